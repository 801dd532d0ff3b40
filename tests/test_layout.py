"""PackedLayout and the rules of boundaries, against a slow oracle."""

from __future__ import annotations

import random

import pytest
import torch

from fa2_pack_patch import PackedLayout, PackingError
from fa2_pack_patch.boundaries import read_boundaries


def oracle(rows: list[list[int]], mask: list[list[int]] | None = None) -> list[int]:
    """Lengths, token by token."""
    lengths: list[int] = []
    for r, row in enumerate(rows):
        for i, position in enumerate(row):
            new = i == 0 or position <= row[i - 1]
            if mask is not None and i:
                real, before = mask[r][i] > 0, mask[r][i - 1] > 0
                new = real != before or (real and new)
            if new:
                lengths.append(0)
            lengths[-1] += 1
    return lengths


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("ids", "lengths"),
    [
        ([0, 1, 2, 0, 1], (3, 2)),
        ([0, 0, 1, 2], (1, 3)),
        ([0, 1, 2, 0], (3, 1)),
        ([0, 0, 0], (1, 1, 1)),
        ([5, 6, 7, 0, 1], (3, 2)),
        ([2, 3, 4, 2, 3], (3, 2)),
        ([0, 1, 5, 6, 0], (4, 1)),
        ([5, 6, 7, 8], (4,)),
    ],
)
def test_resets_make_examples(ids: list[int], lengths: tuple[int, ...], masked: bool) -> None:
    mask = torch.ones(1, len(ids)) if masked else None
    layout = PackedLayout.from_position_ids(torch.tensor(ids), mask)
    assert layout.lengths == lengths
    assert layout.cu_seqlens.tolist() == [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    assert layout.cu_seqlens.dtype == torch.int32
    assert layout.max_seqlen == max(lengths)


def test_a_row_always_starts_an_example() -> None:
    ids = torch.tensor([[0, 1, 2], [3, 4, 5]])
    assert PackedLayout.from_position_ids(ids).lengths == (3, 3)


def test_random_rows_against_the_oracle() -> None:
    rng = random.Random(0)
    for _ in range(300):
        rows, tokens = rng.randint(1, 3), rng.randint(2, 14)
        ids = []
        for _ in range(rows):
            row, position = [], rng.randint(0, 4)
            for _ in range(tokens):
                row.append(position)
                position = rng.choice([position + 1, position + 1, position + 3, 0, position])
            ids.append(row)
        for mask in (None, torch.ones(rows, tokens)):
            got = read_boundaries(torch.tensor(ids), mask, always=True)
            assert got is not None
            assert got.lengths == oracle(ids)


def test_padding_is_an_example_of_its_own() -> None:
    ids = torch.tensor([[0, 1, 0, 1, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 1, 0, 0]])
    layout = PackedLayout.from_position_ids(ids, mask)
    assert layout.lengths == (2, 2, 2)
    assert layout.padding == (False, False, True)


@pytest.mark.parametrize(
    ("ids", "mask"),
    [
        ([[0, 1, 2, 3]], None),
        ([[1, 1, 1, 0, 1, 2]], [[0, 0, 0, 1, 1, 1]]),
        ([[0, 1, 2, 1, 1]], [[1, 1, 1, 0, 0]]),
        ([[0, 1, 1, 2, 3]], [[1, 1, 0, 1, 1]]),
    ],
)
def test_not_packed(ids: list[list[int]], mask: list[list[int]] | None) -> None:
    given = None if mask is None else torch.tensor(mask)
    assert read_boundaries(torch.tensor(ids), given) is None


def test_segment_ids() -> None:
    layout = PackedLayout.from_segment_ids(torch.tensor([[1, 1, 2, 2, 3, 0], [1, 2, 2, 2, 0, 0]]))
    assert layout.lengths == (2, 2, 1, 1, 1, 3, 2)
    assert layout.padding == (False, False, False, True, False, False, True)


def test_equal_segments_of_adjacent_rows_stay_apart() -> None:
    assert PackedLayout.from_segment_ids(torch.tensor([[1, 2], [2, 3]])).lengths == (1, 1, 1, 1)


@pytest.mark.parametrize(
    ("ids", "mask", "says"),
    [
        ([[0, 1, 0, 1]], [[1, 1, 1, 2]], "contradictory boundaries in row 0"),
        ([[0, 1, 2, 3, 0]], [[1, 0, 1, 1, 1]], "interrupted by padding"),
        ([[0, 1, 0, 1]], [[1, 1, 1]], "got shape (1, 3)"),
        ([[0, 1, 0, 1]], [[1, -1, 1, 1]], "segment ids 0, 1, 2"),
    ],
)
def test_bad_masks_are_quoted(ids: list[list[int]], mask: list[list[int]], says: str) -> None:
    with pytest.raises(PackingError) as caught:
        read_boundaries(torch.tensor(ids), torch.tensor(mask))
    assert says in str(caught.value)


@pytest.mark.parametrize("lengths", [[], [3, 0], [3, -1], [2.5]])
def test_bad_lengths(lengths: list[int]) -> None:
    with pytest.raises(PackingError, match="positive integers"):
        PackedLayout.from_lengths(lengths)


@pytest.mark.parametrize(
    ("cu", "tokens", "says"),
    [
        ([0, 3, 3, 5], 5, "increase strictly"),
        ([1, 3, 5], 5, "start at 0"),
        ([0, 3], 5, "has 5 tokens"),
        ([[0, 3]], 3, "shape"),
    ],
)
def test_bad_cu_seqlens(cu: list[int], tokens: int, says: str) -> None:
    with pytest.raises(PackingError, match=says):
        PackedLayout.from_cu_seqlens(torch.tensor(cu), tokens=tokens)


@pytest.mark.parametrize("ids", [torch.zeros(3, 1, 4, dtype=torch.long), torch.rand(1, 4)])
def test_bad_position_ids(ids: torch.Tensor) -> None:
    with pytest.raises(PackingError, match="position_ids must be"):
        PackedLayout.from_position_ids(ids)


def test_split_round_trip() -> None:
    layout = PackedLayout.from_lengths([2, 3, 1], padding=[False, False, True])
    parts = layout.split(torch.arange(12).view(1, 6, 2))
    assert [p.shape[0] for p in parts] == [2, 3]
    assert torch.equal(torch.cat(parts), torch.arange(10).view(5, 2))
    with pytest.raises(PackingError, match="6 tokens"):
        layout.split(torch.arange(5))


def test_rows_of_one_token_are_rows() -> None:
    """Of a layout that was read from a batch it is known what the first two dimensions are."""
    ids = torch.zeros(4, 1, dtype=torch.int64)
    hidden = torch.arange(12.0).view(4, 1, 3)
    cu = torch.arange(5, dtype=torch.int32)
    for layout in (
        PackedLayout.from_position_ids(ids),
        PackedLayout.from_segment_ids(ids + 1),
        PackedLayout.from_batch({"input_ids": ids, "cu_seq_lens_q": cu}),
        PackedLayout.from_lengths([1] * 4, rows=4),
        PackedLayout.from_position_ids(ids).to("cpu"),
        PackedLayout.from_position_ids(ids).to("meta"),
    ):
        for given in (hidden, hidden[:, 0]):
            assert [part.shape for part in layout.split(given)] == [(1, 3)] * 4
            assert torch.equal(layout.gather_last(given), hidden[:, 0])
            assert layout.pad(given)[0].shape == (4, 1, 3)
    single = PackedLayout.from_position_ids(torch.zeros(1, 1, dtype=torch.int64))
    assert single.split(hidden[:1])[0].shape == (1, 3)
    heads = PackedLayout.from_position_ids(torch.zeros(1, 4, dtype=torch.int64))
    assert heads.split(hidden)[0].shape == (1, 1, 3)  # four tokens of one head each


def test_mask_is_block_causal() -> None:
    expected = torch.tensor([[1, 0, 0], [0, 1, 0], [0, 1, 1]], dtype=torch.bool)
    assert torch.equal(PackedLayout.from_lengths([1, 2]).mask(), expected)


def test_layouts_of_the_same_examples_are_equal() -> None:
    one, two = PackedLayout.from_lengths([1, 2]), PackedLayout.from_lengths([1, 2])
    assert one == two and hash(one) == hash(two)
    assert one != PackedLayout.from_lengths([2, 1])
    assert one != PackedLayout.from_lengths([1, 2], padding=[False, True])


def test_the_last_tokens_of_padding_alone_are_none() -> None:
    layout = PackedLayout.from_lengths([3], padding=[True])
    assert layout.gather_last(torch.zeros(3, 2)).shape == (0, 2)


def test_a_sparse_matrix_of_lengths_is_refused() -> None:
    with pytest.raises(PackingError, match="lengths must be one or more positive integers"):
        PackedLayout.from_lengths(torch.tensor([[3]]).to_sparse())
