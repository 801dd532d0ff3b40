"""Runs a hostile call on a patched model and on its unpatched twin, and judges what came."""

from __future__ import annotations

import copy
import re
import traceback
from dataclasses import dataclass
from typing import Any, Optional

import torch

import fa2_pack_patch as fpp
from fa2_pack_patch.runs import CURRENT
from fa2_pack_patch.tensors import quote

from .inputs import HIDDEN, VOCAB, Cache, Hostile
from .oracle import ROPE_LIMIT, VARLEN, Verdict, verdict

LIMIT = 1e-4
_COMPARED = ("logits", "last_hidden_state", "loss")
_AMONG_PACKED = ("return_dict", "output_hidden_states")


@dataclass
class Outcome:
    """``kind``: "right", "unchanged", "raises as stock", "no values", "refused", or "bad"."""

    kind: str
    detail: str = ""


def _model(**options: Any) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, attn_implementation="sdpa", **options,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


class Bench:
    """Patched models, their unpatched twins, and a good call that must go on working."""

    def __init__(self) -> None:
        scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
        dynamic = {"max_position_embeddings": ROPE_LIMIT, "rope_scaling": scaling}
        self.patched = {"causal": _model(), "dynamic": _model(**dynamic)}
        self.stock = {"causal": _model(), "dynamic": _model(**dynamic)}
        for model in self.patched.values():
            fpp.apply(model, kernel="sdpa")
        for models in (self.patched, self.stock):
            models["base"] = models["causal"].model
        ids = torch.arange(9)[None] % VOCAB
        self.good = {"input_ids": ids, "position_ids": torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2, 3]])}
        self.wanted = {name: self._good(name) for name in self.patched}

    def _good(self, name: str) -> torch.Tensor:
        model = self.patched[name]
        _fresh_rope(model)
        with torch.no_grad():
            return model(**self.good)[0]

    def run(self, call: Hostile) -> Outcome:
        """Judge one call. Never raises: what should not be is "bad"."""
        expected = verdict(call)
        versions = [(v, v._version) for v in call.kwargs.values() if isinstance(v, torch.Tensor)]
        patched = _outcome(self.patched[call.model], call, call.kwargs)
        try:
            result = self._judge(call, expected, patched)
        except Exception:
            result = Outcome("bad", f"the judge: {traceback.format_exc(limit=-4)}")
        if any(v._version != before for v, before in versions):
            result = Outcome("bad", "one of the caller's tensors was written to")
        if isinstance(patched, Exception):
            broken = self._broken(call.model)
            result = Outcome("bad", broken) if broken else result
        return result

    def _broken(self, name: str) -> Optional[str]:
        """Whether a call that failed left something behind."""
        if CURRENT.get() is not None:
            return "a run is still in force"
        try:
            if torch.equal(self._good(name), self.wanted[name]):
                return None
        except Exception as error:
            return f"after the failing call a good one raises {error!r}"
        return "after the failing call a good one gives something else"

    def _judge(self, call: Hostile, expected: Verdict, patched: Any) -> Outcome:
        if isinstance(patched, fpp.Fa2PackPatchError):
            return self._refused(call, expected, patched)
        if expected.kind == "refused" and not isinstance(patched, Exception):
            return Outcome("bad", f"silent: {expected.why}")
        if isinstance(patched, Exception):
            return self._raised(call, expected, patched)
        if expected.kind == "packed":
            return self._right(call, expected, patched)
        if expected.kind == "void":
            return Outcome("no values")
        stock = self._stock(call)
        if isinstance(stock, Exception):
            return Outcome("bad", f"stock raises {stock!r}, patched does not")
        difference = _difference(stock, patched)
        return Outcome("bad", difference) if difference else Outcome("unchanged")

    def _stock(self, call: Hostile, without: tuple[str, ...] = ()) -> Any:
        kwargs = {k: v for k, v in call.kwargs.items() if k not in without}
        return _outcome(self.stock[call.model], call, kwargs)

    def _refused(self, call: Hostile, expected: Verdict, error: Exception) -> Outcome:
        if not quotes(str(error), call, expected):
            return Outcome("bad", f"quotes nothing of what was given: {error}")
        if expected.kind == "packed":
            return Outcome("bad", f"a good packed call was refused: {error}")
        if expected.kind == "stock" and not isinstance(self._stock(call), Exception):
            return Outcome("bad", f"a call that is not packed was refused: {error}")
        return Outcome("refused")

    def _raised(self, call: Hostile, expected: Verdict, error: Exception) -> Outcome:
        frames = [
            f for f in traceback.extract_tb(error.__traceback__) if "/torch/" not in f.filename
        ]
        where = frames[-1].filename
        if "fa2_pack_patch/" in where.replace("tests/", "") and "interceptors" not in where:
            return Outcome("bad", f"{error!r} from {where}:{frames[-1].lineno}")
        if expected.kind == "void":
            return Outcome("no values")
        stock = self._stock(call)
        if expected.kind == "packed" and type(stock) is not type(error):
            # Without what it does not take (1-D positions, segment ids of odd dtypes).
            stock = self._stock(call, ("position_ids", "attention_mask", *VARLEN))
        if type(stock) is type(error):
            return Outcome("raises as stock")
        return Outcome("bad", f"raises {error!r}, stock gives {_brief(stock)}")

    def _right(self, call: Hostile, expected: Verdict, patched: dict[str, Any]) -> Outcome:
        got = patched.get("logits", patched.get("last_hidden_state"))
        want = self._separate(call, expected)
        keep = call.kwargs.get("logits_to_keep")
        real = torch.tensor([not p for p in expected.padding]).repeat_interleave(
            torch.tensor(expected.lengths)
        )
        whole, real = want, real.view(want.shape[:2])
        if keep:
            want, real = want[:, -keep:], real[:, -keep:]
        if got.shape != want.shape:
            return Outcome("bad", f"shape {tuple(got.shape)}, separate {tuple(want.shape)}")
        error = _distance(got[real], want[real])
        if not error <= LIMIT:
            return Outcome("bad", f"{error} from the separate examples")
        labels = call.kwargs.get("labels")
        if (
            "loss" in patched
            and not keep
            and bool((labels.reshape(real.shape)[~real] == -100).all())
        ):
            error = _distance(patched["loss"], _loss(whole, labels, expected))
            if not error <= LIMIT:
                return Outcome("bad", f"the loss is {error} off")
        return Outcome("right")

    def _separate(self, call: Hostile, expected: Verdict) -> torch.Tensor:
        """What the unpatched model gives for each example alone, as one batch again."""
        ids, name = call.kwargs.get("input_ids"), "input_ids"
        if ids is None:
            ids, name = call.kwargs["inputs_embeds"], "inputs_embeds"
        rows, tokens = ids.shape[:2]
        lengths = torch.tensor(expected.lengths)
        starts = lengths.cumsum(0) - lengths
        places = torch.cat([torch.arange(n) for n in expected.lengths])
        if expected.positions is not None:
            places = torch.tensor(expected.positions).reshape(-1)
        flat, model = ids.flatten(0, 1), self.stock[call.model]
        width = HIDDEN if call.model == "base" else VOCAB
        result = torch.full((rows * tokens, width), float("nan"))
        real = [i for i, pad in enumerate(expected.padding) if not pad]
        groups: dict[Any, list[int]] = {}
        for i in real:  # examples of one length go together; rope by length, alone
            groups.setdefault(i if call.model == "dynamic" else expected.lengths[i], []).append(i)
        for members in groups.values():
            at = starts[members][:, None] + torch.arange(expected.lengths[members[0]])
            _fresh_rope(model)
            with torch.no_grad():
                # With a mask: without one, recent releases take a jump forward for a boundary.
                mask = torch.ones_like(at)
                out = model(
                    **{name: flat[at]},
                    position_ids=places[at],
                    attention_mask=mask,
                    use_cache=False,
                )[0]
            result[at] = out.detach()
        return result.view(rows, tokens, width)


