"""Layers of a patched model that come, go and are replaced."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fa2_pack_patch as fpp
from tests.matrix.cells import References, compare
from tests.matrix.kinds import Call

LIMIT = 2e-4
Build = Callable[..., Any]


def fresh_layer(model: Any, index: int) -> torch.nn.Module:
    kind = type(model.model.layers[0])
    torch.manual_seed(5)
    asks = len(inspect.signature(kind).parameters) > 1
    layer: torch.nn.Module = kind(model.config, index) if asks else kind(model.config)
    return layer.eval()


def deepened(model: Any) -> Any:
    """A third layer, and a config that says so."""
    model.model.layers.append(fresh_layer(model, 2))
    return resized(model, 3)


def resized(model: Any, layers: int) -> Any:
    model.config.num_hidden_layers = layers
    types = getattr(model.config, "layer_types", None)
    if types:
        model.config.layer_types = ([*types, types[-1]])[:layers]
    return model


def error(model: Any, reference: Any, call: Call) -> float:
    with torch.no_grad():
        return compare(model(**call.kwargs).logits, call, References(reference))


def test_an_added_layer_is_noticed(build: Build, packed: Call) -> None:
    """It would attend over the whole row, silently, and every other layer example by example."""
    model = build()
    fpp.apply(model)
    deepened(model)
    unpacked = {"input_ids": packed.kwargs["input_ids"]}
    with torch.no_grad():
        assert torch.equal(model(**unpacked).logits, deepened(build())(**unpacked).logits)
    with pytest.raises(fpp.PackingError, match=r"layers\.2\.self_attn is not of the layers"):
        model(**packed.kwargs)
    assert fpp.apply(model).layers == 3
    assert error(model, deepened(build()), packed) < LIMIT
    fpp.revert(model)
    assert all("forward" not in m.__dict__ for m in model.modules())


def test_a_layer_in_another_list_is_noticed(build: Build, packed: Call) -> None:
    model = build()
    fpp.apply(model)
    model.model.layers = torch.nn.ModuleList([*model.model.layers, fresh_layer(model, 2)])
    resized(model, 3)
    with pytest.raises(fpp.PackingError, match=r"layers\.2\.self_attn is not of the layers"):
        model(**packed.kwargs)


def test_a_layer_taken_out(build: Build, packed: Call) -> None:
    model, reference = build(), build()
    fpp.apply(model)
    for other in (model, reference):
        del other.model.layers[1]
        resized(other, 1)
    with pytest.raises(fpp.PackingError, match=r"layers\.1\.self_attn\. They were not called"):
        model(**packed.kwargs)
    assert fpp.apply(model).layers == 1
    assert error(model, reference, packed) < LIMIT


def test_a_replaced_attention_module(build: Build, packed: Call) -> None:
    model, reference = build(), build()
    fpp.apply(model)
    for other in (model, reference):
        other.model.layers[0].self_attn = fresh_layer(other, 0).self_attn
    with pytest.raises(fpp.PackingError, match=r"layers\.0\.self_attn"):
        model(**packed.kwargs)
    fpp.apply(model)
    assert error(model, reference, packed) < LIMIT


def test_one_layer_run_twice(build: Build, packed: Call) -> None:
    """Shared, it is one attention module, and ours."""
    model, reference = build(), build()
    fpp.apply(model)
    for other in (model, reference):
        other.model.layers.append(other.model.layers[0])
        resized(other, 3)
    call = {**packed.kwargs, "use_cache": False}
    logits = model(**call).logits
    for e in packed.examples:
        alone = reference(input_ids=e.tokens[None], use_cache=False).logits[0]
        assert torch.allclose(logits[e.row, e.start : e.start + len(e.tokens)], alone, atol=LIMIT)
