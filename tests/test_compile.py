"""torch.compile: one graph with the patch inside, for any number of static batches.

``python -m tests.test_compile`` writes the table of docs/compile.md anew.
"""

from __future__ import annotations

import copy
import logging
import os
import pickle
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

import fa2_pack_patch
from fa2_pack_patch.data import DataCollatorWithFlattening
from fa2_pack_patch.detect import find_base
from fa2_pack_patch.errors import PackingError
from fa2_pack_patch.patch import ATTRIBUTE, Patch
from fa2_pack_patch.registry import families as registry
from tests.matrix import models
from tests.test_layers import deepened

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "compile.md"
RELEASE = Version(transformers.__version__)
TOKENS, ENTRIES = 24, 8
#: torch.compile runs a module's own hooks outside of its forward: what they do to labels and
#: positions is a small graph of its own, the forward is one.
GRAPHS = 2

Build = Callable[..., torch.nn.Module]
Batch = dict[str, Any]


# What does not compile as one graph, in Transformers' own code


@dataclass(frozen=True)
class Why:
    """Why a family's own code breaks the graph, and what makes it whole."""

    text: str
    advice: str
    remedy: Callable[[torch.nn.Module], Any] | None = None


@contextmanager
def _without_warnings(model: torch.nn.Module) -> Iterator[None]:
    """As the page advises; taken back here."""
    before = set(torch._dynamo.config.ignore_logging_functions)
    torch._dynamo.config.ignore_logging_functions.add(logging.Logger.warning_once)
    yield
    torch._dynamo.config.ignore_logging_functions = before


@contextmanager
def _batched_experts(model: torch.nn.Module) -> Iterator[None]:
    model.config._experts_implementation = "batched_mm"
    yield


ROUTING = Why("visits the experts that were chosen, which only the device knows", "")
WARNING = Why(
    "warns inside of its forward when it trains",
    "load it as `eager` (packed calls run the kernel all the same), or "
    "`torch._dynamo.config.ignore_logging_functions.add(logging.Logger.warning_once)`",
    _without_warnings,
)
FLOAT32 = Why(
    "multiplies its experts by an operator that compiles in bfloat16 only",
    'load it in bfloat16, or with `experts_implementation="batched_mm"`',
    _batched_experts,
)


@dataclass(frozen=True)
class Break:
    family: str
    releases: str
    why: Why
    loaded_as: tuple[str, ...] = ("eager", "sdpa", "flash_attention_2")
    case: str = ""


NOT_EAGER = ("sdpa", "flash_attention_2")
BREAKS = (
    Break("dbrx", ">=4.40", ROUTING),
    Break("mixtral", ">=4.36,<4.40", ROUTING),
    Break("mixtral", ">=4.52,<5.0", ROUTING),
    Break("qwen2_moe", ">=4.52,<5.0", ROUTING),
    Break("qwen3_moe", ">=4.53,<5.0", ROUTING),
    Break("mixtral", ">=5.0,<5.3", FLOAT32, case="float32"),
    Break("qwen2_moe", ">=5.0,<5.3", FLOAT32, case="float32"),
    Break("qwen3_moe", ">=5.0,<5.3", FLOAT32, case="float32"),
    Break("gemma2", ">=4.42,<4.57", WARNING, NOT_EAGER),
    Break("gemma3_text", ">=4.50,<4.57", WARNING, NOT_EAGER),
)
#: Their rotary tables are made in the first call: the second compiles once more, the last time.
TWICE = {"falcon": ">=4.34,<4.36", "gemma": ">=4.38,<4.41"}


def broken(family: str, implementation: str) -> Why | None:
    """Why a family loaded so is not one graph in this release; None if it is."""
    for entry in BREAKS:
        if (
            entry.family == family
            and implementation in entry.loaded_as
            and RELEASE in SpecifierSet(entry.releases)
        ):
            return entry.why
    return None


