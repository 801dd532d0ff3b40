"""The kernels, and which of them serves a call. Knows nothing of Transformers."""

from __future__ import annotations

from functools import lru_cache

from ..errors import KernelUnavailableError
from . import flash_attn, flash_attn_3, torch_flash
from .base import AttentionCall, Kernel, in_forward_ad
from .flash_attn import FlashAttn
from .flash_attn_3 import FlashAttn3
from .sdpa import Sdpa
from .torch_flash import TorchFlash

#: In the order in which "auto" tries them.
KERNELS: dict[str, Kernel] = {k.name: k for k in (FlashAttn(), FlashAttn3(), TorchFlash(), Sdpa())}

_EPOCH = [0]

__all__ = [
    "KERNELS",
    "AttentionCall",
    "Kernel",
    "choose",
    "epoch",
    "get",
    "in_forward_ad",
    "probe",
    "reset",
    "select",
]


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


def probe(name: str) -> None:
    """Import what ``name`` may need, "auto" any of them: a graph in the making cannot."""
    for kernel in KERNELS.values() if name == "auto" else [get(name)]:
        kernel.unavailable()


def select(name: str, call: AttentionCall) -> Kernel:
    """The kernel for a call: the one named, or for "auto" the first that can.

    A kernel after the chosen one, or beside the named one, is not probed: flash-attn is not even
    imported for ``"sdpa"``.

    Raises:
        KernelUnavailableError: with every reason, and the names of the kernels that can.
    """
    for kernel in KERNELS.values() if name == "auto" else [get(name)]:
        if not _against(kernel, call):
            return kernel
    against = {k.name: _against(k, call) for k in KERNELS.values()}
    able = [n for n, reasons in against.items() if not reasons]  # sdpa always
    quoted = against.items() if name == "auto" else [(name, against[name])]
    text = "; ".join(f"{n}: {', '.join(reasons)}" for n, reasons in quoted)
    raise KernelUnavailableError(
        f"kernel={name!r} cannot serve this attention ({call}). {text}. Kernels that can: "
        f"{', '.join(able)}; apply with kernel={able[0]!r} or kernel='auto'."
    )


#: :func:`select` with a memory, which Dynamo would look through with a warning.
choose = lru_cache(maxsize=256)(select)


def _against(kernel: Kernel, call: AttentionCall) -> list[str]:
    missing = kernel.unavailable()
    return [missing] if missing else kernel.refuses(call)


def epoch() -> int:
    """How often :func:`reset` was called: what was chosen before does not hold after."""
    return _EPOCH[0]


def reset() -> None:
    """Forget what was probed (for tests, and after installing a kernel)."""
    _EPOCH[0] += 1
    choose.cache_clear()
    flash_attn.probe.cache_clear()
    flash_attn_3.probe.cache_clear()
    torch_flash.probe.cache_clear()
