"""Rotary embeddings whose phases depend on the row, where packed may differ from separate.

Default, linear, yarn and llama3 rotary embeddings take each token's phase from its own position and
are right by themselves. Dynamic NTK rescales every phase by the longest position of the call, and
longrope picks its factors by it, so one long example would change its neighbours.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Optional

import torch

from .copies import Alone
from .errors import PackingError
from .layout import PackedLayout
from .runs import current

if TYPE_CHECKING:
    from .patch import Patch


@dataclass(frozen=True)
class RopeRule:
    """``kind`` is "dynamic" or "longrope"; beyond ``limit`` positions the phases change."""

    kind: str
    limit: int


def rope_rule(config: Any) -> Optional[RopeRule]:
    """The rule of a model's config, or None when its rope treats each token by itself."""
    for holder in (getattr(config, "rope_scaling", None), getattr(config, "rope_parameters", None)):
        for raw in _flatten(holder):
            kind = raw.get("rope_type", raw.get("type"))
            if kind == "dynamic":
                original = raw.get("original_max_position_embeddings")
                return RopeRule("dynamic", int(original or config.max_position_embeddings))
            if kind in ("longrope", "su"):
                limit = (
                    getattr(config, "original_max_position_embeddings", None)
                    or raw.get("original_max_position_embeddings")
                    or config.max_position_embeddings
                )
                return RopeRule("longrope", int(limit))
    return None


def _flatten(holder: Any) -> list[dict[str, Any]]:
    if not isinstance(holder, dict):
        return []
    nested = [v for v in holder.values() if isinstance(v, dict)]
    return nested or [holder]


def check_lengths(
    rule: RopeRule, layout: PackedLayout, reach: Sequence[int], base: Optional[torch.nn.Module]
) -> None:
    """Refuse a call in which one example would change its neighbours' phases.

    Args:
        rule: the model's rule.
        layout: the examples of the call.
        reach: each example's largest position plus one.
        base: the model, whose rotary modules may still hold the phases of a longer call.

    Raises:
        PackingError: names the example.
    """
    real = [i for i in range(layout.examples) if not (layout.padding and layout.padding[i])]
    longest = max(real, key=lambda i: reach[i])
    if reach[longest] == rule.limit:
        _check_at_limit(rule, base, [i for i in real if reach[i] != rule.limit], longest)
    if reach[longest] <= rule.limit:
        return
    if rule.kind == "dynamic":
        others = [i for i in real if reach[i] != reach[longest]]
        effect = "rescales the rotary phases of the whole call by its longest example"
    else:
        others = [i for i in real if reach[i] <= rule.limit]
        effect = "switches the whole call to its long factors for its longest example"
    if others:
        raise PackingError(
            f"example {longest} reaches position {reach[longest] - 1}, beyond the {rule.limit} "
            f"positions up to which this model's {rule.kind} rope is constant; the model {effect}, "
            f"which would change example {others[0]} (up to position {reach[others[0]] - 1}) and "
            f"{len(others) - 1} more. Run example {longest} in a call of its own, or with examples "
            + ("of its length." if rule.kind == "dynamic" else "beyond that limit too.")
        )


def _check_at_limit(
    rule: RopeRule, base: Optional[torch.nn.Module], shorter: Sequence[int], longest: int
) -> None:
    """From 4.43 on, only a call that stays below the limit gives a longer call's phases up."""
    if rule.kind != "dynamic" or not shorter or base is None:
        return
    rotary = [m for m in base.modules() if hasattr(m, "original_max_seq_len")]
    cached = [v for m in rotary for n, v in vars(m).items() if n.endswith("max_seq_len_cached")]
    if any(int(tokens) > rule.limit for tokens in cached):
        raise PackingError(
            f"example {longest} takes all {rule.limit} positions up to which this model's dynamic "
            "rope is constant. After a longer call the model keeps that call's rotary phases for "
            f"it, but not for shorter ones, so it would change example {shorter[0]} and "
            f"{len(shorter) - 1} more. Run example {longest} in a call of its own."
        )


class RotaryByExample(Alone):
    """Stands for a rotary module's forward that is told the row's length: tells the example's."""

    def __init__(self, module: torch.nn.Module, patch: Patch) -> None:
        self.module = module
        self.patch = patch
        self.before: Any = None
        self.parameters = tuple(inspect.signature(type(module).forward).parameters)[1:]

    def _parts(self) -> tuple[Patch, torch.nn.Module, str]:
        return self.patch, self.module, "forward"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = current(self.patch)
        if run is None:
            return self._stock(*args, **kwargs)
        call = {**dict(zip(self.parameters, args)), **kwargs}
        if "position_ids" in self.parameters and call.get("position_ids") is None:
            # Phi-3's flash class of 4.44.0 forgets them.
            call["position_ids"] = run.layout_positions(call["x"].device)
        if call.get("seq_len") is not None:
            call["seq_len"] = run.longest
        return self._stock(**call)

    def _stock(self, *args: Any, **kwargs: Any) -> Any:
        if self.before is not None:
            return self.before(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)


def takes_row_length(module: Any) -> bool:
    """Whether a rotary module's forward has a ``seq_len`` argument."""
    if not isinstance(module, torch.nn.Module):
        return False
    return "seq_len" in inspect.signature(type(module).forward).parameters
