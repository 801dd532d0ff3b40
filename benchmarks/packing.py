"""How well and how fast lengths are packed: ``python benchmarks/packing.py [--write]``.

Padding shares and densities of the real lengths in ``data/lengths.json``, and seconds for a million
of them. ``--write`` keeps the result and renders it into ``docs/packing.md``.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
RESULT = ROOT / "benchmarks" / "results" / "packing.json"
PAGE = ROOT / "docs" / "packing.md"
CAPACITY = 4096
RANKS = 8
NAMES = {"t0": "T0 (short, heavy tail)", "gsm8k": "GSM8K (narrow)"}


def padding(lengths: Any, batch: int) -> float:
    """The share of padding in random padded batches of so many examples."""
    order = np.random.default_rng(0).permutation(len(lengths))[: len(lengths) // batch * batch]
    rows = lengths[order].reshape(-1, batch)
    return float(1 - rows.sum() / (rows.max(1).sum() * batch))


def packed(lengths: Any) -> dict[str, Any]:
    """Density, and how uneven the cost of a step's eight ranks is, for each strategy."""
    from fa2_pack_patch.data import density, pack_lengths
    from fa2_pack_patch.data.packers import STRATEGIES

    found = {}
    for strategy in STRATEGIES:
        bins = pack_lengths(lengths, CAPACITY, strategy)
        steps = pack_lengths(lengths, CAPACITY, strategy, ranks=RANKS)
        costs = [int((lengths[held] ** 2).sum()) for held in bins]
        step_costs = np.array([(lengths[held] ** 2).sum() for held in steps]).reshape(-1, RANKS)
        found[strategy] = {
            "density": round(density(bins, lengths, CAPACITY), 5),
            "bins": len(bins),
            "cost_deviation": round(float(np.std(costs) / np.mean(costs)), 3),
            "slowest_rank": round(float(step_costs.max(1).sum() / step_costs.mean(1).sum()), 3),
        }
    return found


def seconds(lengths: Any) -> dict[str, float]:
    """Seconds for a million lengths drawn from the real ones, the best of three."""
    from fa2_pack_patch.data import pack_lengths
    from fa2_pack_patch.data.packers import STRATEGIES

    million = np.random.default_rng(0).choice(lengths, 1_000_000)
    found = {}
    for strategy in STRATEGIES:
        times = []
        for _ in range(3):
            began = time.perf_counter()
            pack_lengths(million, CAPACITY, strategy)
            times.append(time.perf_counter() - began)
        found[strategy] = round(min(times), 2)
    return found


def measure() -> dict[str, Any]:
    data = json.loads((ROOT / "benchmarks" / "data" / "lengths.json").read_text(encoding="utf-8"))
    from benchmarks.training_curve import machine

    result: dict[str, Any] = {
        "machine": machine(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "capacity": CAPACITY,
    }
    for name in NAMES:
        whole = np.array(data[name])
        lengths = np.minimum(whole, CAPACITY)
        result[name] = {
            "examples": len(lengths),
            "cut": int((whole > CAPACITY).sum()),
            "padding_share": {str(b): round(padding(whole, b), 4) for b in (8, 32)},
            **packed(lengths),
        }
    result["seconds_for_a_million"] = seconds(np.minimum(data["t0"], CAPACITY))
    return result


def table(result: dict[str, Any]) -> str:
    """What the page shows."""
    lines = [
        "| lengths | padding in random padded batches of 8 / 32 | strategy | density at "
        f"{result['capacity']} tokens | attention cost, slowest of {RANKS} ranks over the mean |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, title in NAMES.items():
        found = result[name]
        share = " / ".join(f"{100 * v:.1f} %" for v in found["padding_share"].values())
        for strategy in ("bfd", "balanced", "next_fit"):
            row = found[strategy]
            lines.append(
                f"| {title} | {share} | `{strategy}` | {row['density']:.4f} | "
                f"{row['slowest_rank']:.3f} |"
            )
    times = ", ".join(f"`{k}` {v} s" for k, v in result["seconds_for_a_million"].items())
    lines += [
        "",
        f"{result['t0']['examples']:,} and {result['gsm8k']['examples']:,} real examples, those "
        f"above {result['capacity']} tokens cut. A million lengths: {times} "
        f"({result['machine']}; `benchmarks/packing.py`).",
    ]
    return "\n".join(lines)


def rendered(text: str, result: dict[str, Any]) -> str:
    """The page with its table made anew."""
    block = f"<!-- packing -->\n{table(result)}\n<!-- /packing -->"
    return re.sub(r"<!-- packing -->\n.*?<!-- /packing -->", lambda _: block, text, flags=re.DOTALL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    result = measure()
    print(json.dumps(result, indent=1))
    if options.write:
        RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8"), result), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
