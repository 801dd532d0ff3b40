"""DataCollatorWithFlattening: its rows, its padding, and what it refuses."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import transformers
from packaging.version import Version

import fa2_pack_patch
from fa2_pack_patch import PackedLayout, PackingError
from fa2_pack_patch.data import DataCollatorWithFlattening

EXAMPLES = [[5, 6, 7, 8], [9], [10, 11, 12]]
THEIRS = getattr(transformers, "DataCollatorWithFlattening", None)
VERSION = Version(transformers.__version__)


def features(**more: Any) -> list[dict[str, Any]]:
    return [{"input_ids": list(ids), **more} for ids in EXAMPLES]


def options() -> list[dict[str, Any]]:
    """The options that the installed release's own collator has."""
    if THEIRS is None:
        return []
    known = inspect.signature(THEIRS.__init__).parameters
    wanted: list[dict[str, Any]] = [
        {},
        {"return_position_ids": False},
        {"separator_id": -7},
        {"return_flash_attn_kwargs": True},
        {"return_seq_idx": True},
        {"return_flash_attn_kwargs": True, "return_seq_idx": True, "separator_id": 3},
        {"position_ids_start": 2},
    ]
    return [option for option in wanted if set(option) <= set(known)]


@pytest.mark.parametrize("option", options(), ids=str)
@pytest.mark.parametrize("labels", [False, True])
@pytest.mark.parametrize("kind", [list, torch.tensor, numpy.array])
def test_rows_are_those_of_transformers(option: Any, labels: bool, kind: Any) -> None:
    if Version("5.0") > VERSION and kind is not list:
        kind = list  # their collator took lists alone
    made = []
    for at, example in enumerate(features()):
        if labels:
            example["labels"] = [-100 if i < at else t for i, t in enumerate(example["input_ids"])]
        made.append({k: kind(v) for k, v in example.items()})
    assert THEIRS is not None
    theirs = THEIRS(**option)([dict(example) for example in made])
    ours = DataCollatorWithFlattening(**option)(made)
    assert set(ours) == set(theirs)
    for key, value in theirs.items():
        if isinstance(value, torch.Tensor):
            if Version("4.53") <= VERSION:  # int64 for all until then
                assert ours[key].dtype == value.dtype, key
            assert ours[key].tolist() == value.tolist(), key
        else:
            assert ours[key] == value, key


def test_the_row() -> None:
    row = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)(features())
    assert row["input_ids"].tolist() == [[5, 6, 7, 8, 9, 10, 11, 12]]
    assert row["labels"].tolist() == [[-100, 6, 7, 8, -100, -100, 11, 12]]
    assert row["position_ids"].tolist() == [[0, 1, 2, 3, 0, 0, 1, 2]]
    assert row["cu_seq_lens_q"].tolist() == row["cu_seq_lens_k"].tolist() == [0, 4, 5, 8]
    assert row["cu_seq_lens_q"].dtype == row["seq_idx"].dtype == torch.int32
    assert row["seq_idx"].tolist() == [[0, 0, 0, 0, 1, 2, 2, 2]]
    assert type(row["max_length_q"]) is type(row["max_length_k"]) is int
    assert row["max_length_q"] == 4
    assert "attention_mask" not in row


def test_numpy() -> None:
    row = DataCollatorWithFlattening(return_tensors="np", return_flash_attn_kwargs=True)(features())
    assert isinstance(row["input_ids"], numpy.ndarray)
    assert row["input_ids"].dtype == numpy.int64
    assert row["cu_seq_lens_q"].dtype == numpy.int32


def test_padding_is_known_as_padding() -> None:
    collator = DataCollatorWithFlattening(
        pad_to_multiple_of=6, pad_token_id=99, return_flash_attn_kwargs=True, position_ids_start=2
    )
    row = collator(features())
    assert row["input_ids"].tolist() == [[5, 6, 7, 8, 9, 10, 11, 12, 99, 99, 99, 99]]
    assert row["labels"][0, 8:].tolist() == [-100] * 4
    assert row["attention_mask"].tolist() == [[1] * 8 + [0] * 4]
    assert row["position_ids"][0, 8:].tolist() == [2, 3, 4, 5]
    assert row["cu_seq_lens_q"].tolist() == [0, 4, 5, 8, 12]
    layout = PackedLayout.from_position_ids(row["position_ids"], row["attention_mask"])
    assert layout.lengths == (4, 1, 3, 4)
    assert layout.padding == (False, False, False, True)


