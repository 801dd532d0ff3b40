"""The hook of a patched model that decides for each forward: packed, and by what layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Optional

import torch

from .boundaries import Boundaries, read_boundaries
from .compat import implementation_of, is_compiling, is_exporting, recorder
from .detect import added_attention, foreign_core, lists_changed, stock_core
from .errors import PackingError
from .forwards import HeadForward, owner_of
from .graphs import CHANGED, UNREAD, UNREAD_ROPE, eagerly
from .heads import check_unreached
from .layout import PackedLayout
from .prompts import check_adapters, check_prompts, may_be_prompted
from .reading import (
    VARLEN,
    by_name,
    cache_of,
    check_mapped,
    device_layout,
    explicit,
    fits,
    from_generate,
    handed_over,
    in_generate,
    just_read,
    may_be_segments,
    readable,
    remember_unpacked,
    to_host,
)
from .refusals import (
    check_added,
    check_copy,
    check_head,
    check_inputs,
    check_mask,
    check_options,
    check_recorded,
    check_traced,
    one_result_a_row,
)
from .rope import check_lengths
from .runs import Run, coming, enter
from .targets import has_labels, mask_labels
from .tensors import check_position_ids, fit_position_ids, is_fake, mapped_over, upload
from .varlen import VarlenLayout

if TYPE_CHECKING:
    from .patch import Patch


class ModelHook:
    """Forward pre-hook (with keywords): is this call packed, and where are its examples?

    On the base model it also takes the mask away; on the model around it (a head, a PEFT wrapper)
    it also sees labels, and varlen arguments that an old release's forward would not accept.
    """

    def __init__(
        self, patch: Patch, *, base: bool, pooled: Optional[str] = None, outer: bool = False
    ) -> None:
        self.patch = patch
        self.base = base
        self.pooled = pooled
        #: a wrapper (PEFT) around the model with the head, which wants varlen arguments too
        self.outer = outer
        #: whether a token's label is predicted from the token before it: by a causal head
        self.shifts_labels = False
        #: the module that apply reached; None for one whose forward is its own
        self.home: Optional[torch.nn.Module] = None

    def __call__(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Optional[tuple[tuple[Any, ...], dict[str, Any]]]:
        if is_exporting() and check_recorded(by_name(module, args, kwargs)):
            return None
        if is_compiling():
            call = by_name(module, args, kwargs)
            why = UNREAD if self.patch.rope is None else UNREAD_ROPE
            known = handed_over(call) and not may_be_prompted(call)
            if why is UNREAD and self.pooled is None and known:
                return self._trace(module, call)
            run = self.patch.traced
            if self.base and run is not None and run.positions is call.get("position_ids"):
                return self._enter(module, call)
            return eagerly(why, self._unread, module, args, kwargs)  # type: ignore[no-any-return]
        found = self._decide(module, args, kwargs)
        if self.base:
            coming(self.patch, by_name(module, args, kwargs) if found is None else found[1])
        return found

    def _unread(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Optional[tuple[tuple[Any, ...], dict[str, Any]]]:
        found = self._decide(module, args, kwargs)
        if self.base:
            enter(self.patch)  # what stands for its forward is compiled, and does not
        return found

    def _trace(
        self, module: torch.nn.Module, call: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A packed call inside a compiled graph: no value on the device is read."""
        inputs = call.get("input_ids")
        if inputs is None:
            inputs = call["inputs_embeds"]
        rows, tokens = inputs.shape[0], inputs.shape[1]
        layout = device_layout(call, rows * tokens)
        check_options(call, None, self.patch.config)
        check_mask(call.get("attention_mask"), rows, tokens)
        call["position_ids"] = self._carried(call.get("position_ids"), layout, rows, tokens)
        if self.shifts_labels:
            mask_labels(call, layout)
        call["use_cache"] = False
        if self.outer:
            return (), call
        # Most heads of old releases would not hand varlen arguments on: the base model's hook knows
        # this run by its positions.
        for name in VARLEN:
            call.pop(name, None)
        self.patch.traced = Run(layout, call["position_ids"], layout.max_seqlen, self.patch)
        return self._enter(module, call) if self.base else ((), call)

    def _enter(
        self, module: torch.nn.Module, call: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        patch = self.patch
        if patch.stale is not None or lists_changed(patch, module) or patch.both_ways():
            eagerly(CHANGED, self._check_layers, module)
        call["use_cache"] = False
        self._drop_mask(call)
        return (), call

    def _decide(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Optional[tuple[tuple[Any, ...], dict[str, Any]]]:
        check_copy(module, self.home)
        call = by_name(module, args, kwargs)
        self.patch.traced = None  # of a compiled call that did not end
        if not self.outer:
            check_prompts(module, call)
        given = call.get("position_ids")
        run = self._run(call)
        if run is None:
            if isinstance(given, torch.Tensor):
                self.patch.runs.mark_plain(given)
            return None
        unseen = call["position_ids"] is not given
        self._still_whole(module, unseen=unseen)
        if self.base:
            check_adapters(module)
        if self.base and unseen:
            check_unreached(module, self.patch.family, call, run.layout)
        if self.pooled is not None:
            raise one_result_a_row(self.pooled, run.layout)
        if not self.base and not self.outer:
            check_head(module)
        self._adjust(call, run)
        return (), call

    def passed_by(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments for a forward that may have been called without its hooks (PEFT does)."""
        if not self.in_force(module):
            return args, kwargs
        call = by_name(module, args, kwargs)
        position_ids, mask = call.get("position_ids"), call.get("attention_mask")
        if is_compiling():
            run = self.patch.traced
            seen = run is not None and run.positions is position_ids
            if seen or not has_labels(call):
                return args, kwargs
            return self(module, args, kwargs) or (args, kwargs)
        seen = just_read(position_ids, mask, forget=False)
        if isinstance(position_ids, torch.Tensor) and all(call.get(n) is None for n in VARLEN):
            seen |= self.patch.runs.bound(position_ids, self.patch) is not None
        if seen:
            return args, kwargs
        return self._decide(module, args, kwargs) or (args, kwargs)

    def in_force(self, module: torch.nn.Module) -> bool:
        """False where it was reverted, or undone by somebody else."""
        return any(hook is self for hook in module._forward_pre_hooks.values())

    def _check_layers(self, base: torch.nn.Module) -> None:
        if self.patch.stale is not None:
            raise PackingError(f"{self.patch.stale}.")
        both_ways = self.patch.both_ways()
        if both_ways is not None:
            raise PackingError(
                f"since apply, {both_ways}: this model attends in both directions, and packed rows "
                "are for causal decoders. Give it one example a row."
            )
        check_added(added_attention(self.patch, base))

    def _still_whole(self, model: torch.nn.Module, *, unseen: bool) -> None:
        """Nobody replaced what apply relies on; ``unseen`` if no head saw this call before."""
        patch = self.patch
        if not self.base:
            return
        self._check_layers(model)
        for edit in patch.edits if unseen else ():
            if isinstance(edit.value, HeadForward) and not edit.value.in_place():
                raise PackingError(
                    f"{type(edit.target).__name__}.forward was replaced after apply (now "
                    f"{owner_of(edit.target)}) and called without the model's hooks, so that the "
                    "labels at the examples' first tokens would stay targets. Call "
                    "fa2_pack_patch.apply(model) again, last."
                )
        module = patch.sites[0].module
        name = implementation_of(module, patch.config, patch.span.via)
        patch.reference(name)
        stock = stock_core(module, patch.span, name)
        if stock is not patch.stock:
            reason = foreign_core(stock, patch.span.name)
            if reason is not None:
                raise PackingError(f"since apply, {reason}.")
            patch.stock = stock

    def _run(self, call: dict[str, Any]) -> Optional[Run]:
        inputs = call.get("input_ids")
        if inputs is None:
            inputs = call.get("inputs_embeds")
        position_ids, mask = call.get("position_ids"), call.get("attention_mask")
        varlen = {k: call[k] for k in VARLEN if call.get(k) is not None}
        if not isinstance(inputs, torch.Tensor) or inputs.dim() < 2:
            return None
        rows, tokens = int(inputs.shape[0]), int(inputs.shape[1])
        if not varlen and (mapped_over(position_ids) or mapped_over(mask)):
            check_mapped(position_ids, mask)
            return None
        if not varlen and (is_fake(position_ids) or is_fake(mask)):
            by_what = recorder()
            if by_what is not None:
                check_recorded(call, by_what)
            return None
        if isinstance(position_ids, torch.Tensor) and not varlen:
            bound = self.patch.runs.bound(position_ids, self.patch)
            if bound is not None:
                return bound
            if position_ids.is_meta:
                return None  # no values, no examples
        if varlen and from_generate(call, varlen, self.patch.release):
            varlen = {}
        known = self.patch.explicit_seen and self.patch.rope is None
        if varlen and known and handed_over(call, inputs.device):
            return self._handed_over(call, position_ids, mask, rows, tokens)
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
            odd = ids.shape[1] != tokens or ids.shape[0] not in (1, rows)
            if odd and not varlen and cache_of(call) is not None:
                return None
            ids = fit_position_ids(position_ids, rows, tokens)
        plain = mask if fits(mask, rows, tokens) else None
        host_ids, host_mask, host_cu = to_host(ids, plain, varlen)
        if varlen:
            found: Optional[Boundaries] = explicit(
                varlen, host_cu, host_ids, host_mask, rows, tokens
            )
        else:
            found = read_boundaries(host_ids, host_mask) if readable(host_ids, host_mask) else None
        if found is not None and not varlen and found.over_padding_alone(tokens) and in_generate():
            found = None
        if found is None:
            remember_unpacked(None if self.base else (position_ids, mask))
            return None
        check_traced()
        wide = mask is not None and getattr(mask, "shape", None) != (rows, tokens)
        if wide and cache_of(call) is not None:
            return None  # generation into a static cache brings a mask of its own
        check_mask(mask, rows, tokens)
        check_inputs(call)
        layout = PackedLayout.from_lengths(found.lengths, device=device, padding=found.padding)
        check_options(call, layout, self.patch.config)
        self.patch.explicit_seen |= bool(varlen)
        return self._bind(call, layout, ids, host_ids, plain, rows, tokens, device)

    def _handed_over(
        self, call: dict[str, Any], position_ids: Any, mask: Any, rows: int, tokens: int
    ) -> Run:
        """Varlen arguments on a GPU, after a first such call was read: nothing waits for it."""
        check_traced()
        self.patch.doubts.read()
        layout = device_layout(call, rows * tokens)
        check_options(call, None, self.patch.config)
        check_inputs(call)
        check_mask(mask, rows, tokens)
        carried = self._carried(position_ids, layout, rows, tokens)
        self.patch.doubts.add(
            layout.cu_seqlens,
            call[VARLEN[1]],
            layout.max_seqlen,
            None if position_ids is None else carried,
            rows,
            tokens,
        )
        run = Run(layout, carried, layout.max_seqlen, self.patch)
        self.patch.runs.bind(carried, run)
        call["position_ids"] = carried
        return run

    def _carried(
        self, position_ids: Any, layout: VarlenLayout, rows: int, tokens: int
    ) -> torch.Tensor:
        """The model's own int64 ``(rows, tokens)`` copy of the positions, made from a layout."""
        if position_ids is None:
            starts = layout.cu_seqlens.to(torch.int64)[layout.owners()]
            index = torch.arange(rows * tokens, device=layout.cu_seqlens.device)
            return (index - starts).view(rows, tokens)
        ids = fit_position_ids(position_ids, rows, tokens)
        return ids.to(dtype=torch.int64, copy=True).contiguous()

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
        positions = layout.positions().view(rows, tokens) if host_ids is None else host_ids
        # The model's own contiguous int64 copy: nobody else writes to it, and it carries the run.
        if ids is None or any(layout.padding):
            own = positions.clone(memory_format=torch.contiguous_format)
            for start, length, pad in zip(layout.starts, layout.lengths, layout.padding):
                if pad:  # a position of padding must not lengthen a dynamic rope
                    own.view(-1)[start : start + length] = 0
            positions = own
            carried = upload(own.clone(), device)
        else:
            carried = ids.to(device=device, dtype=torch.int64, copy=True).contiguous()
        if self.patch.rope is not None and not all(layout.padding):
            last = [s + n - 1 for s, n in zip(layout.starts, layout.lengths)]
            ends = torch.tensor(last, device="cpu")
            # Plus one as Python ints: as int64 the largest would wrap.
            reach = [at + 1 for at in positions.reshape(-1)[ends].tolist()]
            check_lengths(self.patch.rope, layout, reach, self.patch.base)
        run = Run(layout, positions, int(positions.max()) + 1, self.patch)
        self.patch.runs.bind(carried, run)
        call["position_ids"] = carried
        return run

    def _adjust(self, call: dict[str, Any], run: Run) -> None:
        for name in VARLEN:
            call.pop(name, None)
        call["use_cache"] = False
        mask = call.get("attention_mask")
        if self.base:
            self._drop_mask(call)
        elif isinstance(mask, torch.Tensor):
            call["attention_mask"] = (mask != 0).to(mask.dtype)
        if self.shifts_labels:
            mask_labels(call, run.layout)

    def _drop_mask(self, call: dict[str, Any]) -> None:
        call["attention_mask"] = None
        if self.patch.mask_placeholder:
            device = call["position_ids"].device
            call["attention_mask"] = torch.zeros(1, 1, 1, 1, device=device)
