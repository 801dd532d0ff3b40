"""How exact PyTorch itself is on a model, and how far two results are from each other."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Optional

import torch


def unit(tensor: torch.Tensor, computed: Optional[torch.dtype] = None) -> float:
    """The relative rounding error of one matrix product whose result is ``tensor``, as a deviation.

    One rounding to its dtype, and those of a sum of as many terms as it is wide in float32, in
    which PyTorch accumulates half precision and Transformers computes norms, softmax and rotary
    phases of any dtype; errors of a sum grow with the root of its length. A rounding is off by
    anything within half an epsilon, which deviates by epsilon / sqrt(12).
    """
    accumulated = torch.finfo(torch.float32).eps
    coarse = torch.get_float32_matmul_precision() != "highest"
    if coarse and tensor.device.type == "cuda" and tensor.dtype == torch.float32:
        accumulated = 2.0**-10  # TF32
    width = tensor.shape[-1] if tensor.dim() else 1
    own = max(torch.finfo(dtype).eps for dtype in (tensor.dtype, computed or tensor.dtype))
    return float(own + math.sqrt(width) * accumulated) / math.sqrt(12)


@contextmanager
def rounded(model: torch.nn.Module, seed: int) -> Iterator[None]:
    """Every module without children rounds otherwise: its output, and the gradient of it.

    What PyTorch itself does when it is given the same numbers in another shape, so the distance to
    an undisturbed run is PyTorch's own error.
    """
    generators: dict[torch.device, torch.Generator] = {}

    def disturb(tensor: torch.Tensor, computed: Optional[torch.dtype]) -> torch.Tensor:
        device = tensor.device
        if device not in generators:
            generators[device] = torch.Generator(device).manual_seed(seed)
        noise = torch.randn(tensor.shape, generator=generators[device], device=device)
        wide = tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))
        size = wide.square().mean(-1, keepdim=True).sqrt() * unit(tensor, computed)
        return tensor + (noise * size).to(tensor.dtype)

    def hook(module: torch.nn.Module, _: Any, out: Any) -> Any:
        if not isinstance(out, torch.Tensor) or not out.is_floating_point() or not out.dim():
            return None
        computed = getattr(module, "compute_dtype", None)  # of bitsandbytes' 4-bit layers
        if not isinstance(computed, torch.dtype) or not computed.is_floating_point:
            computed = None
        changed = disturb(out, computed)
        if changed.requires_grad:
            # What is not differentiable has no gradient.
            changed.register_hook(lambda g: None if g is None else disturb(g, computed))  # type: ignore[no-untyped-call]
        return changed

    leaves = [m for m in model.modules() if not any(True for _ in m.children())]
    with ExitStack() as stack:
        for leaf in leaves:
            stack.callback(leaf.register_forward_hook(hook).remove)
        yield


def distance(got: torch.Tensor, want: torch.Tensor, *, typical: bool = False) -> float:
    """The 2-norm of a token's difference, over the root mean square of the tokens' norms.

    The largest of all tokens, or with ``typical`` their upper quartile.
    """
    size = want.double().norm(dim=-1).square().mean().sqrt()
    each_token = (got.double() - want.double()).norm(dim=-1)
    if not bool(each_token.isfinite().all()):
        return math.inf
    found = float(each_token.quantile(0.75) if typical else each_token.max())
    return found / float(size) if float(size) else found
