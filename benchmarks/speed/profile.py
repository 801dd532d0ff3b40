"""Where a patched step's time goes: on the device by kind of kernel, on the host by whose code.

Three parts. ``device``: the share of attention, matrix products and the rest in the kernels' time.
``host``: microseconds of Python that the patch adds to an attention layer, and to a whole step, by
the host's clock without waiting for the device, on inputs so small that the device is always
ahead. ``syncs``: how often a training step waits for the device.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import data, models
from .cells import Cell, open_cell
from .measure import Deadline, Update, Writer, attempt, synchronize, tidy

#: Host microseconds that the patch may add to an attention layer's forward.
BAR_US = 30.0
#: Host synchronisations of a training step, by variant.
BAR_SYNCS = {"ours": 1, "ours_lengths": 0}
#: Four examples: the device takes less for them than the host takes to launch.
LENGTHS = (40, 24, 48, 16)
_CALLS = 20  # between two looks at the clock; their launches fit the device's queue

_KINDS = (
    ("attention", re.compile(r"flash|fmha|attention", re.IGNORECASE)),
    (
        "gemm",
        re.compile(r"gemm|nvjet|cutlass|xmma|cublas|splitk|gemv|aten::(add|b)?mm", re.IGNORECASE),
    ),
)


@dataclass(frozen=True)
class Part:
    """One measurement of this section."""

    name: str
    measure: Callable[[Part, argparse.Namespace, Writer, Deadline], int]
    cell: Cell | None = None


def main(options: argparse.Namespace, writer: Writer, deadline: Deadline) -> int:
    """All parts; returns how many gave no result."""
    parts = [p for p in CELLS if options.only.search(p.name)]
    failed = 0
    for n, part in enumerate(parts):
        if n and deadline.left() < 5 and not options.smoke:
            writer.put(cell=part.name, variant="all", error="not run: --seconds were used up")
            failed += 1
            continue
        try:
            failed += part.measure(part, options, writer, deadline.share(len(parts) - n))
        except Exception as fault:
            error = f"{type(fault).__name__}: {fault}"[:600]
            writer.put(cell=part.name, variant="all", error=error)
            failed += 1
        tidy()
    return failed


def release() -> str:
    """The Transformers of this process: a row's key."""
    import transformers

    return str(transformers.__version__)


def kind_of(kernel: str) -> str:
    """ "attention", "gemm" or "other", by a kernel's name."""
    return next((kind for kind, pattern in _KINDS if pattern.search(kernel)), "other")


def shares(kernels: Iterable[tuple[str, float]]) -> dict[str, Any]:
    """Each kind's share of the kernels' time, and the longest kernels by name."""
    kinds = {"attention": 0.0, "gemm": 0.0, "other": 0.0}
    names: dict[str, float] = {}
    for name, microseconds in kernels:
        kinds[kind_of(name)] += microseconds
        names[name] = names.get(name, 0.0) + microseconds
    total = sum(kinds.values())
    if not total:
        raise RuntimeError("the profiler saw no kernel")
    longest = sorted(names.items(), key=lambda item: -item[1])[:12]
    return {
        **{f"{kind}_share": round(value / total, 4) for kind, value in kinds.items()},
        "longest": [[name[:120], kind_of(name), round(us / total, 4)] for name, us in longest],
    }


def _device(part: Part, options: argparse.Namespace, writer: Writer, deadline: Deadline) -> int:
    assert part.cell is not None
    model, variants, update = open_cell(part.cell, ("stock", "ours"), smoke=options.smoke)
    about = part.cell.about(model, smoke=options.smoke)
    about.update(cell=part.name, release=release())
    failed = 0
    for variant in variants:
        attempt(variant, update, first_only=True)
        seconds = [attempt(variant, update) for _ in range(2)][-1]
        if seconds is None:
            writer.put(**about, variant=variant.name, error=variant.error)
            failed += 1
            continue
        kernels, busy = _traced(lambda v=variant: v.turn(update))  # type: ignore[misc]
        steps = len(variant.batches)
        writer.put(
            **about,
            variant=variant.name,
            step_ms=round(1000 * seconds / steps, 3),
            device_ms=round(busy / 1000 / steps, 3),
            device_busy=round(busy / 1e6 / seconds, 4),
            kernels_a_step=round(len(kernels) / steps, 1),
            **shares(kernels),
        )
    return failed


