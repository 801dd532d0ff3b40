"""Every error says what happened and where, what was given, and what to do."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import arange, tensor, zeros

import fa2_pack_patch as fpp
from fa2_pack_patch import PackedLayout, compat, data, errors
from fa2_pack_patch.tensors import quote
from tests.matrix import models
from tests.matrix.kinds import ONE, TWO, _positions, _varlen

PACKAGE = Path(fpp.__file__).parent
#: Messages that hold nothing of the caller's: there is nothing but the situation to tell.
WITHOUT_VALUES = {
    "nn.DataParallel copied this model",
    "output_attentions=True cannot go with packed rows",
    "the leak map is drawn by matplotlib",
    "the verified model no longer exists",
    "padding_free=False pads with the tokenizer, got tokenizer=None",
    "truncation=True needs max_length, got max_length=None",
    "pad_token_id must be an integer, got None",
    "mlm=True cannot go with completion-only labels",
    "got no bins",
    "got no lengths",
    "effective_batch got no batches",
    "backward of a packed call came after the model was reverted",
    "attention is empty",  # a registry file's
}
#: What a reader can do, as the first word of a sentence or of a part of one.
VERBS = (
    "apply|call|change|choose|count|cut|do not|give|go on|install|keep|leave|let|load|make|map over|"
    "mend|move|pack|pass|pip install|raise|reinstall|remove|run|set|shorten|split|take|tokenize|trace|"
    "undo|use|verify"
)
ADVICE = re.compile(rf"(?:^|[.;:,] |\bor |\band )(?:{VERBS})\b", re.IGNORECASE)
#: Or what was expected, where doing that is all there is to do.
EXPECTED = re.compile(r"\bmust (?:be|hold|have|keep|run)\b|\bexpected\b")
#: Half a message: another text, which is here too, is put before or behind it.
HALVES = {".", "since apply, .", ": : "}


def tells(text: str) -> bool:
    return bool(ADVICE.search(text) or EXPECTED.search(text))


def _is_message(node: ast.AST) -> bool:
    """An error that is made, or a reason for one that is noted."""
    if not isinstance(node, ast.Call) or not node.args:
        return False
    names = {n for n in vars(errors) if n.endswith("Error")} - {"UnsupportedModelError"}
    names |= {"ValueError", "TypeError", "RuntimeError", "ImportError", "RegistryError"}
    if isinstance(node.func, ast.Attribute):  # the reasons of an UnsupportedModelError
        whose = node.func.value
        written = isinstance(node.args[0], (ast.Constant, ast.JoinedStr, ast.BinOp))
        found = isinstance(whose, ast.Attribute) and whose.attr == "reasons"
        return node.func.attr == "append" and found and written
    return getattr(node.func, "id", "") in names


def messages() -> Iterator[tuple[str, str, bool]]:
    """Place, constant text and whether it holds values, of each message that is written out."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if _is_message(node):
                assert isinstance(node, ast.Call)
                parts = list(ast.walk(node.args[0]))
                text = "".join(str(p.value) for p in parts if isinstance(p, ast.Constant))
                values = any(isinstance(p, ast.FormattedValue) for p in parts)
                yield f"{path.name}:{node.lineno}", text, values


def test_every_message_holds_what_was_given() -> None:
    found = list(messages())
    assert len(found) > 130
    bare = {
        where: text
        for where, text, values in found
        if not values and not any(text.startswith(known) for known in WITHOUT_VALUES)
    }
    assert not bare, "quote what was given, or say in WITHOUT_VALUES that there is nothing"
    starts = {known for known in WITHOUT_VALUES for _, text, _ in found if text.startswith(known)}
    assert starts == WITHOUT_VALUES


def test_every_message_says_what_to_do() -> None:
    poor = {w: t for w, t, _ in messages() if not tells(t) and t not in HALVES}
    assert not poor


def test_a_message_that_says_not_what_to_do_is_told() -> None:
    for text in (
        "labels do not fit, because the data set holds more, and they are of no use",
        "the model must not, and the calls of the run take it",
        "cannot be packed. Its runs and its packed rows are given; the caller moves them",
    ):
        assert not tells(text)
    # Without its sentences of advice, hardly a message would pass.
    told = [t for _, t, _ in messages() if ADVICE.search(t) and not EXPECTED.search(t)]
    assert len(told) > 80
    for text in told:
        assert not tells(ADVICE.sub(" ", text))


