"""The releases of the matrix, and a folder for each: ``python -m tests.matrix.releases``.

One environment with torch serves nearly all; a release's folder holds Transformers and the
tokenizers and huggingface-hub that it asks for, and goes in front by PYTHONPATH.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

#: Every minor at its last patch release, and the patch releases at which packing changed.
RELEASES = [
    "4.34.1",
    "4.35.2",
    "4.36.2",
    "4.37.2",
    "4.38.2",
    "4.39.3",
    "4.40.2",
    "4.41.2",
    "4.42.4",
    "4.43.4",
    "4.44.0",
    "4.44.2",
    "4.45.2",
    "4.46.3",
    "4.47.1",
    "4.48.3",
    "4.49.0",
    "4.50.3",
    "4.51.3",
    "4.52.4",
    "4.53.0",
    "4.53.3",
    "4.54.0",
    "4.54.1",
    "4.55.0",
    "4.55.4",
    "4.56.2",
    "4.57.6",
    "5.0.0",
    "5.1.0",
    "5.2.0",
    "5.3.0",
    "5.4.0",
    "5.5.4",
    "5.6.0",
    "5.6.2",
    "5.7.0",
    "5.8.1",
    "5.9.0",
    "5.10.4",
    "5.11.0",
    "5.12.1",
    "5.13.1",
    "5.14.1",
    "5.15.1",
    "5.16.1",
    "5.17.0",
    "5.18.0",
    "5.19.0",
    "5.20.2",
    "5.21.1",
    "5.22.2",
    "5.23.0",
    "5.24.0",
]

#: What CI runs: one release on each side of every boundary.
BOUNDARIES = [
    "4.34.1",
    "4.36.2",
    "4.38.2",
    "4.42.4",
    "4.43.4",
    "4.44.2",
    "4.46.3",
    "4.47.1",
    "4.48.3",
    "4.52.4",
    "4.53.3",
    "4.55.4",
    "4.57.6",
    "5.0.0",
    "5.6.2",
    "5.15.1",
    "5.23.0",
    "5.24.0",
]

#: What Transformers of any release imports besides; pure or version-tolerant, shared by all.
SHARED = [
    "numpy<2",
    "packaging",
    "safetensors",
    "tqdm",
    "regex",
    "pyyaml",
    "filelock",
    "requests",
    "fsspec",
    "typer",
    "httpx",
    "httpx2",
    "httpcore2",
    "jinja2",
    "psutil",
]


def root() -> Path:
    """Where the folders lie: FA2_PACK_PATCH_RELEASES, or ``.cache/releases`` in the checkout."""
    given = os.environ.get("FA2_PACK_PATCH_RELEASES")
    return Path(given) if given else ROOT / ".cache" / "releases"


def installer() -> list[str]:
    """The command that installs into a folder: uv if it is there, else pip."""
    beside = Path(sys.executable).with_name("uv")
    uv = str(beside) if beside.exists() else shutil.which("uv")
    if uv:
        return [uv, "pip", "install", "--quiet", "--python", sys.executable]
    return [sys.executable, "-m", "pip", "install", "--quiet"]


def companions(metadata: str) -> list[str]:
    """The tokenizers and huggingface-hub requirements in a wheel's METADATA."""
    found = {}
    for line in metadata.splitlines():
        match = re.match(r"Requires-Dist: (tokenizers|huggingface[-_]hub)\b([^;]*)(;.*)?$", line)
        if match and "extra ==" not in (match.group(3) or "") and match.group(1) not in found:
            found[match.group(1)] = match.group(1) + re.sub(r"[()\s]", "", match.group(2))
    return list(found.values())


def folder(version: str, where: Path | None = None) -> Path:
    """The release's folder, made when it is missing."""

    def fill(made: Path) -> None:
        install(made, [f"transformers=={version}"])
        metadata = next(made.glob("transformers-*.dist-info")) / "METADATA"
        install(made, companions(metadata.read_text(encoding="utf-8")))

    return whole((where or root()) / version, fill)


def whole(target: Path, fill: Callable[[Path], None]) -> Path:
    """``target``, filled when it is missing: whole or not at all, whoever else wants it."""
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        fill(made)
        made.chmod(0o755)  # mkdtemp's own mode shuts everybody else out
        try:
            made.rename(target)
        except OSError:  # somebody else was quicker
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return target


def install(target: Path, requirements: list[str]) -> None:
    command = [*installer(), "--target", str(target), "--no-deps", *requirements]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(requirements)}: {done.stdout[-800:]}{done.stderr[-800:]}")


def main(arguments: list[str] | None = None) -> int:
    wanted = sys.argv[1:] if arguments is None else arguments
    for version in wanted or RELEASES:
        began = time.time()
        print(f"{version}: {folder(version)} ({time.time() - began:.1f} s)", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
