"""Which family a model is, whether its code is the one known, and every reason if not."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
from packaging.version import Version

from . import compat
from .errors import UnsupportedModelError
from .interceptors import INTERCEPTORS, home_of
from .patch import ATTRIBUTE, FORWARDS, Patch, absent
from .prompts import by_the_row
from .refusals import not_causal
from .registry import Family, Span, by_base_class, by_model_type, families

_REFUSED_WRAPPERS = {
    "DataParallel": "nn.DataParallel copies the model at each forward; use DistributedDataParallel",
}
_CAUSAL = "packed rows are for causal decoders; give one"


@dataclass
class Detection:
    """A model, or a config, taken apart: what :mod:`fa2_pack_patch.apply` needs to plan."""

    subject: str
    family: Optional[Family] = None
    span: Optional[Span] = None
    base: Optional[torch.nn.Module] = None
    holders: list[torch.nn.Module] = field(default_factory=list)
    pooled: dict[int, str] = field(default_factory=dict)
    attention: list[tuple[str, torch.nn.Module]] = field(default_factory=list)
    implementation: str = ""
    config: Any = None
    reasons: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def class_of(module: torch.nn.Module) -> type:
    """A module's class under the subclass that FSDP2 makes of it."""
    cls = type(module)
    if cls.__name__.startswith("FSDP") and any(c.__name__ == "FSDPModule" for c in cls.__mro__):
        return cls.__mro__[2] if cls.__mro__[1].__name__ == "FSDPModule" else cls.__mro__[1]
    return cls


def is_pretrained(module: torch.nn.Module) -> bool:
    """Whether a module is a Transformers model (its class, without importing Transformers)."""
    return any(
        c.__name__ == "PreTrainedModel" and c.__module__.startswith("transformers.")
        for c in type(module).__mro__
    )


def find_base(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module, Family]]:
    """The base models of known families inside ``model``."""
    found = []
    for name, module in model.named_modules():
        cls = class_of(module)
        family = by_base_class(cls.__module__, cls.__name__)
        if family is not None:
            found.append((name, module, family))
    return found


def check_module(model: object, what: str = "patched for packed rows") -> None:
    """Refuse what is no module.

    Raises:
        UnsupportedModelError: quotes it.
    """
    if not isinstance(model, torch.nn.Module):
        reason = f"a torch.nn.Module was expected, got {model!r:.80}"
        if isinstance(model, str):
            reason += "; load it first, with AutoModelForCausalLM.from_pretrained"
        raise UnsupportedModelError(type(model).__name__, [reason], what)


def around(model: torch.nn.Module) -> Detection:
    """The wrappers and heads around the one base model in ``model``, and the reasons against."""
    result = Detection(subject=type(model).__name__)
    _wrappers(model, result)
    for _, base, family in find_base(model)[:1]:
        result.base = base
        _holders(model, base, family, result)
    return result


def detect(model: torch.nn.Module, release: Version) -> Detection:
    """Take a model apart; all reasons against it are in the result."""
    result = Detection(subject=type(model).__name__)
    _wrappers(model, result)
    bases = find_base(model)
    if not bases:
        result.reasons += why_no_family(model)
        return result
    if len(bases) > 1:
        names = ", ".join(f"{n or '(root)'}: {type(m).__name__}" for n, m, _ in bases)
        result.reasons.append(
            f"it holds {len(bases)} language models ({names}); take one at a time"
        )
        return result
    _, base, family = bases[0]
    result.base, result.family = base, family
    config: Any = base.config
    result.config = config
    _holders(model, base, family, result)
    result.span = _span(family, release, result)
    result.reasons += config_reasons(config, family, release)
    result.notes += [n.text for n in family.notes if n.releases.contains(release, prereleases=True)]
    if result.span is not None:
        _attention(base, family, result.span, config, release, result)
    return result


def _wrappers(model: torch.nn.Module, result: Detection) -> None:
    for module in model.modules():
        reason = _REFUSED_WRAPPERS.get(type(module).__name__)
        if reason:
            result.reasons.append(reason)


def _holders(
    model: torch.nn.Module, base: torch.nn.Module, family: Family, result: Detection
) -> None:
    """The models around the base: heads, PEFT wrappers; each must be known or harmless."""
    around = [m for m in model.modules() if m is not base and any(c is base for c in m.modules())]
    for module in around:
        cls = class_of(module)
        if is_pretrained(module):
            if cls.__module__ != family.module:
                result.reasons.append(
                    f"its class {cls.__name__} comes from {cls.__module__}, not from "
                    f"{family.module}; load it as {family.causal}, with trust_remote_code=False"
                )
            elif cls.__name__ in family.pooled:
                result.pooled[id(module)] = cls.__name__
            elif cls.__name__ != family.causal and cls.__name__ not in family.per_token:
                known = [family.causal, *family.per_token, *family.pooled]
                result.reasons.append(
                    f"the head {cls.__name__} is not known; known: {known}; use one of them, "
                    "or the base model in it"
                )
            result.holders.append(module)
        elif any(c.__name__ == "PeftModel" for c in cls.__mro__):
            active = getattr(module, "active_peft_config", None)
            reason = by_the_row(active)
            result.reasons += [] if reason is None else [f"{reason}; use LoRA"]
            result.holders.append(module)


