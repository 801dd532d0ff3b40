"""Small training runs with this environment's Trainer; other releases: ``tests/trainers``."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

import fa2_pack_patch
from fa2_pack_patch import PackingError
from fa2_pack_patch.data import DataCollatorWithFlattening
from tests.trainers import cases, parts, releases, run


def test_loss_of_each_step_is_the_padded_run_s() -> None:
    cases.curve()


def test_evaluation_on_flattened_batches() -> None:
    cases.evaluation()


def test_resumed_is_uninterrupted() -> None:
    cases.resume()


def test_a_token_budget() -> None:
    cases.budget()


def test_batches_of_a_fixed_shape() -> None:
    cases.static()


def test_a_plain_loop_with_accelerate() -> None:
    cases.accelerate()


def test_examples_can_weigh_the_same() -> None:
    cases.per_example()


def raw(features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A flattened batch whose labels are the ids, each example's first one too."""
    ids = [torch.as_tensor(f["input_ids"]) for f in features]
    row = torch.cat(ids)[None]
    positions = torch.cat([torch.arange(len(one)) for one in ids])[None]
    return {"input_ids": row, "labels": row.clone(), "position_ids": positions}


@pytest.mark.skipif(parts.release() < Version("4.46"), reason="Trainer counts no targets there")
def test_first_labels_that_are_not_masked(tmp_path: Any) -> None:
    """They are no targets, but Trainer counts them: what docs/packing.md says of such batches."""
    data = [{**f, "labels": f["input_ids"]} for f in parts.examples(8)]
    losses = {}
    for name, collator in {
        "padded": parts.padded,
        "masked": DataCollatorWithFlattening(),
        "raw": raw,
    }.items():
        model = parts.model()
        fa2_pack_patch.apply(model)
        trainer = parts.recording(transformers.Trainer)(
            model=model,
            args=parts.arguments(tmp_path, max_steps=1),
            data_collator=collator,
            train_dataset=data,
        )
        trainer.train()
        losses[name] = trainer.steps()[0]
    alone = parts.loss_alone(parts.model(), [data[:4], data[4:]], per_token=True)
    labels = sum(len(f["labels"]) for f in data)
    targets, rows = labels - len(data), 2
    if parts.release() < Version("5.9"):
        wanted = {"padded": targets / labels, "masked": 1, "raw": targets / labels}
    else:
        wanted = {"padded": 1, "masked": 1, "raw": targets / (labels - rows)}
    for name, share in wanted.items():
        assert losses[name] == pytest.approx(alone * share, abs=cases.BAR), name


def test_the_page_on_packing_runs(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of docs/packing.md, in order, in one namespace."""
    text = (releases.releases.ROOT / "docs" / "packing.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(blocks) == 7
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    names: dict[str, Any] = {"model": parts.model(), "dataset": parts.examples(16)}
    for block in blocks:
        exec(compile(block, "docs/packing.md", "exec"), names)
    lines = [line for line in names["trainer"].state.log_history if "eval_accuracy" in line]
    assert lines[0]["eval_examples"] == 16
    assert names["layout"].examples == 4 and names["padded"].shape[0] == 4


def test_metrics_need_the_label_names(tmp_path: Any) -> None:
    from fa2_pack_patch.data import examples_metrics

    metrics = examples_metrics(cases._measures)
    trainer = transformers.Trainer(
        model=parts.model(),
        args=parts.arguments(tmp_path),
        data_collator=parts.padded,
        eval_dataset=parts.examples(4),
        compute_metrics=metrics,
    )
    with pytest.raises(PackingError, match=r"set TrainingArguments\(label_names="):
        trainer.evaluate()


def test_the_runs_fail_when_examples_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bars are tight enough: positions that go on make one example of each row."""

    class Mixing(DataCollatorWithFlattening):  # type: ignore[misc]
        def __call__(self, *args: Any, **more: Any) -> Any:
            batch = super().__call__(*args, **more)
            batch["position_ids"] = torch.arange(batch["input_ids"].shape[1])[None]
            return batch

    monkeypatch.setattr(cases, "DataCollatorWithFlattening", Mixing)
    monkeypatch.setattr(cases, "Fa2PackPatchCallback", lambda: cases_callback(check_steps=0))
    with pytest.raises(AssertionError):
        cases.curve()


def cases_callback(**options: Any) -> Any:
    from fa2_pack_patch.callback import Fa2PackPatchCallback

    return Fa2PackPatchCallback(**options)


def test_a_failed_case_fails_the_check() -> None:
    assert run.failed({"transformers": "5.0", "a": {"passed": True}, "b": {"passed": False}}) == [
        "b"
    ]
    result = run.one(["nothing"])
    assert run.failed(result) == ["nothing"] and "AttributeError" in result["nothing"]["error"]


def test_every_setup_names_cases_that_exist() -> None:
    import ast

    root = releases.releases.ROOT / "tests" / "trainers"
    names = set()
    for module in ("cases.py", "trl_cases.py"):
        tree = ast.parse((root / module).read_text(encoding="utf-8"))
        names |= {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert {case for setup in releases.SETUPS for case in setup.cases} <= names
