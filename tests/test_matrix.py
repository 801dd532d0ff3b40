"""The matrix's machinery: metadata, comparison with kept results, rendering."""

from __future__ import annotations

from typing import Any

from tests.matrix import releases, render, run

METADATA = """Requires-Dist: huggingface-hub (<1.0,>=0.14.1)
Requires-Dist: numpy (>=1.17)
Requires-Dist: tokenizers!=0.21.0,<0.22,>=0.21
Requires-Dist: tokenizers<1 ; extra == 'all'
Requires-Dist: huggingface-hub==0.24 ; extra == 'dev'
"""


def result(
    release: str, patched: dict[str, list[str]], stock: dict[str, list[str]]
) -> dict[str, Any]:
    cells = {
        "patched": patched, "stock": stock, "gradients": {"right": ["plain"]},
        "perturbation": "right", "revert": "unchanged", "patched_error": 1e-6,
    }  # fmt: skip
    return {"release": release, "torch": "2", "python": "3", "families": {"llama": {"sdpa": cells}}}


def test_companions_are_read_from_the_wheel() -> None:
    assert releases.companions(METADATA) == [
        "huggingface-hub<1.0,>=0.14.1",
        "tokenizers!=0.21.0,<0.22,>=0.21",
    ]


def test_boundaries_are_releases_and_sorted() -> None:
    assert set(releases.BOUNDARIES) <= set(releases.RELEASES)
    assert sorted(releases.RELEASES, key=render.Version) == releases.RELEASES


def test_every_minor_is_there() -> None:
    minors = {tuple(int(x) for x in r.split(".")[:2]) for r in releases.RELEASES}
    assert minors == {(4, m) for m in range(34, 58)} | {(5, m) for m in range(25)}


def test_a_changed_status_is_shown() -> None:
    kept = result("4.43.4", {"right": ["rows"]}, {"wrong": ["rows"]})
    new = result("4.43.4", {"wrong": ["rows"]}, {"wrong": ["rows"]})
    assert run.difference(kept, kept) == []
    assert run.difference(kept, new) == ["4.43.4 llama/sdpa/patched/rows: kept right, now wrong"]


def test_a_fault_shows_on_the_first_screen() -> None:
    good = result("4.43.4", {"right": ["rows"]}, {"wrong": ["rows"]})
    bad = result("4.44.2", {"wrong": ["rows"]}, {"right": ["rows"]})
    page = render.render([good, bad])
    assert "| `llama` | ✅ | ❌ |" in page
    assert "| two packed rows, position_ids | ❌ | ✅ |" in page


def test_the_page_is_deterministic_and_current() -> None:
    results = render.load(render.RESULTS)
    assert [r["release"] for r in results] == releases.RELEASES
    on_gpu = render.load_gpu(render.GPU)
    assert [r["transformers"] for r in on_gpu] == [
        "4.36.2", "4.43.4", "4.46.3", "4.53.3", "4.57.6", "5.24.0"
    ]  # fmt: skip
    page = render.render(results, on_gpu, render.load_gpu(render.PROOFS))
    assert render.TARGET.read_text(encoding="utf-8") == page


def test_no_kept_cell_is_bad() -> None:
    assert render.counts(render.load(render.RESULTS))["bad"] == 0
