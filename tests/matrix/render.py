"""``compat_matrix.md`` from the kept results: ``python -m tests.matrix.render [--check]``."""

from __future__ import annotations

import argparse
import json
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

from packaging.version import Version

from fa2_pack_patch import registry

from .kinds import GENERATION, KINDS

RESULTS = Path(__file__).resolve().parent / "results"
GPU = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "gpu"
PROOFS = GPU.with_name("gpu_verify")
KERNELS = ("flash_attn", "torch_flash", "sdpa")
STATES = ("stock", "patched", "leaking")
TARGET = Path(__file__).resolve().parents[2] / "compat_matrix.md"
IMPLEMENTATIONS = ("eager", "sdpa", "flash_attention_2")
BAD = ("wrong", "error")

Result = dict[str, Any]


def load(where: Path) -> list[Result]:
    """The kept results, oldest release first."""
    found = [json.loads(p.read_text(encoding="utf-8")) for p in where.glob("*.json")]
    return sorted(found, key=lambda r: Version(r["release"]))


def verdict(cells: Result | None) -> str:
    """One family, loaded as one implementation, in one release: ok, fault or none."""
    if cells is None or (
        set(cells) <= {"stock_broken", "patched", "stock", "gradients"}
        and (cells.get("stock_broken") and not cells.get("patched"))
    ):
        return "–"  # absent, or stock cannot even build it
    if "crash" in cells or "refused" in cells or not cells.get("patched"):
        return "❌"
    groups = [cells["patched"], cells["gradients"]]
    if any(group.get(s) for group in groups for s in BAD):
        return "❌"
    expected = {k.name for k in KINDS if k.outcome == "refused"}
    unexpected = set(cells["patched"].get("refused", [])) - expected
    if cells.get("perturbation") != "right" or cells.get("revert") != "unchanged":
        return "❌"
    return "(✅)" if unexpected else "✅"


def family_cell(result: Result, family: str) -> str:
    """All implementations of a family in one release in one sign."""
    by_implementation = result["families"].get(family)
    if not by_implementation:
        return "–"
    signs = {verdict(c) for c in by_implementation.values()}
    return next(sign for sign in ("❌", "(✅)", "✅", "–") if sign in signs)


def spans(results: list[Result], column: Any) -> list[tuple[str, list[str]]]:
    """Adjacent releases with the same column, as ("4.34 … 4.36", column)."""
    found = []
    for value, group in groupby(results, key=column):
        names = [r["release"] for r in group]
        label = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
        found.append((label, value))
    return found


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def stock_share(result: Result, kind: str, implementation: str) -> str:
    """Of the families loaded so, how many stock gets wrong with this kind, and how many raise."""
    wrong = ran = raised = 0
    for by_implementation in result["families"].values():
        cells = by_implementation.get(implementation)
        if cells is None or not cells.get("stock"):
            continue
        if kind in cells["stock"].get("error", []):
            raised += 1
        elif any(kind in kinds for kinds in cells["stock"].values()):
            ran += 1
            wrong += kind in cells["stock"].get("wrong", [])
    if not ran:
        return "raises" if raised else "–"
    sign = "✅" if wrong == 0 else ("❌" if wrong == ran else f"{wrong}/{ran}")
    return f"{sign}, {raised} raise" if raised else sign


def counts(results: list[Result]) -> dict[str, int]:
    """How many cells there are, and how each of them came out."""
    found = {"cells": 0, "right": 0, "unchanged": 0, "refused": 0, "bad": 0, "stock_wrong": 0}
    found["stock_error"] = 0
    for result in results:
        for by_implementation in result["families"].values():
            for cells in by_implementation.values():
                for group in ("patched", "gradients"):
                    for status, kinds in cells.get(group, {}).items():
                        found["cells"] += len(kinds)
                        name = "bad" if status in BAD else status
                        found[name] = found.get(name, 0) + len(kinds)
                whole = [cells[g] for g in ("perturbation", "revert") if g in cells]
                whole += ["error" for g in ("crash", "refused") if g in cells]
                for status in whole:
                    found["cells"] += 1
                    name = "bad" if status in BAD else status
                    found[name] = found.get(name, 0) + 1
                found["stock_wrong"] += len(cells.get("stock", {}).get("wrong", []))
    return found


def load_gpu(where: Path) -> list[Result]:
    """What benchmarks/gpu_check.py or gpu_verify.py kept, oldest release first."""
    found = [json.loads(p.read_text(encoding="utf-8")) for p in where.glob("*.json")]
    return sorted(found, key=lambda r: Version(r["transformers"]))