def _outcome(model: torch.nn.Module, call: Hostile, kwargs: dict[str, Any]) -> Any:
    """The tensors that came, or the exception."""
    kwargs = dict(kwargs)
    for name, value in kwargs.items():
        if isinstance(value, Cache):
            kwargs[name] = _cache(model, value.tokens)
    args: list[Any] = []
    if call.positional:
        args = [kwargs.pop(n, None) for n in ("input_ids", "attention_mask", "position_ids")]
    _fresh_rope(model)
    try:
        with torch.no_grad():
            out = model(*args, **kwargs)
    except Exception as error:
        return error
    if isinstance(out, tuple):
        label = "logits" if call.model != "base" else "last_hidden_state"
        tensors = [o for o in out if isinstance(o, torch.Tensor)]
        names = ["loss", label] if len(tensors) > 1 else [label]
        return dict(zip(names, tensors))
    found = {n: out[n] for n in _COMPARED if out.get(n) is not None}
    cache = out.get("past_key_values")
    if cache is not None:
        found["cached"] = torch.tensor(cache.get_seq_length())
    return found


_CACHES: dict[tuple[int, int], Any] = {}


def _cache(model: torch.nn.Module, tokens: int) -> Any:
    from transformers import DynamicCache

    key = id(model), tokens
    if key not in _CACHES:
        _CACHES[key] = DynamicCache()
        if tokens:
            with torch.no_grad():
                out = model(input_ids=torch.arange(tokens)[None], use_cache=True)
            _CACHES[key] = out.past_key_values
    return copy.deepcopy(_CACHES[key])


