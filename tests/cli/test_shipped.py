"""What ships together fits together."""

import numpy as np
import pytest

from sscd_vec import Encoder, Normalizer, models
from sscd_vec.normalize import COPY_RATE, STANDARD_BANK


@pytest.mark.parametrize("name", models.shipped())
def test_the_shipped_normalizer_fits_its_model_and_has_every_threshold(name: str) -> None:
    encoder = Encoder.from_pretrained(name, device="cpu")
    normalizer = Normalizer.load(models.normalizer_path(name))
    normalizer.check_encoder(encoder)
    assert set(normalizer.thresholds) == {"search", "symmetric", "tiled"}
    for kind, threshold in normalizer.thresholds.items():  # one language for every kind of score
        assert (threshold.rate, threshold.bank_size) == (COPY_RATE, STANDARD_BANK)
        grown = [normalizer.threshold(kind, size) for size in (1000, 100_000, 10_000_000)]
        assert grown == sorted(grown) and grown[0] == pytest.approx(threshold.value, abs=0.08)
        assert 0 < grown[0] < grown[2] < normalizer.largest_score
    assert normalizer.domain is not None and len(normalizer.domain.background) >= 500
    picture = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    z = encoder.encode([picture, picture[:, ::-1].copy()])
    assert normalizer.scores(z, z).shape == (2, 2)


def test_one_model_ships() -> None:
    assert len(models.shipped()) == 1
