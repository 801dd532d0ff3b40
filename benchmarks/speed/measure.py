"""Turns of training steps, their medians, their peak memory; rows that survive a kill."""

from __future__ import annotations

import gc
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .data import Batch

Call = Callable[..., Any]


class Deadline:
    """A section's seconds, shared out over what is still to be done."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds to the end; negative when it has passed."""
        return self.end - time.monotonic()

    def share(self, of: int) -> Deadline:
        """One of ``of`` equal parts of what is left."""
        return Deadline(self.left() / max(of, 1))


class Writer:
    """Appends rows to ``DIR/SECTION.jsonl``, one JSON object a line, each flushed at once.

    A row written again with the same key (section, cell, variant, release) replaces the earlier
    one for the readers.
    """

    def __init__(self, folder: Path, section: str, **common: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{section}.jsonl"
        self.common = {"section": section, **common}
        self.put(kind="machine", **machine())

    def put(self, *, quiet: bool = False, **row: Any) -> None:
        """One row; and, unless ``quiet``, a short line of it to stdout."""
        line = {**self.common, **row}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if not quiet:
            print(" ".join(f"{k}={_short(v)}" for k, v in row.items()), flush=True)


def _short(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) < 240 else text[:237] + "..."


def machine() -> dict[str, Any]:
    """The GPU (or CPU) and the versions of all that matters."""
    import transformers

    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    for name in ("flash_attn", "peft", "triton"):
        try:
            versions[name] = __import__(name).__version__
        except Exception:
            versions[name] = "none"
    gpu = torch.cuda.is_available()
    return {
        "machine": torch.cuda.get_device_name() if gpu else f"CPU {platform.machine()}",
        "memory_bytes": torch.cuda.mem_get_info()[1] if gpu else 0,
        "python": platform.python_version(),
        **versions,
    }


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak(*, reset: bool = False) -> int:
    """Bytes allocated at the highest since the last reset (0 on a CPU)."""
    if not torch.cuda.is_available():
        return 0
    if reset:
        torch.cuda.reset_peak_memory_stats()
    return torch.cuda.max_memory_allocated()


def tidy() -> None:
    """Give cached memory back, so that one variant's fragments do not hurt the next."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class Update:
    """Ends a step: the optimizer, with learning rate 0.

    Rate 0 costs what any rate costs, and leaves every variant and every round the same weights, so
    their losses can be compared. ``adamw`` and ``sgd`` are torch's fused ones; ``in_backward`` is
    SGD applied, and the gradient freed, as soon as a weight has its gradient, so that a model whose
    weights fill half the card can be trained in full.
    """

    def __init__(self, model: torch.nn.Module, name: str) -> None:
        self.name = name
        trained = [p for p in model.parameters() if p.requires_grad]
        self.parameters = trained
        self.optimizer: torch.optim.Optimizer | None = None
        fused = {"fused": True} if torch.cuda.is_available() else {}
        if name == "adamw":
            self.optimizer = torch.optim.AdamW(trained, lr=0.0, weight_decay=0.0, **fused)
        elif name == "sgd":
            self.optimizer = torch.optim.SGD(trained, lr=0.0, **fused)
        elif name == "in_backward":
            for parameter in trained:
                parameter.register_post_accumulate_grad_hook(_descend)
        else:
            raise ValueError(f"optimizer must be adamw, sgd or in_backward, got {name!r}")

    def __call__(self) -> None:
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

    def drop(self) -> None:
        """Forget gradients, after a step that did not come to its end."""
        for parameter in self.parameters:
            parameter.grad = None


def _descend(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    with torch.no_grad():
        parameter.add_(parameter.grad, alpha=0.0)
    parameter.grad = None


@dataclass
class Variant:
    """One way to train on the batches; ``call`` is the model, compiled or not."""

    name: str
    call: Call
    batches: list[Batch]
    before_step: Callable[[], None] | None = None
    seconds: list[float] = field(default_factory=list)
    peak: int = 0
    loss: float | None = None
    error: str | None = None

    def turn(self, update: Update, *, first_only: bool = False) -> float:
        """All batches once, a training step each; seconds from idle GPU to idle GPU."""
        synchronize()
        began = time.perf_counter()
        for batch in self.batches[: 1 if first_only else None]:
            if self.before_step is not None:
                self.before_step()
            loss = self.call(**batch.call, use_cache=False).loss
            loss.backward()
            if first_only:
                self.loss = float(loss.detach())
            update()
        synchronize()
        return time.perf_counter() - began

    def row(self) -> dict[str, Any]:
        """What is written down: medians over the turns, of real tokens."""
        if self.error is not None:
            return {"variant": self.name, "error": self.error, "peak_bytes": self.peak}
        real = sum(b.real for b in self.batches)
        median = statistics.median(self.seconds)
        return {
            "variant": self.name,
            "tokens_per_second": round(real / median, 1),
            "step_ms": round(1000 * median / len(self.batches), 3),
            "real_tokens": real,
            "computed_tokens": sum(b.computed for b in self.batches),
            "peak_bytes": self.peak,
            "loss": self.loss,
            "rounds": len(self.seconds),
            "seconds": [round(s, 5) for s in self.seconds],
        }


OUT_OF_MEMORY = getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError)


def attempt(variant: Variant, update: Update, **how: Any) -> float | None:
    """One turn, or None and the reason kept in ``variant.error``; other variants go on."""
    peak(reset=True)
    found = None
    try:
        found = variant.turn(update, **how)
    except OUT_OF_MEMORY:
        variant.error = "out of memory"
    except Exception as fault:
        variant.error = f"{type(fault).__name__}: {fault}"[:600]
    variant.peak = max(variant.peak, peak())
    if variant.error is not None:
        update.drop()
        tidy()
    return found


def interleave(
    variants: list[Variant],
    update: Update,
    deadline: Deadline,
    writer: Writer,
    *,
    rounds: int = 7,
    tidy_between: bool = False,
    **row: Any,
) -> None:
    """A B C A B C … until the deadline or ``rounds``; at least one round. Rows after each round.

    Before it each variant does its first batch once, untimed: callers put the largest first.
    """
    for variant in variants:
        attempt(variant, update, first_only=True)
        if tidy_between:
            tidy()
    live = [v for v in variants if v.error is None]
    for variant in variants:
        if variant.error is not None:
            writer.put(quiet=True, **row, **variant.row())
    longest = 0.0
    for n in range(rounds):
        if not live or (n and deadline.left() < longest):
            break
        began = time.monotonic()
        # Each round starts with another variant, so that none always follows the same one.
        for variant in [*live[n % len(live) :], *live[: n % len(live)]]:
            seconds = attempt(variant, update)
            if seconds is not None:
                variant.seconds.append(seconds)
            if tidy_between:
                tidy()
        longest = max(longest, time.monotonic() - began)
        for variant in live:
            writer.put(quiet=True, **row, **variant.row())
        live = [v for v in live if v.error is None]
    say(str(row.get("cell")), variants)


def say(cell: str, variants: list[Variant]) -> None:
    """The cell's result in a few short lines."""
    print(cell)
    for variant in variants:
        row = variant.row()
        if "error" in row:
            print(f"  {variant.name:18} {row['error'][:160]}", flush=True)
            continue
        print(
            f"  {variant.name:18} {row['tokens_per_second']:>9.0f} tokens/s {row['step_ms']:>9.2f} "
            f"ms/step {row['peak_bytes'] / 2**30:>6.1f} GiB  {row['rounds']} rounds",
            flush=True,
        )


def latest(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last row of each key, in order of first sight; a row of the machine is left out."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        if row.get("kind") != "machine":
            found[tuple(str(row.get(k)) for k in ("section", "cell", "variant", "release"))] = row
    return list(found.values())


def read(path: Path) -> list[dict[str, Any]]:
    """All rows of a results file; a half-written last line, after a kill, is ignored."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found
