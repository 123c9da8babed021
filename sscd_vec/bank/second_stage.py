"""The second stage of a bank: geometry confirms candidates and outlines what was copied.

Local features of the bank's images are read from its store (``features`` in the bank's folder), if
it keeps one, and computed from the images' files otherwise. They are kept under the digest of an
image's bytes, so features of an image that has changed since are never used.
"""

import logging
import math
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sscd_vec.bank.describe import describe
from sscd_vec.bank.judging import SECOND_LOOKS, look_closely, verified
from sscd_vec.bank.location import FEATURES
from sscd_vec.bank.records import BankImage
from sscd_vec.bank.results import BankMatch
from sscd_vec.bank.settings import BankSettings
from sscd_vec.bank.views import PENALTY, SCALES
from sscd_vec.encoder.images import ImageError, ImageInput, Pixels, load_pixels
from sscd_vec.files import ImageFile
from sscd_vec.normalize import Proof
from sscd_vec.progress import progress_bar
from sscd_vec.verify import Evidence, Features, FeatureStore, Verifier
from sscd_vec.verify.features import load_cv2

if TYPE_CHECKING:
    from sscd_vec.bank.bank import Bank
    from sscd_vec.bank.describe import Described, Source
    from sscd_vec.bank.pairs import Relate
    from sscd_vec.bank.searching import Scales
    from sscd_vec.bank.setup import Setup

Float32 = NDArray[np.float32]
FURTHER = 5  # candidates that only a tile of the query, or a look at twice the size, finds
REMEMBERED = 256  # images whose features are held in memory, 70 kB each
PART = 64  # images whose features are written at a time

logger = logging.getLogger(__name__)


class Nearest(NamedTuple):
    """A match by descriptor that may be verified.

    Attributes:
        match: As the index found it.
        score: Of the whole images' descriptors; None if the verifier was not fitted on such scores.
        is_due: Whether to verify it; False beyond the limit.
    """

    match: BankMatch
    score: float | None
    is_due: bool = True


