"""Two processes give what one gives: DDP, FSDP1, FSDP2, ZeRO, accelerate and ``Trainer``.

One process means the stock model and each example in a call of its own.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections import OrderedDict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import fa2_pack_patch
from fa2_pack_patch.data import PackedBatchSampler
from tests.distributed import launch, parts, tasks
from tests.distributed.tasks import Case

LIMIT = 1e-5
#: So many tokens a batch make 11 batches of the examples, which two processes cannot share evenly.
CAPACITY = 40
WRAPPERS = ["ddp", "fsdp1", "fsdp2"]
if importlib.util.find_spec("deepspeed"):  # python -m tests.distributed.run
    WRAPPERS += ["zero2", "zero3"]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Any:
    """As the processes have: their sums are then made in the same order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _cases(wrapper: str) -> list[Case]:
    _, tied, other = parts.families()
    found = [
        Case(wrapper),
        Case(wrapper, tied, proof=True),
        Case(wrapper, other),
        Case(wrapper, checkpoint="model"),
        Case(wrapper, other, checkpoint="reentrant"),
        Case(wrapper, tied, checkpoint="wrapper"),
        Case(wrapper, apply="after"),
        Case(wrapper, proof=True),
        Case(wrapper, apply="after", checkpoint="model", proof=True),
    ]
    if not wrapper.startswith("zero"):  # DeepSpeed exchanges gradients in its own way
        found += [
            Case(wrapper, other, backward="late"),
            Case(wrapper, backward="once"),
            Case(wrapper, backward="once", checkpoint="wrapper"),
        ]
    return found


CASES = [case for wrapper in WRAPPERS for case in _cases(wrapper)]


@cache
def _try(wrapper: str) -> dict[str, list[Any]] | launch.RunFailed:
    """All that is run under one wrapper, in one pair of processes: starting them takes longest."""
    cases = [*_cases(wrapper), Case(wrapper, apply="never")]
    jobs = [case.job() for case in cases]
    jobs.append(("epochs", {"wrapper": wrapper, "capacity": CAPACITY}))
    jobs.append(("doubted", {"wrapper": wrapper}))
    jobs += [("partitioned", {})] if wrapper == "zero3" else []
    names = [*map(str, cases), *(name for name, _ in jobs[len(cases) :])]
    try:
        return dict(zip(names, launch.launch(jobs)))
    except launch.RunFailed as fault:  # kept too: a hang takes its time once
        return fault


def _runs(wrapper: str) -> dict[str, list[Any]]:
    found = _try(wrapper)
    if isinstance(found, launch.RunFailed):
        raise launch.RunFailed(str(found))
    return found


@cache
def _alone() -> float:
    """The loss summed over the targets of all examples."""
    numbers = range(len(parts.EXAMPLES))
    return parts.alone(parts.build("llama"), numbers) * parts.targets(numbers)


