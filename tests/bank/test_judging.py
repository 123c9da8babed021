"""No false promise: what looks alike to the model is a copy only if its pixels say so."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sscd_vec.bank import Bank
from sscd_vec.bank.exact import SecondLook
from sscd_vec.bank.judging import judge_pair, verified
from sscd_vec.bank.results import Copies
from sscd_vec.bank.tidy import link_copies, move_copies
from sscd_vec.normalize import Domain, Grade, Normalizer, Proof, Verdict
from sscd_vec.verify import Evidence
from tests.bank.conftest import COPY, COUNT, OpenBank
from tests.bank.test_exact import page, resaved
from tests.tiny_encoder import TinyEncoder
from tests.verify.test_everywhere import photographed

PAGES = 5


@pytest.fixture(scope="session")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Different letters of one company."""
    folder = tmp_path_factory.mktemp("letters")
    for seed in range(PAGES):
        page(seed).save(folder / f"page-{seed}.png", compress_level=1)
    return folder


@pytest.fixture
def mixed(images: Path, letters: Path) -> Path:
    """A folder of letters and drawings; one of each was saved again."""
    for file in letters.iterdir():
        shutil.copy(file, images)
    resaved(page(1)).save(images / "resaved.jpg", quality=95)
    drawing = Image.open(images / "image-03.png").convert("RGB")
    drawing.save(images / "drawing.jpg", quality=90)
    return images


@pytest.fixture(scope="session")
def careful(normalizer: Normalizer, drawn: Path, letters: Path) -> Normalizer:
    """Knows drawings, and that letters are something else."""
    inside = TinyEncoder().encode(sorted(drawn.iterdir()))
    outside = TinyEncoder().encode(sorted(letters.iterdir()))
    apart = outside.mean(0) - inside.mean(0)
    direction = (apart / np.linalg.norm(apart)).astype(np.float32)
    threshold = ((outside @ direction).min() + (inside @ direction).max()) / 2
    assert (outside @ direction).min() > (inside @ direction).max()
    return normalizer.with_domain(Domain(direction, float(threshold), outside))


def test_the_score_alone_would_call_letters_copies(open_bank: OpenBank, mixed: Path) -> None:
    with open_bank() as bank:
        bank.add(mixed)
        assert bank.search(page(9), k=1)[0].verdict == "copy"  # of a letter it never saw
        assert max(len(group.members) for group in bank.duplicates().groups) > PAGES


def test_a_letter_never_seen_is_not_a_copy(
    open_bank: OpenBank, place: str, mixed: Path, careful: Normalizer
) -> None:
    with open_bank(place, normalizer=careful) as bank:
        bank.add(mixed)
        matches = bank.search(page(9), k=PAGES)
        assert {match.verdict for match in matches} == {"unsure"}
        assert all(match.is_copy is False and match.score >= COPY for match in matches)
        assert "look alike" in matches[0].reason and "compare" not in matches[0].reason
        assert "compare their pixels" in matches[-1].reason  # only the best few are compared
    with open_bank(place, normalizer=None) as again:  # what is outside is on record
        flags = {Path(image.id).name: image.outside for image in again.images()}
        assert {flags[f"page-{n}.png"] for n in range(PAGES)} == {True}
        assert {flags[f"image-{n:02}.png"] for n in range(COUNT)} == {False}
        assert again.search(page(9), k=1)[0].verdict == "unsure"


def test_a_letter_saved_again_is_a_copy_and_so_is_a_drawing(
    open_bank: OpenBank, mixed: Path, careful: Normalizer
) -> None:
    with open_bank(normalizer=careful) as bank:
        bank.add(mixed)
        letter = bank.search(resaved(page(2), quality=60), k=1)[0]
        assert (Path(letter.id).name, letter.verdict) == ("page-2.png", "copy")
        assert letter.reason == "the same pixels everywhere"
        drawing = bank.search(mixed / "drawing.jpg", k=2)
        assert {match.verdict for match in drawing} == {"copy"}
        assert "pixels" not in drawing[0].reason  # its score says enough


def test_without_a_file_a_letter_stays_unsure(open_bank: OpenBank, careful: Normalizer) -> None:
    with open_bank(normalizer=careful) as bank:
        bank.add([page(2)], ids=["letter"])
        match = bank.search(page(2))[0]
        assert (match.verdict, match.is_copy) == ("unsure", False)
        assert "compare their pixels" in match.reason
        described = bank.encoder.encode([page(2)])
        assert bank.search_descriptors([described])[0][0].verdict == "unsure"