def table() -> str:
    """The table of docs/compile.md."""
    lines = [
        "| family | Transformers | when | its own code | one graph all the same |",
        "| --- | --- | --- | --- | --- |",
    ]
    titles = {name: record.title for name, record in registry().items()}
    for entry in BREAKS:
        loaded = "" if len(entry.loaded_as) == 3 else "loaded as " + " or ".join(entry.loaded_as)
        cells = (titles[entry.family], _span(entry.releases), loaded or entry.case)
        lines.append("| " + " | ".join([*cells, entry.why.text, entry.why.advice or "–"]) + " |")
    rest = sorted(set(titles) - {entry.family for entry in BREAKS}, key=str.lower)
    names = "; ".join(titles[family] for family in rest)
    twice = " and ".join(f"{titles[family]} {_span(span)}" for family, span in TWICE.items())
    return (
        "\n".join(lines)
        + f"\n\nOne graph in every release that has them: {names}.\n\n"
        + f"{twice} compile a second time in the second step, for rotary tables of the first."
    )


def _span(releases: str) -> str:
    bounds = sorted(SpecifierSet(releases), key=lambda one: one.operator, reverse=True)
    first, *before = (one.version for one in bounds)
    return f"{first} to below {before[0]}" if before else f"{first} and later"


def page_with_table() -> str:
    """docs/compile.md with its table made anew."""
    text = PAGE.read_text(encoding="utf-8")
    new = f"<!-- table -->\n{table()}\n<!-- /table -->"
    return re.sub(r"<!-- table -->.*<!-- /table -->", lambda _: new, text, flags=re.DOTALL)


# Batches, backends, steps


def static_batch(lengths: list[int], rows: int = 1) -> Batch:
    """``rows`` alike, padded to TOKENS a row; the boundaries to a fixed number of entries."""
    rest = TOKENS - sum(lengths)
    one = [*lengths, *([rest] if rest else [])] * rows
    ends = [0]
    for length in one:
        ends.append(ends[-1] + length)
    total = TOKENS * rows
    cu = torch.tensor(ends + [total] * (ENTRIES * rows + 1 - len(ends)), dtype=torch.int32)
    positions = torch.cat([torch.arange(n) for n in one]).view(rows, TOKENS)
    ids = torch.randint(3, 90, (rows, TOKENS))
    labels = ids.clone()
    labels[:, sum(lengths) :] = -100
    return {
        "input_ids": ids,
        "labels": labels,
        "position_ids": positions,
        "cu_seq_lens_q": cu,
        "cu_seq_lens_k": cu.clone(),
        "max_length_q": TOKENS,
        "max_length_k": TOKENS,
    }


