"""The report on copies: one HTML file that needs nothing else, offline, on a phone, in the dark.

The page (``report.html``) carries two JSON blocks: an index of groups, which it filters and sorts,
and the thumbnails, which it decodes as they come into view. Heatmaps are kept as the small grids
the network gives, a few hundred bytes each, and are painted over the picture when asked for.
"""

import base64
import json
import os
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sscd_vec.bank.decisions import FORMAT
from sscd_vec.bank.heat_grid import grid
from sscd_vec.bank.results import Copies, Copy, Heatmap
from sscd_vec.files import write_whole


def write_report(
    path: str | os.PathLike[str],
    found: Copies,
    *,
    unreadable: int = 0,
    model: str = "",
    title: str = "Copies",
    normalizer: str = "",
) -> None:
    """Write the report, whole or not at all.

    Args:
        path: The HTML file.
        found: What ``Bank.duplicates`` found.
        unreadable: How many files could not be read.
        model: Which encoder was used, for the headline.
        title: The headline.
        normalizer: Query fingerprint of the normalizer, for the decisions the page saves.
    """
    target = Path(path)
    thumbnails: list[str] = []

    def entry(copy: Copy, keep: bool) -> dict[str, Any]:
        file, inspected = copy.image.file, copy.inspected
        if inspected is not None:
            thumbnails.append(base64.b64encode(inspected.thumbnail).decode())
        return {
            "path": copy.image.id,
            "digest": copy.image.digest,
            "reason": copy.reason,
            "protected": copy.is_protected,
            "link": None if file is None or file.member else _link(file.path, target),
            "bytes": None if file is None else file.size,
            "width": inspected and inspected.width,
            "height": inspected and inspected.height,
            "resolution": inspected and round(inspected.resolution, 2),
            "thumbnail": None if inspected is None else len(thumbnails) - 1,
            "keep": keep,
            "score": None if keep else round(copy.score, 4),
            "score_means": copy.judged and copy.judged.reason,
            "heatmap": _grid(copy.heatmap),
            "keep_heatmap": _grid(copy.keep_heatmap),
            "region": _region(copy),
            "relation": None if copy.evidence is None else copy.evidence.relation,
        }

    index = {
        "title": title,
        "threshold": found.threshold,
        "scanned": found.scanned,
        "unreadable": unreadable,
        "model": model,
        "normalizer": normalizer,
        "decisions": FORMAT,
        "groups": [
            {
                "members": [entry(each, each is group.keep) for each in group.members],
                "reason": group.reason,
                "leave_alone": group.leave_alone,
                "verdict": group.verdict,
                "related": [{"path": i, "score": round(score, 4)} for i, score in group.related],
            }
            for group in (*found.groups, *found.unsure)
        ],
    }
    page = files("sscd_vec.bank").joinpath("report.html").read_text("utf-8")
    # Each placeholder is filled once: what was filled in is never searched again.
    before, rest = page.split("@INDEX@")
    between, after = rest.split("@THUMBNAILS@")
    target.parent.mkdir(parents=True, exist_ok=True)
    write_whole(target, "".join((before, _json(index), between, _json(thumbnails), after)))


def _json(value: object) -> str:
    """JSON that no HTML parser takes for markup."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def _link(picture: Path, report: Path) -> str:
    """Address of the picture relative to the report, so that a moved pair still works."""
    try:
        relative = os.path.relpath(os.path.abspath(picture), os.path.abspath(report.parent))
    except ValueError:  # another drive
        return picture.absolute().as_uri()
    return quote(os.fsencode(relative).replace(os.sep.encode(), b"/"))


def _region(copy: Copy) -> dict[str, Any] | None:
    """Outlines of what was copied, in the copy and in the one to keep."""
    region = None if copy.evidence is None else copy.evidence.region
    if region is None:
        return None
    outlines = {"copy": region.query, "keep": region.reference}
    return {name: [[round(x, 4), round(y, 4)] for x, y in o] for name, o in outlines.items()}


def _grid(heatmap: Heatmap | None) -> dict[str, Any] | None:
    return None if heatmap is None else grid(heatmap)
