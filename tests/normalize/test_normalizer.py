import json
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from dataclasses import FrozenInstanceError
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from sscd_vec import models
from sscd_vec.normalize import (
    Domain,
    FingerprintMismatch,
    Normalizer,
    NormalizerFileError,
    OverlapError,
    ScoreNorm,
    UncalibratedError,
    Whitening,
)
from sscd_vec.normalize.descriptors import Float32
from tests.normalize.made import descriptors


class Encoder:
    fingerprint = "encoder-a"


@pytest.fixture
def fitted() -> Normalizer:
    return Normalizer.fit(descriptors(400), encoder=Encoder())


def test_scores_are_the_papers(fitted: Normalizer) -> None:
    q, r = descriptors(5, seed=1), descriptors(7, seed=2)
    whitening = Whitening.fit(descriptors(400))
    zq, zr, zb = (whitening.apply(z) for z in (q, r, descriptors(400)))
    nearest = -np.sort(-(zq @ zb.T), axis=1)[:, :3]
    np.testing.assert_allclose(
        fitted.scores(q, r), zq @ zr.T - nearest.mean(axis=1)[:, None], atol=1e-6
    )
    np.testing.assert_allclose(
        fitted.queries(q) @ fitted.references(r).T, fitted.scores(q, r), atol=1e-6
    )
    np.testing.assert_allclose(fitted.biases(q), nearest.mean(axis=1), atol=1e-6)


def test_a_bias_reorders_no_querys_results(fitted: Normalizer) -> None:
    q, r = descriptors(5, seed=1), descriptors(40, seed=2)
    plain = fitted.with_score_norm(None).scores(q, r)
    assert (np.argsort(plain, axis=1) == np.argsort(fitted.scores(q, r), axis=1)).all()


@given(st.integers(0, 999), st.integers(1, 40), st.integers(1 << 8, 1 << 20))
@settings(max_examples=30, deadline=None)
def test_any_permutation_of_rows_permutes_the_result(seed: int, rows: int, memory: int) -> None:
    made = Normalizer.fit(descriptors(400))
    z = descriptors(rows, seed=seed)
    order = np.random.default_rng(seed).permutation(rows)
    for use in (partial(made.queries, memory=memory), made.references, made.biases):
        np.testing.assert_allclose(use(z)[order], use(z[order]), atol=1e-6)
    scores, permuted = made.scores(z, z), made.scores(z[order], z[order])
    np.testing.assert_allclose(scores[np.ix_(order, order)], permuted, atol=1e-6)


def test_symmetric_scores_are_the_smaller_direction(fitted: Normalizer) -> None:
    a, b = descriptors(6, seed=1), descriptors(8, seed=2)
    expected = np.minimum(fitted.scores(a, b), fitted.scores(b, a).T)
    np.testing.assert_allclose(fitted.symmetric_scores(a, b), expected, atol=1e-6)


def test_one_descriptor_and_none(fitted: Normalizer) -> None:
    assert fitted.queries(descriptors(1)[0]).shape == (1, 26)
    assert fitted.queries(np.zeros((0, 24), dtype=np.float32)).shape == (0, 26)
    assert fitted.references(np.zeros((0, 24), dtype=np.float32)).shape == (0, 26)


def test_identity_is_cosine() -> None:
    q, r = descriptors(5), descriptors(6, seed=1)
    identity = Normalizer.identity(24)
    np.testing.assert_allclose(identity.scores(q, r), q @ r.T, atol=1e-6)
    assert identity.lifted_dim == 26 and identity.background is None
    with pytest.raises(ValueError, match="unit length"):
        identity.queries(2 * q)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"whitening": "centre"},
        {"whitening": None},
        {"whitening": None, "unit": False},
        {"score_norm": None},
        {"whitening": None, "score_norm": None},
        {"dim": 11, "keep_background": "float16"},
        {"l2_before": True, "eps": "oas", "background_size": 50},
    ],
)
def test_saved_and_loaded_bit_for_bit(tmp_path: Path, options: dict[str, object]) -> None:
    made = Normalizer.fit(descriptors(400), encoder="e", **options)  # type: ignore[arg-type]
    made = made.with_threshold(0.25).with_threshold(0.5, "tiled")
    made.save(tmp_path / "n.safetensors")
    loaded = Normalizer.load(tmp_path / "n.safetensors")
    z = descriptors(9, seed=3)
    assert (loaded.queries(z) == made.queries(z)).all()
    assert (loaded.references(z) == made.references(z)).all()
    assert loaded.reference_fingerprint == made.reference_fingerprint
    assert loaded.query_fingerprint == made.query_fingerprint
    assert loaded.thresholds == made.thresholds and loaded.encoder == "e"
    assert [p.name for p in tmp_path.iterdir()] == ["n.safetensors"]


