"""Verdicts on images: what the normalizer says about a score, and the pixels where it cannot say.

A score between two images outside what the normalizer knows (documents, charts, screenshots) says
little. Their pixels are compared instead (``exact``): a resaved, resized or lightly cropped copy
is found, everything else stays *unsure*. Geometry alone makes no copies of them either: two pages
of one form share lines and boxes. Laid on each other by that alignment, their pixels do
(``look_closely``).
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sscd_vec.bank.exact import SecondLook, load_prepared
from sscd_vec.bank.results import BankMatch
from sscd_vec.bank.views import best_hits
from sscd_vec.encoder.images import ImageError, ImageInput
from sscd_vec.normalize import Grade, Kind, Normalizer, Outside, Proof, Verdict
from sscd_vec.normalize.verdict import ALIKE
from sscd_vec.verify.everywhere import agree_everywhere

if TYPE_CHECKING:
    from sscd_vec.adapters.matches import Match
    from sscd_vec.bank.bank import Bank
    from sscd_vec.verify import Evidence

Float32 = NDArray[np.float32]
TELLING = 64  # keypoints: of fewer, that they do not align says nothing
NOT_FOUND = "too little of one is found in the other"
SECOND_LOOKS = 3  # a copy of a document is the best match in 99 of 100 searches


def judge_hits(
    bank: "Bank",
    hits: Sequence[Iterable["Match"]],
    outside: Outside,
    k: int,
    *,
    image: "ImageInput | None" = None,
    threshold: float | None = None,
    penalty: float = 0.0,
) -> list[BankMatch]:
    """The ``k`` best images among an index's hits, each with its verdict.

    Args:
        bank: Where they were found.
        hits: What the index found for each view of the query, the whole image first.
        outside: Which of the views lie outside what the normalizer knows.
        k: At most this many images.
        image: The query, for a second look; without it some verdicts stay *unsure*.
        threshold: The score of a copy, instead of the calibrated one.
        penalty: What every score loses.
    """
    kind, views = bank.score_kind(len(hits)), bank.compared_views(len(hits))
    scored = [[(str(hit.id), float(hit.score) - penalty) for hit in view] for view in hits]
    metadata = {str(hit.id): hit.metadata for view in hits for hit in view}
    second_look, looks = SecondLook(image), SECOND_LOOKS
    size, matches = len(bank), []
    for name, score, view in best_hits(scored)[:k]:
        judge = partial(bank.normalizer.judge, score, size, kind, views=views, threshold=threshold)
        known, verdict = bank.get(name), judge()
        if outside.flags[view] and (known is None or known.outside is not False):
            proof = None
            if looks and verdict.grade != "no":
                proof, looks = second_look(bank.shown_file(known)), looks - 1
            verdict = judge(in_doubt=True, shift=float(outside.shifts[view]), proof=proof)
        matches.append(BankMatch(name, score, verdict, known, metadata.get(name)))
    return matches


def verified(
    judged: Verdict, evidence: "Evidence", threshold: float, proof: Proof | None = None
) -> Verdict:
    """The verdict on a pair after verification, with the verifier's score and threshold.

    Two pages of one form share lines and boxes, so geometry alone makes no copies of images that
    are in doubt: only their pixels do.

    Args:
        judged: The verdict by descriptors, and by pixels where the pair is in doubt.
        evidence: What geometry says.
        threshold: Least verified score of a copy.
        proof: What a close look at a pair in doubt found (``look_closely``).
    """
    found = replace(judged, score=evidence.score, threshold=threshold)
    if judged.basis == "pixels":
        return found
    found = replace(found, basis="geometry")
    places = f"verified: {evidence.cells} places of both align"
    if judged.in_doubt and proof is not None and proof.is_copy is not None:
        return replace(found, grade="copy" if proof.is_copy else "no", reason=proof.reason)
    if evidence.score >= threshold:
        if judged.in_doubt:
            why = ALIKE if proof is None else proof.reason
            return replace(found, grade="unsure", reason=f"{places}; {why}")
        if evidence.doubt:
            return replace(found, grade="look", reason=f"{places}; {evidence.doubt}")
        return replace(found, grade="copy", reason=places)
    if judged.grade == "unsure" and evidence.visible < TELLING:
        return replace(found, grade="unsure", reason=f"{ALIKE}, and too plain to be aligned")
    grade: Grade = "look" if judged.grade == "copy" else "no"
    return replace(found, grade=grade, reason=f"not verified: {NOT_FOUND}")


def look_closely(
    query: "ImageInput | None", reference: "ImageInput | None", evidence: "Evidence | None"
) -> Proof | None:
    """What the aligned pixels say: the same everywhere, different in many places, or neither.

    Args:
        query: The image that geometry took as the query; None if it is not at hand.
        reference: The other one, likewise.
        evidence: What geometry says.

    Returns:
        None if there is nothing to compare.
    """
    if query is None or reference is None or evidence is None or evidence.transform is None:
        return None
    try:
        first, second = load_prepared(query), load_prepared(reference)
    except ImageError as error:  # gone, or changed since it was added
        return Proof(None, f"their pixels could not be compared: {error.reason}", "geometry")
    found = agree_everywhere(first, second, np.array(evidence.transform))
    return Proof(found.is_copy, found.reason, "geometry")


def judge_pair(
    normalizer: Normalizer,
    descriptors: Float32,
    images: tuple[ImageInput, ImageInput],
    threshold: float | None = None,
) -> Verdict:
    """The verdict on two images of which neither is the query.

    Args:
        normalizer: Whose scores.
        descriptors: ``(2, d)`` theirs.
        images: The images themselves, for a second look.
        threshold: The symmetric score of a copy, instead of the calibrated one.
    """
    whitened = normalizer.whiten(descriptors)
    biases, outside = normalizer.whitened_biases(whitened), normalizer.outside(whitened)
    score = float(whitened[0] @ whitened[1] - biases.max())
    kind: Kind = "symmetric"
    verdict = normalizer.judge(score, kind=kind, threshold=threshold)
    if not outside.flags.all() or verdict.grade == "no":
        return verdict
    return normalizer.judge(
        score,
        kind=kind,
        threshold=threshold,
        in_doubt=True,
        shift=float((biases + outside.shifts).max() - biases.max()),
        proof=SecondLook(images[0])(images[1]),
    )
