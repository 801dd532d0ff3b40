"""Batch samplers: a token budget, every example once an epoch, on one process or many."""

from __future__ import annotations

import random
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from fa2_pack_patch import PackingError
from fa2_pack_patch.data import (
    DataCollatorWithFlattening,
    DistributedPackedBatchSampler,
    PackedBatchSampler,
)

CAPACITY = 64
LENGTHS = [random.Random(at).choice([3, 5, 9, 17, 40, 64]) for at in range(203)]


class Examples(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """A map-style data set whose token is its index."""

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, at: int) -> dict[str, Any]:
        return {"input_ids": [at] * LENGTHS[at]}


def everyone(batches: list[list[int]], count: int = len(LENGTHS)) -> bool:
    return sorted(at for batch in batches for at in batch) == list(range(count))


def whole_and_resumed(loader: Callable[[], Any]) -> tuple[list[Any], list[Any]]:
    """All that a stateful loader gives, and what another gives from the state of six of them on."""
    whole = list(loader())
    first = loader()
    iterator = iter(first)
    for _ in range(6):
        next(iterator)
    state = first.state_dict()
    del iterator
    second = loader()
    second.load_state_dict(state)
    return whole, list(second)


def distributed(rank: int, count: int = 3, **options: Any) -> DistributedPackedBatchSampler:
    return DistributedPackedBatchSampler(
        options.pop("lengths", LENGTHS), CAPACITY, num_replicas=count, rank=rank, **options
    )


@pytest.mark.parametrize("strategy", ["bfd", "next_fit", "balanced"])
def test_every_epoch_has_every_example_once(strategy: str) -> None:
    sampler = PackedBatchSampler(LENGTHS, CAPACITY, strategy=strategy)
    epochs = []
    for _ in range(2):
        length = len(sampler)
        epochs.append(list(sampler))
        assert len(epochs[-1]) == length and everyone(epochs[-1])
        assert all(sum(LENGTHS[at] for at in batch) <= CAPACITY for batch in epochs[-1])
    assert epochs[0] != epochs[1] and sampler.epoch == 2


def test_an_epoch_follows_from_the_seed() -> None:
    one, two = PackedBatchSampler(LENGTHS, CAPACITY), PackedBatchSampler(LENGTHS, CAPACITY)
    list(one)
    two.set_epoch(1)
    assert list(one) == list(two)
    other = PackedBatchSampler(LENGTHS, CAPACITY, seed=1)
    other.set_epoch(1)
    one.set_epoch(1)
    assert list(one) != list(other)


def test_a_look_at_the_batches_is_no_pass() -> None:
    """A process that looks at its batches alone must not go on to another epoch than the others."""
    ranks = [distributed(rank) for rank in range(3)]
    looked = ranks[1].batches()
    state = ranks[1].state_dict()
    assert ranks[1].epoch == 0 and ranks[1].batches() == looked
    assert (state["epoch"], state["batch"]) == (0, 0)
    passes = [list(rank) for rank in ranks]
    assert passes[1] == looked
    assert everyone([batch for mine in passes for batch in mine])
    started = iter(ranks[1])
    first = next(started)
    assert ranks[1].batches()[0] == first and ranks[1].state_dict()["batch"] == 1


def test_without_shuffling_all_epochs_are_one() -> None:
    sampler = PackedBatchSampler(LENGTHS, CAPACITY, shuffle=False, strategy="next_fit")
    first = list(sampler)
    assert first == list(sampler)
    assert [at for batch in first for at in batch] == list(range(len(LENGTHS)))


@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize("strategy", ["bfd", "next_fit", "balanced"])
def test_ranks_have_as_many_batches_and_share_all_examples(strategy: str, count: int) -> None:
    ranks = [distributed(rank, count, strategy=strategy) for rank in range(count)]
    for _ in range(2):
        batches = [list(rank) for rank in ranks]
        assert len({len(b) for b in batches}) == 1
        assert everyone([batch for mine in batches for batch in mine])
    alone = PackedBatchSampler(LENGTHS, CAPACITY, strategy=strategy)
    whole = len(list(alone))
    if strategy == "bfd":
        assert ranks[0].divided == -whole % count
    assert ranks[0].dropped == ranks[0].repeated == 0


def test_ranks_of_a_step_cost_about_the_same() -> None:
    batches = [list(distributed(rank, 4)) for rank in range(4)]
    costs = torch.tensor(
        [[float(sum(LENGTHS[at] ** 2 for at in b)) for b in mine] for mine in batches]
    )
    assert costs.max(0).values.sum() < 1.1 * costs.mean(0).sum()


