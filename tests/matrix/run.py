"""Run the matrix: ``python -m tests.matrix.run [--releases all|boundaries|X,Y] [--check]``.

``--add 5.25.0`` is all that a new Transformers minor takes: its folder, its cells, its JSON, and
``compat_matrix.md`` rendered again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from . import releases, render

RESULTS = Path(__file__).resolve().parent / "results"
_LIMIT_S = 1200


def run_release(version: str, out: Path) -> tuple[str, int, str, float]:
    """One release in a process of its own: version, exit status, what it printed, seconds."""
    began = time.time()
    path = os.pathsep.join([str(releases.folder(version)), str(releases.ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.matrix.cells", "--release", version, "--out", str(out)]
    try:
        done = subprocess.run(
            command,
            cwd=releases.ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
        return version, done.returncode, done.stdout + done.stderr, time.time() - began
    except subprocess.TimeoutExpired:
        return version, 124, f"did not end within {_LIMIT_S} s", time.time() - began


def statuses(result: dict[str, Any]) -> dict[str, str]:
    """Every cell's status by its path: what ``--check`` compares."""
    found: dict[str, str] = {}
    for family, by_implementation in result["families"].items():
        for implementation, cells in by_implementation.items():
            for group in ("patched", "stock", "gradients"):
                for status, kinds in cells.get(group, {}).items():
                    for kind in kinds:
                        found[f"{family}/{implementation}/{group}/{kind}"] = status
            for group in ("perturbation", "revert"):
                found[f"{family}/{implementation}/{group}"] = cells.get(group, "absent")
    return found


def difference(kept: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Where the statuses of two results of one release differ."""
    a, b = statuses(kept), statuses(new)
    return [
        f"{new['release']} {path}: kept {a.get(path, 'absent')}, now {b.get(path, 'absent')}"
        for path in sorted(a.keys() | b.keys())
        if a.get(path) != b.get(path)
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--releases", default="all", help="all, boundaries, or X,Y")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--check", action="store_true", help="compare with the kept results")
    parser.add_argument("--add", help="a new release: run it, keep it, render the matrix")
    options = parser.parse_args(arguments)
    named = {"all": releases.RELEASES, "boundaries": releases.BOUNDARIES}
    wanted = [options.add] if options.add else named.get(options.releases)
    if wanted is None:
        wanted = options.releases.split(",")
    failed = []
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) if options.check else options.out
        out.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(options.jobs) as pool:
            jobs = [pool.submit(run_release, v, out / f"{v}.json") for v in wanted]
            for number, job in enumerate(jobs, 1):
                version, status, text, seconds = job.result()
                last = text.strip().splitlines()[-1] if text.strip() else ""
                print(f"[{number}/{len(wanted)}] {version}: {seconds:.0f} s, {last}", flush=True)
                if status:
                    failed.append(version)
                    print("\n".join(text.strip().splitlines()[-30:]), flush=True)
                elif options.check:
                    new = json.loads((out / f"{version}.json").read_text(encoding="utf-8"))
                    kept = json.loads((RESULTS / f"{version}.json").read_text(encoding="utf-8"))
                    stale = difference(kept, new)
                    if stale:
                        failed.append(version)
                        print("\n".join(stale[:20]), flush=True)
    if options.add and not failed:
        render.main([])
    print(f"matrix: {len(wanted) - len(set(failed))} passed, {len(set(failed))} failed {failed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
