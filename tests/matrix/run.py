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
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from . import releases, render

RESULTS = Path(__file__).resolve().parent / "results"
CELLS = "tests.matrix.cells"
_LIMIT_S = 1200


def run_release(version: str, out: Path, cells: str = CELLS) -> tuple[str, int, str, float]:
    """One release in a process of its own: version, exit status, what it printed, seconds."""
    began = time.time()
    try:
        folder = releases.folder(version)
    except (OSError, RuntimeError, StopIteration) as raised:
        return version, 1, f"no folder: {raised}", time.time() - began
    path = os.pathsep.join([str(folder), str(releases.ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", cells, "--release", version, "--out", str(out)]
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
    except subprocess.TimeoutExpired as raised:
        said = (raised.stdout or b"") + (raised.stderr or b"")  # bytes even with text=True
        text = said.decode(errors="replace") if isinstance(said, bytes) else said
        return version, 124, f"{text}\ndid not end within {_LIMIT_S} s", time.time() - began


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
            for group in ("crash", "refused", "stock_broken"):
                if cells.get(group):
                    found[f"{family}/{implementation}/{group}"] = "yes"
    return found


def difference(kept: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Where the statuses of two results of one release differ."""
    a, b = statuses(kept), statuses(new)
    return [
        f"{new['release']} {path}: kept {a.get(path, 'absent')}, now {b.get(path, 'absent')}"
        for path in sorted(a.keys() | b.keys())
        if a.get(path) != b.get(path)
    ]


def stale(version: str, new: Path) -> list[str]:
    """How a new result differs from the kept one, or that none is kept."""
    kept = RESULTS / f"{version}.json"
    if not kept.exists():
        return [f"{version}: no kept result; run python -m tests.matrix.run --add {version}"]
    read = [json.loads(p.read_text(encoding="utf-8")) for p in (kept, new)]
    lines = difference(read[0], read[1])
    return lines if len(lines) <= 20 else [*lines[:20], f"… and {len(lines) - 20} more"]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--releases", default="all", help="all, boundaries, or X,Y")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--check", action="store_true", help="compare with the kept results")
    parser.add_argument("--add", help="a new release: run it, keep it, render the matrix")
    parser.add_argument("--cells-module", default=CELLS, help="what runs one release")
    options = parser.parse_args(arguments)
    if options.add and options.add.count(".") < 2:
        parser.error(f"--add wants the whole version, {options.add}.0 for one, not {options.add}")
    named = {"all": releases.RELEASES, "boundaries": releases.BOUNDARIES}
    wanted = [options.add] if options.add else named.get(options.releases)
    if wanted is None:
        wanted = options.releases.split(",")
    failed = []
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) if options.check else options.out
        out.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(options.jobs) as pool:
            cells = options.cells_module
            jobs = [pool.submit(run_release, v, out / f"{v}.json", cells) for v in wanted]
            for number, job in enumerate(as_completed(jobs), 1):
                version, status, text, seconds = job.result()
                last = text.strip().splitlines()[-1] if text.strip() else ""
                print(f"[{number}/{len(wanted)}] {version}: {seconds:.0f} s, {last}", flush=True)
                if status:
                    failed.append(version)
                    print("\n".join(text.strip().splitlines()[-30:]), flush=True)
                new = out / f"{version}.json"
                if options.check and new.exists():
                    lines = stale(version, new)
                    if lines:
                        failed.append(version)
                        print("\n".join(lines), flush=True)
    if options.add and not failed:
        render.main([])
        if options.add not in releases.RELEASES:
            print(f"now add {options.add} to RELEASES in tests/matrix/releases.py")
    failed = sorted(set(failed))
    print(f"matrix: {len(wanted) - len(failed)} passed, {len(failed)} failed {failed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
