"""torch's transforms of a patched model: torch.func, torch.jit.trace, torch.export."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.func import functional_call, grad, vmap

import fa2_pack_patch as fpp
from tests.matrix.kinds import Call

LIMIT = 2e-4
Build = Callable[..., Any]


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in model.named_parameters()}


def squares(model: Any, kwargs: dict[str, Any]) -> Callable[..., torch.Tensor]:
    def of(parameters: dict[str, torch.Tensor], **more: Any) -> torch.Tensor:
        call = {"use_cache": False, **kwargs, **more}
        logits: torch.Tensor = functional_call(model, parameters, (), call).logits
        return logits.square().sum()

    return of


def alone(model: Any, call: Call, parameters: dict[str, torch.Tensor]) -> torch.Tensor:
    total = torch.zeros(())
    for e in call.examples:
        kwargs = {"input_ids": e.tokens[None], "position_ids": e.positions[None]}
        total = total + squares(model, kwargs)(parameters)
    return total


def test_func_grad(build: Build, packed: Call) -> None:
    model, stock = build(), build()
    fpp.apply(model)
    found = grad(squares(model, packed.kwargs))(weights(model))
    wanted = grad(lambda p: alone(stock, packed, p))(weights(stock))
    for name, value in wanted.items():
        assert torch.allclose(found[name], value, atol=LIMIT, rtol=LIMIT), name


FIRST = """
import torch
from torch.func import grad
from fa2_pack_patch.runs import Runs

print(grad(lambda x: Runs().bound((x * 0).long(), None) or x)(torch.tensor(1.0)))
"""


def test_func_grad_before_any_other_call() -> None:
    """What is found out about torch once must not be found out inside of a transform."""
    done = subprocess.run(
        [sys.executable, "-c", FIRST], capture_output=True, text=True, check=False
    )
    assert done.stdout == "tensor(1.)\n", done.stderr


@pytest.mark.parametrize("given", ["", "position_ids", "attention_mask"])
def test_gradients_of_each_row_by_vmap(build: Build, given: str) -> None:
    """Per-sample gradients of calls that are not packed: those that stock gives, if it can."""
    ids = torch.randint(3, 30, (3, 6), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    mapped = {
        "position_ids": torch.arange(6).expand(3, 6).contiguous(),
        "attention_mask": mask,
    }.get(given, ids)

    def each(model: Any) -> Any:
        def one(parameters: Any, row: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            more = {given: other[None]} if given else {}
            return grad(squares(model, {"input_ids": row[None]}))(parameters, **more)

        return vmap(one, in_dims=(None, 0, 0))(weights(model), ids, mapped)

    model = build("llama", "eager")
    try:
        wanted = each(model)
    except RuntimeError as error:
        assert "vmap" in str(error)  # stock's own code reads a value, or writes in place
        return
    fpp.apply(model)
    found = each(model)
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_vmap_over_rows_packed_alike(build: Build, packed: Call) -> None:
    model = build()
    fpp.apply(model)
    ids, positions = packed.kwargs["input_ids"], packed.kwargs["position_ids"]
    many = torch.stack([ids, ids.flip(1)])
    found = vmap(lambda x: model(input_ids=x, position_ids=positions).logits)(many)
    assert torch.allclose(found[0], model(**packed.kwargs).logits, atol=LIMIT)


@pytest.mark.parametrize("dim", [0, 1])
def test_vmap_over_the_boundaries_is_refused(build: Build, packed: Call, dim: int) -> None:
    model = build()
    fpp.apply(model)
    ids, positions = packed.kwargs["input_ids"], packed.kwargs["position_ids"]

    def one(positions: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids[:1], position_ids=positions[None]).logits  # type: ignore[no-any-return]

    many = positions if dim == 0 else positions.T
    with pytest.raises(fpp.PackingError, match="maps over position_ids of a packed call"):
        vmap(one, in_dims=dim)(many)


@pytest.mark.filterwarnings("ignore")
def test_a_traced_packed_call_is_refused(build: Build, packed: Call) -> None:
    model = build("llama", "eager", torchscript=True)
    fpp.apply(model)
    with pytest.raises(fpp.PackingError, match=r"torch\.jit\.trace would keep"):
        torch.jit.trace(model, example_kwarg_inputs=packed.kwargs)


exports = pytest.mark.skipif(
    not hasattr(torch.compiler, "is_exporting"), reason="torch does not say that it exports"
)


def exported(model: Any, strict: bool, kwargs: dict[str, Any]) -> Any:
    torch._dynamo.reset()
    return torch.export.export(model, (), {**kwargs, "use_cache": False}, strict=strict)


@exports
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("strict", [True, False])
def test_export_is_as_before(build: Build, packed: Call, strict: bool) -> None:
    kwargs = {"input_ids": packed.kwargs["input_ids"]}
    model = build()
    try:
        exported(model, strict, kwargs)
    except Exception as error:  # whatever this release's own code does
        pytest.skip(f"stock is not exported: {type(error).__name__}")
    fpp.apply(model)
    module = exported(model, strict, kwargs).module()
    with torch.no_grad():
        found = module(**kwargs, use_cache=False).logits
        assert torch.allclose(found, model(**kwargs).logits, atol=LIMIT)


@exports
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("strict", [True, False])
def test_export_of_what_may_be_packed_is_refused(build: Build, packed: Call, strict: bool) -> None:
    model = build()
    fpp.apply(model)
    with pytest.raises(Exception, match="torch.export cannot tell by position_ids") as caught:
        exported(model, strict, packed.kwargs)
    assert strict or isinstance(caught.value, fpp.PackingError)
