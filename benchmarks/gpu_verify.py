"""``verify`` on a GPU: on every family, as stock, patched, and with one layer that leaks.

``python benchmarks/gpu_verify.py OUT_DIR [--shard N/M] [--cpu]`` uses the Transformers on the path,
with flash-attn, and writes ``OUT_DIR/<release>[-N].json``; the results kept are those of
``benchmarks/results/gpu_verify``, rendered into ``compat_matrix.md`` by ``tests.matrix.render``.

A proof is worth something if it passes on what is right and only there: it must not pass on the
model as it was loaded, must pass once the model is patched, and must not pass when the last
attention layer adds a little of one example to the others.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_check import build  # noqa: E402
from benchmarks.speed.models import build as published  # noqa: E402
from tests.matrix import models  # noqa: E402

#: As what a model is loaded, its layout, its dtype, and the kernel it is patched to call.
WAYS = [
    ("flash_attention_2", "real", torch.bfloat16, "flash_attn"),
    ("sdpa", "real", torch.bfloat16, "flash_attn"),
    ("sdpa", "real", torch.bfloat16, "torch_flash"),
    ("sdpa", "tiny", torch.float16, "torch_flash"),
    ("sdpa", "tiny", torch.float32, "sdpa"),
    ("eager", "tiny", torch.bfloat16, "flash_attn"),
    ("eager", "tiny", torch.float32, "sdpa"),
]
#: Published shapes with random weights, of which time and memory are told.
LARGE = ("llama-1b", "llama-2-7b")
#: How much of the mean of its row the layer that leaks adds to a token.
LEAK = 0.01
STATES = ("stock", "patched", "leaking")


def plans(version: str) -> Iterator[tuple[str, str, str, torch.dtype, str]]:
    """Family, implementation, layout, dtype and kernel, of what this release has."""
    for name, case in models.FAMILIES.items():
        for implementation, layout, dtype, kernel in WAYS:
            if implementation in models.implementations(case, version):
                yield name, implementation, layout, dtype, kernel
    for name in LARGE if torch.cuda.is_available() else ():
        yield name, "flash_attention_2", "published", torch.bfloat16, "flash_attn"


def leak(model: torch.nn.Module) -> None:
    """The last attention layer adds to each token of a batch's longer rows a little of all."""
    forwards = [
        m for m in model.modules() if type(m.__dict__.get("forward")).__name__ == "PackedForward"
    ]

    def hook(_: Any, __: Any, out: Any) -> Any:
        first = out[0] if isinstance(out, tuple) else out
        mixed = first + LEAK * first.mean(1, keepdim=True)
        return (mixed, *out[1:]) if isinstance(out, tuple) else mixed

    forwards[-1].register_forward_hook(hook)


def proofs(
    name: str, implementation: str, layout: str, dtype: torch.dtype, kernel: str, device: str
) -> dict[str, Any]:
    """Whether the proof passed in each state, which checks did not, and how long it took."""
    import fa2_pack_patch

    if layout == "published":
        model = published(name, implementation, smoke=False)
    else:
        model = build(name, implementation, layout).to(device, dtype)
    found: dict[str, Any] = {}
    for state in STATES:
        if state == "patched":
            try:
                fa2_pack_patch.apply(model, kernel=kernel)
            except fa2_pack_patch.KernelUnavailableError as refused:
                return {"refused": str(refused)[:300]}
        elif state == "leaking":
            leak(model)
        began = time.perf_counter()
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        report = fa2_pack_patch.verify(model)
        failed = [c.name for c in report.checks if not c.passed]
        found[state] = {
            "passed": report.passed,
            "failed": failed,
            "seconds": round(time.perf_counter() - began, 2),
        }
        if device == "cuda":
            peak = torch.cuda.max_memory_allocated() - before
            found[state]["gib"] = round(peak / 2**30, 2)
        if state == "patched":
            shares = [
                c.value / c.allowed for c in report.checks if c.allowed and c.value != c.allowed
            ]
            found[state]["nearest"] = round(max(shares, default=0.0), 3)
            if not report.passed:
                found[state]["report"] = str(report)
    return found


def right(found: dict[str, Any]) -> bool:
    """Whether a proof passed where it must, and there alone."""
    if "refused" in found:
        return True
    return all(s in found and found[s]["passed"] == (s == "patched") for s in STATES)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shard", default="0/1")
    parser.add_argument("--cpu", action="store_true", help="a trial of the script, without a GPU")
    parser.add_argument("--families")
    options = parser.parse_args()
    import transformers

    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    version = transformers.__version__
    device = "cpu" if options.cpu else "cuda"
    result: dict[str, Any] = {
        "machine": "cpu" if options.cpu else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": version,
        "models": {},
    }
    shard, shards = (int(n) for n in options.shard.split("/"))
    target = options.out / (f"{version}-{shard}.json" if shards > 1 else f"{version}.json")
    options.out.mkdir(parents=True, exist_ok=True)
    bad, began = 0, time.time()
    for n, plan in enumerate(plans(version)):
        name, implementation, layout, dtype, kernel = plan
        if n % shards != shard or (options.families and name not in options.families.split(",")):
            continue
        if options.cpu and kernel not in ("sdpa", "torch_flash"):
            continue
        key = f"{name}/{implementation}/{layout}/{str(dtype)[6:]}/{kernel}"
        try:
            found = proofs(*plan, device)
        except Exception as fault:
            found = {"fault": f"{type(fault).__name__}: {fault}"[:300]}
            traceback.print_exc()
        result["models"][key] = found
        if not right(found):
            bad += 1
            print(version, key, json.dumps(found, indent=1), flush=True)
        target.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    count = len(result["models"])
    print(f"{version}: {count} models, {bad} bad, {time.time() - began:.0f} s", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
