"""TRL's ``SFTTrainer`` of several eras, with our collator or with TRL's own and our patch."""

from __future__ import annotations

import inspect
import tempfile
from pathlib import Path
from typing import Any

from fa2_pack_patch.callback import Fa2PackPatchCallback
from fa2_pack_patch.data import DataCollatorWithFlattening

from . import parts
from .cases import BAR


def _tokenizer() -> Any:
    """A tokenizer of whole words, since SFTTrainer wants one even for tokenized data."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2}
    words.update({f"w{n}": n for n in range(3, parts.VOCABULARY)})
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def _train(collator: Any, callbacks: list[Any], **more: Any) -> Any:
    import datasets
    import trl

    accepted = inspect.signature(trl.SFTTrainer.__init__).parameters
    given: dict[str, Any] = {
        "model": parts.model(),
        "train_dataset": datasets.Dataset.from_list(parts.examples(48)),
        "data_collator": collator,
        "callbacks": callbacks,
    }
    config: Any = None
    if "dataset_text_field" in accepted:  # before SFTConfig took these
        given.update(
            tokenizer=_tokenizer(),
            dataset_text_field="text",
            dataset_kwargs={"skip_prepare_dataset": True},
            max_seq_length=64,
        )
    else:
        config = trl.SFTConfig  # new ones take bfloat16 unless told otherwise
        more["bf16"] = False
        more["dataset_kwargs"] = {"skip_prepare_dataset": True}
        given["processing_class"] = _tokenizer()
    with tempfile.TemporaryDirectory() as out:
        args = parts.arguments(Path(out), config, **more)
        trainer = parts.recording(trl.SFTTrainer)(args=args, **given)
        trainer.train()
    return trainer


def _compare(padded: Any, packed: Any) -> dict[str, Any]:
    import trl

    logs = [line for line in packed.state.log_history if "loss" in line]
    result = {
        "trl": trl.__version__,
        "padded": padded.steps(),
        "packed": packed.steps(),
        "difference": parts.largest(padded.steps(), packed.steps()),
        "weights": parts.distance(padded.model, packed.model),
        "packed_share": [line.get("packed_share") for line in logs],
    }
    assert result["difference"] < BAR and result["weights"] < 1e-3, result
    assert abs(result["packed"][0] - result["packed"][-1]) > 1e-3, result
    assert result["packed_share"] == [1.0] * len(logs) and logs, result
    return result


def sft() -> dict[str, Any]:
    """SFTTrainer with a padding collator, and with ours."""
    padded = _train(parts.padded, [])
    return _compare(padded, _train(DataCollatorWithFlattening(), [Fa2PackPatchCallback()]))


def sft_padding_free() -> dict[str, Any]:
    """TRL's own ``padding_free=True`` on an sdpa model, made right by the patch alone."""
    padded = _train(None, [], max_length=None)
    packed = _train(None, [Fa2PackPatchCallback()], max_length=None, padding_free=True)
    return _compare(padded, packed)