def test_float16_halves_the_background(tmp_path: Path) -> None:
    for keep in ("float32", "float16"):
        options: dict[str, object] = {"keep_background": keep}
        Normalizer.fit(descriptors(4000), **options).save(tmp_path / keep)  # type: ignore[arg-type]
    sizes = [(tmp_path / keep).stat().st_size for keep in ("float32", "float16")]
    assert sizes[0] - sizes[1] == pytest.approx(4000 * 24 * 2, rel=0.01)


def test_what_an_index_depends_on(fitted: Normalizer) -> None:
    same = [
        fitted.with_threshold(0.3),
        fitted.with_score_norm(ScoreNorm(0.5)),
        fitted.with_score_norm(None),
        fitted.with_background(descriptors(100, seed=9)),
        Normalizer.fit(descriptors(400), encoder="encoder-a"),
    ]
    assert {n.reference_fingerprint for n in same} == {fitted.reference_fingerprint}
    assert len({n.query_fingerprint for n in [fitted, *same[:4]]}) == 5
    assert same[4].query_fingerprint == fitted.query_fingerprint
    others = [
        Normalizer.fit(descriptors(400), encoder="encoder-b"),
        Normalizer.fit(descriptors(400)),
        Normalizer.fit(descriptors(400), encoder="encoder-a", whitening="centre"),
        Normalizer.fit(descriptors(400), encoder="encoder-a", dim=20),
        Normalizer.fit(descriptors(401), encoder="encoder-a"),
        Normalizer.fit(descriptors(400), encoder="encoder-a", whitening=None),
        Normalizer.fit(descriptors(400), encoder="encoder-a", whitening=None, unit=False),
    ]
    assert len({n.reference_fingerprint for n in [fitted, *others]}) == 8


def test_changing_the_query_side_drops_thresholds(fitted: Normalizer) -> None:
    calibrated = fitted.with_threshold(0.3)
    assert calibrated.threshold() == 0.3
    for changed in (
        calibrated.with_score_norm(ScoreNorm(0.5)),
        calibrated.with_background(descriptors(100)),
    ):
        with pytest.raises(UncalibratedError, match="calibrate"):
            changed.threshold()


def test_it_cannot_be_changed(fitted: Normalizer) -> None:
    with pytest.raises(FrozenInstanceError):
        fitted.dim_in = 3  # type: ignore[misc]  # the point of the test
    with pytest.raises(TypeError):
        fitted.thresholds["search"] = 1  # type: ignore[index]  # the point of the test
    assert fitted.background is not None
    with pytest.raises(ValueError, match="read-only"):
        fitted.background[0] = 0


def test_another_encoder_is_refused(fitted: Normalizer) -> None:
    z = descriptors(2)
    fitted.queries(z, encoder=Encoder())
    for use in (fitted.queries, fitted.references):
        with pytest.raises(FingerprintMismatch, match="encoder-a, got encoder encoder-b"):
            use(z, encoder="encoder-b")
    Normalizer.fit(descriptors(400)).queries(z, encoder="encoder-b")  # nothing to compare with


