"""DDP, FSDP1, FSDP2 and ZeRO behind one face: a step, and whole gradients and weights of it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from .parts import RATE

#: What wrappers put into the names of parameters; DDP and DeepSpeed put "module." before them.
_INSERTED = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


def name_of(parameter: str) -> str:
    """The name of a parameter in the model that was wrapped."""
    for part in _INSERTED:
        parameter = parameter.replace(part, "")
    return parameter[len("module.") :] if parameter.startswith("module.") else parameter


def layers_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The decoder layers, which are sharded and checkpointed one by one."""
    found: list[torch.nn.Module] = list(model.get_submodule("model").layers)  # type: ignore[arg-type]
    return found


def checkpoint(model: torch.nn.Module, how: str) -> None:
    """Activation checkpointing: Transformers' own ("model", "reentrant"), or torch's wrapper."""
    if how in ("model", "reentrant"):
        enable: Any = model.gradient_checkpointing_enable
        if inspect.signature(enable).parameters:
            enable(gradient_checkpointing_kwargs={"use_reentrant": how == "reentrant"})
        else:  # 4.34 has the reentrant kind only
            enable()
    elif how == "wrapper":
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
            apply_activation_checkpointing,
        )

        kind = type(layers_of(model)[0])
        apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, kind))
    elif how != "none":
        raise ValueError(f"checkpoint must be none, model, reentrant or wrapper, got {how!r}")


class Ddp:
    """``DistributedDataParallel``; the base of the others, which differ in a method or two."""

    def __init__(self, model: torch.nn.Module, micro_batches: int) -> None:
        self.micro_batches = micro_batches
        self.model = self.wrap(model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        return torch.nn.parallel.DistributedDataParallel(model)

    def unsynchronized(self) -> Any:
        """In it, gradients stay on their rank and add up."""
        return self.model.no_sync()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def end_micro_batch(self) -> None:
        """What only DeepSpeed wants to be told."""

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def gradients(self) -> dict[str, torch.Tensor]:
        """Whole gradients by the model's own names; a copy."""
        return {
            name_of(n): p.grad.clone()
            for n, p in self.model.named_parameters()
            if p.grad is not None
        }

    def weights(self) -> dict[str, torch.Tensor]:
        """Whole weights by the model's own names; a copy."""
        return {name_of(n): p.detach().clone() for n, p in self.model.named_parameters()}


class Fsdp1(Ddp):
    """``FullyShardedDataParallel`` of each decoder layer and of the whole."""

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

        kind = type(layers_of(model)[0])
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=partial(transformer_auto_wrap_policy, transformer_layer_cls={kind}),
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )

    @contextmanager
    def _whole(self, *, gradients: bool) -> Iterator[None]:
        from torch.distributed.fsdp import FullyShardedDataParallel

        with FullyShardedDataParallel.summon_full_params(
            self.model, with_grads=gradients, writeback=False
        ):
            yield

    def gradients(self) -> dict[str, torch.Tensor]:
        with self._whole(gradients=True):
            return super().gradients()

    def weights(self) -> dict[str, torch.Tensor]:
        with self._whole(gradients=False):
            return super().weights()


class Fsdp2(Ddp):
    """``fully_shard`` of each decoder layer and of the whole, over a mesh of CPUs."""

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in layers_of(model):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    @contextmanager
    def unsynchronized(self) -> Iterator[None]:
        model: Any = self.model
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)

    def gradients(self) -> dict[str, torch.Tensor]:
        return {n: g.full_tensor() for n, g in super().gradients().items()}  # type: ignore[attr-defined]

    def weights(self) -> dict[str, torch.Tensor]:
        return {n: w.full_tensor() for n, w in super().weights().items()}  # type: ignore[attr-defined]


class Zero(Ddp):
    """DeepSpeed's engine; ``stage`` of ZeRO."""

    stage = 2

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        import deepspeed

        # Sums over shared memory in place of gloo: it would compile that first, for a minute or two.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=RATE),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": self.micro_batches,
                # By default ZeRO-3 leaves parameters of up to 100,000 numbers whole: all of these.
                "zero_optimization": {
                    "stage": self.stage,
                    "stage3_param_persistence_threshold": 0,
                },
                "gradient_clipping": 0.0,
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,
            },
            dist_init_required=False,
        )
        found: torch.nn.Module = engine
        return found

    def unsynchronized(self) -> Any:
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        # The engine divides by the number of micro-batches.
        self.model.backward(loss * self.micro_batches)  # type: ignore[operator]

    def end_micro_batch(self) -> None:
        self.model.step()  # type: ignore[operator]

    def step(self) -> None:
        """Done by the last :meth:`end_micro_batch`."""

    def gradients(self) -> dict[str, torch.Tensor]:
        from deepspeed.utils import safe_get_full_grad

        found = {n: safe_get_full_grad(p) for n, p in self.model.named_parameters()}
        return {name_of(n): g.clone() for n, g in found.items() if g is not None}

    def weights(self) -> dict[str, torch.Tensor]:
        from deepspeed.utils import safe_get_full_fp32_param

        found = {n: safe_get_full_fp32_param(p) for n, p in self.model.named_parameters()}
        return {name_of(n): w.detach().clone() for n, w in found.items()}


class Zero3(Zero):
    """ZeRO with sharded parameters."""

    stage = 3


WRAPPERS: dict[str, type[Ddp]] = {
    "ddp": Ddp, "fsdp1": Fsdp1, "fsdp2": Fsdp2, "zero2": Zero, "zero3": Zero3,
}  # fmt: skip
