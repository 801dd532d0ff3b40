"""Which examples share a packed row: bin packing of lengths, in tokens.

Best-fit decreasing puts the longest example that is left into the fullest bin that still takes it;
it needs at most 11/9 of the fewest possible bins, plus four (Johnson, Demers, Ullman, Garey,
Graham, "Worst-case performance bounds for simple one-dimensional packing algorithms", SIAM J.
Comput. 3, 1974). Equal lengths are placed together, so that a million take about a second.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Optional, Union

import numpy as np
import numpy.typing as npt

from ..errors import PackingError
from ..tensors import quote

Ints = npt.NDArray[np.int64]
Lengths = Union[Sequence[int], npt.NDArray[Any]]

STRATEGIES = ("bfd", "next_fit", "balanced")
TOO_LONG = ("error", "truncate", "split")
#: "balanced" spreads lengths above capacity / 16; shorter ones hardly count and fill what is left.
_LIGHT = 16


class Piece(NamedTuple):
    """Tokens ``start`` to ``stop`` of the example of that index, longer than the capacity."""

    example: int
    start: int
    stop: int


def pack_lengths(
    lengths: Lengths,
    capacity: int,
    strategy: str = "bfd",
    *,
    max_examples: Optional[int] = None,
    ranks: int = 1,
    too_long: str = "error",
) -> list[list[Any]]:
    """Bins of examples, none with more than ``capacity`` tokens; every example is in one of them.

    The same arguments give the same bins.

    Args:
        lengths: tokens of each example, positive integers.
        capacity: tokens a bin may hold.
        strategy: "bfd", best-fit decreasing over all lengths: the fewest bins. "next_fit": in the
            order given, a new bin whenever an example does not fit. "balanced": about as many
            bins as "bfd", with the attention cost (the sum of squared lengths) spread evenly.
        max_examples: the most examples in a bin, for batches of a static shape.
        ranks: processes that take one bin each a step, out of ``ranks`` consecutive ones. Their
            number is made a multiple of it by dividing bins, and all but "next_fit" order them so
            that those of a step cost about the same.
        too_long: what becomes of an example longer than ``capacity``: "error"; "truncate", it
            counts as ``capacity`` tokens (cut it when it is read); "split", into pieces of
            ``capacity`` tokens and a rest.

    Returns:
        For each bin the indices of its examples, ascending; where an example was split,
        ``Piece(example, start, stop)`` in place of its index.

    Raises:
        PackingError: a length that is no positive integer or, by default, above ``capacity``; too
            few examples to make the number of bins a multiple of ``ranks``.
        ValueError: options that do not exist.
    """
    check_choice("too_long", too_long, TOO_LONG)
    sizes = check_lengths(lengths)
    check_count("capacity", capacity)
    names: Optional[list[Any]] = None
    if too_long == "truncate":
        sizes = np.minimum(sizes, capacity)
    elif too_long == "split" and len(sizes) and sizes.max() > capacity:
        names = _pieces(sizes, capacity)
        sizes = np.array([n.stop - n.start if isinstance(n, Piece) else sizes[n] for n in names])
    bins = pack_arrays(sizes, capacity, strategy, max_examples=max_examples, ranks=ranks)
    if len(bins) % ranks:
        raise PackingError(
            f"{len(sizes)} examples make {len(bins)} bins that cannot be divided into a multiple "
            f"of ranks={ranks}; give more examples, fewer ranks, or a larger capacity than "
            f"{capacity}."
        )
    if names is None:
        return [held.tolist() for held in bins]
    return [[names[at] for at in held.tolist()] for held in bins]


def density(bins: Iterable[Sequence[Any]], lengths: Lengths, capacity: int) -> float:
    """The share of the bins' tokens that examples fill, above 0 and at most 1.

    Args:
        bins: as :func:`pack_lengths` returns them.
        lengths: tokens of each example; longer ones count as ``capacity``.
        capacity: tokens of a bin.
    """
    sizes = np.minimum(check_lengths(lengths), capacity)
    total = count = 0
    for held in bins:
        count += 1
        total += sum(h.stop - h.start if isinstance(h, Piece) else int(sizes[h]) for h in held)
    if not count:
        raise PackingError(
            "got no bins, of which there is no density; give what pack_lengths returned."
        )
    return total / (count * capacity)


def pack_arrays(
    sizes: Ints,
    capacity: int,
    strategy: str = "bfd",
    *,
    max_examples: Optional[int] = None,
    ranks: int = 1,
) -> list[Ints]:
    """:func:`pack_lengths` of checked sizes; the number of bins is a multiple of ``ranks`` only if
    there are examples enough."""
    check_choice("strategy", strategy, STRATEGIES)
    check_count("capacity", capacity)
    check_count("ranks", ranks)
    if max_examples is not None:
        check_count("max_examples", max_examples)
    if not len(sizes):
        return []
    if sizes.max() > capacity:
        over = np.flatnonzero(sizes > capacity)
        raise PackingError(
            f"{len(over)} of {len(sizes)} examples are longer than capacity={capacity} tokens: "
            f"examples {quote(over.tolist())} of {quote(sizes[over].tolist())} tokens. Raise the "
            'capacity, leave them out, or pass too_long="truncate" or too_long="split".'
        )
    most = max_examples or len(sizes)
    if strategy == "next_fit":
        found = _next_fit(sizes, capacity, most)
    else:
        order = np.argsort(-sizes, kind="stable")
        where = _best_fit(sizes[order], capacity, most)
        if strategy == "balanced":
            bins = int(where.max()) + 1
            where = _balanced(sizes[order], capacity, most, bins + -bins % ranks)
        found = np.empty(len(sizes), dtype=np.int64)
        found[order] = where
    result = _grouped(found)
    if ranks > 1:
        result = _divided(result, sizes, ranks)
        if strategy != "next_fit":
            result = _by_cost(result, sizes)
    return result


def check_lengths(lengths: Lengths) -> Ints:
    """The lengths as int64; refuses what is no positive integer."""
    try:
        given = np.asarray(lengths)
    except ValueError:  # lists of several lengths
        given = np.empty(0, dtype=object)
    if given.dtype == object or given.ndim > 1:
        raise PackingError(
            "lengths must be a list or array of one integer for each example, got a "
            f"{type(lengths).__name__}{_first(lengths)}; of a column of token ids, give "
            "[len(ids) for ids in column]."
        )
    if given.size == 0:
        return np.zeros(0, dtype=np.int64)
    if given.ndim != 1 or given.dtype.kind not in "iu":
        raise PackingError(
            f"lengths must be one-dimensional integers, got {given.dtype} of shape {given.shape}: "
            f"{quote(given.tolist())}."
        )
    sizes = given.astype(np.int64)
    if sizes.min() < 1:
        bad = np.flatnonzero(sizes < 1)
        raise PackingError(
            f"lengths must be positive, but examples {quote(bad.tolist())} have "
            f"{quote(sizes[bad].tolist())} tokens; leave out empty examples."
        )
    return sizes


def _first(values: Any) -> str:
    """The shape of an array, or the first of other values, in words."""
    if hasattr(values, "shape"):
        return f" of shape {tuple(values.shape)}"
    first = values[0] if isinstance(values, Sequence) and values else None
    return "" if first is None else f" that starts with a {type(first).__name__}: {quote(first)}"


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Refuses what is none of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {list(choices)}, got {value!r}.")


def check_count(name: str, value: object) -> None:
    """Refuses what is no positive integer."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}.")


