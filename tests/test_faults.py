"""What goes wrong in the middle: the next call is right, nothing is left behind, revert restores."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import fa2_pack_patch as fpp
from fa2_pack_patch import hooks
from fa2_pack_patch.patch import Edit
from fa2_pack_patch.runs import CURRENT
from tests.matrix import models
from tests.matrix.cells import References, compare, packed_loss, separate_gradients
from tests.matrix.kinds import TWO, Call, _plain, _positions, _varlen

LIMIT = 2e-4
apply_module = sys.modules["fa2_pack_patch.apply"]  # the package has the function by that name
OTHER = [[3, 5, 12], [9, 9, 2]]
Build = Callable[..., torch.nn.Module]
FAULTS = [ZeroDivisionError, KeyboardInterrupt, torch.OutOfMemoryError, SystemExit]
if not hasattr(torch, "OutOfMemoryError"):
    FAULTS[2] = torch.cuda.OutOfMemoryError


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> Iterator[None]:
    """What was there before is not looked through at each ``gc.collect()``."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def error_of(model: torch.nn.Module, call: Call, reference: References) -> float:
    with torch.no_grad():
        return compare(model(**call.kwargs).logits, call, reference)


def state(model: torch.nn.Module) -> list[Any]:
    """Every instance attribute and hook of every module, by identity.

    Without the tables that rotary modules of old releases make as they go.
    """
    found = []
    for name, module in model.named_modules():
        for key, value in sorted(module.__dict__.items()):
            if key.endswith("_cached"):
                continue
            inner = {k: id(v) for k, v in value.items()} if isinstance(value, dict) else id(value)
            found.append((name, key, inner))
    return found


def raiser(fault: type[BaseException]) -> Callable[..., Any]:
    def function(*_: Any, **__: Any) -> Any:
        raise fault("in the middle")

    return function


def checkpointed(build: Build, call: Call) -> tuple[Any, dict[str, torch.Tensor]]:
    """A patched model with activation checkpointing, and what its gradients of a call must be."""
    model, alone = build("llama", "eager").train(), build("llama", "eager").train()
    want = separate_gradients(alone, [call])
    fpp.apply(model)
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    return model, want


def assert_gradients(model: torch.nn.Module, want: dict[str, torch.Tensor]) -> None:
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, want[name], atol=LIMIT), name


def nothing_left_behind(model: torch.nn.Module) -> None:
    patch = getattr(model, model.base_model_prefix)._fa2_pack_patch
    gc.collect()
    assert CURRENT.get() is None
    assert patch.traced is None
    assert len(patch.runs._weak) == 0


# In apply and revert


def edits_of(build: Build, family: str = "llama") -> int:
    return len(fpp.apply(build(family)).edits)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("family", ["llama", "falcon_new"])
def test_a_fault_at_any_step_of_apply(
    build: Build, monkeypatch: pytest.MonkeyPatch, family: str, fault: type, when: str
) -> None:
    model = build(family)
    before = state(model)
    real = Edit.commit
    count = edits_of(build, family)
    assert count >= 6
    for step in range(count):
        done = []

        def commit(self: Edit, step: int = step, done: list = done) -> None:
            done.append(self)
            if len(done) > step and when == "before":
                raise fault("in the middle")
            real(self)
            if len(done) > step:
                raise fault("in the middle")

        with monkeypatch.context() as patch:
            patch.setattr(Edit, "commit", commit)
            with pytest.raises(fault):
                fpp.apply(model)
        assert len(done) == step + 1
        assert state(model) == before, step
        assert not fpp.is_applied(model)
    call, reference = _positions(TWO), References(build(family))
    fpp.apply(model)
    assert error_of(model, call, reference) < LIMIT
    fpp.revert(model)
    assert state(model) == before


