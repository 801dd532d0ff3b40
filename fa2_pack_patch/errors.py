"""The exceptions of this package: one class for each kind of mistake."""

from __future__ import annotations

from collections.abc import Sequence

_LONGEST = 1000


class Fa2PackPatchError(Exception):
    """What this package refuses is one of these.

    A wrong option of a data tool (``strategy="best"``) is a plain ``ValueError``, as anywhere.
    """


class UnsupportedModelError(Fa2PackPatchError, TypeError):
    """The model cannot be patched or verified; ``reasons`` holds every reason there is."""

    def __init__(
        self, subject: str, reasons: Sequence[str], what: str = "patched for packed rows"
    ) -> None:
        self.subject = subject
        self.reasons = tuple(reasons)
        self.what = what
        lines = "".join(f"\n  - {reason}" for reason in self.reasons)
        super().__init__(f"{subject} cannot be {what}; the model is unchanged. Reasons:{lines}")

    def __reduce__(self) -> tuple[type, tuple[str, tuple[str, ...], str]]:
        return type(self), (self.subject, self.reasons, self.what)


class UnsupportedReleaseError(Fa2PackPatchError, RuntimeError):
    """Transformers is older than 4.34; or nobody verified it, and a twin of the model failed."""


class PackingError(Fa2PackPatchError, ValueError):
    """A call's boundaries are contradictory, incomplete, or cannot be attended separately."""


class KernelUnavailableError(Fa2PackPatchError, RuntimeError):
    """No kernel, or not the one that was asked for, can compute this attention here."""


def in_words(error: BaseException) -> str:
    """An error in one line, for a message of ours that goes around it."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text if len(text) <= _LONGEST else text[:_LONGEST] + '…'}"
