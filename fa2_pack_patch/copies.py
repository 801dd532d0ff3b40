"""Copies of a part of a patched model: they are stock, and know nothing of the model."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Optional

import torch

if TYPE_CHECKING:
    from .patch import Patch


class Alone:
    """What stands for a method of one module; copied with its model, but not with a part of it.

    ``copy.deepcopy`` of a decoder layer would else copy the whole model by its patch, which knows
    every module. A copied layer has its class's own method there instead.
    """

    #: the instance's own method that was there before apply, if any
    before: Any = None

    def _parts(self) -> tuple[Patch, torch.nn.Module, str]:
        """The patch, the module, and the method's name."""
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        patch, module, name = self._parts()
        if not patch.copied_in(memo):
            if self.before is not None:
                return copy.deepcopy(self.before, memo)
            method: Optional[Any] = getattr(type(module), name, None)
            return None if method is None else method.__get__(copy.deepcopy(module, memo))
        new = object.__new__(type(self))
        memo[id(self)] = new
        state: Any = copy.deepcopy(self.__reduce_ex__(2)[2], memo)
        if hasattr(new, "__setstate__"):
            new.__setstate__(state)
        else:
            new.__dict__.update(state)
        return new
