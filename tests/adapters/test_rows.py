"""Ids by row: appended piece by piece, and read by many threads at once."""

import numpy as np
import pytest

from sscd_vec.adapters.faiss.rows import IntColumn, RowTable


def test_integers_grow_and_keep_their_order() -> None:
    column = IntColumn(np.array([7, 8]))
    before = column.array()
    for begin in range(0, 1000, 50):
        column.extend(range(begin, begin + 50))
    assert column.array().tolist() == [7, 8, *range(1000)] and len(column) == 1002
    assert before.tolist() == [7, 8], "what a reader holds stays as it was"


@pytest.mark.parametrize("ids", [[1, 2, 3], ["a", "b", "c"]])
def test_reading_changes_nothing(ids: list[int | str]) -> None:
    table = RowTable()
    table.append(ids, None, "int" if ids[0] == 1 else "str")
    before = dict(vars(table._ids))
    for _ in range(2):
        assert table.at(np.array([2, 0]))[0].tolist() == [ids[2], ids[0]]
        assert len(table) == 3
    assert all(value is before[name] for name, value in vars(table._ids).items())


def test_rows_by_id_are_seen_whole_or_not_at_all() -> None:
    table = RowTable()
    table.append(list(range(10)), None, "int")
    table.remove([3])
    made_meanwhile = []

    class Dead(set[int]):
        def __contains__(self, row: object) -> bool:
            made_meanwhile.append(table._row_of)
            return super().__contains__(row)

    table.dead, table._row_of = Dead(table.dead), None
    assert sorted(table.row_of) == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    assert made_meanwhile == [None] * 10
