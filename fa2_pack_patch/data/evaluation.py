"""Evaluation by ``Trainer`` on packed rows: ``compute_metrics`` gets examples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Callable, Optional

import torch

from ..errors import PackingError
from ..tensors import quote

_IGNORED = -100  # what Trainer fills rows up with, positions too


class ExamplesMetrics:
    """Makes ``Trainer``'s ``compute_metrics`` see examples and not rows; see
    :func:`examples_metrics`."""

    def __init__(
        self,
        compute_metrics: Callable[..., dict[str, Any]],
        preprocess_logits: Optional[Callable[[Any, torch.Tensor], Any]] = None,
        *,
        padded: bool = False,
    ) -> None:
        self.compute_metrics = compute_metrics
        self.preprocess_logits = preprocess_logits
        self.label_names = ["labels", "position_ids"] + ["attention_mask"] * padded

    def preprocess_logits_for_metrics(self, logits: Any, labels: Any) -> Any:
        """For ``Trainer(preprocess_logits_for_metrics=...)``: your own function, if you gave one,
        on the logits ``(rows, tokens, vocabulary)`` and the labels ``(rows, tokens)``."""
        self._check(labels)
        return (
            logits if self.preprocess_logits is None else self.preprocess_logits(logits, labels[0])
        )

    def __call__(self, prediction: Any, **more: Any) -> dict[str, Any]:
        """For ``Trainer(compute_metrics=...)``: cuts the rows and calls your function."""
        labels = prediction.label_ids
        self._check(labels)
        spans = _spans(labels[1], labels[2] if len(labels) > 2 else None)
        width = labels[1].shape[1]
        given = {
            "predictions": _cut(prediction.predictions, spans, width),
            "label_ids": _cut(labels[0], spans, width),
        }
        for name in ("inputs", "losses"):
            value = getattr(prediction, name, None)
            if value is not None:
                given[name] = _cut(value, spans, width) if name == "inputs" else value
        return self.compute_metrics(type(prediction)(**given), **more)

    def _check(self, labels: Any) -> None:
        if not isinstance(labels, (tuple, list)) or len(labels) != len(self.label_names):
            got = f"{len(labels)} tensors" if isinstance(labels, (tuple, list)) else "one tensor"
            raise PackingError(
                f"compute_metrics needs {self.label_names} to find the examples, got {got} as "
                f"labels; set TrainingArguments(label_names={self.label_names})."
            )


def examples_metrics(
    compute_metrics: Callable[..., dict[str, Any]],
    preprocess_logits: Optional[Callable[[Any, torch.Tensor], Any]] = None,
    *,
    padded: bool = False,
) -> ExamplesMetrics:
    """``compute_metrics`` for packed evaluation: it is given what padded evaluation gives it.

    ``Trainer`` keeps rows and knows nothing of examples; but it keeps whatever ``label_names``
    names, so ``position_ids`` come along and tell the examples apart. ::

        metrics = examples_metrics(compute_metrics, lambda logits, labels: logits.argmax(-1))
        args = TrainingArguments(..., label_names=metrics.label_names)
        trainer = Trainer(
            ..., args=args, compute_metrics=metrics,
            preprocess_logits_for_metrics=metrics.preprocess_logits_for_metrics,
        )

    Args:
        compute_metrics: is called with ``predictions`` ``(examples, longest, ...)`` and
            ``label_ids`` ``(examples, longest)``, padded right with -100, and ``inputs`` likewise
            if you ask for them; ``losses`` stay one a row.
        preprocess_logits: what to keep of the logits, given ``(logits, labels)``.
        padded: the collator pads (``pad_to_multiple_of`` or ``tokens=``), so its batches hold an
            ``attention_mask``; without this, padding would count as an example.

    With several processes ``Trainer`` cuts the last batch by *rows*; let the number of evaluation
    examples be a multiple of ``per_device_eval_batch_size * processes``.
    """
    return ExamplesMetrics(compute_metrics, preprocess_logits, padded=padded)


def _spans(position_ids: Any, mask: Any) -> list[tuple[int, int, int]]:
    """(row, start, end) of each example; Trainer fills rows up with -100."""
    positions = torch.as_tensor(position_ids)
    real = positions != _IGNORED
    if mask is not None:
        real &= torch.as_tensor(mask) > 0
    spans = []
    for row in range(positions.shape[0]):
        kept = int(real[row].sum())
        if not bool(real[row, :kept].all()):
            raise PackingError(
                f"row {row} of the evaluation has padding before its end: {quote(positions[row])}; "
                "give rows whose padding is at the end."
            )
        here = positions[row, :kept]
        starts = [0, *((here[1:] <= here[:-1]).nonzero().flatten() + 1).tolist(), kept]
        spans += [(row, a, b) for a, b in zip(starts, starts[1:]) if b > a]
    return spans


def _cut(values: Any, spans: list[tuple[int, int, int]], width: int) -> Any:
    """``(rows, width, ...)`` arrays or tensors, nested in tuples or dicts, as padded examples."""
    if isinstance(values, (tuple, list)):
        return type(values)(_cut(v, spans, width) for v in values)
    if isinstance(values, Mapping):
        return {k: _cut(v, spans, width) for k, v in values.items()}
    if values.ndim < 2 or values.shape[1] != width:
        raise PackingError(
            f"a prediction of shape {tuple(values.shape)} is not (rows, {width}, ...); "
            "preprocess_logits must keep one value for each token."
        )
    longest = max(end - start for _, start, end in spans)
    shape = (len(spans), longest, *values.shape[2:])
    if isinstance(values, torch.Tensor):
        out: Any = values.new_full(shape, _IGNORED)
    else:
        import numpy as np

        out = np.full(shape, _IGNORED, dtype=values.dtype)
    for n, (row, start, end) in enumerate(spans):
        out[n, : end - start] = values[row, start:end]
    return out
