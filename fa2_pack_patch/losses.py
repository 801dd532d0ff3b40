"""The losses of a probe: what its head makes of labels, packed and of each example by itself."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

import torch

from .batches import Batch, Piece
from .detect import class_of, is_pretrained
from .probe import Probe

_IGNORED = -100


@dataclass(frozen=True)
class Targets:
    """How a head reads labels: ``first`` is the first token of an example that is a target."""

    probe: Probe
    first: int

    @classmethod
    def of(cls, probe: Probe) -> Optional[Targets]:
        """None for a model without a head whose loss is a mean over targets."""
        if getattr(probe.base.config, "output_router_logits", False):
            return None  # the routers' own loss is one of the whole batch
        heads = [class_of(m).__name__ for m in probe.model.modules() if is_pretrained(m)]
        if any(name in probe.family.per_token for name in heads):
            return cls(probe, 0)
        return cls(probe, 1) if probe.family.causal in heads else None

    @property
    def shiftable(self) -> bool:
        """Whether the loss takes labels that its caller moved to the tokens that predict them."""
        heads = [m for m in self.probe.model.modules() if is_pretrained(m)]
        function = getattr(heads[0], "loss_function", None)
        known = () if function is None else inspect.signature(function).parameters
        return bool(self.first) and "shift_labels" in known

    def packed(
        self, batch: Batch, classes: int, *, changed: bool = False, shifted: bool = False
    ) -> torch.Tensor:
        """The loss of a packed call.

        ``changed``: with other labels where none is a target. ``shifted``: with ``shift_labels``.
        """
        labels = torch.full_like(batch.kwargs["input_ids"].cpu(), _IGNORED, dtype=torch.int64)
        for piece in batch.pieces:
            labels[piece.place] = piece.ids % classes
            if changed:
                labels[piece.row, piece.start : piece.start + self.first] = _IGNORED
        given = {"labels": labels}
        if shifted:
            given["shift_labels"] = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=_IGNORED)
        return _loss(self.probe.call(batch, **given))

    def alone(self, pieces: Sequence[Piece], classes: int) -> torch.Tensor:
        """The mean over all targets, each example run by itself."""
        total, count = torch.zeros((), dtype=torch.float64, device="cpu"), 0
        for piece in pieces:
            targets = len(piece.ids) - self.first
            if targets:
                out = self.probe.call_alone(piece, labels=(piece.ids % classes)[None])
                total += _loss(out).double().cpu() * targets
                count += targets
        return total / max(count, 1)

    def surprise(self, pieces: Sequence[Piece], outputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """``(targets,)``: the negative log-likelihood of each target by outputs of examples."""
        found = []
        for piece, out in zip(pieces, outputs):
            kept = out.double().log_softmax(-1)[: len(out) - self.first]
            labels = piece.ids[self.first :, None] % out.shape[-1]
            found.append(-kept.gather(-1, labels.to(kept.device))[:, 0])
        return torch.cat(found)


def _loss(out: Any) -> torch.Tensor:
    found = out.loss if hasattr(out, "loss") else out[0]
    assert isinstance(found, torch.Tensor)
    return found.detach()
