"""With which model, settings and normalizer a bank is opened or made."""

import logging
import os
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from sscd_vec import models
from sscd_vec.bank.location import NORMALIZER, BankError, Location
from sscd_vec.bank.settings import BankSettings
from sscd_vec.files import PathLike
from sscd_vec.normalize import Normalizer

if TYPE_CHECKING:
    from sscd_vec.bank.describe import ImageEncoder

logger = logging.getLogger(__name__)


class Setup:
    """What a bank works with.

    Attributes:
        settings: What the bank was made with.
        normalizer: Its normalizer.
    """

    settings: BankSettings
    normalizer: Normalizer

    def __init__(
        self,
        location: Location | None,
        model: "PathLike | ImageEncoder | None",
        *,
        device: str | None = None,
        trust: bool = False,
    ) -> None:
        """Choose the model; ``read`` or ``make`` does the rest."""
        self._location, self._trust, self._device = location, trust, device
        self._given: ImageEncoder | None = None
        self._name: PathLike | None = None
        if model is None or isinstance(model, str | os.PathLike):
            self._name = model
        else:
            self._given = model

    @classmethod
    def without_bank(
        cls,
        model: "PathLike | ImageEncoder | None" = None,
        normalizer: PathLike | Normalizer | None = None,
        *,
        device: str | None = None,
    ) -> "Setup":
        """A model and its normalizer for images that are in no bank."""
        setup = cls(None, model, device=device)
        setup.make(normalizer, tiles=1)
        return setup

    def read_or_make(
        self, normalizer: PathLike | Normalizer | None, tiles: int | None, *, create: bool
    ) -> bool:
        """Read the bank there is, or make one; return whether there was one.

        Raises:
            BankError: There is none and ``create`` is false, or it cannot be read.
        """
        where = self._location
        if where is not None:
            where.require_regular_files()
            if where.exists:
                self.read(tiles)
                return True
            where.require_free(create)
        self.make(normalizer, tiles or 1)
        return False

    def read(self, tiles: int | None) -> None:
        """Read the settings and the normalizer of a bank that exists.

        Raises:
            BankError: They are damaged, or do not fit what was asked for.
        """
        if self._location is None:
            raise BankError("a bank in memory cannot be opened again")
        folder = self._location.folder
        self.settings = BankSettings.load(folder)
        if tiles not in (None, self.settings.tiles):
            raise self._made_with("tiles", self.settings.tiles, tiles)
        if self._name is not None and self.settings.is_trusted and self.settings.model:
            name = models.stable_name(self._name)
            if name != self.settings.model:
                raise self._made_with("model", self.settings.model, name)
        if self._trust and not self.settings.is_trusted:
            self.settings = self.settings.save(folder)
        self.normalizer = Normalizer.load(folder / NORMALIZER)

    def make(self, normalizer: PathLike | Normalizer | None, tiles: int) -> None:
        """Choose a new bank's settings and normalizer, and write them: the settings last."""
        name = "" if self._given is not None else models.stable_name(self._name)
        self.normalizer = self._choose_normalizer(normalizer, name)
        fingerprint = self.normalizer.encoder or self._load_encoder().fingerprint
        self.settings = BankSettings(name, fingerprint, tiles)
        if self._location is not None:
            self._location.folder.mkdir(parents=True, exist_ok=True)
            self.normalizer.save(self._location.folder / NORMALIZER)
            self.settings = self.settings.save(self._location.folder)

    def replace_normalizer(self, normalizer: PathLike | Normalizer) -> Normalizer:
        """Use another query side from now on.

        Raises:
            BankError: Its reference side is another one: the vectors would have to be made again.
        """
        new = load_normalizer(normalizer)
        has, got = self.normalizer.reference_fingerprint, new.reference_fingerprint
        if has != got:
            raise BankError(
                f"{self._location} was built with reference fingerprint {has}, this normalizer has "
                f"{got}; make a new bank for it"
            )
        if self._location is not None:
            new.save(self._location.folder / NORMALIZER)
        self.normalizer = new
        return new

    def remember_roots(self, places: list[PathLike]) -> None:
        """Note the folders images come from, so that their files may be shown."""
        if self._location is not None and not self.settings.is_trusted:
            return  # a stranger's settings stay as they are
        with_new = self.settings.with_roots(places)
        if with_new.roots != self.settings.roots:
            folder = None if self._location is None else self._location.folder
            self.settings = with_new.sign() if folder is None else with_new.save(folder)

    def may_show(self, path: Path) -> bool:
        """Whether a file lies in the bank or in a folder this user added images from."""
        if self._location is not None and self._location.is_upload(path):
            return True
        real = path.resolve()
        return any(real.is_relative_to(root) for root in self.settings.root_folders)

    @cached_property
    def encoder(self) -> "ImageEncoder":
        """The model, loaded when first needed.

        Raises:
            BankError: The bank names a model this user did not choose.
        """
        encoder = self._load_encoder()
        self.normalizer.check_encoder(encoder)
        return encoder

    def __str__(self) -> str:
        """The model's name."""
        return self.settings.model or "this encoder"

    def _load_encoder(self) -> "ImageEncoder":
        if self._given is not None:
            return self._given
        from sscd_vec.encoder.encoder import Encoder

        name = self._name if self._name is not None else self._allowed_model()
        return Encoder.from_pretrained(name, device=self._device)

    def _allowed_model(self) -> str | None:
        """The bank's model, if it is shipped or this user chose it."""
        name = self.settings.model if hasattr(self, "settings") else None
        if name is None or name in models.shipped():
            return name
        if not name:
            raise BankError(
                f"{self._location} was made with an Encoder object: pass it again as model="
            )
        if not self.settings.is_trusted:
            raise BankError(
                f"{self._location} names the model {name!r}, and its settings were not written by "
                f"you on this account: pass model={name!r} (--model) if you trust it"
            )
        return name

    def _choose_normalizer(self, normalizer: PathLike | Normalizer | None, name: str) -> Normalizer:
        if normalizer is not None:
            return load_normalizer(normalizer)
        try:
            found = Normalizer.from_pretrained(name or None)
            if name or found.encoder == self._load_encoder().fingerprint:
                return found
        except FileNotFoundError:
            pass
        logger.warning(
            "no normalizer comes with %s: scores are plain cosines and no threshold is known; fit "
            "one with `sscd-vec normalize fit`",
            name or "this encoder",
        )
        return Normalizer.identity(self._load_encoder().dim)

    def _made_with(self, option: str, has: object, given: object) -> BankError:
        return BankError(
            f"{self._location} was made with {option}={has}, got {given}; leave it out, or make a "
            "new bank under another name"
        )


def load_normalizer(normalizer: PathLike | Normalizer) -> Normalizer:
    """A normalizer, given as an object, a name or a file."""
    if isinstance(normalizer, Normalizer):
        return normalizer
    return Normalizer.from_pretrained(os.fspath(normalizer))
