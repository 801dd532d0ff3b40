"""Pictures of the results as SVG: the same rows give the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from .attention import SPEC_PEAK
from .results import Results, Section, ratio

COLOURS = {
    "padded_sdpa": "#bbbbbb",
    "padded_fa2": "#777777",
    "stock": "#4477aa",
    "ours": "#ee6677",
    "ceiling": "#ccbb44",
    "flash_attn": "#ee6677",
    "torch_flash": "#aa3377",
    "sdpa": "#aa3377",
    "sdpa_mask": "#777777",
    "flex_attention": "#228833",
}
LABELS = {
    "padded_sdpa": "padded, sdpa",
    "padded_fa2": "padded, FA2",
    "stock": "packed, stock",
    "ours": "packed, patched",
    "ceiling": "ceiling: equal lengths",
}
_STEPS = ("padded_sdpa", "padded_fa2", "stock", "ours", "ceiling")


def write(results: Results, docs: Path) -> list[Path]:
    """All plots that there are rows for, as ``docs/speed_*.svg``."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update(
        {"svg.hashsalt": "fa2_pack_patch", "svg.fonttype": "none", "font.size": 9}
    )
    docs.mkdir(parents=True, exist_ok=True)
    found = []
    drawings: dict[str, Callable[[Results], Any]] = {
        "steps": _speed, "memory": _memory, "attention": _attention
    }  # fmt: skip
    for name, draw in drawings.items():
        figure = draw(results)
        if figure is None:
            continue
        path = docs / f"speed_{name}.svg"
        figure.savefig(path, bbox_inches="tight", metadata={"Date": None, "Creator": None})
        text = path.read_text(encoding="utf-8")
        path.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n", "utf-8")
        found.append(path)
    return found


def _figure(wide: float, high: float, rows: int = 1, columns: int = 1) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(wide, high))
    return figure, figure.subplots(rows, columns, squeeze=False)


def _groups(results: Results) -> list[tuple[str, Section]]:
    sections = [results[name] for name in ("table", "large") if name in results]
    return [(c, s) for s in sections for c in s.cells() if "ours" in s.of(c)]


def _bars(
    results: Results, value: Callable[[dict[str, Any], str], float | None], label: str
) -> Any:
    """Grouped bars over all cells with training steps; None where there are none."""
    cells = _groups(results)
    if not cells:
        return None
    figure, axes = _figure(max(5.0, 1.0 + 0.9 * len(cells)), 3.6)
    axis, width = axes[0][0], 0.8 / len(_STEPS)
    seen: set[int] = set()
    for n, name in enumerate(_STEPS):
        points = [(i, value(s.of(c), name)) for i, (c, s) in enumerate(cells)]
        kept = [(i + (n - 2) * width, v) for i, v in points if v is not None]
        if kept:
            seen.update(round(at) for at, _ in kept)
            axis.bar(*zip(*kept), width=width, color=COLOURS[name], label=LABELS[name])
    axis.set_xticks(
        range(len(cells)),
        [
            c.replace("/", "\n").replace("-code", "\n-code").replace("codellama-", "codellama\n")
            for c, _ in cells
        ],
        fontsize=7,
    )
    axis.set_xlim(-0.6, len(cells) - 0.4)
    axis.set_ylabel(label)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, ncols=5, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1))
    return figure


def _speed(results: Results) -> Any:
    def value(found: dict[str, Any], name: str) -> float | None:
        return ratio(found.get(name), found.get("padded_fa2"))

    return _bars(results, value, "real tokens per second, padded FA2 = 1")


def _memory(results: Results) -> Any:
    def value(found: dict[str, Any], name: str) -> float | None:
        row = found.get(name)
        return None if row is None or row.get("error") else float(row["peak_bytes"]) / 2**30

    return _bars(results, value, "peak memory, GiB")


def _attention(results: Results) -> Any:
    if "attention" not in results:
        return None
    rows = [r for r in results["attention"].rows if "both_tflops" in r]
    panels = sorted({(r["tokens"], -r["kv_heads"], r["heads"]) for r in rows})
    if not panels:
        return None
    columns = min(2, len(panels))
    high = -(-len(panels) // columns)
    figure, axes = _figure(4.4 * columns, 2.9 * high, high, columns)
    for axis, (tokens, kv, heads) in zip(axes.flat, panels):
        mine = [r for r in rows if (r["tokens"], -r["kv_heads"], r["heads"]) == (tokens, kv, heads)]
        for name in dict.fromkeys(r["variant"] for r in mine):
            line = sorted((r["length"], r["both_tflops"]) for r in mine if r["variant"] == name)
            axis.plot(*zip(*line), marker="o", markersize=3, color=COLOURS[name], label=name)
        lengths = sorted({r["length"] for r in mine})
        axis.set_xscale("log", base=2)
        axis.set_xticks(lengths, [str(n) for n in lengths])
        axis.set_ylim(bottom=0)
        axis.set_title(f"{tokens:,} tokens, {heads} query and {-kv} key heads", fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    axes[0][0].legend(frameon=False, fontsize=8)
    figure.supxlabel("tokens of each example", fontsize=9)
    figure.supylabel(f"TFLOP/s, forward and backward (peak: {SPEC_PEAK:.0f})", fontsize=9)
    figure.tight_layout()
    return figure
