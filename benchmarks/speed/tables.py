"""Markdown tables of the results, one function a section."""

from __future__ import annotations

from collections.abc import Sequence

from .bars import UNKNOWN, judge
from .profile import BAR_US
from .results import Results, Row, Section, ratio


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table: its first column to the left, the others to the right."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *rows))


def times(value: float | None, missing: str = "–") -> str:
    """A ratio: 1.87x."""
    return missing if value is None else f"{value:.2f}x"


def _number(row: Row | None, key: str, form: str = ",.0f", scale: float = 1) -> str:
    if row is None:
        return "–"
    if row.get("error") or row.get("skipped"):
        return _why(row)
    return format(float(row[key]) * scale, form) if key in row else "–"


def _why(row: Row) -> str:
    if row.get("skipped") or str(row.get("error")).startswith("not run"):
        return "not run"
    return "out of memory" if row["error"] == "out of memory" else "failed"


def _against(ours: Row | None, other: Row | None, key: str = "tokens_per_second") -> str:
    """Ours over the other; where the other failed, why."""
    if other is not None and other.get("error"):
        return _why(other)
    return times(ratio(ours, other, key))


def _gib(row: Row | None) -> str:
    return _number(row, "peak_bytes", ".1f", 2**-30)


def steps(section: Section) -> str:
    """Training steps: ours against padded, stock and the ceiling; peak memory."""
    head = [
        "model / lengths / batch", "padding", "patched, tokens/s", "/ padded sdpa", "/ padded FA2",
        "/ stock packed", "/ ceiling", "peak, GiB", "peak / padded sdpa", "peak / padded FA2",
    ]  # fmt: skip
    lines = []
    for cell in section.cells():
        found = section.of(cell)
        if "all" in found and "ours" not in found:
            lines.append([cell, str(found["all"].get("error"))[:80], *[""] * (len(head) - 2)])
            continue
        for suffix, note in (("", ""), ("_lengths", " *with lengths*")):
            ours = found.get(f"ours{suffix}")
            if ours is None:
                continue
            sdpa, fa2 = found.get("padded_sdpa"), found.get("padded_fa2")
            lines.append(
                [
                    cell + note,
                    f"{100 * float(ours.get('padding_share', 0)):.0f} %",
                    _number(ours, "tokens_per_second"),
                    _against(ours, sdpa),
                    _against(ours, fa2),
                    _against(ours, found.get(f"stock{suffix}")),
                    _against(ours, found.get("ceiling")),
                    _gib(ours),
                    _against(ours, sdpa, "peak_bytes"),
                    _against(ours, fa2, "peak_bytes"),
                ]
            )
    return table(head, lines)


def old(section: Section) -> str:
    """Older releases, patched, over the newest stock release, packed."""
    head = ["model / lengths / batch", "older", "patched, tokens/s", "newest stock, tokens/s"]
    head += ["ratio", "of its rounds", "bar"]
    lines = []
    for row in section.where(variant="ours_old"):
        release = row["release"]
        match = section.where(variant=f"stock_beside_{release}", cell=row["cell"])
        ratios = section.where(variant="ratio", release=release, cell=row["cell"])
        stock, found = (match or [None])[-1], (ratios or [None])[-1]
        spread, verdict = "–", "not measured"
        if found is not None:
            spread = f"{min(found['each_round']):.2f} to {max(found['each_round']):.2f}"
            verdict = "passed" if found["passed"] else "**missed**"
        lines.append(
            [
                str(row["cell"]),
                str(release),
                _number(row, "tokens_per_second"),
                _number(stock, "tokens_per_second"),
                "–" if found is None else f"{found['ratio']:.3f}",
                spread,
                verdict,
            ]
        )
    return table(head, lines)


def compiled(section: Section) -> str:
    """Eager and compiled steps of static shapes."""
    head = ["model / lengths / batch", "variant", "tokens/s", "/ stock", "/ patched", "peak, GiB"]
    head += ["compiled in", "graphs, breaks, recompiled"]
    lines = []
    for cell in section.cells():
        found = section.of(cell)
        for name, row in found.items():
            if name.endswith("/check") or name == "all":
                continue
            check = found.get(f"{name}/check")
            graphs = "" if check is None else (
                f"{check['graphs']}, {sum(check['breaks'].values())}, {check['recompiled']}"
            )  # fmt: skip
            lines.append(
                [
                    cell,
                    name,
                    _number(row, "tokens_per_second"),
                    _against(row, found.get("stock")),
                    _against(row, found.get("ours")),
                    _gib(row),
                    "" if check is None else f"{check['compile_seconds']:.0f} s",
                    graphs,
                ]
            )
    return table(head, lines)


