"""On a GPU: every family, kind of input and kernel in bf16, logits and gradients.

``python benchmarks/gpu_check.py OUT_DIR`` checks the Transformers that is on the path, with
flash-attn, and writes ``OUT_DIR/<release>.json``; kept in ``benchmarks/results/gpu``, rendered into
``compat_matrix.md`` by ``tests.matrix.render``.

The reference is the unpatched model of the same class in float32, each example by itself, on the
CPU. The rule is flash-attention's own: packed and patched, in bf16, may be off it by no more than
twice what the unpatched model in bf16 on the GPU, each example by itself and with PyTorch's own
attention, is off. Both come from a child process, whose flash classes call the tests' stand-in for
flash-attn in plain torch. Layouts are the tiny models of the matrix, and the family's real heads.
"""

from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.matrix import models  # noqa: E402
from tests.matrix.kinds import KINDS, Call, _masked, _positions  # noqa: E402

KERNELS = ("flash_attn", "torch_flash", "sdpa")
FEW = ("positions", "rows", "padded_right")
LONG = [[130, 1, 257, 64]]
#: What bf16 rounding alone may add: one unit in the last place of the largest value.
ROUNDING = 2.0**-8


def _layout(width: int, heads: int, kv: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": width * heads, "num_attention_heads": heads, "num_key_value_heads": kv,
        "max_position_embeddings": 512, "intermediate_size": 64, **more,
    }  # fmt: skip


#: head_dim and the kind of heads (MHA, GQA, MQA) of published checkpoints, in two layers.
REAL: dict[str, dict[str, Any]] = {
    "llama": _layout(128, 4, 4),
    "mistral": _layout(128, 8, 2, sliding_window=100),
    "mixtral": _layout(128, 8, 2, sliding_window=None),
    "granite": _layout(64, 8, 2),
    "dbrx": {
        "d_model": 768, "n_heads": 6, "max_seq_len": 512,
        "attn_config": {"kv_n_heads": 1, "clip_qkv": 8.0, "rope_theta": 10000.0},
    },
    "falcon": {"hidden_size": 512, "num_attention_heads": 8, "max_position_embeddings": 512},
    "falcon_new": {
        "hidden_size": 512, "num_attention_heads": 8, "num_kv_heads": 2,
        "max_position_embeddings": 512,
    },
    "gemma": _layout(256, 2, 1, head_dim=256),
    "olmo": _layout(128, 4, 4),
    "phi": _layout(80, 4, 4),
    "phi3": _layout(96, 4, 4, sliding_window=100),
    "qwen2": _layout(64, 14, 2, sliding_window=100),
    "qwen2_moe": _layout(128, 4, 4, sliding_window=100),
    "stablelm": _layout(80, 4, 4),
    "starcoder2": _layout(128, 6, 2, sliding_window=100),
    "gemma2": _layout(256, 4, 2, head_dim=256, sliding_window=100, query_pre_attn_scalar=256),
    "gemma3_text": _layout(256, 4, 1, head_dim=256, sliding_window=100, query_pre_attn_scalar=256),
    "qwen3": _layout(128, 8, 2, head_dim=128, sliding_window=100),
    "qwen3_moe": _layout(128, 8, 1, head_dim=128, sliding_window=100),
    "olmo2": _layout(128, 4, 4),
    "cohere": _layout(128, 8, 2),
    "gpt_neox": {
        "hidden_size": 384, "num_attention_heads": 4, "max_position_embeddings": 512,
        "intermediate_size": 64,
    },
    "gptj": {"n_embd": 512, "n_head": 2, "n_positions": 512, "rotary_dim": 64, "n_inner": 64},
    "granitemoe": _layout(64, 8, 2),
}  # fmt: skip
LONG_KINDS = {
    "long": lambda model: _positions(LONG),
    "long_rows": lambda model: _positions([[130, 62], [1, 191]]),
    "long_padded": lambda model: _masked(LONG, "right"),
}


