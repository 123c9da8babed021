"""The folder that ships: weights in half precision, a fitted normalizer, false-match curves.

    python benchmarks release/ship_model make RUN... OUT --background DIR... --strangers DIR...
    python benchmarks release/ship_model check OUT SET --name threshold

``make`` fits whitening and the bias on the background photos, and on further photos how often
strangers score how high (``release/curves``): a rate of 1e-8 per comparison takes thousands of
them. What tells photos from documents, charts and screenshots is fitted on the background photos
and drawn images (``release/domain``). ``check`` says what the search threshold finds in another
set, a DISC-like one (``accuracy/make_disc_like``), beside what it promises.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import results
from accuracy.dataset import DiscSet, read_disc
from accuracy.evaluation import Candidates, best_per_query
from accuracy.related import RelatedPairs
from photos import find_photos
from release.curves import PHOTOS, choose, with_curves
from release.domain import fit_domain
from sscd_vec.encoder import Encoder
from sscd_vec.encoder.checkpoint import load_model, read_checkpoint, write_pretrained
from sscd_vec.encoder.config import EncoderConfig
from sscd_vec.normalize import Normalizer, Whitening
from sscd_vec.trainer.data import find_training_images
from sscd_vec.trainer.model import pooled_features
from sscd_vec.trainer.pixels import Storage, StreamedPixels

CANDIDATES = 10
WHITENING_EPS = 0.8  # on the choosing set 0.7 and 0.85 beat 0, 0.3 and 0.5
HEAD_PHOTOS, HEAD_EPS = 6400, 0.35
BACKGROUND_ROWS = 2500  # weights and normalizer stay below 13 MB


def make(options: argparse.Namespace) -> None:
    """Write the folder, then say what is in it."""
    config, weights = averaged(options.runs)
    if options.size:
        config = config.replace(size=options.size)
    if options.whitened:
        weights = with_blended_head(config, weights, options.background, options.whitened)
    write_pretrained(options.out, config, weights, dtype=torch.float16)
    encoder = Encoder.from_pretrained(options.out)
    background = encoder.encode(photo.read() for photo in find_photos(options.background))
    fitted = Normalizer.fit(
        background,
        eps=WHITENING_EPS,
        encoder=encoder,
        keep_background="float16",
        background_size=BACKGROUND_ROWS,
    )
    fitted = fitted.with_domain(fit_domain(encoder, fitted, background))
    images = choose(options.strangers, options.digits, PHOTOS)
    rows = encoder.encode(list(images.paths))
    related, force = RelatedPairs(), options.force
    fitted = with_curves(fitted, encoder, images.paths, rows, related, force=force)
    fitted.save(options.out / "normalizer.safetensors")


def averaged(runs: Sequence[Path]) -> tuple[EncoderConfig, dict[str, Tensor]]:
    """The mean of the weights of runs that began with one another's."""
    config, weights = read_checkpoint(runs[0])
    for run in runs[1:]:
        other, more = read_checkpoint(run)
        if other != config:
            raise ValueError(f"{run}: expected the model of {runs[0]}, {config}; got {other}")
        weights = {name: tensor + more[name] for name, tensor in weights.items()}
    return config, {name: (tensor / len(runs)).to(tensor.dtype) for name, tensor in weights.items()}


def with_blended_head(
    config: EncoderConfig, weights: dict[str, Tensor], places: Sequence[Path], share: float
) -> dict[str, Tensor]:
    """The weights with a head between the learned one and the whitening of the trunk's features.

    Descriptors of both heads, each brought to the same mean square, are put side by side and
    reduced to the head's dimensions by PCA: all of it linear, so again one layer.
    """
    if not 0 <= share <= 1 or config.head != "linear":
        raise ValueError(
            f"expected a share from 0 to 1 and a linear head, got {share:g} and {config.head!r}"
        )
    photos = StreamedPixels(find_training_images(places)[0], Storage(config.size))
    count = min(len(photos), HEAD_PHOTOS)
    model = load_model(config, weights)
    features = np.concatenate(list(pooled_features(model, photos, config.size, count)))
    whitening = Whitening.fit(features, eps=HEAD_EPS)
    centred = features - whitening.mean
    learned = weights["head.weight"].numpy()
    both = np.concatenate(
        [
            matrix * np.sqrt(part / np.square(centred @ matrix.T).sum(axis=1).mean())
            for matrix, part in ((whitening.matrix, share), (learned, 1 - share))
        ]
    )
    outputs = centred @ both.T
    _, directions = np.linalg.eigh(outputs.T @ outputs)
    head = directions[:, ::-1][:, : config.dim].T @ both
    head *= learned.std() / head.std()
    changed = {"head.weight": head, "head.bias": -head @ whitening.mean}
    return weights | {name: torch.from_numpy(array).float() for name, array in changed.items()}


