"""Whatever is passed ends right, unchanged, as stock raises, or in one of our errors.

``tests/hostile`` makes the calls, says what must come of them and judges; ``tests/fuzz.py`` runs
them by the hundred thousand. Here Hypothesis looks for small ones, and what they found is kept.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fa2_pack_patch import PackedLayout, PackingError, hooks
from fa2_pack_patch.boundaries import read_boundaries
from fa2_pack_patch.reading import _bits, to_host
from fa2_pack_patch.runs import CURRENT, Run
from fa2_pack_patch.varlen import VarlenLayout
from tests.fuzz import fuzz
from tests.hostile.inputs import DTYPES, EXTREME, UNSIGNED, Cache, Hostile, hostile
from tests.hostile.judge import Bench
from tests.hostile.oracle import examples, verdict
from tests.hostile.source import Drawn, Seeded

QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
ROWS = torch.arange(8).view(1, 8)
RESETS = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
CU = torch.tensor([0, 3, 8], dtype=torch.int32)
LENGTHS = {"cu_seq_lens_q": CU, "cu_seq_lens_k": CU, "max_length_q": 5, "max_length_k": 5}


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench()


def ends(bench: Bench, kind: str, model: str = "causal", **kwargs: Any) -> None:
    kwargs.setdefault("input_ids", ROWS)
    outcome = bench.run(Hostile(kwargs, model))
    assert outcome.kind == kind, outcome


def raised(bench: Bench, model: str = "causal", **kwargs: Any) -> str:
    ends(bench, "refused", model, **kwargs)
    with pytest.raises(PackingError) as caught:
        bench.patched[model](**{"input_ids": ROWS, **kwargs})
    return str(caught.value)


@settings(max_examples=400, deadline=None, suppress_health_check=QUIET, derandomize=True)
@given(data=st.data())
def test_any_call_ends_right_or_in_our_error(bench: Bench, data: st.DataObject) -> None:
    call = hostile(Drawn(data))
    outcome = bench.run(call)
    assert outcome.kind != "bad", (outcome.detail, call)


def test_a_thousand_fuzzed_calls() -> None:
    result = fuzz(1000, seed=2)
    assert result["outcomes"].get("bad", 0) == 0, result["bad"]
    for kind in ("right", "unchanged", "refused", "raises as stock", "no values"):
        assert result["outcomes"][kind] > 10, result["outcomes"]


def test_the_kept_result_is_of_a_hundred_thousand_calls() -> None:
    kept = json.loads((Path(__file__).parent / "hostile" / "result.json").read_text())
    assert kept["count"] >= 100_000
    assert kept["outcomes"].get("bad", 0) == 0
    assert sum(kept["outcomes"].values()) == kept["count"]


@pytest.mark.parametrize(
    "fault", ["boundary", "row_start", "mixed", "another_error", "left_behind"]
)
def test_the_judge_would_notice(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    bench = Bench()
    real = PackedLayout.from_lengths.__func__

    def wrong(cls: type, lengths: Any, **more: Any) -> PackedLayout:
        lengths = list(lengths)
        if fault == "boundary" and len(lengths) > 1 and lengths[0] > 1:
            lengths[:2] = [lengths[0] - 1, lengths[1] + 1]
        if fault == "row_start" and len(lengths) > 1:
            lengths[-2:] = [lengths[-2] + lengths[-1]]
            more["padding"] = None
        if fault == "another_error" and len(lengths) > 2:
            raise IndexError("of our own")
        return real(cls, lengths, **more)

    if fault in ("boundary", "row_start", "another_error"):
        monkeypatch.setattr(PackedLayout, "from_lengths", classmethod(wrong))
    elif fault == "mixed":
        monkeypatch.setattr(hooks, "read_boundaries", lambda *a, **k: None)
    else:
        refuse = hooks.check_options

        def leaving(*given: Any) -> None:
            CURRENT.set(object())  # type: ignore[arg-type]
            refuse(*given)

        monkeypatch.setattr(hooks, "check_options", leaving)
    try:
        kinds = [bench.run(hostile(Seeded(f"judge/{n}"))).kind for n in range(60)]
    finally:
        CURRENT.set(None)
    assert "bad" in kinds


def test_thousands_of_examples_in_a_row(bench: Bench) -> None:
    lengths = [1 + i % 2 for i in range(3000)]
    ids = torch.randint(0, 32, (1, sum(lengths)), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    ends(bench, "right", input_ids=ids, position_ids=positions)


# The layout against the oracle.

numbers = st.sampled_from([0, 1, 2, 3, *EXTREME])


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[int]], Optional[list[list[int]]]]:
    rows, tokens = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    small = st.integers(0, 4)
    ids = draw(
        st.lists(
            st.lists(st.one_of(small, small, numbers), min_size=tokens, max_size=tokens),
            min_size=rows, max_size=rows,
        )
    )  # fmt: skip
    masks = st.lists(
        st.lists(st.integers(0, draw(st.integers(1, 3))), min_size=tokens, max_size=tokens),
        min_size=rows, max_size=rows,
    )  # fmt: skip
    return ids, draw(st.one_of(st.none(), masks))


@settings(max_examples=500, deadline=None)
@given(batch=batches())
def test_boundaries_are_the_oracles(batch: tuple[Any, Any]) -> None:
    ids, mask = batch
    found = examples(len(ids), len(ids[0]), ids, mask)
    given_mask = None if mask is None else torch.tensor(mask)
    for always in (False, True):
        try:
            got = read_boundaries(torch.tensor(ids), given_mask, always=always)
        except PackingError:
            assert found.contradiction or (found.packed and found.hole)
            continue
        assert not found.contradiction
        if got is None:
            assert not found.packed
            assert not always
        else:
            assert (got.lengths, got.padding) == (found.lengths, found.padding)
            assert not (found.packed and found.hole)
    layout = None
    try:
        layout = PackedLayout.from_position_ids(torch.tensor(ids), given_mask)
    except PackingError:
        return
    whole = layout.cu_seqlens
    assert (layout.lengths, layout.padding) == (tuple(found.lengths), tuple(found.padding))
    assert whole.tolist() == [sum(found.lengths[:i]) for i in range(len(found.lengths) + 1)]
    again = PackedLayout.from_cu_seqlens(whole, tokens=layout.tokens)
    assert again.lengths == layout.lengths
    owner = [i for i, n in enumerate(layout.lengths) for _ in range(n)]
    mask_wanted = [[a == b and j <= i for j, b in enumerate(owner)] for i, a in enumerate(owner)]
    assert layout.mask().tolist() == mask_wanted


anything = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3),
    st.lists(st.one_of(st.integers(-3, 9), st.floats(), st.none(), st.text(max_size=2)), max_size=6),
)  # fmt: skip


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    values = draw(st.lists(numbers, min_size=64, max_size=64))
    count = 1
    for n in shape:
        count *= n
    tensor = torch.tensor(values[:count]).reshape(shape).to(draw(st.sampled_from(DTYPES)))
    change = draw(st.sampled_from(["none", "none", "none", "meta", "sparse", "strided"]))
    if change == "meta":
        return tensor.to("meta")
    if change == "sparse" and tensor.dim() and tensor.dtype not in UNSIGNED:
        return tensor.to_sparse()
    if change == "strided" and tensor.dim() > 1:
        return tensor.mT.contiguous().mT
    return tensor


@settings(max_examples=500, deadline=None)
@given(one=st.one_of(tensors(), anything), other=st.one_of(st.none(), tensors()))
def test_a_layout_of_anything_is_one_or_our_error(one: Any, other: Any) -> None:
    makers = [
        lambda: PackedLayout.from_position_ids(one, other),
        lambda: PackedLayout.from_segment_ids(one),
        lambda: PackedLayout.from_cu_seqlens(one),
        lambda: PackedLayout.from_cu_seqlens(one, tokens=4),
        lambda: PackedLayout.from_lengths(one),
        lambda: PackedLayout.from_batch({"position_ids": one, "attention_mask": other}),
        lambda: PackedLayout.from_batch({"attention_mask": one}),
        lambda: PackedLayout.from_batch({"cu_seq_lens_q": one, "attention_mask": other}),
        lambda: PackedLayout.from_batch({"cu_seq_lens_q": one, "input_ids": other}),
    ]
    for make in makers:
        try:
            layout = make()
        except PackingError:
            continue
        assert layout.lengths
        assert min(layout.lengths) > 0
        assert layout.cu_seqlens.dtype == torch.int32
        assert int(layout.cu_seqlens[-1]) == layout.tokens == sum(layout.lengths)
        assert layout.max_seqlen == max(layout.lengths)


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    flags=st.lists(st.booleans(), min_size=6, max_size=6),
    side=st.sampled_from(["right", "left"]),
    other=tensors().filter(lambda t: t.dtype not in UNSIGNED and not t.is_sparse and not t.is_meta),
)
def test_taking_apart_and_together(
    lengths: list[int], flags: list[bool], side: str, other: torch.Tensor
) -> None:
    flags = [False, *flags[1 : len(lengths)]]
    layout = PackedLayout.from_lengths(lengths, padding=flags)
    tokens = torch.arange(1, layout.tokens + 1)
    parts = layout.split(tokens)
    assert [len(p) for p in parts] == [n for n, pad in zip(lengths, flags) if not pad]
    assert layout.gather_last(tokens).tolist() == [int(p[-1]) for p in parts]
    padded, mask = layout.pad(tokens, side=side)
    assert padded[mask != 0].tolist() == torch.cat(parts).tolist()
    real = torch.tensor([not f for f in flags]).repeat_interleave(torch.tensor(lengths))
    assert torch.equal(layout.unpad(padded, side=side), tokens * real)
    for use in (layout.split, layout.gather_last, layout.pad, layout.unpad):
        try:
            use(other)
        except PackingError as error:
            assert str(tuple(other.shape)) in str(error)


# What was found, one by one.


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        (RESETS.tolist(), "a list: [[0, 1, 2, 0, 1, 2, 3, 4]]"),
        (RESETS.numpy(), "a ndarray"),
        (RESETS.to_sparse(), "torch.sparse_coo"),
        (RESETS.to(torch.complex64), "torch.complex64"),
        (RESETS.float(), "torch.float32 of shape (1, 8)"),
    ],
    ids=["list", "numpy", "sparse", "complex", "float"],
)
def test_positions_that_are_no_tensor_of_integers(bench: Bench, ids: Any, says: str) -> None:
    assert says in raised(bench, position_ids=ids)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32])
def test_unsigned_positions_and_segments(bench: Bench, dtype: torch.dtype) -> None:
    ends(bench, "right", position_ids=RESETS.to(dtype))
    ends(bench, "right", attention_mask=torch.tensor([[1, 1, 1, 2, 2, 2, 3, 0]]).to(dtype))


def test_positions_and_padding_laid_out_by_columns(bench: Bench) -> None:
    """It ended in torch's error of a view."""
    ids, mask = RESETS.repeat(2, 1), torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0]]).repeat(2, 1)
    across = ids.t().contiguous().t()
    ends(bench, "right", input_ids=ROWS.repeat(2, 1), position_ids=across, attention_mask=mask)


