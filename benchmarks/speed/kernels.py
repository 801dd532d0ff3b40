"""``torch_flash`` against ``flash_attn``: the attention alone, then whole training steps."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch

from . import data, models, table
from .cells import Cell
from .measure import Deadline, Writer
from .timing import turns

NAMES = ("flash_attn", "torch_flash")


@dataclass(frozen=True)
class Attention:
    """Heads, and lengths: a data set's, or so many equal ones."""

    heads: int
    kv_heads: int
    head_dim: int
    source: str

    @property
    def name(self) -> str:
        """For results and ``--only``."""
        return f"attention/{self.heads}h{self.kv_heads}kv{self.head_dim}d/{self.source}"

    def lengths(self, *, smoke: bool) -> list[int]:
        """Tokens of each example, 8,192 in all (about, for a data set)."""
        total = 256 if smoke else 8192
        if self.source.isdigit():
            one = max(4, int(self.source) // (32 if smoke else 1))
            return [one] * (total // one)
        return data.filled(data.lengths(self.source, cap=2048, smoke=smoke), total, 1)[0]


CELLS: list[Attention | Cell] = [
    *(
        Attention(heads, kv, dim, source)
        for heads, kv, dim in ((32, 32, 128), (32, 8, 128), (32, 8, 64))
        for source in ("t0", "gsm8k", "128", "512", "2048")
    ),
    Cell("llama-1b", "t0", tokens=2048, optimizer="adamw", steps=8),
    Cell("llama-1b", "t0", tokens=8192, optimizer="adamw", steps=4),
    Cell("llama-2-7b", "t0", batch=8),
    Cell("llama-2-7b", "gsm8k", batch=8),
    Cell("mistral-7b", "t0", batch=8),
]


def main(options: argparse.Namespace, writer: Writer, deadline: Deadline) -> int:
    """A quarter of the time for the attention, the rest for the steps."""
    chosen = [c for c in CELLS if options.only.search(c.name)]
    alone = [c for c in chosen if isinstance(c, Attention)]
    quarter = Deadline(deadline.left() / 4)
    for n, cell in enumerate(alone):
        _attention(cell, options, writer, quarter.share(len(alone) - n))
    steps = [c for c in chosen if isinstance(c, Cell)]
    return table.run(steps, lambda c: ("ours", "ours_torch_flash"), options, writer, deadline)


def _attention(
    cell: Attention, options: argparse.Namespace, writer: Writer, deadline: Deadline
) -> None:
    lengths = cell.lengths(smoke=options.smoke)
    names = ("sdpa", "flash_attn") if options.smoke else NAMES
    calls: dict[str, Callable[[], object]] = {}
    for name in names:
        forward, backward = closures(name, lengths, cell.heads, cell.kv_heads, cell.head_dim)
        calls[f"{name}/forward"], calls[f"{name}/backward"] = forward, backward
    found = turns(calls, deadline)
    for name in names:
        writer.put(
            cell=cell.name,
            variant=name,
            tokens=sum(lengths),
            examples=len(lengths),
            forward_ms=found[f"{name}/forward"],
            backward_ms=found[f"{name}/backward"],
            both_ms=found[f"{name}/forward"] + found[f"{name}/backward"],
            smoke=options.smoke,
        )


def tensors(
    tokens: int, heads: int, kv_heads: int, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random ``(tokens, heads, head_dim)`` query, key and value that want gradients."""
    where = models.device()
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    q, k, v = (
        torch.randn(tokens, n, head_dim, device=where, dtype=dtype, requires_grad=True)
        for n in (heads, kv_heads, kv_heads)
    )
    return q, k, v


def closures(
    name: str, lengths: list[int], heads: int, kv_heads: int, head_dim: int
) -> tuple[Callable[[], torch.Tensor], Callable[[], object]]:
    """Forward and backward of one of this package's kernels on random tensors."""
    from fa2_pack_patch.kernels import get
    from fa2_pack_patch.layout import PackedLayout

    layout = PackedLayout.from_lengths(lengths, device=models.device())
    q, k, v = tensors(layout.tokens, heads, kv_heads, head_dim)
    kernel = get(name)

    def run() -> torch.Tensor:
        return kernel(q, k, v, layout, scale=None, window=None, softcap=None, dropout=0.0)

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return run()

    return forward, backward_of(run(), q, k, v)


def backward_of(out: torch.Tensor, *inputs: torch.Tensor) -> Callable[[], object]:
    """The backward from ``out``, as often as it is called."""
    gradient = torch.randn_like(out)

    def backward() -> object:
        return torch.autograd.grad(out, inputs, gradient, retain_graph=True)

    return backward
