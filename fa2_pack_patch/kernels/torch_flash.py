"""PyTorch's own FlashAttention-2 with variable lengths: no flash-attn needed.

``torch.nn.attention.varlen.varlen_attn`` where it takes a scale, a window and grouped-query heads;
below that the operator it stands on, ``aten::_flash_attention_forward`` with cumulative lengths
(in every torch from 2.1, with its own derivative). Both take grouped-query heads unrepeated.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Callable, Optional

import torch

from .base import AttentionCall, Kernel, check_backward_range, flash_reasons

if TYPE_CHECKING:
    from ..layout import PackedLayout

_NEEDED = {"scale", "window_size", "enable_gqa"}


@lru_cache(maxsize=1)
def probe() -> tuple[Optional[Callable[..., Any]], frozenset[str]]:
    """``varlen_attn`` if it has all that is needed, and the operator's arguments."""
    function: Optional[Callable[..., Any]] = None
    try:
        from torch.nn.attention.varlen import varlen_attn

        if set(inspect.signature(varlen_attn).parameters) >= _NEEDED:
            function = varlen_attn
    except ImportError:
        pass
    operator = getattr(torch.ops.aten, "_flash_attention_forward", None)
    names = (
        frozenset(a.name for a in operator.default._schema.arguments) if operator else frozenset()
    )
    return function, names


class TorchFlash(Kernel):
    """PyTorch's FlashAttention-2 on a CUDA GPU of compute capability 8 or more."""

    name = "torch_flash"

    def unavailable(self) -> Optional[str]:
        if not torch.cuda.is_available():
            return "torch sees no CUDA device"
        if torch.version.hip is not None:
            return "not verified on ROCm"
        if "cum_seq_q" not in probe()[1]:
            return f"torch {torch.__version__} has no _flash_attention_forward with lengths"
        return None

    def refuses(self, call: AttentionCall) -> list[str]:
        reasons = flash_reasons(call)
        if call.device.type == "cuda" and torch.cuda.get_device_capability(call.device)[0] < 8:
            reasons.append("needs an Ampere GPU or later (compute capability 8)")
        if call.softcap:
            reasons.append(f"has no softcap, got {call.softcap}")
        if call.window and "window_size_left" not in probe()[1]:
            reasons.append(f"torch {torch.__version__} has no window in its flash operator")
        return reasons

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layout: PackedLayout,
        *,
        scale: Optional[float],
        window: Optional[int],
        softcap: Optional[float],
        dropout: float,
    ) -> torch.Tensor:
        check_backward_range(q, layout)
        width = q.shape[2]
        scale = width**-0.5 if scale is None else scale
        extra = -width % 8
        if extra:  # the kernel wants head_dim in eights; zeros change no score
            q, k, v = (torch.nn.functional.pad(t, (0, extra)) for t in (q, k, v))
        cu, longest = layout.cu_seqlens, layout.max_seqlen
        function, _ = probe()
        if function is not None and not dropout:
            out: torch.Tensor = function(
                q,
                k,
                v,
                cu,
                cu,
                longest,
                longest,
                scale=scale,
                window_size=(window - 1 if window else -1, 0),
                enable_gqa=q.shape[1] != k.shape[1],
            )
        else:
            more: dict[str, Any] = {}
            if window:
                more = {"window_size_left": window - 1, "window_size_right": 0}
            out = torch.ops.aten._flash_attention_forward(
                q, k, v, cu, cu, longest, longest, dropout, True, False, scale=scale, **more
            )[0]
        return out[..., :width] if extra else out
