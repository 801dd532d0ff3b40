"""What a kernel is, and what it is asked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Callable, Generic, Optional, TypeVar

import torch

from ..errors import PackingError

if TYPE_CHECKING:
    from ..varlen import Layout

HALF = (torch.float16, torch.bfloat16)

T = TypeVar("T")


class Once(Generic[T]):
    """A function's first answer, kept; also inside of a graph, where lru_cache is looked through.

    Dynamo cannot trace an import that fails: ask once before.
    """

    def __init__(self, function: Callable[[], T]) -> None:
        self.function = function
        self.answers: list[T] = []

    def __call__(self) -> T:
        if not self.answers:
            self.answers.append(self.function())
        return self.answers[0]

    def cache_clear(self) -> None:
        """Forget the answer."""
        self.answers.clear()


@dataclass(frozen=True)
class AttentionCall:
    """The properties of one attention call by which a kernel is chosen.

    ``window`` is the number of keys a query sees, itself included; None for all.
    """

    device: torch.device
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    window: Optional[int]
    softcap: Optional[float]
    dropout: float
    needs_grad: bool
    forward_ad: bool = False

    def __str__(self) -> str:
        text = (
            f"{self.dtype} on {self.device}, {self.heads} query and {self.kv_heads} key heads "
            f"of {self.head_dim}"
        )
        if self.window:
            text += f", window {self.window}"
        if self.softcap:
            text += f", softcap {self.softcap}"
        if self.dropout:
            text += f", dropout {self.dropout}"
        if self.forward_ad:
            text += ", forward-mode derivatives"
        return text


def in_forward_ad() -> bool:
    """Whether derivatives are taken in forward mode: ``torch.func.jvp`` and what is made of it."""
    return torch.autograd.forward_ad._current_level >= 0


class Kernel(ABC):
    """Computes causal attention of packed examples."""

    name: str

    @abstractmethod
    def unavailable(self) -> Optional[str]:
        """Why this kernel cannot be used in this process at all, or None."""

    @abstractmethod
    def refuses(self, call: AttentionCall) -> list[str]:
        """Every reason against this one call; empty when the kernel can serve it."""

    @abstractmethod
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
        """Attention ``(tokens, heads, head_dim)`` in the dtype of ``q``.

        Args:
            q: ``(tokens, heads, head_dim)``.
            k: ``(tokens, kv_heads, head_dim)``; heads is a multiple of kv_heads.
            v: like ``k``.
            layout: the examples; its ``cu_seqlens`` on the device of ``q``.
            scale: of the scores; None for ``head_dim**-0.5``.
            window: keys a query sees, itself included; None for all.
            softcap: ``softcap * tanh(scores / softcap)``; None for none.
            dropout: probability.

        Raises:
            PackingError: beyond what the kernel's backward can index.
        """


def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a CUDA device; (0, 0) of any other, and where torch sees none."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return 0, 0
    return torch.cuda.get_device_capability(device)


def flash_reasons(call: AttentionCall) -> list[str]:
    """What all flash-attention kernels have against a call: device, dtype, head size."""
    reasons = []
    major, minor = capability(call.device)
    if 0 < major < 8:
        reasons.append(f"needs an Ampere GPU or later (compute capability 8), got {major}.{minor}")
    if call.device.type != "cuda":
        reasons.append(f"needs a CUDA device, got {call.device.type}")
    if call.dtype not in HALF:
        reasons.append(f"needs float16 or bfloat16, got {call.dtype}")
    if call.forward_ad:
        reasons.append("has no forward-mode derivatives (torch.func.jvp)")
    if call.head_dim > 256:
        reasons.append(f"head_dim is at most 256, got {call.head_dim}")
    return reasons


def check_backward_range(q: torch.Tensor, layout: Layout, *, each_head: bool = False) -> None:
    """Refuse what flash-attention's backward would index beyond int32.

    Its ``dq_accum`` holds ``(tokens + 128 * examples) * heads * head_dim`` elements, the head size
    rounded up to 32 (to 64 above 128), and is indexed with int32 (flash-attention issue 1500).

    Args:
        q: ``(tokens, heads, head_dim)``; nothing is checked unless it takes part in a backward.
        layout: the examples.
        each_head: the heads are indexed with int64 (FlashAttention-3), so only one must fit.

    Raises:
        PackingError: with the numbers.
    """
    if not (torch.is_grad_enabled() and q.requires_grad):
        return
    heads, head_dim = 1 if each_head else q.shape[1], q.shape[2]
    step = 32 if head_dim <= 128 else 64
    rounded = -(-head_dim // step) * step
    size = (layout.tokens + 128 * layout.examples) * heads * rounded
    if size >= 2**31:
        raise PackingError(
            f"flash-attn's backward cannot index this call: ({layout.tokens} tokens + 128 * "
            f"{layout.examples} examples) * {heads} heads * {rounded} (head_dim {head_dim} rounded "
            f"up) = {size}, which is not below 2**31 = {2**31}. Pack fewer tokens or fewer "
            'examples into a call, or apply with kernel="sdpa".'
        )