def test_no_padding_needed_still_has_a_mask() -> None:
    row = DataCollatorWithFlattening(pad_to_multiple_of=4)(features())
    assert row["attention_mask"].tolist() == [[1] * 8]


@pytest.mark.parametrize("lengths", [[4, 1, 3], [10], [2, 2, 2, 2, 2], [1]])
def test_static_rows_have_one_shape(lengths: list[int]) -> None:
    collator = DataCollatorWithFlattening(tokens=10, max_examples=5, return_flash_attn_kwargs=True)
    row = collator([{"input_ids": list(range(n))} for n in lengths])
    shapes = {k: tuple(v.shape) for k, v in row.items() if isinstance(v, torch.Tensor)}
    assert set(shapes.values()) == {(1, 10), (7,)}
    assert row["max_length_q"] == row["max_length_k"] == 10
    ends = [0]
    for length in [*lengths, 10 - sum(lengths)]:
        ends.append(ends[-1] + length)
    assert row["cu_seq_lens_q"].tolist() == ends + [10] * (7 - len(ends))
    assert int(row["attention_mask"].sum()) == sum(lengths)


def test_static_padding_beyond_max_length_is_cut() -> None:
    collator = DataCollatorWithFlattening(
        tokens=10, max_examples=3, max_length=4, return_flash_attn_kwargs=True
    )
    row = collator([{"input_ids": [1, 2, 3]}])
    assert row["cu_seq_lens_q"].tolist() == [0, 3, 7, 10, 10, 10, 10]
    assert row["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 0, 1, 2]]
    assert row["max_length_q"] == 4


@pytest.mark.parametrize("lengths", [[11], [1] * 6, [5, 6]])
def test_static_rows_refuse_what_does_not_fit(lengths: list[int]) -> None:
    collator = DataCollatorWithFlattening(tokens=10, max_examples=5)
    with pytest.raises(PackingError, match=r"tokens=10 and max_examples=5"):
        collator([{"input_ids": list(range(n))} for n in lengths])


def test_an_examples_own_padding_is_taken_out_by_its_mask() -> None:
    rows = [
        {"input_ids": [0, 0, 5, 0], "attention_mask": [0, 0, 1, 1], "labels": [-100, -100, 5, 0]},
        {"input_ids": [7, 8, 0], "attention_mask": [1, 1, 0], "labels": [7, 8, -100]},
    ]
    row = DataCollatorWithFlattening()(rows)
    assert row["input_ids"].tolist() == [[5, 0, 7, 8]]  # a real 0 stays
    assert row["labels"].tolist() == [[-100, 0, -100, 8]]
    assert row["position_ids"].tolist() == [[0, 1, 0, 1]]


def test_assistant_masks_become_labels() -> None:
    row = DataCollatorWithFlattening()(
        [
            {"input_ids": [4, 5, 6, 7], "assistant_masks": [0, 0, 1, 1]},
            {"input_ids": [8, 9], "assistant_masks": [1, 1]},
        ]
    )
    assert row["labels"].tolist() == [[-100, -100, 6, 7, -100, 9]]
    assert set(row) == {"input_ids", "labels", "position_ids"}


def test_more_keys_are_carried() -> None:
    made = [
        {"input_ids": [1, 2], "weight": 0.5, "group": 3, "advantage": [0.1, 0.2]},
        {"input_ids": [3], "weight": 2.0, "group": 4, "advantage": numpy.array([0.3])},
    ]
    row = DataCollatorWithFlattening(pad_to_multiple_of=4)(made)
    assert row["weight"].tolist() == [0.5, 2.0]
    assert row["group"].tolist() == [3, 4]
    assert row["group"].dtype == torch.int64
    torch.testing.assert_close(row["advantage"].float(), torch.tensor([[0.1, 0.2, 0.3, 0.0]]))


@pytest.mark.parametrize(
    ("feature", "match"),
    [
        ({"input_ids": [1, 2], "text": "hello"}, r"'text' of example 0 is str 'hello'"),
        ({"input_ids": [1, 2], "more": [1, 2, 3]}, r"'more' of example 0 has shape \(3,\)"),
        ({"input_ids": [1, 2], "labels": [1]}, r"labels of example 0 have shape \(1,\)"),
        ({"input_ids": [1.5]}, r"must be integers"),
        ({"labels": [1]}, r"no input_ids; its keys are \['labels'\]"),
        ({"input_ids": []}, r"every one of the 1 examples of this batch is empty"),
        ({"input_ids": [[1, 2]]}, r"shape \(1, 2\)"),
    ],
)
def test_bad_examples_are_quoted(feature: dict[str, Any], match: str) -> None:
    with pytest.raises(PackingError, match=match):
        DataCollatorWithFlattening()([feature])


def test_keys_must_agree() -> None:
    with pytest.raises(PackingError, match=r"example 1 differs from example 0 in \['weight'\]"):
        DataCollatorWithFlattening()([{"input_ids": [1], "weight": 1.0}, {"input_ids": [2]}])
    with pytest.raises(PackingError, match="example 1 has no labels but example 0 has"):
        DataCollatorWithFlattening()([{"input_ids": [1], "labels": [1]}, {"input_ids": [2]}])


def test_empty_examples_are_left_out() -> None:
    made = [{"input_ids": []}, *features(), {"input_ids": numpy.array([], dtype=numpy.int64)}]
    row = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)(made)
    assert row["cu_seq_lens_q"].tolist() == [0, 4, 5, 8]
    assert row["seq_idx"].unique().tolist() == [0, 1, 2]


