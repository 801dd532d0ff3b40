"""What packing does to a real model, before and after ``fa2_pack_patch.apply``.

Run with any supported Transformers on PYTHONPATH; ``make demo`` does so for an old and the newest.
"""

from __future__ import annotations

import argparse
import json
import logging
import resource
import sys
import time
import warnings
from pathlib import Path

import torch

import fa2_pack_patch
from fa2_pack_patch.plots import foreign_share, leak_maps

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Example = dict[str, list[int]]


def tensors(example: Example) -> tuple[torch.Tensor, torch.Tensor]:
    """ids and labels ``(length,)`` of one example; only the completion is a target."""
    ids = torch.tensor(example["prompt"] + example["completion"])
    labels = ids.clone()
    labels[: len(example["prompt"])] = -100
    return ids, labels


def packed_batch(examples: list[Example]) -> dict[str, torch.Tensor]:
    """All examples end to end in one row ``(1, tokens)``; position_ids start anew at each."""
    ids, labels, positions = [], [], []
    for example in examples:
        i, t = tensors(example)
        ids.append(i)
        labels.append(t)
        positions.append(torch.arange(len(i)))
    parts = (ids, positions, labels)
    names = ("input_ids", "position_ids", "labels")
    return {n: torch.cat(p)[None].to(DEVICE) for n, p in zip(names, parts)}


def padded_batch(examples: list[Example]) -> dict[str, torch.Tensor]:
    """One example a row, padded right."""
    pairs = [tensors(e) for e in examples]
    width = max(len(i) for i, _ in pairs)
    batch = {
        "input_ids": torch.zeros(len(pairs), width, dtype=torch.long),
        "attention_mask": torch.zeros(len(pairs), width, dtype=torch.long),
        "labels": torch.full((len(pairs), width), -100),
    }
    for row, (ids, labels) in enumerate(pairs):
        batch["input_ids"][row, : len(ids)] = ids
        batch["attention_mask"][row, : len(ids)] = 1
        batch["labels"][row, : len(ids)] = labels
    return {n: t.to(DEVICE) for n, t in batch.items()}


def true_loss(model: torch.nn.Module, examples: list[Example]) -> float:
    """Mean loss over all targets, each example run by itself."""
    total, count = 0.0, 0
    for example in examples:
        batch = packed_batch([example])
        targets = int((batch["labels"][:, 1:] != -100).sum())
        total += model(**batch).loss.item() * targets
        count += targets
    return total / count


def train(folder: Path, examples: list[Example], steps: int, batch: int, packed: bool) -> float:
    """A few AdamW steps from the same weights; prints progress, gives real tokens per second."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).to(DEVICE).train()
    if packed:
        fa2_pack_patch.apply(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    name, tokens, seconds = ("packed" if packed else "padded"), 0, 0.0
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for step in range(steps):
        part = examples[step * batch : (step + 1) * batch]
        inputs = packed_batch(part) if packed else padded_batch(part)
        began = time.perf_counter()
        loss = model(**inputs, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        seconds += time.perf_counter() - began
        real = sum(len(e["prompt"]) + len(e["completion"]) for e in part)
        tokens += real
        print(
            f"  {name} step {step + 1}/{steps}: loss {loss.item():.5f}, {real} tokens in "
            f"{inputs['input_ids'].numel()} places, {tokens / seconds:.0f} real tokens/s",
            flush=True,
        )
    if DEVICE == "cuda":
        print(f"  {name} peak memory: {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(f"  peak memory of the process so far: {peak:.2f} GiB")
    return tokens / seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("inputs", type=Path, help="what demo/prepare.py wrote")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--picture", type=Path, help="where the leak map goes")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    from transformers import AutoModelForCausalLM

    folder = options.inputs / "model"
    examples = json.loads((options.inputs / "examples.json").read_text(encoding="utf-8"))
    model = AutoModelForCausalLM.from_pretrained(folder).to(DEVICE).eval()
    print(f"\n== transformers {transformers.__version__}, torch {torch.__version__}, {DEVICE} ==")
    shown = examples[: options.batch]
    batch = packed_batch(shown)
    with torch.no_grad():
        truth = true_loss(model, shown)
        stock = model(**batch).loss.item()
    print(f"loss of {len(shown)} examples, each by itself:      {truth:.5f}")
    print(f"packed in one row, stock:                 {stock:.5f}  (off by {stock - truth:+.5f})")
    print(fa2_pack_patch.apply(model))
    with torch.no_grad():
        patched = model(**batch).loss.item()
    print(
        f"packed in one row, patched:               {patched:.5f}  (off by {patched - truth:+.1e})"
    )
    report = fa2_pack_patch.verify(model)
    print(report)
    cut = [example["prompt"][:12] for example in examples[:3]]
    row, maps = leak_maps(model, cut)
    print(
        f"influence from other examples: stock {foreign_share(row, maps['stock']):.1%}, "
        f"patched {foreign_share(row, maps['patched']):.1%}"
    )
    if options.picture:
        options.picture.parent.mkdir(parents=True, exist_ok=True)
        title = f"SmolLM2-135M, Transformers {transformers.__version__}"
        report.plot(options.picture, examples=cut, title=title)
        print(f"picture: {options.picture}")
    del model
    print("training, the same examples padded and packed:")
    # Packed first: a CPU process knows only the peak of all it has done so far.
    rates = [train(folder, examples, options.steps, options.batch, p) for p in (True, False)]
    print(f"packed / padded: {rates[0] / rates[1]:.2f}x")
    if not report or abs(patched - truth) > (1e-4 if DEVICE == "cpu" else 2e-3):
        print("FAILED: packed differs from separate")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