class SecondStage:
    """Verifies what a bank's index finds.

    Attributes:
        verifier: Compares features; its limits bound time and memory.
    """

    def __init__(self, bank: "Bank", *, keep: bool) -> None:
        """Load the weights, and open the store of features if there is one.

        Args:
            bank: Whose images to compare with.
            keep: Whether to make a store if there is none.

        Raises:
            ImportError: OpenCV is not installed; says how to install it.
        """
        load_cv2()
        self._bank = bank
        self.verifier = _load_verifier(bank.settings)
        self._store = self._open_store(keep)
        self._of_file = lru_cache(REMEMBERED)(self._extract_file)

    @property
    def threshold(self) -> float:
        """Least score of a verified copy: the bank's own if one was given, else the fitted one."""
        weights = self.verifier.weights
        known = _knows_scores(self.verifier, self._bank)
        fitted = weights.with_descriptor if known else weights.geometry
        return fitted.threshold if self._bank.threshold is None else self._bank.threshold

    # ------------------------------------------------------------------ searching

    def search(
        self,
        part: "Sequence[Described]",
        k: int,
        limit: int | None,
        scales: "Scales",
        threshold: float | None = None,
    ) -> list[list[BankMatch]]:
        """The ``k`` best matches of each image after verification: copies first, then by score.

        Candidates beyond the limit, and those whose features are not at hand, stay as the
        descriptors judged them and come after those that were verified.

        Args:
            part: The images; those that could not be read have no matches.
            k: At most this many matches each.
            limit: Verify at most this many candidates of each; the verifier's own by default.
            scales: Whether a look at twice the size brings further candidates; "auto" where no
                copy was verified.
            threshold: Least verified score of a copy; ``self.threshold`` by default.
        """
        least = self.threshold if threshold is None else threshold
        ready = [one for one in part if one.descriptors is not None]
        nearest = iter(self._nearest(ready, k, limit or self.verifier.candidates))
        return [
            [] if one.descriptors is None else self._verify(one, next(nearest), k, scales, least)
            for one in part
        ]

    def relate(
        self, first: BankImage, second: BankImage, score: float | None = None
    ) -> Evidence | None:
        """Compare two images of the bank; None if the features of either are not at hand.

        Args:
            first: Taken as the query.
            second: Taken as the reference.
            score: Symmetric score of their descriptors.
        """
        ours, theirs = self.features_of(first), self.features_of(second)
        if ours is None or theirs is None:
            return None
        known = None if score is None else self._known_score(score)
        return self.verifier.compare(ours, theirs, known)

    def features_of(self, image: BankImage | None) -> Features | None:
        """Features of an image of the bank: kept, or from its file; None without either."""
        if image is None:
            return None
        kept = None if self._store is None else self._store.get(image.digest)
        if kept is not None or image.file is None:
            return kept
        return self._of_file(image.file)

    # ------------------------------------------------------------------ keeping features

    def keep(self, sources: "Sequence[Source]", show_progress: bool | None = None) -> None:
        """Keep the features of images that are in the bank and have none in the store yet."""
        if self._store is None:
            return
        digests = {s.id: image.digest for s in sources if (image := self._bank.get(s.id))}
        todo = [s for s in sources if s.id in digests and digests[s.id] not in self._store]
        with progress_bar("local features", len(todo), show_progress) as bar:
            for start in range(0, len(todo), PART):
                made: dict[str, Features] = {}
                for source in todo[start : start + PART]:
                    try:
                        features = self.verifier.extract(self._load(source.image))
                    except ImageError as error:  # gone since it was added
                        logger.warning("no local features of %s: %s", source.id, error.reason)
                        continue
                    made[digests[source.id]] = features.best(self.verifier.kept)
                    bar.advance()
                self._store.put(made)

    def forget(self, digests: Sequence[str]) -> None:
        """Remove the features of images that were removed, unless an equal image is left."""
        if self._store is not None:
            used = self._bank.storage.records.digests_in_use(digests)
            self._store.remove([digest for digest in digests if digest not in used])

    def close(self) -> None:
        """Close the store."""
        if self._store is not None:
            self._store.close()

    # ------------------------------------------------------------------ how it does it

    def _nearest(self, ready: "Sequence[Described]", k: int, limit: int) -> list[list[Nearest]]:
        """Candidates of each query: by the whole image, then those that only its tiles find."""
        views = [one.descriptors for one in ready if one.descriptors is not None]
        images, many = [one.source.image for one in ready], max(k, limit)
        whole = self._bank.search_descriptors([each[:1] for each in views], many, images=images)
        found = [
            [Nearest(m, self._known_score(m.score), rank < limit) for rank, m in enumerate(matches)]
            for matches in whole
        ]
        if all(len(each) == 1 for each in views):
            return found
        tiled = self._bank.search_descriptors(views, many, images=images)
        return [[*ours, *_further(ours, more)] for ours, more in zip(found, tiled, strict=True)]

    def _verify(
        self, one: "Described", nearest: list[Nearest], k: int, scales: "Scales", least: float
    ) -> list[BankMatch]:
        try:
            query = self.verifier.extract(self._load(one.source.image))
        except ImageError:  # gone since it was encoded
            return [each.match for each in nearest[:k]]
        look = _CloseLook(self._bank, one.source.image)
        matches = [
            self._judge(query, each, least, look) if each.is_due else each.match for each in nearest
        ]
        is_whole = one.descriptors is not None and len(one.descriptors) == 1
        is_open = scales == "auto" and not any(match.is_copy for match in matches)
        if is_whole and (is_open or scales == "both"):
            more = _further(nearest, self._look_larger(one.source))
            matches += [self._judge(query, each, least, look) for each in more]
        return sorted(matches, key=_rank)[:k]

    def _look_larger(self, source: "Source") -> list[BankMatch]:
        """What the index finds for an image at twice the size."""
        looks = describe(self._bank.encoder, [source], scale=SCALES[1])
        rows = [one.descriptors for look in looks for one in look if one.descriptors is not None]
        found = self._bank.search_descriptors(rows, self.verifier.candidates, penalty=PENALTY)
        return [match for matches in found for match in matches]

    def _judge(
        self, query: Features, candidate: Nearest, least: float, look: "_CloseLook"
    ) -> BankMatch:
        features = self.features_of(candidate.match.image)
        if features is None:
            return candidate.match
        evidence = self.verifier.compare(query, features, candidate.score)
        judged = verified(candidate.match.judged, evidence, least, look(candidate.match, evidence))
        return replace(candidate.match, score=evidence.score, judged=judged, evidence=evidence)

    def _known_score(self, score: float) -> float | None:
        """A descriptor score, if the weights were fitted on such scores; else geometry decides."""
        return score if _knows_scores(self.verifier, self._bank) else None

    def _extract_file(self, file: ImageFile) -> Features | None:
        if not self._bank.may_show(file.path):
            return None
        try:
            return self.verifier.extract(self._load(file)).best(self.verifier.kept)
        except ImageError:
            return None

    def _load(self, image: ImageInput) -> Pixels:
        side = self.verifier.side
        return load_pixels(image, reduce_to=lambda height, width: (side, side))

    def _open_store(self, keep: bool) -> FeatureStore | None:
        location = self._bank.location
        if location is None:
            return self._open_temporary_store() if keep else None
        path, read_only = location.folder / FEATURES, self._bank.storage.read_only
        if path.exists() or (keep and not read_only):
            return FeatureStore(path, read_only=read_only)
        return None

    def _open_temporary_store(self) -> FeatureStore:
        """For a bank in memory: still a file, since features take 70 kB an image."""
        folder = tempfile.mkdtemp(prefix="sscd-vec-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return FeatureStore(Path(folder, FEATURES))


class _CloseLook:
    """Compares a query with those of its candidates that are in doubt and align, a few of them."""

    def __init__(self, bank: "Bank", query: ImageInput) -> None:
        self._bank, self._query, self._left = bank, query, SECOND_LOOKS

    def __call__(self, match: BankMatch, evidence: Evidence) -> Proof | None:
        """What their pixels say; None if the pair is not in doubt or enough were compared."""
        file = None if match.image is None else match.image.file
        is_due = match.judged.in_doubt and match.judged.basis != "pixels" and evidence.located
        if not is_due or not self._left or file is None or not self._bank.may_show(file.path):
            return None
        self._left -= 1
        return look_closely(self._query, file, evidence)


def compare_images(setup: "Setup", first: Pixels, second: Pixels, score: float) -> Evidence:
    """Compare two images that are in no bank.

    Args:
        setup: Model and normalizer.
        first: Taken as the query.
        second: Taken as the reference.
        score: Symmetric score of their descriptors.

    Raises:
        ImportError: OpenCV is not installed; says how to install it.
    """
    verifier = _load_verifier(setup.settings)
    ours, theirs = verifier.extract(first), verifier.extract(second)
    return verifier.compare(ours, theirs, score if _knows_scores(verifier, setup) else None)


def file_comparison(setup: "Setup") -> "Relate":
    """What compares two images by their files, in no bank; ``SecondStage.relate`` without one.

    Raises:
        ImportError: OpenCV is not installed; says how to install it.
    """
    load_cv2()
    verifier = _load_verifier(setup.settings)
    knows_scores, side = _knows_scores(verifier, setup), verifier.side

    @lru_cache(REMEMBERED)
    def features_of(file: ImageFile | None) -> Features | None:
        if file is None:
            return None
        try:
            pixels = load_pixels(file, reduce_to=lambda height, width: (side, side))
        except ImageError:
            return None
        return verifier.extract(pixels).best(verifier.kept)

    def relate(first: BankImage, second: BankImage, score: float | None) -> Evidence | None:
        ours, theirs = features_of(first.file), features_of(second.file)
        if ours is None or theirs is None:
            return None
        return verifier.compare(ours, theirs, score if knows_scores else None)

    return relate


def _load_verifier(settings: BankSettings) -> Verifier:
    """The verifier of the bank's model; the shipped one for a model without its own."""
    name = settings.model if settings.is_trusted else ""
    try:
        return Verifier.from_pretrained(name or None)
    except FileNotFoundError:
        return Verifier.from_pretrained()


def _knows_scores(verifier: Verifier, made_with: "Bank | Setup") -> bool:
    """Whether the weights were fitted on scores of this model and normalizer."""
    settings, about = made_with.settings, verifier.weights.about
    ours = (settings.encoder, made_with.normalizer.reference_fingerprint)
    return ours == (about.get("encoder"), about.get("normalizer")) and settings.tiles == 1


def _further(known: list[Nearest], found: Sequence[BankMatch]) -> list[Nearest]:
    """A few candidates that another look at the query found."""
    ids = {one.match.id for one in known}
    # The whole query scores with these at most as it does with the last of its own candidates.
    scores = [one.score for one in known if one.score is not None]
    more = [Nearest(match, min(scores, default=None)) for match in found if match.id not in ids]
    return more[:FURTHER]


def _rank(match: BankMatch) -> tuple[bool, bool, float]:
    score = -math.inf if math.isnan(match.score) else match.score
    return not match.is_copy, match.evidence is None, -score
