"""What a normalizer consists of, as JSON settings and arrays: for its fingerprints and its file."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sscd_vec.normalize.score_norm import ScoreNorm
from sscd_vec.normalize.scorer import Scorer
from sscd_vec.normalize.threshold import Threshold
from sscd_vec.normalize.whitening import Whitening

Settings = dict[str, Any]
Arrays = dict[str, NDArray[Any]]


def reference_side(normalizer: Scorer) -> tuple[Settings, Arrays]:
    """What stored vectors depend on: encoder, whitening, layout."""
    settings: Settings = {
        "layout": "unit+2" if normalizer.unit else "length+3",
        "dim_in": normalizer.dim_in,
        "encoder": normalizer.encoder,
        "unit": normalizer.unit,
        "max_length": normalizer.max_length,
        "whitening": None,
    }
    w = normalizer.whitening
    if w is None:
        return settings, {}
    settings["whitening"] = {
        "mode": w.mode,
        "eps": w.eps,
        "count": w.count,
        "l2_before": w.l2_before,
        "unit_input": w.unit_input,
    }
    return settings, {
        "whitening.mean": w.mean,
        "whitening.matrix": w.matrix,
        "whitening.variances": w.variances,
    }


def query_side(normalizer: Scorer) -> tuple[Settings, Arrays]:
    """What may change without touching an index: beta, n, n_end, background, M, thresholds."""
    norm, thresholds = normalizer.score_norm, normalizer.thresholds
    settings: Settings = {
        "score_norm": None
        if norm is None
        else {"beta": norm.beta, "n": norm.n, "n_end": norm.n_end},
        "query_square": normalizer.lift.query_square,
        "background_precision": normalizer.background_precision,
        "thresholds": [thresholds[kind].to_dict() for kind in sorted(thresholds)],
    }
    if normalizer.background is None:
        return settings, {}
    return settings, {"background": normalizer.background.astype(normalizer.background_precision)}


def fields(settings: Settings, arrays: Arrays) -> dict[str, Any]:
    """The constructor's arguments back from both sides."""
    whitening = settings["whitening"]
    if whitening is not None:
        whitening = Whitening(
            **whitening,
            mean=arrays["whitening.mean"],
            matrix=arrays["whitening.matrix"],
            variances=arrays["whitening.variances"],
        )
    norm, background = settings["score_norm"], arrays.get("background")
    return {
        "dim_in": settings["dim_in"],
        "whitening": whitening,
        "score_norm": None if norm is None else ScoreNorm(**norm),
        "background": None if background is None else background.astype(np.float32),
        "encoder": settings["encoder"],
        "unit": settings["unit"],
        "max_length": settings["max_length"],
        "background_precision": settings["background_precision"],
        "thresholds": {t["kind"]: Threshold.from_dict(t) for t in settings["thresholds"]},
    }
