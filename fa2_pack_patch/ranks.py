"""What the ranks of a sharded model decide together: a call of one rank is one of all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Optional, TypeVar

import torch

from .batches import Batch, usual
from .errors import PackingError, in_words
from .forwards import ModelForward, in_place
from .patch import Patch
from .probe import Probe
from .report import Check
from .tensors import quote

_T = TypeVar("_T")


class FailedError(Exception):
    """A call failed on some rank; the message says why."""


class Ranks:
    """All ranks of a model whose parameters are shards; of any other this one alone."""

    def __init__(self, probe: Probe) -> None:
        distributed = torch.distributed
        there = distributed.is_available() and distributed.is_initialized()
        self.count = distributed.get_world_size() if there and probe.sharded else 1

    def all(self, mine: Any) -> list[Any]:
        """What each rank gives here, in their order."""
        found = [mine] * self.count
        if self.count > 1:
            torch.distributed.all_gather_object(found, mine)
        return found

    def any(self, here: object) -> bool:
        """Whether it is true on a rank: then all of them do what calls the model."""
        return any(self.all(bool(here)))

    def attempt(self, call: Callable[[], _T]) -> tuple[Optional[_T], str]:
        """What a call of the patched model gives; None, and why, if it failed on any rank."""
        found, why = None, ""
        try:
            found = call()
        except torch.cuda.OutOfMemoryError:
            raise
        except FailedError as failed:
            why = str(failed)
        except Exception as error:
            why = in_words(error)
        told = self.all(why)
        if not why:
            why = next((f"on rank {rank}: {w}" for rank, w in enumerate(told) if w), "")
        return None if why else found, why

    def check_examples(self, batches: Sequence[Batch]) -> None:
        """Refuse ranks that were given other examples: the proof would hang.

        Raises:
            PackingError: quotes the lengths of two ranks.
        """
        told = self.all(", ".join(map(_told, batches)))
        for rank, theirs in enumerate(told):
            if theirs != told[0]:
                raise PackingError(
                    "verify of a model whose parameters are sharded runs on all ranks together, "
                    f"with examples of the same lengths: rank 0 has {told[0]}, rank {rank} has "
                    f"{theirs}. Give every rank the same examples, or none."
                )

    def failures(self, checks: Sequence[Check]) -> list[str]:
        """The ranks of a model in shards on which a check failed, and which; it fails on all."""
        failed = self.all([c.name for c in checks if not c.passed])
        told = [f"rank {rank}: {names[0]}" for rank, names in enumerate(failed) if names]
        return told if self.count > 1 else []

    def apart(self, probe: Probe) -> str:
        """How the patch of another rank differs from rank 0's, in words.

        A packed call then ends in an error on one of them, and the others would wait for it.
        """
        undone = self.all(undone_of(probe.patch))
        for rank, theirs in enumerate(undone):
            if theirs != undone[0]:
                return f"rank 0: {_quoted(undone[0])}; rank {rank}: {_quoted(theirs)}"
        return ""


def undone_of(patch: Optional[Patch]) -> list[str]:
    """What :func:`fa2_pack_patch.apply` did and is no longer there."""
    if patch is None:
        return ["not patched"]
    gone = [f"{site.label} is not packed" for site in patch.sites if not in_place(site)]
    for edit in patch.edits:
        ours, name = edit.value, type(edit.target).__name__
        if isinstance(ours, ModelForward) and not ours.in_place():
            gone.append(f"{name}.forward was replaced")
        elif edit.hook is not None and edit.gone():
            gone.append(f"{name} has lost a hook")
    return gone


def _quoted(undone: Sequence[str]) -> str:
    more = f" and {len(undone) - 2} more" if len(undone) > 2 else ""
    return (", ".join(undone[:2]) or "as applied") + more


def _told(batch: Batch) -> str:
    rows, tokens = batch.kwargs["input_ids"].shape
    about = quote([len(piece.ids) for piece in batch.pieces])
    about += f" in {rows} x {tokens} tokens"
    about += "" if batch.padding is None else " with padding"
    return about + ("" if usual(batch.pieces) else " with positions of their own")
