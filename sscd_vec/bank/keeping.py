"""From rows that are copies to a ``CopyGroup``: inspect files, choose the one to keep, judge."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from sscd_vec.bank.groups import Group, scores
from sscd_vec.bank.heat_grid import IMAGE_SIDE, coarse, reduced
from sscd_vec.bank.lineage import Choice, Rules, choose
from sscd_vec.bank.pairs import Relate, Scored, Tools
from sscd_vec.bank.quality import InspectedImage, inspect_image
from sscd_vec.bank.records import BankImage
from sscd_vec.bank.results import Copy, CopyGroup
from sscd_vec.encoder.images import ImageError, Pixels, load_pixels
from sscd_vec.files import Unreadable
from sscd_vec.normalize import Proof
from sscd_vec.normalize.verdict import ALIKE
from sscd_vec.progress import ProgressBar

if TYPE_CHECKING:
    from sscd_vec.bank.describe import ImageEncoder

MOST_RELATED = 10


def build_groups(
    copies: Sequence[Group],
    alike: Sequence[Group],
    scored: Scored,
    tools: Tools,
    rules: Rules,
    bar: ProgressBar,
) -> tuple[list[CopyGroup], list[CopyGroup], list[Unreadable]]:
    """Groups as a person sees them; none of only protected copies.

    Args:
        copies: Rows that are copies of each other.
        alike: Rows that only a person can tell apart.
        scored: The images.
        tools: What they are compared with.
        rules: What a person wants to keep.
        bar: Advances by a group at a time.

    Returns:
        Groups of copies with the one to keep, groups that are only shown, and the files that cannot
        be read any more.
    """
    built: list[CopyGroup] = []
    shown: list[CopyGroup] = []
    unreadable: list[Unreadable] = []
    for number, group in enumerate(bar.track([*copies, *alike], "inspecting groups")):
        is_sure = number < len(copies)
        images = [scored.images[row] for row in group.members]
        safe = {image.id for image in images if rules.protects(image.file)}
        if is_sure and len(safe) == len(images):
            continue
        members = _inspect(images, unreadable)
        rows = [row for row in group.members if scored.images[row].id in members]
        if len(rows) < 2:
            continue
        if not is_sure:
            shown.append(_with_verdicts(_build_unsure(rows, members, scored), scored, tools))
            continue
        one = _build(group, rows, members, scored, rules, safe)
        one = _with_verdicts(one, scored, tools)
        if tools.relate is not None:
            one = _with_evidence(one, tools.relate)
        built.append(one if tools.encoder is None else _with_heatmaps(one, tools.encoder()))
    return built, shown, unreadable


def _inspect(
    images: Sequence[BankImage], unreadable: list[Unreadable]
) -> dict[str, InspectedImage | None]:
    """What each image looks like; files that are gone or changed are left out."""
    found: dict[str, InspectedImage | None] = {}
    for image in images:
        try:
            found[image.id] = None if image.file is None else inspect_image(image.file)
        except (OSError, ValueError) as error:
            if image.file is not None:
                unreadable.append(Unreadable(image.file.path, str(error)))
    return found


def _members(
    rows: list[int], keep: int, inspected: dict[str, InspectedImage | None], scored: Scored
) -> list[Copy]:
    """The images of some rows, each with its score with the one at position ``keep``."""
    images = [_image(scored, row) for row in rows]
    found = scores(scored.z, scored.biases, [rows[keep]], rows)[0].tolist()
    return [
        Copy(image, score, inspected[image.id]) for image, score in zip(images, found, strict=True)
    ]


def _image(scored: Scored, row: int) -> BankImage:
    """The image of a row, with whether it lies outside what the normalizer knows."""
    image = scored.images[row]
    if image.outside is not None:
        return image
    return replace(image, outside=bool(scored.outside.flags[row]))


def _build_unsure(
    rows: list[int], inspected: dict[str, InspectedImage | None], scored: Scored
) -> CopyGroup:
    """A group that is only shown; its first image stands for the others."""
    first, *others = _members(rows, 0, inspected, scored)
    copies = tuple(sorted(others, key=lambda copy: -copy.score))
    return CopyGroup(replace(first, score=1.0), copies, leave_alone=ALIKE, verdict="unsure")


def _build(
    group: Group,
    rows: list[int],
    inspected: dict[str, InspectedImage | None],
    scored: Scored,
    rules: Rules,
    safe: set[str],
) -> CopyGroup:
    """Choose the one to keep and score the others with it."""
    images = [scored.images[row] for row in rows]
    seen = [inspected[image.id] for image in images]
    if any(image is None for image in seen):
        at = rows.index(group.hub) if group.hub in rows else 0
        choice = Choice(at, False, "not all of them are files", ("",) * len(rows))
    else:
        files = [image for image in seen if image]
        choice = choose(files, [image.digest for image in images], rules)
    members = [
        replace(copy, reason=why, is_protected=copy.image.id in safe)
        for copy, why in zip(
            _members(rows, choice.keep, inspected, scored), choice.reasons, strict=True
        )
    ]
    keep = replace(members.pop(choice.keep), score=1.0)
    related = {scored.images[other].id: score for _, other, score in reversed(group.related)}
    return CopyGroup(
        keep,
        tuple(sorted(members, key=lambda copy: -copy.score)),
        tuple(sorted(related.items(), key=lambda item: -item[1])[:MOST_RELATED]),
        choice.reason,
        "" if choice.is_sure else f"unsure which one to keep: {choice.reason}",
    )


def _with_verdicts(group: CopyGroup, scored: Scored, tools: Tools) -> CopyGroup:
    """The group with a verdict on each of its members and the one to keep."""
    is_unsure, copies = group.verdict == "unsure", []
    for copy in group.copies:
        both = bool(group.keep.image.outside and copy.image.outside)
        judged = tools.normalizer.judge(
            copy.score,
            len(scored.images),
            "symmetric",
            threshold=scored.threshold,
            in_doubt=is_unsure,
            proof=Proof(True, "the same pixels everywhere") if both and not is_unsure else None,
        )
        if judged.grade != group.verdict:  # its score with other members made it one of them
            judged = replace(judged, grade=group.verdict, reason="similar to others of its group")
        copies.append(replace(copy, judged=judged))
    return replace(group, copies=tuple(copies))


def _with_evidence(group: CopyGroup, relate: Relate) -> CopyGroup:
    copies = tuple(
        replace(copy, evidence=relate(copy.image, group.keep.image, copy.score))
        for copy in group.copies
    )
    return replace(group, copies=copies)


def _with_heatmaps(group: CopyGroup, encoder: "ImageEncoder") -> CopyGroup:
    try:
        kept = _pixels(group.keep)
        if kept is None:
            return group
        copies = []
        for copy in group.copies:
            pixels = _pixels(copy)
            if pixels is not None:
                copy = replace(
                    copy,
                    heatmap=coarse(encoder.heatmap(pixels, kept)),
                    keep_heatmap=coarse(encoder.heatmap(kept, pixels)),
                )
            copies.append(copy)
    except ImageError:  # gone since it was inspected: the group is shown without
        return group
    return replace(group, copies=tuple(copies))


def _pixels(copy: Copy) -> Pixels | None:
    if copy.image.file is None:
        return None
    return reduced(load_pixels(copy.image.file, reduce_to=lambda h, w: (IMAGE_SIDE, IMAGE_SIDE)))
