"""Where a Milvus is, with the credentials kept apart from everything that gets printed."""

from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit

HIDDEN = "***"
FOLDER_NAME = 255  # bytes of a name in a file system


@dataclass(frozen=True)
class Address:
    """A Lite file or a server, and the credentials for it.

    Attributes:
        uri: Path of a Lite file, or a URI without credentials.
        db_name: Database on the server.
        token: ``"user:password"`` or an API key; never shown.
    """

    uri: str
    db_name: str = ""
    token: str = field(default="", repr=False)

    @classmethod
    def parse(
        cls,
        uri: str | Path,
        *,
        token: str = "",
        user: str = "",
        password: str = "",
        db_name: str = "",
    ) -> "Address":
        """Take credentials out of a URI such as ``https://user:password@host:19530/db``.

        Raises:
            ValueError: If it is neither a Lite path ending in ``.db`` nor a URI with a host. It
                shows nothing that may be a credential.
        """
        text = str(uri)
        if "://" not in text:
            if text.startswith("unix:"):
                return cls(text, db_name, token or _joined(user, password))
            return cls(_lite_path(text), db_name)
        parts = urlsplit(text)
        if parts.scheme.lower() not in ("http", "https", "tcp"):
            raise ValueError(
                f"uri: expected http://, https:// or tcp://, got {parts.scheme}://; or the path of "
                "a Milvus Lite file ending in .db"
            )
        inside = _joined(unquote(parts.username or ""), unquote(parts.password or ""))
        place = parts.netloc.rpartition("@")[2]
        if "@" in parts.path + parts.query + parts.fragment:
            raise ValueError(
                "uri: expected scheme://user:password@host:port/database, got an @ behind the "
                "host; write / ? # @ of a password as %2F %3F %23 %40, or give it as password="
            )
        if not parts.hostname or not _has_port(parts):
            # What stands where a port should may be a password, if the @host was forgotten.
            raise ValueError(
                "uri: expected scheme://user:password@host:port/database, got no host, or a port "
                "that is not a number up to 65535"
            )
        bare = urlunsplit((parts.scheme, place, "", "", ""))
        database = db_name or parts.path.strip("/").partition("/")[0]
        return cls(bare, database, token or _joined(user, password) or inside)

    @property
    def is_lite(self) -> bool:
        """Whether it is a file of this machine rather than a server."""
        return "://" not in self.uri and not self.uri.startswith("unix:")

    def hide(self, text: str) -> str:
        """``text`` with every credential in it blacked out."""
        for secret in self.secrets:
            text = text.replace(secret, HIDDEN)
        return text

    @property
    def secrets(self) -> list[str]:
        """What must never be printed, longest first."""
        password = self.token.partition(":")[2]
        return sorted({s for s in (self.token, password) if s}, key=len, reverse=True)


def require_folder_name(partition: str) -> None:
    """Refuse a partition that is not a folder name: Lite takes any, and would write elsewhere.

    Raises:
        ValueError: If it is a path, or too long for a name.
    """
    if (
        partition in (".", "..")
        or any(character in partition for character in "/\\\0")
        or len(partition.encode(errors="surrogatepass")) > FOLDER_NAME
    ):
        raise ValueError(
            f"partition: expected the name of a folder, at most {FOLDER_NAME} bytes without / or "
            f"\\, got {partition[:80]!r}; a hash of it will do"
        )


def _joined(user: str, password: str) -> str:
    return f"{user}:{password}" if password else user


def _has_port(parts: SplitResult) -> bool:
    """Whether the port is one, or left out; urllib only looks when asked."""
    try:
        return parts.port is None or parts.port > 0
    except ValueError:
        return False


def _lite_path(text: str) -> str:
    path = Path(text)
    if path.suffix != ".db" or text.lower().startswith(("http:", "https:", "tcp:")):
        # Perhaps a mistyped URI: what stands before an @ may be a password.
        shown = f"{HIDDEN}@{text.rpartition('@')[2]}" if "@" in text else text
        raise ValueError(
            f"uri: expected a path ending in .db (Milvus Lite) or a URI such as "
            f"http://host:19530, got {shown!r}"
        )
    if path.is_file():
        raise ValueError(
            f"{path}: a file, but Milvus Lite 3 keeps a folder there; it is foreign or from "
            "Milvus Lite 2, which wrote another format. Choose another path"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    return str(path)
