"""``sscd-vec search``: is this image in the bank?"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sscd_vec.cli.console import (
    NO_MATCH,
    SOME_UNREADABLE,
    DeviceOption,
    JsonOption,
    list_unreadable,
    plain,
    print_json,
    print_rows,
    say,
    warn,
)
from sscd_vec.cli.index import CollectionOption, StateOption, TokenOption

if TYPE_CHECKING:
    from sscd_vec.encoder import Encoder
    from sscd_vec.photos.bank import Hit

ExitCodeOption = Annotated[
    bool, typer.Option("--exit-code", help="Exit with 4 if no copy is found.")
]
ThresholdOption = Annotated[
    float | None,
    typer.Option("--threshold", help="Least score of a copy; the calibrated one by default."),
]


def search(
    images: Annotated[list[Path], typer.Argument(help="Images to look for, or folders of them.")],
    bank: Annotated[str, typer.Option("--in", help="The bank: what `index --to` was given.")],
    k: Annotated[int, typer.Option("-k", min=1, max=1000, help="Matches per image.")] = 5,
    threshold: ThresholdOption = None,
    heatmap: Annotated[
        Path | None,
        typer.Option("--heatmap", help="Write a picture of what matched (one image, best match)."),
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
    collection: CollectionOption = "photos",
    state: StateOption = None,
    milvus_token: TokenOption = None,
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
    from sscd_vec.cli.session import open_encoder, threshold_for
    from sscd_vec.photos.bank import Bank, without_credentials
    from sscd_vec.photos.descriptor_cache import DescriptorCache
    from sscd_vec.photos.folder import Unreadable, find_images, shown

    problems: list[Unreadable] = []
    files = find_images(images, problems.append)
    opened = Bank.open(bank, collection=collection, state=state, token=milvus_token)
    from sscd_vec.photos.encode_files import (
        describe_files,  # loads torch: after what may fail at once
    )

    encoder = open_encoder(opened.settings.model, device)
    opened.normalizer.check_encoder(encoder)
    tiled = tiles > 1 or opened.settings.tiles > 1
    limit = threshold_for(opened.normalizer, "tiled" if tiled else "search", threshold)
    results: list[dict[str, Any]] = []
    found_copy = drawn = False
    for part in describe_files(encoder, files, DescriptorCache(None), tiles=tiles):
        problems += part.unreadable
        for file, hits in zip(part.files, opened.search(part.descriptors, k), strict=True):
            matches = [_match(hit, limit) for hit in hits]
            found_copy = found_copy or any(match["copy"] for match in matches)
            results.append({"image": shown(file.path), "matches": matches})
            if heatmap is not None and len(files) == 1 and hits:
                drawn = _write_heatmap(encoder, file.path, hits[0], heatmap)
    if heatmap is not None and len(files) != 1:
        warn(f"no heatmap: --heatmap explains one image, got {len(files)}; search it alone")
    opened.close()
    unreadable = [(shown(problem.path), problem.reason) for problem in problems]
    if as_json:
        print_json(
            {
                "bank": without_credentials(bank),
                "threshold": limit,
                "results": results,
                "heatmap": str(heatmap) if drawn else None,
                "unreadable": [{"path": p, "reason": r} for p, r in unreadable],
            }
        )
    else:
        _print(results, limit)
        list_unreadable(unreadable)
    if unreadable:
        raise typer.Exit(SOME_UNREADABLE)
    if exit_code and not found_copy:
        raise typer.Exit(NO_MATCH)


def verdict(copy: bool | None) -> str:
    """A verdict in words."""
    return {True: "copy", False: "no copy", None: "no threshold"}[copy]


def _match(hit: "Hit", limit: float | None) -> dict[str, Any]:
    return {
        "id": hit.id,
        "score": round(hit.score, 5),
        "copy": None if limit is None else hit.score >= limit,
    }


def _print(results: list[dict[str, Any]], limit: float | None) -> None:
    rows = [
        (result["image"], match["id"], match["score"], verdict(match["copy"]))
        for result in results
        for match in result["matches"]
    ]
    title = "no threshold is calibrated: judge the scores yourself"
    if limit is not None:
        title = f"a copy scores at least {limit:.3f}"
    print_rows(["image", "match", "score", "verdict"], rows, title=title)


def _write_heatmap(encoder: "Encoder", query: Path, hit: "Hit", target: Path) -> bool:
    """Draw what matched; False, and a word about it, where the match's file is gone."""
    from sscd_vec.cli.compare import heatmap_pair

    if hit.picture is None or not hit.picture.path.exists():
        warn(f"no heatmap: the file of {plain(hit.id)} is not at hand")
        return False
    heatmap_pair(encoder, query, hit.picture.path, target)
    say(f"heatmap: {target}")
    return True
