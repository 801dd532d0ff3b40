"""The command line of the benchmarks; see README.md beside it."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import re
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SECTIONS = {
    "table": "table",
    "old": "old",
    "compiled": "compiled",
    "torch_flash": "kernels",
    "large": "large",
    "attention": "attention",
    "profile": "profile",
    "worker": "old",  # the child of "old", one for each Transformers
}
#: Sections in which batches of many widths follow each other: no fragments in their peaks.
_EXPANDABLE = ("table", "large", "old", "worker", "torch_flash")


def parse(arguments: list[str]) -> argparse.Namespace:
    """The options; ``--only`` compiled."""
    parser = argparse.ArgumentParser("python -m benchmarks.speed", description=__doc__)
    parser.add_argument("section", choices=list(SECTIONS))
    parser.add_argument("--out", type=Path, default=Path("speed"), help="folder of the results")
    parser.add_argument("--seconds", type=float, default=300.0, help="about how long this may take")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each variant at the most")
    parser.add_argument("--only", default="", help="regular expression on the cells' names")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, on a CPU")
    parser.add_argument("--list", action="store_true", help="print the cells' names")
    parser.add_argument("--modes", default="default,reduce-overhead", help="of torch.compile")
    parser.add_argument(
        "--old", action="append", default=[], help="PYTHONPATH of an older Transformers; repeatable"
    )
    options = parser.parse_args(arguments)
    options.only = re.compile(options.only)
    return options


def main(arguments: list[str]) -> int:
    """One section; 0 when nothing failed."""
    options = parse(arguments)
    if options.section in _EXPANDABLE:
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    sys.path.insert(0, str(ROOT))
    if options.smoke:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        from tests.matrix.standin.activate import activate

        activate()
    import torch
    import transformers

    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    if not options.smoke and not torch.cuda.is_available():
        print("torch sees no GPU; --smoke runs the same code on a CPU", file=sys.stderr)
        return 2
    module = importlib.import_module(f".{SECTIONS[options.section]}", __package__)
    if options.list:
        print("\n".join(cell.name for cell in module.CELLS))
        return 0
    from .measure import Deadline, Writer

    deadline = Deadline(options.seconds)
    if options.section == "worker":
        return int(module.worker(options))
    writer = Writer(options.out, options.section)
    failed = int(module.main(options, writer, deadline))
    print(f"{options.section}: {failed} failed; {writer.path}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
