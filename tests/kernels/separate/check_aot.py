"""Run by test_separate.py: what the kernels cost, from their machine code for four GPUs.

The committed table holds every launch; a few are compiled again here and compared with it. No GPU
is needed.
"""

from typing import Any

import pytest
import torch

import results
from speed import aot, sass
from sscd_vec.kernels import gem_pool
from sscd_vec.kernels.gem import FLAT_TILE

GROWTH = 1.05
# Compiled again by this test; the rest takes minutes.
CHOSEN = (
    "fp32 rows, fp32 products, whole",
    "bf16 rows, bf16 products, whole",
    "bf16 NCHW 7x7 p=3",
    "fp32 NCHW 9x9 p=3",
)
KERNELS = ("scan", "push", "flat_forward", "flat_backward")
COSTS = ("issue_clocks", "shared_clocks", "bytes_per_flop", "product_ratio", "spilled")
# Clocks per 1000 multiply-adds that a tile of sm_90 may take, whatever it waits for.
GOALS = {"fp32": 4.4, "bf16": 0.74, "fp16": 0.74}
INSTRUCTIONS = {"sm_80": "mma", "sm_90": "wgmma", "sm_100": "tcgen05", "gfx942": "mfma"}
NVIDIA = ("sm_80", "sm_90", "sm_100")

Row = dict[str, Any]


@pytest.fixture(scope="module")
def table() -> dict[tuple[str, str], Row]:
    """The committed figures by variant and target."""
    figures: Any = results.read("kernels_aot")["figures"]
    rows = [row for found in figures["targets"].values() for kind in found.values() for row in kind]
    return {(row["variant"], row["target"]): row for row in rows}


@pytest.fixture(scope="module")
def matrix(table: dict[tuple[str, str], Row]) -> list[Row]:
    """The figures of the kernels that multiply matrices, NVIDIA's."""
    found = [row for row in table.values() if row["issue_clocks"] is not None]
    assert {(row["variant"].split()[0], row["target"]) for row in found} == {
        (kernel, target) for kernel in ("scan", "push") for target in NVIDIA
    }
    return found


@pytest.fixture(scope="module")
def compiled() -> list[aot.Figures]:
    return aot.compile_all(CHOSEN, KERNELS)


def test_no_cost_grows(table: dict[tuple[str, str], Row], compiled: list[aot.Figures]) -> None:
    assert {x.target for x in compiled} == set(INSTRUCTIONS)
    assert {x.variant.split()[0] for x in compiled} == set(KERNELS)
    grown = []
    for new in compiled:
        old = table[new.variant, new.target]
        for cost in COSTS:
            now, before = getattr(new, cost), old[cost]
            assert (now is None) == (before is None)
            if now is not None and now > GROWTH * before:
                grown.append(f"{new.variant} on {new.target}: {cost} {before} -> {now}")
        for part in ("instruction", "shapes"):
            if getattr(new, part) != old[part]:
                grown.append(f"{new.variant} on {new.target}: {part} {old[part]} was lost")
    assert not grown, "\n".join([*grown, "meant? python benchmarks speed/kernels --aot"])


def test_products_are_not_made_twice(matrix: list[Row]) -> None:
    assert all(row["product_ratio"] <= 1.05 for row in matrix)


def test_instructions_fit_beside_the_products(matrix: list[Row]) -> None:
    late = [row for row in matrix if row["issue_clocks"] > 1.5 * row["tensor_clocks"]]
    assert not late, late


@pytest.mark.parametrize("products", GOALS)
def test_sm_90_reaches_its_goals(matrix: list[Row], products: str) -> None:
    """Whatever bounds a tile of many rows: instructions, tensor cores or shared memory."""
    rows = [
        row
        for row in matrix
        if row["target"] == "sm_90"
        and row["variant"].split()[1] == products
        and not row["variant"].endswith("64x64")  # of few rows, which are no matter of speed
    ]
    assert len(rows) == 4  # scan, and push for three kinds of anchors
    for row in rows:
        clocks = max(row[f"{name}_clocks"] for name in ("issue", "tensor", "shared"))
        assert clocks <= GOALS[products], row


def test_every_target_uses_its_own_matrix_instruction(table: dict[tuple[str, str], Row]) -> None:
    rows = [row for row in table.values() if row["variant"].startswith(("scan", "push"))]
    assert {row["target"] for row in rows} == set(INSTRUCTIONS)
    assert all(row["instruction"] == INSTRUCTIONS[row["target"]] for row in rows)


def test_matrix_instructions_are_wide(matrix: list[Row]) -> None:
    """64 columns at least, but for the similarities in ``push``, as docs/kernels.md explains."""
    for row in matrix:
        if row["target"] == "sm_80":
            continue
        kernel, products, *_ = row["variant"].split()
        narrow = 16 if (row["target"], products) == ("sm_90", "fp32") else 32
        columns = columns_of(row["shapes"])
        assert columns == [narrow, 256] if kernel == "push" else columns[0] >= 64, row


@pytest.mark.parametrize("products", ["bf16", "fp32"])
def test_push_multiplies_64_columns_of_shorter_rows(
    monkeypatch: pytest.MonkeyPatch, products: str
) -> None:
    """Of 256 numbers: two warp groups share 128 columns, for which shared memory then suffices."""
    monkeypatch.setattr(aot, "DIMENSION", 256)
    target = next(t for t in aot.TARGETS if t.name == "sm_90")
    with aot.record(target, ("push",)) as launches:
        aot.workloads()[f"{products} rows, {products} products, whole"]()
    (launch,) = launches
    found = aot.figures("push", target, launch)
    assert columns_of(found.shapes) == [64, 128] and found.spilled <= 8
    assert found.shared <= found.shared_limit


