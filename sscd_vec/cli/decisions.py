"""``sscd-vec decisions``: what a person decided about a bank's images; and thresholds from it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sscd_vec.cli.console import (
    CollectionOption,
    InBankOption,
    JsonOption,
    StateOption,
    TokenOption,
    TrustOption,
    count,
    open_bank,
    print_json,
    print_rows,
    warn,
)

if TYPE_CHECKING:
    from sscd_vec.normalize import Calibration, Normalizer


def decisions(
    bank: InBankOption,
    add: Annotated[
        Path | None, typer.Option("--add", help="Take over a file that a report saved.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write all decisions to a file.")
    ] = None,
    collection: CollectionOption = None,
    state: StateOption = None,
    milvus_token: TokenOption = None,
    trust: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """List, add or export what you decided: which images are copies, and which are not.

    Decisions name images by the SHA-256 of their content. search and dedup respect them whatever
    the score says.

        sscd-vec decisions --in bank.faiss --add decisions.json
        sscd-vec decisions --in bank.faiss --out all.json
    """
    from sscd_vec.bank.decisions import Decisions

    new = None if add is None else Decisions.load(add)
    with open_bank(
        bank, collection=collection, state=state, token=milvus_token, trust=trust
    ) as opened:
        if new is not None:
            opened.add_decisions(new)
        found = opened.decisions()
        names = {image.digest: image.id for image in opened.images()}
    if out is not None:
        found.save(out)
    if as_json:
        print_json(found.to_dict())
        return
    rows = [
        (
            names.get(one.first, one.first),
            names.get(one.second, one.second),
            "" if one.score is None else one.score,
            "copy" if one.is_copy else "not a copy",
        )
        for one in found
    ]
    print_rows(["image", "other", "score", "decision"], rows)
    warn(f"{count(len(found), 'decision')}, {count(len(found.kept), 'image')} chosen to keep")


def threshold_from(
    path: Path, normalizer: "Normalizer", precision: float, force: bool = False
) -> "Calibration":
    """The threshold of symmetric scores that people's decisions ask for.

    Raises:
        CalibrationError: There are too few, or of one kind only, and it is not forced.
        ValueError: They were made with another normalizer.
    """
    from sscd_vec.bank.decisions import Decisions
    from sscd_vec.normalize import precision_threshold
    from sscd_vec.normalize.calibration.precision import trusted

    found = Decisions.load(path)
    if found.normalizer != normalizer.query_fingerprint:
        raise ValueError(
            f"{path}: its scores were made with normalizer {found.normalizer or 'unknown'}, this "
            f"one is {normalizer.query_fingerprint}; export the decisions again from a bank or a "
            "report made with this one"
        )
    scored = [(one, one.score) for one in found if one.score is not None]
    if not scored:
        raise ValueError(f"{path}: expected decisions with scores, got none")
    found_threshold = precision_threshold(
        [score for _, score in scored],
        [one.is_copy for one, _ in scored],
        precision,
        kind="symmetric",
        query_ids=[one.first for one, _ in scored],
    )
    return trusted(found_threshold, normalizer.largest_score, force)
