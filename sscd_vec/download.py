"""One file over HTTP, resumable: what arrived is kept, and continued only if it is the same file.

The bytes so far are ``NAME.part``, the server's validator (ETag or Last-Modified) is in
``NAME.part.json``. A request for the rest carries ``If-Range``, so a server whose file changed
sends all of it again. A redirect may not leave HTTPS.
"""

import http.client
import json
import logging
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from sscd_vec.files import write_whole

log = logging.getLogger(__name__)

Progress = Callable[[int, int | None], None]

_CHUNK = 1 << 20
_TIMEOUT = 30.0
_ATTEMPTS = 4
_PAUSE = 1.0


class DownloadError(OSError):
    """A file that could not be fetched, why, and what to do."""


@dataclass(frozen=True)
class _Partial:
    """What is known of a transfer that has begun."""

    url: str
    validator: str | None
    total: int | None


def download(url: str, path: Path, progress: Progress | None = None) -> None:
    """Fetch ``url`` to ``path``, continuing an earlier transfer, and only then give it its name.

    A broken connection is retried a few times, as long as bytes still arrive.

    Args:
        url: What to fetch.
        path: Where to; ``path.part`` holds the bytes until all are there.
        progress: Called with the bytes so far and in total (None if the server does not say).

    Raises:
        DownloadError: Unreachable, refused, redirected away from HTTPS, or cut off; says which,
            and that a new call continues.
    """
    part = partial_path(path)
    failures = 0
    while True:
        before = _size(part)
        try:
            _transfer(url, part, progress)
            break
        except (http.client.HTTPException, ConnectionError, TimeoutError, _CutOff) as error:
            failures = 0 if _size(part) > before else failures + 1
            if failures >= _ATTEMPTS:
                raise DownloadError(
                    f"{url} broke off after {_size(part)} bytes ({error or type(error).__name__}). "
                    f"They are kept in {part}: run the same command again to continue."
                ) from error
            log.info("%s broke off at %d bytes (%s); continuing", url, _size(part), error)
            time.sleep(_PAUSE * failures)
    os.replace(part, path)
    _notes(part).unlink(missing_ok=True)


def partial_path(path: Path) -> Path:
    """Where the bytes of an unfinished transfer to ``path`` are kept."""
    return path.with_name(path.name + ".part")


def discard_partial(path: Path) -> None:
    """Forget an unfinished transfer to ``path``."""
    part = partial_path(path)
    part.unlink(missing_ok=True)
    _notes(part).unlink(missing_ok=True)


class _CutOff(Exception):
    """The connection ended before the file did."""


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects over HTTP(S), from HTTPS only to HTTPS."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        allowed = ("https:",) if req.full_url.lower().startswith("https:") else ("http:", "https:")
        if not newurl.lower().startswith(allowed):
            raise DownloadError(
                f"{req.full_url} redirects to {newurl}, which is not encrypted: refused. Check the "
                "base URL, or fetch the file yourself and pass its path."
            )
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _transfer(url: str, part: Path, progress: Progress | None) -> None:
    known = _read_notes(part, url)
    have = _size(part)
    if known and known.validator and have == known.total:
        return
    request = urllib.request.Request(url, headers={"User-Agent": "sscd-vec"})
    if have and known and known.validator:
        request.add_header("Range", f"bytes={have}-")
        request.add_header("If-Range", known.validator)
    try:
        opener = urllib.request.build_opener(_Redirects)
        with opener.open(request, timeout=_TIMEOUT) as response:
            _receive(url, response, part, known, progress)
    except urllib.error.HTTPError as error:
        if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE and have:
            discard_partial(part.with_name(part.name.removesuffix(".part")))
            raise _CutOff("the server refused the rest; starting over") from error
        if error.code >= 500:
            raise _CutOff(f"HTTP {error.code} {error.reason}") from error
        raise DownloadError(
            f"{url}: HTTP {error.code} {error.reason}. Check the name and the base URL."
        ) from error
    except urllib.error.URLError as error:
        if isinstance(error.reason, ConnectionResetError | TimeoutError):
            raise _CutOff(str(error.reason)) from error
        raise DownloadError(
            f"cannot reach {url} ({error.reason}). Without a network, put the file into the cache "
            "folder on a machine that has one, or pass its path instead of its name."
        ) from error


def _receive(
    url: str,
    response: http.client.HTTPResponse,
    part: Path,
    known: _Partial | None,
    progress: Progress | None,
) -> None:
    """Append a 206 to the bytes so far, or write a 200 from the start."""
    have = _size(part)
    length = response.headers.get("Content-Length")
    total = int(length) if length is not None and length.isdigit() else None
    mode = "wb"
    if response.status == http.client.PARTIAL_CONTENT:
        start, total = _content_range(url, response.headers.get("Content-Range"))
        if start != have:
            raise DownloadError(f"{url}: asked for bytes from {have}, the server sent from {start}")
        if known and _validator(response.headers) not in (None, known.validator):
            part.unlink()  # a server that ignores If-Range
            raise _CutOff("the file changed on the server; starting over")
        mode = "ab"
    else:
        if known and have:
            log.info("%s: the file changed or the server cannot continue; starting over", url)
        part.unlink(missing_ok=True)
        have = 0
        _write_notes(part, _Partial(url, _validator(response.headers), total))
    with part.open(mode) as file:
        while chunk := response.read(_CHUNK):
            file.write(chunk)
            have += len(chunk)
            if progress is not None:
                progress(have, total)
        file.flush()
        os.fsync(file.fileno())
    if total is not None and have < total:
        raise _CutOff(f"{have} of {total} bytes")
    if total is not None and have > total:
        part.unlink(missing_ok=True)
        raise DownloadError(f"{url}: the server sent {have} bytes and announced {total}")


def _validator(headers: http.client.HTTPMessage) -> str | None:
    """A strong ETag, else the date; If-Range allows no weak ETag."""
    etag = headers.get("ETag")
    if etag and not etag.startswith("W/"):
        return str(etag)
    modified = headers.get("Last-Modified")
    return str(modified) if modified else None


def _content_range(url: str, value: str | None) -> tuple[int, int | None]:
    found = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", value or "")
    if found is None:
        raise DownloadError(f"{url}: a partial answer without a readable Content-Range ({value})")
    return int(found[1]), None if found[3] == "*" else int(found[3])


def _notes(part: Path) -> Path:
    return part.with_name(part.name + ".json")


def _read_notes(part: Path, url: str) -> _Partial | None:
    try:
        notes = _Partial(**json.loads(_notes(part).read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError):
        return None
    return notes if notes.url == url else None


def _write_notes(part: Path, notes: _Partial) -> None:
    write_whole(_notes(part), json.dumps(asdict(notes)))


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
