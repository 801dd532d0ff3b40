"""Milliseconds of single calls, taking turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from .measure import Deadline

_CYCLES_A_MS = 1_800_000  # of the device; its clock is near 1.8 GHz


def turns(
    calls: dict[str, Callable[[], object]],
    deadline: Deadline,
    *,
    repeats: int = 15,
    inner: int = 4,
    warm: int = 2,
    ahead_ms: float = 0.0,
) -> dict[str, float]:
    """Median milliseconds of each call, by device events on a GPU.

    ``inner`` calls follow each other between two events, so that launches overlap the device; the
    calls take turns, and stop at the deadline (one turn at least). With ``ahead_ms`` the device is
    kept busy for about so long before the first event: calls launched meanwhile run back to back,
    and what is timed is the device alone, however slowly the host launches.
    """
    for call in calls.values():
        for _ in range(warm):
            call()
    found: dict[str, list[float]] = {name: [] for name in calls}
    for n in range(repeats):
        if n and deadline.left() < 0:
            break
        for name, call in calls.items():
            found[name].append(_once(call, inner, ahead_ms))
    return {name: statistics.median(times) for name, times in found.items()}


def _once(call: Callable[[], object], inner: int, ahead_ms: float) -> float:
    if not torch.cuda.is_available():
        began = time.perf_counter()
        for _ in range(inner):
            call()
        return 1000 * (time.perf_counter() - began) / inner
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    if ahead_ms:
        torch.cuda._sleep(int(ahead_ms * _CYCLES_A_MS))
    start.record()  # type: ignore[no-untyped-call]
    for _ in range(inner):
        call()
    end.record()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / inner
