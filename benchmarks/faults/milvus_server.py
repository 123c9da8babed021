"""A real Milvus (PyPI's ``milvus`` 2.3.5, standalone) to test against: started, killed, restarted.

The package's own starter chooses new ports at each start and unpacks 250 MB into each folder; here
ports are chosen once, so that clients find a restarted server where it was, and all servers of an
environment share the programs.
"""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import milvus

START_SECONDS = 120.0
STARTS = 3  # between its choice and its use another program may take a port
LOG_TAIL = 2000
# A server made for billions of rows, asked to take a few hundred seriously.
SMALL = {
    "proxy.timeTickInterval": 20,  # ms; a strongly consistent read waits for the next tick
    "indexCoord.segment.minSegmentNumRowsToEnableIndex": 16,
    "queryCoord.checkInterval": 200,  # ms; these three make loading and handing over prompt
    "queryCoord.distPullInterval": 100,
    "queryCoord.checkHandoffInterval": 500,
}
TOKEN = "root:Milvus"  # every new Milvus has this account


class Certificate(NamedTuple):
    """A server's certificate and its private key, as PEM files."""

    pem: Path
    key: Path

    @classmethod
    def self_signed(cls, folder: Path, host: str = "localhost") -> "Certificate":
        """Make one with openssl."""
        folder.mkdir(parents=True, exist_ok=True)
        made = cls(folder / "server.pem", folder / "server.key")
        request = "openssl req -x509 -newkey rsa:2048 -nodes -days 2".split()
        names = ["-subj", f"/CN={host}", "-addext", f"subjectAltName=DNS:{host}"]
        files = ["-keyout", str(made.key), "-out", str(made.pem)]
        subprocess.run([*request, *names, *files], check=True, capture_output=True)
        return made


class MilvusProcess:
    """One server: its folder, its ports, its process."""

    def __init__(
        self, folder: Path, *, authorized: bool = False, certificate: Certificate | None = None
    ) -> None:
        """Prepare the folder and choose free ports; with a certificate it speaks TLS only."""
        self.folder, self.certificate = folder, certificate
        config = milvus.MilvusServerConfig(data_dir=str(folder))
        config.set("authorization_enabled", authorized)
        if certificate is not None:
            config.set("tls_mode", 1)
            config.set("server_pem_path", str(certificate.pem))
            config.set("server_key_path", str(certificate.key))
        for key, value in SMALL.items():
            config.set(key, value)
        names = [name for name in config.configurable_items if name.endswith("_port")]
        *ports, etcd_peer, self._health_port = _free_ports(len(names) + 2)
        config.update(**dict(zip(names, ports, strict=True)))
        config.resolve()
        self._move_etcd(config.configs["etcd_port"], etcd_peer)
        self.port = int(config.get("proxy_port"))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def uri(self) -> str:
        """Where clients find it."""
        if self.certificate is not None:
            return f"https://localhost:{self.port}"
        return f"http://127.0.0.1:{self.port}"

    def _move_etcd(self, client_port: int, peer_port: int) -> None:
        """Give the embedded etcd its own ports: with its fixed one, only one server could run."""
        peer, client = (f"http://127.0.0.1:{port}" for port in (peer_port, client_port))
        path = self.folder / "etcd.yaml"
        path.write_text(
            f"name: default\ndata-dir: {self.folder / 'data' / 'etcd.data'}\n"
            f"listen-peer-urls: {peer}\ninitial-advertise-peer-urls: {peer}\n"
            f"listen-client-urls: {client}\nadvertise-client-urls: {client}\n"
            f"initial-cluster: default={peer}\n"
        )
        settings = self.folder / "configs" / "milvus.yaml"
        text = settings.read_text().replace("etcd:\n", f"etcd:\n  config:\n    path: {path}\n", 1)
        settings.write_text(text)

    def start(self) -> None:
        """Start it and wait until it says it is healthy.

        Raises:
            RuntimeError: If it ends instead; the message has the end of its log.
            TimeoutError: If it does neither in time.
        """
        executable = _programs() / "milvus"
        environment = {
            **os.environ,
            "DEPLOY_MODE": "STANDALONE",
            "METRICS_PORT": str(self._health_port),
            "MILVUS_RUN_DIR": str(self.folder / "run"),
            "LD_LIBRARY_PATH": f"{executable.parent}:{os.environ.get('LD_LIBRARY_PATH', '')}",
        }
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [executable, "run", "standalone"],
                env=environment,
                cwd=self.folder,
                stdout=log,
                stderr=log,
            )
        self._wait()

    def kill(self) -> None:
        """End it as ``kill -9`` does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """End it as an operator does."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self.kill()
            self._process = None

    def _wait(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        url = f"http://127.0.0.1:{self._health_port}/healthz"
        while time.monotonic() < deadline:
            if self._process is None or self._process.poll() is not None:
                raise RuntimeError(f"Milvus ended while starting:\n{self._log_tail()}")
            try:
                with urllib.request.urlopen(url, timeout=5) as answer:
                    if b"OK" in answer.read():
                        return
            except (urllib.error.URLError, OSError):
                pass
            time.sleep(0.2)
        self.kill()
        raise TimeoutError(
            f"Milvus did not start within {START_SECONDS:.0f} s:\n{self._log_tail()}"
        )

    def _log_tail(self) -> str:
        return (self.folder / "server.log").read_text(errors="replace")[-LOG_TAIL:]


def _programs() -> Path:
    """The folder of Milvus's programs, unpacked once per environment."""
    folder = Path(sys.prefix) / "var" / f"milvus-{milvus.__version__}"
    if not folder.exists():
        folder.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as unpacked:
            milvus._initialize_data_files(unpacked)
            try:
                os.rename(Path(unpacked) / "bin", folder)
            except OSError:  # another process was first
                if not folder.exists():
                    raise
    return folder


def _free_ports(count: int) -> list[int]:
    """Ports nobody listens on, all different: each is held until the last is chosen."""
    with ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


@contextmanager
def running(
    folder: Path, *, authorized: bool = False, certificate: Certificate | None = None
) -> Iterator[MilvusProcess]:
    """A server that ends with the block; what it stored in ``folder`` is then deleted."""
    for start in range(1, STARTS + 1):
        server = MilvusProcess(folder, authorized=authorized, certificate=certificate)
        try:
            server.start()
            break
        except RuntimeError:
            if start == STARTS:
                raise
    try:
        yield server
    finally:
        server.kill()
        shutil.rmtree(folder)
