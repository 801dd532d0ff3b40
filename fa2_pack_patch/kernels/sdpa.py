"""Example by example with PyTorch's own attention: any device, any dtype, exact; the oracle.

Also what "auto" takes for float32 on a GPU, which no flash kernel computes. Slower with many short
examples: one launch for each, sized by ``layout.lengths``, so that nothing waits for the device.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch.nn.functional import dropout as drop
from torch.nn.functional import scaled_dot_product_attention, softmax

from ..varlen import Layout, VarlenLayout
from .base import AttentionCall, Kernel, in_forward_ad


class Sdpa(Kernel):
    """One call for each example; nothing is shared between them."""

    name = "sdpa"

    def unavailable(self) -> Optional[str]:
        return None

    def refuses(self, call: AttentionCall) -> list[str]:
        return []

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layout: Layout,
        *,
        scale: Optional[float],
        window: Optional[int],
        softcap: Optional[float],
        dropout: float,
    ) -> torch.Tensor:
        if isinstance(layout, VarlenLayout):
            return _blockwise(q, k, v, layout, scale, window, softcap, dropout)
        lengths = list(layout.lengths)
        parts = []
        for qe, ke, ve in zip(*(t.split_with_sizes(lengths) for t in (q, k, v))):
            # (1, heads, length, head_dim)
            one = (t.transpose(0, 1)[None] for t in (qe, ke, ve))
            out = _attention(*one, scale=scale, window=window, softcap=softcap, dropout=dropout)
            parts.append(out[0].transpose(0, 1))
        return torch.cat(parts).to(q.dtype)  # autocast gives its own dtype


def _blockwise(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: VarlenLayout,
    scale: Optional[float],
    window: Optional[int],
    softcap: Optional[float],
    dropout: float,
) -> torch.Tensor:
    """All examples at once under a mask of tokens by tokens: no length is known on the host."""
    owner = layout.owners()
    mask = _windowed(layout.tokens, window or layout.tokens, q.device)
    mask = mask & (owner[:, None] == owner)
    one = (t.transpose(0, 1)[None] for t in (q, k, v))
    out = _attention(*one, scale=scale, window=None, softcap=softcap, dropout=dropout, mask=mask)
    return out[0].transpose(0, 1).to(q.dtype)


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: Optional[float],
    window: Optional[int],
    softcap: Optional[float],
    dropout: float,
    mask: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    length, groups = q.shape[2], q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    if window and length > window:
        mask = _windowed(length, window, q.device)
    if softcap or in_forward_ad():
        scores = q @ k.transpose(2, 3) * (q.shape[3] ** -0.5 if scale is None else scale)
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        seen = mask if mask is not None else _windowed(length, length, q.device)
        weights = softmax(scores.masked_fill(~seen, float("-inf")), dim=-1, dtype=torch.float32)
        return drop(weights.to(q.dtype), dropout) @ v
    return scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scale
    )


def _windowed(length: int, window: int, device: torch.device) -> torch.Tensor:
    """bool ``(length, length)``: the last ``window`` keys up to each query."""
    # Not cached: long examples would keep gigabytes, and a mask made under inference_mode cannot
    # be saved for a later backward.
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    return (distance >= 0) & (distance < window)
