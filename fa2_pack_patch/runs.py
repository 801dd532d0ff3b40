"""One packed forward and how its attention layers find it again.

A :class:`Run` is bound to the *storage* of the ``position_ids`` that the base model is given: every
attention module receives views of that storage, in recomputes of activation checkpointing too. So
two forwards before one backward, or a teacher beside a student, each see their own.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Optional, Union

import torch

from .compat import is_compiling, storages_keep_attributes
from .errors import PackingError
from .layout import PackedLayout
from .tensors import holds_integers, mapped_over, quote, unwrapped, upload
from .varlen import VarlenLayout

if TYPE_CHECKING:
    from .patch import Patch

_ATTRIBUTE = "_fa2_pack_patch_run"
_PLAIN = "_fa2_pack_patch_plain"
_KEPT = 128

#: The run of the attention module that is executing, for interception points without position_ids.
CURRENT: ContextVar[Optional[Run]] = ContextVar("fa2_pack_patch_run", default=None)


def current(patch: Patch) -> Optional[Run]:
    """The run of the attention module of ``patch`` that is executing, if it runs packed.

    A compiled forward does not go by :data:`CURRENT`, and goes on without it where its graph broke.
    """
    run = None if is_compiling() else CURRENT.get()
    return patch.traced if run is None else run


#: Of this thread: the patched models whose forward it is in, and the call that a hook saw last.
_HERE = threading.local()


def enter(patch: Patch) -> None:
    """Note that the base model's forward begins, of a call that its hook saw."""
    if not hasattr(_HERE, "patches"):
        _HERE.patches = set()
    _HERE.patches.add(id(patch))


def leave(patch: Patch) -> None:
    getattr(_HERE, "patches", set()).discard(id(patch))


def entered(patch: Patch) -> bool:
    return id(patch) in getattr(_HERE, "patches", ())


_INPUTS = ("input_ids", "inputs_embeds", "position_ids", "attention_mask", "cu_seq_lens_q")


def coming(patch: Patch, call: Mapping[str, Any]) -> None:
    """Note that the base model's hook has seen a call, whose forward comes next."""
    given = [call.get(name) for name in _INPUTS]
    marks = [weakref.ref(t) if isinstance(t, torch.Tensor) else None for t in given]
    _HERE.coming = id(patch), marks if any(marks) else ()


def came(patch: Patch, call: Mapping[str, Any]) -> bool:
    """Whether a forward is that of the call that the hook has just seen; true once.

    accelerate may have moved all of it to another device in between.
    """
    owner, marks = getattr(_HERE, "coming", (None, ()))
    _HERE.coming = None, ()
    if owner != id(patch) or not marks:
        return False
    seen = [None if mark is None else mark() for mark in marks]
    given = [call.get(name) for name in _INPUTS]
    given = [t if isinstance(t, torch.Tensor) else None for t in given]
    if any(mark is not None and t is None for mark, t in zip(marks, seen)):
        return False  # it ended before its forward
    if all(one is other for one, other in zip(seen, given)):
        return True
    at = _INPUTS.index("position_ids")
    run = None if seen[at] is None else patch.runs.bound(seen[at], patch)  # type: ignore[arg-type]
    if all(_equal(one, other) for one, other in zip(seen, given)):
        if run is not None:
            patch.runs.bind(given[at], run)  # type: ignore[arg-type]
        return True
    same = any(one is other for one, other in zip(seen[:at], given) if one is not None)
    if run is not None and run.open and same and not _equal(seen[at], given[at]):
        raise PackingError(
            "position_ids of a packed call were changed after fa2_pack_patch read where its "
            f"examples are, to {quote(given[at])}, by a forward pre-hook of the base model. Change "
            "them before the model is called."
        )
    return False


