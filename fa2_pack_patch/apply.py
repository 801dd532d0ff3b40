"""Patch a model in place, and undo it: first a plan that is checked whole, then the commit."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Optional

import torch

from . import compat, kernels, twin
from .counting import CountHook
from .detect import (
    Detection,
    around,
    attention_modules,
    check_module,
    class_of,
    detect,
    find_base,
    is_pretrained,
    judge_config,
    lists_of,
)
from .errors import UnsupportedModelError, UnsupportedReleaseError
from .forwards import BaseForward, HeadForward, PackedForward
from .hooks import ModelHook
from .interceptors.method import PackedMethod
from .patch import ATTRIBUTE, Edit, Patch, PatchReport, Site
from .report import Verdict
from .rope import RotaryByExample, rope_rule, takes_row_length

#: One model may be applied to, and reverted, from several threads.
_LOCK = threading.RLock()


def apply(
    model: torch.nn.Module, *, kernel: str = "auto", allow_unverified: bool = False
) -> PatchReport:
    """Make packed rows of a Transformers model right, in place.

    From then on a call whose ``position_ids`` start anew inside a row (or which brings segment ids
    as ``attention_mask``, or ``cu_seq_lens_q/k`` and ``max_length_q/k``) is attended example by
    example; every other call is what it was. Applying twice is harmless.

    Args:
        model: a causal language model of a supported family, its bare base model, or a wrapper
            (PEFT, DDP, FSDP, ``torch.compile``) around it.
        kernel: "auto", "flash_attn", "flash_attn_3", "torch_flash" or "sdpa".
        allow_unverified: go on with a Transformers newer than the newest verified one without a
            proof. By default a two-layer twin of the config must pass :func:`fa2_pack_patch.verify`
            on the CPU first, once on each machine.

    Returns:
        A report of what was done.

    Raises:
        UnsupportedModelError: with every reason; the model is unchanged.
        UnsupportedReleaseError: Transformers older than 4.34; or newer than the verified ones, or
            with altered modeling code, and the twin did not pass.
        KernelUnavailableError: ``kernel`` is unknown or cannot serve this model here.
    """
    check_module(model)
    if kernel != "auto":
        kernels.get(kernel)
    release = compat.release()
    note = compat.check_release(release)  # a twin may prove it, see below
    with _LOCK:
        patch = _patch_of(model)
        if patch is not None:
            report = _still(patch, model, kernel)
            if report is not None:
                return report
        earlier = _heads(patch)
        with _set_aside(patch), _strays_set_aside(model, patch):
            found = detect(model, release)
            _join_heads(found, earlier)
            if found.reasons:
                raise UnsupportedModelError(found.subject, found.reasons + ([note] if note else []))
            return _plan(found, kernel, _proved(found, note, trusted=allow_unverified))


@contextmanager
def _set_aside(patch: Optional[Patch]) -> Iterator[None]:
    """Undo an earlier patch for another one; put it back where there is none in the end."""
    if patch is None:
        yield
        return
    edits, report = list(patch.edits), patch.report
    patch.undo()
    try:
        yield
    except BaseException:
        if report is not None:  # else it was half undone when it came here
            patch.commit(edits)
            patch.report = report
        raise


@contextmanager
def _strays_set_aside(model: torch.nn.Module, patch: Optional[Patch]) -> Iterator[None]:
    """:func:`_let_go`; what it undid is done again where there is no patch in the end."""
    gone = _let_go(model, patch)
    try:
        yield
    except BaseException:
        for other, edits in gone:
            other.commit(edits)
        raise


def _let_go(model: torch.nn.Module, patch: Optional[Patch]) -> list[tuple[Patch, list[Edit]]]:
    """Undo what was done to a head in ``model`` whose base model is another one by now."""
    gone = []
    for module in model.modules():
        for hook in list(module._forward_pre_hooks.values()):
            if isinstance(hook, ModelHook) and not hook.base and hook.patch is not patch:
                other = hook.patch
                edits = [edit for edit in other.edits if edit.target is module]
                other.edits = [edit for edit in other.edits if edit.target is not module]
                for edit in reversed(edits):
                    edit.undo()
                gone.append((other, edits))
    return gone


def _still(patch: Patch, model: torch.nn.Module, kernel: str) -> Optional[PatchReport]:
    """The report of an earlier :func:`apply` that still holds; None when it must be done anew."""
    outside = around(model)
    if outside.reasons:
        raise UnsupportedModelError(outside.subject, outside.reasons)
    return patch.report if kernel == patch.kernel and _holds(patch, outside) else None


def _holds(patch: Patch, outside: Detection) -> bool:
    """Whether an earlier :func:`apply` covers all that is around the model by now."""
    if patch.stale is not None or outside.base is None:
        return False
    known = {id(edit.target) for edit in patch.edits}
    attention = attention_modules(outside.base, patch.family, patch.span)
    same = [id(module) for _, module in attention] == [id(site.module) for site in patch.sites]
    here = all(id(holder) in known for holder in outside.holders)
    return same and here and not any(_undone(edit) for edit in patch.edits)


def _undone(edit: Edit) -> bool:
    """Whether somebody else took away what :func:`apply` put there, or a head's forward."""
    value = edit.value
    return edit.gone() or (isinstance(value, HeadForward) and not value.in_place())


