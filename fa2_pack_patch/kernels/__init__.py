"""The kernels, and which of them serves a call. Knows nothing of Transformers."""

from __future__ import annotations

from functools import lru_cache

from ..errors import KernelUnavailableError
from . import flash_attn, flash_attn_3, torch_flash
from .base import AttentionCall, Kernel
from .flash_attn import FlashAttn
from .flash_attn_3 import FlashAttn3
from .sdpa import Sdpa
from .torch_flash import TorchFlash

#: In the order in which "auto" tries them.
KERNELS: dict[str, Kernel] = {k.name: k for k in (FlashAttn(), FlashAttn3(), TorchFlash(), Sdpa())}

__all__ = ["KERNELS", "AttentionCall", "Kernel", "choose", "get", "reset"]


def get(name: str) -> Kernel:
    """The kernel called ``name``.

    Raises:
        KernelUnavailableError: no such kernel.
    """
    kernel = KERNELS.get(name)
    if kernel is None:
        raise KernelUnavailableError(
            f"kernel={name!r} is not known; give one of {['auto', *KERNELS]}."
        )
    return kernel


@lru_cache(maxsize=256)
def choose(name: str, call: AttentionCall) -> Kernel:
    """The kernel for a call: the one named, or for "auto" the first that can.

    Raises:
        KernelUnavailableError: with every reason, and the names of the kernels that can.
    """
    against = {}
    for kernel in KERNELS.values():
        missing = kernel.unavailable()
        against[kernel.name] = [missing] if missing else kernel.refuses(call)
    able = [n for n, reasons in against.items() if not reasons]
    if name == "auto":
        return KERNELS[able[0]]
    kernel = get(name)
    if name in able:
        return kernel
    raise KernelUnavailableError(
        f"kernel={name!r} cannot serve this attention ({call}): {'; '.join(against[name])}. "
        f"Kernels that can: {', '.join(able)}; apply with kernel={able[0]!r} or kernel='auto'."
    )


def reset() -> None:
    """Forget what was probed (for tests, and after installing a kernel)."""
    choose.cache_clear()
    flash_attn.probe.cache_clear()
    flash_attn_3.probe.cache_clear()
    torch_flash.probe.cache_clear()
