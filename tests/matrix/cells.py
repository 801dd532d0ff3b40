"""One release's cells of the matrix: families x implementations x kinds of input, as JSON.

``python -m tests.matrix.cells --release 4.43.4 --out FILE`` with that release first on PYTHONPATH.
Packed is compared with the same, unpatched model run on each example by itself.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import math
import platform
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

import fa2_pack_patch
from fa2_pack_patch import compat

from . import models
from .kinds import KINDS, TWO, Call, Example, Kind, _positions

LIMIT = 2e-4
#: MoE routes each token by itself, but batches experts: only arithmetic noise may pass.
MOE_NOISE = 1e-5
WINDOW_OFF: dict[str, dict[str, Any]] = {
    "phi3": {"sliding_window": None},
    "qwen2_moe": {"use_sliding_window": False},
}
MOE = ("mixtral", "qwen2_moe", "qwen3_moe", "granitemoe", "dbrx")

Cell = dict[str, Any]


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


def separate(model: torch.nn.Module, example: Example) -> torch.Tensor:
    """Logits ``(length, vocab)`` of one example alone, float32."""
    call = {"input_ids": example.tokens[None], "position_ids": example.positions[None]}
    try:
        logits = model(**call, use_cache=False).logits[0].float()
        if not bool(torch.isfinite(logits).all()):  # 4.44.0 loses an example that starts at 3
            raise IndexError("not finite")
        return logits
    except (IndexError, RuntimeError, TypeError):
        # Old rotary tables end at the row's length (an example from 3 on is then the same example
        # from 0 on), and Falcon's eager of 4.36 to 4.43 wants a mask for one token.
        call["position_ids"] = call["position_ids"] - example.positions[0]
        call["attention_mask"] = torch.ones_like(call["input_ids"])
        return model(**call, use_cache=False).logits[0].float()


class References:
    """The unpatched model's logits of each example, computed once."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.known: dict[tuple[int, ...], torch.Tensor] = {}

    def __call__(self, example: Example) -> torch.Tensor:
        key = (*example.tokens.tolist(), -1, *example.positions.tolist())
        if key not in self.known:
            with torch.no_grad():
                self.known[key] = separate(self.model, example)
        return self.known[key]


def compare(logits: torch.Tensor, call: Call, reference: References) -> float:
    """Largest difference between a packed call and its examples alone."""
    worst = 0.0
    for e in call.examples:
        got = logits[e.row, e.start : e.start + len(e.tokens)].float()
        error = (got - reference(e)).abs().max().item()
        worst = max(worst, float("inf") if math.isnan(error) else error)
    return worst


def run_packed(model: torch.nn.Module, kind: Kind, reference: References) -> Cell:
    call = kind.make(model)
    try:
        with torch.no_grad():
            logits = model(**call.kwargs).logits
        error = compare(logits, call, reference)
    except fa2_pack_patch.Fa2PackPatchError as raised:
        return {"status": "refused", "detail": _short(raised)}
    except Exception as raised:
        return {"status": "error", "detail": _short(raised)}
    return {"status": "right" if error < LIMIT else "wrong", "error": error}


def run_refused(model: torch.nn.Module, kind: Kind) -> Cell:
    try:
        call = kind.make(model)
    except Exception as raised:
        return {"status": "stock_error", "detail": _short(raised)}
    try:
        with torch.no_grad():
            model(**call.kwargs)
    except fa2_pack_patch.Fa2PackPatchError as raised:
        return {"status": "refused", "detail": _short(raised)}
    except Exception as raised:
        return {"status": "error", "detail": _short(raised)}
    return {"status": "wrong", "detail": "accepted"}


def outcome(model: torch.nn.Module, kind: Kind) -> Any:
    """What a call that is not packed gives: logits, or the name of stock's own error."""
    call = kind.make(model)
    try:
        with torch.no_grad():
            return model(**call.kwargs).logits
    except Exception as raised:
        return _short(raised)


def same(before: Any, after: Any) -> Cell:
    if isinstance(before, str) or isinstance(after, str):
        equal = isinstance(before, str) and isinstance(after, str) and before == after
        return {"status": "unchanged" if equal else "wrong", "detail": f"{before} / {after}"[:300]}
    equal = before.shape == after.shape and torch.equal(
        torch.nan_to_num(before, 12345.0), torch.nan_to_num(after, 12345.0)
    )
    return {"status": "unchanged" if equal else "wrong"}


