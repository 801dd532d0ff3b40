"""The caller's tensors: quoted in errors, checked, and brought from and to the host."""

from __future__ import annotations

import sys
from typing import Any

import torch

from .compat import is_compiling
from .errors import PackingError

_SHOWN = 24
_LONGEST = 600
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8) + tuple(
    getattr(torch, name) for name in ("uint16", "uint32") if hasattr(torch, name)
)
_MASKS = (torch.bool, torch.float32, torch.float64, torch.bfloat16, torch.float16) + (
    (torch.uint64,) if hasattr(torch, "uint64") else ()
)


def quote(values: object) -> str:
    """The caller's own values, shortened to fit into an error message."""
    if isinstance(values, torch.Tensor):
        if not has_values(values) or values.layout != torch.strided:
            return describe(values)
        values = values.detach().cpu().tolist()
    if isinstance(values, (list, tuple)) and len(values) > _SHOWN:
        head = ", ".join(str(v) for v in values[:_SHOWN])
        text = f"[{head}, … {len(values)} in all]"
    else:
        text = str(values)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… ({len(text)} characters in all)"


def describe(tensor: torch.Tensor) -> str:
    """Dtype and shape of the caller's tensor, and whatever else is odd about it."""
    odd = "" if tensor.layout == torch.strided else f" ({tensor.layout})"
    if not has_values(tensor):
        odd += " on device meta, where it" if tensor.is_meta else " in a FakeTensorMode, where it"
        odd += " has no values"
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}{odd}"


def is_fake(tensor: Any) -> bool:
    """Whether a tensor is of torch's FakeTensorMode: a device and a shape, but no values."""
    fakes = None if is_compiling() else sys.modules.get("torch._subclasses.fake_tensor")
    return fakes is not None and isinstance(tensor, fakes.FakeTensor)


def has_values(tensor: torch.Tensor) -> bool:
    return not tensor.is_meta and not is_fake(tensor)


def holds_integers(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds integers that int64 holds too, and can be read: dense, with values."""
    usual = tensor.dtype in _INTEGERS
    return usual and tensor.layout == torch.strided and has_values(tensor)


def is_mask(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds what a mask may hold, and can be read: dense and real numbers."""
    usual = tensor.dtype in _INTEGERS or tensor.dtype in _MASKS
    return usual and tensor.layout == torch.strided and has_values(tensor)


def as_tensor(name: str, values: Any) -> torch.Tensor:
    """A tensor of what the caller gave, or a :class:`PackingError` that quotes it."""
    if isinstance(values, torch.Tensor):
        return values  # torch.as_tensor would send it to torch.set_default_device's
    try:
        return torch.as_tensor(values, device="cpu")
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise PackingError(
            f"{name} must be integers in a tensor, got a {type(values).__name__}: {quote(values)}."
        ) from None


def of_array(name: str, values: Any) -> Any:
    """A numpy array as a tensor; anything else as it is."""
    array = hasattr(values, "__array__") and not isinstance(values, torch.Tensor)
    return as_tensor(name, values) if array else values


def check_tokens(name: str, values: torch.Tensor) -> None:
    if values.dim() != 2 or not values.numel():
        raise PackingError(
            f"{name} must be (rows, tokens) with at least one token, got shape "
            f"{tuple(values.shape)}."
        )


def check_position_ids(position_ids: torch.Tensor) -> torch.Tensor:
    """``position_ids`` as ``(rows, tokens)``, or a :class:`PackingError` that quotes it."""
    if not isinstance(position_ids, torch.Tensor):
        raise PackingError(
            f"position_ids must be a tensor, got a {type(position_ids).__name__}: "
            f"{quote(position_ids)}."
        )
    if position_ids.dim() not in (1, 2):
        raise PackingError(
            f"position_ids must be (rows, tokens), got shape {tuple(position_ids.shape)}; "
            "three-dimensional (multimodal) positions are not supported."
        )
    if not holds_integers(position_ids):
        raise PackingError(f"position_ids must be int32 or int64, got {describe(position_ids)}.")
    return position_ids[None] if position_ids.dim() == 1 else position_ids


def fit_position_ids(position_ids: torch.Tensor, rows: int, tokens: int) -> torch.Tensor:
    """``position_ids`` as ``(rows, tokens)``, one row for all, or a :class:`PackingError`."""
    ids = check_position_ids(position_ids)
    if ids.shape[1] != tokens or ids.shape[0] not in (1, rows):
        raise PackingError(
            f"position_ids of shape {tuple(position_ids.shape)} do not fit an input of {rows} rows "
            f"of {tokens} tokens; expected ({rows}, {tokens})"
            f"{f' or (1, {tokens})' if rows > 1 else ''}."
        )
    return ids.expand(rows, tokens)


def mask_on_host(mask: Any) -> torch.Tensor:
    given = as_tensor("attention_mask", mask)
    if not is_mask(given):
        raise PackingError(
            f"attention_mask must hold 0/1 or segment ids 0, 1, 2, …, got {describe(given)}."
        )
    host = given.detach().cpu()
    keep = host.is_floating_point() or host.dtype == torch.bool
    return host if keep else host.to(torch.int64)


def upload(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A CPU tensor on ``device`` without waiting for the device."""
    if device.type == "cuda" and host.device.type == "cpu":
        return host.pin_memory().to(device, non_blocking=True)
    return host.to(device)


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor under the wrappers of torch.func's transforms: it has a storage."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def mapped_over(tensor: Any) -> bool:
    """Whether ``torch.func.vmap`` runs over a tensor, so that its values cannot be read."""
    functorch = torch._C._functorch
    while isinstance(tensor, torch.Tensor) and functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            return True
        tensor = functorch.get_unwrapped(tensor)
    return False


def all_mapped(tensor: torch.Tensor) -> torch.Tensor:
    """All rows of a ``(rows, tokens)`` tensor that ``torch.func.vmap`` runs over, in one."""
    functorch = torch._C._functorch
    tokens = tensor.shape[-1]
    while functorch.is_functorch_wrapped_tensor(tensor):
        mapped = functorch.maybe_get_bdim(tensor) if functorch.is_batchedtensor(tensor) else None
        tensor = functorch.get_unwrapped(tensor)
        if mapped is not None:
            tensor = tensor.movedim(mapped, 0)
    return tensor.reshape(-1, tokens)
