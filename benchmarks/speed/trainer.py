"""Training speed, stage by stage, against the straightforward pipeline.

The baseline is the plain training script: each view is edited by itself with Pillow and
torchvision's transforms, the network is torch's default (NCHW), the loss an N x N matrix. Ours
edits whole batches, runs channels_last, and keeps freed memory from step to step as ``Trainer.fit``
does (the first of each turn's steps pays for that). Both start from decoded images, are float32 and
run in turn, so only the ratios mean anything. Our crops come from stored squares, or, like the
baseline's, from the images' own pixels. Generated images are 640 x 480 JPEGs::

    python benchmarks speed/trainer                      # ResNet-18 at 128 px, generated images
    python benchmarks speed/trainer --images images/ --trunk efficientnet_lite0
"""

import argparse
import io
import random
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor
from torchvision.transforms import v2

import results
from speed.measure import interleaved
from sscd_vec.encoder.images import load_pixels
from sscd_vec.encoder.model import build_model
from sscd_vec.files import ImageFile, find_images
from sscd_vec.kernels import reference
from sscd_vec.trainer import TrainConfig, Trainer
from sscd_vec.trainer.augment.choices import draw, generator
from sscd_vec.trainer.augment.geometry import views_of
from sscd_vec.trainer.augment.overlay import Overlays
from sscd_vec.trainer.losses import Objective, backward
from sscd_vec.trainer.model import SplitModel, initial_model, normalize
from sscd_vec.trainer.pixels import MemoryPixels, PixelSource, Storage, freed_memory_kept
from sscd_vec.trainer.run import Run

IMAGE_SIZE = (640, 480)
STEPS = 3  # steps of each pipeline in a turn


def main() -> None:
    """Measure and write ``results/trainer.json``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", help="folder, tar or list; generated images by default")
    parser.add_argument("--trunk", default="resnet18")
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--batch", type=int, default=64, help="source images")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dry", action="store_true", help="print, do not write results")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        places = options.images or generate(Path(folder), 2 * options.batch)
        images = find_images(places)[: 2 * options.batch]
        figures = measure(images, options.trunk, options.size, options.batch, options.rounds)
    for name, value in figures.items():
        print(f"{name:42s} {value:10.2f}" if isinstance(value, float) else f"{name:42s} {value}")
    if not options.dry:
        print(results.write("trainer", figures))


def measure(
    images: list[ImageFile], trunk: str, size: int, batch: int, rounds: int
) -> dict[str, object]:
    """Time each stage and the whole step, ours and the baseline's, in turn."""
    config = TrainConfig(
        trunk=trunk, dim=128, size=size, batch=batch, steps=100, optimizer="adamw", entropy_weight=5
    )
    trainer = Trainer(config, device="cpu")
    stored = MemoryPixels(images, Storage(config.pixels))
    own = MemoryPixels(images, Storage(0, own=True))
    batches, own_batches = trainer.batches(stored), trainer.batches(own)
    exact = replace(batches, recipe=trainer.recipe.with_changes({"exact_jitter": 1.0}))
    run = Run(config, initial_model(config), torch.device("cpu"), trainer.ranks, 100)
    baseline = Baseline(config, images[:batch], trainer.overlays)
    views = batches(0)
    normal = normalize(run.model, views.images)
    split = SplitModel(run.model)
    split.training_mode()
    z = torch.nn.functional.normalize(torch.randn(2 * batch, config.dim), dim=1)

    def forward() -> Tensor:
        with torch.no_grad():
            z: Tensor = split(normal)
        return z

    def whole_backward() -> None:
        backward(split, normal, views.sources, Objective(config.tau), 5.0)
        split.zero_grad(set_to_none=True)

    step = iter(range(1, 10**6))

    def our_steps() -> None:
        with freed_memory_kept():
            for _ in range(STEPS):
                run.take_step(batches(next(step)))

    def plain_steps() -> None:
        for _ in range(STEPS):
            baseline.step(views.sources)

    candidates: dict[str, Callable[[], object]] = {
        "decode": lambda: MemoryPixels(images[:batch], Storage(config.pixels)),
        "augment": lambda: batches(next(step)),
        "augment, own pixels": lambda: own_batches(next(step)),
        "augment, exact jitter": lambda: exact(next(step)),
        "augment, image by image": baseline.views,
        "forward": forward,
        "forward and backward": whole_backward,
        "loss": lambda: Objective(config.tau).gradient(z, views.sources, 5.0),
        "loss, N x N": lambda: naive_loss(z, views.sources),
        "step": our_steps,
        "step, image by image": plain_steps,
    }
    times = interleaved(candidates, rounds)
    count = 2 * batch
    figures: dict[str, object] = {
        "trunk": trunk,
        "size": size,
        "views": count,
        "rounds": rounds,
        "threads": torch.get_num_threads(),
    }
    made = {name: STEPS if name.startswith("step") else 1 for name in times}
    figures |= {
        f"views/s: {name}": made[name] * count / timing.median for name, timing in times.items()
    }
    figures["views/s: decode"] = batch / times["decode"].median
    figures["backward / forward"] = times["forward and backward"].median / times["forward"].median
    figures["augment, part of our step"] = STEPS * times["augment"].median / times["step"].median
    for name, source in (("stored", stored), ("own", own)):
        figures[f"crops enlarged: {name}"] = enlarged(source, trainer, config)
    figures["speedup: augment"] = times["augment"].speedup_over(times["augment, image by image"])
    for name in ("augment, own pixels", "augment, exact jitter"):
        figures[f"speedup: {name}"] = times[name].speedup_over(times["augment, image by image"])
    figures["speedup: loss"] = times["loss"].speedup_over(times["loss, N x N"])
    figures["speedup: step"] = times["step"].speedup_over(times["step, image by image"])
    return figures


