"""Packed batches and the examples in them, for a proof.

Nothing here uses :mod:`fa2_pack_patch.boundaries` or :mod:`fa2_pack_patch.layout`: what is proved
must not be its own witness.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional, Union

import torch

from .errors import PackingError
from .tensors import (
    as_tensor,
    check_tokens,
    describe,
    fit_position_ids,
    holds_integers,
    is_mask,
    quote,
)

#: One example a sequence of token ids, or a packed batch as the model is called with.
Examples = Union[Mapping[str, Any], Sequence[Union[Sequence[int], torch.Tensor]]]

_ONE: list[int] = [6, 9, 2, 7]
_ROWS: list[list[int]] = [[4, 1, 9], [6, 8], [3, 8]]
_REACH = 1024


@dataclass(frozen=True)
class Piece:
    """One example and where it stands: ``ids`` and ``positions`` are int64 ``(length,)``."""

    row: int
    start: int
    ids: torch.Tensor
    positions: torch.Tensor

    @property
    def place(self) -> tuple[int, slice]:
        return self.row, slice(self.start, self.start + len(self.ids))


def usual(pieces: Sequence[Piece]) -> bool:
    """Whether all have the positions that a row by itself has: 0, 1, 2, …"""
    return all(torch.equal(p.positions, torch.arange(len(p.ids), device="cpu")) for p in pieces)


@dataclass(frozen=True)
class Batch:
    """Keyword arguments of one packed call, the examples in it, and its padding ``(rows, T)``."""

    name: str
    kwargs: dict[str, Any]
    pieces: list[Piece]
    padding: Optional[torch.Tensor] = None


def pack(rows: Sequence[Sequence[torch.Tensor]], name: str) -> Batch:
    """Examples end to end, one row for each list, and a mask where rows have padding.

    The padding of a shorter row is in front of its examples, between them and behind them.
    """
    width = max(sum(len(ids) for ids in row) for row in rows)
    shape = len(rows), width
    ids = torch.zeros(shape, dtype=torch.long, device="cpu")
    positions, mask = torch.zeros_like(ids), torch.zeros_like(ids)
    pieces = []
    for r, row in enumerate(rows):
        spare, gaps, at = width - sum(len(tokens) for tokens in row), len(row) + 1, 0
        for n, tokens in enumerate(row):
            at += spare * (n + 1) // gaps - spare * n // gaps
            piece = Piece(r, at, tokens, torch.arange(len(tokens), device="cpu"))
            ids[piece.place], positions[piece.place], mask[piece.place] = tokens, piece.positions, 1
            pieces.append(piece)
            at += len(tokens)
    kwargs: dict[str, Any] = {"input_ids": ids, "position_ids": positions}
    if bool(mask.all()):
        return Batch(name, kwargs, pieces)
    return Batch(name, {**kwargs, "attention_mask": mask}, pieces, mask == 0)


def random_batches(vocabulary: int, window: Optional[int]) -> list[Batch]:
    """Two small packed batches: one row without padding, three with it.

    With a sliding window of up to 1024 tokens the first example of the row is longer than it.
    """
    generator = torch.Generator().manual_seed(20)

    def draw(length: int) -> torch.Tensor:
        return torch.randint(1, vocabulary, (length,), generator=generator, device="cpu")

    lengths = list(_ONE)
    if window and window <= _REACH:
        lengths[0] = max(lengths[0], window + 4)
    return [
        pack([[draw(n) for n in lengths]], "one row"),
        pack([[draw(n) for n in row] for row in _ROWS], "padded rows"),
    ]


def given_batch(examples: Examples, vocabulary: int) -> Batch:
    """The user's own examples, or packed batch, as a :class:`Batch`.

    Args:
        examples: as for :func:`fa2_pack_patch.verify`.
        vocabulary: how many token ids the model takes.

    Raises:
        PackingError: no token ids of this vocabulary, fewer than two examples, an empty one, or a
            batch whose boundaries cannot be read.
    """
    if isinstance(examples, Mapping):
        batch = _read_batch(examples)
    else:
        batch = pack([_token_ids(examples)], "your examples")
    ids = batch.kwargs["input_ids"]
    wrong = ids[(ids < 0) | (ids >= vocabulary)]
    if len(wrong):
        raise PackingError(
            f"this model's embedding takes token ids from 0 to {vocabulary - 1}, got "
            f"{quote(wrong)}; give ids of the model's own tokenizer."
        )
    return batch


def _token_ids(examples: Any) -> list[torch.Tensor]:
    if not isinstance(examples, Iterable) or isinstance(examples, (str, bytes)):
        raise PackingError(
            "verify takes examples as a list of sequences of token ids, or as one packed batch (a "
            f"mapping), got a {type(examples).__name__}: {quote(examples)}."
        )
    found = []
    for n, example in enumerate(examples):
        if isinstance(example, (str, bytes, Mapping)):
            raise PackingError(
                f"example {n} must be a sequence of token ids, got a {type(example).__name__}: "
                f"{quote(example)}; give its input_ids, as the tokenizer makes them."
            )
        tokens = as_tensor(f"example {n}", example).detach()
        if not holds_integers(tokens) and tokens.numel():
            raise PackingError(
                f"example {n} must be token ids, one integer for each token, got "
                f"{describe(tokens)}: {quote(example)}."
            )
        found.append(tokens.cpu().to(torch.int64).reshape(-1))
    if len(found) < 2 or any(len(t) == 0 for t in found):
        raise PackingError(
            "verify needs at least two examples of at least one token, got examples of "
            f"{quote([len(t) for t in found])} tokens."
        )
    return found


def _check_batch(kwargs: Mapping[str, Any]) -> None:
    """Refuse a batch that cannot be read: by its shapes and dtypes.

    Raises:
        PackingError: quotes them.
    """
    ids = kwargs.get("input_ids")
    if not isinstance(ids, torch.Tensor):
        given = f"the keys {sorted(kwargs)}" if ids is None else f"a {type(ids).__name__}"
        raise PackingError(
            f"verify needs a batch with a tensor input_ids (rows, tokens), got {given}; give that, "
            "or a list of examples."
        )
    check_tokens("input_ids", ids)
    if not holds_integers(ids):
        raise PackingError(f"input_ids must be integers, got {describe(ids)}.")
    rows, width = ids.shape
    positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
    if positions is not None:
        fit_position_ids(positions, rows, width)
    if mask is not None:
        tensor = isinstance(mask, torch.Tensor)
        if not tensor or mask.shape != ids.shape or not is_mask(mask):
            raise PackingError(
                "attention_mask must hold 0/1 or segment ids, of shape (rows, tokens) = "
                f"({rows}, {width}), got {describe(mask) if tensor else quote(mask)}."
            )
    lengths = kwargs.get("cu_seq_lens_q")
    if lengths is not None:
        lengths = as_tensor("cu_seq_lens_q", lengths)
        if not holds_integers(lengths) or lengths.dim() != 1 or bool((lengths < 0).any()):
            raise PackingError(
                "cu_seq_lens_q must be integers from 0 on, of shape (examples + 1,), got "
                f"{describe(lengths)}: {quote(lengths)}."
            )


def _read_batch(given: Mapping[str, Any]) -> Batch:
    kwargs = {k: v for k, v in given.items() if v is not None and k != "labels"}
    _check_batch(kwargs)
    ids = kwargs["input_ids"].detach().cpu().to(torch.int64)
    rows, width = ids.shape
    starts = torch.zeros(rows, width, dtype=torch.bool, device="cpu")
    starts[:, 0] = True
    positions = kwargs.get("position_ids")
    if positions is not None:
        positions = positions.detach().cpu().to(torch.int64).reshape(-1, width).expand(rows, width)
        starts[:, 1:] |= positions[:, 1:] <= positions[:, :-1]
    mask = kwargs.get("attention_mask")
    real = torch.ones(rows, width, dtype=torch.bool, device="cpu")
    if mask is not None:
        mask = mask.detach().cpu().to(torch.int64)
        real = mask != 0
        starts[:, 1:] |= mask[:, 1:] != mask[:, :-1]
    lengths = kwargs.get("cu_seq_lens_q")
    if lengths is not None:
        inner = as_tensor("cu_seq_lens_q", lengths).detach().cpu().to(torch.int64)
        starts.view(-1)[inner[inner < rows * width]] = True
    pieces = []
    for r in range(rows):
        edges = [*starts[r].nonzero().reshape(-1).tolist(), width]
        for a, b in zip(edges, edges[1:]):
            if bool(real[r, a]):
                own = torch.arange(b - a, device="cpu")
                place = own if positions is None else positions[r, a:b]
                pieces.append(Piece(r, a, ids[r, a:b], place))
    if len(pieces) <= rows:
        raise PackingError(
            f"verify needs a packed batch, but {rows} rows of {width} tokens hold "
            f"{len(pieces)} examples. Give position_ids that start anew inside a row, segment ids "
            "or cu_seq_lens_q, or a list of examples."
        )
    return Batch("your batch", kwargs, pieces, None if bool(real.all()) else ~real)
