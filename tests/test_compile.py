"""torch.compile: one graph with the patch inside, for any number of static batches."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

import fa2_pack_patch
from fa2_pack_patch.errors import PackingError

TOKENS, ENTRIES = 24, 8
#: torch.compile runs a module's own hooks outside of its forward: the labels' few operations are a
#: graph of their own, the forward is one.
GRAPHS = 2


def static_batch(lengths: list[int], rows: int = 1) -> dict[str, Any]:
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
        "cu_seq_lens_k": cu,
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


def step(model: torch.nn.Module, call: Any, batch: dict[str, Any]) -> tuple[Any, torch.Tensor]:
    model.zero_grad()
    out = call(**batch)
    out.loss.backward()
    grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return out, torch.cat(grads)


def built(build: Callable[..., torch.nn.Module], family: str) -> torch.nn.Module:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = build(family).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def one_graph(family: str) -> bool:
    """Whether the release's own model code is known to trace as one graph, patched or not."""
    version = Version(transformers.__version__)
    if version < Version("4.48"):
        return False
    if family in ("qwen2_moe", "stablelm"):
        return version >= Version("5.0")
    return family not in ("dbrx", "falcon", "falcon_new", "gemma2", "gpt_neox", "gptj", "cohere")


FAMILIES = [
    "llama",
    "mistral",
    "mixtral",
    "granite",
    "gemma",
    "olmo",
    "phi",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "stablelm",
    "starcoder2",
    "falcon",
    "dbrx",
]


@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_is_eager(build: Callable[..., torch.nn.Module], family: str) -> None:
    model = built(build, family)
    fa2_pack_patch.apply(model, kernel="sdpa")
    backend = Counting()
    compiled = torch.compile(model, backend=backend, fullgraph=one_graph(family))
    for lengths in ([5, 9, 3], [7, 2, 2, 4], [24]):
        batch = static_batch(lengths)
        out, grads = step(model, compiled, batch)
        expected, wanted = step(model, model, batch)
        torch.testing.assert_close(out.logits, expected.logits, atol=2e-5, rtol=0)
        torch.testing.assert_close(grads, wanted, atol=2e-5, rtol=0)
        if one_graph(family):
            assert backend.graphs == GRAPHS, "a batch of the same shapes was compiled anew"


@pytest.mark.skipif(not one_graph("llama"), reason="the interface came with 4.48")
class TestOneGraph:
    @pytest.mark.parametrize("rows", [1, 2])
    def test_fifty_batches_without_recompilation(self, build: Any, rows: int) -> None:
        model = built(build, "llama")
        fa2_pack_patch.apply(model, kernel="sdpa")
        backend, choose = Counting(), random.Random(0)
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        for _ in range(50):
            lengths = [choose.randint(1, 6) for _ in range(choose.randint(1, 4))]
            compiled(**static_batch(lengths, rows)).loss.backward()
        assert backend.graphs == GRAPHS

    def test_no_example_sees_another(self, build: Any) -> None:
        model = built(build, "llama").eval()
        fa2_pack_patch.apply(model, kernel="sdpa")
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        batch = static_batch([6, 8, 5])
        before = compiled(**batch).logits
        batch["input_ids"] = batch["input_ids"].clone()
        batch["input_ids"][0, 2] += 1
        after = compiled(**batch).logits
        assert not torch.equal(before[:, 2:6], after[:, 2:6])
        assert torch.equal(before[:, 6:], after[:, 6:])

    def test_labels_at_starts_do_not_count(self, build: Any) -> None:
        model = built(build, "llama")
        fa2_pack_patch.apply(model, kernel="sdpa")
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

    def test_checkpointing(self, build: Any) -> None:
        model = built(build, "llama")
        fa2_pack_patch.apply(model, kernel="sdpa")
        batch = static_batch([6, 8, 5])
        expected, wanted = step(model, model, batch)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        compiled = torch.compile(model, backend="aot_eager")
        out, grads = step(model, compiled, batch)
        torch.testing.assert_close(out.logits, expected.logits, atol=2e-5, rtol=0)
        torch.testing.assert_close(grads, wanted, atol=2e-5, rtol=0)

    def test_nothing_stays_for_the_next_call(self, build: Any) -> None:
        model = built(build, "llama")
        plain = {k: v for k, v in static_batch([24]).items() if k in ("input_ids", "labels")}
        expected = model(**plain).logits
        fa2_pack_patch.apply(model, kernel="sdpa")
        torch.compile(model, backend="eager", fullgraph=True)(**static_batch([6, 8, 5]))
        assert torch.equal(model(**plain).logits, expected)

    def test_a_copy_is_its_own(self, build: Any) -> None:
        model = built(build, "llama")
        fa2_pack_patch.apply(model, kernel="sdpa")
        other = copy.deepcopy(model)
        batch = static_batch([6, 8, 5])
        out, grads = step(other, torch.compile(other, backend="eager"), batch)
        expected, wanted = step(model, model, batch)
        torch.testing.assert_close(out.logits, expected.logits, atol=2e-5, rtol=0)
        torch.testing.assert_close(grads, wanted, atol=2e-5, rtol=0)

    def test_a_broken_graph_is_right_too(self, build: Any) -> None:
        model = built(build, "llama")
        fa2_pack_patch.apply(model, kernel="sdpa")

        def broken(module: Any, args: Any) -> None:
            torch._dynamo.graph_break()

        model.model.layers[1].register_forward_pre_hook(broken)
        batch = static_batch([6, 8, 5])
        out, grads = step(model, torch.compile(model, backend="eager"), batch)
        expected, wanted = step(model, model, batch)
        torch.testing.assert_close(out.logits, expected.logits, atol=2e-5, rtol=0)
        torch.testing.assert_close(grads, wanted, atol=2e-5, rtol=0)

    def test_positions_alone_are_right(self, build: Any) -> None:
        model = built(build, "llama")
        fa2_pack_patch.apply(model, kernel="sdpa")
        batch = static_batch([6, 8, 5])
        expected = model(**batch).logits
        ids = {k: batch[k] for k in ("input_ids", "position_ids")}
        out = torch.compile(model, backend="eager")(**ids)
        torch.testing.assert_close(out.logits, expected, atol=2e-5, rtol=0)

    def test_lengths_alone_are_right(self, build: Any) -> None:
        model = built(build, "llama")
        fa2_pack_patch.apply(model, kernel="sdpa")
        batch = static_batch([6, 8, 5])
        expected = model(**batch).logits
        del batch["position_ids"]
        out = torch.compile(model, backend="eager", fullgraph=True)(**batch)
        torch.testing.assert_close(out.logits, expected, atol=2e-5, rtol=0)

    def test_a_cache_is_refused(self, build: Any) -> None:
        model = built(build, "llama")
        fa2_pack_patch.apply(model, kernel="sdpa")
        with pytest.raises(PackingError, match="use_cache=True"):
            torch.compile(model, backend="eager")(**static_batch([6, 8]), use_cache=True)


def test_static_rows_are_right_in_eager(build: Callable[..., torch.nn.Module]) -> None:
    model = built(build, "llama").eval()
    batch = static_batch([6, 8, 5])
    fa2_pack_patch.apply(model, kernel="sdpa")
    packed = model(**batch).logits[0]
    fa2_pack_patch.revert(model)
    starts = 0
    for length in (6, 8, 5):
        alone = model(batch["input_ids"][:, starts : starts + length]).logits[0]
        torch.testing.assert_close(packed[starts : starts + length], alone, atol=2e-5, rtol=0)
        starts += length
