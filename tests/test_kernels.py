"""The kernels against a dense float32 reference, and which of them serves a call."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from fa2_pack_patch import KernelUnavailableError, PackedLayout, PackingError, kernels
from fa2_pack_patch.kernels.base import AttentionCall, check_backward_range

LENGTHS = [5, 1, 17, 64, 3]
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
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


def test_no_gradient_crosses_a_boundary() -> None:
    q, k, v = (t.requires_grad_() for t in tensors(4, 2, 16, torch.float32, "cpu"))
    layout = PackedLayout.from_lengths(LENGTHS)
    out = kernels.get("sdpa")(q, k, v, layout, scale=None, window=None, softcap=None, dropout=0.0)
    for grad in torch.autograd.grad(out[6:23].sum(), (q, k, v)):
        assert grad[:6].count_nonzero() == grad[23:].count_nonzero() == 0
        assert grad[6:23].count_nonzero() > 0


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_sdpa_keeps_the_dtype_under_autocast(softcap: float | None) -> None:
    q, k, v = tensors(4, 2, 16, torch.float32, "cpu")
    layout = PackedLayout.from_lengths(LENGTHS)
    options = {"scale": None, "window": 4, "softcap": softcap, "dropout": 0.0}
    with torch.autocast("cpu", torch.bfloat16):
        assert kernels.get("sdpa")(q, k, v, layout, **options).dtype == torch.float32


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_sdpa_drops_out_what_it_is_told_to(softcap: float | None) -> None:
    q, k, _ = tensors(4, 4, 16, torch.float32, "cpu")
    layout = PackedLayout.from_lengths(LENGTHS)
    torch.manual_seed(0)
    out = kernels.get("sdpa")(
        q, k, torch.ones_like(k), layout, scale=None, window=None, softcap=softcap, dropout=0.5
    )
    # Weights add up to one; with half of them dropped and the rest doubled they no longer do.
    assert set(out[5].flatten().tolist()) <= {0.0, 2.0}  # the example of one token
    assert (out - 1).abs().max() > 0.2
    assert abs(out.mean().item() - 1) < 0.2


def test_sdpa_takes_what_is_not_contiguous() -> None:
    layout = PackedLayout.from_lengths(LENGTHS)
    options: dict[str, Any] = {"scale": None, "window": 4, "softcap": None}
    given = tensors(4, 2, 16, torch.float32, "cpu")
    apart = [t.transpose(0, 2).contiguous().transpose(0, 2) for t in given]
    assert not any(t.is_contiguous() for t in apart)
    out = kernels.get("sdpa")(*apart, layout, dropout=0.0, **options)
    assert torch.allclose(out, dense(*given, layout, **options), atol=2e-5)


def by_cu_seqlens(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu: torch.Tensor, **options: Any
) -> torch.Tensor:
    """What a varlen kernel computes: from cu_seqlens alone, as flash-attn documents it."""
    assert cu.dtype == torch.int32
    parts = []
    for a, b in zip(cu.tolist(), cu.tolist()[1:]):
        one = PackedLayout.from_lengths([b - a])
        parts.append(dense(q[a:b], k[a:b], v[a:b], one, **options))
    return torch.cat(parts)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
) -> torch.Tensor:
    assert causal
    assert type(max_seqlen_q) is int
    assert max_seqlen_q == max_seqlen_k == int(cu_seqlens_q.diff().max())
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    window = window_size[0] + 1 if window_size != (-1, -1) else None
    assert window is None or window_size[1] == 0
    asked.append(deterministic)
    return by_cu_seqlens(
        q, k, v, cu_seqlens_q, scale=softmax_scale, window=window, softcap=softcap or None
    )


asked: list[bool] = []


def old_varlen_func(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any,
    max_seqlen_k: Any, dropout_p: float = 0.0, softmax_scale: Any = None, causal: bool = False,
) -> None:  # fmt: skip
    """The signature of flash-attn before 2.3."""


def varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Torch's public function, by its documentation; its kernel's demands included."""
    assert enable_gqa == (query.shape[1] != key.shape[1])
    assert window_size[1] == 0
    return flash_operator(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, 0.0, True, False,
        scale=scale, window_size_left=window_size[0], window_size_right=0,
    )[0]  # fmt: skip


