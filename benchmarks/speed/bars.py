"""What was promised beforehand, and whether the results hold it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .results import Results, Row, ratio

PASSED, MISSED, UNKNOWN = "passed", "**missed**", "not measured"


@dataclass(frozen=True)
class Bar:
    """One promise: what, the bar, what was found, and the verdict."""

    what: str
    bar: str
    found: str
    verdict: str


def judge(results: Results) -> list[Bar]:
    """All bars; those without a result are there too, as not measured."""
    return [
        *_steps(results),
        *_compiled(results),
        *_torch_flash(results),
        *_old(results),
        *_host(results),
        *_syncs(results),
        *_losses(results),
        *_graphs(results),
    ]


def _verdict(passed: object) -> str:
    return UNKNOWN if passed is None else PASSED if passed else MISSED


def _rows(results: Results, section: str, **wanted: object) -> list[Row]:
    return results[section].where(**wanted) if section in results else []


def _broken(results: Results, section: str, what: str, bar: str) -> list[Bar]:
    """A bar for each row that says that nothing could be measured."""
    return [
        Bar(f"{what}: {r['cell']}", bar, str(r["error"])[:120], UNKNOWN)
        for r in _rows(results, section)
        if r.get("error") and (r["variant"] == "all" or section == "old")
    ]


@dataclass(frozen=True)
class Least:
    """A ratio of two variants that each of some cells must reach (or, of memory, stay below)."""

    what: str
    section: str
    over: str
    under: str
    bar: float
    cells: str = ""
    key: str = "tokens_per_second"
    most: bool = False

    def judge(self, results: Results) -> Bar:
        """The worst cell, and how many reach the bar."""
        section = results.get(self.section)
        found = {}
        for cell in section.cells() if section else []:
            rows = section.of(cell) if section else {}
            value = ratio(rows.get(self.over), rows.get(self.under), self.key)
            if value is not None and re.search(self.cells, cell):
                found[cell] = value
        bar = f"{'<=' if self.most else '>='} {self.bar:g}"
        if not found:
            return Bar(self.what, bar, "–", UNKNOWN)
        worst = (max if self.most else min)(found, key=lambda cell: found[cell])
        held = [c for c, v in found.items() if (v <= self.bar if self.most else v >= self.bar)]
        seen = f"{found[worst]:.2f} at worst ({worst})"
        if len(found) > 1:
            seen += f"; {len(held)} of {len(found)} cells hold it"
        return Bar(self.what, bar, seen, _verdict(len(held) == len(found)))


_STEPS = [
    Least("patched / ceiling, everywhere", "table", "ours", "ceiling", 0.98),
    Least("patched / stock packed", "table", "ours", "stock", 1.0),
    Least(
        "patched / stock packed, from position_ids alone, 1B and 2,048 tokens",
        "table", "ours", "stock", 1.15, "2048tok$",
    ),
    Least("patched / padded FA2, T0, batch 32", "table", "ours", "padded_fa2", 4.8, "/t0/b32$"),
    Least(
        "patched / padded FA2, GSM8K, batch 32", "table", "ours", "padded_fa2", 1.55,
        "/gsm8k/b32$",
    ),
    Least(
        "peak memory, patched / padded FA2, T0, batch 32", "table", "ours", "padded_fa2", 0.66,
        "/t0/b32$", "peak_bytes", True,
    ),
    Least("patched / stock packed, above 10B", "large", "ours", "stock", 1.0),
]  # fmt: skip


def _steps(results: Results) -> list[Bar]:
    return [least.judge(results) for least in _STEPS]


def _compiled(results: Results) -> list[Bar]:
    return [
        Least(
            f"compiled ({mode}) / stock packed, eager, 1B and {tokens:,} tokens",
            "compiled", f"compiled_{mode}", "stock", bar, f"{tokens}tok$",
        ).judge(results)
        for tokens, bar in ((2048, 2.1), (8192, 1.4))
        for mode in ("default", "reduce-overhead")
    ]  # fmt: skip


def _torch_flash(results: Results) -> list[Bar]:
    what = "torch_flash / flash_attn, attention alone, forward and backward"
    found = {}
    section = results.get("torch_flash")
    for cell in section.cells() if section else []:
        rows = section.of(cell) if section else {}
        value = ratio(rows.get("flash_attn"), rows.get("torch_flash"), "both_ms")
        if value is not None:
            found[cell] = value
    bar = Bar(what, ">= 0.9", "–", UNKNOWN)
    if found:
        worst = min(found, key=lambda cell: found[cell])
        bar = Bar(what, ">= 0.9", f"{found[worst]:.2f} at worst ({worst})",
                  _verdict(found[worst] >= 0.9))  # fmt: skip
    steps = Least(
        "torch_flash / flash_attn, whole steps", "torch_flash", "ours_torch_flash", "ours", 0.97
    )
    return [bar, steps.judge(results)]


def _old(results: Results) -> list[Bar]:
    what, bar = "older release patched / newest stock packed", ">= 0.97"
    rows = _rows(results, "old", variant="ratio")
    found = [
        Bar(f"{what}: {r['cell']}, {r['release']}", bar, f"{r['ratio']:.3f}", _verdict(r["passed"]))
        for r in rows
    ]
    return [*found, *_broken(results, "old", what, bar)] or [Bar(what, bar, "–", UNKNOWN)]


def _host(results: Results) -> list[Bar]:
    what, bar = "host time added to an attention layer", "< 30 µs"
    return [
        Bar(f"{what}, {r['release']}", bar, f"{r['layer_us']:.1f} µs", _verdict(r["passed"]))
        for r in _rows(results, "profile", variant="added")
    ] or [Bar(what, bar, "–", UNKNOWN)]


def _syncs(results: Results) -> list[Bar]:
    what = "host synchronisations of a training step"
    found = []
    for row in _rows(results, "profile"):
        if "bar" in row and "synchronisations" in row:
            how = f"{row['variant']}, {row['cell'].rsplit('/', 1)[1]}, {row['release']}"
            count = row["synchronisations"]
            seen = "–" if count is None else str(count)
            found.append(
                Bar(f"{what}: {how}", f"<= {row['bar']}", seen, _verdict(row.get("passed")))
            )
    return found or [Bar(what, "<= 1, with lengths 0", "–", UNKNOWN)]


def _losses(results: Results) -> list[Bar]:
    """One bar a section: the cell whose losses differ the most."""
    found = []
    for section in ("table", "large", "torch_flash"):
        rows = [r for r in _rows(results, section, variant="losses") if r.get("losses")]
        what, bar = f"padded, stock and patched give one loss ({section})", "< 1 %"
        if not rows:
            found.append(Bar(what, bar, "–", UNKNOWN))
            continue
        worst = max(rows, key=lambda r: float(r["off"]))
        seen = f"{100 * worst['off']:.2f} % at the most, of {len(rows)} cells ({worst['cell']})"
        found.append(Bar(what, bar, seen, _verdict(all(r["same"] for r in rows))))
    return found


def _graphs(results: Results) -> list[Bar]:
    what = "compiled: no graph break, no recompilation for other lengths, the eager loss"
    found = []
    for row in _rows(results, "compiled"):
        if not str(row["variant"]).endswith("/check"):
            continue
        how = f"{row['cell']}, {row['variant'][:-6].removeprefix('compiled_')}"
        seen = (
            f"{row['graphs']} graphs, {sum(row['breaks'].values())} breaks, {row['recompiled']} "
            f"recompiled over {row['different_batches']} batches, off {100 * row['off']:.2f} %"
        )
        found.append(Bar(f"{what}: {how}", "as said", seen, _verdict(row["right"])))
    return [*found, *_broken(results, "compiled", what, "as said")] or [
        Bar(what, "as said", "–", UNKNOWN)
    ]