def torch_flash(section: Section) -> str:
    """``torch_flash`` against ``flash_attn``: the attention alone, then whole steps."""
    alone, whole = [], []
    for cell in section.cells():
        found = section.of(cell)
        if cell.startswith("attention/"):
            flash, torch = found.get("flash_attn"), found.get("torch_flash")
            alone.append(
                [
                    cell.removeprefix("attention/"),
                    *(_number(r, k, ".3f") for r in (flash, torch)
                      for k in ("forward_ms", "backward_ms")),
                    times(ratio(flash, torch, "both_ms")),
                ]
            )  # fmt: skip
        elif "ours" in found:
            flash, torch = found["ours"], found.get("ours_torch_flash")
            whole.append(
                [cell, _number(flash, "tokens_per_second"), _number(torch, "tokens_per_second"),
                 _against(torch, flash), _against(torch, flash, "peak_bytes")]
            )  # fmt: skip
    heads = ["heads / lengths", "flash_attn forward, ms", "backward, ms"]
    heads += ["torch_flash forward, ms", "backward, ms", "torch_flash is faster by"]
    steps_head = ["model / lengths / batch", "flash_attn, tokens/s", "torch_flash, tokens/s"]
    steps_head += ["torch_flash / flash_attn", "peak / flash_attn"]
    return table(heads, alone) + "\n\n" + table(steps_head, whole)


def attention(section: Section) -> str:
    """Attention alone: TFLOP/s of forward and backward, and their share of the chip's peak."""
    names = list(dict.fromkeys(r["variant"] for r in section.rows if r["variant"] != "all"))
    head = ["heads / tokens / example length", *names]
    lines = []
    for cell in section.cells():
        found = section.of(cell)
        texts = []
        for name in names:
            row = found.get(name) or found.get("all")
            text = _number(row, "both_tflops", ".0f")
            if row is not None and "both_of_peak" in row:
                text += f" ({100 * row['both_of_peak']:.0f} %)"
            texts.append(text)
        lines.append([cell.removeprefix("alone/"), *texts])
    return table(head, lines)


def profile(section: Section) -> str:
    """Device time by kind of kernel, host time, synchronisations."""
    device, host, syncs = [], [], []
    for row in section.rows:
        cell, variant, release = str(row["cell"]), str(row["variant"]), str(row.get("release"))
        if "attention_share" in row:
            shares = [f"{100 * row[k + '_share']:.1f} %" for k in ("attention", "gemm", "other")]
            busy = f"{100 * row['device_busy']:.0f} %"
            name = cell.removeprefix("device/")
            device.append([name, release, variant, f"{row['step_ms']:.1f}", busy, *shares])
        elif "forward_us" in row:
            host.append([release, variant, f"{row['forward_us']:.1f} µs"])
        elif "host_ms" in row:
            host.append([release, variant, f"{row['host_ms']:.2f} ms"])
        elif variant == "added":
            host.append([release, f"added to a layer (bar {BAR_US:.0f})", f"{row['layer_us']} µs"])
        elif "synchronisations" in row:
            how, count = cell.rsplit("/", 1)[1], row["synchronisations"]
            syncs.append([release, how, variant, "–" if count is None else str(count)])
    head = ["model / lengths / batch", "release", "variant", "step, ms", "device busy"]
    return "\n\n".join(
        [
            table([*head, "attention", "GEMM", "other"], device),
            table(["release", "call", "host time"], host),
            table(["release", "checkpointing", "variant", "synchronisations"], syncs),
        ]
    )


def bars(results: Results, *, measured: bool = False) -> str:
    """Every promise with its verdict; ``measured`` leaves out those without a result."""
    found = [b for b in judge(results) if b.verdict != UNKNOWN or not measured]
    return table(
        ["promise", "bar", "measured", "verdict"],
        [[b.what, b.bar, b.found, b.verdict] for b in found],
    )
