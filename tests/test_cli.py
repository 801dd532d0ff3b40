"""The command line as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fa2_pack_patch import cli, registry
from tests import readme


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
