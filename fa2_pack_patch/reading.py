"""Reading what a caller passed: positions, masks, varlen arguments, caches."""

from __future__ import annotations

import inspect
import sys
import threading
import weakref
from collections.abc import Mapping
from types import FrameType
from typing import Any, Optional

import torch
from packaging.version import Version
from torch import int64

from . import compat
from .boundaries import Boundaries, read_boundaries
from .errors import PackingError
from .layout import PackedLayout
from .tensors import (
    all_mapped,
    as_tensor,
    describe,
    has_values,
    holds_integers,
    is_mask,
    mapped_over,
    quote,
)
from .varlen import VarlenLayout

VARLEN = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_CACHES = ("past_key_values", "past_key_value", "cache", "layer_past", "cache_params")

# The position_ids that the model's own hook just found not to be packed: the base model's hook,
# which gets the same object next, does not read them again.
_UNPACKED = threading.local()


def by_name(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    call = dict(kwargs)
    if args:
        names = list(inspect.signature(type(module).forward).parameters)[1:]
        call.update(zip(names, args))
    return call


def handed_over(call: Mapping[str, Any], device: Optional[torch.device] = None) -> bool:
    """Whether all varlen arguments are there and need no reading: tensors and Python ints.

    With a ``device``, the tensors must lie there; elsewhere, on a CPU, or on meta, which has no
    values to check later, nothing can be gained.
    """
    q, k, longest, other = (call.get(name) for name in VARLEN)
    return (
        isinstance(q, torch.Tensor)
        and isinstance(k, torch.Tensor)
        and q.dim() == 1
        and q.shape == k.shape
        and q.dtype == k.dtype == torch.int32
        and (device is None or q.device == k.device == device)
        and (device is None or device.type not in ("cpu", "meta"))
        and isinstance(longest, int)
        and isinstance(other, int)
    )


def device_layout(call: Mapping[str, Any], tokens: int) -> VarlenLayout:
    """The layout of varlen arguments whose values are not read."""
    longest = max(call[VARLEN[2]], call[VARLEN[3]])
    return VarlenLayout(call[VARLEN[0]], min(longest, tokens), tokens)


def fits(mask: Any, rows: int, tokens: int) -> bool:
    return isinstance(mask, torch.Tensor) and mask.shape == (rows, tokens) and is_mask(mask)


def may_be_segments(mask: Any) -> bool:
    return isinstance(mask, torch.Tensor) and mask.dim() == 2 and mask.dtype != torch.bool


def readable(ids: Optional[torch.Tensor], mask: Optional[torch.Tensor]) -> bool:
    return ids is not None or (mask is not None and bool((mask > 1).any()))


def remember_unpacked(pair: Optional[tuple[Any, Any]]) -> None:
    """Note what was just read and found not to be packed, for :func:`just_read`."""
    _UNPACKED.seen = None if pair is None else (_mark(pair[0]), _mark(pair[1]))


def just_read(position_ids: Any, mask: Any, *, forget: bool = True) -> bool:
    """Whether the model around this one has just read these very objects."""
    seen = getattr(_UNPACKED, "seen", None)
    if forget:
        _UNPACKED.seen = None
    return seen is not None and _marks(seen[0], position_ids) and _marks(seen[1], mask)


def _mark(tensor: Any) -> Any:
    """Tells a tensor from every other one, later ones at its address and its own changes too."""
    if not isinstance(tensor, torch.Tensor):
        return None
    return weakref.ref(tensor), None if tensor.is_inference() else tensor._version


def _marks(mark: Any, tensor: Any) -> bool:
    if mark is None or not isinstance(tensor, torch.Tensor):
        return mark is None and not isinstance(tensor, torch.Tensor)
    reference, version = mark
    return reference() is tensor and (tensor.is_inference() or tensor._version == version)


def check_mapped(ids: Any, mask: Any) -> None:
    """Refuse a packed call in ``torch.func.vmap``, if what is mapped over says where examples are.

    Raises:
        PackingError: names what is mapped over.
    """
    given = {"position_ids": ids, "attention_mask": mask}
    rows = {}
    for name, fine in (("position_ids", holds_integers), ("attention_mask", is_mask)):
        tensor = given[name]
        if isinstance(tensor, torch.Tensor) and tensor.dim() in (1, 2) and fine(tensor):
            rows[name] = all_mapped(tensor)
    most = max((len(t) for t in rows.values()), default=0)
    whole = {name: t.repeat(most // len(t), 1) for name, t in rows.items()}
    found = (whole.get("position_ids"), whole.get("attention_mask"))
    if readable(*found) and read_boundaries(*found) is not None:
        names = " and ".join(name for name, tensor in given.items() if mapped_over(tensor))
        raise PackingError(
            f"torch.func.vmap maps over {names} of a packed call, whose examples it then hides. "
            "Map over calls that are packed alike (in_dims=None for these), or use a loop."
        )


def to_host(
    ids: Optional[torch.Tensor], mask: Optional[torch.Tensor], varlen: Mapping[str, Any]
) -> tuple[Optional[torch.Tensor], Optional[torch.Tensor], list[Optional[torch.Tensor]]]:
    """All that must be read, with one transfer for each device it lies on."""
    cu = [varlen.get(name) for name in VARLEN[:2]]
    for name, given in zip(VARLEN, cu):
        if not isinstance(given, torch.Tensor):
            continue
        if not has_values(given) or given.layout != torch.strided:
            raise PackingError(f"{name} must be a tensor with values, got {describe(given)}.")
    tensors = [t for t in (ids, mask, *cu) if isinstance(t, torch.Tensor)]
    on_device = [t for t in tensors if t.device.type != "cpu"]
    moved: dict[int, torch.Tensor] = {}
    if len(on_device) > 1 and len({t.device for t in on_device}) == 1:
        joined = torch.cat([_bits(t) for t in on_device]).cpu()
        parts = joined.split_with_sizes([t.numel() for t in on_device])
        moved = {id(t): p.view(t.shape) for t, p in zip(on_device, parts)}

    def host(name: str, values: Any) -> Optional[torch.Tensor]:
        if values is None:
            return None
        t = values if isinstance(values, torch.Tensor) else as_tensor(name, values)
        here = moved.get(id(t))
        if t.is_floating_point():
            return t.detach().cpu() if here is None else here.view(torch.float64)
        here = t.detach().cpu() if here is None else here
        return here if t.is_complex() else here.to(torch.bool if t.dtype == torch.bool else int64)

    lengths = [host(name, values) for name, values in zip(VARLEN, cu)]
    return host("position_ids", ids), host("attention_mask", mask), lengths


def _bits(t: torch.Tensor) -> torch.Tensor:
    """A tensor's values as int64, floats by their bits: none loses a digit."""
    flat = t.detach().reshape(-1)
    return flat.to(torch.float64).view(int64) if t.is_floating_point() else flat.to(int64)


def _count(name: str, value: Any) -> int:
    """A length as a Python int, or a :class:`PackingError` that quotes it."""
    try:
        number = value.item() if hasattr(value, "item") else value
        count = number if isinstance(number, (int, float)) else None
        if count is not None and int(count) == count:
            return int(count)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        pass
    raise PackingError(
        f"{name} must be a Python int, the tokens of the longest example, got a "
        f"{type(value).__name__}: {quote(value)}."
    )


def explicit(
    varlen: Mapping[str, Any],
    cu: list[Optional[torch.Tensor]],
    ids: Optional[torch.Tensor],
    mask: Optional[torch.Tensor],
    rows: int,
    tokens: int,
) -> Boundaries:
    missing = [name for name in VARLEN if name not in varlen]
    if missing:
        given = {k: quote(v) for k, v in varlen.items()}
        raise PackingError(
            f"the varlen arguments are incomplete: got {given}, missing {missing}. Give all of "
            f"{list(VARLEN)}, or none and position_ids that start anew at each example."
        )
    q, k = cu
    assert q is not None and k is not None
    if q.dtype != k.dtype or not torch.equal(q, k):
        raise PackingError(
            f"cu_seq_lens_q {quote(q)} and cu_seq_lens_k {quote(k)} differ; in self-attention over "
            "packed rows they are the same. Give one tensor for both."
        )
    layout = PackedLayout.from_cu_seqlens(q, tokens=rows * tokens)
    for name in VARLEN[2:]:
        longest = _count(name, varlen[name])
        if longest < layout.max_seqlen:
            raise PackingError(
                f"{name} is {longest}, but the longest example of cu_seq_lens_q "
                f"{quote(q)} has {layout.max_seqlen} tokens. Give that or more."
            )
    starts = torch.zeros(rows * tokens, dtype=torch.bool, device="cpu")
    firsts = torch.tensor(layout.starts, device="cpu")
    starts[firsts] = True
    for row in range(rows):
        if not bool(starts[row * tokens]):
            raise PackingError(
                f"cu_seq_lens_q {quote(q)} lets an example run over from row {row - 1} into row "
                f"{row} (rows of {tokens} tokens). Each row starts an example: cut it there, or "
                "make one row of the batch."
            )
    for name, other in (("position_ids", ids), ("attention_mask", mask)):
        found = None
        if name == "position_ids" and other is not None:
            found = read_boundaries(other, None)
        elif other is not None and not bool((other == 1).all()):
            found = read_boundaries(None, other, always=True)
        if found is not None:
            theirs = PackedLayout.from_lengths(found.lengths).starts
            extra = [s for s in theirs if not bool(starts[s])]
            if extra:
                raise PackingError(
                    f"contradictory boundaries: {name} starts an example at token {extra[0]}, "
                    f"cu_seq_lens_q {quote(q)} does not. Give one of the two, or make them agree."
                )
    padding = [False] * layout.examples
    if mask is not None:
        padding = [bool(p) for p in (mask.reshape(-1)[firsts] == 0).tolist()]
    return Boundaries(list(layout.lengths), padding)


def from_generate(call: Mapping[str, Any], varlen: Mapping[str, Any], release: Version) -> bool:
    """generate() hands over varlen arguments from 4.54 on: with a cache, and at first without."""
    if cache_of(call) is not None:
        return True
    q, k = varlen.get(VARLEN[0]), varlen.get(VARLEN[1])
    if not compat.generate_hands_over_varlen(release):
        return False
    if not isinstance(q, torch.Tensor) or not isinstance(k, torch.Tensor):
        return False
    return q.shape == k.shape and q.dtype == k.dtype and not torch.equal(q, k)


def in_generate() -> bool:
    """Whether ``generate()`` is what calls the model: it packs no rows.

    Without a cache it feeds the whole row again, and since 5.0 counts positions on from those of
    the padding behind a prompt.
    """
    frame: Optional[FrameType] = sys._getframe(1)
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith("transformers.generation."):
            return True
        frame = frame.f_back
    return False


def cache_of(call: Mapping[str, Any]) -> Any:
    return next((call[name] for name in _CACHES if call.get(name) is not None), None)
