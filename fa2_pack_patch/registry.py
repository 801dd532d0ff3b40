"""The families: one record for each TOML file of ``registry/``.

The files are read once, when first asked for; adding a family is adding a file. Reading them runs
no code of theirs. In a checkout they lie at the root's ``registry/``, in a wheel beside
this module.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Optional

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from .errors import Fa2PackPatchError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

VIA = ("method", "function", "dict", "interface")
_DEFAULT_NAME = {
    "method": "_flash_attention_forward",
    "function": "_flash_attention_forward",
    "interface": "ALL_ATTENTION_FUNCTIONS",
}


class RegistryError(Fa2PackPatchError, ValueError):
    """A registry file is malformed; the message names the file and the key."""


@dataclass(frozen=True)
class Span:
    """How a family's attention is reached over a range of releases."""

    releases: SpecifierSet
    via: str
    classes: tuple[str, ...]
    packed_class: Optional[str]
    name: str


@dataclass(frozen=True)
class Reference:
    """What a model loaded as eager or sdpa does by its own masks, over a range of releases."""

    releases: SpecifierSet
    implementations: tuple[str, ...]
    window: str = "none"
    layers: str = "all"
    softcap: bool = False
    scale: Optional[str] = None
    condition: Optional[str] = None


@dataclass(frozen=True)
class Refusal:
    """A configuration that cannot be packed, and why."""

    when: Mapping[str, Any]
    reason: str
    releases: SpecifierSet


@dataclass(frozen=True)
class Note:
    """A quirk worth knowing, over a range of releases."""

    releases: SpecifierSet
    text: str


@dataclass(frozen=True)
class Family:
    """One architecture family, as its registry file describes it."""

    family: str
    title: str
    model_types: tuple[str, ...]
    since: Version
    module: str
    base: str
    causal: str
    per_token: tuple[str, ...]
    pooled: tuple[str, ...]
    spans: tuple[Span, ...]
    references: tuple[Reference, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    notes: tuple[Note, ...] = ()
    varlen_kwargs: Optional[SpecifierSet] = field(default=None)

    def span(self, release: Version) -> Optional[Span]:
        """The span that holds ``release``, or None when the family is not in that release."""
        return next((s for s in self.spans if s.releases.contains(release, prereleases=True)), None)

    def reference(self, release: Version, implementation: str) -> Optional[Reference]:
        """The reference rule for a model loaded as ``implementation``, if there is one."""
        for rule in self.references:
            if implementation in rule.implementations and rule.releases.contains(
                release, prereleases=True
            ):
                return rule
        return None


def folder() -> Path:
    """Where the registry's files lie."""
    here = Path(__file__).resolve().parent
    for candidate in (here / "registry", here.parent / "registry"):
        if any(candidate.glob("*.toml")):
            return candidate
    raise RegistryError(
        f"no registry files in {here / 'registry'} or {here.parent / 'registry'}: reinstall the "
        "package."
    )


@lru_cache(maxsize=1)
def families() -> dict[str, Family]:
    """All families by name, in the order of their names."""
    return {path.stem: read(path) for path in sorted(folder().glob("*.toml"))}


def by_base_class(module: str, name: str) -> Optional[Family]:
    """The family whose base model is the class ``name`` of ``module``."""
    return next((f for f in families().values() if (f.module, f.base) == (module, name)), None)


def by_model_type(model_type: str) -> Optional[Family]:
    """The family of a config's ``model_type``."""
    return next((f for f in families().values() if model_type in f.model_types), None)


_KEYS = {
    "family", "title", "model_types", "since", "module", "base", "causal", "per_token", "pooled",
    "varlen_kwargs", "attention", "reference", "refuse", "note",
}  # fmt: skip


def read(path: Path) -> Family:
    """One family from its file.

    Raises:
        RegistryError: not TOML, a key missing, unknown or of the wrong kind.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RegistryError(f"{path.name} is not TOML: {error}") from error
    unknown = sorted(set(raw) - _KEYS)
    if unknown:
        raise RegistryError(f"{path.name} has unknown keys {unknown}; known: {sorted(_KEYS)}")
    if raw.get("family") != path.stem:
        raise RegistryError(f"{path.name}: family = {raw.get('family')!r} must be {path.stem!r}")
    try:
        varlen = raw.get("varlen_kwargs")
        return Family(
            family=raw["family"],
            title=raw["title"],
            model_types=tuple(raw["model_types"]),
            since=Version(raw["since"]),
            module=raw["module"],
            base=raw["base"],
            causal=raw["causal"],
            per_token=tuple(raw.get("per_token", ())),
            pooled=tuple(raw.get("pooled", ())),
            spans=tuple(_span(s) for s in raw["attention"]),
            references=tuple(_reference(r) for r in raw.get("reference", ())),
            refusals=tuple(
                Refusal(dict(r["when"]), r["reason"], SpecifierSet(r.get("releases", "")))
                for r in raw.get("refuse", ())
            ),
            notes=tuple(
                Note(SpecifierSet(n.get("releases", "")), n["text"]) for n in raw.get("note", ())
            ),
            varlen_kwargs=SpecifierSet(varlen) if varlen else None,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise RegistryError(f"{path.name}: {type(error).__name__}: {error}") from error


def _span(raw: Mapping[str, Any]) -> Span:
    via = raw["via"]
    if via not in VIA:
        raise ValueError(f"via = {via!r} must be one of {VIA}")
    name = raw.get("name") or _DEFAULT_NAME.get(via)
    if not name:
        raise ValueError(f"via = {via!r} needs a name")
    return Span(
        SpecifierSet(raw["releases"]), via, tuple(raw["classes"]), raw.get("packed_class"), name
    )


def _reference(raw: Mapping[str, Any]) -> Reference:
    window, layers = raw.get("window", "none"), raw.get("layers", "all")
    if window not in ("none", "W", "W+1"):
        raise ValueError(f"window = {window!r} must be 'none', 'W' or 'W+1'")
    if layers not in ("all", "kernel", "layer_types", "even"):
        raise ValueError(f"layers = {layers!r} must be 'all', 'kernel', 'layer_types' or 'even'")
    return Reference(
        SpecifierSet(raw["releases"]),
        tuple(raw["implementations"]),
        window,
        layers,
        bool(raw.get("softcap", False)),
        raw.get("scale"),
        raw.get("condition"),
    )
