"""Releases and modeling code that nobody verified: a two-layer twin of the config is tried first.

The twin is built from the model's own config, made small, on the CPU in float32, and
:func:`fa2_pack_patch.verify` must pass on it. A pass is kept in a file of this machine's cache, by
versions, config and the modeling code's own bytes. The cache holds JSON and nothing that runs.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import hashlib
import importlib
import importlib.util
import json
import os
import platform
import sys
import tempfile
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, Optional

import torch
from packaging.version import Version

from . import compat
from .errors import UnsupportedReleaseError, in_words
from .registry import Family, folder

#: The form of a cache file; of any other form it is not read.
FORMAT = 1
_SHARED = (
    "transformers.masking_utils",
    "transformers.modeling_attn_mask_utils",
    "transformers.modeling_flash_attention_utils",
    "transformers.modeling_rope_utils",
    "transformers.modeling_utils",
    "transformers.integrations.sdpa_attention",
    "transformers.integrations.flash_attention",
)


def cache_folder() -> Path:
    """``$FA2_PACK_PATCH_CACHE``, or ``fa2_pack_patch`` in the user's cache folder."""
    given = os.environ.get("FA2_PACK_PATCH_CACHE")
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fa2_pack_patch"


def code_files(family: Family) -> list[Path]:
    """The files of Transformers that a family's attention runs through."""
    found = []
    for name in (family.module, *_SHARED):
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            continue
        if spec is not None and spec.origin is not None and Path(spec.origin).is_file():
            found.append(Path(spec.origin))
    return found


@lru_cache(maxsize=1)
def _record() -> Mapping[str, str]:
    """What the installer wrote down of Transformers' Python files: their sha256 by path."""
    try:
        package = distribution("transformers")
        lines = (package.read_text("RECORD") or "").splitlines()
        root = os.path.realpath(str(package.locate_file("")))
    except (PackageNotFoundError, OSError, ValueError):
        return {}
    found = {}
    for line in lines:
        path, _, rest = line.partition(".py,sha256=")
        if rest:
            found[os.path.join(root, *path.split("/")) + ".py"] = rest.split(",")[0]
    return found


def altered(family: Family) -> Optional[str]:
    """The first file of a family's code that is not as it was installed, or None."""
    for path in code_files(family):
        wanted = _record().get(os.path.realpath(path))
        if wanted is None:
            continue
        digest = hashlib.sha256(path.read_bytes()).digest()
        if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != wanted:
            return str(path.name)
    return None