# What a user sees


def _llama() -> Any:
    implementation = "sdpa" if compat.release() >= compat.Version("4.36") else "eager"
    return models.build(models.FAMILIES["llama"], implementation)


@pytest.fixture(scope="module")
def model() -> Any:
    found = _llama()
    fpp.apply(found)
    return found


def _call(**more: Any) -> dict[str, Any]:
    return {k: v for k, v in {**_positions(ONE).kwargs, **more}.items() if v is not None}


def _lengths(**more: Any) -> dict[str, Any]:
    return {**_varlen(ONE).kwargs, **more}


ENDS = tensor([0, 4, 13, 14, 20], dtype=torch.int32)
CALLS: list[tuple[str, Callable[[], dict[str, Any]], list[str]]] = [
    (
        "positions of another shape",
        lambda: _call(position_ids=arange(7)[None]),
        [r"position_ids of shape \(1, 7\)", "1 rows of 20 tokens", r"expected \(1, 20\)"],
    ),
    (
        "positions that are no integers",
        lambda: _call(position_ids=zeros(1, 20)),
        ["position_ids must be int32 or int64", r"torch.float32 of shape \(1, 20\)"],
    ),
    (
        "multimodal positions",
        lambda: _call(position_ids=zeros(3, 1, 20, dtype=torch.long)),
        [r"got shape \(3, 1, 20\)", r"must be \(rows, tokens\)", "multimodal"],
    ),
    (
        "a 4-D mask",
        lambda: _call(attention_mask=zeros(1, 1, 20, 20)),
        [r"\(1, 1, 20, 20\)", r"must be \(rows, tokens\) = \(1, 20\)", "or none"],
    ),
    (
        "a mask of halves",
        lambda: _call(attention_mask=torch.full((1, 20), 0.5)),
        ["attention_mask must hold 0/1 or segment ids", r"\[0.5, 0.5"],
    ),
    (
        "an example around padding",
        lambda: _call(
            attention_mask=tensor([[1] * 6 + [0] * 2 + [1] * 12]),
        ),
        ["row 0", "example at token 5 goes on at token 8", "move the padding to its end"],
    ),
    (
        "segments against positions",
        lambda: _call(attention_mask=tensor([[1] * 6 + [2] * 14])),
        ["contradictory boundaries in row 0", "at token 4", "Give one of the two"],
    ),
    (
        "lengths in part",
        lambda: {k: v for k, v in _lengths().items() if k != "max_length_k"},
        [r"missing \['max_length_k'\]", "cu_seq_lens_q", "Give all of"],
    ),
    (
        "lengths that differ",
        lambda: _lengths(cu_seq_lens_k=tensor([0, 5, 20], dtype=torch.int32)),
        [r"cu_seq_lens_q \[0, 4, 13, 14, 20\]", r"\[0, 5, 20\] differ", "Give one tensor for both"],
    ),
    (
        "lengths that end early",
        lambda: _lengths(cu_seq_lens_q=ENDS[:-1], cu_seq_lens_k=ENDS[:-1]),
        ["ends at 14", "the batch has 20 tokens", "Count padding"],
    ),
    (
        "a short maximum",
        lambda: _lengths(max_length_q=3),
        ["max_length_q is 3", "has 9 tokens", "Give that or more"],
    ),
    (
        "a maximum that is no number",
        lambda: _lengths(max_length_q="long"),
        ["max_length_q must be a Python int", "got a str: long"],
    ),
    (
        "an example over two rows",
        lambda: {
            **_varlen(TWO).kwargs,
            "position_ids": None,
            "cu_seq_lens_q": tensor([0, 25, 40], dtype=torch.int32),
            "cu_seq_lens_k": tensor([0, 25, 40], dtype=torch.int32),
            "max_length_q": 25,
            "max_length_k": 25,
        },
        [r"\[0, 25, 40\]", "from row 0 into row 1", "rows of 20 tokens", "cut it there"],
    ),
    (
        "attention weights",
        lambda: _call(output_attentions=True),
        ["output_attentions=True cannot go", "Pass output_attentions=False"],
    ),
    (
        "a cache",
        lambda: _call(use_cache=True),
        [r"lengths \[4, 9, 1, 6\]", "use_cache=True", "Pass use_cache=False"],
    ),
    (
        "labels of another kind",
        lambda: _call(labels=zeros(1, 20)),
        [r"labels .* must be integers of shape \(1, 20\)", "got torch.float32"],
    ),
]


