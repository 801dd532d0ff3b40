"""``DataCollatorWithFlattening``: a list of examples to one packed row, without padding.

The same on every Transformers release and without Transformers. Argument names and the row's format
follow the collator of that name in Transformers 5.24 (``transformers/data/data_collator.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Callable, Optional

import torch

from ..errors import PackingError
from ..tensors import quote
from .checks import check_columns, check_keys, check_lengths, check_whole

Feature = Mapping[str, Any]
Batch = dict[str, Any]

_OWN = (
    "input_ids",
    "labels",
    "attention_mask",
    "position_ids",
    "token_type_ids",
    "assistant_masks",
    "completion_mask",
)


class DataCollatorWithFlattening:
    """Lays the examples of a batch end to end in one row of shape ``(1, tokens)``.

    The batch has ``input_ids`` and ``labels`` (int64 ``(1, tokens)``), and as asked for
    ``position_ids`` (int64, from ``position_ids_start`` at each example), ``cu_seq_lens_q/k``
    (int32 ``(examples + 1,)``) with ``max_length_q/k`` (Python ints), and ``seq_idx`` (int32).
    With padding it also has an ``attention_mask`` of 0 and 1 (int64), by which a patched model,
    the layout and the metrics know the padding; a model that is not patched may mix examples
    under a mask.

    An example holds ``input_ids`` and perhaps ``labels`` (else ``input_ids`` are the labels), as
    lists, numpy arrays or tensors. Its ``attention_mask`` takes padding out of it;
    ``assistant_masks`` (of chat templates with ``{% generation %}``) and TRL's ``completion_mask``
    leave only their tokens as targets; its own ``position_ids``, which must not start anew inside
    of it, and ``token_type_ids`` are left out.
    Other keys of numbers are carried: one number an example as
    ``(examples,)``, one a token as ``(1, tokens)``; anything else is refused by name.

    Args:
        return_position_ids: give ``position_ids``.
        separator_id: the label of each example's first token, which no token predicts.
        return_flash_attn_kwargs: give ``cu_seq_lens_q/k`` and ``max_length_q/k``.
        return_seq_idx: give ``seq_idx``, the number of each token's example.
        position_ids_start: the first position of each example (2 for RoBERTa-like models).
        pad_to_multiple_of: pad the row to a multiple of so many tokens.
        max_length: the longest example allowed, in tokens; in the static mode also the value of
            ``max_length_q/k``.
        truncation: cut longer examples to ``max_length`` instead of refusing them.
        pad_token_id: ``input_ids`` of padding.
        tokens: the static mode: every row has exactly so many tokens, ``cu_seq_lens`` always as
            many entries (the last value repeated; ``max_examples + 2``, more with a ``max_length``,
            above which padding takes several) and ``max_length_q/k`` is fixed, so that a compiled
            step is compiled once.
        max_examples: the most examples a static row may hold.
        inner: another collator whose labels are wanted: it is called first, and its rows are taken
            apart by their ``attention_mask``.
        return_tensors: "pt" or "np".

    Raises:
        ValueError: arguments that contradict each other.
        PackingError: at a call, for examples that cannot be laid out as asked.
    """

    def __init__(
        self,
        return_position_ids: bool = True,
        *,
        separator_id: int = -100,
        return_flash_attn_kwargs: bool = False,
        return_seq_idx: bool = False,
        position_ids_start: int = 0,
        pad_to_multiple_of: Optional[int] = None,
        max_length: Optional[int] = None,
        truncation: bool = False,
        pad_token_id: int = 0,
        tokens: Optional[int] = None,
        max_examples: Optional[int] = None,
        inner: Optional[Callable[[list[Any]], Mapping[str, Any]]] = None,
        return_tensors: str = "pt",
    ) -> None:
        if not isinstance(return_position_ids, bool):
            raise ValueError(
                f"return_position_ids must be a bool, got {return_position_ids!r}; give a "
                "tokenizer's pad_token_id by that name."
            )
        for name, value in (
            ("pad_to_multiple_of", pad_to_multiple_of),
            ("max_length", max_length),
            ("tokens", tokens),
            ("max_examples", max_examples),
        ):
            if value is not None and (isinstance(value, bool) or value != int(value) or value < 1):
                raise ValueError(f"{name} must be a positive integer, got {value!r}.")
        if (tokens is None) != (max_examples is None):
            raise ValueError(
                f"static rows need tokens and max_examples, got tokens={tokens!r}, "
                f"max_examples={max_examples!r}; give both or neither."
            )
        if pad_token_id is None and (tokens is not None or pad_to_multiple_of is not None):
            raise ValueError(
                "pad_token_id must be an integer, got None: the tokenizer has none. Leave it out, "
                "or give any token: padding is masked."
            )
        if tokens is not None and pad_to_multiple_of is not None:
            raise ValueError(
                f"tokens={tokens} fixes the row already; leave out "
                f"pad_to_multiple_of={pad_to_multiple_of}."
            )
        if truncation and max_length is None:
            raise ValueError(
                "truncation=True needs max_length, got max_length=None; give the most tokens that "
                "an example may have."
            )
        if return_tensors not in ("pt", "np"):
            raise ValueError(f'return_tensors must be "pt" or "np", got {return_tensors!r}.')
        self.return_position_ids = return_position_ids
        self.separator_id = separator_id
        self.return_flash_attn_kwargs = return_flash_attn_kwargs
        self.return_seq_idx = return_seq_idx
        self.position_ids_start = position_ids_start
        self.pad_to_multiple_of = None if pad_to_multiple_of is None else int(pad_to_multiple_of)
        self.max_length = None if max_length is None else int(max_length)
        self.truncation = truncation
        self.pad_token_id = pad_token_id
        self.tokens = None if tokens is None else int(tokens)
        self.max_examples = None if max_examples is None else int(max_examples)
        self.inner = inner
        self.return_tensors = return_tensors

    def __call__(
        self,
        features: Sequence[Any],
        return_tensors: Optional[str] = None,
        separator_id: Optional[int] = None,
    ) -> Batch:
        """One packed row of ``features``; empty examples are left out."""
        kind = return_tensors or self.return_tensors
        if kind not in ("pt", "np"):
            raise ValueError(f'return_tensors must be "pt" or "np", got {kind!r}.')
        given: Sequence[Feature] = [] if isinstance(features, Mapping) else list(features)
        if isinstance(features, Mapping) or any(not hasattr(f, "items") for f in given):
            raise PackingError(
                f"give a list of examples, each a mapping with input_ids, got a "
                f"{type(features).__name__}; of a data set, [dataset[n] for n in range(4)] and not "
                "dataset[:4], which is a mapping of columns."
            )
        if self.inner is not None:
            given = rows_of(self.inner(list(given)))
        labelled = [feature.get("labels") is not None for feature in given]
        if any(labelled) and not all(labelled):
            raise PackingError(
                f"example {labelled.index(False)} has no labels but example {labelled.index(True)} "
                "has; give labels to all examples or to none (then input_ids are the labels)."
            )
        examples = [self._example(feature, at) for at, feature in enumerate(given)]
        kept = [at for at, example in enumerate(examples) if len(example["input_ids"])]
        if not kept:
            raise PackingError(
                f"every one of the {len(examples)} examples of this batch is empty; give at least "
                "one token."
            )
        examples = [examples[at] for at in kept]
        check_keys(examples, kept)
        lengths = [len(example["input_ids"]) for example in examples]
        pad = self._padding(lengths)
        separator = self.separator_id if separator_id is None else separator_id
        batch: Batch = {}
        batch["input_ids"] = _row([e.pop("input_ids") for e in examples], pad, self.pad_token_id)
        labels = [e.pop("labels") for e in examples]
        for row in labels:
            row[0] = separator
        batch["labels"] = _row(labels, pad, -100)
        spans = [*lengths, *self._runs(pad)]
        if self.return_position_ids:
            start = self.position_ids_start
            batch["position_ids"] = torch.cat([torch.arange(start, start + n) for n in spans])[None]
        if self.return_seq_idx:
            index = torch.arange(len(spans), dtype=torch.int32)
            batch["seq_idx"] = index.repeat_interleave(torch.tensor(spans))[None]
        if self.return_flash_attn_kwargs:
            batch.update(self._varlen(spans))
        if self.tokens is not None or self.pad_to_multiple_of is not None:
            mask = torch.ones(1, sum(spans), dtype=torch.int64)
            mask[:, sum(lengths) :] = 0
            batch["attention_mask"] = mask
        check_columns(examples[0], batch)
        for key in examples[0]:
            values = [e[key] for e in examples]
            batch[key] = _row(values, pad, 0) if values[0].dim() else torch.stack(values)
        if kind == "np":
            return {k: _numpy(v) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
        return batch

    def _example(self, feature: Feature, at: int) -> dict[str, torch.Tensor]:
        """One example's tensors, its own padding taken out."""
        if "input_ids" not in feature:
            raise PackingError(
                f"example {at} has no input_ids; its keys are {sorted(feature)}. Tokenize the data "
                "set first."
            )
        ids = _numbers(feature["input_ids"], "input_ids", at)
        if ids.dim() != 1 or ids.is_floating_point():
            raise PackingError(
                f"input_ids of example {at} must be integers of shape (length,), got {ids.dtype} "
                f"of shape {tuple(ids.shape)}."
            )
        length = len(ids)
        check_lengths(feature.get("seq_lengths"), at)
        result = {"input_ids": ids, "labels": ids}
        if feature.get("labels") is not None:
            result["labels"] = self._aligned(feature, "labels", at, length)
            if result["labels"].is_floating_point():
                raise PackingError(
                    f"labels of example {at} are {result['labels'].dtype}; they must be integers, "
                    "with -100 where there is no target."
                )
        keep, mask, positions = torch.ones(length, dtype=torch.bool), None, None
        if feature.get("attention_mask") is not None:
            mask = self._aligned(feature, "attention_mask", at, length)
            keep = mask != 0
        if feature.get("position_ids") is not None:
            positions = _numbers(feature["position_ids"], "position_ids", at)
        check_whole(at, mask, positions, keep)
        for name in ("assistant_masks", "completion_mask"):
            if feature.get(name) is not None:
                wanted = self._aligned(feature, name, at, length) != 0
                result["labels"] = torch.where(wanted, result["labels"], -100)
        for key, value in feature.items():
            if key in _OWN or value is None:
                continue
            tensor = _numbers(value, key, at)
            if tensor.dim() > 1 or (tensor.dim() == 1 and len(tensor) != length):
                raise PackingError(
                    f"{key!r} of example {at} has shape {tuple(tensor.shape)}; only one number, or "
                    f"one for each of its {length} tokens, can be carried. Remove the column."
                )
            result[key] = tensor
        result = {k: v[keep].clone() if v.dim() else v for k, v in result.items()}
        count = len(result["input_ids"])
        if self.max_length is not None and count > self.max_length:
            if not self.truncation:
                raise PackingError(
                    f"example {at} has {count} tokens, more than max_length={self.max_length}; "
                    "shorten it, raise max_length, or pass truncation=True."
                )
            result = {k: v[: self.max_length] if v.dim() else v for k, v in result.items()}
        return result

    @staticmethod
    def _aligned(feature: Feature, key: str, at: int, length: int) -> torch.Tensor:
        values = _numbers(feature[key], key, at)
        if values.shape != (length,):
            raise PackingError(
                f"{key} of example {at} have shape {tuple(values.shape)}, but its input_ids have "
                f"{length} tokens; they must be of one length."
            )
        return values

    def _padding(self, lengths: list[int]) -> int:
        total = sum(lengths)
        if self.tokens is None:
            return -total % self.pad_to_multiple_of if self.pad_to_multiple_of else 0
        assert self.max_examples is not None
        if total > self.tokens or len(lengths) > self.max_examples:
            raise PackingError(
                f"{len(lengths)} examples of {total} tokens (lengths {quote(lengths)}) do not fit "
                f"into a static row of tokens={self.tokens} and max_examples={self.max_examples}; "
                "pack them with pack_lengths(lengths, capacity), or raise the two."
            )
        return self.tokens - total

    def _runs(self, pad: int) -> list[int]:
        """Padding as examples of its own; in a static row none is longer than ``max_length``."""
        if not pad:
            return []
        longest = self.max_length if self.tokens is not None and self.max_length else pad
        whole, rest = divmod(pad, longest)
        return [longest] * whole + ([rest] if rest else [])

    def _varlen(self, spans: list[int]) -> Batch:
        cu = torch.zeros(len(spans) + 1, dtype=torch.int32)
        cu[1:] = torch.tensor(spans).cumsum(0)
        longest = max(spans)
        if self.tokens is not None:
            assert self.max_examples is not None
            entries = self.max_examples + 1 + len(self._runs(self.tokens))
            cu = torch.cat([cu, cu.new_full((entries - len(cu),), self.tokens)])
            longest = self.max_length or self.tokens
        varlen: Batch = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu.clone()}
        varlen["max_length_q"] = varlen["max_length_k"] = longest
        return varlen


