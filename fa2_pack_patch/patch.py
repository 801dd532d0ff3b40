"""The state of one patched model: its attention sites, its edits, and how to undo them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import CellType
from typing import Any, Callable, Optional

import torch
from packaging.version import Version
from torch.utils.hooks import RemovableHandle

from . import compat
from .errors import PackingError
from .refusals import not_causal
from .registry import Family, Reference, Span
from .rope import RopeRule
from .runs import Run, Runs
from .varlen import Doubts

#: Where a patched base model keeps its :class:`Patch`.
ATTRIBUTE = "_fa2_pack_patch"

#: What an attribute that was not there before is said to have been.
ABSENT = "<absent>"


def absent(value: Any) -> bool:
    """Whether what was there before an edit was nothing."""
    return isinstance(value, str) and value == ABSENT


#: Where a module's forward may be: as its own attribute, or under accelerate's hooks.
FORWARDS = ("forward", "_old_forward")

_HOOK_DICTIONARIES = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


@dataclass
class Site:
    """One attention module of a patched model."""

    patch: Patch
    module: torch.nn.Module
    index: int
    label: str
    #: the class's forward, and the same with names rebound; made at the first packed call
    rebound: Optional[tuple[Callable[..., Any], Callable[..., Any]]] = field(
        default=None, repr=False, compare=False
    )
    #: what the last call of the kernel was like, and the kernel
    choice: Optional[tuple[tuple[Any, ...], Any]] = field(default=None, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "rebound": None, "choice": None}

    @property
    def family(self) -> Family:
        return self.patch.family

    @property
    def span(self) -> Span:
        return self.patch.span

    @property
    def config(self) -> Any:
        return self.patch.config

    @property
    def owner(self) -> type:
        """The class whose forward runs on packed calls."""
        if self.span.packed_class is None:
            return type(self.module)
        owner = getattr(sys.modules[self.family.module], self.span.packed_class)
        assert isinstance(owner, type)
        return owner

    @property
    def forward(self) -> Callable[..., Any]:
        return self.owner.forward  # type: ignore[attr-defined,no-any-return]

    def core(
        self, scale: Optional[float], handed_window: Optional[int], softcap: Optional[float]
    ) -> tuple[Optional[float], Optional[int], Optional[float]]:
        """Scale, window (keys a query sees, itself included) and softcap of this layer.

        Packed must equal what this very model gives for each example alone, so for a flash
        implementation they are what the release hands to flash-attn, and for eager and sdpa what
        its masks and its core do, by the registry's reference rules.
        """
        name = compat.implementation_of(self.module, self.config, self.span.via)
        rule, flash = self.patch.reference(name)
        if flash:
            sees = handed_window + self.patch.window_extra if handed_window else None
            return scale, sees, softcap or None
        if rule is None:
            return scale, None, None
        if rule.scale == "default":
            scale = None
        if rule.softcap:
            softcap = getattr(self.config, "attn_logit_softcapping", None)
        return scale, self._reference_window(rule, handed_window), softcap if rule.softcap else None

    def drops_out(self) -> bool:
        """Whether attention has dropout, as this model was loaded; Falcon's has as flash alone."""
        name = compat.implementation_of(self.module, self.config, self.span.via)
        rule, _ = self.patch.reference(name)
        return rule is None or rule.dropout

    def _reference_window(self, rule: Any, handed_window: Optional[int]) -> Optional[int]:
        width = getattr(self.config, "sliding_window", None)
        if rule.window == "none" or not width:
            return None
        if rule.condition and not getattr(self.config, rule.condition, None):
            return None
        layer = getattr(self.module, "layer_idx", self.index)
        if rule.layers == "kernel" and not handed_window:
            return None
        if rule.layers == "even" and layer % 2:
            return None
        if rule.layers == "layer_types":
            types = getattr(self.config, "layer_types", None)
            if types is None or types[layer] != "sliding_attention":
                return None
        return int(width) + (1 if rule.window == "W+1" else 0)


@dataclass
class Edit:
    """One reversible change: an instance attribute, or a hook."""

    target: torch.nn.Module
    name: str
    value: Any
    hook: Optional[str] = None  # "pre" or "post"
    before: Any = ABSENT
    hook_id: Optional[int] = None

    def commit(self) -> None:
        if self.hook == "pre":
            self.hook_id = self.target.register_forward_pre_hook(self.value, with_kwargs=True).id
        elif self.hook == "post":
            self.hook_id = self.target.register_forward_hook(self.value, with_kwargs=True).id
        else:
            own = self.target.__dict__
            self.before = own.get(self.name, ABSENT)
            own[self.name] = self.value
            cell = _cell(own.get("forward")) if self.name == "_old_forward" else None
            if cell is not None:
                cell.cell_contents = self.value

    def gone(self) -> bool:
        """Whether it was undone by somebody else: its hook taken away, or stock's forward back."""
        own = self.target.__dict__
        if self.hook is not None:
            hooks = own["_forward_pre_hooks" if self.hook == "pre" else "_forward_hooks"]
            return all(value is not self.value for value in hooks.values())
        if self.name not in FORWARDS or "_old_forward" in own:
            return False
        forward = own.get("forward")
        return forward is None or getattr(forward, "__func__", None) is type(self.target).forward

    def undo(self) -> None:
        """Undo the change, wherever it is by now; where it is no more, do nothing."""
        if self.hook is not None:
            dictionaries = [getattr(self.target, name, {}) for name in _HOOK_DICTIONARIES]
            for number in [n for d in dictionaries for n, v in d.items() if v is self.value]:
                for dictionary in dictionaries:
                    dictionary.pop(number, None)
            return
        own = self.target.__dict__
        if self.name in FORWARDS:
            self._undo_in_cell(own.get("forward"))
        # accelerate's hooks may have come or gone since, and move a forward from one to the other
        slots = FORWARDS if self.name in FORWARDS else (self.name,)
        for slot in slots:
            found = own.get(slot, ABSENT)
            function = getattr(found, "__func__", None)  # bound by accelerate
            if found is not self.value and getattr(function, "stands_for", None) is not self.value:
                continue
            if not absent(self.before):
                own[slot] = self.before
            elif slot == "_old_forward":
                own[slot] = type(self.target).forward.__get__(self.target)
            else:
                del own[slot]

    def _undo_in_cell(self, forward: Any) -> None:
        cell = _cell(forward)
        if cell is None or cell.cell_contents is not self.value:
            return
        stock = type(self.target).forward
        cell.cell_contents = stock.__get__(self.target) if absent(self.before) else self.before

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.hook_id is not None:
            # torch numbers hooks by a count of the process: a later hook must not take ours away
            RemovableHandle.next_id = max(RemovableHandle.next_id, self.hook_id + 1)

    def __str__(self) -> str:
        what = f"{self.hook} hook" if self.hook else self.name
        return f"{type(self.target).__name__}: {what}"


