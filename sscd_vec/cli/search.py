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
    VerifyOption,
    list_unreadable,
    open_bank,
    plain,
    print_json,
    print_rows,
    say,
    unreadable_json,
    warn,
    warn_of_nothing,
)
from sscd_vec.files import Unreadable, find_images, printable_path
from sscd_vec.shards import holds_descriptors

if TYPE_CHECKING:
    from sscd_vec.bank import Answer, Bank
    from sscd_vec.verify import Evidence, Polygon


def search(
    images: Annotated[
        list[Path],
        typer.Argument(help="Images to look for, folders of them, or Parquet of descriptors."),
    ],
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
    verify: VerifyOption = False,
    candidates: Annotated[
        int,
        typer.Option("--candidates", min=1, max=1000, help="With --verify: how many per image."),
    ] = 20,
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

    The verdict is copy (fewer than 1 stranger in 1 000 scores so high in a bank of this size), look
    (a person should), unsure (with the reason) or no. In a pipe it prints IMAGE, MATCH, SCORE,
    VERDICT and REASON, separated by tabs.

    With --verify the best candidates are compared point by point: one score of everything, with a
    threshold of its own, and outlines of what was copied (--json; --heatmap draws them). Every
    image of a collage is found. `index --local` keeps what this needs of the bank's images.

        sscd-vec search suspect.jpg --in bank.faiss
        sscd-vec search suspects/ --in bank.faiss --json
        sscd-vec search collage.jpg --in bank.faiss --verify --tiles 2
    """
    from sscd_vec.bank.views import crop_count

    problems: list[Unreadable] = []
    described = [path for path in images if holds_descriptors(path)]
    files = find_images([p for p in images if p not in described], problems.append)
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
        verify=verify and candidates,
    ) as opened:
        views = opened.compared_views(crop_count(tiles))
        limit = None if verify else opened.threshold_of(opened.score_kind(tiles), views)
        answers = []
        for given in described:
            answers += _searched(opened, given, k, problems)
        for file, answer in zip(
            files,
            opened.search_many(files, k, tiles=tiles, scales=scales, show_progress=None),
            strict=True,
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
        if not (answers or problems):
            warn_of_nothing(images)
        _print(answers, limit, verified=verify)
        list_unreadable(problems)
    if problems:
        raise typer.Exit(SOME_UNREADABLE)
    if exit_code and not any(match.is_copy for answer in answers for match in answer.matches):
        raise typer.Exit(NO_MATCH)


def _searched(bank: "Bank", place: Path, k: int, problems: list[Unreadable]) -> "list[Answer]":
    """Answers for a file of descriptors; images that have none are problems."""
    answers = list(bank.search_many(place, k))
    problems += [Unreadable(Path(answer.image), answer.error) for answer in answers if answer.error]
    return [answer for answer in answers if not answer.error]


def _document(answer: "Answer") -> dict[str, Any]:
    return {
        "image": answer.image,
        "matches": [
            {"id": match.id, **match.to_dict()}
            | ({} if match.evidence is None else {"verified": evidence_json(match.evidence)})
            for match in answer.matches
        ],
    }


def evidence_json(evidence: "Evidence") -> dict[str, Any]:
    """What verification found, for programs; corners go from (0, 0) to (1, 1)."""
    region = evidence.region
    return {
        "relation": evidence.relation,
        "mirrored": evidence.mirrored if region else None,
        "region": region and {name: _corners(part) for name, part in region._asdict().items()},
        "cells": evidence.cells,
        "agreeing": round(evidence.agreeing, 3),
        "descriptor_score": evidence.descriptor_score and round(evidence.descriptor_score, 5),
    }


def _corners(polygon: "Polygon") -> list[list[float]]:
    return [[round(x, 4), round(y, 4)] for x, y in polygon]


def _print(answers: "list[Answer]", limit: float | None, *, verified: bool) -> None:
    rows = [
        (answer.image, match.id, match.score, match.verdict, match.reason)
        for answer in answers
        for match in answer.matches
    ]
    title = "no threshold is calibrated: judge the scores yourself"
    if verified:
        title = "verified scores: how sure a copy is, 0 to 1"
    elif limit is not None:
        title = f"a copy scores at least {limit:.3f}"
    print_rows(["image", "match", "score", "verdict", "reason"], rows, title=title)


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
    heatmap_pair(bank.encoder, files[0], match.image.file, target, match.region)
    say(f"heatmap: {target}")
    return True