def twin_config(config: Any) -> Any:
    """A copy of a config with two layers and small sizes, all else as it was."""
    small = copy.deepcopy(config)
    heads = int(config.num_attention_heads)
    kv = int(getattr(config, "num_key_value_heads", None) or heads)
    ratio = min(max(1, heads // kv), 2)
    few = min(2, kv)
    width = int(config.hidden_size) // heads
    sizes: dict[str, Any] = {
        "num_hidden_layers": 2,
        "num_attention_heads": few * ratio,
        "num_key_value_heads": few,
        "num_kv_heads": few,
        "hidden_size": few * ratio * width,
        "intermediate_size": 64,
        "ffn_hidden_size": 64,
        "n_inner": 64,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "num_local_experts": 4,
        "num_experts": 4,
        "vocab_size": 128,
        "max_window_layers": 1,
    }
    for name, value in sizes.items():
        if isinstance(getattr(small, name, None), int):
            setattr(small, name, value)
    for name in ("num_experts_per_tok", "sliding_window"):
        limit = 2 if name == "num_experts_per_tok" else 5
        if isinstance(getattr(small, name, None), int):
            setattr(small, name, min(limit, getattr(small, name)))
    _nested(small, few)
    kinds = getattr(small, "layer_types", None)
    if kinds:  # one layer of each kind there is
        small.layer_types = (list(dict.fromkeys(kinds)) * 2)[:2]
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if getattr(small, name, None) is not None:
            setattr(small, name, 0)
    for name in [n for n in small.__dict__ if n.endswith(("dropout", "pdrop"))]:
        setattr(small, name, 0.0)
    for name in ("quantization_config", "auto_map"):
        small.__dict__.pop(name, None)
    for name in ("dtype", "torch_dtype", "_dtype"):
        if name in small.__dict__:
            small.__dict__[name] = torch.float32
    return small


def _nested(config: Any, kv: int) -> None:
    """DBRX keeps attention and experts in configs of their own."""
    for holder, sizes in (
        ("attn_config", {"kv_n_heads": kv}),
        (
            "ffn_config",
            {
                "hidden_size": config.hidden_size,
                "ffn_hidden_size": 32,
                "moe_num_experts": 4,
                "moe_top_k": 2,
            },
        ),
    ):
        inner = getattr(config, holder, None)
        for name, value in sizes.items():
            if inner is not None and isinstance(getattr(inner, name, None), int):
                setattr(inner, name, value)


def build(config: Any, family: Family, implementation: str) -> torch.nn.Module:
    """A random float32 causal model of a twin's config on the CPU, in evaluation mode."""
    cls = getattr(importlib.import_module(family.module), family.causal)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        if hasattr(cls, "_from_config") and _chosen():
            model = cls._from_config(config, attn_implementation=implementation)
        else:
            model = cls(config)
        for parameter in model.parameters():  # a fresh model's attention hardly matters
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    found: torch.nn.Module = model.float().eval()
    return found


def as_built(implementation: str) -> str:
    """As what the twin of a model is built: flash-attention runs on no CPU, sdpa came with 4.36."""
    return "eager" if implementation == "eager" or not _chosen() else "sdpa"


def _chosen() -> bool:
    """Whether models of this release are built as the implementation that is asked for."""
    return compat.release() >= Version("4.36")


def try_twin(config: Any, family: Family, implementation: str = "sdpa") -> Any:
    """The :class:`~fa2_pack_patch.VerifyReport` of a patched two-layer twin of ``config``."""
    from .apply import apply
    from .verify import verify

    small = twin_config(config)
    try:
        model = build(small, family, as_built(implementation))
    except ValueError:  # no sdpa for this family here
        model = build(small, family, "eager")
    with torch.enable_grad():
        apply(model, allow_unverified=True)
        return verify(model)


def key(config: Any, family: Family, implementation: str) -> dict[str, str]:
    """What a pass is valid for."""
    code = hashlib.sha256()
    own = sorted(Path(__file__).parent.rglob("*.py")) + [folder() / f"{family.family}.toml"]
    for path in (*code_files(family), *own):
        code.update(path.read_bytes())
    small = json.dumps(twin_config(config).to_dict(), sort_keys=True, default=str)
    return {
        "transformers": str(compat.release()),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{sys.platform} {platform.machine()}",
        "family": family.family,
        "implementation": as_built(implementation),
        "config": hashlib.sha256(small.encode()).hexdigest(),
        "code": code.hexdigest(),
    }


def _file(wanted: Mapping[str, str]) -> Path:
    name = hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).hexdigest()[:32]
    return cache_folder() / f"twin-{name}.json"


def passed_before(wanted: Mapping[str, str]) -> bool:
    """Whether the cache holds a pass for exactly this key; a file that is not sound is no pass."""
    try:
        kept = json.loads(_file(wanted).read_text(encoding="utf-8"))
    except (OSError, ValueError, RuntimeError, RecursionError):
        return False
    return bool(
        isinstance(kept, dict)
        and kept.get("format") == FORMAT
        and kept.get("passed") is True
        and kept.get("key") == dict(wanted)
    )


def remember(wanted: Mapping[str, str]) -> None:
    """Keep a pass. Nothing happens where the cache cannot be written."""
    text = json.dumps({"format": FORMAT, "passed": True, "key": dict(wanted)}, indent=1)
    temporary = None
    try:
        target = _file(wanted)
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=".twin-", dir=target.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, target)
        temporary = None
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        pass
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def check(config: Any, family: Family, implementation: str, why: str, instead: str) -> str:
    """A note that a twin of ``config`` passed, now or before.

    Args:
        why: what is not verified, for the messages.
        instead: what to install instead, for the messages.

    Raises:
        UnsupportedReleaseError: it did not pass, with the figures.
    """
    wanted = key(config, family, implementation)
    if passed_before(wanted):
        return f"{why}; a two-layer twin of this config passed verify on this machine before"
    try:
        report = try_twin(config, family, implementation)
    except Exception as error:
        raise UnsupportedReleaseError(
            f"{why}, and a two-layer twin of this config could not be tried: "
            f"{in_words(error)}. The model is unchanged. You can {instead}; or pass "
            "allow_unverified=True and call fa2_pack_patch.verify(model) yourself."
        ) from error
    if not report.passed:
        raise UnsupportedReleaseError(
            f"{why}, and on a two-layer twin of this config packed is not what separate is; the "
            f"model is unchanged. Give it one example a row, or {instead}.\n{report}"
        )
    remember(wanted)
    return f"{why}; a two-layer twin of this config passed verify just now"
