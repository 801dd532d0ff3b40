"""Above 10 billion parameters on one GPU: padded against packed, in full and with LoRA."""

from __future__ import annotations

import argparse

from . import table
from .cells import Cell
from .measure import Deadline, Writer

ROWS = ("padded_fa2", "stock", "ours", "ceiling")
CELLS = [
    Cell(shape, source, batch=8, checkpoint=True, optimizer=optimizer, steps=2, lora=lora)
    for shape, optimizer, lora in (
        ("llama-2-13b", "in_backward", False),
        ("codellama-34b", "in_backward", False),
        ("codellama-34b", "adamw", True),
        ("llama-55b", "adamw", True),
    )
    for source in ("t0", "gsm8k")
]


def main(options: argparse.Namespace, writer: Writer, deadline: Deadline) -> int:
    """All cells that ``--only`` lets through; running out of memory is a result, not a failure."""
    cells = [c for c in CELLS if options.only.search(c.name)]
    return table.run(cells, lambda c: ROWS, options, writer, deadline, tidy_between=True)
