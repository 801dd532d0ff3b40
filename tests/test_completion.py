"""DataCollatorForCompletionOnlyLM: targets are the answers, padded and packed."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
import transformers

import fa2_pack_patch
from fa2_pack_patch import PackingError
from fa2_pack_patch.data import DataCollatorForCompletionOnlyLM

WORDS = [
    "[PAD]",
    "[UNK]",
    "###",
    "Human",
    ":",
    "Assistant",
    "hi",
    "there",
    "how",
    "are",
    "you",
    "fine",
    "thanks",
    "bye",
]


@pytest.fixture
def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers import models as kinds
    from tokenizers.pre_tokenizers import Whitespace

    made = Tokenizer(kinds.WordLevel({w: i for i, w in enumerate(WORDS)}, "[UNK]"))
    made.pre_tokenizer = Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]"
    )


def words(labels: Any) -> list[str]:
    return ["_" if i == -100 else WORDS[i] for i in labels]


ONE = "### Human : hi there ### Assistant : fine thanks"
TWO = "### Human : hi ### Assistant : how are you ### Human : bye ### Assistant : bye bye"


def encoded(tokenizer: Any, *texts: str) -> list[dict[str, Any]]:
    return [{"input_ids": tokenizer.encode(text)} for text in texts]


def test_one_answer(tokenizer: Any) -> None:
    collator = DataCollatorForCompletionOnlyLM(
        "### Assistant :", tokenizer=tokenizer, padding_free=True
    )
    row = collator(encoded(tokenizer, ONE, ONE))
    assert words(row["labels"][0].tolist()) == ([*("_" * 8), "fine", "thanks"]) * 2
    assert row["position_ids"].tolist() == [list(range(10)) * 2]
    assert "attention_mask" not in row


def test_the_last_answer_counts_without_instruction_template(tokenizer: Any) -> None:
    collator = DataCollatorForCompletionOnlyLM(
        "### Assistant :", tokenizer=tokenizer, padding_free=True
    )
    row = collator(encoded(tokenizer, TWO))
    assert words(row["labels"][0].tolist()) == [*("_" * 17), "bye", "bye"]


@pytest.mark.parametrize("as_ids", [False, True])
def test_every_answer_of_a_conversation(tokenizer: Any, as_ids: bool) -> None:
    templates: list[Any] = ["### Assistant :", "### Human :"]
    if as_ids:
        templates = [tokenizer.encode(t) for t in templates]
    collator = DataCollatorForCompletionOnlyLM(
        *templates, tokenizer=None if as_ids else tokenizer, padding_free=True
    )
    row = collator(encoded(tokenizer, TWO))
    assert words(row["labels"][0].tolist()) == [
        *("_" * 7), "how", "are", "you", *("_" * 7), "bye", "bye",
    ]  # fmt: skip


def test_a_system_text_and_an_open_turn_are_no_targets(tokenizer: Any) -> None:
    collator = DataCollatorForCompletionOnlyLM(
        "### Assistant :", "### Human :", tokenizer=tokenizer, padding_free=True
    )
    row = collator(encoded(tokenizer, "there " + ONE + " ### Human : bye"))
    assert words(row["labels"][0].tolist()) == [*("_" * 9), "fine", "thanks", *("_" * 4)]


def test_the_assistant_may_begin(tokenizer: Any) -> None:
    collator = DataCollatorForCompletionOnlyLM(
        "### Assistant :", "### Human :", tokenizer=tokenizer, padding_free=True
    )
    row = collator(
        encoded(tokenizer, "### Assistant : hi there ### Human : bye ### Assistant : bye")
    )
    assert words(row["labels"][0].tolist()) == [
        *("_" * 3), "hi", "there", *("_" * 7), "bye",
    ]  # fmt: skip


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded(tokenizer: Any, side: str) -> None:
    tokenizer.padding_side = side
    collator = DataCollatorForCompletionOnlyLM("### Assistant :", tokenizer=tokenizer)
    batch = collator(encoded(tokenizer, ONE, TWO))
    assert batch["input_ids"].shape == batch["labels"].shape == (2, 19)
    pad = ["_"] * 9
    answer = [*("_" * 8), "fine", "thanks"]
    assert words(batch["labels"][0].tolist()) == (pad + answer if side == "left" else answer + pad)
    assert words(batch["labels"][1].tolist()) == [*("_" * 17), "bye", "bye"]
    assert batch["attention_mask"].sum(1).tolist() == [10, 19]


def test_packed_and_padded_have_the_same_targets(tokenizer: Any, build: Any) -> None:
    model = build("llama").eval()
    features = encoded(tokenizer, ONE, TWO)
    common = {"tokenizer": tokenizer, "instruction_template": "### Human :"}
    padded = DataCollatorForCompletionOnlyLM("### Assistant :", **common)(features)
    expected = model(**padded).loss
    fa2_pack_patch.apply(model, kernel="sdpa")
    packed = DataCollatorForCompletionOnlyLM(
        "### Assistant :", padding_free=True, return_flash_attn_kwargs=True, **common
    )(features)
    torch.testing.assert_close(model(**packed).loss, expected, atol=1e-5, rtol=0)


def test_missing_templates(tokenizer: Any) -> None:
    features = encoded(tokenizer, ONE, "hi there")
    collator = DataCollatorForCompletionOnlyLM(
        "### Assistant :", tokenizer=tokenizer, padding_free=True
    )
    with pytest.raises(PackingError, match=r"'### Assistant :' does not occur in example 1"):
        collator(features)
    ignoring = DataCollatorForCompletionOnlyLM(
        "### Assistant :", tokenizer=tokenizer, padding_free=True, on_missing="ignore"
    )
    assert ignoring(features)["labels"][0, -2:].tolist() == [-100, -100]
    collator = DataCollatorForCompletionOnlyLM(
        "### Assistant :", "bye bye bye", tokenizer=tokenizer, padding_free=True
    )
    with pytest.raises(PackingError, match="instruction_template='bye bye bye' does not occur"):
        collator(features[:1])


@pytest.mark.parametrize("kind", [list, numpy.array, torch.tensor])
def test_kinds_of_input(tokenizer: Any, kind: Any) -> None:
    ids = tokenizer.encode(ONE)
    collator = DataCollatorForCompletionOnlyLM(
        "### Assistant :", tokenizer=tokenizer, padding_free=True
    )
    row = collator([{"input_ids": kind(ids), "attention_mask": kind([1] * len(ids))}])
    assert words(row["labels"][0].tolist())[-2:] == ["fine", "thanks"]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"mlm": True}, "mlm=True"),
        ({"on_missing": "warn"}, "'warn'"),
        ({"return_seq_idx": True}, "padding_free=True"),
        ({"response_template": "### Assistant :", "padding_free": True}, "needs a tokenizer"),
        ({"response_template": [], "padding_free": True}, "no tokens"),
        ({}, "tokenizer=None"),
    ],
)
def test_contradictory_arguments(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        DataCollatorForCompletionOnlyLM(**{"response_template": [1], **arguments})


def test_another_ignore_index_cannot_go_into_packed_rows() -> None:
    with pytest.raises(ValueError, match="ignore_index=-1 cannot go with padding_free"):
        DataCollatorForCompletionOnlyLM([7], ignore_index=-1, padding_free=True)


def test_a_conversation_cut_from_the_left_says_what_is_missing() -> None:
    collator = DataCollatorForCompletionOnlyLM([7], [3], tokenizer=None, padding_free=True)
    with pytest.raises(PackingError, match="instruction_template.*turns cannot be told apart"):
        collator([[5, 7, 8, 9]])
