"""NOT flash-attn: its two functions in plain torch, for tests of the flash classes on a CPU.

Semantics as in flash-attn 2: bottom-right causal alignment, grouped-query heads, window_size in
keys to the left and right of the query, softcap.
"""

from __future__ import annotations

from typing import Any

import torch

__version__ = "2.8.3"
__cpu_stand_in__ = True


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> torch.Tensor:
    """(batch, length, heads, head_dim) like the real one."""
    if alibi_slopes is not None or return_attn_probs:
        raise NotImplementedError("the stand-in has neither ALiBi nor attention weights")
    groups = q.shape[2] // k.shape[2]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = q @ k.transpose(2, 3) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    queries, keys = q.shape[2], k.shape[2]
    place = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)[None]
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if causal:
        seen &= place >= 0
    if window_size[0] >= 0:
        seen &= place <= window_size[0]
    if window_size[1] >= 0:
        seen &= -place <= window_size[1]
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    weights = torch.nn.functional.dropout(torch.nan_to_num(weights), dropout_p)
    return (weights @ v).transpose(1, 2)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
) -> torch.Tensor:
    """(tokens, heads, head_dim) like the real one; tokens in no sequence are left as NaN."""
    for cu in (cu_seqlens_q, cu_seqlens_k):
        if cu.dtype != torch.int32 or cu.dim() != 1:
            raise RuntimeError("cu_seqlens must be int32 of shape (batch_size + 1,)")
    pieces = []
    a, b = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    if a[0] > 0:
        pieces.append(torch.full_like(q[: a[0]], float("nan")))
    for n in range(len(a) - 1):
        one = (q[a[n] : a[n + 1]], k[b[n] : b[n + 1]], v[b[n] : b[n + 1]])
        if one[0].shape[0]:
            out = flash_attn_func(
                *(t[None] for t in one), dropout_p, softmax_scale, causal, window_size, softcap
            )
            pieces.append(out[0])
    if a[-1] < q.shape[0]:
        pieces.append(torch.full_like(q[a[-1] :], float("nan")))
    return torch.cat(pieces)


def flash_attn_with_kvcache(*_: Any, **__: Any) -> torch.Tensor:
    raise NotImplementedError("the stand-in has no paged attention")