def generations(model: torch.nn.Module) -> dict[str, Any]:
    """Tokens of generation with each cache class, and prefill, decode and one-token logits."""
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    found: dict[str, Any] = {}

    def attempt(name: str, function: Any) -> None:
        try:
            with torch.no_grad():
                found[name] = function()
        except Exception as raised:
            found[name] = _short(raised)

    options = {"max_new_tokens": 4, "do_sample": False}
    attempt("generate", lambda: model.generate(ids, **options))
    attempt("generate_left", lambda: model.generate(ids, attention_mask=mask, **options))
    attempt("generate_no_cache", lambda: model.generate(ids, use_cache=False, **options))
    if compat.release() >= compat.Version("4.41"):
        for cache in ("static", "sliding_window", "hybrid"):
            model.__dict__.pop("_cache", None)  # generate() would go on with the last one
            attempt(
                f"generate_{cache}",
                lambda c=cache: model.generate(ids, cache_implementation=c, **options),
            )

    def decode() -> torch.Tensor:
        first = model(input_ids=ids, use_cache=True)
        mask_ = torch.ones(2, 5, dtype=torch.long)
        step = {"input_ids": torch.tensor([[3], [4]]), "attention_mask": mask_}
        return model(**step, past_key_values=first.past_key_values, use_cache=True).logits

    def one_token() -> torch.Tensor:
        return model(input_ids=ids[:, :1], position_ids=torch.tensor([[7], [7]])).logits

    attempt("prefill_decode", decode)
    attempt("one_token_step", one_token)
    return found


def _targets(example: Example) -> torch.Tensor:
    labels = example.tokens.clone()
    labels[0] = -100
    return labels


def _clone_grads(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}


def separate_gradients(model: torch.nn.Module, calls: list[Call]) -> dict[str, torch.Tensor]:
    """Gradients of the mean loss over each call's targets, examples run one by one."""
    model.zero_grad(set_to_none=True)
    for call in calls:
        count = sum(len(e.tokens) - 1 for e in call.examples)
        for e in call.examples:
            if len(e.tokens) < 2:
                continue
            logits = separate(model, e)
            loss = torch.nn.functional.cross_entropy(logits[:-1], e.tokens[1:], reduction="sum")
            (loss / count).backward()
    return _clone_grads(model)


def packed_loss(model: torch.nn.Module, call: Call) -> torch.Tensor:
    labels = torch.full_like(call.kwargs["input_ids"], -100)
    for e in call.examples:
        labels[e.row, e.start : e.start + len(e.tokens)] = _targets(e)
    return model(**call.kwargs, labels=labels).loss