def _fresh_rope(model: torch.nn.Module) -> None:
    """A dynamic rope remembers the longest call: forget it."""
    rope = getattr(model, "model", model).rotary_emb
    if rope.rope_type == "dynamic":
        rope.inv_freq = rope.original_inv_freq
        rope.max_seq_len_cached = rope.original_max_seq_len


def _difference(stock: dict[str, Any], patched: dict[str, Any]) -> str:
    if stock.keys() != patched.keys():
        return f"stock gives {sorted(stock)}, patched {sorted(patched)}"
    for name, value in stock.items():
        other = patched[name]
        if value.shape != other.shape or value.dtype != other.dtype:
            return f"{name} is of another shape or dtype"
        if not value.is_meta and not torch.equal(value.nan_to_num(7.0), other.nan_to_num(7.0)):
            return f"{name} differs from stock by {_distance(other, value)}"
    return ""


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference, relative to values above one; nan and inf must be the same."""
    if not torch.equal(one.isfinite(), other.isfinite()):
        return float("inf")
    one, other = one.nan_to_num(0.0, 0.0, 0.0), other.nan_to_num(0.0, 0.0, 0.0)
    scale = other.abs().max().clamp(min=1) if other.numel() else 1
    return float(((one - other).abs().max() / scale) if one.numel() else 0.0)


def _loss(logits: torch.Tensor, labels: torch.Tensor, expected: Verdict) -> torch.Tensor:
    lengths = torch.tensor(expected.lengths)
    wanted = labels.reshape(-1).clone()
    wanted[lengths.cumsum(0) - lengths] = -100
    flat = logits.flatten(0, 1)
    return torch.nn.functional.cross_entropy(flat[:-1], wanted[1:].long())


def quotes(message: str, call: Hostile, expected: Verdict) -> bool:
    """Whether a message shows something that the caller gave."""
    shown = [quote(expected.lengths)] if expected.lengths else []
    for name, value in call.kwargs.items():
        shown.append(f"{name}=True")
        shown.append(type(value).__name__ if value is not None else f"missing ['{name}'")
        if isinstance(value, torch.Tensor):
            shown += [str(tuple(value.shape)), str(value.dtype), f"device {value.device}"]
            if not value.is_meta and not value.is_sparse:
                shown += [quote(value), quote(value.flatten())]
                shown += [quote(row) for row in value] if value.dim() == 2 else []
        elif not isinstance(value, Cache):
            listed = hasattr(value, "tolist") or isinstance(value, tuple)
            shown.append(
                quote([int(v) for v in value]) if listed and name in VARLEN else str(value)
            )
        if name in message and name in ("head_mask", "encoder_hidden_states"):
            return True
    numbers = re.search(r"lengths \[\d|row \d+: |example \d+ reaches position", message)
    return bool(numbers) or any(text and text in message for text in shown)


def _brief(result: Any) -> str:
    if isinstance(result, Exception):
        return repr(result)[:200]
    return str({k: tuple(v.shape) for k, v in result.items()})