@pytest.mark.parametrize("kind", ["labels", "shift_labels"])
def test_labels_elsewhere_than_an_input_without_values(bench: Bench, kind: str) -> None:
    ends(bench, "no values", input_ids=ROWS.to("meta"), position_ids=RESETS, **{kind: ROWS})


@pytest.mark.parametrize("name", list(LENGTHS))
def test_lengths_that_hold_no_values(bench: Bench, name: str) -> None:
    given = torch.as_tensor(LENGTHS[name], device="meta")
    assert "meta" in raised(bench, **{**LENGTHS, name: given})


def test_all_lengths_on_meta_after_a_call_with_lengths(bench: Bench) -> None:
    """They were left to be checked at the next call, which cannot read them either."""
    model = bench.patched["causal"]
    model(input_ids=ROWS, **LENGTHS)
    moved = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in LENGTHS.items()}
    assert "meta" in raised(bench, input_ids=ROWS.to("meta"), **moved)
    ends(bench, "right", position_ids=RESETS)


def test_positions_that_hold_no_values_are_the_models_business(bench: Bench) -> None:
    call = {"position_ids": RESETS.to("meta"), "attention_mask": torch.ones(1, 8)}
    ends(bench, "no values", **call)
    ends(bench, "no values", input_ids=ROWS.to("meta"), **call)


