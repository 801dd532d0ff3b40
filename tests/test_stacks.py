"""What else people do to a model: each stack works, applied before and after, or is refused."""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import os
import re
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

import fa2_pack_patch as fpp
from fa2_pack_patch import compat, registry
from fa2_pack_patch.interceptors import home_of
from tests.matrix import models
from tests.matrix.kinds import TWO, Call, _plain, _positions, _varlen

LIMIT = 2e-4
Build = Callable[..., torch.nn.Module]
Wrap = Callable[[torch.nn.Module], torch.nn.Module]


# What is done to a model


class PackedInt8(torch.nn.Module):
    """A linear layer as GPTQ, AWQ and HQQ put it: no Linear, no ``weight``, only buffers."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        scales = weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("scales", scales)
        self.register_buffer("qweight", (weight / scales).round().to(torch.int8))
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.qweight.to(x.dtype) * self.scales.to(x.dtype))


class Int8Weight(torch.nn.Linear):
    """As bitsandbytes puts it: a Linear whose ``weight`` is a parameter of an integer dtype."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False)
        packed = PackedInt8(linear)
        self.register_buffer("scales", packed.scales)
        self.weight = torch.nn.Parameter(packed.qweight, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight.to(x.dtype) * self.scales.to(x.dtype))


class NoWeight(Int8Weight):
    """A Linear by its class, without any ``weight`` left."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__(linear)
        packed = self.weight.data
        del self.weight
        self.register_buffer("qweight", packed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.qweight.to(x.dtype) * self.scales.to(x.dtype))


def replaced_linears(kind: type[torch.nn.Module]) -> Wrap:
    def wrap(model: torch.nn.Module) -> torch.nn.Module:
        for layer in model.model.layers:
            for parent in (layer.self_attn, layer.mlp):
                for name, module in list(parent.named_children()):
                    if isinstance(module, torch.nn.Linear):
                        setattr(parent, name, kind(module))
        return model

    return wrap


def torchao(model: torch.nn.Module) -> torch.nn.Module:
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(model.model, quantization.Int8WeightOnlyConfig())
    return model


def lora(model: torch.nn.Module) -> torch.nn.Module:
    import torch.distributed.tensor  # PEFT 0.19 uses it unasked; old releases do not import it

    peft = pytest.importorskip("peft", exc_type=ImportError)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return peft.get_peft_model(model, config)


def cpu_offload(model: torch.nn.Module) -> torch.nn.Module:
    accelerate = pytest.importorskip("accelerate")
    return accelerate.cpu_offload(model, execution_device=torch.device("cpu"))


def device_map(model: torch.nn.Module) -> torch.nn.Module:
    """Each module has a hook of accelerate's, the second layer is offloaded."""
    accelerate = pytest.importorskip("accelerate")
    places = {
        "model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk",
        "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu",
    }  # fmt: skip
    if not hasattr(model.model, "rotary_emb"):
        del places["model.rotary_emb"]
    folder = Path(os.environ["PYTEST_OFFLOAD"])
    return accelerate.dispatch_model(
        model, places, main_device="cpu", offload_dir=str(folder), force_hooks=True
    )


def hooked(model: torch.nn.Module) -> torch.nn.Module:
    """accelerate's hooks on every module, as ``device_map`` puts them, nothing offloaded."""
    hooks = pytest.importorskip("accelerate.hooks")
    for module in model.modules():
        hooks.add_hook_to_module(module, hooks.AlignDevicesHook(execution_device="cpu"))
    return model


def hooked_of_old(model: torch.nn.Module) -> torch.nn.Module:
    """The same as accelerate did it until 0.24: its forward calls the one that it found."""

    def hook(module: torch.nn.Module) -> None:
        old_forward = module.forward
        module._old_forward, module._hf_hook = old_forward, object()

        @functools.wraps(old_forward)
        def new_forward(*args: Any, **kwargs: Any) -> Any:
            return old_forward(*args, **kwargs)

        module.forward = new_forward

    for module in model.modules():
        hook(module)
    return model


def fp32_outputs(model: torch.nn.Module) -> torch.nn.Module:
    """What accelerate's ``prepare`` does to a model under mixed precision."""
    operations = pytest.importorskip("accelerate.utils.operations")
    forward = model.forward
    function = getattr(forward, "__func__", None)
    if function is None:
        model.forward = operations.convert_outputs_to_fp32(forward)
    else:
        model.forward = types.MethodType(operations.convert_outputs_to_fp32(function), model)
    return model


def prepared(model: torch.nn.Module) -> torch.nn.Module:
    """What accelerate's ``prepare`` makes of it under mixed precision."""
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(True)
    try:
        found = accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare(model)
    finally:
        accelerate.state.AcceleratorState._reset_state(True)
    return found  # type: ignore[no-any-return]


