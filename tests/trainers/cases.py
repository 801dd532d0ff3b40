"""The runs. Each case returns numbers and raises ``AssertionError`` where a bar is missed."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from packaging.version import Version

from fa2_pack_patch import PackedLayout, apply
from fa2_pack_patch.callback import Fa2PackPatchCallback
from fa2_pack_patch.data import (
    DataCollatorWithFlattening,
    PackedBatchSampler,
    examples_metrics,
    per_example_loss,
)

from . import parts

#: Loss of a step, padded against packed, fp32.
BAR = 1e-5


def curve() -> dict[str, Any]:
    """Padded and packed runs with gradient accumulation: the same loss in each step."""
    from transformers import Trainer

    data, trainers, collators = parts.examples(64), {}, {}
    for name, inner in (("padded", parts.padded), ("packed", DataCollatorWithFlattening())):
        collators[name] = parts.Remembered(inner)
        with tempfile.TemporaryDirectory() as out:
            callbacks = [Fa2PackPatchCallback()] if name == "packed" else []
            trainer = parts.recording(Trainer)(
                model=parts.model(),
                args=parts.arguments(Path(out)),
                data_collator=collators[name],
                train_dataset=data,
                callbacks=callbacks,
            )
            trainer.train()
            trainers[name] = trainer
    padded, packed = trainers["padded"].steps(), trainers["packed"].steps()
    per_token = parts.release() >= Version("4.46")
    first = collators["packed"].micro[:2]
    assert first == collators["padded"].micro[:2], "the two runs saw other examples"
    alone = parts.loss_alone(parts.model(), first, per_token=per_token)
    logs = [line for line in trainers["packed"].state.log_history if "loss" in line]
    result = {
        "padded": padded,
        "packed": packed,
        "difference": parts.largest(padded, packed),
        "first_step_alone": alone,
        "weights": parts.distance(trainers["padded"].model, trainers["packed"].model),
        "packed_share": [line.get("packed_share") for line in logs],
        "padding_saved": [line.get("padding_saved") for line in logs],
    }
    assert result["difference"] < BAR, result
    assert abs(packed[0] - alone) < BAR, result
    assert abs(padded[0] - padded[-1]) > 1e-3, result  # it did train
    assert result["weights"] < 1e-3, result
    assert result["packed_share"] == [1.0] * 4, result
    assert all(0.1 < saved < 0.9 for saved in result["padding_saved"]), result
    assert all(line["packed_tokens_per_second"] > 0 for line in logs), result
    return result


def _measures(prediction: Any) -> dict[str, float]:
    """Token accuracy of each example, averaged over examples: rows would give another number."""
    guesses, labels = prediction.predictions[:, :-1], prediction.label_ids[:, 1:]
    targets = labels != -100
    right = (guesses == labels) & targets
    share = right.sum(1) / np.maximum(targets.sum(1), 1)
    return {"examples": len(labels), "targets": int(targets.sum()), "accuracy": float(share.mean())}


def evaluation() -> dict[str, Any]:
    """Evaluation on padded and on flattened batches gives the same loss and metrics."""
    from transformers import Trainer

    data, results = parts.examples(10, seed=8), {}
    network = parts.model(2)
    with torch.no_grad():  # guesses that are right now and then
        network.lm_head.weight.copy_(network.get_input_embeddings().weight)
    for feature in data:
        feature["labels"][1::3] = feature["input_ids"][:-1][::3][: len(feature["labels"][1::3])]
    for name in ("padded", "packed", "packed and padded to 16"):
        metrics = examples_metrics(
            _measures, lambda logits, labels: logits.argmax(-1), padded="16" in name
        )
        more: dict[str, Any] = {"compute_metrics": _measures}
        more["preprocess_logits_for_metrics"] = lambda logits, labels: logits.argmax(-1)
        collator: Any = parts.padded
        names = None
        if name != "padded":
            apply(network)
            collator = DataCollatorWithFlattening(pad_to_multiple_of=16 if "16" in name else None)
            more = {
                "compute_metrics": metrics,
                "preprocess_logits_for_metrics": metrics.preprocess_logits_for_metrics,
            }
            names = metrics.label_names
        with tempfile.TemporaryDirectory() as out:
            args = parts.arguments(Path(out), per_device_eval_batch_size=5, label_names=names)
            trainer = Trainer(
                model=network, args=args, data_collator=collator, eval_dataset=data, **more
            )
            found = trainer.evaluate()
        results[name] = {k: found[f"eval_{k}"] for k in ("loss", "examples", "targets", "accuracy")}
    first = results["padded"]
    assert first["examples"] == 10 and 0.05 < first["accuracy"] < 1, results
    for other in results.values():
        assert abs(other["loss"] - first["loss"]) < BAR, results
        assert {**other, "loss": 0} == {**first, "loss": 0}, results
    return results


def resume() -> dict[str, Any]:
    """Four steps, and two steps with a checkpoint plus two more after it, are the same run."""
    from transformers import Trainer

    data = parts.examples(64)

    def trainer(out: str) -> Any:
        args = parts.arguments(Path(out), save_strategy="steps", save_steps=2)
        return parts.recording(Trainer)(
            model=parts.model(),
            args=args,
            data_collator=DataCollatorWithFlattening(),
            train_dataset=data,
            callbacks=[Fa2PackPatchCallback()],
        )

    with tempfile.TemporaryDirectory() as out:
        whole = trainer(out)
        whole.train()
        second = trainer(out)
        second.train(resume_from_checkpoint=str(Path(out) / "checkpoint-2"))
    result = {
        "whole": whole.steps(),
        "resumed": second.steps(),
        "difference": parts.largest(whole.steps()[2:], second.steps()),
        "weights": parts.distance(whole.model, second.model),
    }
    assert result["difference"] < BAR and result["weights"] < BAR, result
    return result


def static() -> dict[str, Any]:
    """Batches of a fixed shape, as for a compiled step: the padded run's losses still."""
    from transformers import Trainer

    data, curves = parts.examples(64), {}
    fixed = DataCollatorWithFlattening(tokens=128, max_examples=6, return_flash_attn_kwargs=True)
    for name, collator in (("padded", parts.padded), ("static", fixed)):
        network = parts.model()
        if name == "static":
            apply(network)
        with tempfile.TemporaryDirectory() as out:
            trainer = parts.recording(Trainer)(
                model=network,
                args=parts.arguments(Path(out)),
                data_collator=collator,
                train_dataset=data,
            )
            trainer.train()
        curves[name] = trainer.steps()
    result = {**curves, "difference": parts.largest(curves["padded"], curves["static"])}
    assert result["difference"] < BAR, result
    return result


