"""Older Transformers, patched, against the newest stock release: in turns, in one run.

Each older Transformers lives in a child process (``worker``) that takes the same batches of the
same shape; parent and child train one after the other, never at once, so that what the machine
does to one it does to the other.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from .cells import Cell, open_cell
from .measure import Deadline, Update, Variant, Writer, attempt, say, tidy

#: Patched, an older release must reach this share of the newest stock release's tokens a second.
BAR = 0.97
CELLS = [
    Cell("llama-1b", "t0", tokens=2048, optimizer="adamw", steps=8),
    Cell("llama-2-7b", "t0", batch=8),
    Cell("llama-2-7b", "gsm8k", batch=8),
]
_ROOT = Path(__file__).resolve().parents[2]
_PATIENCE = 150.0  # seconds for one answer: imports and the first kernels take the longest


class ChildError(RuntimeError):
    """The child died, hung or failed; quotes the end of what it printed."""


class Child:
    """One older Transformers in a process of its own, asked line by line."""

    def __init__(self, path: str, *, smoke: bool) -> None:
        inherited = os.environ.get("PYTHONPATH", "")
        found = os.pathsep.join(p for p in (path, str(_ROOT), inherited) if p)
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.speed", "worker", *(["--smoke"] if smoke else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, "PYTHONPATH": found},
        )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()
        self.release = "unknown"

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def ask(self, **request: Any) -> dict[str, Any]:
        """The answer to one request.

        Raises:
            ChildError: no answer, or one that says what went wrong.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._lines.get(timeout=_PATIENCE)
        except (OSError, queue.Empty) as fault:
            raise ChildError(f"{type(fault).__name__} at {request}: {self._tail()}") from None
        if not line:
            raise ChildError(f"died at {request}: {self._tail()}")
        answer: dict[str, Any] = json.loads(line)
        if answer.get("fault"):
            raise ChildError(answer["fault"])
        return answer

    def _tail(self) -> str:
        self._log.seek(0)
        return self._log.read()[-500:].strip()

    def stop(self) -> None:
        """End the process; harmless when it has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._log.close()


def main(options: argparse.Namespace, writer: Writer, deadline: Deadline) -> int:
    """Every cell with every ``--old``; returns how many pairs gave no ratio."""
    paths = options.old or ([""] if options.smoke else [])
    if not paths:
        raise SystemExit("old: give --old PYTHONPATH of an older Transformers, once for each")
    cells = [c for c in CELLS if options.only.search(c.name)]
    children = [Child(path, smoke=options.smoke) for path in paths]
    failed = 0
    try:
        ready = []
        for child, path in zip(children, paths):
            try:
                child.release = str(child.ask(do="hello")["release"])
                ready.append(child)
            except ChildError as fault:
                error = f"{type(fault).__name__}: {fault}"
                writer.put(cell="all", variant="ours_old", release=path, error=error)
                failed += len(cells)
        for n, cell in enumerate(cells):
            share = deadline.share(len(cells) - n)
            failed += _cell(cell, ready, options, writer, share, late=bool(n))
    finally:
        for child in children:
            child.stop()
    return failed


def _cell(
    cell: Cell,
    children: list[Child],
    options: argparse.Namespace,
    writer: Writer,
    deadline: Deadline,
    *,
    late: bool,
) -> int:
    if late and deadline.left() < 5 and not options.smoke:
        writer.put(cell=cell.name, variant="all", error="not run: --seconds were used up")
        return len(children)
    try:
        model, variants, update = open_cell(cell, ["stock"], smoke=options.smoke)
        about = cell.about(model, smoke=options.smoke)
        newest = variants[0]
        attempt(newest, update, first_only=True)
        failed = 0
        for n, child in enumerate(children):
            share = deadline.share(len(children) - n)
            failed += not _pair(cell, newest, child, update, options, writer, share, about)
    except Exception as fault:
        failed = len(children)
        error = f"{type(fault).__name__}: {fault}"[:600]
        writer.put(cell=cell.name, variant="all", error=error)
    model = variants = update = newest = None  # type: ignore[assignment]
    tidy()
    return failed


def _pair(
    cell: Cell,
    newest: Variant,
    child: Child,
    update: Update,
    options: argparse.Namespace,
    writer: Writer,
    deadline: Deadline,
    about: dict[str, object],
) -> bool:
    """Newest, old, newest, old … ; whether a ratio came of it."""
    import transformers

    stock = Variant(f"stock_beside_{child.release}", newest.call, newest.batches)
    stock.peak, stock.loss, stock.error = newest.peak, newest.loss, newest.error
    old = Variant("ours_old", newest.call, newest.batches)  # a mirror: the child has the model

    def put() -> None:
        writer.put(quiet=True, **about, **stock.row(), release=transformers.__version__)
        writer.put(quiet=True, **about, **old.row(), release=child.release)
        if stock.seconds and old.seconds:
            writer.put(quiet=True, **about, **ratio_row(stock.seconds, old.seconds, child.release))

    longest = 0.0
    try:
        _mirror(old, child.ask(do="open", cell=cell.name))
        for n in range(options.rounds):
            if stock.error or old.error or (n and deadline.left() < longest):
                break
            began = time.monotonic()
            seconds = attempt(stock, update)
            if seconds is not None:
                stock.seconds.append(seconds)
                _mirror(old, child.ask(do="turn"))
            longest = max(longest, time.monotonic() - began)
            if len(old.seconds) == len(stock.seconds) == n + 1:
                put()
        child.ask(do="close")
    except ChildError as fault:
        old.error = f"{type(fault).__name__}: {fault}"[:600]
    if old.error or stock.error:
        put()
    say(f"{cell.name} with {child.release}", [stock, old])
    if not (old.seconds and stock.seconds) or old.error or stock.error:
        return False
    found = ratio_row(stock.seconds, old.seconds, child.release)
    print(f"  ours_old / newest stock: {found['ratio']:.3f} (bar {BAR})", flush=True)
    return True


def _mirror(old: Variant, answer: dict[str, Any]) -> None:
    """Keep what the child measured."""
    old.peak = max(old.peak, int(answer["peak_bytes"]))
    old.loss = answer.get("loss", old.loss)
    old.error = answer.get("error")
    if answer.get("seconds") is not None:
        old.seconds.append(float(answer["seconds"]))


def ratio_row(stock: list[float], old: list[float], release: str) -> dict[str, Any]:
    """Tokens a second of the older over the newest: the median of each round's own ratio."""
    each = [s / o for s, o in zip(stock, old)]
    ratio = statistics.median(each)
    return {
        "variant": "ratio",
        "release": release,
        "ratio": round(ratio, 4),
        "each_round": [round(r, 4) for r in each],
        "bar": BAR,
        "passed": ratio >= BAR,
    }


