"""FSDP2 on several GPUs of one machine: padded against packed, ranks balanced and unbalanced.

    torchrun --standalone --nproc-per-node 8 -m benchmarks.fsdp --out fsdp.json
    torchrun --standalone --nproc-per-node 2 -m benchmarks.fsdp --smoke --out smoke.json  # no GPU

A Llama of 7B parameters (``--shape``), float32 weights sharded by ``fully_shard``, computed in
bf16, AdamW at a learning rate of 0: every variant trains the same weights. Each variant goes once
through the same examples, and a rank computes at most ``--tokens`` tokens a step, padding included:

- ``padded``: one example a row, in random order, as many as fit;
- ``packed_unbalanced``: best-fit-decreasing bins, dealt out in random order;
- ``packed_bfd``: the same strategy with ``pack_lengths(..., ranks=n)``, which orders the bins;
- ``packed_balanced``: ``strategy="balanced"``, bins of about the same attention cost.

Variants take turns until ``--rounds`` or ``--seconds``; the result holds medians of whole turns.
Last, each rank times its forwards and backwards alone: all weights gathered before, no gradients
exchanged. From that come, summed over a turn's steps,

- ``wait_seconds`` of a rank: what the slowest rank of a step takes alone, less what this one takes;
- ``communication_seconds``: what the steps took in the turns, less what the slowest rank of each
  takes alone; this is what no computation hides.

Alone, a rank holds all weights and all gradients (41 GB for 7B, beside its part of weights,
gradients and AdamW's state): take 141 GB cards, or at least four of 80 GB. Where memory is short
those values are null. ``loss``, the mean over all targets, must agree; else the exit code is 1.
Needs torch 2.6 and Transformers 4.46.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import shares  # noqa: E402
from benchmarks.speed import data, measure, models  # noqa: E402
from fa2_pack_patch import apply, kernels  # noqa: E402
from fa2_pack_patch.data import DataCollatorWithFlattening  # noqa: E402

#: Losses of the variants over the same examples may differ by this share.
CLOSE = {torch.bfloat16: 1e-2, torch.float32: 1e-4}


@dataclass
class Step:
    """One rank's batch; ``targets`` are those of all ranks."""

    call: dict[str, Any]
    targets: int


@dataclass
class Variant:
    """A variant on this rank, and its turns so far."""

    name: str
    about: dict[str, Any]
    steps: list[Step]
    seconds: list[float] = field(default_factory=list)
    inside: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    loss: float = 0.0
    peak: int = 0


def collate(numbers: Sequence[int], lengths: Sequence[int], vocabulary: int, padded: bool) -> Any:
    """The call of a batch, on this rank's device; an example's tokens follow from its number."""
    examples = []
    for n in numbers:
        generator = torch.Generator().manual_seed(n)
        examples.append(torch.randint(3, vocabulary, (lengths[n],), generator=generator))
    if padded:
        pad = torch.nn.utils.rnn.pad_sequence
        mask = pad([torch.ones_like(e) for e in examples], batch_first=True)
        labels = pad(examples, batch_first=True, padding_value=-100)
        call = {"input_ids": pad(examples, batch_first=True), "attention_mask": mask}
        call["labels"] = labels
    else:
        collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
        call = collator([{"input_ids": e} for e in examples])
    return data.move(data.Batch(call, 0, 0), device()).call


