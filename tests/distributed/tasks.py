"""What a process does; each function is run on every rank, and returns what this rank saw."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import fa2_pack_patch
from fa2_pack_patch import hooks
from fa2_pack_patch.data import (
    DataCollatorWithFlattening,
    DistributedPackedBatchSampler,
    PackedBatchSampler,
)
from fa2_pack_patch.kernels import sdpa
from fa2_pack_patch.probe import Probe
from tests.trainers import parts as trainers

from . import parts
from .wrappers import WRAPPERS, Ddp, checkpoint, name_of


@dataclass(frozen=True)
class Case:
    """One short training run.

    Attributes:
        wrapper: a key of :data:`tests.distributed.wrappers.WRAPPERS`.
        family: a key of :data:`tests.matrix.models.FAMILIES`.
        checkpoint: "none", or how activations are checkpointed.
        apply: "before" or "after" wrapping, or "never", which also leaves positions out.
        backward: "each" micro-batch, "late" (gradients are exchanged with the last one only) or
            "once" (all forwards of a step come before the backward).
        proof: ``verify`` before the first step, and where each has its gradients.
    """

    wrapper: str
    family: str = "llama"
    checkpoint: str = "none"
    apply: str = "before"
    backward: str = "each"
    proof: bool = False

    def __str__(self) -> str:
        rest = [self.checkpoint, f"apply {self.apply}", f"backward {self.backward}"]
        rest += ["proof"] if self.proof else []
        usual = ["none", "apply before", "backward each"]
        return "-".join([self.wrapper, self.family, *(r for r in rest if r not in usual)])

    def job(self) -> tuple[str, dict[str, Any]]:
        """For :func:`tests.distributed.launch.launch`."""
        return "train", asdict(self)


def train(**given: Any) -> dict[str, Any]:
    """The run of a :class:`Case`; whole gradients and weights come from rank 0 alone."""
    case = Case(**given)
    wrapped = _wrapped(case)
    micro_batches = [step[dist.get_rank()] for step in parts.STEPS]
    losses: list[float] = []
    gradients: dict[str, torch.Tensor] = {}
    proofs = [fa2_pack_patch.verify(wrapped.model)] if case.proof else []
    for step in micro_batches:
        loss, found = _step(wrapped, step, case)
        if case.proof:
            proofs.append(fa2_pack_patch.verify(wrapped.model))
        losses.append(loss)
        gradients = gradients or found
        wrapped.step()
    weights = wrapped.weights()
    kept = dist.get_rank() == 0
    return {
        "losses": losses,
        "gradients": gradients if kept else None,
        "weights": weights if kept else None,
        "applied": fa2_pack_patch.is_applied(wrapped.model),
        "proofs": [str(proof) for proof in proofs],
    }


def _wrapped(case: Case) -> Ddp:
    model = parts.build(case.family)
    if case.apply == "before":
        fa2_pack_patch.apply(model, kernel="sdpa")
    checkpoint(model, case.checkpoint)
    wrapped = WRAPPERS[case.wrapper](model, len(parts.STEPS[0][0]))
    if case.apply == "after":
        fa2_pack_patch.apply(wrapped.model, kernel="sdpa")
    return wrapped


def _step(
    wrapped: Ddp, step: Sequence[Sequence[int]], case: Case
) -> tuple[float, dict[str, torch.Tensor]]:
    """Forward and backward of a step's micro-batches; loss and gradients over all ranks."""
    batches = [packed(numbers, positions=case.apply != "never") for numbers in step]
    total = torch.tensor(float(sum(map(parts.targets, step))))
    dist.all_reduce(total)
    kept, gradients = torch.zeros(()), {}
    pending: list[torch.Tensor] = []
    for at, batch in enumerate(batches):
        last = at == len(batches) - 1
        with wrapped.unsynchronized() if case.backward == "late" and not last else nullcontext():
            labels = batch.pop("labels")
            if case.checkpoint == "wrapper":  # a cache would get the recomputed keys once more
                batch["use_cache"] = False
            loss = parts.loss_sum(wrapped.model(**batch).logits, labels)
            kept += loss.detach()
            # Every wrapper takes the mean of the ranks' gradients.
            pending.append(loss * dist.get_world_size() / total)
            if case.backward != "once" or last:
                wrapped.backward(torch.stack(pending).sum())
                pending = []
            if last:
                gradients = wrapped.gradients()
            wrapped.end_micro_batch()
    dist.all_reduce(kept)
    return float(kept / total), gradients


