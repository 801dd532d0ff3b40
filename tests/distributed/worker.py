"""One process of a run; :mod:`tests.distributed.launch` starts it with RANK and WORLD_SIZE set."""

from __future__ import annotations

import datetime
import json
import logging
import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

#: Seconds that a collective waits for the other processes.
PATIENCE = 30


def main(jobs: str, folder: str) -> None:
    """Joins the others, does the jobs, leaves their results in ``folder``."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    out, rank = Path(folder), int(os.environ["RANK"])
    dist.init_process_group(
        "gloo",
        init_method=f"file://{out / 'store'}",
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=datetime.timedelta(seconds=PATIENCE),
    )
    from . import tasks

    (out / f"{rank}.ready").touch()
    results = []
    for task, given in json.loads(jobs):
        print(task, given, flush=True)
        results.append(getattr(tasks, task)(**given))
    torch.save(results, out / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
