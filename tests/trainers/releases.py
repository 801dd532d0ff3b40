"""Which trainers are run, with which companions: ``python -m tests.trainers.releases``.

A release of Transformers comes from :mod:`tests.matrix.releases`. What else a trainer of its time
needs goes into a folder of its own, without dependencies; torch and pure helpers are shared.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from ..matrix import releases

#: What all of them import besides, into the environment itself; ``datasets`` for TRL among it.
SHARED = ["pandas", "xxhash", "multiprocess", "dill", "rich"]


@dataclass(frozen=True)
class Setup:
    """One run: a release, the companions of its time, and the cases that it does."""

    name: str
    transformers: str
    packages: tuple[str, ...]
    cases: tuple[str, ...]


_TRAINER = ("curve", "evaluation", "resume", "budget", "per_example")
_OLD_DATA = (
    "datasets==3.6.0",
    "pyarrow==21.0.0",  # the newest that takes numpy below 2, as old releases need
    "tyro==0.9.2",
    "docstring-parser==0.16",
    "shtab==1.7.1",
    "typeguard==4.4.1",
)

SETUPS = [
    Setup("trainer-4.34", "4.34.1", ("accelerate==0.23.0", "peft==0.6.2"), _TRAINER),
    Setup("trainer-4.36", "4.36.2", ("accelerate==0.25.0", "peft==0.7.1"), _TRAINER),
    Setup("trainer-4.43", "4.43.4", ("accelerate==0.33.0", "peft==0.12.0"), _TRAINER),
    Setup("trainer-4.46", "4.46.3", ("accelerate==1.1.1", "peft==0.13.2"), _TRAINER),
    Setup("trainer-4.57", "4.57.6", ("accelerate==1.15.0",), _TRAINER),
    Setup("trainer-5.24", "5.24.0", ("accelerate==1.15.0",), (*_TRAINER, "accelerate", "static")),
    Setup(
        "trl-0.8",
        "4.40.2",
        ("trl==0.8.6", "accelerate==0.30.1", "peft==0.10.0", *_OLD_DATA),
        ("sft",),
    ),
    Setup(
        "trl-0.15",
        "4.49.0",
        ("trl==0.15.2", "accelerate==1.3.0", "peft==0.14.0", *_OLD_DATA),
        ("sft",),
    ),
    Setup(
        "trl-1.16",
        "5.24.0",
        ("trl==1.16.0", "accelerate==1.15.0", "datasets==4.7.0", "pyarrow==21.0.0"),
        ("sft", "sft_padding_free"),
    ),
    Setup(
        "lightning-2.6",
        "5.24.0",
        ("pytorch-lightning==2.6.6", "lightning-utilities==0.15.3", "torchmetrics==1.9.0"),
        ("lightning",),
    ),
]


def folder(setup: Setup) -> Path:
    """The companions' folder, made when it is missing."""
    given = os.environ.get("FA2_PACK_PATCH_COMPANIONS")
    base = Path(given) if given else releases.ROOT / ".cache" / "companions"
    return releases.whole(
        base / setup.name, lambda made: releases.install(made, list(setup.packages))
    )


def path(setup: Setup) -> str:
    """What goes on PYTHONPATH for this run."""
    parts = [folder(setup), releases.folder(setup.transformers), releases.ROOT]
    return os.pathsep.join(str(part) for part in parts)


def main(arguments: list[str] | None = None) -> int:
    wanted = sys.argv[1:] if arguments is None else arguments
    for setup in SETUPS:
        if not wanted or setup.name in wanted:
            began = time.time()
            print(f"{setup.name}: {path(setup)} ({time.time() - began:.1f} s)", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