def _cell(forward: Any) -> Optional[CellType]:
    """Where a hook of accelerate below 0.25 has the forward that it calls, whatever is put in."""
    names = getattr(getattr(forward, "__code__", None), "co_freevars", ())
    return forward.__closure__[names.index("old_forward")] if "old_forward" in names else None


@dataclass(frozen=True)
class PatchReport:
    """What :func:`fa2_pack_patch.apply` did.

    Attributes:
        family: the registry's family name.
        release: the installed Transformers.
        implementation: as what the model was loaded (``eager``, ``sdpa``, …).
        interceptor: ``method``, ``function``, ``dict`` or ``interface``.
        kernel: the kernel that would serve the model as it is now.
        layers: attention modules patched.
        verified: whether this release is one of the verified ones.
        notes: anything the user should know, in sentences.
        edits: each change that was made, for the curious.
    """

    family: str
    release: str
    implementation: str
    interceptor: str
    kernel: str
    layers: int
    verified: bool = True
    notes: tuple[str, ...] = ()
    edits: tuple[str, ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        lines = [
            f"fa2_pack_patch: {self.family}, {self.layers} attention layers, "
            f"transformers {self.release}" + ("" if self.verified else " (not verified)"),
            f"  loaded as {self.implementation}, reached by {self.interceptor}, "
            f"kernel {self.kernel}",
        ]
        return "\n".join(lines + [f"  note: {note}" for note in self.notes])


class Patch:
    """Everything that is known of one patched model; copied and pickled with it."""

    def __init__(
        self, family: Family, span: Span, release: Version, config: Any, kernel: str
    ) -> None:
        self.family = family
        self.span = span
        self.release = release
        self.config = config
        self.kernel = kernel
        self.rope: Optional[RopeRule] = None
        self.sites: list[Site] = []
        self.edits: list[Edit] = []
        self.runs = Runs()
        #: what a compiled forward in the making is packed by; None outside of one
        self.traced: Optional[Run] = None
        #: varlen arguments were read and found right once; later ones on a GPU are doubted instead
        self.explicit_seen = False
        self.doubts = Doubts()
        self.mask_placeholder = compat.mask_placeholder(release)
        self.window_extra = (compat.flash_window_sees(1, release) or 1) - 1
        self._references: dict[str, tuple[Optional[Reference], bool]] = {}
        #: the lists of layers, by name, and how many each held when this was made
        self.lists: dict[str, int] = {}
        #: None unless this model was unpickled where it cannot run packed, and then why
        self.stale: Optional[str] = None
        #: what the release's code called its attention by when that was last looked at
        self.stock: Any = None
        self.report: Optional[PatchReport] = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "stock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        here = compat.release()
        if here != self.release:
            self.stale = (
                f"this model was patched with transformers {self.release} and loaded with {here}; "
                "call fa2_pack_patch.apply(model) again before a packed call"
            )

    def reference(self, implementation: str) -> tuple[Optional[Reference], bool]:
        """The registry's rule for an implementation, and whether flash-attn's own values hold.

        Looked up once: a compiled forward must find nothing that changes at the first look.
        """
        if implementation not in self._references:
            if compat.implementation_kind(implementation) is None:
                raise PackingError(
                    f"since apply, this model's attn_implementation is {implementation!r}, which "
                    "cannot be packed. Set it to 'sdpa', 'eager' or a flash-attention, or give one "
                    "example a row."
                )
            rule = self.family.reference(self.release, implementation)
            flash = rule is None and compat.implementation_kind(implementation) == "flash"
            self._references[implementation] = rule, flash
        return self._references[implementation]

    def commit(self, edits: Sequence[Edit]) -> None:
        """Make all edits, or none of them."""
        try:
            for edit in edits:
                self.edits.append(edit)
                edit.commit()
        except BaseException:
            self.undo()
            raise

    @property
    def base(self) -> Optional[torch.nn.Module]:
        """The base model; None once it is reverted."""
        return next((edit.target for edit in self.edits if edit.name == ATTRIBUTE), None)

    def both_ways(self) -> Optional[str]:
        """What makes stock attend in both directions by now (all layers are seen at apply)."""
        first = self.sites[0]
        return not_causal(self.config, [(first.label, first.module)], self.release)

    def copied_in(self, memo: Mapping[int, Any]) -> bool:
        """Whether ``copy.deepcopy`` is at the whole model, not at a part of it."""
        return id(self) in memo or (self.base is not None and id(self.base) in memo)

    def undo(self) -> None:
        """Put back exactly what was there; interrupted, it can be called again."""
        self.report = None
        for edit in reversed(self.edits):
            edit.undo()
        self.edits = []
