"""From a data set to packed batches: collators, packers, samplers, metrics.

Needs torch alone; Transformers is imported only by what subclasses one of its classes.
"""

from __future__ import annotations

import importlib
from typing import Any

_WHERE = {
    "DataCollatorWithFlattening": "collators",
    "DataCollatorForCompletionOnlyLM": "completion",
    "pack_lengths": "packers",
    "density": "packers",
    "PackedBatchSampler": "samplers",
    "DistributedPackedBatchSampler": "samplers",
    "PackedIterableDataset": "streaming",
    "per_example_loss": "metrics",
    "token_counts": "metrics",
    "examples_metrics": "metrics",
    "effective_batch": "metrics",
}

__all__ = list(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_WHERE[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
