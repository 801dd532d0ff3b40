"""The generated parts of README.md: ``python -m tests.readme [--check]``."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from benchmarks.speed.results import load
from fa2_pack_patch import cli

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"


_ROWS = (
    ("table", "llama-2-7b/t0/b32", "7B, batch 32, checkpointing, T0"),
    ("table", "llama-2-7b/gsm8k/b32", "7B, batch 32, checkpointing, GSM8K"),
    ("table", "mistral-7b/t0/b4", "7B (GQA), batch 4, T0"),
    ("table", "llama-1b/t0/2048tok", "1B, 2,048 tokens, T0"),
    ("large", "codellama-34b/t0/b8/lora", "34B, LoRA, batch 8, T0"),
)
_COLUMNS = ("padded_fa2", "stock", "ours", "ceiling")


def speed() -> str:
    """Rows of the speed table, of benchmarks/results/speed."""
    found = load()
    head = "| | padded FA2 | packed, stock | packed, patched | ceiling | peak memory, padded → packed |"
    rows = [head, "| --- | --- | --- | --- | --- | --- |"]
    for section, cell, title in _ROWS:
        of = found[section].of(cell)
        base = of["padded_fa2"]["tokens_per_second"]
        cells = [
            f"{of[name]['tokens_per_second']:,.0f} ({of[name]['tokens_per_second'] / base:.2f}x)"
            for name in _COLUMNS
        ]
        peaks = " → ".join(f"{of[n]['peak_bytes'] / 2**30:.0f}" for n in ("padded_fa2", "ours"))
        rows.append(f"| {title} | " + " | ".join(cells) + f" | {peaks} GiB |")
    return "\n".join(rows)


def compiled() -> str:
    """The sentence on compiled steps."""
    section = load()["compiled"]
    parts = []
    for tokens in (2048, 8192):
        of = section.of(f"llama-1b/t0/{tokens}tok")
        stock, mine = of["stock"], of["compiled_default"]
        parts.append(
            f"{mine['tokens_per_second']:,.0f} tokens/s against {stock['tokens_per_second']:,.0f} "
            f"of stock packing ({mine['tokens_per_second'] / stock['tokens_per_second']:.2f}x) at "
            f"{tokens:,} tokens a step"
        )
    return "1B, compiled: " + ", ".join(parts) + "."


def syncs() -> str:
    """The sentence on host synchronisations."""
    rows = load()["profile"].where(cell="syncs/llama-1b/plain")
    count = {row["variant"]: row["synchronisations"] for row in rows}
    return (
        f"Host synchronisations of a training step of {rows[0]['layers']} layers: "
        f"{count['ours']} from `position_ids` alone (stock: {count['stock']}), "
        f"{count['ours_lengths']} when the collator hands the lengths over (stock: "
        f"{count['stock_lengths']})."
    )


def current(text: str) -> str:
    """The page with its generated parts made anew."""
    text = _between(text, "families", cli.families_table(markdown=True))
    text = _between(text, "speed", speed())
    text = _between(text, "syncs", syncs())
    return _between(text, "compiled", compiled())


def _between(text: str, name: str, new: str) -> str:
    pattern = rf"<!-- {name} -->\n(?:.*?)<!-- /{name} -->\n"
    return re.sub(
        pattern, lambda _: f"<!-- {name} -->\n{new}\n<!-- /{name} -->\n", text, flags=re.DOTALL
    )


def main() -> int:
    text = README.read_text(encoding="utf-8")
    if "--check" in sys.argv:
        if current(text) == text:
            return 0
        print("README.md is stale: run python -m tests.readme")
        return 1
    README.write_text(current(text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
