"""4.34 to 4.42: the flash class's method ``_flash_attention_forward``, or GPT-J's ``_attn``."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Callable, Optional

import torch

from ..compat import refuses_without_windows
from ..copies import Alone
from ..runs import current
from .base import (
    Interceptor,
    RotaryLength,
    TorchWithoutFloat32,
    attend,
    for_dynamo,
    uses_name,
)

if TYPE_CHECKING:
    from ..patch import Patch, Site
    from ..runs import Run
    from .base import Sited


class PackedMethod(Alone):
    """Stands for the method on one module; without a packed call in force it is the original."""

    def __init__(self, site: Site) -> None:
        self.site = site
        original = getattr(site.owner, site.span.name)
        self.parameters = tuple(inspect.signature(original).parameters)[1:]
        self.by_layer = "max_window_layers" in original.__code__.co_names

    def _parts(self) -> tuple[Patch, torch.nn.Module, str]:
        return self.site.patch, self.site.module, self.site.span.name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        site = self.site
        run = current(site.patch)
        name = site.span.name
        if run is None:
            return getattr(type(site.module), name)(site.module, *args, **kwargs)
        if name == "_attn":
            return self._core(run, *args, **kwargs)
        values = {**dict(zip(self.parameters, args)), **kwargs}
        sliding = values.get("use_sliding_windows", False)
        if sliding and self.by_layer:
            # Qwen2 and Qwen2-MoE choose the layers inside the method.
            sliding = site.module.layer_idx < site.config.max_window_layers
        return attend(
            site,
            run,
            values["query_states"],
            values["key_states"],
            values["value_states"],
            heads_first=False,
            scale=values.get("softmax_scale"),
            handed_window=getattr(site.config, "sliding_window", None) if sliding else None,
            softcap=None,  # Gemma 2 in 4.42 is the only one, and drops it without a mask
            dropout=values.get("dropout", 0.0),
        )

    def _core(
        self,
        run: Run,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, None]:
        out = attend(
            self.site,
            run,
            query,
            key,
            value,
            heads_first=True,
            scale=None,
            handed_window=None,
            softcap=None,
            dropout=getattr(self.site.module, "attn_dropout", None)
            or getattr(self.site.module, "attention_dropout", 0.0),
        )
        return out.transpose(1, 2), None


class _Method(Interceptor):
    def missing(self, forward: Callable[..., Any], name: str, owner: type) -> Optional[str]:
        if not callable(getattr(owner, name, None)):
            return f"{owner.__name__} has no method {name}; its code is not the one verified"
        if uses_name(forward, name):
            return None
        return f"{owner.__name__}.forward does not call {name}; its code is not the one verified"

    def stock(self, owner: type, name: str, implementation: str) -> Any:
        return getattr(owner, name, None)

    def names(self, holder: Sited) -> dict[str, Any]:
        # _flash_supports_window_size exists only where flash-attn was importable.
        windowed = _Windowed(holder)
        return {"torch": TorchWithoutFloat32(), "_flash_supports_window_size": windowed}

    def traceable(self, owner: type, name: str, holder: Sited) -> Callable[..., Any]:
        names = {
            "torch": TorchWithoutFloat32(),
            "_flash_supports_window_size": _Windowed(holder),
            "max": RotaryLength(holder),
        }
        return for_dynamo(owner, names)


class _Windowed:
    """True for a model with a sliding window, and for code that runs with no other: asked then."""

    def __init__(self, holder: Sited) -> None:
        self.holder = holder

    def __bool__(self) -> bool:
        site = self.holder.site
        if refuses_without_windows(site.family.family):
            return True
        return getattr(site.config, "sliding_window", None) is not None


INTERCEPTOR = _Method()
