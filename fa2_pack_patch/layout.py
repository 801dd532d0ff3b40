"""Where the examples are in a batch that is laid end to end.

Knows nothing of Transformers; what starts an example is said in :mod:`.boundaries`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Optional, Union

import torch

from .boundaries import read_boundaries
from .errors import PackingError
from .tensors import (
    as_tensor,
    check_position_ids,
    check_tokens,
    describe,
    holds_integers,
    mask_on_host,
    of_array,
    quote,
    upload,
)


@dataclass(frozen=True)
class PackedLayout:
    """The examples of a batch of ``rows * tokens_per_row`` tokens, flattened row by row.

    Attributes:
        cu_seqlens: int32 ``(examples + 1,)``, from 0 to ``tokens``, strictly increasing.
        lengths: tokens of each example, Python ints; their sum is ``tokens``.
        max_seqlen: the longest example, in tokens, a Python int.
        tokens: all tokens of the batch, padding included.
        padding: for each example whether it is a run of padding and no example of the caller's.
        rows: rows of the batch that the layout was read from; None where that is not known.
    """

    cu_seqlens: torch.Tensor = field(compare=False)  # follows from lengths
    lengths: tuple[int, ...]
    max_seqlen: int
    tokens: int
    padding: tuple[bool, ...] = ()
    rows: Optional[int] = field(default=None, compare=False)
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
        rows: Optional[int] = None,
    ) -> PackedLayout:
        """A layout from the tokens of each example, in order; costs no synchronisation.

        Raises:
            PackingError: no lengths, or one that is not a positive integer.
        """
        try:
            counts = tuple(int(n) for n in lengths)
            whole = all(n == m for n, m in zip(counts, lengths))
        except (TypeError, ValueError, OverflowError, RuntimeError):  # nan, infinity, no numbers
            counts, whole, lengths = (), False, [lengths]  # type: ignore[list-item]
        if not counts or not whole or any(n < 1 for n in counts):
            raise PackingError(
                f"lengths must be one or more positive integers, got {quote(list(lengths))}; "
                "leave out empty examples."
            )
        total = sum(counts)
        if total >= 2**31:
            raise PackingError(
                f"lengths add up to {total} tokens, which is not below 2**31: cu_seqlens is int32. "
                "Split the batch."
            )
        flags = tuple(bool(p) for p in padding) if padding is not None else (False,) * len(counts)
        if len(flags) != len(counts):
            raise PackingError(
                f"padding has {len(flags)} flags for {len(counts)} lengths; give one for each."
            )
        # On the CPU, whatever torch.set_default_device says.
        cu = torch.zeros(len(counts) + 1, dtype=torch.int32, device="cpu")
        sizes = torch.tensor(counts, dtype=torch.int32, device="cpu")
        torch.cumsum(sizes, 0, dtype=torch.int32, out=cu[1:])
        return cls(upload(cu, torch.device(device)), counts, max(counts), total, flags, rows)

    @classmethod
    def from_cu_seqlens(
        cls,
        cu_seqlens: Union[torch.Tensor, Sequence[int]],
        *,
        tokens: Optional[int] = None,
        rows: Optional[int] = None,
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
        return cls.from_lengths(lengths, device=given.device, rows=rows)

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
        mask = None if attention_mask is None else mask_on_host(attention_mask)
        host = ids.detach().cpu().to(torch.int64)
        check_tokens("position_ids", host)
        found = read_boundaries(host, mask, always=True)
        assert found is not None
        return cls.from_lengths(
            found.lengths, device=ids.device, padding=found.padding, rows=len(host)
        )

    @classmethod
    def from_segment_ids(cls, segment_ids: torch.Tensor) -> PackedLayout:
        """The layout of ``(rows, tokens)`` segment ids: 1,1,2,2,3,0 with 0 for padding."""
        segment_ids = as_tensor("segment_ids", segment_ids)
        host = mask_on_host(segment_ids)
        if host.dim() == 1:
            host = host[None]
        check_tokens("segment_ids", host)
        found = read_boundaries(None, host, always=True)
        assert found is not None
        return cls.from_lengths(
            found.lengths, device=segment_ids.device, padding=found.padding, rows=len(host)
        )

    def to(self, device: Union[str, torch.device]) -> PackedLayout:
        """The same layout with ``cu_seqlens`` on ``device``; kept, so that layers share it."""
        device = torch.device(device)
        mine = self.cu_seqlens.device
        if mine.type == device.type and (device.index is None or mine.index == device.index):
            return self
        key = str(device)
        if key not in self._moved:
            cu = upload(self.cu_seqlens, device)
            moved = replace(self, cu_seqlens=cu, _moved={})
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
        return torch.cat([torch.arange(n, device="cpu") for n in self.lengths])

    @classmethod
    def from_batch(cls, batch: Mapping[str, Any]) -> PackedLayout:
        """The layout of a collated batch, by what it holds (one synchronisation on a GPU).

        Args:
            batch: tensors or numpy arrays: ``cu_seq_lens_q`` (zero-length entries at its end are
                left out), else ``position_ids``, else a 2-D ``attention_mask``; the mask says what
                is padding.

        Raises:
            PackingError: none of the three, or they contradict each other.
        """
        names = ("input_ids", "position_ids", "labels")
        given = {
            name: of_array(name, batch.get(name))
            for name in (*names, "cu_seq_lens_q", "attention_mask")
        }
        cu, ids, mask = given["cu_seq_lens_q"], given["position_ids"], given["attention_mask"]
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
                "a batch must have cu_seq_lens_q, position_ids or a 2-D attention_mask to tell its "
                f"examples apart, got the keys {quote(sorted(batch))}."
            )
        shaped = next((given[name] for name in names if given[name] is not None), None)
        rows = len(shaped) if shaped is not None and shaped.dim() == 2 else None
        tokens = None if shaped is None else shaped.numel()
        layout = cls.from_cu_seqlens(cu, tokens=tokens, rows=rows)
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
        return replace(layout, padding=tuple(flags), _moved={})

    def gather_last(self, hidden: torch.Tensor) -> torch.Tensor:
        """The last token of each example that is not padding: ``(examples, ...)``.

        Args:
            hidden: ``(rows, tokens, ...)`` or ``(tokens, ...)``, as for :meth:`split`.
        """
        ends = [s + n - 1 for s, n, pad in self._spans() if not pad]
        index = torch.tensor(ends, dtype=torch.int64, device="cpu")
        return self._flat(hidden).index_select(0, upload(index, hidden.device))

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
        of_one_token = self.rows == self.tokens and tensor.shape[1:2] == (1,)
        if tensor.dim() > 1 and (tensor.shape[0] != self.tokens or of_one_token):
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
            raise PackingError(
                f"this layout is all padding (runs of {quote(list(self.lengths))} tokens): there "
                "is no example to pad. Leave such batches out."
            )
        first = torch.tensor([start for start, _ in real], device="cpu")[:, None]
        lengths = torch.tensor([length for _, length in real], device="cpu")[:, None]
        longest = int(lengths.max())
        place = torch.arange(longest, device="cpu")[None]
        if side == "left":
            place = place - (longest - lengths)
        mask = (place >= 0) & (place < lengths)
        return (first + place).masked_fill(~mask, 0), mask.to(torch.int64)
