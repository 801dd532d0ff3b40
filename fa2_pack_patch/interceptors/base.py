"""What the interceptors share: a forward run with a name rebound, and the call to the kernel."""

from __future__ import annotations

import inspect
import types
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Callable, Optional, Protocol

import torch

from .. import compat, kernels
from ..errors import PackingError
from ..runs import CURRENT

if TYPE_CHECKING:
    from ..patch import Site
    from ..runs import Run


class Sited(Protocol):
    """What knows its site, by the time it runs."""

    site: Site


class _NeverEqual:
    """Stands for ``torch.float32`` in a forward, so that its own cast to half never happens."""


class TorchWithoutFloat32:
    """``torch`` as a flash class's forward sees it: no tensor has float32 dtype.

    Those forwards cast fp32 query, key and value to half precision (4.34: always to fp16), which
    would be wrong for a model in fp32; :func:`attend` casts where the weights are half precision.
    """

    float32 = _NeverEqual()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class RotaryLength:
    """``max`` as a flash class's forward sees it, whose only use is the length of a rotary table.

    Those of 4.34 to 4.47 take the last positions from the device for it. A compiled forward does
    not wait for them: the table reaches to every position that the model has.
    """

    def __init__(self, holder: Sited) -> None:
        self.holder = holder

    def __call__(self, tokens: int, last: Any) -> int:
        patch = self.holder.site.patch
        there = int(patch.config.max_position_embeddings)
        if compat.rotary_length_adds_one(patch.release):
            there -= 1
        return tokens if tokens > there else there