@pytest.mark.parametrize("value", ["long", float("nan"), float("inf"), 2.5, [9], torch.ones(2)])
def test_longest_examples_that_are_no_number(bench: Bench, value: Any) -> None:
    assert "max_length_q must be a Python int" in raised(
        bench, **{**LENGTHS, "max_length_q": value}
    )


@pytest.mark.parametrize("value", [[0, "x"], "0 3 8", [0, [1]], object()], ids=str)
def test_lengths_that_are_no_numbers(bench: Bench, value: Any) -> None:
    said = raised(bench, **{**LENGTHS, "cu_seq_lens_q": value, "cu_seq_lens_k": value})
    assert f"a {type(value).__name__}" in said


def test_lengths_as_a_list(bench: Bench) -> None:
    ends(bench, "right", **{**LENGTHS, "cu_seq_lens_q": [0, 3, 8], "cu_seq_lens_k": (0, 3, 8)})


def test_one_segment_id_with_resets_is_contradictory(bench: Bench) -> None:
    """It was taken for a call that is not packed, and mixed."""
    mask = torch.full((1, 8), 2)
    assert "contradictory" in raised(bench, position_ids=RESETS, attention_mask=mask)


def test_segment_ids_beyond_int64_stay_apart_or_are_refused(bench: Bench) -> None:
    """As int64 they were all one number."""
    mask = torch.tensor([[1e30, 1e30, 1e30, 2e30, 2e30, 2e30, 2e30, 2e30]])
    with pytest.raises(PackingError, match="segment ids 0, 1, 2"):
        bench.patched["causal"](input_ids=ROWS, attention_mask=mask)