def test_an_image_outside_that_shows_a_known_one_is_judged_by_its_score(
    open_bank: OpenBank, normalizer: Normalizer, images: Path
) -> None:
    rows = np.eye(8, TinyEncoder.dim, dtype=np.float32)
    everything = Domain(rows[0], -2.0, rows)
    nothing = Domain(everything.direction, 2.0, everything.background)
    with open_bank(normalizer=normalizer.with_domain(nothing)) as bank:
        bank.add(images)
        bank.replace_normalizer(normalizer.with_domain(everything))
        query = bank.encoder.encode([images / "image-03.png"])
        match = bank.search_descriptors([query], k=1)[0][0]
        assert (Path(match.id).name, match.verdict) == ("image-03.png", "copy")


def test_files_that_are_gone_leave_a_reason(
    open_bank: OpenBank, mixed: Path, careful: Normalizer
) -> None:
    with open_bank(normalizer=careful) as bank:
        bank.add(mixed)
        for file in mixed.glob("page-*.png"):
            file.unlink()
        (mixed / "resaved.jpg").unlink()
        match = bank.search(page(2), k=1)[0]
        assert match.verdict == "unsure" and "could not be compared" in match.reason
    assert SecondLook(None)(page(1)) is None and SecondLook(page(1))(None) is None


@pytest.mark.parametrize("backend", ["memory", "faiss"])
def test_duplicates_list_letters_apart_and_nothing_moves_them(
    open_bank: OpenBank, mixed: Path, careful: Normalizer, tmp_path: Path, backend: str
) -> None:
    shutil.copy(mixed / "page-4.png", mixed / "same.png")
    with open_bank(
        None if backend == "memory" else tmp_path / "b.faiss", normalizer=careful
    ) as bank:
        bank.add(mixed)
        found = bank.duplicates()
    groups = [{Path(m.image.id).name for m in group.members} for group in found.groups]
    expected = [{"image-03.png", "drawing.jpg"}, {"page-1.png", "resaved.jpg"}]
    assert sorted(groups, key=min) == sorted([*expected, {"page-4.png", "same.png"}], key=min)
    judged = [copy.judged for group in found.groups for copy in group.copies]
    assert all(verdict is not None and verdict.grade == "copy" for verdict in judged)
    [unsure] = found.unsure
    assert {Path(m.image.id).name for m in unsure.members} >= {
        f"page-{n}.png" for n in range(PAGES)
    }
    assert unsure.verdict == "unsure" and "look alike" in unsure.leave_alone
    assert {copy.judged and copy.judged.grade for copy in unsure.copies} == {"unsure"}
    before = {file.name for file in mixed.iterdir()}
    everything = [*found.groups, *found.unsure]  # even if somebody asks for it
    linked = link_copies(everything, apply=True)
    assert {action.path.name for action in linked.actions} <= {"page-4.png", "same.png"}
    moved = move_copies(everything, tmp_path / "moved", apply=True)
    gone = before - {file.name for file in mixed.iterdir()}
    assert gone and gone == {action.path.name for action in moved.actions}
    pairs = [{"image-03.png", "drawing.jpg"}, {"page-1.png", "resaved.jpg"}]
    assert all(len(gone & pair) <= 1 for pair in [*pairs, {"page-4.png", "same.png"}])
    assert not gone & {f"page-{n}.png" for n in (0, 2, 3)}


def test_geometry_takes_letters_that_differ_from_the_unsure_ones(
    open_bank: OpenBank, careful: Normalizer, tmp_path: Path
) -> None:
    folder = tmp_path / "letters"
    folder.mkdir()
    for number in (1, 2):
        page(number).save(folder / f"page-{number}.png")
    resaved(page(1)).save(folder / "resaved.png")
    with open_bank(normalizer=careful) as bank:
        bank.add(folder)
        plain, verified = bank.duplicates(), bank.duplicates(verify=True)
    [unsure] = plain.unsure
    assert {Path(m.image.id).name for m in unsure.members} >= {"page-1.png", "page-2.png"}
    assert not verified.unsure
    [group] = verified.groups
    assert {Path(m.image.id).name for m in group.members} == {"page-1.png", "resaved.png"}


