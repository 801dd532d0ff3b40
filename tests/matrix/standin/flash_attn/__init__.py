"""NOT flash-attn: its functions in plain torch, so that tests can run the flash classes on a CPU.

Signatures and semantics of flash-attn 2.8: causal and windows aligned to the bottom right,
grouped-query heads, windows counted in keys left and right of the query, contiguous results of the
queries' dtype. Unlike the real one it takes any dtype and device and any head_dim. What it does not
have (paged attention) raises.
"""

from __future__ import annotations

from typing import Any

import torch

__version__ = "2.8.3"
__cpu_stand_in__ = True


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output like q, logsumexp ``(batch, heads, queries)``, weights after dropout."""
    if q.shape[2] % k.shape[2]:
        raise RuntimeError("Number of heads in key/value must divide number of heads in query")
    if softcap and dropout_p:
        raise RuntimeError("Softcapping does not support dropout for now")
    dtype = q.dtype
    exact = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    groups, queries, keys = q.shape[2] // k.shape[2], q.shape[1], k.shape[1]
    q, k, v = (t.transpose(1, 2).to(exact) for t in (q, k, v))
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = q @ k.transpose(2, 3) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    last = torch.arange(queries, device=q.device)[:, None] + keys - queries
    behind = last - torch.arange(keys, device=q.device)[None]
    if alibi_slopes is not None:
        slopes = alibi_slopes.to(exact).reshape(-1, q.shape[1], 1, 1)  # (heads,) or (batch, heads)
        scores = scores - slopes * behind.abs()
    left, right = window_size[0], 0 if causal else window_size[1]
    seen = torch.ones(queries, keys, dtype=torch.bool, device=q.device)
    if left >= 0:
        seen &= behind <= left
    if right >= 0:
        seen &= behind >= -right
    scores = scores.masked_fill(~seen, float("-inf"))
    blind = ~seen.any(-1, keepdim=True)  # a query that sees no key gets zeros, not NaN
    weights = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
    if dropout_p:
        weights = torch.nn.functional.dropout(weights, dropout_p)
    out = (weights @ v).transpose(1, 2).to(dtype).contiguous()
    return out, scores.logsumexp(-1), weights


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """(batch, length, heads, head_dim) like the real one."""
    found = _attend(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    return found if return_attn_probs else found[0]


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | torch.Tensor,
    max_seqlen_k: int | torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> Any:
    """(tokens, heads, head_dim) like the real one.

    The real one leaves memory as it was for tokens in no sequence, and for those past
    ``max_seqlen_q`` (rounded up to its block size): here both are NaN, so that nobody reads them.
    """
    if block_table is not None:
        raise NotImplementedError("the stand-in has no paged attention")
    for cu in (cu_seqlens_q, cu_seqlens_k):
        if cu.dtype != torch.int32 or cu.dim() != 1:
            raise RuntimeError("cu_seqlens must be int32 of shape (batch_size + 1,)")
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise RuntimeError("cu_seqlens_q and cu_seqlens_k must have the same length")
    if return_attn_probs:
        raise NotImplementedError("the stand-in has no attention weights of packed sequences")
    starts_q, starts_k, longest = cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), int(max_seqlen_q)
    pieces = [torch.full_like(q[: starts_q[0]], float("nan"))]
    for n in range(len(starts_q) - 1):
        rows = slice(starts_q[n], starts_q[n + 1])
        keys = slice(starts_k[n], starts_k[n + 1])
        if rows.start == rows.stop:
            continue
        each = alibi_slopes is not None and alibi_slopes.dim() > 1
        out, _, _ = _attend(
            *(t[None] for t in (q[rows], k[keys], v[keys])),
            dropout_p, softmax_scale, causal, window_size, softcap,
            alibi_slopes[n] if each else alibi_slopes,
        )  # fmt: skip
        pieces.append(out[0, :longest])
        pieces.append(torch.full_like(out[0, longest:], float("nan")))
    pieces.append(torch.full_like(q[starts_q[-1] :], float("nan")))
    return torch.cat(pieces)


def flash_attn_with_kvcache(*_: Any, **__: Any) -> torch.Tensor:
    """Imported by name from 5.4 on, called only by continuous batching."""
    raise NotImplementedError("the stand-in has no paged attention")
