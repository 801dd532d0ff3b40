"""verify: true on a right model, false on every wrong one, and nothing is left behind."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import fa2_pack_patch as fpp
from fa2_pack_patch import batches, compat, forwards, hooks, kernels, layout, patch, plots, rounding
from fa2_pack_patch.kernels import sdpa
from tests.matrix import models
from tests.matrix.kinds import Call
from tests.test_apply import state

Build = Callable[..., torch.nn.Module]
RELEASE = str(compat.release())
HERE = [name for name, case in models.FAMILIES.items() if models.available(case, RELEASE)]
FAMILIES = [f for f in ("llama", "mistral", "falcon", "mixtral") if f in HERE]


def base(model: torch.nn.Module) -> Any:
    return next(m for m in model.modules() if patch.ATTRIBUTE in m.__dict__)


def head_hook(model: torch.nn.Module) -> hooks.ModelHook:
    edits = base(model).__dict__[patch.ATTRIBUTE].edits
    values = [edit.value for edit in edits]
    return next(v for v in values if isinstance(v, hooks.ModelHook) and not v.base)


def taken(report: fpp.VerifyReport) -> list[str]:
    """The checks that there are in every release."""
    return [c.name for c in report.checks if c.name != "loss by shifted labels"]


def failed(report: fpp.VerifyReport) -> set[str]:
    return {c.name for c in report.checks if not c.passed}


@pytest.mark.parametrize(
    ("family", "implementation"),
    [*((f, "sdpa") for f in HERE), *((f, "eager") for f in FAMILIES)],
)
def test_a_patched_model_passes(build: Build, family: str, implementation: str) -> None:
    model = build(family, implementation)
    fpp.apply(model)
    report = fpp.verify(model)
    assert report.passed, str(report)
    assert bool(report)
    assert len(taken(report)) == 15


@pytest.mark.parametrize("family", FAMILIES)
def test_an_unpatched_model_fails(build: Build, family: str) -> None:
    report = fpp.verify(build(family))
    assert not report.passed
    assert "layers not packed, one row" in failed(report)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("family", [f for f in ("llama", "gemma", "falcon") if f in HERE])
def test_other_dtypes(build: Build, family: str, dtype: torch.dtype) -> None:
    model = build(family).to(dtype)
    if dtype == torch.float64 and compat.release() < compat.Version("4.36"):
        pytest.skip("stock's mask overflows: it is float32, with the least float64 in it")
    assert not fpp.verify(model)
    fpp.apply(model)
    report = fpp.verify(model)
    assert report.passed, str(report)
    allowed = {c.name: c.allowed for c in report.checks}["logits, one row"]
    eps = torch.finfo(dtype).eps
    assert eps < allowed < 1000 * max(eps, torch.finfo(torch.float32).eps)


def hooks_removed(model: torch.nn.Module) -> None:
    for module in model.modules():
        module._forward_pre_hooks.clear()
        module._forward_hooks.clear()


def forwards_removed(model: torch.nn.Module) -> None:
    for site in base(model).__dict__[patch.ATTRIBUTE].sites:
        site.module.__dict__.pop("forward")


def one_forward_replaced(model: torch.nn.Module) -> None:
    module = base(model).__dict__[patch.ATTRIBUTE].sites[1].module
    module.forward = type(module).forward.__get__(module)


@pytest.mark.parametrize("undo", [hooks_removed, forwards_removed, one_forward_replaced])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_patch_undone_by_somebody_else_fails(
    build: Build, family: str, undo: Callable[[torch.nn.Module], None]
) -> None:
    model = build(family)
    fpp.apply(model)
    undo(model)
    report = fpp.verify(model)
    assert "layers not packed, one row" in failed(report)


def test_revert_fails(build: Build) -> None:
    model = build()
    fpp.apply(model)
    assert fpp.verify(model)
    fpp.revert(model)
    assert not fpp.verify(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_wrong_layer_that_says_it_is_packed(build: Build, family: str) -> None:
    """Its kernel is told that the whole row is one example."""
    model = build(family)
    fpp.apply(model)
    wrong = base(model).__dict__[patch.ATTRIBUTE].sites[1]
    forward = forwards.PackedForward._forward

    def mixing(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.site is not wrong:
            return forward(self, *args, **kwargs)
        run = self._run(kwargs["position_ids"], args[0] if args else kwargs["hidden_states"])
        kept = None if run is None else run.layout
        if run is not None:
            run.layout = layout.PackedLayout.from_lengths([kept.tokens])
        try:
            return forward(self, *args, **kwargs)
        finally:
            if run is not None:
                run.layout = kept

    with mock.patch.object(forwards.PackedForward, "_forward", mixing):
        report = fpp.verify(model)
    assert failed(report) >= {
        "logits, one row",
        "others when one changes, one row",
        "gradients of inputs",
        "gradients across examples",
    }, str(report)


def wrong_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    core = patch.Site.core

    def change(self: Any, *args: Any) -> Any:
        scale, window, softcap = core(self, *args)
        return (scale or self.module.head_dim**-0.5) * 1.01, window, softcap

    monkeypatch.setattr(patch.Site, "core", change)


def no_window(monkeypatch: pytest.MonkeyPatch) -> None:
    core = patch.Site.core
    monkeypatch.setattr(
        patch.Site, "core", lambda self, *a: (core(self, *a)[0], None, core(self, *a)[2])
    )


def wider_window(monkeypatch: pytest.MonkeyPatch) -> None:
    core = patch.Site.core

    def change(self: Any, *args: Any) -> Any:
        scale, window, softcap = core(self, *args)
        return scale, window + 1, softcap

    monkeypatch.setattr(patch.Site, "core", change)


def boundary_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    read = hooks.read_boundaries

    def change(*args: Any, **kwargs: Any) -> Any:
        found = read(*args, **kwargs)
        if found is not None and len(found.lengths) > 1:
            found.lengths[0] += 1
            found.lengths[1] -= 1
        return found

    monkeypatch.setattr(hooks, "read_boundaries", change)


def merged_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    read = hooks.read_boundaries

    def change(*args: Any, **kwargs: Any) -> Any:
        found = read(*args, **kwargs)
        if found is not None:
            found.lengths[-2:] = [sum(found.lengths[-2:])]
            found.padding[-2:] = [False]
        return found

    monkeypatch.setattr(hooks, "read_boundaries", change)


@pytest.mark.parametrize(
    "fault", [wrong_scale, no_window, wider_window, boundary_off_by_one, merged_examples]
)
def test_faults_that_change_numbers(
    build: Build, monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], None]
) -> None:
    if compat.release() < compat.Version("4.40") and fault in (no_window, wider_window):
        model = build("mistral", "eager")  # its sdpa has no window there
    else:
        model = build("mistral", "sdpa")
    fpp.apply(model)
    site = base(model).__dict__[patch.ATTRIBUTE].sites[0]
    if fault in (no_window, wider_window) and site.core(None, 5, None)[1] is None:
        pytest.skip("this release gives Mistral no window without flash-attn")
    assert fpp.verify(model)
    fault(monkeypatch)
    report = fpp.verify(model)
    assert "logits, one row" in failed(report), str(report)


def test_a_wrong_backward_alone(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * 1.01

    call = sdpa.Sdpa.__call__
    monkeypatch.setattr(sdpa.Sdpa, "__call__", lambda *a, **k: Doubled.apply(call(*a, **k)))
    model = build()
    fpp.apply(model)
    report = fpp.verify(model)
    assert failed(report) == {"gradients of inputs", "gradients of parameters"}, str(report)


def everything(model: torch.nn.Module) -> list[Any]:
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    modes = [m.training for m in model.modules()]
    buffers = [(n, id(b), b.clone()) for n, b in model.named_buffers()]
    return [state(model), grads, modes, buffers, model.config.to_dict(), torch.get_rng_state()]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b))
    return bool(a == b)


@pytest.mark.parametrize("family", [f for f in ("llama", "mixtral", "gptj") if f in HERE])
def test_nothing_is_left_behind(build: Build, packed: Call, family: str) -> None:
    model = build(family)
    fpp.apply(model)
    model.train()
    next(model.children()).eval()
    model(**packed.kwargs).logits.sum().backward()
    before = everything(model)
    assert fpp.verify(model)
    fpp.verify(model, examples=[[5, 6, 7], [8, 9]])
    for a, b in zip(before, everything(model)):
        assert same(a, b)


def test_a_failure_leaves_nothing_behind(build: Build) -> None:
    model = build()
    before = everything(model)
    for _ in range(2):
        assert not fpp.verify(model)
    for a, b in zip(before, everything(model)):
        assert same(a, b)


def test_without_gradients(build: Build) -> None:
    model = build()
    fpp.apply(model)
    with torch.no_grad():
        assert len(taken(fpp.verify(model))) == 12
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    assert len(taken(fpp.verify(model))) == 12
    model.model.layers[0].self_attn.q_proj.weight.requires_grad_(True)
    report = fpp.verify(model)
    assert report.passed and len(taken(report)) == 15


def test_own_examples(build: Build, packed: Call) -> None:
    model = build()
    fpp.apply(model)
    for examples in ([[5, 6, 7], [8, 9, 4, 3]], [torch.tensor([5, 6]), torch.tensor([7])]):
        assert fpp.verify(model, examples=examples)
    batch = {**packed.kwargs, "labels": packed.kwargs["input_ids"]}
    report = fpp.verify(model, examples=batch)
    assert report.passed, str(report)
    assert "logits, your batch" in {c.name for c in report.checks}


def test_examples_that_prove_nothing(build: Build) -> None:
    model = build()
    fpp.apply(model)
    report = fpp.verify(model, examples=[[7] * 3, [7] * 4])
    assert failed(report) == {"tolerance against mixing, your examples"}
    assert "they prove nothing; give others" in str(report)


def test_own_batches_of_every_kind(build: Build) -> None:
    from tests.matrix.kinds import KINDS

    model = build()
    fpp.apply(model)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for kind in KINDS:
        call = kind.make(model)
        if kind.outcome == "right" and "input_ids" in call.kwargs:
            report = fpp.verify(model, examples=call.kwargs)
            assert report.passed, (kind.name, str(report))


@pytest.mark.parametrize(
    ("examples", "says"),
    [
        ([[5, 6]], "at least two examples"),
        ([[5, 6], []], "examples of [2, 0] tokens"),
        ({"input_ids": torch.ones(2, 4, dtype=torch.long)}, "2 rows of 4 tokens hold 2 examples"),
        ({"inputs_embeds": torch.ones(2, 4, 8)}, "input_ids (rows, tokens)"),
    ],
)
def test_examples_that_are_not_packed(build: Build, examples: Any, says: str) -> None:
    with pytest.raises(fpp.PackingError) as caught:
        fpp.verify(build(), examples=examples)
    assert says in str(caught.value)


def test_token_ids_are_what_the_embedding_takes(build: Build) -> None:
    """Which may have fewer or more rows than the config says."""
    model: Any = build()
    fpp.apply(model)
    model.resize_token_embeddings(120)
    assert fpp.verify(model, examples=[[5, 110], [7, 8, 119]])
    model = build().model
    model.embed_tokens = torch.nn.Embedding(120, model.config.hidden_size)
    fpp.apply(model)
    assert model.config.vocab_size == 97
    assert fpp.verify(model, examples=[[5, 110], [7, 8, 119]])
    with pytest.raises(fpp.PackingError, match=r"from 0 to 119, got \[120\]"):
        fpp.verify(model, examples=[[5, 120], [7, 8]])
    fewer = build().model
    fewer.embed_tokens = torch.nn.Embedding(50, fewer.config.hidden_size)
    fpp.apply(fewer)
    assert fpp.verify(fewer)
    with mock.patch.object(type(fewer), "forward", side_effect=AssertionError("it was run")):
        for examples in ([[5, 60], [7, 8]], [[5, -1], [7, 8]]):
            with pytest.raises(fpp.PackingError, match=r"from 0 to 49, got \[(60|-1)\]"):
                fpp.verify(fewer, examples=examples)
            with pytest.raises(fpp.PackingError, match="from 0 to 49"):
                plots.leak_maps(fewer, examples)


def test_a_model_of_no_known_family() -> None:
    with pytest.raises(fpp.UnsupportedModelError, match="holds no Transformers model"):
        fpp.verify(torch.nn.Linear(2, 2))


def test_wrapped_models(build: Build) -> None:
    peft = pytest.importorskip("peft") if compat.release() >= compat.Version("5") else None
    model = build()
    fpp.apply(model)
    assert fpp.verify(model.model)  # the bare base model
    if peft is not None:
        config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        wrapped = peft.get_peft_model(build(), config)
        assert not fpp.verify(wrapped)
        fpp.apply(wrapped)
        report = fpp.verify(wrapped)
        assert report.passed, str(report)
    assert fpp.verify(copy.deepcopy(model))


class DeepSpeedEngine(torch.nn.Module):
    """As DeepSpeed's: it wants to be told of every backward of what its forward gives."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("not to be called: its next step would hang")