def test_max_length() -> None:
    with pytest.raises(PackingError, match=r"example 0 has 4 tokens, more than max_length=3"):
        DataCollatorWithFlattening(max_length=3)(features())
    row = DataCollatorWithFlattening(max_length=3, truncation=True)(features())
    assert row["input_ids"].tolist() == [[5, 6, 7, 9, 10, 11, 12]]


@pytest.mark.parametrize(
    "arguments",
    [
        {"tokens": 8},
        {"max_examples": 8},
        {"tokens": 8, "max_examples": 2, "pad_to_multiple_of": 4},
        {"pad_to_multiple_of": 0},
        {"max_length": -1},
        {"truncation": True},
        {"return_tensors": "tf"},
    ],
)
def test_contradictory_arguments(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=str(next(iter(arguments)))):
        DataCollatorWithFlattening(**arguments)


def test_a_tokenizer_is_not_the_first_argument() -> None:
    with pytest.raises(ValueError, match="must be a bool"):
        DataCollatorWithFlattening(object())  # type: ignore[arg-type]


def test_inner() -> None:
    def padded(examples: list[Any]) -> dict[str, Any]:
        width = max(len(e["input_ids"]) for e in examples)
        ids = torch.zeros(len(examples), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for at, e in enumerate(examples):
            ids[at, width - len(e["input_ids"]) :] = torch.tensor(e["input_ids"])
            mask[at, width - len(e["input_ids"]) :] = 1
        labels = torch.where(ids % 2 == 0, ids, -100)
        return {"input_ids": ids, "labels": labels, "attention_mask": mask}

    row = DataCollatorWithFlattening(inner=padded)(features())
    assert row["input_ids"].tolist() == [[5, 6, 7, 8, 9, 10, 11, 12]]
    assert row["labels"].tolist() == [[-100, 6, -100, 8, -100, -100, -100, 12]]

    def maskless(examples: list[Any]) -> dict[str, Any]:
        return {k: v for k, v in padded(examples).items() if k != "attention_mask"}

    with pytest.raises(PackingError, match="3 rows without attention_mask"):
        DataCollatorWithFlattening(inner=maskless)(features())


def test_inner_of_transformers() -> None:
    from tokenizers import Tokenizer
    from tokenizers import models as toymodels

    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(toymodels.WordLevel({"a": 0, "b": 1, "[PAD]": 2}, "a")),
        pad_token="[PAD]",
    )
    inner = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
    made = [{"input_ids": [0, 1, 1]}, {"input_ids": [1]}]
    row = DataCollatorWithFlattening(inner=inner)(made)
    assert row["input_ids"].tolist() == [[0, 1, 1, 1]]
    assert row["labels"].tolist() == [[-100, 1, 1, -100]]


