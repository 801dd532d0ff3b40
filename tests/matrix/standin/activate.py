"""Make Transformers, of any release, take the stand-in for an installed flash-attn."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch


def activate() -> None:
    """Put the stand-in on the path and answer yes where Transformers asks for flash-attn 2."""
    here = str(Path(__file__).resolve().parent)
    if here in sys.path:
        return
    sys.path.insert(0, here)
    from transformers import utils
    from transformers.utils import import_utils

    def yes(*_: Any, **__: Any) -> bool:
        return True

    for name in (
        "is_flash_attn_2_available",
        "is_flash_attn_available",
        "is_flash_attn_greater_or_equal_2_10",
    ):
        for module in (utils, import_utils):
            if hasattr(module, name):
                setattr(module, name, yes)
    with mock.patch.object(torch.cuda, "is_available", yes):
        import transformers.modeling_utils
    del transformers
