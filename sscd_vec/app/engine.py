"""What the server can do with a bank. Runs in the worker's thread, many requests at a time."""

import errno
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sscd_vec.app.answers import LONGEST_ID, ThresholdFacts
from sscd_vec.app.limits import Refused
from sscd_vec.app.metrics import Metrics
from sscd_vec.app.uploads import Pixels
from sscd_vec.bank import Answer, Bank, BankMatch
from sscd_vec.bank.heat_grid import reduced
from sscd_vec.bank.records import BankImage
from sscd_vec.bank.settings import BankSettings
from sscd_vec.files import ImageFile
from sscd_vec.locks import LockHeldError
from sscd_vec.verify import Verifier

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Search:
    """One image to look for.

    Attributes:
        pixels: The image.
        k: How many matches are wanted.
        threshold: Least score of a copy; the bank's if None.
        digest: SHA-256 of the file it came in: what was decided about it is known by that.
    """

    pixels: Pixels
    k: int
    threshold: float | None = None
    digest: str = ""


@dataclass(frozen=True)
class Ruling:
    """What a person decided about an image, known by its SHA-256, and one of the bank."""

    digest: str
    id: str
    is_copy: bool


@dataclass(frozen=True)
class Pair:
    """One image and the image of the bank to compare it with."""

    query: Pixels
    reference: Pixels


