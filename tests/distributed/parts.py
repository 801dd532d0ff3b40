"""What all runs train on, and what one process gives for it, example by example."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from packaging.version import Version

from tests.matrix import models
from tests.trainers import parts as trainers

RATE = 0.02
EXAMPLES = trainers.examples(23, seed=4)
#: Optimizer step, rank, micro-batch: numbers of examples. No two are of one size, and some are
#: a single example, which is no packed call at all.
STEPS: tuple[tuple[tuple[tuple[int, ...], ...], ...], ...] = (
    (((0, 1, 2, 3), (4,)), ((5,), (6, 7))),
    (((8,), (9, 10)), ((11, 12, 13), (14, 15, 16, 17))),
    (((18, 19), (20,)), ((21, 22, 0, 3), (5, 1))),
)


def families() -> tuple[str, str, str]:
    """Llama, one with tied embeddings, and one with experts or at least a window.

    Before 5.0 each expert is a module of its own; DDP and FSDP2 want every rank to use them all.
    """
    release = transformers.__version__
    tied = "gemma" if models.available(models.FAMILIES["gemma"], release) else "mistral"
    return "llama", tied, "mixtral" if Version(release) >= Version("5.0") else "mistral"


def build(family: str) -> torch.nn.Module:
    """A tiny model in training mode, float32, the same weights in each process.

    It has positions for whole rows: old releases lengthen their rotary tables, which are buffers,
    and DDP cannot bring ranks together whose buffers are of different lengths.
    """
    case = models.FAMILIES[family]
    found = models.implementations(case, transformers.__version__)
    how = "sdpa" if "sdpa" in found else "eager"
    return models.build(case, how, max_position_embeddings=256).train()


def loss_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy summed over the targets of ``labels`` ``(1, tokens)``, not shifted."""
    return F.cross_entropy(logits[0, :-1].float(), labels[0, 1:], reduction="sum")


def targets(numbers: Iterable[int]) -> int:
    """How many tokens of these examples count in the loss."""
    return sum(sum(t != -100 for t in EXAMPLES[n]["labels"][1:]) for n in numbers)


def tokens(numbers: Iterable[int]) -> int:
    """How many tokens these examples have."""
    return sum(len(EXAMPLES[n]["input_ids"]) for n in numbers)


@cache
def one_process(family: str) -> dict[str, Any]:
    """Losses, the first step's gradients and the last weights of one process, nothing packed.

    The stock model takes each example in a call of its own.
    """
    model = build(family)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses, gradients = [], {}
    for step in STEPS:
        numbers = [n for rank in step for micro in rank for n in micro]
        losses.append(alone(model, numbers, backward=True))
        if not gradients:
            gradients = {
                name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
            }
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return {"losses": losses, "gradients": gradients, "weights": weights}


def alone(model: torch.nn.Module, numbers: Sequence[int], *, backward: bool = False) -> float:
    """The mean loss over all targets of these examples, each in a call of its own."""
    total = 0.0
    count = targets(numbers)
    for n in numbers:
        ids = torch.tensor(EXAMPLES[n]["input_ids"])[None]
        labels = torch.tensor(EXAMPLES[n]["labels"])[None]
        with torch.set_grad_enabled(backward):
            loss = loss_sum(model(input_ids=ids, use_cache=False).logits, labels) / count
        if backward:
            loss.backward()
        total += float(loss.detach())
    return total
