"""torch's transforms of a patched model: torch.func, torch.jit.trace, torch.export."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import fa2_pack_patch as fpp
from fa2_pack_patch import compat
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


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_func_jvp(build: Build, packed: Call, family: str, implementation: str) -> None:
    """PyTorch's attention by itself has no forward-mode derivatives on a CPU."""
    model, stock = build(family, implementation), build(family, "eager")
    fpp.apply(model)
    generator = torch.Generator().manual_seed(3)
    there = weights(model)
    along = {n: torch.randn(v.shape, generator=generator) * 0.01 for n, v in there.items()}
    if implementation == "eager":
        wanted = jvp(lambda p: alone(stock, packed, p), (there,), (along,))[1]
    else:
        slopes = grad(lambda p: alone(stock, packed, p))(there)
        wanted = sum((slopes[n] * along[n]).sum() for n in there)
    found = jvp(squares(model, packed.kwargs), (there,), (along,))[1]
    assert torch.allclose(found, wanted, rtol=1e-3)


def test_flash_kernels_have_no_forward_mode() -> None:
    from fa2_pack_patch.kernels import AttentionCall, get

    call = AttentionCall(
        torch.device("cuda"), torch.bfloat16, 4, 2, 16, None, None, 0.0, False, forward_ad=True
    )
    for name in ("flash_attn_3", "torch_flash"):
        assert any("torch.func.jvp" in reason for reason in get(name).refuses(call)), name


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


def recorded(model: Any, mode: str, kwargs: dict[str, Any]) -> Any:
    def logits(given: dict[str, Any]) -> torch.Tensor:
        return model(**given, use_cache=False).logits  # type: ignore[no-any-return]

    more = {"_allow_non_fake_inputs": True} if mode == "fake" else {}
    with torch.no_grad():
        return make_fx(logits, tracing_mode=mode, **more)(kwargs)


@pytest.mark.parametrize("mode", ["real", "fake"])
@pytest.mark.parametrize("given", ["packed", "plain", "nothing"])
def test_make_fx(build: Build, packed: Call, mode: str, given: str) -> None:
    """What could be packed is refused where it cannot be read, what is packed everywhere."""
    model, stock = build("llama", "eager"), build("llama", "eager")
    fpp.apply(model)
    ids = packed.kwargs["input_ids"]
    kwargs = {
        "packed": packed.kwargs,
        "plain": {"input_ids": ids, "position_ids": torch.arange(20).expand(2, 20).contiguous()},
        "nothing": {"input_ids": ids},
    }[given]
    if given == "packed" or (given == "plain" and mode == "fake"):
        says = "make_fx would keep" if mode == "real" else "make_fx cannot tell by position_ids"
        with pytest.raises(fpp.PackingError, match=says):
            recorded(model, mode, kwargs)
        return
    try:
        wanted = recorded(stock, mode, kwargs)
    except Exception as error:  # whatever this release's own code does
        pytest.skip(f"stock is not recorded: {type(error).__name__}")
    found = recorded(model, mode, kwargs)
    assert torch.equal(found(kwargs), wanted(kwargs))


def test_fake_tensors_are_the_models_business(build: Build, packed: Call) -> None:
    """As those on meta: a packed call has no values either, and its shapes are stock's."""
    model = build("llama", "sdpa")
    fpp.apply(model)
    with FakeTensorMode(allow_non_fake_inputs=True) as fakes:
        given = {name: fakes.from_tensor(value) for name, value in packed.kwargs.items()}
        logits = model(**given, use_cache=False).logits
    assert logits.shape == (2, 20, 97)
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(fpp.PackingError, match="Fake"):
        lengths = torch.zeros(3, dtype=torch.int32)
        model(**given, cu_seq_lens_q=lengths, cu_seq_lens_k=lengths, max_length_q=4, max_length_k=4)


def test_whether_torch_exports_is_read_from_its_flag(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dynamo of torch 2.11 takes ``torch.compiler.is_exporting()`` for true in every graph."""
    assert compat.is_exporting.__module__ == "fa2_pack_patch.compat"
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    assert not compat.is_exporting()
    monkeypatch.setattr(torch.compiler, "_is_exporting_flag", True)
    assert compat.is_exporting()


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
