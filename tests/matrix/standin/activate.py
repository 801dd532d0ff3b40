"""Make Transformers, of any release, take the stand-in for an installed flash-attn 2.8.3."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

_ANSWERS = (
    "is_flash_attn_2_available",
    "is_flash_attn_available",  # 4.34
    "is_flash_attn_greater_or_equal_2_10",
)


def _yes(*_: Any, **__: Any) -> bool:
    return True


def activate() -> None:
    """Put the stand-in on the path and answer yes where Transformers asks for flash-attn 2.

    Before any modeling module is imported: those bind flash-attn's functions at import. CUDA stays
    absent for everyone. Calling it twice is harmless.
    """
    here = str(Path(__file__).resolve().parent)
    if here not in sys.path:
        sys.path.insert(0, here)
        importlib.invalidate_caches()
    import flash_attn

    if not getattr(flash_attn, "__cpu_stand_in__", False):
        raise RuntimeError(f"the real flash-attn is loaded already, from {flash_attn.__file__}")
    from transformers import utils
    from transformers.utils import import_utils

    if getattr(import_utils, _ANSWERS[0], getattr(import_utils, _ANSWERS[1], None)) is _yes:
        return
    late = [
        name
        for name, module in list(sys.modules.items())
        if name.startswith("transformers.")
        and not name.startswith("transformers.utils")
        and any(answer in vars(module) for answer in _ANSWERS)
    ]
    if late:
        raise RuntimeError(f"activate() comes too late, after the import of {', '.join(late)}")
    for module in (utils, import_utils):
        for answer in _ANSWERS:
            if hasattr(module, answer):
                setattr(module, answer, _yes)
    # Read before the path was set, if Transformers was imported first.
    mapping = getattr(import_utils, "PACKAGE_DISTRIBUTION_MAPPING", None)
    if mapping is not None and "flash_attn" not in mapping:
        mapping["flash_attn"] = ["flash-attn"]
    for name in ("_package_distribution_mapping", "is_flash_attn_greater_or_equal"):
        clear = getattr(getattr(import_utils, name, None), "cache_clear", None)
        if clear is not None:
            clear()
