"""NOT flash-attn: stand-ins for its padding helpers, for tests only."""

from __future__ import annotations

import torch
from torch.nn.functional import pad


def index_first_axis(tensor: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Rows of the first dimension."""
    return tensor[indices.long()]


def unpad_input(
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor,
    unused_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """Five values, as flash-attn gives since 2.7 (Transformers up to 4.46 unpacks four)."""
    every = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = every.sum(-1, dtype=torch.int32)
    used = attention_mask.sum(-1, dtype=torch.int32)
    indices = every.flatten().nonzero().flatten()
    cu = pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    flat = hidden_states.reshape(-1, *hidden_states.shape[2:])
    return flat[indices], indices, cu, int(lengths.max()), used


def pad_input(
    hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int
) -> torch.Tensor:
    """``(tokens, ...)`` back to ``(batch, seqlen, ...)``, zeros where no token goes."""
    out = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    out = out.index_copy(0, indices.long(), hidden_states)
    return out.view(batch, seqlen, *hidden_states.shape[1:])
