"""Models and calls that attend in both directions, or by what cannot be packed: refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

import fa2_pack_patch as fpp
from tests.matrix.kinds import Call, _varlen

Build = Callable[..., torch.nn.Module]
RELEASE = Version(transformers.__version__)


def by_config(model: Any) -> None:
    model.config.is_causal = False


def by_layers(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.is_causal = False


def by_the_last_layer(model: Any) -> None:
    model.model.layers[-1].self_attn.is_causal = False


def heeds(change: Callable[[Any], None]) -> bool:
    """Whether stock's masks go by it here."""
    return change is not by_config or Version("5.0.0") < RELEASE


@pytest.mark.parametrize("change", [by_config, by_layers, by_the_last_layer])
def test_before_apply(build: Build, packed: Call, change: Callable[[Any], None]) -> None:
    model = build()
    change(model)
    if heeds(change):
        with pytest.raises(fpp.UnsupportedModelError, match=r"is_causal is [Ff]alse.*give one"):
            fpp.apply(model)
        assert not fpp.supports(model)
        assert change is not by_config or not fpp.supports(model.config)
    else:
        fpp.apply(model)
        model(**packed.kwargs)


@pytest.mark.parametrize("change", [by_config, by_layers])
def test_after_apply(build: Build, packed: Call, change: Callable[[Any], None]) -> None:
    model = build()
    fpp.apply(model)
    change(model)
    if heeds(change):
        with pytest.raises(fpp.PackingError, match=r"since apply, .*is_causal is [Ff]alse"):
            model(**packed.kwargs)
    model(input_ids=packed.kwargs["input_ids"])


def test_after_apply_compiled_with_lengths(build: Build) -> None:
    model = build()
    fpp.apply(model)
    compiled = torch.compile(model, backend="eager")
    call = _varlen([[4, 9, 7]])
    compiled(**call.kwargs)
    by_layers(model)
    with pytest.raises(fpp.PackingError, match="since apply, .*is_causal is false"):
        compiled(**call.kwargs)


@pytest.mark.parametrize("value", [False, 0])
def test_a_call_that_asks_for_both_directions(build: Build, packed: Call, value: Any) -> None:
    model = build()
    fpp.apply(model)
    with pytest.raises(fpp.PackingError, match=f"is_causal={value} cannot go with a packed row"):
        model.model(**packed.kwargs, is_causal=value)


@pytest.mark.skipif(Version("4.48") > RELEASE, reason="the classes of its modules say it")
@pytest.mark.parametrize("name", ["flex_attention", "an_sdpa_by_another_name"])
def test_an_implementation_chosen_after_apply(build: Build, packed: Call, name: str) -> None:
    """No rule says what window it has: Mistral's was lost."""
    model = build("mistral")
    fpp.apply(model)
    functions = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    before = dict(functions)
    try:
        functions.setdefault(name, functions["sdpa"])
        model.config._attn_implementation = name
        with pytest.raises(fpp.PackingError, match=f"since apply, .* is '{name}', which cannot"):
            model(**packed.kwargs)
        model.config._attn_implementation = "eager"
        model(**packed.kwargs)
    finally:
        for key in set(functions) - set(before):
            del functions[key]