def checkpointed(reentrant: bool) -> Wrap:
    def wrap(model: torch.nn.Module) -> torch.nn.Module:
        enable = model.gradient_checkpointing_enable
        if inspect.signature(enable).parameters:
            enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        else:  # 4.34 has the reentrant kind only
            enable()
        model.enable_input_require_grads()
        return model

    return wrap


def checkpoint_wrapper(model: torch.nn.Module) -> torch.nn.Module:
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as torchs

    kind = type(model.model.layers[0])
    torchs.apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, kind))
    return model


def offload_wrapper(model: torch.nn.Module) -> torch.nn.Module:
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as torchs

    for n, layer in enumerate(model.model.layers):
        model.model.layers[n] = torchs.offload_wrapper(layer)
    return model


def compiled(part: str) -> Wrap:
    def wrap(model: torch.nn.Module) -> torch.nn.Module:
        torch._dynamo.reset()
        for n, layer in list(enumerate(model.model.layers))[1:]:
            if part == "layer":
                model.model.layers[n] = torch.compile(layer, backend="eager", dynamic=True)
            else:
                own = torch.compile(getattr(layer, part), backend="eager", dynamic=True)
                setattr(layer, part, own)
        return model

    return wrap


def weight_norm(model: torch.nn.Module) -> torch.nn.Module:
    """A parametrisation makes a class of its own for each module."""
    for layer in model.model.layers:
        torch.nn.utils.parametrizations.weight_norm(layer.self_attn.q_proj)
    return model


