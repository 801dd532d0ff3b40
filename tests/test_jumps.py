"""Positions that skip forward inside an example: one example to us, whatever stock makes of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fa2_pack_patch as fpp
from fa2_pack_patch import compat
from tests.matrix import models

SKIP = [0, 1, 2, 10, 11, 12]
#: the same example, and another one behind it
PACKED = [*SKIP, 0, 1, 2, 3]
#: Stock infers examples from positions alone where it is given neither a cache nor a mask.
STOCK_SPLITS = compat.release() >= compat.Version("4.53")
CALLS: dict[str, dict[str, Any]] = {
    "bare": {"use_cache": False},
    "cache": {},
    "mask": {"use_cache": False, "attention_mask": True},
}


def seen(model: torch.nn.Module, positions: list[int], how: str) -> list[bool]:
    """Which tokens notice another first token."""
    ids = torch.arange(5, 5 + len(positions))[None]
    other = ids.clone()
    other[0, 0] = 50
    more = dict(CALLS[how], position_ids=torch.tensor([positions]))
    if "attention_mask" in more:
        more["attention_mask"] = torch.ones_like(ids)
    with torch.no_grad():
        found = [model(input_ids=i, **more).logits[0] for i in (ids, other)]
    moved: list[bool] = ((found[0] - found[1]).abs().amax(-1) > 1e-6).tolist()
    return moved


def check(implementation: str) -> None:
    model = models.build(models.FAMILIES["llama"], implementation)
    for how in CALLS:
        splits = STOCK_SPLITS and how == "bare" and implementation != "flash_attention_2"
        own = [True] * 3 + [not splits] * 3
        assert seen(model, SKIP, how) == own, how
        assert seen(model, PACKED, how)[:6] == own, how
        fpp.apply(model)
        assert seen(model, SKIP, how) == own, how  # a row that is not packed is as it was
        assert seen(model, PACKED, how) == [True] * 6 + [False] * 4, how
        fpp.revert(model)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_jump_is_no_boundary(implementation: str) -> None:
    check(implementation)


def test_a_jump_is_no_boundary_for_flash_attention() -> None:
    """In a process of its own, where Transformers believes in a flash-attn on the CPU."""
    code = "from tests.matrix.standin import activate; activate.activate()\n"
    code += "from tests import test_jumps; test_jumps.check('flash_attention_2')"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=Path(__file__).resolve().parents[1], capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
