"""Images in, verdicts out."""

import io
import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sscd_vec.bank import Bank, BankError, BankMatch
from sscd_vec.bank.searching import merge_looks
from sscd_vec.bank.views import PENALTY
from sscd_vec.encoder.images import ImageError
from sscd_vec.files import find_images
from sscd_vec.normalize import Normalizer
from tests.bank.conftest import COUNT, OpenBank
from tests.tiny_encoder import TinyEncoder


def resaved(path: Path) -> bytes:
    buffer = io.BytesIO()
    Image.open(path).convert("RGB").save(buffer, "JPEG", quality=60)
    return buffer.getvalue()


def test_a_folder_goes_in_and_a_copy_is_found(
    open_bank: OpenBank, place: str, images: Path, tmp_path: Path
) -> None:
    original = images / "image-03.png"
    copy = tmp_path / "copy.jpg"
    copy.write_bytes(resaved(original))
    with open_bank(place) as bank:
        done = bank.add(images)
        assert (done.added, done.unchanged, done.unreadable) == (COUNT, 0, [])
        assert len(bank) == COUNT
        assert str(original) in bank
        assert "something else" not in bank
        best, *others = bank.search(copy, k=3)
        assert (best.id, best.path, best.is_copy) == (str(original), original, True)
        assert best.score > 0.95
        assert len(others) == 2
        assert not any(other.is_copy for other in others)
        assert bank.search(resaved(original))[0].id == str(original)
    with open_bank(place) as again:
        assert len(again) == COUNT
        assert again.search(copy)[0].id == str(original)


def test_again_only_new_and_changed_images_are_encoded(
    open_bank: OpenBank, place: str, images: Path, encoder: TinyEncoder
) -> None:
    with open_bank(place) as bank:
        bank.add(images)
        encoder.batches.clear()
        assert bank.add(images).unchanged == COUNT
        assert encoder.batches == []
        (images / "image-00.png").write_bytes((images / "image-01.png").read_bytes())
        (images / "new.png").write_bytes((images / "image-02.png").read_bytes())
        done = bank.add(images)
        assert (done.added, done.unchanged) == (2, COUNT - 1)
        assert sum(encoder.batches) == 2
        found = {match.id for match in bank.search(images / "image-01.png") if match.is_copy}
        assert found == {str(images / "image-00.png"), str(images / "image-01.png")}


def test_images_with_ids_of_ones_own(open_bank: OpenBank, place: str, images: Path) -> None:
    paths = sorted(images.iterdir())
    pixels = [np.asarray(Image.open(path).convert("RGB")) for path in paths]
    with open_bank(place) as bank:
        mixed: list[Any] = [pixels[0], Image.open(paths[1]), paths[2].read_bytes(), paths[3]]
        done = bank.add(mixed, ids=["a", "b", "c", "d"], metadata=[{"n": 1}, None, {"n": 3}, None])
        assert done.added == 4
        assert bank.add(mixed, ids=["a", "b", "c", "d"]).unchanged == 4
        match = bank.search(resaved(paths[2]))[0]
        assert (match.id, match.is_copy, match.path, match.metadata) == ("c", True, None, {"n": 3})
        assert bank.search(paths[3])[0].path == paths[3]
        assert bank.add([pixels[5]], ids=["a"]).added == 1  # another image under that id
        assert bank.search(pixels[5])[0].id == "a"
        assert not bank.search(pixels[0])[0].is_copy


def test_ids_and_images_must_fit(open_bank: OpenBank, images: Path) -> None:
    with open_bank() as bank:
        pixels = np.zeros((9, 9, 3), np.uint8)
        with pytest.raises(TypeError, match="need ids"):
            bank.add([pixels])
        with pytest.raises(TypeError, match="need ids"):
            bank.add(pixels)
        with pytest.raises(ValueError, match="expected 1 different"):
            bank.add([pixels], ids=["a", "b"])
        with pytest.raises(ValueError, match="of which 1 are different"):
            bank.add([pixels, pixels], ids=["a", "a"])
        with pytest.raises(ValueError, match="only with ids"):
            bank.add(images, metadata=[{}])
        with pytest.raises(FileNotFoundError, match="no such file"):
            bank.add(images / "absent")


def test_unreadable_files_are_listed_and_the_others_added(
    open_bank: OpenBank, place: str, images: Path
) -> None:
    (images / "broken.jpg").write_bytes(b"\xff\xd8\xff broken")
    (images / "empty.png").touch()
    with open_bank(place) as bank:
        done = bank.add(images)
        assert done.added == COUNT
        assert sorted(problem.path.name for problem in done.unreadable) == [
            "broken.jpg",
            "empty.png",
        ]
        with pytest.raises(ImageError, match=r"broken\.jpg"):
            bank.search(images / "broken.jpg")
        answers = {Path(answer.image).name: answer for answer in bank.search_many(images)}
        assert len(answers) == COUNT + 2
        assert answers["empty.png"].error == "the file is empty"
        assert answers["image-01.png"].matches[0].is_copy


