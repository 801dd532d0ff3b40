"""Run the trainers: ``python -m tests.trainers.run --all --check``, or the names of setups.

Each setup runs in a process of its own with its Transformers and companions in front, and prints
one JSON object. ``--check`` exits with 1 when a case failed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import subprocess
import sys
import time
import traceback
import warnings

from . import releases

_MODULES = ("cases", "trl_cases")


def one(cases: list[str]) -> dict[str, object]:
    """Run cases in this process, whatever Transformers it has."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    results: dict[str, object] = {"transformers": transformers.__version__}
    for case in cases:
        began = time.time()
        module = importlib.import_module(f".{_where(case)}", __package__)
        try:
            found = getattr(module, case)()
            results[case] = {**found, "passed": True, "seconds": round(time.time() - began, 1)}
        except Exception as error:  # the other cases still run; the check fails
            traceback.print_exc()
            results[case] = {"passed": False, "error": f"{type(error).__name__}: {error}"[:2000]}
    return results


def _where(case: str) -> str:
    return "trl_cases" if case.startswith("sft") else "cases"


def start(setup: releases.Setup) -> tuple[dict[str, object], str]:
    """Run a setup in a process; its result, and what it said if it failed."""
    env = dict(os.environ)
    env["PYTHONPATH"] = releases.path(setup)
    env["OMP_NUM_THREADS"] = "1"
    env["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"  # old Trainers pickle their random state
    env["TOKENIZERS_PARALLELISM"] = "false"
    env["HF_HUB_OFFLINE"] = "1"
    env.pop("CUDA_VISIBLE_DEVICES", None)
    command = [sys.executable, "-m", "tests.trainers.run", "--here", *setup.cases]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"process": {"passed": False, "error": done.stderr[-2000:]}}, done.stderr[-4000:]
    return json.loads(lines[-1]), done.stderr[-4000:]


def failed(result: dict[str, object]) -> list[str]:
    """The names of the cases that did not pass."""
    return [k for k, v in result.items() if isinstance(v, dict) and not v.get("passed")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="setups, or cases with --here")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--here", action="store_true", help="run the cases in this process")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if options.here:
        print(json.dumps(one(options.names)))
        return 0
    known = {setup.name: setup for setup in releases.SETUPS}
    unknown = sorted(set(options.names) - set(known))
    if unknown or not (options.all or options.names):
        parser.error(f"unknown {unknown}; the setups are {sorted(known)}")
    bad = []
    for setup in known.values():
        if not options.all and setup.name not in options.names:
            continue
        began = time.time()
        result, said = start(setup)
        missed = failed(result)
        bad += [f"{setup.name}: {case}" for case in missed]
        if missed:
            print(said, file=sys.stderr)
        seconds = round(time.time() - began, 1)
        print(json.dumps({"setup": setup.name, "seconds": seconds, **result}), flush=True)
    if bad:
        print("failed: " + ", ".join(bad), file=sys.stderr)
    return 1 if bad and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
