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
    for name in LABELS:
        given = call.get(name)
        if not isinstance(given, torch.Tensor):
            continue
        rows, tokens = call["position_ids"].shape
        check_labels(given, rows, tokens, name=name)
        if given.numel() == layout.tokens:  # else the model's own loss says what is wrong
            call[name] = _masked(given, _index(layout, given.device, last=name == LABELS[1]))


def _index(layout: Layout, device: torch.device, *, last: bool) -> torch.Tensor:
    """int64: each example's first or last token in the flattened batch."""
    if isinstance(layout, PackedLayout):
        ends = [s + n - 1 for s, n in zip(layout.starts, layout.lengths)] if last else layout.starts
        return upload(torch.tensor(ends), device)
    # Read by nobody. Examples of no tokens stand at the end: they start behind the last token.
    cu = layout.cu_seqlens.to(torch.int64)
    return (cu[1:] - 1).clamp(0, layout.tokens - 1) if last else cu[:-1]


def _masked(labels: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    flat = labels.reshape(-1)
    longer = torch.cat([flat, flat.new_zeros(1)])  # one element for those behind the last token
    return longer.index_fill(0, index, IGNORED)[:-1].view(labels.shape)