def test_tars_are_added_and_found(open_bank: OpenBank, images: Path, tmp_path: Path) -> None:
    shard = tmp_path / "shard.tar"
    with tarfile.open(shard, "w") as archive:
        for path in sorted(images.iterdir()):
            archive.add(path, path.name)
    with open_bank(tmp_path / "known.faiss") as bank:
        assert bank.add(shard).added == COUNT
        match = bank.search(images / "image-04.png")[0]
        assert match.id == f"{shard}/image-04.png"
        assert match.image is not None and match.image.file is not None
        assert match.image.file.read() == (images / "image-04.png").read_bytes()
        assert bank.add(shard).unchanged == COUNT


def test_removed_images_are_gone(open_bank: OpenBank, place: str, images: Path) -> None:
    name = str(images / "image-03.png")
    with open_bank(place) as bank:
        bank.add(images)
        assert bank.remove([name, "never there"]) == 1
        assert len(bank) == COUNT - 1
        assert name not in bank
        assert not bank.search(name)[0].is_copy
        assert Path(name).exists()
        assert bank.add(images).added == 1


def test_kept_images_live_and_die_with_the_bank(
    open_bank: OpenBank, place: str, images: Path
) -> None:
    pixels = np.asarray(Image.open(images / "image-05.png").convert("RGB"))
    with open_bank(place) as bank:
        bank.add([pixels], ids=["upload"], keep=True)
        kept = bank.search(pixels)[0].path
        assert kept is not None and kept.parent.name == "uploads"
        assert bank.may_show(kept)
        assert bank.add([pixels], ids=["upload"], keep=True).unchanged == 1
        assert bank.remove("upload") == 1
        assert not kept.exists()


