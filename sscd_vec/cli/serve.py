"""``sscd-vec serve``: the bank as a web page and a JSON API."""

import json
import socket
from typing import Annotated

import typer

from sscd_vec.cli.console import (
    CollectionOption,
    DeviceOption,
    Failure,
    ModelOption,
    NormalizerOption,
    StateOption,
    ThresholdOption,
    TokenOption,
    TrustOption,
    VerifyOption,
    open_bank,
    warn,
)

LOCAL = ("127.0.0.1", "localhost", "::1")
WRITER_PATIENCE = 5.0  # seconds to wait for another program that writes to the bank


def serve(
    bank: Annotated[str, typer.Argument(help="The bank: what `index --to` was given.")],
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; only this machine by default.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="0 takes a free one.")
    ] = 8000,
    token: Annotated[
        str | None,
        typer.Option(
            "--token",
            envvar="SSCD_VEC_TOKEN",
            help="Ask every client for this token. Needed beyond this machine.",
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option("--allow-host", help="Answer to this host name too: that of a proxy."),
    ] = None,
    read_only: Annotated[
        bool,
        typer.Option("--read-only", help="Leave out /add, /remove and /decide; write nothing."),
    ] = False,
    tiles: Annotated[
        int, typer.Option("--tiles", min=1, max=4, help="Search overlapping crops of each image.")
    ] = 1,
    verify: VerifyOption = False,
    max_upload: Annotated[
        int, typer.Option("--max-upload", min=1, help="Mebibytes of one request.")
    ] = 32,
    max_pixels: Annotated[
        int, typer.Option("--max-pixels", min=1, help="Megapixels of one image.")
    ] = 64,
    concurrent: Annotated[
        int, typer.Option("--concurrent", min=1, help="Requests worked on at once.")
    ] = 16,
    timeout: Annotated[
        float, typer.Option("--timeout", min=1, help="Seconds for one request.")
    ] = 30.0,
    threshold: ThresholdOption = None,
    model: ModelOption = None,
    normalizer: NormalizerOption = None,
    collection: CollectionOption = None,
    state: StateOption = None,
    milvus_token: TokenOption = None,
    trust: TrustOption = False,
    device: DeviceOption = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Say where it listens as one line of JSON on standard output."),
    ] = False,
) -> None:
    """Serve a bank on this machine: a page to drop images on, and a JSON API.

    The page is at /, the API's description at /docs, Prometheus counters at /metrics. It answers
    on 127.0.0.1 only; --host opens it to others, and then a --token is required.

        sscd-vec serve bank.faiss
        curl -F image=@suspect.jpg http://127.0.0.1:8000/search
    """
    if host not in LOCAL and not token:
        raise Failure(
            f"--host {host} opens the bank to other machines: set a --token too (or "
            "SSCD_VEC_TOKEN), and put TLS in front of it"
        )
    _listen(host, port).close()  # a port in use is said before the model is loaded
    opened = open_bank(
        bank,
        model=model,
        normalizer=normalizer,
        threshold=threshold,
        collection=collection,
        state=state,
        token=milvus_token,
        trust=trust,
        device=device,
        read_only=read_only or None,
        wait=WRITER_PATIENCE,
        verify=verify,
    )
    try:
        import uvicorn

        from sscd_vec.app.connections import server_config
        from sscd_vec.app.engine import Engine
        from sscd_vec.app.limits import LOOPBACK, Limits
        from sscd_vec.app.metrics import Metrics
        from sscd_vec.app.server import create_app
    except ImportError as error:
        raise Failure("the web page needs an extra: pip install 'sscd-vec[app]'") from error

    limits = Limits(
        body=max_upload * 2**20,
        pixels=max_pixels * 1_000_000,
        concurrent=concurrent,
        waiting=4 * concurrent,
        timeout=timeout,
    )
    engine = Engine(opened, Metrics(), tiles=tiles)
    names = LOOPBACK | {name.lower() for name in allow_host or ()}
    app = create_app(
        engine,
        limits=limits,
        token=token,
        hosts=names if host in LOCAL else None,
        read_only=read_only,
    )
    config = server_config(app, limits, engine.metrics, host=host, port=port)
    listening = _listen(host, port)
    shown = f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{listening.getsockname()[1]}"
    if as_json:
        facts = {"url": url, "bank": str(opened), "images": len(opened)}
        typer.echo(json.dumps(facts))  # one line, flushed: the server goes on after it
    else:
        warn(f"serving {opened} on {url} (Ctrl-C stops)")
    try:
        uvicorn.Server(config).run(sockets=[listening])
    finally:
        opened.close()


def _why(error: OSError) -> str:
    """The system's words, without the address: that is said already."""
    return (error.strerror or str(error)).partition(" (while")[0]


def _listen(host: str, port: int) -> socket.socket:
    """A socket on which clients can wait from now on."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise Failure(
            f"cannot listen on {host}:{port} ({_why(error)}); choose another --port, or 0 for "
            "a free one"
        ) from error
