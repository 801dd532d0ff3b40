"""PackedIterableDataset: a stream packed through a buffer."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from fa2_pack_patch import PackingError
from fa2_pack_patch.data import DataCollatorWithFlattening, PackedIterableDataset
from tests.test_samplers import whole_and_resumed

CAPACITY = 64
SIZES = [random.Random(at).choice([3, 5, 9, 17, 40, 64]) for at in range(203)]
EXAMPLES = [{"input_ids": [at] * size} for at, size in enumerate(SIZES)]
LENGTHS = Path(__file__).resolve().parents[1] / "benchmarks" / "data" / "lengths.json"


def ids(lists: Any) -> list[int]:
    return [example["input_ids"][0] for held in lists for example in held]


def stream(**options: Any) -> PackedIterableDataset:
    options = {"buffer_size": 20, **options}
    return PackedIterableDataset(options.pop("dataset", EXAMPLES), CAPACITY, **options)


class Own(IterableDataset):  # type: ignore[type-arg]
    """Divides itself among workers, and can go on where it was."""

    def __init__(self) -> None:
        self.at = 0
        self.epoch = 0

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        step, first = (worker.num_workers, worker.id) if worker else (1, 0)
        start, self.at = self.at, 0
        for at in range(start or first, len(EXAMPLES), step):
            self.at = at + step
            yield EXAMPLES[at]
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


@pytest.mark.parametrize("buffer_size", [1, 20, 1000])
def test_nothing_is_lost_and_nothing_is_too_much(buffer_size: int) -> None:
    data = stream(buffer_size=buffer_size)
    for _ in range(2):  # a second epoch reads it again
        lists = list(data)
        assert sorted(ids(lists)) == list(range(len(EXAMPLES)))
        assert all(sum(len(e["input_ids"]) for e in held) <= CAPACITY for held in lists)


def test_no_example_waits_for_ever() -> None:
    early = {"input_ids": [0] * 33}  # nothing else fits beside it
    lists = list(stream(dataset=[early] + [{"input_ids": [1] * 32}] * 400, buffer_size=10))
    assert ids(lists[:1]) == [0]


def test_a_buffer_fills_real_lengths() -> None:
    found = json.loads(LENGTHS.read_text(encoding="utf-8"))["t0"]
    examples = [{"input_ids": range(min(n, 4096))} for n in found]
    tokens = sum(len(e["input_ids"]) for e in examples)
    assert tokens / (len(list(PackedIterableDataset(examples, 4096))) * 4096) >= 0.999


@pytest.mark.parametrize("dataset", [EXAMPLES, Own()], ids=["list", "divides itself"])
@pytest.mark.parametrize("workers", [0, 2, 3])
def test_workers_share_the_stream(workers: int, dataset: Any) -> None:
    loader = DataLoader(
        stream(dataset=dataset),
        batch_size=None,
        collate_fn=DataCollatorWithFlattening(),
        num_workers=workers,
    )
    rows = [batch["input_ids"] for batch in loader]
    assert all(row.shape[0] == 1 and row.shape[1] <= CAPACITY for row in rows)
    assert torch.bincount(torch.cat(rows, 1)[0]).tolist() == SIZES


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("count", [2, 5])
def test_processes_get_as_many_lists(count: int, workers: int) -> None:
    ranks = []
    for rank in range(count):
        loader = DataLoader(
            stream(num_replicas=count, rank=rank),
            batch_size=None,
            collate_fn=list,
            num_workers=workers,
        )
        ranks.append(list(loader))
    assert len({len(lists) for lists in ranks}) == 1
    assert sorted(i for lists in ranks for i in ids(lists)) == list(range(len(EXAMPLES)))


def test_a_stream_too_short_for_the_processes() -> None:
    def ranks(**options: Any) -> list[PackedIterableDataset]:
        return [stream(dataset=EXAMPLES[:2], num_replicas=3, rank=r, **options) for r in range(3)]

    with pytest.raises(PackingError, match=r"2 lists that cannot be divided among 3 processes"):
        list(ranks(remainder="error")[0])
    repeated, dropped = ranks(), ranks(remainder="drop")
    lists = [list(rank) for rank in repeated]
    assert [len(mine) for mine in lists] == [1, 1, 1] and repeated[0].repeated == 1
    assert {i for mine in lists for i in ids(mine)} == {0, 1}
    assert [list(rank) for rank in dropped] == [[], [], []] and dropped[0].dropped == 2


@pytest.mark.parametrize("dataset", [EXAMPLES, Own()], ids=["read again", "goes on itself"])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("at", [3, 17])
def test_resumed(dataset: Any, count: int, at: int) -> None:
    whole = list(stream(dataset=dataset, num_replicas=count))
    stopped = stream(dataset=dataset, num_replicas=count)
    iterator = iter(stopped)
    for _ in range(at):
        next(iterator)
    state = stopped.state_dict()
    iterator.close()
    if isinstance(dataset, Own):
        dataset.at = 0
    resumed = stream(dataset=dataset, num_replicas=count)
    resumed.load_state_dict(state)
    assert list(resumed) == whole[at:]
    assert list(resumed) == whole


@pytest.mark.parametrize("workers", [0, 2])
def test_in_a_stateful_loader(workers: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def loader() -> Any:
        return stateful.StatefulDataLoader(
            stream(), batch_size=None, collate_fn=list, num_workers=workers
        )

    whole, rest = whole_and_resumed(loader)
    assert rest == whole[6:]


def test_datasets_streams() -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list(EXAMPLES).to_iterable_dataset(num_shards=4)
    for workers in (0, 2):
        loader = DataLoader(
            stream(dataset=data), batch_size=None, collate_fn=list, num_workers=workers
        )
        assert sorted(ids(loader)) == list(range(len(EXAMPLES)))


def test_passes_after_a_resumed_one_are_whole() -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list(EXAMPLES).to_iterable_dataset(num_shards=4)
    stopped = stream(dataset=data)
    stopped.set_epoch(2)
    whole = list(stopped)
    iterator = iter(stopped)
    for _ in range(7):
        next(iterator)
    state = stopped.state_dict()
    resumed = stream(dataset=datasets.Dataset.from_list(EXAMPLES).to_iterable_dataset(num_shards=4))
    resumed.load_state_dict(state)
    assert list(resumed) == whole[7:]
    assert list(resumed) == whole and list(resumed) == whole


def test_a_state_of_other_workers_or_processes_is_refused() -> None:
    state = stream()
    next(iter(state))
    for options, workers in (({}, 2), ({"num_replicas": 2}, 0)):
        resumed = stream(**options)
        resumed.load_state_dict(state.state_dict())
        with pytest.raises(PackingError, match="same num_replicas and num_workers"):
            list(DataLoader(resumed, batch_size=None, collate_fn=list, num_workers=workers))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_map_style_data_set_ends_at_its_length(workers: int) -> None:
    class Around(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return len(EXAMPLES)

        def __getitem__(self, at: int) -> Any:
            return EXAMPLES[at % len(EXAMPLES)]

    lists = DataLoader(
        stream(dataset=Around()), batch_size=None, collate_fn=list, num_workers=workers
    )
    assert sorted(ids(lists)) == list(range(len(EXAMPLES)))


def test_the_epoch_is_passed_on() -> None:
    data = Own()
    stream(dataset=data).set_epoch(3)
    assert data.epoch == 3


def test_static_lists() -> None:
    lists = list(stream(max_examples=2))
    assert max(map(len, lists)) == 2 and sorted(ids(lists)) == list(range(len(EXAMPLES)))


def test_length_can_be_a_column() -> None:
    data = [{"tokens": 40, "input_ids": []}, {"tokens": 30, "input_ids": []}]
    assert len(list(stream(dataset=data, length=lambda e: e["tokens"]))) == 2


def test_too_long() -> None:
    long = [{"input_ids": [1] * 5}, {"input_ids": [2] * 70}]
    with pytest.raises(PackingError, match=r"example 1 of the stream has 70 tokens.*capacity=64"):
        list(stream(dataset=long))
    assert len(list(stream(dataset=long, too_long="truncate"))) == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dataset": iter(EXAMPLES)}, "can be read only once"),
        ({"buffer_size": 0}, "buffer_size must be a positive integer, got 0"),
        ({"max_examples": 0}, "max_examples must be"),
        ({"too_long": "split"}, "'split'"),
        ({"remainder": "pad"}, "'error', 'repeat', 'drop'.*'pad'"),
        ({"num_replicas": 2, "rank": 2}, "rank must be an integer from 0 to 1"),
    ],
)
def test_refused(options: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        stream(**options)


def test_empty_examples_are_refused() -> None:
    with pytest.raises(PackingError, match="example 0 of the stream has 0 tokens"):
        list(stream(dataset=[{"input_ids": []}]))
