"""Do heatmaps point at the pasted region? Hit rates on overlays and collages of the generator.

    python benchmarks accuracy/heatmap PHOTOS... [--model MODEL] [--images 100]

A hit: the hottest place of ``encoder.heatmap(composed, source)`` lies inside the pasted region.
Chance is the region's share of the picture. The same is asked of the heatmap against an unrelated
photo: a map that only liked salient places would hit as often there.
"""

import argparse

import numpy as np
from numpy.typing import NDArray

import results
from accuracy.command_model import label, open_encoder
from accuracy.edits.composed import KINDS, Kind, compose
from photos import Photo, find_photos
from sscd_vec import Encoder


def main() -> None:
    """Measure and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sources", nargs="+", help="folders or tars of photos")
    parser.add_argument("--model", help="a model or imagenet:TRUNK; the shipped one by default")
    parser.add_argument("--images", type=int, default=100, help="pictures of each kind")
    asked = parser.parse_args()
    encoder = open_encoder(asked.model)
    photos = find_photos(asked.sources)
    np.random.default_rng(1).shuffle(photos)
    sources, others = photos[: asked.images], photos[asked.images :]
    rows = [{"kind": kind, **measure(encoder, sources, others, kind)} for kind in KINDS]
    print(rows)
    results.write(
        "heatmap",
        {"model": label(asked.model), "encoder": encoder.config.to_dict(), "rows": rows},
        encoder=encoder.fingerprint,
    )


def measure(
    encoder: Encoder, sources: list[Photo], others: list[Photo], kind: Kind
) -> dict[str, float]:
    """Hit rates of one kind of picture."""
    hits, unrelated_hits, shares, hotter = [], [], [], []
    for made in compose(sources, others, kind):
        heat = encoder.heatmap(made.image, sources[made.source].image())
        stranger = encoder.heatmap(made.image, others[made.source].image())
        hits.append(_hits(heat, made.region))
        unrelated_hits.append(_hits(stranger, made.region))
        shares.append(made.share)
        hotter.append(heat[made.region].mean() > heat[~made.region].mean())
    return {
        "images": len(hits),
        "hit_rate": round(float(np.mean(hits)), 3),
        "hit_rate_against_unrelated": round(float(np.mean(unrelated_hits)), 3),
        "chance": round(float(np.mean(shares)), 3),
        "hotter_inside_than_outside": round(float(np.mean(hotter)), 3),
    }


def _hits(heat: NDArray[np.float32], region: NDArray[np.bool_]) -> bool:
    return bool(region.ravel()[int(heat.argmax())])


if __name__ == "__main__":
    main()
