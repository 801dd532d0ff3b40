"""What PEFT does to rows, not to examples: prompt learning around a patched model, aLoRA, Lily.

Under prompt learning its caller's boundaries do not come through: PEFT leaves out ``position_ids``
and says so in a warning alone; what its caller gave is still in the frames of that call, and
nowhere else.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any, Optional

import torch

from .boundaries import read_boundaries
from .errors import PackingError
from .reading import VARLEN, by_name, cache_of, fits, readable, to_host
from .tensors import check_position_ids, has_values, quote


def may_be_prompted(call: Mapping[str, Any]) -> bool:
    """Whether a call is such as prompt learning makes: embeddings, or a cache, and PEFT is here."""
    return "peft" in sys.modules and (
        call.get("inputs_embeds") is not None or cache_of(call) is not None
    )


def check_prompts(module: torch.nn.Module, call: Mapping[str, Any]) -> None:
    """Refuse a packed batch of which PEFT's prompt learning made this call.

    Args:
        module: the patched model that is called.
        call: its arguments: embeddings with virtual tokens before them, or a cache of these.

    Raises:
        PackingError: names the kind of prompt learning.
    """
    if not may_be_prompted(call):
        return
    frame = _prompting(module, sys._getframe(1))
    if frame is None:
        return
    wrapper = frame.f_locals["self"]
    peft_type = wrapper.active_peft_config.peft_type
    kind = getattr(peft_type, "value", peft_type)
    given = _given(wrapper, frame)
    calls = [given] if given is not None else _of_a_bare_forward(frame)
    if not calls:
        raise PackingError(
            f"{type(wrapper).__name__}.forward was called with position_ids and without its hooks. "
            f"PEFT's {kind} drops them, so nobody can tell whether this call is packed. Call the "
            "model itself: model(...), not model.forward(...)."
        )
    for one in calls:
        packed = _packed(one)
        if packed is not None:
            raise PackingError(
                f"this call packs several examples into its rows ({packed}), but PEFT's {kind} is "
                "around the model and puts its virtual tokens before each row, not each example. "
                "Give it one example a row, padded; or use LoRA or another adapter for packed rows."
            )


def by_the_row(config: Any) -> Optional[str]:
    """Why an adapter of PEFT cannot adapt packed rows example by example, or None.

    Args:
        config: the adapter's ``PeftConfig``.
    """
    tokens = getattr(config, "alora_invocation_tokens", None)
    if tokens:
        return (
            "PEFT's activated LoRA (aLoRA) adapts the end of each row, from its last invocation "
            f"tokens {quote(tokens)} on, not of each example"
        )
    kind = getattr(config, "peft_type", None)
    kind = str(getattr(kind, "value", kind))
    if kind == "LILY":
        return f"PEFT's {kind} weighs its experts by the mean over all tokens of a batch"
    if getattr(config, "is_prompt_learning", False):
        return (
            f"PEFT's {kind} (prompt learning) puts virtual tokens before each row, not each example"
        )
    return None


def check_adapters(module: torch.nn.Module) -> None:
    """Refuse a packed call that PEFT's aLoRA or Lily would adapt by the row.

    Args:
        module: the patched base model that is called.

    Raises:
        PackingError: says what to do instead.
    """
    if "peft" not in sys.modules:
        return
    frame: Optional[FrameType] = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "forward" and _of_peft(frame):
            wrapper = frame.f_locals.get("self")
            configs = getattr(wrapper, "peft_config", None)
            if isinstance(wrapper, torch.nn.Module) and isinstance(configs, Mapping):
                reasons = [by_the_row(config) for config in configs.values()]
                if any(reasons) and any(map(_adapts_by_the_row, module.modules())):
                    raise PackingError(
                        f"{next(filter(None, reasons))}. Give it one example a row, padded; or "
                        "use LoRA for packed rows."
                    )
        frame = frame.f_back


def _adapts_by_the_row(module: torch.nn.Module) -> bool:
    """Whether a layer of PEFT's does so now; aLoRA's is told the token of each row by a hook."""
    if getattr(module, "disable_adapters", False):
        return False
    if type(module).__module__ == "peft.tuners.lily.layer":
        return "LilyLayer" in {cls.__name__ for cls in type(module).__mro__}
    functions = [getattr(hook, "func", None) for hook in module._forward_pre_hooks.values()]
    return any(getattr(f, "__name__", "").startswith("_alora_offsets") for f in functions)


def _prompting(module: torch.nn.Module, frame: Optional[FrameType]) -> Optional[FrameType]:
    """The frame of a PEFT model's forward with prompt learning that is calling ``module``."""
    while frame is not None:
        if frame.f_code.co_name == "forward" and _of_peft(frame):
            wrapper = frame.f_locals.get("self")
            config = getattr(wrapper, "active_peft_config", None)
            if getattr(config, "is_prompt_learning", False):
                assert isinstance(wrapper, torch.nn.Module)
                if any(inner is module for inner in wrapper.modules()):
                    return frame
        frame = frame.f_back
    return None


