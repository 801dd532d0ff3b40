"""Labels of a packed call: none is a target that would be predicted from another example."""

from __future__ import annotations

from typing import Any

import torch

from .layout import PackedLayout
from .refusals import check_labels
from .tensors import upload
from .varlen import Layout

IGNORED = -100

#: Labels by the token that they are of, and by the token that predicts them.
LABELS = ("labels", "shift_labels")


def has_labels(call: dict[str, Any]) -> bool:
    """Whether a call brings labels of either kind."""
    return any(isinstance(call.get(name), torch.Tensor) for name in LABELS)


def mask_labels(call: dict[str, Any], layout: Layout) -> None:
    """Put copies into ``call`` in which no label is predicted from another example.

    In ``labels`` that is each example's first token. In ``shift_labels``, which Transformers' loss
    takes in their place as they are, it is what stands at each example's last token.

    Raises:
        PackingError: labels of as many tokens that could not be told apart.
    """
    asked = call.get("ignore_index")  # a keyword of Transformers' losses
    ignored = IGNORED if asked is None else asked
    for name in LABELS:
        given = call.get(name)
        if not isinstance(given, torch.Tensor):
            continue
        rows, tokens = call["position_ids"].shape
        check_labels(given, rows, tokens, name=name)
        if given.numel() == layout.tokens:  # else the model's own loss says what is wrong
            call[name] = _masked(given, layout, ignored, last=name == LABELS[1])


def _masked(labels: torch.Tensor, layout: Layout, ignored: int, *, last: bool) -> torch.Tensor:
    """A copy without each example's first token, or its last one."""
    cu = layout.cu_seqlens
    if cu.device != labels.device and isinstance(layout, PackedLayout):
        cu = upload(torch.tensor([*layout.starts, layout.tokens], device="cpu"), labels.device)
    cu = cu.to(device=labels.device, dtype=torch.int64)
    flat = labels.reshape(-1)
    if last:
        index = (cu[1:] - 1).clamp(0, layout.tokens - 1)
    else:
        index = cu[:-1]
        if not isinstance(layout, PackedLayout):
            # Read by nobody: examples of no tokens, at the end, start behind the last token.
            flat = torch.cat([flat, flat.new_zeros(1)])
    return flat.index_fill(0, index, ignored)[: layout.tokens].view(labels.shape)
