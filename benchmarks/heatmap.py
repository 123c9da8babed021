"""Do heatmaps point at the pasted region? Hit rates on overlays and collages.

    python benchmarks/heatmap.py PHOTOS... --model MODEL [--images 200]

A hit: the hottest place of ``encoder.heatmap(composed, source)`` lies inside the pasted region.
Chance is the region's share of the picture. The same is asked of the heatmap against an unrelated
photo: a map that only liked salient places would hit as often there.
"""

import argparse
from functools import partial

import numpy as np
import results
from composed import KINDS, compose
from photos import find_photos

from sscd_vec import Encoder
from sscd_vec.encoder.backends.fold import inference_copy
from sscd_vec.encoder.heatmap import match_heatmap


def main() -> None:
    """Measure and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sources", nargs="+", help="folders or tars of photos")
    parser.add_argument("--model", default=None, help="the shipped model by default")
    parser.add_argument("--images", type=int, default=200, help="pictures of each kind")
    asked = parser.parse_args()
    encoder = Encoder.from_pretrained(asked.model)
    # What Encoder.heatmap computes, with the network prepared once and not for every call.
    explain = partial(match_heatmap, inference_copy(encoder.model), device=encoder.device)
    photos = find_photos(asked.sources)
    np.random.default_rng(1).shuffle(photos)
    sources, others = photos[: asked.images], photos[asked.images :]
    figures = {}
    for kind in KINDS:
        hits, unrelated_hits, shares, contrast = [], [], [], []
        for made in compose(sources, others, kind):
            pixels = np.asarray(made.image)
            heat = explain(pixels, np.asarray(sources[made.source].image()))
            stranger = np.asarray(others[made.source].image())
            hits.append(_hits(heat, made.box))
            unrelated_hits.append(_hits(explain(pixels, stranger), made.box))
            shares.append(made.share)
            left, top, right, bottom = made.box
            inside = np.zeros(heat.shape, bool)
            inside[top:bottom, left:right] = True
            contrast.append(float(heat[inside].mean() - heat[~inside].mean()))
        figures[kind] = {
            "images": len(hits),
            "hit_rate": round(float(np.mean(hits)), 3),
            "hit_rate_against_unrelated": round(float(np.mean(unrelated_hits)), 3),
            "chance": round(float(np.mean(shares)), 3),
            "hotter_inside_than_outside": round(float(np.mean(np.array(contrast) > 0)), 3),
        }
    record = {"model": encoder.config.to_dict(), "figures": figures}
    print(figures)
    results.write("heatmap", record)


def _hits(heat: np.ndarray, box: tuple[int, int, int, int]) -> bool:
    y, x = np.unravel_index(int(heat.argmax()), heat.shape)
    left, top, right, bottom = box
    return bool(left <= x < right and top <= y < bottom)


if __name__ == "__main__":
    main()
