"""Generation of a patched model is stock's, with every kind of cache and of padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fa2_pack_patch as fpp

Build = Callable[..., Any]
PADDED = torch.tensor([[0, 0, 0, 5, 6, 7], [4, 8, 9, 5, 6, 7]])
MASK = (PADDED != 0).long()
WHOLE = torch.tensor([[4, 8, 9, 5, 4, 8, 9, 5]])


def positions_of(mask: torch.Tensor, pad: int) -> torch.Tensor:
    """Counted over real tokens, as generate does; padding has position ``pad``."""
    return (mask.cumsum(-1) - 1).masked_fill(mask == 0, pad)


def static_cache(model: Any) -> Any:
    kind = pytest.importorskip("transformers").StaticCache
    try:
        return kind(config=model.config, max_cache_len=24)
    except TypeError:  # until 4.54 or so it is told more
        return kind(model.config, 2, 24, "cpu", dtype=torch.float32)


def chat(model: Any, draft: Any, *, pad: int, static: bool = False) -> torch.Tensor:
    """Turns of a chat that are padded on the left each, over one cache."""
    options: dict[str, Any] = {"use_cache": True}
    if static:
        options["past_key_values"] = static_cache(model)
        options["cache_position"] = torch.arange(6)
    positions = positions_of(MASK, pad)
    out = model(input_ids=PADDED, attention_mask=MASK, position_ids=positions, **options)
    mask, found = MASK, [out.logits]
    for _ in range(2):
        options["past_key_values"] = out.past_key_values
        turn = torch.tensor([[0, 0, 0, 5], [7, 8, 9, 6]])
        mask = torch.cat([mask, (turn != 0).long()], 1)
        if static:
            options["cache_position"] = torch.arange(mask.shape[1] - 4, mask.shape[1])
        positions = positions_of(mask, pad)[:, -4:]
        out = model(input_ids=turn, attention_mask=mask, position_ids=positions, **options)
        found.append(out.logits)
    return torch.cat(found, 1)


def tree(model: Any, draft: Any) -> torch.Tensor:
    """Two drafts of two tokens side by side over a cache, told apart by a 4-D mask."""
    cache = model(input_ids=WHOLE, use_cache=True).past_key_values
    sees = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]])
    sees = torch.cat([torch.ones(4, 8, dtype=torch.long), sees], 1)
    mask = torch.zeros(1, 1, 4, 12).masked_fill(sees == 0, torch.finfo(torch.float32).min)
    positions = torch.tensor([[8, 9, 8, 9]])
    given = {"input_ids": WHOLE[:, :4], "position_ids": positions, "attention_mask": mask}
    return model(**given, past_key_values=cache, use_cache=True).logits  # type: ignore[no-any-return]


def generate(**given: Any) -> Callable[[Any, Any], torch.Tensor]:
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, **given}

    def run(model: Any, draft: Any) -> torch.Tensor:
        more = {"assistant_model": draft} if options.get("assisted") else {}
        return model.generate(**{k: v for k, v in options.items() if k != "assisted"}, **more)  # type: ignore[no-any-return]

    return run


PADDED_CALL = {"input_ids": PADDED, "attention_mask": MASK}
WAYS: dict[str, Callable[[Any, Any], torch.Tensor]] = {
    "assisted": generate(input_ids=WHOLE, assisted=True),
    "assisted, padded": generate(input_ids=PADDED[:1], attention_mask=MASK[:1], assisted=True),
    "prompt lookup": generate(input_ids=WHOLE, prompt_lookup_num_tokens=3),
    "beams": generate(**PADDED_CALL, num_beams=2),
    "positions of its own": generate(**PADDED_CALL, position_ids=positions_of(MASK, 0)),
    "no cache": generate(**PADDED_CALL, use_cache=False),
    "static": generate(**PADDED_CALL, cache_implementation="static"),
    "chat, padding at 0": lambda m, d: chat(m, d, pad=0),
    "chat, padding at 1": lambda m, d: chat(m, d, pad=1),
    "chat, static, padding at 1": lambda m, d: chat(m, d, pad=1, static=True),
    "tree": tree,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_as_stock(build: Build, implementation: str, way: str) -> None:
    def run(patched: bool) -> Any:
        model, draft = build("llama", implementation), build("llama", implementation, seed=1)
        if patched:
            fpp.apply(model)
            fpp.apply(draft)
        with torch.no_grad():
            return WAYS[way](model, draft)

    try:
        wanted = run(patched=False)
    except Exception as error:
        if isinstance(error, fpp.Fa2PackPatchError):
            raise
        pytest.skip(f"this release does not: {type(error).__name__}: {error}"[:200])
    assert torch.equal(run(patched=True), wanted)