@pytest.mark.parametrize(
    "option",
    [
        {},
        {"return_flash_attn_kwargs": True},
        {"pad_to_multiple_of": 16},
        {"pad_to_multiple_of": 16, "return_flash_attn_kwargs": True},
        {"tokens": 24, "max_examples": 6, "return_flash_attn_kwargs": True},
        {"tokens": 24, "max_examples": 6, "max_length": 9, "return_flash_attn_kwargs": True},
        # Older rotary tables are as long as the row: position 2 of 1 token is beyond them.
        *([{"position_ids_start": 2}] if Version("4.38") <= VERSION else []),
    ],
    ids=str,
)
def test_a_patched_model_gives_what_separate_examples_give(
    build: Callable[..., torch.nn.Module], option: dict[str, Any]
) -> None:
    model = build("llama").eval()
    start = option.get("position_ids_start", 0)
    alone = [
        model(torch.tensor([ids]), position_ids=torch.arange(start, start + len(ids))[None]).logits[
            0
        ]
        for ids in EXAMPLES
    ]
    fa2_pack_patch.apply(model, kernel="sdpa")
    batch = DataCollatorWithFlattening(**option)(features())
    out = model(**batch)
    found = out.logits[0, : sum(map(len, EXAMPLES))].split([len(e) for e in EXAMPLES])
    for one, wanted in zip(found, alone):
        torch.testing.assert_close(one, wanted, atol=2e-5, rtol=0)
    losses = [
        torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]), reduction="sum")
        for logits, ids in zip(alone, EXAMPLES)
        if len(ids) > 1
    ]
    torch.testing.assert_close(out.loss, sum(losses) / 5, atol=2e-5, rtol=0)


def test_arrays_of_any_layout() -> None:
    pandas = pytest.importorskip("pandas")
    wanted = [3, 2, 60000]
    arrays = [
        numpy.array(wanted[::-1])[::-1],
        numpy.array(wanted, dtype=">i4"),
        numpy.array(wanted, dtype=numpy.uint16),
        pandas.Series(wanted, index=[7, 8, 9]),
    ]
    for array in arrays:
        batch = DataCollatorWithFlattening()([{"input_ids": array}])
        assert batch["input_ids"].tolist() == [wanted]


@pytest.mark.parametrize("value", [2**70, 1j, numpy.array([2**63], dtype=numpy.uint64)])
def test_numbers_that_do_not_fit_are_refused(value: Any) -> None:
    with pytest.raises(PackingError, match="'w' of example 0 is"):
        DataCollatorWithFlattening()([{"input_ids": [1], "w": value}])


def test_labels_are_integers() -> None:
    with pytest.raises(PackingError, match="labels of example 1 are torch.float32"):
        DataCollatorWithFlattening()(
            [{"input_ids": [1], "labels": [1]}, {"input_ids": [1], "labels": [float("nan")]}]
        )


def test_columns_are_no_examples() -> None:
    with pytest.raises(PackingError, match=r"not dataset\[:4\]"):
        DataCollatorWithFlattening()({"input_ids": [[1, 2], [3]]})  # type: ignore[arg-type]


def test_an_iterator_goes_through_an_inner_collator() -> None:
    def inner(features: Any) -> Any:
        return {"input_ids": torch.tensor([f["input_ids"] for f in features])}

    batch = DataCollatorWithFlattening(inner=inner)(iter([{"input_ids": [1, 2]}]))  # type: ignore[arg-type]
    assert batch["input_ids"].tolist() == [[1, 2]]


def test_padding_needs_a_token() -> None:
    DataCollatorWithFlattening(pad_token_id=None)([{"input_ids": [1]}])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="pad_token_id must be an integer, got None"):
        DataCollatorWithFlattening(pad_to_multiple_of=8, pad_token_id=None)  # type: ignore[arg-type]