def worker(options: argparse.Namespace) -> int:
    """The child: one JSON answer a line for each request on stdin, until that ends."""
    import transformers

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what anybody prints is no answer
    held: dict[str, Any] = {}
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["do"] == "hello":
                answer: dict[str, Any] = {"release": transformers.__version__}
            elif request["do"] == "open":
                held["variant"], held["update"] = _open(request["cell"], smoke=options.smoke)
                answer = _turn(held["variant"], held["update"], first_only=True)
            elif request["do"] == "turn":
                answer = _turn(held["variant"], held["update"])
            else:
                held.clear()
                tidy()
                answer = {}
        except Exception as fault:
            answer = {"fault": f"{type(fault).__name__}: {fault}"[:600]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    return 0


def _open(name: str, *, smoke: bool) -> tuple[Variant, Update]:
    import fa2_pack_patch

    cell = next(c for c in CELLS if c.name == name)
    model, variants, update = open_cell(cell, ["stock"], smoke=smoke)
    fa2_pack_patch.apply(model)
    return Variant("ours_old", model, variants[0].batches), update


def _turn(variant: Variant, update: Update, *, first_only: bool = False) -> dict[str, Any]:
    seconds = attempt(variant, update, first_only=first_only)
    found = {"peak_bytes": variant.peak, "error": variant.error, "loss": variant.loss}
    return found if first_only else {**found, "seconds": seconds}
