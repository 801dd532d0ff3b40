"""Corners of the matrix's machinery: what raises, what crashed, what could not be installed."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any, Callable

import pytest

from tests.matrix import releases, render, run

FAKE = """
import argparse, json, pathlib, sys
p = argparse.ArgumentParser()
p.add_argument("--release"); p.add_argument("--out")
o = p.parse_args()
if o.release == "9.9.8":
    print("the cells fell over"); sys.exit(3)
status = "wrong" if o.release == "9.9.9" else "right"
cells = {"patched": {status: ["rows"]}, "stock": {"wrong": ["rows"]}, "gradients": {},
         "perturbation": "right", "revert": "unchanged"}
pathlib.Path(o.out).write_text(json.dumps({"release": o.release, "torch": "2", "python": "3",
    "families": {"llama": {"sdpa": cells}}}))
print(f"{o.release}: {status}"); sys.exit(status == "wrong")
"""


def result(cells: dict[str, Any], release: str = "4.43.4") -> dict[str, Any]:
    return {"release": release, "torch": "2", "python": "3", "families": {"llama": {"sdpa": cells}}}


def good(**more: Any) -> dict[str, Any]:
    return {
        "patched": {"right": ["rows"]}, "stock": {"wrong": ["rows"]}, "gradients": {},
        "perturbation": "right", "revert": "unchanged", **more,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("stock", "sign"),
    [
        ([{"right": ["rows"]}, {"right": ["rows"]}], "✅"),
        ([{"wrong": ["rows"]}, {"wrong": ["rows"]}], "❌"),
        ([{"wrong": ["rows"]}, {"right": ["rows"]}], "1/2"),
        ([{"error": ["rows"]}, {"error": ["rows"]}], "raises"),
        ([{"error": ["rows"]}, {"right": ["rows"]}], "✅, 1 raise"),
        ([{"error": ["rows"]}, {"wrong": ["rows"]}], "❌, 1 raise"),
        ([{"wrong": ["ones"]}], "–"),
        ([], "–"),
    ],
)
def test_stock_that_raises_is_not_shown_as_right(stock: list[dict[str, Any]], sign: str) -> None:
    families = {f"family{n}": {"sdpa": {"stock": cells}} for n, cells in enumerate(stock)}
    assert render.stock_share({"families": families}, "rows", "sdpa") == sign


@pytest.mark.parametrize(
    ("cells", "sign"),
    [
        (good(), "✅"),
        (good(perturbation="wrong"), "❌"),
        (good(revert="wrong"), "❌"),
        (good(gradients={"error": ["plain"]}), "❌"),
        (good(patched={"refused": ["rows"]}), "(✅)"),
        ({"crash": "X: y"}, "❌"),
        ({"refused": "no", "stock": {"wrong": ["rows"]}}, "❌"),
        ({"stock_broken": "X: y", "patched": {}, "stock": {}, "gradients": {}}, "–"),
    ],
)
def test_the_sign_and_the_count_of_bad_cells_agree(cells: dict[str, Any], sign: str) -> None:
    one = result(cells)
    assert render.family_cell(one, "llama") == sign
    assert (render.counts([one])["bad"] > 0) == (sign == "❌")


def gpu_model(**changes: Any) -> dict[str, Any]:
    row = {"right": 3, "worst": {"logits": 0.5}, "wrong": {}}
    return {"own": {}, **{k: changes.get(k, row) for k in render.KERNELS}}


@pytest.mark.parametrize(
    ("model", "sign"),
    [
        (gpu_model(), "✅"),
        (gpu_model(torch_flash={"refused": "no softcap"}), "✅ not `torch_flash`"),
        (gpu_model(sdpa={"right": 2, "worst": {}, "wrong": {"rows": {}}}), "❌"),
        (gpu_model(flash_attn={"right": 0, "worst": {}, "wrong": {}, "fault": "X"}), "❌"),
        ({"fault": "X: y"}, "❌"),
    ],
)
def test_the_gpu_s_signs(model: dict[str, Any], sign: str) -> None:
    models = {"llama/eager/tiny": gpu_model(), "llama/sdpa/tiny": model}
    one = {"machine": "M", "torch": "2", "flash_attn": "2", "transformers": "5", "models": models}
    assert render.gpu_cell(one, "llama") == sign and render.gpu_cell(one, "phi") == "–"
    page = "\n".join(render.gpu([one]))
    assert f"| `llama` | {sign} |" in page
    assert (" 0 wrong" in page) == (sign != "❌")


def proof(*passed: bool) -> dict[str, Any]:
    found = {s: {"passed": p, "nearest": 0.5} for s, p in zip(render.STATES, passed)}
    return found


def test_proofs_on_a_gpu_are_counted() -> None:
    models = {
        "a": proof(False, True, False),
        "b": proof(False, True, True),
        "c": {"refused": "no such dtype"},
    }
    models["llama-1b/sdpa/published/bfloat16/sdpa"] = proof(False, True, False)
    models["llama-1b/sdpa/published/bfloat16/sdpa"]["patched"].update(seconds=7.4, gib=2.46)
    one = {"machine": "a GPU", "torch": "2", "transformers": "5.24.0", "models": models}
    page = "\n".join(render.proofs([one]))
    assert "of 3 models it passed 0 as they were loaded, 3 patched, and 1 patched whose" in page
    assert "On the shape of `llama-1b` it took 7 s and 2.5 GiB beside the weights" in page
    assert "could not be run" not in page
    models["d"] = {"fault": "X"}
    assert "1 could not be run, as stock neither: X." in "\n".join(render.proofs([one]))
    assert render.proofs([]) == []


def test_adjacent_equal_releases_share_a_column() -> None:
    page = render.render([result(good(), r) for r in ("4.43.4", "4.44.0", "4.44.2")])
    assert "| family | 4.43.4 … 4.44.2 |" in page
    assert page == render.render([result(good(), r) for r in ("4.43.4", "4.44.0", "4.44.2")])


def test_releases_are_ordered_as_versions(tmp_path: Path) -> None:
    for release in ("5.10.4", "5.9.0", "4.57.6"):
        (tmp_path / f"{release}.json").write_text(json.dumps(result(good(), release)))
    assert [r["release"] for r in render.load(tmp_path)] == ["4.57.6", "5.9.0", "5.10.4"]


def test_a_stale_page_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "4.43.4.json").write_text(json.dumps(result(good())))
    monkeypatch.setattr(render, "RESULTS", tmp_path)
    monkeypatch.setattr(render, "TARGET", tmp_path / "page.md")
    assert render.main([]) == 0
    assert render.main(["--check"]) == 0
    (tmp_path / "page.md").write_text("old")
    assert render.main(["--check"]) == 1
    assert "python -m tests.matrix.render" in capsys.readouterr().out


def test_a_crash_is_a_difference() -> None:
    assert run.difference(result(good()), result(good(crash="X: y"))) == [
        "4.43.4 llama/sdpa/crash: kept absent, now yes"
    ]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The runner over made-up cells, without installing anything."""
    (tmp_path / "fake_cells.py").write_text(FAKE)
    kept = tmp_path / "kept"
    kept.mkdir()

    def folder(version: str) -> Path:
        if version == "9.9.7":
            raise RuntimeError("no such release")
        return tmp_path

    monkeypatch.setattr(releases, "folder", folder)
    monkeypatch.setattr(run, "RESULTS", kept)

    def call(*arguments: str) -> int:
        return run.main(["--cells-module", "fake_cells", "--out", str(kept), *arguments])

    return call


