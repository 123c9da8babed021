"""DISC2021 on disk, in the challenge's layout or the authors': lists of images and true pairs."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sscd_vec.predictions import GroundTruth, read_ground_truth

# Folder of references, of queries, and the files that may hold the ground truth, best first.
LAYOUTS = (
    ("references", "queries", ("dev_queries_groundtruth.csv", "public_ground_truth.csv")),
    ("val_ref", "val_query", ("val_groundtruth_matches.csv",)),
)
TRAINING = "training"
ENDINGS = (".jpg", ".jpeg", ".png")


@dataclass(frozen=True)
class Images:
    """Image files and their ids, in the order of the ids."""

    ids: tuple[str, ...]
    paths: tuple[str, ...]

    def __len__(self) -> int:
        """Number of images."""
        return len(self.ids)

    def only(self, ids: Iterable[str]) -> "Images":
        """The images with these ids."""
        wanted = set(ids)
        kept = [pair for pair in zip(self.ids, self.paths, strict=True) if pair[0] in wanted]
        return Images(tuple(pair[0] for pair in kept), tuple(pair[1] for pair in kept))


@dataclass(frozen=True)
class DiscSet:
    """A copy-detection test.

    Attributes:
        references: What is searched.
        queries: The queries that are judged, with and without a match.
        training: Images to fit whitening and bias on; never references or queries.
        matches: True ``(query id, reference id)`` pairs.
    """

    references: Images
    queries: Images
    training: Images
    matches: frozenset[tuple[str, str]]

    @property
    def truth(self) -> GroundTruth:
        """Matches and judged queries as the metrics take them."""
        pairs = sorted(self.matches)
        return GroundTruth([q for q, _ in pairs], [r for _, r in pairs], self.queries.ids)


def read_disc(folder: Path) -> DiscSet:
    """Read a DISC2021 folder in either layout.

    A ground truth that lists queries without a reference says which queries are judged: the
    challenge's public part names half of them, and only those count. One that lists matches only
    (the authors') judges every query in the folder.

    Raises:
        FileNotFoundError: If the folder has neither layout.
        ValueError: If the ground truth names images that are not there.
    """
    for references, queries, truths in LAYOUTS:
        found = [folder / name for name in truths if (folder / name).exists()]
        if (folder / references).is_dir() and (folder / queries).is_dir() and found:
            truth = read_ground_truth(found[0])
            listed = list_images(folder / queries)
            if truth.judged is not None:
                listed = listed.only(truth.judged.tolist())
            disc = DiscSet(
                list_images(folder / references),
                listed,
                list_images(folder / TRAINING),
                frozenset(zip(truth.query_ids.tolist(), truth.reference_ids.tolist(), strict=True)),
            )
            _check(disc, found[0])
            return disc
    wanted = "; ".join(f"{r}/, {q}/, training/ and {' or '.join(t)}" for r, q, t in LAYOUTS)
    have = ", ".join(sorted(entry.name for entry in folder.iterdir())) if folder.is_dir() else ""
    raise FileNotFoundError(
        f"{folder}: expected {wanted}; it holds {have or 'nothing'}. Without DISC2021, make a set "
        "of your own photos with benchmarks/make_disc_like.py"
    )


def list_images(folder: Path) -> Images:
    """The images of a folder; ids are the file names without their ending."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: expected a folder of images")
    with os.scandir(folder) as entries:
        names = sorted(e.name for e in entries if e.name.lower().endswith(ENDINGS))
    ids = tuple(os.path.splitext(name)[0] for name in names)
    return Images(ids, tuple(str(folder / name) for name in names))


def _check(disc: DiscSet, truth: Path) -> None:
    queries, references = set(disc.queries.ids), set(disc.references.ids)
    lost = [pair for pair in disc.matches if pair[0] not in queries or pair[1] not in references]
    if lost:
        raise ValueError(
            f"{truth}: {len(lost)} of {len(disc.matches)} pairs name an image that is not in the "
            f"folders, such as {sorted(lost)[0]}: the set is incomplete"
        )
    if not len(disc.training):
        raise ValueError("training/: no image; whitening and bias are fitted on it")
