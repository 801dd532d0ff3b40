"""Thousands of hostile calls: ``python -m tests.fuzz --count 100000 --seed 0``.

Each must end right, unchanged, with the exception that the unpatched model raises, or with one of
our errors (``tests/hostile``). Prints one line of JSON: how many ended how, where, and for how
long; and the seed of each that ended badly, which ``--only`` runs again.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import signal
import sys
import time
import warnings
from collections import Counter
from typing import Any

import torch
import transformers

from .hostile.inputs import Hostile, hostile
from .hostile.judge import Bench, Outcome
from .hostile.source import Seeded

HANGS = 60  # seconds
SHOWN = 20


def make(seed: int, number: int) -> Hostile:
    """The call of that number."""
    return hostile(Seeded(f"{seed}/{number}"), long=1)


def fuzz(count: int, seed: int, *, verbose: bool = False) -> dict[str, Any]:
    """Run ``count`` calls and count how they ended."""
    bench = Bench()
    outcomes: Counter[str] = Counter()
    spoilt: Counter[str] = Counter()
    bad: list[str] = []
    began = time.monotonic()
    for number in range(count):
        call = make(seed, number)
        outcome = _in_time(bench, call)
        outcomes[outcome.kind] += 1
        spoilt.update(set(call.spoilt))
        if outcome.kind == "bad":
            bad.append(f"{number}: {outcome.detail}")
            if verbose:
                print(f"{number} {call.spoilt} {call.model}: {outcome.detail}", file=sys.stderr)
    return {
        "count": count,
        "seed": seed,
        "outcomes": dict(sorted(outcomes.items())),
        "bad": bad[:SHOWN],
        "spoilt": dict(sorted(spoilt.items())),
        "seconds": round(time.monotonic() - began),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, CPU, {torch.get_num_threads()} thread",
    }


def _in_time(bench: Bench, call: Hostile) -> Outcome:
    if not hasattr(signal, "SIGALRM"):
        return bench.run(call)

    def late(*_: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, late)
    signal.alarm(HANGS)
    try:
        return bench.run(call)
    except TimeoutError:
        return Outcome("bad", f"hangs for {HANGS} seconds")
    finally:
        signal.alarm(0)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="show the call of this number, and what came")
    parser.add_argument("--verbose", action="store_true", help="show bad ones as they come")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    if given.only is not None:
        call = make(given.seed, given.only)
        print(call)
        print(Bench().run(call))
        return 0
    result = fuzz(given.count, given.seed, verbose=given.verbose)
    print(json.dumps(result))
    return 1 if result["outcomes"].get("bad") else 0


if __name__ == "__main__":
    raise SystemExit(main())
