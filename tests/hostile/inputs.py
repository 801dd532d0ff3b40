"""Calls that people make, or should not: a sensible one, then a few of its arguments spoilt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from .source import Source

VOCAB = 32
HIDDEN = 16
EXTREME = [0, 1, -1, 2, 2**15, 2**31 - 1, 2**31, 2**53, 2**53 + 1, 2**63 - 1, -(2**63)]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
UNSIGNED = [torch.uint16, torch.uint32, torch.uint64]
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
DTYPES = [*INTEGERS, torch.bool, *FLOATS, *UNSIGNED, torch.complex64]
FLOAT_VALUES = [
    0.0, 1.0, 2.0, 3.0, 0.5, -1.0, float("nan"), float("inf"), -float("inf"), 1e30, 2e30,
    2.0**53, -3.4e38,
]  # fmt: skip


@dataclass(frozen=True)
class Cache:
    """Stands for a cache of so many tokens: each model gets one of its own."""

    tokens: int


@dataclass
class Hostile:
    """One call: keyword arguments, of which model, and what has been done to it."""

    kwargs: dict[str, Any]
    model: str = "causal"
    #: pass everything up to position_ids by position
    positional: bool = False
    spoilt: list[str] = field(default_factory=list)


def hostile(source: Source, *, long: int = 0) -> Hostile:
    """A call; ``long``: per thousand of them that have thousands of examples."""
    call = _sensible(source, long=bool(long) and source.integer(1, 1000) > 1000 - long)
    for _ in range(source.pick([0, 1, 1, 1, 2, 2, 3])):
        change = source.pick(CHANGES)
        change(source, call.kwargs)
        call.spoilt.append(change.__name__.lstrip("_"))
    call.model = source.pick(["causal"] * 6 + ["base", "base", "dynamic"])
    if call.model == "base":
        call.kwargs.pop("labels", None)
        call.kwargs.pop("logits_to_keep", None)
        call.positional = source.chance(30)
    return call


def _partition(source: Source, tokens: int, longest: int = 9) -> list[int]:
    lengths = []
    while tokens:
        lengths.append(source.integer(1, min(tokens, longest)))
        tokens -= lengths[-1]
    return lengths


def _sensible(source: Source, *, long: bool) -> Hostile:
    rows = 1 if long else source.pick([1, 1, 2, 3])
    tokens = source.integer(3000, 5000) if long else source.integer(2, 14)
    lengths = [_partition(source, tokens, 2 if long else 9) for _ in range(rows)]
    generator = torch.Generator().manual_seed(source.integer(0, 9999))
    ids = torch.randint(0, VOCAB, (rows, tokens), generator=generator)
    first, step = source.pick([0, 0, 0, 3, -2]), source.pick([1, 1, 1, 2])
    positions = torch.stack(
        [torch.cat([first + step * torch.arange(n) for n in row]) for row in lengths]
    )
    segments = torch.stack(
        [torch.cat([torch.full((n,), i + 1) for i, n in enumerate(row)]) for row in lengths]
    )
    kwargs: dict[str, Any] = {"input_ids": ids}
    kind = source.pick(["positions", "positions", "segments", "varlen", "both", "plain", "arange"])
    if kind in ("positions", "both"):
        kwargs["position_ids"] = positions
    if kind in ("segments", "both"):
        kwargs["attention_mask"] = segments
    if kind == "arange":
        kwargs["position_ids"] = torch.arange(tokens).expand(rows, tokens)
    if kind == "varlen":
        kwargs.update(_varlen([n for row in lengths for n in row]))
        if source.chance(50):
            kwargs["position_ids"] = positions
    return Hostile(kwargs)


def _varlen(lengths: list[int]) -> dict[str, Any]:
    cu = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    longest = max(lengths)
    return {
        "cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": longest, "max_length_k": longest,
    }  # fmt: skip


def _shape(kwargs: dict[str, Any]) -> tuple[int, int]:
    """Rows and tokens of the call as it was meant."""
    for name in ("input_ids", "inputs_embeds"):
        value = kwargs.get(name)
        if isinstance(value, torch.Tensor) and value.dim() > 1:
            return int(value.shape[0]), int(value.shape[1])
    return 1, 6


def _numbers(source: Source, count: int, options: list[Any]) -> list[Any]:
    return [source.pick(options) for _ in range(count)]


def _positions(source: Source, kwargs: dict[str, Any]) -> None:
    """Values nobody expects."""
    rows, tokens = _shape(kwargs)
    rows, tokens = source.pick([rows, 1]), min(tokens, 64)
    kind = source.pick(["small", "extreme", "constant", "down", "one_reset", "none"])
    values: Any = torch.zeros(rows, tokens, dtype=torch.int64)
    if kind == "none":
        kwargs.pop("position_ids", None)
        return
    if kind in ("small", "extreme"):
        options = EXTREME if kind == "extreme" else [0, 1, 2, 3, 4]
        values = torch.tensor(_numbers(source, rows * tokens, options)).view(rows, tokens)
    elif kind == "constant":
        values = values + source.pick(EXTREME)
    elif kind == "down":
        values = values + torch.arange(tokens).flip(0)
    else:
        values = values + torch.arange(tokens)
        values[:1, source.integer(0, tokens - 1) if tokens else 0 :][:, :1] = 0
    kwargs["position_ids"] = values


def _mask(source: Source, kwargs: dict[str, Any]) -> None:
    rows, tokens = _shape(kwargs)
    kind = source.pick(["ones", "right", "left", "random", "segments", "float", "extreme", "none"])
    mask = torch.ones(rows, tokens, dtype=torch.int64)
    if kind == "none":
        kwargs.pop("attention_mask", None)
        return
    if kind in ("right", "left") and tokens:
        for row in range(rows):
            width = source.integer(0, min(tokens, 9))
            mask[row, tokens - width :] = 0
        mask = mask.flip(1) if kind == "left" else mask
    elif kind in ("random", "segments", "float", "extreme") and rows * tokens < 200:
        options: dict[str, list[Any]] = {
            "random": [0, 1], "segments": [0, 1, 2, 3], "extreme": EXTREME, "float": FLOAT_VALUES,
        }  # fmt: skip
        values = _numbers(source, rows * tokens, options[kind])
        dtype = torch.int64
        if kind == "float":
            dtype = source.pick(FLOATS)
        mask = torch.tensor(values, dtype=dtype).view(rows, tokens)
    given = kwargs.get("attention_mask")
    if kind in ("right", "left") and isinstance(given, torch.Tensor) and given.shape == mask.shape:
        try:
            mask = given * mask
        except (RuntimeError, NotImplementedError):
            return
    kwargs["attention_mask"] = mask


def _wide_mask(source: Source, kwargs: dict[str, Any]) -> None:
    """Ready masks of three or four dimensions, and what is no mask at all."""
    rows, tokens = _shape(kwargs)
    tokens = min(tokens, 64)
    causal = torch.ones(tokens, tokens).tril().bool().expand(rows, 1, tokens, tokens)
    extra = torch.zeros(rows, 1, tokens, tokens).masked_fill(~causal, float("-inf"))
    options: list[Any] = [
        causal, extra, causal[:, 0], torch.zeros(1, 1, 1, 1), torch.zeros(()), torch.ones(tokens),
        torch.zeros(0, 0), [[1] * tokens] * rows, {"full_attention": extra}, 1, "causal",
        torch.tensor([1, 2, 2]), torch.ones(rows, tokens + 1, dtype=torch.int64),
    ]  # fmt: skip
    kwargs["attention_mask"] = source.pick(options)


def _odd_shape(source: Source, kwargs: dict[str, Any]) -> None:
    name = source.pick(["position_ids", "attention_mask", "labels", "input_ids"])
    value = kwargs.get(name)
    if not isinstance(value, torch.Tensor) or value.dim() != 2:
        return
    changes: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda t: t[:1], lambda t: t[:, :-1], lambda t: t[:, 1:], lambda t: t[0], lambda t: t[None],
        lambda t: t[None].expand(3, -1, -1), lambda t: torch.cat([t, t]), lambda t: t[:, :0],
        lambda t: t[:0], lambda t: torch.cat([t, t[:, :1]], 1), lambda t: t.flatten()[0],
        lambda t: t[:, None], lambda t: t.t(), lambda t: t[:, :1], lambda t: t[..., None],
    ]  # fmt: skip
    if value.numel() and not value.is_sparse:
        kwargs[name] = source.pick(changes)(value)


def _odd_layout(source: Source, kwargs: dict[str, Any]) -> None:
    """The same values in another dtype, with other strides, or in something that is no tensor."""
    name = source.pick(["position_ids", "attention_mask", "position_ids", "input_ids", "labels"])
    value = kwargs.get(name)
    if not isinstance(value, torch.Tensor):
        return
    dtype = source.pick(DTYPES)
    changes: list[Callable[[torch.Tensor], Any]] = [
        lambda t: t.to(dtype), lambda t: t.to(dtype), lambda t: t.to(dtype),
        lambda t: t.mT.contiguous().mT if t.dim() > 1 else t,
        lambda t: torch.stack([t, t + 1], -1)[..., 0],
        lambda t: t[:1].expand(t.shape) if t.dim() else t, lambda t: t.tolist(),
        lambda t: t.numpy(), lambda t: t.to_sparse(), lambda t: torch.nn.Parameter(t, False),
    ]  # fmt: skip
    try:
        kwargs[name] = source.pick(changes)(value)
    except (RuntimeError, TypeError, NotImplementedError):
        return  # torch itself cannot make it


def _meta(source: Source, kwargs: dict[str, Any]) -> None:
    name = source.pick([*kwargs, "input_ids"])
    if isinstance(kwargs.get(name), torch.Tensor):
        kwargs[name] = kwargs[name].to("meta")


def _given_varlen(source: Source, kwargs: dict[str, Any]) -> None:
    """Cumulative lengths that may be wrong."""
    rows, tokens = _shape(kwargs)
    if "cu_seq_lens_q" not in kwargs:
        kwargs.update(_varlen(_partition(source, rows * min(tokens, 64)) or [1]))
        return
    cu = kwargs["cu_seq_lens_q"]
    name = source.pick(["cu_seq_lens_q", "cu_seq_lens_k", "both", "both"])
    if not isinstance(cu, torch.Tensor) or cu.dim() != 1 or cu.is_meta:
        return
    end = int(cu[-1]) if len(cu) and cu.dtype in INTEGERS else 4
    values = list(cu.tolist())

    def like(numbers: list[Any]) -> torch.Tensor:
        # Unsigned tensors can neither be turned nor negated; as int64 they wrap.
        whole = [(n + 2**63) % 2**64 - 2**63 if isinstance(n, int) else n for n in numbers]
        return torch.tensor(whole).to(cu.dtype)

    options: list[Any] = [
        cu[:-1], cu[1:], torch.cat([cu, cu[-1:], cu[-1:]]), cu[None], like(values[::-1]),
        cu[:0], cu[:1], like([v + 1 for v in values]), like([-v for v in values]),
        cu.to(source.pick(DTYPES)), values, tuple(values), cu.numpy(), cu[0:1],
        torch.tensor([0, 0, end]), torch.tensor([0, 2**31, 2**40]), torch.tensor([0, -1, end]),
        torch.tensor([0, end]), torch.tensor([0.0, float("nan")]), cu.to("meta"), "lengths", None,
        torch.tensor([0, 2**63 - 1, -(2**63)]), cu.to(torch.int64), [0, "x"], [0, [1]],
        torch.tensor(0), int(end), cu[::2],
    ]  # fmt: skip
    value = source.pick(options)
    names = ["cu_seq_lens_q", "cu_seq_lens_k"] if name == "both" else [name]
    kwargs.update(dict.fromkeys(names, value))


def _longest(source: Source, kwargs: dict[str, Any]) -> None:
    options: list[Any] = [
        0, 1, -1, 14, 2**31, 2**63, 10**30, 9.0, 2.5, float("nan"), float("inf"), "9", "long", None,
        torch.tensor(9), torch.tensor([9]), torch.tensor([1, 2]), torch.tensor(9.5), True, [9],
        torch.tensor(9, device="meta"), torch.tensor([]),
    ]  # fmt: skip
    if "cu_seq_lens_q" not in kwargs:
        return
    value = source.pick(options)
    for name in source.pick([["max_length_q"], ["max_length_k"], ["max_length_q", "max_length_k"]]):
        kwargs[name] = value


def _drop(source: Source, kwargs: dict[str, Any]) -> None:
    name = source.pick([*sorted(kwargs), "nothing"])
    if name != "input_ids" or source.chance(30):
        kwargs.pop(name, None)


def _tokens(source: Source, kwargs: dict[str, Any]) -> None:
    """Input ids out of the vocabulary, of another dtype, or without a single one."""
    rows, tokens = _shape(kwargs)
    ids = kwargs.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.is_meta or ids.dim() != 2 or ids.is_sparse:
        return
    kind = source.pick(["vocabulary", "negative", "empty", "one", "none", "both", "dtype"])
    if kind in ("vocabulary", "negative") and ids.numel() and ids.dtype in INTEGERS:
        ids = ids.to(torch.int64)
        ids[source.integer(0, rows - 1), source.integer(0, tokens - 1)] = (
            VOCAB + 5 if kind == "vocabulary" else -1
        )
    elif kind == "empty":
        ids = source.pick([ids[:, :0], ids[:0]])
    elif kind == "one":  # rows of one token, and all that goes with them
        for name in ("position_ids", "attention_mask", "labels"):
            value = kwargs.get(name)
            if isinstance(value, torch.Tensor) and value.dim() == 2 and not value.is_sparse:
                kwargs[name] = value[:, :1]
        ids = ids[:, :1]
    elif kind == "none":
        del kwargs["input_ids"]
        return
    elif kind == "both":
        kwargs["inputs_embeds"] = torch.zeros(rows, tokens, HIDDEN)
    else:
        ids = ids.to(source.pick([torch.int32, torch.int16, torch.uint8, torch.float32]))
    kwargs["input_ids"] = ids


def _embeds(source: Source, kwargs: dict[str, Any]) -> None:
    rows, tokens = _shape(kwargs)
    kwargs.pop("input_ids", None)
    generator = torch.Generator().manual_seed(source.integer(0, 9999))
    embeds = torch.randn(rows, tokens, HIDDEN, generator=generator)
    kind = source.pick(["plain", "nan", "inf", "huge", "strided", "dtype", "grad", "rank"])
    if kind in ("nan", "inf", "huge") and rows * tokens:
        value = {"nan": float("nan"), "inf": float("inf"), "huge": 1e30}[kind]
        embeds[source.integer(0, rows - 1), source.integer(0, tokens - 1)] = value
    elif kind == "strided":
        embeds = embeds.transpose(0, 2).contiguous().transpose(0, 2)
    elif kind == "dtype":
        embeds = embeds.to(source.pick([torch.float64, torch.bfloat16, torch.int64]))
    elif kind == "grad":
        embeds.requires_grad_()
    elif kind == "rank":
        embeds = source.pick([embeds[0] if rows else embeds, embeds[..., 0], embeds[None]])
    kwargs["inputs_embeds"] = embeds


def _labels(source: Source, kwargs: dict[str, Any]) -> None:
    rows, tokens = _shape(kwargs)
    generator = torch.Generator().manual_seed(source.integer(0, 9999))
    labels = torch.randint(0, VOCAB, (rows, tokens), generator=generator)
    labels[torch.rand(rows, tokens, generator=generator) < 0.2] = -100
    mask = kwargs.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.shape == labels.shape and not mask.is_sparse:
        labels[(mask == 0).to("cpu") if not mask.is_meta else labels < 0] = -100
    kwargs["labels"] = labels


def _options(source: Source, kwargs: dict[str, Any]) -> None:
    name, value = source.pick(
        [
            ("use_cache", True), ("use_cache", False), ("output_attentions", True),
            ("past_key_values", Cache(0)), ("past_key_values", Cache(3)), ("cache", Cache(0)),
            ("return_dict", False),
            ("logits_to_keep", 1), ("logits_to_keep", 3), ("output_hidden_states", True),
            ("head_mask", torch.ones(2, 2)), ("encoder_hidden_states", torch.ones(1, 2, HIDDEN)),
            ("cache_position", torch.arange(4)), ("nonsense", 1), ("past_key_values", ()),
        ]
    )  # fmt: skip
    kwargs[name] = value


CHANGES = [
    _positions, _positions, _mask, _mask, _wide_mask, _odd_shape, _odd_shape, _odd_layout,
    _odd_layout, _meta, _given_varlen, _given_varlen, _longest, _drop, _tokens, _embeds, _labels,
    _options,
]  # fmt: skip