def packed(numbers: Sequence[int], *, positions: bool = True) -> dict[str, Any]:
    """One packed row of these examples."""
    found = DataCollatorWithFlattening()([parts.EXAMPLES[n] for n in numbers])
    if not positions:
        del found["position_ids"]
    return found


def epochs(wrapper: str, capacity: int) -> list[dict[str, Any]]:
    """Two epochs of batches that fill ``capacity`` tokens; the weights stay."""
    wrapped = _wrapped(Case(wrapper))
    loader = _loader(DistributedPackedBatchSampler(_lengths(), capacity))
    return [_epoch(wrapped, loader) for _ in range(2)]


def stalled(wrapper: str, capacity: int) -> None:
    """What uneven ranks do: one is through with its epoch while the other still waits for it."""
    wrapped = _wrapped(Case(wrapper))
    sampler = DistributedPackedBatchSampler(_lengths(), capacity)
    if dist.get_rank() == 0:
        _epoch(wrapped, _loader(list(sampler)[:-1]))
        time.sleep(600)
    _epoch(wrapped, _loader(sampler))


def _lengths() -> list[int]:
    return [len(example["input_ids"]) for example in parts.EXAMPLES]


def _loader(batches: Any) -> Any:
    numbered = [{**example, "number": n} for n, example in enumerate(parts.EXAMPLES)]
    return torch.utils.data.DataLoader(
        numbered,  # type: ignore[arg-type]
        batch_sampler=batches,
        collate_fn=DataCollatorWithFlattening(),
    )


def _epoch(wrapped: Ddp, loader: Any) -> dict[str, Any]:
    """Forward and backward of each batch; which examples it held, and the sum of all losses."""
    held, total = [], 0.0
    for batch in loader:
        held.append(batch.pop("number").tolist())
        labels = batch.pop("labels")
        loss = parts.loss_sum(wrapped.model(**batch).logits, labels)
        wrapped.backward(loss)
        wrapped.optimizer.zero_grad()
        total += float(loss.detach())
    return {"held": held, "loss": total}


def trainer(**arguments: Any) -> dict[str, Any]:
    """Transformers' ``Trainer``, examples in order: its log, each step's loss, the last weights."""
    from transformers import Trainer

    from fa2_pack_patch.callback import Fa2PackPatchCallback

    class InOrder(trainers.recording(Trainer)):  # type: ignore[misc]
        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    with tempfile.TemporaryDirectory() as out:
        made = InOrder(
            model=parts.build("llama"),
            args=trainers.arguments(Path(out), optim="sgd", learning_rate=0.1, **arguments),
            data_collator=DataCollatorWithFlattening(),
            train_dataset=trainers.examples(64),
            callbacks=[Fa2PackPatchCallback(kernel="sdpa")],
        )
        made.train()
    return {
        "processes": made.args.world_size,
        "losses": made.steps(),
        "logged": [line for line in made.state.log_history if "loss" in line],
        "weights": {n: p.detach().clone() for n, p in made.model.named_parameters()},
        "start": {n: p.detach().clone() for n, p in parts.build("llama").named_parameters()},
    }