def _span(family: Family, release: Version, result: Detection) -> Optional[Span]:
    span = family.span(release)
    if span is None:
        result.reasons.append(
            f"family {family.family} is known from transformers {family.since} on, not in "
            f"{release}; install a later Transformers"
        )
    return span


def config_reasons(config: Any, family: Family, release: Version) -> list[str]:
    """The registry's refusals that a config meets."""
    reasons = []
    for refusal in family.refusals:
        if not refusal.releases.contains(release, prereleases=True):
            continue
        if all(getattr(config, key, None) == value for key, value in refusal.when.items()):
            when = ", ".join(f"{k}={v!r}" for k, v in refusal.when.items())
            reasons.append(f"config has {when}: {refusal.reason}")
    reason = not_causal(config, [], release)
    return reasons if reason is None else [*reasons, f"{reason}, but {_CAUSAL}"]


def _attention_classes(family: Family, span: Span) -> set[type]:
    code = importlib.import_module(family.module)
    return {getattr(code, name) for name in span.classes if hasattr(code, name)}


def attention_modules(
    base: torch.nn.Module, family: Family, span: Span
) -> list[tuple[str, torch.nn.Module]]:
    """The attention modules of a base model and their names in it."""
    known = _attention_classes(family, span)
    return [(n, m) for n, m in base.named_modules() if class_of(m) in known]


def lists_of(base: torch.nn.Module, attention: list[tuple[str, torch.nn.Module]]) -> dict[str, int]:
    """The lists of layers that the attention modules lie in: how many layers each holds."""
    lists = [(n, m) for n, m in base.named_modules() if isinstance(m, torch.nn.ModuleList)]
    inside = [name for name, _ in attention]
    return {n: len(m) for n, m in lists if any(name.startswith(f"{n}.") for name in inside)}


def lists_changed(patch: Patch, base: torch.nn.Module) -> bool:
    """Whether a list of layers holds fewer or more than it did at apply."""
    for name, layers in patch.lists.items():
        module: Optional[torch.nn.Module] = base
        for part in name.split("."):
            module = None if module is None else module._modules.get(part)
        if module is None or len(module._modules) != layers:
            return True
    return False


def added_attention(patch: Patch, base: torch.nn.Module) -> list[str]:
    """The attention modules that came into a patched model after apply.

    All modules are looked through only if a list of layers changed.
    """
    if not lists_changed(patch, base):
        return []
    ours = {id(site.module) for site in patch.sites}
    found = attention_modules(base, patch.family, patch.span)
    return [name for name, module in found if id(module) not in ours]


def _attention(
    base: torch.nn.Module,
    family: Family,
    span: Span,
    config: Any,
    release: Version,
    result: Detection,
) -> None:
    code = importlib.import_module(family.module)
    known = _attention_classes(family, span)
    result.attention = attention_modules(base, family, span)
    layers = getattr(config, "num_hidden_layers", None)
    if len(result.attention) != layers:
        names = sorted({type(m).__name__ for _, m in base.named_modules() if _mixes(m)})
        result.reasons.append(
            f"{len(result.attention)} attention modules of {sorted(c.__name__ for c in known)} for "
            f"{layers} layers; token-mixing modules found: {names or 'none'}. Its layers were "
            "replaced or left out; load the model with its family's own layers"
        )
        return
    patch = base.__dict__.get(ATTRIBUTE)
    edits = patch.edits if isinstance(patch, Patch) else []
    ours = {id(edit.value): edit.before for edit in edits if edit.name in FORWARDS}
    for label, module in result.attention:
        reason = _foreign(module, label, ours)
        if reason is not None:
            result.reasons.append(reason)
            break
    first = result.attention[0][1]
    result.implementation = compat.implementation_of(first, config, span.via)
    result.reasons += _unpackable(result.implementation)
    owner: Any = (
        class_of(first) if span.packed_class is None else getattr(code, span.packed_class, None)
    )
    if owner is None:
        result.reasons.append(
            f"{family.module} has no class {span.packed_class}; its code is not the one verified: "
            f"reinstall transformers {release}"
        )
        return
    reason = _not_its_own(owner)
    if reason is None:
        reason = INTERCEPTORS[span.via].missing(owner.forward, span.name, owner)
        reason = reason and f"{reason}: reinstall transformers {release}"
    if reason is None:
        reason = foreign_core(stock_core(first, span, result.implementation), span.name)
    if reason is not None:
        result.reasons.append(reason)
    reason = not_causal(None, result.attention, release)
    result.reasons += [] if reason is None else [f"{reason}, but {_CAUSAL}"]


