"""What must come of a call: the rules of the README once more, slowly, on Python numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

import torch

from .inputs import INTEGERS, Hostile

Rows = Sequence[Sequence[Any]]
VARLEN = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
WHOLE = [*INTEGERS, torch.uint16, torch.uint32]
ROPE_LIMIT = 8  # of the model "dynamic"


@dataclass
class Found:
    """The examples of a batch, and what speaks against packing them."""

    lengths: list[int] = field(default_factory=list)
    padding: list[bool] = field(default_factory=list)
    packed: bool = False
    contradiction: bool = False
    hole: bool = False


def examples(rows: int, tokens: int, positions: Optional[Rows], mask: Optional[Rows]) -> Found:
    """Token by token; ``last`` is the last real token of the row so far."""
    segmented = mask is not None and any(m is not True and m > 1 for row in mask for m in row)
    found = Found()
    for row, i in ((r, i) for r in range(rows) for i in range(tokens)):
        last, before = (None, None) if i == 0 else (last, real)  # noqa: F821
        real = mask is None or mask[row][i] != 0
        seen = real and last is not None
        reset = seen and positions is not None and positions[row][i] <= positions[row][last]
        other = seen and segmented and mask[row][i] != mask[row][last]
        edge = other if segmented else reset
        if real != before or edge:
            found.lengths.append(0)
            found.padding.append(not real)
        found.lengths[-1] += 1
        found.packed |= edge
        found.hole |= seen and not edge and last != i - 1
        found.contradiction |= segmented and reset and not other and last == i - 1
        last = i if real else last
    return found


@dataclass
class Verdict:
    """``kind`` is what must come of the call.

    "packed": right, example by example. "stock": what the unpatched model gives, or our error where
    that raises. "refused": anything but a result. "loose": our error, or as the unpatched model.
    "void": anything but an error of our code, there are no values.
    """

    kind: str
    why: str = ""
    lengths: list[int] = field(default_factory=list)
    padding: list[bool] = field(default_factory=list)
    #: ``(rows, tokens)``, or None for positions from 0 in each example
    positions: Optional[list[list[int]]] = None


def verdict(call: Hostile) -> Verdict:
    kwargs = call.kwargs
    given = {name: kwargs[name] for name in VARLEN if kwargs.get(name) is not None}
    inputs = kwargs.get("input_ids")
    inputs = kwargs.get("inputs_embeds") if inputs is None else inputs
    ids, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
    if not isinstance(inputs, torch.Tensor) or inputs.dim() < 2:
        return Verdict("refused" if _resets(ids) else "loose", "no tokens by rows")
    if inputs.is_meta:
        return Verdict("void", "inputs without values")
    rows, tokens = int(inputs.shape[0]), int(inputs.shape[1])
    cached = any(kwargs.get(name) is not None for name in ("past_key_values", "cache"))
    if not given and (rows * tokens == 0 or tokens == 1):
        return Verdict("stock", "nothing to pack")
    if given and rows * tokens == 0:
        return Verdict("refused", "lengths of nothing")
    positions, fits = _positions(ids, rows, tokens)
    if not fits:
        bad = bool(given) or (_resets(ids) and not cached)
        return Verdict("refused" if bad else "loose", "odd position_ids")
    wide = mask is not None and not _by_rows(mask, rows, tokens)
    numbers = None if mask is None or wide else _numbers(mask)
    if any(isinstance(v, torch.Tensor) and v.is_meta for v in given.values()):
        return Verdict("refused" if not cached else "void", "lengths without values")
    if any(isinstance(v, torch.Tensor) and v.is_meta for v in (ids, mask)):
        packed = not cached and examples(rows, tokens, positions, None).packed
        return Verdict("refused" if packed or given else "void", "values that do not exist")
    if numbers is None and mask is not None and not wide:
        packed = not given and examples(rows, tokens, positions, None).packed
        return Verdict("refused" if packed else "loose", "a mask of no numbers")
    segmented = numbers is not None and any(m is not True and m > 1 for row in numbers for m in row)
    odd = numbers is not None and any(m < 0 or m != m // 1 for row in numbers for m in row)
    found = examples(rows, tokens, positions, numbers)
    if given and not cached:
        result = _explicit(given, rows, tokens, positions, numbers)
    elif odd and segmented:
        return Verdict("loose", "segment ids that are none")
    elif segmented and found.contradiction:
        result = Verdict("refused", "contradiction")
    elif not found.packed:
        if wide and _looks_segmented(mask):
            return Verdict("loose", "segment ids of another shape")
        return Verdict("loose" if given else "stock", "not packed")
    elif found.hole or odd:
        result = Verdict("refused", "a hole, or a mask of odd numbers")
    else:
        result = Verdict("packed", "", found.lengths, found.padding)
    result.positions = positions
    if wide:
        return Verdict("loose" if cached else "refused", "a mask of another shape")
    if inputs.dim() != (2 if inputs is kwargs.get("input_ids") else 3):
        return Verdict("refused", "inputs of another rank")
    labels = kwargs.get("labels")
    many = isinstance(labels, torch.Tensor) and labels.numel() == rows * tokens
    if many and (labels.dtype not in INTEGERS or labels.is_sparse):
        return Verdict("refused", "labels that are no integers")
    if many and labels.dim() > 1 and labels.shape[-1] != tokens:
        return Verdict("refused", "labels in other rows")
    if cached or any(kwargs.get(n) for n in ("use_cache", "output_attentions")):
        return Verdict("refused", "a cache or attentions")
    if any(kwargs.get(n) is not None for n in ("head_mask", "encoder_hidden_states")):
        return Verdict("refused", "a foreign argument")
    if call.model == "dynamic" and result.kind == "packed" and _stretches(result, rows, tokens):
        return Verdict("refused", "one example changes the rope of another")
    return result


def _explicit(
    given: dict[str, Any], rows: int, tokens: int, positions: Optional[Rows], mask: Optional[Rows]
) -> Verdict:
    if len(given) < len(VARLEN):
        return Verdict("refused", "incomplete")
    q, k, *longest = (_flat(given[name]) for name in VARLEN)
    if any(isinstance(given[name], (list, tuple)) for name in VARLEN[2:]):
        return Verdict("refused", "a list as max_length")
    if q is None or q != k or len(q) < 2 or any(len(v or []) != 1 for v in longest):
        return Verdict("refused", "not lengths")
    lengths = [b - a for a, b in zip(q, q[1:])]
    while len(lengths) > 1 and lengths[-1] == 0:
        lengths.pop()
    starts = [sum(lengths[:i]) for i in range(len(lengths))] if len(lengths) < 99 else []
    if len(lengths) >= 99:
        starts = torch.tensor([0, *lengths[:-1]]).cumsum(0).tolist()
    if q[0] != 0 or min(lengths) < 1 or q[-1] != rows * tokens:
        return Verdict("refused", "not from 0 to the token count")
    if any(v[0] < max(lengths) for v in longest if v):
        return Verdict("refused", "an example beyond max_length")
    if not {row * tokens for row in range(rows)} <= set(starts):
        return Verdict("refused", "an example over two rows")
    padding = [False] * len(lengths)
    if mask is not None:
        if any(m < 0 or m != m // 1 for row in mask for m in row):
            return Verdict("refused", "a mask of odd numbers")
        flat = [m for row in mask for m in row]
        padding = [flat[s] == 0 for s in starts]
        if any(m != 1 for m in flat) and not _within(examples(rows, tokens, None, mask), starts):
            return Verdict("refused", "the mask has other boundaries")
    if positions is not None and not _within(examples(rows, tokens, positions, None), starts):
        return Verdict("refused", "position_ids have other boundaries")
    return Verdict("packed", "", lengths, padding)


def _within(found: Found, starts: list[int]) -> bool:
    theirs = torch.tensor([0, *found.lengths[:-1]]).cumsum(0).tolist()
    return set(theirs) <= set(starts)


def _flat(value: Any) -> Optional[list[int]]:
    """Whole numbers in one dimension (or one), as Python ints; None when they are none."""
    if isinstance(value, torch.Tensor):
        if value.dtype not in (*WHOLE, torch.uint64) or value.dim() > 1 or value.is_sparse:
            return None
        return [int(v) for v in value.reshape(-1).tolist()]
    if isinstance(value, (list, tuple)):
        return list(value) if all(type(v) is int for v in value) else None
    if hasattr(value, "tolist"):
        return _flat(torch.as_tensor(value))
    if isinstance(value, float) and value.is_integer():
        return [int(value)]
    return [int(value)] if isinstance(value, int) else None


def _positions(ids: Any, rows: int, tokens: int) -> tuple[Optional[list[list[int]]], bool]:
    """Whole numbers for each token, and whether position_ids are what they should be."""
    if ids is None:
        return None, True
    if not isinstance(ids, torch.Tensor) or ids.dtype not in WHOLE or ids.is_sparse:
        return None, False
    wide = ids[None] if ids.dim() == 1 else ids
    if wide.dim() != 2 or wide.shape[1] != tokens or wide.shape[0] not in (1, rows):
        return None, False
    return (None if ids.is_meta else wide.expand(rows, tokens).tolist()), True


def _by_rows(mask: Any, rows: int, tokens: int) -> bool:
    return isinstance(mask, torch.Tensor) and tuple(mask.shape) == (rows, tokens)


def _numbers(mask: torch.Tensor) -> Optional[list[list[Any]]]:
    """A mask's values; infinities and nan become fractions, which no mask has."""
    if mask.dtype.is_complex or mask.is_sparse or mask.is_meta:
        return None
    if mask.dtype == torch.bool or not mask.dtype.is_floating_point:
        return mask.tolist()
    huge = (mask >= 2.0**53) | mask.isnan()  # beyond that a float is no id
    return mask.to(torch.float64).masked_fill(huge, 1.5).tolist()


def _resets(ids: Any) -> bool:
    """Whether positions of any shape and dtype go back somewhere."""
    try:
        values = torch.as_tensor(ids)
        values = values.to_dense() if values.is_sparse else values
        values = values.to(torch.complex128).real.reshape(-1, values.shape[-1])
        return bool((values[:, 1:] <= values[:, :-1]).any())
    except Exception:  # nothing that has an order
        return False


def _looks_segmented(mask: Any) -> bool:
    return isinstance(mask, torch.Tensor) and mask.dim() < 3


def _stretches(result: Verdict, rows: int, tokens: int) -> bool:
    flat = [p for row in result.positions for p in row] if result.positions else None
    reach, at = [], 0
    for length, pad in zip(result.lengths, result.padding):
        at += length
        if not pad:
            reach.append((flat[at - 1] if flat else length - 1) + 1)
    return bool(reach) and max(reach) > ROPE_LIMIT and len(set(reach)) > 1
