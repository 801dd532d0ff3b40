"""``python -m fa2_pack_patch env | families | check CONFIG_OR_MODEL_DIR | matrix``."""

from __future__ import annotations

import argparse
import importlib
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Optional

from . import __version__, kernels
from .apply import supports
from .compat import NEWEST, OLDEST
from .errors import Fa2PackPatchError
from .registry import Family, families


def env() -> str:
    """What a bug report should hold, as ``- key: value`` lines."""
    lines = ["Copy the text below into your issue.", "", f"- `fa2_pack_patch`: {__version__}"]
    lines.append(f"- platform: {platform.platform()}")
    lines.append(f"- Python: {platform.python_version()}")
    for name in ("transformers", "torch", "flash-attn", "accelerate", "peft", "trl"):
        try:
            lines.append(f"- {name}: {version(name)}")
        except PackageNotFoundError:
            lines.append(f"- {name}: not installed")
    import torch

    if torch.cuda.is_available():
        lines.append(f"- GPU: {torch.cuda.get_device_name()} (CUDA {torch.version.cuda})")
    else:
        lines.append("- GPU: none seen by torch")
    for kernel in kernels.KERNELS.values():
        lines.append(f"- kernel {kernel.name}: {kernel.unavailable() or 'available'}")
    lines.append(f"- verified Transformers: {OLDEST} to {NEWEST}")
    return "\n".join(lines)


def families_table(markdown: bool = False) -> str:
    """The registry as a table: family, model types, since which release, how it is reached."""
    rows = [("family", "model types", "since", "reached by", "refuses")]
    for family in families().values():
        rows.append(
            (
                family.title,
                ", ".join(family.model_types),
                str(family.since),
                _reached(family),
                "; ".join(
                    ", ".join(f"{k}={v}" for k, v in r.when.items())
                    + (f" in {r.releases}" if str(r.releases) else "")
                    for r in family.refusals
                ),
            )
        )
    if markdown:
        lines = ["| " + " | ".join(row) + " |" for row in rows]
        lines.insert(1, "|" + " --- |" * len(rows[0]))
        return "\n".join(lines)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in rows)


def _reached(family: Family) -> str:
    return ", ".join(f"{s.via} {s.releases}" for s in family.spans)


def check(target: str) -> int:
    """The verdict on a config file or a model folder; 0 supported, 1 not, 2 unreadable."""
    path = Path(target)
    if not path.exists():
        print(f"{target!r} is neither a config.json nor a folder with one.", file=sys.stderr)
        return 2
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(str(path), trust_remote_code=False)
    except Exception as error:
        print(f"{target!r} could not be read as a config: {error}", file=sys.stderr)
        return 2
    verdict = supports(config)
    print(verdict)
    return 0 if verdict else 1


def matrix() -> int:
    """Where the compatibility matrix is, and how to run it."""
    try:
        run = importlib.import_module("tests.matrix.run")
    except ImportError:
        print(
            "The matrix is run from a checkout of the repository: "
            "python -m tests.matrix.run --add RELEASE; its results are in compat_matrix.md.",
            file=sys.stderr,
        )
        return 2
    return int(run.main(sys.argv[2:]))


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """The command line; exit status 0 fine, 1 not supported, 2 wrong use."""
    parser = argparse.ArgumentParser(prog="python -m fa2_pack_patch", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("env", help="versions and kernels, for a bug report")
    listing = commands.add_parser("families", help="the registry as a table")
    listing.add_argument("--markdown", action="store_true")
    checking = commands.add_parser("check", help="is this config or model folder supported?")
    checking.add_argument("target", metavar="CONFIG_OR_MODEL_DIR")
    commands.add_parser("matrix", help="run the compatibility matrix (in a checkout)")
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["matrix"]:
        return matrix()
    options = parser.parse_args(given)
    try:
        if options.command == "env":
            print(env())
        elif options.command == "families":
            print(families_table(options.markdown))
        else:
            return check(options.target)
    except Fa2PackPatchError as error:
        print(error, file=sys.stderr)
        return 1
    return 0
