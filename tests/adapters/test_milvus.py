"""What is Milvus's own: Lite's traps, tenants, filters, credentials, paging, bulk files."""

import json
import logging
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import grpc
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pymilvus import MilvusClient, MilvusException

from faults.milvus_server import TOKEN, Certificate, MilvusProcess, running
from sscd_vec.adapters.arguments import Batch, Rows
from sscd_vec.adapters.matches import Matches
from sscd_vec.adapters.milvus import (
    Address,
    MilvusCollection,
    MilvusError,
    connection,
    rows,
    search,
    storage,
)
from sscd_vec.adapters.milvus.connection import Connection
from sscd_vec.adapters.milvus.rows import KEY_BYTES, Part, key_blocks
from sscd_vec.adapters.milvus.search import Page, Request, banded, growing, search_params
from sscd_vec.adapters.milvus.settings import ForeignCollection, Settings, VectorType
from sscd_vec.normalize import FingerprintMismatch, Normalizer

from .conftest import DIM, Photos, unit


@pytest.fixture(params=["lite", "server"])
def place(request: pytest.FixtureRequest, lite: str) -> Iterator[tuple[str, str]]:
    """URI and token of a Lite file and of a real server."""
    if request.param == "lite":
        yield lite, ""
    else:
        yield request.getfixturevalue("server").uri, TOKEN


def new_name() -> str:
    return f"c{uuid4().hex[:12]}"


# ------------------------------------------------------------------ one collection, opened again


def test_reopening_checks_who_made_it(
    place: tuple[str, str], photos: Photos, normalizer: Normalizer
) -> None:
    uri, token = place
    name = new_name()
    with MilvusCollection(uri, name, normalizer, token=token, metric="l2") as made:
        made.add(photos.ids, photos.references)
    other = Normalizer.fit(unit(np.random.default_rng(9).normal(size=(500, DIM))))
    with pytest.raises(FingerprintMismatch) as error:
        MilvusCollection(uri, name, other, token=token)
    assert normalizer.reference_fingerprint in str(error.value)
    assert other.reference_fingerprint in str(error.value)
    with pytest.raises(ValueError, match="metric: collection .* was made with 'l2', got 'ip'"):
        MilvusCollection(uri, name, normalizer, token=token, metric="ip")
    changed = normalizer.with_score_norm(None)  # query side only
    with MilvusCollection(uri, name, changed, token=token) as opened:
        assert len(opened) == 600 and opened.settings is not None
        assert opened.settings.metric == "l2"
        found = opened.search(photos.queries, 5)
        best = -np.sort(-changed.scores(photos.queries, photos.references), axis=1)[:, :5]
        np.testing.assert_allclose(found.scores.reshape(best.shape), best, atol=1e-4)
        opened.drop()
        client = opened._storage.connection.client
        client.create_collection("theirs", dimension=8)
        with pytest.raises(ForeignCollection, match="was not made by sscd-vec"):
            MilvusCollection(uri, "theirs", normalizer, token=token)
        client.drop_collection("theirs")


def test_awkward_ids_and_metadata_survive(
    place: tuple[str, str], photos: Photos, normalizer: Normalizer
) -> None:
    uri, token = place
    ids = [
        'it\'s "quoted"',
        "back\\slash",
        "new\nline",
        "képek/ő.jpg",
        "写真 1",
        "a]b, c",
        "%_'\\''",
    ]
    metadata = [{"tag": "x' or 1==1", "n": n, "deep": {"list": [1, None, "ö"]}} for n in range(7)]
    with MilvusCollection(uri, new_name(), normalizer, token=token) as index:
        index.add(ids, photos.references[:7], metadata)
        found = index.search(photos.references[:7], 1)
        assert found.ids.tolist() == ids
        assert list(found.metadata or []) == metadata
        assert all(i in index for i in ids)
        assert (
            index.search(photos.references[:1], 9, filter="n > 4 and deep['list'][0] == 1").counts
            == 2
        )
        assert index.search(photos.references[:1], 3, metadata=False).metadata is None
        assert index.present([*ids, "other"]) == set(ids)
        assert index.remove(ids[:6]) == 6 and len(index) == 1 and ids[6] in index
        for bad in ({"id": 1}, {"vector": 1}, {"$meta": 1}):
            with pytest.raises(ValueError, match="taken by the collection"):
                index.add("z", photos.references[0], bad)
        with pytest.raises(ValueError, match="what JSON can hold"):
            index.add("z", photos.references[0], {"x": float("inf")})
        index.drop()


def test_control_characters_in_ids(
    place: tuple[str, str], photos: Photos, normalizer: Normalizer
) -> None:
    uri, token = place
    ids = ["nul\0", "bell\a", "tab\t", "return\r\n", "\\u0000", "\x7f\x1f"]
    with MilvusCollection(uri, new_name(), normalizer, token=token) as index:
        index.add(ids, photos.references[:6])
        assert index.present([*ids, "u0000"]) == set(ids)
        assert index.remove(ids) == 6 and len(index) == 0
        index.drop()


def test_ids_the_collection_cannot_hold(
    place: tuple[str, str], photos: Photos, normalizer: Normalizer
) -> None:
    uri, token = place
    name = new_name()
    with MilvusCollection(uri, name, normalizer, token=token, id_length=10) as index:
        index.add("é" * 5, photos.references[0])
    with MilvusCollection(uri, name, normalizer, token=token) as index:  # it knows its limit
        with pytest.raises(ValueError, match="at most 10 bytes, got 12 .* a larger id_length"):
            index.add(["a", "é" * 6], photos.references[:2])
        with pytest.raises(ValueError, match="Unicode text"):
            index.add("a\udcff", photos.references[0])
        with pytest.raises(ValueError, match="what JSON can hold"):
            index.add("a", photos.references[0], {"file": "\udcff"})
        for wrong in ({3: 4}, {"a": [{3: 4}]}):
            with pytest.raises(TypeError, match=r"names that are strings, got \[3\]"):
                index.add("a", photos.references[0], wrong)  # type: ignore[arg-type]  # the point
        assert len(index) == 1 and np.str_("é" * 5) in index
        index.drop()
    with pytest.raises(ValueError, match="id_length: expected 1 to 65535 bytes, got 0"):
        MilvusCollection(uri, name, normalizer, token=token, id_length=0)


