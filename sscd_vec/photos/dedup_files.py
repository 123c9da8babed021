"""From files to groups of copies with the one to keep: what ``dedup`` and the report show."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sscd_vec.encoder import Encoder
from sscd_vec.encoder.images import ImageError, Pixels, load_pixels
from sscd_vec.normalize import Normalizer
from sscd_vec.photos import dedup
from sscd_vec.photos.descriptor_cache import DescriptorCache
from sscd_vec.photos.encode_files import describe_files
from sscd_vec.photos.folder import ImageFile, Unreadable, find_images
from sscd_vec.photos.heat_grid import IMAGE_SIDE, coarse, reduced
from sscd_vec.photos.quality import Picture, keep, look
from sscd_vec.photos.report import Copy, CopyGroup


@dataclass(frozen=True)
class Copies:
    """What a search for copies found.

    Attributes:
        groups: The groups, largest first.
        threshold: Least symmetric score of a copy.
        scanned: Images compared.
        pairs: Pairs of copies, groups or not.
        unreadable: Files that could not be read.
    """

    groups: list[CopyGroup]
    threshold: float
    scanned: int
    pairs: int
    unreadable: list[Unreadable]


@dataclass(frozen=True)
class Progress:
    """Functions called as work is done.

    Attributes:
        stage: Told what begins, and how many steps it has.
        done: Told how many steps were finished since its last call.
    """

    stage: Callable[[str, int], None] = lambda title, total: None
    done: Callable[[int], None] = lambda count: None


def find_copies(
    encoder: Encoder,
    normalizer: Normalizer,
    roots: Iterable[Path],
    *,
    threshold: float,
    cache: DescriptorCache,
    leave_out: Path | None = None,
    heatmaps: bool = False,
    on_progress: Progress | None = None,
) -> Copies:
    """Find groups of copies in folders.

    Args:
        encoder: The model.
        normalizer: Its normalizer.
        roots: Folders and files.
        threshold: Least symmetric score of a copy.
        cache: Descriptors already known.
        leave_out: A folder that is not entered where it lies below a root.
        heatmaps: Compute what matched, for the report: two forward passes per copy.
        on_progress: Told how far things are.
    """
    progress = on_progress or Progress()
    unreadable: list[Unreadable] = []
    images = find_images(roots, unreadable.append, leave_out=leave_out)
    progress.stage("encoding", len(images))
    files: list[ImageFile] = []
    rows: list[NDArray[np.float32]] = []
    for part in describe_files(encoder, images, cache, on_files=progress.done):
        files += part.files
        rows += part.descriptors
        unreadable += part.unreadable
    descriptors = np.concatenate(rows) if rows else np.empty((0, normalizer.dim_in), np.float32)
    z, biases = _whitened(normalizer, descriptors)
    progress.stage("comparing", len(files))
    pairs = dedup.find_pairs(z, biases, threshold, on_rows=progress.done)
    found = dedup.group(z, biases, threshold, pairs)
    progress.stage("looking at groups", len(found))
    groups = []
    for group in found:
        built = _build(group, files, z, biases, unreadable)
        if built is not None:
            groups.append(_with_heatmaps(built, encoder) if heatmaps else built)
        progress.done(1)
    return Copies(groups, threshold, len(files), len(pairs), unreadable)


def _whitened(
    normalizer: Normalizer, descriptors: NDArray[np.float32]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    if not len(descriptors):
        return np.empty((0, normalizer.dim), np.float32), np.empty(0, np.float32)
    return normalizer.whiten(descriptors), normalizer.biases(descriptors)


def _build(
    group: dedup.Group,
    files: list[ImageFile],
    z: NDArray[np.float32],
    biases: NDArray[np.float32],
    unreadable: list[Unreadable],
) -> CopyGroup | None:
    """Look at the pictures of a group and choose the one to keep."""
    members: list[int] = []
    pictures: list[Picture] = []
    for row in group.members:
        try:
            pictures.append(look(files[row].path))
            members.append(row)
        except (OSError, ValueError) as error:  # gone or changed since it was encoded
            unreadable.append(Unreadable(files[row].path, str(error)))
    if len(members) < 2:
        return None
    kept = keep(pictures)
    scores = dedup.scores(z, biases, [members[kept]], members)[0]
    copies = [
        Copy(picture, float(score))
        for number, (picture, score) in enumerate(zip(pictures, scores, strict=True))
        if number != kept
    ]
    related = {files[outsider].path: score for _, outsider, score in reversed(group.related)}
    return CopyGroup(
        pictures[kept],
        tuple(sorted(copies, key=lambda copy: -copy.score)),
        tuple(sorted(related.items(), key=lambda item: -item[1])[:10]),
    )


def _with_heatmaps(group: CopyGroup, encoder: Encoder) -> CopyGroup:
    try:
        kept = _reduced(group.keep.path)
        copies = []
        for copy in group.copies:
            pixels = _reduced(copy.picture.path)
            copies.append(
                Copy(
                    copy.picture,
                    copy.score,
                    coarse(encoder.heatmap(pixels, kept)),
                    coarse(encoder.heatmap(kept, pixels)),
                )
            )
    except ImageError:  # gone since it was looked at: the group is shown without
        return group
    return CopyGroup(group.keep, tuple(copies), group.related)


def _reduced(path: Path) -> Pixels:
    return reduced(load_pixels(path, reduce_to=lambda h, w: (IMAGE_SIDE, IMAGE_SIDE)))
