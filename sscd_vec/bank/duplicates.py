"""Groups of copies among the images of a bank, and the one of each to keep."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sscd_vec.bank import groups
from sscd_vec.bank.heat_grid import IMAGE_SIDE, coarse, reduced
from sscd_vec.bank.quality import InspectedImage, choose_best, inspect_image
from sscd_vec.bank.records import BankImage
from sscd_vec.bank.views import image_of
from sscd_vec.encoder.images import ImageError, Pixels, load_pixels
from sscd_vec.files import Unreadable
from sscd_vec.progress import progress_bar

if TYPE_CHECKING:
    from sscd_vec.bank.bank import Bank
    from sscd_vec.bank.describe import ImageEncoder

Float32 = NDArray[np.float32]
Heatmap = NDArray[np.floating]  # (h, w), larger is more alike
MOST_RELATED = 10


@dataclass(frozen=True)
class Copy:
    """A member of a group of copies.

    Attributes:
        image: What the bank knows about it.
        score: Symmetric score with the one to keep; 1 for that one itself.
        inspected: Its size, detail and thumbnail; None without a file.
        heatmap: Which part of it matches the one to keep.
        keep_heatmap: Which part of the one to keep it matches.
    """

    image: BankImage
    score: float = 1.0
    inspected: InspectedImage | None = None
    heatmap: Heatmap | None = None
    keep_heatmap: Heatmap | None = None


@dataclass(frozen=True)
class CopyGroup:
    """Images that are copies of each other.

    Attributes:
        keep: The one to keep.
        copies: The others, most alike first.
        related: Ids with a score: copies of one member that are not copies of the group.
    """

    keep: Copy
    copies: tuple[Copy, ...]
    related: tuple[tuple[str, float], ...] = ()

    @property
    def members(self) -> tuple[Copy, ...]:
        """All of them, the one to keep first."""
        return (self.keep, *self.copies)


@dataclass(frozen=True)
class Copies:
    """What a search for copies found.

    Attributes:
        groups: The groups, largest first.
        threshold: Least symmetric score of a copy.
        scanned: Images compared.
        pairs: Pairs of copies, in groups or not.
        unreadable: Files that could be encoded earlier and cannot be read now.
    """

    groups: list[CopyGroup]
    threshold: float
    scanned: int
    pairs: int
    unreadable: list[Unreadable]


def find_copies(
    bank: "Bank",
    threshold: float | None = None,
    *,
    heatmaps: bool = False,
    show_progress: bool | None = None,
) -> Copies:
    """Find groups of copies among a bank's images; see ``Bank.duplicates``."""
    if threshold is None:
        threshold = bank.normalizer.threshold("symmetric")
    images, z = _vectors(bank)
    biases = bank.normalizer.whitened_biases(z)
    unreadable: list[Unreadable] = []
    with progress_bar("comparing", len(z), show_progress) as bar:
        pairs = groups.find_pairs(z, biases, threshold, on_rows=bar.advance)
        found = groups.group_pairs(z, biases, threshold, pairs)
        bar.update(0, len(found), title="inspecting groups")
        built: list[CopyGroup] = []
        for group in found:
            members = _inspect([images[row] for row in group.members], unreadable)
            if len(members) > 1:
                rows = [row for row in group.members if images[row].id in members]
                one = _build(group, rows, images, members, z, biases)
                built.append(_with_heatmaps(one, bank.encoder) if heatmaps else one)
            bar.advance()
    return Copies(built, threshold, len(images), len(pairs), unreadable)


def _vectors(bank: "Bank") -> tuple[list[BankImage], Float32]:
    """All images of a bank and their whole view's whitened descriptors."""
    known = {image.id: image for image in bank.storage.records.all()}
    images: list[BankImage] = []
    rows: list[Float32] = []
    for ids, part in bank.storage.index.iterate_vectors():
        whole = [row for row, name in enumerate(ids) if image_of(str(name)) == name]
        images += [known.get(str(ids[row]), BankImage(str(ids[row]), "", 1)) for row in whole]
        rows.append(part[whole])
    if not rows:
        return [], np.empty((0, bank.normalizer.dim), np.float32)
    z = np.concatenate(rows)
    order = sorted(range(len(images)), key=lambda row: images[row].id)
    return [images[row] for row in order], z[order]


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


def _build(
    group: groups.Group,
    rows: list[int],
    images: Sequence[BankImage],
    inspected: dict[str, InspectedImage | None],
    z: Float32,
    biases: Float32,
) -> CopyGroup:
    """Choose the one to keep and score the others with it."""
    seen = [(row, inspected[images[row].id]) for row in rows]
    with_file = [(row, image) for row, image in seen if image is not None]
    kept = with_file[choose_best([i for _, i in with_file])][0] if with_file else group.hub
    if kept not in rows:
        kept = rows[0]
    scores = groups.scores(z, biases, [kept], rows)[0]
    copies = [
        Copy(images[row], float(score), image)
        for (row, image), score in zip(seen, scores, strict=True)
        if row != kept
    ]
    related = {images[outsider].id: score for _, outsider, score in reversed(group.related)}
    return CopyGroup(
        Copy(images[kept], 1.0, inspected[images[kept].id]),
        tuple(sorted(copies, key=lambda copy: -copy.score)),
        tuple(sorted(related.items(), key=lambda item: -item[1])[:MOST_RELATED]),
    )


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