def test_a_bank_in_memory(open_bank: OpenBank, images: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    with open_bank() as bank:
        bank.add(images)
        assert bank.search(images / "image-02.png")[0].is_copy
        assert repr(bank) == f"Bank('a bank in memory', {COUNT} images)"
    assert sorted(tmp_path.rglob("*")) == before


def test_tiles_find_an_image_pasted_into_another(open_bank: OpenBank, images: Path) -> None:
    small = Image.open(images / "image-01.png").convert("RGB")
    noise = np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    canvas = Image.fromarray(noise).resize((2 * small.width, 2 * small.height))
    canvas.paste(small, (small.width, 0))
    with open_bank() as bank:
        bank.add(images)
        best = bank.search(canvas, tiles=2)[0]
        assert (Path(best.id).name, best.is_copy) == ("image-01.png", True)
        assert not bank.search(canvas)[0].is_copy
    with open_bank(tiles=2) as tiled:
        tiled.add([canvas], ids=["canvas"])
        assert tiled.search(small)[0].is_copy
        tiled.add([small.resize((40, 40))], ids=["canvas"])  # too small for crops: old ones go
        assert len(tiled.storage.index) == 1


def test_a_second_look_finds_what_is_small_in_the_query(
    encoder: TinyEncoder, open_bank: OpenBank, images: Path
) -> None:
    small = Image.open(images / "image-01.png").convert("RGB")
    canvas = Image.new("RGB", (2 * small.width, 2 * small.height), "red")
    canvas.paste(small, (small.width // 2, small.height // 2))
    stream = io.BytesIO()
    canvas.save(stream, "PNG")
    with open_bank() as bank:
        bank.add(images)
        encoder.scales.clear()
        for query in (canvas, io.BytesIO(stream.getvalue())):
            best = bank.search(query)[0]
            assert (Path(best.id).name, best.is_copy) == ("image-01.png", True)
            assert best.score == pytest.approx(1 - PENALTY, abs=0.02)
        assert encoder.scales == [1.0, 2.0] * 2
        assert not bank.search(canvas, scales="one")[0].is_copy
        assert bank.search(canvas, scales="both") == bank.search(canvas)
        encoder.scales.clear()
        assert bank.search(small)[0].is_copy
        assert encoder.scales == [1.0], "the first look decided"
        with pytest.raises(ValueError, match="expected one of"):
            bank.search(canvas, scales="twice")  # type: ignore[arg-type]


def test_two_looks_give_each_match_once() -> None:
    judge = Normalizer.identity(4).with_threshold(0.4).judge
    first = [BankMatch(name, score, judge(score)) for name, score in (("a", 0.5), ("b", 0.2))]
    found = ("b", 0.86), ("a", 0.47), ("c", 0.26)
    larger = [BankMatch(name, score, judge(score)) for name, score in found]
    merged = merge_looks(first, larger, 2)
    assert [(m.id, round(m.score, 6)) for m in merged] == [("b", 0.86), ("a", 0.5)]


def test_threshold_given_calibrated_or_unknown(
    encoder: TinyEncoder, open_bank: OpenBank, images: Path
) -> None:
    query = images / "image-01.png"
    with open_bank(threshold=2.0) as strict:
        strict.add(images)
        assert strict.search(query)[0].is_copy is False
    with open_bank(normalizer=Normalizer.identity(encoder.dim)) as unknown:
        unknown.add(images)
        assert unknown.search(query)[0].is_copy is None


def test_copies_in_the_bank(open_bank: OpenBank, place: str, images: Path) -> None:
    (images / "copy.jpg").write_bytes(resaved(images / "image-02.png"))
    with open_bank(place) as bank:
        bank.add(images)
        found = bank.duplicates(heatmaps=True)
    assert (found.scanned, found.pairs, len(found.groups)) == (COUNT + 1, 1, 1)
    group = found.groups[0]
    assert Path(group.keep.image.id).name == "image-02.png"
    assert [Path(copy.image.id).name for copy in group.copies] == ["copy.jpg"]
    assert group.copies[0].score > 0.9
    assert group.copies[0].heatmap is not None


def test_copies_without_files_are_grouped_too(open_bank: OpenBank, images: Path) -> None:
    path = images / "image-02.png"
    with open_bank() as bank:
        bank.add([path.read_bytes(), resaved(path)], ids=["a", "b"])
        group = bank.duplicates().groups[0]
    assert {member.image.id for member in group.members} == {"a", "b"}


def test_files_that_changed_since_are_left_out_of_groups(open_bank: OpenBank, images: Path) -> None:
    for name in ("copy", "another"):
        (images / f"{name}.jpg").write_bytes(resaved(images / "image-02.png"))
    with open_bank() as bank:
        bank.add(images)
        (images / "copy.jpg").unlink()
        found = bank.duplicates()
    assert [problem.path.name for problem in found.unreadable] == ["copy.jpg"]
    assert len(found.groups[0].members) == 2


def test_what_a_bank_was_made_with_is_held(
    open_bank: OpenBank, images: Path, tmp_path: Path, normalizer: Normalizer
) -> None:
    place = tmp_path / "known.faiss"
    with open_bank(place) as bank:
        bank.add(images)
    with pytest.raises(BankError, match="made with tiles=1, got 2"):
        open_bank(place, tiles=2)
    with open_bank(place, normalizer=normalizer.with_threshold(0.5)) as bank:
        assert bank.threshold_of("search") == 0.5
    with open_bank(place, normalizer=None) as bank:
        assert bank.threshold_of("search") == 0.5  # kept with the bank
        background = np.eye(TinyEncoder.dim, dtype=np.float32)
        other = Normalizer.fit(background, whitening="centre", score_norm=None)
        with pytest.raises(BankError, match="make a new bank"):
            bank.replace_normalizer(other)


def test_places_that_are_no_banks(open_bank: OpenBank, tmp_path: Path) -> None:
    with pytest.raises(BankError, match="no bank at .*index IMAGES"):
        open_bank(tmp_path / "absent.faiss", create=False)
    assert not (tmp_path / "absent.faiss.bank").exists()
    (tmp_path / "foreign.faiss").write_bytes(b"x")
    with pytest.raises(BankError, match="exists but is not a bank"):
        open_bank(tmp_path / "foreign.faiss")
    with pytest.raises(BankError, match=r"expected NAME\.faiss"):
        open_bank(tmp_path / "known.sqlite")
    with pytest.raises(BankError, match="no Milvus answers"):
        open_bank("http://127.0.0.1:1/known")


def test_the_shipped_model_needs_three_lines(tmp_path: Path, images: Path) -> None:
    bank = Bank(tmp_path / "known.faiss")
    bank.add(images)
    match = bank.search(images / "image-03.png")[0]
    assert (Path(match.id).name, match.is_copy) == ("image-03.png", True)
    assert bank.settings.model == "sscd_lite0"
    bank.close()
    again = Bank(tmp_path / "known.faiss", read_only=True)
    assert again.search(images / "image-03.png")[0].is_copy
    again.close()


def test_images_given_as_files_keep_their_names(open_bank: OpenBank, images: Path) -> None:
    with open_bank() as bank:
        bank.add(images)
        files = find_images(images)
        assert [answer.image for answer in bank.search_many(files)] == [file.id for file in files]
        assert os.fspath(images) in next(iter(bank.search_many(images))).image
