"""The training loop, from top to bottom.

``Trainer(TrainConfig(...)).fit("images/", out="run/")`` trains and leaves in ``run/`` the folder
that ``Encoder.from_pretrained`` reads. What the loop does at step t depends on the settings, the
images and the weights before it, and on nothing else, so a killed run continues to the bit: a
checkpoint holds weights, averaged weights, optimizer, scaler, step and the best validation so far,
and there is no other state.
"""

import json
import logging
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from sscd_vec.encoder.backends.native import return_freed_memory
from sscd_vec.files import PathLike, staging, write_whole
from sscd_vec.locks import locked
from sscd_vec.progress import ProgressBar, is_watched, progress_bar
from sscd_vec.trainer.augment.overlay import Overlays
from sscd_vec.trainer.augment.recipe import RECIPES
from sscd_vec.trainer.config import TrainConfig
from sscd_vec.trainer.data import Batches, Images
from sscd_vec.trainer.distributed import Ranks
from sscd_vec.trainer.model import initial_model
from sscd_vec.trainer.pixels import PixelSource, freed_memory_kept
from sscd_vec.trainer.report import journal, write_preview, write_report
from sscd_vec.trainer.run import Run, TrainingDiverged
from sscd_vec.trainer.validation import Validation, validation_of

log = logging.getLogger(__name__)

SETTINGS = "train.json"
IMAGES = "images.json"
LOCK = ".lock"
CHECKPOINTS = "checkpoints"
STEPS_OF_KEPT_MEMORY = 50


@dataclass(frozen=True)
class Result:
    """How a run ended.

    Attributes:
        out: The run's folder, readable by ``Encoder.from_pretrained``.
        steps: Steps taken in all.
        finished: Whether the run reached its end; if not, resume it.
        initial: Validation µAP before training, if there is a validation.
        best: Best validation µAP, that of the start included; its weights are the ones written.
        skipped: Number of unreadable images.
    """

    out: Path
    steps: int
    finished: bool
    initial: float | None
    best: float | None
    skipped: int

    @property
    def gained(self) -> bool | None:
        """Whether training helped; None without a validation. If not, the start was kept."""
        if self.initial is None or self.best is None:
            return None
        return self.best > self.initial


