"""Where the examples start: the rules, on the host.

Those of the README: a row's first token starts an example, and so does each token whose position is
not greater than the one before it; a jump forward does not. Padding is one example for each run of
it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import torch

from .errors import PackingError
from .tensors import quote

#: up to here every whole number is a float64 of its own
_EXACT = 2.0**53


@dataclass(frozen=True)
class Boundaries:
    """What :func:`read_boundaries` found: example lengths, and which are padding."""

    lengths: list[int]
    padding: list[bool]

    def over_padding_alone(self, tokens: int) -> bool:
        """Whether no two examples in a row of ``tokens`` touch: padding is between them all."""
        at, before = 0, True
        for length, padding in zip(self.lengths, self.padding):
            if at % tokens and not (before or padding):
                return False
            at, before = at + length, padding
        return True


def read_boundaries(
    position_ids: Optional[torch.Tensor],
    attention_mask: Optional[torch.Tensor],
    *,
    always: bool = False,
) -> Optional[Boundaries]:
    """The examples of a batch, or None when it is not packed.

    Args:
        position_ids: int64 ``(rows, tokens)`` on the CPU, or None.
        attention_mask: ``(rows, tokens)`` on the CPU: 0/1 or segment ids, or None.
        always: give the boundaries of a batch that is not packed too.

    Raises:
        PackingError: a mask of another shape or with negative values, an example interrupted by
            padding, or positions that start anew inside one segment.
    """
    if position_ids is not None and attention_mask is None:
        return _read_resets(position_ids, always=always)
    shaped = position_ids if position_ids is not None else attention_mask
    assert shaped is not None
    rows, tokens = shaped.shape
    real, segments, odd = _read_mask(attention_mask, rows, tokens)
    start = torch.zeros(rows, tokens, dtype=torch.bool, device="cpu")
    start[:, 0] = True
    both = real[:, 1:] & real[:, :-1]
    resets = torch.zeros(rows, tokens - 1, dtype=torch.bool, device="cpu")
    if position_ids is not None:
        resets = (position_ids[:, 1:] <= position_ids[:, :-1]) & both
    if segments is None:
        inner = resets
    else:
        inner = (segments[:, 1:] != segments[:, :-1]) & both
        bad = (resets & ~inner).nonzero()
        if len(bad):
            row, at = (int(x) for x in bad[0])
            assert position_ids is not None
            raise PackingError(
                f"contradictory boundaries in row {row}: position_ids start anew at token "
                f"{at + 1} ({quote(position_ids[row])}), but the segment ids of attention_mask go "
                f"on ({quote(segments[row])}). Give one of the two, or make them agree."
            )
    start[:, 1:] |= inner | (real[:, 1:] != real[:, :-1])
    packed = bool(inner.any())
    hole = None
    if odd is not None and (always or position_ids is None):
        raise odd
    if not bool(real.all()):
        gap_packed, hole = _across_gaps(position_ids, segments, real)
        packed = packed or gap_packed
    if not packed and not always:
        return None
    if odd is not None:
        raise odd
    if packed and hole is not None:
        row, before, after = hole
        what = segments if segments is not None else position_ids
        assert what is not None
        raise PackingError(
            f"row {row}: the example at token {before} goes on at token {after}, after padding "
            f"({quote(what[row])}). In a packed row an example must not be interrupted by padding; "
            "move the padding to its end."
        )
    firsts = start.flatten().nonzero().flatten()
    ends = torch.cat([firsts, torch.tensor([rows * tokens], device="cpu")])
    return Boundaries(ends.diff().tolist(), (~real).flatten()[firsts].tolist())


def _read_resets(position_ids: torch.Tensor, *, always: bool) -> Optional[Boundaries]:
    """:func:`read_boundaries` where all tokens are real: few operators, in each training step."""
    start = torch.ones_like(position_ids, dtype=torch.bool)
    start[:, 1:] = position_ids[:, 1:] <= position_ids[:, :-1]
    firsts = start.flatten().nonzero().flatten().tolist()
    if len(firsts) == len(position_ids) and not always:
        return None
    ends = [*firsts[1:], position_ids.numel()]
    return Boundaries([b - a for a, b in zip(firsts, ends)], [False] * len(firsts))


def _read_mask(
    mask: Optional[torch.Tensor], rows: int, tokens: int
) -> tuple[torch.Tensor, Optional[torch.Tensor], Optional[PackingError]]:
    """Which tokens are real, their segment ids if it has any, and what is wrong with its values."""
    if mask is None:
        return torch.ones(rows, tokens, dtype=torch.bool, device="cpu"), None, None
    if mask.dim() != 2 or tuple(mask.shape) != (rows, tokens):
        raise PackingError(
            f"attention_mask must be (rows, tokens) = ({rows}, {tokens}) with 0/1 or segment ids, "
            f"got shape {tuple(mask.shape)}; encoder, prefix and 4-D masks cannot go with packed "
            "rows."
        )
    if mask.dtype == torch.bool:
        return mask, None, None
    odd, real = None, mask != 0
    wrong = mask < 0
    if mask.is_floating_point():  # nan and infinities are no whole numbers either
        wrong = wrong | (mask != mask.round()) | (mask >= _EXACT)
    if bool(wrong.any()):
        odd = PackingError(
            f"attention_mask must hold 0/1 or segment ids 0, 1, 2, …, got {quote(mask.flatten())}."
        )
    elif bool((mask > 1).any()):
        return real, mask.to(torch.int64), None
    return real, None, odd


def _across_gaps(
    positions: Optional[torch.Tensor], segments: Optional[torch.Tensor], real: torch.Tensor
) -> tuple[bool, Optional[tuple[int, int, int]]]:
    """Over padding inside a row: is there a boundary, and where does an example go on?"""
    keys = segments if segments is not None else positions
    if keys is None:
        return False, None
    index = torch.arange(real.shape[1], device="cpu").expand_as(real)
    last = torch.where(real, index, torch.full_like(index, -1)).cummax(dim=1).values
    before = last[:, :-1]
    gap = real[:, 1:] & ~real[:, :-1] & (before >= 0)
    earlier = keys[:, :-1].gather(1, before.clamp(min=0)) if len(keys) else keys[:, :-1]
    goes_on = keys[:, 1:] == earlier if segments is not None else keys[:, 1:] > earlier
    holes = (gap & goes_on).nonzero()
    hole = None
    if len(holes):
        row, at = (int(x) for x in holes[0])
        hole = (row, int(before[row, at]), at + 1)
    return bool((gap & ~goes_on).any()), hole
