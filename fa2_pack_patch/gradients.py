"""The gradients of a probe: of embeddings by example, and of parameters in a sketch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Optional

import torch

from .batches import Piece
from .probe import Probe

#: Gradients by name: ``embeddings`` per example, and a sketch of each parameter's.
Gradients = dict[str, torch.Tensor]
#: A sketch holds no fewer numbers: the norm of a few random ones says little.
_KEPT = 64


@contextmanager
def embedded(probe: Probe) -> Iterator[list[torch.Tensor]]:
    """Collects the embeddings that enter the model, with gradients on."""
    seen: list[torch.Tensor] = []

    def hook(_: torch.nn.Module, __: Any, out: torch.Tensor) -> torch.Tensor:
        if not out.requires_grad:
            out = out.detach().requires_grad_()
        seen.append(out)
        return out

    handle = probe.embedding.register_forward_hook(hook)
    try:
        with torch.enable_grad():
            yield seen
    finally:
        handle.remove()


@contextmanager
def checkpointed(probe: Probe) -> Iterator[None]:
    """Activation checkpointing that is on recomputes in the block, in evaluation mode too.

    Not the reentrant kind, which cannot be asked for single gradients, nor where the same modules
    would drop out.
    """
    config: Any = probe.base.config
    random = [n for n, v in vars(config).items() if n.endswith(("dropout", "pdrop")) and v]
    found = []
    for module in probe.reference.modules() if not random else ():
        function = getattr(module, "_gradient_checkpointing_func", None)
        reentrant = getattr(function, "keywords", {}).get("use_reentrant", True)
        if getattr(module, "gradient_checkpointing", False) and not reentrant:
            found.append((module, module.training))
    for module, _ in found:
        module.training = True
    try:
        yield
    finally:
        for module, training in found:
            module.training = training


def weights_of(pieces: Sequence[Piece], outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Fixed random weights ``(length, width)`` of each example's outputs: the loss is their sum."""
    found = []
    for n, (piece, out) in enumerate(zip(pieces, outputs)):
        generator = torch.Generator().manual_seed(500 + n)
        shape = len(piece.ids), out.shape[-1]
        drawn = torch.randn(shape, generator=generator, device="cpu")
        found.append(drawn / math.sqrt(out.shape[-1]))
    return found


def loss_of(out: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    wide = torch.promote_types(out.dtype, torch.float32)
    return (out.to(wide) * weights.to(out.device)).sum()


def trained(probe: Probe) -> dict[str, torch.nn.Parameter]:
    """The parameters whose gradients can be compared; under ZeRO-3 they are empty between calls."""
    return {
        n: p
        for n, p in probe.reference.named_parameters()
        if p.requires_grad and (p.numel() or hasattr(p, "ds_id")) and p.device.type != "meta"
    }


def sketches(
    names: Sequence[str], gradients: Sequence[Optional[torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """Each gradient summed over its last dimension with fixed random signs; small ones as they are.

    Linear and of the same expected norm, so sketches are added and compared in place of gradients.
    """
    found = {}
    for name, gradient in zip(names, gradients):
        if gradient is None:
            continue
        if gradient.dim() < 2 or gradient.numel() < _KEPT * gradient.shape[-1]:
            found[name] = gradient.detach().double().cpu()
            continue
        generator = torch.Generator().manual_seed(gradient.shape[-1])
        size = gradient.shape[-1:]
        signs = torch.randint(0, 2, size, generator=generator, device="cpu") * 2 - 1
        wide = torch.promote_types(gradient.dtype, torch.float32)
        found[name] = (gradient.detach().to(wide) @ signs.to(gradient.device, wide)).double().cpu()
    return found


def gradients(probe: Probe, loss: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Gradients]:
    """Of the embeddings ``(rows, T, width)`` that enter the model in ``loss``, and of parameters.

    Under FSDP there is no other way to those of parameters than a backward: every ``.grad`` is None
    before it (:func:`~fa2_pack_patch.probe.undisturbed` has set them aside) and after it.
    """
    kept: Gradients = {}
    with embedded(probe) as seen:
        value = loss()
        if probe.fsdp:
            seen[-1].retain_grad()
            value.backward()  # type: ignore[no-untyped-call]
            parameters = trained(probe)
            found = [seen[-1].grad, *(_local(p.grad) for p in parameters.values())]
            for parameter in probe.model.parameters():
                parameter.grad = None
        else:
            parameters = trained(probe)
            inputs = [seen[-1], *parameters.values()]
            with _let_go(parameters, kept):
                found = list(torch.autograd.grad(value, inputs, allow_unused=True))
    assert found[0] is not None
    whole = {n: g for n, g in zip(parameters, found[1:]) if n not in kept}
    return found[0].detach(), {**kept, **sketches(list(whole), list(whole.values()))}


@contextmanager
def _let_go(parameters: Mapping[str, torch.nn.Parameter], kept: Gradients) -> Iterator[None]:
    """Collects sketches under ZeRO-3 in place of gradients, which are whole on each rank.

    They are taken as they pass, so that of all these no two are held at a time; DeepSpeed, which
    adds up what is accumulated, notices nothing.
    """

    def keep(name: str, gradient: torch.Tensor) -> torch.Tensor:
        kept.update(sketches([name], [gradient]))
        return gradient.new_zeros(()).expand_as(gradient)

    shards = {n: p for n, p in parameters.items() if hasattr(p, "ds_id")}
    handles = []
    for name, parameter in shards.items():
        handles.append(parameter.register_hook(partial(keep, name)))  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def of_inputs(probe: Probe, loss: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Of the embeddings alone."""
    if probe.fsdp:
        return gradients(probe, loss)[0]
    with embedded(probe) as seen:
        (found,) = torch.autograd.grad(loss(), seen[-1])
    return found.detach()


def _local(gradient: Any) -> Optional[torch.Tensor]:
    """This rank's shard of a gradient."""
    if gradient is None:
        return None
    local: torch.Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return local if local.numel() else None


def gradients_alone(
    probe: Probe, pieces: Sequence[Piece], weights: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], Gradients]:
    """Of each example by itself: of its embeddings, and summed over all, of each parameter."""
    tokens: list[torch.Tensor] = []
    total: Gradients = {}
    for piece, weight in zip(pieces, weights):
        found, parameters = gradients(probe, partial(_loss_alone, probe, piece, weight))
        tokens.append(found[0][: len(piece.ids)].cpu())
        for name, sketch in parameters.items():
            total[name] = total[name] + sketch if name in total else sketch
    return tokens, total


def _loss_alone(probe: Probe, piece: Piece, weights: torch.Tensor) -> torch.Tensor:
    return loss_of(probe.alone(piece), weights)


def gradients_padded(
    probe: Probe, pieces: Sequence[Piece], weights: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], Gradients]:
    """The same as :func:`gradients_alone`, of all in one unpacked batch of padded rows."""

    def loss() -> torch.Tensor:
        parts = [loss_of(out, weight) for out, weight in zip(probe.padded(pieces), weights)]
        return torch.stack(parts).sum()

    found, parameters = gradients(probe, loss)
    return [found[n, : len(p.ids)].cpu() for n, p in enumerate(pieces)], parameters
