"""PyTorch's own FlashAttention-2 with variable lengths: no flash-attn needed.

``torch.nn.attention.varlen.varlen_attn`` where it takes a scale, a window and grouped-query heads;
below that, and for dropout, which it has not, the operator it stands on:
``aten::_flash_attention_forward`` with cumulative lengths (in every torch from 2.1; differentiable
by torch's ``derivatives.yaml``; with a window from 2.5). Both are the same FlashAttention-2 kernel,
which takes grouped-query heads unrepeated, and demands a head_dim in eights and a last dimension of
stride 1 (``mha_varlen_fwd`` in torch's ``flash_api.cpp``).
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Callable, Optional

import torch

from .base import AttentionCall, Kernel, Once, capability, check_backward_range, flash_reasons

if TYPE_CHECKING:
    from ..varlen import Layout

_NEEDED = {"scale", "window_size", "enable_gqa"}


@Once
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
        windowed = "window_size_left" in probe()[1]
        if call.needs_grad and call.head_dim > 192 and _is_small(call.device):
            # Too little shared memory for this backward, but for 225 to 256 without dropout since
            # flash-attn 2.5.5, which torch has had at the latest since its operator has a window.
            served = windowed and call.head_dim > 224 and not call.dropout
            if not served:
                reasons.append(f"has no backward for head_dim {call.head_dim} on this GPU")
        if call.softcap:
            reasons.append(f"has no softcap, got {call.softcap}")
        if call.window and not windowed:
            reasons.append(f"torch {torch.__version__} has no window in its flash operator")
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
        check_backward_range(q, layout)
        width = q.shape[2]
        scale = width**-0.5 if scale is None else scale
        extra = -width % 8
        if extra:  # the kernel wants head_dim in eights; zeros change no score
            q, k, v = (torch.nn.functional.pad(t, (0, extra)) for t in (q, k, v))
        q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
        cu, longest = layout.cu_seqlens, layout.max_seqlen
        left = window - 1 if window else -1
        function, names = probe()
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
                window_size=(left, 0),
                enable_gqa=q.shape[1] != k.shape[1],
            )
        else:
            more: dict[str, Any] = {}
            if "window_size_left" in names:
                more = {"window_size_left": left, "window_size_right": 0}
            out = torch.ops.aten._flash_attention_forward(
                q, k, v, cu, cu, longest, longest, dropout, True, False, scale=scale, **more
            )[0]
        return out[..., :width] if extra else out


def _is_small(device: torch.device) -> bool:
    """Whether a multiprocessor has 100 KB of shared memory (consumer GPUs), not 160 KB or more."""
    major, minor = capability(device)
    return (major, minor) in ((8, 6), (8, 9)) or major == 12
