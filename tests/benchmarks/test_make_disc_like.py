import hashlib
import json
import tarfile
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from PIL import Image

from accuracy import make_disc_like
from accuracy.dataset import RECORDS, read_disc, read_records
from accuracy.edits import mix
from photos import find_photos, usable
from tests.benchmarks.conftest import jpeg, synthetic_photo


def checksums(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_same_seed_gives_the_same_bytes_from_folder_or_tar_and_any_number_of_workers(
    photo_folder: Path, disc_like: Path, tmp_path: Path
) -> None:
    tar = tmp_path / "photos.tar"
    with tarfile.open(tar, "w") as archive:
        for path in sorted(photo_folder.iterdir(), reverse=True):
            archive.add(path, path.name)
    again = tmp_path / "again"
    make_disc_like.main([str(tar), str(again), "--workers", "2", "--unmatched", "14"])
    assert checksums(again) == checksums(disc_like)
    other = tmp_path / "other"
    make_disc_like.main(
        [str(tar), str(other), "--workers", "1", "--unmatched", "14", "--seed", "1"]
    )
    assert checksums(other)["query_edits.jsonl"] != checksums(disc_like)["query_edits.jsonl"]


def test_pools_share_no_photo(disc_like: Path, photo_folder: Path) -> None:
    content = {hashlib.sha256(p.read_bytes()).digest(): p.name for p in photo_folder.iterdir()}
    split = {
        name: {
            content[hashlib.sha256(p.read_bytes()).digest()] for p in (disc_like / name).iterdir()
        }
        for name in ("references", "training")
    }
    records = read_records(disc_like / RECORDS).values()
    matched = {str(r["source"]) for r in records if r["reference_id"]}
    unmatched = {str(r["source"]) for r in records if not r["reference_id"]}
    others = {name for r in records for name in cast(list[str], r["others"])}
    assert matched and unmatched and others
    assert matched < split["references"]  # some references are distractors
    pools = [split["references"], split["training"], unmatched, others]
    for index, pool in enumerate(pools):
        for second in pools[index + 1 :]:
            assert not pool & second


def test_ground_truth_and_records_agree(disc_like: Path) -> None:
    disc = read_disc(disc_like)
    records = read_records(disc_like / RECORDS)
    assert tuple(records) == disc.queries.ids
    assert {(q, r["reference_id"]) for q, r in records.items() if r["reference_id"]} == disc.matches
    files = ("dev_queries_groundtruth.csv", "public_ground_truth.csv")
    dev, public = ((disc_like / name).read_text().splitlines() for name in files)
    assert [line.split(",")[0] for line in dev[1:]] == list(records)
    assert public == dev[: 1 + len(records) // 2]
    for path in (disc_like / "queries").iterdir():
        with Image.open(path) as image:
            assert min(image.size) >= 24 and image.mode == "RGB"


def test_an_interrupted_run_goes_on_and_ends_the_same(
    photo_folder: Path, disc_like: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "set"
    arguments = [str(photo_folder), str(out), "--workers", "1", "--unmatched", "14"]
    write = make_disc_like._write
    written = []

    def failing(path: Path, data: bytes) -> None:
        if path.parent.name == "queries":
            written.append(path)
            if len(written) == 6:
                raise KeyboardInterrupt
        write(path, data)

    monkeypatch.setattr(make_disc_like, "_write", failing)
    with pytest.raises(KeyboardInterrupt):
        make_disc_like.main(arguments)
    partial = out / "query_edits.jsonl.partial"
    with partial.open("a") as file:
        file.write('{"query_id": "Q000')  # a line cut off
    monkeypatch.setattr(make_disc_like, "_write", write)
    kept = {path: path.stat().st_mtime_ns for path in written[:5]}
    make_disc_like.main(arguments)
    assert checksums(out) == checksums(disc_like)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept


def test_another_set_in_the_folder_is_refused(photo_folder: Path, disc_like: Path) -> None:
    with pytest.raises(ValueError, match="other photos, seed"):
        make_disc_like.main([str(photo_folder), str(disc_like), "--unmatched", "14", "--seed", "9"])


def test_too_few_photos_is_said(photo_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="ask for fewer"):
        make_disc_like.main([str(photo_folder), str(tmp_path / "x"), "--references", "400"])


@pytest.mark.parametrize("name", sorted(mix.MIXTURE))
@pytest.mark.parametrize("size", [(96, 96), (160, 70)])
def test_every_edit_changes_the_picture_and_says_how(name: str, size: tuple[int, int]) -> None:
    source = synthetic_photo(3).resize(size)
    before = source.tobytes()
    for seed in range(4):
        rng = np.random.default_rng(seed)
        edited, strengths = mix.MIXTURE[name].edit(source, rng, lambda: synthetic_photo(4))
        assert source.tobytes() == before, "the source was changed in place"
        assert edited.mode == "RGB" and min(edited.size) >= 16
        assert edited.size != source.size or edited.tobytes() != before
        assert strengths and json.dumps(strengths)


def test_draw_takes_one_to_four_edits_one_of_a_family_composed_after_the_crop() -> None:
    counts = set()
    for seed in range(400):
        names = mix.draw(np.random.default_rng(seed))
        counts.add(len(names))
        families = [mix.MIXTURE[name].family for name in names]
        assert len(set(families)) == len(families)
        if "crop" in names and "composed" in families:
            assert names.index("crop") < families.index("composed")
        if "compress" in names:
            assert names[-1] == "compress"
    assert counts == {1, 2, 3, 4}


def test_unusable_files_and_repeats_are_left_out(tmp_path: Path) -> None:
    good = jpeg(synthetic_photo(1))
    (tmp_path / "a.jpg").write_bytes(good)
    (tmp_path / "b.jpg").write_bytes(good)
    (tmp_path / "c.jpg").write_bytes(b"not a picture")
    (tmp_path / "d.png").write_bytes(jpeg(synthetic_photo(2, side=40)))
    (tmp_path / "notes.txt").write_text("hello")
    assert [photo.name for photo in usable(find_photos([tmp_path]))] == ["a.jpg"]
    with pytest.raises(FileNotFoundError, match="absent"):
        find_photos([tmp_path / "nothing"])
    compressed = tmp_path / "photos.tar.gz"
    with tarfile.open(compressed, "w:gz") as archive:
        archive.add(tmp_path / "a.jpg", "a.jpg")
    with pytest.raises(ValueError, match="unpack it"):
        find_photos([compressed])
