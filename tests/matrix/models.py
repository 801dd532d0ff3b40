"""Tiny models of every family, built alike in every release."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from unittest import mock

import torch
from packaging.version import Version

_COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MOE: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_QWEN_MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "decoder_sparse_step": 1,
}


class NotInThisRelease(Exception):  # noqa: N818
    """This release has no such family, or not as this implementation."""


@dataclass(frozen=True)
class FamilyCase:
    """One model of the matrix.

    ``family`` is the stem of its registry file. ``since``, ``sdpa`` and ``flash`` are the first
    releases with the family, with its sdpa and its flash attention; ``sdpa_until`` is the first
    without sdpa again.
    """

    family: str
    config: str
    causal: str
    base: str
    since: str
    options: dict[str, Any] = field(default_factory=dict)
    sdpa: str = "4.48"
    flash: str = "4.34"
    sdpa_until: str | None = None


def _case(
    family: str,
    prefix: str,
    since: str,
    sdpa: str,
    *,
    flash: str | None = None,
    drop: tuple[str, ...] = (),
    sdpa_until: str | None = None,
    **options: Any,
) -> FamilyCase:
    return FamilyCase(
        family,
        f"{prefix}Config",
        f"{prefix}ForCausalLM",
        f"{prefix}Model",
        since,
        {k: v for k, v in {**_COMMON, **options}.items() if k not in drop},
        sdpa,
        flash or since,
        sdpa_until,
    )


_GPTJ = {
    "vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4,
    "n_inner": 48, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
}  # fmt: skip
_DBRX = {
    "vocab_size": 97, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64,
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_FALCON = {
    "alibi": False, "bias": False, "hidden_dropout": 0.0, "attention_dropout": 0.0,
    "ffn_hidden_size": 48,
}  # fmt: skip

# fmt: off
FAMILIES: dict[str, FamilyCase] = {
    "llama": _case("llama", "Llama", "4.34", "4.36"),
    "mistral": _case("mistral", "Mistral", "4.34", "4.37", sliding_window=5),
    "mixtral": _case("mixtral", "Mixtral", "4.36", "4.37", sliding_window=5, **_MOE),
    "granite": _case("granite", "Granite", "4.45", "4.45", attention_multiplier=0.3),
    "dbrx": FamilyCase(
        "dbrx", "DbrxConfig", "DbrxForCausalLM", "DbrxModel", "4.40", _DBRX, "4.40", "4.40"
    ),
    "falcon": _case(
        "falcon", "Falcon", "4.34", "4.36", multi_query=True, parallel_attn=True,
        new_decoder_architecture=False, drop=("num_key_value_heads", "intermediate_size"),
        **_FALCON,
    ),
    "falcon_new": _case(
        "falcon", "Falcon", "4.34", "4.36", new_decoder_architecture=True, num_kv_heads=2,
        drop=("num_key_value_heads", "intermediate_size"), **_FALCON,
    ),
    "gemma": _case("gemma", "Gemma", "4.38", "4.38", head_dim=16),
    "olmo": _case("olmo", "Olmo", "4.40", "4.40", clip_qkv=8.0),
    "phi": _case(
        "phi", "Phi", "4.36", "4.39", embd_pdrop=0.0, resid_pdrop=0.0, attention_dropout=0.0
    ),
    "phi3": _case(
        "phi3", "Phi3", "4.41", "4.45", sliding_window=5, embd_pdrop=0.0, resid_pdrop=0.0
    ),
    "qwen2": _case(
        "qwen2", "Qwen2", "4.37", "4.37", sliding_window=5, use_sliding_window=True,
        max_window_layers=1,
    ),
    "qwen2_moe": _case(
        "qwen2_moe", "Qwen2Moe", "4.40", "4.40", sliding_window=5, use_sliding_window=True,
        max_window_layers=1, shared_expert_intermediate_size=24, **_QWEN_MOE,
    ),
    "stablelm": _case(
        "stablelm", "StableLm", "4.38", "4.39", partial_rotary_factor=0.5, hidden_dropout=0.0,
        attention_dropout=0.0,
    ),
    "starcoder2": _case(
        "starcoder2", "Starcoder2", "4.39", "4.39", sliding_window=5, residual_dropout=0.0,
        embedding_dropout=0.0, attention_dropout=0.0,
    ),
    "gemma2": _case(
        "gemma2", "Gemma2", "4.42", "4.42", sdpa_until="5.21", head_dim=16, sliding_window=5,
        query_pre_attn_scalar=24, attn_logit_softcapping=2.0, final_logit_softcapping=20.0,
    ),
    "gemma3_text": FamilyCase(
        "gemma3_text", "Gemma3TextConfig", "Gemma3ForCausalLM", "Gemma3TextModel", "4.50",
        {**_COMMON, "head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 24,
         "sliding_window_pattern": 2, "layer_types": ["sliding_attention", "full_attention"]},
        "4.50", "4.50",
    ),
    "qwen3": _case(
        "qwen3", "Qwen3", "4.51", "4.51", head_dim=16, sliding_window=5, use_sliding_window=True,
        max_window_layers=1,
    ),
    "qwen3_moe": _case(
        "qwen3_moe", "Qwen3Moe", "4.51", "4.51", head_dim=16, sliding_window=5,
        use_sliding_window=True, max_window_layers=0, **_QWEN_MOE,
    ),
    "olmo2": _case("olmo2", "Olmo2", "4.47", "4.47"),
    "cohere": _case("cohere", "Cohere", "4.39", "4.39", use_qk_norm=True),
    "gpt_neox": _case(
        "gpt_neox", "GPTNeoX", "4.34", "4.42", flash="4.36", hidden_dropout=0.0,
        attention_dropout=0.0, drop=("num_key_value_heads",),
    ),
    "gptj": FamilyCase(
        "gptj", "GPTJConfig", "GPTJForCausalLM", "GPTJModel", "4.34", _GPTJ, "5.24", "4.39"
    ),
    "granitemoe": _case(
        "granitemoe", "GraniteMoe", "4.45", "4.45", attention_multiplier=0.3, **_MOE
    ),
}
# fmt: on


def available(case: FamilyCase, version: str) -> bool:
    """Whether the release has this family."""
    return Version(version) >= Version(case.since)


def implementations(case: FamilyCase, version: str) -> list[str]:
    """As what the family can be loaded in the release; empty where the release lacks it."""
    release = Version(version)
    if not available(case, version):
        return []
    found = ["eager"]
    until = case.sdpa_until
    if release >= Version(case.sdpa) and (until is None or release < Version(until)):
        found.append("sdpa")
    if release >= Version(case.flash):
        found.append("flash_attention_2")
    return found


@lru_cache(maxsize=1)
def _release() -> Version:
    import transformers

    return Version(transformers.__version__)


@contextmanager
def _float32_flash() -> Iterator[None]:
    """4.36 to 4.53 ask for CUDA, or warn of float32, before they build a flash class."""
    from transformers import PreTrainedModel

    name = "_check_and_enable_flash_attn_2"
    if not hasattr(PreTrainedModel, name):
        yield
        return

    def enable(cls: type, config: Any, *_: Any, **__: Any) -> Any:
        config._attn_implementation = "flash_attention_2"
        return config

    with mock.patch.object(PreTrainedModel, name, classmethod(enable)):
        yield


def _name_q_proj(model: torch.nn.Module) -> None:
    """Flash classes without a q_proj (Phi of 4.36, GPT-NeoX) ask one for its dtype all the same.

    A plain attribute: no submodule, so that parameters, state dict and config stay as they are.
    """
    for module in model.modules():
        fused = getattr(module, "query_key_value", None)
        if fused is not None and type(module).__name__.endswith("FlashAttention2"):
            module.__dict__.setdefault("q_proj", fused)


def _construct(case: FamilyCase, implementation: str, **overrides: Any) -> torch.nn.Module:
    import transformers

    config = getattr(transformers, case.config)(**{**case.options, **overrides})
    cls = getattr(transformers, case.causal)
    if _release() < Version("4.36"):
        config._flash_attn_2_enabled = implementation == "flash_attention_2"
        return cls(config)
    with _float32_flash():
        model = cls._from_config(config, attn_implementation=implementation)
    if implementation == "flash_attention_2" and _release() < Version("4.48"):
        _name_q_proj(model)
    return model


def _fill(model: torch.nn.Module, seed: int, norm: float) -> None:
    """Weights large enough for attention to matter; norms scatter around ``norm``."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.copy_((0.0 if name.endswith("bias") else norm) + 0.1 * noise)
            else:
                parameter.copy_(noise * 0.2)


def build(
    case: FamilyCase, implementation: str, *, seed: int = 0, **overrides: Any
) -> torch.nn.Module:
    """A causal model in eval mode, float32; the same weights for each implementation.

    ``overrides`` go to the config. Torch's own random state stays as it is.
    """
    version = str(_release())
    found = implementations(case, version)
    if implementation not in found:
        names = ", ".join(found) or "nothing at all"
        raise NotInThisRelease(
            f"transformers {version} has {case.family} as {names}, not as {implementation}"
        )
    with torch.random.fork_rng(devices=[]):
        model = _construct(case, implementation, **overrides).float()
    _fill(model, seed, norm=0.0 if case.family.startswith("gemma") else 1.0)  # Gemma adds the one
    model.tie_weights()
    return model.eval()
