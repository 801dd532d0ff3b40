"""The results as Markdown and SVG: ``python -m benchmarks.speed.render [--write | --check]``."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from . import plots, tables
from .results import AGAIN, FOLDER, Results, Section, load, smoke

DOCS = Path(__file__).resolve().parents[2] / "docs"
START, END = "<!-- results: python -m benchmarks.speed.render --write -->", "<!-- /results -->"
_PAGE = f"# Speed and memory\n\n{START}\n{END}\n"

#: Heading, what is to be known for reading it, and the table; by section.
_PARTS: dict[str, tuple[str, str, Callable[[Section], str]]] = {
    "table": (
        "Training steps",
        "Real tokens per second (padding is not counted) of forward, backward and update. "
        "Ratios are patched over the other. The ceiling: as many tokens in rows of equal length, "
        "with nothing to pad and nothing to find out.",
        tables.steps,
    ),
    "large": (
        "Above 10 billion parameters",
        "The same, on one GPU, in full (SGD applied in the backward) and with LoRA.",
        tables.steps,
    ),
    "old": (
        "Older releases, patched, against the newest stock release",
        "Turn by turn in one run, each older release in a process of its own.",
        tables.old,
    ),
    "compiled": ("Compiled steps", "Static shapes under `torch.compile`.", tables.compiled),
    "torch_flash": (
        "Without flash-attn",
        "PyTorch's own FlashAttention-2 operator in its place.",
        tables.torch_flash,
    ),
    "attention": (
        "Attention alone",
        "TFLOP/s of forward and backward together, and their share of the H200's 989 in dense "
        "bf16. Only what packed causal attention needs is counted as work.",
        tables.attention,
    ),
    "profile": (
        "Where a step's time goes",
        "Host times are medians, with inputs so small that the device never backs up. Added to a "
        "layer: the dearest way to call the patched layer less the cheapest stock call.",
        tables.profile,
    ),
}  # fmt: skip


def markdown(results: Results, again: Sequence[Results] = ()) -> str:
    """Everything as text: machines, bars, a table a section, and the bars of other runs."""
    parts = []
    if smoke(results):
        parts.append("**Some rows are of a `--smoke` run on a CPU: no measurement.**")
    parts += [_machines(results), "## Bars\n\n" + tables.bars(results)]
    for name, (title, note, draw) in _PARTS.items():
        if name in results and results[name].rows:
            parts.append(f"## {title}\n\n{note}\n\n{draw(results[name])}")
    for n, run in enumerate(again, 1):
        parts.append(f"## Measured again, run {n}\n\n{tables.bars(run, measured=True)}")
    return "\n\n".join(parts)


def _machines(results: Results) -> str:
    found = []
    for section in results.values():
        for m in section.machines:
            found.append(
                f"{m['machine']}, torch {m['torch']}, Transformers {m['transformers']}, "
                f"flash-attn {m['flash_attn']}, Python {m['python']}"
            )
    return "Measured on: " + "; ".join(dict.fromkeys(found)) + "."


def inserted(page: str, text: str) -> str:
    """The page with ``text`` between the markers.

    Raises:
        ValueError: the page has no markers.
    """
    if START not in page or END not in page:
        raise ValueError(f"the page has no markers; put {START} and {END} where the results go")
    pattern = re.escape(START) + r".*?" + re.escape(END)
    return re.sub(pattern, lambda _: f"{START}\n{text}\n{END}", page, count=1, flags=re.DOTALL)


def main(arguments: list[str]) -> int:
    """Prints, writes or checks; 1 when there are no results or the page is stale."""
    parser = argparse.ArgumentParser("python -m benchmarks.speed.render", description=__doc__)
    parser.add_argument("--results", type=Path, default=FOLDER, help="folder of the JSONL files")
    parser.add_argument("--docs", type=Path, default=DOCS, help="folder of speed.md and the plots")
    parser.add_argument("--write", action="store_true", help="speed.md and speed_*.svg")
    parser.add_argument("--check", action="store_true", help="is speed.md what the results say?")
    options = parser.parse_args(arguments)
    results = load(options.results)
    if not results:
        print(f"no results in {options.results}", file=sys.stderr)
        return 1
    text = markdown(results, [load(f) for f in sorted(options.results.glob(AGAIN))])
    path = options.docs / "speed.md"
    page = path.read_text(encoding="utf-8") if path.exists() else _PAGE
    if options.check:
        stale = not path.exists() or inserted(page, text) != page
        if stale:
            print(f"{path} is stale: run python -m benchmarks.speed.render --write")
        return int(stale)
    if not options.write:
        print(text)
        return 0
    drawn = plots.write(results, options.docs)
    path.write_text(inserted(page, text), encoding="utf-8")
    print("\n".join(str(p) for p in [path, *drawn]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