def flash_operator(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor,
    max_q: int, max_k: int, dropout: float, causal: bool, debug: bool, *, scale: float | None,
    window_size_left: int = -1, window_size_right: int = -1,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    assert causal
    assert not debug
    assert max_q == max_k == int(cu_q.diff().max())
    assert all(t.stride(-1) == 1 and t.shape[-1] % 8 == 0 for t in (q, k, v))
    window = window_size_left + 1 if window_size_left >= 0 else None
    return (by_cu_seqlens(q, k, v, cu_q, scale=scale, window=window, softcap=None),)


@pytest.fixture
def probed_anew() -> Iterator[None]:
    kernels.reset()
    yield
    kernels.reset()


def install(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    module = ModuleType(name)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)
    kernels.reset()


@pytest.mark.usefixtures("probed_anew")
@pytest.mark.parametrize("name", ["flash_attn", "flash_attn_3", "varlen_attn", "operator"])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("scale", [None, 0.7])
# 12 is no multiple of 8: torch's kernel wants zeros, and the scale of 12 all the same.
@pytest.mark.parametrize("dim", [12, 16])
@pytest.mark.parametrize("heads", [(4, 4), (4, 1)])
def test_the_arguments_of_the_flash_kernels(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    window: int | None,
    scale: float | None,
    heads: tuple[int, int],
    dim: int,
) -> None:
    softcap = None
    if name == "flash_attn":
        softcap = 2.0
        install(monkeypatch, name, flash_attn_varlen_func=flash_attn_varlen_func)
        kernel = kernels.get(name)
    elif name == "flash_attn_3":

        def with_lse(
            *args: Any, window_size: tuple[int, int] = (-1, -1), **more: Any
        ) -> tuple[torch.Tensor, None]:
            return flash_attn_varlen_func(*args, window_size=window_size, **more), None

        install(monkeypatch, "flash_attn_interface", flash_attn_varlen_func=with_lse)
        kernel = kernels.get(name)
    else:
        from fa2_pack_patch.kernels import torch_flash

        function = varlen_attn if name == "varlen_attn" else None
        found = (function, frozenset({"cum_seq_q", "window_size_left"}))
        monkeypatch.setattr(torch_flash, "probe", lambda: found)
        monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash_operator)
        kernel = kernels.get("torch_flash")
    layout = PackedLayout.from_lengths(LENGTHS)
    given = tensors(*heads, dim, torch.float32, "cpu")
    apart = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in given]
    options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap}
    out = kernel(*apart, layout, dropout=0.0, **options)
    assert out.shape == given[0].shape
    assert torch.allclose(out, dense(*given, layout, **options), atol=2e-5)


@pytest.mark.usefixtures("probed_anew")
def test_flash_attn_is_deterministic_when_the_environment_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, "flash_attn", flash_attn_varlen_func=flash_attn_varlen_func)
    asked.clear()
    for value in ("0", "1"):
        monkeypatch.setenv("FLASH_ATTENTION_DETERMINISTIC", value)
        kernels.get("flash_attn")(
            *tensors(4, 4, 16, torch.float32, "cpu"), PackedLayout.from_lengths(LENGTHS),
            scale=None, window=None, softcap=None, dropout=0.0,
        )  # fmt: skip
    assert asked == [False, True]


@pytest.mark.usefixtures("probed_anew")
def test_an_old_flash_attn_refuses_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    install(
        monkeypatch, "flash_attn", flash_attn_varlen_func=old_varlen_func, __cpu_stand_in__=True
    )
    kernel = kernels.get("flash_attn")
    assert kernel.unavailable() is None
    assert kernel.refuses(CALL) == []
    reasons = kernel.refuses(replace(CALL, window=4, softcap=2.0, dropout=0.1))
    assert [any(w in r for r in reasons) for w in ("window_size", "softcap", "dropout")] == [
        True
    ] * 3
    assert kernels.choose("auto", CALL).name == "flash_attn"
    assert kernels.choose("auto", replace(CALL, window=4)).name == "sdpa"


@pytest.mark.usefixtures("probed_anew")
def test_a_flash_attn_on_the_cpu_must_say_that_it_is_a_stand_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, "flash_attn", flash_attn_varlen_func=flash_attn_varlen_func)
    assert any("CUDA" in r for r in kernels.get("flash_attn").refuses(CALL))