def budget() -> dict[str, Any]:
    """A token budget instead of a batch size: every example once an epoch, resumed in the middle,
    and the losses are those of the same examples padded."""
    from torch.utils.data import DataLoader
    from transformers import Trainer

    data = parts.examples(60)
    sizes = [len(example["input_ids"]) for example in data]

    class Budget(Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            sampler = PackedBatchSampler(
                sizes, 96, seed=self.args.seed, multiple_of=self.args.world_size
            )
            loader = DataLoader(
                self.train_dataset, batch_sampler=sampler, collate_fn=self.data_collator
            )
            return self.accelerator.prepare(loader)

    runs, seen = {}, {}
    with tempfile.TemporaryDirectory() as out:
        for name, inner, again in (
            ("padded", parts.padded, False),
            ("packed", DataCollatorWithFlattening(), False),
            ("resumed", DataCollatorWithFlattening(), True),
        ):
            network = parts.model()
            if name != "padded":
                apply(network)
            seen[name] = parts.Remembered(inner)
            args = parts.arguments(
                Path(out) / ("padded" if name == "padded" else "packed"),
                max_steps=-1,
                num_train_epochs=2,
                gradient_accumulation_steps=1,
                save_strategy="steps",
                save_steps=5,
            )
            runs[name] = parts.recording(Budget)(
                model=network, args=args, data_collator=seen[name], train_dataset=data
            )
            folder = str(Path(out) / "packed" / "checkpoint-5")
            runs[name].train(resume_from_checkpoint=folder if again else None)
    padded, packed = runs["padded"].steps(), runs["packed"].steps()
    epoch = len(packed) // 2
    result = {
        "steps": len(packed),
        "difference": parts.largest(padded, packed),
        "resumed": parts.largest(packed[5:], runs["resumed"].steps()),
        "weights": parts.distance(runs["packed"].model, runs["resumed"].model),
    }
    for at in (0, epoch):
        examples = [str(f) for micro in seen["packed"].micro[at : at + epoch] for f in micro]
        assert sorted(examples) == sorted(map(str, data)), f"epoch at {at}: not every example once"
    assert seen["packed"].micro[:epoch] != seen["packed"].micro[epoch : 2 * epoch], result
    assert epoch > 6 and result["difference"] < BAR, result
    assert result["resumed"] < BAR and result["weights"] < BAR, result
    return result


def per_example() -> dict[str, Any]:
    """Every example weighs the same (docs/packing.md): padded or packed, in one batch or in two."""
    from transformers import Trainer

    # 4.46 and 4.47 add the gradients of micro-batches up, and 4.48 takes their mean again.
    adds_up = Version("4.46") <= parts.release() < Version("4.48")

    class PerExample(Trainer):  # type: ignore[misc]
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            self.model_accepts_loss_kwargs = False

        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any
        ) -> Any:
            labels = inputs["labels"]
            outputs = model(**{k: v for k, v in inputs.items() if k != "labels"})
            losses = per_example_loss(outputs.logits, labels, PackedLayout.from_batch(inputs))
            loss = losses.per_example()
            if adds_up:
                loss = loss / self.args.gradient_accumulation_steps
            return (loss, outputs) if return_outputs else loss

    runs = {}
    for name, collator, size in (
        ("padded", parts.padded, 4),
        ("packed", DataCollatorWithFlattening(), 4),
        ("one batch", DataCollatorWithFlattening(), 8),
    ):
        network = parts.model()
        if name != "padded":
            apply(network)
        with tempfile.TemporaryDirectory() as out:
            args = parts.arguments(
                Path(out), per_device_train_batch_size=size, gradient_accumulation_steps=8 // size
            )
            runs[name] = parts.recording(PerExample)(
                model=network, args=args, data_collator=collator, train_dataset=parts.examples(64)
            )
            runs[name].train()
    steps = {name: run.steps() for name, run in runs.items()}
    if adds_up:  # the loss that it reports is divided once more
        for name, run in runs.items():
            steps[name] = [x * run.args.gradient_accumulation_steps for x in steps[name]]
    result = {
        **steps,
        "difference": parts.largest(steps["padded"], steps["packed"]),
        "difference of one batch": parts.largest(steps["packed"], steps["one batch"]),
        "weights": parts.distance(runs["packed"].model, runs["one batch"].model),
    }
    assert result["difference"] < BAR and result["difference of one batch"] < BAR, result
    assert result["weights"] < 1e-3, result
    return result


