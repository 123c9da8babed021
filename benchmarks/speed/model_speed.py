"""How much faster the model in the box encodes than the paper's ResNet-50 at its 288 pixels.

    python benchmarks speed/model_speed PHOTOS

From files to descriptors, both with our encoder, and the ResNet-50 the paper code's way as well
(``models.EagerDescriber``); in turn in one process on the same photos. ResNet-50's weights are
random: they do not change its speed.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import results
from accuracy.models import EagerDescriber
from photos import find_photos
from speed.measure import interleaved
from sscd_vec.encoder import Encoder, EncoderConfig, build_model

LEAST = 6.0


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("photos", type=Path, nargs="+", help="folders or tars of photos")
    parser.add_argument("--images", type=int, default=96, help="photos of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", type=Path, default=results.RESULTS)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for photo in find_photos(options.photos)[: options.images]:
            paths.append(str(Path(folder) / Path(photo.name).name))
            Path(paths[-1]).write_bytes(photo.read())
        figures = measure(paths, options.rounds)
    print("\n".join(f"{name:40}{value}" for name, value in figures.items()))
    fingerprint = Encoder.from_pretrained().fingerprint
    print(results.write("model_speed", figures, options.results, encoder=fingerprint))


def measure(paths: Sequence[str], rounds: int) -> dict[str, float | int]:
    """Speed-ups over both ways of running the ResNet-50."""
    shipped = Encoder.from_pretrained()
    large = Encoder(build_model(EncoderConfig(trunk="resnet50", size=288)).eval())
    eager = EagerDescriber(large.model)
    taken = interleaved(
        {
            "paper": lambda: eager(paths),
            "resnet50": lambda: large.encode(list(paths), show_progress=False),
            "shipped": lambda: shipped.encode(list(paths), show_progress=False),
        },
        rounds=rounds,
    )
    speedup = taken["shipped"].speedup_over(taken["resnet50"])
    return {
        "photos": len(paths),
        "over_resnet50_by_our_encoder": round(speedup, 2),
        "over_resnet50_the_papers_way": round(taken["shipped"].speedup_over(taken["paper"]), 2),
        "at_least": LEAST,
    }


if __name__ == "__main__":
    main()