def test_too_few_examples_to_divide() -> None:
    lengths = [60] * 7
    with pytest.raises(PackingError, match=r'7 examples make 7 batches.* 3 processes.*"repeat"'):
        distributed(0, lengths=lengths)
    repeat = [distributed(rank, lengths=lengths, remainder="repeat") for rank in range(3)]
    batches = [batch for rank in repeat for batch in rank]
    assert len(batches) == 9 and {at for b in batches for at in b} == set(range(7))
    assert repeat[0].repeated == 2
    drop = [distributed(rank, lengths=lengths, remainder="drop") for rank in range(3)]
    assert [len(list(rank)) for rank in drop] == [2, 2, 2] and drop[0].dropped == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_in_a_loader(workers: int) -> None:
    sampler = PackedBatchSampler(LENGTHS, CAPACITY)
    loader = DataLoader(
        Examples(),
        batch_sampler=sampler,
        collate_fn=DataCollatorWithFlattening(),
        num_workers=workers,
    )
    assert len(loader) == len(sampler)
    rows = [batch["input_ids"] for batch in loader]
    assert all(row.shape[0] == 1 and row.shape[1] <= CAPACITY for row in rows)
    counts = torch.bincount(torch.cat(rows, 1)[0], minlength=len(LENGTHS))
    assert counts.tolist() == LENGTHS


def test_resumed_in_the_middle_of_an_epoch() -> None:
    whole = PackedBatchSampler(LENGTHS, CAPACITY)
    list(whole)
    second, third = list(whole), list(whole)
    stopped = PackedBatchSampler(LENGTHS, CAPACITY)
    list(stopped)
    iterator = iter(stopped)
    taken = [next(iterator) for _ in range(5)]
    resumed = PackedBatchSampler(LENGTHS, CAPACITY)
    resumed.load_state_dict(stopped.state_dict())
    assert taken == second[:5]
    assert list(resumed) == second[5:]
    assert list(resumed) == third
    early = PackedBatchSampler(LENGTHS, CAPACITY)
    early.load_state_dict(stopped.state_dict(consumed=3))  # two were read ahead
    assert list(early) == second[3:]


@pytest.mark.parametrize("persistent", [False, True])
def test_the_state_of_a_loader_that_has_taken_all_batches_ahead(persistent: bool) -> None:
    sampler = PackedBatchSampler(LENGTHS, CAPACITY)
    loader = DataLoader(
        Examples(),
        batch_sampler=sampler,
        collate_fn=DataCollatorWithFlattening(),
        num_workers=2,
        persistent_workers=persistent,
    )
    wanted = PackedBatchSampler(LENGTHS, CAPACITY)
    for _ in range(2):
        whole = list(wanted)
        states = [sampler.state_dict(consumed=at) for at, _ in enumerate(loader, 1)]
        for at in (1, len(whole) - 1, len(whole)):
            resumed = PackedBatchSampler(LENGTHS, CAPACITY)
            resumed.load_state_dict(states[at - 1])
            assert list(resumed) == whole[at:]


def test_a_loaded_state_is_not_thrown_away() -> None:
    stopped = PackedBatchSampler(LENGTHS, CAPACITY)
    whole, second = list(stopped), list(stopped)
    stopped.set_epoch(1)
    resumed = PackedBatchSampler(LENGTHS, CAPACITY)
    resumed.load_state_dict(stopped.state_dict(consumed=5))
    with pytest.raises(PackingError, match=r"set_epoch\(0\) .* batch 5 of epoch 1"):
        resumed.set_epoch(0)
    resumed.set_epoch(1)
    assert list(resumed) == second[5:]
    resumed.set_epoch(0)
    assert list(resumed) == whole


def test_resumed_in_a_loader_prepared_by_accelerate() -> None:
    accelerate = pytest.importorskip("accelerate.data_loader")
    state = {**PackedBatchSampler(LENGTHS, CAPACITY).state_dict(), "epoch": 1, "batch": 5}
    sampler = PackedBatchSampler(LENGTHS, CAPACITY)
    loader = accelerate.prepare_data_loader(
        DataLoader(Examples(), batch_sampler=sampler, collate_fn=DataCollatorWithFlattening()),
        put_on_device=False,
    )
    sampler.load_state_dict(state)
    with pytest.raises(PackingError, match=r"loader\.set_epoch\(sampler\.epoch\)"):
        next(iter(loader))
    loader.set_epoch(sampler.epoch)
    wanted = PackedBatchSampler(LENGTHS, CAPACITY)
    list(wanted)
    seen = [sorted(set(batch["input_ids"][0].tolist())) for batch in loader]
    assert seen == [sorted(batch) for batch in list(wanted)[5:]]
    assert {t for batch in loader for t in batch["input_ids"][0].tolist()} == set(range(203))


def test_a_broken_off_epoch_starts_again() -> None:
    sampler = PackedBatchSampler(LENGTHS, CAPACITY)
    first = [batch for batch, _ in zip(sampler, range(3))]
    again = list(sampler)
    assert again[:3] == first and everyone(again)


def test_the_state_after_an_epoch_is_the_next_one_s() -> None:
    sampler = PackedBatchSampler(LENGTHS, CAPACITY)
    list(sampler)
    state = sampler.state_dict()
    assert (state["epoch"], state["batch"]) == (1, 0)