def _difference(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    assert got.keys() == wanted.keys()
    return max(float((got[name] - wanted[name]).abs().max()) for name in wanted)


def _apart(losses: list[float], wanted: list[float]) -> float:
    assert len(losses) == len(wanted) > 0
    return max(abs(a - b) for a, b in zip(losses, wanted))


def test_ranks_hold_different_numbers_of_examples_and_tokens() -> None:
    """Else a mean of means, or a batch of the other rank, could pass below."""
    for first, second in parts.STEPS:
        for count in (len, parts.tokens, parts.targets):
            assert sum(map(count, first)) != sum(map(count, second))
            for one, other in zip(first, second):
                assert count(one) != count(other)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_losses_gradients_and_weights(case: Case) -> None:
    one, (first, second) = parts.one_process(case.family), _runs(case.wrapper)[str(case)]
    assert first["applied"] and second["applied"]
    assert first["losses"] == second["losses"]
    assert _apart(first["losses"], one["losses"]) < LIMIT
    assert _difference(first["gradients"], one["gradients"]) < LIMIT
    assert _difference(first["weights"], one["weights"]) < LIMIT
    assert max(float(g.abs().max()) for g in one["gradients"].values()) > 1000 * LIMIT
    for rank in (first, second):
        assert len(rank["proofs"]) == (1 + len(parts.STEPS) if case.proof else 0)
        for proof in rank["proofs"]:
            assert "verify: passed" in proof and "gradients of inputs" in proof, proof
            assert "gradients of parameters" in proof, proof


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_proofs_that_fail_end_on_all_ranks(wrapper: str) -> None:
    for number, rank in enumerate(_runs(wrapper)["doubted"]):
        assert "verify: FAILED" in rank["unpatched"]
        if wrapper in ("ddp", "zero2"):  # each rank has the whole model
            assert "verify: passed" in rank["others"]
            for kind in ("wrong", "undone", "errors"):
                assert f"verify: {'FAILED' if number else 'passed'}" in rank[kind], rank[kind]
        else:
            assert "rank 1 has [2, 2, 2]" in rank["others"], rank["others"]
            assert "verify: FAILED" in rank["wrong"], rank["wrong"]
            assert "ranks that failed" in rank["wrong"] and "rank 1: logits" in rank["wrong"]
            assert "verify: FAILED" in rank["undone"], rank["undone"]
            assert "rank 0: as applied; rank 1: " in rank["undone"], rank["undone"]
            said = f"{'' if number else 'on rank 1: '}ZeroDivisionError: somebody's fault"
            for check in ("layers not packed, one row", "loss", "gradients of inputs"):
                assert f"  {check}: {said}" in rank["errors"], rank["errors"]
            assert "verify: passed" in rank["one without"], rank["one without"]
            assert "gradients" not in rank["one without"]
        assert re.search("gradients of inputs .* FAILED", rank["backward"]), rank["backward"]
        assert re.search("gradients of parameters .* FAILED", rank["backward"]), rank["backward"]
        assert not re.search("logits.* FAILED", rank["backward"]), rank["backward"]
        assert "verify: passed" in rank["again"], rank["again"]
        assert rank["whole"] == 0  # nothing that ZeRO-3 had shared out lies whole afterwards


@pytest.mark.parametrize("wrapper", [w for w in WRAPPERS if w == "zero3"])
def test_parameters_in_parts_want_an_engine(wrapper: str) -> None:
    for rank in _runs(wrapper)["partitioned"]:
        assert "verify the engine that deepspeed.initialize gave" in rank["before"], rank["before"]
        assert "verify: passed" in rank["after"], rank["after"]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_without_apply_losses_and_gradients_differ(wrapper: str) -> None:
    one, (first, _) = parts.one_process("llama"), _runs(wrapper)[str(Case(wrapper, apply="never"))]
    assert not first["applied"]
    assert min(abs(a - b) for a, b in zip(first["losses"], one["losses"])) > 100 * LIMIT
    assert _difference(first["gradients"], one["gradients"]) > 100 * LIMIT


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_an_epoch_ends_on_all_ranks_at_once(wrapper: str) -> None:
    """An odd number of batches; after the last one nobody waits, and every example was seen."""
    lengths = [len(example["input_ids"]) for example in parts.EXAMPLES]
    assert len(PackedBatchSampler(lengths, CAPACITY)) % launch.PROCESSES
    first, second = _runs(wrapper)["epochs"]
    for one, other in zip(first, second):
        assert len(one["held"]) == len(other["held"])
        seen = [n for batch in [*one["held"], *other["held"]] for n in batch]
        assert sorted(seen) == list(range(len(lengths)))
        assert abs(one["loss"] + other["loss"] - _alone()) < LIMIT * parts.targets(seen)
    assert first[0]["held"] != first[1]["held"]


class _Watched(OrderedDict[str, Any]):
    """Parameters that note when they are asked for, which is when ZeRO-3 gathers them."""

    def __init__(self, name: str, given: dict[str, Any], asked: list[str]) -> None:
        super().__init__(given)
        self.name, self.asked = name, asked

    def __getitem__(self, key: str) -> Any:
        self.asked.append(f"{self.name}.{key}")
        return super().__getitem__(key)


@pytest.mark.parametrize("family", sorted(set(parts.families())))
def test_packed_calls_ask_for_the_weights_that_other_calls_ask_for(family: str) -> None:
    """A rank whose batch is one example would else wait for another parameter than the others."""
    asked: dict[bool, list[str]] = {}
    for packed in (True, False):
        model = parts.build(family)
        fa2_pack_patch.apply(model, kernel="sdpa")
        asked[packed] = []
        for name, module in model.named_modules():
            module._parameters = _Watched(name, module._parameters, asked[packed])
        model(**tasks.packed([0, 1] if packed else [2]))
    assert asked[True] == asked[False] != []


def test_uneven_ranks_are_found_hanging() -> None:
    """The run above would not pass: what hangs is ended, and says where it stood."""
    job = ("stalled", {"wrapper": "ddp", "capacity": CAPACITY})
    with pytest.raises(launch.RunFailed, match=r"(?s)hung: 2 of 2 processes.*in stalled"):
        launch.launch([job], timeout=8)


def test_a_failing_rank_fails_the_run() -> None:
    with pytest.raises(launch.RunFailed, match=r"(?s)rank 0 ended with 1.*no_such_task"):
        launch.launch([("no_such_task", {})])


@cache
def _hugging_face() -> list[list[Any]]:
    return launch.launch(
        [("trainer", {"gradient_accumulation_steps": 1}), ("accelerated", {"capacity": CAPACITY})]
    )


def test_trainer_is_one_process_with_accumulation() -> None:
    first, second = _hugging_face()[0]
    one = tasks.trainer(gradient_accumulation_steps=2)
    assert (first["processes"], one["processes"]) == (2, 1)
    both = [(a + b) / 2 for a, b in zip(first["losses"], second["losses"])]
    assert _apart(both, one["losses"]) < LIMIT
    assert _difference(first["weights"], one["weights"]) < LIMIT
    assert _difference(first["weights"], second["weights"]) == 0
    assert _difference(one["weights"], one["start"]) > 100 * LIMIT
    for rank in (first, second):
        assert [line["packed_share"] for line in rank["logged"]] == [1.0] * len(both)


def test_accelerate_shares_out_the_batches() -> None:
    first, second = _hugging_face()[1]
    assert len(first["held"]) == len(second["held"])
    seen = [n for batch in [*first["held"], *second["held"]] for n in batch]
    assert sorted(seen) == list(range(len(parts.EXAMPLES)))
    assert abs(first["loss"] + second["loss"] - _alone()) < LIMIT * parts.targets(seen)
    model = parts.build("llama")
    parts.alone(model, seen, backward=True)
    wanted = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    scale = launch.PROCESSES / parts.targets(seen)  # DDP's mean of the sums, to a mean over targets
    assert _difference({n: g * scale for n, g in first["gradients"].items()}, wanted) < LIMIT


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_the_benchmark_s_variants_hold_the_same_examples(ranks: int) -> None:
    from benchmarks import shares

    lengths = [len(example["input_ids"]) for example in parts.EXAMPLES] * 5
    costs = {}
    for name in shares.VARIANTS:
        found = shares.batches(name, lengths, CAPACITY, ranks)
        assert len(found) % ranks == 0
        assert sorted(n for batch in found for n in batch) == list(range(len(lengths)))
        about = shares.describe(found, lengths, ranks, padded=name == "padded")
        assert about["real_tokens"] == sum(about["real_tokens_per_rank"]) == sum(lengths)
        for batch in found:
            held = [lengths[n] for n in batch]
            assert (len(held) * max(held) if name == "padded" else sum(held)) <= CAPACITY
        costs[name] = about["attention_cost_imbalance"]
    assert 1 <= costs["packed_balanced"] <= costs["packed_unbalanced"]


def test_the_benchmark_runs_on_two_cpus(tmp_path: Path) -> None:
    out = tmp_path / "fsdp.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "benchmarks.fsdp", "--smoke", "--rounds=1", "--steps=2", f"--out={out}"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    log = tmp_path / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, env=env, cwd=launch.ROOT, stdout=file, stderr=file, start_new_session=True
        )
    try:
        assert process.wait(launch.TIMEOUT) == 0, log.read_text()[-4000:]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    result = json.loads(out.read_text(encoding="utf-8"))
    assert result["machine"]["ranks"] == 2 and result["machine"]["torch"] == torch.__version__
    assert list(result["variants"]) == [
        "padded", "packed_unbalanced", "packed_bfd", "packed_balanced",
    ]  # fmt: skip
    for found in result["variants"].values():
        assert found["tokens_per_second"] > 0 and min(found["alone_seconds"]) > 0
        assert min(found["wait_seconds"]) >= 0 and len(found["wait_seconds"]) == 2
        assert abs(found["loss"] - result["variants"]["padded"]["loss"]) < 1e-3
