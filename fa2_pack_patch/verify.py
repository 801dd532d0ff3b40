"""Proof on the user's own model: packed against separate, leaks, and every layer packed."""

from __future__ import annotations

import math
import statistics
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Optional

import torch

from . import compat
from .batches import Batch, Examples, Piece, given_batch, random_batches, usual
from .dropouts import attention_trains, has_dropout, varies
from .forwards import in_place
from .gradients import (
    checkpointed,
    gradients,
    gradients_alone,
    gradients_padded,
    loss_of,
    of_inputs,
    trained,
    weights_of,
)
from .losses import Targets
from .probe import Probe, each, settled, undisturbed
from .ranks import FailedError, Ranks
from .report import Check, VerifyReport
from .rounding import distance, rounded

#: Runs with other roundings, of which the largest error counts.
_TRIALS = 2
#: Packed and separate may each be off by PyTorch's own error.
_SIDES = 2
#: So many examples of a batch are changed, one after the other.
_CHANGED = 8
#: Of fewer numbers than that, the error in two runs may be small by chance.
_FEW = 16
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def verify(model: torch.nn.Module, *, examples: Optional[Examples] = None) -> VerifyReport:
    """Prove on a model, as it is and where it is, that its packed rows are right.

    Packed is compared with the same model run on each example by itself (logits; gradients too if
    they are on and a parameter requires them), each example is changed to see whether another one
    notices, and every attention layer must have run packed. Tolerances are twice the error that
    PyTorch itself makes on this model, measured by rounding every module's output otherwise.

    Random state, training modes, ``.grad``, buffers and config are as before afterwards. Dropout is
    off, but for the check of that in attention. No other thread may use the model meanwhile.

    Args:
        model: a patched model, or a wrapper around it.
        examples: sequences of token ids, which are packed into one row; or a packed batch
            (``input_ids`` (rows, tokens) and ``position_ids``, …). A few short random ones by
            default, one of them longer than the sliding window if that is at most 1024.

    Returns:
        A report, which is true in a condition if all checks passed. It did not pass on a model
        that is not patched.

    Raises:
        UnsupportedModelError: the model holds no known family.
        PackingError: ``examples`` cannot be packed.
    """
    probe = Probe.of(model)
    vocabulary = min(probe.rows, probe.vocabulary)
    ranks = Ranks(probe)
    if examples is None:
        window = getattr(probe.base.config, "sliding_window", None)
        batches = random_batches(vocabulary, window if isinstance(window, int) else None)
    else:
        try:
            batches = [given_batch(examples, probe.rows)]
        except Exception:
            ranks.all("examples that were refused")  # on the others verify ends too
            raise
    ranks.check_examples(batches)
    with_gradients = torch.is_grad_enabled() and any(p.requires_grad for p in model.parameters())
    with undisturbed(model):
        checks = _Proof(probe, vocabulary, ranks).run(batches, with_gradients)
    weight = next(probe.base.parameters())
    return VerifyReport(
        passed=all(c.passed for c in checks),
        checks=tuple(checks),
        subject=f"{type(model).__name__}, {weight.dtype}, {probe.device}, transformers "
        f"{compat.release()}, torch {torch.__version__}",
        _model=weakref.ref(model),
    )


def _check(name: str, value: float, allowed: float, note: str = "") -> Check:
    return Check(name, value, allowed, value <= allowed, note)