@pytest.mark.parametrize("keep", ["float32", "float16"])
def test_a_background_among_the_references_is_reported(keep: str) -> None:
    references = descriptors(100, seed=4)
    background = descriptors(400)
    background[[7, 300]] = references[[50, 2]]
    options: dict[str, object] = {"keep_background": keep}
    made = Normalizer.fit(background, **options)  # type: ignore[arg-type]
    with pytest.raises(OverlapError, match="2 background rows") as caught:
        made.check_overlap(references)
    assert np.asarray(caught.value.pairs).tolist() == [[7, 50], [300, 2]]
    with pytest.raises(OverlapError):
        Normalizer.fit(background, references=references)
    Normalizer.fit(descriptors(400), references=references)


@pytest.mark.parametrize(
    "options",
    [
        {"score_norm": None},  # nothing of it is kept
        {"background_size": 3},  # neither row is kept
        {"whitening": None, "score_norm": None},
        {"whitening": Whitening.fit(descriptors(400)), "score_norm": None},
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_all_of_a_background_is_compared_with_the_references(
    options: dict[str, object], streamed: bool
) -> None:
    references = descriptors(100, seed=4)
    background = descriptors(400)
    background[[7, 300]] = references[[50, 2]]
    given = iter(np.array_split(background, 4)) if streamed else background
    with pytest.raises(OverlapError, match="2 background rows") as caught:
        Normalizer.fit(given, references=references, **options)  # type: ignore[arg-type]
    assert np.asarray(caught.value.pairs).tolist() == [[7, 50], [300, 2]]
    clean = iter(np.array_split(descriptors(400), 4)) if streamed else descriptors(400)
    Normalizer.fit(clean, references=references, **options)  # type: ignore[arg-type]


def test_a_generator_gives_what_an_array_gives() -> None:
    background = descriptors(500)
    array = Normalizer.fit(background, background_size=60, seed=3)
    streamed = Normalizer.fit(iter(np.array_split(background, 1)), background_size=60, seed=3)
    assert streamed.background is not None and streamed.background.shape == (60, 24)
    assert streamed.query_fingerprint == array.query_fingerprint
    assert streamed.whitening is not None and streamed.whitening.count == 500
    given = Normalizer.fit(iter([background]), whitening=Whitening.fit(background))
    assert given.query_fingerprint == Normalizer.fit(background).query_fingerprint


def test_a_sample_of_a_long_background_never_holds_all_of_it() -> None:
    batch_bytes = 2000 * 24 * 4

    def batches() -> Iterator[Float32]:
        for seed in range(40):
            yield descriptors(2000, seed=seed)

    tracemalloc.start()
    made = Normalizer.fit(batches(), background_size=500)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert made.whitening is not None and made.whitening.count == 80_000
    assert made.background is not None and len(made.background) == 500
    # float64 copies of a batch, in the generator and in the moments: far from all 40 batches
    assert peak < 12 * batch_bytes


def test_it_shows_its_settings_not_its_arrays(fitted: Normalizer) -> None:
    assert "encoder-a" in repr(fitted) and "array(" not in repr(fitted)


def test_products_supplied_from_outside(fitted: Normalizer, tmp_path: Path) -> None:
    background = fitted.background
    assert background is not None
    searched: list[int] = []
    multiplied: list[tuple[int, ...]] = []

    def search(queries: Float32, k: int) -> Float32:
        searched.append(k)
        return np.sort(queries @ background.T, axis=1)[:, -k:]

    def matmul(rows: Float32, matrix: Float32) -> Float32:
        multiplied.append(matrix.shape)
        return np.asarray(np.einsum("nd,de->ne", rows, matrix))

    z = descriptors(5, seed=1)
    outside = fitted.with_products(matmul, search)
    np.testing.assert_allclose(outside.queries(z), fitted.queries(z), atol=1e-6)
    assert searched == [3] and multiplied == [(24, 24)]
    assert outside.query_fingerprint == fitted.query_fingerprint
    outside.save(tmp_path / "n")
    loaded = Normalizer.load(tmp_path / "n")
    assert (loaded.queries(z) == fitted.queries(z)).all() and len(multiplied) == 1
    # Another background makes the search wrong and leaves the whitening as it was.
    other = outside.with_background(descriptors(100, seed=9))
    assert other.search is None and other.matmul is matmul
    back = outside.with_products()
    assert back.search is None and (back.queries(z) == fitted.queries(z)).all()


def unit_rows(count: int, dim: int, seed: int = 0) -> Float32:
    rows = np.random.default_rng(seed).normal(size=(count, dim))
    return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True), dtype=np.float32)


