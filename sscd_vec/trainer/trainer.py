"""The training loop, from top to bottom.

``Trainer(TrainConfig(...)).fit("photos/", out="run/")`` trains and leaves in ``run/`` the folder
``Encoder.from_pretrained`` reads. What the loop does at step t is a function of the configuration,
the photos and the weights before it; nothing else, so a killed run continues to the bit.
"""

import logging
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from sscd_vec.encoder.backends.native import return_freed_memory
from sscd_vec.trainer.allocator import freed_memory_kept
from sscd_vec.trainer.batches import Batches
from sscd_vec.trainer.checkpoint import Checkpoints, only_run, write_json
from sscd_vec.trainer.config import TrainConfig
from sscd_vec.trainer.data import PathLike, Photo, find_photos, hold_out
from sscd_vec.trainer.distributed import Ranks
from sscd_vec.trainer.health import TrainingDiverged
from sscd_vec.trainer.interruption import Interruption
from sscd_vec.trainer.journal import Journal, write_skipped
from sscd_vec.trainer.mix import Batch
from sscd_vec.trainer.overlay import Overlays
from sscd_vec.trainer.pixels import MemoryPixels, PixelSource, StreamedPixels, bytes_in_memory
from sscd_vec.trainer.progress import Display
from sscd_vec.trainer.recipe import RECIPES
from sscd_vec.trainer.report import write_report
from sscd_vec.trainer.run import Run
from sscd_vec.trainer.validation import FEWEST_PHOTOS, MOST_PHOTOS, Validation

log = logging.getLogger(__name__)

SETTINGS = "train.json"
PHOTOS = "photos.json"
STEPS_OF_KEPT_MEMORY = 50


@dataclass(frozen=True)
class Result:
    """How a run ended.

    Attributes:
        out: The run's folder, readable by ``Encoder.from_pretrained``.
        steps: Steps taken in all.
        finished: Whether the run reached its end; if not, resume it.
        best: Best validation µAP, if there was a validation.
        skipped: Unreadable photos met.
    """

    out: Path
    steps: int
    finished: bool
    best: float | None
    skipped: int