class Trainer:
    """Trains an SSCD encoder."""

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
        images: PathLike | Iterable[PathLike],
        out: PathLike,
        *,
        resume: bool = False,
        show_progress: bool | None = None,
    ) -> Result:
        """Train on images and write the encoder.

        Args:
            images: Folder, tar, list file, or several of them.
            out: Folder to write. With ``resume`` it holds an earlier, unfinished run.
            resume: Continue from the newest checkpoint in ``out``, if there is one.
            show_progress: Show a bar with the time left; None shows it on a terminal.

        Returns:
            How it ended. An interrupted run (Ctrl-C, SIGTERM) has been saved.

        Raises:
            FileExistsError: ``out`` holds a run and ``resume`` is false.
            LockHeldError: Another process trains into ``out``.
            ValueError: A setting, the batch or the images cannot be used.
            TrainingDiverged: Gradients stayed non-finite.
        """
        config, ranks, out = self.config, self.ranks, Path(out)
        show = show_progress if ranks.first else False
        checkpoints = Checkpoints(out, config.keep)
        if checkpoints.files() and not resume:
            raise FileExistsError(
                f"{out} holds a run: resume it (--resume {out}, fit(..., resume=True)), or choose "
                "another folder"
            )
        # Everything that can be refused is refused before anything is decoded or written.
        run = Run(config, initial_model(config), self.device, ranks)
        found = Images.find(images, config, self.recipe, ranks.count)
        if ranks.first:
            out.mkdir(parents=True, exist_ok=True)
        lock = locked(out / LOCK, wait=False, purpose="train into this folder")
        with (
            lock if ranks.first else nullcontext(),
            freed_memory_kept(self.device.type == "cpu"),
        ):
            pixels, held = found.decode(config, show, validate=ranks.first)
            batches = self.batches(pixels)
            run.steps = config.steps or max(1, round(config.epochs * batches.steps_per_epoch))
            if resume and (saved := checkpoints.load_newest()) is not None:
                run.load(saved)
                log.info("resumed after step %d", run.step)
            elif config.head_init == "whitened":
                run.whiten_head(pixels)
            if ranks.first:
                write_whole(out / SETTINGS, _json(config.to_dict()))
                write_whole(out / IMAGES, _json([str(Path(p).absolute()) for p in found.places]))
            validation = validation_of(held, pixels, config, self.overlays) if ranks.first else None
            try:
                self._loop(run, batches, validation, checkpoints, show)
            except TrainingDiverged:
                if ranks.first:
                    write_report(out, config, run.score)
                raise
            skipped = ranks.merged(found.unreadable | pixels.skipped | held.skipped)
            if ranks.first:
                if run.best is None:  # without a validation, the last weights
                    run.export(out)
                write_report(out, config, run.score, skipped)
            ranks.wait()
        finished = run.step >= run.steps
        return Result(out, run.step, finished, run.initial, run.best, len(skipped))

    def _loop(
        self,
        run: Run,
        batches: Batches,
        validation: Validation | None,
        checkpoints: "Checkpoints",
        show: bool | None,
    ) -> None:
        config, ranks, out = self.config, self.ranks, checkpoints.folder.parent
        validate_every = config.validate_every or batches.steps_per_epoch
        checkpoint_every = config.checkpoint_every or max(1, batches.steps_per_epoch // 2)
        with (
            journal(out, run.step, ranks.first) as record,
            interruptions() as stop_requested,
            progress_bar("training", run.steps, show) as bar,
        ):
            if validation is not None and run.step == 0:
                run.keep_start(validation, out)
                record(0, {"initial_micro_ap": run.initial})
                _say(bar, show, f"before training: µAP {100 * (run.initial or 0):.1f}")
            for step, batch in batches.ahead(range(run.step, run.steps)):
                figures = run.take_step(batch)
                if run.step % STEPS_OF_KEPT_MEMORY == 0:
                    return_freed_memory()
                last = run.step == run.steps
                validated = validation is not None and (run.step % validate_every == 0 or last)
                if validation is not None and validated:
                    figures |= run.validate(validation, out)
                    _say(bar, show, _validated(run.step, figures))
                if step % config.log_every == 0 or last or validated:
                    record(step, figures)
                if validated:
                    write_report(out, config, run.score)
                bar.update(run.step, figures=_in_short(figures))
                interrupted = ranks.any(stop_requested())
                if ranks.first and (run.step % checkpoint_every == 0 or last or interrupted):
                    checkpoints.save(run.step, run.state())
                if interrupted:
                    if ranks.first:
                        log.info("interrupted after step %d; saved", run.step)
                    return

    def batches(self, pixels: PixelSource) -> Batches:
        """This rank's share of every step's views."""
        config, ranks = self.config, self.ranks
        sizes = (config.size, config.batch, config.seed, ranks.rank, ranks.count)
        return Batches(pixels, self.recipe, self.overlays, *sizes, str(self.device))

    def preview(self, images: PathLike | Iterable[PathLike], path: PathLike) -> None:
        """Write a contact sheet of the first step's pairs: each image's two views side by side.

        Args:
            images: Folder, tar, list file, or several of them.
            path: Image file to write.

        Raises:
            ValueError: Fewer than two of the images it looks at can be read.
        """
        pixels, count = Images.sample(images, self.config)
        if len(pixels) < 2:
            raise ValueError(f"a preview needs 2 images: {len(pixels)} of {count} could be read")
        trainer = Trainer(self.config.with_changes(batch=len(pixels)), device="cpu")
        write_preview(trainer.batches(pixels)(0).images, Path(path))


class Checkpoints:
    """The checkpoints of one run, newest last."""

    def __init__(self, out: Path, keep: int) -> None:
        """Keep the newest ``keep`` below ``out``."""
        self.folder = out / CHECKPOINTS
        self.keep = keep

    def files(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return sorted(self.folder.glob("step-*.pt"))

    def save(self, step: int, state: dict[str, Any]) -> Path | None:
        """Write one and drop the oldest; on a full disk keep the last good one and say so.

        Returns:
            The file, or None if it could not be written.
        """
        path = self.folder / f"step-{step:08d}.pt"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with staging(path) as staged:
                torch.save(state, staged)
        except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
            log.error(
                "checkpoint at step %d not written (%s); the last good one stays", step, error
            )
            return None
        for old in self.files()[: -self.keep]:
            old.unlink(missing_ok=True)
        return path

    def load_newest(self) -> dict[str, Any] | None:
        """The newest readable checkpoint, or None if there is none."""
        for path in reversed(self.files()):
            try:
                state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
            except (OSError, RuntimeError, EOFError) as error:
                log.warning("%s cannot be read (%s); trying an older one", path, error)
                continue
            return state
        return None


@contextmanager
def interruptions() -> Iterator[Callable[[], bool]]:
    """Turn Ctrl-C and SIGTERM into a question the loop asks between two steps: stop now?

    A second signal interrupts at once. Only the main thread can listen.
    """
    requested = threading.Event()

    def remember(number: int, frame: FrameType | None) -> None:
        if requested.is_set():
            raise KeyboardInterrupt
        requested.set()

    main = threading.current_thread() is threading.main_thread()
    signals = (signal.SIGINT, signal.SIGTERM) if main else ()
    before = [(number, signal.signal(number, remember)) for number in signals]
    try:
        yield requested.is_set
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def _json(content: object) -> str:
    return json.dumps(content, indent=1) + "\n"


def _say(bar: ProgressBar, show: bool | None, text: str) -> None:
    """Print a line above the bar, or log it where no bar is shown."""
    if show or (show is None and is_watched()):
        bar.say(text)
    else:
        log.info(text)


def _validated(step: int, figures: Mapping[str, Any]) -> str:
    raw = 100 * figures["micro_ap_raw"]
    return f"step {step}: µAP {100 * figures['micro_ap']:.1f}, raw cosine {raw:.1f}"


def _in_short(figures: Mapping[str, Any]) -> str:
    return (
        f"loss {figures['total']:.3f}  copies {figures['positive_similarity']:.2f}  "
        f"nearest other {figures['negative_similarity']:.2f}"
    )