def test_a_mask_of_fractions_on_a_call_that_is_not_packed(bench: Bench) -> None:
    mask = torch.tensor([[0.5, 1.0, 1.0, -1.0, 1.0, 1.0, 1.0, 1.0]])
    ends(bench, "unchanged", position_ids=ROWS, attention_mask=mask)
    assert "0.5" in raised(bench, position_ids=RESETS, attention_mask=mask)


@pytest.mark.parametrize("tokens", [0, 3])
def test_lengths_do_not_hide_a_packed_call_with_a_cache(bench: Bench, tokens: int) -> None:
    """generate() passes both, so the lengths say nothing then; the positions still do."""
    call = {**LENGTHS, "position_ids": RESETS, "past_key_values": Cache(tokens)}
    ends(bench, "refused", **call)


def test_a_run_of_one_example_does_not_catch_a_plain_call(bench: Bench) -> None:
    """Its positions 0, 1, … are those of any call; found by value, the plain call raised."""
    cu = torch.tensor([0, 8], dtype=torch.int32)
    lengths = {**LENGTHS, "cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 8}
    model = bench.patched["causal"]
    alive = model(input_ids=ROWS, **{**lengths, "max_length_k": 8})
    assert alive.logits.requires_grad
    ends(bench, "unchanged", input_ids=ROWS.expand(2, 8))


def test_a_run_with_positions_over_its_boundaries_does_not_catch_a_plain_call(
    bench: Bench,
) -> None:
    """Also not when its lengths were not read, as on a GPU: the plain call was packed like it."""
    model = bench.patched["causal"]
    layout = VarlenLayout(CU, 5, 8)
    run = Run(layout, ROWS, 8, model.model._fa2_pack_patch)
    runs = model.model._fa2_pack_patch.runs
    runs.bind(ROWS.clone(), run)
    ends(bench, "unchanged", position_ids=ROWS.clone())
    assert not run.distinct
    assert Run(layout, RESETS, 5, model).distinct


@pytest.mark.parametrize("mask", [0, 1])
def test_a_dynamic_rope_and_nothing_but_padding(bench: Bench, mask: int) -> None:
    cu = torch.tensor([0, 8], dtype=torch.int32)
    call = {**LENGTHS, "cu_seq_lens_q": cu, "cu_seq_lens_k": cu}
    call.update(max_length_q=8, max_length_k=8, attention_mask=torch.full((1, 8), mask))
    ends(bench, "right", "dynamic", **call)


def test_a_dynamic_rope_and_the_largest_position(bench: Bench) -> None:
    """One more than it wrapped around to the smallest, and passed for short."""
    ids = RESETS.clone()
    ids[0, 2] = 2**63 - 1
    assert str(2**63 - 1) in raised(bench, "dynamic", position_ids=ids)


def test_inputs_of_another_rank(bench: Bench) -> None:
    assert "(1, 8, 1)" in raised(bench, input_ids=ROWS[..., None], position_ids=RESETS)


def test_labels_in_other_rows(bench: Bench) -> None:
    two = {"input_ids": ROWS.view(2, 4), "position_ids": torch.tensor([[0, 1, 0, 1]] * 2)}
    assert "(4, 2)" in raised(bench, **two, labels=ROWS.view(4, 2))
    ends(bench, "right", **two, labels=ROWS.view(2, 4))
    for odd in (ROWS.to_sparse(), ROWS.to(torch.uint32), ROWS.float()):
        assert str(odd.dtype) in raised(bench, position_ids=RESETS, labels=odd)


def test_a_mask_that_no_one_can_read(bench: Bench) -> None:
    mask = torch.ones(1, 8)
    for odd, says in ((mask.to_sparse(), "sparse"), (mask.to(torch.complex64), "complex64")):
        assert says in raised(bench, position_ids=RESETS, attention_mask=odd)
        ends(bench, "refused", position_ids=RESETS, attention_mask=odd, past_key_values=Cache(0))


def test_no_digit_is_lost_on_the_way_from_a_device() -> None:
    """Positions around 2**53 went through float64 and met; a mask must stay the fraction it is."""
    ids = torch.tensor([[2**53, 2**53 + 1, 2**63 - 1, -(2**63)]])
    assert _bits(ids).tolist() == ids.flatten().tolist()
    mask = torch.tensor([[0.1, 1.0, float("inf"), -0.0]])
    assert torch.equal(_bits(mask).view(torch.float64).float(), mask.flatten())
    flags = torch.tensor([[True, False]])
    host = to_host(ids.int(), flags, {"cu_seq_lens_q": CU.to(torch.int16), "cu_seq_lens_k": [0, 3]})
    assert [host[0].dtype, host[1].dtype] == [torch.int64, torch.bool]
    assert [t.dtype for t in host[2] if t is not None] == [torch.int64, torch.int64]


def test_lengths_on_the_cpu_for_a_model_that_is_not(bench: Bench) -> None:
    """After a first call they were taken for tensors on its device, and met the others there."""
    import copy

    away = copy.deepcopy(bench.patched["causal"]).to("meta")
    away.model._fa2_pack_patch.explicit_seen = True
    for ids in (None, RESETS):
        out = away(input_ids=ROWS.to("meta"), position_ids=ids, **LENGTHS)
        assert out.logits.shape == (1, 8, 32)
    with pytest.raises(PackingError, match=r"\[0, 3, 9\]"):
        cu = torch.tensor([0, 3, 9], dtype=torch.int32)
        away(input_ids=ROWS.to("meta"), **{**LENGTHS, "cu_seq_lens_q": cu, "cu_seq_lens_k": cu})


def test_the_verdicts_are_the_readmes() -> None:
    """The oracle itself, on what the README says."""
    mask = torch.tensor([[1, 1, 2, 2, 3, 0, 0, 0]])
    cases = [
        ({"position_ids": RESETS}, "packed", [3, 5]),
        ({"position_ids": ROWS}, "stock", []),
        ({"attention_mask": mask}, "packed", [2, 2, 1, 3]),
        ({"attention_mask": mask > 0}, "stock", []),
        ({**LENGTHS, "position_ids": ROWS}, "packed", [3, 5]),
        ({**LENGTHS, "attention_mask": mask}, "refused", []),
        ({"position_ids": RESETS, "use_cache": True}, "refused", []),
    ]
    for more, kind, lengths in cases:
        found = verdict(Hostile({"input_ids": ROWS, **more}))
        assert (found.kind, found.lengths) == (kind, lengths), more