class Counting:
    """A Dynamo backend that runs the graph as it is and counts the graphs it was given."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.graphs += 1
        return graph.forward


def step(
    model: torch.nn.Module, call: Any, batch: Batch, around: Callable[[], Any] = nullcontext
) -> tuple[Any, torch.Tensor]:
    """Output, and all gradients in one vector."""
    model.zero_grad()
    with around():
        out = call(**batch)
    out.loss.backward()
    grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return out, torch.cat(grads)


def patched(build: Build, family: str = "llama", *arguments: Any, **more: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = build(family, *arguments, **more).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    fa2_pack_patch.apply(model, kernel="sdpa")
    return model


LENGTHS = ([5, 9, 3], [7, 2, 2, 4], [24], [2, 1, 1, 1, 3])


def same_as_eager(
    model: torch.nn.Module,
    call: Any,
    around: Callable[[], Any] = nullcontext,
    *,
    reference: torch.nn.Module | None = None,
    close: float = 2e-5,
) -> None:
    """Logits and gradients of compiled steps are those of an eager copy of the model."""
    eager = copy.deepcopy(model) if reference is None else reference
    for lengths in LENGTHS:
        batch = static_batch(lengths)
        out, grads = step(model, call, batch, around)
        expected, wanted = step(eager, eager, batch, around)
        torch.testing.assert_close(out.logits, expected.logits, atol=close, rtol=0)
        torch.testing.assert_close(out.loss, expected.loss, atol=close, rtol=0)
        torch.testing.assert_close(grads, wanted, atol=close, rtol=0)


def checkpointed(model: torch.nn.Module, *, reentrant: bool) -> torch.nn.Module:
    if Version("4.35") > RELEASE:  # it takes no arguments, and is always what torch defaults to
        model.gradient_checkpointing_enable()
    else:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    return model


def patch_of(model: torch.nn.Module) -> Patch:
    ((_, base, _),) = find_base(model)
    found = base.__dict__[ATTRIBUTE]
    assert isinstance(found, Patch)
    return found


def attention(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [site.module for site in patch_of(model).sites]


def loaded_as(model: torch.nn.Module) -> str:
    report = patch_of(model).report
    assert report is not None
    return report.implementation


def break_here(module: Any, args: Any) -> None:
    torch._dynamo.graph_break()


# Every family


FAMILIES = [name for name, case in models.FAMILIES.items() if models.available(case, str(RELEASE))]
#: What fullgraph=True raises, by what stands in its way.
NO_GRAPH = (torch._dynamo.exc.TorchDynamoException, GuardOnDataDependentSymNode)


def whole(model: torch.nn.Module, family: str) -> None:
    """One graph, right, and compiled no more after the first step (or the second)."""
    backend = Counting()
    same_as_eager(model, torch.compile(model, backend=backend, fullgraph=True))
    stem = models.FAMILIES[family].family
    again = stem in TWICE and RELEASE in SpecifierSet(TWICE[stem])
    assert backend.graphs == GRAPHS + again


@pytest.mark.parametrize("family", FAMILIES)
def test_one_graph_or_known_why(build: Build, family: str) -> None:
    model = patched(build, family)
    why = broken(models.FAMILIES[family].family, loaded_as(model))
    if why is None:
        whole(model, family)
        return
    with pytest.raises(NO_GRAPH):  # else the table is too modest
        torch.compile(model, backend="eager", fullgraph=True)(**static_batch([5, 9, 3]))
    if why is not FLOAT32:  # that raises in any graph
        torch._dynamo.reset()
        same_as_eager(model, torch.compile(model, backend="eager"))
    if why.remedy is not None:
        torch._dynamo.reset()
        with why.remedy(model):
            whole(model, family)
    if why is WARNING:
        whole(patched(build, family, "eager"), family)


def _from_matrix(family: str, implementation: str) -> torch.nn.Module:
    return models.build(models.FAMILIES[family], implementation)


def loaded_as_flash_attention(*families: str) -> None:
    """In a process of its own, where Transformers believes in a flash-attn on the CPU."""
    from tests.matrix.standin import activate

    activate.activate()
    name = "flash_attention_2"
    for family in families:
        model = patched(_from_matrix, family, name)
        assert loaded_as(model) == name
        whole(model, family)


def test_loaded_as_flash_attention() -> None:
    families = [f for f in ("llama", "falcon", "stablelm", "gptj") if f in FAMILIES]
    if Version("4.39") > RELEASE:
        families = ["llama"]  # GPT-J and StableLM had none, Falcon asks for CUDA
    in_a_process(f"loaded_as_flash_attention(*{families})", ROOT)


def in_a_process(call: str, folder: Path, **environment: str) -> None:
    """A function of this module, in a process of its own."""
    code = f"from tests import test_compile as t; t.{call}"
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = os.pathsep.join([str(ROOT), *(os.path.abspath(p) for p in given if p)])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


# One graph, whatever is done with it


class TestBatches:
    @pytest.mark.parametrize("rows", [1, 2])
    def test_fifty_batches_without_recompilation(self, build: Build, rows: int) -> None:
        model = patched(build)
        backend, choose = Counting(), random.Random(0)
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        for _ in range(50):
            lengths = [choose.randint(1, 6) for _ in range(choose.randint(1, 4))]
            compiled(**static_batch(lengths, rows)).loss.backward()
        assert backend.graphs == GRAPHS

    def test_fifty_batches_of_the_collator(self, build: Build) -> None:
        model = patched(build)
        backend, choose = Counting(), random.Random(1)
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        collate = DataCollatorWithFlattening(
            tokens=32, max_examples=6, max_length=16, return_flash_attn_kwargs=True
        )
        for n in range(50):
            lengths = [choose.randint(1, 10) for _ in range(choose.randint(1, 3))]
            batch = collate([{"input_ids": [choose.randrange(3, 90)] * k} for k in lengths])
            out = compiled(**batch)
            out.loss.backward()
            if n % 10 == 0:
                expected = model(**batch)
                torch.testing.assert_close(out.loss, expected.loss, atol=2e-5, rtol=0)
                torch.testing.assert_close(out.logits, expected.logits, atol=2e-5, rtol=0)
        assert backend.graphs == GRAPHS

    def test_other_numbers_of_entries_compile_once_more(self, build: Build) -> None:
        model = patched(build)
        backend = Counting()
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        batch = static_batch([5, 9, 3])
        for entries in (9, 10, 12, 20, 6):
            cu = torch.tensor([0, 5, 14, 17] + [24] * (entries - 4), dtype=torch.int32)
            batch["cu_seq_lens_q"], batch["cu_seq_lens_k"] = cu, cu.clone()
            torch.testing.assert_close(
                compiled(**batch).logits, model(**batch).logits, atol=2e-5, rtol=0
            )
        assert backend.graphs <= 2 * GRAPHS

    def test_one_tensor_for_both_and_a_buffer_filled_anew(self, build: Build) -> None:
        model = patched(build)
        backend = Counting()
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        eager, buffer = copy.deepcopy(model), static_batch([24])
        buffer["cu_seq_lens_k"] = buffer["cu_seq_lens_q"]
        for lengths in LENGTHS:
            for name, value in static_batch(lengths).items():
                if isinstance(value, torch.Tensor):
                    buffer[name].copy_(value)
            out, grads = step(model, compiled, buffer)
            expected, wanted = step(eager, eager, buffer)
            torch.testing.assert_close(out.logits, expected.logits, atol=2e-5, rtol=0)
            torch.testing.assert_close(grads, wanted, atol=2e-5, rtol=0)
        assert backend.graphs == GRAPHS

    def test_static_rows_are_right_in_eager(self, build: Build) -> None:
        model = patched(build).eval()
        batch = static_batch([6, 8, 5])
        packed = model(**batch).logits[0]
        fa2_pack_patch.revert(model)
        starts = 0
        for length in (6, 8, 5):
            alone = model(batch["input_ids"][:, starts : starts + length]).logits[0]
            torch.testing.assert_close(packed[starts : starts + length], alone, atol=2e-5, rtol=0)
            starts += length

    def test_lengths_alone(self, build: Build) -> None:
        model = patched(build)
        batch = static_batch([6, 8, 5])
        expected = model(**batch).logits
        del batch["position_ids"]
        out = torch.compile(model, backend="eager", fullgraph=True)(**batch)
        torch.testing.assert_close(out.logits, expected, atol=2e-5, rtol=0)

    def test_a_row_longer_than_the_rotary_table(self, build: Build) -> None:
        """Flash classes below 4.48 make the table anew, in the first call."""
        family = "mistral" if Version("4.48") > RELEASE else "llama"
        model = patched(build, family, max_position_embeddings=16)
        backend = Counting()
        same_as_eager(model, torch.compile(model, backend=backend, fullgraph=True))
        assert backend.graphs <= GRAPHS + 1


class TestPacking:
    def test_no_example_sees_another(self, build: Build) -> None:
        model = patched(build).eval()
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        batch = static_batch([6, 8, 5])
        before = compiled(**batch).logits
        batch["input_ids"] = batch["input_ids"].clone()
        batch["input_ids"][0, 2] += 1
        after = compiled(**batch).logits
        assert not torch.equal(before[:, 2:6], after[:, 2:6])
        assert torch.equal(before[:, 6:], after[:, 6:])

    def test_labels_at_starts_do_not_count(self, build: Build) -> None:
        model = patched(build)
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        batch = static_batch([6, 8, 5])
        masked = batch["labels"].clone()
        masked[0, [0, 6, 14]] = -100
        loss = compiled(**batch).loss
        assert loss == compiled(**{**batch, "labels": masked}).loss
        alone = torch.nn.functional.cross_entropy(
            model(**batch).logits[0, :-1].float(), masked[0, 1:]
        )
        torch.testing.assert_close(loss, alone)

    def test_nothing_stays_for_the_next_call(self, build: Build) -> None:
        model = patched(build)
        plain = {k: v for k, v in static_batch([24]).items() if k in ("input_ids", "labels")}
        fa2_pack_patch.revert(model)
        expected = model(**plain).logits
        fa2_pack_patch.apply(model, kernel="sdpa")
        torch.compile(model, backend="eager", fullgraph=True)(**static_batch([6, 8, 5]))
        assert torch.equal(model(**plain).logits, expected)

    def test_nothing_stays_on_the_callers_tensor(self, build: Build) -> None:
        """Not even where layers are left out of the graph, and look for the run by its positions."""
        model = patched(build)
        for layer in model.model.layers:
            layer.forward = torch.compiler.disable(layer.forward)
        batch = static_batch([6, 8, 5])
        torch.compile(model, backend="eager")(**batch)
        batch["position_ids"].copy_(torch.arange(TOKENS)[None])
        plain = {k: batch[k] for k in ("input_ids", "position_ids")}
        found = model(**plain, use_cache=False).logits
        fa2_pack_patch.revert(model)
        assert torch.equal(found, model(**plain, use_cache=False).logits)

    def test_a_replaced_forward_is_found(self, build: Build) -> None:
        model = patched(build)
        module = attention(model)[1]
        module.forward = type(module).forward.__get__(module)
        with pytest.raises((PackingError, *NO_GRAPH), match="did not run packed"):
            torch.compile(model, backend="eager", fullgraph=True)(**static_batch([6, 8]))

    def test_a_cache_is_refused(self, build: Build) -> None:
        model = patched(build)
        with pytest.raises(PackingError, match="use_cache=True"):
            torch.compile(model, backend="eager")(**static_batch([6, 8]), use_cache=True)


class TestTraining:
    @pytest.mark.parametrize("reentrant", [False, True])
    def test_checkpointing(self, build: Build, reentrant: bool) -> None:
        model = patched(build)
        eager = copy.deepcopy(model)
        backend = Counting()
        compiled = torch.compile(
            checkpointed(model, reentrant=reentrant), backend=backend, fullgraph=True
        )
        same_as_eager(model, compiled, reference=eager)
        assert backend.graphs == GRAPHS

    def test_checkpointing_of_a_broken_graph(self, build: Build) -> None:
        model = patched(build)
        eager = copy.deepcopy(model)
        for module in attention(model)[1].children():
            module.register_forward_pre_hook(break_here)
        compiled = torch.compile(checkpointed(model, reentrant=False), backend="aot_eager")
        same_as_eager(model, compiled, reference=eager)

    def test_autocast(self, build: Build) -> None:
        model = patched(build)
        backend = Counting()
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        same_as_eager(
            model, compiled, lambda: torch.autocast("cpu", dtype=torch.bfloat16), close=0.05
        )
        assert backend.graphs == GRAPHS

    def test_aot_autograd(self, build: Build) -> None:
        """The whole backward is a graph as well."""
        model = patched(build, "qwen2" if "qwen2" in FAMILIES else "mistral")
        same_as_eager(model, torch.compile(model, backend="aot_eager", fullgraph=True))

    def test_any_kernel_that_can(self, build: Build) -> None:
        """ "auto", without a flash-attn: what cannot be imported is not traced."""
        model = patched(build)
        fa2_pack_patch.apply(model)
        backend = Counting()
        same_as_eager(model, torch.compile(model, backend=backend, fullgraph=True))
        assert backend.graphs == GRAPHS


class TestWays:
    def test_model_compile(self, build: Build) -> None:
        model = patched(build)
        eager = copy.deepcopy(model)
        backend = Counting()
        model.compile(backend=backend, fullgraph=True)
        same_as_eager(model, model, reference=eager)
        assert backend.graphs == GRAPHS

    def test_compiled_before_it_is_patched(self, build: Build) -> None:
        """As ``Trainer(torch_compile=True)`` does with the callback."""
        model = patched(build)
        eager = copy.deepcopy(model)
        fa2_pack_patch.revert(model)
        backend = Counting()
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        fa2_pack_patch.apply(compiled, kernel="sdpa")
        same_as_eager(model, compiled, reference=eager)
        assert backend.graphs == GRAPHS
        fa2_pack_patch.revert(compiled)
        assert not fa2_pack_patch.is_applied(model)

    def test_the_base_model(self, build: Build) -> None:
        model = patched(build)
        backend, batch = Counting(), static_batch([6, 8, 5])
        del batch["labels"]
        out = torch.compile(model.model, backend=backend, fullgraph=True)(**batch)
        torch.testing.assert_close(out[0], model.model(**batch)[0], atol=2e-5, rtol=0)
        assert backend.graphs == GRAPHS

    def test_its_forward_assigned(self, build: Build) -> None:
        """The hooks around it run in eager: right, in more than one graph."""
        model = patched(build)
        eager = copy.deepcopy(model)
        model.forward = torch.compile(model.forward, backend="eager")
        same_as_eager(model, model, reference=eager)

    @pytest.mark.parametrize("fullgraph", [False, True])
    def test_a_layer_that_came_after_apply(self, build: Build, fullgraph: bool) -> None:
        """It would attend over the whole row, silently; compiled before it came, and after."""
        model, batch = patched(build), static_batch([6, 8, 5])
        compiled = torch.compile(model, backend="eager", fullgraph=fullgraph)
        compiled(**batch)
        deepened(model)
        kind, says = PackingError, r"layers\.2\.self_attn is not of the layers"
        if fullgraph:
            kind, says = (
                torch._dynamo.exc.Unsupported,
                r"layers came or went.*call .*apply\(model\)",
            )
        for _ in range(2):
            with pytest.raises(kind, match=says):
                compiled(**batch)
            torch._dynamo.reset()
        fa2_pack_patch.apply(model, kernel="sdpa")
        same_as_eager(model, compiled)

    def test_layer_by_layer(self, build: Build) -> None:
        model = patched(build)
        eager = copy.deepcopy(model)
        for layer in model.model.layers:
            layer.compile(backend="eager")
        same_as_eager(model, model, reference=eager)

    @pytest.mark.parametrize("way", ["deepcopy", "pickle"])
    def test_a_copy_is_whole_and_its_own(self, build: Build, way: str) -> None:
        model = patched(build)
        other = copy.deepcopy(model) if way == "deepcopy" else pickle.loads(pickle.dumps(model))
        with torch.no_grad():
            attention(other)[0].q_proj.weight.mul_(1.5)
        for one in (other, model):
            torch._dynamo.reset()
            backend = Counting()
            same_as_eager(one, torch.compile(one, backend=backend, fullgraph=True))
            assert backend.graphs == GRAPHS


class TestBreaks:
    @pytest.mark.parametrize("where", ["disabled", "attention", "inside"])
    def test_a_broken_graph_is_right(self, build: Build, where: str) -> None:
        """Also where the layers differ: the second has a window, the first has none."""
        model = patched(build, "qwen2" if "qwen2" in FAMILIES else "mistral")
        eager = copy.deepcopy(model)
        for layer, module in zip(model.model.layers, attention(model)):
            if where == "disabled":
                layer.forward = torch.compiler.disable(layer.forward)
                continue
            for target in [module] if where == "attention" else module.children():
                target.register_forward_pre_hook(break_here)
        same_as_eager(model, torch.compile(model, backend="eager"), reference=eager)

    def test_beyond_dynamos_limit_of_recompilations(self, build: Build) -> None:
        model = patched(build, num_hidden_layers=10)
        eager = copy.deepcopy(model)
        for module in attention(model):
            module.register_forward_pre_hook(break_here)
        same_as_eager(model, torch.compile(model, backend="eager"), reference=eager, close=2e-4)

    def test_positions_alone(self, build: Build) -> None:
        model = patched(build)
        batch = static_batch([6, 8, 5])
        expected = model(**batch).logits
        ids = {k: batch[k] for k in ("input_ids", "position_ids")}
        out = torch.compile(model, backend="eager")(**ids)
        torch.testing.assert_close(out.logits, expected, atol=2e-5, rtol=0)
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match="Python ints.*read outside of it"):
            torch.compile(model, backend="eager", fullgraph=True)(**ids)

    def test_a_rope_that_depends_on_the_lengths(self, build: Build) -> None:
        key = "type" if Version("4.45") > RELEASE else "rope_type"
        scaling = {key: "dynamic", "factor": 2.0}
        model = patched(build, rope_scaling=scaling, max_position_embeddings=16)
        compiled = torch.compile(model, backend="eager")
        batch = static_batch([6, 8, 5])
        torch.testing.assert_close(
            compiled(**batch).logits, model(**batch).logits, atol=2e-5, rtol=0
        )
        with pytest.raises(PackingError, match="example 0 reaches position 19"):
            compiled(**static_batch([20]))
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match="rope depends on the lengths"):
            torch.compile(model, backend="eager", fullgraph=True)(**batch)


# The page


def test_the_page_has_this_table() -> None:
    current = PAGE.read_text(encoding="utf-8")
    assert page_with_table() == current, "docs/compile.md is stale: python -m tests.test_compile"
    assert current.count("<!-- table -->") == 1


def run_the_page() -> None:
    """Its blocks, in order, in one namespace, by a backend that counts; leaves traces."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    backend, real, choose = Counting(), torch.compile, random.Random(0)

    def compile_here(*arguments: Any, **more: Any) -> Any:
        return real(*arguments, **{**more, "backend": backend})

    lengths = [choose.randint(2, 20) for _ in range(48)]
    dataset = [{"input_ids": [choose.randrange(3, 90) for _ in range(n)]} for n in lengths]
    model = _from_matrix("llama", "sdpa").train()
    names: dict[str, Any] = {"model": model, "dataset": dataset}
    torch.compile = compile_here
    graphs = []
    for block in blocks:
        torch._dynamo.reset()
        backend.graphs = 0
        exec(compile(block, "docs/compile.md", "exec"), names)
        graphs.append(backend.graphs)
    first, trained = graphs
    assert first == GRAPHS
    assert len(names["rows"]) > 5
    assert trained in {GRAPHS, GRAPHS + 1}  # num_items_in_batch is a Python int in some releases
    losses = [line["loss"] for line in names["trainer"].state.log_history if "loss" in line]
    assert len(losses) == 6
    assert all(0 < loss < 20 for loss in losses)


@pytest.mark.skipif(
    Version("4.43") > RELEASE, reason="Trainer needs an older accelerate; see tests/trainers"
)
def test_the_page_runs(tmp_path: Path) -> None:
    in_a_process("run_the_page()", tmp_path, ACCELERATE_USE_CPU="true")


if __name__ == "__main__":
    PAGE.write_text(page_with_table(), encoding="utf-8")
