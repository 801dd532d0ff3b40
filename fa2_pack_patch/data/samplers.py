"""Batch samplers that fill a token budget, for map-style data sets; on one process or many."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, Optional

import numpy as np
import torch
from torch.utils.data import Sampler

from ..errors import PackingError
from .packers import Ints, Lengths, check_choice, check_count, check_lengths, pack_arrays

REMAINDERS = ("error", "repeat", "drop")


class PackedBatchSampler(Sampler):  # type: ignore[type-arg]
    """Lists of indices whose examples have at most ``capacity`` tokens together.

    For ``DataLoader(dataset, batch_sampler=..., collate_fn=DataCollatorWithFlattening())``: each
    batch is one packed row. Every epoch sees every example once, packed anew from another
    permutation; ``set_epoch`` chooses the epoch, and without it each full pass goes on to the next
    (``list(sampler)`` is one; to look at an epoch without taking it, there is :meth:`batches`).

    For accelerate's ``prepare`` (which gives process ``r`` of ``n`` every n-th batch), pass
    ``multiple_of=accelerator.num_processes``: then nothing is repeated, and the batches of a step
    cost about the same.

    Args:
        lengths: tokens of each example, in the order of the data set.
        capacity: tokens of a batch at the most.
        strategy: see :func:`pack_lengths`; "next_fit" keeps the (shuffled) order.
        shuffle: another order of examples and batches every epoch.
        seed: of the permutation; the same on all processes.
        max_examples: the most examples in a batch, for static shapes.
        multiple_of: make the number of batches a multiple of this by dividing some of them;
            ``divided`` says how many more batches that made.
        too_long: "error", or "truncate" where the collator cuts to ``max_length=capacity``.
        remainder: what to do when there are too few examples to divide: "error"; "repeat" the
            first batches of the epoch (``repeated`` says how many); or "drop" the last ones
            (``dropped``).

    Raises:
        PackingError: lengths that cannot be packed; a state of other lengths or options.
        ValueError: options that do not exist.
    """

    #: What accelerate and Trainer ask a batch sampler for; batches are of no fixed size.
    batch_size: Optional[int] = None
    drop_last = False

    def __init__(
        self,
        lengths: Lengths,
        capacity: int,
        *,
        strategy: str = "bfd",
        shuffle: bool = True,
        seed: int = 0,
        max_examples: Optional[int] = None,
        multiple_of: int = 1,
        too_long: str = "error",
        remainder: str = "error",
    ) -> None:
        if too_long not in ("error", "truncate"):
            raise ValueError(
                f'too_long must be "error" or "truncate", got {too_long!r}; to split examples, '
                'split them in the data set, by pack_lengths(..., too_long="split").'
            )
        check_choice("remainder", remainder, REMAINDERS)
        check_count("capacity", capacity)
        check_count("multiple_of", multiple_of)
        if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed < 0:
            raise ValueError(f"seed must be a non-negative integer, got {seed!r}.")
        self.lengths = check_lengths(lengths)
        if not len(self.lengths):
            raise PackingError("got no lengths; give the number of tokens of at least one example.")
        if too_long == "truncate":
            self.lengths = np.minimum(self.lengths, capacity)
        self.capacity = capacity
        self.strategy = strategy
        self.shuffle = shuffle
        self.seed = seed
        self.max_examples = max_examples
        self.multiple_of = multiple_of
        self.remainder = remainder
        self.epoch = 0
        self.divided = self.repeated = self.dropped = 0
        self._resume_at = 0
        self._given = 0
        self._loaded = False  # a state waits for its pass
        self._ended: Optional[int] = None  # the epoch of the last pass, if all of it was taken
        self._packed: Optional[tuple[int, list[Ints]]] = None
        self._bins()  # refuses what cannot be packed here and not in a worker's traceback

    @property
    def sampler(self) -> PackedBatchSampler:
        """Itself: releases of accelerate look here for ``set_epoch``."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """The epoch that the next pass is of; its permutation follows from seed and epoch.

        Raises:
            PackingError: another epoch than that of a state that was loaded and not gone on from.
        """
        epoch = int(epoch)
        if epoch != self.epoch:
            if self._loaded:
                raise PackingError(
                    f"set_epoch({epoch}) would throw away the loaded state, which goes on at batch "
                    f"{self._resume_at} of epoch {self.epoch}. A loader prepared by accelerate "
                    "counts epochs from 0 by itself: call loader.set_epoch(sampler.epoch) after "
                    "load_state_dict."
                )
            self._resume_at = self._given = 0
        self.epoch, self._ended = epoch, None

    def __len__(self) -> int:
        """Batches of this epoch on this process ("next_fit" shuffled: epochs differ)."""
        return len(self._mine())

    def __iter__(self) -> Iterator[list[int]]:
        batches, at = self._mine(), self._resume_at
        epoch, self._resume_at = self.epoch, 0
        self._loaded, self._ended = False, None
        for number in range(at, len(batches)):
            self._given = number + 1
            yield batches[number].tolist()
        if self.epoch == epoch:
            self.epoch, self._given, self._ended = epoch + 1, 0, epoch

    def batches(self) -> list[list[int]]:
        """All of this process's batches of this epoch, to look at: the next pass stays as it is."""
        return [held.tolist() for held in self._mine()]

    @property
    def density(self) -> float:
        """The share of this epoch's token budget (of all processes) that examples fill."""
        bins = self._bins()
        return float(sum(int(self.lengths[b].sum()) for b in bins) / (len(bins) * self.capacity))

    def state_dict(self, *, consumed: Optional[int] = None) -> dict[str, Any]:
        """What :meth:`load_state_dict` goes on from.

        Args:
            consumed: batches of this epoch that training has finished, those before a resume
                counted. By default those that were taken from the sampler; a ``DataLoader`` with
                workers takes some ahead, and one prepared by accelerate one more
                (``StatefulDataLoader`` accounts for them itself).
        """
        epoch, batch = self.epoch, self._given if consumed is None else int(consumed)
        if consumed and self._ended is not None:
            epoch = self._ended  # the loader has taken the last batches ahead of training
        return {"epoch": epoch, "batch": batch, "fingerprint": self._fingerprint()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next pass is the rest of the epoch that the state is from."""
        missing = sorted({"epoch", "batch", "fingerprint"} - set(state))
        if missing:
            raise PackingError(
                f"this state has no {missing}, only {sorted(state)}; give what a sampler's "
                "state_dict() returned."
            )
        if state["fingerprint"] != self._fingerprint():
            raise PackingError(
                f"this state is of a sampler with fingerprint {state['fingerprint']}, this one has "
                f"{self._fingerprint()}: lengths, capacity, strategy, seed, shuffle, max_examples "
                "and the number of processes must be those of the run that is resumed."
            )
        self.epoch = int(state["epoch"])
        self._resume_at = self._given = int(state["batch"])
        self._loaded, self._ended = True, None

    def _fingerprint(self) -> str:
        options = (
            self.capacity,
            self.strategy,
            self.shuffle,
            self.seed,
            self.max_examples,
            self.multiple_of,
            self.remainder,
        )
        found = hashlib.sha256(self.lengths.tobytes())
        found.update(repr(options).encode())
        return found.hexdigest()[:16]

    def _mine(self) -> list[Ints]:
        """This process's batches."""
        return self._bins()

    def _bins(self) -> list[Ints]:
        """All processes' batches of this epoch; packed once an epoch."""
        if self._packed is None or self._packed[0] != self.epoch:
            self._packed = self.epoch, self._pack()
        return self._packed[1]

    def _pack(self) -> list[Ints]:
        count, step = len(self.lengths), self.multiple_of
        order = np.arange(count)
        random = np.random.default_rng([self.seed, self.epoch])
        if self.shuffle:
            order = random.permutation(count)
        sizes = self.lengths[order]

        def pack(ranks: int) -> list[Ints]:
            return pack_arrays(
                sizes, self.capacity, self.strategy, max_examples=self.max_examples, ranks=ranks
            )

        bins = pack(step)
        self.divided = len(bins) - len(pack(1)) if step > 1 else 0
        bins = self._even(bins)
        if self.shuffle and self.strategy != "next_fit":
            starts = random.permutation(len(bins) // step) * step
            bins = [bins[start + rank] for start in starts.tolist() for rank in range(step)]
        return [order[held] for held in bins]

    def _even(self, bins: list[Ints]) -> list[Ints]:
        """A multiple of the processes, where examples were too few to make it by dividing."""
        over = len(bins) % self.multiple_of
        self.repeated = self.dropped = 0
        if not over:
            return bins
        if self.remainder == "repeat":
            self.repeated = self.multiple_of - over
            return bins + [bins[n % len(bins)] for n in range(self.repeated)]
        if self.remainder == "drop" and len(bins) > over:
            self.dropped = over
            return bins[:-over]
        raise PackingError(
            f"{len(self.lengths)} examples make {len(bins)} batches, which cannot be divided into "
            f"a multiple of {self.multiple_of} processes; pass remainder="
            '"repeat" to see some batches twice an epoch or "drop" to leave some out, or raise '
            f"capacity={self.capacity}."
        )


class DistributedPackedBatchSampler(PackedBatchSampler):
    """:class:`PackedBatchSampler` for one of several processes.

    Every process computes the same batches and takes one of each ``num_replicas`` consecutive
    ones, so that all have as many, and those of a step cost about the same. Do not pass its loader
    to accelerate's ``prepare``, which would divide the batches again.

    Args:
        lengths: as in :class:`PackedBatchSampler`; the same on every process.
        capacity: tokens of one process's batch at the most.
        num_replicas: processes; by default those of ``torch.distributed``.
        rank: this process's number.
        options: all others of :class:`PackedBatchSampler` but ``multiple_of``.

    Raises:
        ValueError: without ``torch.distributed``, ``num_replicas`` or ``rank`` missing; a rank
            out of range.
    """

    def __init__(
        self,
        lengths: Lengths,
        capacity: int,
        *,
        num_replicas: Optional[int] = None,
        rank: Optional[int] = None,
        **options: Any,
    ) -> None:
        if "multiple_of" in options:
            raise ValueError(
                f"multiple_of is num_replicas here, got multiple_of={options['multiple_of']!r}; "
                "leave it out."
            )
        self.num_replicas, self.rank = replicas(num_replicas, rank)
        super().__init__(lengths, capacity, multiple_of=self.num_replicas, **options)

    def _mine(self) -> list[Ints]:
        return self._bins()[self.rank :: self.num_replicas]


def replicas(num_replicas: Optional[int], rank: Optional[int]) -> tuple[int, int]:
    """Number of processes and this one's, from ``torch.distributed`` where not given."""
    distributed = torch.distributed
    ready = distributed.is_available() and distributed.is_initialized()
    if (num_replicas is None or rank is None) and not ready:
        raise ValueError(
            f"num_replicas={num_replicas!r} and rank={rank!r}: torch.distributed is not "
            "initialized, so give both, or call torch.distributed.init_process_group first."
        )
    count = distributed.get_world_size() if num_replicas is None else num_replicas
    mine = distributed.get_rank() if rank is None else rank
    check_count("num_replicas", count)
    if isinstance(mine, bool) or not isinstance(mine, int) or not 0 <= mine < count:
        raise ValueError(f"rank must be an integer from 0 to {count - 1}, got {mine!r}.")
    return count, mine