def test_two_images_are_judged_like_a_bank_of_them(careful: Normalizer, drawn: Path) -> None:
    encoder = TinyEncoder()

    def verdict(first: Image.Image, second: Image.Image) -> str:
        return judge_pair(careful, encoder.encode([first, second]), (first, second)).grade

    drawing = Image.open(drawn / "image-03.png").convert("RGB")
    assert verdict(page(1), page(2)) == "unsure"
    assert verdict(page(1), resaved(page(1))) == "copy"
    assert verdict(drawing, resaved(drawing)) == "copy"
    assert verdict(drawing, page(1)) == "no"


def test_a_bank_without_a_threshold_is_unsure_of_everything(images: Path) -> None:
    plain = Normalizer.identity(TinyEncoder.dim)
    with Bank(model=TinyEncoder(), normalizer=plain) as bank:
        bank.add(images)
        match = bank.search(images / "image-00.png")[0]
        assert (match.verdict, match.is_copy, match.threshold) == ("unsure", None, None)
        assert "no threshold is calibrated" in match.reason


@pytest.fixture(scope="session")
def doubtful(careful: Normalizer) -> Normalizer:
    """To it everything is something else, letters on a brown table too."""
    assert careful.domain is not None
    return careful.with_domain(replace(careful.domain, threshold=-2.0))


def test_geometry_decides_what_scores_and_frames_cannot(
    open_bank: OpenBank, mixed: Path, doubtful: Normalizer
) -> None:
    on_table = photographed(page(2))
    with open_bank(normalizer=doubtful) as bank:
        bank.add(mixed)
        assert bank.search(on_table, k=1)[0].verdict != "copy"
        best, *others = bank.search(on_table, verify=True)
        assert (Path(best.id).name, best.verdict) == ("page-2.png", "copy")
        assert best.reason == "aligned, they are the same everywhere"
        assert "copy" not in {match.verdict for match in others}
        stranger = bank.search(photographed(page(9)), verify=True)
        assert "copy" not in {match.verdict for match in stranger}


def test_duplicates_find_a_letter_scanned_askew_with_geometry_only(
    open_bank: OpenBank, mixed: Path, doubtful: Normalizer
) -> None:
    turned = page(2).rotate(1.5, Image.Resampling.BICUBIC, fillcolor="white")
    turned.save(mixed / "askew.jpg", quality=95)

    def with_page(found: Copies) -> list[set[str]]:
        names = [{Path(m.image.id).name for m in group.members} for group in found.groups]
        return [members for members in names if any("page" in name for name in members)]

    with open_bank(normalizer=doubtful) as bank:
        bank.add(mixed)
        resaved_only = [{"page-1.png", "resaved.jpg"}]
        assert with_page(bank.duplicates()) == resaved_only
        found = with_page(bank.duplicates(verify=True))
    assert sorted(found, key=max) == [{"page-2.png", "askew.jpg"}, *resaved_only]


@pytest.mark.parametrize(
    ("grade", "score", "visible", "proof", "expected"),
    [
        ("unsure", 0.9, 200, Proof(True, "same", "geometry"), "copy"),
        ("no", 0.9, 200, Proof(True, "same", "geometry"), "copy"),
        ("unsure", 0.9, 200, Proof(False, "other", "geometry"), "no"),
        ("unsure", 0.9, 200, Proof(None, "few places", "geometry"), "unsure"),
        ("unsure", 0.9, 200, None, "unsure"),
        ("unsure", 0.1, 200, None, "no"),
        ("unsure", 0.1, 10, None, "unsure"),
    ],
)
def test_a_close_look_decides_about_pairs_in_doubt(
    grade: Grade, score: float, visible: int, proof: Proof | None, expected: Grade
) -> None:
    judged = Verdict(0.6, grade, "", 0.2, None, None, 1000, in_doubt=True)
    evidence = Evidence(score, 0.5, 9, 9, 0.9, 0.9, 1, 1, False, None, (), (), 0.6, visible)
    found = verified(judged, evidence, 0.5, proof)
    assert (found.grade, found.score, found.basis) == (expected, score, "geometry")
    by_pixels = replace(judged, grade="copy", basis="pixels")
    assert verified(by_pixels, evidence, 0.5, proof).grade == "copy"
