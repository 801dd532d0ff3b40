"""``DataCollatorForCompletionOnlyLM``: the loss on the answers alone, padded or packed.

Arguments and meaning follow TRL's collator of that name (0.7 to 0.19, removed since).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Optional, Union

import torch

from ..errors import PackingError
from ..tensors import quote
from .collators import Batch, DataCollatorWithFlattening

Template = Union[str, Sequence[int]]


class DataCollatorForCompletionOnlyLM:
    """Finds the answers by the text before them, and leaves only them as targets.

    With ``response_template`` alone an example is a prompt and one answer: everything up to the end
    of the template's last occurrence is masked. With ``instruction_template`` too, an example is a
    conversation: each span from an instruction template to the end of the response template that
    follows it is masked, and so is what comes before the first answer.

    Args:
        response_template: the text before each answer, or its token ids (safer: many tokenizers
            give a text other ids in the middle of a sentence).
        instruction_template: the text, or the ids, before each turn of the user.
        tokenizer: turns texts into ids, and pads when ``padding_free`` is false.
        mlm: not possible with answers alone; must be false.
        ignore_index: the label of what is no target.
        padding_free: one packed row, as :class:`DataCollatorWithFlattening` makes it; else a padded
            batch.
        on_missing: "error", or "ignore" to leave an example without a template with no target.
        flattening: further arguments for :class:`DataCollatorWithFlattening`.

    Raises:
        ValueError: contradictory arguments.
        PackingError: at a call, for an example in which the template does not occur.
    """

    def __init__(
        self,
        response_template: Template,
        instruction_template: Optional[Template] = None,
        *,
        tokenizer: Any = None,
        processing_class: Any = None,
        mlm: bool = False,
        ignore_index: int = -100,
        padding_free: bool = False,
        on_missing: str = "error",
        **flattening: Any,
    ) -> None:
        tokenizer = tokenizer if tokenizer is not None else processing_class
        if mlm:
            raise ValueError("mlm=True cannot go with completion-only labels; pass mlm=False.")
        if on_missing not in ("error", "ignore"):
            raise ValueError(f'on_missing must be "error" or "ignore", got {on_missing!r}.')
        if flattening and not padding_free:
            raise ValueError(
                f"{sorted(flattening)} belong to packed rows; pass padding_free=True with them."
            )
        if padding_free and ignore_index != -100:
            raise ValueError(
                f"ignore_index={ignore_index} cannot go with padding_free=True, whose rows mark "
                "with -100 what is no target; leave ignore_index out."
            )
        self.tokenizer = tokenizer
        self.response_ids = self._ids(response_template, "response_template")
        self.instruction_ids = (
            None
            if instruction_template is None
            else self._ids(instruction_template, "instruction_template")
        )
        self.response_template = response_template
        self.instruction_template = instruction_template
        self.ignore_index = ignore_index
        self.padding_free = padding_free
        self.on_missing = on_missing
        if not padding_free and tokenizer is None:
            raise ValueError(
                "padding_free=False pads with the tokenizer, got tokenizer=None; give it, or "
                "padding_free=True."
            )
        pad = getattr(tokenizer, "pad_token_id", None)
        if padding_free and pad is not None:
            flattening.setdefault("pad_token_id", pad)
        self.flattening = DataCollatorWithFlattening(**flattening) if padding_free else None

    def _ids(self, template: Template, name: str) -> list[int]:
        if isinstance(template, str):
            if self.tokenizer is None:
                raise ValueError(
                    f"{name}={template!r} is text and needs a tokenizer, got None; give "
                    "tokenizer=..., or the template's ids."
                )
            ids = self.tokenizer.encode(template, add_special_tokens=False)
        else:
            ids = [int(i) for i in template]
        if not ids:
            raise ValueError(f"{name}={template!r} has no tokens; give the text before an answer.")
        return list(ids)

    def __call__(self, features: Sequence[Union[Mapping[str, Any], Sequence[int]]]) -> Batch:
        """A packed row or a padded batch with ``labels`` on the answers alone."""
        made = [self._labelled(feature, at) for at, feature in enumerate(features)]
        if self.flattening is not None:
            return self.flattening(made)
        bare = [{k: v for k, v in feature.items() if k != "labels"} for feature in made]
        batch: Batch = dict(self.tokenizer.pad(bare, return_tensors="pt"))
        labels = torch.full_like(batch["input_ids"], self.ignore_index)
        left = getattr(self.tokenizer, "padding_side", "right") == "left"
        for row, feature in zip(labels, made):
            first = len(row) - len(feature["labels"]) if left else 0
            row[first : first + len(feature["labels"])] = torch.as_tensor(feature["labels"])
        batch["labels"] = labels
        return batch

    def _labelled(self, feature: Union[Mapping[str, Any], Sequence[int]], at: int) -> Batch:
        given: Batch = (
            dict(feature) if isinstance(feature, Mapping) else {"input_ids": list(feature)}
        )
        if "input_ids" not in given:
            raise PackingError(
                f"example {at} has no input_ids; its keys are {sorted(given)}. Tokenize the data "
                "set first."
            )
        ids = torch.as_tensor(given["input_ids"]).tolist()
        given["input_ids"] = ids
        given["labels"] = self._labels(ids, at)
        mask = given.get("attention_mask")
        if mask is not None:
            given["labels"] = [
                label if real else self.ignore_index
                for label, real in zip(given["labels"], torch.as_tensor(mask).tolist())
            ]
        return given

    def _labels(self, ids: list[int], at: int) -> list[int]:
        answers = [i + len(self.response_ids) for i in find(ids, self.response_ids)]
        missing: Optional[tuple[str, Any]] = None
        if not answers:
            missing = ("response_template", self.response_template)
        turns = None
        if self.instruction_ids is not None:
            turns = find(ids, self.instruction_ids)
            if not turns and missing is None:
                missing = ("instruction_template", self.instruction_template)
        if missing is not None:
            if self.on_missing == "ignore":
                return [self.ignore_index] * len(ids)
            name, template = missing
            why = "it would train on nothing" if not answers else "its turns cannot be told apart"
            raise PackingError(
                f"{name}={template!r} does not occur in example {at} (its ids start with "
                f"{quote(ids)}): {why}. Give the template as the ids that the "
                'tokenizer makes of it in the middle of a text, shorten less, or pass on_missing="'
                'ignore".'
            )
        if turns is None:
            return [self.ignore_index] * answers[-1] + ids[answers[-1] :]
        labels = list(ids)
        for start, end in masked_spans(turns, answers, len(ids)):
            labels[start:end] = [self.ignore_index] * (end - start)
        return labels


def find(ids: Sequence[int], template: Sequence[int]) -> list[int]:
    """Where ``template`` starts in ``ids``."""
    width, wanted = len(template), list(template)
    return [i for i in range(len(ids) - width + 1) if list(ids[i : i + width]) == wanted]


def masked_spans(turns: list[int], answers: list[int], length: int) -> list[tuple[int, int]]:
    """What is no target of a conversation: from each turn of the user to the next answer.

    Args:
        turns: where the instruction templates start, in order.
        answers: where the answers start (the response templates end), in order.
        length: tokens of the example.
    """
    spans = [(0, answers[0])]
    for turn in turns:
        following = [a for a in answers if a > turn]
        spans.append((turn, following[0] if following else length))
    return spans
