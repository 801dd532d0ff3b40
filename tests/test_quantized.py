"""Models loaded in 8 and 4 bits, by bitsandbytes and torchao where they are installed.

``python -m tests.others`` installs them into a folder of their own and runs this on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

import fa2_pack_patch as fpp
from fa2_pack_patch import compat
from tests.matrix.kinds import TWO, _plain, _positions

Build = Callable[..., torch.nn.Module]
WIDTH = {"hidden_size": 128, "intermediate_size": 128}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class WholeTensor(torch.nn.Linear):
    """Scales what comes in by its largest value of all, as tensor-wise float8 and int8 do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.detach().abs().amax() / 127
        rounded = (x / scale).round() * scale
        return super().forward(x + (rounded - x).detach())


def whole_tensor(model: torch.nn.Module) -> torch.nn.Module:
    for layer in model.model.layers:
        for parent in (layer.self_attn, layer.mlp):
            for module in parent.children():
                if isinstance(module, torch.nn.Linear):
                    module.__class__ = WholeTensor
    return model


@dataclass(frozen=True)
class Bits:
    """What ``BitsAndBytesConfig`` is given, and the dtype of all that is not quantised."""

    name: str
    options: dict[str, Any]
    dtype: torch.dtype = torch.float32


_NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
BITS = [
    Bits("int8", {"load_in_8bit": True}),
    Bits("int8-bf16", {"load_in_8bit": True}, torch.bfloat16),
    Bits("nf4", {**_NF4, "bnb_4bit_compute_dtype": torch.float32}),
    Bits(
        "nf4-bf16",
        {**_NF4, "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": torch.bfloat16},
        torch.bfloat16,
    ),
    Bits("fp4", {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}),
]


def loaded(build: Build, folder: Path, bits: Bits) -> torch.nn.Module:
    """A tiny Llama, saved and loaded again as its user would."""
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    build(**WIDTH).save_pretrained(folder)
    named = "dtype" if compat.release() >= Version("4.56") else "torch_dtype"
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
        folder,
        quantization_config=BitsAndBytesConfig(**bits.options),
        device_map={"": DEVICE},
        **{named: bits.dtype},
    )
    return model.eval()


def undone(model: torch.nn.Module) -> None:
    """The last layer's attention without its patch."""
    last = [m for m in model.modules() if type(m).__name__ == "LlamaAttention"][-1]
    del last.forward


@pytest.mark.parametrize("bits", BITS, ids=lambda b: b.name)
def test_verify_of_bitsandbytes(build: Build, tmp_path: Path, bits: Bits) -> None:
    model = loaded(build, tmp_path, bits)
    assert not fpp.verify(model).passed
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    fpp.apply(model)
    report = fpp.verify(model)
    assert report.passed, str(report)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[name]), name
    undone(model)
    assert not fpp.verify(model).passed


@pytest.mark.parametrize("bits", BITS, ids=lambda b: b.name)
def test_plain_calls_of_bitsandbytes(build: Build, tmp_path: Path, bits: Bits) -> None:
    model = loaded(build, tmp_path, bits)
    plain = {
        k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v
        for k, v in _plain(9, 2).kwargs.items()
    }
    with torch.no_grad():
        want = model(**plain).logits
        fpp.apply(model)
        assert torch.equal(model(**plain).logits, want)


@pytest.mark.parametrize("order", ["apply first", "apply last"])
@pytest.mark.parametrize("bits", BITS[2:], ids=lambda b: b.name)
def test_qlora(build: Build, tmp_path: Path, bits: Bits, order: str) -> None:
    """Gradients of the adapters through 4-bit layers that are recomputed."""
    peft = pytest.importorskip("peft", exc_type=ImportError)
    model: Any = loaded(build, tmp_path, bits)
    if order == "apply first":
        fpp.apply(model)
    model = peft.prepare_model_for_kbit_training(
        model, gradient_checkpointing_kwargs={"use_reentrant": False}
    )
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = peft.get_peft_model(model, config)
    if order == "apply last":
        fpp.apply(model)
    report = fpp.verify(model)
    assert report.passed, str(report)
    assert "gradients of parameters" in [c.name for c in report.checks]
    call = _positions(TWO).kwargs
    given = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in call.items()}
    model.train()
    model(**given, labels=given["input_ids"]).loss.backward()  # verify has left it trainable
    found = [p.grad for p in model.parameters() if p.requires_grad]
    assert found
    assert all(g is not None and bool(g.isfinite().all()) for g in found)
    assert any(bool((g != 0).any()) for g in found)


@pytest.mark.parametrize("kind", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"])
def test_verify_of_torchao(build: Build, kind: str) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model = build(**WIDTH).to(DEVICE, torch.bfloat16)
    quantization.quantize_(model.model, getattr(quantization, kind)())
    assert not fpp.verify(model).passed
    fpp.apply(model)
    report = fpp.verify(model)
    assert report.passed, str(report)
    undone(model)
    assert not fpp.verify(model).passed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_verify_where_arithmetic_depends_on_the_batch(build: Build, dtype: torch.dtype) -> None:
    """Examples in one tensor round each other otherwise, in stock too: that is no leak."""
    model = whole_tensor(build(**WIDTH)).to(dtype)
    assert not fpp.verify(model).passed
    fpp.apply(model)
    report = fpp.verify(model)
    assert report.passed, str(report)
    moved = next(c for c in report.checks if c.name.startswith("others"))
    assert 0 < moved.value < moved.allowed
    assert next(c for c in report.checks if c.name == "gradients across examples").value == 0
    undone(model)
    assert not fpp.verify(model).passed


def test_verify_does_not_excuse_a_leak(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where stock's rows do not move each other, others that move are a fault."""
    model: Any = build()
    fpp.apply(model)

    def leak(_: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
        return out if out.shape[1] < 10 else out + 1e-6 * out.mean(1, keepdim=True)

    model.model.norm.register_forward_hook(leak)
    report = fpp.verify(model)
    assert not report.passed
    failed = [c.name for c in report.checks if not c.passed]
    assert "others when one changes, one row" in failed
