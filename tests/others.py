"""Liger-Kernel, torchao and bitsandbytes, the real ones: ``python -m tests.others``.

They go into a folder of their own, and the tests that are skipped without them run on a CPU;
Liger's Triton kernels give way to torch there, all else of it is its own.
"""

from __future__ import annotations

import os
import subprocess
import sys

from tests.trainers.releases import Setup, path

SETUP = Setup(
    "others",
    "5.24.0",
    (
        "liger-kernel==0.8.5",
        "triton==3.5.0",  # Liger imports it
        "torchao==0.18.0",
        "bitsandbytes==0.50.2",
    ),
    ("liger", "torchao", "bitsandbytes", "qlora"),
)


def main() -> int:
    """Pytest's exit code; a test that is skipped all the same is named."""
    env = {**os.environ, "PYTHONPATH": path(SETUP), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-rs"]
    command += ["tests/test_stacks.py", "tests/test_quantized.py", "-k", " or ".join(SETUP.cases)]
    return subprocess.run(command, env=env, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
