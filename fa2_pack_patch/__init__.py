"""Packed rows attended example by example, in any supported Transformers model and release."""

from typing import Any

from .apply import applied, apply, is_applied, revert, supports
from .errors import (
    Fa2PackPatchError,
    KernelUnavailableError,
    PackingError,
    UnsupportedModelError,
    UnsupportedReleaseError,
)
from .layout import PackedLayout
from .patch import PatchReport
from .report import Verdict, VerifyReport
from .verify import verify

__version__ = "0.1.0"

__all__ = [
    "Fa2PackPatchCallback",
    "Fa2PackPatchError",
    "KernelUnavailableError",
    "PackedLayout",
    "PackingError",
    "PatchReport",
    "UnsupportedModelError",
    "UnsupportedReleaseError",
    "Verdict",
    "VerifyReport",
    "applied",
    "apply",
    "is_applied",
    "revert",
    "supports",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name == "Fa2PackPatchCallback":  # its base class is in Transformers
        from .callback import Fa2PackPatchCallback

        return Fa2PackPatchCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
