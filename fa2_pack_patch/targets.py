"""Labels of a packed call: none is a target that would be predicted from another example."""

from __future__ import annotations

from typing import Any, Optional

import torch

from .layout import PackedLayout
from .refusals import check_labels
from .tensors import upload
from .varlen import Layout

IGNORED = -100

#: Labels by the token that they are of, and by the token that predicts them.
LABELS = ("labels", "shift_labels")

#: What says for which tokens a head gives logits (the second until 4.49).
KEPT = ("logits_to_keep", "num_logits_to_keep")


def has_labels(call: dict[str, Any]) -> bool:
    """Whether a call brings labels of either kind."""
    return any(isinstance(call.get(name), torch.Tensor) for name in LABELS)


def mask_labels(call: dict[str, Any], layout: Layout) -> None:
    """Put copies into ``call`` in which no label is predicted from another example.

    In ``labels`` that is each example's first token. In ``shift_labels``, which Transformers' loss
    takes in their place as they are, it is what stands at each example's last token. With logits
    of some tokens alone, labels are of these.

    Raises:
        PackingError: labels of as many tokens that could not be told apart.
    """
    asked = call.get("ignore_index")  # a keyword of Transformers' losses
    ignored = IGNORED if asked is None else asked
    kept = _kept(call)
    for name in LABELS:
        given = call.get(name)
        if not isinstance(given, torch.Tensor):
            continue
        some = kept if kept is not None and given.numel() == kept.numel() else None
        shaped = call["position_ids"] if some is None else some
        width = shaped.shape[-1]
        check_labels(given, shaped.numel() // max(width, 1), width, name=name)
        if given.numel() == shaped.numel():  # else the model's own loss says what is wrong
            call[name] = _masked(given, layout, ignored, some, last=name == LABELS[1])


def _masked(
    labels: torch.Tensor,
    layout: Layout,
    ignored: int,
    kept: Optional[torch.Tensor],
    *,
    last: bool,
) -> torch.Tensor:
    """A copy without each example's first token, or its last one."""
    if kept is not None:
        return _masked_of_some(labels, layout, ignored, kept, last=last)
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


def _kept(call: dict[str, Any]) -> Optional[torch.Tensor]:
    """The flat index of each token of which the head gives logits; None where of all."""
    asked = next((call[name] for name in KEPT if call.get(name) is not None), 0)
    if isinstance(asked, int) and not asked:
        return None
    ids = call["position_ids"]
    index = torch.arange(ids.numel(), device=ids.device).view(ids.shape)
    if isinstance(asked, int):
        return index[:, -asked:]
    if isinstance(asked, torch.Tensor) and asked.dim() == 2:
        return index[asked] if asked.dtype == torch.bool else index.take_along_dim(asked, 1)
    return index[:, asked]


def _masked_of_some(
    labels: torch.Tensor, layout: Layout, ignored: int, kept: torch.Tensor, *, last: bool
) -> torch.Tensor:
    """:func:`_masked` for labels of the ``kept`` tokens, each after the one that predicts it."""
    owner = _owners(layout, kept.device)
    if last:
        after = torch.nn.functional.pad(owner[1:], (0, 1), value=-1)
        foreign = (owner != after)[kept]
    else:
        whose = owner[kept]
        foreign = torch.zeros_like(kept, dtype=torch.bool)
        foreign[..., 1:] = whose[..., 1:] != whose[..., :-1]
    return labels.masked_fill(foreign.view(labels.shape).to(labels.device), ignored)


def _owners(layout: Layout, device: torch.device) -> torch.Tensor:
    """int64 ``(tokens,)``: the example of each token."""
    if not isinstance(layout, PackedLayout):
        return layout.owners().to(device)
    lengths = torch.tensor(layout.lengths, device="cpu")
    return upload(torch.arange(layout.examples, device="cpu").repeat_interleave(lengths), device)
