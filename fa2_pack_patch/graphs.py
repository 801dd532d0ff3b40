"""Code that must stay out of a compiled graph, and what ``fullgraph=True`` is told then."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from .compat import BREAKS_SAY_WHY

#: Why a call whose boundaries must be read cannot be in one graph.
UNREAD = (
    "fa2_pack_patch: only a call with all of cu_seq_lens_q and cu_seq_lens_k (int32 tensors of one "
    "shape), max_length_q and max_length_k (Python ints) is packed inside of a graph; the "
    "boundaries of any other are read outside of it. Pass them, as DataCollatorWithFlattening("
    "tokens=..., max_examples=..., return_flash_attn_kwargs=True) does; or leave out fullgraph."
)
UNREAD_ROPE = (
    "fa2_pack_patch: this model's rope depends on the lengths of the examples, which are read "
    "outside of the graph; leave out fullgraph=True."
)
CHANGED = (
    "fa2_pack_patch: since apply this model's layers came or went, it attends in both directions, "
    "or it was loaded with another Transformers; call fa2_pack_patch.apply(model) again."
)


def eagerly(why: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function`` outside of Dynamo, where that is loaded: a graph break, not a fault."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return function(*args, **kwargs)
    if BREAKS_SAY_WHY:
        dynamo.graph_break(msg=why)
    return dynamo.disable(function)(*args, **kwargs)