def accelerate() -> dict[str, Any]:
    """A plain loop with ``Accelerator``: per-token weighting by hand."""
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    data, curves = parts.examples(32), {}
    for name, collator in (("padded", parts.padded), ("packed", DataCollatorWithFlattening())):
        network = parts.model()
        if name == "packed":
            apply(network)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
        loader = DataLoader(data, batch_size=4, collate_fn=collator)
        network, optimizer, loader = accelerator.prepare(network, optimizer, loader)
        losses = []
        for batch in loader:
            with accelerator.accumulate(network):
                loss = network(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(float(loss.detach()))
        curves[name] = losses
    result = {**curves, "difference": parts.largest(curves["padded"], curves["packed"])}
    assert len(curves["packed"]) == 8 and result["difference"] < BAR, result
    return result


def lightning() -> dict[str, Any]:
    """PyTorch Lightning: the batch goes to the model as it is."""
    import pytorch_lightning as pl
    from torch.utils.data import DataLoader

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self, packed: bool) -> None:
            super().__init__()
            self.network = parts.model()
            self.losses: list[float] = []
            if packed:
                apply(self.network)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss: torch.Tensor = self.network(**batch).loss
            self.losses.append(float(loss.detach()))
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    curves = {}
    for name, collator in (("padded", parts.padded), ("packed", DataCollatorWithFlattening())):
        module = Module(name == "packed")
        loader = DataLoader(parts.examples(32), batch_size=4, collate_fn=collator)
        with tempfile.TemporaryDirectory() as out:
            trainer = pl.Trainer(
                default_root_dir=out,
                accelerator="cpu",
                max_epochs=1,
                accumulate_grad_batches=2,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            trainer.fit(module, loader)
        curves[name] = module.losses
    result = {**curves, "difference": parts.largest(curves["padded"], curves["packed"])}
    assert len(curves["packed"]) == 8 and result["difference"] < BAR, result
    return result
