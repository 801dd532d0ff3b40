"""4.48 and later: the registry ``ALL_ATTENTION_FUNCTIONS`` and ``eager_attention_forward``."""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING, Any, Callable, Optional

import torch

from ..errors import PackingError
from .base import Interceptor, attend, for_dynamo, home_of, run_of, running, uses_name

if TYPE_CHECKING:
    from ..patch import Site
    from ..runs import Run
    from .base import Sited


class _Only:
    """A registry that knows one function, whatever it is asked for."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __getitem__(self, name: str) -> Callable[..., Any]:
        return self.function

    def __contains__(self, name: str) -> bool:
        return True

    def get(self, name: str, default: Any = None) -> Callable[..., Any]:
        return self.function

    def get_interface(self, name: str, default: Any = None) -> Callable[..., Any]:
        return self.function


class _Interface(Interceptor):
    def missing(self, forward: Callable[..., Any], name: str, owner: type) -> Optional[str]:
        if uses_name(forward, name):
            return None
        return f"{owner.__name__}.forward does not use {name}; its code is not the one verified"

    def stock(self, owner: type, name: str, implementation: str) -> Any:
        code = vars(sys.modules[owner.__module__])
        if implementation == "eager":
            return code.get("eager_attention_forward")
        function = code[name].get(implementation)
        if not implementation.startswith("flash_attention"):
            return function
        # Its own name for the function that calls flash-attn, which libraries like to bind anew.
        inner = getattr(inspect.unwrap(function), "__globals__", {}).get("_flash_attention_forward")
        theirs = home_of(function).startswith("transformers.")
        return inner if theirs and inner is not None else function

    def names(self, holder: Sited) -> dict[str, Any]:
        def attention(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            return _attention(holder.site, running(), *args, **kwargs)

        name = holder.site.span.name
        return {name: _Only(attention), "eager_attention_forward": attention}

    def traceable(self, owner: type, name: str, holder: Sited) -> Callable[..., Any]:
        def attention(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            return _attention(holder.site, run_of(holder), *args, **kwargs)

        names = {name: _Only(attention), "eager_attention_forward": attention}
        return for_dynamo(owner, names)


def _attention(
    site: Site,
    run: Run,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
    *_: Any,
    scaling: Optional[float] = None,
    dropout: Any = 0.0,
    sliding_window: Optional[int] = None,
    softcap: Optional[float] = None,
    s_aux: Any = None,
    **__: Any,
) -> tuple[torch.Tensor, None]:
    if s_aux is not None:
        raise PackingError(
            f"{site.label} has attention sinks (s_aux), which no kernel here takes. Give it one "
            "example a row, padded."
        )
    out = attend(
        site,
        run,
        query,
        key,
        value,
        heads_first=True,
        scale=scaling,
        handed_window=sliding_window,
        softcap=softcap,
        dropout=dropout,
    )
    return out, None


INTERCEPTOR = _Interface()
