"""A head that apply never reached: put around a patched base model later, or beside its own head.

No hook of it sees its labels; what its caller gave is in the frame of its forward.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any, Optional

import torch

from .detect import class_of
from .errors import PackingError
from .refusals import one_result_a_row
from .targets import KEPT, LABELS, mask_labels
from .varlen import Layout

if TYPE_CHECKING:
    from .registry import Family


def check_unreached(
    base: torch.nn.Module, family: Family, call: Mapping[str, Any], layout: Layout
) -> None:
    """Refuse a packed call that a head without hooks handed to the base model.

    Args:
        base: the patched base model.
        family: its family, which says what heads it has.
        call: what the base model is called with; ``position_ids`` are ``(rows, tokens)``.
        layout: the examples.

    Raises:
        PackingError: names the head, of which a label is a target that another example would
            predict, or which gives one result for each row.
    """
    for head, frame in _heads(base, family):
        name = class_of(head).__name__
        if name in family.pooled:
            raise one_result_a_row(name, layout)
        given = dict(frame.f_locals.get("kwargs", {}))
        given.update((n, frame.f_locals[n]) for n in LABELS + KEPT if n in frame.f_locals)
        labels = {n: given[n] for n in LABELS if isinstance(given.get(n), torch.Tensor)}
        masked = {**given, "position_ids": call["position_ids"]}
        mask_labels(masked, layout)
        if not all(torch.equal(masked[n], labels[n]) for n in labels):
            raise PackingError(
                f"fa2_pack_patch.apply was never called on this {name}, so that labels at the "
                "examples' boundaries would be targets that another example predicts. Call "
                "fa2_pack_patch.apply on it too, or set these labels to -100."
            )


def _heads(base: torch.nn.Module, family: Family) -> Iterator[tuple[torch.nn.Module, FrameType]]:
    """The family's heads whose forward is calling ``base``, and the frames of that."""
    known = {family.causal, *family.pooled}
    frame: Optional[FrameType] = sys._getframe(2)
    while frame is not None:
        head = frame.f_locals.get("self") if "forward" in frame.f_code.co_name else None
        if isinstance(head, torch.nn.Module):
            kind = class_of(head)
            ours = kind.__module__ == family.module and kind.__name__ in known
            if ours and any(module is base for module in head.modules()):
                yield head, frame
        frame = frame.f_back