def _heads(patch: Optional[Patch]) -> list[tuple[torch.nn.Module, Optional[str]]]:
    """The heads and wrappers that an earlier :func:`apply` reached, and what is said of pooled."""
    edits = [] if patch is None else patch.edits
    hooks = [(e.target, e.value) for e in edits if isinstance(e.value, ModelHook)]
    return [(target, hook.pooled) for target, hook in hooks if not hook.base]


def _join_heads(found: Detection, earlier: list[tuple[torch.nn.Module, Optional[str]]]) -> None:
    """Heads that share a base model stay patched when another one comes to it."""
    here = {id(holder) for holder in found.holders}
    for head, pooled in earlier:
        if id(head) not in here and any(module is found.base for module in head.modules()):
            found.holders.append(head)
            if pooled is not None:
                found.pooled[id(head)] = pooled


def _shifts_labels(holder: torch.nn.Module, found: Detection) -> bool:
    """Whether a token's label is predicted from the token before it: not by per-token heads."""
    assert found.family is not None
    inside = {id(module) for module in holder.modules()}
    heads = {class_of(head).__name__ for head in found.holders if id(head) in inside}
    return heads.isdisjoint(found.family.per_token)


def _proved(found: Detection, note: Optional[str], *, trusted: bool = False) -> Optional[str]:
    """For a release or modeling code that nobody verified: what a twin of the config gave.

    None is tried if it is ``trusted`` without.
    """
    assert found.family is not None
    instead = "install an earlier Transformers or a later fa2_pack_patch"
    if note is None:
        changed = twin.altered(found.family)
        if changed is None:
            return None
        release = f"transformers {compat.release()}"
        note = f"{changed} of {release} is not as it was released"
        instead = f"reinstall {release}, so that it is"
    if trusted:
        return f"{note}, and taken without a proof (allow_unverified=True); call verify(model)"
    return twin.check(found.config, found.family, found.implementation, note, instead)


def _plan(found: Detection, kernel: str, note: Optional[str]) -> PatchReport:
    assert found.base is not None and found.family is not None and found.span is not None
    config: Any = found.base.config
    release = compat.release()
    patch = Patch(found.family, found.span, release, config, kernel)
    patch.rope = rope_rule(config)
    flash = compat.implementation_kind(found.implementation) == "flash"
    if flash and compat.reads_flash_mask(found.family.module):
        patch.mask_placeholder = False
    edits = [Edit(found.base, ATTRIBUTE, patch)]  # first, so that it is the last to be undone
    for index, (label, module) in enumerate(found.attention):
        site = Site(patch, module, index, label)
        patch.sites.append(site)
        edits += _site_edits(site)
        patch.reference(compat.implementation_of(module, config, found.span.via))
    decide, count = ModelHook(patch, base=True), CountHook(patch)
    edits.append(Edit(found.base, "pre", decide, hook="pre"))
    edits.append(Edit(found.base, "post", count, hook="post"))
    edits.append(_forward_edit(found.base, BaseForward(found.base, decide, count)))
    patch.lists = lists_of(found.base, found.attention)
    for holder in found.holders:
        pooled = found.pooled.get(id(holder))
        hook = ModelHook(patch, base=False, pooled=pooled, outer=not is_pretrained(holder))
        hook.shifts_labels = _shifts_labels(holder, found)
        edits.append(Edit(holder, "pre", hook, hook="pre"))
        if not hook.outer:
            edits.append(_forward_edit(holder, HeadForward(holder, hook)))
    chosen = _kernel_now(patch)
    notes = [note] if note else []
    notes += found.notes
    if found.pooled:
        notes.append(
            f"{', '.join(found.pooled.values())} gives one result a row: packed rows will be "
            "refused"
        )
    patch.report = PatchReport(
        family=found.family.family,
        release=str(release),
        implementation=found.implementation,
        interceptor=found.span.via,
        kernel=chosen,
        layers=len(patch.sites),
        verified=note is None,
        notes=tuple(notes),
        edits=tuple(str(e) for e in edits),
    )
    patch.commit(edits)
    return patch.report


