"""``sscd-vec demo``: the whole library in a minute, with nothing to download."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sscd_vec.cli.console import JsonOption, count, print_json, print_rows, say
from sscd_vec.progress import progress_bar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from sscd_vec.encoder import Encoder
    from sscd_vec.normalize import Normalizer

ORIGINALS = 16
UNRELATED = 4
# Seeds of images that are in no bank: to whiten with, and (others) to calibrate on.
BACKGROUND, HELD_OUT = range(1000, 1120), range(2000, 2096)
FALSE_MATCHES = 1e-3  # per comparison, on the held-out images


@dataclass(frozen=True)
class _Query:
    path: Path
    edit: str
    original: str | None


def demo(
    folder: Annotated[Path, typer.Argument(help="Where to put everything.")] = Path("sscd-demo"),
    as_json: JsonOption = False,
) -> None:
    """See it work: draw images, edit copies, index, search, report. Nothing is downloaded.

    Draws 16 images and 24 edited copies of them (resaved, cropped, filtered, captioned, framed,
    mirrored) plus 4 unrelated ones; indexes the originals in a FAISS file and in a Milvus Lite
    file; searches both for the rest; prints the matches and writes report.html with the groups
    of copies.

        sscd-vec demo
        sscd-vec demo ~/sscd-demo --json
    """
    from sscd_vec.bank import Bank

    queries = _draw_images(folder)
    encoder, normalizer, label = _model()
    answers: dict[str, list[tuple[str, float]]] = {}
    for backend, name in (("faiss", "bank.faiss"), ("milvus", "bank.db")):
        _forget(folder / name)
        say(f"indexing {ORIGINALS} images in {folder / name} …")
        with Bank(folder / name, model=encoder, normalizer=normalizer) as bank:
            bank.add(folder / "images")
            found = bank.search_many([query.path for query in queries], k=1)
            answers[backend] = [
                (Path(answer.matches[0].id).name, answer.matches[0].score) for answer in found
            ]

    threshold = normalizer.threshold()
    rows = [
        {
            "query": query.path.name,
            "edit": query.edit,
            "best_match": answers["faiss"][number][0],
            "score_faiss": round(answers["faiss"][number][1], 4),
            "score_milvus": round(answers["milvus"][number][1], 4),
            "copy": answers["faiss"][number][1] >= threshold,
            "right": _is_right(query, answers["faiss"][number], threshold),
        }
        for number, query in enumerate(queries)
    ]
    report = folder / "report.html"
    groups, kept = _write_report(report, folder, encoder, normalizer, label)
    _print(rows, threshold, label, report, groups, kept, as_json)


def _draw_images(folder: Path) -> list[_Query]:
    import numpy as np
    from PIL import Image

    from sscd_vec.cli.pictures import EDITS, draw

    for part in ("images", "queries"):
        (folder / part).mkdir(parents=True, exist_ok=True)
        for old in (folder / part).glob("*.jpg"):
            old.unlink()
    queries = []
    names = list(EDITS)
    with progress_bar("drawing", ORIGINALS + UNRELATED) as bar:
        for seed in range(ORIGINALS):
            original = draw(seed)
            name = f"picture-{seed:02}.jpg"
            original.save(folder / "images" / name, quality=92)
            with Image.open(folder / "images" / name) as saved:
                original = saved.convert("RGB")
            for step in range(1 + seed % 2):
                edit = names[(seed + 3 * step + seed // 6) % len(names)]
                path = folder / "queries" / f"picture-{seed:02}-{edit}.jpg"
                edited = EDITS[edit](original, np.random.default_rng((11, seed, step)))
                edited.save(path, quality=70)
                queries.append(_Query(path, edit, name))
            bar.advance()
        for seed in range(500, 500 + UNRELATED):
            path = folder / "queries" / f"unrelated-{seed}.jpg"
            draw(seed).save(path, quality=85)
            queries.append(_Query(path, "unrelated", None))
            bar.advance()
    return queries


def _model() -> tuple["Encoder", "Normalizer", str]:
    """The shipped model, with a normalizer fitted here.

    The one that ships was fitted on photos. To it all drawn images look alike: scores are
    calibrated on images like those they are used on.
    """
    from sscd_vec import models
    from sscd_vec.encoder import Encoder

    encoder = Encoder.from_pretrained()
    return encoder, _fit(encoder), models.stable_name(None)


def _fit(encoder: "Encoder") -> "Normalizer":
    from sscd_vec.normalize import Normalizer

    fitted = Normalizer.fit(_encode_drawn(encoder, BACKGROUND), eps="oas", encoder=encoder)
    held_out = _encode_drawn(encoder, HELD_OUT)
    for kind in ("search", "symmetric"):
        fitted = fitted.calibrate(
            held_out, false_match_rate=FALSE_MATCHES, per="comparison", kind=kind
        )
    return fitted


def _encode_drawn(encoder: "Encoder", seeds: range) -> "NDArray[np.float32]":
    from sscd_vec.cli.pictures import draw

    with progress_bar("drawing background images", len(seeds)) as bar:
        images = []
        for seed in seeds:
            images.append(draw(seed))
            bar.advance()
    return encoder.encode(images, show_progress=False)


def _write_report(
    report: Path, folder: Path, encoder: "Encoder", normalizer: "Normalizer", label: str
) -> tuple[int, int]:
    """Write the report; return how many groups there are, and how many keep the original."""
    from sscd_vec.bank import Bank
    from sscd_vec.bank.report import write_report

    with Bank(model=encoder, normalizer=normalizer) as bank:
        bank.add([folder / "images", folder / "queries"])
        found = bank.duplicates(heatmaps=True)
        fingerprint = bank.normalizer.query_fingerprint
    title = f"Copies in {folder.name}"
    write_report(report, found, model=label, title=title, normalizer=fingerprint)
    originals = (folder / "images").resolve()
    kept = [group.keep.image.file for group in found.groups if group.is_sure]
    return len(found.groups), sum(
        file is not None and originals in file.path.parents for file in kept
    )


def _is_right(query: _Query, answer: tuple[str, float], threshold: float) -> bool:
    best, score = answer
    if query.original is None:
        return score < threshold
    return best == query.original and score >= threshold


def _forget(index: Path) -> None:
    """Remove what an earlier demo left."""
    import shutil

    for path in (index, Path(f"{index}.bank"), Path(f"{index}.sidecar")):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _print(
    rows: Sequence[dict[str, Any]],
    threshold: float,
    label: str,
    report: Path,
    groups: int,
    kept: int,
    as_json: bool,
) -> None:
    copies = [row for row in rows if row["edit"] != "unrelated"]
    found = sum(row["right"] for row in copies)
    false = sum(row["copy"] for row in rows if row["edit"] == "unrelated")
    if as_json:
        print_json(
            {
                "model": label,
                "threshold": threshold,
                "copies": len(copies),
                "copies_found": found,
                "false_matches": false,
                "report": str(report),
                "groups": groups,
                "originals_kept": kept,
                "matches": rows,
            }
        )
        return
    print_rows(
        ["query", "best match", "FAISS", "Milvus", "verdict"],
        [
            (
                row["query"],
                row["best_match"],
                row["score_faiss"],
                row["score_milvus"],
                "copy" if row["copy"] else "no copy",
            )
            for row in rows
        ],
        title=f"model: {label}, a copy scores at least {threshold:.3f}",
    )
    say(f"\n{found} of {len(copies)} copies found, {false} of {UNRELATED} unrelated called a copy.")
    say(f"The original is the one to keep in {kept} of {count(groups, 'group')} of copies.")
    say(f"{report} shows them: open it in a browser.")
