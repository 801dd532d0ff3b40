"""The speed benchmark: every section's smoke run, and the renderer on rows made up here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.speed import bars, measure, plots, render, results, tables
from benchmarks.speed.attention import Shape, row
from benchmarks.speed.old import ratio_row
from benchmarks.speed.profile import added, counted, covered, kind_of, shares

ROOT = Path(__file__).resolve().parents[1]
CELL = "llama-2-7b/t0/b4"

#: Section, cells, and the variants that must have a row without an error.
SMOKE = [
    ("table", "llama-(1b/t0|2-7b/t0/b4)", {"padded_sdpa", "padded_fa2", "stock", "ours", "ours_lengths", "ceiling"}),
    ("large", "34b/t0/b8", {"padded_fa2", "stock", "ours", "ceiling"}),
    ("old", "1b", {"ours_old", "ratio"}),
    ("compiled", "2048", {"stock", "ours", "compiled_default", "compiled_default/check"}),
    ("torch_flash", "32h8kv64d/512|gsm8k/b8", {"flash_attn", "ours", "ours_torch_flash"}),
    ("attention", "32h8.*tok/512", {"flash_attn", "sdpa", "sdpa_mask", "flex_attention"}),
    ("profile", "", {"stock", "ours", "ours_lengths", "ours/layer", "ours/step", "added"}),
]  # fmt: skip


#: All sections in one process: importing Transformers takes longer than running most of them.
DRIVER = """
import json, sys
from benchmarks.speed.__main__ import main
for section, only in json.loads(sys.argv[2]):
    print("exit", section, main([section, "--smoke", "--only", only, "--rounds", "1", "--seconds",
          "20", "--modes", "default", "--out", sys.argv[1]]), flush=True)
"""


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of the results of every section, and what was printed."""
    out = tmp_path_factory.mktemp("speed")
    command = [sys.executable, "-c", DRIVER, str(out), json.dumps([s[:2] for s in SMOKE])]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return out, done.stdout + done.stderr[-2000:]


@pytest.mark.parametrize(("section", "only", "wanted"), SMOKE, ids=[s[0] for s in SMOKE])
def test_smoke(section: str, only: str, wanted: set[str], smoke: tuple[Path, str]) -> None:
    folder, printed = smoke
    assert f"exit {section} 0" in printed, printed[-4000:]
    found = measure.latest(measure.read(folder / f"{section}.jsonl"))
    assert wanted <= {r["variant"] for r in found}
    assert not [r for r in found if r.get("error")]


def test_a_smoke_run_is_no_measurement(smoke: tuple[Path, str]) -> None:
    text = render.markdown(results.load(smoke[0]))
    assert text.startswith("**Some rows are of a `--smoke` run")
    for title, _, _ in render._PARTS.values():
        assert f"## {title}\n" in text


def step(variant: str, rate: float, peak: float, **more: Any) -> dict[str, Any]:
    return {
        "section": "table", "cell": CELL, "variant": variant, "padding_share": 0.6,
        "tokens_per_second": rate, "peak_bytes": peak * 2**30, **more,
    }  # fmt: skip


