"""``sscd-vec compare``: are these two images copies?"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sscd_vec.cli.console import (
    NO_MATCH,
    DeviceOption,
    ExitCodeOption,
    Failure,
    JsonOption,
    ModelOption,
    NormalizerOption,
    ThresholdOption,
    VerifyOption,
    print_json,
    print_rows,
    say,
)
from sscd_vec.cli.search import evidence_json
from sscd_vec.files import ImageFile, printable_path, staging

if TYPE_CHECKING:
    from PIL.Image import Image

    from sscd_vec.bank.describe import ImageEncoder
    from sscd_vec.bank.setup import Setup
    from sscd_vec.verify import Evidence, Polygon, Region

PANEL_HEIGHT, GAP = 480, 12  # pixels
OUTLINE = (255, 212, 0)


def compare(
    first: Annotated[Path, typer.Argument(metavar="A", help="An image.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Another one.")],
    model: ModelOption = None,
    normalizer: NormalizerOption = None,
    threshold: ThresholdOption = None,
    heatmap: Annotated[
        Path | None, typer.Option("--heatmap", help="Write a PNG of what matched here.")
    ] = None,
    verify: VerifyOption = False,
    outlines: Annotated[
        Path | None,
        typer.Option("--outlines", help="With --verify: write a PNG with what was copied here."),
    ] = None,
    device: DeviceOption = None,
    exit_code: ExitCodeOption = False,
    as_json: JsonOption = False,
) -> None:
    """Compare two images: score, verdict, heatmap.

    Neither image is the query, so the score is the smaller of the two directions. The verdict is
    copy, look (a person should), unsure (with the reason) or no, as in a bank of 1 000 images.

    With --verify geometry has its say: one score of everything, with a threshold of its own, which
    image is a part of the other, and outlines of what was copied (--outlines, --heatmap, --json).

        sscd-vec compare a.jpg b.jpg --heatmap matched.png
        sscd-vec compare a.jpg b.jpg --verify --outlines copied.png
    """
    from sscd_vec.bank.judging import judge_pair, look_closely, verified
    from sscd_vec.bank.setup import Setup

    if outlines is not None and not verify:
        raise Failure("--outlines shows what --verify finds: add --verify")

    for path in (first, second):
        if path.is_dir():
            raise Failure(
                f"{printable_path(path)} is a folder: name an image, or find the copies in it with "
                "`sscd-vec dedup`"
            )
        if not path.is_file():
            raise Failure(f"{printable_path(path)}: no such file")
    setup = Setup.without_bank(model, normalizer, device=device)
    encoder, fitted = setup.encoder, setup.normalizer
    rows = encoder.encode([first, second], show_progress=False)
    verdict = judge_pair(fitted, rows, (first, second), None if verify else threshold)
    evidence = None
    if verify:
        evidence = _verify(setup, first, second, verdict.score)
        least = evidence.threshold if threshold is None else threshold
        proof = look_closely(first, second, evidence) if verdict.in_doubt else None
        verdict = verified(verdict, evidence, least, proof)
    limit = verdict.threshold
    region = None if evidence is None else evidence.region
    if heatmap is not None:
        heatmap_pair(encoder, first, second, heatmap, region)
        say(f"heatmap: {heatmap}")
    if outlines is not None:
        _write_sheet([_panel(first), _panel(second)], region, outlines)
        say(f"outlines: {outlines}")
    if as_json:
        print_json(
            {
                "a": str(first),
                "b": str(second),
                **verdict.to_dict(),
                "cosine": round(float(rows[0] @ rows[1]), 5),
                "threshold": limit,
                "heatmap": None if heatmap is None else str(heatmap),
            }
            | ({} if evidence is None else {"verified": evidence_json(evidence)})
        )
    else:
        title = "" if limit is None else f"a copy scores at least {limit:.3f}"
        row = [verdict.score, verdict.grade, verdict.reason]
        row += [] if evidence is None else [_said(evidence)]
        print_rows(["score", "verdict", "reason", "a and b"][: len(row)], [row], title=title)
    if exit_code and not verdict.is_copy:
        raise typer.Exit(NO_MATCH)


def heatmap_pair(
    encoder: "ImageEncoder",
    first: Path | ImageFile,
    second: Path | ImageFile,
    target: Path,
    region: "Region | None" = None,
) -> None:
    """Write both images side by side, painted with where they match and with the outlines."""
    from sscd_vec.encoder.heatmap import paint_heatmap

    panels = [_panel(first), _panel(second)]
    heats = [encoder.heatmap(panels[0], panels[1]), encoder.heatmap(panels[1], panels[0])]
    top = max(float(heat.max()) for heat in heats)
    painted = [
        paint_heatmap(panel, heat, top=top) for panel, heat in zip(panels, heats, strict=True)
    ]
    _write_sheet(painted, region, target)


def _verify(setup: "Setup", first: Path, second: Path, score: float) -> "Evidence":
    from sscd_vec.bank.second_stage import compare_images
    from sscd_vec.encoder.images import load_pixels

    return compare_images(setup, load_pixels(first), load_pixels(second), score)


def _said(evidence: "Evidence") -> str:
    """In words, which image contains which."""
    words = {
        "same": "show the same",
        "part": "a is a part of b",
        "whole": "b is a part of a",
        "overlap": "share a part",
        "unknown": "nothing located",
    }
    mirrored = evidence.located and evidence.mirrored
    return words[evidence.relation] + (", mirrored" if mirrored else "")


def _panel(source: Path | ImageFile) -> "Image":
    """An image as high as the sheet."""
    from PIL import Image

    from sscd_vec.encoder.images import load_pixels

    image = Image.fromarray(load_pixels(source))
    width = max(1, round(image.width * PANEL_HEIGHT / image.height))
    return image.resize((width, PANEL_HEIGHT), Image.Resampling.LANCZOS)


def _write_sheet(panels: "list[Image]", region: "Region | None", target: Path) -> None:
    from PIL import Image

    if region is not None:
        _draw(panels[0], region.query)
        _draw(panels[1], region.reference)
    sheet = Image.new("RGB", (sum(p.width for p in panels) + GAP, PANEL_HEIGHT), (255, 255, 255))
    sheet.paste(panels[0], (0, 0))
    sheet.paste(panels[1], (panels[0].width + GAP, 0))
    target.parent.mkdir(parents=True, exist_ok=True)
    kind = Image.registered_extensions().get(target.suffix.lower(), "PNG")
    with staging(target) as staged:
        sheet.save(staged, kind)


def _draw(panel: "Image", outline: "Polygon") -> None:
    """An outline, dark below light so that it is seen on any image."""
    from PIL import ImageDraw

    corners = [(x * (panel.width - 1), y * (panel.height - 1)) for x, y in outline]
    pen = ImageDraw.Draw(panel)
    for colour, width in (((0, 0, 0), 7), (OUTLINE, 3)):
        pen.line([*corners, *corners[:2]], colour, width, joint="curve")