@pytest.mark.parametrize("streamed", [False, True])
def test_few_rows_of_the_shipped_model_keep_its_whitening(
    caplog: pytest.LogCaptureFixture, streamed: bool
) -> None:
    shipped = Normalizer.from_pretrained()
    assert shipped.encoder is not None and shipped.whitening is not None
    few = unit_rows(2 * shipped.dim_in, shipped.dim_in)
    given = iter(np.array_split(few, 3)) if streamed else few
    made = Normalizer.fit(given, encoder=shipped.encoder)
    assert f"{len(few)} rows are too few" in caplog.text and "whitening='whiten'" in caplog.text
    assert made.reference_fingerprint == shipped.reference_fingerprint
    assert made.background is not None and len(made.background) == len(few)
    same = shipped.with_background(few, keep="float32")
    assert made.query_fingerprint == same.query_fingerprint and same.thresholds == {}
    own = Normalizer.fit(few, whitening="whiten", encoder=shipped.encoder)
    assert own.whitening is not None and own.whitening.count == len(few)
    shrunk = Normalizer.fit(few, eps="oas", encoder=shipped.encoder)
    assert shrunk.whitening is not None and shrunk.whitening.count == len(few)


def test_few_rows_of_another_model_are_fitted_with_a_warning_or_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    few = descriptors(100)
    for encoder in (None, "another"):
        caplog.clear()
        made = Normalizer.fit(few, encoder=encoder)
        assert made.whitening is not None and made.whitening.count == 100
        assert "from 100 rows" in caplog.text
        with pytest.raises(ValueError, match="20 rows vary in 19 directions"):
            Normalizer.fit(few[:20], encoder=encoder)


def test_enough_rows_of_the_shipped_model_are_whitened_afresh() -> None:
    """Ten rows per dimension; its fingerprint alone does not bring the shipped whitening back."""
    encoder = Normalizer.from_pretrained().encoder
    made = Normalizer.fit(descriptors(240), encoder=encoder)
    assert made.whitening is not None and made.whitening.count == 240


def test_the_shipped_normalizer_by_name_folder_and_file() -> None:
    shipped = Normalizer.from_pretrained()
    assert {"search", "symmetric", "tiled"} <= set(shipped.thresholds)
    path = models.normalizer_path()
    for place in (path, path.parent, str(path.parent), path.parent.name):
        assert Normalizer.from_pretrained(place).query_fingerprint == shipped.query_fingerprint
    with pytest.raises(FileNotFoundError, match="no_such_model"):
        Normalizer.from_pretrained("no_such_model")


def test_malformed_settings_are_refused() -> None:
    background = descriptors(400)
    with pytest.raises(ValueError, match="at least n_end = 3 rows, got 2"):
        Normalizer.fit(descriptors(2), whitening=None)
    with pytest.raises(ValueError, match="only with whitening"):
        Normalizer.fit(background, whitening=None, dim=3)
    with pytest.raises(ValueError, match="unit length"):
        Normalizer.fit(2 * background, whitening=None)
    with pytest.raises(ValueError, match="longest"):
        Normalizer.fit(2 * background, whitening=None, unit=False, max_length=1.0)
    for length in (float("nan"), float("inf"), -1.0):
        with pytest.raises(ValueError, match="more than 0 and finite"):
            Normalizer.fit(background, whitening=None, unit=False, max_length=length)
    with pytest.raises(ValueError, match="only with unit=False, got 2"):
        Normalizer.fit(background, whitening=None, max_length=2.0)
    for options in ({"unit": False}, {"max_length": 2.0}):
        with pytest.raises(ValueError, match="whitened vectors have unit length"):
            Normalizer.fit(background, **options)
    with pytest.raises(ValueError, match="at least 500 rows to keep, got 400"):
        Normalizer.fit(background, background_size=500)
    with pytest.raises(ValueError, match="no background"):
        Normalizer.identity(3).with_score_norm(ScoreNorm())
    with pytest.raises(ValueError, match="at least n_end = 401 rows, got 400"):
        Normalizer.fit(background).with_score_norm(ScoreNorm(1.0, 1, 401))


