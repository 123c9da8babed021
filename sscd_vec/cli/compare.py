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
    print_json,
    print_rows,
    say,
)
from sscd_vec.cli.search import verdict
from sscd_vec.files import ImageFile, staging

if TYPE_CHECKING:
    from sscd_vec.bank.describe import ImageEncoder

PANEL_HEIGHT = 480


def compare(
    first: Annotated[Path, typer.Argument(metavar="A", help="An image.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Another one.")],
    model: ModelOption = None,
    normalizer: NormalizerOption = None,
    threshold: ThresholdOption = None,
    heatmap: Annotated[
        Path | None, typer.Option("--heatmap", help="Write a PNG of what matched here.")
    ] = None,
    device: DeviceOption = None,
    exit_code: ExitCodeOption = False,
    as_json: JsonOption = False,
) -> None:
    """Compare two images: score, verdict, heatmap.

    Neither image is the query, so the score is the smaller of the two directions, and the verdict
    uses the threshold of kind "symmetric".

        sscd-vec compare a.jpg b.jpg --heatmap matched.png
    """
    from sscd_vec.bank.setup import Setup

    for path in (first, second):
        if not path.is_file():
            raise Failure(f"{path}: no such file")
    setup = Setup(None, model, device=device)
    setup.make(normalizer, tiles=1)
    encoder, fitted = setup.encoder, setup.normalizer
    rows = encoder.encode([first, second], show_progress=False)
    score = float(fitted.symmetric_scores(rows[:1], rows[1:])[0, 0])
    limit = threshold
    if limit is None and "symmetric" in fitted.thresholds:
        limit = fitted.threshold("symmetric")
    copy = None if limit is None else score >= limit
    if heatmap is not None:
        heatmap_pair(encoder, first, second, heatmap)
        say(f"heatmap: {heatmap}")
    if as_json:
        print_json(
            {
                "a": str(first),
                "b": str(second),
                "score": round(score, 5),
                "cosine": round(float(rows[0] @ rows[1]), 5),
                "threshold": limit,
                "copy": copy,
                "heatmap": None if heatmap is None else str(heatmap),
            }
        )
    else:
        title = "" if limit is None else f"a copy scores at least {limit:.3f}"
        print_rows(["score", "verdict"], [(score, verdict(copy))], title=title)
    if exit_code and not copy:
        raise typer.Exit(NO_MATCH)


def heatmap_pair(
    encoder: "ImageEncoder", first: Path | ImageFile, second: Path | ImageFile, target: Path
) -> None:
    """Write both images side by side, each painted with where it matches the other."""
    import numpy as np
    from PIL import Image

    from sscd_vec.encoder.heatmap import paint_heatmap
    from sscd_vec.encoder.images import load_pixels

    pixels = []
    for source in (first, second):
        image = Image.fromarray(load_pixels(source))
        width = max(1, round(image.width * PANEL_HEIGHT / image.height))
        pixels.append(np.array(image.resize((width, PANEL_HEIGHT), Image.Resampling.LANCZOS)))
    heats = [encoder.heatmap(pixels[0], pixels[1]), encoder.heatmap(pixels[1], pixels[0])]
    top = max(float(heat.max()) for heat in heats)
    panels = [
        paint_heatmap(image, heat, top=top) for image, heat in zip(pixels, heats, strict=True)
    ]
    sheet = Image.new("RGB", (sum(p.width for p in panels) + 12, PANEL_HEIGHT), (255, 255, 255))
    sheet.paste(panels[0], (0, 0))
    sheet.paste(panels[1], (panels[0].width + 12, 0))
    target.parent.mkdir(parents=True, exist_ok=True)
    kind = Image.registered_extensions().get(target.suffix.lower(), "PNG")
    with staging(target) as staged:
        sheet.save(staged, kind)