def accelerated(capacity: int) -> dict[str, Any]:
    """A loop with ``Accelerator``, which shares out the batches itself; one epoch."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = parts.build("llama")
    fa2_pack_patch.apply(model, kernel="sdpa")
    sampler = PackedBatchSampler(_lengths(), capacity, multiple_of=accelerator.num_processes)
    model, loader = accelerator.prepare(model, _loader(sampler))
    held, total = [], 0.0
    for batch in loader:
        held.append(batch.pop("number").tolist())
        labels = batch.pop("labels")
        loss = parts.loss_sum(model(**batch).logits, labels)
        accelerator.backward(loss)
        total += float(loss.detach())
    gradients = {name_of(n): p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"held": held, "loss": total, "gradients": gradients}


def doubted(wrapper: str) -> dict[str, Any]:
    """Proofs that must not pass, or not begin: without packing, with other examples, or one wrong
    rank; and one that passes after them."""
    model = WRAPPERS[wrapper](parts.build("llama"), 1).model
    found = {"unpatched": str(fa2_pack_patch.verify(model))}
    fa2_pack_patch.apply(model, kernel="sdpa")
    lengths = [[3, 4], [2, 2, 2]][dist.get_rank()]
    try:
        report = fa2_pack_patch.verify(model, examples=[list(range(5, 5 + n)) for n in lengths])
        found["others"] = str(report)
    except fa2_pack_patch.PackingError as error:
        found["others"] = str(error)
    if dist.get_rank() == 1:
        found["wrong"], found["undone"] = _wrong(model), _undone(model)
    else:
        found["wrong"], found["undone"] = (str(fa2_pack_patch.verify(model)) for _ in range(2))
    fa2_pack_patch.revert(model)
    fa2_pack_patch.apply(model, kernel="sdpa")
    first = dist.get_rank() == 0
    found["errors"] = str(fa2_pack_patch.verify(model)) if first else _failing(model)
    with torch.set_grad_enabled(first):
        found["one without"] = str(fa2_pack_patch.verify(model))
    found["backward"] = _wrong_backward(model)
    found["again"] = str(fa2_pack_patch.verify(model))
    found["whole"] = sum(p.numel() for p in model.parameters() if hasattr(p, "ds_id"))
    return found


def partitioned() -> dict[str, str]:
    """Proofs of a model in parts from the start (``zero.Init``): before there is an engine, after."""
    import deepspeed

    model = parts.build("llama")
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    deepspeed.zero.Init(module=model, config_dict_or_path=config, dtype=torch.float32)
    fa2_pack_patch.apply(model, kernel="sdpa")
    try:
        found = {"before": str(fa2_pack_patch.verify(model))}
    except fa2_pack_patch.UnsupportedModelError as error:
        found = {"before": str(error)}
    found["after"] = str(fa2_pack_patch.verify(WRAPPERS["zero3"](model, 1).model))
    return found


def _wrong(model: torch.nn.Module) -> str:
    """A proof of a model that takes the last two examples for one, on this rank."""
    read = hooks.read_boundaries

    def merged(*args: Any, **kwargs: Any) -> Any:
        found = read(*args, **kwargs)
        if found is not None:
            found.lengths[-2:] = [sum(found.lengths[-2:])]
            found.padding[-2:] = [False]
        return found

    with mock.patch.object(hooks, "read_boundaries", merged):
        return str(fa2_pack_patch.verify(model))


def _wrong_backward(model: torch.nn.Module) -> str:
    """A proof of a model whose kernel gives right outputs and wrong gradients."""
    call = sdpa.Sdpa.__call__

    def wrong(*args: Any, **kwargs: Any) -> torch.Tensor:
        out = call(*args, **kwargs)
        return out + (out - out.detach()) / 100

    with mock.patch.object(sdpa.Sdpa, "__call__", wrong):
        return str(fa2_pack_patch.verify(model))


def _failing(model: torch.nn.Module) -> str:
    """A proof of a model whose packed calls end in an error, on this rank."""
    call = Probe.call

    def failing(*args: Any, **kwargs: Any) -> Any:
        call(*args, **kwargs)
        raise ZeroDivisionError("somebody's fault")

    with mock.patch.object(Probe, "call", failing):
        return str(fa2_pack_patch.verify(model))


def _undone(model: torch.nn.Module) -> str:
    """A proof of a model one of whose layers has lost its patch, on this rank."""
    layer = next(m for m in reversed(list(model.modules())) if hasattr(m, "q_proj"))
    del layer.forward
    return str(fa2_pack_patch.verify(model))
