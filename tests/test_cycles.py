"""A thousand times apply and revert: nothing stays behind, and every object is the one before."""

from __future__ import annotations

import gc
import statistics
import tracemalloc
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fa2_pack_patch as fpp
from tests.matrix.kinds import Call

Build = Callable[..., torch.nn.Module]
CYCLES = 1000
PARTS = 5
#: what the interpreter itself may take: bytes, and objects (one of each cycle would be a thousand)
SLACK = 8192
FEW = 20


def state(model: torch.nn.Module) -> list[Any]:
    """Every instance attribute of every module, what its dictionaries hold, by the objects."""
    found: list[Any] = []
    for name, module in model.named_modules():
        for key, value in sorted(module.__dict__.items()):
            found.append((name, key, value))
            if isinstance(value, dict):
                found += [(name, key, k, v) for k, v in value.items()]
    return found


def identical(one: list[Any], other: list[Any]) -> bool:
    """Whether two states hold the very same objects under the same names, in the same order."""
    return len(one) == len(other) and all(
        a[:-1] == b[:-1] and a[-1] is b[-1] for a, b in zip(one, other)
    )


def objects() -> Counter[str]:
    """How many objects of each type the garbage collector knows."""
    for _ in range(2):  # the first look makes objects of its own
        gc.collect()
        found = Counter(type(o).__qualname__ for o in gc.get_objects())
    return found


def cycle(model: torch.nn.Module, call: Call | None = None) -> None:
    fpp.apply(model, kernel="sdpa")
    if call is not None:
        with torch.no_grad():
            model(**call.kwargs)
    assert fpp.revert(model)


@pytest.mark.parametrize("family", ["llama", "mistral", "falcon_new"])
def test_a_thousand_cycles_leave_the_identical_objects(build: Build, family: str) -> None:
    model = build(family)
    cycle(model)  # what is made once for all models
    before = state(model)
    for _ in range(CYCLES if family == "llama" else 100):
        cycle(model)
        assert not fpp.is_applied(model)
    assert identical(state(model), before)


def growth(step: Callable[[], Any]) -> int:
    """The bytes that ``CYCLES`` steps keep: what a part of them keeps, in the median, times PARTS.

    Memory that grows with each step grows in each part. What comes once does not count: the
    interpreter's own table of interned strings, in which the paths that ``apply`` reads come and
    go, is built anew after some ten thousand of them, and is then megabytes elsewhere.
    """
    grown = []
    tracemalloc.start(1)
    try:
        for _ in range(20):  # what each step replaces is counted from here on
            step()
        for _ in range(PARTS):
            gc.collect()
            before = tracemalloc.get_traced_memory()[0]
            for _ in range(CYCLES // PARTS):
                step()
            gc.collect()
            grown.append(tracemalloc.get_traced_memory()[0] - before)
    finally:
        tracemalloc.stop()
    return statistics.median_low(grown) * PARTS


def test_a_thousand_cycles_take_no_memory(build: Build) -> None:
    model = build()
    for _ in range(20):
        cycle(model)
    known = objects()
    grown = growth(lambda: cycle(model))
    assert grown < SLACK, f"{grown} bytes"
    more = objects() - known
    assert sum(more.values()) < FEW, more.most_common(5)


@pytest.mark.parametrize("size", [0, 64, 10_000])
def test_what_each_step_keeps_is_growth(size: int) -> None:
    kept = []
    found = growth(lambda: kept.append(bytearray(size)))
    assert found >= CYCLES * max(size, 56) > SLACK


@pytest.mark.parametrize("first", [20, 400, 1015])
def test_what_comes_once_is_no_growth(first: int) -> None:
    """A large table is built anew, elsewhere, in any part of the steps."""
    table, count = [bytearray(4_000_000)], [0]

    def step() -> None:
        count[0] += 1
        if count[0] == first:
            table[0] = bytearray(8_000_000)

    assert growth(step) < SLACK


def test_packed_calls_between_cycles_take_no_memory(build: Build, packed: Call) -> None:
    model = build()
    for _ in range(10):
        cycle(model, packed)
    known = objects()
    for _ in range(100):
        cycle(model, packed)
    more = objects() - known
    assert sum(more.values()) < FEW, more.most_common(5)


def test_a_reverted_patch_is_garbage(build: Build, packed: Call) -> None:
    model = build()
    fpp.apply(model, kernel="sdpa")
    model(**packed.kwargs)
    patch = weakref.ref(model.model._fa2_pack_patch)
    fpp.revert(model)
    gc.collect()
    assert patch() is None


def test_a_patched_model_is_garbage_when_nobody_has_it(build: Build, packed: Call) -> None:
    model = build()
    fpp.apply(model, kernel="sdpa")
    model(**packed.kwargs)
    there = weakref.ref(model)
    del model
    gc.collect()
    assert there() is None


def test_a_thousand_packed_forwards_keep_no_layout(build: Build, packed: Call) -> None:
    model = build()
    fpp.apply(model, kernel="sdpa")
    runs = model.model._fa2_pack_patch.runs
    with torch.no_grad():
        for _ in range(1000):
            model(**packed.kwargs)
    gc.collect()
    assert len(runs._weak) <= len(runs._kept) <= 128


@pytest.mark.parametrize("fault", [ValueError("a step of apply failed"), KeyboardInterrupt()])
def test_cycles_that_fail_leave_nothing(
    build: Build, monkeypatch: pytest.MonkeyPatch, fault: BaseException
) -> None:
    """Every third edit fails, a hundred times."""
    from fa2_pack_patch.patch import Edit

    model = build()
    cycle(model)
    before = state(model)
    commit, count = Edit.commit, [0]

    def failing(self: Edit) -> None:
        count[0] += 1
        if count[0] % 3 == 0:
            raise fault
        commit(self)

    monkeypatch.setattr(Edit, "commit", failing)
    for _ in range(100):
        with pytest.raises(type(fault)):
            fpp.apply(model, kernel="sdpa")
    assert identical(state(model), before)
    assert not fpp.is_applied(model)