@pytest.mark.parametrize(
    "options", [{"seed": 3}, {"strategy": "balanced"}, {"multiple_of": 2}, {"shuffle": False}]
)
def test_a_state_of_another_sampler_is_refused(options: Any) -> None:
    state = PackedBatchSampler(LENGTHS, CAPACITY).state_dict()
    with pytest.raises(PackingError, match=r"lengths, capacity, strategy, seed"):
        PackedBatchSampler(LENGTHS, CAPACITY, **options).load_state_dict(state)
    with pytest.raises(PackingError, match="fingerprint"):
        PackedBatchSampler(LENGTHS[:-1], CAPACITY).load_state_dict(state)


def test_a_state_of_something_else_is_refused() -> None:
    with pytest.raises(PackingError, match=r"no \['batch', 'fingerprint'\], only \['epoch'"):
        PackedBatchSampler(LENGTHS, CAPACITY).load_state_dict({"epoch": 1, "step": 3})


@pytest.mark.parametrize("workers", [0, 2])
def test_in_a_stateful_loader(workers: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def loader() -> Any:
        return stateful.StatefulDataLoader(
            Examples(),
            batch_sampler=PackedBatchSampler(LENGTHS, CAPACITY),
            collate_fn=DataCollatorWithFlattening(),
            num_workers=workers,
        )

    whole, rest = whole_and_resumed(loader)
    assert [b["input_ids"].tolist() for b in rest] == [b["input_ids"].tolist() for b in whole[6:]]


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_accelerate_neither_cuts_nor_repeats(processes: int) -> None:
    accelerate = pytest.importorskip("accelerate.data_loader")
    seen: list[list[list[int]]] = []
    for rank in range(processes):
        loader = DataLoader(
            Examples(),
            batch_sampler=PackedBatchSampler(LENGTHS, CAPACITY, multiple_of=processes),
            collate_fn=DataCollatorWithFlattening(),
        )
        prepared = accelerate.prepare_data_loader(
            loader, num_processes=processes, process_index=rank, put_on_device=False
        )
        prepared.set_epoch(1)
        seen.append([batch["input_ids"][0].tolist() for batch in prepared])
    assert len({len(rows) for rows in seen}) == 1
    tokens = torch.tensor([t for rows in seen for row in rows for t in row])
    assert torch.bincount(tokens, minlength=len(LENGTHS)).tolist() == LENGTHS
    wanted = PackedBatchSampler(LENGTHS, CAPACITY, multiple_of=processes)
    wanted.set_epoch(1)
    first = next(iter(wanted))
    assert sorted(set(seen[0][0])) == sorted(first)


def test_truncated_lengths_count_as_the_capacity() -> None:
    with pytest.raises(PackingError, match="longer than capacity=10"):
        PackedBatchSampler([4, 30], 10)
    sampler = PackedBatchSampler([4, 30], 10, too_long="truncate")
    assert sorted(map(tuple, sampler)) == [(0,), (1,)]
    assert sampler.density == 14 / 20


def test_static_batches() -> None:
    sampler = PackedBatchSampler([3] * 50, CAPACITY, max_examples=4)
    collator = DataCollatorWithFlattening(
        return_flash_attn_kwargs=True, tokens=CAPACITY, max_examples=4
    )
    loader = DataLoader([{"input_ids": [1, 2, 3]}] * 50, batch_sampler=sampler, collate_fn=collator)
    shapes = {
        tuple((k, tuple(v.shape)) for k, v in b.items() if hasattr(v, "shape")) for b in loader
    }
    assert len(shapes) == 1


def test_processes_come_from_torch_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="init_process_group"):
        DistributedPackedBatchSampler(LENGTHS, CAPACITY)
    fake = types.SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        get_world_size=lambda: 4,
        get_rank=lambda: 2,
    )
    monkeypatch.setattr(sys.modules["fa2_pack_patch.data.samplers"].torch, "distributed", fake)
    sampler = DistributedPackedBatchSampler(LENGTHS, CAPACITY)
    assert (sampler.num_replicas, sampler.rank) == (4, 2)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"too_long": "split"}, ValueError, "split them in the data set"),
        ({"remainder": "pad"}, ValueError, "'error', 'repeat', 'drop'.*'pad'"),
        ({"seed": -1}, ValueError, "seed must be a non-negative integer, got -1"),
        ({"multiple_of": 0}, ValueError, "multiple_of must be"),
        ({"strategy": "ffd"}, ValueError, "'ffd'"),
        ({"lengths": []}, PackingError, "no lengths"),
    ],
)
def test_refused(options: Any, error: Any, said: str) -> None:
    with pytest.raises(error, match=said):
        PackedBatchSampler(options.pop("lengths", LENGTHS), CAPACITY, **options)


@pytest.mark.parametrize(("count", "rank"), [(2, 2), (2, -1), (0, 0), (2, True)])
def test_ranks_out_of_range(count: Any, rank: Any) -> None:
    with pytest.raises(ValueError, match="must be"):
        distributed(rank, count)
    with pytest.raises(ValueError, match="multiple_of is num_replicas"):
        distributed(0, 2, multiple_of=2)