def liger_like(model: torch.nn.Module) -> torch.nn.Module:
    """What Liger-Kernel does to a loaded model, with torch in place of its Triton kernels."""
    modeling = sys.modules[type(model).__module__]

    def rotary(q: Any, k: Any, cos: Any, sin: Any, *more: Any, **named: Any) -> Any:
        CALLS.add("rotary")
        return STOCK["rotary"](q, k, cos, sin, *more, **named)

    def norm(self: Any, x: torch.Tensor) -> torch.Tensor:
        CALLS.add("norm")
        scale = x.pow(2).mean(-1, keepdim=True).add(self.variance_epsilon).rsqrt()
        return self.weight * (x * scale)

    def mlp(self: Any, x: torch.Tensor) -> torch.Tensor:
        CALLS.add("mlp")
        return self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))

    def head(self: Any, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        """Loss without the shifted logits, by the hidden states."""
        CALLS.add("head")
        found = self.model(input_ids=input_ids, **kwargs)
        hidden = found[0]
        logits, loss = self.lm_head(hidden), None
        if labels is not None:
            loss = torch.nn.functional.cross_entropy(
                self.lm_head(hidden[:, :-1]).flatten(0, 1), labels[:, 1:].flatten()
            )
        return types.SimpleNamespace(loss=loss, logits=logits)

    modeling.apply_rotary_pos_emb = rotary
    model.forward = types.MethodType(head, model)
    for layer in model.model.layers:
        layer.mlp.__dict__["forward"] = mlp.__get__(layer.mlp)
        for module in (layer.input_layernorm, layer.post_attention_layernorm):
            module.__dict__["forward"] = norm.__get__(module)
    return model


CALLS: set[str] = set()
#: what the release itself has by the name ``rotary``
STOCK: dict[str, Any] = {}


def liger(model: torch.nn.Module) -> torch.nn.Module:
    """The real one's patching, where it is installed; its Triton kernels give way to torch."""
    patches = pytest.importorskip("liger_kernel.transformers.monkey_patch", exc_type=ImportError)
    operations = importlib.import_module("liger_kernel.ops")
    for name, stand_in in _LIGER.items():
        getattr(operations, name).apply = stand_in
    patches.apply_liger_kernel_to_llama(model=model)
    return model


def _liger_norm(x: Any, weight: Any, eps: float, *_: Any) -> torch.Tensor:
    CALLS.add("liger norm")
    return weight * (x * x.pow(2).mean(-1, keepdim=True).add(eps).rsqrt())


def _liger_mlp(a: torch.Tensor, b: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.nn.functional.silu(a) * b


def _liger_rope(q: Any, k: Any, cos: Any, sin: Any, *_: Any) -> Any:
    CALLS.add("liger rope")
    return STOCK["rotary"](q, k, cos, sin)


def _liger_loss(x: Any, weight: Any, target: Any, *_: Any) -> Any:
    CALLS.add("liger loss")
    loss = torch.nn.functional.cross_entropy((x @ weight.t()).float(), target)
    return loss, None, None, None


_LIGER: dict[str, Any] = {
    "LigerRMSNormFunction": _liger_norm,
    "LigerSiLUMulFunction": _liger_mlp,
    "LigerRopeFunction": _liger_rope,
    "LigerFusedLinearCrossEntropyFunction": _liger_loss,
}


@dataclass(frozen=True)
class Stack:
    """Something done to a model; ``trains`` where gradients flow to what is left to train."""

    name: str
    wrap: Wrap
    trains: bool = True
    around: Callable[[], Any] = nullcontext
    #: what is said where it comes after apply and cannot work there
    refused: str | None = None


def _save_on_cpu() -> Any:
    return torch.autograd.graph.save_on_cpu()


STACKS = [
    Stack("nothing", lambda model: model),
    Stack("lora", lora),
    Stack("gptq-like", replaced_linears(PackedInt8)),
    Stack("bitsandbytes-like", replaced_linears(Int8Weight)),
    Stack("linear-without-weight", replaced_linears(NoWeight)),
    Stack("torchao", torchao, trains=False),
    Stack("cpu_offload", cpu_offload, trains=False),
    Stack("device_map", device_map, trains=False),
    Stack("accelerate-hooks", hooked),
    Stack("accelerate-hooks-of-0.24", hooked_of_old),
    Stack("accelerate-fp32-outputs", fp32_outputs),
    Stack("checkpointing", checkpointed(False)),
    Stack("checkpointing-reentrant", checkpointed(True)),
    Stack("checkpoint_wrapper", checkpoint_wrapper),
    Stack("offload_wrapper", offload_wrapper),
    Stack("save_on_cpu", lambda model: model, around=_save_on_cpu),
    Stack("save_on_cpu-checkpointing", checkpointed(False), around=_save_on_cpu),
    Stack("compiled-mlp", compiled("mlp")),
    Stack("compiled-attention", compiled("self_attn")),
    Stack("compiled-layer", compiled("layer")),
    Stack("weight_norm", weight_norm),
    Stack("lora-checkpointing", lambda model: lora(checkpointed(True)(model))),
    Stack("lora-fp32-outputs", lambda model: fp32_outputs(lora(model))),
    Stack("liger-like", liger_like),
    Stack("liger", liger),
    # Two that pass both of ours by: the head's forward replaced, and called without its hooks.
    Stack(
        "lora-liger-like",
        lambda model: lora(liger_like(model)),
        refused=r"apply\(model\) again, last",
    ),
]


# Packed against separate


@pytest.fixture(autouse=True)
def whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What stacks bind in modules and classes is put back."""
    from transformers.models.llama import modeling_llama

    monkeypatch.setenv("PYTEST_OFFLOAD", str(tmp_path))
    before = dict(vars(modeling_llama))
    STOCK["rotary"] = modeling_llama.apply_rotary_pos_emb
    liger_ops = sys.modules.get("liger_kernel.ops")
    for name in _LIGER if liger_ops else ():
        function = getattr(liger_ops, name)
        monkeypatch.setattr(function, "apply", function.apply)
    CALLS.clear()
    yield
    for name, value in before.items():
        setattr(modeling_llama, name, value)


def one_by_one(model: torch.nn.Module, call: Call, trains: bool) -> tuple[list[Any], float]:
    """Each example's logits, and the mean loss over all targets; gradients are left in place."""
    model.zero_grad(set_to_none=True)
    logits, total = [], 0.0
    count = sum(len(e.tokens) - 1 for e in call.examples)
    for e in call.examples:
        given = {"input_ids": e.tokens[None], "position_ids": e.positions[None]}
        if len(e.tokens) == 1:  # no target
            with torch.no_grad():
                logits.append(model(**given, use_cache=False).logits[0])
            continue
        with torch.set_grad_enabled(trains):
            out = model(**given, labels=given["input_ids"], use_cache=False)
        if out.logits is None:  # Liger's loss does without
            with torch.no_grad():
                out.logits = model(**given, use_cache=False).logits
        logits.append(out.logits[0].detach())
        share = out.loss * ((len(e.tokens) - 1) / count)
        total += share.item()
        if trains:
            share.backward()
    return logits, total


def gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def differ(model: torch.nn.Module, call: Call, want: list[torch.Tensor]) -> float:
    with torch.no_grad():
        logits = model(**call.kwargs).logits
    return max(
        (logits[e.row, e.start : e.start + len(e.tokens)] - w).abs().max().item()
        for e, w in zip(call.examples, want)
    )


def build_stack(build: Build, stack: Stack, order: str) -> torch.nn.Module:
    model = build()
    if order == "apply first":
        fpp.apply(model)
        return stack.wrap(model)
    model = stack.wrap(model)
    if order == "apply last":
        fpp.apply(model)
    return model


ORDERS = ["apply first", "apply last"]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("stack", STACKS, ids=lambda s: s.name)
def test_packed_is_separate(build: Build, stack: Stack, order: str) -> None:
    call = _positions(TWO)
    alone = build_stack(build, stack, "never").train(stack.trains)
    model = build_stack(build, stack, order).train(stack.trains)
    assert fpp.is_applied(model)
    if stack.refused and order == "apply first":
        with pytest.raises(fpp.PackingError, match=stack.refused):
            model(**call.kwargs)
        return
    with stack.around():
        want, loss = one_by_one(alone, call, stack.trains)
        assert differ(model, call, want) < LIMIT
        labels = call.kwargs["input_ids"].clone()  # the first tokens are targets for all we say
        with torch.set_grad_enabled(stack.trains):
            got = model(**call.kwargs, labels=labels).loss
        assert got.item() == pytest.approx(loss, abs=LIMIT)
        if stack.trains:
            got.backward()
    if stack.trains:
        wanted, found = gradients_of(alone), gradients_of(model)
        assert set(found) == set(wanted)
        assert wanted
        for name, gradient in wanted.items():
            assert torch.allclose(found[name], gradient, atol=LIMIT), name
    plain = _plain(9, 2).kwargs
    with torch.no_grad():
        assert torch.equal(model(**plain).logits, alone(**plain).logits)
    if "liger" in stack.name:
        assert len(CALLS) >= 3, CALLS
    fpp.revert(model)
    assert not fpp.is_applied(model)
    del call.kwargs["use_cache"]  # its default is True, with which stock mixes examples
    assert differ(model.eval(), call, want) > LIMIT
    with torch.no_grad():
        assert torch.equal(model(**plain).logits, alone.eval()(**plain).logits)


@pytest.mark.parametrize("order", ["never", *ORDERS])
@pytest.mark.parametrize("stack", STACKS, ids=lambda s: s.name)
def test_verify(build: Build, stack: Stack, order: str) -> None:
    """True where packing is in force, however the model was changed, and where it is not false."""
    model = build_stack(build, stack, order)
    with stack.around():
        report = fpp.verify(model)
    refused = stack.refused is not None and order == "apply first"
    assert report.passed == (order != "never" and not refused), str(report)
    if refused:
        assert re.search(str(stack.refused), str(report))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="Liger's kernels need a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("order", ["never", *ORDERS])
def test_verify_with_ligers_kernels(build: Build, order: str, dtype: torch.dtype) -> None:
    patches = pytest.importorskip("liger_kernel.transformers.monkey_patch", exc_type=ImportError)
    model = build(hidden_size=128, intermediate_size=256).to("cuda", dtype)
    if order == "apply first":
        fpp.apply(model)
    patches.apply_liger_kernel_to_llama(model=model)
    if order == "apply last":
        fpp.apply(model)
    report = fpp.verify(model)
    assert report.passed == (order != "never"), str(report)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("stack", [s for s in STACKS if "comp" not in s.name], ids=lambda s: s.name)
def test_apply_again_after_revert(build: Build, stack: Stack, order: str) -> None:
    call = _positions(TWO)
    want, _ = one_by_one(build_stack(build, stack, "never"), call, False)
    model = build_stack(build, stack, order)
    fpp.revert(model)
    fpp.apply(model)
    assert differ(model, call, want) < LIMIT


@pytest.mark.parametrize("order", ORDERS)
def test_varlen_arguments_through_peft(build: Build, order: str) -> None:
    """Old releases' forwards do not know them, and PEFT calls a forward without its hooks."""
    stack = next(s for s in STACKS if s.name == "lora")
    call = _varlen(TWO)
    want, loss = one_by_one(build_stack(build, stack, "never"), call, False)
    model = build_stack(build, stack, order)
    assert differ(model, call, want) < LIMIT
    got = model(**call.kwargs, labels=call.kwargs["input_ids"]).loss
    assert got.item() == pytest.approx(loss, abs=LIMIT)


def test_a_forward_without_hooks_reads_the_batch_once(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fa2_pack_patch import hooks

    patched = build()
    fpp.apply(patched)
    model = lora(patched)
    reads = []
    real = hooks.to_host
    monkeypatch.setattr(hooks, "to_host", lambda *a: reads.append(1) or real(*a))
    model(**_positions(TWO).kwargs)
    assert len(reads) == 1
    model(input_ids=torch.arange(3, 9)[None], position_ids=torch.arange(6)[None])
    assert len(reads) == 2


def test_a_patched_forward_has_the_signature_of_the_class(build: Build) -> None:
    """Trainer drops the columns of a batch that are not in it, generate() refuses them."""
    model = build()
    want = inspect.signature(model.forward)
    fpp.apply(model)
    assert inspect.signature(model.forward) == want
    assert "labels" in inspect.signature(model.forward).parameters


@pytest.mark.parametrize("removed", ["before revert", "after revert"])
@pytest.mark.parametrize("order", ORDERS)
def test_accelerate_hooks_that_come_and_go(build: Build, order: str, removed: str) -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    model = build_stack(build, Stack("hooks", hooked), order)
    if removed == "before revert":
        hooks.remove_hook_from_submodules(model)
        call = _positions(TWO)
        want, _ = one_by_one(build(), call, False)
        assert differ(model, call, want) < LIMIT
    fpp.revert(model)
    if removed == "after revert":
        hooks.remove_hook_from_submodules(model)
    for module in model.modules():
        for value in module.__dict__.values():
            assert not type(value).__module__.startswith("fa2_pack_patch"), value
    fpp.apply(model)


@pytest.mark.parametrize("order", ["first", "between", "last"])
def test_accelerate_takes_its_mixed_precision_off_again(build: Build, order: str) -> None:
    """It binds what it finds under its own wrappers to the model, as a function."""
    accelerate = pytest.importorskip("accelerate")
    call, stock = _positions(TWO), build()
    wanted, _ = one_by_one(stock, call, False)
    model: Any = build()
    if order == "first":
        fpp.apply(model)
    model = prepared(model)
    if order == "between":
        fpp.apply(model)
    model = accelerate.utils.extract_model_from_parallel(model, keep_fp32_wrapper=False)
    if order == "last":
        fpp.apply(model)
    assert differ(model, call, wanted) < LIMIT
    assert inspect.signature(model.forward) == inspect.signature(stock.forward)
    plain = {"input_ids": call.kwargs["input_ids"]}
    with torch.no_grad():
        assert torch.equal(model(**plain).logits, stock(**plain).logits)
        loss = model(**call.kwargs, labels=plain["input_ids"]).loss.item()
        if order == "between":  # what stood there went with accelerate's own
            with pytest.raises(fpp.PackingError, match="forward was replaced after apply"):
                model.forward(**call.kwargs, labels=plain["input_ids"])
            fpp.apply(model)
        assert model.forward(**call.kwargs, labels=plain["input_ids"]).loss.item() == loss
    again = deepcopy(model)
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()
    assert differ(again, call, wanted) < LIMIT
    fpp.revert(model)
    assert "fa2_pack_patch" not in repr(model.__dict__.get("forward"))


# What is refused


def prompted(model: torch.nn.Module, kind: str) -> torch.nn.Module:
    """A model under PEFT's prompt learning, where this PEFT has that for this release."""
    peft = pytest.importorskip("peft", exc_type=ImportError)
    config = getattr(peft, kind)(
        task_type="CAUSAL_LM", num_virtual_tokens=3, token_dim=32, num_transformer_submodules=1,
        num_attention_heads=4, num_layers=2,
    )  # fmt: skip
    try:
        return peft.get_peft_model(model, config)
    except TypeError as error:  # 0.15 and later want a config of 4.44 or later
        if "is not iterable" not in str(error):
            raise
        pytest.skip(f"PEFT {peft.__version__} has no prompt learning for this release")


PROMPTS = ["PrefixTuningConfig", "PromptTuningConfig", "PromptEncoderConfig"]


@pytest.mark.parametrize("kind", PROMPTS)
def test_prompt_learning_is_refused(build: Build, kind: str) -> None:
    wrapped = prompted(build(num_key_value_heads=4), kind)
    with pytest.raises(fpp.UnsupportedModelError, match="prompt learning"):
        fpp.apply(wrapped)
    patched = build(num_key_value_heads=4)
    fpp.apply(patched)
    with pytest.raises(fpp.UnsupportedModelError, match="prompt learning"):
        fpp.apply(prompted(patched, kind))


class Around(torch.nn.Module):
    """As DistributedDataParallel and others hand a call on."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


@pytest.mark.parametrize(
    ("kind", "around"),
    [*itertools.product(PROMPTS, ["nothing", "wrapper", "fp32-outputs"]), (PROMPTS[1], "compiled")],
)
def test_prompt_learning_after_apply_is_refused_by_packed_calls(
    build: Build, kind: str, around: str
) -> None:
    """PEFT drops position_ids there, and only warns; its other calls are left alone."""
    patched, alone = build(num_key_value_heads=4), build(num_key_value_heads=4)
    fpp.apply(patched)
    wrap: dict[str, Wrap] = {
        "nothing": lambda model: model,
        "wrapper": Around,
        "fp32-outputs": fp32_outputs,
        "compiled": lambda model: torch.compile(model, backend="eager"),
    }
    torch._dynamo.reset()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        stock = prompted(alone, kind)
        torch.manual_seed(3)
        prompting = prompted(patched, kind)
    model = wrap[around](prompting)
    says = rf"lengths \[4, 9, 7, 11, 1, 8\].*{stock.active_peft_config.peft_type.value}.*LoRA"
    call = _positions(TWO).kwargs
    del call["use_cache"]
    with torch.no_grad():
        for given in (call, {**call, "attention_mask": torch.ones(2, 20, dtype=torch.long)}):
            with pytest.raises(fpp.PackingError, match=says):
                model(**given)
        segments = torch.tensor([[1, 1, 2, 2, 2]])
        with pytest.raises(fpp.PackingError, match=r"lengths \[2, 3\]"):
            model(input_ids=torch.arange(3, 8)[None], attention_mask=segments)
        with pytest.raises(fpp.PackingError, match="cu_seq_lens_q"):
            model(**_varlen(TWO).kwargs)
        for given in right_calls():
            assert torch.equal(model(**given).logits, stock(**given).logits)
    ids = torch.arange(3, 8)[None]
    options = {"input_ids": ids, "max_new_tokens": 3, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(prompting.generate(**options), stock.generate(**options))


def right_calls() -> list[dict[str, torch.Tensor]]:
    """One example a row, with and without what tells so."""
    ids = torch.tensor([[5, 6, 7, 8, 9], [7, 8, 9, 0, 0]])
    mask = (ids != 0).long()
    return [
        {"input_ids": ids},
        {"input_ids": ids, "attention_mask": mask},
        {"input_ids": ids, "attention_mask": mask, "position_ids": torch.arange(5)[None]},
        {"input_ids": ids[:1], "position_ids": torch.arange(5)[None]},
        {"input_ids": ids, "labels": ids, "position_ids": torch.arange(5).expand(2, 5)},
    ]


@pytest.mark.parametrize("kind", PROMPTS)
def test_prompt_learning_called_by_its_forward(build: Build, kind: str) -> None:
    """No hook of PEFT's model has seen its arguments, of which prompt tuning drops positions."""
    patched, alone = build(num_key_value_heads=4), build(num_key_value_heads=4)
    fpp.apply(patched)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        stock = prompted(alone, kind)
        torch.manual_seed(3)
        model = prompted(patched, kind)
    call = _positions(TWO).kwargs
    del call["use_cache"]
    keeps = kind == "PrefixTuningConfig" and _offsets_positions()
    with torch.no_grad():
        for given in (call, {**call, "attention_mask": torch.ones(2, 20, dtype=torch.long)}):
            with pytest.raises(fpp.PackingError, match=r"lengths \[4, 9, 7, 11, 1, 8\]"):
                model.forward(**given)
        with pytest.raises(fpp.PackingError, match="lengths" if keeps else r"not model\.forward"):
            call_by_forward(model)
        varlen = _varlen(TWO).kwargs
        with pytest.raises(fpp.PackingError, match="cu_seq_lens_q"):
            model.forward(**varlen)
        for given in right_calls():
            assert torch.equal(model.forward(**given).logits, stock.forward(**given).logits)
        odd = torch.tensor([[0, 1, 2, 3, 4], [0, 1, 2, 0, 0]])
        given = {**right_calls()[1], "position_ids": odd}
        assert torch.equal(model.forward(**given).logits, stock.forward(**given).logits)


def test_activated_lora_is_refused(build: Build) -> None:
    """It adapts a row from its last invocation tokens on: not the examples before, silently."""
    import torch.distributed.tensor  # PEFT 0.19 uses it unasked

    peft = pytest.importorskip("peft", exc_type=ImportError)
    if Version("4.52.1") > compat.release():
        pytest.skip("PEFT has no aLoRA for this release")
    call = _positions(TWO).kwargs
    del call["use_cache"]
    tokens = call["input_ids"][0, 5:6].tolist()
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False,
        alora_invocation_tokens=tokens,
    )  # fmt: skip

    def adapted(model: torch.nn.Module) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            return peft.get_peft_model(model, config).eval()

    with pytest.raises(fpp.UnsupportedModelError, match="aLoRA"):
        fpp.apply(adapted(build()))
    model, stock = build(), adapted(build())
    fpp.apply(model)
    wrapped = adapted(model)
    with torch.no_grad():
        with pytest.raises(fpp.PackingError, match=rf"aLoRA.*{tokens[0]}.*not of each example"):
            wrapped(**call)
        ids = call["input_ids"]
        assert torch.equal(wrapped(input_ids=ids).logits, stock(input_ids=ids).logits)
        with wrapped.disable_adapter():
            assert torch.equal(wrapped(**call).logits, model(**call).logits)


def test_lily_is_refused(build: Build) -> None:
    """It weighs its experts by the mean over all tokens, the other examples' too, silently."""
    peft = pytest.importorskip("peft", exc_type=ImportError)
    if not hasattr(peft, "LilyConfig"):
        pytest.skip("PEFT has no Lily for this release")
    call = _positions(TWO).kwargs
    del call["use_cache"]
    model, stock = build(), build()
    plain = stock(input_ids=call["input_ids"]).logits
    config = peft.LilyConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"])
    with pytest.raises(fpp.UnsupportedModelError, match="LILY weighs.*mean.*use LoRA"):
        fpp.apply(peft.get_peft_model(stock, config))
    fpp.apply(model)
    alone = model(**call).logits
    wrapped = peft.get_peft_model(model, config).eval()
    with torch.no_grad():
        with pytest.raises(fpp.PackingError, match="LILY weighs.*mean.*one example a row"):
            wrapped(**call)
        with wrapped.disable_adapter():
            assert torch.equal(wrapped(**call).logits, alone)
            assert torch.equal(wrapped(input_ids=call["input_ids"]).logits, plain)


def call_by_forward(model: Any) -> Any:
    """With positions that no name of this function holds."""
    return model.forward(torch.arange(3, 9)[None], position_ids=torch.arange(6)[None] % 3)


def _offsets_positions() -> bool:
    """PEFT hands positions on to a model under prefix tuning since 0.18."""
    peft = pytest.importorskip("peft", exc_type=ImportError)
    return Version(peft.__version__) >= Version("0.18")


def test_data_parallel_is_refused(build: Build) -> None:
    model = build()
    with pytest.raises(fpp.UnsupportedModelError, match="DistributedDataParallel"):
        fpp.apply(torch.nn.DataParallel(model))
    fpp.apply(model)
    with pytest.raises(fpp.UnsupportedModelError, match="DistributedDataParallel"):
        fpp.apply(torch.nn.DataParallel(model))
    assert fpp.is_applied(model)


def replica(model: torch.nn.Module) -> torch.nn.Module:
    """What nn.DataParallel makes for each device, which takes GPUs."""
    copies = {m: m._replicate_for_data_parallel() for m in model.modules()}
    for module, copy in copies.items():
        for name, child in module._modules.items():
            copy._modules[name] = None if child is None else copies[child]
        for name, parameter in module._parameters.items():
            setattr(copy, name, parameter)
    return copies[model]


def test_a_data_parallel_copy_of_a_patched_model_says_so(build: Build) -> None:
    call = _positions(TWO)
    model = build()
    replica(model)(**call.kwargs)
    fpp.apply(model)
    for kwargs in (call.kwargs, _plain(9).kwargs):
        with pytest.raises(fpp.PackingError, match="DistributedDataParallel"):
            replica(model)(**kwargs)
    model(**call.kwargs)


@contextmanager
def other_library(name: str = "other_library") -> Iterator[types.ModuleType]:
    """A module of somebody else's, with functions that stand for attention."""
    module = types.ModuleType(name)
    source = """
import functools

def forward(self, *args, **kwargs):
    raise AssertionError("not to be called")

def attention(*args, **kwargs):
    raise AssertionError("not to be called")

class Callable:
    def __call__(self, *args, **kwargs):
        raise AssertionError("not to be called")

def wrapped(function):
    @functools.wraps(function)
    def inner(*args, **kwargs):
        return function(*args, **kwargs)
    return inner

def hidden(function):
    kept = [function]
    @functools.wraps(function)
    def inner(*args, **kwargs):
        return kept[0](*args, **kwargs)
    return inner
"""
    exec(compile(source, name, "exec"), module.__dict__)
    sys.modules[name] = module
    yield module
    del sys.modules[name]


def refused(model: torch.nn.Module) -> None:
    before = {id(m): dict(m.__dict__) for m in model.modules()}
    with pytest.raises(fpp.UnsupportedModelError, match="other_library"):
        fpp.apply(model)
    assert {id(m): dict(m.__dict__) for m in model.modules()} == before
    assert not fpp.supports(model)


@pytest.mark.parametrize("how", ["function", "method", "partial", "object"])
def test_a_forward_on_the_module_itself(build: Build, how: str) -> None:
    with other_library() as library:
        model = build()
        module = model.model.layers[1].self_attn
        module.forward = {
            "function": library.forward,
            "method": library.forward.__get__(module),
            "partial": functools.partial(library.forward, module),
            "object": library.Callable(),
        }[how]
        refused(model)
        del module.forward
        fpp.apply(model)
        module.forward = library.wrapped(type(module).forward).__get__(module)  # goes past ours
        with pytest.raises(fpp.PackingError, match=r"layers\.1\.self_attn.*other_library"):
            model(**_positions(TWO).kwargs)


@pytest.mark.parametrize("how", ["function", "object", "partial"])
def test_a_forward_on_the_class(build: Build, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    with other_library() as library:
        model = build()
        kind = type(model.model.layers[0].self_attn)
        value = {
            "function": library.forward,
            "object": library.Callable(),
            "partial": functools.partial(library.forward),
        }[how]
        monkeypatch.setattr(kind, "forward", value)
        refused(model)


@pytest.mark.parametrize("how", ["wrapped", "hidden"])
@pytest.mark.parametrize("order", ORDERS)
def test_a_decorated_forward_on_the_class(
    build: Build, monkeypatch: pytest.MonkeyPatch, how: str, order: str
) -> None:
    """One that calls on is kept around the packed forward where that can be; else it is named."""
    call = _positions(TWO)
    want, _ = one_by_one(build(), call, False)
    with other_library() as library:
        model = build()
        kind = type(model.model.layers[0].self_attn)
        if order == "apply first":
            fpp.apply(model)
        monkeypatch.setattr(kind, "forward", getattr(library, how)(kind.forward))
        if order == "apply last":
            fpp.apply(model)
        if how == "hidden" and model.model._fa2_pack_patch.span.packed_class is None:
            with pytest.raises(fpp.PackingError, match="other_library"):
                model(**call.kwargs)
        else:
            assert differ(model, call, want) < LIMIT


def core_of(model: torch.nn.Module) -> tuple[Any, str]:
    """Where this release keeps what its attention goes to: a dictionary or a class, and the key."""
    patch = getattr(model, model.base_model_prefix)._fa2_pack_patch
    module = patch.sites[0].module
    code = vars(sys.modules[type(module).__module__])
    via, name = patch.span.via, patch.span.name
    implementation = compat.implementation_of(module, model.config, via)
    if via == "interface" and implementation == "eager":
        return code, "eager_attention_forward"
    if via in ("interface", "dict"):
        return code[name], implementation
    return (code, name) if via == "function" else (type(module), name)


def replace(
    monkeypatch: pytest.MonkeyPatch, place: tuple[Any, str], make: Callable[[Any], Any]
) -> None:
    holder, name = place
    if isinstance(holder, type):
        monkeypatch.setattr(holder, name, make(getattr(holder, name)))
    else:
        monkeypatch.setitem(holder, name, make(holder[name]))


def noticed(
    monkeypatch: pytest.MonkeyPatch,
    model: torch.nn.Module,
    call: Call,
    place: tuple[Any, str],
    make: Callable[[Any], Any],
) -> None:
    """A replacement after apply stops the next call, and a new apply for as long as it is there."""
    with monkeypatch.context() as later:
        replace(later, place, make)
        with pytest.raises(fpp.PackingError, match="since apply, .*other_library"):
            model(**call.kwargs)
        fpp.revert(model)
        refused(model)
    fpp.apply(model)
    model(**call.kwargs)


FOREIGN: dict[str, Callable[[types.ModuleType], Callable[[Any], Any]]] = {
    "function": lambda library: lambda _: library.attention,
    "wrapped": lambda library: library.wrapped,
    "partial": lambda library: lambda _: functools.partial(library.attention),
}


def foreign_cores() -> list[tuple[str, str]]:
    """Families and implementations whose attention this release calls by a name of its own."""
    release, found = compat.release(), []
    for family in ("llama", "gptj", "gemma2", "gpt_neox"):
        span = registry.families()[family].span(release)
        if span and (span.via in ("dict", "interface") or span.name == "_attn"):
            names = models.implementations(models.FAMILIES[family], str(release))
            found += [(family, n) for n in names if n in ("eager", "sdpa")]
    return found


@pytest.mark.parametrize("how", list(FOREIGN))
@pytest.mark.parametrize(("family", "implementation"), foreign_cores())
def test_somebody_elses_attention_function(
    build: Build,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    implementation: str,
    how: str,
) -> None:
    """Packed would bypass it, so the model would not be what it is without packing."""
    model = build(family, implementation)
    call = _positions(TWO)
    with other_library() as library:
        fpp.apply(model)
        model(**call.kwargs)
        noticed(monkeypatch, model, call, core_of(model), FOREIGN[how](library))


def loaded_as_flash_attention() -> None:
    """In a process of its own, where Transformers believes in a flash-attn on the CPU."""
    from tests.matrix.standin import activate

    activate.activate()
    monkeypatch = pytest.MonkeyPatch()
    model = models.build(models.FAMILIES["llama"], "flash_attention_2")
    fpp.apply(model)
    places = [core_of(model)]
    if Version("4.48") <= compat.release():
        from transformers.integrations import flash_attention

        places.append((vars(flash_attention), "_flash_attention_forward"))
    call = _positions(TWO)
    for place in places:
        with other_library() as library:
            noticed(monkeypatch, model, call, place, lambda _: library.attention)


def test_another_flash_attention_forward() -> None:
    import subprocess

    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c",
         "from tests import test_stacks as t; t.loaded_as_flash_attention()"],
        cwd=Path(__file__).resolve().parents[1], capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


def test_what_only_flash_attention_calls_is_no_matter_elsewhere(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old recipes for packing bind ``_get_unpad_data``; a model loaded as sdpa never calls it."""
    from transformers.models.llama import modeling_llama

    call = _positions(TWO)
    want, _ = one_by_one(build(), call, False)
    with other_library() as library:
        for name in ("_get_unpad_data", "_flash_attention_forward"):
            monkeypatch.setattr(modeling_llama, name, library.attention, raising=False)
        model = build()
        fpp.apply(model)
        assert differ(model, call, want) < LIMIT


def test_home_of_is_not_fooled_by_copied_names(build: Build) -> None:
    kind = type(build().model.layers[0].self_attn)
    with other_library() as library:
        assert home_of(kind.forward) == kind.__module__
        assert home_of(library.wrapped(kind.forward)) == "other_library"
        assert home_of(functools.partial(library.attention, 1)) == "other_library"
        assert home_of(library.Callable()) == "other_library"
        assert home_of(library.Callable().__call__) == "other_library"