def _unpackable(implementation: str) -> list[str]:
    if compat.implementation_kind(implementation) is not None:
        return []
    return [
        f"loaded with attn_implementation={implementation!r}, which cannot be packed; "
        "load with 'sdpa', 'eager', 'flash_attention_2', 'flash_attention_3' or a hub kernel "
        "whose name says flash"
    ]


def _mixes(module: torch.nn.Module) -> bool:
    return bool(
        re.search(r"Attention|Mamba|Mixer|DeltaNet|Recurrent|Conv1d", type(module).__name__)
    )


def stock_core(module: torch.nn.Module, span: Span, implementation: str) -> Any:
    """What an attention module's own forward calls its attention by; None where that is ours."""
    if "/" in implementation:  # a hub kernel, whose function may be the kernel's own
        return None
    return INTERCEPTORS[span.via].stock(class_of(module), span.name, implementation)


def foreign_core(function: Any, name: str) -> Optional[str]:
    """Why what :func:`stock_core` found is not Transformers' own, or None when it is."""
    home = home_of(function)
    if function is None or home.startswith("transformers."):
        return None
    what = getattr(function, "__qualname__", None) or type(function).__qualname__
    return (
        f"the attention this model was loaded with now goes to {home}.{what} instead of "
        f"Transformers' own (reached by {name}); packed rows would bypass it: undo that patch, or "
        "go on without fa2_pack_patch"
    )


def _not_its_own(owner: type) -> Optional[str]:
    inner: Any = inspect.unwrap(owner.forward)  # type: ignore[attr-defined]
    home = getattr(inner, "__module__", None)
    if home == owner.__module__ and inner.__name__ == "forward":
        return None
    return (
        f"{owner.__name__}.forward was replaced by {home_of(inner)}."
        f"{getattr(inner, '__qualname__', type(inner).__qualname__)}; "
        "undo that patch, or apply fa2_pack_patch to a fresh process without it"
    )


def _foreign(module: torch.nn.Module, label: str, ours: Mapping[int, Any]) -> Optional[str]:
    reason = _not_its_own(class_of(module))
    if reason is not None:
        return reason
    forward = module.__dict__.get("forward")
    forward = ours.get(id(forward), forward)  # what was there before apply
    if forward is None or absent(forward) or "_hf_hook" in module.__dict__:
        return None
    own = getattr(forward, "__func__", None) is type(module).forward
    if own and forward.__self__ is module:  # accelerate leaves that when its hooks are removed
        return None
    return (
        f"{label}.forward was replaced on the module itself by {home_of(forward)}; undo that patch "
        "before apply"
    )


def why_no_family(model: torch.nn.Module) -> list[str]:
    pretrained = next(
        (m for m in model.modules() if is_pretrained(m) or hasattr(m, "config")), None
    )
    if pretrained is None:
        return [f"{type(model).__name__} holds no Transformers model; supported: {_supported()}"]
    model_type = getattr(getattr(pretrained, "config", None), "model_type", None)
    family = by_model_type(str(model_type))
    if family is not None:
        cls = type(pretrained)
        return [
            f"model_type {model_type!r} is supported as {family.module}.{family.base}, but no such "
            f"module is in this {cls.__module__}.{cls.__name__} (remote code, or a class of "
            "somebody else's); load it with trust_remote_code=False"
        ]
    return [_unknown(model_type)]


def _unknown(model_type: Any) -> str:
    return f"model_type {model_type!r} is not in the registry; supported: {_supported()}"


def _supported() -> str:
    return ", ".join(sorted(t for f in families().values() for t in f.model_types))


def judge_config(config: Any, release: Version) -> Detection:
    """The verdict on a config alone: family, release, and the registry's refusals."""
    model_type = getattr(config, "model_type", None)
    if not isinstance(model_type, str):
        return Detection(
            type(config).__name__,
            reasons=[f"a model or its config was expected, got {config!r:.80}; load it first"],
        )
    result = Detection(f"config of model_type {model_type!r}", config=config)
    result.family = family = by_model_type(model_type)
    if family is None:
        result.reasons.append(_unknown(model_type))
        return result
    result.span = _span(family, release, result)
    result.reasons += config_reasons(config, family, release)
    # The property of 4.36 to 4.47 says eager where nothing was chosen yet.
    result.implementation = vars(config).get("_attn_implementation_internal") or "sdpa"
    result.reasons += _unpackable(result.implementation)
    auto = getattr(config, "auto_map", None)
    if auto:
        result.notes.append(
            f"the config has an auto_map ({sorted(auto)}): load it without remote code"
        )
    result.notes += [n.text for n in family.notes if n.releases.contains(release, prereleases=True)]
    return result
