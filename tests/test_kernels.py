"""The kernels against a dense float32 reference, and which of them serves a call."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fa2_pack_patch import KernelUnavailableError, PackedLayout, PackingError, kernels
from fa2_pack_patch.kernels.base import AttentionCall, check_backward_range

LENGTHS = [5, 1, 17, 64, 3]
CALL = AttentionCall(torch.device("cpu"), torch.float32, 4, 2, 16, None, None, 0.0, True)


def dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: PackedLayout,
    scale: float | None,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """(tokens, heads, head_dim) by one full matrix of scores."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * (scale or q.shape[2] ** -0.5)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    seen = layout.mask()
    if window:
        index = torch.arange(len(q), device=q.device)
        seen = seen & (index[:, None] - index < window)
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


def tensors(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: str
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(heads * dim)
    shapes = [(sum(LENGTHS), h, dim) for h in (heads, kv_heads, kv_heads)]
    return [torch.randn(s, generator=generator).to(device, dtype) for s in shapes]


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_sdpa_equals_the_dense_reference(
    heads: tuple[int, int], window: int | None, softcap: float | None, scale: float | None
) -> None:
    q, k, v = (t.requires_grad_() for t in tensors(*heads, 16, torch.float32, "cpu"))
    layout = PackedLayout.from_lengths(LENGTHS)
    options = {"scale": scale, "window": window, "softcap": softcap}
    out = kernels.get("sdpa")(q, k, v, layout, dropout=0.0, **options)
    want = dense(q, k, v, layout, **options)
    assert torch.allclose(out, want, atol=2e-5)
    weights = torch.randn_like(out)
    got = torch.autograd.grad((out * weights).sum(), (q, k, v))
    expected = torch.autograd.grad((want * weights).sum(), (q, k, v))
    for a, b in zip(got, expected):
        assert torch.allclose(a, b, atol=5e-5)


def test_nothing_leaks_between_examples() -> None:
    q, k, v = tensors(4, 2, 16, torch.float32, "cpu")
    layout = PackedLayout.from_lengths(LENGTHS)
    options = {"scale": None, "window": None, "softcap": None, "dropout": 0.0}
    before = kernels.get("sdpa")(q, k, v, layout, **options)
    for t in (q, k, v):
        t[6:23] = float("nan")
    after = kernels.get("sdpa")(q, k, v, layout, **options)
    assert torch.equal(before[:6], after[:6])
    assert torch.equal(before[23:], after[23:])
    assert after[6:23].isnan().any()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("name", ["flash_attn", "flash_attn_3", "torch_flash"])
@pytest.mark.parametrize("dim", [64, 80, 96, 100, 128, 256])
@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (8, 1)])
@pytest.mark.parametrize("window", [None, 16])
def test_flash_kernels_on_a_gpu(
    name: str, dim: int, heads: tuple[int, int], window: int | None
) -> None:
    call = replace(
        CALL, device=torch.device("cuda"), dtype=torch.bfloat16, heads=heads[0],
        kv_heads=heads[1], head_dim=dim, window=window,
    )  # fmt: skip
    kernel = kernels.get(name)
    if kernel.unavailable() or kernel.refuses(call):
        pytest.skip(kernel.unavailable() or "; ".join(kernel.refuses(call)))
    layout = PackedLayout.from_lengths(LENGTHS, device="cuda")
    given = tensors(*heads, dim, torch.bfloat16, "cuda")
    options = {"scale": None, "window": window, "softcap": None}
    exact = [t.float().requires_grad_() for t in given]
    want = dense(*exact, layout, **options)
    weights = torch.randn_like(want)
    want_grads = torch.autograd.grad((want * weights).sum(), exact)
    errors = {}
    for one in (kernel, kernels.get("sdpa")):
        half = [t.clone().requires_grad_() for t in given]
        out = one(*half, layout, dropout=0.0, **options)
        grads = torch.autograd.grad((out * weights).sum(), half)
        pairs = [(out, want), *zip(grads, want_grads)]
        errors[one.name] = [(a.float() - b).abs().max().item() for a, b in pairs]
    for mine, theirs in zip(errors[name], errors["sdpa"]):
        # flash-attention's own rule: no more than twice PyTorch's error in the same precision.
        assert mine <= 2 * theirs + 1e-3


def test_auto_on_a_cpu_is_sdpa() -> None:
    assert kernels.choose("auto", CALL).name == "sdpa"


def test_a_named_kernel_that_cannot_says_why_and_who_can() -> None:
    with pytest.raises(KernelUnavailableError) as caught:
        kernels.choose("torch_flash", replace(CALL, head_dim=512, softcap=30.0))
    text = str(caught.value)
    assert "torch_flash" in text
    assert "heads of 512" in text
    assert "Kernels that can: sdpa" in text


@pytest.mark.parametrize("name", ["torch_flash", "flash_attn", "flash_attn_3"])
def test_flash_kernels_state_every_reason(name: str) -> None:
    reasons = kernels.get(name).refuses(replace(CALL, head_dim=512))
    text = "; ".join(reasons)
    assert "float16 or bfloat16" in text
    assert "at most 256" in text
    assert "CUDA" in text


def test_torch_flash_has_no_softcap() -> None:
    assert any(
        "softcap" in r for r in kernels.get("torch_flash").refuses(replace(CALL, softcap=5.0))
    )


def test_unknown_kernel_is_quoted() -> None:
    with pytest.raises(KernelUnavailableError, match="'flash'.*'auto'"):
        kernels.get("flash")


def test_backward_range() -> None:
    # flash-attention issue 1500: 16 heads of 128 fail from 8129 examples of few tokens on.
    q = torch.empty(0, 16, 128, requires_grad=True)
    fine = PackedLayout.from_lengths([1] * 8000)
    check_backward_range(q, fine)
    check_backward_range(q.detach(), PackedLayout.from_lengths([1] * 9000))
    with pytest.raises(PackingError, match=r"9000 examples.*below 2\*\*31"):
        check_backward_range(q, PackedLayout.from_lengths([1] * 9000))


def test_head_dim_is_rounded_up_for_the_backward_range() -> None:
    layout = PackedLayout.from_lengths([1] * 4200)
    check_backward_range(torch.empty(0, 16, 192, requires_grad=True), layout)
    with pytest.raises(PackingError, match="256"):
        check_backward_range(torch.empty(0, 16, 200, requires_grad=True), layout)
