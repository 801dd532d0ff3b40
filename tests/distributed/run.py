"""DeepSpeed's ZeRO-2 and ZeRO-3 in two processes: ``python -m tests.distributed.run``.

DeepSpeed goes into a folder of its own. Nothing of it is compiled: see
:class:`tests.distributed.wrappers.Zero`.
"""

from __future__ import annotations

import os
import subprocess
import sys

from tests.trainers.releases import Setup, folder, path

SETUP = Setup(
    "deepspeed-0.19",
    "5.24.0",
    (
        "deepspeed==0.19.8",
        "einops==0.8.2",
        "hjson==3.1.0",
        "msgpack==1.2.4",
        "ninja==1.13.2",
        "py-cpuinfo==9.0.0",
        "pydantic==2.14.4",
        "pydantic-core==2.50.5",
        "annotated-types==0.8.0",
        "typing-inspection==0.4.5",
    ),
    ("zero2", "zero3"),
)


def main() -> int:
    """The tests of ``tests/test_distributed.py`` that need DeepSpeed; pytest's exit code."""
    env = dict(os.environ)
    env["PYTHONPATH"] = path(SETUP)
    env["PATH"] = os.pathsep.join([str(folder(SETUP) / "bin"), env.get("PATH", "")])
    env["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, "-m", "pytest", "-q", "tests/test_distributed.py"]
    command += ["-k", " or ".join(SETUP.cases)]
    return subprocess.run(command, env=env, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