def _equal(one: Optional[torch.Tensor], other: Optional[torch.Tensor]) -> bool:
    if one is other:
        return True
    if one is None or other is None or (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    if any(t.is_meta or t.layout != torch.strided or mapped_over(t) for t in (one, other)):
        return False
    return torch.equal(one.detach().cpu(), other.detach().cpu())


class Run:
    """The layout of one forward, and which attention layers have run with it."""

    def __init__(
        self,
        layout: Union[PackedLayout, VarlenLayout],
        positions: torch.Tensor,
        longest: int,
        owner: object,
    ) -> None:
        self.layout = layout
        #: int64 ``(rows, tokens)``, what the model's own tensor holds; on the CPU if it was read
        self.positions = positions
        #: the largest position of any example, plus one
        self.longest = longest
        self.owner_id = id(owner)
        self.done: set[int] = set()
        #: whether the forward itself is under way, not a recompute of it
        self.open = True
        self._distinct: Optional[bool] = None
        self._sent: dict[torch.device, torch.Tensor] = {}

    @property
    def distinct(self) -> bool:
        """Whether the positions alone tell this run from a call that is not packed (reads them).

        They do not where they run on over a boundary, or where there is none.
        """
        if self.positions.is_meta or self.layout.cu_seqlens.is_meta:
            self._distinct = False
        if self._distinct is None:
            flat = self.positions.reshape(-1)
            starts = self.layout.cu_seqlens[1:-1].to(device=flat.device, dtype=torch.int64)
            starts = starts[starts < flat.numel()]
            anew = (flat[starts] <= flat[starts - 1]).all()
            self._distinct = starts.numel() > 0 and bool(anew)
        return self._distinct

    def layout_positions(self, device: torch.device) -> torch.Tensor:
        """The positions on ``device``; sent once for each of them."""
        if self.positions.device == device:
            return self.positions
        if device not in self._sent:
            self._sent[device] = upload(self.positions, device)
        return self._sent[device]


class Runs:
    """The packed forwards of one patched model that may still be needed."""

    def __init__(self) -> None:
        self._weak: weakref.WeakSet[Run] = weakref.WeakSet()
        self._kept: deque[tuple[int, torch.Tensor, Run]] = deque(maxlen=_KEPT)
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return Runs, ()  # a copied or unpickled model starts without forwards in flight

    def bind(self, position_ids: torch.Tensor, run: Run) -> None:
        """From now on ``position_ids``, its views and its detached copies lead to ``run``."""
        with self._lock:
            self._weak.add(run)
            if storages_keep_attributes():
                setattr(unwrapped(position_ids).untyped_storage(), _ATTRIBUTE, run)
            else:
                # Held, so that the address stays this tensor's own.
                self._kept.append((position_ids.data_ptr(), position_ids, run))

    def mark_plain(self, position_ids: torch.Tensor) -> None:
        """The call of ``position_ids`` is not packed, whatever packed one has the same values."""
        if self._weak and storages_keep_attributes() and position_ids.layout == torch.strided:
            setattr(unwrapped(position_ids).untyped_storage(), _PLAIN, True)

    def bound(self, position_ids: torch.Tensor, owner: object) -> Optional[Run]:
        """The run of this very patched model that ``position_ids`` was bound to, or None."""
        run = self._by_storage(position_ids)
        return run if run is not None and run.owner_id == id(owner) else None

    def keep(self, run: Run, output: Any, before: Callable[[Any], None]) -> None:
        """Let ``run`` live as long as the graph that led to the model's ``output`` does.

        A recompute may be given other tensors than the forward was, and finds its run by value: an
        offloading framework or an old release's checkpoints keep no tensor that carries it.
        ``before`` is called when the backward begins.
        """
        for tensor in _tensors(output):
            if tensor.grad_fn is not None:
                tensor.grad_fn.metadata[_ATTRIBUTE] = run  # type: ignore[index]
                tensor.grad_fn.register_prehook(before)

    def find(self, position_ids: torch.Tensor, hidden_states: Any) -> Optional[Run]:
        """The run that ``position_ids`` belongs to, or None.

        Args:
            position_ids: as an attention module is given them.
            hidden_states: its input, ``(rows, tokens, ...)``.
        """
        run = self._by_storage(position_ids)
        if run is not None or not self._weak:
            return run
        if not isinstance(hidden_states, torch.Tensor):
            return None
        if hidden_states.shape[:2] != position_ids.shape:
            return None  # not a packed call: each token of one has a position
        return self._by_value(position_ids)

    def _by_storage(self, position_ids: torch.Tensor) -> Optional[Run]:
        if position_ids.layout != torch.strided:
            return None
        if storages_keep_attributes():
            return getattr(unwrapped(position_ids).untyped_storage(), _ATTRIBUTE, None)
        if self._kept:
            address = position_ids.data_ptr()
            for kept, tensor, run in reversed(self._kept):
                if kept == address and tensor.numel() == position_ids.numel():
                    return run
        return None

    def _by_value(self, position_ids: torch.Tensor) -> Optional[Run]:
        # Offloaded or moved to another device between forward and recompute: another storage of the
        # model's own copy, which is int64.
        if position_ids.dtype != torch.int64 or not holds_integers(position_ids):
            return None
        if getattr(unwrapped(position_ids).untyped_storage(), _PLAIN, False):
            return None
        recompute = in_backward()
        with self._lock:
            alive = [run for run in self._weak if run.positions.shape == position_ids.shape]
        alive = [run for run in alive if run.open or recompute]
        if not alive:
            return None
        host = position_ids.detach().cpu()
        same = [run for run in alive if not run.positions.is_meta]
        same = [run for run in same if torch.equal(run.positions.cpu(), host)]
        if not recompute:  # a layer that is missing from its forward is noticed at the end
            same = [run for run in same if run.distinct]
        if not same:
            return None
        if len({run.layout.lengths for run in same}) > 1:
            raise PackingError(
                "position_ids were moved between forward and recompute, and several packed "
                f"forwards with these positions are in flight ({quote(host)}); give their padding "
                "other positions, or run backward before the next forward."
            )
        if not same[0].distinct:
            raise PackingError(
                "position_ids were moved between forward and recompute, and they alone do not say "
                f"where the examples of that packed forward start ({quote(host)}): they run on "
                "over a boundary. Give positions that start anew at each example, or leave "
                "position_ids out beside cu_seq_lens_q."
            )
        self.bind(position_ids, same[0])
        return same[0]


def in_backward() -> bool:
    """Whether this is called by autograd's backward: by a recompute."""
    return torch._C._current_graph_task_id() != -1


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, (tuple, list)):
        for value in output:
            yield from _tensors(value)
