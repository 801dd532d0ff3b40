"""The kept training curves as a table and a picture: ``python benchmarks/curves.py --write``.

Reads ``results/training_curve*.json`` (made by ``training_curve.py``), writes the table into
``docs/packing.md`` and draws ``docs/training_curve.svg``.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "packing.md"
PICTURE = ROOT / "docs" / "training_curve.svg"


def load() -> list[dict[str, Any]]:
    """All kept runs, the float32 ones first."""
    found = [
        json.loads(p.read_text(encoding="utf-8")) for p in RESULTS.glob("training_curve*.json")
    ]
    return sorted(found, key=lambda r: (r["dtype"], [int(n) for n in r["transformers"].split(".")]))


def table(runs: list[dict[str, Any]]) -> str:
    """One line a release."""
    lines = [
        "| Transformers | machine | dtype | steps | largest difference of a loss | allowed | "
        "tokens computed, packed / padded |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for run in runs:
        share = run["packed"]["tokens"] / run["padded"]["tokens"]
        lines.append(
            f"| {run['transformers']} | {run['machine'].split(',')[0]} | {run['dtype']} | "
            f"{len(run['packed']['loss'])} | {run['largest_difference']:.1e} | {run['bar']:.1e} | "
            f"{share:.2f} |"
        )
    return "\n".join(lines)


def rendered(text: str, runs: list[dict[str, Any]]) -> str:
    """The page with its table made anew."""
    block = f"<!-- curves -->\n{table(runs)}\n<!-- /curves -->"
    return re.sub(r"<!-- curves -->\n.*?<!-- /curves -->", lambda _: block, text, flags=re.DOTALL)


def draw(runs: list[dict[str, Any]]) -> None:
    """The loss of each step, padded and packed, and how far apart they are."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams.update(
        {"svg.hashsalt": "fa2_pack_patch", "svg.fonttype": "none", "font.size": 9}
    )
    runs = [run for run in runs if run["bf16_noise"] is not None]
    figure = Figure(figsize=(3.4 * len(runs), 3.8))
    axes = figure.subplots(2, len(runs), sharex=True, squeeze=False, height_ratios=[2, 1])
    for column, run in enumerate(runs):
        padded, packed = run["padded"]["loss"], run["packed"]["loss"]
        other = run["padded, sdpa"]["loss"]
        top, below = axes[0][column], axes[1][column]
        top.plot(padded, color="#777777", linewidth=2, label="padded")
        top.plot(packed, color="#ee6677", linewidth=0.8, label="packed")
        top.set_title(f"Transformers {run['transformers']}", fontsize=9)
        pairs = ((packed, "#ee6677", "packed"), (other, "#bbbbbb", "padded, sdpa"))
        for loss, colour, label in pairs:
            gap = [a - b for a, b in zip(loss, padded)]
            below.plot(gap, color=colour, linewidth=0.8, label=f"{label} less padded")
        for axis in (top, below):
            axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("loss")
    axes[1][0].set_ylabel("difference")
    axes[0][-1].legend(frameon=False)
    axes[1][-1].legend(frameon=False, fontsize=7)
    figure.supxlabel("optimizer step", fontsize=9)
    figure.tight_layout()
    figure.savefig(PICTURE, metadata={"Date": None, "Creator": None})
    text = PICTURE.read_text(encoding="utf-8")
    PICTURE.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n", "utf-8")


def main() -> int:
    runs = load()
    print(table(runs))
    if "--write" in sys.argv:
        PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8"), runs), encoding="utf-8")
        draw(runs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