@pytest.mark.parametrize(("what", "make", "parts"), CALLS, ids=[c[0] for c in CALLS])
def test_a_packed_call_that_is_refused(
    model: Any, what: str, make: Callable[[], dict[str, Any]], parts: list[str]
) -> None:
    for part in parts:
        with pytest.raises(fpp.PackingError, match=part):
            model(**make())


class TrainingStep(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = _llama()

    def forward(self, batch: Any) -> Any:
        return batch


OTHERS: list[tuple[str, Callable[[], Any], list[str]]] = [
    ("apply of a path", lambda: fpp.apply("org/model"), ["'org/model'", "load it first"]),  # type: ignore[arg-type]
    ("revert of nothing", lambda: fpp.revert(None), ["cannot be reverted", "expected, got None"]),  # type: ignore[arg-type]
    ("is_applied of a dict", lambda: fpp.is_applied({}), ["expected, got {}"]),  # type: ignore[arg-type]
    (
        "verify of a path",
        lambda: fpp.verify("org/model"),  # type: ignore[arg-type]
        ["str cannot be verified", "'org/model'", "load it first"],
    ),
    (
        "apply of no language model",
        lambda: fpp.apply(torch.nn.Linear(2, 2)),
        ["Linear cannot be patched", "holds no Transformers model", "supported: cohere, .*llama"],
    ),
    (
        "verify of no language model",
        lambda: fpp.verify(torch.nn.Linear(2, 2)),
        ["Linear cannot be verified", "holds no Transformers model", "supported: cohere, .*llama"],
    ),
    (
        "verify of two models",
        lambda: fpp.verify(torch.nn.ModuleList([_llama(), _llama()])),
        ["2 language models", "1.model: LlamaModel", "take one at a time"],
    ),
    (
        "verify of a training step",
        lambda: fpp.verify(TrainingStep()),
        ["TrainingStep cannot be verified", "takes no input_ids", "its model.net instead"],
    ),
    (
        "verify of no values",
        lambda: fpp.verify(_llama().to("meta")),
        ["LlamaModel cannot be verified", "on device meta", "load them first"],
    ),
    (
        "verify of a number",
        lambda: fpp.verify(_llama(), examples=5),  # type: ignore[arg-type]
        ["list of sequences of token ids", "got a int: 5"],
    ),
    (
        "verify of texts",
        lambda: fpp.verify(_llama(), examples=["one", "two"]),
        ["example 0 must be a sequence of token ids", "got a str: one; give its input_ids"],
    ),
    (
        "verify of halves",
        lambda: fpp.verify(_llama(), examples=[[5, 6], [0.5]]),  # type: ignore[list-item]
        ["example 1 must be token ids", r"torch.float32 of shape \(1,\): \[0.5\]"],
    ),
    (
        "verify of other tokens",
        lambda: fpp.verify(_llama(), examples=[[5, 6], [97, -1]]),
        ["0 to 96", r"got \[97, -1\]", "the model's own tokenizer"],
    ),
    (
        "verify of a batch of other tokens",
        lambda: fpp.verify(_llama(), examples=_call(input_ids=tensor([[5, 97] * 10]))),
        ["0 to 96", r"got \[97, 97"],
    ),
    (
        "verify of features",
        lambda: fpp.verify(_llama(), examples=[[5, 6], {"input_ids": [7, 8]}]),  # type: ignore[list-item]
        ["example 1 must be a sequence of token ids", "got a dict", "give its input_ids"],
    ),
    (
        "verify of a batch of lists",
        lambda: fpp.verify(_llama(), examples={"input_ids": [[5, 6, 7]]}),
        ["a tensor input_ids", "got a list", "or a list of examples"],
    ),
    (
        "verify of a batch without ids",
        lambda: fpp.verify(_llama(), examples={"inputs_embeds": zeros(2, 4, 8)}),
        [r"got the keys \['inputs_embeds'\]"],
    ),
    (
        "verify of a batch of halves",
        lambda: fpp.verify(_llama(), examples={"input_ids": zeros(2, 4)}),
        ["input_ids must be integers", "got torch.float32"],
    ),
    (
        "verify of other positions",
        lambda: fpp.verify(_llama(), examples=_call(position_ids=arange(7)[None])),
        [r"position_ids of shape \(1, 7\)", r"expected \(1, 20\)\."],
    ),
    (
        "verify of a 4-D mask",
        lambda: fpp.verify(_llama(), examples=_call(attention_mask=zeros(1, 1, 20, 20))),
        [r"\(rows, tokens\) = \(1, 20\)", r"got torch.float32 of shape \(1, 1, 20, 20\)"],
    ),
    (
        "verify of negative lengths",
        lambda: fpp.verify(_llama(), examples=_lengths(cu_seq_lens_q=tensor([-1, 20]))),
        ["cu_seq_lens_q must be integers from 0 on", r"\[-1, 20\]"],
    ),
    (
        "verify of one example",
        lambda: fpp.verify(_llama(), examples=[[5, 6]]),
        ["at least two examples", r"examples of \[2\] tokens"],
    ),
    (
        "verify of a plain batch",
        lambda: fpp.verify(_llama(), examples={"input_ids": zeros(2, 3, dtype=torch.long)}),
        ["2 rows of 3 tokens hold 2 examples", "start anew inside a row"],
    ),
    ("no such kernel", lambda: fpp.apply(_llama(), kernel="best"), ["'best'", "give one of"]),
    (
        "no such lengths",
        lambda: PackedLayout.from_lengths([3, 0]),
        [r"got \[3, 0\]", "leave out empty examples"],
    ),
    (
        "too many tokens",
        lambda: PackedLayout.from_lengths([2**31]),
        ["2147483648 tokens", "below 2", "Split the batch"],
    ),
    (
        "nothing but padding",
        lambda: PackedLayout.from_lengths([3], padding=[True]).pad(zeros(3)),
        [r"all padding \(runs of \[3\] tokens\)", "Leave such batches out"],
    ),
    (
        "a tensor of another batch",
        lambda: PackedLayout.from_lengths([3, 4]).split(zeros(5)),
        ["has 7 tokens", r"shape \(5,\)", "give"],
    ),
    ("density of nothing", lambda: data.density([], [], 8), ["got no bins", "pack_lengths"]),
    (
        "an example without tokens",
        lambda: data.DataCollatorWithFlattening()([{"text": "one"}]),
        ["example 0 has no input_ids", "'text'", "Tokenize"],
    ),
    (
        "truncation to nowhere",
        lambda: data.DataCollatorWithFlattening(truncation=True),
        ["max_length=None", "give the most tokens"],
    ),
]


@pytest.mark.parametrize(("what", "make", "parts"), OTHERS, ids=[c[0] for c in OTHERS])
def test_a_call_that_is_refused(what: str, make: Callable[[], Any], parts: list[str]) -> None:
    with pytest.raises((fpp.Fa2PackPatchError, ValueError)) as caught:
        make()
    for part in parts:
        assert caught.match(part)


def test_what_is_quoted_is_shortened() -> None:
    for value in ("word " * 999, list(range(999)), [list(range(999))], {"text": "word " * 999}):
        assert len(quote(value)) < 700
        assert "in all" in quote(value)


def test_a_proof_that_fails_says_why() -> None:
    model = _llama()
    assert "call fa2_pack_patch.apply(model)" in str(fpp.verify(model))
    fpp.apply(model)
    for module in model.modules():
        module._forward_pre_hooks.clear()
        module._forward_hooks.clear()
    assert "or somebody removed its hooks" in str(fpp.verify(model))
    ids, segments = arange(5, 13)[None], tensor([[1, 1, 1, 1, 2, 2, 2, 2]])
    report = fpp.verify(model, examples={"input_ids": ids, "attention_mask": segments})
    assert "somebody removed its hooks; call fa2_pack_patch.apply(model) again" in str(report)
