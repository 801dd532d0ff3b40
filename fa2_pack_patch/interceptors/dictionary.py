"""Gemma 2 in 4.47, GPT-NeoX in 4.47 and 4.48: a module-level dictionary of functions."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Callable, Optional

import torch

from .base import Interceptor, attend, for_dynamo, run_of, running, uses_name
from .interface import _Only

if TYPE_CHECKING:
    from ..patch import Site
    from ..runs import Run
    from .base import Sited


class _Dictionary(Interceptor):
    def missing(self, forward: Callable[..., Any], name: str, owner: type) -> Optional[str]:
        if uses_name(forward, name):
            return None
        return f"{owner.__name__}.forward does not use {name}; its code is not the one verified"

    def stock(self, owner: type, name: str, implementation: str) -> Any:
        return vars(sys.modules[owner.__module__])[name].get(implementation)

    def names(self, holder: Sited) -> dict[str, Any]:
        def attention(*given: Any, **named: Any) -> tuple[torch.Tensor, None]:
            return _attention(holder.site, running(), given)

        return {holder.site.span.name: _Only(attention)}

    def traceable(self, owner: type, name: str, holder: Sited) -> Callable[..., Any]:
        def attention(*given: Any, **named: Any) -> tuple[torch.Tensor, None]:
            return _attention(holder.site, run_of(holder), given)

        names = {name: _Only(attention)}
        return for_dynamo(owner, names)


def _attention(site: Site, run: Run, given: tuple[Any, ...]) -> tuple[torch.Tensor, None]:
    # Gemma 2 hands the module first, GPT-NeoX does not.
    tensors = given if isinstance(given[0], torch.Tensor) else given[1:]
    out = attend(
        site,
        run,
        tensors[0],
        tensors[1],
        tensors[2],
        heads_first=True,
        scale=getattr(site.module, "scaling", None),
        handed_window=getattr(site.module, "sliding_window", None),
        softcap=getattr(site.config, "attn_logit_softcapping", None),
        dropout=getattr(site.config, "attention_dropout", 0.0),
    )
    return out, None


INTERCEPTOR = _Dictionary()
