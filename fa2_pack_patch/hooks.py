"""The model hook, which decides once per forward, and the attention hook, which acts on it."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Optional

import torch
from packaging.version import Version

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
from .rope import check_lengths
from .runs import CURRENT, Run

if TYPE_CHECKING:
    from .patch import Patch, Site

VARLEN = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_CACHES = ("past_key_values", "past_key_value", "cache", "layer_past", "cache_params")
_FOREIGN = ("head_mask", "encoder_hidden_states", "encoder_attention_mask")

# The position_ids that the model's own hook just found not to be packed: the base model's hook,
# which gets the same object next, does not read them again.
_UNPACKED = threading.local()


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
        call = _by_name(module, args, kwargs)
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
        if varlen and _from_generate(call, varlen, self.patch.release):
            return None
        if not varlen:
            if rows * tokens == 0 or tokens == 1:
                return None
            if position_ids is None and not _may_be_segments(mask):
                return None
            if self.base and _just_read(position_ids, mask):
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
                if not varlen and ids.dim() == 2 and _cache_of(call) is not None:
                    return None
                raise PackingError(
                    f"position_ids of shape {tuple(position_ids.shape)} do not fit an input of "
                    f"{rows} rows of {tokens} tokens; expected ({rows}, {tokens}) or (1, {tokens})."
                )
            ids = ids.expand(rows, tokens)
        plain = mask if isinstance(mask, torch.Tensor) and mask.shape == (rows, tokens) else None
        host_ids, host_mask, host_cu = _to_host(ids, plain, varlen)
        if varlen:
            found: Optional[Boundaries] = _explicit(
                varlen, host_cu, host_ids, host_mask, rows, tokens
            )
        else:
            found = read_boundaries(host_ids, host_mask) if _readable(host_ids, host_mask) else None
        if found is None:
            _UNPACKED.seen = (id(position_ids), id(mask)) if not self.base else None
            return None
        if mask is not None and plain is None and _cache_of(call) is not None:
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
            call["labels"] = _without_first(labels, run.layout)

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
        cache = _cache_of(call)
        if cache is not None:
            raise PackingError(
                f"a packed row (lengths {quote(list(layout.lengths))}) cannot go with a cache, "
                f"got {_describe_cache(cache)}. Pass past_key_values=None and use_cache=False."
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


def _owner(module: torch.nn.Module) -> str:
    forward = module.__dict__.get("forward", type(module).forward)
    return f"{getattr(forward, '__module__', type(forward).__module__)}"


def _by_name(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    call = dict(kwargs)
    if args:
        names = list(inspect.signature(type(module).forward).parameters)[1:]
        call.update(zip(names, args))
    return call


def _may_be_segments(mask: Any) -> bool:
    return isinstance(mask, torch.Tensor) and mask.dim() == 2 and mask.dtype != torch.bool


def _readable(ids: Optional[torch.Tensor], mask: Optional[torch.Tensor]) -> bool:
    return ids is not None or (mask is not None and bool((mask > 1).any()))


def _just_read(position_ids: Any, mask: Any) -> bool:
    seen = getattr(_UNPACKED, "seen", None)
    _UNPACKED.seen = None
    return seen is not None and seen == (id(position_ids), id(mask))


def _to_host(
    ids: Optional[torch.Tensor], mask: Optional[torch.Tensor], varlen: Mapping[str, Any]
) -> tuple[Optional[torch.Tensor], Optional[torch.Tensor], list[Optional[torch.Tensor]]]:
    """All that must be read, with one transfer for each device it lies on."""
    cu = [varlen.get(name) for name in VARLEN[:2]]
    tensors = [t for t in (ids, mask, *cu) if isinstance(t, torch.Tensor)]
    on_device = [t for t in tensors if t.device.type != "cpu"]
    moved: dict[int, torch.Tensor] = {}
    if len(on_device) > 1 and len({t.device for t in on_device}) == 1:
        joined = torch.cat([t.reshape(-1).to(torch.float64) for t in on_device]).cpu()
        parts = joined.split_with_sizes([t.numel() for t in on_device])
        moved = {id(t): p.view(t.shape) for t, p in zip(on_device, parts)}

    def host(t: Any) -> Any:
        if not isinstance(t, torch.Tensor):
            return None if t is None else torch.as_tensor(t)
        here = moved.get(id(t))
        if here is None:
            here = t.detach().cpu()
        return here.to(torch.int64) if not t.is_floating_point() and t.dtype != torch.bool else here

    mask_host = host(mask)
    if mask is not None and mask.dtype == torch.bool and mask_host is not None:
        mask_host = mask_host.to(torch.bool)
    return host(ids), mask_host, [host(c) for c in cu]


def _explicit(
    varlen: Mapping[str, Any],
    cu: list[Optional[torch.Tensor]],
    ids: Optional[torch.Tensor],
    mask: Optional[torch.Tensor],
    rows: int,
    tokens: int,
) -> Boundaries:
    missing = [name for name in VARLEN if name not in varlen]
    if missing:
        given = {k: quote(v) for k, v in varlen.items()}
        raise PackingError(
            f"the varlen arguments are incomplete: got {given}, missing {missing}. Give all of "
            f"{list(VARLEN)}, or none and position_ids that start anew at each example."
        )
    q, k = cu
    assert q is not None and k is not None
    if not torch.equal(q, k):
        raise PackingError(
            f"cu_seq_lens_q {quote(q)} and cu_seq_lens_k {quote(k)} differ; in self-attention over "
            "packed rows they are the same."
        )
    layout = PackedLayout.from_cu_seqlens(q, tokens=rows * tokens)
    for name in VARLEN[2:]:
        if int(varlen[name]) < layout.max_seqlen:
            raise PackingError(
                f"{name} is {int(varlen[name])}, but the longest example of cu_seq_lens_q "
                f"{quote(q)} has {layout.max_seqlen} tokens."
            )
    starts = torch.zeros(rows * tokens, dtype=torch.bool)
    starts[torch.tensor(layout.starts)] = True
    for row in range(rows):
        if not bool(starts[row * tokens]):
            raise PackingError(
                f"cu_seq_lens_q {quote(q)} lets an example run over from row {row - 1} into row "
                f"{row} (rows of {tokens} tokens); each row starts an example."
            )
    for name, other in (("position_ids", ids), ("attention_mask", mask)):
        found = None
        if name == "position_ids" and other is not None:
            found = read_boundaries(other, None)
        elif other is not None and not bool((other == 1).all()):
            found = read_boundaries(None, other, always=True)
        if found is not None:
            theirs = PackedLayout.from_lengths(found.lengths).starts
            extra = [s for s in theirs if not bool(starts[s])]
            if extra:
                raise PackingError(
                    f"contradictory boundaries: {name} starts an example at token {extra[0]}, "
                    f"cu_seq_lens_q {quote(q)} does not. Give one of the two, or make them agree."
                )
    padding = [False] * layout.examples
    if mask is not None:
        padding = [bool(p) for p in (mask.reshape(-1)[torch.tensor(layout.starts)] == 0).tolist()]
    return Boundaries(list(layout.lengths), padding)


def _without_first(labels: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
    """A copy in which no example's first token is a target: it would be predicted from another."""
    if labels.numel() != layout.tokens:
        return labels
    starts = upload(torch.tensor(layout.starts), labels.device)
    flat = labels.reshape(-1).clone()
    flat.index_fill_(0, starts, -100)
    return flat.view(labels.shape)


def _from_generate(call: Mapping[str, Any], varlen: Mapping[str, Any], release: Version) -> bool:
    """generate() hands over varlen arguments from 4.54 on: with a cache, and at first without."""
    if _cache_of(call) is not None:
        return True
    q, k = varlen.get(VARLEN[0]), varlen.get(VARLEN[1])
    if not compat.generate_hands_over_varlen(release) or q is None or k is None:
        return False
    return q.shape == k.shape and not torch.equal(q, k)


def _cache_of(call: Mapping[str, Any]) -> Any:
    return next((call[name] for name in _CACHES if call.get(name) is not None), None)


def _describe_cache(cache: Any) -> str:
    length = getattr(cache, "get_seq_length", None)
    if length is None:
        return f"a {type(cache).__name__}"
    try:
        return f"a {type(cache).__name__} holding {int(length())} tokens"
    except (TypeError, ValueError, IndexError, AttributeError):
        return f"a {type(cache).__name__}"