def enlarged(source: PixelSource, trainer: Trainer, config: TrainConfig) -> float:
    """Fraction of one epoch's crops that have fewer pixels than the view they become."""
    decoded = source.take(np.arange(len(source)))
    choices = draw(trainer.recipe, len(source), generator(config.seed, 0))
    to_image = views_of(choices, decoded.aspects).to_image[:, :, :2]
    sides = np.array([(pixels.shape[1], pixels.shape[0]) for pixels in decoded.pixels])
    detail = np.linalg.norm(to_image, axis=2) * sides / config.size
    return float((detail.prod(axis=1) < 1).mean())


class Baseline:
    """What a plain training script does: edit each view by itself, N x N loss."""

    def __init__(self, config: TrainConfig, images: list[ImageFile], overlays: Overlays) -> None:
        """Prepare the network and torchvision's transforms with the advanced set's strengths."""
        size = config.size
        self._images = [Image.fromarray(load_pixels(image)) for image in images]
        self._overlays = overlays
        self._model = build_model(config.encoder, zero_init_residual=True).train()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), 1e-3)
        self._blur = v2.GaussianBlur(size // 10 * 2 + 1, (size / 224, 5 * size / 224))
        self._crop = v2.RandomResizedCrop(size, (0.08, 1.0), antialias=True)
        self._jitter = v2.ColorJitter(0.8, 0.8, 0.8, 0.2)
        self._tensor = v2.Compose(
            [
                v2.ToImage(),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
            ]
        )

    def views(self) -> Tensor:
        """Two views of every image, first views first."""
        return torch.stack([self._view(image) for _ in range(2) for image in self._images])

    def step(self, sources: Tensor) -> None:
        """One training step."""
        self._optimizer.zero_grad()
        z = self._model.training_descriptors(self.views())
        torch.autograd.backward(reference.sscd_loss(z, sources, 0.05, 5.0).total)
        self._optimizer.step()

    def _view(self, image: Image.Image) -> Tensor:
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        if random.random() < 0.05:
            image = image.rotate(random.choice([90, 180, 270]), expand=True)
        for probability, make, part in (
            (0.1, self._overlays.text, (0.1, 0.3)),
            (0.2, self._overlays.emoji, (0.1, 0.5)),
        ):
            if random.random() < probability:
                size = max(4, round(random.uniform(*part) * min(image.size)))
                sprite = make(random.randrange(2**31), size)
                layer = Image.fromarray((sprite * 255).astype(np.uint8), "RGBA")
                place = (random.randrange(image.width), random.randrange(image.height))
                image = image.copy()
                image.paste(layer, place, layer)
        if random.random() < 0.05:
            image = image.rotate(random.uniform(0, 360))
        image = self._crop(image)
        if random.random() < 0.8:
            image = self._jitter(image)
        if random.random() < 0.2:
            image = image.convert("L").convert("RGB")
        if random.random() < 0.5:
            image = self._blur(image)
        if random.random() < 0.2:
            file = io.BytesIO()
            image.save(file, "JPEG", quality=random.randint(1, 100))
            image = Image.open(file).convert("RGB")
        tensor: Tensor = self._tensor(image)
        return tensor


def naive_loss(z: Tensor, sources: Tensor) -> Tensor:
    """Loss and gradient from the N x N matrix."""
    leaf = z.clone().requires_grad_()
    return torch.autograd.grad(reference.sscd_loss(leaf, sources, 0.05, 5.0).total, leaf)[0]


def generate(folder: Path, count: int) -> Path:
    """Write JPEGs of random shapes on noise, about as hard to decode as photographs."""
    for seed in range(count):
        noise = np.random.default_rng(seed)
        coarse = noise.integers(0, 256, (32, 32, 3), dtype=np.uint8)
        image = Image.fromarray(coarse).resize(IMAGE_SIZE)
        pen = ImageDraw.Draw(image)
        for x, y, w, h in noise.integers(0, 300, (12, 4)).tolist():
            pen.ellipse((x, y, x + w, y + h), fill=tuple(noise.integers(0, 256, 3).tolist()))
        image.save(folder / f"{seed:05d}.jpg", quality=90)
    return folder


if __name__ == "__main__":
    main()
