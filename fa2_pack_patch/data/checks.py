"""What the examples of a batch must be: each one example, and all of the same keys."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from typing import Any, Optional

import torch

from ..errors import PackingError
from ..tensors import quote


def check_whole(
    at: int, mask: Optional[torch.Tensor], position_ids: Optional[torch.Tensor], kept: torch.Tensor
) -> None:
    """Refuse an example of several, which would be laid into the row as one.

    Args:
        at: its number.
        mask: its ``attention_mask`` ``(length,)``.
        position_ids: its own positions, of any shape.
        kept: bool ``(length,)``, its tokens that are no padding.

    Raises:
        PackingError: quotes the mask or the positions.
    """
    if mask is not None and bool(((mask != 0) & (mask != 1)).any()):
        raise PackingError(
            f"attention_mask of example {at} must hold 0 and 1, got {quote(mask)}; of segment ids, "
            "give each segment as an example of its own."
        )
    if position_ids is None or position_ids.shape != kept.shape:
        return
    own = position_ids[kept]
    if bool((own[1:] <= own[:-1]).any()):
        raise PackingError(
            f"position_ids of example {at} start anew inside of it ({quote(own)}): it is packed "
            "already, or padded. Give each of its examples by itself, or pass such rows on to the "
            "model as they are; mark padding by attention_mask."
        )


def check_keys(examples: list[dict[str, torch.Tensor]], at: list[int]) -> None:
    """Refuse examples of other keys than the first; ``at`` are their numbers."""
    wanted = {key: value.dim() for key, value in examples[0].items()}
    for example, index in zip(examples, at):
        found = {key: value.dim() for key, value in example.items()}
        if found != wanted:
            odd = sorted(k for k in set(wanted) | set(found) if wanted.get(k) != found.get(k))
            raise PackingError(
                f"example {index} differs from example {at[0]} in {odd}: each key must be in every "
                "example, as one number in all of them or as one for each token in all."
            )


def check_lengths(seq_lengths: Any, at: int) -> None:
    """Refuse an example that TRL has packed: its ``seq_lengths`` are those of several."""
    if isinstance(seq_lengths, Sized) and len(seq_lengths) > 1:
        raise PackingError(
            f"seq_lengths of example {at} are of {len(seq_lengths)} ({quote(seq_lengths)}): TRL "
            "has packed it already. Give each of its examples by itself (packing=False), or "
            "use TRL's own collator for such rows."
        )


def check_columns(columns: Iterable[str], batch: Iterable[str]) -> None:
    """Refuse columns of the data set that the collator makes itself."""
    both = sorted(set(columns) & set(batch))
    if both:
        raise PackingError(
            f"the examples have columns {both}, which this collator makes itself. Remove them from "
            "the data set."
        )