def compare_gradients(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> Cell:
    missing = sorted(set(want) - set(got))
    if missing:
        return {"status": "wrong", "detail": f"no gradient for {missing[:3]}"}
    worst = max((got[n] - g).abs().max().item() for n, g in want.items())
    if math.isnan(worst):
        worst = float("inf")
    return {"status": "right" if worst < LIMIT else "wrong", "error": worst}


def gradients(
    model: torch.nn.Module, references: dict[str, dict[str, torch.Tensor]]
) -> dict[str, Cell]:
    """Plain, both kinds of activation checkpointing, and two forwards before their backwards."""
    first, second = _positions(TWO), _positions([[3, 5, 12], [9, 9, 2]], seed=7)
    cells: dict[str, Cell] = {}

    def attempt(name: str, calls: list[Call]) -> None:
        try:
            model.zero_grad(set_to_none=True)
            losses = [packed_loss(model, c) for c in calls]
            for loss in losses:
                loss.backward()
            cells[name] = compare_gradients(_clone_grads(model), references[str(len(calls))])
        except fa2_pack_patch.Fa2PackPatchError as raised:
            cells[name] = {"status": "refused", "detail": _short(raised)}
        except Exception as raised:
            cells[name] = {"status": "error", "detail": _short(raised)}

    model.train()
    attempt("plain", [first])
    attempt("two_forwards", [first, second])
    for name, reentrant in (("checkpoint", False), ("checkpoint_reentrant", True)):
        try:
            if compat.release() >= compat.Version("4.36"):
                model.gradient_checkpointing_enable(
                    gradient_checkpointing_kwargs={"use_reentrant": reentrant}
                )
            elif reentrant:
                model.gradient_checkpointing_enable()
            else:
                continue
        except Exception as raised:
            cells[name] = {"status": "error", "detail": _short(raised)}
            continue
        model.enable_input_require_grads()
        attempt(name, [first, second])
        model.disable_input_require_grads()
        model.gradient_checkpointing_disable()
    model.eval()
    model.zero_grad(set_to_none=True)
    return cells


def perturbation(model: torch.nn.Module, family: str) -> Cell:
    """Change one example's tokens: no other example may change at all."""
    call = _positions(TWO)
    try:
        with torch.no_grad():
            before = model(**call.kwargs).logits
            changed = copy.deepcopy(call)
            target = changed.examples[1]
            ids = changed.kwargs["input_ids"]
            at = slice(target.start, target.start + len(target.tokens))
            ids[target.row, at] = (ids[target.row, at] + 11) % 90 + 3
            after = model(**changed.kwargs).logits
    except Exception as raised:
        return {"status": "error", "detail": _short(raised)}
    worst = 0.0
    for n, e in enumerate(call.examples):
        if n != 1:
            span = slice(e.start, e.start + len(e.tokens))
            worst = max(worst, (before[e.row, span] - after[e.row, span]).abs().max().item())
    limit = MOE_NOISE if family in MOE else 0.0
    return {"status": "right" if worst <= limit else "wrong", "error": worst}


def measure(case: Any, implementation: str, fast: bool = False) -> dict[str, Any]:
    """All cells of one family, loaded as one implementation."""
    try:
        model, broken = models.build(case, implementation), None
    except Exception as raised:
        if "does not support an attention implementation" in str(raised):
            raise
        return {"stock_broken": _short(raised)}
    reference, alone = References(model), model
    packed = [k for k in KINDS if k.outcome == "right"]
    quiet = [k for k in KINDS if k.outcome == "unchanged"]
    try:
        for kind in packed:
            for example in kind.make(model).examples:
                reference(example)
    except Exception as raised:
        if implementation == "eager":
            return {"stock_broken": _short(raised)}
        # Stock cannot run one example (flash in 4.34 casts fp32 to fp16, Gemma 2's of 4.47 fails):
        # the same weights loaded as eager stand for it.
        off = WINDOW_OFF.get(case.family, {})  # whose flash and eager windows differ
        broken, alone = _short(raised), models.build(case, "eager", **off)
        model = models.build(case, implementation, **off)
        reference = References(alone)
    stock = {k.name: run_packed(model, k, reference) for k in packed}
    before = {k.name: outcome(model, k) for k in quiet}
    torch.manual_seed(0)
    generated = generations(model)
    first, second = _positions(TWO), _positions([[3, 5, 12], [9, 9, 2]], seed=7)
    try:
        alone.train()
        wanted = {"1": separate_gradients(alone, [first])}
    except Exception as raised:  # StableLM's flash class of 4.38 cannot train, for one
        broken, alone = _short(raised), models.build(case, "eager").train()
        wanted = {"1": separate_gradients(alone, [first])}
    wanted["2"] = separate_gradients(alone, [first, second])
    alone.eval()
    model.eval()
    model.zero_grad(set_to_none=True)

    try:
        fa2_pack_patch.apply(model, allow_unverified=True)  # a new minor is run to be verified
    except fa2_pack_patch.Fa2PackPatchError as raised:
        return {"refused": _short(raised), "stock": stock}
    patched = {k.name: run_packed(model, k, reference) for k in packed}
    for kind in quiet:
        patched[kind.name] = same(before[kind.name], outcome(model, kind))
    torch.manual_seed(0)
    for name, tokens in generations(model).items():
        patched[name] = same(generated[name], tokens)
    for kind in KINDS:
        if kind.outcome == "refused":
            patched[kind.name] = run_refused(model, kind)
    result = {
        "patched": patched,
        "stock": stock,
        "gradients": gradients(model, wanted),
        "perturbation": perturbation(model, case.family),
    }
    if broken:
        result["stock_broken"] = broken
    fa2_pack_patch.revert(model)
    again = [same(before[k.name], outcome(model, k)) for k in quiet]
    still = [run_packed(model, k, reference)["status"] for k in packed]
    equal = all(c["status"] == "unchanged" for c in again)
    equal = equal and still == [stock[k.name]["status"] for k in packed]
    result["revert"] = {"status": "unchanged" if equal else "wrong"}
    return result


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--release")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--families", help="comma-separated; all by default")
    parser.add_argument("--implementations", default="eager,sdpa,flash_attention_2")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    from .standin import activate

    activate.activate()
    import transformers

    if options.release and transformers.__version__ != options.release:
        sys.exit(f"transformers {transformers.__version__} is importable, not {options.release}")
    transformers.logging.set_verbosity_error()
    version = compat.release()
    began = time.time()
    families: dict[str, dict[str, Any]] = {}
    chosen = options.families.split(",") if options.families else list(models.FAMILIES)
    wanted = options.implementations.split(",")
    for name in chosen:
        case = models.FAMILIES[name]
        if not models.available(case, str(version)):
            continue
        families[name] = {}
        for implementation in models.implementations(case, str(version)):
            if implementation not in wanted:
                continue
            try:
                families[name][implementation] = measure(case, implementation)
            except Exception as raised:
                if "does not support an attention implementation" in str(raised):
                    continue
                families[name][implementation] = {"crash": _short(raised)}
                logging.disable(logging.NOTSET)
                import traceback

                traceback.print_exc()
    result = {
        "release": str(version),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "seconds": round(time.time() - began, 1),
        "families": families,
    }
    if options.out:
        options.out.write_text(compact(result), encoding="utf-8")
    bad = 0
    for name, by_implementation in families.items():
        for implementation, cells in by_implementation.items():
            for cell, value in _walk(cells):
                if value.get("status") in ("wrong", "error"):
                    bad += 1
                    print(f"{name}/{implementation}/{cell}: {value}")
            if "crash" in cells or "refused" in cells:
                bad += 1
                print(f"{name}/{implementation}: {cells.get('crash') or cells.get('refused')}")
    print(f"{version}: {result['seconds']} s, {bad} bad cells")
    return 1 if bad else 0


