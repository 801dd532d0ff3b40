"""A layout whose boundaries stay on the device: what a caller who hands lengths over has paid for.

Nothing here waits for the device, so it also serves ``torch.compile`` and CUDA graphs. The values
are checked all the same: :class:`Doubts` has the device compare them and reads the answer at a
later call, when it has long been there.
"""

from __future__ import annotations

from collections import deque
from typing import Optional, Union

import torch

from .errors import PackingError
from .layout import PackedLayout
from .tensors import quote


class VarlenLayout:
    """The examples of a flattened batch, by device tensors and Python ints alone.

    Attributes:
        cu_seqlens: int32 ``(examples + 1,)`` on the device, from 0 to ``tokens``; trailing entries
            may repeat ``tokens`` (examples of no tokens, which keep its length fixed).
        max_seqlen: no example has more tokens; a Python int.
        tokens: all tokens of the batch, padding included.
    """

    def __init__(self, cu_seqlens: torch.Tensor, max_seqlen: int, tokens: int) -> None:
        self.cu_seqlens = cu_seqlens
        self.max_seqlen = max_seqlen
        self.tokens = tokens

    @property
    def examples(self) -> int:
        """At the most so many examples: entries of no tokens are counted."""
        return int(self.cu_seqlens.shape[0]) - 1

    def to(self, device: Union[str, torch.device]) -> VarlenLayout:
        """The same layout on ``device``."""
        moved = self.cu_seqlens.to(device)
        return self if moved is self.cu_seqlens else _on(moved, self)

    def host(self) -> PackedLayout:
        """The same examples as a :class:`PackedLayout` (waits for the device)."""
        return PackedLayout.from_cu_seqlens(self.cu_seqlens, tokens=self.tokens)

    def owners(self) -> torch.Tensor:
        """int64 ``(tokens,)``: the example of each token."""
        index = torch.arange(self.tokens, device=self.cu_seqlens.device)
        return torch.searchsorted(self.cu_seqlens[1:].to(torch.int64), index, right=True)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each example (waits for the device)."""
        return self.host().lengths

    @property
    def padding(self) -> tuple[bool, ...]:
        """No example is known to be padding: the mask was not read."""
        return ()


def _on(cu_seqlens: torch.Tensor, layout: VarlenLayout) -> VarlenLayout:
    return VarlenLayout(cu_seqlens, layout.max_seqlen, layout.tokens)


#: What a kernel is given.
Layout = Union[PackedLayout, VarlenLayout]


class Doubts:
    """Checks of varlen arguments that the device makes and a later call reads."""

    def __init__(self) -> None:
        self._open: deque[tuple[torch.Tensor, Optional[torch.cuda.Event], torch.Tensor]] = deque()

    def __reduce__(self) -> tuple[type[Doubts], tuple[()]]:
        return Doubts, ()  # a copied or unpickled model starts without calls in flight

    def add(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        longest: int,
        position_ids: Optional[torch.Tensor],
        rows: int,
        tokens: int,
    ) -> None:
        """Have the device check cumulative lengths of ``rows`` rows of ``tokens`` tokens."""
        total = rows * tokens
        step = q.diff()
        wrong = (q[0] != 0) | (q[-1] != total) | (step < 0).any() | (step > longest).any()
        # Examples of no tokens only at the end.
        wrong |= ((step == 0) & (q[:-1] < total)).any()
        if k is not q:
            wrong |= (q != k).any()
        starts = torch.zeros(total + 1, dtype=torch.bool, device=q.device)
        starts.index_fill_(0, q.to(torch.int64).clamp(0, total), True)
        inside = starts[:total].view(rows, tokens)
        wrong |= ~inside[:, 0].all()
        if position_ids is not None:
            resets = position_ids[:, 1:] <= position_ids[:, :-1]
            wrong |= (resets & ~inside[:, 1:]).any()
        if q.device.type != "cuda":
            self._open.append((wrong, None, q))
            return
        flag = torch.empty((), dtype=torch.bool, pin_memory=True, device="cpu")
        flag.copy_(wrong, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._open.append((flag, event, q))

    def read(self) -> None:
        """Raise for the first earlier call whose answer has come and is bad.

        Raises:
            PackingError: quotes the cumulative lengths of that call.
        """
        while self._open:
            wrong, event, q = self._open[0]
            if event is not None and not event.query():  # type: ignore[no-untyped-call]
                return
            self._open.popleft()
            if bool(wrong):
                self._open.clear()
                raise PackingError(
                    f"an earlier call of this model was given cu_seq_lens_q {quote(q)}, which do "
                    "not fit its rows, its max_length_q, its cu_seq_lens_k or its position_ids: "
                    "they must run from 0 to the token count, start an example at each row and at "
                    "each reset of position_ids, and no example may exceed max_length_q. Its "
                    "result is not to be trusted: make them right, and go back to before that call "
                    "(varlen arguments on a GPU are checked without waiting for it)."
                )
