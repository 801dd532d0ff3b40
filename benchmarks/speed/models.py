"""Models with random weights in the shapes of published ones, and copies that share the weights."""

from __future__ import annotations

import copy
from typing import Any

import torch
from packaging.version import Version

#: hidden, layers, query heads, key heads, intermediate, vocabulary, tied embeddings: from the
#: published configs. All are built as Llama or Mistral without biases. Mistral is v0.3 (no window);
#: "llama-55b" is Llama-2-70B's layer, 64 times: about the largest that fits one H200 in bf16.
SHAPES: dict[str, tuple[str, int, int, int, int, int, int, bool]] = {
    "llama-1b": ("Llama", 2048, 16, 32, 8, 8192, 32000, False),
    "llama-2-7b": ("Llama", 4096, 32, 32, 32, 11008, 32000, False),
    "mistral-7b": ("Mistral", 4096, 32, 32, 8, 14336, 32768, False),
    "granite-8b-code": ("Llama", 4096, 36, 32, 8, 14336, 49152, True),
    "llama-2-13b": ("Llama", 5120, 40, 40, 40, 13824, 32000, False),
    "codellama-34b": ("Llama", 8192, 48, 64, 8, 22016, 32000, False),
    "llama-55b": ("Llama", 8192, 64, 64, 8, 28672, 32000, False),
}
#: Any shape becomes this one with --smoke; its width in query heads over key heads is kept.
_TINY = (64, 2, 4, 2, 96, 128)


def device() -> torch.device:
    """Where everything runs: the GPU, or the CPU with ``--smoke``."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def config(shape: str, *, smoke: bool) -> Any:
    """The Transformers config of one of :data:`SHAPES`."""
    import transformers

    family, hidden, layers, heads, kv, inter, vocab, tied = SHAPES[shape]
    if smoke:
        hidden, layers, heads, kv, inter, vocab = _TINY
    more: dict[str, Any] = {"sliding_window": None} if family == "Mistral" else {}
    return getattr(transformers, f"{family}Config")(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        intermediate_size=inter,
        vocab_size=vocab,
        max_position_embeddings=8192,
        tie_word_embeddings=tied,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **more,
    )


def build(
    shape: str, implementation: str = "flash_attention_2", *, smoke: bool, checkpoint: bool = False
) -> torch.nn.Module:
    """A causal model in train mode, its random weights made on the device, bf16 (CPU: float32)."""
    import transformers

    where = device()
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    cls = getattr(transformers, f"{SHAPES[shape][0]}ForCausalLM")
    before = torch.get_default_dtype()
    # The stand-in's flash attention takes float32, but some releases refuse it by the default.
    torch.set_default_dtype(torch.bfloat16)
    try:
        with where:
            model = _construct(cls, config(shape, smoke=smoke), implementation)
    finally:
        torch.set_default_dtype(before)
    model = model.to(dtype) if where.type == "cpu" else model
    if checkpoint:
        model.gradient_checkpointing_enable(  # type: ignore[operator]
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )
    return model.train()


def _construct(cls: Any, made: Any, implementation: str) -> torch.nn.Module:
    """The class by its release's own way to ask for an attention implementation."""
    import transformers

    if Version(transformers.__version__) < Version("4.36"):
        made._flash_attn_2_enabled = implementation == "flash_attention_2"
        found: torch.nn.Module = cls(made)
    else:
        found = cls._from_config(made, attn_implementation=implementation)
    return found


def twin(model: torch.nn.Module, implementation: str | None = None) -> torch.nn.Module:
    """Another module tree over the very same parameters and buffers: costs no device memory.

    So variants of one model can take turns, step by step, without being patched and reverted.
    """
    shared = {id(t): t for t in [*model.parameters(), *model.buffers()]}
    other = copy.deepcopy(model, shared)
    if implementation is not None:
        if hasattr(other, "set_attn_implementation"):
            other.set_attn_implementation(implementation)
        else:
            raise RuntimeError(
                f"this Transformers cannot change a model's attention to {implementation!r}; "
                "run this section on 4.54 or later"
            )
    assert next(other.parameters()) is next(model.parameters())
    return other


def parameters(model: torch.nn.Module) -> int:
    """How many weights, tied ones once."""
    return sum(p.numel() for p in model.parameters())
