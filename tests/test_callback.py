"""``Fa2PackPatchCallback``: what it applies, counts, logs and refuses."""

from __future__ import annotations

import pickle
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

import fa2_pack_patch
from fa2_pack_patch import PackedLayout, PackingError
from fa2_pack_patch.callback import Fa2PackPatchCallback, counts
from tests.trainers import parts


def trainer(tmp_path: Any, callback: Any, collator: Any = None, **more: Any) -> Any:
    return transformers.Trainer(
        model=parts.model(),
        args=parts.arguments(tmp_path, **more),
        data_collator=collator or flatten,
        train_dataset=parts.examples(64),
        callbacks=[callback],
    )


def flatten(features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """The least that a packed batch needs."""
    ids = [x for f in features for x in f["input_ids"]]
    labels = [x for f in features for x in f["labels"]]
    positions = [n for f in features for n in range(len(f["input_ids"]))]
    return {
        "input_ids": torch.tensor([ids]),
        "labels": torch.tensor([labels]),
        "position_ids": torch.tensor([positions]),
    }


def step(callback: Any, model: torch.nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
    """One forward and one log line, without a Trainer."""
    model(**batch)
    logs: dict[str, Any] = {"loss": 1.0}
    state = SimpleNamespace(log_history=[{"step": 1}], global_step=1)
    callback.on_log(None, state, None, logs=logs)
    assert state.log_history[0].items() >= {k: logs[k] for k in logs if k != "loss"}.items()
    return logs


@pytest.fixture
def begun() -> Any:
    callback, model = Fa2PackPatchCallback(), parts.model()
    model.train()
    callback.on_train_begin(None, None, None, model=model)
    return callback, model


def test_importing_the_package_imports_no_transformers() -> None:
    code = "import sys, fa2_pack_patch.callback; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert issubclass(Fa2PackPatchCallback, transformers.TrainerCallback)
    assert pickle.loads(pickle.dumps(Fa2PackPatchCallback)) is Fa2PackPatchCallback


def test_counts_of_a_packed_forward(begun: Any) -> None:
    callback, model = begun
    batch = flatten(parts.examples(5))
    lengths = [len(f["input_ids"]) for f in parts.examples(5)]
    logs = step(callback, model, batch)
    assert logs["packed_share"] == 1.0
    assert logs["padding_saved"] == round(1 - sum(lengths) / (5 * max(lengths)), 4)
    assert logs["packed_tokens_per_second"] > 0


def test_padding_in_the_row_is_not_saved(begun: Any) -> None:
    callback, model = begun
    batch = flatten([{"input_ids": [5] * n, "labels": [5] * n} for n in (2, 6, 4)])
    mask = torch.tensor([[1] * 8 + [0] * 4])
    logs = step(callback, model, {**batch, "attention_mask": mask})
    assert logs["padding_saved"] == 0.0  # 2 and 6 padded are 12 tokens, and so is the row


def test_padded_forwards_count_as_not_packed(begun: Any) -> None:
    callback, model = begun
    three = sum(len(f["input_ids"]) for f in parts.examples(3))
    model(**flatten(parts.examples(3)))
    model(**parts.padded(parts.examples(3)))
    assert int(callback._seen.real) == 2 * three  # padding is not counted
    logs = step(callback, model, parts.padded(parts.examples(3)))
    assert logs["packed_share"] == round(1 / 3, 4)


def test_evaluation_is_not_counted(begun: Any) -> None:
    callback, model = begun
    model.eval()
    model(**parts.padded(parts.examples(3)))
    model.train()
    assert step(callback, model, flatten(parts.examples(3)))["packed_share"] == 1.0
    logs = {"eval_loss": 1.0}
    callback.on_log(None, SimpleNamespace(log_history=[], global_step=1), None, logs=logs)
    assert logs == {"eval_loss": 1.0}


def test_training_that_never_packs_is_an_error(tmp_path: Any) -> None:
    run = trainer(tmp_path, Fa2PackPatchCallback(), parts.padded)
    with pytest.raises(PackingError, match=r"first 2 training steps was packed.*shape \(4, \d+\)"):
        run.train()
    trainer(tmp_path, Fa2PackPatchCallback(check_steps=0), parts.padded, max_steps=2).train()


def test_dropped_positions_are_an_error(tmp_path: Any) -> None:
    def without(features: Any) -> Any:
        batch = flatten(features)
        del batch["position_ids"]
        return batch

    with pytest.raises(PackingError, match="Use a data collator that flattens"):
        trainer(tmp_path, Fa2PackPatchCallback(), without).train()


def test_applies_once_and_reverts_on_request(tmp_path: Any) -> None:
    stays = trainer(tmp_path, Fa2PackPatchCallback(), max_steps=1)
    before = fa2_pack_patch.apply(stays.model)
    stays.train()
    assert fa2_pack_patch.is_applied(stays.model)
    assert fa2_pack_patch.apply(stays.model) is before
    hooks = len(base(stays.model)._forward_hooks)
    stays.train()
    assert len(base(stays.model)._forward_hooks) == hooks  # ours is gone after training

    goes = trainer(tmp_path, Fa2PackPatchCallback(revert_at_end=True), max_steps=1)
    goes.train()
    assert not fa2_pack_patch.is_applied(goes.model)


def base(model: Any) -> Any:
    return model.model


def test_what_was_patched_before_is_not_reverted(tmp_path: Any) -> None:
    run = trainer(tmp_path, Fa2PackPatchCallback(revert_at_end=True), max_steps=1)
    fa2_pack_patch.apply(run.model)
    run.train()
    assert fa2_pack_patch.is_applied(run.model)


def test_put_first_lets_the_others_see_the_values(tmp_path: Any) -> None:
    seen: list[dict[str, Any]] = []

    class Reporter(transformers.TrainerCallback):  # type: ignore[misc]
        def on_log(
            self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any
        ) -> None:
            seen.append(dict(logs))

    callback = Fa2PackPatchCallback()
    run = trainer(tmp_path, callback, max_steps=1)
    run.callback_handler.callbacks.insert(0, Reporter())
    callback.put_first(run)
    run.train()
    assert seen[0]["packed_share"] == 1.0
    with pytest.raises(PackingError, match="not a callback of the trainer"):
        Fa2PackPatchCallback().put_first(run)


def test_refuses_a_negative_check() -> None:
    with pytest.raises(PackingError, match="got -1"):
        Fa2PackPatchCallback(check_steps=-1)


def test_counts_without_reading_the_device() -> None:
    """A layout whose lengths stay on the device: a full tail, and padding by the mask."""
    lengths = PackedLayout.from_lengths([3, 5, 2], padding=[False, False, True])
    there = SimpleNamespace(cu_seqlens=torch.tensor([0, 3, 8, 10, 10, 10]), tokens=10)
    mask = torch.tensor([[1] * 8 + [0] * 2])
    assert counts(lengths, None) == (8, 10)
    assert [int(x) for x in counts(there, mask)] == [8, 10]
    assert [int(x) for x in counts(there, None)] == [10, 15]


def test_compiled_forwards_are_not_taken_for_unpacked_ones(begun: Any) -> None:
    callback, model = begun
    compiled = torch.compile(model, backend="eager")
    compiled(**flatten(parts.examples(4)))
    for _ in range(callback.check_steps):
        callback.on_step_end(None, None, None)


def test_evaluation_before_training_is_packed(tmp_path: Any) -> None:
    """``Trainer.evaluate`` alone fires no ``on_train_begin``."""

    def loss(callbacks: list[Any], model: Any) -> float:
        found = transformers.Trainer(
            model=model,
            args=parts.arguments(tmp_path, per_device_eval_batch_size=4),
            data_collator=flatten,
            eval_dataset=parts.examples(8),
            callbacks=callbacks,
        ).evaluate()
        return float(found["eval_loss"])

    patched = parts.model()
    fa2_pack_patch.apply(patched)
    assert loss([Fa2PackPatchCallback()], parts.model()) == loss([], patched)


def test_revert_at_end_after_a_first_try() -> None:
    """``auto_find_batch_size`` begins training again after an error."""
    callback, model = Fa2PackPatchCallback(revert_at_end=True), parts.model()
    for _ in range(2):
        callback.on_train_begin(None, None, None, model=model)
    callback.on_train_end(None, None, None, model=model)
    assert not fa2_pack_patch.is_applied(model)
