"""How much faster the encoder is than the paper code's way, and whether it says the same.

The paper code's way: torch eager, float32, NCHW; every photo opened by Pillow, resized, turned
into a tensor and normalized by torchvision, and taken through the network, one by one. Both ways
run in turn in one process on the same photos, so only the ratios mean anything.

    python benchmarks speed/encoder [--photos FOLDER] [--images 1000] [--model NAME_OR_PATH]
                                 [--real FOLDER_OR_TAR]

What decoding large JPEGs at a fraction of their size does to descriptors is measured with trained
weights: EfficientNet-Lite0's from ImageNet, on photos of ``--real`` enlarged to 4000×3000, one to
a picture and twelve to a picture (more detail).
"""

import argparse
import functools
import io
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torchvision import transforms

import results
from photos import Photo, find_photos
from speed.measure import Timing, interleaved, peak_mib
from sscd_vec.encoder import Encoder, EncoderConfig, SSCDModel, build_model
from sscd_vec.encoder.imagenet import imagenet_model
from sscd_vec.encoder.images import load_pixels
from sscd_vec.encoder.preprocess import preprocess, target_size
from sscd_vec.files import find_images

# Share of the generated photos, width, height: cameras, phones, the web.
SIZES = (
    (0.15, 4000, 3000), (0.05, 3000, 4000), (0.15, 2048, 1536), (0.10, 1920, 1080),
    (0.20, 1024, 768), (0.10, 768, 1024), (0.15, 640, 480), (0.10, 500, 375),
)  # fmt: skip
LARGE = (4000, 3000)
QUALITY, FINE_QUALITY = 80, 92
REAL_PICTURES, COLLAGE = 32, (4, 3)  # pictures of each kind; columns and rows of a collage
BLOCKS = 5
MINIMA = {
    "forward_torch": 1.8, "forward_openvino": 2.6, "jpeg_to_tensor": 4.0, "folder_torch": 2.5,
}  # fmt: skip
PEAK_BYTES = 1.5e9


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write ``results/encoder.json``."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--photos", type=Path, help="folder of JPEGs; generated ones by default")
    parser.add_argument("--images", type=int, default=1000, help="photos of the folder row")
    parser.add_argument("--model", help="trained weights; random ones by default")
    parser.add_argument("--real", type=Path, help="folder or tar of photos, to enlarge")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--skip-openvino", action="store_true")
    parser.add_argument("--only-memory", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.only_memory:
        print(json.dumps(peak_memory(options.model, options.photos, options.images)))
        return
    model = load_model(options.model)
    encoders = {"torch": Encoder(model, device="cpu")}
    if not options.skip_openvino:
        encoders["openvino"] = Encoder(model, device="cpu", backend="openvino")
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.photos or generate_photos(Path(scratch, "photos"), options.images)
        photos = [found.path for found in find_images(folder)][: options.images]
        rows: dict[str, Callable[[], object]] = {
            "JPEG to tensor, 4000x3000": lambda: decode_row(
                encoders["torch"], Path(scratch), options.rounds
            ),
            "forward 288x288, batch 32": lambda: forward_row(model, encoders, options.rounds),
            f"folder to descriptors, {len(photos)} photos": lambda: folder_row(
                model, encoders, photos
            ),
            "memory": lambda: child_memory(options.model, folder, options.images),
        }
        if options.real is not None:
            rows["decoding, trained weights"] = lambda: trained_row(find_photos([options.real]))
        figures: dict[str, object] = {
            "weights": options.model or "random (cosines are not those of trained weights)",
            "trunk": model.config.trunk,
        }
        for name, measure in rows.items():
            figures[name] = measure()
            print(f"{name}: {figures[name]}", flush=True)
    print(results.write("encoder", figures))


def load_model(name: str | None) -> SSCDModel:
    """The model of ``name``, or a ResNet-50 with random weights."""
    if name is not None:
        return Encoder.from_pretrained(name, device="cpu").model
    torch.manual_seed(0)
    return build_model(EncoderConfig()).eval()


def reference_transform(config: EncoderConfig) -> Callable[[Image.Image], Tensor]:
    """The paper code's preprocessing."""
    size = config.size if config.size_mode == "short" else (config.size, config.size)
    steps = [
        transforms.Resize(size),
        transforms.ToTensor(),
        transforms.Normalize(config.mean, config.std),
    ]
    transform: Callable[[Image.Image], Tensor] = transforms.Compose(steps)
    return transform


def reference_tensor(path: Path, transform: Callable[[Image.Image], Tensor]) -> Tensor:
    """One photo to a tensor, the paper code's way."""
    with Image.open(path) as image:
        return transform(image.convert("RGB"))


@torch.inference_mode()
def reference_descriptors(model: SSCDModel, photos: Sequence[Path]) -> NDArray[np.float32]:
    """Photos to descriptors, the paper code's way."""
    transform = reference_transform(model.config)
    rows = [model(reference_tensor(path, transform)[None])[0].numpy() for path in photos]
    return np.stack(rows)


def forward_row(model: SSCDModel, encoders: dict[str, Encoder], rounds: int) -> dict[str, object]:
    """One batch of 32 through the network, with what the encoder adds to it."""
    pixels = torch.from_numpy(
        np.random.default_rng(0).integers(0, 256, (32, 288, 288, 3), dtype=np.uint8)
    )
    config = model.config
    batch = torch.cat([preprocess(image.numpy(), config) for image in pixels]).contiguous()

    @torch.inference_mode()
    def reference() -> Tensor:
        descriptors: Tensor = model(batch)
        return descriptors

    runs: dict[str, Callable[[], object]] = {"reference": reference}
    wanted, row = reference().numpy(), {}
    for name, encoder in encoders.items():
        forward = encoder._open(encoder.backend, encoder.precision, encoder.device)
        runs[name] = lambda forward=forward: forward(pixels)  # type: ignore[misc]
        row[f"1 - cosine, {name}"] = float(1 - (forward(pixels) * wanted).sum(1).min())
    timings = interleaved(runs, rounds=rounds)
    return {**ratios(timings, {name: f"forward_{name}" for name in encoders}), **row}


def decode_row(encoder: Encoder, scratch: Path, rounds: int) -> dict[str, object]:
    """Large photos to model input, one thread, at two JPEG qualities.

    Both ways read every Huffman code of a file, so the ratio falls as files grow. One thread,
    because a folder is decoded by one per core.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _decode_figures(encoder, scratch, rounds)
    finally:
        torch.set_num_threads(threads)


def _decode_figures(encoder: Encoder, scratch: Path, rounds: int) -> dict[str, object]:
    config = encoder.config
    transform = reference_transform(config)

    def reduce_to(height: int, width: int) -> tuple[int, int]:
        return target_size(height, width, config)

    def reference(path: Path) -> Tensor:
        return reference_tensor(path, transform)

    def fast(path: Path) -> Tensor:
        return preprocess(load_pixels(path, reduce_to=reduce_to), config)

    def each(make: Callable[[Path], Tensor], photos: Sequence[Path]) -> list[Tensor]:
        return [make(path) for path in photos]

    row: dict[str, object] = {}
    for quality in (QUALITY, FINE_QUALITY):
        photos = large_photos(scratch, 3, quality)
        runs: dict[str, Callable[[], object]] = {
            "reference": functools.partial(each, reference, photos),
            "fast": functools.partial(each, fast, photos),
        }
        timings = interleaved(runs, rounds=2 * rounds)
        cosine = encoder.encode(photos) * reference_descriptors(encoder.model, photos)
        row[f"quality {quality}"] = {
            **ratios(timings, {"fast": "jpeg_to_tensor"} if quality == QUALITY else {"fast": ""}),
            "fast, times the reference, in CPU time": round(cpu_ratio(runs, 2 * rounds), 2),
            "megabytes per photo": round(sum(p.stat().st_size for p in photos) / 3e6, 2),
            "least cosine of the descriptors": float(cosine.sum(1).min()),
        }
    return row


def trained_row(photos: Sequence[Photo]) -> dict[str, object]:
    """Fast against exact decoding of real photos enlarged to 4000×3000, with trained weights."""
    model = imagenet_model(EncoderConfig(trunk="efficientnet_lite0", features="trunk"))
    encoder = Encoder(model, device="cpu")
    row: dict[str, object] = {"weights": "EfficientNet-Lite0, ImageNet, GeM-pooled features"}
    for name, (columns, rows) in {"photos": (1, 1), "collages of 12": COLLAGE}.items():
        exact, fast = [], []
        for index in range(REAL_PICTURES):
            first = index * columns * rows
            chosen = [photos[i % len(photos)] for i in range(first, first + columns * rows)]
            data = enlarged(chosen, columns)
            exact.append(encoder.encode(data, decode="exact")[0])
            fast.append(encoder.encode(data)[0])
        cosines = (np.array(exact) * np.array(fast)).sum(1)
        row[f"least cosine, {REAL_PICTURES} {name}"] = float(cosines.min())
        row[f"mean cosine, {REAL_PICTURES} {name}"] = float(cosines.mean())
    row["cosine, at least"] = 0.999
    return row


def enlarged(photos: Sequence[Photo], columns: int) -> bytes:
    """A JPEG of 4000×3000 with the photos in rows of ``columns``."""
    picture = Image.new("RGB", LARGE)
    width, height = LARGE[0] // columns, LARGE[1] // (len(photos) // columns)
    for index, photo in enumerate(photos):
        place = (index % columns * width, index // columns * height)
        picture.paste(photo.image().resize((width, height), Image.Resampling.BICUBIC), place)
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=QUALITY)
    return buffer.getvalue()


def folder_row(
    model: SSCDModel, encoders: dict[str, Encoder], photos: Sequence[Path]
) -> dict[str, object]:
    """Photos on disk to descriptors: every block of the folder both ways, in turn."""
    blocks = [list(block) for block in np.array_split(np.array(photos, object), BLOCKS)]
    names = ("reference", *encoders)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    cosines: dict[str, list[float]] = {name: [] for name in encoders}
    reference_descriptors(model, photos[:2])
    for encoder in encoders.values():
        encoder.encode(list(photos[:8]))
    for block in blocks:
        rows: dict[str, NDArray[np.float32]] = {}

        def reference(block: list[Path] = block) -> None:
            rows["reference"] = reference_descriptors(model, block)  # noqa: B023 - run at once

        runs: dict[str, Callable[[], object]] = {"reference": reference}
        for name, encoder in encoders.items():

            def ours(
                name: str = name, encoder: Encoder = encoder, block: list[Path] = block
            ) -> None:
                rows[name] = encoder.encode(block, show_progress=False)  # noqa: B023 - run at once

            runs[name] = ours
        for name, timing in interleaved(runs, rounds=1, warmup=0).items():
            seconds[name].extend(timing.seconds)
        for name in encoders:
            cosines[name].append(float((rows[name] * rows["reference"]).sum(1).min()))
    timings = {name: Timing(name, tuple(taken)) for name, taken in seconds.items()}
    row = ratios(timings, {name: f"folder_{name}" for name in encoders})
    return {**row, **{f"least cosine, {name}": min(least) for name, least in cosines.items()}}


def ratios(timings: dict[str, Timing], keys: dict[str, str]) -> dict[str, object]:
    """Speed of each candidate over the reference, beside the least the project promises."""
    row: dict[str, object] = {}
    for name, key in keys.items():
        row[f"{name}, times the reference"] = round(
            timings[name].speedup_over(timings["reference"]), 2
        )
        if key in MINIMA:
            row[f"{name}, at least"] = MINIMA[key]
    row["seconds"] = {name: round(timing.median, 3) for name, timing in timings.items()}
    return row


def cpu_ratio(runs: dict[str, Callable[[], object]], rounds: int) -> float:
    """CPU time of the reference over ``fast``: what other people's load changes least."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.process_time()
            run()
            taken[name].append(time.process_time() - start)
    pairs = zip(taken["reference"], taken["fast"], strict=True)
    return statistics.median(reference / fast for reference, fast in pairs)


def child_memory(model: str | None, folder: Path, images: int) -> dict[str, object]:
    """``peak_memory`` of a process that does nothing else."""
    command = [
        *results.RUN,
        "speed/encoder",
        "--only-memory",
        "--photos",
        str(folder),
    ]
    command += ["--images", str(images), *(["--model", model] if model else [])]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    figures: dict[str, object] = json.loads(output.splitlines()[-1])
    return figures


def peak_memory(model: str | None, folder: Path, images: int) -> dict[str, object]:
    """Largest resident size of this process, before and after encoding a folder with torch."""
    encoder = Encoder(load_model(model), device="cpu")
    before = peak_mib() * 2**20
    encoder.encode(find_images(folder)[:images], show_progress=False)
    peak = peak_mib() * 2**20
    return {
        "peak GB": round(peak / 1e9, 3),
        "peak GB with the model loaded, before encoding": round(before / 1e9, 3),
        "GB, at most": PEAK_BYTES / 1e9,
    }


def generate_photos(folder: Path, count: int, seed: int = 0) -> Path:
    """Write ``count`` photo-like JPEGs of mixed sizes: windows of one field."""
    folder.mkdir(parents=True)
    generator = np.random.default_rng(seed)
    field = photo_field(generator)
    shares = np.array([share for share, _, _ in SIZES])
    for index, kind in enumerate(generator.choice(len(SIZES), count, p=shares / shares.sum())):
        _, width, height = SIZES[kind]
        quality = int(generator.integers(75, 95))
        save_window(field, width, height, generator, folder / f"{index:05d}.jpg", quality)
    return folder


def large_photos(folder: Path, count: int, quality: int, seed: int = 1) -> list[Path]:
    """Write ``count`` photo-like JPEGs of 4000×3000."""
    generator = np.random.default_rng(seed)
    field = photo_field(generator)
    paths = [folder / f"large_{quality}_{index}.jpg" for index in range(count)]
    for path in paths:
        save_window(field, *LARGE, generator, path, quality)
    return paths


def photo_field(generator: np.random.Generator, side: int = 4400) -> NDArray[np.uint8]:
    """A colour field with the spectrum of photos (amplitude about 1/f) and edges."""
    field = np.zeros((3, side, side), np.float32)
    for cells in (4, 16, 64, 256, 1024, 2200):
        colour = generator.normal(size=(1, 3, cells, cells))
        light = generator.normal(size=(1, 1, cells, cells))
        grid = torch.from_numpy((colour + 1.5 * light).astype(np.float32))
        grown = torch.nn.functional.interpolate(grid, size=(side, side), mode="bilinear")
        field += grown[0].numpy() * 60 / cells**0.5
    edges = np.sign(field[:1]) * 25  # outlines of things
    pixels: NDArray[np.uint8] = np.clip(field + edges + 120, 0, 255).astype(np.uint8)
    return pixels.transpose(1, 2, 0).copy()


def save_window(
    field: NDArray[np.uint8],
    width: int,
    height: int,
    generator: np.random.Generator,
    path: Path,
    quality: int,
) -> None:
    """Save one window of ``field`` as a JPEG, its colours shifted."""
    top, left = (int(generator.integers(0, len(field) - side + 1)) for side in (height, width))
    window = field[top : top + height, left : left + width]
    gains = generator.uniform(0.7, 1.0, 3).astype(np.float32)
    Image.fromarray((window * gains).astype(np.uint8)).save(path, quality=quality)


if __name__ == "__main__":
    main()
