from pathlib import Path

import pytest

from speed import dry_run


@pytest.mark.parametrize("best", [None, 200])
def test_the_dry_run_finds_its_noisy_copies(tmp_path: Path, best: int | None) -> None:
    figures = dry_run.dry_run(tmp_path, 500, 60, 300, 32, best)
    assert figures["micro_ap"] > 0.9
    assert figures["seconds"] > 0
    assert figures["peak_memory_gib"] > 0
