"""apply and revert: planning, identity, copies, wrappers, threads, refusals."""

from __future__ import annotations

import copy
import io
import json
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fa2_pack_patch as fpp
from fa2_pack_patch import compat, twin
from tests.matrix.cells import References, compare
from tests.matrix.kinds import Call

LIMIT = 2e-4
Build = Callable[..., torch.nn.Module]


def error_of(model: torch.nn.Module, call: Call, reference: References) -> float:
    with torch.no_grad():
        return compare(model(**call.kwargs).logits, call, reference)


def state(model: torch.nn.Module) -> list[Any]:
    """Every instance attribute and hook of every module, by identity."""
    found = []
    for name, module in model.named_modules():
        for key, value in sorted(module.__dict__.items()):
            inner = {k: id(v) for k, v in value.items()} if isinstance(value, dict) else id(value)
            found.append((name, key, inner))
    return found


def test_apply_makes_packed_equal_separate(build: Build, packed: Call) -> None:
    model = build()
    reference = References(build())
    report = fpp.apply(model)
    assert error_of(model, packed, reference) < LIMIT
    assert (report.family, report.layers, report.kernel) == ("llama", 2, "sdpa")
    assert "llama" in str(report)
    assert report.verified


def test_revert_restores_every_object(build: Build) -> None:
    model = build()
    before = state(model)
    fpp.apply(model)
    assert state(model) != before
    assert fpp.revert(model)
    assert state(model) == before
    assert not fpp.revert(model)


def test_many_cycles_leave_nothing(build: Build) -> None:
    model = build()
    before = state(model)
    for _ in range(50):
        fpp.apply(model)
        fpp.revert(model)
    assert state(model) == before


def test_apply_twice_is_one_apply(build: Build) -> None:
    model = build()
    first = fpp.apply(model)
    after = state(model)
    assert fpp.apply(model) is first
    assert state(model) == after


def _hooks_taken(model: Any) -> None:
    for module in model.modules():
        module._forward_pre_hooks.clear()
        module._forward_hooks.clear()


def _one_hook_taken(model: Any) -> None:
    model.model._forward_hooks.clear()


def _forward_taken(model: Any) -> None:
    del model.model.layers[0].self_attn.forward


def _stock_forward_back(model: Any) -> None:
    module = model.model.layers[0].self_attn
    module.forward = type(module).forward.__get__(module)


def _head_replaced(model: Any) -> None:
    cls = type(model)
    model.forward = lambda *a, **k: cls.forward(model, *a, **k)


@pytest.mark.parametrize(
    "undo", [_hooks_taken, _one_hook_taken, _forward_taken, _stock_forward_back, _head_replaced]
)
def test_apply_again_mends_what_somebody_undid(
    build: Build, packed: Call, undo: Callable[[Any], None]
) -> None:
    """The errors of such a model say to call it again."""
    model, reference = build(), References(build())
    first = fpp.apply(model)
    undo(model)
    again = fpp.apply(model)
    assert again is not first
    assert fpp.apply(model) is again
    assert error_of(model, packed, reference) < LIMIT
    assert fpp.verify(model)
    fpp.revert(model)
    if undo is not _head_replaced:
        assert "forward" not in model.__dict__ and not model.model._forward_pre_hooks


def test_another_kernel_replaces_the_first(build: Build) -> None:
    model = build()
    before = state(model)
    fpp.apply(model)
    assert fpp.apply(model, kernel="sdpa").kernel == "sdpa"
    fpp.revert(model)
    assert state(model) == before


def test_applied_is_a_context(build: Build) -> None:
    model = build()
    with pytest.raises(ZeroDivisionError), fpp.applied(model):
        assert fpp.is_applied(model)
        raise ZeroDivisionError
    assert not fpp.is_applied(model)
    fpp.apply(model)
    with fpp.applied(model):
        pass
    assert fpp.is_applied(model)


def test_a_second_model_of_the_class_is_untouched(build: Build, packed: Call) -> None:
    patched, other = build(), build()
    before = state(other)
    with torch.no_grad():
        stock = other(**packed.kwargs).logits
    fpp.apply(patched)
    assert state(other) == before
    with torch.no_grad():
        assert torch.equal(other(**packed.kwargs).logits, stock)


def test_the_bare_base_model(build: Build, packed: Call) -> None:
    model, reference = build(), References(build())
    fpp.apply(model.model)
    hidden = model.model(**packed.kwargs).last_hidden_state
    assert compare(model.lm_head(hidden), packed, reference) < LIMIT


