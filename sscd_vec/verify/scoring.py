"""From measurements to one score: a logistic combination of a handful of figures, kept as JSON.

``score = 1 / (1 + exp(-(b + sum_i w_i x_i)))``, with two sets of weights: one for pairs whose
descriptor score is known, one for geometry alone. The weights are fitted on labelled pairs of
nearest neighbours (``benchmarks/release/fit_verifier.py``), so a score is a probability among such
pairs.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sscd_vec.files import PathLike, printable_path, write_whole
from sscd_vec.verify.evidence import Support

FORMAT = 1
# A descriptor score above this says no more: outside what a model was trained on (drawings, charts,
# forms) strangers score high too, so without geometry's word no pair is a copy.
SURE = 0.15


class WeightsError(ValueError):
    """A file that does not hold the weights of a verifier."""


@dataclass(frozen=True)
class Combination:
    """One logistic combination and the score from which a pair is called a copy.

    Attributes:
        bias: Added to the sum.
        weights: By the name of the figure.
        threshold: A score of at least this is a copy.
    """

    bias: float
    weights: Mapping[str, float]
    threshold: float

    def score(self, figures: Mapping[str, float]) -> float:
        """The probability-like score of a pair."""
        total = self.bias + sum(weight * figures[name] for name, weight in self.weights.items())
        return 1 / (1 + math.exp(-max(-50.0, min(50.0, total))))


@dataclass(frozen=True)
class Weights:
    """Both combinations, and where they come from.

    Attributes:
        with_descriptor: For pairs with a descriptor score.
        geometry: For pairs without one; also says whether the region can be believed.
        about: What they were fitted on and what the thresholds promise.
    """

    with_descriptor: Combination
    geometry: Combination
    about: Mapping[str, Any]

    def save(self, path: PathLike) -> None:
        """Write them as JSON, whole or not at all."""
        plain = {
            "format": FORMAT,
            "with_descriptor": _plain(self.with_descriptor),
            "geometry": _plain(self.geometry),
            "about": dict(self.about),
        }
        write_whole(path, json.dumps(plain, indent=1) + "\n")

    @classmethod
    def load(cls, path: PathLike) -> "Weights":
        """Read what ``save`` wrote.

        Raises:
            FileNotFoundError: There is no such file.
            WeightsError: It holds something else.
        """
        try:
            plain = json.loads(Path(path).read_text("utf-8"))
            if plain["format"] != FORMAT:
                raise ValueError(f"expected format {FORMAT}, got {plain['format']!r}")
            return cls(
                _combination(plain["with_descriptor"], descriptor=True),
                _combination(plain["geometry"], descriptor=False),
                dict(plain["about"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise WeightsError(
                f"{printable_path(path)}: not the weights of a verifier ({error}); write them with "
                "benchmarks/release/fit_verifier.py"
            ) from error


def figures_of(support: Support, descriptor_score: float | None = None) -> dict[str, float]:
    """What a combination is made of; every figure grows with the likelihood of a copy."""
    figures = {
        "cells": math.log1p(support.cells),
        "sure_cells": math.log1p(support.sure_cells),
        "matched": support.inliers / max(support.visible, 20),
        "correlation": support.correlation,
        "agreeing": support.agreeing,
        "supported": math.log1p(support.cells) * support.agreeing,
    }
    if descriptor_score is not None:
        figures["descriptor"] = min(descriptor_score, SURE)
    return figures


FIGURES = ("cells", "sure_cells", "matched", "correlation", "agreeing", "supported")


def _plain(combination: Combination) -> dict[str, Any]:
    return {
        "bias": combination.bias,
        "weights": dict(combination.weights),
        "threshold": combination.threshold,
    }


def _combination(plain: Mapping[str, Any], *, descriptor: bool) -> Combination:
    known = {*FIGURES, "descriptor"} if descriptor else set(FIGURES)
    weights = {str(name): float(weight) for name, weight in plain["weights"].items()}
    if not set(weights) <= known:
        raise ValueError(f"unknown figures {sorted(set(weights) - known)}")
    made = Combination(float(plain["bias"]), weights, float(plain["threshold"]))
    if not all(map(math.isfinite, (made.bias, made.threshold, *weights.values()))):
        raise ValueError("a number that is not finite")
    return made