def test_one_failure_does_not_stop_the_others(
    fake: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert fake("--releases", "9.9.6") == 0
    assert fake("--releases", "9.9.7,9.9.8,9.9.9,9.9.6") == 1
    said = capsys.readouterr().out
    assert "no such release" in said
    assert "the cells fell over" in said
    assert "matrix: 1 passed, 3 failed ['9.9.7', '9.9.8', '9.9.9']" in said


def test_check_tells_a_stale_and_a_missing_result(
    fake: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fake("--releases", "9.9.6", "--check") == 1
    assert "9.9.6: no kept result" in capsys.readouterr().out
    kept = tmp_path / "kept" / "9.9.6.json"
    kept.write_text(json.dumps(result(good(patched={"refused": ["rows"]}), "9.9.6")))
    before = kept.read_text()
    assert fake("--releases", "9.9.6", "--check") == 1
    assert "llama/sdpa/patched/rows: kept refused, now right" in capsys.readouterr().out
    assert kept.read_text() == before
    kept.write_text(json.dumps(result(good(), "9.9.6")))
    assert fake("--releases", "9.9.6", "--check") == 0


def test_add_wants_the_whole_version(fake: Callable[..., int]) -> None:
    with pytest.raises(SystemExit):
        fake("--add", "9.9")


def test_a_folder_is_made_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def install(target: Path, requirements: list[str]) -> None:
        if requirements[0].startswith("transformers=="):
            info = target / f"transformers-{requirements[0][14:]}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text("Requires-Dist: tokenizers<0.20,>=0.19\n")
        elif (tmp_path / "broken").exists():
            raise RuntimeError("network")
        else:
            assert requirements == ["tokenizers<0.20,>=0.19"]
            (target / "tokenizers").mkdir()

    monkeypatch.setattr(releases, "install", install)
    where = tmp_path / "folders"
    (tmp_path / "broken").touch()
    with pytest.raises(RuntimeError, match="network"):
        releases.folder("4.43.4", where)
    assert list(where.iterdir()) == []
    (tmp_path / "broken").unlink()
    made: list[Path] = []
    threads = [
        threading.Thread(target=lambda: made.append(releases.folder("4.43.4", where)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [where / "4.43.4"] * 4
    assert [p.name for p in where.iterdir()] == ["4.43.4"]
    assert (where / "4.43.4" / "tokenizers").is_dir()
    assert (where / "4.43.4").stat().st_mode & 0o777 == 0o755


def test_pip_stands_in_for_uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(releases.shutil, "which", lambda _name: None)
    assert releases.installer()[1:4] == ["-m", "pip", "install"]
    (tmp_path / "uv").touch()
    assert releases.installer()[0] == str(tmp_path / "uv")


def test_the_environment_chooses_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FA2_PACK_PATCH_RELEASES", "/somewhere")
    assert releases.root() == Path("/somewhere")
    monkeypatch.delenv("FA2_PACK_PATCH_RELEASES")
    assert releases.root() == releases.ROOT / ".cache" / "releases"


def test_the_headline_adds_up() -> None:
    n = render.counts([result(good(patched={"right": ["rows"], "stock_error": ["filled_cache"]}))])
    parts = ("right", "unchanged", "refused", "stock_error", "bad")
    assert n["cells"] == sum(n[p] for p in parts) == 4