class Interceptor(ABC):
    """Runs one attention module's forward with our kernel in place of the release's."""

    @abstractmethod
    def missing(self, forward: Callable[..., Any], name: str, owner: type) -> Optional[str]:
        """Why ``forward`` cannot be intercepted by ``name``, or None when it can."""

    @abstractmethod
    def stock(self, owner: type, name: str, implementation: str) -> Any:
        """What ``owner``'s forward calls its attention by for ``implementation``; None if nothing.

        It is what somebody else may have replaced: a method, a function, an entry of a registry.
        """

    @abstractmethod
    def names(self, holder: Sited) -> dict[str, Any]:
        """What the forward is to find under its module's global names, outside of Dynamo."""

    def run(self, holder: Sited, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's forward on a packed call; :data:`~fa2_pack_patch.runs.CURRENT` is its run.

        The rebound function is made once, and again when the class has got another forward.
        """
        site = holder.site
        forward = site.forward
        if site.rebound is None or site.rebound[0] is not forward:
            site.rebound = forward, rebound(forward, self.names(holder), scope=Scope)
        return site.rebound[1](site.module, *args, **kwargs)

    @abstractmethod
    def traceable(self, owner: type, name: str, holder: Sited) -> Callable[..., Any]:
        """``owner``'s forward for Dynamo to trace, packed by what ``holder.site.patch.traced`` is.

        Made once for each module, when neither the site nor the module need be whole yet.
        """


class Scope(dict):  # type: ignore[type-arg]
    """A function's globals: some names bound otherwise, all others as they are in the module now.

    So what somebody rebinds there later (a fused rotary function, say) is honoured.
    """

    def __init__(self, module: dict[str, Any], names: dict[str, Any]) -> None:
        super().__init__(names)
        self["__builtins__"] = module["__builtins__"]  # Python takes these from the dict itself
        self.module = module

    def __missing__(self, name: str) -> Any:
        return self.module[name]


def copied(module: dict[str, Any], names: dict[str, Any]) -> dict[str, Any]:
    """The module's globals at this moment, some names bound otherwise, for Dynamo.

    It looks a function's globals up in the module called ``__name__``; without that name it takes
    the dictionary itself, and so sees what is bound there.
    """
    scope = {**module, **names}
    scope.pop("__name__", None)
    return scope


def layers_of(function: Any) -> Iterator[Any]:
    """A function, and what it is around: bound methods, partials and decorators are opened."""
    while function is not None:
        yield function
        if getattr(function, "of_fa2_pack_patch", None) is True:
            return
        inner = None
        for name in ("__func__", "func", "__wrapped__", "stands_for"):
            inner = inner or getattr(function, name, None)
        function = inner


def home_of(function: Any) -> str:
    """The module whose code runs when ``function`` is called: somebody else's, if there is any.

    Names that a decorator copied are not believed: a function tells by its globals. Without a
    stranger it is the innermost function's.
    """
    homes = ["builtins"]
    for layer in layers_of(function):
        scope = getattr(layer, "__globals__", None)
        home = type(layer).__module__ if scope is None else str(scope.get("__name__"))
        if home in ("functools", "builtins"):  # a partial, a bound method
            continue
        homes.append(home)
        if not home.startswith(("transformers.", "torch.")):
            break
    return homes[-1]


def innermost(forward: Callable[..., Any]) -> types.FunctionType:
    """The function under all decorators."""
    inner = inspect.unwrap(forward)
    assert isinstance(inner, types.FunctionType)
    return inner


def rebound(
    forward: Any,
    names: dict[str, Any],
    *,
    scope: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]],
) -> Callable[..., Any]:
    """``forward`` with some of its module's global names bound otherwise, by ``scope``.

    Decorators are kept: the cell that holds the wrapped function is replaced. The innermost
    function has a code object of its own: Dynamo keeps what it compiled with that, for one set of
    globals.
    """
    wrapped = getattr(forward, "__wrapped__", None)
    if wrapped is None:
        copy = _copy(forward, scope(forward.__globals__, names), forward.__closure__)
        copy.__code__ = copy.__code__.replace()
        return copy
    inner = rebound(wrapped, names, scope=scope)
    cells = tuple(
        types.CellType(inner) if cell.cell_contents is wrapped else cell
        for cell in forward.__closure__ or ()
    )
    outer = _copy(forward, forward.__globals__, cells)
    outer.__wrapped__ = inner  # type: ignore[attr-defined]
    return outer


def for_dynamo(owner: type, names: dict[str, Any]) -> Callable[..., Any]:
    """``owner``'s forward as :meth:`Interceptor.traceable` gives it."""
    return rebound(owner.forward, names, scope=copied)  # type: ignore[attr-defined]


def _copy(function: types.FunctionType, scope: dict[str, Any], closure: Any) -> types.FunctionType:
    copy = types.FunctionType(
        function.__code__, scope, function.__name__, function.__defaults__, closure
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def uses_name(forward: Callable[..., Any], name: str) -> bool:
    """Whether the function's code refers to ``name``, as a global or an attribute."""
    code = getattr(inspect.unwrap(forward), "__code__", None)
    return code is not None and name in code.co_names


def running() -> Run:
    """The run of the attention module that is executing."""
    run = CURRENT.get()
    assert run is not None
    return run


def run_of(holder: Sited) -> Run:
    """The run of the compiled forward in the making."""
    run = holder.site.patch.traced
    assert run is not None
    return run


def attend(
    site: Site,
    run: Run,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    heads_first: bool,
    scale: Optional[float],
    handed_window: Optional[int],
    softcap: Optional[float],
    dropout: Any,
) -> torch.Tensor:
    """Attention of a packed batch, example by example.

    Args:
        site: the attention module and what is known of it.
        run: the forward's layout.
        query: ``(rows, heads, tokens, head_dim)`` if ``heads_first``, else
            ``(rows, tokens, heads, head_dim)``; key and value alike, with their own heads.
        heads_first: see ``query``.
        scale: of the scores; None for ``head_dim**-0.5``.
        handed_window: the sliding window as the release's code hands it to its kernel.
        softcap: of the scores, as the release's code hands it over.
        dropout: probability, or an ``nn.Dropout`` (Falcon in 4.34).

    Returns:
        ``(rows, tokens, heads, head_dim)`` in the dtype of ``query`` after the cast to half.

    Raises:
        PackingError: key and query of different lengths.
    """
    if heads_first:
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    rows, tokens = query.shape[:2]
    layout = run.layout
    if rows * tokens != layout.tokens or key.shape[:2] != query.shape[:2]:
        raise PackingError(
            f"layer {site.index} of {site.label}: {rows} rows of {tokens} queries and "
            f"{key.shape[1]} keys do not fit the {layout.tokens} tokens of this packed call; "
            "a cache cannot go with packed rows: pass use_cache=False and no past_key_values."
        )
    q, k, v = query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)
    if q.dtype == torch.float32 or q.dtype != k.dtype or q.dtype != v.dtype:
        dtype = _target_dtype(site.module, q, k, v)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    scale, window, softcap = site.core(scale, handed_window, softcap)
    if isinstance(dropout, torch.nn.Dropout):
        dropout = dropout.p
    dropout = float(dropout or 0.0) if site.module.training else 0.0
    if dropout and not site.drops_out():
        dropout = 0.0
    kernel = _kernel(site, q, k, window, softcap, dropout)
    out = kernel(
        q, k, v, layout.to(q.device), scale=scale, window=window, softcap=softcap, dropout=dropout
    )
    if not compat.is_compiling():  # a side effect would break the graph of a checkpoint
        run.done.add(site.index)
    return out.view(rows, tokens, q.shape[1], v.shape[2])


def _kernel(
    site: Site,
    q: torch.Tensor,
    k: torch.Tensor,
    window: Optional[int],
    softcap: Optional[float],
    dropout: float,
) -> kernels.Kernel:
    """The kernel for these tensors; the layer's last choice while nothing that matters changes."""
    needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad)
    traced = compat.is_compiling()
    forward_ad = not traced and kernels.in_forward_ad()
    seen: Any = None
    if not traced:
        shapes = q.shape[1:], k.shape[1]
        asked = window, softcap, dropout, needs_grad, forward_ad
        seen = (q.device, q.dtype, shapes, *asked, kernels.epoch())
        if site.choice is not None and site.choice[0] == seen:
            return site.choice[1]  # type: ignore[no-any-return]
    call = kernels.AttentionCall(
        device=q.device,
        dtype=q.dtype,
        heads=q.shape[1],
        kv_heads=k.shape[1],
        head_dim=q.shape[2],
        window=window,
        softcap=softcap,
        dropout=dropout,
        needs_grad=needs_grad,
        forward_ad=forward_ad,
    )
    choose = kernels.select if traced else kernels.choose
    kernel: kernels.Kernel = choose(site.patch.kernel, call)
    if seen is not None:
        site.choice = seen, kernel
    return kernel


def _target_dtype(module: torch.nn.Module, *tensors: torch.Tensor) -> torch.dtype:
    # What Transformers does for fp32 from PEFT's norms: autocast, quantisation, or the weights say.
    if torch.float32 not in {t.dtype for t in tensors}:
        return tensors[0].dtype
    dtype = compat.autocast_dtype(tensors[0].device.type)
    if dtype is None:
        config = getattr(module, "config", None)
        dtype = getattr(config, "_pre_quantization_dtype", None)
    if dtype is None:
        weights = (_weight(m) for m in module.modules() if isinstance(m, torch.nn.Linear))
        dtypes = (w.dtype for w in weights if w is not None and w.is_floating_point())
        dtype = next(dtypes, torch.float32)
    return dtype


def _weight(linear: torch.nn.Linear) -> Optional[torch.Tensor]:
    # Not as an attribute: under ZeRO-3 that gathers it, and ranks with nothing packed would not.
    weight = linear._parameters.get("weight")
    if weight is None:  # quantised layers have a packed one by another name, and ours may be none
        weight = getattr(linear, "weight", None)
    return weight if isinstance(weight, torch.Tensor) else None
