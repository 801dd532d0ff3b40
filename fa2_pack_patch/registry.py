"""The families: one record for each TOML file of ``registry/``.

The files are read once, when first asked for; adding a family is adding a file. Reading them runs
no code of theirs. In a checkout they lie at the root's ``registry/``, in a wheel beside
this module.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
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
    #: whether it drops out in training at all
    dropout: bool = True


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
    """All families by name, in the order of their names.

    Raises:
        RegistryError: a file is malformed, or two claim the same model.
    """
    found: dict[str, Family] = {}
    claimed: dict[str, str] = {}
    for path in sorted(folder().glob("*.toml")):
        family = found[path.stem] = read(path)
        for claim in (*family.model_types, f"{family.module}.{family.base}"):
            other = claimed.setdefault(claim, path.name)
            if other != path.name:
                raise RegistryError(
                    f"{path.name} and {other} both claim {claim!r}; take it out of one"
                )
    return found


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
_SPAN_KEYS = {"releases", "via", "classes", "packed_class", "name"}
_REFERENCE_KEYS = {
    "releases", "implementations", "window", "layers", "softcap", "scale", "condition", "dropout",
}  # fmt: skip
_MODULE = re.compile(r"transformers\.models(\.\w+)+\.modeling_\w+")


def read(path: Path) -> Family:
    """One family from its file.

    Raises:
        RegistryError: unreadable, not TOML, a key missing, unknown or of the wrong kind.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RegistryError(
            f"{path.name} cannot be read: {error}; reinstall the package"
        ) from error
    except (ValueError, RecursionError) as error:  # a number too long for an int, among others
        raise RegistryError(
            f"{path.name} is not TOML: {error}; mend it, or reinstall the package"
        ) from error
    if raw.get("family") != path.stem:
        raise RegistryError(f"{path.name}: family = {raw.get('family')!r} must be {path.stem!r}")
    try:
        return _family(_Table(raw, _KEYS))
    except KeyError as error:
        raise RegistryError(f"{path.name}: give the key {error}, which is missing") from error
    except (TypeError, ValueError) as error:
        raise RegistryError(f"{path.name}: {type(error).__name__}: {error}") from error


class _Table:
    """A table of a file, whose values are asked for by their kind."""

    def __init__(self, raw: Mapping[str, Any], known: set[str]) -> None:
        unknown = sorted(set(raw) - known)
        if unknown:
            raise ValueError(
                f"unknown keys {unknown}; known: {sorted(known)}; remove them (or is it a file of "
                "a later version of fa2_pack_patch?)"
            )
        self.raw = raw

    def text(self, key: str, default: Optional[str] = None) -> str:
        value = self.raw[key] if default is None else self.raw.get(key, default)
        if not isinstance(value, str):
            raise TypeError(f"{key} = {value!r} must be a string")
        return value

    def one_of(self, key: str, allowed: Sequence[Any], default: Any = None) -> Any:
        value = self.raw[key] if default is None else self.raw.get(key, default)
        if value not in allowed or type(value) not in {type(a) for a in allowed}:
            raise ValueError(f"{key} = {value!r} must be one of {tuple(allowed)}")
        return value

    def name(self, key: str, default: Optional[str] = None) -> str:
        value = self.text(key, default)
        if not value.isidentifier():
            raise ValueError(f"{key} = {value!r} must be a name")
        return value

    def texts(self, key: str, default: Optional[list[str]] = None) -> tuple[str, ...]:
        value = self.raw[key] if default is None else self.raw.get(key, default)
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            raise TypeError(f"{key} = {value!r} must be a list of strings")
        return tuple(value)

    def tables(self, key: str, known: set[str]) -> list[_Table]:
        value = self.raw.get(key, [])
        if not isinstance(value, list) or not all(isinstance(v, dict) for v in value):
            raise TypeError(f"{key} = {value!r} must be a list of tables")
        return [_Table(v, known) for v in value]

    def releases(self, key: str = "releases", default: Optional[str] = None) -> SpecifierSet:
        return SpecifierSet(self.text(key, default))


def _family(raw: _Table) -> Family:
    module = raw.text("module")
    if not _MODULE.fullmatch(module):
        raise ValueError(f"module = {module!r} must be a modeling module of Transformers")
    spans = tuple(_span(s) for s in raw.tables("attention", _SPAN_KEYS))
    if not spans:
        raise ValueError(
            "attention is empty; give a table for each way in which the family is reached"
        )
    return Family(
        family=raw.text("family"),
        title=raw.text("title"),
        model_types=raw.texts("model_types"),
        since=Version(raw.text("since")),
        module=module,
        base=raw.name("base"),
        causal=raw.name("causal"),
        per_token=raw.texts("per_token", []),
        pooled=raw.texts("pooled", []),
        spans=spans,
        references=tuple(_reference(r) for r in raw.tables("reference", _REFERENCE_KEYS)),
        refusals=tuple(_refusal(r) for r in raw.tables("refuse", {"when", "reason", "releases"})),
        notes=tuple(
            Note(n.releases(default=""), n.text("text"))
            for n in raw.tables("note", {"releases", "text"})
        ),
        varlen_kwargs=raw.releases("varlen_kwargs") if "varlen_kwargs" in raw.raw else None,
    )


def _span(raw: _Table) -> Span:
    via = raw.one_of("via", VIA)
    packed = raw.name("packed_class") if "packed_class" in raw.raw else None
    return Span(
        raw.releases(), via, raw.texts("classes"), packed, raw.name("name", _DEFAULT_NAME.get(via))
    )


def _refusal(raw: _Table) -> Refusal:
    when = raw.raw["when"]
    if not isinstance(when, dict):
        raise TypeError(f"when = {when!r} must be a table")
    return Refusal(dict(when), raw.text("reason"), raw.releases(default=""))


def _reference(raw: _Table) -> Reference:
    return Reference(
        raw.releases(),
        raw.texts("implementations"),
        raw.one_of("window", ("none", "W", "W+1"), "none"),
        raw.one_of("layers", ("all", "kernel", "layer_types", "even"), "all"),
        raw.one_of("softcap", (True, False), False),
        raw.one_of("scale", ("default",)) if "scale" in raw.raw else None,
        raw.name("condition") if "condition" in raw.raw else None,
        raw.one_of("dropout", (True, False), True),
    )
