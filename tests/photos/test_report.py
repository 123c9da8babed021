"""The report is one file, whatever is in it; ``tests/app/test_browser.py`` opens it."""

import base64
import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from sscd_vec.photos.quality import Picture
from sscd_vec.photos.report import Copy, CopyGroup, write_report


def _picture(path: str) -> Picture:
    return Picture(Path(path), 1000, 40, 30, b"\xff\xd8jpeg")


def _index(page: str) -> Any:  # noqa: ANN401 - JSON
    found = re.search(r'id="index">(.*?)</script>', page, re.S)
    assert found is not None
    return json.loads(found[1])


def test_nothing_is_loaded_from_elsewhere(tmp_path: Path) -> None:
    write_report(tmp_path / "r.html", [], threshold=0.5, scanned=3)
    page = (tmp_path / "r.html").read_text()
    assert not re.search(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//""", page)
    assert "default-src 'none'" in page and 'name="viewport"' in page
    assert "@INDEX@" not in page and "@THUMBNAILS@" not in page


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    name = "/x/</script><script>alert(1)</script> @THUMBNAILS@ \u2028 \udce9.jpg"
    group = CopyGroup(_picture(name), (Copy(_picture("/y.jpg"), 0.7),), ((Path(name), 0.6),))
    write_report(tmp_path / "r.html", [group], threshold=0.5, scanned=2, title="<b>@INDEX@")
    page = (tmp_path / "r.html").read_text()
    assert page.count("<script") == 3 and page.count("</script>") == 3
    index = _index(page)
    assert index["title"] == "<b>@INDEX@"
    assert index["groups"][0]["members"][0]["path"].startswith("/x/</script><script>alert(1)")
    assert index["groups"][0]["related"][0]["score"] == 0.6


def test_links_are_relative_and_quoted(tmp_path: Path) -> None:
    group = CopyGroup(
        _picture(str(tmp_path / "a" / "ü #1?.jpg")), (Copy(_picture(str(tmp_path / "b.jpg")), 0.7),)
    )
    write_report(tmp_path / "out" / "r.html", [group], threshold=0.5, scanned=2)
    members = _index((tmp_path / "out" / "r.html").read_text())["groups"][0]["members"]
    assert members[0]["link"] == "../a/%C3%BC%20%231%3F.jpg"
    assert members[1]["link"] == "../b.jpg"


def test_heatmap_is_a_grid_of_its_own_range(tmp_path: Path) -> None:
    heat = np.array([[0.1, 0.2], [0.5, 0.2], [0.1, 0.1]])
    flat = np.full((2, 2), 0.4)
    group = CopyGroup(_picture("/a"), (Copy(_picture("/b"), 0.7, heat, flat),))
    write_report(tmp_path / "r.html", [group], threshold=0.5, scanned=2)
    copy = _index((tmp_path / "r.html").read_text())["groups"][0]["members"][1]
    assert (copy["heatmap"]["width"], copy["heatmap"]["height"]) == (2, 3)
    assert list(base64.b64decode(copy["heatmap"]["values"])) == [0, 64, 255, 64, 0, 0]
    assert set(base64.b64decode(copy["keep_heatmap"]["values"])) == {0}


def test_failed_write_leaves_the_old_report(tmp_path: Path) -> None:
    target = tmp_path / "r.html"
    write_report(target, [], threshold=0.5, scanned=1)
    before = target.read_bytes()
    broken = CopyGroup(_picture("/a"), (Copy(_picture("/b"), float("nan")),))
    object.__setattr__(broken.copies[0], "score", "not a number")
    try:
        write_report(target, [broken], threshold=0.5, scanned=1)
    except TypeError:
        pass
    else:
        raise AssertionError("a score that is no number was written")
    assert target.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["r.html"]
