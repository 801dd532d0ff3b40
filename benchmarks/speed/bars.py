"""What was promised beforehand, and whether the results hold it."""

from __future__ import annotations

from dataclasses import dataclass

from .results import Results, Row

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
    return [*_old(results), *_host(results), *_syncs(results), *_losses(results), *_graphs(results)]


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
