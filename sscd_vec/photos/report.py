"""The report on copies: one HTML file that needs nothing else, offline, on a phone, in the dark.

The page (``report.html``) carries two JSON blocks: an index of groups, which it filters and sorts,
and the thumbnails, which it decodes as they come into view. Heatmaps are kept as the small grids
the network gives, a few hundred bytes each, and are painted over the picture when asked for.
"""

import base64
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from sscd_vec.photos.folder import shown
from sscd_vec.photos.heat_grid import grid
from sscd_vec.photos.quality import Picture

Heatmap = NDArray[np.floating]  # (h, w), larger is more alike


@dataclass(frozen=True)
class Copy:
    """A picture that is a copy of the one to keep.

    Attributes:
        picture: The file.
        score: Symmetric score with the one to keep.
        heatmap: Which part of it matches the one to keep.
        keep_heatmap: Which part of the one to keep it matches.
    """

    picture: Picture
    score: float
    heatmap: Heatmap | None = None
    keep_heatmap: Heatmap | None = None


@dataclass(frozen=True)
class CopyGroup:
    """One group of the report.

    Attributes:
        keep: The picture to keep.
        copies: The others.
        related: Paths with a score: copies of one member that are not copies of the group.
    """

    keep: Picture
    copies: tuple[Copy, ...]
    related: tuple[tuple[Path, float], ...] = ()


def write_report(
    path: str | os.PathLike[str],
    groups: Sequence[CopyGroup],
    *,
    threshold: float,
    scanned: int,
    unreadable: int = 0,
    model: str = "",
    title: str = "Copies",
) -> None:
    """Write the report, whole or not at all.

    Args:
        path: The HTML file.
        groups: What was found.
        threshold: The score above which a pair counted as a copy.
        scanned: How many images were compared.
        unreadable: How many files could not be read.
        model: Which encoder was used, for the headline.
        title: The headline.
    """
    target = Path(path)
    thumbnails: list[str] = []

    def entry(picture: Picture, **more: object) -> dict[str, Any]:
        thumbnails.append(base64.b64encode(picture.thumbnail).decode())
        return {
            "path": shown(picture.path),
            "link": _link(picture.path, target),
            "bytes": picture.file_size,
            "width": picture.width,
            "height": picture.height,
            "resolution": round(picture.resolution, 2),
            "thumbnail": len(thumbnails) - 1,
            **more,
        }

    index = {
        "title": title,
        "threshold": threshold,
        "scanned": scanned,
        "unreadable": unreadable,
        "model": model,
        "groups": [
            {
                "members": [
                    entry(group.keep, keep=True),
                    *(
                        entry(
                            copy.picture,
                            keep=False,
                            score=round(copy.score, 4),
                            heatmap=_grid(copy.heatmap),
                            keep_heatmap=_grid(copy.keep_heatmap),
                        )
                        for copy in group.copies
                    ),
                ],
                "related": [
                    {"path": shown(other), "score": round(score, 4)}
                    for other, score in group.related
                ],
            }
            for group in groups
        ],
    }
    page = files("sscd_vec.photos").joinpath("report.html").read_text("utf-8")
    # Each placeholder is filled once: what was filled in is never searched again.
    before, rest = page.split("@INDEX@")
    between, after = rest.split("@THUMBNAILS@")
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.writelines((before, _json(index), between, _json(thumbnails), after))
        os.chmod(partial, 0o644)
        os.replace(partial, target)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise


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


def _grid(heatmap: Heatmap | None) -> dict[str, Any] | None:
    return None if heatmap is None else grid(heatmap)