def _site_edits(site: Site) -> list[Edit]:
    module, span = site.module, site.span
    edits = [_forward_edit(module, PackedForward(site))]
    if span.via == "method":
        edits.append(Edit(module, span.name, PackedMethod(site)))
    if span.packed_class is not None and not hasattr(module, "_flash_attn_uses_top_left_mask"):
        edits.append(Edit(module, "_flash_attn_uses_top_left_mask", False))
    rotary = getattr(module, "rotary_emb", None)
    forgetful = compat.rotary_without_positions(site.patch.release, site.family.family)
    if (site.patch.rope is not None or forgetful) and takes_row_length(rotary):
        assert isinstance(rotary, torch.nn.Module)
        edits.append(_forward_edit(rotary, RotaryByExample(rotary, site.patch)))
    return edits


def _forward_edit(module: torch.nn.Module, value: Any) -> Edit:
    """``value`` in place of a module's forward; accelerate's hooks stay around it."""
    slot = "_old_forward" if "_hf_hook" in module.__dict__ else "forward"
    value.before = module.__dict__.get(slot)
    return Edit(module, slot, value)


def _kernel_now(patch: Patch) -> str:
    """The kernel that would serve the model on its present device and in its present dtype."""
    module = patch.sites[0].module
    weight = next((p for p in module.parameters() if p.is_floating_point()), None)
    if weight is None or weight.device.type == "meta":
        return patch.kernel
    config = patch.config
    heads = int(config.num_attention_heads)
    width = getattr(module, "head_dim", None) or getattr(config, "head_dim", None)
    call = kernels.AttentionCall(
        device=weight.device,
        dtype=weight.dtype,
        heads=heads,
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(width or config.hidden_size // heads),
        window=None,
        softcap=None,
        dropout=0.0,
        needs_grad=False,
    )
    return kernels.choose(patch.kernel, call).name


def _patch_of(model: torch.nn.Module) -> Optional[Patch]:
    for _, base, _ in find_base(model):
        patch = base.__dict__.get(ATTRIBUTE)
        if isinstance(patch, Patch):
            return patch
    return None


def revert(model: torch.nn.Module) -> bool:
    """Undo :func:`apply`: every object that was there before is there again.

    Returns:
        Whether the model was patched.

    Raises:
        UnsupportedModelError: ``model`` is no module.
    """
    check_module(model, "reverted")
    with _LOCK:
        patch = _patch_of(model)
        strays = _let_go(model, patch)
        if patch is None:
            return bool(strays)
        patch.undo()
        return True


def is_applied(model: torch.nn.Module) -> bool:
    """Whether ``model``, or the model inside its wrappers, is patched.

    Raises:
        UnsupportedModelError: ``model`` is no module.
    """
    check_module(model, "looked through for a patch")
    return _patch_of(model) is not None


@contextmanager
def applied(
    model: torch.nn.Module, *, kernel: str = "auto", allow_unverified: bool = False
) -> Iterator[PatchReport]:
    """:func:`apply` for a ``with`` block; a model that was patched before stays patched."""
    check_module(model)
    before = is_applied(model)
    report = apply(model, kernel=kernel, allow_unverified=allow_unverified)
    try:
        yield report
    finally:
        if not before:
            revert(model)


def _earlier(model: torch.nn.Module) -> Optional[Verdict]:
    """The verdict on a model whose patch still holds, as :func:`apply` leaves it; else None."""
    patch = _patch_of(model)
    if patch is None or patch.report is None:
        return None
    outside = around(model)
    if not outside.reasons and not _holds(patch, outside):
        return None
    name, release = patch.family.family, str(compat.release())
    if outside.reasons:
        return Verdict(outside.subject, name, release, tuple(outside.reasons))
    notes = ("it is patched already", *patch.report.notes)
    return Verdict(outside.subject, name, release, (), notes)


def supports(model_or_config: Any) -> Verdict:
    """Whether :func:`apply` would accept a model, or a model of a config; all reasons if not.

    The result is true in a condition when it would; the model is not changed. On a release, or with
    modeling code, that nobody verified, the two-layer twin is tried here as :func:`apply` tries it:
    under two seconds, once on each machine. A config is taken to be loaded as it says, else as
    ``sdpa``.
    """
    release = compat.release()
    reasons: list[str] = []
    note = None
    try:
        note = compat.check_release(release)
    except UnsupportedReleaseError as error:
        reasons.append(str(error))
    if isinstance(model_or_config, torch.nn.Module):
        earlier = _earlier(model_or_config)
        if earlier is not None:
            return earlier
        found = detect(model_or_config, release)
    else:
        found = judge_config(model_or_config, release)
    reasons += found.reasons
    notes = tuple(found.notes)
    if not reasons:
        try:
            note = _proved(found, note)
        except UnsupportedReleaseError as error:
            reasons.append(str(error))
    if note is not None and not any(note in r for r in reasons):
        notes = (note, *notes)
    name = found.family.family if found.family else None
    return Verdict(found.subject, name, str(release), tuple(reasons), notes)
