"""What a packed call goes through: kinds of input, boundaries, recompute, refusals, labels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

import fa2_pack_patch as fpp
from fa2_pack_patch import hooks
from fa2_pack_patch.runs import CURRENT
from tests.matrix import models
from tests.matrix.cells import (
    References,
    compare,
    generations,
    gradients,
    outcome,
    packed_loss,
    perturbation,
    run_refused,
    same,
    separate_gradients,
)
from tests.matrix.kinds import KINDS, TWO, Call, Kind, _positions, _varlen

Build = Callable[..., torch.nn.Module]
LIMIT = 2e-4
PACKED = [k for k in KINDS if k.outcome == "right"]
QUIET = [k for k in KINDS if k.outcome == "unchanged"]
REFUSED = [k for k in KINDS if k.outcome == "refused"]
RELEASE = Version(transformers.__version__)
HERE = [n for n, case in models.FAMILIES.items() if models.available(case, str(RELEASE))]


def checkpointed(model: Any, *, reentrant: bool = True) -> None:
    """Activation checkpointing; 4.34 and 4.35 have the reentrant kind alone, without an option."""
    options: dict[str, Any] = {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    model.gradient_checkpointing_enable(**(options if Version("4.36") <= RELEASE else {}))
    model.enable_input_require_grads()


@pytest.mark.parametrize("kind", PACKED, ids=lambda k: k.name)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["llama", "mistral", "falcon_new"])
def test_packed_equals_separate(build: Build, family: str, implementation: str, kind: Kind) -> None:
    model, reference = build(family, implementation), References(build(family, implementation))
    fpp.apply(model)
    call = kind.make(model)
    with torch.no_grad():
        assert compare(model(**call.kwargs).logits, call, reference) < LIMIT


@pytest.mark.parametrize("kind", QUIET, ids=lambda k: k.name)
def test_other_calls_are_bitwise_unchanged(build: Build, kind: Kind) -> None:
    model = build("mistral", "sdpa")
    before = outcome(model, kind)
    if kind.name == "single_offset" and Version("4.42") > RELEASE:
        assert before.startswith("IndexError")  # stock's rope is as long as the row there
    else:
        assert isinstance(before, torch.Tensor)
    fpp.apply(model)
    assert same(before, outcome(model, kind))["status"] == "unchanged"


def test_generation_is_unchanged(build: Build) -> None:
    model = build("llama", "sdpa")
    before = generations(model)
    works = {name for name, value in before.items() if isinstance(value, torch.Tensor)}
    assert works >= {"generate", "generate_left", "generate_no_cache", "prefill_decode"}
    assert Version("4.38") > RELEASE or "one_token_step" in works
    fpp.apply(model)
    for name, value in generations(model).items():
        assert same(before[name], value)["status"] == "unchanged", name


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
def test_generation_from_padded_prompts(build: Build, side: str, cache: bool) -> None:
    """Since 5.0 generate() counts on from the padding's positions, as if an example started."""
    model, stock = build("llama", "eager"), build("llama", "eager")
    fpp.apply(model)
    ids = torch.randint(3, 90, (2, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, slice(3) if side == "left" else slice(4, None)] = 0
    options = {"attention_mask": mask, "max_new_tokens": 4, "use_cache": cache}
    assert torch.equal(model.generate(ids, **options), stock.generate(ids, **options))
    with torch.no_grad():  # by hand it is a packed call: padding between two examples
        call = {"input_ids": ids[:1], "attention_mask": torch.tensor([[1, 1, 1, 0, 0, 1, 1]])}
        call["position_ids"] = torch.tensor([[0, 1, 2, 0, 0, 0, 1]])
        alone = stock(input_ids=ids[:1, 5:], position_ids=torch.arange(2)[None]).logits
        assert torch.allclose(model(**call).logits[:, 5:], alone, atol=LIMIT)


@pytest.mark.parametrize("kind", REFUSED, ids=lambda k: k.name)
def test_contradictions_are_refused(build: Build, kind: Kind) -> None:
    model = build("llama", "sdpa")
    fpp.apply(model)
    cell = run_refused(model, kind)
    assert cell["status"] == "refused", cell


@pytest.mark.parametrize("family", HERE)
def test_every_family_in_this_release(build: Build, packed: Call, family: str) -> None:
    model, reference = build(family, "eager"), References(build(family, "eager"))
    fpp.apply(model)
    with torch.no_grad():
        assert compare(model(**packed.kwargs).logits, packed, reference) < LIMIT
    cell = perturbation(model, models.FAMILIES[family].family)
    assert cell["status"] == "right", cell


@pytest.mark.parametrize(
    "family", [n for n in HERE if n in ("llama", "qwen2", "gemma2", "mixtral")]
)
def test_gradients_recompute_and_two_forwards(build: Build, family: str) -> None:
    model, alone = build(family, "eager"), build(family, "eager").train()
    first, second = _positions(TWO), _positions([[3, 5, 12], [9, 9, 2]], seed=7)
    wanted = {
        "1": separate_gradients(alone, [first]),
        "2": separate_gradients(alone, [first, second]),
    }
    fpp.apply(model)
    cells = gradients(model, wanted)
    kinds = {"plain", "two_forwards", "checkpoint_reentrant"}
    assert set(cells) == kinds | ({"checkpoint"} if Version("4.36") <= RELEASE else set())
    for name, cell in cells.items():
        assert cell["status"] == "right", (name, cell)


def test_recompute_of_offloaded_activations(build: Build) -> None:
    """Saved tensors that went elsewhere and back lie in another storage."""
    model, alone = build("llama", "eager").train(), build("llama", "eager").train()
    call = _positions(TWO)
    want = separate_gradients(alone, [call])
    fpp.apply(model)
    checkpointed(model)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        packed_loss(model, call).backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, want[name], atol=LIMIT), name


