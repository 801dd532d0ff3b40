"""The hook of a patched model that counts the attention layers after each packed forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from .compat import is_compiling, is_exporting
from .forwards import in_place, layers_missed
from .graphs import UNREAD, eagerly
from .recomputes import Recompute
from .runs import Run, leave

if TYPE_CHECKING:
    from .patch import Patch, Site


class CountHook:
    """Forward hook of the base model: every attention layer must have run packed."""

    def __init__(self, patch: Patch) -> None:
        self.patch = patch

    def __call__(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        run = self.patch.traced
        if run is not None:
            self.patch.traced = None
            # Layers in a graph are not counted, so that it stays whole: they are ours or not.
            self._count(run, [s for s in self.patch.sites if not in_place(s)])
        elif is_compiling() and not is_exporting():
            eagerly(UNREAD, self._check, module, kwargs, output)
        elif not is_exporting():
            self._check(module, kwargs, output)

    def _check(self, module: torch.nn.Module, kwargs: dict[str, Any], output: Any) -> None:
        leave(self.patch)
        position_ids = kwargs.get("position_ids")
        if not isinstance(position_ids, torch.Tensor):
            return
        run = self.patch.runs.bound(position_ids, self.patch)
        if run is not None:
            run.open = False
            self._count(run, self.patch.sites)
            self.patch.runs.keep(run, output, Recompute(self.patch, module))

    def _count(self, run: Run, sites: Sequence[Site]) -> None:
        missed = [s for s in sites if s.index not in run.done]
        if missed:
            raise layers_missed(missed, len(self.patch.sites))
