"""Every fork on a version of Transformers or torch, in one place."""

from __future__ import annotations

import re
import sys
from functools import lru_cache
from typing import Any, Callable, Optional

import torch
from packaging.version import Version

from .errors import UnsupportedReleaseError

OLDEST = Version("4.34")
#: The newest minor for which the matrix was run; patch releases of it are accepted.
NEWEST = Version("5.24")

#: Whether torch's graph_break takes the reason that fullgraph=True then shows (2.8 at the latest).
BREAKS_SAY_WHY = Version(torch.__version__.split("+")[0]) >= Version("2.8.0.dev0")

_HUB_FLASH = re.compile(r"^[\w.-]+/[\w.-]*flash[\w.-]*(@[\w./-]+)?(:[\w.-]+)?$")


def release() -> Version:
    """The installed Transformers release."""
    import transformers

    return Version(transformers.__version__)


def check_release(version: Version) -> Optional[str]:
    """None for a verified release; a note for a newer one, which a twin may prove.

    Raises:
        UnsupportedReleaseError: older than 4.34.
    """
    if version.release[:2] < OLDEST.release[:2]:
        raise UnsupportedReleaseError(
            f"transformers {version} is older than {OLDEST}, the oldest release that can be "
            f"patched; install transformers {OLDEST} to {NEWEST}. The model is unchanged."
        )
    if version.release[:2] > NEWEST.release[:2]:
        return f"transformers {version} is not verified (newest verified: {NEWEST})"
    return None


def flash_window_sees(handed: Optional[int], version: Version) -> Optional[int]:
    """Keys a query sees, itself included, when the release hands ``handed`` to flash-attn.

    Until 4.55 the window was ``(W, W)``, one key more than W; from 4.56.0 it is ``(W-1, W-1)``.
    """
    if not handed:
        return None
    return handed if version >= Version("4.56.0.dev0") else handed + 1


def dtype_keyword(version: Version) -> str:
    """What ``from_pretrained`` calls the dtype to load a model in, without a warning."""
    return "dtype" if version >= Version("4.56") else "torch_dtype"


def config_may_be_bidirectional(version: Version) -> bool:
    """Whether a decoder's masks heed ``config.is_causal`` (not yet in 5.0.0)."""
    return version > Version("5.0.0")


def rotary_without_positions(version: Version, family: str) -> bool:
    """Whether the flash class calls its rotary module without position_ids (Phi-3 in 4.44.0)."""
    return family == "phi3" and version == Version("4.44.0")


def refuses_without_windows(family: str) -> bool:
    """Whether a flash class raises where flash-attn has no windows, for models without one too.

    Phi-3's does; Mistral's of old would compare lengths with a window that is None.
    """
    return family == "phi3"


def rotary_length_adds_one(version: Version) -> bool:
    """Whether flash classes write ``max(tokens, last position) + 1``, and not the one inside."""
    return version < Version("4.44")


def generate_hands_over_varlen(version: Version) -> bool:
    """Whether ``generate(use_cache=False)`` passes query and key lengths that differ."""
    return Version("4.54.0") <= version < Version("4.55.1")


def mask_placeholder(version: Version) -> bool:
    """Whether the base model hands a ready 4-D mask on untouched (masking_utils, from 4.53).

    Then a 1x1x1x1 placeholder keeps it from building a mask of tokens by tokens.
    """
    return version >= Version("4.53.0")


def reads_flash_mask(module: str) -> bool:
    """Whether a modeling module has a mask function of its own, without masking_utils.

    Loaded with flash-attention those ask the device whether a mask has a zero in it.
    """
    return not hasattr(sys.modules[module], "create_causal_mask")


def implementation_of(module: torch.nn.Module, config: Any, via: str) -> str:
    """As what an attention module was loaded: its class tells (until 4.47), or its config."""
    name = type(module).__name__
    if via in ("interface", "dict"):
        # Read in every layer of every packed call; a config's own attribute access is slow.
        found = None
        if not is_compiling():  # Dynamo does not know this way
            found = object.__getattribute__(config, "__dict__").get("_attn_implementation_internal")
        return str(found or getattr(config, "_attn_implementation", None) or "eager")
    if name.endswith("FlashAttention2"):
        return "flash_attention_2"
    if name.endswith("SdpaAttention"):
        return "sdpa"
    given = getattr(config, "_attn_implementation", None)
    return "sdpa" if given == "sdpa" and getattr(module, "_use_sdpa", False) else "eager"


def implementation_kind(name: str) -> Optional[str]:
    """``eager``, ``sdpa`` or ``flash`` for an implementation name; None when it is not known."""
    if name in ("eager", "sdpa"):
        return name
    if name in ("flash_attention_2", "flash_attention_3", "flash_attention_4"):
        return "flash"
    return "flash" if _HUB_FLASH.match(name) else None


def autocast_dtype(device_type: str) -> Optional[torch.dtype]:
    """The dtype of the autocast in force on ``device_type``, or None."""
    if device_type == "meta":  # torch has no autocast there, and raises
        return None
    if hasattr(torch, "get_autocast_dtype"):  # torch 2.4
        if torch.is_autocast_enabled(device_type):
            return torch.get_autocast_dtype(device_type)
        return None
    if device_type == "cuda" and torch.is_autocast_enabled():
        return torch.get_autocast_gpu_dtype()
    if device_type == "cpu" and torch.is_autocast_cpu_enabled():
        return torch.get_autocast_cpu_dtype()
    return None


def _never() -> bool:
    return False


#: Whether Dynamo is tracing this very call.
is_compiling: Callable[[], bool] = getattr(torch.compiler, "is_dynamo_compiling", _never)


def is_exporting() -> bool:
    """Whether torch.export is at work (torch 2.7 and later say so).

    ``torch.compiler.is_exporting`` reads the same flag, but in torch 2.11 (not in 2.13) Dynamo
    takes it for true in every graph, of torch.compile too (``torch/_dynamo/variables/torch.py``).
    """
    return bool(getattr(torch.compiler, "_is_exporting_flag", False))


def recorder() -> Optional[str]:
    """What records the operators of this very call for later ones: ``torch.jit.trace``, make_fx."""
    if torch._C._get_tracing_state() is not None:
        return "torch.jit.trace"
    proxies = sys.modules.get("torch.fx.experimental.proxy_tensor")
    for name in ("get_proxy_mode", "get_innermost_proxy_mode"):  # torch 2.1 has the second alone
        mode = getattr(proxies, name, None)
        if mode is not None:
            return None if mode() is None else "make_fx"
    return None


@lru_cache(maxsize=1)
def storages_keep_attributes() -> bool:
    """Whether a storage's Python object lives as long as the storage (torch 2.2 and later)."""
    tensor = torch.zeros(1, device="cpu")
    setattr(tensor.untyped_storage(), "_fa2_pack_patch_probe", True)  # noqa: B010
    alias = tensor.view(1, 1).detach()
    del tensor
    return getattr(alias.untyped_storage(), "_fa2_pack_patch_probe", False)


storages_keep_attributes()  # not first inside of a call: a torch.func transform wraps its tensors
