"""Seeded faults, each of which the tests must find: ``python -m tests.mutants [NAME ...]``.

Each fault is put into a copy of the checkout, and the quick tests run on it until one goes red.
``--jobs 2`` runs two at a time; ``--write`` keeps the result in ``tests/mutants.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULT = Path(__file__).with_suffix(".json")
TESTS = [
    "tests/test_layout.py",
    "tests/test_hooks.py",
    "tests/test_kernels.py",
    "tests/test_apply.py",
    "tests/test_collators.py",
    "tests/test_packers.py",
    "tests/test_samplers.py",
    "tests/test_metrics.py",
    "tests/test_registry.py",
]
_COPIED = ("fa2_pack_patch", "registry", "tests", "benchmarks", "docs", "demo")


@dataclass(frozen=True)
class Mutant:
    """One fault: a piece of a file, and what it becomes. ``numbers``: results come out wrong."""

    name: str
    file: str
    old: str
    new: str
    numbers: bool = True


def _m(name: str, file: str, old: str, new: str, *, numbers: bool = True) -> Mutant:
    folder = "" if file.startswith("registry/") else "fa2_pack_patch/"
    return Mutant(name, folder + file, old, new, numbers)


MUTANTS = [
    # where examples are
    _m(
        "a repeated position is no boundary", "boundaries.py",
        "(position_ids[:, 1:] <= position_ids[:, :-1])",
        "(position_ids[:, 1:] < position_ids[:, :-1])",
    ),
    _m("a row does not start an example", "boundaries.py", "    start[:, 0] = True\n", "    start[0, 0] = True\n"),
    _m(
        "boundaries are one token late", "boundaries.py",
        "    firsts = start.flatten().nonzero().flatten()\n",
        "    firsts = start.flatten().nonzero().flatten()\n    firsts[1:] += (firsts[1:] < rows * tokens - 1).long()\n",
    ),
    _m(
        "padding starts no run", "boundaries.py",
        "start[:, 1:] |= inner | (real[:, 1:] != real[:, :-1])", "start[:, 1:] |= inner",
    ),
    _m(
        "a segment's change is no boundary", "boundaries.py",
        "(segments[:, 1:] != segments[:, :-1]) & both", "(segments[:, 1:] < segments[:, :-1]) & both",
    ),
    _m(
        "the longest example is the first", "layout.py",
        "counts, max(counts), total, flags", "counts, counts[0], total, flags",
    ),
    _m("an interrupted example passes", "boundaries.py", "if packed and hole is not None:", "if False:", numbers=False),
    # one forward and its layers
    _m(
        "a stale layout",
        "runs.py",
        "setattr(position_ids.untyped_storage(), _ATTRIBUTE, run)",
        "setattr(position_ids.untyped_storage(), _ATTRIBUTE, self.__dict__.setdefault('first', run))",
    ),
    _m(
        "another model's layout is taken for its own", "runs.py",
        "return run if run is not None and run.owner_id == id(owner) else None", "return run",
        numbers=False,
    ),
    _m(
        "offloaded positions are not found by value", "runs.py",
        "        return self._by_value(position_ids)\n", "        return None\n",
    ),
    _m(
        "a forward in flight is forgotten", "runs.py",
        "tensor.grad_fn.metadata[_ATTRIBUTE] = run", "pass",
    ),
    _m("a layer is skipped", "forwards.py", "        if run is None:\n            if self.before", "        if run is None or site.index == 1:\n            if self.before"),
    _m("missed layers are not counted", "hooks.py", "missed = ", "missed = [] and ", numbers=False),
    _m("a cache is built", "hooks.py", '        call["use_cache"] = False\n        mask = call', "        mask = call", numbers=False),
    _m("first tokens stay targets", "targets.py", 'LABELS = ("labels", ', 'LABELS = ("no labels", '),
    _m("shifted labels lose the first tokens", "targets.py", "last=name == LABELS[1]", "last=False"),
    _m("per-token heads lose first labels", "apply.py", "heads.isdisjoint(found.family.per_token)", "True"),
    _m("a head may keep positions", "hooks.py", "run is not None and not run.done:", "False:"),
    _m("output_attentions passes", "refusals.py", "    if wants:\n", "    if False:\n", numbers=False),
    _m("contradictory lengths pass", "reading.py", "            if extra:\n", "            if False:\n", numbers=False),
    _m("a short max_length passes", "reading.py", "if longest < layout.max_seqlen:", "if False:", numbers=False),
    # what each layer computes
    _m("the window is dropped", "patch.py", "return int(width) + (1 if rule.window == \"W+1\" else 0)", "return None"),
    _m("the window is one wider", "patch.py", "return int(width) + (1 if", "return int(width) + 1 + (1 if"),
    _m("the window is in all layers", "patch.py", '        if rule.layers == "kernel" and not handed_window:\n            return None\n', ""),
    _m("the scale is dropped", "patch.py", "        if rule.scale == \"default\":\n            scale = None\n", "        scale = None\n"),
    _m("the softcap is dropped", "patch.py", "softcap if rule.softcap else None", "None"),
    _m("no dropout in training", "interceptors/base.py", "if site.module.training else 0.0", "if False else 0.0"),
    _m("not causal", "kernels/sdpa.py", "is_causal=mask is None", "is_causal=False"),
    _m("the kernel's window is one narrower", "kernels/sdpa.py", "(distance < window)", "(distance < window - 1)"),
    _m("flash-attn's window is one wider", "kernels/flash_attn.py", "(window - 1, 0)", "(window, 0)"),
    _m("flash-attn is not causal", "kernels/flash_attn.py", "causal=True", "causal=False"),
    _m("flash-attn loses the scale", "kernels/flash_attn.py", "softmax_scale=scale", "softmax_scale=None"),
    # undoing, and the registry
    _m("revert leaves a hook", "patch.py", "dictionary.pop(number, None)", "None", numbers=False),
    _m("one family's registry entry", "registry/phi.toml", "PhiForCausalLM", "PhiForCausalLm", numbers=False),
    _m("one family's window", "registry/mistral.toml", 'releases = ">=4.42"\nimplementations = ["eager", "sdpa"]\nwindow = "W"', 'releases = ">=4.42"\nimplementations = ["eager", "sdpa"]\nwindow = "W+1"'),
    # data
    _m("the collator keeps first labels", "data/collators.py", "            row[0] = separator\n", "            pass\n"),
    _m("the collator counts on", "data/collators.py", "torch.arange(start, start + n) for n in spans", "torch.arange(start, start + n) for n in [sum(spans)]"),
    _m("a bin is overfull", "data/packers.py", "        at = bisect_left(self.sizes, size)\n", "        at = bisect_left(self.sizes, size - 1)\n"),
    _m("ranks get the same batches", "data/samplers.py", "self._bins()[self.rank :: self.num_replicas]", "self._bins()[0 :: self.num_replicas]"),
    _m("an example's loss takes its neighbour's", "data/metrics.py", "IGNORED = -100", "IGNORED = -101"),
]  # fmt: skip


def run(mutant: Mutant, python_path: str) -> dict[str, Any]:
    """Whether the tests find it, and which one does."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in _COPIED:
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        for path in ROOT.iterdir():
            if path.is_file():
                shutil.copy(path, copy / path.name)
        target = copy / mutant.file
        text = target.read_text(encoding="utf-8")
        if text.count(mutant.old) < 1:
            return {"name": mutant.name, "killed": False, "error": f"{mutant.old!r} is not there"}
        target.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
        env = {**os.environ, "PYTHONPATH": f"{copy}{os.pathsep}{python_path}"}
        env["OMP_NUM_THREADS"] = "1"
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *TESTS]
        done = subprocess.run(
            command, cwd=copy, env=env, capture_output=True, text=True, check=False, timeout=900
        )
    first = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, flags=re.MULTILINE)
    return {
        "name": mutant.name,
        "file": mutant.file,
        "killed": done.returncode == 1 and first is not None,
        "by": first.group(1) if first else "",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    chosen = [m for m in MUTANTS if not options.names or m.name in options.names]
    path = os.environ.get("PYTHONPATH", "")
    found = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for result in pool.map(lambda m: run(m, path), chosen):
            print(json.dumps(result), flush=True)
            found.append(result)
    alive = [r["name"] for r in found if not r["killed"]]
    print(f"{len(found) - len(alive)} of {len(found)} killed; alive: {alive}")
    if options.write:
        RESULT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
