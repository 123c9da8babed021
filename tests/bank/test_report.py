"""The report is one file, whatever is in it; ``tests/app/test_browser.py`` opens it."""

import base64
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sscd_vec.bank.quality import InspectedImage
from sscd_vec.bank.records import BankImage
from sscd_vec.bank.report import write_report
from sscd_vec.bank.results import Copies, Copy, CopyGroup, Heatmap
from sscd_vec.files import ImageFile
from sscd_vec.verify import Verifier
from tests.verify.scenes import crop, scene


def _copy(
    path: str, score: float = 1.0, heat: Heatmap | None = None, keep_heat: Heatmap | None = None
) -> Copy:
    file = ImageFile(Path(path), 1000, 0)
    inspected = InspectedImage(file, 40, 30, b"\xff\xd8jpeg")
    return Copy(BankImage(file.id, "", 1, file), score, inspected, heat, keep_heat)


def _found(*groups: CopyGroup) -> Copies:
    return Copies(list(groups), 0.5, 3, len(groups), [])


def _index(page: str) -> Any:  # noqa: ANN401 - JSON
    found = re.search(r'id="index">(.*?)</script>', page, re.S)
    assert found is not None
    return json.loads(found[1])


def test_nothing_is_loaded_from_elsewhere(tmp_path: Path) -> None:
    write_report(tmp_path / "r.html", _found())
    page = (tmp_path / "r.html").read_text()
    assert not re.search(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//""", page)
    assert "default-src 'none'" in page and 'name="viewport"' in page
    assert "@INDEX@" not in page and "@THUMBNAILS@" not in page


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    name = "/x/</script><script>alert(1)</script> @THUMBNAILS@ \u2028 \udce9.jpg"
    group = CopyGroup(_copy(name), (_copy("/y.jpg", 0.7),), ((name, 0.6),))
    write_report(tmp_path / "r.html", _found(group), title="<b>@INDEX@")
    page = (tmp_path / "r.html").read_text()
    assert page.count("<script") == 3 and page.count("</script>") == 3
    index = _index(page)
    assert index["title"] == "<b>@INDEX@"
    assert index["groups"][0]["members"][0]["path"].startswith("/x/</script><script>alert(1)")
    assert index["groups"][0]["related"][0]["score"] == 0.6


def test_links_are_relative_and_quoted(tmp_path: Path) -> None:
    group = CopyGroup(
        _copy(str(tmp_path / "a" / "ü #1?.jpg")), (_copy(str(tmp_path / "b.jpg"), 0.7),)
    )
    write_report(tmp_path / "out" / "r.html", _found(group))
    members = _index((tmp_path / "out" / "r.html").read_text())["groups"][0]["members"]
    assert members[0]["link"] == "../a/%C3%BC%20%231%3F.jpg"
    assert members[1]["link"] == "../b.jpg"


def test_heatmap_is_a_grid_of_its_own_range(tmp_path: Path) -> None:
    heat = np.array([[0.1, 0.2], [0.5, 0.2], [0.1, 0.1]])
    flat = np.full((2, 2), 0.4)
    group = CopyGroup(_copy("/a"), (_copy("/b", 0.7, heat, flat),))
    write_report(tmp_path / "r.html", _found(group))
    copy = _index((tmp_path / "r.html").read_text())["groups"][0]["members"][1]
    assert (copy["heatmap"]["width"], copy["heatmap"]["height"]) == (2, 3)
    assert list(base64.b64decode(copy["heatmap"]["values"])) == [0, 64, 255, 64, 0, 0]
    assert set(base64.b64decode(copy["keep_heatmap"]["values"])) == {0}


def test_outlines_of_what_was_copied(tmp_path: Path) -> None:
    verifier = Verifier.from_pretrained()
    evidence = verifier.relate(crop(scene(1), 0, 0, 0.5, 1), scene(1))
    group = CopyGroup(_copy("/a"), (replace(_copy("/b", 0.7), evidence=evidence), _copy("/c", 0.6)))
    write_report(tmp_path / "r.html", _found(group))
    keep, part, plain = _index((tmp_path / "r.html").read_text())["groups"][0]["members"]
    assert part["relation"] == "part"
    assert np.max(part["region"]["keep"], axis=0) == pytest.approx([0.5, 1], abs=0.03)
    assert np.max(part["region"]["copy"], axis=0) == pytest.approx([1, 1], abs=0.03)
    assert plain["region"] is plain["relation"] is keep["region"] is None


def test_failed_write_leaves_the_old_report(tmp_path: Path) -> None:
    target = tmp_path / "r.html"
    write_report(target, _found())
    before = target.read_bytes()
    broken = CopyGroup(_copy("/a"), (_copy("/b", float("nan")),))
    object.__setattr__(broken.copies[0], "score", "not a number")
    try:
        write_report(target, _found(broken))
    except TypeError:
        pass
    else:
        raise AssertionError("a score that is not a number was written")
    assert target.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["r.html"]
