"""Seeded faults, each of which the tests must find: ``python -m tests.mutants [NAME ...]``.

Each fault is put into a copy of the checkout, and the quick tests run on it until one goes red.
``--verify`` runs :func:`fa2_pack_patch.verify` alone instead, on a tiny model of what the fault
concerns (``tests/proofs.py``), for each fault that changes numbers. ``--jobs 2`` runs two at a time.

``--write`` keeps the result in ``tests/mutants.json``, a list with an object for each fault: ``name``,
``file``; ``digest`` of the fault itself; ``numbers`` and ``why`` as in :class:`Mutant`; ``tests`` and
``verify``: null where it was not run, else ``killed`` and ``by`` (the first test that went red; the
checks that did not pass, or what was raised), and of ``verify`` the proof it ran ``on``, null where
the numbers are out of its reach.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.matrix.releases import folder
from tests.proofs import RELEASES

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
    """One fault: a piece of a file, and what it becomes.

    ``numbers``: a packed call of a patched model gives other logits, loss or gradients. ``why`` says
    what does, or what else comes of the fault. ``proof`` is the one of :mod:`tests.proofs` that must
    see it; None where the numbers are out of its reach.
    """

    name: str
    file: str
    old: str
    new: str
    numbers: bool
    why: str
    proof: str | None = None

    @property
    def digest(self) -> str:
        """Tells this fault from one that had its name before."""
        told = json.dumps([self.file, self.old, self.new, self.proof])
        return hashlib.sha256(told.encode()).hexdigest()[:12]


def _file(name: str) -> str:
    return name if name.startswith("registry/") else f"fa2_pack_patch/{name}"


def _n(name: str, file: str, old: str, new: str, why: str, proof: str | None = "llama") -> Mutant:
    """A fault that changes numbers."""
    return Mutant(name, _file(file), old, new, True, why, proof)


def _o(name: str, file: str, old: str, new: str, why: str) -> Mutant:
    """A fault that does not."""
    return Mutant(name, _file(file), old, new, False, why)


_REFUSAL = "a refusal that is missing: no call that is right gives anything else"
_BATCH = "another batch: what the model makes of it is right"

MUTANTS = [
    # where examples are
    _n(
        "a repeated position is no boundary", "boundaries.py",
        "(position_ids[:, 1:] <= position_ids[:, :-1])",
        "(position_ids[:, 1:] < position_ids[:, :-1])",
        "an example of one token is read by the next",
    ),
    _n(
        "a jump forward is a boundary", "boundaries.py",
        "= position_ids[:, 1:] <= position_ids[:, :-1]\n",
        "= position_ids[:, 1:] != position_ids[:, :-1] + 1\n",
        "an example whose positions skip is cut in two", "jumps",
    ),
    _n(
        "a jump forward is a boundary under a mask", "boundaries.py",
        "(position_ids[:, 1:] <= position_ids[:, :-1])",
        "(position_ids[:, 1:] != position_ids[:, :-1] + 1)",
        "an example whose positions skip is cut in two", "jumps",
    ),
    _n(
        "a row does not start an example", "boundaries.py",
        "    start[:, 0] = True\n", "    start[0, 0] = True\n",
        "a row's first example reads the row above",
    ),
    _n(
        "boundaries are one token late", "boundaries.py",
        "    firsts = start.flatten().nonzero().flatten()\n",
        "    firsts = start.flatten().nonzero().flatten()\n    firsts[1:] += (firsts[1:] < rows * tokens - 1).long()\n",
        "first tokens belong to the example before",
    ),
    _n(
        "padding starts no run", "boundaries.py",
        "start[:, 1:] |= inner | (real[:, 1:] != real[:, :-1])", "start[:, 1:] |= inner",
        "an example reads the padding in front of it",
    ),
    _n(
        "a segment's change is no boundary", "boundaries.py",
        "(segments[:, 1:] != segments[:, :-1]) & both", "(segments[:, 1:] < segments[:, :-1]) & both",
        "rows with segment ids are one example", "segment ids",
    ),
    _n(
        "the longest example is the first", "layout.py",
        "counts, max(counts), total, flags", "counts, counts[0], total, flags",
        "flash-attention leaves out what is past max_seqlen", "llama, flash-attn",
    ),
    _o("an interrupted example passes", "boundaries.py", "if packed and hole is not None:", "if False:", _REFUSAL),
    # one forward and its layers
    _n(
        "a stale layout", "runs.py",
        "setattr(unwrapped(position_ids).untyped_storage(), _ATTRIBUTE, run)",
        "setattr(unwrapped(position_ids).untyped_storage(), _ATTRIBUTE, self.__dict__.setdefault('first', run))",
        "later calls are cut as the first one was",
    ),
    _o(
        "another model's layout is taken for its own", "runs.py",
        "return run if run is not None and run.owner_id == id(owner) else None", "return run",
        "a second reading is spared, wrongly; the layout that is found is the same",
    ),
    _n(
        "offloaded positions are not found by value", "runs.py",
        "        return self._by_value(position_ids)\n", "        return None\n",
        "recomputes after an offload mix examples", "offloading",
    ),
    _n(
        "a forward in flight is forgotten", "runs.py",
        "tensor.grad_fn.metadata[_ATTRIBUTE] = run", "pass",
        "recomputes after an offload mix examples", "offloading",
    ),
    _n(
        "a layer is skipped", "forwards.py",
        "        if run is None:\n            if position_ids",
        "        if run is None or site.index == 1:\n            if position_ids",
        "one layer mixes examples",
    ),
    _o("missed layers are not counted", "counting.py", "missed = ", "missed = [] and ", _REFUSAL),
    _o(
        "a cache is built", "hooks.py",
        '        call["use_cache"] = False\n        mask = call', "        mask = call",
        "memory that nobody asked for",
    ),
    _n(
        "first tokens stay targets", "targets.py",
        'LABELS = ("labels", ', 'LABELS = ("no labels", ',
        "the loss has targets predicted from another example",
    ),
    _n(
        "shifted labels lose the first tokens", "targets.py",
        "last=name == LABELS[1]", "last=False",
        "the loss has targets predicted from another example, and lacks others",
    ),
    _n(
        "per-token heads lose first labels", "apply.py",
        "heads.isdisjoint(found.family.per_token)", "True",
        "the loss lacks a target of each example", "token classification",
    ),
    _o("a head may keep positions", "forwards.py", "run is not None and not run.done:", "False:", _REFUSAL),
    _o("output_attentions passes", "refusals.py", "    if wants:\n", "    if False:\n", _REFUSAL),
    _o("contradictory lengths pass", "reading.py", "            if extra:\n", "            if False:\n", _REFUSAL),
    _o("a short max_length passes", "reading.py", "if longest < layout.max_seqlen:", "if False:", _REFUSAL),
    # what each layer computes
    _n(
        "the window is dropped", "patch.py",
        "return int(width) + (1 if rule.window == \"W+1\" else 0)", "return None",
        "tokens see further back than in the model", "mistral",
    ),
    _n(
        "the window is one wider", "patch.py",
        "return int(width) + (1 if", "return int(width) + 1 + (1 if",
        "tokens see one more than in the model", "mistral",
    ),
    _n(
        "the window is in all layers", "patch.py",
        '        if rule.layers == "kernel" and not handed_window:\n            return None\n', "",
        "full layers get a window", "qwen2",
    ),
    _n(
        "the scale is dropped", "patch.py",
        "        if rule.scale == \"default\":\n            scale = None\n", "        scale = None\n",
        "scores have another scale than the model's", "gemma2",
    ),
    _n("the softcap is dropped", "patch.py", "softcap if rule.softcap else None", "None", "scores are not capped", "gemma2"),
    _n(
        "no dropout in training", "interceptors/base.py",
        "if site.module.training else 0.0", "if False else 0.0",
        "a model trains without the dropout that it asks for", "dropout",
    ),
    _n("not causal", "kernels/sdpa.py", "is_causal=mask is None", "is_causal=False", "tokens see later ones"),
    _n(
        "the kernel's window is one narrower", "kernels/sdpa.py",
        "(distance < window)", "(distance < window - 1)", "tokens see one less than in the model", "mistral",
    ),
    _n(
        "flash-attn's window is one wider", "kernels/flash_attn.py",
        "(window - 1, 0)", "(window, 0)", "tokens see one more than in the model", "mistral, flash-attn",
    ),
    _n(
        "flash-attn is not causal", "kernels/flash_attn.py",
        "causal=True", "causal=False", "tokens see later ones", "llama, flash-attn",
    ),
    _n(
        "flash-attn loses the scale", "kernels/flash_attn.py",
        "softmax_scale=scale", "softmax_scale=None", "scores have another scale than the model's", "granite, flash-attn",
    ),
    # undoing, and the registry
    _o(
        "revert leaves a hook", "patch.py", "dictionary.pop(number, None)", "None",
        "a model that is patched no more is not as it was",
    ),
    _o(
        "one family's registry entry", "registry/phi.toml", "PhiForCausalLM", "PhiForCausalLm",
        "a model that is right is refused",
    ),
    _n(
        "one family's window", "registry/mistral.toml",
        'releases = ">=4.42"\nimplementations = ["eager", "sdpa"]\nwindow = "W"',
        'releases = ">=4.42"\nimplementations = ["eager", "sdpa"]\nwindow = "W+1"',
        "tokens see one more than in the model", "mistral",
    ),
    # data
    _o("the collator keeps first labels", "data/collators.py", "            row[0] = separator\n", "            pass\n", _BATCH),
    _o("the collator counts on", "data/collators.py", "torch.arange(start, start + n) for n in spans", "torch.arange(start, start + n) for n in [sum(spans)]", _BATCH),
    _o("a bin is overfull", "data/packers.py", "        at = bisect_left(self.sizes, size)\n", "        at = bisect_left(self.sizes, size - 1)\n", _BATCH),
    _o("ranks get the same batches", "data/samplers.py", "self._bins()[self.rank :: self.num_replicas]", "self._bins()[0 :: self.num_replicas]", _BATCH),
    _o(
        "an example's loss takes its neighbour's", "data/metrics.py", "IGNORED = -100", "IGNORED = -101",
        "what is made of right logits afterwards",
    ),
]  # fmt: skip


@contextmanager
def _mutated(mutant: Mutant, python_path: str) -> Iterator[tuple[Path, dict[str, str]]]:
    """A copy of the checkout with the fault in it, and the environment to run it in."""
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place)
        for name in _COPIED:
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        for path in ROOT.iterdir():
            if path.is_file():
                shutil.copy(path, copy / path.name)
        target = copy / mutant.file
        text = target.read_text(encoding="utf-8")
        if text.count(mutant.old) < 1:
            raise ValueError(f"{mutant.name}: {mutant.old!r} is not in {mutant.file}")
        target.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
        env = {**os.environ, "PYTHONPATH": f"{copy}{os.pathsep}{python_path}"}
        yield copy, {**env, "OMP_NUM_THREADS": "1", "FA2_PACK_PATCH_CACHE": str(copy / "cache")}


def by_tests(mutant: Mutant, python_path: str) -> dict[str, Any]:
    """Whether the tests find it, and which one does."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *TESTS]
    with _mutated(mutant, python_path) as (copy, env):
        done = subprocess.run(
            command, cwd=copy, env=env, capture_output=True, text=True, check=False, timeout=900
        )
    first = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, flags=re.MULTILINE)
    killed = done.returncode == 1 and first is not None
    return {"killed": killed, "by": [first.group(1)] if first else []}


