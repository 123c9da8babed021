"""Which pairs geometry is asked about: it takes time, and says little about pages of one form."""

import numpy as np

from sscd_vec.bank.decisions import Decisions
from sscd_vec.bank.groups import Pairs
from sscd_vec.bank.pairs import Scored, Tools, settle
from sscd_vec.bank.records import BankImage
from sscd_vec.normalize import Normalizer, Outside
from sscd_vec.progress import ProgressBar

THRESHOLD = 0.5
PAGES, PHOTOS = range(3), range(3, 6)


def test_geometry_is_asked_about_pairs_near_the_threshold_but_not_of_two_pages() -> None:
    images = [BankImage(f"{row}.png", f"digest {row}", 1) for row in range(6)]
    z = np.eye(6, 8, dtype=np.float32)
    outside = Outside(np.isin(np.arange(6), PAGES), np.zeros(6, np.float32))
    scored = Scored(images, z, np.zeros(6, np.float32), outside, THRESHOLD)
    near, far = THRESHOLD + 0.02, THRESHOLD + 0.3
    pairs = Pairs(
        np.array([3, 0, 0, 3]), np.array([5, 1, 3, 4]),
        np.array([far, near, near, near - 0.04], np.float32),
    )  # fmt: skip
    asked = set()

    def relate(first: BankImage, second: BankImage, score: float | None) -> None:
        asked.add((first.id, second.id, score is None))

    tools = Tools(Normalizer.identity(8), lambda image: None, relate)
    settle(scored, pairs, Decisions(), tools, ProgressBar())
    # A page and a photo, and two photos; two pages get the closer look, which knows no score.
    assert asked == {("0.png", "3.png", False), ("3.png", "4.png", False), ("0.png", "1.png", True)}
