"""How often a packed step makes the host wait: once at most, whatever the number of layers."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import fa2_pack_patch
from benchmarks.speed.profile import synchronisations
from tests.matrix import models

LENGTHS = [30, 1, 41, 8]
CUDA = torch.cuda.is_available()

#: What reads a tensor's values on the host: on a GPU each of them waits for the device.
_READS = (
    "item", "tolist", "cpu", "numpy", "nonzero", "masked_select", "unique", "unique_consecutive",
    "equal", "allclose", "__bool__", "__int__", "__float__", "__index__", "__contains__",
)  # fmt: skip


@contextlib.contextmanager
def counting() -> Iterator[collections.Counter[str]]:
    """Counts the reads in all threads (backwards have theirs), also on a CPU, where they are free."""
    found: collections.Counter[str] = collections.Counter()

    def wrapped(name: str) -> Any:
        plain = getattr(torch.Tensor, name)

        def read(self: torch.Tensor, *args: Any, **more: Any) -> Any:
            found[name] += 1
            return plain(self, *args, **more)

        return read

    own = {name: torch.Tensor.__dict__.get(name) for name in _READS}
    for name in _READS:
        setattr(torch.Tensor, name, wrapped(name))
    try:
        yield found
    finally:
        for name, plain in own.items():
            if plain is None:
                delattr(torch.Tensor, name)
            else:
                setattr(torch.Tensor, name, plain)


def batch(*, lengths_given: bool) -> dict[str, Any]:
    where = "cuda" if CUDA else "cpu"
    total = sum(LENGTHS)
    call: dict[str, Any] = {
        "input_ids": torch.arange(3, 3 + total)[None].to(where),
        "position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None].to(where),
        "labels": torch.arange(3, 3 + total)[None].to(where),
        "use_cache": False,
    }
    if lengths_given:
        cu = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32, device=where)
        call.update(cu_seq_lens_q=cu, cu_seq_lens_k=cu.clone())
        call.update(max_length_q=max(LENGTHS), max_length_k=max(LENGTHS))
    return call


def model(family: str, layers: int, checkpointing: bool) -> torch.nn.Module:
    case = models.FAMILIES[family]
    options: dict[str, Any] = {"num_hidden_layers": layers, "max_position_embeddings": 128}
    if "layer_types" in case.options:
        options["layer_types"] = case.options["layer_types"] * (layers // 2)
    found = models.implementations(case, transformers.__version__)
    which = "flash_attention_2" if CUDA else "sdpa" if "sdpa" in found else "eager"
    network = models.build(case, which, vocab_size=128, **options).train()
    if checkpointing:
        network.gradient_checkpointing_enable()  # type: ignore[operator]
    return network.to("cuda", torch.bfloat16) if CUDA else network


def step(network: torch.nn.Module, call: dict[str, Any]) -> Callable[[], object]:
    def run() -> None:
        network(**call).loss.backward()

    return run


#: Flash classes of these releases ask for the last position in every layer, packed or not.
_STOCK_READS = {"mistral": "<4.43", "qwen2": "<4.44"}


def reads(network: torch.nn.Module, call: dict[str, Any]) -> collections.Counter[str]:
    run = step(network, call)
    run()
    with counting() as found:
        run()
    return found


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma", "qwen2"])
def test_reads_do_not_grow_with_the_layers(family: str, checkpointing: bool) -> None:
    """On a CPU: a layer reads nothing but what its release's own code reads in every call."""
    version = transformers.__version__
    if not models.available(models.FAMILIES[family], version):
        assert Version(version) < Version(models.FAMILIES[family].since)
        return
    found = []
    for layers in (2, 6):
        network = model(family, layers, checkpointing)
        fa2_pack_patch.apply(network, kernel="sdpa")
        found.append(reads(network, batch(lengths_given=False)))
    stock = Version(version) in SpecifierSet(_STOCK_READS.get(family, "<4"))
    runs = 2 if checkpointing else 1
    assert found[1] - found[0] == collections.Counter({"item": 4 * runs} if stock else {}), found


def test_a_layer_that_reads_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from fa2_pack_patch import kernels

    network = model("llama", 2, False)
    fa2_pack_patch.apply(network, kernel="sdpa")
    kernel = type(kernels.get("sdpa"))
    plain = kernel.__call__

    def reading(self: Any, query: torch.Tensor, *args: Any, **more: Any) -> Any:
        query.sum().item()
        return plain(self, query, *args, **more)

    run = step(network, batch(lengths_given=False))
    with counting() as before:
        run()
    monkeypatch.setattr(kernel, "__call__", reading)
    with counting() as after:
        run()
    assert after["item"] == before["item"] + 2


@pytest.mark.skipif(not CUDA, reason="counts CUDA's own warnings")
@pytest.mark.parametrize("kernel", ["flash_attn", "torch_flash"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("lengths_given", [False, True], ids=["position_ids", "lengths"])
@pytest.mark.parametrize("layers", [2, 6])
def test_synchronisations(
    layers: int, lengths_given: bool, checkpointing: bool, kernel: str
) -> None:
    network = model("llama", layers, checkpointing)
    fa2_pack_patch.apply(network, kernel=kernel)
    run = step(network, batch(lengths_given=lengths_given))
    found = synchronisations(run, after=lambda: network.zero_grad(set_to_none=True))
    assert found is not None and found <= (0 if lengths_given else 1)
