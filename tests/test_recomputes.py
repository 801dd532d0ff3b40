"""Backward after the model was reverted: right, or refused where layers would be recomputed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

import fa2_pack_patch as fpp
from tests.matrix.kinds import Call

Build = Callable[..., torch.nn.Module]
RELEASE = Version(transformers.__version__)


def training(build: Build, *, checkpointed: bool) -> Any:
    model: Any = build()
    if checkpointed:
        options: dict[str, Any] = {"gradient_checkpointing_kwargs": {"use_reentrant": True}}
        model.gradient_checkpointing_enable(**(options if Version("4.36") <= RELEASE else {}))
        model.enable_input_require_grads()
    return model.train()


def gradients(model: Any) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def loss_of(model: Any, call: Call) -> torch.Tensor:
    loss: torch.Tensor = model(**call.kwargs, labels=call.kwargs["input_ids"]).loss
    return loss


@pytest.fixture
def wanted(build: Build, packed: Call) -> list[torch.Tensor]:
    model = training(build, checkpointed=False)
    fpp.apply(model)
    loss_of(model, packed).backward()
    return gradients(model)


def same(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return len(got) == len(wanted) and all(
        torch.allclose(a, b, atol=1e-6) for a, b in zip(got, wanted)
    )


@pytest.mark.parametrize("by", ["logits", "hidden states"])
def test_a_recompute_after_revert_is_refused(build: Build, packed: Call, by: str) -> None:
    model = training(build, checkpointed=True)
    with fpp.applied(model):
        if by == "logits":
            loss = loss_of(model, packed)
        else:
            loss = model(**packed.kwargs, output_hidden_states=True).hidden_states[1].sum()
    with pytest.raises(fpp.PackingError, match="backward of a packed call came after .* reverted"):
        loss.backward()


def test_nothing_to_recompute(build: Build, packed: Call, wanted: list[torch.Tensor]) -> None:
    model = training(build, checkpointed=False)
    with fpp.applied(model):
        loss = loss_of(model, packed)
    loss.backward()
    assert same(gradients(model), wanted)


def test_inside_of_the_block(build: Build, packed: Call, wanted: list[torch.Tensor]) -> None:
    model = training(build, checkpointed=True)
    with fpp.applied(model):
        loss = loss_of(model, packed)
        loss.backward()
    assert same(gradients(model), wanted)
    assert loss.grad_fn is not None  # kept for a log line


def test_applied_again_meanwhile(build: Build, packed: Call, wanted: list[torch.Tensor]) -> None:
    model = training(build, checkpointed=True)
    with fpp.applied(model):
        loss = loss_of(model, packed)
    with fpp.applied(model):
        loss.backward()
    assert same(gradients(model), wanted)


def test_a_call_that_is_not_packed(build: Build, packed: Call) -> None:
    model = training(build, checkpointed=True)
    with fpp.applied(model):
        loss = model(input_ids=packed.kwargs["input_ids"], labels=packed.kwargs["input_ids"]).loss
    loss.backward()
