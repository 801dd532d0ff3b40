"""Packing a stream of unknown length through a buffer."""

from __future__ import annotations

import copy
import itertools
from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Callable, Optional

from torch.utils.data import IterableDataset, get_worker_info

from ..errors import PackingError
from .packers import check_choice, check_count
from .samplers import REMAINDERS, replicas


class PackedIterableDataset(IterableDataset):  # type: ignore[type-arg]
    """Lists of examples of a stream, each list of at most ``capacity`` tokens.

    Each list starts with the example that has waited longest and is filled with the longest of the
    buffer that still fit, so none waits forever and none is lost: the buffer is emptied at the end.
    For ``DataLoader(PackedIterableDataset(...), batch_size=None, collate_fn=collator)``.

    Workers of a ``DataLoader`` each take their share: of a ``torch`` or ``datasets``
    ``IterableDataset`` as it divides itself among workers, of any other iterable every n-th
    example. With ``num_replicas`` every process reads the whole stream and takes every n-th list:
    all get as many. For a stream that is divided already, leave it at 1.

    Not for accelerate's ``prepare``, which would cut lists up again: give ``num_replicas`` and
    ``rank`` here.

    Args:
        dataset: an iterable of examples, mappings with ``input_ids``; iterated anew every epoch.
        capacity: tokens of a list at the most.
        buffer_size: examples held back to choose from; more make denser lists.
        length: tokens of an example; by default ``len(example["input_ids"])``.
        max_examples: the most examples in a list.
        too_long: an example above ``capacity``: "error", or "truncate" where the collator cuts to
            ``max_length=capacity`` (it counts as ``capacity`` here).
        num_replicas: processes that share this stream.
        rank: this process's number.
        remainder: when the stream ends with too few examples to give each process a list:
            "repeat" some lists (``repeated`` says how many), "drop" them (``dropped``), or "error".

    Raises:
        PackingError: an example of no tokens or, by default, of more than ``capacity``.
        ValueError: options that do not exist.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        capacity: int,
        *,
        buffer_size: int = 1000,
        length: Optional[Callable[[Any], int]] = None,
        max_examples: Optional[int] = None,
        too_long: str = "error",
        num_replicas: int = 1,
        rank: int = 0,
        remainder: str = "repeat",
    ) -> None:
        super().__init__()
        if iter(dataset) is dataset:
            raise ValueError(
                f"dataset is a {type(dataset).__name__}, which can be read only once; give "
                "something that starts anew each time it is iterated, such as a datasets."
                "IterableDataset.from_generator(...)."
            )
        if too_long not in ("error", "truncate"):
            raise ValueError(f'too_long must be "error" or "truncate", got {too_long!r}.')
        check_choice("remainder", remainder, REMAINDERS)
        check_count("capacity", capacity)
        check_count("buffer_size", buffer_size)
        if max_examples is not None:
            check_count("max_examples", max_examples)
        self.num_replicas, self.rank = replicas(num_replicas, rank)
        self.dataset = dataset
        self.capacity = capacity
        self.buffer_size = buffer_size
        self.length = length or _tokens
        self.max_examples = max_examples
        self.too_long = too_long
        self.remainder = remainder
        self._resume: Optional[dict[str, Any]] = None
        self.repeated = self.dropped = 0
        self._state: dict[str, Any] = _fresh()

    def set_epoch(self, epoch: int) -> None:
        """Passed on to the data set, for its shuffling."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[Any]]:
        self._state, self._resume = self._resume or _fresh(), None
        self._check_split()
        self.repeated = self.dropped = 0
        source = self._source()
        buffer = _Buffer(self.capacity, self.max_examples)
        for example in self._state["buffer"]:
            buffer.add(example, self._size(example, self._state["read"]))
        count = self.num_replicas
        # One group is held back, so that the last lists can be divided among the processes.
        most = count if count == 1 else 2 * count
        group: list[list[Any]] = list(self._state["pending"])
        for held in self._lists(self._read(source), buffer):
            group.append(held)
            if len(group) == most:
                self._note(buffer, group[count:], source)
                yield group[self.rank]
                group = group[count:]
        group = self._completed(group)
        while group:
            self._note(buffer, group[count:], source)
            yield group[self.rank]
            group = group[count:]
        self._state = _fresh()

    def state_dict(self) -> dict[str, Any]:
        """Where the stream is and what the buffer holds; after a list was handed out, and with
        workers for one worker's share (``StatefulDataLoader`` keeps each; here, in the main
        process, nothing is known of what workers did)."""
        return dict(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next pass goes on after the list that the state followed.

        A data set with a ``load_state_dict`` of its own is asked to go on, in the epoch that it was
        in; any other is read again up to where it was. (A ``datasets`` stream loses what is in its
        own shuffle buffer, as it warns.)

        Raises:
            PackingError: when iterated, with other workers or ``num_replicas`` than the state's.
        """
        self._resume = dict(state)

    def _note(self, buffer: _Buffer, pending: list[list[Any]], source: Any) -> None:
        own = getattr(source, "state_dict", None)
        self._state = {
            "read": self._state["read"],
            "buffer": list(buffer.waiting.values()),
            "pending": pending,
            "dataset": own() if own is not None else None,
            "split": self._split(),
        }

    def _split(self) -> tuple[int, int, int]:
        """How the stream is divided: number of processes, workers, this worker's."""
        worker = get_worker_info()
        workers = (worker.num_workers, worker.id) if worker else (0, 0)
        return (self.num_replicas, *workers)

    def _check_split(self) -> None:
        given, mine = self._state.get("split"), self._split()
        if given is not None and tuple(given) != mine:
            names = "(num_replicas, workers, this worker)"
            raise PackingError(
                f"this state is of a stream divided as {names} = {tuple(given)}, this one is "
                f"{mine}; go on with the same num_replicas and num_workers, and with workers "
                "through a StatefulDataLoader, which keeps the state of each."
            )

    def _source(self) -> Any:
        """The data set; to go on in the middle, a copy of it, so that later passes start anew."""
        state = self._state["dataset"]
        if state is None:
            return self.dataset
        source: Any = copy.copy(self.dataset)
        if hasattr(source, "__dict__"):  # the copy of a datasets stream shares the original's
            source.__dict__ = dict(vars(source))
        if isinstance(state, Mapping) and "epoch" in state and hasattr(source, "set_epoch"):
            source.set_epoch(state["epoch"])
        source.load_state_dict(state)
        return source

    def _read(self, source: Any) -> Iterator[Any]:
        """This worker's examples, from where the state is."""
        worker = get_worker_info()
        skip = int(self._state["read"]) if self._state["dataset"] is None else 0
        if not hasattr(source, "__iter__") and hasattr(source, "__len__"):
            source = map(source.__getitem__, range(len(source)))  # it may never raise IndexError
        if worker is not None and not isinstance(source, IterableDataset):
            source = itertools.islice(iter(source), worker.id, None, worker.num_workers)
        return itertools.islice(iter(source), skip, None)

    def _lists(self, examples: Iterator[Any], buffer: _Buffer) -> Iterator[list[Any]]:
        for example in examples:
            size = self._size(example, self._state["read"])
            self._state["read"] += 1
            buffer.add(example, size)
            if len(buffer) > self.buffer_size:
                yield buffer.take()
        while len(buffer):
            yield buffer.take()

    def _size(self, example: Any, at: int) -> int:
        size = int(self.length(example))
        if size < 1:
            raise PackingError(f"example {at} of the stream has {size} tokens; leave it out.")
        if size > self.capacity and self.too_long == "error":
            raise PackingError(
                f"example {at} of the stream has {size} tokens, more than capacity={self.capacity}"
                '; raise the capacity, filter the stream, or pass too_long="truncate".'
            )
        return min(size, self.capacity)

    def _completed(self, group: list[list[Any]]) -> list[list[Any]]:
        """The last lists, those of most examples divided until there is one for each process."""
        missing = -len(group) % self.num_replicas
        for _ in range(missing):
            at = max(range(len(group)), key=lambda n: len(group[n]))
            held = group[at]
            if len(held) == 1:
                return self._uneven(group)
            group = [*group[:at], held[: len(held) // 2], held[len(held) // 2 :], *group[at + 1 :]]
        return group

    def _uneven(self, group: list[list[Any]]) -> list[list[Any]]:
        over = len(group) % self.num_replicas
        if self.remainder == "repeat":
            self.repeated = self.num_replicas - over
            return group + [group[n % len(group)] for n in range(self.repeated)]
        if self.remainder == "drop":
            self.dropped = over
            return group[:-over]
        raise PackingError(
            f"the stream ends with {len(group)} lists that cannot be divided among "
            f"{self.num_replicas} processes (num_replicas); pass remainder="
            '"repeat" to see some twice or "drop" to leave some out.'
        )


def _fresh() -> dict[str, Any]:
    return {"read": 0, "buffer": [], "pending": [], "dataset": None, "split": None}


class _Buffer:
    """Waiting examples by arrival and by size."""

    def __init__(self, capacity: int, most: Optional[int]) -> None:
        self.capacity = capacity
        self.most = most
        self.waiting: dict[int, Any] = {}
        self._sizes: dict[int, int] = {}
        self._sorted: list[tuple[int, int]] = []  # (size, -arrival): of equals the oldest is last
        self._next = 0

    def __len__(self) -> int:
        return len(self.waiting)

    def add(self, example: Any, size: int) -> None:
        self.waiting[self._next] = example
        self._sizes[self._next] = size
        insort(self._sorted, (size, -self._next))
        self._next += 1

    def take(self) -> list[Any]:
        """The oldest, and the longest that fit beside it."""
        oldest = next(iter(self.waiting))
        room = self.capacity - self._sizes[oldest]
        chosen = [oldest]
        self._sorted.remove((self._sizes[oldest], -oldest))
        while room and (self.most is None or len(chosen) < self.most):
            at = bisect_right(self._sorted, (room, 0)) - 1
            if at < 0:
                break
            size, arrival = self._sorted.pop(at)
            chosen.append(-arrival)
            room -= size
        for arrival in chosen:
            del self._sizes[arrival]
        return [self.waiting.pop(arrival) for arrival in sorted(chosen)]


def _tokens(example: Any) -> int:
    return len(example["input_ids"])
