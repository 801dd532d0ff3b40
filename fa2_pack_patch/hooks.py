"""The model hook, which decides once per forward, and the attention hook, which acts on it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Optional

import torch

from . import compat
from .errors import PackingError
from .interceptors import INTERCEPTORS
from .layout import (
    Boundaries,
    PackedLayout,
    check_position_ids,
    quote,
    read_boundaries,
    upload,
)
from .reading import (
    VARLEN,
    by_name,
    cache_of,
    describe_cache,
    explicit,
    from_generate,
    just_read,
    may_be_segments,
    readable,
    remember_unpacked,
    to_host,
    without_first,
)
from .rope import check_lengths
from .runs import CURRENT, Run

if TYPE_CHECKING:
    from .patch import Patch, Site

_FOREIGN = ("head_mask", "encoder_hidden_states", "encoder_attention_mask")


class ModelHook:
    """Forward pre-hook (with keywords): is this call packed, and where are its examples?

    On the base model it also takes the mask away; on the model around it (a head, a PEFT wrapper)
    it also sees labels, and varlen arguments that an old release's forward would not accept.
    """

    def __init__(self, patch: Patch, *, base: bool, pooled: Optional[str] = None) -> None:
        self.patch = patch
        self.base = base
        self.pooled = pooled

    def __call__(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Optional[tuple[tuple[Any, ...], dict[str, Any]]]:
        if is_compiling():
            return eagerly(self._decide, module, args, kwargs)  # type: ignore[no-any-return]
        return self._decide(module, args, kwargs)

    def _decide(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Optional[tuple[tuple[Any, ...], dict[str, Any]]]:
        call = by_name(module, args, kwargs)
        run = self._run(call)
        if run is None:
            return None
        if self.pooled is not None:
            raise PackingError(
                f"{self.pooled} gives one result for each row, but this call packs "
                f"{run.layout.examples} examples into its rows (lengths "
                f"{quote(list(run.layout.lengths))}). Give it one example a row, padded; only "
                "per-token heads can take packed rows."
            )
        self._adjust(call, run)
        return (), call

    def _run(self, call: dict[str, Any]) -> Optional[Run]:
        inputs = call.get("input_ids")
        if inputs is None:
            inputs = call.get("inputs_embeds")
        position_ids = call.get("position_ids")
        mask = call.get("attention_mask")
        varlen = {k: call[k] for k in VARLEN if call.get(k) is not None}
        if not isinstance(inputs, torch.Tensor) or inputs.dim() < 2:
            return None
        rows, tokens = int(inputs.shape[0]), int(inputs.shape[1])
        if isinstance(position_ids, torch.Tensor) and not varlen:
            bound = self.patch.runs.bound(position_ids, self.patch)
            if bound is not None:
                return bound
        if varlen and from_generate(call, varlen, self.patch.release):
            return None
        if not varlen:
            if rows * tokens == 0 or tokens == 1:
                return None
            if position_ids is None and not may_be_segments(mask):
                return None
            if self.base and just_read(position_ids, mask):
                return None
        return self._read(call, position_ids, mask, varlen, rows, tokens, inputs.device)

    def _read(
        self,
        call: dict[str, Any],
        position_ids: Any,
        mask: Any,
        varlen: Mapping[str, Any],
        rows: int,
        tokens: int,
        device: torch.device,
    ) -> Optional[Run]:
        ids = None
        if position_ids is not None:
            ids = check_position_ids(position_ids)
            if ids.shape[1] != tokens or ids.shape[0] not in (1, rows):
                if not varlen and ids.dim() == 2 and cache_of(call) is not None:
                    return None
                raise PackingError(
                    f"position_ids of shape {tuple(position_ids.shape)} do not fit an input of "
                    f"{rows} rows of {tokens} tokens; expected ({rows}, {tokens}) or (1, {tokens})."
                )
            ids = ids.expand(rows, tokens)
        plain = mask if isinstance(mask, torch.Tensor) and mask.shape == (rows, tokens) else None
        host_ids, host_mask, host_cu = to_host(ids, plain, varlen)
        if varlen:
            found: Optional[Boundaries] = explicit(
                varlen, host_cu, host_ids, host_mask, rows, tokens
            )
        else:
            found = read_boundaries(host_ids, host_mask) if readable(host_ids, host_mask) else None
        if found is None:
            remember_unpacked(None if self.base else (position_ids, mask))
            return None
        if mask is not None and plain is None and cache_of(call) is not None:
            return None  # generation into a static cache brings a mask of its own
        if mask is not None and plain is None:
            raise PackingError(
                "a packed call takes a 2-D attention_mask of shape (rows, tokens) or none, got "
                + (f"shape {tuple(mask.shape)}" if hasattr(mask, "shape") else type(mask).__name__)
                + "; encoder, prefix and 4-D masks cannot go with packed rows."
            )
        layout = PackedLayout.from_lengths(found.lengths, device=device, padding=found.padding)
        self._refuse(call, layout)
        return self._bind(call, layout, ids, host_ids, plain, rows, tokens, device)

    def _bind(
        self,
        call: dict[str, Any],
        layout: PackedLayout,
        ids: Optional[torch.Tensor],
        host_ids: Optional[torch.Tensor],
        mask: Optional[torch.Tensor],
        rows: int,
        tokens: int,
        device: torch.device,
    ) -> Run:
        generated = host_ids is None
        positions = layout.positions().view(rows, tokens) if host_ids is None else host_ids
        # The model's own contiguous int64 copy: nobody else writes to it, and it carries the run.
        if ids is None or any(layout.padding):
            own = positions.clone()
            for start, length, pad in zip(layout.starts, layout.lengths, layout.padding):
                if pad:  # a position of padding must not lengthen a dynamic rope
                    own.view(-1)[start : start + length] = 0
            positions = own
            carried = upload(own.clone(), device)
        else:
            carried = ids.to(device=device, dtype=torch.int64, copy=True).contiguous()
        flat = positions.reshape(-1)
        ends = torch.tensor([s + n - 1 for s, n in zip(layout.starts, layout.lengths)])
        reach = (flat[ends] + 1).tolist()
        if self.patch.rope is not None:
            check_lengths(self.patch.rope, layout, reach)
        run = Run(layout, positions, max(reach), self.patch)
        if not generated:
            first = torch.tensor(layout.starts[1:], dtype=torch.long)
            run.distinct = bool((flat[first] <= flat[first - 1]).all()) if len(first) else False
        self.patch.runs.bind(carried, run)
        call["position_ids"] = carried
        return run

    def _adjust(self, call: dict[str, Any], run: Run) -> None:
        for name in VARLEN:
            call.pop(name, None)
        call["use_cache"] = False
        mask = call.get("attention_mask")
        if self.base:
            call["attention_mask"] = None
            if compat.mask_placeholder(self.patch.release):
                device = call["position_ids"].device
                call["attention_mask"] = torch.zeros(1, 1, 1, 1, device=device)
        elif isinstance(mask, torch.Tensor):
            call["attention_mask"] = (mask != 0).to(mask.dtype)
        labels = call.get("labels")
        if not self.base and isinstance(labels, torch.Tensor):
            call["labels"] = without_first(labels, run.layout)

    def _refuse(self, call: Mapping[str, Any], layout: PackedLayout) -> None:
        config = self.patch.config
        wants = call.get("output_attentions")
        if wants is None:
            wants = getattr(config, "output_attentions", False)
        if wants:
            raise PackingError(
                "output_attentions=True cannot go with packed rows: the kernels give no attention "
                "weights. Pass output_attentions=False, or one example a row."
            )
        if call.get("use_cache"):
            raise PackingError(
                f"use_cache=True with a packed row (lengths {quote(list(layout.lengths))}): a "
                "cache of several examples could not be continued. Pass use_cache=False."
            )
        cache = cache_of(call)
        if cache is not None:
            raise PackingError(
                f"a packed row (lengths {quote(list(layout.lengths))}) cannot go with a cache, "
                f"got {describe_cache(cache)}. Pass past_key_values=None and use_cache=False."
            )
        for name in _FOREIGN:
            if call.get(name) is not None:
                raise PackingError(f"{name} cannot go with packed rows; leave it out.")


class CountHook:
    """Forward hook of the base model: every attention layer must have run packed."""

    def __init__(self, patch: Patch) -> None:
        self.patch = patch

    def __call__(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if is_compiling():
            eagerly(self._check, kwargs)
        else:
            self._check(kwargs)

    def _check(self, kwargs: dict[str, Any]) -> None:
        position_ids = kwargs.get("position_ids")
        if not isinstance(position_ids, torch.Tensor):
            return
        run = self.patch.runs.bound(position_ids, self.patch)
        if run is None or len(run.done) == len(self.patch.sites):
            return
        missed = [s for s in self.patch.sites if s.index not in run.done]
        raise PackingError(
            f"{len(missed)} of {len(self.patch.sites)} attention layers did not run packed: "
            f"{', '.join(s.label for s in missed[:4])}. Their forward was replaced after apply "
            f"(now {_owner(missed[0].module)}); the result would mix examples. Apply "
            "fa2_pack_patch last."
        )


class PackedForward:
    """Stands for an attention module's forward: packed when its position_ids carry a layout."""

    def __init__(self, site: Site, before: Any = None) -> None:
        self.site = site
        self.before = before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return eagerly(self._forward, *args, **kwargs)
        return self._forward(*args, **kwargs)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        site = self.site
        position_ids = kwargs.get("position_ids")
        run = site.patch.runs.find(position_ids) if position_ids is not None else None
        if run is None:
            if self.before is not None:
                return self.before(*args, **kwargs)
            return type(site.module).forward(site.module, *args, **kwargs)
        if kwargs.get("attention_mask") is not None:
            kwargs["attention_mask"] = None  # eager's own; some flash classes slice keys by it
        token = CURRENT.set(run)
        try:
            return INTERCEPTORS[site.span.via].run(site, run, args, kwargs)
        finally:
            CURRENT.reset(token)


def is_compiling() -> bool:
    """Whether Dynamo is tracing this very call."""
    return (
        torch.compiler.is_dynamo_compiling()
        if hasattr(torch.compiler, "is_dynamo_compiling")
        else False
    )


def eagerly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function`` outside of Dynamo, where that is loaded: a graph break, not a fault."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return function(*args, **kwargs)
    return dynamo.disable(function)(*args, **kwargs)


def _owner(module: torch.nn.Module) -> str:
    forward = module.__dict__.get("forward", type(module).forward)
    return f"{getattr(forward, '__module__', type(forward).__module__)}"