def check(options: argparse.Namespace) -> None:
    """What the shipped threshold for a bank of this size finds in a set it never saw."""
    encoder = Encoder.from_pretrained(options.model)
    normalizer = Normalizer.load(options.model / "normalizer.safetensors")
    normalizer.check_encoder(encoder)
    disc = read_disc(options.set)
    candidates, matched = scored(normalizer, encoder, disc)
    threshold = normalizer.threshold("search", len(disc.references))
    accepted = candidates.scores >= threshold
    copied = {query for query, _ in disc.matches}
    strangers = [row for row, name in enumerate(disc.queries.ids) if name not in copied]
    false = np.isin(strangers, candidates.queries[accepted])
    figures = {
        "model": options.model.name,
        "threshold": round(threshold, 4),
        "promised false-match rate": normalizer.thresholds["search"].rate,
        "false-match rate": round(float(false.mean()), 5),
        "strangers": len(strangers),
        "precision": round(float(matched[accepted].mean()), 4),
        "recall": round(float(matched[accepted].sum()) / len(disc.matches), 4),
        "accepted pairs": int(accepted.sum()),
        "queries": len(disc.queries),
        "references": len(disc.references),
    }
    print(figures)
    if options.name:
        print(results.write(options.name, figures, encoder=encoder.fingerprint))


def scored(
    normalizer: Normalizer, encoder: Encoder, disc: DiscSet
) -> tuple[Candidates, NDArray[np.bool_]]:
    """The best references of every query, as a search returns them, and which are copies."""
    queries = normalizer.queries(encoder.encode(list(disc.queries.paths)))
    references = normalizer.references(encoder.encode(list(disc.references.paths)))
    found = best_per_query(queries, [references], CANDIDATES)
    return found, are_copies(found, disc)


def are_copies(found: Candidates, disc: DiscSet) -> NDArray[np.bool_]:
    """Which candidates the ground truth has."""
    pairs = zip(found.queries.tolist(), found.references.tolist(), strict=True)
    names = [(disc.queries.ids[query], disc.references.ids[row]) for query, row in pairs]
    return np.array([pair in disc.matches for pair in names])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(required=True)
    making = verbs.add_parser("make", help="write the folder")
    making.add_argument("runs", nargs="+", type=Path, help="trained encoders; averaged if several")
    making.add_argument("out", type=Path)
    making.add_argument("--background", nargs="+", type=Path, required=True)
    making.add_argument(
        "--strangers", nargs="+", type=Path, required=True, help="folders of other photos"
    )
    making.add_argument("--force", action="store_true", help="keep what calibration refuses")
    making.add_argument("--digits", default="", help="last digits of the strangers' names to take")
    making.add_argument("--size", type=int, help="input size, if not the run's own")
    making.add_argument(
        "--whitened",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="how much of the head becomes the whitening of the trunk's features, 0 to 1",
    )
    making.set_defaults(run_verb=make)
    checking = verbs.add_parser("check", help="measure the search threshold")
    checking.add_argument("model", type=Path)
    checking.add_argument("set", type=Path)
    checking.add_argument("--name", help="write results/NAME.json")
    checking.set_defaults(run_verb=check)
    options = parser.parse_args(arguments)
    options.run_verb(options)


if __name__ == "__main__":
    main()
