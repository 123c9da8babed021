"""What a bank was made with, and whether this user made it.

A bank may come from a stranger. Its settings name a model and the folders its images lie in, so
they are signed with a key only this user has. Without a valid signature the bank can be searched
with the shipped model; other models are not loaded and files outside the bank are not shown.
"""

import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from sscd_vec import models
from sscd_vec.bank.location import SETTINGS, BankError
from sscd_vec.bank.views import MOST_TILES
from sscd_vec.files import PathLike, write_whole

FORMAT = 2
MOST_BYTES = 16 * 2**20


@dataclass(frozen=True)
class BankSettings:
    """What a bank was made with.

    Attributes:
        model: Name, folder or file of the encoder.
        encoder: Its fingerprint.
        tiles: Crops per side each image was indexed with; 1 for whole images only.
        roots: Folders images were added from; their files may be shown.
        signature: Proves that this user wrote the settings; '' if nobody did.
        format: Of this file.
    """

    model: str
    encoder: str
    tiles: int = 1
    roots: tuple[str, ...] = ()
    signature: str = ""
    format: int = FORMAT

    @property
    def is_trusted(self) -> bool:
        """Whether this user wrote the settings, on this account."""
        return hmac.compare_digest(self.signature, self._signature())

    def with_roots(self, places: Iterable[PathLike]) -> "BankSettings":
        """The same with the folders of further files."""
        folders = [p if p.is_dir() else p.parent for p in map(Path, places)]
        added = [os.fsencode(folder.resolve()).hex() for folder in folders]
        return replace(self, roots=tuple(dict.fromkeys([*self.roots, *added])))

    @property
    def root_folders(self) -> list[Path]:
        """The folders, as paths; none of a stranger's bank."""
        if not self.is_trusted:
            return []
        return [Path(os.fsdecode(bytes.fromhex(root))) for root in self.roots]

    def sign(self) -> "BankSettings":
        """The same, signed by this user."""
        return replace(self, signature=self._signature())

    def save(self, folder: Path) -> "BankSettings":
        """Sign and write them."""
        signed = self.sign()
        write_whole(folder / SETTINGS, json.dumps(asdict(signed), indent=1) + "\n")
        return signed

    @classmethod
    def load(cls, folder: Path) -> "BankSettings":
        """Read them.

        Raises:
            BankError: They are damaged, or of a newer version.
        """
        path = folder / SETTINGS
        try:
            if path.stat().st_size > MOST_BYTES:
                raise ValueError(f"more than {MOST_BYTES} bytes")
            plain = json.loads(path.read_text("utf-8"))
            if plain.get("format") != FORMAT:
                raise BankError(
                    f"{path}: expected format {FORMAT}, got {plain.get('format')!r}; open the bank "
                    "with the version of sscd-vec that made it, or index its images again"
                )
            settings = cls(**{**plain, "roots": tuple(plain["roots"])})
            if not isinstance(settings.tiles, int) or not 1 <= settings.tiles <= MOST_TILES:
                raise ValueError(f"tiles: expected 1 to {MOST_TILES}, got {settings.tiles!r}")
            for field in (settings.model, settings.encoder, settings.signature, *settings.roots):
                if not isinstance(field, str):
                    raise TypeError(f"expected text, got {field!r}")
        except BankError:
            raise
        except (
            OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError,
        ) as error:  # fmt: skip
            raise BankError(
                f"{path}: damaged settings ({error}); restore the file from a copy, or delete "
                f"{folder} and index the images again"
            ) from error
        return settings

    def _signature(self) -> str:
        fields = {**asdict(self), "signature": ""}
        text = json.dumps(fields, sort_keys=True).encode()
        return hmac.new(_key(), text, hashlib.sha256).hexdigest()


def _key() -> bytes:
    """This user's signing key, made when first needed."""
    path = models.cache_folder() / "key"
    try:
        key = path.read_bytes()
        if len(key) == 32:
            return key
    except OSError:
        pass
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:  # another process has just made it
        return path.read_bytes()
    except OSError:  # no place to keep one: nothing is trusted beyond this process
        return _PROCESS_KEY
    with os.fdopen(handle, "wb") as file:
        file.write(key := secrets.token_bytes(32))
    return key


_PROCESS_KEY = secrets.token_bytes(32)
