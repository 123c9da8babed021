"""``sscd-vec search``: is this image in the bank?"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from sscd_vec.cli.console import (
    NO_MATCH,
    SOME_UNREADABLE,
    CollectionOption,
    DeviceOption,
    ExitCodeOption,
    InBankOption,
    JsonOption,
    ModelOption,
    NormalizerOption,
    StateOption,
    ThresholdOption,
    TokenOption,
    TrustOption,
    list_unreadable,
    open_bank,
    plain,
    print_json,
    print_rows,
    say,
    unreadable_json,
    warn,
)
from sscd_vec.files import Unreadable, find_images, printable_path

if TYPE_CHECKING:
    from sscd_vec.bank import Answer, Bank


def search(
    images: Annotated[list[Path], typer.Argument(help="Images to look for, or folders of them.")],
    bank: InBankOption,
    k: Annotated[int, typer.Option("-k", min=1, max=1000, help="Matches per image.")] = 5,
    threshold: ThresholdOption = None,
    heatmap: Annotated[
        Path | None,
        typer.Option("--heatmap", help="Write a PNG of what matched (one image, best match)."),
    ] = None,
    tiles: Annotated[
        int,
        typer.Option(
            "--tiles",
            min=1,
            max=4,
            help="Also search overlapping crops of each image, 1/N of each side: finds partial "
            "copies, at 10 times the cost for 2, with a threshold of its own.",
        ),
    ] = 1,
    scales: Annotated[
        Literal["auto", "one", "both"],
        typer.Option(
            "--scales",
            help="Look at each image at twice the size too, which finds copies inside collages and "
            "on other backgrounds: when the first look finds no copy (auto), never (one) or always "
            "(both). The second look costs as much as four.",
        ),
    ] = "auto",
    model: ModelOption = None,
    normalizer: NormalizerOption = None,
    collection: CollectionOption = None,
    state: StateOption = None,
    milvus_token: TokenOption = None,
    trust: TrustOption = False,
    device: DeviceOption = None,
    exit_code: ExitCodeOption = False,
    as_json: JsonOption = False,
) -> None:
    """Look for images in a bank: best matches, scores, and whether they are copies.

    The verdict compares the score with the threshold calibrated for the bank's model (kind
    "search"; "tiled" with --tiles). In a pipe it prints IMAGE, MATCH, SCORE and VERDICT,
    separated by tabs.

        sscd-vec search suspect.jpg --in bank.faiss
        sscd-vec search suspects/ --in bank.faiss --json
    """
    problems: list[Unreadable] = []
    files = find_images(list(images), problems.append)
    with open_bank(
        bank,
        model=model,
        normalizer=normalizer,
        threshold=threshold,
        collection=collection,
        state=state,
        token=milvus_token,
        trust=trust,
        device=device,
    ) as opened:
        limit = opened.threshold_of(opened.score_kind(tiles))
        answers = []
        for file, answer in zip(
            files, opened.search_many(files, k, tiles=tiles, scales=scales), strict=True
        ):
            if answer.error:
                problems.append(Unreadable(file.path, answer.error))
            else:
                answers.append(answer)
        drawn = heatmap is not None and _write_heatmap(opened, files, answers, heatmap)
        place = str(opened)
    if as_json:
        print_json(
            {
                "bank": place,
                "threshold": limit,
                "results": [_document(answer) for answer in answers],
                "heatmap": str(heatmap) if drawn else None,
                "unreadable": unreadable_json(problems),
            }
        )
    else:
        _print(answers, limit)
        list_unreadable(problems)
    if problems:
        raise typer.Exit(SOME_UNREADABLE)
    if exit_code and not any(match.is_copy for answer in answers for match in answer.matches):
        raise typer.Exit(NO_MATCH)


def verdict(copy: bool | None) -> str:
    """A verdict in words."""
    return {True: "copy", False: "no copy", None: "no threshold"}[copy]


def _document(answer: "Answer") -> dict[str, Any]:
    return {
        "image": answer.image,
        "matches": [
            {"id": match.id, "score": round(match.score, 5), "copy": match.is_copy}
            for match in answer.matches
        ],
    }


def _print(answers: "list[Answer]", limit: float | None) -> None:
    rows = [
        (answer.image, match.id, match.score, verdict(match.is_copy))
        for answer in answers
        for match in answer.matches
    ]
    title = "no threshold is calibrated: judge the scores yourself"
    if limit is not None:
        title = f"a copy scores at least {limit:.3f}"
    print_rows(["image", "match", "score", "verdict"], rows, title=title)


def _write_heatmap(bank: "Bank", files: list[Any], answers: "list[Answer]", target: Path) -> bool:
    """Draw what matched; say why where that is not possible."""
    from sscd_vec.cli.compare import heatmap_pair

    if len(files) != 1:
        warn(f"no heatmap: --heatmap explains one image, got {len(files)}; search it alone")
        return False
    if not answers or not answers[0].matches:
        return False
    match = answers[0].matches[0]
    if match.image is None or match.image.file is None or not match.image.file.path.exists():
        warn(f"no heatmap: the file of {plain(match.id)} is not at hand")
        return False
    if not bank.may_show(match.image.file.path):
        warn(f"no heatmap: {printable_path(match.image.file.path)} is outside what the bank's "
             "settings allow; pass --trust if you trust this bank")  # fmt: skip
        return False
    heatmap_pair(bank.encoder, files[0], match.image.file, target)
    say(f"heatmap: {target}")
    return True