def _pieces(sizes: Ints, capacity: int) -> list[Any]:
    names: list[Any] = []
    for index, size in enumerate(sizes.tolist()):
        if size <= capacity:
            names.append(index)
            continue
        cuts = [*range(0, size, capacity), size]
        names += [Piece(index, a, b) for a, b in zip(cuts, cuts[1:])]
    return names


def _next_fit(sizes: Ints, capacity: int, most: int) -> Ints:
    found, at, room, held = [], 0, capacity, 0
    for size in sizes.tolist():
        if size > room or held == most:
            at, room, held = at + 1, capacity, 0
        found.append(at)
        room -= size
        held += 1
    return np.array(found, dtype=np.int64)


class _Rooms:
    """Open bins by the room that they have left, those of equal room and count together."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.groups: dict[int, list[tuple[Ints, int]]] = {}

    def put(self, room: int, bins: Ints, held: int) -> None:
        if room and len(bins):
            if room not in self.groups:
                insort(self.sizes, room)
                self.groups[room] = []
            self.groups[room].append((bins, held))

    def take(self, size: int) -> Optional[tuple[int, Ints, int]]:
        """A group of the least room that takes ``size``."""
        at = bisect_left(self.sizes, size)
        if at == len(self.sizes):
            return None
        room = self.sizes[at]
        bins, held = self.groups[room].pop()
        if not self.groups[room]:
            del self.groups[room], self.sizes[at]
        return room, bins, held


def _best_fit(
    descending: Ints, capacity: int, most: int, rooms: Optional[_Rooms] = None, used: int = 0
) -> Ints:
    """The bin of each size, best fit: into ``rooms`` first, new bins count from ``used``."""
    rooms = _Rooms() if rooms is None else rooms
    where = np.empty(len(descending), dtype=np.int64)
    values, firsts, counts = np.unique(-descending, return_index=True, return_counts=True)
    for value, first, count in zip(values.tolist(), firsts.tolist(), counts.tolist()):
        size, at, end = -value, first, first + count
        while at < end:
            group = rooms.take(size)
            if group is None:
                each = min(capacity // size, most)
                fresh = np.arange(used, used - (at - end) // each, dtype=np.int64)
                used += len(fresh)
                group = capacity, fresh, 0
            room, bins, held = group
            each = min(room // size, most - held)
            full, rest = min((end - at) // each, len(bins)), 0
            where[at : at + full * each] = np.repeat(bins[:full], each)
            at += full * each
            if held + each < most:
                rooms.put(room - each * size, bins[:full], held + each)
            if full < len(bins):
                rest = end - at
                where[at:end] = bins[full]
                rooms.put(room - rest * size, bins[full : full + 1], held + rest)
                rooms.put(room, bins[full + 1 :], held)
                at = end
    return where


def _balanced(descending: Ints, capacity: int, most: int, bins: int) -> Ints:
    """Longest first into the bin of least cost that takes it; light ones by best fit at the end."""
    heavy = int(np.searchsorted(-descending, -(capacity // _LIGHT), side="right"))
    where = np.empty(len(descending), dtype=np.int64)
    room, held = [capacity] * bins, [0] * bins
    heap = [(0, at) for at in range(bins)]
    waiting: list[tuple[int, int, int]] = []  # too full now, by their room for what is shorter
    used = bins
    for item, size in enumerate(descending[:heavy].tolist()):
        while waiting and -waiting[0][0] >= size:
            _, at, cost = heapq.heappop(waiting)
            heapq.heappush(heap, (cost, at))
        while heap and (room[heap[0][1]] < size or held[heap[0][1]] == most):
            cost, at = heapq.heappop(heap)
            if held[at] < most:
                heapq.heappush(waiting, (-room[at], at, cost))
        if heap:
            cost, at = heap[0]
            heapq.heapreplace(heap, (cost + size * size, at))
        else:
            at, used = used, used + 1
            room.append(capacity)
            held.append(0)
            heapq.heappush(heap, (size * size, at))
        where[item] = at
        room[at] -= size
        held[at] += 1
    rooms = _Rooms()
    groups: dict[tuple[int, int], list[int]] = {}
    for at in range(used):
        if held[at] < most:
            groups.setdefault((room[at], held[at]), []).append(at)
    for (left, count), members in groups.items():
        rooms.put(left, np.array(members, dtype=np.int64), count)
    where[heavy:] = _best_fit(descending[heavy:], capacity, most, rooms, used)
    return np.unique(where, return_inverse=True)[1].reshape(-1).astype(np.int64)


def _grouped(where: Ints) -> list[Ints]:
    """The indices of each bin, ascending, from the bin of each index."""
    order = np.argsort(where, kind="stable")
    ends = np.cumsum(np.bincount(where)).tolist()
    return [order[a:b] for a, b in zip([0, *ends], ends)]


def _divided(bins: list[Ints], sizes: Ints, ranks: int) -> list[Ints]:
    """Cuts the bins of most examples in two until their number is a multiple of ``ranks``."""
    missing = -len(bins) % ranks
    if not missing or sum(map(len, bins)) < len(bins) + missing:
        return bins
    parts: dict[int, list[Ints]] = {}
    heap = [(-len(held), at, 0) for at, held in enumerate(bins)]
    heapq.heapify(heap)
    for _ in range(missing):
        _, at, part = heapq.heappop(heap)
        pieces = parts.setdefault(at, [bins[at]])
        held = pieces[part]
        half = max(1, int(np.searchsorted(np.cumsum(sizes[held]), sizes[held].sum() / 2)))
        half = min(half, len(held) - 1)
        pieces[part : part + 1] = [held[:half]]
        pieces.append(held[half:])
        heapq.heappush(heap, (-half, at, part))
        heapq.heappush(heap, (half - len(held), at, len(pieces) - 1))
    return [piece for at, held in enumerate(bins) for piece in parts.get(at, [held])]


def _by_cost(bins: list[Ints], sizes: Ints) -> list[Ints]:
    """The dearest first, so that neighbours cost about the same."""
    costs = np.array([int((sizes[held] ** 2).sum()) for held in bins])
    return [bins[at] for at in np.argsort(-costs, kind="stable").tolist()]
