"""What a packed batch says about its examples: losses, counts, the effective batch.

Needs torch alone. "Target" means a label that is not -100 and that a token of the same example
predicts: an example of ``n`` tokens has at most ``n - 1``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Optional, Union

import torch
import torch.nn.functional as F

from ..errors import PackingError
from ..layout import PackedLayout
from ..tensors import of_array, quote, upload
from .evaluation import ExamplesMetrics, examples_metrics

__all__ = [
    "EffectiveBatch",
    "ExampleLosses",
    "ExamplesMetrics",
    "TokenCounts",
    "effective_batch",
    "examples_metrics",
    "per_example_loss",
    "token_counts",
]

IGNORED = -100


@dataclass(frozen=True)
class ExampleLosses:
    """Losses of the examples that are not padding, in the order of the batch.

    Attributes:
        sum: float32 ``(examples,)``, cross-entropy summed over each example's targets, in nats.
        targets: int64 ``(examples,)``, how many targets that were.
    """

    sum: torch.Tensor
    targets: torch.Tensor

    @property
    def mean(self) -> torch.Tensor:
        """float32 ``(examples,)``: the mean over an example's targets; 0 where it has none."""
        return self.sum / self.targets.clamp(min=1)

    def per_token(self) -> torch.Tensor:
        """The scalar that Transformers' own loss gives: every target weighs the same."""
        return self.sum.sum() / self.targets.sum()

    def per_example(self) -> torch.Tensor:
        """A scalar in which every example that has a target weighs the same."""
        return self.mean.sum() / (self.targets > 0).sum()


@dataclass(frozen=True)
class TokenCounts:
    """Counts of the examples that are not padding, in the order of the batch.

    Attributes:
        tokens: int64 ``(examples,)`` on the CPU.
        targets: int64 ``(examples,)`` on the labels' device.
        padding: padding tokens of the whole batch.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    padding: int


def per_example_loss(
    logits: torch.Tensor, labels: torch.Tensor, layout: PackedLayout
) -> ExampleLosses:
    """The causal cross-entropy of each example; gradients flow back.

    Args:
        logits: ``(rows, tokens, vocabulary)``, any float dtype; computed in float32.
        labels: int64 ``(rows, tokens)``, not shifted; -100 is no target. An example's first token
            is none either, whatever its label.
        layout: where the examples are.

    Raises:
        PackingError: shapes that do not fit the layout.
    """
    if logits.dim() < 2 or logits.shape[:-1] != labels.shape or labels.numel() != layout.tokens:
        raise PackingError(
            f"logits of shape {tuple(logits.shape)} and labels of shape {tuple(labels.shape)} do "
            f"not fit a layout of {layout.tokens} tokens; give (rows, tokens, vocabulary) and "
            "(rows, tokens)."
        )
    target, owner, examples = _targets(labels, layout)
    at = (target[1:] != IGNORED).nonzero().flatten()
    chosen = logits.reshape(-1, logits.shape[-1]).index_select(0, at).float()
    losses = F.cross_entropy(chosen, target[1:].index_select(0, at), reduction="none")
    whose = owner[1:].index_select(0, at)
    total = losses.new_zeros(examples).index_add(0, whose, losses)
    return ExampleLosses(total, torch.bincount(whose, minlength=examples))


def token_counts(labels: torch.Tensor, layout: PackedLayout) -> TokenCounts:
    """Tokens and targets of each example.

    Args:
        labels: ``(rows, tokens)``, not shifted; -100 is no target.
        layout: where the examples are.

    Raises:
        PackingError: labels that do not fit the layout.
    """
    labels = of_array("labels", labels)
    if labels.numel() != layout.tokens:
        raise PackingError(
            f"labels of shape {tuple(labels.shape)} do not fit a layout of {layout.tokens} tokens; "
            "give (rows, tokens) of the batch that the layout is of."
        )
    target, owner, examples = _targets(labels, layout)
    lengths = [n for n, pad in zip(layout.lengths, _flags(layout)) if not pad]
    targets = torch.bincount(owner[target != IGNORED], minlength=examples)
    sizes = torch.tensor(lengths, dtype=torch.int64, device="cpu")
    return TokenCounts(sizes, targets, layout.tokens - sum(lengths))


def _flags(layout: PackedLayout) -> Sequence[bool]:
    return layout.padding or (False,) * layout.examples


def _targets(labels: torch.Tensor, layout: PackedLayout) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Flat labels without first tokens and padding; each token's example; number of examples."""
    owner = torch.empty(layout.tokens, dtype=torch.long, device="cpu")
    masked = torch.zeros(layout.tokens, dtype=torch.bool, device="cpu")
    examples = 0
    for start, length, pad in zip(layout.starts, layout.lengths, _flags(layout)):
        owner[start : start + length] = max(examples - 1, 0) if pad else examples
        masked[start : start + (length if pad else 1)] = True
        examples += not pad
    target = labels.reshape(-1).masked_fill(upload(masked, labels.device), IGNORED)
    return target, upload(owner, labels.device), examples