def _of_peft(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).startswith("peft.")


def _given(wrapper: torch.nn.Module, frame: FrameType) -> Optional[dict[str, Any]]:
    """What the PEFT model was called with; None where its ``forward`` was, without its hooks."""
    outer = frame.f_back
    while outer is not None:
        own = outer.f_locals if outer.f_code.co_name == "_wrapped_call_impl" else {}
        if own.get("self") is wrapper:
            return by_name(wrapper, own["args"], own["kwargs"])
        outer = outer.f_back
    return None


def _of_a_bare_forward(frame: FrameType) -> list[dict[str, Any]]:
    """What PEFT's ``forward`` may have been called with, by what it and its caller still hold.

    Nothing where it was given ``position_ids``, which it sets to None, and its caller holds none.
    """
    inputs, held = frame.f_locals.get("input_ids"), dict(frame.f_locals.get("kwargs", {}))
    mask = held.get("attention_mask")
    if "position_ids" not in held or isinstance(held["position_ids"], torch.Tensor):
        ids = [held.get("position_ids")]
    else:
        theirs = {} if frame.f_back is None else frame.f_back.f_locals
        batches = [value for value in theirs.values() if isinstance(value, Mapping)]
        batches = [b for b in batches if inputs is not None and b.get("input_ids") is inputs]
        ids = [b["position_ids"] for b in (theirs, *batches) if "position_ids" in b]
    calls = []
    for given in ids:
        call = {**held, "position_ids": given}
        if isinstance(given, torch.Tensor) and isinstance(mask, torch.Tensor) and mask.dim() == 2:
            call["attention_mask"] = mask[:, mask.shape[1] - given.shape[-1] :]  # PEFT extended it
        calls.append(call)
    return calls


def _packed(given: Mapping[str, Any]) -> Optional[str]:
    """How a call tells that it is packed, in words; None when it is not."""
    for name in VARLEN:
        if given.get(name) is not None:
            return f"{name} {quote(given[name])}"
    ids, mask = given.get("position_ids"), given.get("attention_mask")
    shaped = mask if ids is None else ids
    if not isinstance(shaped, torch.Tensor) or not has_values(shaped) or shaped.dim() not in (1, 2):
        return None
    ids = None if ids is None else check_position_ids(ids)
    rows, tokens = shaped.shape if ids is None else ids.shape
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        rows = mask.shape[0]
    if ids is not None and ids.shape[0] == 1:
        ids = ids.expand(rows, tokens)
    host_ids, host_mask, _ = to_host(ids, mask if fits(mask, rows, tokens) else None, {})
    found = read_boundaries(host_ids, host_mask) if readable(host_ids, host_mask) else None
    return None if found is None else f"lengths {quote(found.lengths)}"
