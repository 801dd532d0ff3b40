"""Layers of a patched model that come, go and are replaced."""

from __future__ import annotations

import copy
import importlib
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


def holds(tree: Any, module: torch.nn.Module) -> bool:
    """Whether a copy of ``tree`` holds one of ``module``."""
    memo: dict[int, Any] = {}
    copy.deepcopy(tree, memo)
    return id(module) in memo


@pytest.mark.parametrize("family", ["llama", "gptj"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_copied_layer_is_stock_and_alone(
    build: Build, packed: Call, family: str, implementation: str
) -> None:
    """As a draft model is made of some layers of a large one; the rest must not come along."""
    model, draft = build(family, implementation), build(family, implementation)
    fpp.apply(model)
    base = model.base_model
    name = "layers" if hasattr(base, "layers") else "h"
    layers = getattr(base, name)
    for part in (layers, layers[1], next(m for m in layers[1].modules() if "forward" in vars(m))):
        assert not holds(part, base)
        assert not holds(part, model.get_input_embeddings())
    setattr(draft.base_model, name, copy.deepcopy(layers))
    draft.load_state_dict(model.state_dict())
    unpacked = {"input_ids": packed.kwargs["input_ids"]}
    with torch.no_grad():
        assert torch.equal(draft(**unpacked).logits, model(**unpacked).logits)
    fpp.apply(draft)
    assert error(draft, build(family, implementation), packed) < LIMIT
    fpp.revert(draft)
    again = copy.deepcopy(model)
    assert fpp.is_applied(again)
    assert error(again, build(family, implementation), packed) < LIMIT


def test_a_model_made_deeper_by_copies_of_its_layers(build: Build, packed: Call) -> None:
    def deeper(model: Any) -> Any:
        layer = copy.deepcopy(model.model.layers[1])
        layer.self_attn.layer_idx = 2
        model.model.layers.append(layer)
        return resized(model, 3)

    model = build()
    fpp.apply(model)
    deeper(model)
    with pytest.raises(fpp.PackingError, match=r"layers\.2\.self_attn is not of the layers"):
        model(**packed.kwargs)
    fpp.apply(model)
    assert error(model, deeper(build()), packed) < LIMIT


def test_layers_that_peft_replicates(build: Build, packed: Call) -> None:
    importlib.import_module("torch.distributed.tensor")  # PEFT 0.19 uses it unasked
    peft = pytest.importorskip("peft", exc_type=ImportError)

    def replicated(model: Any) -> Any:
        given = {"target_modules": ["q_proj", "v_proj"], "layer_replication": [[0, 2], [1, 2]]}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            return peft.get_peft_model(model, peft.LoraConfig(init_lora_weights=False, **given))

    model = build()
    fpp.apply(model)
    wrapped, stock = replicated(model), replicated(build())
    with pytest.raises(fpp.PackingError, match=r"self_attn is not of the layers"):
        wrapped(**packed.kwargs)
    assert fpp.apply(wrapped).layers == 3
    assert error(wrapped, stock, packed) < LIMIT


@pytest.mark.parametrize("how", ["copied", "fresh", "patched"])
def test_another_base_model(build: Build, packed: Call, how: str) -> None:
    """The head still hands its calls to the first one's patch; apply and revert find both."""
    model, other = build(), build()
    fpp.apply(model)
    if how == "patched":
        fpp.apply(other)
    model.model = copy.deepcopy(model.model) if how == "copied" else other.model
    unpacked = {"input_ids": packed.kwargs["input_ids"]}
    with torch.no_grad():
        assert torch.equal(model(**unpacked).logits, build()(**unpacked).logits)
    with pytest.raises(fpp.PackingError, match="LlamaForCausalLM was replaced after apply"):
        model(**packed.kwargs)
    fpp.apply(model)
    assert error(model, build(), packed) < LIMIT
    if how == "patched":
        assert error(other, build(), packed) < LIMIT
    model.model = build().model
    assert fpp.revert(model) and not fpp.revert(model)
    assert not model._forward_pre_hooks and "forward" not in model.__dict__


def test_a_refused_apply_leaves_a_head_of_another_base(build: Build, packed: Call) -> None:
    model = build()
    fpp.apply(model)
    before = dict(model.__dict__), dict(model._forward_pre_hooks)
    model.model = build().model
    attention = model.model.layers[0].self_attn
    attention.forward = lambda *given: given
    with pytest.raises(fpp.UnsupportedModelError):
        fpp.apply(model)
    assert model.__dict__["forward"] is before[0]["forward"]
    assert list(model._forward_pre_hooks.values()) == list(before[1].values())
    del attention.forward
    fpp.apply(model)
    assert error(model, build(), packed) < LIMIT


@pytest.mark.parametrize("part", ["head", "base"])
def test_a_shallow_copy_with_modules_of_its_own(build: Build, packed: Call, part: str) -> None:
    """It has the original's forward, and ran on the original's modules, whatever the call."""
    model = build()
    fpp.apply(model)
    same = copy.copy(model)
    assert error(same, build(), packed) < LIMIT
    other = copy.copy(model)
    other._modules = dict(other._modules)
    if part == "base":
        other.model = copy.copy(model.model)
        other.model._modules = dict(model.model._modules)
        other = other.model
    for call in (packed.kwargs, {"input_ids": packed.kwargs["input_ids"]}):
        with pytest.raises(fpp.PackingError, match=r"shallow copy \(copy\.copy\)"):
            other(**call)
    fpp.revert(model)
    with torch.no_grad():
        copy.copy(model)(**call)