def test_deepcopy_is_a_patched_model_of_its_own(build: Build, packed: Call) -> None:
    model, reference = build(), References(build())
    fpp.apply(model)
    twin = copy.deepcopy(model)
    fpp.revert(model)
    assert fpp.is_applied(twin)
    assert error_of(twin, packed, reference) < LIMIT
    with torch.no_grad():
        twin.lm_head.weight.zero_()
    assert error_of(model, packed, reference) > LIMIT  # reverted, and its weights are its own
    fpp.revert(twin)
    assert not fpp.is_applied(twin)


@pytest.mark.parametrize("how", ["pickle", "torch"])
def test_pickling(build: Build, packed: Call, how: str) -> None:
    model, reference = build(), References(build())
    fpp.apply(model)
    model(**packed.kwargs)
    if how == "pickle":
        loaded = pickle.loads(pickle.dumps(model))
    else:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=False)
    assert fpp.is_applied(loaded)
    assert error_of(loaded, packed, reference) < LIMIT


def test_save_pretrained_writes_what_the_unpatched_model_writes(
    build: Build, tmp_path: Path
) -> None:
    model = build()
    model.save_pretrained(tmp_path / "before")
    fpp.apply(model)
    model.save_pretrained(tmp_path / "after")
    for name in ("config.json",):
        assert (tmp_path / "before" / name).read_bytes() == (tmp_path / "after" / name).read_bytes()
    loaded = type(model).from_pretrained(tmp_path / "after")
    assert not fpp.is_applied(loaded)
    fpp.apply(loaded)