class Engine(torch.nn.Module):
    """Somebody's wrapper that hands all arguments on."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.net = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.net(*args, **kwargs)


class Tuple(Engine):
    """One that unpacks the outputs."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.net(*args, **kwargs).to_tuple()


class LossAlone(Engine):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.net(*args, **kwargs).logits.sum()


class TrainingStep(Engine):
    def forward(self, batch: Any) -> Any:
        return self.net(**batch)


def compiled(model: torch.nn.Module) -> torch.nn.Module:
    torch._dynamo.reset()
    return torch.compile(model, backend="eager", dynamic=True)  # type: ignore[return-value]


@pytest.mark.parametrize("wrap", [DeepSpeedEngine, Engine, Tuple, compiled])
def test_wrappers_that_are_looked_through(
    build: Build, wrap: Callable[[torch.nn.Module], torch.nn.Module]
) -> None:
    model = build()
    assert not fpp.verify(wrap(model))
    fpp.apply(model)
    report = fpp.verify(wrap(model))
    assert report.passed, str(report)
    after = wrap(build())
    fpp.apply(after)
    assert fpp.verify(after)


@pytest.mark.parametrize(
    ("wrap", "says"),
    [
        (torch.nn.DataParallel, "DataParallel copies the model .* use DistributedDataParallel"),
        (TrainingStep, "forward of TrainingStep takes no input_ids.*verify its model.net instead"),
        (LossAlone, "forward of LossAlone gives Tensor, neither logits .*verify its model.net"),
    ],
)
def test_wrappers_that_are_refused(
    build: Build, wrap: Callable[[torch.nn.Module], torch.nn.Module], says: str
) -> None:
    model = build()
    fpp.apply(model)
    with pytest.raises(fpp.UnsupportedModelError, match=says):
        fpp.verify(wrap(model))
    assert fpp.verify(model)