class Engine:
    """A bank at work.

    Attributes:
        bank: What is searched.
        tiles: Crops per side of each query; 1 for whole images.
    """

    def __init__(self, bank: Bank, metrics: Metrics, *, tiles: int = 1) -> None:
        """Load the bank's encoder."""
        self.bank, self.tiles, self.metrics = bank, tiles, metrics
        self.encoder = bank.encoder
        self._roots: tuple[BankSettings, list[Path]] | None = None

    @property
    def threshold(self) -> float | None:
        """Least score of a copy, if one is given or calibrated."""
        if self.bank.verify:
            return self.bank.second_stage.threshold
        return self.bank.threshold_of(self.bank.score_kind(self.tiles))

    @property
    def threshold_facts(self) -> ThresholdFacts:
        """Where the threshold comes from."""
        if self.bank.verify and self.bank.threshold is None:
            return _verified_facts(self.bank.second_stage.verifier)
        found = self.bank.normalizer.thresholds.get(self.bank.score_kind(self.tiles))
        if self.bank.threshold is not None or found is None or found.target == "given":
            source = "none" if self.threshold is None else "given"
            return ThresholdFacts(source=source, target=None, wanted=None, interval=None, note="")
        return ThresholdFacts(
            source="calibrated",
            target=found.target,
            wanted=found.wanted,
            interval=found.interval,
            note=found.note,
        )

    def handlers(self) -> dict[str, Callable[[Sequence[Any]], Sequence[Any]]]:
        """The kinds of work, for the worker."""
        return {
            "search": self.search,
            "large search": self.search,
            "add": self.add,
            "decide": lambda rulings: [_outcome(self.decide, ruling) for ruling in rulings],
            "remove": lambda batches: [_outcome(self.remove, ids) for ids in batches],
            "heatmap": lambda pairs: [_outcome(self.heatmaps, pair) for pair in pairs],
        }

    def search(self, requests: Sequence[Search]) -> list[list[BankMatch] | Refused]:
        """Encode all images in one pass and search them together."""
        most = max(request.k for request in requests)
        answers: dict[int, Answer] = {}
        for least in {request.threshold for request in requests}:
            rows = [row for row, request in enumerate(requests) if request.threshold == least]
            images = [requests[row].pixels for row in rows]
            found = self.bank.search_many(images, most, tiles=self.tiles, threshold=least)
            answers |= zip(rows, found, strict=True)
        self.metrics.images.inc(len(requests))
        return [self._answer(answers[row], request) for row, request in enumerate(requests)]

    def _answer(self, answer: Answer, request: Search) -> list[BankMatch] | Refused:
        if answer.error:
            return Refused(422, f"the image: {answer.error}")
        matches = self._decided(answer.matches[: request.k], request.digest)
        self.metrics.verdicts.labels(verdict=matches[0].verdict if matches else "no").inc()
        return matches

    def _decided(self, matches: list[BankMatch], digest: str) -> list[BankMatch]:
        """Matches with what a person decided: the bank saw pixels, decisions are about files."""
        known = self.bank.storage.records.decisions(about=digest)
        if not known:
            return matches
        return [
            match if match.image is None
            else replace(match, decision=known.about(digest, match.image.digest))
            for match in matches
        ]  # fmt: skip

    def decide(self, ruling: Ruling) -> int:
        """Remember a decision; returns how many pairs were decided about.

        Raises:
            Refused: 404 if the bank has no such image.
        """
        if len(ruling.id.encode()) > LONGEST_ID or self.bank.get(ruling.id) is None:
            raise Refused(404, "the bank has no such image")
        self.bank.decide(ruling.digest, ruling.id, ruling.is_copy)
        return len(self.bank.storage.records.decisions())

    def add(self, images: Sequence[Pixels]) -> list[str]:
        """Keep the images as clean JPEGs and put them into the bank; the same image has one id."""
        # Ids come from the pixels and never from the client.
        ids = [f"upload:{_digest(image)[:32]}" for image in images]
        different = dict(zip(ids, images, strict=True))
        done = self.bank.add(different.values(), list(different), keep=True, show_progress=False)
        self.metrics.images.inc(done.added)
        return ids

    def remove(self, ids: Sequence[str]) -> int:
        """Take images out of the bank. Files of the user stay; kept uploads are deleted."""
        # An id in an index has so many bytes at most; a longer one cannot be there.
        return self.bank.remove([name for name in ids if len(name.encode()) <= LONGEST_ID])

    def heatmaps(self, pair: Pair) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Which part of the one image matches the other, and the other way round."""
        query, reference = reduced(pair.query), reduced(pair.reference)
        return self.encoder.heatmap(query, reference), self.encoder.heatmap(reference, query)

    # ------------------------------------------------------------------ safe in any thread

    def file_of(self, key: int) -> ImageFile:
        """The file of an image of the bank.

        Raises:
            Refused: 404 if there is none, 403 if it may not be shown.
        """
        image = self.bank.storage.records.by_key(key)
        if image is None or image.file is None:
            raise Refused(404, "the bank has no such image")
        if not self.bank.may_show(image.file.path):
            raise Refused(403, "its file lies outside the folders this bank may show")
        return image.file

    def name_of(self, name: str, image: BankImage | None) -> str:
        """What to call an image before people: its path below the folder it was added from."""
        if image is None or image.file is None or name != image.file.id:
            return name
        place = image.file.path
        for root in self._root_folders():
            if place.is_relative_to(root):
                place = root.relative_to(root.parent) / place.relative_to(root)
                break
        else:
            place = place.relative_to(place.parent)
        return ImageFile(place, 0, 0, image.file.member).id

    def _root_folders(self) -> list[Path]:
        """The bank's own, whose signature is checked once."""
        settings = self.bank.settings
        if self._roots is None or self._roots[0] is not settings:
            self._roots = settings, settings.root_folders
        return self._roots[1]


def _verified_facts(verifier: Verifier) -> ThresholdFacts:
    promised = verifier.weights.about["with_descriptor"]["precision"]
    note = "of descriptors and geometry together"
    return ThresholdFacts(
        source="calibrated", target="precision", wanted=promised, interval=None, note=note
    )


def refusal_of(error: Exception) -> Exception:
    """An error of the bank as a client should see it, where that is not the server's fault."""
    if isinstance(error, LockHeldError):
        return Refused(503, "another program is writing to the bank; try again in a second")
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        return Refused(507, "the server's disk is full; nothing was added")
    return error


def _outcome(work: Callable[[Any], Any], item: object) -> object:
    """The result for one item, or its exception: the others of a batch are not concerned."""
    try:
        return work(item)
    except Exception as error:  # raised to its own caller by the worker
        return error


def _digest(image: Pixels) -> str:
    return hashlib.sha256(repr(image.shape).encode() + image.tobytes()).hexdigest()
