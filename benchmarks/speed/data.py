"""Example lengths of real data, and the batches made of them. Token ids are random."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

LENGTHS = Path(__file__).resolve().parents[1] / "data" / "lengths.json"
_CANDIDATES = 201


@dataclass
class Batch:
    """What the model is called with; ``real`` tokens are counted, ``computed`` with padding."""

    call: dict[str, Any]
    real: int
    computed: int


def lengths(name: str, *, cap: int, smoke: bool) -> list[int]:
    """Tokens of each example of "t0" or "gsm8k", cut to ``cap`` as a training run would."""
    found = json.loads(LENGTHS.read_text(encoding="utf-8"))[name]
    if smoke:
        found, cap = [max(2, n // 16) for n in found[:2000]], max(8, cap // 32)
    return [min(int(n), cap) for n in found]


def groups(pool: Sequence[int], size: int, count: int) -> list[list[int]]:
    """``count`` random mini-batches of ``size`` examples whose share of padding is typical.

    Of 201 draws, the one whose padded size over its real size is the median: a few steps of a
    heavy-tailed set would else say more about the draw than about the set.
    """

    def draw(seed: int) -> list[list[int]]:
        picked = random.Random(seed).sample(list(pool), size * count)
        return [picked[i : i + size] for i in range(0, size * count, size)]

    def waste(drawn: list[list[int]]) -> float:
        return sum(len(g) * max(g) for g in drawn) / sum(map(sum, drawn))

    return sorted((draw(seed) for seed in range(_CANDIDATES)), key=waste)[_CANDIDATES // 2]


def filled(pool: Sequence[int], tokens: int, count: int, seed: int = 0) -> list[list[int]]:
    """``count`` batches of at most ``tokens`` tokens: examples in random order, first that fits."""
    order = list(pool)
    random.Random(seed).shuffle(order)
    found: list[list[int]] = []
    at = 0
    for _ in range(count):
        group: list[int] = []
        left, misses = tokens, 0
        while misses < 64 and left >= 8:
            length = order[at % len(order)]
            at += 1
            if length <= left:
                group.append(length)
                left -= length
            else:
                misses += 1
        found.append(group)
    return found


def _ids(group: Sequence[int], vocabulary: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocabulary, (n,), generator=generator) for n in group]


def _targets(examples: list[torch.Tensor]) -> list[torch.Tensor]:
    # The first token of an example is nobody's target, packed or not.
    return [torch.cat([torch.full((1,), -100), e[1:]]) for e in examples]


def padded(group: Sequence[int], vocabulary: int, seed: int = 0) -> Batch:
    """One example a row, padded on the right to the longest."""
    examples = _ids(group, vocabulary, seed)
    pad = torch.nn.utils.rnn.pad_sequence
    mask = pad([torch.ones(n, dtype=torch.long) for n in group], batch_first=True)
    call = {
        "input_ids": pad(examples, batch_first=True),
        "attention_mask": mask,
        "labels": pad(_targets(examples), batch_first=True, padding_value=-100),
    }
    return Batch(call, sum(group), mask.numel())


def packed(
    group: Sequence[int],
    vocabulary: int,
    seed: int = 0,
    *,
    varlen: bool = False,
    tokens: int | None = None,
    entries: int | None = None,
    longest: int | None = None,
) -> Batch:
    """The same examples end to end in one row.

    Args:
        group: their lengths.
        vocabulary: number of token ids.
        seed: of the ids; :func:`padded` with the same seed has the same examples.
        varlen: also ``cu_seq_lens_q/k`` and ``max_length_q/k``.
        tokens: static shape: the row is padded to this many tokens by an example of its own.
        entries: static shape: ``cu_seq_lens`` is padded to this many entries by repeating its end.
        longest: static shape: what ``max_length`` says, whatever the batch holds.
    """
    examples = _ids(group, vocabulary, seed)
    targets, counts = _targets(examples), list(group)
    rest = (tokens or sum(group)) - sum(group)
    if rest:
        examples.append(torch.zeros(rest, dtype=torch.long))
        targets.append(torch.full((rest,), -100))
        counts.append(rest)
    call: dict[str, Any] = {
        "input_ids": torch.cat(examples)[None],
        "labels": torch.cat(targets)[None],
        "position_ids": torch.cat([torch.arange(n) for n in counts])[None],
    }
    if varlen:
        ends = [0, *torch.tensor(counts).cumsum(0).tolist()]
        if entries is not None:
            assert len(ends) <= entries, f"{len(group)} examples do not fit {entries} entries"
            ends += [ends[-1]] * (entries - len(ends))
        cu = torch.tensor(ends, dtype=torch.int32)
        top = max(counts) if longest is None else longest
        assert top >= max(counts)
        call.update(cu_seq_lens_q=cu, cu_seq_lens_k=cu, max_length_q=top, max_length_k=top)
    return Batch(call, sum(group), sum(counts))


def equal(group: Sequence[int], vocabulary: int, seed: int = 0) -> Batch:
    """The ceiling: as many tokens in rows of one length, nothing to pad, nothing to find out."""
    rows = len(group)
    width = round(sum(group) / rows)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocabulary, (rows, width), generator=generator)
    labels = ids.clone()
    labels[:, 0] = -100
    return Batch({"input_ids": ids, "labels": labels}, rows * width, rows * width)


def move(batch: Batch, device: torch.device) -> Batch:
    """The batch with its tensors on ``device``; q and k keep sharing one."""
    done: dict[int, torch.Tensor] = {}
    call: dict[str, Any] = {}
    for name, value in batch.call.items():
        if isinstance(value, torch.Tensor):
            call[name] = done.setdefault(id(value), value.to(device))
        else:
            call[name] = value
    return Batch(call, batch.real, batch.computed)
