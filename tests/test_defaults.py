"""What a process sets for all new tensors (``torch.set_default_device``) changes nothing here."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import fa2_pack_patch as fpp
from fa2_pack_patch.data import per_example_loss, token_counts
from tests.matrix.cells import References, compare
from tests.matrix.kinds import KINDS, ONE, Kind, _positions

Build = Callable[..., torch.nn.Module]
PACKED = [k for k in KINDS if k.outcome == "right"]

# A script that trains on a GPU sets "cuda"; no tensor of "meta" can be read, so one that is made
# without a device of its own shows on any machine.
META = "meta"


@pytest.mark.parametrize("kind", PACKED, ids=lambda k: k.name)
def test_a_packed_call(build: Build, kind: Kind) -> None:
    model, reference = build("mistral"), References(build("mistral"))
    fpp.apply(model)
    call = kind.make(model)
    with torch.no_grad():
        with torch.device(META):
            got = model(**call.kwargs)
        assert compare(got.logits, call, reference) < 2e-4


def test_a_loss_and_a_dynamic_rope(build: Build) -> None:
    model = build("llama", rope_scaling={"type": "dynamic", "factor": 2.0})
    fpp.apply(model)
    call = _positions(ONE)
    call.kwargs["labels"] = call.kwargs["input_ids"]
    want = model(**call.kwargs).loss
    with torch.device(META):
        assert torch.equal(model(**call.kwargs).loss, want)


def test_back_to_examples(build: Build) -> None:
    model = build()
    fpp.apply(model)
    call = _positions(ONE)
    logits, ids = model(**call.kwargs).logits, call.kwargs["input_ids"]

    def examples() -> list[torch.Tensor]:
        layout = fpp.PackedLayout.from_batch(call.kwargs)
        padded, mask = layout.pad(logits)
        losses = per_example_loss(logits, ids, layout).per_example()
        counts = token_counts(ids, layout).targets
        return [padded, mask, layout.unpad(padded), layout.gather_last(logits), losses, counts]

    want = examples()
    with torch.device(META):
        got = examples()
    assert all(torch.equal(one, other) for one, other in zip(got, want))


def test_verify(build: Build) -> None:
    model = build("mistral")
    fpp.apply(model)
    with torch.device(META):
        report = fpp.verify(model)
    assert report.passed, str(report)
