"""Forwards of a patched model that are called without its hooks, and after one that raised."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

import fa2_pack_patch as fpp
from tests.matrix.kinds import TWO, Call, _positions, _varlen
from tests.test_hooks import LIMIT, checkpointed

Build = Callable[..., Any]
RELEASE = Version(transformers.__version__)


def hidden_error(found: torch.Tensor, stock: Any, call: Call) -> float:
    """How far hidden states are from those that the base model ``stock`` gives for each example."""
    worst = 0.0
    for e in call.examples:
        ids = e.tokens[None]
        mask = torch.ones_like(ids)  # Falcon's eager of 4.36 to 4.43 wants one
        alone = stock(input_ids=ids, attention_mask=mask, position_ids=e.positions[None])[0][0]
        got = found[e.row, e.start : e.start + len(e.tokens)]
        worst = max(worst, float((got - alone).abs().max()))
    return worst


@pytest.mark.parametrize("kind", ["positions", "varlen"])
@pytest.mark.parametrize("family", ["llama", "falcon_new"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_the_base_model(build: Build, family: str, implementation: str, kind: str) -> None:
    model, stock = (build(family, implementation).base_model for _ in range(2))
    fpp.apply(model)
    call = _positions(TWO) if kind == "positions" else _varlen(TWO)
    with torch.no_grad():
        found = model.forward(**{**call.kwargs, "use_cache": None})[0]
        assert hidden_error(found, stock, call) < LIMIT
        once = model(**{**call.kwargs, "use_cache": None})[0]
    assert torch.equal(found, once)


def test_a_missing_layer_is_noticed(build: Build, packed: Call) -> None:
    model = build().model
    fpp.apply(model)
    layer = model.layers[1].self_attn
    layer.forward = type(layer).forward.__get__(layer)
    with pytest.raises(fpp.PackingError, match=r"layers\.1\.self_attn"):
        model.forward(**packed.kwargs)


def around_base(model: Any) -> Any:
    """LoRA around a bare base model, which for this task calls ``model.forward(...)``."""
    importlib.import_module("torch.distributed.tensor")  # PEFT 0.19 uses it unasked
    peft = pytest.importorskip("peft", exc_type=ImportError)
    config = peft.LoraConfig(
        task_type="FEATURE_EXTRACTION", r=4, target_modules=["q_proj", "v_proj"],
        init_lora_weights=False,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return peft.get_peft_model(model, config)


@pytest.mark.parametrize("order", ["before", "after"])
def test_peft_around_a_base_model(build: Build, packed: Call, order: str) -> None:
    model, stock = build().model, around_base(build().model)
    if order == "before":
        fpp.apply(model)
    wrapped = around_base(model)
    fpp.apply(wrapped)
    with torch.no_grad():
        assert hidden_error(wrapped(**packed.kwargs)[0], stock, packed) < LIMIT
        varlen = _varlen(TWO)
        assert hidden_error(wrapped(**varlen.kwargs)[0], stock, varlen) < LIMIT
    layer = model.layers[1].self_attn
    layer.forward = type(layer).forward.__get__(layer)
    with pytest.raises(fpp.PackingError, match=r"layers\.1\.self_attn"):
        wrapped(**packed.kwargs)


@pytest.mark.parametrize("part", ["peft", "forward"])
def test_compiled_with_lengths(build: Build, part: str) -> None:
    """In a graph too what stands for the base model's forward does the hooks' work."""
    torch._dynamo.reset()
    call = _varlen(TWO)
    call.kwargs["use_cache"] = False
    lengths = {n: v.to(torch.int32) for n, v in call.kwargs.items() if n.startswith("cu_seq")}
    model, stock = build().model, build().model
    if part == "peft":
        model, stock = around_base(model), around_base(stock)
    fpp.apply(model)
    compiled = torch.compile(model if part == "peft" else model.forward, backend="eager")
    with torch.no_grad():
        found = compiled(**{**call.kwargs, **lengths})[0]
        assert hidden_error(found, stock, call) < LIMIT
        base = model.base_model.model if part == "peft" else model
        assert base._fa2_pack_patch.traced is None


def gradients(model: Any, given: dict[str, Any]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(**given)[0].square().sum().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def test_peft_around_a_base_model_with_offloaded_activations(build: Build, packed: Call) -> None:
    """A recompute then finds its examples by value, for which the run must live as long."""
    model = around_base(build().model).train()
    fpp.apply(model)
    want = gradients(model, packed.kwargs)
    assert want
    checkpointed(model.base_model.model)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        found = gradients(model, packed.kwargs)
    for name, value in want.items():
        assert torch.allclose(found[name], value, atol=LIMIT), name


def fail(*_: Any) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("where", ["layer", "hook", "input"])
def test_after_a_forward_that_raised(build: Build, packed: Call, where: str) -> None:
    """What nobody read where the examples are is refused then too."""
    model = build()
    fpp.apply(model)
    base, ids, positions = model.model, packed.kwargs["input_ids"], packed.kwargs["position_ids"]
    if where == "layer":
        handle = base.layers[0].register_forward_pre_hook(fail)
        with pytest.raises(ZeroDivisionError):
            model(input_ids=ids)
        handle.remove()
    elif where == "hook":
        with pytest.raises(fpp.PackingError):
            model(input_ids=ids, position_ids=positions, use_cache=True)
    else:
        with pytest.raises(Exception):  # noqa: B017 - the release's own, of another kind in each
            model(input_ids=ids + 10**6)
    with torch.no_grad():
        hidden = base.embed_tokens(ids)
        more: dict[str, Any] = {"attention_mask": None, "position_ids": positions}
        if hasattr(base, "rotary_emb"):
            more["position_embeddings"] = base.rotary_emb(hidden, positions)
        with pytest.raises(fpp.PackingError, match="so nobody read where the examples are"):
            base.layers[0](hidden, **more)


def test_nothing_is_seen_before_it_is_called(build: Build, packed: Call) -> None:
    """A hook behind ours raised: the next forward is not taken for the one that ours saw."""
    model, stock = build().model, build().model
    fpp.apply(model)
    handle = model.register_forward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):
        model(input_ids=packed.kwargs["input_ids"])
    handle.remove()
    with torch.no_grad():
        assert hidden_error(model.forward(**packed.kwargs)[0], stock, packed) < LIMIT


@pytest.mark.parametrize("kind", ["positions", "lengths alone"])
@pytest.mark.parametrize("order", ["before", "after"])
def test_inputs_that_accelerate_moves(build: Build, packed: Call, order: str, kind: str) -> None:
    """It sends them to the model's device after the model's own hooks have seen them."""
    hooks = pytest.importorskip("accelerate.hooks")

    class Move(hooks.ModelHook):  # type: ignore[misc,name-defined]
        def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
            moved = {k: v.clone() if torch.is_tensor(v) else v for k, v in kwargs.items()}
            return args, moved

    model, stock, call = build(), build().model, packed
    if kind == "lengths alone":
        call = _varlen(TWO)
        rows, tokens = call.kwargs["input_ids"].shape
        call.kwargs["position_ids"] = torch.arange(tokens).expand(rows, tokens)
        for e in call.examples:
            e.positions.copy_(torch.arange(e.start, e.start + len(e.tokens)))
        if Version("4.42") > RELEASE:
            pytest.skip("stock's rope is as long as the row there")
    if order == "before":
        fpp.apply(model)
    hooks.add_hook_to_module(model.model, Move())
    fpp.apply(model)
    with torch.no_grad():
        for _ in range(2):
            found = model(**call.kwargs, output_hidden_states=True).hidden_states[-1]
            assert hidden_error(found, stock, call) < LIMIT
        ids = packed.kwargs["input_ids"]
        assert torch.equal(model(input_ids=ids).logits, build()(input_ids=ids).logits)


@pytest.mark.parametrize("kind", ["positions", "varlen"])
def test_positions_changed_behind_our_hook_are_refused(build: Build, kind: str) -> None:
    model = build()
    fpp.apply(model)
    call = _positions(TWO) if kind == "positions" else _varlen(TWO)

    def later(module: Any, args: Any, kwargs: Any) -> Any:
        return args, {**kwargs, "position_ids": torch.arange(3, 23).expand(2, 20)}

    handle = model.model.register_forward_pre_hook(later, with_kwargs=True)
    with pytest.raises(fpp.PackingError, match=r"were changed .* to \[\[3, 4, 5.*before the model"):
        model(**{**call.kwargs, "use_cache": None})
    handle.remove()
    assert model(**{**call.kwargs, "use_cache": None}).logits.isfinite().all()