def device() -> torch.device:
    """This rank's GPU, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def sharded(options: argparse.Namespace) -> tuple[torch.nn.Module, str]:
    """The patched model under FSDP2, and as what it was loaded."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    there = measure.machine()["flash_attn"] != "none" and not options.smoke
    how = options.attention or ("flash_attention_2" if there else "sdpa")
    torch.manual_seed(0)  # all ranks make the same weights, and keep their part
    model = models.build(options.shape, how, smoke=options.smoke, checkpoint=options.checkpoint)
    model = model.float()
    apply(model)
    more: dict[str, Any] = {"mesh": init_device_mesh(device().type, (dist.get_world_size(),))}
    if not options.smoke:
        more["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.get_submodule("model").layers:  # type: ignore[union-attr]
        fully_shard(layer, **more)
    fully_shard(model, **more)
    return model, how


def kernel_of(model: torch.nn.Module, dtype: torch.dtype) -> str:
    """The kernel that packed rows are computed with."""
    config: Any = model.config
    heads = config.num_attention_heads
    call = kernels.AttentionCall(
        device=device(),
        dtype=dtype,
        heads=heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.hidden_size // heads,
        window=None,
        softcap=None,
        dropout=0.0,
        needs_grad=True,
    )
    return kernels.choose("auto", call).name


class Bench:
    """The model and what is done with it on this rank."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model: Any = model
        self.update = measure.Update(model, "adamw")
        self.ranks = dist.get_world_size()

    def turn(self, variant: Variant) -> None:
        """All steps of a variant once, as in training."""
        measure.peak(reset=True)
        barrier()
        began = time.perf_counter()
        inside = 0.0
        for step in variant.steps:
            inside += self._step(step)[0]
            self.update()
        barrier()
        variant.seconds.append(time.perf_counter() - began)
        variant.inside.append(inside)
        variant.peak = max(variant.peak, measure.peak())

    def mean_loss(self, variant: Variant) -> float:
        """One turn, not timed: the mean loss over all targets of all ranks."""
        total = torch.zeros((), dtype=torch.float64)
        for step in variant.steps:
            total += self._step(step)[1] * step.targets / self.ranks
            self.update()
        total = reduced(total)
        return float(total) / sum(step.targets for step in variant.steps)

    def alone(self, variants: Sequence[Variant]) -> None:
        """Times each step of each variant without communication; the model is spent afterwards."""
        self.model.set_requires_gradient_sync(False)
        self.model.set_reshard_after_backward(False)
        for layer in self.model.model.layers:
            layer.set_reshard_after_forward(False)
        try:
            self._step(variants[0].steps[0])  # gathers all weights, for good
            for variant in variants:
                turns = [[self._step(step)[0] for step in variant.steps] for _ in range(2)]
                variant.alone = [min(times) for times in zip(*turns)]
        except measure.OUT_OF_MEMORY:
            measure.tidy()

    def _step(self, step: Step) -> tuple[float, float]:
        """Seconds of a forward and backward, and the loss; gradients are the mean of the ranks'."""
        measure.synchronize()
        began = time.perf_counter()
        out = self.model(**step.call, num_items_in_batch=step.targets, use_cache=False)
        loss = out.loss * self.ranks
        loss.backward()
        measure.synchronize()
        return time.perf_counter() - began, float(loss.detach())


def barrier() -> None:
    """All ranks, and all that their GPUs were given to do."""
    measure.synchronize()
    dist.barrier()


def reduced(value: torch.Tensor) -> torch.Tensor:
    """The sum over all ranks."""
    there = value.to(device())
    dist.all_reduce(there)
    return there.cpu()


def gathered(value: Any) -> list[Any]:
    """What each rank has."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def row(variant: Variant) -> dict[str, Any]:
    """A variant's result; a collective."""
    median = statistics.median(variant.seconds)
    inside = gathered(statistics.median(variant.inside))
    found = {
        **variant.about,
        "seconds": round(median, 4),
        "rounds": [round(s, 4) for s in variant.seconds],
        "tokens_per_second": round(variant.about["real_tokens"] / median, 1),
        "tokens_per_second_per_rank": [
            round(tokens / median, 1) for tokens in variant.about["real_tokens_per_rank"]
        ],
        "forward_backward_seconds": [round(s, 4) for s in inside],
        "alone_seconds": None,
        "wait_seconds": None,
        "communication_seconds": None,
        "peak_bytes": gathered(variant.peak),
        "loss": variant.loss,
    }
    alone = gathered(variant.alone)
    if all(alone):
        slowest = sum(map(max, zip(*alone)))
        found["alone_seconds"] = [round(sum(times), 4) for times in alone]
        found["wait_seconds"] = [round(slowest - sum(times), 4) for times in alone]
        found["communication_seconds"] = round(max(inside) - slowest, 4)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark on this rank; 1 where the variants' losses differ."""
    options = parse(arguments)
    _join(options)
    try:
        return _run(options)
    finally:
        dist.destroy_process_group()


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser("benchmarks.fsdp", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("fsdp.json"))
    parser.add_argument("--shape", default="llama-2-7b", choices=list(models.SHAPES))
    parser.add_argument("--lengths", default="t0", choices=["t0", "gsm8k"])
    parser.add_argument("--cap", type=int, default=2048, help="longest example")
    parser.add_argument("--tokens", type=int, default=8192, help="of a rank in a step")
    parser.add_argument("--steps", type=int, default=8, help="about how many packed steps a turn")
    parser.add_argument("--attention", help="default: flash_attention_2 where it is, else sdpa")
    parser.add_argument("--checkpoint", action="store_true", help="activation checkpointing")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=300.0, help="about how long it may take")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, on CPUs through gloo")
    return parser.parse_args(arguments)


