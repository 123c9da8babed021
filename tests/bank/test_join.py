"""Copies through lists: nearly all pairs, exact scores, bounded memory, and a true recall."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sscd_vec.bank import duplicates, groups, join
from sscd_vec.bank.join import Rows
from tests.bank.conftest import OpenBank

THRESHOLD = 0.6
Keys = set[tuple[int, int]]


def planted(count: int, copies: int, dim: int = 64, seed: int = 0) -> Any:  # noqa: ANN401
    """Random unit vectors, some with a copy at cosine 0.8, and biases."""
    rng = np.random.default_rng(seed)
    z = rng.standard_normal((count, dim)).astype(np.float32)
    rows = rng.permutation(count)[: 2 * copies]
    noise = rng.standard_normal((copies, dim)).astype(np.float32)
    z /= np.linalg.norm(z, axis=1, keepdims=True)
    noise /= np.linalg.norm(noise, axis=1, keepdims=True)
    z[rows[copies:]] = 0.8 * z[rows[:copies]] + 0.6 * noise
    z /= np.linalg.norm(z, axis=1, keepdims=True)
    return z, rng.uniform(0, 0.1, count).astype(np.float32)


def keys(pairs: groups.Pairs) -> dict[tuple[int, int], float]:
    rows = zip(pairs.first.tolist(), pairs.second.tolist(), strict=True)
    return dict(zip(rows, pairs.scores.tolist(), strict=True))


def test_lists_find_nearly_all_pairs_with_the_same_scores() -> None:
    z, biases = planted(6000, 500)
    all_pairs = keys(groups.find_pairs(z, biases, THRESHOLD))
    found = join.find_pairs(Rows(z), biases, THRESHOLD)
    through_lists = keys(found.pairs)
    assert set(through_lists) <= set(all_pairs)
    assert len(through_lists) >= 0.97 * len(all_pairs)
    for pair, score in through_lists.items():
        assert score == pytest.approx(all_pairs[pair], abs=1e-5)
    assert list(through_lists.values()) == sorted(through_lists.values(), reverse=True)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1000), count=st.integers(0, 120))
def test_all_lists_give_all_pairs(seed: int, count: int) -> None:
    z, biases = planted(count, count // 5, dim=16, seed=seed)
    found = join.find_pairs(Rows(z), biases, THRESHOLD, probes=10**6)
    assert set(keys(found.pairs)) == set(keys(groups.find_pairs(z, biases, THRESHOLD)))
    assert found.met == found.expected


def test_the_stated_recall_is_what_is_found() -> None:
    z, biases = planted(1000, 200)
    found = join.find_pairs(Rows(z), biases, THRESHOLD, probes=1)
    truth = keys(groups.find_pairs(z, biases, THRESHOLD))
    assert found.sampled == 1000  # all of them, each pair seen from both sides
    assert found.expected == 2 * len(truth)
    assert found.recall == pytest.approx(len(found.pairs) / len(truth))
    assert found.recall is not None and found.recall < 0.95


def test_little_memory_gives_the_same_pairs_in_more_parts() -> None:
    z, biases = planted(2000, 200)
    parts: list[int] = []

    def run(compare: Callable[[range], Any], slabs: Any) -> Any:  # noqa: ANN401
        parts.append(len(slabs))
        return map(compare, slabs)

    large = join.find_pairs(Rows(z), biases, THRESHOLD, run=run)
    small = join.find_pairs(Rows(z), biases, THRESHOLD, memory=200_000, run=run)
    assert parts[0] == 1 and parts[1] > 5
    assert keys(small.pairs) == keys(large.pairs)


def test_equal_images_are_paired_with_the_first() -> None:
    z, _ = planted(300, 0)
    z[100:200] = z[7]
    found = join.find_pairs(Rows(z), np.zeros(300, np.float32), 0.9)
    assert set(keys(found.pairs)) == {(7, row) for row in range(100, 200)}
    assert found.recall == 1
    (group,) = groups.group_pairs(z, np.zeros(300, np.float32), 0.9, found.pairs)
    assert group.members == (7, *range(100, 200))


def test_rows_in_a_file_are_the_same(tmp_path: Path) -> None:
    z, biases = planted(1500, 100)
    z.tofile(tmp_path / "rows")
    mapped = join.find_pairs(Rows(path=tmp_path / "rows", dim=64), biases, THRESHOLD)
    assert keys(mapped.pairs) == keys(join.find_pairs(Rows(z), biases, THRESHOLD).pairs)


def test_a_large_bank_goes_through_lists_and_says_what_that_finds(
    open_bank: OpenBank, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_bank() as bank:
        bank.add(images)
        first = sorted(images.iterdir())[0]
        bank.add([first.read_bytes()], ids=["copy"])
        whole = bank.duplicates(show_progress=False)
        monkeypatch.setattr(duplicates, "MOST_COMPARED", 4)
        lists = bank.duplicates(show_progress=False)
        every = bank.duplicates(exhaustive=True, show_progress=False)
    assert whole.recall == every.recall == 1 and lists.recall == 1
    members = [[sorted(m.image.id for m in g.members) for g in c.groups] for c in (whole, lists)]
    assert members[0] == members[1] != []
    assert (whole.scanned, whole.pairs) == (lists.scanned, lists.pairs)
