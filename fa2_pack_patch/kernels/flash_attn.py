"""flash-attn 2: ``flash_attn_varlen_func``, by what its signature has and not by its version."""

from __future__ import annotations

import inspect
import os
from typing import TYPE_CHECKING, Any, Callable, Optional

import torch

from .base import AttentionCall, Kernel, Once, check_backward_range, flash_reasons

if TYPE_CHECKING:
    from ..varlen import Layout


@Once
def probe() -> tuple[Optional[Callable[..., Any]], frozenset[str], str, bool]:
    """The function, its parameters, why there is none, and whether it is a CPU stand-in."""
    try:
        import flash_attn
    except Exception as error:
        return None, frozenset(), f"flash_attn cannot be imported ({error})", False
    function = getattr(flash_attn, "flash_attn_varlen_func", None)
    if not callable(function):
        where = getattr(flash_attn, "__file__", None) or list(getattr(flash_attn, "__path__", []))
        reason = (
            f"the flash_attn at {where} has no flash_attn_varlen_func (a flash-attn 4 namespace, "
            "perhaps); install flash-attn 2"
        )
        return None, frozenset(), reason, False
    names = frozenset(inspect.signature(function).parameters)
    return function, names, "", bool(getattr(flash_attn, "__cpu_stand_in__", False))


class FlashAttn(Kernel):
    """flash-attn 2 on CUDA, float16 or bfloat16, head_dim up to 256.

    Its backward is the deterministic one if the environment says FLASH_ATTENTION_DETERMINISTIC=1
    (as in Transformers) and the installed version has it (2.4.1). A module that calls itself
    ``__cpu_stand_in__`` (in the tests) is spared the questions of device, dtype and head size.
    """

    name = "flash_attn"

    def unavailable(self) -> Optional[str]:
        return probe()[2] or None

    def refuses(self, call: AttentionCall) -> list[str]:
        _, names, _, stand_in = probe()
        reasons = [] if stand_in else flash_reasons(call)
        if call.softcap and call.dropout:
            reasons.append(f"has no dropout together with softcap, got {call.dropout}")
        if call.window and "window_size" not in names:
            reasons.append("this flash-attn has no window_size (2.3 has)")
        if call.softcap and "softcap" not in names:
            reasons.append("this flash-attn has no softcap (2.6 has)")
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
        function, names, _, _ = probe()
        assert function is not None
        check_backward_range(q, layout)
        q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
        more: dict[str, Any] = {}
        if window:
            more["window_size"] = (window - 1, 0)
        if softcap:
            more["softcap"] = softcap
        if "deterministic" in names and os.environ.get("FLASH_ATTENTION_DETERMINISTIC") == "1":
            more["deterministic"] = True
        out: torch.Tensor = function(
            q,
            k,
            v,
            cu_seqlens_q=layout.cu_seqlens,
            cu_seqlens_k=layout.cu_seqlens,
            max_seqlen_q=layout.max_seqlen,
            max_seqlen_k=layout.max_seqlen,
            dropout_p=dropout,
            softmax_scale=scale,
            causal=True,
            **more,
        )
        return out
