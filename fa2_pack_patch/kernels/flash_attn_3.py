"""FlashAttention-3 (``flash_attn_interface``): Hopper GPUs, no dropout.

Its backward has flash-attn 2's ``dq_accum`` too, as ``(heads, (tokens + padding) * head_dim)`` with
the heads at an int64 stride (``hopper/flash_bwd_postprocess_kernel.h``): only what one head holds
must stay below 2**31.
"""

from __future__ import annotations

import inspect
import os
from typing import TYPE_CHECKING, Any, Callable, Optional

import torch

from .base import AttentionCall, Kernel, Once, capability, check_backward_range, flash_reasons

if TYPE_CHECKING:
    from ..varlen import Layout


@Once
def probe() -> tuple[Optional[Callable[..., Any]], frozenset[str], str]:
    """The function, its parameters, and why there is none."""
    try:
        from flash_attn_interface import flash_attn_varlen_func as function
    except Exception as error:  # a broken build raises more than ImportError
        return None, frozenset(), f"flash_attn_interface cannot be imported ({error})"
    return function, frozenset(inspect.signature(function).parameters), ""


class FlashAttn3(Kernel):
    """FlashAttention-3 on a Hopper GPU."""

    name = "flash_attn_3"

    def unavailable(self) -> Optional[str]:
        return probe()[2] or None

    def refuses(self, call: AttentionCall) -> list[str]:
        names = probe()[1]
        reasons = flash_reasons(call)
        major, minor = capability(call.device)
        if major not in (0, 9):
            reasons.append(f"needs a Hopper GPU (compute capability 9), got {major}.{minor}")
        if call.dropout:
            reasons.append(f"has no dropout, got {call.dropout}")
        if call.window and "window_size" not in names:
            reasons.append("this build has no window_size")
        if call.softcap and "softcap" not in names:
            reasons.append("this build has no softcap")
        return reasons

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
        function, names, _ = probe()
        assert function is not None
        check_backward_range(q, layout, each_head=True)
        more: dict[str, Any] = {}
        if window:
            more["window_size"] = (window - 1, 0)
        if softcap:
            more["softcap"] = softcap
        if "deterministic" in names and os.environ.get("FLASH_ATTENTION_DETERMINISTIC") == "1":
            more["deterministic"] = True
        out = function(
            q,
            k,
            v,
            cu_seqlens_q=layout.cu_seqlens,
            cu_seqlens_k=layout.cu_seqlens,
            max_seqlen_q=layout.max_seqlen,
            max_seqlen_k=layout.max_seqlen,
            softmax_scale=scale,
            causal=True,
            **more,
        )
        # Older builds return (out, log-sum-exp).
        result: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return result
