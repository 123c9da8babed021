"""Banks: images in, verdicts out, on any index."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sscd_vec.bank.bank import Bank
    from sscd_vec.bank.location import BankError
    from sscd_vec.bank.results import Added, Answer, BankMatch

__all__ = ["Added", "Answer", "Bank", "BankError", "BankMatch"]

_FILES = {"Bank": "bank", "BankError": "location"}


def __getattr__(name: str) -> object:
    """Load what is asked for (PEP 562): locations and records need no index and no model."""
    if name not in __all__:
        raise AttributeError(f"module 'sscd_vec.bank' has no attribute {name!r}")
    return getattr(import_module(f"sscd_vec.bank.{_FILES.get(name, 'results')}"), name)
