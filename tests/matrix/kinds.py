"""The kinds of input: what is fed to a model, and what must come of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

VOCAB = 97


@dataclass
class Example:
    """One example of a packed call: where it stands in the batch, its tokens, its positions."""

    row: int
    start: int
    tokens: torch.Tensor
    positions: torch.Tensor


@dataclass
class Call:
    """Keyword arguments of one forward, and the examples in it (none where it is not packed)."""

    kwargs: dict[str, Any]
    examples: list[Example]


@dataclass(frozen=True)
class Kind:
    """One kind of input. ``outcome`` is "right", "unchanged" or "refused"."""

    name: str
    title: str
    outcome: str
    make: Callable[[torch.nn.Module], Call]


def _ids(count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (count,), generator=generator)


def _pack(
    rows: list[list[int]],
    *,
    first: int = 0,
    pads: tuple[str, int] = ("right", 0),
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[Example]]:
    """input_ids, position_ids, segment ids (rows, tokens), and the examples."""
    where, width = pads
    ids, positions, segments, examples = [], [], [], []
    for r, lengths in enumerate(rows):
        row_ids: list[torch.Tensor] = []
        row_pos: list[torch.Tensor] = []
        row_seg: list[torch.Tensor] = []

        def pad(count: int, a: list = row_ids, b: list = row_pos, c: list = row_seg) -> None:
            a.append(torch.zeros(count, dtype=torch.long))
            b.append(torch.zeros(count, dtype=torch.long))
            c.append(torch.zeros(count, dtype=torch.long))

        if width and where == "left":
            pad(width)
        for n, length in enumerate(lengths):
            tokens = _ids(length, 1000 * seed + 100 * r + n)
            place = torch.arange(first, first + length)
            start = sum(len(t) for t in row_ids)
            examples.append(Example(r, start, tokens, place))
            row_ids.append(tokens)
            row_pos.append(place)
            row_seg.append(torch.full((length,), n + 1))
            if width and where == "middle" and n == 0:
                pad(width)
        if width and where == "right":
            pad(width)
        ids.append(torch.cat(row_ids))
        positions.append(torch.cat(row_pos))
        segments.append(torch.cat(row_seg))
    return torch.stack(ids), torch.stack(positions), torch.stack(segments), examples


ONE = [[4, 9, 1, 6]]
TWO = [[4, 9, 7], [11, 1, 8]]


def _positions(rows: list[list[int]], **options: Any) -> Call:
    ids, pos, _, examples = _pack(rows, **options)
    return Call({"input_ids": ids, "position_ids": pos, "use_cache": False}, examples)


def _masked(rows: list[list[int]], where: str) -> Call:
    ids, pos, seg, examples = _pack(rows, pads=(where, 3))
    mask = (seg > 0).long()
    kwargs = {"input_ids": ids, "position_ids": pos, "attention_mask": mask, "use_cache": False}
    return Call(kwargs, examples)


def _ones(_: torch.nn.Module) -> Call:
    call = _positions(TWO)
    call.kwargs["attention_mask"] = torch.ones_like(call.kwargs["input_ids"])
    return call


def _shared(_: torch.nn.Module) -> Call:
    ids, pos, _, examples = _pack([[4, 9, 7], [4, 9, 7]])
    return Call({"input_ids": ids, "position_ids": pos[:1], "use_cache": False}, examples)


def _int32(_: torch.nn.Module) -> Call:
    call = _positions(TWO)
    pos = call.kwargs["position_ids"].int()
    call.kwargs["position_ids"] = pos.t().contiguous().t()
    return call


def _segments(rows: list[list[int]], width: int) -> Call:
    ids, _, seg, examples = _pack(rows, pads=("right", width))
    return Call({"input_ids": ids, "attention_mask": seg, "use_cache": False}, examples)


def _varlen(rows: list[list[int]]) -> Call:
    call = _positions(rows)
    lengths = [n for row in rows for n in row]
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    call.kwargs.update(
        cu_seq_lens_q=cu, cu_seq_lens_k=cu, max_length_q=max(lengths), max_length_k=max(lengths)
    )
    return call


def _embeds(model: torch.nn.Module) -> Call:
    call = _positions(TWO)
    ids = call.kwargs.pop("input_ids")
    call.kwargs["inputs_embeds"] = model.get_input_embeddings()(ids).detach()  # type: ignore[operator]
    return call


def _default_cache(_: torch.nn.Module) -> Call:
    call = _positions(TWO)
    del call.kwargs["use_cache"]
    return call


def _plain(length: int, rows: int = 1, **more: Any) -> Call:
    ids = torch.stack([_ids(length, 50 + r) for r in range(rows)])
    return Call({"input_ids": ids, "use_cache": False, **more}, [])


def _padded(side: str, given: bool, pad_position: int = 1) -> Call:
    ids = torch.stack([_ids(9, 60), _ids(9, 61)])
    mask = torch.ones(2, 9, dtype=torch.long)
    if side == "right":
        mask[0, 6:] = 0
    else:
        mask[0, :3] = 0
    ids = ids * mask
    kwargs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    if given:
        pos = (mask.cumsum(-1) - 1).masked_fill(mask == 0, pad_position)
        kwargs["position_ids"] = pos
    return Call(kwargs, [])


def _offset_single(_: torch.nn.Module) -> Call:
    return _plain(8, position_ids=torch.arange(5, 13)[None])


def _refused(change: Callable[[dict[str, Any]], None], varlen: bool = False) -> Call:
    call = _varlen(ONE) if varlen else _positions(ONE)
    change(call.kwargs)
    return call


def _drop(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda kwargs: kwargs.pop(name)


def _short(kwargs: dict[str, Any]) -> None:
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        kwargs[name] = kwargs[name][:-1]


def _contradict(kwargs: dict[str, Any]) -> None:
    cu = torch.tensor([0, 6, 20], dtype=torch.int32)
    kwargs.update(cu_seq_lens_q=cu, cu_seq_lens_k=cu, max_length_q=14, max_length_k=14)


def _rank(kwargs: dict[str, Any]) -> None:
    kwargs["position_ids"] = kwargs["position_ids"][None].expand(3, -1, -1)


def _four_d(kwargs: dict[str, Any]) -> None:
    kwargs["attention_mask"] = torch.zeros(1, 1, 20, 20)


def _filled_cache(model: torch.nn.Module) -> Call:
    call = _positions(ONE)
    with torch.no_grad():
        cache = model(input_ids=_ids(3, 9)[None], use_cache=True).past_key_values
    call.kwargs.update(past_key_values=cache, use_cache=True)
    return call


def _attentions(kwargs: dict[str, Any]) -> None:
    kwargs["output_attentions"] = True


KINDS = [
    Kind("positions", "one packed row, position_ids", "right", lambda m: _positions(ONE)),
    Kind("rows", "two packed rows, position_ids", "right", lambda m: _positions(TWO)),
    Kind("shared", "position_ids (1, tokens) for two rows", "right", _shared),
    Kind("int32", "int32, non-contiguous position_ids", "right", _int32),
    Kind("ones", "two rows, all-ones mask", "right", _ones),
    Kind("padded_right", "packed row, padded right", "right", lambda m: _masked(ONE, "right")),
    Kind("padded_left", "packed row, padded left", "right", lambda m: _masked(ONE, "left")),
    Kind("padded_middle", "packed row, padding inside", "right", lambda m: _masked(ONE, "middle")),
    Kind("padded_rows", "two packed rows, padded", "right", lambda m: _masked(TWO, "right")),
    Kind("segments", "segment-id mask, no padding", "right", lambda m: _segments(ONE, 0)),
    Kind(
        "segments_rows", "segment-id mask, two rows, padded", "right", lambda m: _segments(TWO, 3)
    ),
    Kind("varlen", "cu_seq_lens and max_length given", "right", lambda m: _varlen(TWO)),
    Kind("embeds", "inputs_embeds, two rows", "right", _embeds),
    Kind("one_token", "examples of one token", "right", lambda m: _positions([[1, 1, 3, 1]])),
    Kind("offset", "examples that start at 3", "right", lambda m: _positions(TWO, first=3)),
    Kind("default_cache", "use_cache left at its default", "right", _default_cache),
    Kind("plain", "not packed: one row", "unchanged", lambda m: _plain(9)),
    Kind("plain_rows", "not packed: two rows", "unchanged", lambda m: _plain(9, 2)),
    Kind(
        "arange",
        "not packed: position_ids 0…n-1",
        "unchanged",
        lambda m: _plain(9, 2, position_ids=torch.arange(9)[None]),
    ),
    Kind("single_offset", "not packed: one example from 5 on", "unchanged", _offset_single),
    Kind("right", "padded right", "unchanged", lambda m: _padded("right", False)),
    Kind("left", "padded left", "unchanged", lambda m: _padded("left", False)),
    Kind("left_ids", "padded left, pads at 1", "unchanged", lambda m: _padded("left", True)),
    Kind("right_ids", "padded right, pads at 1", "unchanged", lambda m: _padded("right", True)),
    Kind(
        "bad_lengths", "cu_seq_lens that do not add up", "refused", lambda m: _refused(_short, True)
    ),
    Kind(
        "partial", "varlen partly given", "refused", lambda m: _refused(_drop("max_length_k"), True)
    ),
    Kind("contradiction", "contradictory boundaries", "refused", lambda m: _refused(_contradict)),
    Kind("rank", "position_ids of rank 3", "refused", lambda m: _refused(_rank)),
    Kind("mask_4d", "a 4-D mask on a packed row", "refused", lambda m: _refused(_four_d)),
    Kind("filled_cache", "a filled cache with resets", "refused", _filled_cache),
    Kind(
        "attentions",
        "output_attentions on a packed row",
        "refused",
        lambda m: _refused(_attentions),
    ),
]

#: What is generated, stock and patched, by its name.
GENERATION = {
    "generate": "generation, default cache",
    "generate_left": "generation, padded left",
    "generate_no_cache": "generation without a cache",
    "generate_static": "generation, static cache",
    "generate_sliding_window": "generation, sliding-window cache",
    "generate_hybrid": "generation, hybrid cache",
    "prefill_decode": "prefill, then decode",
    "one_token_step": "a step of one token",
}