def by_verify(mutant: Mutant, python_path: str) -> dict[str, Any]:
    """Whether ``verify`` alone finds it, and which checks do."""
    if mutant.proof is None:
        return {"on": None, "killed": False, "by": []}
    command = [sys.executable, "-m", "tests.proofs", mutant.proof]
    if mutant.proof in RELEASES:
        python_path = str(folder(RELEASES[mutant.proof]))
    with _mutated(mutant, python_path) as (copy, env):
        done = subprocess.run(
            command, cwd=copy, env=env, capture_output=True, text=True, check=False, timeout=300
        )
    if done.returncode:
        raise RuntimeError(f"{mutant.name}: {done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    by = [found["raised"]] if found["raised"] else found["failed"]
    return {"on": mutant.proof, "killed": not found["passed"], "by": by}


def kept() -> dict[str, dict[str, Any]]:
    """What ``tests/mutants.json`` holds of faults that are still in the list, by name."""
    if not RESULT.exists():
        return {}
    digests = {m.name: m.digest for m in MUTANTS}
    rows = json.loads(RESULT.read_text(encoding="utf-8"))
    return {row["name"]: row for row in rows if digests.get(row["name"]) == row["digest"]}


def write(found: Mapping[str, Mapping[str, Any]]) -> None:
    """Keep results: ``found`` holds ``tests`` or ``verify`` of faults by name."""
    before, rows = kept(), []
    for m in MUTANTS:
        row = {"name": m.name, "file": m.file, "digest": m.digest}
        row.update(numbers=m.numbers, why=m.why)
        for part in ("tests", "verify"):
            row[part] = found.get(m.name, {}).get(part, before.get(m.name, {}).get(part))
        rows.append(row)
    RESULT.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else "")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--verify", action="store_true", help="by verify alone, not by the tests")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    part = "verify" if options.verify else "tests"
    chosen = [m for m in MUTANTS if not options.names or m.name in options.names]
    if options.verify:
        chosen = [m for m in chosen if m.numbers]
    path = os.environ.get("PYTHONPATH", "")
    judge = by_verify if options.verify else by_tests
    found = {}
    with ThreadPoolExecutor(options.jobs) as pool:
        for mutant, result in zip(chosen, pool.map(lambda m: judge(m, path), chosen)):
            print(json.dumps({"name": mutant.name, **result}), flush=True)
            found[mutant.name] = {part: result}
            if options.write:
                write(found)
    alive = [name for name, of in found.items() if not of[part]["killed"]]
    print(f"{len(found) - len(alive)} of {len(found)} killed by {part}; alive: {alive}")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
