"""4.43 to 4.47, and Falcon to this day: the module-level ``_flash_attention_forward``."""

from __future__ import annotations

import inspect
import sys
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Callable, Optional

from .base import (
    Interceptor,
    RotaryLength,
    TorchWithoutFloat32,
    attend,
    for_dynamo,
    run_of,
    running,
    uses_name,
)

if TYPE_CHECKING:
    import torch

    from ..patch import Site
    from ..runs import Run
    from .base import Sited


@lru_cache(maxsize=1)
def _parameters() -> tuple[str, ...]:
    """The release's own parameter order: 4.44 put position_ids before softmax_scale."""
    from transformers.modeling_flash_attention_utils import _flash_attention_forward

    return tuple(inspect.signature(_flash_attention_forward).parameters)


class _Function(Interceptor):
    def missing(self, forward: Callable[..., Any], name: str, owner: type) -> Optional[str]:
        if uses_name(forward, name):
            return None
        return f"{owner.__name__}.forward does not call {name}; its code is not the one verified"

    def stock(self, owner: type, name: str, implementation: str) -> Any:
        forward: Any = owner.forward  # type: ignore[attr-defined]
        if not uses_name(forward, name):  # an eager or an sdpa class
            return None
        return vars(sys.modules[owner.__module__]).get(name)

    def names(self, holder: Sited) -> dict[str, Any]:
        parameters = _parameters()

        def attention(*given: Any, **named: Any) -> torch.Tensor:
            values = {**dict(zip(parameters, given)), **named}
            return _attention(holder.site, running(), values)

        return {holder.site.span.name: attention, "torch": TorchWithoutFloat32()}

    def traceable(self, owner: type, name: str, holder: Sited) -> Callable[..., Any]:
        parameters = _parameters()

        def attention(*given: Any, **named: Any) -> torch.Tensor:
            values = {**dict(zip(parameters, given)), **named}
            return _attention(holder.site, run_of(holder), values)

        names = {name: attention, "torch": TorchWithoutFloat32(), "max": RotaryLength(holder)}
        return for_dynamo(owner, names)


def _attention(site: Site, run: Run, values: dict[str, Any]) -> torch.Tensor:
    return attend(
        site,
        run,
        values["query_states"],
        values["key_states"],
        values["value_states"],
        heads_first=False,
        scale=values.get("softmax_scale"),
        handed_window=values.get("sliding_window"),
        softcap=values.get("softcap"),
        dropout=values.get("dropout", 0.0),
    )


INTERCEPTOR = _Function()