@pytest.fixture
def float64_by_default() -> Iterator[None]:
    """4.34 and 4.35 make Llama's mask in the default dtype, whatever the model's own is."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("float64_by_default")
def test_moving_dtype(build: Build, packed: Call) -> None:
    model = build().to(torch.float32)
    fpp.apply(model)
    model.to(torch.float64)
    reference = References(build().to(torch.float64))
    assert error_of(model, packed, reference) < 1e-5


def test_threads_each_see_their_own_layout(build: Build, packed: Call) -> None:
    from tests.matrix.kinds import _positions

    model, reference = build(), References(build())
    fpp.apply(model)
    calls = [
        packed,
        _positions([[3, 5, 12], [9, 9, 2]], seed=7),
        _positions([[6, 6], [1, 11]], seed=3),
    ]
    for call in calls:
        error_of(model, call, reference)  # fills the references
    errors: list[float] = []

    def work(call: Call) -> None:
        for _ in range(10):
            errors.append(error_of(model, call, reference))

    threads = [threading.Thread(target=work, args=(c,)) for c in calls]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(errors) == 30
    assert max(errors) < LIMIT


def test_32_layers_in_under_50_ms(build: Build) -> None:
    model = build(num_hidden_layers=32)
    fpp.apply(model)
    fpp.revert(model)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        fpp.apply(model)
        times.append(time.perf_counter() - began)
        fpp.revert(model)
    assert min(times) < 0.05


def test_peft_before_and_after(build: Build, packed: Call) -> None:
    peft = pytest.importorskip("peft", exc_type=ImportError)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"])
    reference = References(build())
    before = peft.get_peft_model(build(), config)
    fpp.apply(before)
    assert error_of(before, packed, reference) < LIMIT
    model = build()
    fpp.apply(model)
    after = peft.get_peft_model(model, config)
    assert fpp.is_applied(after)
    assert error_of(after, packed, reference) < LIMIT
    fpp.revert(after)
    assert not fpp.is_applied(model)


def test_data_parallel_is_refused_and_ddp_like_wrappers_are_looked_through(build: Build) -> None:
    with pytest.raises(fpp.UnsupportedModelError, match="DistributedDataParallel"):
        fpp.apply(torch.nn.DataParallel(build()))

    class Wrapper(torch.nn.Module):
        def __init__(self, module: torch.nn.Module) -> None:
            super().__init__()
            self.module = module

    assert fpp.apply(Wrapper(build())).layers == 2


def test_sequence_classification_raises_on_a_packed_row(build: Build, packed: Call) -> None:
    import transformers

    config = build().config
    config.num_labels = 3
    model = transformers.LlamaForSequenceClassification(config).eval()
    report = fpp.apply(model)
    assert any("LlamaForSequenceClassification" in n for n in report.notes)
    with pytest.raises(fpp.PackingError, match="one result for each row"):
        model(**packed.kwargs)
    model(input_ids=torch.tensor([[5, 6, 7]]))


def test_unknown_families_and_strangers_are_refused_whole() -> None:
    import transformers

    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=20)
    model = transformers.GPT2LMHeadModel(config)
    before = state(model)
    with pytest.raises(fpp.UnsupportedModelError, match="'gpt2' is not in the registry") as caught:
        fpp.apply(model)
    assert state(model) == before
    assert caught.value.reasons
    with pytest.raises(fpp.UnsupportedModelError, match="no Transformers model"):
        fpp.apply(torch.nn.Linear(2, 2))
    with pytest.raises(fpp.UnsupportedModelError, match="Module was expected"):
        fpp.apply("llama")  # type: ignore[arg-type]


def test_alibi_falcon_is_refused(build: Build) -> None:
    model = build("falcon", "eager", alibi=True)
    with pytest.raises(fpp.UnsupportedModelError, match="alibi=True"):
        fpp.apply(model)


def test_all_reasons_are_given(build: Build) -> None:
    model = build("falcon", "eager", alibi=True)
    with pytest.raises(fpp.UnsupportedModelError) as caught:
        fpp.apply(torch.nn.DataParallel(model))
    assert len(caught.value.reasons) == 2
    again = pickle.loads(pickle.dumps(caught.value))
    assert again.reasons == caught.value.reasons


def test_a_replaced_forward_is_refused_by_the_name_of_its_module(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build()
    cls = type(model.model.layers[0].self_attn)

    def forward(self: Any, *args: Any, **kwargs: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(cls, "forward", forward)
    with pytest.raises(fpp.UnsupportedModelError, match=__name__):
        fpp.apply(model)


def test_an_instance_forward_is_refused(build: Build) -> None:
    model = build()
    model.model.layers[0].self_attn.forward = lambda *a, **k: None
    with pytest.raises(fpp.UnsupportedModelError, match="on the module itself"):
        fpp.apply(model)


def test_a_patch_put_on_top_of_ours_is_found_at_run_time(build: Build, packed: Call) -> None:
    model = build()
    fpp.apply(model)
    module = model.model.layers[1].self_attn
    cls = type(module)
    module.forward = lambda *a, **k: cls.forward(module, *a, **k)
    with pytest.raises(fpp.PackingError, match=r"1 of 2 attention layers.*layers\.1\.self_attn"):
        model(**packed.kwargs)


def test_flex_attention_is_refused_by_name(build: Build, packed: Call) -> None:
    model = build()
    model.config._attn_implementation = "flex_attention"
    if compat.release() >= compat.Version("4.48"):
        with pytest.raises(fpp.UnsupportedModelError, match="flex_attention"):
            fpp.apply(model)
    else:  # the classes of its modules say what a model runs, and a config read too late says naught
        kind = type(model.model.layers[0].self_attn).__name__
        assert fpp.apply(model).implementation == ("sdpa" if "Sdpa" in kind else "eager")
        assert error_of(model, packed, References(build())) < LIMIT


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sdpa", "sdpa"),
        ("flash_attention_3", "flash"),
        ("kernels-community/flash-attn2", "flash"),
        ("kernels-community/vllm-flash-attn3@v1", "flash"),
        ("paged|sdpa", None),
        ("flex_attention", None),
    ],
)
def test_implementation_names(name: str, kind: str | None) -> None:
    assert compat.implementation_kind(name) == kind


def test_a_failure_in_the_middle_undoes_all(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    from fa2_pack_patch.patch import Edit

    model = build()
    before = state(model)
    calls = []
    real = Edit.commit

    def commit(self: Edit) -> None:
        calls.append(self)
        if len(calls) == 4:
            raise KeyboardInterrupt
        real(self)

    monkeypatch.setattr(Edit, "commit", commit)
    with pytest.raises(KeyboardInterrupt):
        fpp.apply(model)
    assert state(model) == before


def test_versions_out_of_range() -> None:
    with pytest.raises(fpp.UnsupportedReleaseError, match="4.33.3 is older than 4.34.*install"):
        compat.check_release(compat.Version("4.33.3"))
    for version in ("5.25.0", "6.0.0"):
        assert f"{version} is not verified" in str(compat.check_release(compat.Version(version)))
    for version in ("4.34.0", "5.24.9"):
        assert compat.check_release(compat.Version(version)) is None


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> str:
    """The installed release is newer than any verified one, and no twin can be tried."""
    monkeypatch.setattr(compat, "NEWEST", compat.Version("4.33"))
    monkeypatch.setattr(twin, "build", None)
    monkeypatch.setattr(twin, "passed_before", lambda _: False)
    return str(compat.release())


def refused_for_its_release(model: torch.nn.Module, version: str) -> None:
    before = state(model)
    with pytest.raises(fpp.UnsupportedReleaseError, match=version):
        fpp.apply(model)
    assert state(model) == before
    assert not fpp.supports(model)


def test_an_older_release_is_refused(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "release", lambda: compat.Version("4.33.3"))
    refused_for_its_release(build(), "4.33.3")


def test_a_newer_release_is_refused_where_no_twin_passes(build: Build, newer: str) -> None:
    refused_for_its_release(build(), newer)


def test_an_unverified_release_can_be_allowed_and_is_reported(build: Build, newer: str) -> None:
    report = fpp.apply(build(), allow_unverified=True)
    assert not report.verified
    assert f"{newer} is not verified" in str(report)


@pytest.mark.usefixtures("newer")
def test_a_model_refused_on_an_unverified_release_is_told_of_that(build: Build) -> None:
    model = build()
    model.model.layers[0].self_attn.forward = lambda *a, **k: None
    with pytest.raises(fpp.UnsupportedModelError) as caught:
        fpp.apply(model)
    module, release = caught.value.reasons
    assert "on the module itself" in module
    assert "is not verified" in release


def test_supports_a_config_and_a_model(build: Build) -> None:
    import transformers

    assert fpp.supports(build())
    assert fpp.supports(build().config)
    verdict = fpp.supports(transformers.GPT2Config())
    assert not verdict
    assert "'gpt2'" in str(verdict)
    assert not fpp.supports(transformers.FalconConfig(alibi=True))
    if compat.release() >= compat.Version("4.36"):
        config = build().config
        config._attn_implementation = "flex_attention"
        assert "'flex_attention'" in str(fpp.supports(config))


def test_supports_a_model_that_is_patched(build: Build) -> None:
    model = build()
    fpp.apply(model)
    verdict = fpp.supports(model)
    assert verdict
    assert verdict.notes[0] == "it is patched already"
    assert not fpp.supports(torch.nn.DataParallel(model))
    patched = model.model.__dict__["_fa2_pack_patch"]
    patched.stale = "patched elsewhere"  # apply patches it anew
    assert fpp.supports(model) and not fpp.supports(model).notes
    model.model.layers[1].self_attn.forward = lambda *a, **k: None
    verdict = fpp.supports(model)
    assert "layers.1.self_attn.forward was replaced" in str(verdict)
    assert "fa2_pack_patch" not in str(verdict).split(" was replaced")[1]


@pytest.mark.parametrize("given", ["meta-llama/Llama-2-7b-hf", 3, None])
def test_supports_of_what_is_no_model(given: object) -> None:
    verdict = fpp.supports(given)
    assert not verdict
    assert f"a model or its config was expected, got {given!r}" in str(verdict)


def test_unknown_kernel(build: Build) -> None:
    model = build()
    with pytest.raises(fpp.KernelUnavailableError, match="'turbo'"):
        fpp.apply(model, kernel="turbo")
    with pytest.raises(fpp.KernelUnavailableError, match="Kernels that can: sdpa"):
        fpp.apply(model, kernel="torch_flash")
    assert not fpp.is_applied(model)


def test_import_is_light() -> None:
    code = (
        "import sys, json, fa2_pack_patch;"
        "print(json.dumps([m for m in ('transformers', 'flash_attn', 'peft') if m in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


@pytest.mark.parametrize("order", ["before", "after"])
def test_accelerate_offload(build: Build, packed: Call, order: str) -> None:
    accelerate = pytest.importorskip("accelerate")
    model, reference = build(), References(build())
    if order == "before":
        fpp.apply(model)
    model = accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    if order == "after":
        fpp.apply(model)
    assert error_of(model, packed, reference) < LIMIT
    fpp.revert(model)
    assert error_of(model, packed, reference) > LIMIT
    for module in model.modules():
        assert "PackedForward" not in repr(module.__dict__.get("_old_forward"))
        assert "PackedForward" not in repr(module.__dict__.get("forward"))
