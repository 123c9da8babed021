"""Downloads against a real HTTP server that breaks, lies and changes its mind."""

import io
import threading
import urllib.request
import urllib.response
from collections.abc import Iterator
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from sscd_vec import download as download_module
from sscd_vec.download import DownloadError, discard_partial, download, partial_path

CONTENT = bytes(range(256)) * 5000


class Shelf(ThreadingHTTPServer):
    """One file, and how the server behaves about it."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.content = CONTENT
        self.etag: str | None = '"one"'
        self.modified: str | None = None
        self.cuts: list[int] = []  # bytes after which each coming answer breaks off
        self.statuses: list[int] = []  # status of each coming answer, instead of a file
        self.redirects: list[str] = []  # where each coming answer sends the client, instead
        self.honours_range = True
        self.honours_if_range = True
        self.announces_length = True
        self.requests: list[str | None] = []  # the Range header of each request

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/file"

    def handle_error(self, *args: object) -> None:
        """Connections are broken off on purpose here."""


class Answer(BaseHTTPRequestHandler):
    server: Shelf

    def do_GET(self) -> None:
        shelf = self.server
        shelf.requests.append(self.headers.get("Range"))
        if shelf.statuses:
            self.send_error(shelf.statuses.pop(0))
            return
        if shelf.redirects:
            self.send_response(302)
            self.send_header("Location", shelf.redirects.pop(0))
            self.end_headers()
            return
        start = 0
        wanted = self.headers.get("Range")
        same = self.headers.get("If-Range") in (shelf.etag, shelf.modified)
        if wanted and shelf.honours_range and (same or not shelf.honours_if_range):
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            if start >= len(shelf.content):
                self.send_error(416)
                return
            self.send_response(206)
            end = len(shelf.content) - 1
            self.send_header("Content-Range", f"bytes {start}-{end}/{len(shelf.content)}")
        else:
            self.send_response(200)
        body = shelf.content[start:]
        if shelf.announces_length:
            self.send_header("Content-Length", str(len(body)))
        if shelf.etag:
            self.send_header("ETag", shelf.etag)
        if shelf.modified:
            self.send_header("Last-Modified", shelf.modified)
        self.end_headers()
        self.wfile.write(body[: shelf.cuts.pop(0)] if shelf.cuts else body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def shelf(monkeypatch: pytest.MonkeyPatch) -> Iterator[Shelf]:
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(download_module, "_PAUSE", 0.0)
    with Shelf() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def left_over(path: Path) -> list[str]:
    return sorted(it.name for it in path.parent.iterdir() if it != path)


def test_a_whole_file_arrives_with_progress(shelf: Shelf, tmp_path: Path) -> None:
    seen: list[tuple[int, int | None]] = []
    download(shelf.url, tmp_path / "f", lambda done, total: seen.append((done, total)))
    assert (tmp_path / "f").read_bytes() == CONTENT
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert left_over(tmp_path / "f") == []


def test_a_broken_connection_is_continued_where_it_broke(shelf: Shelf, tmp_path: Path) -> None:
    shelf.cuts = [300_000, 200_000]
    download(shelf.url, tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == CONTENT
    assert shelf.requests == [None, "bytes=300000-", "bytes=500000-"]


def test_an_interrupted_download_is_continued_by_the_next_call(
    shelf: Shelf, tmp_path: Path
) -> None:
    def interrupt(done: int, total: int | None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download(shelf.url, tmp_path / "f", interrupt)
    have = partial_path(tmp_path / "f").stat().st_size
    assert 0 < have < len(CONTENT)
    assert not (tmp_path / "f").exists()
    download(shelf.url, tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == CONTENT
    assert shelf.requests[1] == f"bytes={have}-"
    assert left_over(tmp_path / "f") == []


def test_it_gives_up_when_nothing_more_arrives_and_keeps_what_did(
    shelf: Shelf, tmp_path: Path
) -> None:
    shelf.cuts = [1000, 0, 0, 0, 0]
    with pytest.raises(DownloadError, match=r"broke off after 1000 bytes.*again to continue"):
        download(shelf.url, tmp_path / "f")
    assert partial_path(tmp_path / "f").read_bytes() == CONTENT[:1000]
    download(shelf.url, tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == CONTENT


@pytest.mark.parametrize("honours_if_range", [True, False])
def test_a_file_that_changed_in_between_is_fetched_anew(
    honours_if_range: bool, shelf: Shelf, tmp_path: Path
) -> None:
    shelf.cuts = [1000, 0, 0, 0, 0]
    with pytest.raises(DownloadError):
        download(shelf.url, tmp_path / "f")
    shelf.content, shelf.etag = CONTENT[::-1], '"two"'
    shelf.honours_if_range = honours_if_range
    download(shelf.url, tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == CONTENT[::-1]


def test_a_file_that_became_shorter_is_fetched_anew(shelf: Shelf, tmp_path: Path) -> None:
    shelf.cuts = [1000, 0, 0, 0, 0]
    with pytest.raises(DownloadError):
        download(shelf.url, tmp_path / "f")
    shelf.content, shelf.honours_if_range = b"short", False
    download(shelf.url, tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == b"short"


def test_a_server_that_ignores_range_starts_over(shelf: Shelf, tmp_path: Path) -> None:
    shelf.honours_range = False
    shelf.cuts = [1000]
    download(shelf.url, tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == CONTENT
    assert shelf.requests == [None, "bytes=1000-"]


@pytest.mark.parametrize(("etag", "modified"), [(None, None), ('W/"weak"', None)])
def test_without_a_strong_validator_nothing_is_continued(
    etag: str | None, modified: str | None, shelf: Shelf, tmp_path: Path
) -> None:
    shelf.etag, shelf.modified, shelf.cuts = etag, modified, [1000]
    download(shelf.url, tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == CONTENT
    assert shelf.requests == [None, None]


def test_the_date_will_do_as_validator(shelf: Shelf, tmp_path: Path) -> None:
    shelf.etag, shelf.modified = None, "Wed, 21 Oct 2015 07:28:00 GMT"
    shelf.cuts = [1000]
    download(shelf.url, tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == CONTENT
    assert shelf.requests == [None, "bytes=1000-"]


def test_a_length_that_is_not_announced_is_no_trouble(shelf: Shelf, tmp_path: Path) -> None:
    shelf.announces_length = False
    download(shelf.url, tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == CONTENT


def test_a_passing_server_error_is_waited_out(shelf: Shelf, tmp_path: Path) -> None:
    shelf.statuses = [503, 500]
    download(shelf.url, tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == CONTENT


def test_not_found_says_so_at_once(shelf: Shelf, tmp_path: Path) -> None:
    shelf.statuses = [404]
    with pytest.raises(DownloadError, match="HTTP 404 Not Found. Check the name and the base URL"):
        download(shelf.url, tmp_path / "f")
    assert len(shelf.requests) == 1
    assert left_over(tmp_path / "f") == []


def test_offline_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    with Shelf() as closed:
        url = closed.url
    with pytest.raises(DownloadError, match="cannot reach .* put the file into the cache folder"):
        download(url, tmp_path / "f")


def test_discarding_forgets_a_partial_download(shelf: Shelf, tmp_path: Path) -> None:
    shelf.cuts = [1000, 0, 0, 0, 0]
    with pytest.raises(DownloadError):
        download(shelf.url, tmp_path / "f")
    discard_partial(tmp_path / "f")
    assert left_over(tmp_path / "f") == []


def test_a_redirect_between_plain_servers_is_followed(shelf: Shelf, tmp_path: Path) -> None:
    shelf.redirects = [shelf.url + "2"]
    download(shelf.url, tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == CONTENT
    assert len(shelf.requests) == 2


def test_a_redirect_never_leaves_https(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(
        handler: urllib.request.HTTPSHandler, request: urllib.request.Request
    ) -> urllib.response.addinfourl:
        headers = Message()
        headers["Location"] = shelf.url
        response = urllib.response.addinfourl(io.BytesIO(), headers, request.full_url, 302)
        vars(response)["msg"] = "Found"
        return response

    monkeypatch.setattr(urllib.request.HTTPSHandler, "https_open", answer)
    with pytest.raises(DownloadError, match=r"https://models\.example/f redirects to http://.*not"):
        download("https://models.example/f", tmp_path / "f")
    assert not shelf.requests
    assert left_over(tmp_path / "f") == []


def test_a_redirect_to_another_protocol_is_refused(shelf: Shelf, tmp_path: Path) -> None:
    shelf.redirects = ["ftp://127.0.0.1/f"]
    with pytest.raises(DownloadError, match="redirects to ftp"):
        download(shelf.url, tmp_path / "f")