def test_what_cannot_be_an_id_is_not_there(
    place: tuple[str, str], photos: Photos, normalizer: Normalizer
) -> None:
    uri, token = place
    for ids in (photos.ids[:2], [0, 1]):
        with MilvusCollection(uri, new_name(), normalizer, token=token) as index:
            index.add(ids, photos.references[:2])
            assert ids[0] in index
            for never in ("", "\udcff", "x" * 70_000, 2**63, -(2**63) - 1, 10**30, True, None, ()):
                assert never not in index
            index.drop()


def test_integers_that_milvus_would_not_find_again(
    place: tuple[str, str], photos: Photos, normalizer: Normalizer
) -> None:
    uri, token = place
    lowest, highest = -(2**63), 2**63 - 1
    found = [lowest + 1, -1, 0, highest - 1]
    with MilvusCollection(uri, new_name(), normalizer, token=token) as index:
        for never in (lowest, highest):
            with pytest.raises(ValueError, match="Milvus would not find it again"):
                index.add([0, never], photos.references[:2])
        index.add(found, photos.references[:4])
        assert lowest not in index and highest not in index
        assert index.present([lowest, *found, highest, 7]) == set(found)
        assert index.remove([lowest, found[0], found[3], highest]) == 2 and len(index) == 2
        index.drop()


def test_a_first_add_that_is_refused_makes_no_collection(
    place: tuple[str, str], photos: Photos, normalizer: Normalizer
) -> None:
    uri, token = place
    broken = photos.references[:2].copy()
    broken[1, 3] = np.nan
    with MilvusCollection(uri, new_name(), normalizer, token=token) as index:
        with pytest.raises(ValueError, match="NaN or infinity in 1 of 2 rows"):
            index.add([1, 2], broken)
        with pytest.raises(ValueError, match="taken by the collection"):
            index.add([1, 2], photos.references[:2], [{"id": 1}, None])
        assert index.settings is None
        index.add(["a", "b"], photos.references[:2])  # no type of ids was fixed
        assert len(index) == 2
        index.drop()


def test_integers_and_names_that_milvus_cannot_store(
    place: tuple[str, str], photos: Photos, normalizer: Normalizer
) -> None:
    uri, token = place
    with MilvusCollection(uri, new_name(), normalizer, token=token) as index:
        edges = {"low": -(2**63), "high": 2**64 - 1, "list": [{"x": 2**64 - 1}]}
        index.add("edges", photos.references[0], edges)
        assert index.search(photos.references[0], 1)[0][0].metadata == edges
        for wrong in ({"n": 2**64}, {"n": [0, {"m": -(2**63) - 1}]}):
            with pytest.raises(ValueError, match="integers of 64 bits, got -?[0-9]+; keep longer"):
                index.add("z", photos.references[0], wrong)
        with pytest.raises(TypeError, match=r"names that are strings, got \[1\]"):
            index.add("z", photos.references[0], {"deep": [{1: 2}]})
        index.drop()


def test_many_long_ids_are_looked_up_in_parts() -> None:
    assert [len(part) for part in key_blocks(range(10_000))] == [4096, 4096, 1808]
    long = ["x" * 60_000] * 100
    parts = list(key_blocks(long))
    assert [key for part in parts for key in part] == long
    assert max(sum(map(len, part)) for part in parts) <= KEY_BYTES
    assert list(key_blocks([])) == []