def _kind(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return f"a {type(value).__name__}" + ("" if shape is None else f" of shape {tuple(shape)}")


def rows_of(batch: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of a padded batch as examples, padding taken out by ``attention_mask``.

    Args:
        batch: another collator's ``(rows, tokens)`` tensors, or ``(rows,)``.

    Raises:
        PackingError: no ``input_ids``, or more than one row and no ``attention_mask``.
    """
    if "input_ids" not in batch:
        raise PackingError(
            f"the inner collator gave no input_ids but {sorted(batch)}; give one whose batches "
            "have input_ids, attention_mask and labels of shape (rows, tokens)."
        )
    ids = torch.as_tensor(batch["input_ids"])
    if ids.dim() != 2:
        raise PackingError(
            f"the inner collator gave input_ids of shape {tuple(ids.shape)}, not (rows, tokens); "
            "give one that pads its examples into rows."
        )
    if batch.get("attention_mask") is None and len(ids) > 1:
        raise PackingError(
            f"the inner collator gave {len(ids)} rows without attention_mask: which tokens are "
            "padding cannot be known (a padding id may also be a real token). Let it return the "
            "mask."
        )
    rows: list[dict[str, Any]] = []
    for at in range(len(ids)):
        row = {}
        for key, value in batch.items():
            if value is None:
                continue
            if not hasattr(value, "shape") or not len(value.shape) or len(value) != len(ids):
                if key == "position_ids":
                    continue  # of all rows, or of none
                raise PackingError(
                    f"the inner collator gave {key!r} as {_kind(value)}, not one entry for each of "
                    f"its {len(ids)} rows, so it cannot be laid end to end; let it leave {key!r} "
                    "out."
                )
            row[key] = value[at]
        rows.append(row)
    return rows


def _numbers(value: Any, key: str, at: int) -> torch.Tensor:
    """A feature's value as a tensor, int64 or of its own float type, without gradient."""
    tensor = _tensor(value)
    if tensor is None or tensor.is_complex():
        raise PackingError(
            f"{key!r} of example {at} is {type(value).__name__} {str(value)[:60]!r}; only numbers "
            "(bool, int64, float) can be carried into a packed row. Remove the column "
            "(remove_unused_columns)."
        )
    if not tensor.numel():
        return tensor.to(torch.int64)
    return tensor.detach() if tensor.is_floating_point() else tensor.to(torch.int64)


def _tensor(value: Any) -> Optional[torch.Tensor]:
    """A tensor of the value, or None; arrays and series of any layout, byte order and index."""
    if isinstance(value, (str, bytes)):
        return None
    try:
        if isinstance(value, torch.Tensor) or not hasattr(value, "__array__"):
            return torch.as_tensor(value)
        import numpy as np

        array = np.asarray(value)
        if array.dtype.kind == "f":
            return torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))
        whole = array.dtype.kind in "biu"
        if whole and array.dtype == np.uint64 and array.size and int(array.max()) >= 2**63:
            return None
        return torch.from_numpy(array.astype(np.int64)) if whole else None
    except (TypeError, ValueError, RuntimeError):
        return None


def _numpy(tensor: torch.Tensor) -> Any:
    if tensor.dtype == torch.bfloat16:  # numpy has none
        tensor = tensor.float()
    return tensor.numpy()


def _row(parts: list[torch.Tensor], pad: int, value: float) -> torch.Tensor:
    """``(1, tokens)``: the parts end to end, and ``pad`` times ``value``."""
    joined = torch.cat(parts)
    return torch.cat([joined, joined.new_full((pad,), value)])[None] if pad else joined[None]