def test_unreadable_files_say_why(tmp_path: Path, fitted: Normalizer) -> None:
    path = tmp_path / "n.safetensors"
    with pytest.raises(FileNotFoundError, match="no such normalizer"):
        Normalizer.load(path)
    fitted.save(path)
    content = path.read_bytes()
    for length in (0, 5, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(NormalizerFileError, match="truncated"):
            Normalizer.load(path)
    path.write_bytes(b"not a normalizer at all, but long enough to look at")
    with pytest.raises(NormalizerFileError, match="not a normalizer"):
        Normalizer.load(path)
    flipped = bytearray(content)
    flipped[-40] ^= 1
    path.write_bytes(flipped)
    with pytest.raises(NormalizerFileError, match="altered or damaged"):
        Normalizer.load(path)
    save_file({"weight": np.zeros(3, dtype=np.float32)}, path, {"format": "pt"})
    with pytest.raises(NormalizerFileError, match="holds something else"):
        Normalizer.load(path)
    newer = {"format": "sscd-vec.normalizer", "version": "99", "settings": json.dumps({})}
    save_file({"weight": np.zeros(3, dtype=np.float32)}, path, newer)
    with pytest.raises(NormalizerFileError, match="version 99.*upgrade"):
        Normalizer.load(path)
    save_file({"weight": np.zeros(3, dtype=np.float32)}, path, newer | {"version": "1"})
    with pytest.raises(NormalizerFileError, match="incomplete"):
        Normalizer.load(path)


def test_a_domain_is_kept_on_the_query_side(tmp_path: Path, fitted: Normalizer) -> None:
    photos, others = fitted.whiten(descriptors(3000, seed=1)), fitted.whiten(-descriptors(40))
    made = fitted.with_domain(Domain.fit(photos, others))
    assert made.reference_fingerprint == fitted.reference_fingerprint
    assert made.query_fingerprint != fitted.query_fingerprint
    made.save(tmp_path / "n")
    loaded = Normalizer.load(tmp_path / "n")
    assert loaded.domain is not None and made.domain is not None
    assert loaded.query_fingerprint == made.query_fingerprint
    assert (loaded.domain.margins(others) == made.domain.margins(others)).all()
    # The whitening decides what it means, not the bias.
    for changed in (
        made.with_background(descriptors(100)),
        made.with_score_norm(None),
        made.with_threshold(0.3),
    ):
        assert changed.domain is made.domain
    assert made.with_domain(None).query_fingerprint == fitted.query_fingerprint
    with pytest.raises(ValueError, match="expected 24 dimensions, got 8"):
        fitted.with_domain(Domain.fit(unit_rows(3000, 8), unit_rows(40, 8, 1)))


def test_files_of_the_first_version_still_load(tmp_path: Path, fitted: Normalizer) -> None:
    """They have no curves, and fingerprints that do not mention any."""
    made = fitted.with_threshold(0.3)
    made.save(tmp_path / "n")
    with safe_open(tmp_path / "n", framework="numpy") as file:
        metadata, arrays = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}
    assert metadata["version"] == "2" and "curves" not in metadata["settings"]
    save_file(arrays, tmp_path / "old", metadata | {"version": "1"})
    loaded = Normalizer.load(tmp_path / "old")
    assert loaded.query_fingerprint == made.query_fingerprint and loaded.curves == {}


def test_importing_it_loads_no_framework() -> None:
    code = (
        "import sys, sscd_vec.normalize, sscd_vec.metrics, sscd_vec.plots;"
        "print([m for m in ('torch', 'faiss', 'pymilvus', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
