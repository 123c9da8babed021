"""Run by test_separate.py: what the compiler makes of every kernel for four GPUs, none needed."""

import pytest

from speed import aot
from speed.aot import Compiled


@pytest.fixture(scope="module")
def compiled() -> list[Compiled]:
    """Every variant of every kernel for every target, compiled once."""
    return list(aot.compile_all())


def test_every_variant_compiles_for_every_target(compiled: list[Compiled]) -> None:
    expected = {(v.name, t.name) for v in aot.variants() for t in aot.TARGETS}
    assert {(c.variant, c.target) for c in compiled} == expected
    assert {t.name for t in aot.TARGETS} == {"sm_80", "sm_90", "sm_100", "gfx942"}


def test_products_run_on_tensor_cores(compiled: list[Compiled]) -> None:
    kinds = {
        "sm_80": {"mma"},
        "sm_90": {"mma", "wgmma"},
        "sm_100": {"mma", "tcgen05.mma"},
        "gfx942": {"mfma"},
    }
    products = [c for c in compiled if c.products]
    assert products
    wrong = [c for c in products if c.tensor_cores not in kinds[c.target]]
    assert not wrong, "\n".join(map(str, wrong))


def test_no_register_spills(compiled: list[Compiled]) -> None:
    spilling = [c for c in compiled if c.spilled]
    assert not spilling, "\n".join(map(str, spilling))


def test_shared_memory_fits(compiled: list[Compiled]) -> None:
    large = [c for c in compiled if c.shared > c.shared_limit or c.programs < 1]
    assert not large, "\n".join(map(str, large))
