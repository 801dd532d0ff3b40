"""What stands for a module's own forward: of an attention module, and of a model with a head."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Optional

import torch

from . import kernels
from .compat import is_compiling, is_exporting
from .copies import Alone
from .errors import PackingError
from .graphs import UNREAD, eagerly
from .interceptors import INTERCEPTORS, home_of, layers_of
from .reading import by_name, handed_over
from .refusals import base_replaced, check_unseen, positions_kept
from .runs import CURRENT, Run, came, coming, enter, entered, in_backward, leave

if TYPE_CHECKING:
    from .counting import CountHook
    from .hooks import ModelHook
    from .patch import Patch, Site


class ModelForward:
    """Stands for the forward of a model, for callers that pass its hook by."""

    #: for :func:`~fa2_pack_patch.interceptors.base.layers_of`, which opens it no further
    of_fa2_pack_patch = True

    def __init__(self, module: torch.nn.Module, hook: ModelHook) -> None:
        self.module = module
        self.hook = hook
        hook.home = module
        #: the instance's own forward that was there before apply, if any
        self.before: Any = None

    @property
    def __signature__(self) -> inspect.Signature:
        """Trainer and ``generate`` ask a model's forward for its arguments."""
        return inspect.signature(self._stock())

    @property
    def __code__(self) -> Any:
        """``torch.export`` asks a model's forward for the place of its code."""
        return self._stock().__code__

    def in_place(self) -> bool:
        """Whether a call of the module's forward still comes here."""
        return any(layer is self for layer in layers_of(self.module.__dict__.get("forward")))

    @property
    def __func__(self) -> Callable[..., Any]:
        """The function of a bound method, as which accelerate takes a forward.

        It puts its own around that, and later binds what is left of it to the model, or copies do.
        """

        def forward(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self._call(module, args, kwargs)

        forward.__signature__ = inspect.signature(type(self.module).forward)  # type: ignore[attr-defined]
        forward.stands_for = self  # type: ignore[attr-defined]
        return forward

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """What accelerate put around a forward before apply, for it to take that off again."""
        if self.before is None:
            raise AttributeError("__wrapped__")
        return self.before  # type: ignore[no-any-return]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self.module, args, kwargs)

    def _call(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError

    def _stock(self) -> Callable[..., Any]:
        if self.before is not None:
            return self.before  # type: ignore[no-any-return]
        return type(self.module).forward.__get__(self.module)  # type: ignore[no-any-return]

    def _inner(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.before is not None and module is self.module:
            return self.before(*args, **kwargs)
        return type(module).forward(module, *args, **kwargs)


class HeadForward(ModelForward):
    """Stands for the forward of a model with a head.

    PEFT calls ``model.forward(...)`` of the model it wraps; labels and varlen arguments are seen
    here then. After the hook it hands everything on.
    """

    def _call(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = self.hook.passed_by(module, args, kwargs)
        found = self._inner(module, args, kwargs)
        if not is_compiling() and module is self.module:
            self._check_arrival(kwargs)
        return found

    def _check_arrival(self, kwargs: Mapping[str, Any]) -> None:
        """What the head was given of a packed call came to the base model."""
        position_ids = kwargs.get("position_ids")
        if isinstance(position_ids, torch.Tensor):
            patch = self.hook.patch
            run = patch.runs.bound(position_ids, patch)
            if run is not None and not run.done:
                if not any(inner is patch.base for inner in self.module.modules()):
                    raise base_replaced(self.module)
                raise positions_kept(self.module)


class BaseForward(ModelForward):
    """Stands for the forward of the base model.

    PEFT around a base model without a head calls ``model.forward(...)``: the hooks' work is done
    here then. And it says, exactly as long as it runs, that the layers' call was seen.
    """

    def __init__(self, module: torch.nn.Module, hook: ModelHook, count: CountHook) -> None:
        super().__init__(module, hook)
        self.count = count

    def _call(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hook = self.hook
        if is_exporting() or not hook.in_force(module):
            return self._inner(module, args, kwargs)
        call = by_name(module, args, kwargs)
        patch, compiling = hook.patch, is_compiling()
        seen = patch.traced is not None and patch.traced.positions is call.get("position_ids")
        if compiling:  # of what must be read only the layers ask, outside of the graph
            seen = seen or not handed_over(call)
        else:
            seen |= came(patch, call)
        if not seen:
            args, kwargs = hook(module, args, kwargs) or (args, kwargs)
        if compiling:
            output = self._inner(module, args, kwargs)
        else:
            coming(patch, {})
            enter(patch)
            try:
                output = self._inner(module, args, kwargs)
            finally:
                leave(patch)
        if not seen:
            self.count(module, args, kwargs, output)
        return output


class PackedForward(Alone):
    """Stands for an attention module's forward: packed when its position_ids carry a layout."""

    of_fa2_pack_patch = True

    def __init__(self, site: Site) -> None:
        self.site = site
        #: the instance's own forward that was there before apply, if any
        self.before: Any = None
        #: era, class, name and kernel of which the function for Dynamo is made
        self.recipe = (site.span.via, site.owner, site.span.name, site.patch.kernel)
        self.traceable = self._traceable()

    def _parts(self) -> tuple[Patch, torch.nn.Module, str]:
        return self.site.patch, self.site.module, "forward"

    def _traceable(self) -> Callable[..., Any]:
        via, owner, name, kernel = self.recipe
        kernels.probe(kernel)
        return INTERCEPTORS[via].traceable(owner, name, self)

    def __getstate__(self) -> dict[str, Any]:
        return {"site": self.site, "before": self.before, "recipe": self.recipe}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Site and module may still be in the making: a copied model's own function must not ask.
        self.__dict__.update(state)
        self.traceable = self._traceable()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() and self.site.patch.traced is not None:
            if kwargs.get("attention_mask") is not None:
                kwargs["attention_mask"] = None
            return self.traceable(self.site.module, *args, **kwargs)
        if is_exporting() and self.before is None:  # the model's hook let it pass
            return type(self.site.module).forward(self.site.module, *args, **kwargs)
        if is_compiling():
            return eagerly(UNREAD, self._forward, *args, **kwargs)
        return self._forward(*args, **kwargs)

    def _run(self, position_ids: torch.Tensor, hidden_states: Any) -> Optional[Run]:
        patch, traced = self.site.patch, self.site.patch.traced
        if traced is None:
            return patch.runs.find(position_ids, hidden_states)
        # A compiled forward is under way, and the model's own code broke its graph at this layer;
        # or another forward, which is bound already, is recomputed after one that failed.
        earlier = patch.runs.bound(position_ids, patch)
        if earlier is not None and not shares_storage(position_ids, traced.positions):
            return earlier
        patch.runs.bind(position_ids, traced)
        return traced

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        site = self.site
        position_ids = kwargs.get("position_ids")
        run = None
        if position_ids is not None:
            run = self._run(position_ids, args[0] if args else kwargs.get("hidden_states"))
        if run is None:
            if position_ids is not None and not entered(site.patch) and not in_backward():
                check_unseen(site.label, position_ids)
            if self.before is not None:
                return self.before(*args, **kwargs)
            return type(site.module).forward(site.module, *args, **kwargs)
        if kwargs.get("attention_mask") is not None:
            kwargs["attention_mask"] = None  # eager's own; some flash classes slice keys by it
        token = CURRENT.set(run)
        try:
            return INTERCEPTORS[self.recipe[0]].run(self, args, kwargs)
        finally:
            CURRENT.reset(token)


def shares_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def in_place(site: Site) -> bool:
    """Whether the attention module's forward is still the one that :func:`apply` put there."""
    own = site.module.__dict__
    slots = ("forward", "_old_forward")  # the second where accelerate's hooks are around it
    return any(isinstance(own.get(slot), PackedForward) for slot in slots)


def owner_of(module: torch.nn.Module) -> str:
    """Whose forward runs inside of ours, in words."""
    forward = module.__dict__.get("forward")
    if forward is None or isinstance(forward, PackedForward):
        forward = type(module).forward
    return home_of(forward)


def layers_missed(missed: Sequence[Site], layers: int) -> PackingError:
    """What a packed call raises in which attention layers did not run packed."""
    first = missed[0]
    head = (
        f"{len(missed)} of {layers} attention layers did not run packed: "
        f"{', '.join(s.label for s in missed[:4])}."
    )
    if in_place(first) and owner_of(first.module).startswith("transformers."):
        return PackingError(
            f"{head} They were not called: taken out of the model, or left out by its config. "
            "Call fa2_pack_patch.apply(model) again."
        )
    if any(edit.gone() for edit in first.patch.edits if edit.target is first.module):
        return PackingError(
            f"{head} Somebody took away the forward that apply gave them. Call "
            "fa2_pack_patch.apply(model) again."
        )
    return PackingError(
        f"{head} Their forward was replaced after apply (now {owner_of(first.module)}); the result "
        "would mix examples. Undo that, and call fa2_pack_patch.apply(model) again."
    )