def _join(options: argparse.Namespace) -> None:
    import transformers

    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    if options.smoke:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        return
    # Padded batches of many widths follow each other: no fragments in their peaks.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    here = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(here)
    dist.init_process_group("nccl", device_id=here)


def _run(options: argparse.Namespace) -> int:
    deadline = measure.Deadline(options.seconds)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    capacity = options.tokens // 32 if options.smoke else options.tokens
    pool = data.lengths(options.lengths, cap=options.cap, smoke=options.smoke)
    lengths = shares.sample(pool, int(0.98 * capacity * ranks * options.steps))
    model, implementation = sharded(options)
    dtype = torch.float32 if options.smoke else torch.bfloat16
    bench = Bench(model)
    vocabulary = int(bench.model.config.vocab_size)
    variants = []
    for name in shares.VARIANTS:
        padded = name == "padded"
        found = shares.batches(name, lengths, capacity, ranks)
        steps = []
        for at in range(0, len(found), ranks):
            every = found[at : at + ranks]
            call = collate(every[rank], lengths, vocabulary, padded)
            steps.append(Step(call, sum(lengths[i] - 1 for batch in every for i in batch)))
        about = shares.describe(found, lengths, ranks, padded=padded)
        variants.append(Variant(name, about, steps))
    for variant in variants:
        variant.loss = bench.mean_loss(variant)
    result: dict[str, Any] = {
        "benchmark": "fsdp",
        "machine": {**measure.machine(), "ranks": ranks, "backend": dist.get_backend()},
        "options": {k: v if k != "out" else str(v) for k, v in vars(options).items()},
        "implementation": implementation,
        "kernel": kernel_of(model, dtype),
        "dtype": str(dtype),
        "parameters": models.parameters(model),
        "tokens_a_rank": capacity,
    }
    _rounds(bench, variants, options, deadline, result)
    losses = [variant.loss for variant in variants]
    off = max(losses) / min(losses) - 1
    if rank == 0 and off > CLOSE[dtype]:
        print(f"the variants' losses differ by {off:.2g}: {losses}", file=sys.stderr)
    barrier()  # nobody leaves while another still talks to it
    return int(off > CLOSE[dtype])


def _rounds(
    bench: Bench,
    variants: Sequence[Variant],
    options: argparse.Namespace,
    deadline: measure.Deadline,
    result: dict[str, Any],
) -> None:
    """Turns of all variants, in another order each round; the result is written after each."""

    def write() -> None:
        result["variants"] = {variant.name: row(variant) for variant in variants}
        if dist.get_rank() == 0:
            options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    longest = 0.0
    for n in range(options.rounds):
        # One rank's clock decides for all.
        if n and gathered(deadline.left())[0] < 3 * longest:
            break
        began = time.monotonic()
        for variant in [*variants[n % len(variants) :], *variants[: n % len(variants)]]:
            bench.turn(variant)
        longest = gathered(max(longest, time.monotonic() - began))[0]
        write()
    bench.alone(variants)
    write()
    if dist.get_rank() == 0:
        _say(result)


def _say(result: dict[str, Any]) -> None:
    base = result["variants"]["padded"]["tokens_per_second"]
    for name, found in result["variants"].items():
        waits = [f"{w / found['seconds']:.0%}" for w in found["wait_seconds"] or []]
        print(
            f"{name:18} {found['tokens_per_second']:>10,.0f} tokens/s "
            f"({found['tokens_per_second'] / base:.2f}x) {found['steps']:>3} steps, "
            f"ranks wait {' '.join(waits) or '(not timed)'}"
        )


if __name__ == "__main__":
    sys.exit(main())
