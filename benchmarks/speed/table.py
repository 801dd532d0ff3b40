"""The published table's shapes and kinds of batch: padded, stock packed, ours, the ceiling."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from .cells import Cell, open_cell
from .measure import Deadline, Writer, interleave, tidy

ROWS = ("padded_sdpa", "padded_fa2", "stock", "ours", "ceiling")
LAUNCH_BOUND = ("padded_fa2", "stock", "stock_lengths", "ours", "ours_lengths", "ceiling")
#: Equal examples must give equal losses, but for bf16 (random weights: the loss is about 10).
SAME = 0.01

CELLS = [
    Cell("llama-1b", "t0", tokens=2048, optimizer="adamw", steps=8),
    *(
        Cell(shape, source, batch=batch, checkpoint=batch > 4, steps=4 if batch == 4 else 2)
        for shape in ("llama-2-7b", "mistral-7b", "granite-8b-code")
        for batch in (4, 32)
        for source in ("t0", "gsm8k")
    ),
]


def main(options: argparse.Namespace, writer: Writer, deadline: Deadline) -> int:
    """All cells that ``--only`` lets through; returns how many variants failed."""
    cells = [c for c in CELLS if options.only.search(c.name)]
    return run(cells, lambda c: LAUNCH_BOUND if c.tokens else ROWS, options, writer, deadline)


def run(
    cells: Sequence[Cell],
    names: object,
    options: argparse.Namespace,
    writer: Writer,
    deadline: Deadline,
    *,
    tidy_between: bool = False,
) -> int:
    """Cells one after the other, each with its share of the time left."""
    failed = 0
    for n, cell in enumerate(cells):
        if n and deadline.left() < 5:
            writer.put(cell=cell.name, variant="all", error="not run: --seconds were used up")
            failed += 1
            continue
        # A cell that fills the chip takes longer for one round: weigh it as four.
        weights = [4 if c.checkpoint else 1 for c in cells[n:]]
        mine = Deadline(deadline.left() * weights[0] / sum(weights))
        wanted = names(cell)  # type: ignore[operator]
        try:
            model, variants, update = open_cell(cell, wanted, smoke=options.smoke)
        except Exception as fault:
            writer.put(
                cell=cell.name, variant="all", error=f"{type(fault).__name__}: {fault}"[:600]
            )
            failed += 1
            tidy()
            continue
        about = cell.about(model, smoke=options.smoke)
        interleave(
            variants,
            update,
            mine,
            writer,
            rounds=options.rounds,
            tidy_between=tidy_between,
            **about,
        )
        failed += sum(v.error is not None and v.error != "out of memory" for v in variants)
        losses = {v.name: v.loss for v in variants if v.loss is not None and v.name != "ceiling"}
        off = max(losses.values()) / min(losses.values()) - 1 if losses else 0.0
        writer.put(cell=cell.name, variant="losses", losses=losses, off=off, same=off < SAME)
        failed += off >= SAME
        del model, variants, update
        tidy()
    return failed
