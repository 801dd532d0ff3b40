"""A backward that comes after revert: what it would recompute runs as stock, and mixes examples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .errors import PackingError
from .patch import ATTRIBUTE

if TYPE_CHECKING:
    from .patch import Patch


class Recompute:
    """Hook of a packed forward's graph: refuses a recompute of layers that are stock again.

    Reentrant checkpoints would go on without a word; the others find other saved tensors than they
    had, and end in torch's ``CheckpointError``.
    """

    def __init__(self, patch: Patch, base: torch.nn.Module) -> None:
        self.patch = patch
        self.base = base

    def __call__(self, gradients: Any) -> None:
        if not self.patch.edits and self._is_wrong():
            raise PackingError(
                "backward of a packed call came after the model was reverted, and its checkpointed "
                "layers would be recomputed without the examples' edges. Call backward before "
                "fa2_pack_patch.revert, inside of the applied(model) block."
            )

    def _is_wrong(self) -> bool:
        if ATTRIBUTE in self.base.__dict__:
            return False  # applied again: recomputes find their examples
        find = getattr(torch._C, "_current_autograd_node", None)
        waiting = [None if find is None else find()]
        seen = set()
        while waiting:
            node: Any = waiting.pop()
            if node is None or node in seen:
                continue
            if node.name().startswith("CheckpointFunction"):
                return True
            seen.add(node)
            waiting += [after for after, _ in node.next_functions]
        return False
