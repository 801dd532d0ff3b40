"""Dropout in attention, of which a proof in evaluation mode sees nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .probe import Probe


def has_dropout(probe: Probe) -> bool:
    """Whether the config asks for dropout in attention (DBRX keeps it one level down)."""
    config: Any = probe.base.config
    names = ("attention_dropout", "attn_pdrop")
    return any(
        getattr(c, n, 0) for c in (config, getattr(config, "attn_config", None)) for n in names
    )


@contextmanager
def attention_trains(probe: Probe) -> Iterator[None]:
    """Attention modules are in training mode in the block, and no other dropout is on."""
    sites = [] if probe.patch is None else probe.patch.sites
    modules = [
        m for s in sites for n, m in s.module.named_modules() if not n or n.startswith("att")
    ]
    before = [(module, module.training) for module in modules]
    for module in modules:
        module.training = True
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


def varies(call: Callable[[], torch.Tensor]) -> bool:
    """Whether a call gives something else when it is made again."""
    return not torch.equal(call(), call())