def test_an_offloaded_model(build: Build, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = build()
    for way in ("before", "after"):
        model = build()
        if way == "before":
            fpp.apply(model)
        try:
            accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
        except (ImportError, AttributeError):
            pytest.skip("this accelerate cannot offload in this release")
        if way == "after":
            fpp.apply(model)
        assert any(p.device.type == "meta" for p in model.parameters())
        report = fpp.verify(model)
        assert report.passed, str(report)
        assert all(p.device.type == "meta" for p in model.parameters())


def test_the_report_is_small_and_frozen(build: Build) -> None:
    model = build()
    fpp.apply(model)
    report = fpp.verify(model)
    lines = str(report).splitlines()
    assert len(lines) == 2 + len(report.checks)
    assert max(map(len, lines)) <= 110
    with pytest.raises(AttributeError):
        report.passed = False  # type: ignore[misc]
    again = pickle.loads(pickle.dumps(report))
    assert again == report
    assert json.loads(json.dumps(fpp.verify(build()).to_dict()))["passed"] is False


def test_leak_maps_are_triangles(build: Build) -> None:
    model = build()
    fpp.apply(model)
    before = state(model)
    batch, maps = plots.leak_maps(model)
    assert state(model) == before
    lengths = [len(p.ids) for p in batch.pieces]
    own = torch.block_diag(*[torch.ones(n, n) for n in lengths]).tril() > 0
    assert bool((maps["patched"][own] > 0).all())
    assert bool((maps["patched"][~own] == 0).all())
    assert bool((maps["stock"][~own & torch.ones_like(own).tril()] > 0).any())
    assert fpp.verify(model)
    assert (
        plots.foreign_share(batch, maps["patched"]) == 0 < plots.foreign_share(batch, maps["stock"])
    )
    assert list(plots.leak_maps(build())[1]) == ["stock"]
    with pytest.raises(fpp.PackingError, match="at least two examples"):
        plots.leak_maps(model, [[5, 6]])


def test_plot_without_matplotlib(
    build: Build, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = build()
    report = fpp.verify(model)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        report.plot(tmp_path / "leak.png")
    del model
    with pytest.raises(RuntimeError, match="no longer exists"):
        report.plot(tmp_path / "leak.png")


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="no matplotlib")
def test_plot_draws_a_picture(build: Build, tmp_path: Path) -> None:
    model = build()
    fpp.apply(model)
    report = fpp.verify(model)
    report.plot(tmp_path / "own.svg", examples=[[5, 6, 7], [8, 9]], title="Two of my own")
    assert "Two of my own" in (tmp_path / "own.svg").read_text(encoding="utf-8")
    report.plot(tmp_path / "leak.png")
    assert (tmp_path / "leak.png").read_bytes().startswith(b"\x89PNG")


def test_rounding_is_of_the_size_of_rounding() -> None:
    """PyTorch's real error of a matrix product is below ours, and not by orders of magnitude."""
    generator = torch.Generator().manual_seed(0)
    for dtype, width in ((torch.float32, 64), (torch.float32, 1024), (torch.bfloat16, 256)):
        x = torch.randn(32, width, generator=generator).to(dtype)
        linear = torch.nn.Linear(width, width, bias=False).to(dtype)
        with torch.no_grad():
            exact = linear.double()(x.double())
            linear.to(dtype)
            real = rounding.distance(linear(x), exact)
            with rounding.rounded(linear, 0):
                ours = rounding.distance(linear(x), exact)
        assert real < ours < 30 * real


def test_positions_that_skip(build: Build) -> None:
    """From 4.53 on stock cuts an example there if it is given no mask: the proof gives one."""
    model = build()
    batch = {
        "input_ids": torch.arange(5, 13)[None],
        "position_ids": torch.tensor([[0, 1, 4, 5, 0, 1, 2, 7]]),
    }
    assert not fpp.verify(model, examples=batch)
    fpp.apply(model)
    report = fpp.verify(model, examples=batch)
    assert report.passed, str(report)


def test_the_default_batches_hold_what_boundaries_can_go_wrong_on() -> None:
    one, padded = batches.random_batches(50, 5)
    assert "attention_mask" not in one.kwargs
    assert [len(p.ids) for p in one.pieces] == [9, 9, 2, 7]  # longer than the window
    ids, mask = padded.kwargs["input_ids"], padded.kwargs["attention_mask"]
    assert torch.equal(padded.padding, mask == 0)
    assert mask[-1].tolist() == [0] + [1] * 3 + [0] + [1] * 8 + [0]
    assert mask[:-1].all()
    assert 1 in [len(p.ids) for p in padded.pieces]
    for piece in padded.pieces:
        assert torch.equal(ids[piece.place], piece.ids)
        assert torch.equal(padded.kwargs["position_ids"][piece.place], piece.positions)


def test_labels_of_token_classification(build: Build) -> None:
    import transformers

    if compat.release() < compat.Version("4.43"):
        pytest.skip("no token classification in these releases")
    model = transformers.LlamaForTokenClassification(build().config).eval()
    fpp.apply(model)
    report = fpp.verify(model)
    assert report.passed, str(report)
    assert "loss" in {c.name for c in report.checks}
    head_hook(model).shifts_labels = True
    assert failed(fpp.verify(model)) == {"loss"}


def test_a_loss_with_targets_of_another_example(build: Build) -> None:
    model = build()
    fpp.apply(model)
    head_hook(model).shifts_labels = False
    wrong = {"loss", "loss by shifted labels", "loss by first labels"}
    report = fpp.verify(model)
    assert failed(report) == wrong & {c.name for c in report.checks}


def test_a_patch_that_meddles_with_calls_that_are_not_packed(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build()
    fpp.apply(model)
    decide = hooks.ModelHook._decide

    def shifted(self: Any, module: Any, args: Any, kwargs: Any) -> Any:
        found = decide(self, module, args, kwargs)
        if found is None and kwargs.get("position_ids") is not None:
            return args, {**kwargs, "position_ids": kwargs["position_ids"] * 2}
        return found

    monkeypatch.setattr(hooks.ModelHook, "_decide", shifted)
    assert failed(fpp.verify(model)) == {
        "calls not packed, one row",
        "calls not packed, padded rows",
    }


@pytest.mark.parametrize(
    ("packed", "calls"),
    [(False, "calls not packed"), (True, "others when one changes")],
)
def test_a_patch_that_breaks_some_calls(
    build: Build, monkeypatch: pytest.MonkeyPatch, packed: bool, calls: str
) -> None:
    """Where stock gives an answer an error of the patched model is a check that failed."""
    model = build()
    fpp.apply(model)
    decide, seen = hooks.ModelHook._decide, [0]

    def breaking(self: Any, module: Any, args: Any, kwargs: Any) -> Any:
        found = decide(self, module, args, kwargs)
        if (found is not None) == packed and kwargs.get("position_ids") is not None:
            seen[0] += 1
            if not packed or seen[0] == 3:
                raise ZeroDivisionError("somebody's fault")
        return found

    monkeypatch.setattr(hooks.ModelHook, "_decide", breaking)
    report = fpp.verify(model)
    assert f"{calls}, one row" in failed(report)
    assert "ZeroDivisionError: somebody's fault" in str(report)


def test_recomputes_of_checkpointed_activations_are_proved(build: Build) -> None:
    model = build()
    enable = model.gradient_checkpointing_enable
    if "gradient_checkpointing_kwargs" not in inspect.signature(enable).parameters:
        pytest.skip("this release has the reentrant kind alone")
    enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    fpp.apply(model)
    report = fpp.verify(model)
    assert report.passed, str(report)
    forward = forwards.PackedForward._forward

    def wrong_in_backward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch._C._current_graph_task_id() == -1:
            return forward(self, *args, **kwargs)
        return type(self.site.module).forward(self.site.module, *args, **kwargs)

    with mock.patch.object(forwards.PackedForward, "_forward", wrong_in_backward):
        found = failed(fpp.verify(model))
    assert "gradients of inputs" in found, found
    assert not any(module.training for module in model.modules())


def test_dropout_keeps_checkpointing_off(build: Build) -> None:
    """The very modules that recompute may drop out: packed and separate would differ by chance."""
    if compat.release() < compat.Version("4.36"):
        pytest.skip("this release has the reentrant kind alone")
    model = build("falcon", hidden_dropout=0.5)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    fpp.apply(model)
    report = fpp.verify(model)
    assert report.passed, str(report)


def test_the_documented_table_has_the_checks_of_a_report(build: Build) -> None:
    page = (Path(__file__).resolve().parents[1] / "docs" / "verify.md").read_text(encoding="utf-8")
    model = build()
    fpp.apply(model)
    checks = fpp.verify(model).checks
    table = page[page.index("fa2_pack_patch verify: passed") :]
    lines = table[: table.index("```")].splitlines()[2:]
    names = [line[2:].split("  ")[0] for line in lines]
    here = {c.name for c in checks}
    assert [n for n in names if n in here or n != "loss by shifted labels"] == [
        c.name for c in checks
    ]
    for check in checks:
        assert f"| {check.name.split(',')[0]} |" in page


@pytest.mark.skipif(
    compat.release() < compat.Version("4.36"), reason="Llama's attention drops nothing out there"
)
def test_dropout_that_packed_rows_lose(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama", attention_dropout=0.5)
    fpp.apply(model, kernel="sdpa")
    for mode in (True, False):
        model.train(mode)
        report = fpp.verify(model)
        assert report.passed, str(report)
        assert "dropout in training" in [c.name for c in report.checks]
        assert {m.training for m in model.modules()} == {mode}
    kernel = kernels.KERNELS["sdpa"]
    call = type(kernel).__call__

    def without(*args: Any, dropout: float, **more: Any) -> torch.Tensor:
        return call(*args, dropout=0.0, **more)

    monkeypatch.setattr(type(kernel), "__call__", without)
    assert failed(fpp.verify(model)) == {"dropout in training"}


@pytest.mark.skipif("falcon" not in HERE, reason="no Falcon in this release")
def test_dropout_that_only_packed_rows_have(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock Falcon drops out as flash-attention alone, not as it is loaded here."""
    model = build("falcon", attention_dropout=0.5)
    fpp.apply(model)
    assert fpp.verify(model).passed
    monkeypatch.setattr(patch.Site, "drops_out", lambda _: True)
    assert failed(fpp.verify(model)) == {"dropout in training"}
