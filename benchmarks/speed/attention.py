"""Attention alone: what each way to keep packed examples apart makes of the chip.

The arithmetic that is counted is what packed causal attention needs, ``4 * heads * head_dim *
sum(length**2) / 2`` forward and 2.5 times that backward, whatever a variant computes besides: a
mask over all tokens does the work of a full square and gets no credit for it.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from . import kernels, models
from .measure import Deadline, Writer, tidy
from .timing import turns

#: Dense bf16 on an H200 (and H100) SXM by the vendor's datasheet, TFLOP/s; a ceiling nobody meets.
SPEC_PEAK = 989.0
#: A bool mask of tokens by tokens, and the bias that torch makes of it, up to so many tokens.
MASK_TOKENS = 16384
#: Outputs of two bf16 kernels differ by less, as norms; those of another mask by about 1.
CLOSE = 0.02
#: The device is kept busy for so long first, so that slow launches do not count as slow kernels.
AHEAD_MS = 6.0

Pair = tuple[Callable[[], torch.Tensor], Callable[[], object]]


@dataclass(frozen=True)
class Shape:
    """Equal examples of ``length`` tokens, ``tokens`` in all."""

    heads: int
    kv_heads: int
    length: int
    tokens: int
    head_dim: int = 128

    @property
    def name(self) -> str:
        """For results and ``--only``."""
        heads = f"{self.heads}h{self.kv_heads}kv{self.head_dim}d"
        return f"alone/{heads}/{self.tokens}tok/{self.length}"

    def small(self) -> Shape:
        """The same for a CPU."""
        return Shape(4, 4 * self.kv_heads // self.heads, self.length // 32, self.tokens // 64, 16)

    def flops(self) -> float:
        """Floating point operations of the forward."""
        examples = self.tokens // self.length
        return 4 * self.heads * self.head_dim * examples * self.length**2 / 2


CELLS = [
    Shape(32, kv_heads, length, tokens)
    for tokens in (16384, 65536)
    for kv_heads in (32, 8)
    for length in (64, 128, 256, 512, 1024, 2048, 4096)
]


def main(options: argparse.Namespace, writer: Writer, deadline: Deadline) -> int:
    """All shapes; returns how many variants failed or were off."""
    cells = [c for c in CELLS if options.only.search(c.name)]
    ours = ("flash_attn", "sdpa" if options.smoke else "torch_flash")
    makers: dict[str, Callable[[Shape], Pair]] = {
        **{name: functools.partial(kernel, name) for name in ours},
        "sdpa_mask": masked,
        "flex_attention": Flex(smoke=options.smoke),
    }
    failed = 0
    for n, cell in enumerate(cells):
        if n and deadline.left() < 1 and not options.smoke:
            writer.put(cell=cell.name, variant="all", error="not run: --seconds were used up")
            failed += 1
            continue
        try:
            failed += _cell(cell, makers, options, writer, deadline.share(len(cells) - n))
        except Exception as fault:
            error = f"{type(fault).__name__}: {fault}"[:600]
            writer.put(cell=cell.name, variant="all", error=error)
            failed += 1
        tidy()
    return failed


def _cell(
    cell: Shape,
    makers: dict[str, Callable[[Shape], Pair]],
    options: argparse.Namespace,
    writer: Writer,
    deadline: Deadline,
) -> int:
    shape = cell.small() if options.smoke else cell
    about: dict[str, Any] = {
        "cell": cell.name, "tokens": shape.tokens, "length": shape.length, "heads": shape.heads,
        "kv_heads": shape.kv_heads, "head_dim": shape.head_dim, "smoke": options.smoke,
    }  # fmt: skip
    calls: dict[str, Callable[[], object]] = {}
    notes: dict[str, dict[str, Any]] = {}
    wanted: torch.Tensor | None = None
    failed = 0
    for name, make in makers.items():
        if name == "sdpa_mask" and cell.tokens > MASK_TOKENS:
            why = f"a mask of {cell.tokens} by {cell.tokens} is not tried; up to {MASK_TOKENS}"
            writer.put(quiet=True, **about, variant=name, skipped=why)
            continue
        began = time.perf_counter()
        try:
            torch.manual_seed(0)  # the same query, key and value for all
            forward, backward = make(shape)
            out = forward().detach()
            assert out.shape == (shape.tokens, shape.heads, shape.head_dim)
            backward()
            wanted = out if wanted is None else wanted
            off = float((out - wanted).float().norm() / wanted.float().norm())
        except Exception as fault:
            failed += 1
            error = f"{type(fault).__name__}: {fault}"[:1000]
            writer.put(**about, variant=name, error=error)
            tidy()
            continue
        failed += not off < CLOSE
        notes[name] = {
            "off": off,
            "first_call_seconds": round(time.perf_counter() - began, 2),
        }
        calls[f"{name}/forward"], calls[f"{name}/backward"] = forward, backward
    how: dict[str, Any] = {"ahead_ms": AHEAD_MS}
    if options.smoke:
        how = {"repeats": 1, "inner": 1, "warm": 0}
    found = turns(calls, deadline, **how)
    for name, note in notes.items():
        times = found[f"{name}/forward"], found[f"{name}/backward"]
        writer.put(quiet=True, **about, **row(shape, name, *times), **note)
    print(cell.name, {n: round(found[f"{n}/forward"] + found[f"{n}/backward"], 3) for n in notes})
    return failed


def row(shape: Shape, name: str, forward_ms: float, backward_ms: float) -> dict[str, Any]:
    """Milliseconds, TFLOP/s and the share of :data:`SPEC_PEAK` of one variant."""
    flops = shape.flops()
    rates = {
        "forward": flops / forward_ms / 1e9,
        "backward": 2.5 * flops / backward_ms / 1e9,
        "both": 3.5 * flops / (forward_ms + backward_ms) / 1e9,
    }
    return {
        "variant": name,
        "forward_ms": forward_ms,
        "backward_ms": backward_ms,
        **{f"{k}_tflops": round(v, 2) for k, v in rates.items()},
        **{f"{k}_of_peak": round(v / SPEC_PEAK, 4) for k, v in rates.items()},
    }


def owners(shape: Shape) -> torch.Tensor:
    """int32 ``(tokens,)``: the example of each token."""
    where = models.device()
    return torch.arange(shape.tokens, dtype=torch.int32, device=where) // shape.length


def kernel(name: str, shape: Shape) -> Pair:
    """One of this package's kernels."""
    lengths = [shape.length] * (shape.tokens // shape.length)
    return kernels.closures(name, lengths, shape.heads, shape.kv_heads, shape.head_dim)


def masked(shape: Shape) -> Pair:
    """torch's ``scaled_dot_product_attention`` under a bool mask of all tokens by all tokens.

    Keys and values of grouped heads are repeated first, as Transformers does with a mask.
    """
    inputs = kernels.tensors(shape.tokens, shape.heads, shape.kv_heads, shape.head_dim)
    owner = owners(shape)
    mask = (owner[:, None] == owner).tril()
    groups = shape.heads // shape.kv_heads

    def run() -> torch.Tensor:
        q, k, v = (t.transpose(0, 1)[None] for t in inputs)
        if groups > 1:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return out[0].transpose(0, 1)

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return run()

    return forward, kernels.backward_of(run(), *inputs)


class Flex:
    """FlexAttention with a block mask of documents, compiled once for each shape of tensors.

    The owners of the tokens stay in one buffer for each token count, so that other lengths are no
    other graph. With ``smoke`` it is not compiled and has no backward, which no CPU has.
    """

    def __init__(self, *, smoke: bool) -> None:
        self._smoke = smoke
        self._call: Callable[..., Any] | None = None
        self._owners: dict[int, torch.Tensor] = {}
        self._documents: dict[int, Callable[..., torch.Tensor]] = {}

    def __call__(self, shape: Shape) -> Pair:
        """Forward (with what its backward needs) and backward."""
        from torch.nn.attention.flex_attention import create_block_mask

        inputs = kernels.tensors(shape.tokens, shape.heads, shape.kv_heads, shape.head_dim)
        document = self._document(shape)
        mask = create_block_mask(
            document, None, None, shape.tokens, shape.tokens, device=models.device()
        )
        call = self._compiled()
        grouped = shape.heads != shape.kv_heads

        def forward() -> torch.Tensor:
            q, k, v = (t.transpose(0, 1)[None] for t in inputs)
            out: torch.Tensor = call(q, k, v, block_mask=mask, enable_gqa=grouped)
            return out[0].transpose(0, 1)

        if self._smoke:
            inputs = tuple(t.detach() for t in inputs)
            return forward, lambda: None
        return forward, kernels.backward_of(forward(), *inputs)

    def _compiled(self) -> Callable[..., Any]:
        import torch._functorch.config as functorch
        from torch.nn.attention.flex_attention import flex_attention

        if self._call is None:
            # The backward is called again and again: its buffers must outlive a call.
            functorch.donated_buffer = False
            self._call = (
                flex_attention if self._smoke else torch.compile(flex_attention, dynamic=False)
            )
        return self._call

    def _document(self, shape: Shape) -> Callable[..., torch.Tensor]:
        kept = self._owners.setdefault(shape.tokens, owners(shape))
        kept.copy_(owners(shape))

        def document(_b: Any, _h: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return (kept[q] == kept[k]) & (q >= k)

        return self._documents.setdefault(shape.tokens, document)
