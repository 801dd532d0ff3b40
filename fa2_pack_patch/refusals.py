"""What a packed call cannot be given: each check raises a :class:`PackingError` that quotes it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, Optional

import torch
from packaging.version import Version

from .compat import config_may_be_bidirectional, recorder
from .errors import PackingError
from .layout import PackedLayout
from .reading import VARLEN, cache_of, fits, handed_over, may_be_segments
from .tensors import describe, holds_integers, mapped_over, quote
from .varlen import Layout

_LABELS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_FOREIGN = ("head_mask", "encoder_hidden_states", "encoder_attention_mask")


def check_inputs(call: Mapping[str, Any]) -> None:
    """Refuse input_ids that are not ``(rows, tokens)``, and embeddings with more or less to them.

    Raises:
        PackingError: quotes their shape.
    """
    shapes = {"input_ids": "(rows, tokens)", "inputs_embeds": "(rows, tokens, width)"}
    for name, shape in shapes.items():
        given = call.get(name)
        if isinstance(given, torch.Tensor) and given.dim() != shape.count(",") + 1:
            raise PackingError(
                f"{name} of a packed call must be {shape}, got shape {tuple(given.shape)}."
            )


def check_labels(labels: torch.Tensor, rows: int, tokens: int, name: str = "labels") -> None:
    """Refuse labels of as many tokens whose first ones could not be told, or not be left out.

    Raises:
        PackingError: quotes their shape and dtype.
    """
    if labels.numel() != rows * tokens:
        return  # the model's own loss says what is wrong
    elsewhere = labels.dim() > 1 and labels.shape[-1] != tokens
    if elsewhere or labels.dtype not in _LABELS or labels.layout != torch.strided:
        raise PackingError(
            f"{name} of packed rows must be integers of shape ({rows}, {tokens}), got "
            f"{describe(labels)}."
        )


def check_head(module: torch.nn.Module) -> None:
    """Refuse a model with a head whose forward knows no position_ids.

    Raises:
        PackingError: names its class.
    """
    if not _takes_positions(type(module).forward):
        raise positions_kept(module)


@lru_cache(maxsize=64)
def _takes_positions(forward: Callable[..., Any]) -> bool:
    parameters = inspect.signature(forward).parameters
    rest = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return "position_ids" in parameters or rest


def check_copy(module: torch.nn.Module, home: Optional[torch.nn.Module]) -> None:
    """Refuse a shallow copy, whose forward would run on the modules of the model ``home``.

    One that shares its dictionary of modules has none of its own.

    Raises:
        PackingError: says what to do instead.
    """
    if "_is_replica" in module.__dict__:
        raise PackingError(
            "nn.DataParallel copied this model, and its copies would run on the weights of the "
            "first device; use DistributedDataParallel, or fa2_pack_patch.revert(model) first."
        )
    if home is not None and module is not home and module._modules is not home._modules:
        raise PackingError(
            f"this {type(module).__name__} is a shallow copy (copy.copy) of a patched one, and "
            "would run on the modules of that. Use copy.deepcopy; or call "
            "fa2_pack_patch.revert(model) before copying, and apply after."
        )


def base_replaced(module: torch.nn.Module) -> PackingError:
    """What a packed call of a head raises that has another base model than at apply."""
    return PackingError(
        f"the base model of this {type(module).__name__} was replaced after apply. Call "
        "fa2_pack_patch.apply(model) again."
    )


def positions_kept(module: torch.nn.Module) -> PackingError:
    """What a packed call of a head raises that does not hand position_ids on."""
    return PackingError(
        f"{type(module).__name__}.forward does not hand position_ids on to its base model in this "
        "release, so packed rows would mix examples. Give it one example a row, padded; or call "
        "its base model, and put a head of your own on what that gives."
    )


def one_result_a_row(head: str, layout: Layout) -> PackingError:
    """What a packed call of a head raises that gives a result for each row, not for each token."""
    return PackingError(
        f"{head} gives one result for each row, but this call packs {layout.examples} examples "
        f"into its rows (lengths {quote(list(layout.lengths))}). Give it one example a row, "
        "padded; only per-token heads can take packed rows."
    )


def check_added(attention: list[str]) -> None:
    """Refuse a call of a model with attention modules that were not there at apply.

    Raises:
        PackingError: names the first of them.
    """
    if attention:
        raise PackingError(
            f"{attention[0]} is not of the layers that apply found, and would mix the examples "
            f"(one of {len(attention)} that came later). Call fa2_pack_patch.apply(model) again."
        )


def check_unseen(label: str, position_ids: torch.Tensor) -> None:
    """Refuse an attention layer's packed call that the base model's hooks did not see.

    Only whole examples side by side are told here, of two tokens or more; positions of padding,
    which stand still, say nothing without their mask.

    Raises:
        PackingError: says what to call instead.
    """
    if not isinstance(position_ids, torch.Tensor) or not holds_integers(position_ids):
        return
    if position_ids.dim() != 2 or position_ids.shape[1] < 4 or mapped_over(position_ids):
        return
    rises = position_ids[:, 1:] > position_ids[:, :-1]
    if bool((rises[:, :-2] & ~rises[:, 1:-1] & rises[:, 2:]).any()):
        raise PackingError(
            f"{label} was given position_ids that start anew ({quote(position_ids[0])}), but "
            "fa2_pack_patch did not see the model's call, so nobody read where the examples are: "
            "the layers alone were called, or somebody removed its hooks. Call the model itself, "
            "or fa2_pack_patch.apply(model) again."
        )


def check_recorded(call: Mapping[str, Any], by_what: str = "torch.export") -> bool:
    """Refuse to record a call that could be packed without values, which say whether it is.

    Returns:
        True where it cannot be packed, False where its lengths need no reading.

    Raises:
        PackingError: names what would have to be read.
    """
    if handed_over(call):
        return False
    names = ("position_ids", *VARLEN)
    given = [name for name in names if call.get(name) is not None]
    if may_be_segments(call.get("attention_mask")):
        given.append("attention_mask")
    if given:
        raise PackingError(
            f"{by_what} cannot tell by {', '.join(given)} whether this call is packed. Call "
            "fa2_pack_patch.revert(model) before it and apply after; or leave them out."
        )
    return True


def check_traced() -> None:
    """Refuse to record a packed call: its examples would be kept for every later one.

    Raises:
        PackingError: says what to trace instead.
    """
    by_what = recorder()
    if by_what is not None:
        raise PackingError(
            f"{by_what} would keep where the examples of this packed call are, and cut every "
            "later call there. Trace a call that is not packed, or use torch.compile."
        )


def not_causal(
    config: Any, attention: Iterable[tuple[str, torch.nn.Module]], release: Version
) -> Optional[str]:
    """What says that a model attends in both directions, or None.

    Args:
        config: the model's.
        attention: names of attention modules, and these.
        release: the installed Transformers.
    """
    for label, module in attention:
        if not getattr(module, "is_causal", True):
            return f"{label}.is_causal is false"
    if config_may_be_bidirectional(release) and not getattr(config, "is_causal", True):
        return f"config.is_causal is {config.is_causal!r}"
    return None


def check_mask(mask: Any, rows: int, tokens: int) -> None:
    """Refuse a mask that is not ``(rows, tokens)``.

    Raises:
        PackingError: quotes its shape.
    """
    if mask is None or fits(mask, rows, tokens):
        return
    given = describe(mask) if isinstance(mask, torch.Tensor) else f"a {type(mask).__name__}"
    raise PackingError(
        f"attention_mask of a packed call must be (rows, tokens) = ({rows}, {tokens}) with "
        f"integers, bools or floats, got {given}; encoder, prefix and 4-D masks cannot go with "
        "packed rows. Give one of that shape, or none."
    )


def check_options(call: Mapping[str, Any], layout: Optional[PackedLayout], config: Any) -> None:
    """Refuse what cannot be given, or heeded, where several examples share a row.

    Args:
        call: the arguments of a packed call.
        layout: its examples, or None where they are not read.
        config: the model's.

    Raises:
        PackingError: quotes what was asked for.
    """
    what = "varlen arguments"
    if layout is not None:
        what = f"a packed row (lengths {quote(list(layout.lengths))})"
    wants = call.get("output_attentions")
    if wants is None:
        wants = getattr(config, "output_attentions", False)
    if wants:
        raise PackingError(
            "output_attentions=True cannot go with packed rows: the kernels give no attention "
            "weights. Pass output_attentions=False, or one example a row."
        )
    if call.get("use_cache"):
        raise PackingError(
            f"use_cache=True with {what}: a cache of several examples could not be "
            "continued. Pass use_cache=False."
        )
    cache = cache_of(call)
    if cache is not None:
        raise PackingError(
            f"{what} cannot go with a cache, got {_describe_cache(cache)}. "
            "Pass past_key_values=None and use_cache=False."
        )
    causal = call.get("is_causal")
    if causal is not None and not causal:
        raise PackingError(
            f"is_causal={causal!r} cannot go with {what}: the kernels attend to earlier tokens "
            "alone. Leave it out, or give one example a row."
        )
    for name in _FOREIGN:
        if call.get(name) is not None:
            raise PackingError(f"{name} cannot go with packed rows; leave it out.")


def _describe_cache(cache: Any) -> str:
    length = getattr(cache, "get_seq_length", None)
    if length is None:
        return f"a {type(cache).__name__}"
    try:
        return f"a {type(cache).__name__} holding {int(length())} tokens"
    except (TypeError, ValueError, IndexError, AttributeError):
        return f"a {type(cache).__name__}"
