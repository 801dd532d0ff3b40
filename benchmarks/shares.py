"""How the same examples are dealt out to the ranks of ``benchmarks.fsdp``, and how evenly."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from fa2_pack_patch.data import pack_lengths

Batches = list[list[int]]
VARIANTS = ("padded", "packed_unbalanced", "packed_bfd", "packed_balanced")


def sample(pool: Sequence[int], tokens: int, seed: int = 0) -> list[int]:
    """Lengths from ``pool`` in random order, ``tokens`` in all or little less."""
    order = list(pool)
    random.Random(seed).shuffle(order)
    found: list[int] = []
    left = tokens
    for length in order:
        if length > left:
            break
        found.append(length)
        left -= length
    if left == tokens or len(found) == len(order):
        raise ValueError(f"{len(order)} lengths cannot fill {tokens} tokens; choose fewer steps")
    return found


def batches(variant: str, lengths: Sequence[int], capacity: int, ranks: int) -> Batches:
    """The examples of each batch; rank ``r`` takes ``[r::ranks]``."""
    if variant == "padded":
        return even(padded_batches(lengths, capacity), lengths, ranks)
    if variant == "packed_unbalanced":
        bins = pack_lengths(lengths, capacity)
        random.Random(0).shuffle(bins)
        return even(bins, lengths, ranks)
    if variant in ("packed_bfd", "packed_balanced"):
        return pack_lengths(lengths, capacity, variant.split("_")[1], ranks=ranks)
    raise ValueError(f"variant must be one of {list(VARIANTS)}, got {variant!r}")


def padded_batches(lengths: Sequence[int], capacity: int) -> Batches:
    """Examples in their order, as many in a batch as fit with their padding."""
    found: Batches = [[]]
    longest = 0
    for at, length in enumerate(lengths):
        longest = max(longest, length)
        if found[-1] and (len(found[-1]) + 1) * longest > capacity:
            found.append([])
            longest = length
        found[-1].append(at)
    return found


def even(found: Batches, lengths: Sequence[int], ranks: int) -> Batches:
    """A multiple of ``ranks`` batches, by dividing those of the most tokens."""
    found = [list(batch) for batch in found]
    while len(found) % ranks:
        at = max(
            (n for n, batch in enumerate(found) if len(batch) > 1),
            key=lambda n: sum(lengths[i] for i in found[n]),
        )
        half = len(found[at]) // 2
        found[at : at + 1] = [found[at][:half], found[at][half:]]
    return found


def describe(found: Batches, lengths: Sequence[int], ranks: int, *, padded: bool) -> dict[str, Any]:
    """What is known of a variant before it runs; imbalance is 1 where all ranks have the same."""
    tokens = [sum(lengths[i] for i in batch) for batch in found]
    wide = [len(b) * max(lengths[i] for i in b) for b in found] if padded else tokens
    costs = [sum(lengths[i] ** 2 for i in batch) for batch in found]

    def imbalance(values: Sequence[int]) -> float:
        steps = [values[at : at + ranks] for at in range(0, len(values), ranks)]
        return round(sum(map(max, steps)) * ranks / sum(values), 4)

    return {
        "steps": len(found) // ranks,
        "examples": sum(map(len, found)),
        "real_tokens": sum(tokens),
        "computed_tokens": sum(wide),
        "real_tokens_per_rank": [sum(tokens[rank::ranks]) for rank in range(ranks)],
        "token_imbalance": imbalance(wide),
        "attention_cost_imbalance": imbalance(costs),
    }