def gpu_cell(result: Result, family: str) -> str:
    """All models of a family in one release on the GPU: a sign, and the kernels that refuse."""
    models = [m for key, m in result["models"].items() if key.split("/")[0] == family]
    if not models:
        return "–"
    if any(
        "fault" in m or any("fault" in m[k] or m[k].get("wrong") for k in KERNELS) for m in models
    ):
        return "❌"
    refused = [k for k in KERNELS if any("refused" in m[k] for m in models)]
    return "✅" + "".join(f" not `{k}`" for k in refused)


def gpu(results: list[Result]) -> list[str]:
    """The GPU's columns."""
    if not results:
        return []
    rows = [m[k] for r in results for m in r["models"].values() for k in KERNELS if "own" in m]
    right = sum(row.get("right", 0) for row in rows)
    worst = max((v for row in rows for v in row.get("worst", {}).values()), default=0.0)
    wrong = sum(len(row.get("wrong", {})) + ("fault" in row) for row in rows)
    wrong += sum("fault" in m for r in results for m in r["models"].values())
    machines = sorted({f"{r['machine']}, torch {r['torch']}" for r in results})
    names = sorted({key.split("/")[0] for r in results for key in r["models"]})
    lines = [
        "## On a GPU, in bf16",
        "",
        f"{', '.join(machines)}, flash-attn {results[-1]['flash_attn']}: each family loaded each "
        "way, tiny and with the head layout of published checkpoints (head_dim 64 to 256; MHA, GQA, "
        "MQA), the kinds of input that are right above, and the kernels "
        + ", ".join(f"`{k}`" for k in KERNELS)
        + f": {right:,} calls right, {wrong} wrong. Right means: logits and gradients are off the "
        "float32 reference by no more than twice what the unpatched model in bf16, with PyTorch's "
        "own attention and each example by itself, is off, plus one bf16 rounding (2^-8, relative); "
        f"the worst call reached {worst:.2f} of that. Gradients are those of embeddings, norms and "
        "biases. Mixture-of-experts models use all their experts here, since a near tie would be "
        "decided by rounding. These runs are of commit 5be7173; what came after was tested on a CPU.",
        "",
    ]
    columns = [[gpu_cell(r, f) for f in names] for r in results]
    body = [[f"`{f}`", *(c[i] for c in columns)] for i, f in enumerate(names)]
    return [*lines, *table(["family", *(r["transformers"] for r in results)], body), ""]


def proofs(results: list[Result]) -> list[str]:
    """What ``verify`` said on a GPU, of each model as stock, patched, and with a layer that leaks."""
    models = [m for r in results for m in r["models"].values() if "refused" not in m]
    rows = [m for m in models if "fault" not in m]
    if not rows:
        return []
    faults = [m["fault"] for m in models if "fault" in m]
    why = "; ".join(sorted(set(faults)))
    broken = f" {len(faults)} could not be run, as stock neither: {why}." if faults else ""
    passed = {state: sum(m[state]["passed"] for m in rows) for state in STATES}
    releases = ", ".join(r["transformers"] for r in results)
    machines = sorted({f"{r['machine']}, torch {r['torch']}" for r in results})
    shapes = {
        key.split("/")[0]: m["patched"]
        for r in results
        for key, m in r["models"].items()
        if key.split("/")[2:3] == ["published"] and "patched" in m
    }
    took = "".join(
        f" On the shape of `{name}` it took {m['seconds']:.0f} s and {m['gib']:.1f} GiB beside the "
        "weights."
        for name, m in shapes.items()
    )
    nearest = max(m["patched"]["nearest"] for m in rows)
    return [
        f"`verify` there ({', '.join(machines)}, Transformers {releases}; bf16, fp16 and fp32; the "
        f"same kernels): of {len(rows):,} models it passed {passed['stock']:,} as they were loaded, "
        f"{passed['patched']:,} patched, and {passed['leaking']:,} patched whose last attention layer "
        "adds to each token a hundredth of its row's mean. The value nearest to what is allowed was "
        f"{nearest:.2f} of it.{took}{broken}",
        "",
    ]


