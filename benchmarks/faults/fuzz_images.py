"""Decode mutated images: nothing but ``ImageError``, no hang over 5 s, memory below 1.5 GB.

    python benchmarks faults/fuzz_images --images 100000 [--seed 27] [--resume]

Small images of ten formats are altered: bytes flipped, numbers in the header replaced, pieces cut,
doubled, moved or taken from another image. One process decodes them in order; should it die or
stand still, that image is a fault, and another process goes on after it. Image number n of a seed
is always the same, so a fault can be looked at again with ``--only n``.
"""

import argparse
import io
import os
import resource
import select
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast

import numpy as np

import results
from sscd_vec.cli.pictures import draw
from sscd_vec.encoder.images import ImageError, load_pixels

FORMATS = ("JPEG", "PNG", "WEBP", "AVIF", "GIF", "TIFF", "BMP", "PPM", "JPEG2000", "ICO")
SOURCES = 3  # images of each format
HANG = 5.0  # seconds of work for one image
STANDSTILL = 60.0  # seconds without a word, on a machine that has other things to do
MOST_MIB = 1500
REPORT_EVERY = 100
EXTREMES = (0, 1, 0x7F, 0x80, 0xFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
Random = np.random.Generator


@cache
def originals() -> list[bytes]:
    """Whole images of every format, some with options that change their structure."""
    made = []
    for kind in FORMATS:
        for seed in range(SOURCES):
            image = draw(seed).resize((72, 54)).convert(("RGB", "L", "RGB")[seed])
            buffer = io.BytesIO()
            image.save(buffer, kind, **_options(kind, seed))
            made.append(buffer.getvalue())
    return made


def _options(kind: str, seed: int) -> dict[str, Any]:
    if kind == "JPEG":
        return {"progressive": seed == 1, "quality": 80}
    if kind == "TIFF":
        return {"compression": (None, "tiff_lzw", "tiff_adobe_deflate")[seed]}
    return {"sizes": [(48, 48)]} if kind == "ICO" else {}


def _flip(content: bytearray, rng: Random) -> None:
    for place in rng.integers(len(content), size=int(rng.integers(1, 12))):
        content[place] ^= int(rng.integers(1, 256))


def _overwrite_number(content: bytearray, rng: Random) -> None:
    width = int(rng.choice([1, 2, 4, 8]))
    value = EXTREMES[int(rng.integers(len(EXTREMES)))] % (1 << 8 * width)
    place = int(rng.integers(max(1, min(len(content), 400) - width)))
    content[place : place + width] = value.to_bytes(width, ("little", "big")[rng.integers(2)])


def _cut(content: bytearray, rng: Random) -> None:
    del content[int(rng.integers(1, len(content))) :]


def _remove(content: bytearray, rng: Random) -> None:
    first = int(rng.integers(len(content)))
    del content[first : first + int(rng.integers(1, 64))]


def _double(content: bytearray, rng: Random) -> None:
    first = int(rng.integers(len(content)))
    piece = content[first : first + int(rng.integers(1, 256))]
    content[first:first] = piece * int(rng.choice([1, 2, 50]))


def _splice(content: bytearray, rng: Random) -> None:
    other = originals()[int(rng.integers(len(originals())))]
    place = int(rng.integers(len(content)))
    content[place:] = other[int(rng.integers(len(other))) :]


MUTATIONS: tuple[Callable[[bytearray, Random], None], ...] = (
    _flip, _flip, _overwrite_number, _overwrite_number, _cut, _remove, _double, _splice,
)  # fmt: skip


def mutated(number: int, seed: int) -> bytes:
    """Image ``number``; the formats take turns."""
    rng = np.random.default_rng([seed, number])
    content = bytearray(originals()[number % len(originals())])
    for _ in range(int(rng.integers(1, 4))):
        if len(content) > 8:
            MUTATIONS[int(rng.integers(len(MUTATIONS)))](content, rng)
    return bytes(content)


def decode(number: int, seed: int) -> str:
    """What came of it: 'pixels', 'refused', or the name of an exception that must not be."""
    try:
        load_pixels(mutated(number, seed))
        return "pixels"
    except ImageError:
        return "refused"
    except Exception as error:  # what is looked for here
        return f"{type(error).__name__}: {error}"[:200]


@dataclass
class Outcome:
    """What a campaign found so far."""

    seed: int
    images: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    slowest: float = 0.0
    peak_mib: int = 0

    def figures(self) -> dict[str, object]:
        """As they are recorded."""
        return {
            "seed": self.seed,
            "images": self.images,
            "formats": len(FORMATS),
            "outcomes": dict(self.outcomes),
            "faults": self.faults,
            "slowest_seconds": round(self.slowest, 3),
            "peak_mib": self.peak_mib,
        }

    @classmethod
    def read(cls, seed: int) -> "Outcome":
        """The one recorded for this seed, or a new one."""
        if not (results.RESULTS / "fuzz_images.json").exists():
            return cls(seed)
        known = cast(dict[str, Any], results.read("fuzz_images")["figures"])
        if known["seed"] != seed:
            return cls(seed)
        return cls(
            seed, known["images"], Counter(known["outcomes"]), known["faults"],
            known["slowest_seconds"], known["peak_mib"],
        )  # fmt: skip


def work(first: int, last: int, seed: int) -> None:
    """Decode images in a process of its own and print a line about each."""
    warnings.simplefilter("ignore")
    for number in range(first, last):
        begun = time.process_time()  # the machine may have other things to do
        outcome = decode(number, seed)
        seconds = time.process_time() - begun
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        os.write(1, f"{number}\t{seconds:.4f}\t{peak}\t{outcome!r}\n".encode())


def run(outcome: Outcome, images: int, report: Callable[[Outcome], None]) -> None:
    """Go on from ``outcome`` up to ``images`` images."""
    while outcome.images < images:
        arguments = ["--work", str(outcome.images), str(images), str(outcome.seed)]
        child = subprocess.Popen(
            [*results.RUN, "faults/fuzz_images", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # libtiff comments on what it reads
        )
        try:
            _follow(child, outcome, report)
        finally:
            child.kill()
            child.wait()
            if child.stdout is not None:
                child.stdout.close()
        if outcome.images < images:
            how = "hangs" if child.returncode == -9 else f"ends its process: {child.returncode}"
            outcome.faults.append(f"image {outcome.images} {how}")
            outcome.images += 1
        report(outcome)


def _follow(
    child: "subprocess.Popen[bytes]", outcome: Outcome, report: Callable[[Outcome], None]
) -> None:
    """Read what a process says until it ends or stands still."""
    assert child.stdout is not None
    patience, pending = 4 * STANDSTILL, b""  # it starts first
    while select.select([child.stdout], [], [], patience)[0]:
        received = os.read(child.stdout.fileno(), 65536)
        if not received:
            child.wait()
            return
        *lines, pending = (pending + received).split(b"\n")
        for line in lines:
            _take(line.decode(), outcome)
            if outcome.images % (10 * REPORT_EVERY) == 0:
                report(outcome)
        patience = STANDSTILL


def _take(line: str, outcome: Outcome) -> None:
    number, seconds, peak, what = line.split("\t", 3)
    what = what.strip("'\"")
    outcome.images = int(number) + 1
    outcome.slowest = max(outcome.slowest, float(seconds))
    outcome.peak_mib = max(outcome.peak_mib, int(peak))
    known = what in ("pixels", "refused")
    outcome.outcomes[what if known else "fault"] += 1
    if not known:
        outcome.faults.append(f"image {number}: {what}")
    if float(seconds) > HANG or int(peak) > MOST_MIB:
        outcome.faults.append(f"image {number}: {seconds} s, {peak} MiB")


def _record(outcome: Outcome) -> None:
    results.write("fuzz_images", outcome.figures())


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=27)
    parser.add_argument("--resume", action="store_true", help="go on after those recorded")
    parser.add_argument("--only", type=int, help="decode this one here and say what came of it")
    parser.add_argument("--work", nargs=3, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(*options.work)
    elif options.only is not None:
        print(decode(options.only, options.seed))
    else:
        outcome = Outcome.read(options.seed) if options.resume else Outcome(options.seed)
        run(outcome, options.images, _record)
        print(outcome.figures())
        sys.exit(bool(outcome.faults))


if __name__ == "__main__":
    main()
