"""Labels of the tokens alone of which a head gives logits (``logits_to_keep``)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

import fa2_pack_patch as fpp
from tests.matrix.kinds import TWO, Call, _positions, _varlen

Build = Callable[..., torch.nn.Module]
RELEASE = Version(transformers.__version__)
IGNORED = -100

pytestmark = pytest.mark.skipif(Version("4.45") > RELEASE, reason="logits of all tokens alone")


def keyword() -> str:
    cls = transformers.LlamaForCausalLM
    names = inspect.signature(cls.forward).parameters
    return next(n for n in ("logits_to_keep", "num_logits_to_keep") if n in names)


def mean_loss(model: Any, call: Call, targets: torch.Tensor) -> float:
    """Of ``targets`` (rows, tokens), each of which stands at the token that predicts it."""
    plain = {n: v for n, v in call.kwargs.items() if n != "labels"}
    logits = model(**plain).logits.float()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    return loss.item()


def own_targets(call: Call) -> torch.Tensor:
    """The next token of the same example."""
    ids = call.kwargs["input_ids"]
    found = torch.full_like(ids, IGNORED)
    for e in call.examples:
        end = e.start + len(e.tokens)
        found[e.row, e.start : end - 1] = ids[e.row, e.start + 1 : end]
    return found


@pytest.mark.parametrize("lengths", ["positions", "varlen"])
@pytest.mark.parametrize("count", [1, 9, 12, 20, 30])
def test_the_last_ones(build: Build, count: int, lengths: str) -> None:
    model = build()
    fpp.apply(model)
    call = _positions(TWO) if lengths == "positions" else _varlen(TWO)
    labels = call.kwargs["input_ids"][:, -count:].clone()
    before = labels.clone()
    targets = own_targets(call)
    targets[:, :-count] = IGNORED
    got = model(**call.kwargs, labels=labels, **{keyword(): count}).loss
    if count == 1:
        assert got.isnan()  # none is a target
    else:
        assert got.item() == pytest.approx(mean_loss(model, call, targets), abs=1e-5)
    assert torch.equal(labels, before)


@pytest.mark.skipif(Version("4.51") > RELEASE, reason="no loss that takes shift_labels")
def test_shifted_labels(build: Build) -> None:
    model = build()
    fpp.apply(model)
    call = _positions(TWO)
    targets = own_targets(call)
    targets[:, :-12] = IGNORED
    shifted = call.kwargs["input_ids"].roll(-1, 1)[:, -12:]
    got = model(**call.kwargs, labels=shifted, shift_labels=shifted, logits_to_keep=12).loss
    assert got.item() == pytest.approx(mean_loss(model, call, targets), abs=1e-5)


def chosen(kind: str, rows: int, tokens: int) -> torch.Tensor:
    some = torch.arange(2, tokens - 1)
    if kind == "row":
        return some
    if kind == "rows":
        return torch.stack([some + r % 2 for r in range(rows)])
    mask = torch.zeros(rows, tokens, dtype=torch.bool)
    mask[0, 2:15], mask[1, 5:] = True, True
    return mask


def takes(kind: str) -> bool:
    if kind == "row":
        return keyword() == "logits_to_keep"
    return hasattr(transformers.modeling_utils, "slice_logits_to_keep")


@pytest.mark.parametrize("kind", ["row", "rows", "mask"])
def test_any_of_them(build: Build, kind: str) -> None:
    if not takes(kind):
        pytest.skip("no such choice in this release")
    model = build()
    fpp.apply(model)
    call = _positions(TWO)
    ids, targets = call.kwargs["input_ids"], own_targets(call)
    which = chosen(kind, *ids.shape)
    index = torch.arange(ids.numel()).view(ids.shape)
    if which.dtype == torch.bool:
        at = index[which]
    else:
        at = index.take_along_dim(which if which.dim() == 2 else which.expand(len(ids), -1), 1)
    wanted = torch.full_like(targets, IGNORED).flatten()
    predicting = at[..., :-1][at[..., 1:] == at[..., :-1] + 1]  # else the next label is elsewhere
    wanted[predicting] = targets.flatten()[predicting]
    labels = ids.flatten()[at]
    got = model(**call.kwargs, labels=labels, logits_to_keep=which).loss
    assert got.item() == pytest.approx(mean_loss(model, call, wanted.view(ids.shape)), abs=1e-5)


def test_what_cannot_be_told(build: Build) -> None:
    model = build()
    fpp.apply(model)
    call = _positions(TWO)
    labels = call.kwargs["input_ids"][:, -12:].float()
    with pytest.raises(fpp.PackingError, match=r"labels of packed rows must be integers of shape"):
        model(**call.kwargs, labels=labels, **{keyword(): 12})


def test_a_head_that_apply_never_reached(build: Build) -> None:
    model = build()
    fpp.apply(model.model)
    call = _positions(TWO)
    labels = call.kwargs["input_ids"][:, -12:].clone()
    with pytest.raises(fpp.PackingError, match="apply was never called on this LlamaForCausalLM"):
        model(**call.kwargs, labels=labels, **{keyword(): 12})