def plans(version: str) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """Family, implementation, layout, and the kinds of input with their makers."""
    right = {kind.name: kind.make for kind in KINDS if kind.outcome == "right"}
    few = {name: right[name] for name in FEW}
    for name, case in models.FAMILIES.items():
        for implementation in models.implementations(case, version):
            flash = implementation == "flash_attention_2"
            yield name, implementation, "tiny", right if flash else few
            if flash:
                yield name, implementation, "real", LONG_KINDS


def build(name: str, implementation: str, layout: str) -> torch.nn.Module:
    """The matrix's model; wide ones with weights scaled down, so that attention stays soft."""
    case = models.FAMILIES[name]
    options = dict(REAL[name]) if layout == "real" else {}
    # All experts for every token: which ones a near tie picks would depend on rounding.
    if "num_experts_per_tok" in case.options:
        options["num_experts_per_tok"] = case.options.get("num_local_experts", 4)
    if "ffn_config" in case.options:
        options["ffn_config"] = {**case.options["ffn_config"], "moe_top_k": 4}
    model = models.build(case, implementation, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and parameter.shape[-1] > 64:
                parameter.mul_(math.sqrt(32 / parameter.shape[-1]))
    return model


def cotangent(shape: torch.Size, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator)


def kept(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The gradients that are compared: embeddings, norms and biases; all layers reach them."""
    embedding = model.get_input_embeddings().weight  # type: ignore[operator]
    return {n: p for n, p in model.named_parameters() if p.dim() == 1 or p is embedding}


def separate(model: torch.nn.Module, call: Call) -> dict[str, Any]:
    """Logits of each example by itself, and the gradients of all of them together."""
    model.zero_grad(set_to_none=True)
    device = next(model.parameters()).device
    logits = []
    for n, example in enumerate(call.examples):
        ids, place = example.tokens[None].to(device), example.positions[None].to(device)
        given = {"input_ids": ids, "position_ids": place, "use_cache": False}
        try:
            out = model(**given).logits[0]
        except TypeError:  # Falcon's eager of 4.36 to 4.43 wants a mask for one token
            out = model(**given, attention_mask=torch.ones_like(ids)).logits[0]
        (out.float() * cotangent(out.shape, n).to(device)).sum().backward()
        logits.append(out.detach().float().cpu())
    return {"logits": logits, "gradients": _gradients(model)}


def packed(model: torch.nn.Module, call: Call) -> dict[str, Any]:
    """The same of one packed call."""
    model.zero_grad(set_to_none=True)
    device = next(model.parameters()).device
    moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in call.kwargs.items()}
    if "inputs_embeds" in moved:
        moved["inputs_embeds"] = moved["inputs_embeds"].to(next(model.parameters()).dtype)
    out = model(**moved).logits
    parts = [out[e.row, e.start : e.start + len(e.tokens)] for e in call.examples]
    losses = [(p.float() * cotangent(p.shape, n).to(device)).sum() for n, p in enumerate(parts)]
    torch.stack(losses).sum().backward()
    return {"logits": [p.detach().float().cpu() for p in parts], "gradients": _gradients(model)}


def _gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    # Copies: moving the model to the GPU would take a float32 gradient along.
    return {n: p.grad.float().cpu().clone() for n, p in kept(model).items() if p.grad is not None}


def off(got: dict[str, Any], want: dict[str, Any], *, gradients: bool) -> dict[str, float]:
    """The largest error of a logit, and the error of all gradients in the 2-norm, relative."""
    largest = max(float(w.abs().max()) for w in want["logits"])
    worst = max(float((g - w).abs().max()) for g, w in zip(got["logits"], want["logits"]))
    found = {"logits": worst / largest}
    if gradients:
        names = sorted(set(got["gradients"]) & set(want["gradients"]))
        assert names, "no gradients to compare"
        one, other = (
            torch.cat([side["gradients"][n].flatten() for n in names]) for side in (got, want)
        )
        found["gradients"] = float((one - other).norm() / other.norm())
    return found


def reference(out: Path) -> int:
    """The child: each example by itself, float32 on the CPU, and how far bf16 on the GPU is off."""
    from tests.matrix.standin.activate import activate

    activate()
    import transformers

    torch.set_num_threads(2)
    found: dict[str, Any] = {}
    for name, implementation, layout, kinds in plans(transformers.__version__):
        rows = found[f"{name}/{implementation}/{layout}"] = {}
        model = build(name, implementation, layout)
        calls = {kind: make(model) for kind, make in kinds.items()}
        for kind, call in calls.items():
            try:
                rows[kind] = {"exact": separate(model, call)}
            except Exception as fault:  # stock itself cannot run one of the examples
                rows[kind] = f"{type(fault).__name__}: {fault}"[:300]
        model = model.to("cuda", torch.bfloat16)
        for kind, row in rows.items():
            if isinstance(row, dict):
                row["own"] = off(separate(model, calls[kind]), row["exact"], gradients=True)
    torch.save(found, out)
    return 0


def cell(name: str, implementation: str, layout: str, kinds: Any, wanted: Any) -> dict[str, Any]:
    """Each kernel on each kind: how far off, in units of what is allowed."""
    import fa2_pack_patch

    model = build(name, implementation, layout)
    calls = {kind: make(model) for kind, make in kinds.items() if isinstance(wanted[kind], dict)}
    model = model.to("cuda", torch.bfloat16)
    own = {kind: wanted[kind]["own"] for kind in calls}
    found: dict[str, Any] = {
        "kinds": list(calls),
        "own": {m: max(o[m] for o in own.values()) for m in ("logits", "gradients")},
        "stock_broken": {k: v for k, v in wanted.items() if isinstance(v, str)},
    }
    for kernel in KERNELS:
        row: dict[str, Any] = {"right": 0, "worst": {}, "wrong": {}}
        try:
            fa2_pack_patch.apply(model, kernel=kernel)
            for kind, call in calls.items():
                error = off(packed(model, call), wanted[kind]["exact"], gradients=kind != "embeds")
                for measure, value in error.items():
                    allowed = 2 * own[kind][measure] + ROUNDING
                    share = value / allowed if math.isfinite(value) else math.inf
                    row["worst"][measure] = round(max(row["worst"].get(measure, 0.0), share), 3)
                    if not share <= 1:
                        row["wrong"].setdefault(kind, {})[measure] = [value, own[kind][measure]]
                row["right"] += kind not in row["wrong"]
        except fa2_pack_patch.KernelUnavailableError as refused:
            row = {"refused": str(refused)[:300]}
        except Exception as fault:
            row["fault"] = f"{type(fault).__name__}: {fault}"[:300]
            traceback.print_exc()
        found[kernel] = row
        fa2_pack_patch.revert(model)
    return found


def main() -> int:
    if len(sys.argv) == 3 and sys.argv[1] == "--reference":
        logging.disable(logging.WARNING)
        return reference(Path(sys.argv[2]))
    if len(sys.argv) != 2 or not torch.cuda.is_available():
        print(__doc__, "\nneeds a GPU and one argument", file=sys.stderr)
        return 2
    import flash_attn
    import transformers

    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    began = time.time()
    with tempfile.TemporaryDirectory() as folder:
        kept_at = Path(folder) / "reference.pt"
        subprocess.run([sys.executable, __file__, "--reference", str(kept_at)], check=True)
        wanted = torch.load(kept_at, weights_only=False)
    print(f"{transformers.__version__}: references after {time.time() - began:.0f} s", flush=True)
    result: dict[str, Any] = {
        "machine": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "flash_attn": flash_attn.__version__,
        "models": {},
    }
    bad = []
    target = Path(sys.argv[1]) / f"{transformers.__version__}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    for name, implementation, layout, kinds in plans(transformers.__version__):
        key = f"{name}/{implementation}/{layout}"
        try:
            found = cell(name, implementation, layout, kinds, wanted[key])
        except Exception as fault:
            found = {"fault": f"{type(fault).__name__}: {fault}"[:300]}
            traceback.print_exc()
        result["models"][key] = found
        rows = [found, *(found.get(k, {}) for k in KERNELS)]
        if any("fault" in row or row.get("wrong") for row in rows):
            bad.append(key)
            print(transformers.__version__, key, json.dumps(found), flush=True)
        target.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    count = len(result["models"])
    print(f"{transformers.__version__}: {count} models, {len(bad)} with a fault, "
          f"{time.time() - began:.0f} s", flush=True)  # fmt: skip
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