def _traced(run: Callable[[], object]) -> tuple[list[tuple[str, float]], float]:
    """Kernels with their microseconds, and how long the device had at least one of them.

    On a CPU the operators stand for kernels; those that call each other are counted twice.
    """
    from torch.profiler import ProfilerActivity, profile

    gpu = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU]) as found:
        run()
        synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        found.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    wanted = {"kernel", "gpu_memcpy", "gpu_memset"} if gpu else {"cpu_op"}
    mine = [e for e in events if e.get("cat") in wanted]
    spans = sorted((float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in mine)
    return [(e["name"], float(e["dur"])) for e in mine], covered(spans)


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """How much of the line sorted ``(start, end)`` spans cover."""
    total, reach = 0.0, float("-inf")
    for start, end in spans:
        total += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    return total


def variants_of(
    base: torch.nn.Module, *, checkpoint: bool = False
) -> dict[str, tuple[torch.nn.Module, dict[str, Any]]]:
    """Stock and ours, by ``position_ids`` and with lengths: a model and its batch each."""
    import fa2_pack_patch

    stock, ours = models.twin(base), models.twin(base)
    for tree in (stock, ours):
        if checkpoint:
            tree.gradient_checkpointing_enable(  # type: ignore[operator]
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
    fa2_pack_patch.apply(ours)
    vocabulary, where = int(base.config.vocab_size), models.device()
    plain = data.move(data.packed(LENGTHS, vocabulary), where).call
    lengths = data.move(data.packed(LENGTHS, vocabulary, varlen=True), where).call
    return {
        "stock": (stock, plain),
        "stock_lengths": (stock, lengths),
        "ours": (ours, plain),
        "ours_lengths": (ours, lengths),
    }


def _host(part: Part, options: argparse.Namespace, writer: Writer, deadline: Deadline) -> int:
    base = models.build("llama-1b", smoke=options.smoke)
    about = {"cell": part.name, "release": release(), "smoke": options.smoke}
    about["layers"] = layers = int(base.config.num_hidden_layers)
    found = variants_of(base)
    step, layer, failed = {}, {}, 0
    for name, (model, call) in found.items():
        try:
            for _ in range(3):
                model(**call, use_cache=False).loss.backward()
            layer[name] = layer_call(model, call)
            step[name] = _step_call(model, call)
        except Exception as fault:  # an older release knows no lengths
            error = f"{type(fault).__name__}: {fault}"[:300]
            writer.put(**about, variant=f"{name}/layer", error=error)
            step.pop(name, None), layer.pop(name, None)
            failed += name.startswith("ours")
    if "stock_lengths" in layer:
        layer["varlen_alone"] = layer_call(*found["stock_lengths"], without=("position_ids",))
    update = Update(base, "sgd")
    rounds = 2 if options.smoke else 40
    micro = alternate(layer, deadline.share(2), rounds=rounds, calls_each=_CALLS)
    whole = alternate(step, deadline, rounds=2 if options.smoke else 15, after=update.drop)
    for name, us in micro.items():
        writer.put(**about, variant=f"{name}/layer", forward_us=round(us, 2))
    for name, us in whole.items():
        writer.put(**about, variant=f"{name}/step", host_ms=round(us / 1000, 3))
    if "ours" in micro:
        writer.put(**about, variant="added", **added(micro, whole, layers))
    return failed


def added(micro: dict[str, float], whole: dict[str, float], layers: int) -> dict[str, Any]:
    """What the patch adds to a layer's forward and to a step, in host microseconds a layer.

    Judged is the dearest way to call ours against the cheapest stock call there is: stock given the
    lengths but no positions, so that it infers nothing. Where a release has none, against stock.
    """
    dearest = max(v for k, v in micro.items() if k.startswith("ours"))
    cheapest = min(v for k, v in micro.items() if not k.startswith("ours"))
    found: dict[str, Any] = {
        "layer_us": round(dearest - cheapest, 2),
        "bar_us": BAR_US,
        "passed": dearest - cheapest < BAR_US,
    }
    for ours, stock in (("ours", "stock"), ("ours_lengths", "stock_lengths")):
        if ours in micro and stock in micro:
            found[f"{ours}_minus_{stock}_us"] = round(micro[ours] - micro[stock], 2)
        if ours in whole and stock in whole:
            more = whole[ours] - whole[stock]
            found[f"{ours}_minus_{stock}_step_us_a_layer"] = round(more / layers, 2)
    return found


def layer_call(
    model: torch.nn.Module, call: dict[str, Any], *, without: tuple[str, ...] = ()
) -> Callable[[], object]:
    """The first attention layer's forward on the inputs that a packed call of the model gives it.

    Args:
        model: patched or not.
        call: the packed batch.
        without: keyword arguments of the layer to set to None.
    """
    attention = next(m for n, m in model.named_modules() if n.endswith("layers.0.self_attn"))
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    hook = attention.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append((args, dict(kwargs))), with_kwargs=True
    )
    model(**call, use_cache=False)
    hook.remove()
    args, kwargs = seen[0]
    kwargs.update(dict.fromkeys(without))

    def own(value: Any) -> Any:
        # No graph behind the hidden states, or each call would hold the embedding's.
        differs = isinstance(value, torch.Tensor) and value.requires_grad
        return value.detach().requires_grad_() if differs else value

    args, kwargs = tuple(map(own, args)), {k: own(v) for k, v in kwargs.items()}
    return lambda: attention(*args, **kwargs)


def _step_call(model: torch.nn.Module, call: dict[str, Any]) -> Callable[[], object]:
    def run() -> object:
        return model(**call, use_cache=False).loss.backward()

    return run


def alternate(
    calls: dict[str, Callable[[], object]],
    deadline: Deadline,
    *,
    rounds: int,
    calls_each: int = 1,
    after: Callable[[], None] | None = None,
) -> dict[str, float]:
    """Median host microseconds of each call, taking turns, the device idle at the start of each."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    gc.collect()
    gc.disable()
    try:
        for n in range(rounds):
            if n and deadline.left() < 0:
                break
            for name, call in calls.items():
                synchronize()
                began = time.perf_counter_ns()
                for _ in range(calls_each):
                    call()
                found[name].append((time.perf_counter_ns() - began) / 1000 / calls_each)
                synchronize()
                if after is not None:
                    after()
    finally:
        gc.enable()
    return {name: statistics.median(times) for name, times in found.items()}


def _syncs(part: Part, options: argparse.Namespace, writer: Writer, deadline: Deadline) -> int:
    base = models.build("llama-1b", smoke=options.smoke)
    update, failed = Update(base, "sgd"), 0
    for checkpoint in (False, True):
        about: dict[str, Any] = {
            "cell": part.name + ("/checkpointing" if checkpoint else "/plain"),
            "release": release(), "layers": int(base.config.num_hidden_layers),
            "smoke": options.smoke,
        }  # fmt: skip
        for name, (model, call) in variants_of(base, checkpoint=checkpoint).items():
            try:
                count = synchronisations(_step_call(model, call), after=update.drop)
            except Exception as fault:  # an older release knows no lengths
                error = f"{type(fault).__name__}: {fault}"[:300]
                writer.put(**about, variant=name, error=error)
                failed += name.startswith("ours")
                continue
            row: dict[str, Any] = {"synchronisations": count}
            if name in BAR_SYNCS:
                row["bar"] = BAR_SYNCS[name]
                row["passed"] = None if count is None else count <= BAR_SYNCS[name]
            writer.put(**about, variant=name, **row)
    return failed


def synchronisations(run: Callable[[], object], *, after: Callable[[], None]) -> int | None:
    """CUDA's own warnings of synchronising calls in one ``run``, the third; None on a CPU."""
    for _ in range(2):
        run()
        after()
    synchronize()
    if not torch.cuda.is_available():
        return None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    after()
    return counted(str(w.message) for w in caught)


def counted(messages: Iterable[str]) -> int:
    """How many warnings are of a synchronising call: not torch's one notice that the mode is on."""
    return sum("called a synchronizing CUDA operation" in message for message in messages)


_CELLS = (
    Cell("llama-1b", "t0", tokens=2048, optimizer="adamw", steps=3),
    Cell("llama-2-7b", "t0", batch=4, steps=2),
)
CELLS = [
    *(Part(f"device/{cell.name}", _device, cell) for cell in _CELLS),
    Part("host/llama-1b", _host),
    Part("syncs/llama-1b", _syncs),
]
