"""The registry's files, and what the reader says of bad ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.version import Version

from fa2_pack_patch import registry
from tests.matrix import models
from tests.matrix.releases import RELEASES

GOOD = """
family = "toy"
title = "Toy"
model_types = ["toy"]
since = "4.40"
module = "transformers.models.toy.modeling_toy"
base = "ToyModel"
causal = "ToyForCausalLM"

[[attention]]
releases = ">=4.40"
via = "interface"
classes = ["ToyAttention"]
"""


def test_every_family_is_reached_in_exactly_one_way_in_every_release() -> None:
    for family in registry.families().values():
        for text in RELEASES:
            release = Version(text)
            hits = [s for s in family.spans if s.releases.contains(release)]
            known = release.release[:2] >= family.since.release[:2]
            assert len(hits) == int(known), (family.family, text)


def test_every_family_is_in_the_matrix() -> None:
    assert {c.family for c in models.FAMILIES.values()} == set(registry.families())
    for case in models.FAMILIES.values():
        assert registry.families()[case.family].since == Version(case.since)


def test_model_types_belong_to_one_family() -> None:
    types = [t for f in registry.families().values() for t in f.model_types]
    assert len(types) == len(set(types))
    assert registry.by_model_type("mistral") is registry.families()["mistral"]
    assert registry.by_model_type("bert") is None


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "toy.toml"
    path.write_text(GOOD, encoding="utf-8")
    family = registry.read(path)
    assert family.span(Version("4.41")) is not None
    assert family.span(Version("4.39")) is None


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('family = "toy"', 'family = "other"', "'other' must be 'toy'"),
        ('via = "interface"', 'via = "magic"', "'magic'"),
        ('title = "Toy"', 'name = "Toy"', r"unknown keys \['name'\]"),
        ('title = "Toy"', "", "title"),
        ('releases = ">=4.40"', 'releases = "4.40 and up"', "InvalidSpecifier"),
        ('title = "Toy"', "title = ", "not TOML"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, old: str, new: str, says: str) -> None:
    path = tmp_path / "toy.toml"
    path.write_text(GOOD.replace(old, new), encoding="utf-8")
    with pytest.raises(registry.RegistryError, match=says) as caught:
        registry.read(path)
    assert "toy.toml" in str(caught.value)