def test_what_milvus_cannot_build_is_refused(
    place: tuple[str, str],
    photos: Photos,
    normalizer: Normalizer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    uri, token = place
    monkeypatch.setattr(storage, "INDEX_SECONDS", 0.2)
    name = new_name()
    with pytest.raises(ValueError, match="metric: expected one of .* got 'IP'"):
        MilvusCollection(uri, name, normalizer, token=token, metric="IP")  # type: ignore[arg-type]
    with MilvusCollection(uri, name, normalizer, token=token, index_type="NOPE") as index:
        with pytest.raises((ValueError, MilvusError), match="invalid index type|got 'NOPE'"):
            index.add(photos.ids, photos.references)
        assert len(index) == 0
    with MilvusCollection(uri, name, normalizer, token=token) as index:  # nothing was left behind
        index.add(photos.ids[:3], photos.references[:3])
        assert len(index) == 3
        index.drop()


def test_filters_reach_range_search(
    place: tuple[str, str], photos: Photos, normalizer: Normalizer
) -> None:
    uri, token = place
    with MilvusCollection(uri, new_name(), normalizer, token=token) as index:
        index.add(photos.ids, photos.references, [{"n": i} for i in range(600)])
        found = index.range_search(photos.queries[:4], -2.0, filter="n >= 590")
        assert found.counts.tolist() == [10] * 4 and found.complete
        parts = list(index.iterate_range(photos.queries[:4], -2.0, filter="n >= 590", block=3))
        assert [(begin, part.counts.tolist()) for begin, part in parts] == [
            (0, [10, 10, 10]),
            (3, [10]),
        ]
        with pytest.raises(ValueError, match="expected a number, None or 'calibrated', got 'low'"):
            index.iterate_range(photos.queries[:4], "low")  # type: ignore[arg-type]
        index.drop()


# ------------------------------------------------------------------ tenants


def test_tenants_on_a_server_do_not_see_each_other(
    server: MilvusProcess, photos: Photos, normalizer: Normalizer
) -> None:
    name = new_name()
    a = MilvusCollection(server.uri, name, normalizer, token=TOKEN, partition="tenant_a")
    b = MilvusCollection(server.uri, name, normalizer, token=TOKEN, partition="tenant_b")
    a.add(["same", "only_a"], photos.references[:2], [{"owner": "a"}, {"owner": "a"}])
    assert (
        len(b) == 0 and "same" not in b and b.search(photos.references[:1]).counts.tolist() == [0]
    )
    b.add(["same"], photos.references[2:3], [{"owner": "b"}])
    assert (len(a), len(b)) == (2, 1)
    assert a.search(photos.references[:1], 5)[0][0].metadata == {"owner": "a"}
    assert {m.metadata["owner"] for m in b.search(photos.references[:1], 5)[0] if m.metadata} == {
        "b"
    }
    assert b.remove(["same", "only_a"]) == 1
    assert len(a) == 2 and "same" in a
    a.drop()


def test_lite_refuses_to_take_an_id_from_another_tenant(
    lite: str, photos: Photos, normalizer: Normalizer
) -> None:
    a = MilvusCollection(lite, "photos", normalizer, partition="tenant_a")
    b = MilvusCollection(lite, "photos", normalizer, partition="tenant_b")
    a.add(["1", "2"], photos.references[:2])
    with pytest.raises(ValueError, match="belong to another partition"):
        b.add(["2", "3"], photos.references[2:4])
    b.add(["b/2"], photos.references[2:3])
    assert (len(a), len(b)) == (2, 1)
    assert "2" in a and "2" not in b
    assert a.search(photos.references[:1], 5).counts.tolist() == [2]
    a.close()


def test_a_partition_that_another_made_first_is_used(
    place: tuple[str, str],
    photos: Photos,
    normalizer: Normalizer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    uri, token = place
    name = new_name()
    both = [
        MilvusCollection(uri, name, normalizer, token=token, partition="tenant") for _ in range(2)
    ]
    both[0].add(["a"], photos.references[:1])
    assert both[1].present(["a"]) == {"a"}
    monkeypatch.setattr(both[1]._storage, "readable", lambda: False)  # as it was a moment before
    both[1].add(["b"], photos.references[1:2])
    assert len(both[0]) == 2
    both[1].close()
    both[0].drop()
    both[0].close()


@pytest.mark.parametrize("name", ["../../../out", "a/b", "a\\b", "..", "nul\0", "ö" * 128])
def test_a_tenant_of_lite_is_no_path(
    name: str, lite: str, photos: Photos, normalizer: Normalizer
) -> None:
    with pytest.raises(ValueError, match="partition: expected the name of a folder"):
        MilvusCollection(lite, "photos", normalizer, partition=name)
    with MilvusCollection(lite, "photos", normalizer, partition="ö" * 127) as index:
        index.add_batches([(photos.ids[:3], photos.references[:3])])
        assert len(index) == 3


def test_an_absolute_path_as_tenant_writes_nowhere(
    lite: str, tmp_path: Path, photos: Photos, normalizer: Normalizer
) -> None:
    with pytest.raises(ValueError, match="partition: expected the name of a folder"):
        MilvusCollection(lite, "photos", normalizer, partition=str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------ Lite's traps


def test_index_parameters_reach_lite(lite: str, photos: Photos, normalizer: Normalizer) -> None:
    with MilvusCollection(
        lite, "photos", normalizer, index_type="HNSW", index_params={"M": 6, "efConstruction": 44}
    ) as index:
        index.add_batches([(photos.ids, photos.references)])
    [manifest] = Path(lite).rglob("manifest.json")
    spec = json.loads(manifest.read_text())["index_specs"]["vector"]
    assert spec["build_params"] == {"M": 6, "efConstruction": 44}


def test_lite_flushes_before_it_searches_a_bulk_load(
    lite: str, normalizer: Normalizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []
    call = Connection.call

    def counting(self: Connection, verb: str, *args: object, **kwargs: object) -> object:
        called.append(verb)
        return call(self, verb, *args, **kwargs)

    monkeypatch.setattr(Connection, "call", counting)
    many = unit(np.random.default_rng(1).normal(size=(1500, DIM)))
    with MilvusCollection(lite, "photos", normalizer) as index:
        index.add(range(900), many[:900])
        index.search(many[:1])
        assert "flush" not in called, "a few rows are searched as they are"
        index.add(range(900, 1500), many[900:])
        index.search(many[:1])
        index.search(many[:1])
        assert called.count("flush") == 1


def test_a_second_process_is_told_what_to_do(
    lite: str, photos: Photos, normalizer: Normalizer
) -> None:
    holder = (
        "import sys; from pymilvus import MilvusClient; c = MilvusClient(sys.argv[1]); "
        "print('open', flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", holder, lite], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == b"open\n"
        with pytest.raises(MilvusError, match="another process has this Milvus Lite file open"):
            MilvusCollection(lite, "photos", normalizer)
    finally:
        child.communicate(b"")
    with MilvusCollection(lite, "photos", normalizer) as index:  # free again
        index.add(photos.ids[:3], photos.references[:3])
        assert len(index) == 3


def test_closing_one_leaves_another_of_the_same_file_open(
    lite: str, photos: Photos, normalizer: Normalizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(lite).parent)
    one = MilvusCollection(lite, "one", normalizer)
    two = MilvusCollection(Path(lite).name, "two", normalizer)  # the same, named otherwise
    one.add(photos.ids[:3], photos.references[:3])
    two.add(photos.ids[:4], photos.references[:4])
    one.close()
    one.close()
    assert len(two) == 4 and two.search(photos.references[:1], 1).ids.tolist() == ["r0"]
    with pytest.raises(MilvusError, match="closed here; open it again"):
        one.search(photos.references[:1])
    two.close()
    assert not connection._held_by_another(Path(lite) / "LOCK"), "free for another process"


def test_a_refused_collection_keeps_no_lite_file_open(
    lite: str, photos: Photos, normalizer: Normalizer
) -> None:
    with MilvusCollection(lite, "photos", normalizer) as index:
        index.add(photos.ids[:3], photos.references[:3])
        assert connection._held_by_another(Path(lite) / "LOCK")
    other = Normalizer.fit(unit(np.random.default_rng(9).normal(size=(500, DIM))))
    with pytest.raises(FingerprintMismatch):
        MilvusCollection(lite, "photos", other)
    assert not connection._held_by_another(Path(lite) / "LOCK")


def test_paths_that_are_no_lite_file(tmp_path: Path, normalizer: Normalizer) -> None:
    with pytest.raises(ValueError, match=r"path ending in \.db"):
        MilvusCollection(tmp_path / "photos", "photos", normalizer)
    (tmp_path / "old.db").write_bytes(b"SQLite format 3")
    with pytest.raises(ValueError, match="a file, but Milvus Lite 3 keeps a folder"):
        MilvusCollection(tmp_path / "old.db", "photos", normalizer)
    with pytest.raises(ValueError, match="expected http://"):
        MilvusCollection("ftp://host", "photos", normalizer)


def test_a_collection_made_after_it_was_looked_for(
    place: tuple[str, str], photos: Photos, normalizer: Normalizer
) -> None:
    uri, token = place
    name = new_name()
    early = [MilvusCollection(uri, name, normalizer, token=token) for _ in range(6)]
    # Of another metric; on a server of another width: the product quantizer's parts must divide it.
    kind: dict[str, Any] = {"metric": "l2"} if token == "" else {"index_type": "IVF_PQ"}
    params = {"m": 5, "nlist": 4} if token else {}
    made = MilvusCollection(uri, name, normalizer, token=token, index_params=params, **kind)
    made.add(range(300), photos.references[:300])
    assert early[0].search(photos.references[:3], 1).ids.tolist() == [0, 1, 2]
    assert early[1].range_search(photos.references[:3], 0.2).counts.tolist() == [1, 1, 1]
    [(begin, part)] = early[2].iterate_range(photos.references[:3], 0.2)
    assert begin == 0 and part.counts.tolist() == [1, 1, 1]
    with pytest.raises(TypeError, match="this index holds int ids, got str"):
        early[3].add(["a"], photos.references[:1])
    with pytest.raises(TypeError, match="this index holds int ids, got str"):
        early[4].remove(["a"])
    with pytest.raises(TypeError, match="this index holds int ids, got str"):
        early[5].present(["a"])
    made.drop()
    for each in (*early, made):
        each.close()


# ------------------------------------------------------------------ credentials and connections

SECRET = "pass-W0rd!"


def test_credentials_leave_the_uri() -> None:
    address = Address.parse(f"https://alice:{SECRET}@host:19530/archive")
    assert address.uri == "https://host:19530"
    assert (address.token, address.db_name) == (f"alice:{SECRET}", "archive")
    assert SECRET not in repr(address) and "alice" not in repr(address)
    assert address.hide(f"bad password {SECRET}") == "bad password ***"
    assert Address.parse("http://h:1", user="u", password="p", db_name="d").token == "u:p"
    assert Address.parse("http://h:1", token="key").token == "key"


@pytest.mark.parametrize(
    "uri",
    [
        "http//root:{}@host:19530",
        "http:/root:{}@host/photos.db",
        "root:{}@host:19530",
        "http://root:a/{}@host:19530",
        "http://root:{}#a@host:19530",
        "http://root:{}?a@host:19530",
        "milvus://root:{}@host",
        "http://root:{}@[host",
        "http://root:{}",
        "http://root:{}@host:port",
        "http://root:{}@host:65536",
        "http://root:{}@",
    ],
)
def test_a_mistyped_uri_is_refused_without_showing_its_password(uri: str) -> None:
    with pytest.raises(ValueError) as error:
        Address.parse(uri.format(SECRET))
    assert SECRET not in repr(error.value)


def test_a_wrong_password_is_refused_without_showing_it(
    server: MilvusProcess, normalizer: Normalizer, caplog: pytest.LogCaptureFixture
) -> None:
    uri = server.uri.replace("http://", f"http://root:{SECRET}@")
    with caplog.at_level(logging.DEBUG), pytest.raises(MilvusError) as error:
        MilvusCollection(uri, "photos", normalizer)  # a refusal is not waited out
    shown = [str(error.value), repr(error.value), caplog.text]
    cause: BaseException | None = error.value
    seen: set[int] = set()  # pymilvus makes errors their own cause
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        shown.append(str(cause))
        cause = cause.__cause__ or cause.__context__
    assert all(SECRET not in text for text in shown)
    assert "check token, user and password" in str(error.value)


def test_secrets_in_a_message_are_blacked_out() -> None:
    class Client:
        def search(self, **_: object) -> None:
            raise MilvusException(1, f"user root with {SECRET} may not")

        def close(self) -> None: ...

    made = Connection.__new__(Connection)
    made.address = Address("http://host:1", token=f"root:{SECRET}")
    made._timeout, made._retry_for, made._options, made._client = 1.0, 0.0, {}, Client()
    with pytest.raises(MilvusError, match=r"user root with \*\*\* may not") as error:
        made.call("search")
    assert error.value.__cause__ is None and error.value.__suppress_context__


def test_tls_and_token_are_passed_through(
    monkeypatch: pytest.MonkeyPatch, normalizer: Normalizer
) -> None:
    seen: dict[str, Any] = {}

    class Client:
        def __init__(self, uri: str, **kwargs: object) -> None:
            seen.update(kwargs, uri=uri)

        def __getattr__(self, verb: str) -> Any:  # noqa: ANN401
            return lambda *a, **k: seen.update(timeout_of_call=k["timeout"]) or False

    monkeypatch.setattr(connection, "MilvusClient", Client)
    index = MilvusCollection(
        "https://host:443",
        "photos",
        normalizer,
        token="key",
        db_name="archive",
        timeout=7,
        options={"secure": True, "server_pem_path": "ca.pem", "server_name": "host"},
    )
    assert seen == {
        "uri": "https://host:443",
        "token": "key",
        "db_name": "archive",
        "timeout": 7,
        "timeout_of_call": 7,
        "secure": True,
        "server_pem_path": "ca.pem",
        "server_name": "host",
    }
    assert repr(index) == "MilvusCollection('https://host:443', 'photos', partition='_default')"


def test_credentials_have_one_way_in(normalizer: Normalizer) -> None:
    with pytest.raises(ValueError, match="options: expected no credentials, got password") as error:
        MilvusCollection("http://host:1", "photos", normalizer, options={"password": SECRET})
    assert SECRET not in str(error.value)


def test_a_real_server_with_tls(
    tmp_path: Path, photos: Photos, normalizer: Normalizer, caplog: pytest.LogCaptureFixture
) -> None:
    right = Certificate.self_signed(tmp_path / "right")
    wrong = Certificate.self_signed(tmp_path / "wrong")
    with running(tmp_path / "milvus", authorized=True, certificate=right) as server:
        trusting = {"server_pem_path": str(right.pem), "server_name": "localhost"}
        deceived = {**trusting, "server_pem_path": str(wrong.pem)}
        # Strangers first: pymilvus keeps a channel that once was trusted.
        for uri, options in ((server.uri, deceived), (server.uri.replace("https", "http"), {})):
            with pytest.raises(MilvusError) as error:
                MilvusCollection(
                    uri, "photos", normalizer, token=TOKEN, options=options, timeout=2, retry_for=0
                )
            assert TOKEN not in str(error.value) + caplog.text
        with MilvusCollection(
            server.uri, "photos", normalizer, token=TOKEN, options=trusting
        ) as index:
            index.add(photos.ids, photos.references)
            assert len(index) == 600
            assert index.search(photos.queries[:3], 1).ids.tolist() == photos.ids[:3]


def test_back_off_then_success_or_a_clear_end(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    clock = [0.0]

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        clock[0] += seconds

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    failures = [MilvusException(2, "server unavailable"), grpc.FutureTimeoutError()] * 4

    class Client:
        def __init__(self, *_: object, **__: object) -> None: ...

        def list_collections(self, timeout: float) -> str:
            if failures:
                raise failures.pop()
            return "done"

        def upsert(self, timeout: float) -> None:
            raise MilvusException(1100, "the dimension does not fit")

        def close(self) -> None: ...

    monkeypatch.setattr(connection, "MilvusClient", Client)
    made = Connection(Address("http://host:1"), 1.0, 60.0, {})
    assert len(pauses) == 8 and pauses[3] > 3 * pauses[0] and max(pauses) <= 6
    with pytest.raises(MilvusError, match="upsert failed: the dimension does not fit"):
        made.call("upsert")
    assert len(pauses) == 8, "what will not pass is not tried again"
    failures.extend([MilvusException(2, "server unavailable")] * 1000)
    with pytest.raises(MilvusError, match="unavailable"):
        made.call("list_collections")
    assert sum(pauses) < 130


def test_a_mistyped_filter_is_not_waited_for_whatever_it_says(
    server: MilvusProcess, photos: Photos, normalizer: Normalizer
) -> None:
    index = MilvusCollection(server.uri, new_name(), normalizer, token=TOKEN)
    index.add(photos.ids[:3], photos.references[:3])
    begin = time.monotonic()
    with pytest.raises(MilvusError, match="cannot parse expression"):
        index.search(photos.queries[:1], filter='state == "unavailable" or "not ready" andd')
    assert time.monotonic() - begin < 10, "nothing that passes"
    index.drop()


def test_a_collection_that_somebody_released_is_loaded_again(
    server: MilvusProcess, photos: Photos, normalizer: Normalizer
) -> None:
    index = MilvusCollection(server.uri, new_name(), normalizer, token=TOKEN, retry_for=20)
    index.add(photos.ids, photos.references)
    MilvusClient(server.uri, token=TOKEN).release_collection(index.name)
    assert index.search(photos.references[:3], 1).ids.tolist() == photos.ids[:3]
    index.drop()


# ------------------------------------------------------------------ sizes


def test_nothing_is_sent_of_a_large_call_with_a_bad_row(
    photos: Photos, normalizer: Normalizer, lite: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "REQUEST_BYTES", 20_000)
    with MilvusCollection(lite, "photos", normalizer) as index:
        index.add("there", photos.references[0])
        spoilt = photos.references.copy()
        spoilt[-1, 0] = np.nan
        with pytest.raises(ValueError, match="NaN or infinity"):
            index.add(photos.ids, spoilt)
        assert len(index) == 1
        index.add(photos.ids, photos.references)
        assert len(index) == 601


def test_requests_stay_under_the_message_limit(
    photos: Photos, normalizer: Normalizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "REQUEST_BYTES", 20_000)
    metadata: list[Any] = [{"text": "x" * (50 * (i % 40))} for i in range(600)]
    made = Settings.choose(normalizer, "ip", "FLAT", None, "str")
    added = Rows(photos.ids, photos.references, metadata)
    parts = [part.entities(made) for part in rows.parts(added, normalizer.references, made)]
    assert [row["id"] for part in parts for row in part] == photos.ids
    sizes = [sum(4 * 32 + len(json.dumps(row["text"])) for row in part) for part in parts]
    assert max(sizes) <= 20_000 and len(parts) < 60
    stored = np.stack([row["vector"] for part in parts for row in part])
    np.testing.assert_allclose(stored, normalizer.references(photos.references), atol=1e-6)
    monkeypatch.setattr(rows, "LARGEST_ROW", 1000)
    with pytest.raises(ValueError, match="per row"):
        list(rows.parts(added, normalizer.references, made))


@given(
    values=st.lists(st.integers(0, 6), max_size=60),
    limit=st.integers(2, 9),
    seen=st.booleans(),
    sign=st.sampled_from([1, -1]),
    order=st.randoms(use_true_random=False),
)
@settings(max_examples=200, deadline=None)
def test_pages_find_everything_once_however_many_tie(
    values: list[int], limit: int, seen: bool, sign: int, order: random.Random
) -> None:
    named = [(float(sign * v), f"i{n}") for n, v in enumerate(values)]
    order.shuffle(named)  # of ties a server may give any
    stored = sorted(named, key=lambda hit: -sign * hit[0])
    asked: list[Request] = []

    def is_asked_for(value: float, id: str, request: Request) -> bool:
        bounds = dict(re.findall(r'id (>=|<) "(\w+)"', request.filter))
        return (
            (request.best is None or sign * value <= sign * request.best)
            and id >= bounds.get(">=", "")
            and id < bounds.get("<", "j")
        )

    def ask(request: Request) -> Page:
        asked.append(request)
        hits = [hit for hit in stored if is_asked_for(*hit, request)][: request.limit]
        return Page(
            [i for _, i in hits], [v for v, _ in hits], [None] * len(hits) if seen else None
        )

    for pages in (list(banded(ask, limit, -sign * np.inf)), list(growing(ask, limit))):
        ids = [i for page in pages for i in page.ids]
        assert sorted(ids) == sorted(i for _, i in stored)
        scores = [sign * v for page in pages for v in page.values]
        assert scores == sorted(scores, reverse=True)
        assert len(asked) <= 10 + 8 * len(stored) / limit, "no more requests than pages, nearly"
        asked.clear()


STRANGE = [f'same "{i}\\' for i in range(100)]


@pytest.mark.parametrize(
    ("metric", "same_ids"), [("ip", STRANGE), ("l2", STRANGE), ("cosine", range(-50, 50))]
)
def test_range_search_beyond_the_page_limit_on_a_server(
    metric: Any,  # noqa: ANN401
    same_ids: Sequence[Any],
    server: MilvusProcess,
    photos: Photos,
    normalizer: Normalizer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(search, "FIRST_HITS", 16)
    monkeypatch.setattr(search, "PAGE_WITH_METADATA", 50)
    index = MilvusCollection(server.uri, new_name(), normalizer, token=TOKEN, metric=metric)
    # A hundred of the same picture: more ties than fit on a page.
    same = np.repeat(photos.references[:1], 100, axis=0)
    photo_ids: Sequence[Any] = photos.ids if same_ids is STRANGE else range(100, 700)
    index.add([*photo_ids, *same_ids], np.concatenate([photos.references, same]))
    found = index.range_search(photos.queries[:3], -1.0)
    scores = normalizer.scores(photos.queries[:3], np.concatenate([photos.references, same]))
    assert found.counts.tolist() == (scores >= -1.0).sum(axis=1).tolist()
    assert found.counts.min() > 650
    assert found.complete
    for query in range(3):
        ids = [match.id for match in found[query]]
        assert len(set(ids)) == len(ids)
        assert sorted(found.scores[found.queries == query], reverse=True) == list(
            found.scores[found.queries == query]
        )
    streamed = [part for _, part in index.iterate_range(photos.queries[:3], -1.0, block=1)]
    assert [len(part.ids) for part in streamed] == found.counts.tolist()
    index.drop()


@pytest.mark.parametrize("metric", ["ip", "l2"])
def test_more_real_hits_than_a_server_returns_at_once(
    metric: Any,  # noqa: ANN401
    server: MilvusProcess,
    normalizer: Normalizer,
) -> None:
    many = unit(np.random.default_rng(8).normal(size=(20_000, DIM)))
    index = MilvusCollection(server.uri, new_name(), normalizer, token=TOKEN, metric=metric)
    index.add_batches((range(n, n + 5000), many[n : n + 5000]) for n in range(0, 20_000, 5000))
    queries = unit(np.random.default_rng(9).normal(size=(2, DIM)))
    expected = normalizer.scores(queries, many)
    threshold = float(np.sort(expected[0])[1000])  # 19 000 of the first query's
    for metadata in (False, True):
        found = index.range_search(queries, threshold, metadata=metadata)
        assert found.complete and found.counts[0] > 18_990 > search.SERVER_LIMIT
        for query in range(2):
            rows = found.ids[found.queries == query]
            assert len(set(rows.tolist())) == len(rows), "a match came twice"
            sure = set(np.flatnonzero(expected[query] > threshold + 1e-4).tolist())
            possible = set(np.flatnonzero(expected[query] > threshold - 1e-4).tolist())
            assert sure <= set(rows.tolist()) <= possible
            np.testing.assert_allclose(
                found.scores[found.queries == query], expected[query, rows], atol=1e-4
            )
    index.drop()


def test_k_beyond_what_a_server_gives(
    server: MilvusProcess, photos: Photos, normalizer: Normalizer
) -> None:
    index = MilvusCollection(server.uri, new_name(), normalizer, token=TOKEN)
    index.add(photos.ids, photos.references)
    found = index.search(photos.queries[:2], 20_000)
    assert found.counts.tolist() == [600, 600]
    assert found.incomplete == "a server returns at most 16384 per query"
    index.drop()


def test_answers_larger_than_a_message(
    server: MilvusProcess,
    photos: Photos,
    normalizer: Normalizer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    index = MilvusCollection(server.uri, new_name(), normalizer, token=TOKEN)
    many = unit(np.random.default_rng(4).normal(size=(1200, DIM)))
    for begin in range(0, 1200, 200):  # 65 kB each but for every sixteenth: 73 MB in all
        ids = range(begin, begin + 200)
        metadata: list[Any] = [{"n": i, "text": "x" * 65_000} if i % 16 else None for i in ids]
        index.add(ids, many[begin : begin + 200], metadata)
    called: list[str] = []
    call = Connection.call

    def counting(self: Connection, verb: str, *args: object, **kwargs: object) -> object:
        called.append(verb)
        return call(self, verb, *args, **kwargs)

    monkeypatch.setattr(Connection, "call", counting)
    found = index.search(many[:120], 10)  # too many queries: asked in parts
    assert called.count("search") > 2 and "query" not in called
    check_numbers(found)
    called.clear()
    found = index.search(many[:1], 1200)  # too many hits of one: their metadata apart
    assert called.count("search") == 2 and called.count("query") > 1
    check_numbers(found)
    called.clear()
    found = index.range_search(many[:1], -5.0)
    assert found.counts.tolist() == [1200] and called.count("query") > 1
    check_numbers(found)
    index.drop()


def check_numbers(found: Matches) -> None:
    """Every match has the metadata it was added with."""
    assert found.metadata is not None
    numbers = [more and more["n"] for more in found.metadata]
    expected = [i if i % 16 else None for i in found.ids.tolist()]
    wrong = [pair for pair in zip(expected, numbers, strict=True) if pair[0] != pair[1]]
    assert not wrong, f"{len(wrong)} of {len(numbers)} expected, got {wrong[:5]}"


def test_more_queries_than_a_server_takes_at_once(
    server: MilvusProcess, photos: Photos, normalizer: Normalizer
) -> None:
    index = MilvusCollection(server.uri, new_name(), normalizer, token=TOKEN)
    index.add(photos.ids, photos.references)
    queries = np.tile(photos.references, (28, 1))
    assert len(queries) > search.REQUEST_QUERIES
    found = index.search(queries, 1, metadata=False)
    assert found.ids.tolist() == photos.ids * 28
    index.drop()


def test_queries_are_sent_in_requests_of_bounded_size(
    lite: str, photos: Photos, normalizer: Normalizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    call = Connection.call

    def counting(self: Connection, verb: str, *args: object, **kwargs: Any) -> object:  # noqa: ANN401
        if verb == "search":
            sent.append(len(kwargs["data"]))
        return call(self, verb, *args, **kwargs)

    with MilvusCollection(lite, "photos", normalizer) as index:
        index.add(photos.ids, photos.references)
        whole = index.search(photos.queries, 3), index.range_search(photos.queries, 0.1)
        monkeypatch.setattr(Connection, "call", counting)
        monkeypatch.setattr(search, "REQUEST_BYTES", 16 * 4 * 32)  # 16 queries of 32 dimensions
        parts = index.search(photos.queries, 3), index.range_search(photos.queries, 0.1)
    assert sent == [16, 16, 8] * 2
    for one, other in zip(whole, parts, strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        assert one.counts.tolist() == other.counts.tolist()
        np.testing.assert_allclose(one.scores, other.scores, atol=1e-6)  # rounding, summed anew


# ------------------------------------------------------------------ large loads


@pytest.mark.parametrize("file_type", ["parquet", "json"])
def test_bulk_files_are_imported_by_a_real_server(
    file_type: Any,  # noqa: ANN401
    server: MilvusProcess,
    photos: Photos,
    normalizer: Normalizer,
    tmp_path: Path,
) -> None:
    index = MilvusCollection(server.uri, new_name(), normalizer, token=TOKEN)
    batches: list[Batch] = [
        (photos.ids[:400], photos.references[:400], [{"n": i} for i in range(400)]),
        (photos.ids[400:], photos.references[400:]),
    ]
    files = index.write_bulk_files(iter(batches), tmp_path / "bulk", file_type=file_type)
    assert index.write_bulk_files([], tmp_path / "none") == []
    assert len(files) == 1 and all(Path(name).suffix == f".{file_type}" for name in files[0])
    assert len(index) == 0, "nothing is sent"
    assert index.import_files(files, timeout=60) == 600
    with pytest.raises(MilvusError, match=r"import_files: .*gone"):
        index.import_files([[str(tmp_path / f"gone.{file_type}")]], timeout=60)
    deadline = time.monotonic() + 60
    while len(index) < 600 and time.monotonic() < deadline:
        time.sleep(0.2)
    assert len(index) == 600
    found = index.search(photos.queries, 5)
    best = -np.sort(-normalizer.scores(photos.queries, photos.references), axis=1)[:, :5]
    np.testing.assert_allclose(found.scores.reshape(best.shape), best, atol=1e-4)
    assert found[3][0].metadata == {"n": 3}
    index.drop()


def test_bulk_files_are_checked_as_add_is(
    lite: str, photos: Photos, normalizer: Normalizer, tmp_path: Path
) -> None:
    with MilvusCollection(lite, "photos", normalizer, id_length=10) as index:
        batch = photos.ids[:2], photos.references[:2]
        with pytest.raises(ValueError, match="file_type: expected one of .* got 'csv'"):
            index.write_bulk_files([batch], tmp_path, file_type="csv")  # type: ignore[arg-type]
        assert index.settings is None
        with pytest.raises(ValueError, match="at most 10 bytes, got 11"):
            index.write_bulk_files([batch, (["x" * 11], photos.references[:1])], tmp_path)
    with MilvusCollection(lite, "integers", normalizer) as index:
        empty: Batch = ([], np.empty((0, DIM), dtype=np.float32))
        assert index.write_bulk_files([empty, empty], tmp_path) == []
        assert index.settings is None, "nothing said what ids are"
        files = index.write_bulk_files([empty, (range(2), photos.references[:2])], tmp_path)
        assert len(files) == 1 and index.settings is not None
        assert index.settings.id_type == "int"


def test_bulk_files_name_the_extra_they_need(
    lite: str,
    photos: Photos,
    normalizer: Normalizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with (
        MilvusCollection(lite, "photos", normalizer) as index,
        pytest.raises(ImportError, match=r"sscd-vec\[milvus-bulk\]"),
    ):
        index.write_bulk_files([(photos.ids, photos.references)], tmp_path)


def test_a_collection_whose_index_is_still_being_made_opens_when_it_is_there(
    server: MilvusProcess, photos: Photos, normalizer: Normalizer
) -> None:
    name = new_name()
    made = MilvusCollection(server.uri, name, normalizer, token=TOKEN)
    made.add(photos.ids[:5], photos.references[:5])
    made.commit()
    client = made._storage.connection.client
    client.release_collection(name)
    client.drop_index(name, "vector")
    params = made._storage.opened().index_params(lite=False)
    later = threading.Timer(1.0, lambda: client.create_index(name, params))
    later.start()
    try:
        assert len(MilvusCollection(server.uri, name, normalizer, token=TOKEN)) == 5
    finally:
        later.join()
        made.drop()


def test_two_that_create_at_once_get_one_collection(
    server: MilvusProcess, photos: Photos, normalizer: Normalizer
) -> None:
    name = new_name()
    both = [MilvusCollection(server.uri, name, normalizer, token=TOKEN) for _ in range(2)]
    halves = [slice(0, 300), slice(300, 600)]
    failures: list[BaseException] = []

    def load(index: MilvusCollection, half: slice) -> None:
        try:
            index.add(photos.ids[half], photos.references[half])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=load, args=pair) for pair in zip(both, halves, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and len(both[0]) == 600
    both[0].drop()


@pytest.mark.parametrize("vector_type", ["float16", "bfloat16"])
def test_half_precision_is_sent_and_read_as_such(
    normalizer: Normalizer, photos: Photos, vector_type: VectorType
) -> None:
    settings = Settings.choose(normalizer, "ip", "HNSW", None, "str", vector_type)
    assert Settings.read({"properties": settings.properties}, "c").vector_type == vector_type
    (field,) = [f for f in settings.schema(64).fields if f.name == "vector"]
    assert field.dtype.name == f"{vector_type.upper()}_VECTOR"
    vectors = normalizer.references(photos.references)
    part = Part(["a"], vectors[:1], None, 1)
    sent = part.entities(settings)[0]["vector"]
    assert sent.dtype == vector_type and sent.nbytes == 2 * settings.dim
    read = settings.decoded([row.tobytes() for row in vectors.astype(settings.dtype)])
    np.testing.assert_allclose(read, vectors, atol=1e-3 if vector_type == "float16" else 4e-3)


@pytest.mark.parametrize(
    ("index_type", "vector_type", "version", "needed"),
    [
        ("HNSW", "float16", "2.3.5-lite", "2.4"),
        ("HNSW", "bfloat16", "v2.3.20", "2.4"),
        ("IVF_RABITQ", "float32", "2.5.4", "2.6"),
    ],
)
def test_what_a_server_does_not_have_yet_is_refused(
    normalizer: Normalizer, index_type: str, vector_type: VectorType, version: str, needed: str
) -> None:
    settings = Settings.choose(normalizer, "ip", index_type, None, "str", vector_type)
    with pytest.raises(ValueError, match=f"needs Milvus {needed} or newer, this server is"):
        settings.check_server(version)
    settings.check_server("2.6.0")
    settings.check_server("v3.1")


def test_lite_has_float32_only(lite: str, normalizer: Normalizer, photos: Photos) -> None:
    with MilvusCollection(lite, "c", normalizer, vector_type="float16") as made:
        with pytest.raises(ValueError, match="Milvus Lite has float32 only"):
            made.add(photos.ids, photos.references)
    with pytest.raises(ValueError, match="vector_type: expected one of"):
        MilvusCollection(lite, "c", normalizer, vector_type="int8")  # type: ignore[arg-type]


def test_searches_of_large_indexes_look_at_enough(normalizer: Normalizer) -> None:
    rabitq = Settings.choose(normalizer, "ip", "IVF_RABITQ", {"nlist": 4096}, "str")
    assert rabitq.params == {"nlist": 4096, "refine": True, "refine_type": "SQ8"}
    assert search_params(rabitq, 10, {"nprobe": 128})["params"] == {"nprobe": 128, "refine_k": 8}
    disk = Settings.choose(normalizer, "ip", "DISKANN", None, "str")
    assert search_params(disk, 500, {})["params"] == {"search_list": 500}


@pytest.mark.parametrize(
    "options", [{"vector_type": "float16"}, {"index_type": "IVF_RABITQ"}], ids=str
)
def test_a_real_server_is_asked_for_its_version(
    server: MilvusProcess, normalizer: Normalizer, photos: Photos, options: dict[str, Any]
) -> None:
    with MilvusCollection(server.uri, "half", normalizer, token=TOKEN, **options) as made:
        with pytest.raises(ValueError, match=r"or newer, this server is .*2\.3\.5"):
            made.add(photos.ids, photos.references)
        assert len(made) == 0