@pytest.mark.parametrize("name", ["register_forward_pre_hook", "register_forward_hook"])
def test_an_interrupt_right_after_a_hook_was_registered(
    build: Build, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    model = build()
    before = state(model)
    real = getattr(torch.nn.Module, name)

    def register(self: Any, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.Module, name, register)
        with pytest.raises(KeyboardInterrupt):
            fpp.apply(model)
    assert state(model) == before


@pytest.mark.parametrize(
    "step", ["detect", "_site_edits", "rope_rule", "_kernel_now", "PatchReport", "HeadForward"]
)
def test_a_fault_while_apply_plans(
    build: Build, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    model = build()
    before = state(model)
    with monkeypatch.context() as patch:
        patch.setattr(apply_module, step, raiser(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            fpp.apply(model)
    assert state(model) == before
    fpp.apply(model)


def test_a_fault_at_any_step_of_revert(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """It can be called again, and an interrupted one is not taken for a patched model."""
    model, reference = build(), References(build())
    call = _positions(TWO)
    before = state(model)
    real = Edit.undo
    for again in (fpp.revert, fpp.apply):
        for step in range(edits_of(build)):
            fpp.apply(model)
            done: list[Edit] = []

            def undo(self: Edit, step: int = step, done: list = done) -> None:
                done.append(self)
                if len(done) > step:
                    raise KeyboardInterrupt
                real(self)

            with monkeypatch.context() as patch:
                patch.setattr(Edit, "undo", undo)
                with pytest.raises(KeyboardInterrupt):
                    fpp.revert(model)
            again(model)
            if again is fpp.apply:
                assert error_of(model, call, reference) < LIMIT
                fpp.revert(model)
            assert state(model) == before, step


@pytest.mark.parametrize("fault", ["interrupt", "no such kernel here"])
def test_a_failed_change_of_kernel_leaves_the_first(
    build: Build, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    model, reference = build(), References(build())
    before = state(model)
    report = fpp.apply(model)
    with monkeypatch.context() as patch:
        if fault == "interrupt":
            patch.setattr(apply_module, "_kernel_now", raiser(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                fpp.apply(model, kernel="sdpa")
        else:
            with pytest.raises(fpp.KernelUnavailableError, match="Kernels that can"):
                fpp.apply(model, kernel="torch_flash")
    assert error_of(model, _positions(TWO), reference) < LIMIT
    assert fpp.apply(model) is report
    assert fpp.apply(model, kernel="sdpa") is not report
    assert error_of(model, _positions(TWO), reference) < LIMIT
    fpp.revert(model)
    assert state(model) == before


def test_a_thousand_cycles_leave_nothing(build: Build) -> None:
    model = build(num_hidden_layers=1)
    before = state(model)
    kept = []
    for _ in range(1000):
        fpp.apply(model)
        kept.append(weakref.ref(model.model._fa2_pack_patch))
        fpp.revert(model)
    assert state(model) == before
    gc.collect()
    assert not any(reference() for reference in kept)


# In a call


def breaking(model: torch.nn.Module, where: str, monkeypatch: Any, fault: type) -> Any:
    """Has a packed call of ``model`` fail at a place."""
    attention = model.model.layers[1].self_attn
    if where == "kernel":
        kernel = fpp.kernels.get("sdpa")
        monkeypatch.setattr(type(kernel), "__call__", raiser(fault))
    elif where == "attention":
        monkeypatch.setattr(attention.o_proj, "forward", raiser(fault))
    elif where == "between":
        monkeypatch.setattr(model.model.layers[0].mlp, "forward", raiser(fault))
    elif where == "head":
        monkeypatch.setattr(model.lm_head, "forward", raiser(fault))
    elif where == "layout":
        monkeypatch.setattr(hooks.PackedLayout, "from_lengths", raiser(fault))
    elif where == "bind":
        monkeypatch.setattr(hooks.ModelHook, "_adjust", raiser(fault))
    elif where == "embedding":
        monkeypatch.setattr(model.model.embed_tokens, "forward", raiser(fault))
    else:
        raise AssertionError(where)


PLACES = ["kernel", "attention", "between", "head", "layout", "bind", "embedding"]


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_forward(
    build: Build, monkeypatch: pytest.MonkeyPatch, where: str, fault: type
) -> None:
    model, reference = build(), References(build())
    before = state(model)
    fpp.apply(model)
    patched = state(model)
    for make in (_positions, _varlen):
        call = make(TWO)
        with monkeypatch.context() as patch:
            breaking(model, where, patch, fault)
            with pytest.raises(fault):
                model(**call.kwargs)
        nothing_left_behind(model)
        assert state(model) == patched
        assert error_of(model, call, reference) < LIMIT
        assert error_of(model, _positions(OTHER), reference) < LIMIT
        plain = _plain(20, 2).kwargs
        with torch.no_grad():
            assert torch.equal(model(**plain).logits, reference.model(**plain).logits)
    fpp.revert(model)
    assert state(model) == before


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_backward(
    build: Build, monkeypatch: pytest.MonkeyPatch, fault: type, checkpoint: bool
) -> None:
    model, alone = build("llama", "eager").train(), build("llama", "eager").train()
    first, second = _positions(TWO), _positions(OTHER, seed=7)
    want = separate_gradients(alone, [first, second])
    before = state(model)
    fpp.apply(model)
    if checkpoint:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    with monkeypatch.context() as patch:
        loss = packed_loss(model, first)
        if checkpoint:  # in the recompute
            patch.setattr(model.model.layers[0].self_attn.o_proj, "forward", raiser(fault))
        else:
            weight = model.model.layers[0].self_attn.q_proj.weight
            handle = weight.register_hook(raiser(fault))
        with pytest.raises(fault):
            loss.backward()
        if not checkpoint:
            handle.remove()
    del loss
    model.zero_grad(set_to_none=True)
    nothing_left_behind(model)
    for call in (first, second):
        packed_loss(model, call).backward()
    assert_gradients(model, want)
    if checkpoint:
        model.disable_input_require_grads()
        model.gradient_checkpointing_disable()
    fpp.revert(model)
    if not checkpoint:
        assert state(model) == before


def test_the_first_of_two_forwards_outlives_the_failure_of_the_second(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = _positions(TWO)
    model, want = checkpointed(build, first)
    loss = packed_loss(model, first)
    with monkeypatch.context() as patch:
        breaking(model, "between", patch, ZeroDivisionError)
        with pytest.raises(ZeroDivisionError):
            model(**_positions(OTHER).kwargs)
    loss.backward()
    assert_gradients(model, want)


def test_a_call_that_fails_between_the_head_and_the_base_model(build: Build) -> None:
    """The base model must not take the head's word for positions that have changed since."""
    model, reference = build(), References(build())
    fpp.apply(model)
    call = _positions(TWO)
    positions = torch.arange(20).repeat(2, 1)
    handle = model.register_forward_pre_hook(raiser(ZeroDivisionError))
    with pytest.raises(ZeroDivisionError):
        model(input_ids=call.kwargs["input_ids"], position_ids=positions)
    handle.remove()
    positions.copy_(call.kwargs["position_ids"])
    hidden = model.model(input_ids=call.kwargs["input_ids"], position_ids=positions)[0]
    with torch.no_grad():
        assert compare(model.lm_head(hidden), call, reference) < LIMIT


def test_a_failure_of_the_attention_count_says_which_and_passes(build: Build) -> None:
    model, reference = build(), References(build())
    fpp.apply(model)
    module = model.model.layers[0].self_attn
    ours = module.__dict__.pop("forward")
    with pytest.raises(fpp.PackingError, match=r"layers\.0\.self_attn"):
        model(**_positions(TWO).kwargs)
    module.__dict__["forward"] = ours
    assert error_of(model, _positions(TWO), reference) < LIMIT


# Threads, asyncio, processes


def calls_and_references(build: Build, reference: References) -> list[Call]:
    calls = [_positions(TWO), _positions(OTHER, seed=7), _positions([[6, 6], [1, 11]], seed=3)]
    for call in calls:
        for example in call.examples:
            reference(example)
    return calls


def test_one_model_from_several_threads(build: Build) -> None:
    model, reference = build(), References(build())
    fpp.apply(model)
    calls = calls_and_references(build, reference)
    start = threading.Barrier(4)

    def work(n: int) -> float:
        start.wait()
        return max(error_of(model, calls[(n + i) % 3], reference) for i in range(10))

    with ThreadPoolExecutor(4) as pool:
        assert max(pool.map(work, range(4))) < LIMIT
    nothing_left_behind(model)


def test_threads_that_fail_do_not_disturb_others(build: Build) -> None:
    model, reference = build(), References(build())
    fpp.apply(model)
    calls = calls_and_references(build, reference)
    real = model.model.layers[1].mlp.forward
    doomed = threading.local()

    def forward(x: torch.Tensor) -> torch.Tensor:
        if getattr(doomed, "yes", False):
            raise ZeroDivisionError
        return real(x)

    model.model.layers[1].mlp.forward = forward

    def work(n: int) -> float:
        doomed.yes = n % 2 == 1
        worst = 0.0
        for call in calls * 3:
            if doomed.yes:
                with pytest.raises(ZeroDivisionError):
                    model(**call.kwargs)
            else:
                worst = max(worst, error_of(model, call, reference))
        return worst

    with ThreadPoolExecutor(4) as pool:
        assert max(pool.map(work, range(4))) < LIMIT
    nothing_left_behind(model)


def test_several_models_from_several_threads(build: Build) -> None:
    names = ["llama", "falcon_new", "llama", "gpt_neox"]

    def work(n: int) -> float:
        model, reference = build(names[n]), References(build(names[n]))
        before = state(model)
        worst = 0.0
        for call in calls_and_references(build, reference) * 3:
            fpp.apply(model)
            worst = max(worst, error_of(model, call, reference))
            fpp.revert(model)
        assert state(model) == before
        return worst

    with ThreadPoolExecutor(4) as pool:
        assert max(pool.map(work, range(4))) < LIMIT


def test_apply_to_one_model_from_several_threads(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two at once are one after the other: one patch, which one revert undoes."""
    real = apply_module.detect
    meeting = threading.Barrier(2)

    def detect(*args: Any) -> Any:
        found = real(*args)
        with pytest.raises(threading.BrokenBarrierError):  # nobody else gets here meanwhile
            meeting.wait(0.2)
        return found

    monkeypatch.setattr(apply_module, "detect", detect)
    model = build()
    before = state(model)
    with ThreadPoolExecutor(2) as pool:
        reports = list(pool.map(lambda _: fpp.apply(model), range(2)))
    assert reports[0] is reports[1]
    fpp.revert(model)
    assert state(model) == before


def test_backward_in_another_thread(build: Build) -> None:
    call = _positions(TWO)
    model, want = checkpointed(build, call)
    loss = packed_loss(model, call)
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert_gradients(model, want)


def test_asyncio(build: Build) -> None:
    model, reference = build(), References(build())
    fpp.apply(model)
    calls = calls_and_references(build, reference)

    async def one(n: int) -> float:
        worst = 0.0
        for i in range(4):
            await asyncio.sleep(0)
            assert CURRENT.get() is None
            call = calls[(n + i) % 3]
            worst = max(worst, error_of(model, call, reference))
            worst = max(worst, await asyncio.to_thread(error_of, model, call, reference))
        return worst

    async def all_of_them() -> list[float]:
        return await asyncio.gather(*(one(n) for n in range(4)))

    assert max(asyncio.run(all_of_them())) < LIMIT


def _in_worker(model: torch.nn.Module, results: Any) -> None:
    try:
        torch.set_num_threads(1)
        case = models.FAMILIES["llama"]
        reference = References(models.build(case, "eager"))
        fresh = models.build(case, "eager")
        fpp.apply(fresh)
        call = _positions(TWO)
        errors = [error_of(m, call, reference) for m in (model, fresh)]
        fpp.revert(model)
        results.put((errors, fpp.is_applied(model)))
    except BaseException as error:
        results.put(repr(error))
        raise


@pytest.fixture(params=["fork", "spawn"])
def context(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param not in multiprocessing.get_all_start_methods():
        pytest.skip(f"no {request.param} on this system")
    yield multiprocessing.get_context(request.param)


def test_workers(build: Build, context: Any) -> None:
    """A patched model in a worker is patched there, and reverted there alone."""
    model, reference = build("llama", "eager"), References(build("llama", "eager"))
    fpp.apply(model)
    call = _positions(TWO)
    assert error_of(model, call, reference) < LIMIT
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    results = context.Queue()
    process = context.Process(target=_in_worker, args=(model, results))
    process.start()
    try:
        found = results.get(timeout=60)
    finally:
        process.join(10)
        process.kill()
        torch.set_num_threads(threads)
    assert isinstance(found, tuple), found
    errors, still = found
    assert max(errors) < LIMIT
    assert not still
    assert fpp.is_applied(model)
    assert error_of(model, call, reference) < LIMIT
