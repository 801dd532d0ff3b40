"""Where the examples are in a batch that is laid end to end.

Knows nothing of Transformers. The rules of :func:`read_boundaries` are the ones in the README:
a row's first token starts an example, and so does each token whose position is not greater than
the one before it; a jump forward does not. Padding is one example for each run of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional, Union

import torch

from .errors import PackingError

_SHOWN = 24
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8) + tuple(
    getattr(torch, name) for name in ("uint16", "uint32") if hasattr(torch, name)
)
_MASKS = (torch.bool, torch.float32, torch.float64, torch.bfloat16, torch.float16) + (
    (torch.uint64,) if hasattr(torch, "uint64") else ()
)
#: up to here every whole number is a float64 of its own
_EXACT = 2.0**53


def quote(values: object) -> str:
    """The caller's own values, shortened to fit into an error message."""
    if isinstance(values, torch.Tensor):
        if values.is_meta or values.layout != torch.strided:
            return describe(values)
        values = values.detach().cpu().tolist()
    if isinstance(values, (list, tuple)) and len(values) > _SHOWN:
        head = ", ".join(str(v) for v in values[:_SHOWN])
        return f"[{head}, … {len(values)} in all]"
    return str(values)


@dataclass(frozen=True)
class PackedLayout:
    """The examples of a batch of ``rows * tokens_per_row`` tokens, flattened row by row.

    Attributes:
        cu_seqlens: int32 ``(examples + 1,)``, from 0 to ``tokens``, strictly increasing.
        lengths: tokens of each example, Python ints; their sum is ``tokens``.
        max_seqlen: the longest example, in tokens, a Python int.
        tokens: all tokens of the batch, padding included.
        padding: for each example whether it is a run of padding and no example of the caller's.
    """

    cu_seqlens: torch.Tensor = field(compare=False)  # follows from lengths
    lengths: tuple[int, ...]
    max_seqlen: int
    tokens: int
    padding: tuple[bool, ...] = ()
    _moved: dict[str, PackedLayout] = field(
        default_factory=dict, repr=False, compare=False, hash=False
    )

    @property
    def examples(self) -> int:
        """How many examples there are, runs of padding included."""
        return len(self.lengths)

    @property
    def starts(self) -> list[int]:
        """The index of each example's first token in the flattened batch."""
        result, start = [], 0
        for length in self.lengths:
            result.append(start)
            start += length
        return result

    @classmethod
    def from_lengths(
        cls,
        lengths: Sequence[int],
        *,
        device: Union[str, torch.device] = "cpu",
        padding: Optional[Sequence[bool]] = None,
    ) -> PackedLayout:
        """A layout from the tokens of each example, in order; costs no synchronisation.

        Raises:
            PackingError: no lengths, or one that is not a positive integer.
        """
        try:
            counts = tuple(int(n) for n in lengths)
        except (TypeError, ValueError, OverflowError, RuntimeError):  # nan, infinity, no numbers
            counts, lengths = (), [lengths]  # type: ignore[list-item]
        if not counts or any(n < 1 for n in counts) or any(n != m for n, m in zip(counts, lengths)):
            raise PackingError(
                f"lengths must be one or more positive integers, got {quote(list(lengths))}; "
                "leave out empty examples."
            )
        total = sum(counts)
        if total >= 2**31:
            raise PackingError(f"lengths add up to {total} tokens; cu_seqlens is int32: split it.")
        flags = tuple(bool(p) for p in padding) if padding is not None else (False,) * len(counts)
        if len(flags) != len(counts):
            raise PackingError(
                f"padding has {len(flags)} flags for {len(counts)} lengths; give one for each."
            )
        cu = torch.zeros(len(counts) + 1, dtype=torch.int32)
        torch.cumsum(torch.tensor(counts, dtype=torch.int32), 0, dtype=torch.int32, out=cu[1:])
        return cls(upload(cu, torch.device(device)), counts, max(counts), total, flags)

    @classmethod
    def from_cu_seqlens(
        cls, cu_seqlens: Union[torch.Tensor, Sequence[int]], *, tokens: Optional[int] = None
    ) -> PackedLayout:
        """A layout from cumulative lengths ``(examples + 1,)`` (read on the host).

        Raises:
            PackingError: not one-dimensional, not from 0, not strictly increasing (trailing
                repeats of the last value are left out), or not ending at ``tokens``.
        """
        given = as_tensor("cu_seqlens", cu_seqlens)
        if given.dim() != 1 or given.numel() < 2 or not holds_integers(given):
            raise PackingError(
                f"cu_seqlens must be integers of shape (examples + 1,), got {describe(given)}."
            )
        host = given.detach().cpu()
        ends = [int(x) for x in host.tolist()]
        lengths = [b - a for a, b in zip(ends, ends[1:])]
        while len(lengths) > 1 and lengths[-1] == 0:  # a fixed number of entries
            lengths.pop()
        if ends[0] != 0 or min(lengths) < 1:
            raise PackingError(
                f"cu_seqlens must start at 0 and increase strictly (its last value may be "
                f"repeated), got {quote(ends)}; leave out empty examples."
            )
        if tokens is not None and ends[-1] != tokens:
            raise PackingError(
                f"cu_seqlens ends at {ends[-1]}, but the batch has {tokens} tokens "
                f"(rows times tokens a row): {quote(ends)}. Count padding as an example of its own."
            )
        return cls.from_lengths(lengths, device=given.device)

    @classmethod
    def from_position_ids(
        cls, position_ids: torch.Tensor, attention_mask: Optional[torch.Tensor] = None
    ) -> PackedLayout:
        """The layout of a batch by its position resets (one synchronisation on a GPU).

        Args:
            position_ids: int32 or int64, ``(tokens,)`` or ``(rows, tokens)``.
            attention_mask: ``(rows, tokens)``: 0/1, or segment ids (1,1,2,2,0).

        Raises:
            PackingError: contradictory or malformed input.
        """
        ids = check_position_ids(position_ids)
        mask = None if attention_mask is None else _mask_on_host(attention_mask)
        host = ids.detach().cpu().to(torch.int64)
        _check_tokens("position_ids", host)
        found = read_boundaries(host, mask, always=True)
        assert found is not None
        return cls.from_lengths(found.lengths, device=ids.device, padding=found.padding)

    @classmethod
    def from_segment_ids(cls, segment_ids: torch.Tensor) -> PackedLayout:
        """The layout of ``(rows, tokens)`` segment ids: 1,1,2,2,3,0 with 0 for padding."""
        segment_ids = as_tensor("segment_ids", segment_ids)
        host = _mask_on_host(segment_ids)
        if host.dim() == 1:
            host = host[None]
        _check_tokens("segment_ids", host)
        found = read_boundaries(None, host, always=True)
        assert found is not None
        return cls.from_lengths(found.lengths, device=segment_ids.device, padding=found.padding)

    def to(self, device: Union[str, torch.device]) -> PackedLayout:
        """The same layout with ``cu_seqlens`` on ``device``; kept, so that layers share it."""
        device = torch.device(device)
        mine = self.cu_seqlens.device
        if mine.type == device.type and (device.index is None or mine.index == device.index):
            return self
        key = str(device)
        if key not in self._moved:
            cu = upload(self.cu_seqlens, device)
            moved = PackedLayout(cu, self.lengths, self.max_seqlen, self.tokens, self.padding)
            self._moved[key] = moved
        return self._moved[key]

    def split(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """``tensor`` cut into its examples, padding left out.

        Args:
            tensor: ``(rows, tokens, ...)`` or ``(tokens, ...)``, ``tokens`` in all.

        Returns:
            One ``(length, ...)`` view for each example that is not padding.

        Raises:
            PackingError: the tensor has another number of tokens.
        """
        parts = self._flat(tensor).split_with_sizes(list(self.lengths))
        return [p for p, pad in zip(parts, self.padding or (False,) * self.examples) if not pad]

    def mask(self) -> torch.Tensor:
        """Which token sees which: bool ``(tokens, tokens)``; the slow oracle of the tests."""
        index = torch.arange(self.examples, device=self.cu_seqlens.device)
        lengths = self.cu_seqlens.diff()
        owner = torch.repeat_interleave(index, lengths)
        return (owner[:, None] == owner[None, :]).tril()

    def positions(self) -> torch.Tensor:
        """int64 ``(tokens,)`` on the CPU: each token's place in its example, from 0."""
        return torch.cat([torch.arange(n) for n in self.lengths])

    @classmethod
    def from_batch(cls, batch: Mapping[str, Any]) -> PackedLayout:
        """The layout of a collated batch, by what it holds (one synchronisation on a GPU).

        Args:
            batch: ``cu_seq_lens_q`` (zero-length entries at its end are left out), else
                ``position_ids``, else a 2-D ``attention_mask``; the mask says what is padding.

        Raises:
            PackingError: none of the three, or they contradict each other.
        """
        cu, ids = batch.get("cu_seq_lens_q"), batch.get("position_ids")
        mask = batch.get("attention_mask")
        if mask is not None and not isinstance(mask, torch.Tensor):
            raise PackingError(
                f"attention_mask must be a tensor, got a {type(mask).__name__}: {quote(mask)}."
            )
        if cu is None:
            if ids is not None:
                return cls.from_position_ids(ids, mask)
            if mask is not None and mask.dim() == 2:
                return cls.from_segment_ids(mask)
            raise PackingError(
                "a batch needs cu_seq_lens_q, position_ids or a 2-D attention_mask to tell its "
                f"examples apart, got the keys {quote(sorted(batch))}."
            )
        names = ("input_ids", "position_ids", "labels")
        shaped = next((batch[name] for name in names if batch.get(name) is not None), None)
        layout = cls.from_cu_seqlens(cu, tokens=None if shaped is None else shaped.numel())
        if mask is None:
            return layout
        if mask.numel() != layout.tokens:
            raise PackingError(
                f"attention_mask of shape {tuple(mask.shape)} does not fit the {layout.tokens} "
                f"tokens of cu_seq_lens_q {quote(cu)}; give (rows, tokens)."
            )
        real = (mask.detach().cpu().reshape(-1) != 0).split_with_sizes(list(layout.lengths))
        for part, start in zip(real, layout.starts):
            if bool(part.any()) != bool(part.all()):
                raise PackingError(
                    f"attention_mask has padding inside the example at token {start} of "
                    f"cu_seq_lens_q {quote(cu)}; count padding as an example of its own."
                )
        flags = [not bool(part[0]) for part in real]
        return cls.from_lengths(layout.lengths, device=layout.cu_seqlens.device, padding=flags)

    def gather_last(self, hidden: torch.Tensor) -> torch.Tensor:
        """The last token of each example that is not padding: ``(examples, ...)``.

        Args:
            hidden: ``(rows, tokens, ...)`` or ``(tokens, ...)``, as for :meth:`split`.
        """
        ends = [s + n - 1 for s, n, pad in self._spans() if not pad]
        return self._flat(hidden).index_select(
            0, upload(torch.tensor(ends, dtype=torch.int64), hidden.device)
        )

    def pad(
        self, tensor: torch.Tensor, value: float = 0, *, side: str = "right"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One example a row: the padded batch, and its mask.

        Args:
            tensor: ``(rows, tokens, ...)`` or ``(tokens, ...)``, as for :meth:`split`.
            value: what padding holds.
            side: where padding goes, "right" or "left".

        Returns:
            ``(examples, longest, ...)`` of the tensor's dtype (gradients flow back), and the int64
            0/1 ``attention_mask`` ``(examples, longest)``. This layout's padding is left out.
        """
        index, mask = self._places(side)
        padded = self._flat(tensor)[upload(index, tensor.device)]
        mask = upload(mask, tensor.device)
        hole = (mask == 0).view(*mask.shape, *[1] * (padded.dim() - 2))
        return padded.masked_fill(hole, value), mask

    def unpad(self, padded: torch.Tensor, value: float = 0, *, side: str = "right") -> torch.Tensor:
        """Undo :meth:`pad`: ``(examples, longest, ...)`` to ``(tokens, ...)``.

        Args:
            padded: one example a row; wider rows than the longest example are allowed.
            value: what this layout's own padding holds.
            side: where the padding of ``padded`` is.

        Raises:
            PackingError: other rows than this layout has examples, or too short ones.
        """
        index, mask = self._places(side)
        rows, longest = index.shape
        if padded.dim() < 2 or padded.shape[0] != rows or padded.shape[1] < longest:
            raise PackingError(
                f"this layout has {rows} examples, the longest of {longest} tokens, got a padded "
                f"tensor of shape {tuple(padded.shape)}; give (examples, longest or more, ...)."
            )
        extra = padded.shape[1] - longest
        kept = padded[:, extra:] if side == "left" else padded[:, :longest]
        from_ = upload(mask.flatten().nonzero().flatten(), padded.device)
        to = upload(index.flatten()[mask.flatten() != 0], padded.device)
        values = kept.reshape(rows * longest, *padded.shape[2:]).index_select(0, from_)
        empty = padded.new_full((self.tokens, *padded.shape[2:]), value)
        return empty.index_copy(0, to, values)

    def _spans(self) -> list[tuple[int, int, bool]]:
        flags = self.padding or (False,) * self.examples
        return list(zip(self.starts, self.lengths, flags))

    def _flat(self, tensor: torch.Tensor) -> torch.Tensor:
        flat = tensor
        if tensor.dim() > 1 and tensor.shape[0] != self.tokens:
            flat = tensor.flatten(0, 1)
        if tensor.dim() == 0 or flat.shape[0] != self.tokens:
            raise PackingError(
                f"this layout has {self.tokens} tokens, got a tensor of shape "
                f"{tuple(tensor.shape)}; give (rows, tokens, ...) or (tokens, ...)."
            )
        return flat

    def _places(self, side: str) -> tuple[torch.Tensor, torch.Tensor]:
        """The token that goes to each place of the padded batch (0 where none), and the mask."""
        if side not in ("right", "left"):
            raise PackingError(f'side must be "right" or "left", got {side!r}.')
        real = [(start, length) for start, length, pad in self._spans() if not pad]
        if not real:
            raise PackingError(f"this layout is all padding: lengths {quote(list(self.lengths))}.")
        first = torch.tensor([start for start, _ in real])[:, None]
        lengths = torch.tensor([length for _, length in real])[:, None]
        longest = int(lengths.max())
        place = torch.arange(longest)[None]
        if side == "left":
            place = place - (longest - lengths)
        mask = (place >= 0) & (place < lengths)
        return (first + place).masked_fill(~mask, 0), mask.to(torch.int64)


@dataclass(frozen=True)
class Boundaries:
    """What :func:`read_boundaries` found: example lengths, and which are padding."""

    lengths: list[int]
    padding: list[bool]


def upload(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A CPU tensor on ``device`` without waiting for the device."""
    if device.type == "cuda" and host.device.type == "cpu":
        return host.pin_memory().to(device, non_blocking=True)
    return host.to(device)


def check_position_ids(position_ids: torch.Tensor) -> torch.Tensor:
    """``position_ids`` as ``(rows, tokens)``, or a :class:`PackingError` that quotes it."""
    if not isinstance(position_ids, torch.Tensor):
        raise PackingError(
            f"position_ids must be a tensor, got a {type(position_ids).__name__}: "
            f"{quote(position_ids)}."
        )
    if position_ids.dim() not in (1, 2):
        raise PackingError(
            f"position_ids must be (rows, tokens), got shape {tuple(position_ids.shape)}; "
            "three-dimensional (multimodal) positions are not supported."
        )
    if not holds_integers(position_ids):
        raise PackingError(f"position_ids must be int32 or int64, got {describe(position_ids)}.")
    return position_ids[None] if position_ids.dim() == 1 else position_ids


def as_tensor(name: str, values: Any) -> torch.Tensor:
    """A tensor of what the caller gave, or a :class:`PackingError` that quotes it."""
    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise PackingError(
            f"{name} must be integers in a tensor, got a {type(values).__name__}: {quote(values)}."
        ) from None


def _check_tokens(name: str, values: torch.Tensor) -> None:
    if values.dim() != 2 or not values.numel():
        raise PackingError(
            f"{name} must be (rows, tokens) with at least one token, got shape "
            f"{tuple(values.shape)}."
        )


def holds_integers(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds integers that int64 holds too, and can be read: dense, not meta."""
    return tensor.dtype in _INTEGERS and tensor.layout == torch.strided and not tensor.is_meta


def describe(tensor: torch.Tensor) -> str:
    """Dtype and shape of the caller's tensor, and whatever else is odd about it."""
    odd = "" if tensor.layout == torch.strided else f" ({tensor.layout})"
    if tensor.is_meta:
        odd += " on device meta, where it has no values"
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}{odd}"


def is_mask(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds what a mask may hold, and can be read: dense and real numbers."""
    usual = tensor.dtype in _INTEGERS or tensor.dtype in _MASKS
    return usual and tensor.layout == torch.strided and not tensor.is_meta


def _mask_on_host(mask: Any) -> torch.Tensor:
    given = as_tensor("attention_mask", mask)
    if not is_mask(given):
        raise PackingError(
            f"attention_mask must hold 0/1 or segment ids 0, 1, 2, …, got {describe(given)}."
        )
    host = given.detach().cpu()
    keep = host.is_floating_point() or host.dtype == torch.bool
    return host if keep else host.to(torch.int64)


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
    shaped = position_ids if position_ids is not None else attention_mask
    assert shaped is not None
    rows, tokens = shaped.shape
    real, segments, odd = _read_mask(attention_mask, rows, tokens)
    start = torch.zeros(rows, tokens, dtype=torch.bool)
    start[:, 0] = True
    both = real[:, 1:] & real[:, :-1]
    resets = torch.zeros(rows, tokens - 1, dtype=torch.bool)
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
    ends = torch.cat([firsts, torch.tensor([rows * tokens])])
    return Boundaries(ends.diff().tolist(), (~real).flatten()[firsts].tolist())


def _read_mask(
    mask: Optional[torch.Tensor], rows: int, tokens: int
) -> tuple[torch.Tensor, Optional[torch.Tensor], Optional[PackingError]]:
    """Which tokens are real, their segment ids if it has any, and what is wrong with its values."""
    if mask is None:
        return torch.ones(rows, tokens, dtype=torch.bool), None, None
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
    index = torch.arange(real.shape[1]).expand_as(real)
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