def test_weights_leave_their_gradient_and_numpy_gets_bfloat16_as_float32() -> None:
    weights = torch.tensor([0.5, 2.0], dtype=torch.bfloat16, requires_grad=True)
    batch = DataCollatorWithFlattening(return_tensors="np")([{"input_ids": [1, 2], "w": weights}])
    assert batch["w"].dtype == numpy.float32 and batch["w"].tolist() == [[0.5, 2.0]]


def test_lengths_are_python_ints_whatever_was_given() -> None:
    collator = DataCollatorWithFlattening(
        tokens=8, max_examples=3, max_length=numpy.int64(4), return_flash_attn_kwargs=True
    )
    assert type(collator([{"input_ids": [1, 2]}])["max_length_q"]) is int


@pytest.mark.parametrize("examples", [1, 2, 3])
def test_short_examples_never_overflow_a_static_row(examples: int) -> None:
    collator = DataCollatorWithFlattening(
        tokens=64, max_examples=3, max_length=8, return_flash_attn_kwargs=True
    )
    batch = collator([{"input_ids": [1, 2]}] * examples)
    layout = PackedLayout.from_batch(batch)
    assert len(batch["cu_seq_lens_q"]) == 3 + 1 + 64 // 8
    assert sum(not pad for pad in layout.padding) == examples and layout.max_seqlen <= 8


def test_an_example_that_is_packed_already_is_refused() -> None:
    collator = DataCollatorWithFlattening()
    two = {"input_ids": [5, 6, 7, 8], "position_ids": [0, 1, 0, 1]}
    with pytest.raises(PackingError, match=r"example 1 start anew .*\[0, 1, 0, 1\]"):
        collator([{"input_ids": [5]}, two])
    for mask in ([1, 1, 2, 2], [0.0, -1e9, 0.0, 0.0]):
        with pytest.raises(PackingError, match="example 0 must hold 0 and 1"):
            collator([{"input_ids": [5, 6, 7, 8], "attention_mask": mask}])
    # Positions of padding say nothing.
    left = {"input_ids": [0, 0, 5, 6], "attention_mask": [0, 0, 1, 1], "position_ids": [1, 1, 0, 1]}
    assert collator([left])["input_ids"].tolist() == [[5, 6]]


@pytest.mark.parametrize("padding", [{}, {"pad_to_multiple_of": 16}])
def test_an_inner_collator_that_packs_is_refused(padding: dict[str, Any]) -> None:
    inner = DataCollatorWithFlattening(**padding)
    with pytest.raises(PackingError, match="start anew inside of it"):
        DataCollatorWithFlattening(inner=inner)(features())


def test_completion_mask() -> None:
    made = [{"input_ids": [5, 6, 7], "completion_mask": [0, 0, 1]}]
    row = DataCollatorWithFlattening()(made)
    assert row["labels"].tolist() == [[-100, -100, 7]]
    assert "completion_mask" not in row


def test_a_column_that_the_collator_makes_itself_is_refused() -> None:
    examples = [{"input_ids": [3, 4, 5], "seq_idx": [7, 7, 7]}, {"input_ids": [6], "seq_idx": [8]}]
    assert DataCollatorWithFlattening()(examples)["seq_idx"].tolist() == [[7, 7, 7, 8]]
    with pytest.raises(PackingError, match=r"columns \['seq_idx'\], which this collator makes"):
        DataCollatorWithFlattening(return_seq_idx=True)(examples)
    limits = [{"input_ids": [3, 4], "max_length_q": 9}]
    with pytest.raises(PackingError, match="max_length_q"):
        DataCollatorWithFlattening(return_flash_attn_kwargs=True)(limits)


@pytest.mark.parametrize("lengths", [[2, 1], [1, 1, 1]])
def test_an_example_that_trl_has_packed_is_refused(lengths: list[int]) -> None:
    example = {"input_ids": [3, 4, 5], "seq_lengths": lengths}
    with pytest.raises(PackingError, match="seq_lengths of example 0 are of .*TRL has packed it"):
        DataCollatorWithFlattening()([example])
