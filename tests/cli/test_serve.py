"""The server as a program: it starts, answers on loopback only, and stops cleanly."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sscd_vec.cli import app


def test_other_machines_need_a_token(tmp_path: Path) -> None:
    bank = str(tmp_path / "bank.faiss")
    result = CliRunner().invoke(app, ["serve", bank, "--host", "0.0.0.0"])
    assert result.exit_code == 1
    assert "set a --token too" in result.stderr
    missing = CliRunner().invoke(app, ["serve", bank])
    assert missing.exit_code == 1 and "there is no bank" in missing.stderr


@pytest.mark.parametrize("json_option", [[], ["--json"]], ids=["people", "programs"])
def test_serve_search_and_stop(
    json_option: list[str],
    model: Path,
    drawn: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SSCD_VEC_CACHE", str(tmp_path / "cache"))
    bank = str(tmp_path / "bank.faiss")
    made = CliRunner().invoke(app, ["index", str(drawn), "--to", bank, "--model", str(model)])
    assert made.exit_code == 0, made.output
    server = subprocess.Popen(
        [sys.executable, "-m", "sscd_vec", "serve", bank, "--port", "0", *json_option],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        assert server.stdout is not None and server.stderr is not None
        if json_option:
            facts = json.loads(server.stdout.readline())
            assert (facts["bank"], facts["images"]) == (bank, 14)
            line = facts["url"]
        else:
            line = next(line for line in server.stderr if "http://" in line)
        found = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert found is not None, line
        request = urllib.request.Request(
            f"{found[0]}/search?k=2",
            (drawn / "copy-7.jpg").read_bytes(),
            {"Content-Type": "image/jpeg"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            assert "server" not in {name.lower() for name in response.headers}
            matches = json.load(response)["results"][0]["matches"]
        assert {Path(match["id"]).name for match in matches} == {"copy-7.jpg", "photo-7.jpg"}
        with pytest.raises(urllib.error.HTTPError, match="415") as refused:
            urllib.request.urlopen(urllib.request.Request(f"{found[0]}/search", b"x"), timeout=60)
        refused.value.close()
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(30)
    assert server.stdout is not None and server.stderr is not None
    rest, result = server.stderr.read(), server.stdout.read()
    server.stderr.close()
    server.stdout.close()
    assert "Traceback" not in rest and result == ""
    assert server.returncode in (0, 130, -signal.SIGINT)
