"""Static shapes under torch.compile: one graph for all batches, against eager stock and ours."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from . import data, models
from .measure import Deadline, Update, Variant, Writer, interleave, synchronize, tidy

DIFFERENT = 50
#: What max_length says in every batch: the longest example that is let in.
LONGEST = 2048
#: Compiled may be off the eager model's loss and gradient norm by this; bf16 noise is below it.
CLOSE = 0.01


@dataclass(frozen=True)
class Size:
    """Exactly ``tokens`` a step, of the 1B shape; at most ``examples`` in it."""

    tokens: int
    examples: int
    steps: int = 8

    @property
    def name(self) -> str:
        """For results and ``--only``."""
        return f"llama-1b/t0/{self.tokens}tok"


CELLS = [Size(2048, 32), Size(8192, 64)]


def main(options: argparse.Namespace, writer: Writer, deadline: Deadline) -> int:
    """Both sizes; returns how many compiled variants failed, broke, recompiled or were off."""
    failed = 0
    cells = [c for c in CELLS if options.only.search(c.name)]
    for n, size in enumerate(cells):
        if n and deadline.left() < 60 and not options.smoke:
            writer.put(cell=size.name, variant="all", error="not run: --seconds were used up")
            failed += 1
            continue
        failed += _size(size, options, writer, deadline.share(len(cells) - n))
        tidy()
    return failed


def batches(size: Size, vocabulary: int, *, smoke: bool, count: int) -> list[dict[str, Any]]:
    """``count`` static batches; the static contract and, of the same tokens, position_ids alone."""
    tokens = size.tokens // 32 if smoke else size.tokens
    pool = data.lengths("t0", cap=2048, smoke=smoke)
    found = []
    for seed, group in enumerate(data.filled(pool, tokens, count)):
        kept = group[: size.examples]
        static = data.packed(
            kept, vocabulary, seed, varlen=True, tokens=tokens, entries=size.examples + 2,
            longest=min(tokens, LONGEST),
        )  # fmt: skip
        plain = data.packed(kept, vocabulary, seed, tokens=tokens)
        where = models.device()
        found.append({"static": data.move(static, where), "plain": data.move(plain, where)})
    return found


def _size(size: Size, options: argparse.Namespace, writer: Writer, deadline: Deadline) -> int:
    import fa2_pack_patch

    smoke = options.smoke
    torch._dynamo.reset()
    base = models.build("llama-1b", smoke=smoke)
    update = Update(base, "adamw")
    every = batches(size, int(base.config.vocab_size), smoke=smoke, count=DIFFERENT)
    plain = [b["plain"] for b in every[: size.steps]]
    static = [b["static"] for b in every[: size.steps]]
    ours = models.twin(base)
    fa2_pack_patch.apply(ours)
    variants = [Variant("stock", base, plain), Variant("ours", ours, plain)]
    variants.append(Variant("ours_lengths", ours, static))
    about = {
        "cell": size.name, "shape": "llama-1b", "lengths": "t0", "tokens": size.tokens,
        "optimizer": "adamw", "parameters": models.parameters(base), "smoke": smoke,
    }  # fmt: skip
    wanted = [_norms(ours, b["plain"].call, update) for b in every[:3]]
    stock = [_norms(base, b["plain"].call, update) for b in every[:3]]
    failed = 0
    for mode in options.modes.split(","):
        name = f"compiled_{mode}"
        if deadline.left() < 45 and not smoke:
            writer.put(**about, variant=name, error="not compiled: --seconds were used up")
            failed += 1
            continue
        tree = models.twin(base)
        # The tests' CPU stand-in for flash-attn reads lengths on the host, which no graph can.
        fa2_pack_patch.apply(tree, kernel="sdpa" if smoke else "auto")
        try:
            call, before, found = _compile(tree, mode, every, update, smoke=smoke)
        except Exception as fault:
            writer.put(**about, variant=name, error=f"{type(fault).__name__}: {fault}"[:1500])
            update.drop()
            failed += 1
            continue
        got = [_norms(call, b["static"].call, update, tree, before) for b in every[:3]]
        off, stock_off = _off(got, wanted), _off(stock, wanted)
        right = off < CLOSE and not found["breaks"] and not found["recompiled"]
        failed += not right
        writer.put(
            **about, variant=f"{name}/check", off=off, stock_off=stock_off, right=right,
            loss_and_norm=got, eager=wanted, **found,
        )  # fmt: skip
        variants.append(Variant(name, call, static, before))
    interleave(variants, update, deadline, writer, rounds=options.rounds, **about)
    return failed + sum(v.error is not None for v in variants)


def _compile(
    tree: torch.nn.Module, mode: str, every: list[dict[str, Any]], update: Update, *, smoke: bool
) -> tuple[Callable[..., Any], Callable[[], None] | None, dict[str, Any]]:
    """Compiles, then counts over all different batches what Dynamo says."""
    import torch._dynamo.utils as dynamo

    graphs = mode == "reduce-overhead"
    how: dict[str, Any] = {"backend": "aot_eager"} if smoke else {"mode": mode}
    call: Any = torch.compile(tree, dynamic=False, **how)
    before = torch.compiler.cudagraph_mark_step_begin if graphs and not smoke else None
    dynamo.counters.clear()
    began = time.perf_counter()
    for batch in every[:3]:  # compiled; with CUDA graphs then warmed up, then recorded
        _norms(call, batch["static"].call, update, tree, before)
    seconds = time.perf_counter() - began
    first = int(dynamo.counters["stats"]["unique_graphs"])
    for batch in every:
        if before is not None:
            before()
        loss = call(**batch["static"].call, use_cache=False).loss
        loss.backward()
        update()
    synchronize()
    last = int(dynamo.counters["stats"]["unique_graphs"])
    skipped = {k: v for k, v in dynamo.counters["inductor"].items() if "cudagraph" in str(k)}
    return (
        call,
        before,
        {
            "compile_seconds": round(seconds, 1),
            "graphs": first,
            "recompiled": last - first,
            "different_batches": len(every),
            "breaks": {str(k)[:200]: v for k, v in dynamo.counters["graph_break"].items()},
            "cudagraphs": {str(k): int(v) for k, v in skipped.items()},
        },
    )


def _norms(
    call: Callable[..., Any],
    kwargs: dict[str, Any],
    update: Update,
    tree: torch.nn.Module | None = None,
    before: Callable[[], None] | None = None,
) -> tuple[float, float]:
    """Loss and the norm of all gradients of one step without its update."""
    if before is not None:
        before()
    # As in the timed steps, logits are let go before the backward: recorded graphs count on it.
    loss = call(**kwargs, use_cache=False).loss
    loss.backward()
    module: Any = tree if tree is not None else call
    squares = [p.grad.float().square().sum() for p in module.parameters() if p.grad is not None]
    result = float(loss.detach()), float(torch.stack(squares).sum().sqrt())
    update.drop()
    return result


def _off(got: list[tuple[float, float]], want: list[tuple[float, float]]) -> float:
    """The largest relative difference of a loss or a norm."""
    return max(abs(g / w - 1) for a, b in zip(got, want) for g, w in zip(a, b))
