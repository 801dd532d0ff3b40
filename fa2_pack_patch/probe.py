"""Running a model on packed batches and on their examples alone."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Callable, Optional

import torch

from .batches import Batch, Piece
from .counting import CountHook
from .detect import around, check_module, find_base, is_pretrained, why_no_family
from .errors import UnsupportedModelError
from .hooks import ModelHook
from .patch import ATTRIBUTE, Patch
from .registry import Family
from .runs import Run, Runs, enter, leave

_PROVED = "verified"
#: They exchange buffers and gradients at each call; the model inside is proved by itself.
_AROUND = ("DistributedDataParallel", "DeepSpeedEngine")
#: What an engine of DeepSpeed puts in the place of each module's dictionary of parameters.
_GATHERING = "ZeROOrderedDict"
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_PLAIN = (torch.Tensor, int, float, bool, str, type(None))


@dataclass
class Probe:
    """A model and how it is called for a proof."""

    model: torch.nn.Module
    base: torch.nn.Module
    family: Family
    embedding: torch.nn.Module
    device: torch.device
    reference: torch.nn.Module
    patch: Optional[Patch]
    runs: list[Run] = field(default_factory=list)

    @classmethod
    def of(cls, model: torch.nn.Module) -> Probe:
        """Look through wrappers for the model to call.

        Raises:
            UnsupportedModelError: no language model of a known family in it, or several; or one
                without values.
        """
        check_module(model, _PROVED)
        outside, bases = around(model), find_base(model)
        if outside.reasons:
            raise UnsupportedModelError(outside.subject, outside.reasons, _PROVED)
        if not bases:
            raise UnsupportedModelError(outside.subject, why_no_family(model), _PROVED)
        if len(bases) > 1:
            names = ", ".join(f"{n or '(root)'}: {type(m).__name__}" for n, m, _ in bases)
            reason = f"it holds {len(bases)} language models ({names}); take one at a time"
            raise UnsupportedModelError(outside.subject, [reason], _PROVED)
        _, base, family = bases[0]
        call = model
        while type(call).__name__ in _AROUND:
            call = call.module  # type: ignore[assignment]
        if any(type(m).__name__ in family.pooled for m in model.modules()):
            call = base
        _check_call(call)
        _check_values(base)
        embedding = base.get_input_embeddings()  # type: ignore[operator]
        patch = base.__dict__.get(ATTRIBUTE)
        return cls(
            model=call,
            base=base,
            family=family,
            embedding=embedding,
            device=_device(base, embedding),
            reference=getattr(call, "_orig_mod", call),  # the eager model under torch.compile
            patch=patch if isinstance(patch, Patch) else None,
        )

    @property
    def sharded(self) -> bool:
        """Whether parameters are shards (FSDP, ZeRO-3): a call of one rank is one of all."""
        shards = any(hasattr(p, "ds_id") for p in self.model.parameters())
        return shards or self.fsdp

    @property
    def fsdp(self) -> bool:
        """Whether a backward alone gives gradients of parameters, to the shards (FSDP1, FSDP2)."""
        return any(is_fsdp(module) for module in self.model.modules())

    @property
    def layers(self) -> int:
        return int(self.base.config.num_hidden_layers)  # type: ignore[union-attr,arg-type]

    @property
    def rows(self) -> int:
        """How many token ids the embedding takes: its rows, also where they are sharded."""
        found = []
        for module in self.embedding.modules():
            count, weight = getattr(module, "num_embeddings", None), getattr(module, "weight", None)
            if isinstance(count, int):
                found.append(count)
                if isinstance(weight, torch.Tensor) and weight.is_floating_point():
                    found += weight.shape[:1] if weight.dim() == 2 else []
        return max(found, default=self.vocabulary)

    @property
    def vocabulary(self) -> int:
        return int(self.base.config.vocab_size)  # type: ignore[union-attr,arg-type]

    def packed(self, batch: Batch, **changed: torch.Tensor) -> torch.Tensor:
        """``(rows, T, width)``: logits, or hidden states of a bare base model."""
        return _output(self.model, self.call(batch, **changed))

    def call(self, batch: Batch, **changed: torch.Tensor) -> Any:
        """What the model returns of a packed call."""
        return self.model(**self._moved({**batch.kwargs, **changed}))

    def alone(self, piece: Piece) -> torch.Tensor:
        """``(length, width)`` of one example by itself, as before :func:`fa2_pack_patch.apply`."""
        return _output(self.reference, self.call_alone(piece))[0][: len(piece.ids)]

    def unpacked(self, piece: Piece) -> torch.Tensor:
        """The same with the patch in place, which must make nothing of it."""
        return _output(self.reference, self._single(piece))[0][: len(piece.ids)]

    def call_alone(self, piece: Piece, **more: torch.Tensor) -> Any:
        """What the model returns of one example by itself, as before apply."""
        with stock(self):
            return self._single(piece, **more)

    def _single(self, piece: Piece, **more: torch.Tensor) -> Any:
        ids, positions = piece.ids[None], piece.positions[None]
        given: dict[str, Any] = {"input_ids": ids, "position_ids": positions, "use_cache": False}
        given.update(more)
        if bool((positions.diff() > 1).any()):
            # From 4.53 on a jump is taken for a boundary where there is no mask.
            given["attention_mask"] = torch.ones_like(ids)
        try:
            return self.reference(**self._moved(given))
        except (IndexError, RuntimeError, TypeError):
            # Rotary tables of old releases end at the row's length, so padding makes it longer; and
            # Falcon's eager of 4.36 to 4.43 wants a mask for one token.
            given["position_ids"] = positions - positions[0, 0]
            given["attention_mask"] = torch.ones_like(ids)
            room = max(0, int(given["position_ids"].max()) + 1 - ids.shape[1])
            for name, value in given.items():
                if isinstance(value, torch.Tensor):
                    pad = -100 if name == "labels" else 0
                    given[name] = torch.nn.functional.pad(value, (0, room), value=pad)
            return self.reference(**self._moved(given))

    def _moved(self, given: Mapping[str, Any]) -> dict[str, Any]:
        return {
            k: v.to(self.device) if isinstance(v, torch.Tensor) else v for k, v in given.items()
        }

    def mixed(self, batch: Batch) -> list[torch.Tensor]:
        """The same as :meth:`alone`, each row run as if it were one example."""
        ids = batch.kwargs["input_ids"].to(self.device)
        rows = torch.arange(ids.shape[1], device=self.device).expand(ids.shape)
        with stock(self):
            out = self.reference(input_ids=ids, position_ids=rows, use_cache=False)
        out = _output(self.reference, out)
        return [out[p.place] for p in batch.pieces]

    def padded(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """The same as :meth:`alone`, of all in one unpacked batch, padded on the right."""
        ids = [p.ids for p in pieces]
        rows = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
        real = [torch.ones_like(i) for i in ids]
        mask = torch.nn.utils.rnn.pad_sequence(real, batch_first=True)
        given = {"input_ids": rows, "attention_mask": mask, "use_cache": False}
        with stock(self):
            out = _output(self.reference, self.reference(**self._moved(given)))
        return [out[n, : len(i)] for n, i in enumerate(ids)]

    @contextmanager
    def recorded(self) -> Iterator[list[Run]]:
        """Keep the runs of packed forwards in the block."""
        patch = self.patch
        if patch is None:
            yield []
            return
        before, seen = patch.runs, patch.explicit_seen
        patch.runs = recorder = _Recorder()
        try:
            yield recorder.seen
        finally:
            patch.runs, patch.explicit_seen = before, seen


class _Recorder(Runs):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Run] = []

    def bind(self, position_ids: torch.Tensor, run: Run) -> None:
        if all(run is not other for other in self.seen):
            self.seen.append(run)
        super().bind(position_ids, run)


@contextmanager
def stock(probe: Probe) -> Iterator[None]:
    """The model as it was before :func:`fa2_pack_patch.apply`, in the block alone."""
    patch = probe.patch
    if patch is None:
        yield
        return
    runs, patch.runs = patch.runs, Runs()  # runs of earlier forwards are not to be found
    kept = []
    for module in probe.model.modules():
        for name in _HOOKS:
            hooks = getattr(module, name)
            if any(isinstance(h, (ModelHook, CountHook)) for h in hooks.values()):
                kept.append((hooks, list(hooks.items())))
    try:
        for hooks, items in kept:
            for key, hook in items:
                if isinstance(hook, (ModelHook, CountHook)):
                    del hooks[key]
        enter(patch)  # else layers ask why no hook has seen their call
        yield
    finally:
        leave(patch)
        patch.runs = runs
        for hooks, items in kept:  # in the order that they had
            hooks.clear()
            hooks.update(items)


def _device(base: torch.nn.Module, embedding: torch.nn.Module) -> torch.device:
    weight = next(embedding.parameters(), None)
    if weight is not None and weight.device.type != "meta":
        return weight.device
    hook = getattr(embedding, "_hf_hook", None)
    hooks = [hook, *getattr(hook, "hooks", ())]
    for found in (getattr(h, "execution_device", None) for h in hooks):
        if found is not None:
            return torch.device(found if not isinstance(found, int) else f"cuda:{found}")
    real = (p.device for p in base.parameters() if p.device.type != "meta")
    return next(real, torch.device("cpu"))


def _check_call(model: torch.nn.Module) -> None:
    """Refuse what is not called as a model is (a LightningModule, a training step of one's own).

    Nor is a model whose parameters lie in parts on the ranks, with nobody who gathers them.

    Raises:
        UnsupportedModelError: names it, and the model inside it.
    """
    in_parts = any(hasattr(p, "ds_id") and not p.numel() for p in model.parameters())
    if in_parts and all(type(m._parameters).__name__ != _GATHERING for m in model.modules()):
        why = (
            "its parameters are partitioned by DeepSpeed's ZeRO-3, and only an engine gathers them "
            "for a call; verify the engine that deepspeed.initialize gave"
        )
        raise UnsupportedModelError(type(model).__name__, [why])
    parameters = inspect.signature(type(model).forward).parameters
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    if "input_ids" in parameters or any(p.kind in variable for p in parameters.values()):
        return
    reason = _not_called(model, "takes no input_ids")
    raise UnsupportedModelError(type(model).__name__, [reason], _PROVED)


def _check_values(base: torch.nn.Module) -> None:
    """Refuse a model all of whose parameters are on meta, but for those of accelerate's hooks.

    Raises:
        UnsupportedModelError: says so.
    """
    if all(p.is_meta for p in base.parameters()) and not any(
        hasattr(module, "_hf_hook") for module in base.modules()
    ):
        reason = "its parameters are on device meta, where they have no values; load them first"
        raise UnsupportedModelError(type(base).__name__, [reason], _PROVED)


def _not_called(model: torch.nn.Module, what: str) -> str:
    inside = next((name for name, m in model.named_modules() if name and is_pretrained(m)), "")
    advice = f"verify its model.{inside} instead" if inside else "verify the model inside it"
    return f"the forward of {type(model).__qualname__} {what}; {advice}"


def _output(model: torch.nn.Module, out: Any) -> torch.Tensor:
    """``(rows, tokens, width)``, of what a call of ``model`` returned.

    Raises:
        UnsupportedModelError: there is no such thing in it.
    """
    named = [getattr(out, name, None) for name in ("logits", "last_hidden_state")]
    first = out[:1] if isinstance(out, (tuple, list)) else (out,)
    for found in (*named, *first):
        if isinstance(found, torch.Tensor) and found.dim() == 3:
            return found
    what = f"gives {type(out).__name__}, neither logits nor last_hidden_state (rows, tokens, width)"
    raise UnsupportedModelError(type(model).__name__, [_not_called(model, what)], _PROVED)


def is_fsdp(module: torch.nn.Module) -> bool:
    """Whether a module is what FSDP1 puts around one, or FSDP2 makes of one."""
    names = {c.__name__ for c in type(module).__mro__}
    return not names.isdisjoint({"FullyShardedDataParallel", "FSDPModule"})


@contextmanager
def _shards(model: torch.nn.Module) -> Iterator[None]:
    """Inside, no parameter of an FSDP model has a gradient; after, all is sharded as before."""
    fsdp = [m for m in model.modules() if is_fsdp(m)]
    sharded = [m for m in fsdp if hasattr(m, "reshard") and not _whole(m)]
    before = [(p, p.grad) for p in model.parameters()] if fsdp else []
    for parameter, _ in before:
        parameter.grad = None
    try:
        yield
    finally:
        for module in sharded:
            if _whole(module):
                module.reshard()  # type: ignore[operator]
        for parameter, gradient in before:
            parameter.grad = gradient


def _whole(module: torch.nn.Module) -> bool:
    """Whether FSDP2 has gathered a parameter in ``module``."""
    return any(not hasattr(p, "to_local") for p in module.parameters())


@contextmanager
def undisturbed(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode inside; random state, training modes and modules' caches as before after."""
    cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    training = [(m, m.training) for m in model.modules()]
    own = [m for m in model.modules() if type(m).__module__.startswith("transformers.")]
    before = [(m, dict(m.__dict__), dict(m._buffers)) for m in own]
    try:
        with torch.random.fork_rng(devices=range(cuda)), _shards(model):
            for module, _ in training:
                # In evaluation on a CPU bitsandbytes repacks 4-bit weights for good, and those have
                # no gradients.
                module.training = any(c.__name__ == "Linear4bit" for c in type(module).__mro__)
            yield
    finally:
        for module, mode in training:
            module.training = mode
        for module, attributes, buffers in before:
            _restore(module, attributes, buffers)


def _restore(
    module: torch.nn.Module, attributes: dict[str, Any], buffers: dict[str, Optional[torch.Tensor]]
) -> None:
    for name, value in attributes.items():  # lengths and tables that a rotary embedding keeps
        if isinstance(value, _PLAIN) and module.__dict__.get(name, value) is not value:
            module.__dict__[name] = value
    for name, old in buffers.items():
        new = module._buffers.get(name)
        moved = old is not None and new is not None and old.device != new.device
        if new is not old and not moved:
            module._buffers[name] = old


def each(function: Callable[[Piece], torch.Tensor], pieces: Sequence[Piece]) -> list[torch.Tensor]:
    """``function`` of every example, detached and on the CPU in at least float32."""
    return settled(function(piece) for piece in pieces)


def settled(outputs: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Each detached and on the CPU in at least float32."""
    found = []
    for output in outputs:
        wide = torch.promote_types(output.dtype, torch.float32)
        found.append(output.detach().to(wide).cpu())
    return found