def test_no_other_tile_costs_less_than_the_one_in_use() -> None:
    """The committed table of other forms; what TMA would save docs/kernels.md states."""
    figures: Any = results.read("kernels_tried")["figures"]
    tried = [x for x in figures["forms"] if "TMA" not in x["form"] and x["fits"]]
    used = {(x["kernel"], "d=256" in x["form"]): x for x in tried if "in use" in x["form"]}
    others = [x for x in tried if "in use" not in x["form"]]
    assert len(others) >= 5
    for other in others:
        mine = used[other["kernel"], "d=256" in other["form"]]
        assert mine["fits"] and mine["at least"] < other["at least"], other


def columns_of(shapes: str) -> list[int]:
    """Columns of the matrix instructions, the fewest first."""
    return sorted(int(shape.split("x")[1]) for shape in shapes.split(", "))


def test_bytes_from_l2_stay_within_what_it_gives(matrix: list[Row]) -> None:
    """64 bytes a clock for each multiprocessor, at most as long as the tile takes anyway."""
    for row in matrix:
        if row["variant"].endswith("64x64"):
            continue
        longest = max(row[f"{name}_clocks"] for name in ("issue", "tensor", "shared"))
        assert 2000 * row["bytes_per_flop"] / 64 <= longest, row


def test_spills_are_few_and_fit(table: dict[tuple[str, str], Row]) -> None:
    for row in table.values():
        limit = 400 if row["variant"].startswith(("scan", "push")) else 8  # one pair of registers
        assert row["spilled"] <= limit, row
        assert row["shared"] <= row["shared_limit"] and row["programs"] >= 1, row


@pytest.mark.parametrize("size", [7, 9])
@pytest.mark.parametrize(("name", "item"), [("fp32", 4), ("bf16", 2)])
def test_every_flat_pooling_is_in_the_table(
    table: dict[tuple[str, str], Row], size: int, name: str, item: int
) -> None:
    """Maps of odd size in NCHW, p = 1 and 3: all of x in loads of at least 8 bytes, both ways."""
    for target in NVIDIA:
        for way in ("forward", "backward"):
            for p in (1, 3):
                row = table[f"flat_{way} {name} NCHW {size}x{size} p={p}", target]
                assert row["wide_load_bytes"] >= FLAT_TILE * item, row


@pytest.mark.parametrize("size", [7, 9])
def test_pooling_loads_16_bytes_at_odd_sizes(compiled: list[aot.Figures], size: int) -> None:
    found = [x for x in compiled if x.variant.startswith("flat_") and f"{size}x{size}" in x.variant]
    wide = {x.target: x.wide_load_bytes for x in found if x.variant.startswith("flat_forward")}
    item = 2 if size == 7 else 4
    for target in NVIDIA:
        loaded = wide[target]
        assert loaded is not None and loaded >= FLAT_TILE * item  # all of x, and no lane idle


def test_the_table_describes_the_launch_at_hand() -> None:
    """A map that starts at an odd address is another binary: its loads are narrow."""
    storage = torch.rand(4 * 256 * 81 + 1)
    maps = [storage[start : start + 4 * 256 * 81].view(4, 256, 9, 9) for start in (0, 1)]
    target = next(t for t in aot.TARGETS if t.name == "sm_90")
    found = []
    for x in maps:
        with aot.record(target) as launches:
            gem_pool(x)
        (launch,) = launches
        found.append(sass.load_widths(sass.listing(launch.compiled.asm["cubin"])))
    aligned, odd = found
    assert max(aligned) == 16 and max(odd) == 4


LISTING = """
.L_begin:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_tiles:
        /*0010*/                   LDGSTS.E.BYPASS.128 [R2], [R4.64] ;
        /*0020*/                   HGMMA.64x256x16.F32.BF16 R24, R4, gdesc[UR4].tnspB, R24 ;
        /*0030*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24, gsb0 ;
        /*0040*/              @P1  BRA `(.L_rare) ;
.L_sum:
        /*0050*/                   MUFU.EX2 R5, R6 ;
        /*0060*/              @P0  BRA `(.L_tiles) ;
        /*0070*/                   EXIT ;
.L_rare:
        /*0080*/                   LDG.E R9, [R4.64] ;
        /*0090*/                   BRA `(.L_sum) ;
"""


def test_the_cost_of_a_loop_by_hand() -> None:
    cost = sass.tile_cost(LISTING, warps=8, rounds=1)
    assert cost.multiply_adds == 2 * 64 * (256 + 64) * 16  # two groups of four warps
    assert cost.issue_clocks == 8 * 6 / 4  # without the branch that few tiles take
    assert cost.bytes == 8 * 32 * 16
    # The load, the right factor of both products, the left one of the second.
    operands = 2 * 2 * 16 * (256 + 64 + 64)
    assert cost.shared_clocks == (8 * 32 * 16 + operands) / 128
    assert cost.shapes == ((64, 64), (64, 256))


def test_a_loop_without_products_is_refused() -> None:
    with pytest.raises(ValueError, match="no loop that multiplies and sums"):
        sass.tile_cost(LISTING.replace("HGMMA", "FFMA"), warps=8, rounds=1)