ROWS: list[dict[str, Any]] = [
    {
        "section": "table", "kind": "machine", "machine": "H200", "torch": "2.11",
        "transformers": "5.17.0", "flash_attn": "2.8.3", "python": "3.12",
    },
    step("ours", 1.0, 1.0),  # replaced by the next
    step("ours", 3000.0, 20.0),
    step("padded_sdpa", 1000.0, 40.0),
    step("padded_fa2", 1500.0, 25.0),
    step("stock", 2500.0, 20.0),
    step("ceiling", 4000.0, 20.0),
    {"section": "table", "cell": CELL, "variant": "losses", "losses": {"a": 1}, "off": 0.02, "same": False},
    {
        "section": "attention", "cell": "alone/32h8kv128d/16384tok/512", "tokens": 16384,
        "length": 512, "heads": 32, "kv_heads": 8,
        **row(Shape(32, 8, 512, 16384), "flash_attn", 1.0, 2.0),
    },
    {
        "section": "attention", "cell": "alone/32h8kv128d/16384tok/512", "tokens": 16384,
        "variant": "flex_attention", "error": "CompileError: no",
    },
    {"section": "old", "cell": CELL, **ratio_row([1.0, 1.0, 1.1], [1.25, 1.0, 1.0], "4.36.2")},
    {"section": "old", "cell": CELL, **ratio_row([0.9], [1.0], "4.43.4")},
    {"section": "old", "cell": CELL, "variant": "ours_old", "release": "4.40.2", "error": "ChildError: died"},
    {"section": "profile", "cell": "host/llama-1b", "release": "5.17.0", "variant": "added", **added({"ours": 95.0, "ours_lengths": 80.0, "stock": 120.0, "varlen_alone": 60.0}, {}, 16)},
    {"section": "profile", "cell": "syncs/llama-1b/plain", "release": "5.17.0", "variant": "ours", "synchronisations": 1, "bar": 1, "passed": True},
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Results as a killed run leaves them: the last line is half-written."""
    lines = [json.dumps(r) for r in ROWS]
    (tmp_path / "speed.jsonl").write_text("\n".join(lines) + '\n{"section": "ta', "utf-8")
    return tmp_path


def test_steps_are_ratios_of_the_latest_rows(folder: Path) -> None:
    line = tables.steps(results.load(folder)["table"]).splitlines()[2]
    cells = [c.strip() for c in line.strip("|").split("|")]
    assert cells == [
        CELL, "60 %", "3,000", "3.00x", "2.00x", "1.20x", "0.75x", "20.0", "0.50x", "0.80x",
    ]  # fmt: skip


def test_a_variant_without_memory_is_named(folder: Path) -> None:
    found = results.load(folder)
    fa2 = next(r for r in found["table"].rows if r["variant"] == "padded_fa2")
    fa2["error"] = "out of memory"
    assert "| 3.00x | out of memory | 1.20x |" in tables.steps(found["table"])


def test_bars_are_judged_as_they_are(folder: Path) -> None:
    found = {b.what: (b.found, b.verdict) for b in bars.judge(results.load(folder))}
    what = f"older release patched / newest stock packed: {CELL}"
    assert found[f"{what}, 4.36.2"] == ("1.000", bars.PASSED)
    assert found[f"{what}, 4.43.4"] == ("0.900", bars.MISSED)
    assert found[what] == ("ChildError: died", bars.UNKNOWN)
    assert found["host time added to an attention layer, 5.17.0"] == ("35.0 µs", bars.MISSED)
    loss = found["padded, stock and patched give one loss (table)"]
    assert loss[1] == bars.MISSED
    assert "2.00 %" in loss[0]
    assert found["padded, stock and patched give one loss (large)"][1] == bars.UNKNOWN
    sync = "host synchronisations of a training step: ours, plain, 5.17.0"
    assert found[sync] == ("1", bars.PASSED)


def test_attention_says_what_failed(folder: Path) -> None:
    text = tables.attention(results.load(folder)["attention"])
    tflops = 3.5 * 4 * 32 * 128 * 32 * 512**2 / 2 / 3e-3 / 1e12
    assert f"| {tflops:.0f} ({100 * tflops / 989:.0f} %) | failed |" in text


def test_the_page_is_written_between_its_markers_and_checked(folder: Path) -> None:
    pytest.importorskip("matplotlib")
    docs = folder / "docs"
    arguments = ["--results", str(folder), "--docs", str(docs)]
    assert render.main([*arguments, "--check"]) == 1
    assert render.main([*arguments, "--write"]) == 0
    assert render.main([*arguments, "--check"]) == 0
    page = docs / "speed.md"
    page.write_text("mine above\n" + page.read_text("utf-8").replace("3.00x", "9.99x"), "utf-8")
    assert render.main([*arguments, "--check"]) == 1
    assert render.main([*arguments, "--write"]) == 0
    assert page.read_text("utf-8").startswith("mine above\n")
    assert "9.99x" not in page.read_text("utf-8")


def test_a_page_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="no markers"):
        render.inserted("# Speed\n", "text")


def test_no_results_is_an_error(tmp_path: Path) -> None:
    assert render.main(["--results", str(tmp_path)]) == 1


def test_plots_are_the_same_bytes_each_time(folder: Path) -> None:
    pytest.importorskip("matplotlib")
    found = results.load(folder)
    first = {p.name: p.read_bytes() for p in plots.write(found, folder / "a")}
    second = {p.name: p.read_bytes() for p in plots.write(found, folder / "b")}
    assert set(first) == {"speed_steps.svg", "speed_memory.svg", "speed_attention.svg"}
    assert first == second
    for image in first.values():
        assert ElementTree.fromstring(image).tag.endswith("svg")
        assert b"<dc:date>" not in image


def test_kernels_are_told_apart_by_name() -> None:
    attention = "void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 64, cutlass::bfloat16_t> >"
    gemm = (
        "nvjet_tst_128x256_64x4_bz_TNT",
        "sm90_xmma_gemm_bf16bf16",
        "cutlass_80_tensorop",
        "aten::addmm",
    )
    assert kind_of(attention) == "attention"
    assert {kind_of(name) for name in gemm} == {"gemm"}
    assert kind_of("void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add>") == "other"
    found = shares([(attention, 1.0), (gemm[0], 2.0), ("copy", 0.5), ("copy", 0.5)])
    assert (found["attention_share"], found["gemm_share"], found["other_share"]) == (
        0.25,
        0.5,
        0.25,
    )
    with pytest.raises(RuntimeError, match="no kernel"):
        shares([])


def test_covered_time_counts_overlaps_once() -> None:
    assert covered([(0, 2), (1, 3), (1, 2), (5, 6)]) == 4


def test_the_notice_of_the_debug_mode_is_no_synchronisation() -> None:
    call = "called a synchronizing CUDA operation (Triggered internally at CUDAFunctions.cpp:148.)"
    notice = "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing operations"
    assert counted([notice, call, "another warning", call]) == 2


def test_what_is_added_is_the_dearest_over_the_cheapest() -> None:
    micro = {
        "stock": 90.0,
        "stock_lengths": 70.0,
        "varlen_alone": 60.0,
        "ours": 80.0,
        "ours_lengths": 85.0,
    }
    whole = {"stock": 1600.0, "ours": 1280.0}
    found = added(micro, whole, layers=16)
    assert found["layer_us"] == 25.0
    assert found["passed"]
    assert found["ours_minus_stock_us"] == -10.0
    assert found["ours_minus_stock_step_us_a_layer"] == -20.0
    assert not added({**micro, "ours": 90.0}, whole, 16)["passed"]


def test_the_count_of_operations() -> None:
    assert Shape(2, 1, 4, 8, 16).flops() == 4 * 2 * 16 * (2 * 16) / 2
