"""Fit what tells photos from everything else, and store it with a model's normalizer.

    python benchmarks release/domain MODEL PHOTOS...

``PHOTOS`` are a few thousand that no test holds: the background's. The other images are drawn
(``release/nonphotos``), so the same model, photos and fonts give the same numbers again. Everything
else in the normalizer stays as it is.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from photos import find_photos
from release import nonphotos
from sscd_vec import models
from sscd_vec.encoder import Encoder
from sscd_vec.normalize import Domain, Normalizer

FALSE_ALARM = 0.003  # of photos; 0.01 takes the copy verdict from 2 of 736 copies, this from none
PER_KIND = 24  # drawn images of each kind: 768 rows, 0.8 MB


def fit_domain(encoder: Encoder, normalizer: Normalizer, photos: NDArray[np.float32]) -> Domain:
    """Fit on descriptors of photos and on drawn images."""
    others = encoder.encode(nonphotos.draw_all(PER_KIND))
    known = normalizer.whiten(photos)
    return Domain.fit(known, normalizer.whiten(others), false_alarm=FALSE_ALARM)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="name or folder of a model with a normalizer")
    parser.add_argument("photos", nargs="+", type=Path, help="folders or tars of photos")
    options = parser.parse_args(arguments)
    encoder = Encoder.from_pretrained(options.model)
    path = models.normalizer_path(options.model)
    normalizer = Normalizer.load(path)
    normalizer.check_encoder(encoder)
    rows = encoder.encode(photo.read() for photo in find_photos(options.photos))
    domain = fit_domain(encoder, normalizer, rows)
    normalizer.with_domain(domain).save(path)
    beyond = float(domain.outside(normalizer.whiten(rows)).mean())
    print(
        f"{path.name}: {len(domain.background)} drawn images, threshold {domain.threshold:.3f}; "
        f"{beyond:.2%} of {len(rows)} photos lie outside"
    )


if __name__ == "__main__":
    main()
