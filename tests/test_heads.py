"""Several heads on one base model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

import fa2_pack_patch as fpp
from tests.matrix.kinds import TWO, Call, _positions
from tests.test_hooks import LIMIT

Build = Callable[..., Any]


def two_heads(build: Build, second: str = "LlamaForCausalLM") -> tuple[Any, Any]:
    first = build()
    config = build().config
    config.num_labels = config.vocab_size
    other = getattr(transformers, second)(config).eval()
    other.model = first.model
    return first, other


def loss_alone(model: Any, call: Call, *, shifted: int) -> float:
    """The mean over all targets, where an example of n tokens has n - ``shifted``."""
    total, count = 0.0, 0
    for e in call.examples:
        ids = e.tokens[None]
        if len(e.tokens) > shifted:
            total += model(input_ids=ids, labels=ids).loss.item() * (len(e.tokens) - shifted)
            count += len(e.tokens) - shifted
    return total / count


def error(model: Any, *, shifted: int = 1) -> float:
    call = _positions(TWO)
    found = model(**call.kwargs, labels=call.kwargs["input_ids"]).loss.item()
    return abs(float(found) - loss_alone(model, call, shifted=shifted))


def test_two_causal_heads(build: Build) -> None:
    first, second = two_heads(build)
    fpp.apply(first)
    fpp.apply(second)
    assert error(first) < LIMIT
    assert error(second) < LIMIT
    fpp.revert(first)
    assert not fpp.is_applied(second)
    for model in (first, second):
        assert not model._forward_pre_hooks and "forward" not in model.__dict__


@pytest.mark.skipif(
    not hasattr(transformers, "LlamaForTokenClassification"), reason="no such head yet"
)
def test_a_causal_head_beside_a_per_token_head(build: Build) -> None:
    first, second = two_heads(build, "LlamaForTokenClassification")
    for model in (first, second):
        fpp.apply(model)
    assert error(first) < LIMIT
    assert error(second, shifted=0) < LIMIT


def test_a_pooled_head_still_raises(build: Build) -> None:
    causal, pooled = two_heads(build, "LlamaForSequenceClassification")
    fpp.apply(pooled)
    fpp.apply(causal)
    assert error(causal) < LIMIT
    with pytest.raises(fpp.PackingError, match="one result for each row"):
        pooled(**_positions(TWO).kwargs)


def test_apply_to_the_base_keeps_the_head(build: Build) -> None:
    """Another kernel makes all anew, also where only the base model is named."""
    model = build()
    fpp.apply(model)
    fpp.apply(model.model, kernel="sdpa")
    assert error(model) < LIMIT


def test_a_head_that_left_the_base_is_let_go(build: Build) -> None:
    first, second = two_heads(build)
    fpp.apply(first)
    first.model = build().model
    fpp.apply(second)
    assert error(second) < LIMIT
    assert not first._forward_pre_hooks and "forward" not in first.__dict__
    assert isinstance(second.model, torch.nn.Module) and not fpp.is_applied(first)


@pytest.mark.parametrize("order", ["later", "beside"])
@pytest.mark.parametrize("way", ["called", "forward"])
def test_a_head_that_apply_never_reached(build: Build, order: str, way: str) -> None:
    """Its labels are seen by nobody: what another example would predict is no target in silence."""
    first, second = two_heads(build)
    fpp.apply(first if order == "beside" else first.model)
    call = dict(_positions(TWO).kwargs)
    labels = call["input_ids"].clone()
    forward = second if way == "called" else second.forward
    with torch.no_grad():
        for ids in (call["input_ids"], call["input_ids"].flip(1)):
            with pytest.raises(fpp.PackingError, match="never called on this LlamaForCausalLM"):
                forward(**{**call, "input_ids": ids}, labels=labels)
        forward(**call)
        forward(input_ids=labels, labels=labels)
        for example in _positions(TWO).examples:
            labels[example.row, example.start] = -100
        with_labels = forward(**call, labels=labels).loss.item()
    assert with_labels == pytest.approx(loss_alone(second, _positions(TWO), shifted=1), abs=LIMIT)
    fpp.apply(second)
    assert error(second) < LIMIT


def test_a_pooled_head_that_apply_never_reached(build: Build) -> None:
    causal, pooled = two_heads(build, "LlamaForSequenceClassification")
    fpp.apply(causal)
    with pytest.raises(fpp.PackingError, match="one result for each row"):
        pooled(**_positions(TWO).kwargs)
    assert error(causal) < LIMIT


@pytest.mark.skipif(
    not hasattr(transformers, "LlamaForTokenClassification"), reason="no such head yet"
)
def test_a_per_token_head_that_apply_never_reached(build: Build) -> None:
    """All its labels are its own: it needs no apply."""
    causal, second = two_heads(build, "LlamaForTokenClassification")
    fpp.apply(causal)
    assert error(second, shifted=0) < LIMIT
