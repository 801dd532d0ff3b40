"""The command line as a user meets it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from fa2_pack_patch import cli, compat, registry, twin
from tests import readme
from tests.matrix import models, run


def test_env_can_be_pasted(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["env"]) == 0
    said = capsys.readouterr().out
    for word in ("transformers: ", "torch: ", "kernel sdpa: available", "kernel flash_attn: "):
        assert word in said


def test_families_lists_the_registry(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["families"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1 + len(registry.families())
    assert any(line.startswith("Falcon") and "alibi=True" in line for line in said)


def test_the_readmes_generated_parts_are_current() -> None:
    text = readme.README.read_text(encoding="utf-8")
    assert readme.current(text) == text, "README.md is stale: run python -m tests.readme"
    assert all(family.title in text for family in registry.families().values())


@pytest.mark.parametrize(
    ("config", "status", "says"),
    [
        ({"model_type": "llama"}, 0, "supported (family llama"),
        ({"model_type": "falcon", "alibi": True}, 1, "alibi=True"),
        ({"model_type": "gpt2"}, 1, "'gpt2' is not in the registry"),
    ],
)
def test_check(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    config: dict[str, object],
    status: int,
    says: str,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert cli.main(["check", str(tmp_path)]) == status
    assert says in capsys.readouterr().out


def test_check_of_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "no/such/folder"]) == 2
    assert "no/such/folder" in capsys.readouterr().err


def test_unknown_command_is_wrong_use() -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["frobnicate"])
    assert caught.value.code == 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    models.build(models.FAMILIES["llama"], "eager").save_pretrained(path)
    return str(path)


def test_verify_of_a_folder(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", folder, "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "fa2_pack_patch: llama, 2 attention layers" in said
    assert "verify: passed" in said and "logits, padded rows" in said


def test_verify_as_json(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", folder, "--json", "--device", "cpu", "--kernel", "sdpa"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["passed"] is True
    assert result["versions"]["transformers"] == str(compat.release())
    assert len(result["verify"]["checks"]) >= 15


def test_verify_that_fails(
    folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(model: object, **_: object) -> str:
        return "nothing was done"

    monkeypatch.setattr(sys.modules["fa2_pack_patch.apply"], "apply", nothing)
    assert cli.main(["verify", folder, "--device", "cpu"]) == 1
    said = capsys.readouterr().out
    assert "FAILED" in said and "open an issue" in said


def test_verify_of_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", "no/such/folder"]) == 2
    assert cli.main(["verify", str(tmp_path)]) == 2
    assert "could not be loaded" in capsys.readouterr().err


def _wrong_uses(folder: str, tmp_path: Path) -> dict[str, tuple[list[str], list[str]]]:
    """Command lines, and what each is told."""
    (tmp_path / "file").write_text("x")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text("{")
    (tmp_path / "unknown").mkdir()
    (tmp_path / "unknown" / "config.json").write_text('{"model_type": "frobnicated"}')
    odd, unknown = str(tmp_path / "odd"), str(tmp_path / "unknown")
    return {
        "no folder": (["verify", "org/model"], ["'org/model' is not a folder", "give one"]),
        "a file": (
            ["verify", str(tmp_path / "file")],
            ["is not a folder", "nothing is downloaded"],
        ),
        "no JSON": (["verify", odd], ["could not be loaded as a model", "config.json"]),
        "unknown type": (["verify", unknown], ["could not be loaded as a model", "frobnicated"]),
        "no device": (["verify", folder, "--device", "tpuu"], ["--device tpuu cannot be used"]),
        "check of nothing": (["check", "org/model"], ["neither a config.json", "give the path"]),
        "check of no JSON": (["check", odd], ["could not be read as a config"]),
        "check of unknown": (["check", unknown], ["could not be read as a config", "frobnicated"]),
        "no version": (["matrix", "--release", "new"], ["'new' is no version; give one like"]),
        "other release": (
            ["matrix", "--release", "9.9"],
            ["--release 9.9 was asked for", "pip install transformers==9.9 first"],
        ),
        "no family": (
            ["matrix", "--release", str(compat.release()), "--families", "llama,lama"],
            ["unknown are ['lama']", "known: cohere"],
        ),
    }


def test_wrong_use_is_told_in_a_line(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for which, (arguments, parts) in _wrong_uses(folder, tmp_path).items():
        capsys.readouterr()
        assert cli.main(arguments) == 2, which
        said = capsys.readouterr()
        assert not said.out, which
        for part in parts:
            assert part in said.err, which


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="no matplotlib")
@pytest.mark.parametrize(
    ("name", "part"), [("no/such/folder/x.png", "in a folder that there is"), ("x.odd", "'.odd'")]
)
def test_a_picture_that_cannot_be_written_is_told_first(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, part: str
) -> None:
    with mock.patch.object(cli, "_load", side_effect=AssertionError("it was loaded")):
        assert cli.main(["verify", folder, "--plot", str(tmp_path / name)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("--plot ") and part in said


def test_a_picture_without_matplotlib(
    folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert cli.main(["verify", folder, "--plot", "leak.png"]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


def test_a_malformed_registry_file_is_told_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "toy.toml").write_text("family = ")
    monkeypatch.setattr(registry, "folder", lambda: tmp_path)
    registry.families.cache_clear()
    try:
        assert cli.main(["families"]) == 1
    finally:
        registry.families.cache_clear()
    assert capsys.readouterr().err.startswith("toy.toml is not TOML")


def test_verify_of_an_unsupported_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import transformers

    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=9, n_positions=8)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    assert cli.main(["verify", str(tmp_path), "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["passed"] is False and "'gpt2' is not in the registry" in result["refused"]


def test_doctor_names_exactly_the_kinds_that_stock_gets_wrong(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    kept = run.RESULTS / f"{compat.release()}.json"
    cells = json.loads(kept.read_text(encoding="utf-8"))["families"]["llama"]
    seen = {row["implementation"] for row in result["kinds"]}
    assert seen == set(cells) & {"eager", "sdpa"}
    for name in seen:
        found: dict[str, list[str]] = {}
        for row in result["kinds"]:
            if row["implementation"] == name:
                found.setdefault(row["stock"], []).append(row["kind"])
                assert row["patched"] == "right"
        ones = next(kinds for kinds in found.values() if "ones" in kinds)
        ones.remove("row_ones")  # not of the matrix, which has two rows of it
        assert {k: sorted(v) for k, v in found.items()} == cells[name]["stock"]


#: The doctor's own look at flash-attention, with the stand-in for a CPU; for a process of its own.
_AS_FLASH = """
import json
from tests.matrix.standin.activate import activate
activate()
from fa2_pack_patch import doctor
print(json.dumps([vars(o) for o in doctor.examine(["flash_attention_2"])]))
"""


def test_doctor_of_flash_attention() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _AS_FLASH], capture_output=True, text=True, check=True
    )
    kept = run.RESULTS / f"{compat.release()}.json"
    cells = json.loads(kept.read_text(encoding="utf-8"))["families"]["llama"]
    found: dict[str, list[str]] = {}
    for row in json.loads(ran.stdout.splitlines()[-1]):
        assert row["patched"] == "right"
        found.setdefault(row["stock"], []).append(row["kind"])
    next(kinds for kinds in found.values() if "positions" in kinds).remove("row_ones")
    assert {k: sorted(v) for k, v in found.items()} == cells["flash_attention_2"]["stock"]


def test_doctor_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    said = capsys.readouterr().out
    for word in ("verified (the matrix was run)", "padded_right (packed row", "After apply: "):
        assert word in said


def test_matrix_of_the_installed_release(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    release = str(compat.release())
    assert cli.main(["matrix", "--release", release, "--families", "llama,falcon"]) == 0
    assert "2 of 2 families passed" in capsys.readouterr().out
    assert cli.main(["matrix", "--release", "4.0.0"]) == 2
    assert f"transformers {release} is installed" in capsys.readouterr().err
    assert cli.main(["matrix", "--release", release, "--families", "lama"]) == 2
    monkeypatch.setattr(twin, "build", None)
    assert cli.main(["matrix", f"--release={release}", "--families", "llama", "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["passed"] is False and "error" in result["families"]["llama"]


def test_every_family_passes_the_release_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["matrix", "--release", str(compat.release())]) == 0, capsys.readouterr().out
