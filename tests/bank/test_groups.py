"""Grouping against brute force, and the shapes that must not become one giant group."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from sscd_vec.bank import groups as grouping


def _unit(rows: NDArray[np.floating]) -> NDArray[np.float32]:
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / lengths, np.float32)


def _brute(
    z: NDArray[np.float32], biases: NDArray[np.float32], threshold: float
) -> dict[tuple[int, int], float]:
    directed = z @ z.T - biases[:, None]
    symmetric = np.minimum(directed, directed.T)
    n = len(z)
    return {
        (a, b): float(symmetric[a, b])
        for a in range(n)
        for b in range(a + 1, n)
        if symmetric[a, b] >= threshold
    }


@pytest.mark.parametrize("count", [0, 1, 2, 41, 1271])
def test_pairs_are_those_of_brute_force(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouping, "ROWS", 401)
    monkeypatch.setattr(grouping, "COLUMNS", 97)
    rng = np.random.default_rng(count)
    z = _unit(rng.normal(size=(count, 16)) + 0.5) if count else np.zeros((0, 16), np.float32)
    biases = rng.uniform(0, 0.4, count).astype(np.float32)
    # Half way between two neighbouring scores, so that rounding decides nothing.
    values = np.sort(list(_brute(z, biases, 0.2).values()))
    middle = values[len(values) // 2 - 1 : len(values) // 2 + 1]
    threshold = float(middle.mean()) if len(middle) == 2 else 0.2
    finished: list[int] = []
    pairs = grouping.find_pairs(z, biases, threshold, links=count + 1, on_rows=finished.append)
    expected = _brute(z, biases, threshold)
    got = dict(
        zip(
            zip(pairs.first.tolist(), pairs.second.tolist(), strict=True), pairs.scores, strict=True
        )
    )
    assert got.keys() == expected.keys()
    for pair, score in expected.items():
        assert got[pair] == pytest.approx(score, abs=1e-5)
    assert (np.diff(pairs.scores) <= 0).all()
    assert sum(finished) == count


def test_links_bound_what_is_kept_of_a_thousand_equal_images() -> None:
    z = _unit(np.ones((1500, 8)))
    biases = np.zeros(1500, np.float32)
    pairs = grouping.find_pairs(z, biases, 0.9, links=7)
    assert np.bincount(pairs.first).max() == 7
    groups = grouping.group_pairs(z, biases, 0.9, pairs)
    assert [len(g.members) for g in groups] == [1500]


def test_chain_of_weak_links_is_not_one_group() -> None:
    # Forty images, each a copy (score 1/2) of its two neighbours only: e_i + e_(i+1).
    z = _unit(np.eye(40) + np.roll(np.eye(40), 1, axis=1))
    near = 0.5
    biases = np.zeros(40, np.float32)
    pairs = grouping.find_pairs(z, biases, near - 1e-3)
    assert len(pairs) == 40  # a ring: plain union-find would give one group of forty
    groups = grouping.group_pairs(z, biases, near - 1e-3, pairs)
    assert max(len(g.members) for g in groups) <= 3
    linked = {frozenset((a, b)) for g in groups for a, b, _ in g.related}
    inside = {
        frozenset((int(a), int(b)))
        for a, b in zip(pairs.first, pairs.second, strict=True)
        for g in groups
        if {int(a), int(b)} <= set(g.members)
    }
    # No copy is lost: every pair is inside a group or named as related by one.
    assert len(linked | inside) == 40


def test_original_with_crops_that_do_not_overlap_stays_together() -> None:
    crops = np.eye(6, dtype=np.float32)
    original = crops.sum(0, keepdims=True)
    z = _unit(np.concatenate([crops, original]))
    biases = np.zeros(7, np.float32)
    threshold = 1 / np.sqrt(6) - 1e-3
    groups = grouping.group_pairs(z, biases, threshold, grouping.find_pairs(z, biases, threshold))
    assert [g.members for g in groups] == [tuple(range(7))]
    assert groups[0].hub == 6


def test_two_dense_groups_with_one_bridge_stay_two() -> None:
    rng = np.random.default_rng(5)
    left = np.zeros((6, 32)) + np.eye(32)[0] + 0.1 * rng.normal(size=(6, 32))
    right = np.zeros((6, 32)) + np.eye(32)[1] + 0.1 * rng.normal(size=(6, 32))
    bridge = np.eye(32)[:1] + np.eye(32)[1:2]
    z = _unit(np.concatenate([left, right, bridge]))
    biases = np.zeros(13, np.float32)
    threshold = 0.45
    pairs = grouping.find_pairs(z, biases, threshold)
    groups = grouping.group_pairs(z, biases, threshold, pairs)
    assert sorted(len(g.members) for g in groups) == [6, 7]
    assert all(set(g.members) - {12} in ({*range(6)}, {*range(6, 12)}) for g in groups)


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 30), st.integers(0, 1000), st.floats(0.1, 0.9))
def test_every_member_is_a_copy_of_another_and_none_is_in_two(
    count: int, seed: int, threshold: float
) -> None:
    rng = np.random.default_rng(seed)
    z = _unit(rng.normal(size=(count, 4)))
    biases = rng.uniform(0, 0.3, count).astype(np.float32)
    pairs = grouping.find_pairs(z, biases, threshold)
    groups = grouping.group_pairs(z, biases, threshold, pairs)
    seen = [row for g in groups for row in g.members]
    assert len(seen) == len(set(seen))
    copies = {frozenset(p) for p in zip(pairs.first.tolist(), pairs.second.tolist(), strict=True)}
    for g in groups:
        assert g.hub in g.members
        for row in g.members:
            assert any(frozenset((row, other)) in copies for other in g.members)
    linked = {row for pair in copies for row in pair}
    named = set(seen) | {b for g in groups for _, b, _ in g.related}
    assert linked <= named


def test_shapes_are_checked() -> None:
    with pytest.raises(ValueError, match=r"\(3, 2\) and \(2,\)"):
        grouping.find_pairs(np.zeros((3, 2), np.float32), np.zeros(2, np.float32), 0.5)
