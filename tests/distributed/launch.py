"""Starts the processes of one run, and ends them: a run that hangs fails, and says where it hung."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
PROCESSES = 2
#: Seconds without a word of any process until a run counts as hung; each says which job it begins.
#: A collective gives up sooner (worker.PATIENCE).
TIMEOUT = 80.0


class RunFailed(Exception):  # noqa: N818
    """A process failed or hung; the message ends with what it had said."""


#: A function of :mod:`tests.distributed.tasks` and its keyword arguments, which JSON can hold.
Job = tuple[str, Mapping[str, Any]]


def launch(jobs: Sequence[Job], *, timeout: float | None = None) -> list[list[Any]]:
    """Does the jobs one after the other in each of two processes; results by job, then by rank.

    Args:
        jobs: what to do.
        timeout: seconds for all the jobs together, from when the processes have met.

    Raises:
        RunFailed: a process ended with an error, or one was still running after its time.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        running = [_start(jobs, out, rank) for rank in range(PROCESSES)]
        try:
            why = _wait(running, out, timeout)
        finally:
            for process in running:
                process.kill()
                process.wait()
        if why:
            said = [f"--- rank {rank}\n{_said(out, rank)}" for rank in range(PROCESSES)]
            raise RunFailed("\n".join([why, *said]))
        ranks = [torch.load(out / f"{rank}.pt", weights_only=False) for rank in range(PROCESSES)]
        return [list(results) for results in zip(*ranks)]


def _start(jobs: Sequence[Job], out: Path, rank: int) -> subprocess.Popen[bytes]:
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *(p for p in sys.path if p)])
    env.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(PROCESSES),
        LOCAL_WORLD_SIZE=str(PROCESSES),
        OMP_NUM_THREADS="1",
        CUDA_VISIBLE_DEVICES="",
        HF_HUB_OFFLINE="1",
        DS_ACCELERATOR="cpu",
        ACCELERATE_USE_CPU="true",
    )
    command = [sys.executable, "-X", "faulthandler", "-W", "ignore", "-m"]
    command += ["tests.distributed.worker", json.dumps(jobs), str(out)]
    with (out / f"{rank}.log").open("wb") as log:
        return subprocess.Popen(command, env=env, cwd=ROOT, stdout=log, stderr=log)


def _wait(
    running: Sequence[subprocess.Popen[bytes]], out: Path, timeout: float | None
) -> str | None:
    """Until all have ended well; else why not. The others of a failed process get two seconds."""
    began = time.monotonic()
    end, last = began + TIMEOUT, float("inf")
    said, why = 0, None
    while time.monotonic() < min(end, last):
        if timeout is not None and all((out / f"{n}.ready").exists() for n in range(PROCESSES)):
            last, timeout = time.monotonic() + timeout, None
        size = sum((out / f"{n}.log").stat().st_size for n in range(PROCESSES))
        if size != said:
            said, end = size, time.monotonic() + TIMEOUT
        codes = [process.poll() for process in running]
        if all(code == 0 for code in codes):
            return None
        bad = [f"rank {rank} ended with {code}" for rank, code in enumerate(codes) if code]
        if bad and why is None:
            last = min(last, time.monotonic() + 2)
        why = ", ".join(bad) or None
        if bad and None not in codes:
            return why
        time.sleep(0.05)
    ran = time.monotonic() - began
    alive = [process for process in running if process.poll() is None]
    for process in alive:  # faulthandler then writes where each thread stands
        process.send_signal(signal.SIGABRT)
    for process in alive:
        try:
            process.wait(2)
        except subprocess.TimeoutExpired:
            continue
    return why or f"hung: {len(alive)} of {len(running)} processes ran after {ran:.0f} s"


def _said(out: Path, rank: int) -> str:
    return (out / f"{rank}.log").read_text(encoding="utf-8", errors="replace")[-3500:]