@pytest.mark.usefixtures("probed_anew")
def test_the_namespace_of_flash_attn_4_is_no_flash_attn(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    kernels.reset()
    reason = kernels.get("flash_attn").unavailable()
    monkeypatch.undo()
    sys.modules.pop("flash_attn", None)
    assert reason is not None
    assert str(tmp_path) in reason
    assert "no flash_attn_varlen_func" in reason


@pytest.mark.usefixtures("probed_anew")
def test_sdpa_by_name_does_not_probe_flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    def probed() -> None:
        raise AssertionError("probed")

    monkeypatch.setattr(kernels.get("flash_attn"), "unavailable", probed)
    assert kernels.choose("sdpa", CALL).name == "sdpa"


@pytest.mark.parametrize(
    ("name", "capability", "change", "word"),
    [
        ("flash_attn", (7, 5), {}, "Ampere"),
        ("torch_flash", (7, 0), {}, "Ampere"),
        ("flash_attn_3", (8, 0), {}, "Hopper"),
        ("flash_attn_3", (9, 0), {"dropout": 0.1}, "dropout"),
        ("torch_flash", (8, 9), {"head_dim": 224}, "backward"),
        ("torch_flash", (8, 9), {"head_dim": 256, "dropout": 0.1}, "backward"),
    ],
)
def test_what_the_gpu_must_be(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    capability: tuple[int, int],
    change: dict[str, Any],
    word: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    call = replace(CALL, device=torch.device("cuda", 0), dtype=torch.bfloat16)
    kernel = kernels.get(name)
    assert any(word in r for r in kernel.refuses(replace(call, **change)))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    if word != "dropout":
        assert kernel.refuses(replace(call, **change)) == []


def test_the_operator_of_this_torch_takes_lengths() -> None:
    from fa2_pack_patch.kernels import torch_flash

    names = torch_flash.probe()[1]
    assert {"cum_seq_q", "cum_seq_k", "max_q", "scale"} <= names
    call = replace(CALL, window=4)
    refused = any("no window" in r for r in kernels.get("torch_flash").refuses(call))
    assert refused == ("window_size_left" not in names)


def gpu_kernel(name: str, call: AttentionCall) -> kernels.Kernel:
    kernel = kernels.get(name)
    reasons = kernel.unavailable() or "; ".join(kernel.refuses(call))
    if reasons:
        pytest.skip(reasons)
    if call.dtype == torch.float16 and name == "flash_attn":
        one = [torch.zeros(8, 1, 64, dtype=call.dtype, device="cuda") for _ in range(3)]
        layout = PackedLayout.from_lengths([8], device="cuda")
        try:
            kernel(*one, layout, scale=None, window=None, softcap=None, dropout=0.0)
        except RuntimeError as error:
            if "bf16" not in str(error) and "bfloat16" not in str(error):
                raise
            pytest.skip(f"this flash-attn was built without float16: {str(error)[:80]}")
    return kernel


def assert_within_twice_the_error(
    kernel: kernels.Kernel,
    given: list[torch.Tensor],
    layout: PackedLayout,
    window: int | None,
    scale: float | None = None,
) -> None:
    """flash-attention's own rule: no more than twice PyTorch's error in the same precision."""
    options: dict[str, Any] = {"scale": scale, "window": window, "softcap": None}
    exact = [t.float().requires_grad_() for t in given]
    want = dense(*exact, layout, **options)
    weights = torch.randn_like(want)
    want_grads = torch.autograd.grad((want * weights).sum(), exact)
    errors = {}
    for one in (kernel, kernels.get("sdpa")):
        half = [t.detach().requires_grad_() for t in given]
        out = one(*half, layout, dropout=0.0, **options)
        assert out.dtype == given[0].dtype
        grads = torch.autograd.grad((out * weights).sum(), half)
        pairs = [(out, want), *zip(grads, want_grads)]
        errors[one.name] = [((a.float() - b).abs().max(), (a.float() - b).norm()) for a, b in pairs]
    unit = torch.finfo(given[0].dtype).eps / 2  # what rounding the exact result would add
    # Of a gradient that is exactly zero, since a window of one key leaves no choice, what the
    # kernels' float32 sums leave over.
    floor = 64 * torch.finfo(torch.float32).eps
    for mine, theirs, exactly in zip(errors[kernel.name], errors["sdpa"], (want, *want_grads)):
        assert mine[0] <= 2 * theirs[0] + unit * exactly.abs().max() + floor * weights.abs().max()
        assert mine[1] <= 2 * theirs[1] + floor * weights.norm()


GPU_CALL = replace(
    CALL, device=torch.device("cuda"), dtype=torch.bfloat16, heads=8, kv_heads=2, head_dim=64
)
FLASH = pytest.mark.parametrize("name", ["flash_attn", "flash_attn_3", "torch_flash"])


@CUDA
@FLASH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 80, 96, 100, 128, 256])
@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (8, 1)])
@pytest.mark.parametrize("window", [None, 1, 16])
def test_flash_kernels_on_a_gpu(
    name: str, dtype: torch.dtype, dim: int, heads: tuple[int, int], window: int | None
) -> None:
    call = replace(
        GPU_CALL, dtype=dtype, heads=heads[0], kv_heads=heads[1], head_dim=dim, window=window
    )
    layout = PackedLayout.from_lengths(LENGTHS, device="cuda")
    given = tensors(*heads, dim, dtype, "cuda")
    assert_within_twice_the_error(gpu_kernel(name, call), given, layout, window)


