"""``verify`` alone, on a tiny real model of what a seeded fault concerns: ``python -m tests.proofs``.

``python -m tests.proofs NAME`` prints, as JSON, whether it passed, which checks did not, and what
was raised.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch

import fa2_pack_patch as fpp
from tests.matrix import models
from tests.matrix.kinds import TWO, _segments


def _proof(family: str, implementation: str = "sdpa", kernel: str = "auto") -> fpp.VerifyReport:
    model = _built(family, implementation)
    fpp.apply(model, kernel=kernel)
    return fpp.verify(model)


def _built(family: str, implementation: str, **config: Any) -> torch.nn.Module:
    import transformers

    case = models.FAMILIES[family]
    if implementation not in models.implementations(case, transformers.__version__):
        implementation = "eager"
    return models.build(case, implementation, **config)


def _segment_ids() -> fpp.VerifyReport:
    model = _built("llama", "sdpa")
    fpp.apply(model)
    return fpp.verify(model, examples=_segments(TWO, 3).kwargs)


def _jumps() -> fpp.VerifyReport:
    """Examples whose positions skip."""
    model = _built("llama", "sdpa")
    fpp.apply(model)
    positions = torch.tensor([[0, 1, 2, 9, 10, 11, 0, 1, 5, 6]])
    return fpp.verify(
        model, examples={"input_ids": torch.arange(5, 15)[None], "position_ids": positions}
    )


def _classifier() -> fpp.VerifyReport:
    import transformers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.LlamaForTokenClassification(_built("llama", "sdpa").config)
    fpp.apply(model)
    return fpp.verify(model)


def _dropping() -> fpp.VerifyReport:
    model = _built("llama", "sdpa", attention_dropout=0.5)
    fpp.apply(model)
    return fpp.verify(model)


def _checkpointed() -> fpp.VerifyReport:
    model: Any = _built("llama", "sdpa")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    fpp.apply(model)
    return fpp.verify(model)


def _offloaded() -> fpp.VerifyReport:
    """What a backward needs lies elsewhere meanwhile: recomputes are given other tensors."""
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda tensor: tensor):
        return _checkpointed()


def _flash(family: str) -> fpp.VerifyReport:
    """The kernel of flash-attn, with the stand-in for it."""
    from tests.matrix.standin import activate

    activate.activate()
    return _proof(family, kernel="flash_attn")


PROOFS: dict[str, Callable[[], fpp.VerifyReport]] = {
    "llama": lambda: _proof("llama"),
    "mistral": lambda: _proof("mistral"),
    "qwen2": lambda: _proof("qwen2"),
    "gemma2": lambda: _proof("gemma2"),
    "segment ids": _segment_ids,
    "jumps": _jumps,
    "token classification": _classifier,
    "dropout": _dropping,
    "offloading": _offloaded,
    "llama, flash-attn": lambda: _flash("llama"),
    "mistral, flash-attn": lambda: _flash("mistral"),
    "granite, flash-attn": lambda: _flash("granite"),
}

#: Where a proof says nothing in the newest release: decoder layers were handed positions as an
#: argument that checkpoints save until 4.57, as one of a closure later.
RELEASES = {"offloading": "4.46.3"}


def result(name: str) -> dict[str, Any]:
    """What came of one proof, in plain values."""
    try:
        report = PROOFS[name]()
    except Exception as error:
        what = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        return {"passed": False, "failed": [], "raised": what}
    failed = [check.name for check in report.checks if not check.passed]
    return {"passed": report.passed, "failed": failed, "raised": ""}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=list(PROOFS))
    parser.add_argument(
        "--table", action="store_true", help="the report itself, as in docs/verify.md"
    )
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    print(PROOFS[options.name]() if options.table else json.dumps(result(options.name)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
