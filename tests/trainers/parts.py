"""What all runs share: a tiny model, ragged examples, a padding collator, recorded losses."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version

VOCABULARY = 97


def release() -> Version:
    import transformers

    return Version(transformers.__version__)


def model(seed: int = 0) -> torch.nn.Module:
    """A two-layer Llama, fp32, the same weights for the same seed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config)


def examples(count: int, seed: int = 3) -> list[dict[str, list[int]]]:
    """Of 3 to 30 tokens; the first third is a prompt, whose labels are -100."""
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        length = rng.randint(3, 30)
        ids = [rng.randrange(3, VOCABULARY) for _ in range(length)]
        prompt = max(1, length // 3)
        made.append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]})
    return made


def padded(features: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """One example a row, padded right: what packing is measured against."""
    width = max(len(f["input_ids"]) for f in features)
    batch = {
        "input_ids": torch.zeros(len(features), width, dtype=torch.long),
        "attention_mask": torch.zeros(len(features), width, dtype=torch.long),
        "labels": torch.full((len(features), width), -100),
    }
    for row, feature in enumerate(features):
        length = len(feature["input_ids"])
        batch["input_ids"][row, :length] = torch.as_tensor(feature["input_ids"])
        batch["labels"][row, :length] = torch.as_tensor(feature["labels"])
        batch["attention_mask"][row, :length] = 1
    return batch


class Remembered:
    """A collator that keeps what it was given: the order of the examples."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.micro: list[list[dict[str, Any]]] = []

    def __call__(self, features: list[dict[str, Any]]) -> Any:
        self.micro.append([dict(f) for f in features])
        return self.inner(features)


def loss_alone(
    network: torch.nn.Module, micro: list[list[dict[str, Any]]], *, per_token: bool
) -> float:
    """The loss of one optimizer step, each example run by itself.

    ``per_token``: the mean over all targets of the step (Trainer from 4.46 on); else the mean over
    micro-batches of their means.
    """
    network.eval()
    sums, counts = [], []
    with torch.no_grad():
        for batch in micro:
            total, count = 0.0, 0
            for feature in batch:
                ids = torch.as_tensor(feature["input_ids"])[None]
                labels = torch.as_tensor(feature["labels"])
                logits = network(input_ids=ids).logits[0, :-1].float()
                total += float(
                    torch.nn.functional.cross_entropy(logits, labels[1:], reduction="sum")
                )
                count += int((labels[1:] != -100).sum())
            sums.append(total)
            counts.append(count)
    if per_token:
        return sum(sums) / sum(counts)
    return sum(s / c for s, c in zip(sums, counts)) / len(sums)


def recording(trainer: Any) -> Any:
    """A subclass of a Trainer that keeps each micro-batch's part of the loss, not rounded."""

    class Recording(trainer):  # type: ignore[misc]
        def training_step(self, *args: Any, **more: Any) -> Any:
            loss = super().training_step(*args, **more)
            self.__dict__.setdefault("parts", []).append(float(loss))
            return loss

        def steps(self) -> list[float]:
            """The loss of each optimizer step."""
            parts, size = self.parts, self.args.gradient_accumulation_steps
            return [sum(parts[at : at + size]) for at in range(0, len(parts), size)]

    return Recording


def arguments(out: Path, kind: Any = None, **more: Any) -> Any:
    """``TrainingArguments``, or a subclass of it, for a quiet run on the CPU."""
    import transformers

    given: dict[str, Any] = {
        "output_dir": str(out),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "max_steps": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 5,
    }
    given.update(more)
    return (kind or transformers.TrainingArguments)(**given)


def distance(one: torch.nn.Module, other: torch.nn.Module) -> float:
    """The largest difference of any weight."""
    pairs = zip(one.state_dict().values(), other.state_dict().values())
    return max(float((a - b).abs().max()) for a, b in pairs)


def largest(one: Sequence[float], other: Sequence[float]) -> float:
    """The largest difference of two curves of the same length."""
    assert len(one) == len(other) and one, (len(one), len(other))
    return max(abs(a - b) for a, b in zip(one, other))