class Trainer:
    """Trains an SSCD encoder as its configuration says."""

    def __init__(self, config: TrainConfig, *, device: str | None = None) -> None:
        """Prepare a run.

        Args:
            config: Everything the run depends on.
            device: ``"cpu"``, ``"cuda"``, ...; the GPU if there is one by default.
        """
        self.config = config
        kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.ranks = Ranks.join(torch.device(kind).type)
        self.device = torch.device(f"cuda:{self.ranks.local}" if kind == "cuda" else kind)
        self.overlays = Overlays.find(config.fonts, config.emoji)
        self.recipe = RECIPES[config.augmentations].with_changes(config.recipe)

    def fit(
        self,
        photos: PathLike | Iterable[PathLike],
        out: PathLike,
        *,
        resume: bool = False,
        show_progress: bool | None = None,
    ) -> Result:
        """Train on photos and write the encoder.

        Args:
            photos: Folder, tar shard, list file, or several of them.
            out: Folder to write. With ``resume`` it holds an earlier, unfinished run.
            resume: Continue from the newest checkpoint in ``out``, if there is one.
            show_progress: Show a bar with the time left; None shows it on a terminal.

        Returns:
            How it ended. An interrupted run (Ctrl-C, SIGTERM) has been saved.

        Raises:
            FileExistsError: ``out`` holds a run and ``resume`` is false.
            BlockingIOError: Another process trains into ``out``.
            TrainingDiverged: Gradients stayed non-finite.
        """
        config, ranks, out = self.config, self.ranks, Path(out)
        places = [photos] if isinstance(photos, str | os.PathLike) else list(photos)
        checkpoints = Checkpoints(out, config.keep)
        if checkpoints.files() and not resume:
            raise FileExistsError(
                f"{out} holds a run: resume it (--resume {out}, fit(..., resume=True)), or choose "
                "another folder"
            )
        on_cpu = self.device.type == "cpu"
        with (
            only_run(out) if ranks.first else nullcontext(),
            Display(show_progress if ranks.first else False) as display,
            freed_memory_kept(on_cpu),
        ):
            training, held_out = self.split(find_photos(places))
            pixels = self.decode(training, display)
            batches = self.batches(pixels)
            steps = config.steps or max(1, round(config.epochs * batches.steps_per_epoch))
            run = Run(config, self.device, ranks, steps)
            if resume and (saved := checkpoints.load_newest()) is not None:
                run.load(saved)
                log.info("resumed after step %d", run.step)
            elif config.head_init == "whitened":
                run.whiten_head(pixels)
            if ranks.first:
                out.mkdir(parents=True, exist_ok=True)
                write_json(out / SETTINGS, config.to_dict())
                write_json(out / PHOTOS, [str(Path(place).absolute()) for place in places])
            held = MemoryPixels(held_out if ranks.first else [], config.pixels)
            validation = self._validation(held, pixels) if ranks.first else None
            try:
                with Journal(out, run.step, ranks.first) as journal, Interruption() as interruption:
                    self._loop(
                        run, batches, steps, validation, journal, checkpoints, interruption, display
                    )
            except TrainingDiverged:
                if ranks.first:
                    write_report(out, config, run.score)
                raise
            skipped = ranks.merged(pixels.skipped | held.skipped)
            if ranks.first:
                write_skipped(out, skipped)
                if run.best is None:
                    run.export(out)
                write_report(out, config, run.score)
            ranks.wait()
        return Result(out, run.step, run.step >= steps, run.best, len(skipped))

    def _loop(
        self,
        run: Run,
        batches: Batches,
        steps: int,
        validation: Validation | None,
        journal: Journal,
        checkpoints: Checkpoints,
        interruption: Interruption,
        display: Display,
    ) -> None:
        config, ranks, out = self.config, self.ranks, checkpoints.folder.parent
        validate_every = config.validate_every or batches.steps_per_epoch
        checkpoint_every = config.checkpoint_every or max(1, batches.steps_per_epoch // 2)
        if validation is not None and run.step == 0:
            initial = run.measure(validation).micro_ap
            journal.write(0, {"initial_micro_ap": initial})
            display.say(f"before training: µAP {100 * initial:.1f}")
        for step, batch in self._ahead(batches, range(run.step, steps)):
            figures = run.take_step(batch)
            if run.step % STEPS_OF_KEPT_MEMORY == 0:
                return_freed_memory()
            last = run.step == steps
            if validation is not None and (run.step % validate_every == 0 or last):
                figures |= run.validate(validation, out)
                write_report(out, config, run.score)
            if step % config.log_every == 0 or last or "micro_ap" in figures:
                journal.write(step, figures)
            display.show(run.step, steps, figures)
            interrupted = ranks.any(interruption.asked)
            if ranks.first and (run.step % checkpoint_every == 0 or last or interrupted):
                checkpoints.save(run.step, run.state())
            if interrupted:
                if ranks.first:
                    log.info("interrupted after step %d; saved", run.step)
                return

    def split(self, photos: list[Photo]) -> tuple[list[Photo], list[Photo]]:
        """Photos to train on and photos to validate on."""
        if self.config.validation:
            return photos, find_photos(self.config.validation)[:MOST_PHOTOS]
        return hold_out(photos, self.config.holdout, MOST_PHOTOS)

    def decode(self, photos: list[Photo], display: Display | None = None) -> PixelSource:
        """Photos as pixels, kept in memory if they fit or as the configuration says."""
        side, how = self.config.pixels, self.config.decoded
        fits = bytes_in_memory(len(photos), side) <= self.config.memory_gb * 1e9
        if how == "memory" or (how == "auto" and fits):
            return MemoryPixels(photos, side, progress=display.decoded if display else None)
        return StreamedPixels(photos, side)

    def batches(self, pixels: PixelSource) -> Batches:
        """This rank's share of every step's views."""
        return Batches(
            pixels,
            self.recipe,
            self.overlays,
            self.config.size,
            self.config.batch,
            self.config.seed,
            self.ranks.rank,
            self.ranks.count,
            str(self.device),
        )

    def _validation(self, photos: PixelSource, background: PixelSource) -> Validation | None:
        if len(photos) < FEWEST_PHOTOS:
            log.warning(
                "no validation, and so the last weights are written, not the best: it needs %d "
                "readable photos and has %d. Raise holdout (now %g) or name others as validation",
                FEWEST_PHOTOS,
                len(photos),
                self.config.holdout,
            )
            return None
        return Validation(photos, background, self.config.size, self.overlays)

    def _ahead(self, batches: Batches, steps: range) -> Iterator[tuple[int, Batch]]:
        """Batches in order, the next one made while this one is trained on, where that helps.

        Two thread pools on one CPU only disturb each other, so photos in memory are augmented in
        turn there.
        """
        if self.device.type == "cpu" and isinstance(batches.pixels, MemoryPixels):
            yield from ((step, batches(step)) for step in steps)
            return
        with ThreadPoolExecutor(1, thread_name_prefix="augment") as pool:
            waiting = [pool.submit(batches, step) for step in steps[:1]]
            for step in steps:
                batch = waiting.pop().result()
                waiting += [
                    pool.submit(batches, later) for later in steps[step + 1 - steps.start :][:1]
                ]
                yield step, batch
