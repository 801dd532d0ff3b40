"""The exceptions of this package: one class for each kind of mistake."""

from __future__ import annotations

from collections.abc import Sequence


class Fa2PackPatchError(Exception):
    """Everything this package raises on purpose is one of these."""


class UnsupportedModelError(Fa2PackPatchError, TypeError):
    """The model cannot be patched; ``reasons`` holds every reason, not only the first."""

    def __init__(self, subject: str, reasons: Sequence[str]) -> None:
        self.subject = subject
        self.reasons = tuple(reasons)
        lines = "".join(f"\n  - {reason}" for reason in self.reasons)
        super().__init__(
            f"{subject} cannot be patched for packed rows; the model is unchanged. Reasons:{lines}"
        )

    def __reduce__(self) -> tuple[type, tuple[str, tuple[str, ...]]]:
        return type(self), (self.subject, self.reasons)


class UnsupportedReleaseError(Fa2PackPatchError, RuntimeError):
    """The installed Transformers is older than 4.34 or newer than the newest verified release."""


class PackingError(Fa2PackPatchError, ValueError):
    """A call's boundaries are contradictory, incomplete, or cannot be attended separately."""


class KernelUnavailableError(Fa2PackPatchError, RuntimeError):
    """No kernel, or not the one that was asked for, can compute this attention here."""