class _Proof:
    """The checks of one model."""

    def __init__(self, probe: Probe, vocabulary: int, ranks: Ranks) -> None:
        self.probe = probe
        self.ranks = ranks
        self.vocabulary = vocabulary
        config: Any = probe.base.config
        holders = (config, getattr(config, "ffn_config", None))
        self.experts = any((getattr(h, n, None) or 0) > 1 for h in holders for n in _EXPERTS)
        # In half precision a router's choice turns on a rounding, and then a token is another one:
        # all tokens together still tell, the worst does not.
        half = any(p.dtype.itemsize < 4 for p in probe.base.parameters() if p.is_floating_point())
        self.typical = self.experts and half
        self.company = False  # whether a token's numbers depend on the tokens beside it
        self.checks: list[Check] = []

    def run(self, batches: Sequence[Batch], with_gradients: bool) -> list[Check]:
        apart = self.ranks.apart(self.probe)
        if apart:
            return [_check(f"layers not packed, {batches[0].name}", math.inf, 0, apart)]
        with torch.no_grad():
            for batch in batches:
                alone, trials = self._logits(batch)
            self._losses(batches[-1], alone, trials)
            if has_dropout(self.probe):
                self._dropout(batches[-1])
        if not self.ranks.any(not with_gradients):
            self._gradients(batches[-1])
        bad = self.ranks.failures(self.checks)
        if bad:
            self.checks.append(_check("ranks that failed", len(bad), 0, "; ".join(bad[:4])))
        return self.checks

    def _furthest(self, got: Iterable[torch.Tensor], want: Iterable[torch.Tensor]) -> float:
        """The distance of two lists of examples."""
        pair = torch.cat(list(got)), torch.cat(list(want))
        return distance(*pair, typical=self.typical)

    def _logits(self, batch: Batch) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
        """Returns what the examples give one by one, and again with other roundings."""
        probe, pieces = self.probe, batch.pieces
        alone, trials = each(probe.alone, pieces), []
        for seed in range(_TRIALS):
            with rounded(probe.reference, seed):
                trials.append(each(probe.alone, pieces))
        with probe.recorded() as runs:
            out, note = self.ranks.attempt(lambda: probe.packed(batch).detach())
            missing = self._missing(runs)
            if missing and not note:
                note = self._why_missing(missing, runs)
        moved, why = self._moved(batch, out)
        if not why and self.ranks.any(moved) and self._company(pieces):
            trials.append(settled(probe.padded(pieces)))
        own = max(self._furthest(again, alone) for again in trials)  # PyTorch's own error
        value = math.inf
        if out is not None:
            value = self._furthest(settled(out[p.place] for p in pieces), alone)
        self.checks += [
            _check(f"layers not packed, {batch.name}", missing, 0, note),
            _check(f"logits, {batch.name}", value, _SIDES * own),
        ]
        self._unpacked(batch, alone, _SIDES * own)
        self._power(batch, alone, _SIDES * own)
        allowed = 0.0 if out is None or why or self._exact(batch, out) else _SIDES * own
        self.checks.append(_check(f"others when one changes, {batch.name}", moved, allowed, why))
        return alone, trials

    def _unpacked(self, batch: Batch, alone: Sequence[torch.Tensor], allowed: float) -> None:
        """Calls that are not packed give what they gave before apply, bit for bit."""
        probe, pieces, name = self.probe, batch.pieces, f"calls not packed, {batch.name}"
        found, why = self.ranks.attempt(lambda: each(probe.unpacked, pieces))
        if found is None:  # stock gave an answer
            self.checks.append(_check(name, math.inf, 0, why))
            return
        value, again = self._furthest(found, alone), 0.0
        if self.ranks.any(value):
            again = self._furthest(each(probe.alone, pieces), alone)
        self.checks.append(_check(name, value, allowed if value and again else 0))

    def _losses(
        self,
        batch: Batch,
        alone: Sequence[torch.Tensor],
        trials: Sequence[Sequence[torch.Tensor]],
    ) -> None:
        """By labels: the mean over all targets, of which an example's first token is none."""
        pieces, targets = batch.pieces, Targets.of(self.probe)
        if targets is None or self.typical:  # one token of another expert moves a mean of few
            return
        classes = alone[0].shape[-1]
        wanted, surprise = targets.alone(pieces, classes), targets.surprise(pieces, alone)
        own = max(float((targets.surprise(pieces, t) - surprise).abs().max()) for t in trials)
        ways: list[dict[str, bool]] = [{}, {"changed": True}, {}]
        found = []
        for way in [*ways, {"shifted": True}] if targets.shiftable else ways:
            loss, why = self.ranks.attempt(partial(targets.packed, batch, classes, **way))
            if loss is None:
                self.checks.append(_check("loss", math.inf, 0, why))
                return
            found.append(loss)
        loss, other, again, *shifted = found
        allowed = _SIDES * own + float(wanted.abs()) * torch.finfo(loss.dtype).eps
        for name, given in zip(("loss", "loss by shifted labels"), (loss, *shifted)):
            off = float((given.double().cpu() - wanted).abs())
            self.checks.append(_check(name, off if math.isfinite(off) else math.inf, allowed))
        if targets.first:
            by_first, exact = float((other - loss).abs()), bool(loss == again)
            self.checks.append(_check("loss by first labels", by_first, 0 if exact else allowed))

    def _dropout(self, batch: Batch) -> None:
        """In packed rows attention drops out in training where it does in separate ones."""
        probe = self.probe
        with attention_trains(probe):
            alone = self.ranks.any(varies(lambda: torch.cat(each(probe.alone, batch.pieces))))
            found, why = self.ranks.attempt(lambda: varies(lambda: probe.packed(batch)))
        self.checks.append(_check("dropout in training", float(found != alone), 0, why))

    def _missing(self, runs: Sequence[Any]) -> int:
        patch, layers = self.probe.patch, self.probe.layers
        if patch is None:
            return layers
        if runs:
            return max(layers - len(run.done) for run in runs)
        if any(hasattr(m, "_orig_mod") for m in (self.probe.model, *self.probe.model.modules())):
            return layers - sum(in_place(site) for site in patch.sites)  # inside of a graph
        return layers

    def _why_missing(self, missing: int, runs: Sequence[Any]) -> str:
        if self.probe.patch is None:
            return "the model is not patched: call fa2_pack_patch.apply(model)"
        if not runs:
            return (
                "fa2_pack_patch did not see this call: somebody removed its hooks; call "
                "fa2_pack_patch.apply(model) again"
            )
        return (
            f"{missing} of {self.probe.layers} attention layers did not run packed; call "
            "fa2_pack_patch.apply(model) again, after whatever else changes the model"
        )

    def _power(self, batch: Batch, alone: Sequence[torch.Tensor], allowed: float) -> None:
        """Is the tolerance small against what mixing examples does?"""
        try:
            mixed = settled(self.probe.mixed(batch))
        except (IndexError, RuntimeError):  # more tokens than the model has positions
            return
        later = [n for n, p in enumerate(batch.pieces) if p.start]  # a row's first sees nobody
        effect = self._furthest([mixed[n] for n in later], [alone[n] for n in later])
        name = f"tolerance against mixing, {batch.name}"
        note = ""
        if allowed > effect / _SIDES:
            note = "mixing would hardly change these examples, so they prove nothing; give others"
        self.checks.append(_check(name, allowed, effect / _SIDES, note))

    def _moved(self, batch: Batch, out: Optional[torch.Tensor]) -> tuple[float, str]:
        """How far others move when one example, or the padding, has other tokens."""
        if out is None:
            return math.inf, ""
        worst, ids = 0.0, batch.kwargs["input_ids"].cpu()
        for n in [*self._some(batch.pieces), None]:
            where: Any = batch.padding if n is None else batch.pieces[n].place
            if where is None:
                continue
            changed = ids.clone()
            changed[where] = self._other(changed[where])
            after, why = self.ranks.attempt(partial(self.probe.packed, batch, input_ids=changed))
            if after is None:
                return math.inf, why
            for m, piece in enumerate(batch.pieces):
                if m != n:
                    pair = after[piece.place], out[piece.place]
                    worst = max(worst, distance(*pair, typical=self.typical))
        return worst, ""

    def _some(self, pieces: Sequence[Piece]) -> range:
        return range(0, len(pieces), max(1, math.ceil(len(pieces) / _CHANGED)))

    def _other(self, ids: torch.Tensor) -> torch.Tensor:
        return (ids + 1 + self.vocabulary // 3) % self.vocabulary

    def _exact(self, batch: Batch, out: torch.Tensor) -> bool:
        """Whether this model's arithmetic on one token is the same whatever the others are.

        Not with experts, which are given other numbers of tokens, nor where it depends on the
        company, nor if a repeated call differs.
        """
        if self.experts or self.company:
            return False
        return torch.equal(self.probe.packed(batch), out)

    def _company(self, pieces: Sequence[Piece]) -> bool:
        """Whether stock, too, gives a row other numbers when another row has other tokens.

        8-bit linear layers look for outliers in the whole batch, and a scale may be that of a whole
        tensor; then the same examples in a padded batch show how much that is.
        """
        if self.experts or self.ranks.any(not usual(pieces)):
            return False
        if self.company:
            return True
        probe = self.probe
        try:
            before = probe.padded(pieces)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception:  # a mask that overflows in float64, in old releases
            return False
        for n in self._some(pieces):
            changed = [replace(p, ids=self._other(p.ids)) if p is pieces[n] else p for p in pieces]
            after = probe.padded(changed)
            others = [m for m in range(len(pieces)) if m != n]
            if any(not torch.equal(after[m], before[m]) for m in others):
                self.company = True
        self.company = self.ranks.any(self.company)
        return self.company

    def _gradients(self, batch: Batch) -> None:
        probe, pieces = self.probe, batch.pieces
        with torch.no_grad():
            weights = weights_of(pieces, each(probe.alone, pieces[:1]) * len(pieces))
        tokens, sums = gradients_alone(probe, pieces, weights)
        trials = []
        for seed in range(_TRIALS):
            with rounded(probe.reference, seed):
                trials.append(gradients_alone(probe, pieces, weights))
        if self.company and usual(pieces):
            trials.append(gradients_padded(probe, pieces, weights))
        names = ("gradients of inputs", "gradients of parameters", "gradients across examples")

        def loss(only: Optional[int] = None) -> torch.Tensor:
            out, why = self.ranks.attempt(partial(probe.packed, batch))
            if out is None:
                raise FailedError(why)  # before a backward that the other ranks would not make
            chosen = range(len(pieces)) if only is None else [only]
            parts = [loss_of(out[pieces[n].place], weights[n]) for n in chosen]
            return torch.stack([p.to(parts[0].device) for p in parts]).sum()

        foreign = None
        with checkpointed(probe):
            found, why = self.ranks.attempt(partial(gradients, probe, loss))
            if found is not None:
                foreign, why = self._foreign(loss, batch)
        if found is None or foreign is None:
            self.checks.append(_check(names[0], math.inf, 0, why))
            return
        inputs, got = found
        packed = [inputs[p.place].cpu() for p in pieces]
        value = self._furthest(packed, tokens)
        own = max(self._furthest(trial, tokens) for trial, _ in trials)
        self.checks.append(_check(names[0], value, _SIDES * own))
        if sums:
            self._parameters(names[1], got, sums, [t for _, t in trials], len(pieces))
        self.checks.append(_check(names[2], foreign, 0))

    def _parameters(
        self,
        name: str,
        got: dict[str, torch.Tensor],
        want: dict[str, torch.Tensor],
        trials: Sequence[dict[str, torch.Tensor]],
        examples: int,
    ) -> None:
        """The parameter that is furthest from what is allowed for it."""
        kinds = trained(self.probe)
        sizes = {label: float(wanted.norm()) or 1.0 for label, wanted in want.items()}
        own = {
            label: max(float((t[label] - wanted).norm()) for t in trials) / sizes[label]
            for label, wanted in want.items()
        }
        usual = statistics.median(own.values())
        worst: tuple[float, float, float, str] = (-1.0, 0.0, 0.0, "")
        for label, wanted in want.items():
            value = math.inf
            if label in got:
                value = float((got[label] - wanted).norm()) / sizes[label]
            value = value if math.isfinite(value) else math.inf
            error = own[label] if wanted.numel() >= _FEW else max(own[label], usual)
            error += examples * torch.finfo(kinds[label].dtype).eps  # one rounding for each sum
            allowed = _SIDES * error
            if value / allowed > worst[0]:
                worst = value / allowed, value, allowed, label
        note = f"furthest off is {worst[3]}" if worst[0] > 1 else ""
        self.checks.append(_check(name, worst[1], worst[2], note))

    def _foreign(
        self, loss: Callable[[int], torch.Tensor], batch: Batch
    ) -> tuple[Optional[float], str]:
        """The largest gradient of an example's outputs by another's inputs; must be exactly 0."""
        worst = 0.0
        step = max(1, math.ceil(len(batch.pieces) / _CHANGED))
        for n in range(0, len(batch.pieces), step):
            found, why = self.ranks.attempt(partial(of_inputs, self.probe, partial(loss, n)))
            if found is None:
                return None, why
            gradient = found.clone()
            gradient[batch.pieces[n].place] = 0
            largest = float(gradient.abs().max())
            worst = max(worst, largest if math.isfinite(largest) else math.inf)
        return worst, ""