def test_offloaded_positions_that_do_not_tell_the_examples_are_refused(build: Build) -> None:
    """Lengths beside positions that run on: a recompute with a copy of these cannot be packed."""
    model = build("llama", "eager").train()
    fpp.apply(model)
    checkpointed(model)
    cu = torch.tensor([0, 4, 10], dtype=torch.int32)
    call = {
        "input_ids": torch.arange(10)[None] + 1,
        "position_ids": torch.arange(10)[None],
        **{"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 6, "max_length_k": 6},
    }
    model(**call).logits.sum().backward()  # nothing moved
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        loss = model(**call).logits.sum()
    attention = model.model.layers[1].self_attn
    real = attention.forward
    moved = []

    def elsewhere(*args: Any, **kwargs: Any) -> Any:  # where checkpoints keep them otherwise
        moved.append(True)
        return real(*args, **{**kwargs, "position_ids": kwargs["position_ids"].clone()})

    attention.__dict__["forward"] = elsewhere
    with pytest.raises(fpp.PackingError, match="run on over a boundary"):
        loss.backward()


def test_one_token_with_the_positions_of_a_call_in_flight(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not packed, whatever its positions are: a packed call has one for each token."""
    model = build("llama", "eager").train()
    fpp.apply(model)
    kept = model(input_ids=torch.tensor([[3, 5]]), position_ids=torch.tensor([[0, 0]]))
    monkeypatch.setattr(fpp.runs, "in_backward", lambda: True)
    runs, moved = model.model._fa2_pack_patch.runs, torch.tensor([[0, 0]])
    assert runs.find(moved, torch.zeros(1, 1, 8)) is None
    assert runs.find(moved.to(torch.uint16), torch.zeros(1, 2, 8)) is None  # no copy of ours
    assert runs.find(moved, torch.zeros(1, 2, 8)) is not None
    assert kept.logits.requires_grad


def test_moved_positions_lead_to_their_layout(build: Build, packed: Call) -> None:
    """Layers on several devices are given other tensors of the same values."""
    model = build("llama", "sdpa")
    fpp.apply(model)
    out = model(**packed.kwargs).logits

    def elsewhere(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "position_ids": kwargs["position_ids"].clone()}

    handle = model.model.layers[1].self_attn.register_forward_pre_hook(elsewhere, with_kwargs=True)
    assert torch.equal(model(**packed.kwargs).logits, out)
    handle.remove()
    fpp.revert(model)
    assert not torch.allclose(model(**packed.kwargs).logits, out, atol=1e-3)


@pytest.mark.parametrize("reentrant", [False, True] if Version("4.36") <= RELEASE else [True])
def test_a_plain_call_with_the_positions_of_a_packed_one(build: Build, reentrant: bool) -> None:
    """In flight with it: found by value, it was packed too, as were its recomputes."""
    model, stock = build("llama", "eager").train(), build("llama", "eager").train()
    ids, positions = torch.tensor([[3, 5, 7, 9]]), torch.tensor([[0, 1, 2, 0]])
    plain = {"input_ids": ids, "attention_mask": torch.tensor([[1, 1, 1, 0]])}
    fpp.apply(model)
    found = []
    for tree in (stock, model):
        checkpointed(tree, reentrant=reentrant)
        out = tree(**plain, position_ids=positions.clone(), use_cache=False).logits
        if tree is model:
            kept = tree(input_ids=ids, position_ids=positions.clone(), use_cache=False).logits
            out = tree(**plain, position_ids=positions.clone(), use_cache=False).logits
        out[:, 2:].square().sum().backward()
        found.append((out, tree.model.layers[0].self_attn.q_proj.weight.grad))
    assert kept.requires_grad
    assert torch.equal(found[0][0], found[1][0])
    assert torch.allclose(found[0][1], found[1][1], atol=1e-5)


def test_a_run_is_one_model_s_own(build: Build, packed: Call) -> None:
    """A model that is called inside of another, with its positions, counts layers of its own."""
    student, teacher = build("llama", "sdpa"), build("llama", "sdpa")
    fpp.apply(student)
    fpp.apply(teacher)
    broken = teacher.model.layers[0].self_attn
    broken.forward = type(broken).forward.__get__(broken)  # somebody's patch after ours

    def ask(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        call = {**packed.kwargs, "position_ids": kwargs["position_ids"], "use_cache": False}
        teacher(**call)

    student.model.layers[1].self_attn.register_forward_hook(ask, with_kwargs=True)
    with torch.no_grad(), pytest.raises(fpp.PackingError, match="1 of 2 attention layers"):
        student(**packed.kwargs)


def test_dropout_in_training_alone(build: Build, packed: Call) -> None:
    model = build("llama", "sdpa", attention_dropout=0.5)
    fpp.apply(model)
    with torch.no_grad():
        calm = [model(**packed.kwargs).logits for _ in range(2)]
        model.train()
        wild = [model(**packed.kwargs).logits for _ in range(2)]
    has = Version(transformers.__version__) >= Version("4.36")  # Llama had none before
    assert torch.equal(*calm) and torch.allclose(*wild, atol=1e-3) != has


def test_no_cache_is_built(build: Build, packed: Call) -> None:
    model = build("llama", "sdpa")
    fpp.apply(model)
    assert not model(**packed.kwargs).past_key_values
    assert model(input_ids=packed.kwargs["input_ids"]).past_key_values


def test_a_max_length_below_the_longest_example_is_refused(build: Build) -> None:
    model = build("llama", "sdpa")
    fpp.apply(model)
    call = next(kind for kind in KINDS if kind.name == "varlen").make(model).kwargs
    call["max_length_k"] = 10
    with pytest.raises(fpp.PackingError, match=r"max_length_k is 10, but the longest .* 11 tokens"):
        model(**call)


def test_no_gradient_reaches_another_example(build: Build) -> None:
    model = build("llama", "sdpa")
    fpp.apply(model)
    call = _positions(TWO)
    ids = call.kwargs.pop("input_ids")
    embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
    logits = model(**call.kwargs, inputs_embeds=embeds).logits
    logits[0, 4:13].sum().backward()
    own = torch.zeros(2, 20, dtype=torch.bool)
    own[0, 4:13] = True
    assert (embeds.grad[~own] == 0).all()
    assert (embeds.grad[own] != 0).any()


def test_the_first_label_of_an_example_is_no_target(build: Build) -> None:
    model, alone = build(), build()
    fpp.apply(model)
    call = _positions(TWO)
    ids = call.kwargs["input_ids"]
    given = ids.clone()
    loss = model(**call.kwargs, labels=given).loss
    total, count = 0.0, 0
    for e in call.examples:
        logits = alone(input_ids=e.tokens[None]).logits[0].float()
        total += torch.nn.functional.cross_entropy(
            logits[:-1], e.tokens[1:], reduction="sum"
        ).item()
        count += len(e.tokens) - 1
    assert loss.item() == pytest.approx(total / count, abs=LIMIT)
    assert torch.equal(given, ids)


def own_losses(model: Any, call: Call) -> float:
    """The mean loss of all examples' targets, each example by itself."""
    total, count = 0.0, 0
    for e in call.examples:
        ids = e.tokens[None]
        shifted = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
        if len(e.tokens) > 1:
            given = {"labels": ids, "shift_labels": shifted, "use_cache": False}
            loss = model(input_ids=ids, position_ids=e.positions[None], **given).loss
            total += loss.item() * (len(e.tokens) - 1)
            count += len(e.tokens) - 1
    return total / count


@pytest.mark.skipif(Version("4.51") > RELEASE, reason="no loss that takes shift_labels")
@pytest.mark.parametrize("kind", ["positions", "varlen"])
def test_a_shifted_label_of_another_example_is_no_target(build: Build, kind: str) -> None:
    """Trainers that split sequences hand labels over where they are predicted."""
    model, alone = build(), build()
    fpp.apply(model)
    call = _positions(TWO) if kind == "positions" else _varlen(TWO)
    ids = call.kwargs["input_ids"]
    shifted = ids.roll(-1, 1)  # a row's last token is given a target, too
    given = shifted.clone()
    loss = model(**call.kwargs, labels=ids, shift_labels=given).loss
    assert loss.item() == pytest.approx(own_losses(alone, call), abs=LIMIT)
    assert torch.equal(given, shifted)
    with pytest.raises(
        fpp.PackingError, match=r"shift_labels of packed rows must be integers of shape \(2, 20\)"
    ):
        model(**call.kwargs, labels=ids, shift_labels=given.float())


@pytest.mark.skipif(Version("4.46") > RELEASE, reason="no keywords for the loss")
def test_the_label_that_the_caller_ignores(build: Build) -> None:
    """``ignore_index`` goes to the loss: -100 would then be a class out of range."""
    model, alone = build(), build()
    fpp.apply(model)
    call = _positions(TWO)
    loss = model(**call.kwargs, labels=call.kwargs["input_ids"], ignore_index=-1).loss
    assert loss.item() == pytest.approx(own_losses(alone, call), abs=LIMIT)


def token_heads(*families: str) -> list[tuple[str, str]]:
    names = {f: f"{models.FAMILIES[f].causal[:-11]}ForTokenClassification" for f in families}
    return [(f, name) for f, name in names.items() if hasattr(transformers, name)]


def token_head(build: Build, family: str, name: str) -> Any:
    config = build(family, "eager").config
    config.num_labels = 5
    return getattr(transformers, name)(config).eval()


@pytest.mark.parametrize(("family", "name"), token_heads("llama", "mistral", "qwen2"))
def test_a_class_for_every_token(build: Build, family: str, name: str) -> None:
    """Its labels are no next tokens: the first of an example is one like the others."""
    model = token_head(build, family, name)
    call = _positions(TWO)
    total = 0.0
    for e in call.examples:
        ids = e.tokens[None]
        loss = model(input_ids=ids, position_ids=e.positions[None], labels=ids % 5).loss
        total += loss.item() * len(e.tokens)
    fpp.apply(model)
    got = model(**call.kwargs, labels=call.kwargs["input_ids"] % 5)
    assert got.loss.item() == pytest.approx(total / 40, abs=LIMIT)


@pytest.mark.parametrize(("family", "name"), token_heads("falcon", "phi", "phi3"))
def test_a_head_that_keeps_the_positions_to_itself(build: Build, family: str, name: str) -> None:
    """Falcon's does to this day, Phi's until 4.47; some take them and say nothing."""
    model, stock = token_head(build, family, name), token_head(build, family, name)
    stock.load_state_dict(model.state_dict())
    plain = {"input_ids": torch.arange(3, 9)[None]}
    fpp.apply(model)
    assert torch.equal(model(**plain).logits, stock(**plain).logits)
    segments = next(k for k in KINDS if k.name == "segments").make(model)
    for call in (_positions(TWO), segments):
        if family != "falcon" and Version("4.48") <= RELEASE:
            logits = model(**call.kwargs).logits
            e = call.examples[1]
            alone = stock(input_ids=e.tokens[None], position_ids=e.positions[None]).logits[0]
            got = logits[e.row, e.start : e.start + len(e.tokens)]
            assert torch.allclose(got, alone, atol=LIMIT)
        else:
            with pytest.raises(
                fpp.PackingError, match=f"{name}.forward does not hand position_ids"
            ):
                model(**call.kwargs)


@pytest.mark.parametrize("family", ["llama", "falcon_new"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_base_model_called_by_its_forward(
    build: Build, packed: Call, family: str, implementation: str
) -> None:
    """Its hooks see nothing then: what is packed is right all the same, the rest what it was."""
    model, stock = (build(family, implementation).base_model for _ in range(2))
    fpp.apply(model)
    with torch.no_grad():
        assert torch.equal(model.forward(**packed.kwargs)[0], model(**packed.kwargs)[0])
    ids = packed.kwargs["input_ids"][:, :5]
    mask = torch.ones_like(ids)
    right, left = torch.tensor([[0, 1, 2, 1, 1]]), torch.tensor([[1, 1, 0, 1, 2]])
    for positions, at in ((right, 3), (left, 0)):
        padded = mask.clone()
        padded[:, at : at + 2] = 0
        call = {"input_ids": ids, "attention_mask": padded, "position_ids": positions}
        with torch.no_grad():
            found, wanted = model.forward(**call)[0], stock.forward(**call)[0]
        assert torch.equal(found[padded > 0], wanted[padded > 0])


def test_positional_arguments(build: Build, packed: Call) -> None:
    model, reference = build(), References(build())
    fpp.apply(model)
    ids, positions = packed.kwargs["input_ids"], packed.kwargs["position_ids"]
    hidden = model.model(ids, None, positions).last_hidden_state
    assert compare(model.lm_head(hidden), packed, reference) < LIMIT


def test_the_callers_tensors_are_left_alone(build: Build) -> None:
    model = build()
    fpp.apply(model)
    for kind in PACKED:
        call = kind.make(model)
        copies = {k: v.clone() for k, v in call.kwargs.items() if isinstance(v, torch.Tensor)}
        model(**call.kwargs)
        for name, value in copies.items():
            assert torch.equal(call.kwargs[name], value), (kind.name, name)


def test_an_exception_in_the_kernel_leaves_nothing_behind(
    build: Build, packed: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, reference = build(), References(build())
    fpp.apply(model)
    with monkeypatch.context() as patch:
        kernel = fpp.kernels.get("sdpa")
        patch.setattr(type(kernel), "__call__", lambda *a, **k: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(**packed.kwargs)
    with torch.no_grad():
        assert compare(model(**packed.kwargs).logits, packed, reference) < LIMIT
    assert CURRENT.get() is None


def test_errors_quote_the_input(build: Build) -> None:
    model = build()
    fpp.apply(model)
    said = {k.name: run_refused(model, k)["detail"] for k in REFUSED}
    assert "[0, 4, 13, 14]" in said["bad_lengths"]
    assert "20 tokens" in said["bad_lengths"]
    assert "missing ['max_length_k']" in said["partial"]
    assert "[0, 6, 20]" in said["contradiction"]
    assert "(3, 1, 20)" in said["rank"]
    assert "(1, 1, 20, 20)" in said["mask_4d"]
    assert "use_cache=False" in said["filled_cache"]


def test_rope_that_depends_on_the_longest_example(build: Build) -> None:
    scaling: dict[str, Any] = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    if Version("4.43") > RELEASE:
        scaling = {"type": "dynamic", "factor": 2.0}
    options = {"max_position_embeddings": 8, "rope_scaling": scaling}
    model = build("llama", "sdpa", **options)
    fpp.apply(model)
    fine = _positions([[5, 8, 7]])
    with torch.no_grad():
        logits = model(**fine.kwargs).logits
    assert compare(logits, fine, References(build("llama", "sdpa", **options))) < LIMIT
    with pytest.raises(fpp.PackingError, match="example 1 reaches position 8.*dynamic"):
        model(**_positions([[4, 9, 7]]).kwargs)


def test_a_dynamic_rope_at_its_limit_after_a_longer_call(build: Build) -> None:
    scaling = {"type": "dynamic", "factor": 4.0}
    made = {"rope_scaling": scaling, "max_position_embeddings": 16}
    model, alone = build("llama", **made), build("llama", **made)
    fpp.apply(model)
    call = _positions([[16, 5]])
    long = {"input_ids": torch.arange(3, 33)[None], "use_cache": False}
    with torch.no_grad():
        assert compare(model(**call.kwargs).logits, call, References(alone)) < LIMIT
        for one in (model, alone):
            one(**long)
        try:
            got = model(**call.kwargs).logits
        except fpp.PackingError as error:
            assert "example 0 takes all 16 positions" in str(error)
            assert Version("4.43") <= RELEASE
        else:
            assert compare(got, call, References(alone)) < LIMIT
        model(input_ids=call.kwargs["input_ids"][:, :9])  # gives the phases up
        if Version("4.43") <= RELEASE:
            assert compare(
                model(**call.kwargs).logits, call, References(build("llama", **made))
            ) < (LIMIT)


@pytest.mark.skipif("phi3" not in HERE, reason="no family with longrope in this release")
def test_longrope_switches_all_or_is_refused(build: Build) -> None:
    scaling: dict[str, Any] = {
        "type": "longrope" if Version("4.43") <= RELEASE else "su",
        "short_factor": [1.0] * 4, "long_factor": [1.0, 1.5, 2.0, 2.5],
    }  # fmt: skip
    if Version("5") <= RELEASE:
        scaling |= {"rope_type": scaling.pop("type"), "factor": 8.0, "rope_theta": 10000.0}
        scaling["original_max_position_embeddings"] = 8
    options: dict[str, Any] = {"rope_scaling": scaling, "original_max_position_embeddings": 8}
    options["sliding_window"] = None
    model = build("phi3", "sdpa", **options)
    reference = References(build("phi3", "sdpa", **options))
    fpp.apply(model)
    for lengths in ([5, 8, 7], [9, 10, 11]):
        call = _positions([lengths])
        with torch.no_grad():
            assert compare(model(**call.kwargs).logits, call, reference) < LIMIT, lengths
    with pytest.raises(fpp.PackingError, match="longrope"):
        model(**_positions([[5, 12]]).kwargs)


def test_rows_longer_than_the_models_positions(build: Build) -> None:
    model = build("llama", "sdpa", max_position_embeddings=8)
    reference = References(build("llama", "sdpa", max_position_embeddings=8))
    fpp.apply(model)
    call = _positions([[8, 7, 8, 5, 8]])
    with torch.no_grad():
        assert compare(model(**call.kwargs).logits, call, reference) < LIMIT


@pytest.mark.parametrize("fault", ["boundaries", "row_start", "global_layout", "window"])
def test_the_tests_would_notice(build: Build, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Four mutants; each must make packed differ from separate."""
    family = "mistral" if fault == "window" else "llama"
    how = "eager" if fault == "window" else "sdpa"  # stock as sdpa had no window once
    model, reference = build(family, how), References(build(family, how))
    fpp.apply(model)
    real = fpp.PackedLayout.from_lengths.__func__

    if fault == "boundaries":

        def one(cls: type, lengths: Any, **more: Any) -> Any:
            return real(cls, [sum(lengths)], device=more["device"])

        monkeypatch.setattr(fpp.PackedLayout, "from_lengths", classmethod(one))
    elif fault == "row_start":

        def merged(cls: type, lengths: Any, **more: Any) -> Any:
            lengths = list(lengths)
            joined = lengths[:2] + [lengths[2] + lengths[3]] + lengths[4:]
            return real(cls, joined, device=more["device"])

        monkeypatch.setattr(fpp.PackedLayout, "from_lengths", classmethod(merged))
    elif fault == "window":
        from fa2_pack_patch.patch import Site

        core = Site.core
        monkeypatch.setattr(Site, "core", lambda *a: (core(*a)[0], None, core(*a)[2]))
    else:
        alone = build(family, "sdpa").train()
        first, second = _positions(TWO), _positions([[3, 5, 12], [9, 9, 2]], seed=7)
        wanted = {
            "1": separate_gradients(alone, [first]),
            "2": separate_gradients(alone, [first, second]),
        }
        runs, last = type(model.model._fa2_pack_patch.runs), {}
        bind = runs.bind

        def remember(self: Any, tensor: torch.Tensor, run: Any) -> None:
            last["run"] = run
            bind(self, tensor, run)

        monkeypatch.setattr(runs, "bind", remember)
        monkeypatch.setattr(runs, "find", lambda self, *given: last["run"])
        cells = gradients(model, wanted)
        assert cells["plain"]["status"] == "right"
        recomputed = cells.get("checkpoint", cells["checkpoint_reentrant"])
        assert recomputed["status"] in ("wrong", "error")  # torch may notice, too
        assert cells["checkpoint_reentrant"]["status"] == "wrong"
        return
    call = _positions(TWO)
    with torch.no_grad():
        assert compare(model(**call.kwargs).logits, call, reference) > 10 * LIMIT


def test_one_read_of_the_input_per_forward(
    build: Build, packed: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build()
    fpp.apply(model)
    reads = []
    real = hooks.to_host
    monkeypatch.setattr(hooks, "to_host", lambda *a: reads.append(1) or real(*a))
    model(**packed.kwargs)
    assert len(reads) == 1
    model(input_ids=torch.arange(3, 9)[None], position_ids=torch.arange(6)[None])
    assert len(reads) == 2
    model(input_ids=torch.tensor([[5]]), position_ids=torch.tensor([[0]]))
    model(input_ids=torch.tensor([[5, 6]]))
    assert len(reads) == 2


@pytest.mark.parametrize("part", ["model", "layers"])
def test_compiled_equals_eager(build: Build, part: str) -> None:
    """Compiled around or inside: right, with a graph break at the patch."""
    model, reference = build("llama", "sdpa"), References(build("llama", "sdpa"))
    fpp.apply(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager") if part == "model" else model
    if part == "layers":
        for layer in model.model.layers:
            layer.compile(backend="eager")
    for rows in (TWO, [[3, 5, 12], [9, 9, 2]]):
        call = _positions(rows)
        with torch.no_grad():
            assert compare(compiled(**call.kwargs).logits, call, reference) < LIMIT
    assert fpp.is_applied(compiled)


def test_autocast_gives_what_it_gives_for_each_example_alone(build: Build, packed: Call) -> None:
    model, alone = build("llama", "sdpa"), build("llama", "sdpa")
    fpp.apply(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        want = References(alone)
        logits = model(**packed.kwargs).logits
        error = compare(logits, packed, want)
        scale = max(want(e).abs().max().item() for e in packed.examples)
    assert error < 0.02 * scale


@pytest.mark.parametrize(
    ("weights", "quantized", "expected"),
    [
        (torch.bfloat16, None, torch.bfloat16),
        (torch.float32, None, torch.float32),
        (torch.float32, torch.float16, torch.float16),
    ],
)
def test_fp32_from_peft_norms_is_cast_as_transformers_casts_it(
    weights: torch.dtype, quantized: Any, expected: torch.dtype
) -> None:
    from types import SimpleNamespace

    from fa2_pack_patch.interceptors.base import _target_dtype

    module = torch.nn.Module()
    module.q_proj = torch.nn.Linear(2, 2, dtype=weights)
    module.config = SimpleNamespace(_pre_quantization_dtype=quantized)
    full, half = torch.zeros(1), torch.zeros(1, dtype=torch.bfloat16)
    assert _target_dtype(module, full, full, full) == expected
    assert _target_dtype(module, half, half, half) == torch.bfloat16


def test_a_flash_kernel_for_fp32_or_wide_heads_names_those_that_can(
    build: Build, packed: Call
) -> None:
    model = build("llama", "sdpa")
    fpp.apply(model)
    model.model._fa2_pack_patch.kernel = "flash_attn"  # as if it had been there at apply
    with pytest.raises(fpp.KernelUnavailableError, match="Kernels that can: sdpa"):
        model(**packed.kwargs)
