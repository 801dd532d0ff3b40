"""What is handed back: a verdict on a model, and what a proof found."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional, Union

import torch


@dataclass(frozen=True)
class Verdict:
    """Whether a model or a config is supported; true in a condition when it is.

    Attributes:
        subject: what was looked at.
        family: the family's name, where one was found.
        release: the Transformers release it was judged for.
        reasons: every reason against it; empty when it is supported.
        notes: quirks of this family in this release.
    """

    subject: str
    family: Optional[str]
    release: str
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return not self.reasons

    def __str__(self) -> str:
        word = "supported" if self else "not supported"
        head = f"{self.subject}: {word} (family {self.family}, transformers {self.release})"
        lines = [f"  - {r}" for r in self.reasons] + [f"  note: {n}" for n in self.notes]
        return "\n".join([head, *lines])


@dataclass(frozen=True)
class Check:
    """One figure of a proof: it passed if ``value`` is not above ``allowed``.

    Attributes:
        name: what was compared.
        value: how far it was off; infinite where the call failed.
        allowed: what dtype and PyTorch's own error on this model explain.
        passed: the outcome.
        note: what was raised, where something was.
    """

    name: str
    value: float
    allowed: float
    passed: bool
    note: str = ""


@dataclass(frozen=True)
class VerifyReport:
    """What :func:`fa2_pack_patch.verify` found; its string is a small table.

    Attributes:
        passed: whether every check passed.
        checks: the figures, in the order they were taken.
        subject: the model's class, dtype and device, in words.
    """

    passed: bool
    checks: tuple[Check, ...]
    subject: str = ""
    _model: Any = field(default=None, repr=False, compare=False)

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        width = max(len(c.name) for c in self.checks)
        lines = [f"fa2_pack_patch verify: {'passed' if self.passed else 'FAILED'}, {self.subject}"]
        lines.append(f"  {'check':{width}}  {'value':>9}  {'allowed':>9}")
        for c in self.checks:
            word = "" if c.passed else "  FAILED"
            lines.append(f"  {c.name:{width}}  {c.value:9.2g}  {c.allowed:9.2g}{word}")
        lines += [f"  {c.name}: {c.note}" for c in self.checks if c.note]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; an infinite value is ``null``."""
        rows = [
            {
                "name": c.name,
                "value": c.value if math.isfinite(c.value) else None,
                "allowed": c.allowed,
                "passed": c.passed,
                "note": c.note,
            }
            for c in self.checks
        ]
        return {"passed": self.passed, "subject": self.subject, "checks": rows}

    def plot(
        self,
        path: Union[str, Path],
        *,
        examples: Optional[Sequence[Union[Sequence[int], torch.Tensor]]] = None,
        title: Optional[str] = None,
    ) -> None:
        """Draw which input token changes which output token, stock and patched side by side.

        The model that was verified must still exist, as it was.

        Args:
            path: of the picture; its suffix gives the format.
            examples: short sequences of token ids, packed into one row; random ones by default.
            title: over the picture; the model's class and release by default.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: ``path`` is in no folder, or of no format that can be written.
            RuntimeError: the model is gone.
        """
        from .plots import draw_leaks

        model = self._model() if self._model is not None else None
        if model is None:
            raise RuntimeError(
                "the verified model no longer exists, so its leak map cannot be drawn; keep the "
                "model until after plot()."
            )
        draw_leaks(model, Path(path), examples, title)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_model": None}
