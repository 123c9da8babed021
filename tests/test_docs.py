"""Every Python block of the README and the docs runs, page by page, from top to bottom.

A block that cannot run in a test stands behind a comment ``<!-- not run: WHY -->``.
"""

import io
import re
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sscd_vec.cli.pictures import EDITS, draw

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<why>.+?) -->\n)?(?P<indent> *)```python\n"
    r"(?P<code>.*?)^(?P=indent)```",
    re.DOTALL | re.MULTILINE,
)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WITH_CODE = [page for page in PAGES if "```python\n" in page.read_text("utf-8")]
# Reasons that are allowed; a new one has to be added here, where a reader sees it.
REASONS = {"downloads a released model", "trains a ResNet-50 on GPUs"}


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A folder with what the pages talk about, and the variables they take for granted."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SSCD_VEC_CACHE", str(tmp_path / "cache"))
    (tmp_path / "photos").mkdir()
    for seed in range(6):
        image = draw(seed)
        image.thumbnail((200, 200))
        image.save(tmp_path / "photos" / f"{seed}.jpg")
        if seed == 0:
            for name in ("a", "cat", "original"):
                image.save(tmp_path / f"{name}.jpg")
            edited = EDITS["captioned"](image, np.random.default_rng(0))
            for name in ("upload", "dog", "collage"):
                edited.save(tmp_path / f"{name}.jpg")
    (tmp_path / "list.txt").write_text("photos/1.jpg\n")
    with tarfile.open(tmp_path / "shard-000.tar", "w") as shard:
        shard.add(tmp_path / "photos" / "2.jpg", "2.jpg")
    buffer = io.BytesIO()
    image.save(buffer, "JPEG")
    return {
        "array": np.asarray(image),
        "pil_image": image,
        "jpeg_bytes": buffer.getvalue(),
        "raw_bytes": buffer.getvalue(),
        "paths": sorted((tmp_path / "photos").iterdir()),
    }


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.stem)
def test_every_block_runs(page: Path, names: dict[str, Any]) -> None:
    text = page.read_text("utf-8")
    blocks = list(BLOCK.finditer(text))
    assert len(blocks) == text.count("```python\n"), "a block that this test does not see"
    for block in blocks:
        if block["why"] is not None:
            assert block["why"] in REASONS
            continue
        line = text[: block.start("code")].count("\n")
        code = re.sub(rf"^{block['indent']}", "", block["code"], flags=re.MULTILINE)
        exec(compile("\n" * line + code, str(page), "exec"), names)
