import numpy as np
import pytest

from sscd_vec.adapters.matches import Match, Matches, concatenate, no_matches


def some() -> Matches:
    return Matches(
        np.array(["a", "b", "c"], dtype=object),
        np.array([0.9, 0.5, 0.7], dtype=np.float32),
        np.array([0, 2, 2, 3]),
        [{"n": 1}, None, None],
    )


def test_reads_like_a_list_of_lists() -> None:
    matches = some()
    assert len(matches) == 3
    assert matches[0] == [Match("a", float(np.float32(0.9)), {"n": 1}), Match("b", 0.5, None)]
    assert matches[1] == []
    assert matches[-1][0].id == "c"
    assert [len(row) for row in matches] == [2, 0, 1] == matches.counts.tolist()
    assert matches.queries.tolist() == [0, 0, 2]
    assert matches[1:] == [matches[1], matches[2]]
    with pytest.raises(IndexError, match="query 3 of 3"):
        matches[3]


def test_above_keeps_rows_and_metadata_together() -> None:
    kept = some().above(0.7)
    assert kept.ids.tolist() == ["a", "c"]
    assert kept.counts.tolist() == [1, 0, 1]
    assert kept.metadata == [{"n": 1}, None]
    assert some().above(0.0).ids.tolist() == ["a", "b", "c"]


def test_concatenate_shifts_queries_and_keeps_the_reason() -> None:
    why = Matches(np.array([7]), np.array([0.1], dtype=np.float32), np.array([0, 1]), None, "cut")
    joined = concatenate([no_matches(2), some(), why])
    assert joined.counts.tolist() == [0, 0, 2, 0, 1, 1]
    assert joined.metadata == [{"n": 1}, None, None, None]
    assert not joined.complete and joined.incomplete == "cut"
    assert concatenate([]).counts.tolist() == []
    assert "6 queries, 4 matches, incomplete: cut" in repr(joined)
