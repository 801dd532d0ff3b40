"""A cell: one model shape on one kind of batch; and the variants that are compared in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from . import data, models
from .measure import Update, Variant

#: How each variant is run. "lengths": the collator's cu_seq_lens and max_length are passed too.
VARIANTS = (
    "padded_sdpa",
    "padded_fa2",
    "stock",
    "stock_lengths",
    "ours",
    "ours_lengths",
    "ours_torch_flash",
    "ceiling",
)


@dataclass(frozen=True)
class Cell:
    """``batch`` examples a step, or as many as fit ``tokens``; ``steps`` of them a turn."""

    shape: str
    source: str
    batch: int = 0
    tokens: int = 0
    checkpoint: bool = False
    optimizer: str = "sgd"
    steps: int = 4
    cap: int = 2048
    lora: bool = False

    @property
    def name(self) -> str:
        """For results and ``--only``."""
        size = f"b{self.batch}" if self.batch else f"{self.tokens}tok"
        return f"{self.shape}/{self.source}/{size}" + ("/lora" if self.lora else "")

    def groups(self, *, smoke: bool) -> list[list[int]]:
        """The lengths of each step's examples; the step that pads the most first."""
        pool = data.lengths(self.source, cap=self.cap, smoke=smoke)
        if self.batch:
            found = data.groups(pool, self.batch, self.steps)
        else:
            found = data.filled(pool, self.tokens // 32 if smoke else self.tokens, self.steps)
        return sorted(found, key=lambda g: -len(g) * max(g))

    def about(self, model: torch.nn.Module, *, smoke: bool) -> dict[str, object]:
        """What a row says of its cell."""
        groups = self.groups(smoke=smoke)
        real, wide = sum(map(sum, groups)), sum(len(g) * max(g) for g in groups)
        return {
            "cell": self.name,
            "shape": self.shape,
            "parameters": models.parameters(model),
            "lengths": self.source,
            "cap": self.cap,
            "examples_a_step": round(sum(map(len, groups)) / len(groups), 1),
            "padding_share": round(1 - real / wide, 4),
            "checkpointing": self.checkpoint,
            "optimizer": self.optimizer + (" on LoRA weights, base frozen" if self.lora else ""),
            "smoke": smoke,
        }


def open_cell(
    cell: Cell, names: Sequence[str], *, smoke: bool
) -> tuple[torch.nn.Module, list[Variant], Update]:
    """The model, its variants over the same weights and the same examples, and their update."""
    import fa2_pack_patch

    base = models.build(cell.shape, smoke=smoke, checkpoint=cell.checkpoint)
    if cell.lora:
        base = _with_lora(base)
    vocabulary = int(base.config.vocab_size)
    groups = cell.groups(smoke=smoke)
    variants = []
    for name in names:
        if name not in VARIANTS:
            raise ValueError(f"variant must be one of {list(VARIANTS)}, got {name!r}")
        tree = base
        if name == "padded_sdpa":
            tree = models.twin(base, "sdpa")
        elif name.startswith("ours"):
            tree = models.twin(base)
            forced = "torch_flash" if name.endswith("torch_flash") and not smoke else "auto"
            fa2_pack_patch.apply(tree, kernel=forced)
        batches = []
        for seed, group in enumerate(groups):
            if name.startswith("padded"):
                batch = data.padded(group, vocabulary, seed)
            elif name == "ceiling":
                batch = data.equal(group, vocabulary, seed)
            else:
                batch = data.packed(group, vocabulary, seed, varlen=name.endswith("lengths"))
            batches.append(data.move(batch, models.device()))
        variants.append(Variant(name, tree, batches))
    return base, variants, Update(base, cell.optimizer)


def _with_lora(model: torch.nn.Module) -> torch.nn.Module:
    import peft

    options = peft.LoraConfig(
        r=16, lora_alpha=32, lora_dropout=0.0, task_type="CAUSAL_LM", target_modules="all-linear"
    )
    # Adapters stay bf16: float32 ones would cast every activation, padded or packed.
    found: torch.nn.Module = peft.get_peft_model(model, options, autocast_adapter_dtype=False)
    return found.train()
