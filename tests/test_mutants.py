"""The kept results of the seeded faults are of the list as it is, and the proofs pass without."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests import mutants, proofs

KEPT = mutants.kept()


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda m: m.name)
def test_every_fault_was_found(mutant: mutants.Mutant) -> None:
    assert mutant.name in KEPT, "run python -m tests.mutants --write, and with --verify"
    row = KEPT[mutant.name]
    assert row["tests"]["killed"] and row["tests"]["by"]
    assert (row["numbers"], row["why"]) == (mutant.numbers, mutant.why)
    assert mutant.why
    if not mutant.numbers:
        assert row["verify"] is None
    elif mutant.proof is None:
        assert row["verify"] == {"on": None, "killed": False, "by": []}
    else:
        assert row["verify"]["killed"] and row["verify"]["by"]
        assert row["verify"]["on"] == mutant.proof


def test_every_fault_that_changes_numbers_has_a_proof() -> None:
    assert not [m.name for m in mutants.MUTANTS if m.numbers and m.proof is None]
    assert sum(m.numbers for m in mutants.MUTANTS) >= 25


def test_names_are_unique_and_faults_apply() -> None:
    assert len({m.name for m in mutants.MUTANTS}) == len(mutants.MUTANTS) >= 30
    for m in mutants.MUTANTS:
        assert m.old in (mutants.ROOT / m.file).read_text(encoding="utf-8"), m.name
        assert m.old != m.new


def test_every_proof_is_of_a_fault() -> None:
    assert {m.proof for m in mutants.MUTANTS} - {None} == set(proofs.PROOFS)


@pytest.mark.parametrize("name", [n for n in proofs.PROOFS if n not in proofs.RELEASES])
def test_a_proof_passes_without_a_fault(name: str) -> None:
    if "flash-attn" in name:  # the stand-in must be there before Transformers is
        done = subprocess.run(
            [sys.executable, "-m", "tests.proofs", name],
            cwd=mutants.ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
        found = json.loads(done.stdout.splitlines()[-1])
    else:
        found = proofs.result(name)
    assert found == {"passed": True, "failed": [], "raised": ""}
