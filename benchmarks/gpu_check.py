"""On a GPU: every family and kernel in bf16 against float32, synchronisations, and a first speed.

``python benchmarks/gpu_check.py OUT.json``. Errors follow flash-attention's own rule: packed, in
bf16, may be off the float32 reference by no more than twice what the unpatched model in bf16, run
on each example by itself, is off. Speeds are ratios within this run.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import fa2_pack_patch
from tests.matrix import models
from tests.matrix.kinds import TWO, Call, _positions

KERNELS = ("flash_attn", "torch_flash", "sdpa")


def on_gpu(call: Call) -> dict[str, Any]:
    moved = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in call.kwargs.items()}
    moved.pop("use_cache", None)
    return moved


def alone(model: torch.nn.Module, call: Call) -> list[torch.Tensor]:
    found = []
    for e in call.examples:
        ids, place = e.tokens[None].cuda(), e.positions[None].cuda()
        given = {"input_ids": ids, "position_ids": place, "use_cache": False}
        with torch.no_grad():
            try:
                found.append(model(**given).logits[0])
            except TypeError:  # Falcon's eager of 4.36 to 4.43 wants a mask for one token
                found.append(model(**given, attention_mask=torch.ones_like(ids)).logits[0])
    return found


def off(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    return max((g.float() - w.float()).abs().max().item() for g, w in zip(got, want))


def family(name: str, implementation: str) -> dict[str, Any]:
    case = models.FAMILIES[name]
    call = _positions(TWO)
    exact = alone(models.build(case, implementation_for_fp32(case)).cuda(), call)
    model = models.build(case, implementation).to("cuda", torch.bfloat16)
    own = off(alone(model, call), exact)
    found: dict[str, Any] = {"separate_bf16": own}
    for kernel in KERNELS:
        try:
            fa2_pack_patch.apply(model, kernel=kernel)
            with torch.no_grad():
                logits = model(**on_gpu(call)).logits
            parts = [logits[e.row, e.start : e.start + len(e.tokens)] for e in call.examples]
            error = off(parts, exact)
            loss = model(**on_gpu(call), labels=on_gpu(call)["input_ids"]).loss
            loss.backward()
            finite = all(
                bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None
            )
            model.zero_grad(set_to_none=True)
            found[kernel] = {"error": error, "right": error <= 2 * own + 1e-2 and finite}
        except fa2_pack_patch.KernelUnavailableError as refused:
            found[kernel] = {"refused": str(refused)[:200]}
        except Exception as fault:
            found[kernel] = {"right": False, "fault": f"{type(fault).__name__}: {fault}"[:300]}
        fa2_pack_patch.revert(model)
    return found


def implementation_for_fp32(case: models.FamilyCase) -> str:
    # Windows of flash and of eager differ in some releases; families without one do not care.
    return "eager"


def llama(hidden: int, layers: int, heads: int, kv: int, inter: int, implementation: str) -> Any:
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv, intermediate_size=inter, vocab_size=32000,
        max_position_embeddings=8192,
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM._from_config(
            config, attn_implementation=implementation
        )
    torch.set_default_dtype(torch.float32)
    return model.to(torch.bfloat16).train()


def synchronisations() -> dict[str, Any]:
    """Warnings of CUDA's sync debug mode in one forward and backward, packed, by position_ids."""
    found: dict[str, Any] = {}
    for patched in (False, True):
        try:
            found["patched" if patched else "stock"] = _count(patched)
        except RuntimeError as fault:  # the trimmed test build lacks kernels that stock 4.43 calls
            found["patched" if patched else "stock"] = str(fault)
    return found


def _count(patched: bool) -> int:
    model = llama(256, 6, 4, 2, 512, "flash_attention_2")
    if patched:
        fa2_pack_patch.apply(model)
    lengths = [100, 50, 200, 162]
    positions = torch.cat([torch.arange(n) for n in lengths])[None].cuda()
    batch = {"input_ids": torch.randint(0, 32000, (1, 512)).cuda(), "position_ids": positions}
    model(**batch, use_cache=False).logits.sum().backward()
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        model(**batch, use_cache=False).logits.sum().backward()
        torch.cuda.set_sync_debug_mode("default")
    return len([w for w in caught if "synchroniz" in str(w.message)])


def speed() -> dict[str, Any]:
    """Real tokens per second of a 1B-shaped Llama, batch 8, log-normal lengths (median 110)."""
    generator = torch.Generator().manual_seed(0)
    steps = [
        [
            max(8, min(2048, int(n)))
            for n in torch.exp(4.7 + torch.randn(8, generator=generator)).tolist()
        ]
        for _ in range(12)
    ]
    found: dict[str, Any] = {}
    for name in ("padded", "stock packed", "patched packed", "patched packed, torch_flash"):
        try:
            found[name] = _rate(name, steps)
        except RuntimeError as fault:
            found[name] = str(fault)
        torch.cuda.empty_cache()
    return found


def _rate(name: str, steps: list[list[int]]) -> int:
    model = llama(2048, 16, 32, 8, 8192, "flash_attention_2")
    if name.startswith("patched"):
        fa2_pack_patch.apply(model, kernel="torch_flash" if "torch" in name else "auto")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    tokens, began = 0, 0.0
    for n, lengths in enumerate(steps):
        if n == 3:
            torch.cuda.synchronize()
            tokens, began = 0, time.perf_counter()
        batch = batch_of(lengths, padded=name == "padded")
        model(**batch, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        tokens += sum(lengths)
    torch.cuda.synchronize()
    return round(tokens / (time.perf_counter() - began))


def batch_of(lengths: list[int], padded: bool) -> dict[str, torch.Tensor]:
    if not padded:
        ids = torch.randint(0, 32000, (1, sum(lengths)))
        positions = torch.cat([torch.arange(n) for n in lengths])[None]
        batch = {"input_ids": ids, "position_ids": positions, "labels": ids}
    else:
        width = max(lengths)
        mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
        ids = torch.randint(0, 32000, mask.shape)
        labels = ids.masked_fill(mask == 0, -100)
        batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return {k: v.cuda() for k, v in batch.items()}


def main() -> int:
    import flash_attn
    import transformers

    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    result: dict[str, Any] = {
        "machine": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "flash_attn": flash_attn.__version__,
        "families": {},
    }
    wrong = 0
    for name, case in models.FAMILIES.items():
        if not models.available(case, transformers.__version__):
            continue
        for implementation in models.implementations(case, transformers.__version__):
            try:
                cell = family(name, implementation)
            except Exception as fault:
                cell = {"fault": f"{type(fault).__name__}: {fault}"[:300]}
            result["families"][f"{name}/{implementation}"] = cell
            bad = [k for k in KERNELS if cell.get(k, {}).get("right") is False]
            if bad or "fault" in cell:
                wrong += 1
                print(name, implementation, cell, flush=True)
    result["synchronisations"] = synchronisations()
    result["real_tokens_per_second"] = speed()
    print(json.dumps({k: v for k, v in result.items() if k != "families"}, indent=1))
    print(f"{len(result['families'])} models, {wrong} with a fault")
    Path(sys.argv[1]).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
