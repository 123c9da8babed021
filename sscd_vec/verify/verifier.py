"""``Verifier``: is this candidate a copy, how sure, and which part of which image was copied."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Literal, NamedTuple

import numpy as np

from sscd_vec import models
from sscd_vec.files import PathLike
from sscd_vec.verify.evidence import Aligned, best_alignment
from sscd_vec.verify.features import (
    LARGEST_SIDE,
    MOST_KEYPOINTS,
    Features,
    Pixels,
    extract,
    load_cv2,
)
from sscd_vec.verify.regions import Polygon, Region, overlap, to_unit
from sscd_vec.verify.scoring import Weights, figures_of
from sscd_vec.verify.shared import shared_only

SIDE, KEYPOINTS, KEPT, CANDIDATES = 384, 800, 500, 20
MOSTLY = 0.93  # an image of which that share is covered is there as a whole

Relation = Literal["same", "part", "whole", "overlap", "unknown"]


@dataclass(frozen=True)
class Evidence:
    """What verification says about a query and a reference.

    Regions and the transform are in unit coordinates, (0, 0) the upper left corner of an image and
    (1, 1) the lower right one. They are empty and None where geometry alone cannot tell.

    Attributes:
        score: How sure a copy is, 0 to 1, of everything together.
        threshold: Least score of a copy.
        inliers: Matched keypoints that agree on the transform.
        cells: Distinct places they lie in: a hundred keypoints on one logo are few.
        correlation: Of the aligned images' detail, -1 to 1.
        agreeing: Share of the overlap that looks the same.
        query_coverage: Share of the query that the reference covers.
        reference_coverage: Share of the reference that is seen in the query.
        mirrored: Whether the query is a mirror image.
        transform: ``(3, 3)`` from the query to the reference; None if not located.
        query_region: Where in the query the copied part is.
        reference_region: Where in the reference it comes from.
        descriptor_score: As given.
        visible: Keypoints in the overlap, in the image where they are fewer.
        doubt: Why an alignment makes no copy, such as that only a frame is shared; '' if nothing
            says so.
    """

    score: float
    threshold: float
    inliers: int
    cells: int
    correlation: float
    agreeing: float
    query_coverage: float
    reference_coverage: float
    mirrored: bool
    transform: tuple[tuple[float, ...], ...] | None
    query_region: Polygon
    reference_region: Polygon
    descriptor_score: float | None = None
    visible: int = 0
    doubt: str = ""

    @property
    def is_copy(self) -> bool:
        """Whether ``score`` reaches the threshold and the alignment is not in doubt."""
        return self.score >= self.threshold and not self.doubt

    @property
    def located(self) -> bool:
        """Whether geometry alone shows the copied part."""
        return self.transform is not None

    @property
    def region(self) -> Region | None:
        """What was copied, outlined in both images; None if not located."""
        return Region(self.query_region, self.reference_region) if self.located else None

    @property
    def relation(self) -> Relation:
        """Which of the two images contains the other.

        "same": either shows all of the other. "part": the query is a part of the reference, as a
        crop is. "whole": the query shows all of the reference and something more: the reference
        is a crop of it, or the query has a frame, a caption or other images around the copy.
        "overlap": each shows something the other does not. "unknown": not located.
        """
        if not self.located:
            return "unknown"
        covered, shown = self.query_coverage >= MOSTLY, self.reference_coverage >= MOSTLY
        if covered:
            return "same" if shown else "part"
        return "whole" if shown else "overlap"


class Candidate(NamedTuple):
    """A reference that may be what a query was made from.

    Attributes:
        id: Its id.
        features: Its local features.
        descriptor_score: Score of the descriptors, if there is one.
    """

    id: str
    features: Features
    descriptor_score: float | None = None


class Verified(NamedTuple):
    """A candidate after verification.

    Attributes:
        id: Of the candidate.
        evidence: What verification says.
    """

    id: str
    evidence: Evidence


class Verifier:
    """Compares local features of images and combines them with the descriptors' score.

    Attributes:
        weights: Of the score.
        side: Images are looked at with their longer side scaled to this many pixels.
        keypoints: Most keypoints of a query.
        kept: Most keypoints of a reference, whether kept or looked at again.
        candidates: ``verify`` looks at this many candidates at most.
    """

    def __init__(
        self,
        weights: Weights,
        *,
        side: int = SIDE,
        keypoints: int = KEYPOINTS,
        kept: int = KEPT,
        candidates: int = CANDIDATES,
    ) -> None:
        """Use these weights and limits; time and memory grow with the limits and nothing else.

        Raises:
            ValueError: A limit is out of its range.
        """
        limits = (
            ("side", side, 32, min(2048, LARGEST_SIDE)),
            ("keypoints", keypoints, 1, MOST_KEYPOINTS),
            ("kept", kept, 1, MOST_KEYPOINTS),
            ("candidates", candidates, 1, 10_000),
        )
        for name, value, least, most in limits:
            if not least <= value <= most:
                raise ValueError(f"{name}: expected {least} to {most}, got {value}")
        self.weights = weights
        self.side, self.keypoints, self.kept, self.candidates = side, keypoints, kept, candidates

    @classmethod
    def from_pretrained(cls, name_or_path: PathLike | None = None, **limits: int) -> "Verifier":
        """Load the weights that lie beside a model.

        Args:
            name_or_path: A shipped model's name or a model folder, or the JSON file itself; the
                shipped model by default.
            limits: Of ``__init__``.

        Raises:
            FileNotFoundError: The model has no weights for verification.
            WeightsError: The file holds something else.
        """
        return cls(Weights.load(models.verifier_path(name_or_path)), **limits)

    def extract(self, pixels: Pixels) -> Features:
        """Find the local features of an image.

        Args:
            pixels: ``(h, w, 3)`` uint8 RGB, as ``load_pixels`` gives.

        Raises:
            ValueError: The array is something else.
            ImportError: OpenCV is not installed; says how to install it.
        """
        expected = isinstance(pixels, np.ndarray) and pixels.ndim == 3 and pixels.shape[2] == 3
        if not expected or pixels.dtype != np.uint8 or not pixels.size:
            shape = getattr(pixels, "shape", type(pixels).__name__)
            kind = getattr(pixels, "dtype", "")
            raise ValueError(f"pixels: expected (h, w, 3) uint8 RGB, got {shape} {kind}")
        return extract(pixels, side=self.side, keypoints=self.keypoints)

    def compare(
        self, query: Features, reference: Features, descriptor_score: float | None = None
    ) -> Evidence:
        """Look for the reference in the query.

        Args:
            query: Features of the query.
            reference: Features of the reference; the ``kept`` best keypoints are used.
            descriptor_score: Score of the two descriptors as the index gives it (with the shipped
                model and normalizer); without it geometry decides alone.
        """
        aligned = best_alignment(query, reference.best(self.kept))
        figures = figures_of(aligned.support, descriptor_score)
        geometry = self.weights.geometry
        combined = geometry if descriptor_score is None else self.weights.with_descriptor
        score = combined.score(figures)
        # No descriptor score makes a copy alone: where there is a copy, geometry has seen it.
        is_sure = score >= combined.threshold
        located = is_sure or geometry.score(figures) >= geometry.threshold
        return _evidence(
            aligned,
            query,
            reference,
            score,
            combined.threshold,
            located,
            descriptor_score,
        )

    def relate(self, first: Pixels, second: Pixels) -> Evidence:
        """Lay one image on another by geometry alone: where they overlap, which contains which.

        Args:
            first: Pixels of the image that is taken as the query.
            second: Pixels of the image that is taken as the reference.
        """
        return self.compare(self.extract(first), self.extract(second))

    def verify(self, query: Features | Pixels, candidates: Iterable[Candidate]) -> list[Verified]:
        """Compare a query with its candidates, best first; a collage has several copies.

        Args:
            query: Features of the query, or its pixels.
            candidates: Best by descriptor first. Only the first ``self.candidates`` are taken, one
                at a time, so features may be read or extracted as they are asked for.
        """
        seen = query if isinstance(query, Features) else self.extract(query)
        verdicts = [
            Verified(one.id, self.compare(seen, one.features, one.descriptor_score))
            for one in islice(candidates, self.candidates)
        ]
        return sorted(verdicts, key=lambda verdict: -verdict.evidence.score)


def is_available() -> bool:
    """Whether what verification needs is installed (``pip install 'sscd-vec[verify]'``)."""
    try:
        load_cv2()
    except ImportError:
        return False
    return True


def _evidence(
    aligned: Aligned,
    query: Features,
    reference: Features,
    score: float,
    threshold: float,
    located: bool,
    descriptor_score: float | None,
) -> Evidence:
    support = aligned.support
    unit = to_unit(aligned.matrix, query.size, reference.size, aligned.mirrored)
    region = overlap(unit) if located else Region((), ())
    doubt = shared_only(query, reference, unit, support) if located else ""
    return Evidence(
        score,
        threshold,
        support.inliers,
        support.cells,
        support.correlation,
        support.agreeing,
        support.query_coverage,
        support.reference_coverage,
        aligned.mirrored,
        tuple(tuple(map(float, row)) for row in unit) if located else None,
        region.query,
        region.reference,
        descriptor_score,
        support.visible,
        doubt,
    )