def render(
    results: list[Result],
    on_gpu: list[Result] | None = None,
    proved: list[Result] | None = None,
) -> str:
    """The whole page."""
    families = sorted({f for r in results for f in r["families"]})
    n = counts(results)
    lines = [
        "# Compatibility matrix",
        "",
        "<!-- Rendered by `python -m tests.matrix.render` from tests/matrix/results. -->",
        "",
        f"{len(families)} models of {len(registry.families())} families in {len(results)} releases "
        f"of Transformers ({results[0]['release']} to {results[-1]['release']}), each loaded as "
        f"eager, sdpa and flash_attention_2: {n['cells']:,} cells, of which {n['right']:,} right "
        f"(packed = separate), {n['unchanged']:,} unchanged bit for bit, {n['refused']:,} refused "
        f"by name, {n['stock_error']:,} without an input (stock itself raises while making it), "
        f"{n['bad']:,} bad. On the same inputs stock Transformers is silently wrong in "
        f"{n['stock_wrong']:,} cells.",
        "",
        "Every cell was run in float32 on a CPU (torch "
        + ", ".join(sorted({r["torch"] for r in results}))
        + "), tiny models of the real classes; flash_attention_2 with a stand-in for flash-attn in "
        "plain torch. Right means: logits and every gradient within 2e-4 of the same unpatched "
        "model run on each example by itself, and no other example's output moves when one "
        "example changes (exactly; mixture-of-experts models within 1e-5).",
        "",
        "## What works where",
        "",
        "✅ every kind of input right, unchanged or refused as it must be · (✅) with a refusal named "
        "below · ❌ a fault · – not in that release, or stock cannot build it there",
        "",
    ]
    columns = spans(results, lambda r: [family_cell(r, f) for f in families])
    rows = [[f"`{f}`", *(c[1][i] for c in columns)] for i, f in enumerate(families)]
    lines += table(["family", *(c[0] for c in columns)], rows)
    lines += ["", *gpu(on_gpu or []), *proofs(proved or [])]
    lines += ["## What stock Transformers gets wrong, without a word", ""]
    lines += [
        "Packed rows on the unpatched model: ✅ right for every family that runs, ❌ silently wrong "
        "for every family that runs, n/m wrong for n of m · raises, or n raise: stock stops with "
        "an error, which is not silent.",
    ]
    packed = [k for k in KINDS if k.outcome == "right"]
    for implementation in IMPLEMENTATIONS:
        columns = spans(
            results,
            lambda r, i=implementation: [stock_share(r, k.name, i) for k in packed],
        )
        lines += ["", f"### Loaded as {implementation}", ""]
        lines += table(
            ["kind of input", *(c[0] for c in columns)],
            [[k.title, *(c[1][i] for c in columns)] for i, k in enumerate(packed)],
        )
    lines += ["", "## The kinds of input", ""]
    titles = [[k.title, f"`{k.name}`", k.outcome] for k in KINDS]
    titles += [[title, f"`{name}`", "unchanged"] for name, title in GENERATION.items()]
    lines += table(["kind", "name", "with the patch"], titles)
    lines += ["", "## Each family", ""]
    detail = []
    for family in families:
        present = [r for r in results if family in r["families"]]
        errors = [
            (c.get("patched_error", 0.0), c.get("gradients_error", 0.0))
            for r in present
            for c in r["families"][family].values()
        ]
        foreign = max(
            c.get("perturbation_error", 0.0)
            for r in present
            for c in r["families"][family].values()
        )
        detail.append(
            [
                f"`{family}`",
                f"{present[0]['release']} … {present[-1]['release']}",
                f"{max(e[0] for e in errors):.0e}",
                f"{max(e[1] for e in errors):.0e}",
                f"{foreign:.0e}" if foreign else "0",
            ]
        )
    lines += table(
        ["family", "releases", "largest error, logits", "gradients", "foreign example"], detail
    )
    lines += ["", "## Quirks of single releases", ""]
    for family in registry.families().values():
        lines += [f"- {family.title} ({note.releases}): {note.text}" for note in family.notes]
    broken: dict[str, list[str]] = {}
    for result in results:
        for family, by_implementation in result["families"].items():
            for implementation, cells in by_implementation.items():
                if "stock_broken" in cells:
                    text = (
                        cells["stock_broken"].split(":")[0] + ": " + _brief(cells["stock_broken"])
                    )
                    broken.setdefault(text, []).append(
                        f"{family}/{implementation} {result['release']}"
                    )
    lines += ["", "### Where stock cannot run one example in float32 by itself", ""]
    lines += [
        "There packed was compared with the same weights loaded as eager.",
        "",
    ]
    lines += [f"- {text} — {', '.join(where)}" for text, where in sorted(broken.items())]
    faults = [
        f"- {result['release']} {family}/{implementation} {kind}: {cell}"
        for result in results
        for family, by_implementation in result["families"].items()
        for implementation, cells in by_implementation.items()
        for kind, cell in cells.get("faults", {}).items()
    ]
    if faults:
        lines += ["", "## Faults", "", *faults]
    return "\n".join(lines) + "\n"


def _brief(text: str) -> str:
    tail = text.split(":", 1)[-1].strip()
    return tail[:90].replace("|", "/")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail when the page is stale")
    options = parser.parse_args(arguments)
    text = render(load(RESULTS), load_gpu(GPU), load_gpu(PROOFS))
    if options.check:
        if TARGET.read_text(encoding="utf-8") == text:
            return 0
        print("compat_matrix.md is stale: run python -m tests.matrix.render")
        return 1
    TARGET.write_text(text, encoding="utf-8")
    print(f"wrote {TARGET.name}: {len(text.splitlines())} lines")
    return 0


if __name__ == "__main__":
    sys.exit(main())