@CUDA
@FLASH
@pytest.mark.parametrize("window", [None, 1])
def test_examples_of_one_token_on_a_gpu(name: str, window: int | None) -> None:
    # With max_seqlen 1, flash-attention takes another path for grouped-query heads.
    layout = PackedLayout.from_lengths([1] * sum(LENGTHS), device="cuda")
    given = tensors(8, 2, 64, torch.bfloat16, "cuda")
    assert_within_twice_the_error(gpu_kernel(name, GPU_CALL), given, layout, window)


@CUDA
@FLASH
@pytest.mark.parametrize("way", ["fused", "heads_first", "last"])
def test_what_is_not_contiguous_on_a_gpu(name: str, way: str) -> None:
    layout = PackedLayout.from_lengths(LENGTHS, device="cuda")
    q, k, v = tensors(8, 2, 64, torch.bfloat16, "cuda")
    if way == "fused":  # Phi-3 and GPT-NeoX cut q, k and v out of one tensor
        given = list(torch.cat([q, k, v], dim=1).split([8, 2, 2], dim=1))
    else:
        a, b = (0, 1) if way == "heads_first" else (1, 2)
        given = [t.transpose(a, b).contiguous().transpose(a, b) for t in (q, k, v)]
    assert not any(t.is_contiguous() for t in given)
    assert_within_twice_the_error(gpu_kernel(name, GPU_CALL), given, layout, 16, scale=0.3)


@CUDA
@FLASH
def test_nothing_leaks_between_examples_on_a_gpu(name: str) -> None:
    kernel = gpu_kernel(name, GPU_CALL)
    layout = PackedLayout.from_lengths(LENGTHS, device="cuda")
    given = [t.requires_grad_() for t in tensors(8, 2, 64, torch.bfloat16, "cuda")]
    options: dict[str, Any] = {"scale": None, "window": None, "softcap": None, "dropout": 0.0}
    before = kernel(*given, layout, **options)
    for grad in torch.autograd.grad(before[6:23].float().sum(), given):
        assert grad[:6].count_nonzero() == grad[23:].count_nonzero() == 0
        assert grad[6:23].count_nonzero() > 0
    changed = [t.detach().clone() for t in given]
    for t in changed:
        t[6:23] = 7.0
    after = kernel(*changed, layout, **options)
    assert torch.equal(before[:6], after[:6])
    assert torch.equal(before[23:], after[23:])


@CUDA
def test_torch_operator_and_varlen_attn_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of the two this torch has taken, the other one is as right."""
    from fa2_pack_patch.kernels import torch_flash

    kernel = gpu_kernel("torch_flash", replace(GPU_CALL, window=16))
    found = (None, torch_flash.probe()[1])
    monkeypatch.setattr(torch_flash, "probe", lambda: found)
    layout = PackedLayout.from_lengths(LENGTHS, device="cuda")
    for window in (None, 16):
        given = tensors(8, 2, 80, torch.bfloat16, "cuda")
        assert_within_twice_the_error(kernel, given, layout, window)
    ones = PackedLayout.from_lengths([1] * sum(LENGTHS), device="cuda")
    assert_within_twice_the_error(kernel, given, ones, None)


@CUDA
def test_float32_on_a_gpu_is_served_by_sdpa() -> None:
    call = replace(GPU_CALL, dtype=torch.float32)
    assert kernels.choose("auto", call).name == "sdpa"


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


def test_the_backward_range_of_one_head_alone() -> None:
    q = torch.empty(0, 16, 128, requires_grad=True)
    check_backward_range(q, PackedLayout.from_lengths([1] * 9000), each_head=True)
    with pytest.raises(PackingError, match="1 heads"):
        check_backward_range(q, PackedLayout.from_lengths([1] * 131072), each_head=True)


def test_head_dim_is_rounded_up_for_the_backward_range() -> None:
    layout = PackedLayout.from_lengths([1] * 4200)
    check_backward_range(torch.empty(0, 16, 192, requires_grad=True), layout)
    with pytest.raises(PackingError, match="256"):
        check_backward_range(torch.empty(0, 16, 200, requires_grad=True), layout)
