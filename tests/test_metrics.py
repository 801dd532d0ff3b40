"""Back from a packed batch to its examples: split, pad, last tokens, losses, counts, metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fa2_pack_patch import PackedLayout, PackingError
from fa2_pack_patch.data import DataCollatorWithFlattening
from fa2_pack_patch.data.metrics import (
    effective_batch,
    examples_metrics,
    per_example_loss,
    token_counts,
)

LENGTHS = [4, 1, 6, 3]


@pytest.fixture
def layout() -> PackedLayout:
    """Four examples and two tokens of padding."""
    return PackedLayout.from_lengths([*LENGTHS, 2], padding=[False] * 4 + [True])


@pytest.fixture
def labels() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 11, (1, 16), generator=generator)
    labels[0, 5:8] = -100  # a prompt of the third example
    return labels


# Layout: there and back


def test_gather_last_is_the_last_of_each_split(layout: PackedLayout) -> None:
    hidden = torch.randn(1, 16, 5)
    last = layout.gather_last(hidden)
    assert last.shape == (4, 5)
    assert torch.equal(last, torch.stack([part[-1] for part in layout.split(hidden)]))


@pytest.mark.parametrize("side", ["right", "left"])
def test_pad_and_unpad_are_a_round_trip(layout: PackedLayout, side: str) -> None:
    flat = torch.randn(1, 16, 3)
    padded, mask = layout.pad(flat, -1, side=side)
    assert padded.shape == (4, 6, 3) and mask.dtype == torch.int64
    assert mask.sum(1).tolist() == LENGTHS
    edge = 0 if side == "right" else -1  # where every row has a token
    assert bool(mask[:, edge].all()) and int(mask[:, -1 - edge].sum()) == 1
    for row, keep, part in zip(padded, mask.bool(), layout.split(flat)):
        assert torch.equal(row[keep], part)
        assert bool((row[~keep] == -1).all())
    back = layout.unpad(padded, 7, side=side)
    assert torch.equal(back[:14], flat[0, :14])
    assert bool((back[14:] == 7).all())


def test_unpad_takes_wider_rows(layout: PackedLayout) -> None:
    flat = torch.arange(16.0)
    for side, pad in (("right", (0, 3)), ("left", (3, 0))):
        padded, _ = layout.pad(flat, side=side)
        back = layout.unpad(F.pad(padded, pad), side=side)
        assert torch.equal(back[:14], flat[:14])


def test_pad_lets_gradients_through(layout: PackedLayout) -> None:
    flat = torch.randn(16, requires_grad=True)
    padded, _ = layout.pad(flat)
    padded.sum().backward()
    assert flat.grad is not None
    assert flat.grad.tolist() == [1.0] * 14 + [0.0] * 2


def test_a_padded_batch_to_its_layout_and_back() -> None:
    mask = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1], [1, 0, 0, 0]])
    ids = torch.arange(12).view(3, 4)
    layout = PackedLayout.from_batch({"input_ids": ids, "attention_mask": mask})
    assert [part.tolist() for part in layout.split(ids)] == [[0, 1, 2], [5, 6, 7], [8]]
    padded, again = layout.pad(ids)
    assert padded.tolist() == [[0, 1, 2], [5, 6, 7], [8, 0, 0]]
    assert again.tolist() == [[1, 1, 1], [1, 1, 1], [1, 0, 0]]


def test_from_batch_reads_what_collators_give(layout: PackedLayout) -> None:
    positions = layout.positions()[None]
    mask = torch.tensor([[1] * 14 + [0] * 2])
    ids = torch.zeros(1, 16, dtype=torch.long)
    cu = torch.tensor([0, 4, 5, 11, 14, 16, 16, 16], dtype=torch.int32)  # static: full tail
    for batch in (
        {"input_ids": ids, "position_ids": positions, "attention_mask": mask},
        {"input_ids": ids, "cu_seq_lens_q": cu, "attention_mask": mask},
        {"input_ids": ids, "cu_seq_lens_q": cu, "position_ids": positions, "attention_mask": mask},
    ):
        found = PackedLayout.from_batch(batch)
        assert found.lengths == layout.lengths and found.padding == layout.padding
        assert found.cu_seqlens.tolist() == layout.cu_seqlens.tolist()
    bare = PackedLayout.from_batch({"input_ids": ids, "position_ids": positions})
    assert bare.padding == (False,) * 5


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ({"input_ids": torch.zeros(1, 4)}, r"got the keys \['input_ids'\]"),
        (
            {"input_ids": torch.zeros(1, 4), "cu_seq_lens_q": torch.tensor([0, 3])},
            "ends at 3, but the batch has 4",
        ),
        (
            {"cu_seq_lens_q": torch.tensor([0, 4]), "attention_mask": torch.tensor([[1, 1, 0, 0]])},
            r"padding inside the example at token 0 of cu_seq_lens_q \[0, 4\]",
        ),
        (
            {"cu_seq_lens_q": torch.tensor([0, 4]), "attention_mask": torch.ones(1, 3)},
            r"shape \(1, 3\) does not fit the 4 tokens",
        ),
    ],
)
def test_from_batch_refuses(batch: dict[str, torch.Tensor], said: str) -> None:
    with pytest.raises(PackingError, match=said):
        PackedLayout.from_batch(batch)


def test_pad_refuses(layout: PackedLayout) -> None:
    with pytest.raises(PackingError, match="16 tokens, got a tensor of shape"):
        layout.pad(torch.zeros(1, 15))
    with pytest.raises(PackingError, match="got 'middle'"):
        layout.pad(torch.zeros(16), side="middle")
    with pytest.raises(PackingError, match="4 examples, the longest of 6"):
        layout.unpad(torch.zeros(4, 5))
    with pytest.raises(PackingError, match="all padding"):
        PackedLayout.from_lengths([3], padding=[True]).pad(torch.zeros(3))


# Losses and counts


def alone(logits: torch.Tensor, labels: torch.Tensor, layout: PackedLayout) -> list[torch.Tensor]:
    parts = zip(layout.split(logits), layout.split(labels))
    return [F.cross_entropy(x[:-1], y[1:], reduction="sum") for x, y in parts]


def test_loss_of_each_example_is_its_loss_alone(layout: PackedLayout, labels: torch.Tensor) -> None:
    logits = torch.randn(1, 16, 11, requires_grad=True)
    found = per_example_loss(logits, labels, layout)
    expected = torch.stack(alone(logits, labels, layout))
    assert torch.allclose(found.sum, expected, atol=1e-6)
    assert found.targets.tolist() == [3, 0, 3, 2]
    assert torch.allclose(found.mean, expected / torch.tensor([3, 1, 3, 2]), atol=1e-6)
    assert torch.allclose(found.per_token(), expected.sum() / 8, atol=1e-6)
    weighed = (expected / torch.tensor([3, 1, 3, 2])).sum() / 3
    assert torch.allclose(found.per_example(), weighed, atol=1e-6)
    (gradient,) = torch.autograd.grad(found.sum[2], logits)
    touched = gradient[0].abs().sum(-1) > 0
    assert touched.nonzero().flatten().tolist() == [7, 8, 9]


def test_counts(layout: PackedLayout, labels: torch.Tensor) -> None:
    counts = token_counts(labels, layout)
    assert counts.tokens.tolist() == LENGTHS
    assert counts.targets.tolist() == [3, 0, 3, 2]
    assert counts.padding == 2


def test_losses_of_two_rows() -> None:
    layout = PackedLayout.from_lengths([2, 3, 4, 1])
    logits, labels = torch.randn(2, 5, 7), torch.randint(0, 7, (2, 5))
    found = per_example_loss(logits, labels, layout)
    expected = [float(x) for x in alone(logits, labels, layout)]
    assert found.sum.tolist() == pytest.approx(expected, abs=1e-5)


def test_losses_refuse_other_shapes(layout: PackedLayout, labels: torch.Tensor) -> None:
    with pytest.raises(PackingError, match=r"\(1, 15, 11\).*layout of 16"):
        per_example_loss(torch.zeros(1, 15, 11), labels, layout)
    with pytest.raises(PackingError, match=r"\(1, 15\).*layout of 16"):
        token_counts(labels[:, :15], layout)


# Metrics


@dataclass
class Prediction:
    predictions: Any
    label_ids: Any
    inputs: Any = None
    losses: Any = None


def rows(as_tensor: bool) -> Prediction:
    """Two rows of 6: examples of 3 and 2 (then Trainer's -100), and of 1, 3, 2 with padding of 2."""
    positions = np.array([[0, 1, 2, 0, 1, -100, -100, -100], [0, 0, 1, 2, 0, 1, 0, 1]])
    mask = np.array([[1, 1, 1, 1, 1, -100, -100, -100], [1, 1, 1, 1, 1, 1, 0, 0]])
    labels = np.arange(16).reshape(2, 8)
    logits = np.stack([labels, labels + 100], -1).astype("float32")
    arrays = [logits, labels, positions, mask]
    if as_tensor:
        arrays = [torch.from_numpy(a) for a in arrays]
    return Prediction(arrays[0], tuple(arrays[1:]), inputs=arrays[1])


@pytest.mark.parametrize("as_tensor", [False, True])
def test_metrics_see_examples(as_tensor: bool) -> None:
    seen: dict[str, Any] = {}

    def compute(prediction: Prediction, **more: Any) -> dict[str, float]:
        seen.update(vars(prediction), more=more)
        return {"examples": len(prediction.label_ids)}

    hook = examples_metrics(compute, padded=True)
    assert hook.label_names == ["labels", "position_ids", "attention_mask"]
    assert hook(rows(as_tensor), compute_result=True) == {"examples": 5}
    assert seen["more"] == {"compute_result": True}
    gap = -100
    expected = [[0, 1, 2], [3, 4, gap], [8, gap, gap], [9, 10, 11], [12, 13, gap]]
    assert seen["label_ids"].tolist() == expected
    assert seen["inputs"].tolist() == expected
    assert seen["predictions"][3, :, 1].tolist() == [109, 110, 111]
    assert isinstance(seen["predictions"], torch.Tensor) == as_tensor


def test_metrics_refuse_what_cannot_be_cut() -> None:
    hook = examples_metrics(lambda p: {})
    with pytest.raises(PackingError, match=r"got one tensor.*label_names=\['labels'"):
        hook(Prediction(np.zeros((2, 8)), np.zeros((2, 8))))
    with pytest.raises(PackingError, match="got one tensor"):
        hook.preprocess_logits_for_metrics(torch.zeros(2, 8, 3), torch.zeros(2, 8))
    given = rows(False)
    with pytest.raises(PackingError, match=r"shape \(2, 1\) is not \(rows, 8"):
        hook(Prediction(np.zeros((2, 1)), given.label_ids[:2]))


# The effective batch


def test_effective_batch_of_lengths() -> None:
    found = effective_batch(
        [10, 2, 4, 4, 5, 5, 5, 5, 3, 9],
        per_device_batch_size=2,
        gradient_accumulation_steps=2,
        world_size=1,
    )
    assert (found.steps, found.examples) == (3, (4, 4, 2))
    assert found.tokens == (20, 20, 12) and found.targets == (16, 16, 10)
    assert found.padded == (20 + 8, 20, 18)
    assert found.padding_saved == pytest.approx(1 - 52 / 66)
    assert found.largest_share == pytest.approx(9 / 16 * 4)
    assert "tokens a step: 17.3 (12 to 20)" in str(found)
    assert "2.2 times its equal share" in str(found)


def test_effective_batch_counts_real_targets(layout: PackedLayout, labels: torch.Tensor) -> None:
    mask = torch.tensor([[1] * 14 + [0] * 2])
    batch = {"position_ids": layout.positions()[None], "attention_mask": mask, "labels": labels}
    found = effective_batch([batch, layout, [3, 3]], world_size=2)
    assert found.targets == (8 + 10, 4)
    assert found.computed == (32, 6) and found.padded == (48, 6)


def padding(tokens: int) -> dict[str, torch.Tensor]:
    """A batch without an example, as some processes get at the end of an epoch."""
    none = torch.zeros(1, tokens, dtype=torch.int64)
    return {"position_ids": none, "attention_mask": none, "labels": none - 100}


def test_a_batch_of_padding_alone_has_no_examples() -> None:
    found = effective_batch([[3, 5], padding(8), padding(4)])
    assert found.examples == (2, 0, 0) and found.targets == (6, 0, 0)
    assert found.computed == (8, 8, 4) and found.padded == (10, 0, 0)
    assert found.largest_share == pytest.approx(4 / 6 * 2)
    assert "examples a step: 0.7 (0 to 2)" in str(found)


@pytest.mark.parametrize(
    "options", [{}, {"return_flash_attn_kwargs": True, "tokens": 16, "max_examples": 4}]
)
def test_numpy_batches_count_as_tensors_do(options: dict[str, Any]) -> None:
    features = [{"input_ids": list(range(2, 2 + n))} for n in (4, 1, 7)]
    tensors = DataCollatorWithFlattening(**options)(features)
    arrays = DataCollatorWithFlattening(**options, return_tensors="np")(features)
    assert not any(isinstance(value, torch.Tensor) for value in arrays.values())
    layout = PackedLayout.from_batch(arrays)
    assert layout == PackedLayout.from_batch(tensors)
    assert effective_batch([arrays]) == effective_batch([tensors])
    counts = token_counts(arrays["labels"], layout)
    assert counts.tokens.tolist() == [4, 1, 7] and counts.targets.tolist() == [3, 0, 6]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"batches": []}, "no batches"),
        ({"batches": [padding(8), padding(4)]}, r"no example in any of the 2 batches.*\[8, 4\]"),
        ({"batches": [3, 4]}, r"plain lengths \(\[3, 4\]\) need per_device_batch_size"),
        ({"batches": [[3]], "per_device_batch_size": 2}, "goes with plain lengths only"),
        ({"batches": [[3]], "world_size": 0}, "world_size must be at least 1, got 0"),
    ],
)
def test_effective_batch_refuses(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(PackingError, match=said):
        effective_batch(**arguments)
