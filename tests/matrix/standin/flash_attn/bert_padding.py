"""Stand-ins for flash-attn's padding helpers: tests only."""

from __future__ import annotations

import torch
from torch.nn.functional import pad


def index_first_axis(tensor: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    return tensor[indices.long()]


def unpad_input(hidden: torch.Tensor, mask: torch.Tensor, unused: torch.Tensor | None = None):
    lengths = mask.sum(-1, dtype=torch.int32)
    indices = mask.flatten().nonzero().flatten()
    cu = pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    flat = hidden.reshape(-1, *hidden.shape[2:])
    return flat[indices], indices, cu, int(lengths.max()), lengths


def pad_input(hidden: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    out = hidden.new_zeros(batch * seqlen, *hidden.shape[1:])
    out = out.index_copy(0, indices.long(), hidden)
    return out.view(batch, seqlen, *hidden.shape[1:])