@dataclass(frozen=True)
class EffectiveBatch:
    """What an optimizer step really sees; :func:`effective_batch` makes it, ``print`` shows it.

    Attributes:
        steps: optimizer steps.
        examples, tokens, targets: of each step, padding not counted.
        computed: tokens that the model computes in each step, padding included.
        padded: tokens that padding every micro-batch to its longest example would compute.
        largest_share: the largest share that one example has in its step's loss when every target
            weighs the same, times the examples of the step: 1 if all weigh the same.
    """

    steps: int
    examples: tuple[int, ...]
    tokens: tuple[int, ...]
    targets: tuple[int, ...]
    computed: tuple[int, ...]
    padded: tuple[int, ...]
    largest_share: float

    @property
    def padding_saved(self) -> float:
        """The share of a padded run's tokens that is not computed, 0 to 1."""
        return 1 - sum(self.computed) / sum(self.padded)

    def __str__(self) -> str:
        lines = [f"{self.steps} optimizer steps"]
        for name in ("examples", "tokens", "targets"):
            values = getattr(self, name)
            mean = sum(values) / len(values)
            lines.append(f"{name} a step: {mean:,.1f} ({min(values):,} to {max(values):,})")
        lines.append(f"padding saved: {self.padding_saved:.1%} of what a padded run computes")
        lines.append(
            "weighting per token: a target weighs 1 / targets of the step, and one example at most "
            f"{self.largest_share:.1f} times its equal share"
        )
        lines.append("weighting per example: an example weighs 1 / examples of the step")
        return "\n".join(lines)


Batch = Union[PackedLayout, Mapping[str, Any], Sequence[int]]


def effective_batch(
    batches: Union[Sequence[int], Sequence[Batch]],
    *,
    per_device_batch_size: Optional[int] = None,
    gradient_accumulation_steps: int = 1,
    world_size: int = 1,
) -> EffectiveBatch:
    """Examples, tokens and targets of each optimizer step.

    Args:
        batches: either the lengths of all examples in order, which ``per_device_batch_size`` cuts
            into micro-batches; or the micro-batches themselves, each a list of lengths, a layout,
            or a collated batch of tensors or arrays. Real targets are counted from a collated
            batch's labels; lengths and layouts count all tokens of an example but its first.
        per_device_batch_size: examples of a micro-batch; only with plain lengths.
        gradient_accumulation_steps: micro-batches of one process in an optimizer step.
        world_size: processes; they take the micro-batches in turn.

    Raises:
        PackingError: no batches, none but padding, a factor below 1, or plain lengths without a
            batch size.
    """
    factors = {
        "per_device_batch_size": per_device_batch_size,
        "gradient_accumulation_steps": gradient_accumulation_steps,
        "world_size": world_size,
    }
    for name, factor in factors.items():
        if factor is not None and factor < 1:
            raise PackingError(f"{name} must be at least 1, got {factor}.")
    items: list[Any] = batches.tolist() if isinstance(batches, torch.Tensor) else list(batches)
    if not items:
        raise PackingError("effective_batch got no batches; give at least one.")
    if isinstance(items[0], Integral):
        if per_device_batch_size is None:
            raise PackingError(
                f"plain lengths ({quote(items)}) need per_device_batch_size to be cut into "
                "micro-batches; or give a list of lists of lengths."
            )
        size = per_device_batch_size
        items = [items[at : at + size] for at in range(0, len(items), size)]
    elif per_device_batch_size is not None:
        raise PackingError(
            f"per_device_batch_size={per_device_batch_size} goes with plain lengths only, got "
            "micro-batches, which have a size of their own; leave it out."
        )
    micro = [_count(item) for item in items]
    if not any(m.tokens for m in micro):
        raise PackingError(
            f"there is no example in any of the {len(micro)} batches, only padding "
            f"({quote([m.computed for m in micro])} tokens); give batches whose attention_mask is "
            "not 0 at an example's tokens."
        )
    width = gradient_accumulation_steps * world_size
    groups = [micro[at : at + width] for at in range(0, len(micro), width)]
    shares = []
    for group in groups:
        targets = [t for m in group for t in m.targets]
        shares.append(max(targets, default=0) / max(sum(targets), 1) * len(targets))
    return EffectiveBatch(
        steps=len(groups),
        examples=tuple(sum(len(m.tokens) for m in g) for g in groups),
        tokens=tuple(sum(sum(m.tokens) for m in g) for g in groups),
        targets=tuple(sum(sum(m.targets) for m in g) for g in groups),
        computed=tuple(sum(m.computed for m in g) for g in groups),
        padded=tuple(sum(len(m.tokens) * max(m.tokens, default=0) for m in g) for g in groups),
        largest_share=max(shares),
    )


@dataclass(frozen=True)
class _Micro:
    tokens: list[int]
    targets: list[int]
    computed: int


def _count(item: Batch) -> _Micro:
    layout: PackedLayout
    if isinstance(item, PackedLayout):
        layout = item
    elif isinstance(item, Mapping):
        layout = PackedLayout.from_batch(item)
        if item.get("labels") is not None:
            counts = token_counts(item["labels"], layout)
            return _Micro(counts.tokens.tolist(), counts.targets.tolist(), layout.tokens)
    else:
        layout = PackedLayout.from_lengths(item)
    lengths = [n for n, pad in zip(layout.lengths, _flags(layout)) if not pad]
    return _Micro(lengths, [n - 1 for n in lengths], layout.tokens)
