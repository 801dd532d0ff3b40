"""Where choices come from: a seeded generator (the fuzzer) or Hypothesis (which shrinks them)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from hypothesis.strategies import DataObject

T = TypeVar("T")


class Source(Protocol):
    """Choices; the first option and the lowest number are the tamest."""

    def integer(self, low: int, high: int) -> int: ...

    def pick(self, options: Sequence[T]) -> T: ...

    def chance(self, percent: int) -> bool: ...


class Seeded:
    """The fuzzer's choices."""

    def __init__(self, seed: Any) -> None:
        self._random = random.Random(seed)

    def integer(self, low: int, high: int) -> int:
        return self._random.randint(low, high)

    def pick(self, options: Sequence[T]) -> T:
        return self._random.choice(options)

    def chance(self, percent: int) -> bool:
        return self._random.random() * 100 < percent


class Drawn:
    """Hypothesis's choices."""

    def __init__(self, data: DataObject) -> None:
        from hypothesis import strategies

        self._data = data
        self._make = strategies

    def integer(self, low: int, high: int) -> int:
        return self._data.draw(self._make.integers(low, high))

    def pick(self, options: Sequence[T]) -> T:
        return options[self.integer(0, len(options) - 1)]

    def chance(self, percent: int) -> bool:
        return self.integer(0, 99) >= 100 - percent
