"""pack_lengths: bins of examples, and what it refuses."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fa2_pack_patch import PackingError
from fa2_pack_patch.data import density, pack_lengths
from fa2_pack_patch.data.packers import STRATEGIES, Piece

LENGTHS = Path(__file__).resolve().parents[1] / "benchmarks" / "data" / "lengths.json"


def t0(cap: int = 4096) -> Any:
    """Tokens of the 20,000 examples of the T0 sample."""
    return np.minimum(json.loads(LENGTHS.read_text(encoding="utf-8"))["t0"], cap)


def everyone(bins: list[list[int]], count: int) -> bool:
    return sorted(at for held in bins for at in held) == list(range(count))


def costs(bins: list[list[int]], lengths: Any) -> Any:
    return np.array([(np.asarray(lengths)[held] ** 2).sum() for held in bins])


def plain_best_fit(lengths: list[int], capacity: int, most: int) -> int:
    """Best-fit decreasing as the textbook has it, one example after the other; its bins."""
    rooms: list[list[int]] = []
    for size in sorted(lengths, reverse=True):
        open_ = [r for r in rooms if r[0] >= size and r[1] < most]
        if open_:
            best = min(open_, key=lambda r: r[0])
            best[0] -= size
            best[1] += 1
        else:
            rooms.append([capacity - size, 1])
    return len(rooms)


cases = st.integers(8, 60).flatmap(
    lambda capacity: st.tuples(
        st.lists(st.integers(1, capacity), min_size=1, max_size=60), st.just(capacity)
    )
)


@pytest.mark.parametrize("strategy", STRATEGIES)
@settings(max_examples=150, deadline=None)
@given(case=cases, most=st.sampled_from([None, 1, 2, 5]), ranks=st.sampled_from([1, 2, 3]))
def test_no_example_is_lost_doubled_or_too_much(
    strategy: str, case: tuple[list[int], int], most: Any, ranks: int
) -> None:
    lengths, capacity = case
    try:
        bins = pack_lengths(lengths, capacity, strategy, max_examples=most, ranks=ranks)
    except PackingError as error:
        assert "cannot be divided" in str(error)
        alone = len(pack_lengths(lengths, capacity, strategy, max_examples=most))
        assert alone + -alone % ranks > len(lengths)
        return
    assert everyone(bins, len(lengths))
    assert len(bins) % ranks == 0
    for held in bins:
        assert held and held == sorted(held)
        assert sum(lengths[at] for at in held) <= capacity
        assert most is None or len(held) <= most
    assert bins == pack_lengths(lengths, capacity, strategy, max_examples=most, ranks=ranks)


@settings(max_examples=150, deadline=None)
@given(case=cases, most=st.sampled_from([None, 2, 3]))
def test_grouped_best_fit_is_the_textbook_s(case: tuple[list[int], int], most: Any) -> None:
    lengths, capacity = case
    bins = pack_lengths(lengths, capacity, max_examples=most)
    assert len(bins) == plain_best_fit(lengths, capacity, most or len(lengths))


def test_next_fit_keeps_the_order() -> None:
    assert pack_lengths([4, 5, 2, 9, 1], 10, "next_fit") == [[0, 1], [2], [3, 4]]
    flat = [at for held in pack_lengths(t0(), 4096, "next_fit") for at in held]
    assert flat == list(range(20_000))


def test_best_fit_fills_real_lengths() -> None:
    lengths = t0()
    bins = pack_lengths(lengths, 4096)
    assert everyone(bins, len(lengths))
    assert density(bins, lengths, 4096) >= 0.999
    assert len(bins) <= -(-int(lengths.sum()) // 4096) + 1


def test_balanced_does_not_search_bins_that_are_too_full() -> None:
    lengths = [3200] * 16_000 + [412] * 48_000  # nine of the short ones leave 388 tokens
    began = time.perf_counter()
    bins = pack_lengths(lengths, 4096, "balanced")
    assert time.perf_counter() - began < 3
    assert sorted(at for held in bins for at in held) == list(range(len(lengths)))


def test_a_million_lengths_in_three_seconds() -> None:
    lengths = np.random.default_rng(0).choice(t0(), 1_000_000)
    began = time.perf_counter()
    bins = pack_lengths(lengths, 4096)
    assert time.perf_counter() - began < 3
    assert density(bins, lengths, 4096) >= 0.999


def test_balanced_costs_spread_less_in_as_many_bins() -> None:
    lengths = t0()
    fitted, balanced = (pack_lengths(lengths, 4096, s) for s in ("bfd", "balanced"))
    assert len(balanced) <= len(fitted) * 1.005
    spread = [costs(bins, lengths).std() for bins in (fitted, balanced)]
    assert spread[1] < 0.85 * spread[0]


def test_balanced_evens_out_where_it_can() -> None:
    lengths = [600] * 8 + [20] * 400  # bfd: one 600 after the other into the same bins
    fitted, balanced = (costs(pack_lengths(lengths, 1600, s), lengths) for s in STRATEGIES[::2])
    assert len(balanced) == len(fitted) == 8
    assert balanced.max() < 1.1 * balanced.mean() and fitted.max() > 1.9 * fitted.mean()


@pytest.mark.parametrize("strategy", ["bfd", "balanced"])
def test_the_bins_of_a_step_cost_about_the_same(strategy: str) -> None:
    lengths = t0()
    steps = costs(pack_lengths(lengths, 4096, strategy, ranks=8), lengths).reshape(-1, 8)
    assert steps.max(1).sum() < 1.02 * steps.mean(1).sum()
    alone = pack_lengths(lengths, 4096, strategy)
    order = np.random.default_rng(0).permutation(len(alone))[: len(alone) // 8 * 8]
    loose = costs([alone[at] for at in order], lengths).reshape(-1, 8)
    assert loose.max(1).sum() > 1.5 * loose.mean(1).sum()


def test_bins_are_divided_for_the_ranks() -> None:
    assert len(pack_lengths([1] * 10, 5)) == 2
    bins = pack_lengths([1] * 10, 5, ranks=4)
    assert len(bins) == 4 and everyone(bins, 10)
    assert min(map(len, bins)) >= 2


def test_too_long() -> None:
    with pytest.raises(PackingError, match=r"1 of 3 .* capacity=10 tokens: examples \[1\] of \[25"):
        pack_lengths([3, 25, 4], 10)
    assert everyone(pack_lengths([3, 25, 4], 10, too_long="truncate"), 3)
    bins = pack_lengths([3, 25, 4], 10, too_long="split")
    items = [item for held in bins for item in held]
    pieces = sorted(i for i in items if isinstance(i, Piece))
    assert pieces == [Piece(1, 0, 10), Piece(1, 10, 20), Piece(1, 20, 25)]
    assert sorted(i for i in items if not isinstance(i, Piece)) == [0, 2]
    assert density(bins, [3, 25, 4], 10) == 32 / (len(bins) * 10)


def test_density_counts_what_fits() -> None:
    assert density([[0, 1], [2]], [4, 4, 2], 10) == 0.5
    with pytest.raises(PackingError, match="no bins"):
        density([], [1], 10)


def test_nothing_makes_no_bins() -> None:
    assert pack_lengths([], 10) == []


@pytest.mark.parametrize(
    ("lengths", "capacity", "options", "error", "said"),
    [
        ([3, 0, 2], 10, {}, PackingError, r"examples \[1\] have \[0\] tokens"),
        ([3, -4], 10, {}, PackingError, r"\[-4\] tokens"),
        ([3.0, 4.5], 10, {}, PackingError, r"float64 of shape \(2,\): \[3.0, 4.5\]"),
        (
            [[3, 4]],
            10,
            {},
            PackingError,
            r"a list that starts with a list: \[3, 4\]; .*len\(ids\)",
        ),
        ([[3, 4], [5]], 10, {}, PackingError, r"starts with a list: \[3, 4\]; .*len\(ids\)"),
        ([torch.arange(3), [5]], 10, {}, PackingError, r"a Tensor: \[0, 1, 2\]; .*len\(ids\)"),
        (
            [None, 4],
            10,
            {},
            PackingError,
            "list or array of one integer for each example, got a list;",
        ),
        (None, 10, {}, PackingError, "got a NoneType"),
        (np.ones((2, 3), int), 10, {}, PackingError, r"got a ndarray of shape \(2, 3\)"),
        (iter([3, 4]), 10, {}, PackingError, "got a list_iterator"),
        ([True, True], 10, {}, PackingError, "bool"),
        ([3], 0, {}, ValueError, "capacity must be a positive integer, got 0"),
        ([3], 2.5, {}, ValueError, r"got 2\.5"),
        ([3], 10, {"strategy": "ffd"}, ValueError, "'bfd', 'next_fit', 'balanced'.*'ffd'"),
        ([3], 10, {"too_long": "drop"}, ValueError, "'error', 'truncate', 'split'.*'drop'"),
        ([3], 10, {"ranks": 0}, ValueError, "ranks must be"),
        ([3], 10, {"max_examples": 0}, ValueError, "max_examples must be"),
        ([3, 3], 3, {"ranks": 3}, PackingError, r"2 examples make 2 bins .* ranks=3"),
    ],
)
def test_refused(lengths: Any, capacity: Any, options: Any, error: Any, said: str) -> None:
    with pytest.raises(error, match=said):
        pack_lengths(lengths, capacity, **options)


def test_the_page_shows_what_was_measured() -> None:
    from benchmarks import packing

    text = packing.PAGE.read_text(encoding="utf-8")
    result = json.loads(packing.RESULT.read_text(encoding="utf-8"))
    assert packing.rendered(text, result) == text
    lengths = t0(packing.CAPACITY)
    assert result["t0"]["bfd"] == packing.packed(lengths)["bfd"]  # no clock in it
    share = result["t0"]["padding_share"]["32"]
    assert share == round(packing.padding(t0(cap=10**6), 32), 4) > 0.85