def compact(result: dict[str, Any]) -> str:
    """The kept form: kinds grouped by status, the largest errors, details only of faults."""
    families: dict[str, dict[str, Any]] = {}
    for name, by_implementation in result["families"].items():
        families[name] = {}
        for implementation, cells in by_implementation.items():
            families[name][implementation] = kept = {}
            for key in ("stock_broken", "crash", "refused"):
                if cells.get(key):
                    kept[key] = cells[key]
            for group in ("patched", "stock", "gradients"):
                by_status: dict[str, list[str]] = {}
                for kind, cell in sorted(cells.get(group, {}).items()):
                    by_status.setdefault(cell["status"], []).append(kind)
                    if group != "stock" and cell["status"] in ("wrong", "error"):
                        kept.setdefault("faults", {})[f"{group}.{kind}"] = cell
                kept[group] = by_status
                errors = [c["error"] for c in cells.get(group, {}).values() if "error" in c]
                if group != "stock" and errors:
                    kept[f"{group}_error"] = float(f"{max(errors):.1e}")
            for key in ("perturbation", "revert"):
                if key in cells:
                    kept[key] = cells[key]["status"]
            if "perturbation" in cells:
                kept["perturbation_error"] = float(f"{cells['perturbation'].get('error', 0):.1e}")
    head = {k: result[k] for k in ("release", "torch", "python")}
    lines = [json.dumps(head)[:-1] + ', "families": {']
    rows = []
    for name, by_implementation in families.items():
        inner = ",\n".join(
            f"  {json.dumps(i)}: {json.dumps(c, sort_keys=True)}"
            for i, c in by_implementation.items()
        )
        rows.append(f" {json.dumps(name)}: {{\n{inner}\n }}")
    return lines[0] + "\n" + ",\n".join(rows) + "\n}}\n"


def _walk(cells: dict[str, Any]) -> list[tuple[str, Cell]]:
    found = []
    for group in ("patched", "gradients"):
        found += [(f"{group}.{k}", v) for k, v in cells.get(group, {}).items()]
    for name in ("perturbation", "revert"):
        if name in cells:
            found.append((name, cells[name]))
    return found


if __name__ == "__main__":
    sys.exit(main())
