"""State on disk: whole patched models, checkpoints beside them, and the registry's files."""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.hooks import RemovableHandle

import fa2_pack_patch as fpp
from fa2_pack_patch import compat, registry
from fa2_pack_patch.patch import ATTRIBUTE
from tests.matrix import models
from tests.matrix.cells import References, compare
from tests.matrix.kinds import TWO, Call, _plain, _positions

LIMIT = 2e-4
ROOT = Path(__file__).resolve().parents[1]
Build = Callable[..., torch.nn.Module]
FAMILIES = [
    f
    for f in ("llama", "mistral", "falcon_new", "gpt_neox", "gemma2", "phi3", "qwen2")
    if models.available(models.FAMILIES[f], str(compat.release()))
]


def error_of(model: torch.nn.Module, call: Call, reference: References) -> float:
    with torch.no_grad():
        return compare(model(**call.kwargs).logits, call, reference)


def through_pickle(model: torch.nn.Module) -> torch.nn.Module:
    return pickle.loads(pickle.dumps(model))


def through_torch(model: torch.nn.Module) -> torch.nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


WAYS: dict[str, Callable[[torch.nn.Module], torch.nn.Module]] = {
    "pickle": through_pickle,
    "torch": through_torch,
    "deepcopy": copy.deepcopy,
}


def ours(model: torch.nn.Module) -> list[Any]:
    """What of this package is in a model's modules and their hooks."""
    found = []
    for module in model.modules():
        for value in module.__dict__.values():
            inner = value.values() if isinstance(value, dict) else [value]
            found += [v for v in inner if type(v).__module__.startswith("fa2_pack_patch")]
    return found


# Whole models


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_patched_model_loads_patched(build: Build, family: str, way: str) -> None:
    model, reference = build(family), References(build(family))
    fpp.apply(model)
    call = _positions(TWO)
    model(**call.kwargs)  # what a call leaves in the model goes to disk as well
    loaded = WAYS[way](model)
    assert fpp.is_applied(loaded)
    fpp.revert(model)  # which is another one
    assert error_of(loaded, call, reference) < LIMIT
    plain = _plain(9, 2).kwargs
    with torch.no_grad():
        assert torch.equal(loaded(**plain).logits, reference.model(**plain).logits)
    assert fpp.revert(loaded)
    assert ours(loaded) == []
    fpp.apply(loaded)
    assert error_of(loaded, call, reference) < LIMIT


def test_a_loaded_models_report(build: Build) -> None:
    model = build()
    report = fpp.apply(model)
    assert fpp.apply(through_torch(model)) == report


def test_a_reverted_model_loads_unpatched_and_needs_nothing_of_ours(build: Build) -> None:
    model = build()
    fpp.apply(model)
    fpp.revert(model)
    data = pickle.dumps(model)
    assert b"fa2_pack_patch" not in data
    assert not fpp.is_applied(pickle.loads(data))


def test_a_model_with_a_graph_in_flight_is_saved_without_it(build: Build) -> None:
    model, reference = build("llama", "eager").train(), References(build("llama", "eager"))
    fpp.apply(model)
    call = _positions(TWO)
    loss = model(**call.kwargs, labels=call.kwargs["input_ids"]).loss
    loaded = through_pickle(model).eval()
    loss.backward()
    assert error_of(loaded, call, reference) < LIMIT


_ELSEWHERE = """
import sys, torch
model = torch.load(sys.argv[1], weights_only=False)
import fa2_pack_patch
kwargs, logits = torch.load(sys.argv[2])
assert fa2_pack_patch.is_applied(model)
def ours():
    hooks = [h for m in model.modules() for d in (m._forward_pre_hooks, m._forward_hooks)
             for h in d.values()]
    return sum(type(h).__module__.startswith("fa2_pack_patch") for h in hooks)
before = ours()
assert before >= 3
seen = []
for module in (model.model, model):
    module.register_forward_pre_hook(lambda *_: seen.append("before"))
    module.register_forward_hook(lambda *_: seen.append("after"))
    module.register_forward_pre_hook(lambda *_: None, with_kwargs=True)
for layer in model.model.layers:
    layer.register_forward_hook(lambda *_: None)
assert ours() == before, (ours(), before)
with torch.no_grad():
    error = (model(**kwargs).logits - logits).abs().max().item()
assert error < 1e-5, error
assert len(seen) == 4, seen
assert fa2_pack_patch.revert(model)
model(**kwargs)
assert len(seen) == 8, seen
"""


def test_hooks_in_another_process_do_not_push_ours_out(build: Build, tmp_path: Path) -> None:
    """torch numbers hooks anew in each process; an unpickled one keeps its number."""
    RemovableHandle.next_id = 0  # as in a process that loads the model and applies at once
    model = build("llama", "eager")
    fpp.apply(model)
    call = _positions(TWO)
    with torch.no_grad():
        logits = model(**call.kwargs).logits
    torch.save(model, tmp_path / "model.pt")
    torch.save((call.kwargs, logits), tmp_path / "call.pt")
    command = [sys.executable, "-W", "ignore", "-c", _ELSEWHERE]
    done = subprocess.run(
        [*command, str(tmp_path / "model.pt"), str(tmp_path / "call.pt")],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_model_that_was_patched_with_another_release(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its packed calls are refused until it is patched anew; the others are what they were."""
    model, reference = build(), References(build())
    fpp.apply(model)
    data = pickle.dumps(model)
    getattr(model, model.base_model_prefix).__dict__[ATTRIBUTE].release = compat.Version("4.44.1")
    old = pickle.dumps(model)
    call, plain = _positions(TWO), _plain(9, 2).kwargs
    loaded = pickle.loads(old)
    for forward in (loaded, loaded.model):
        with pytest.raises(fpp.PackingError, match=r"with transformers 4\.44\.1 and loaded with"):
            forward(**call.kwargs)
    with torch.no_grad():
        assert torch.equal(loaded(**plain).logits, reference.model(**plain).logits)
    fpp.apply(loaded)
    assert error_of(loaded, call, reference) < LIMIT
    fpp.revert(loaded)
    assert ours(loaded) == []
    assert error_of(pickle.loads(data), call, reference) < LIMIT
    again = pickle.loads(old)
    fpp.revert(again)
    assert ours(again) == []
    again(**call.kwargs)


def test_truncated_pickles_are_pickles_own_error(build: Build) -> None:
    model = build()
    fpp.apply(model)
    data = pickle.dumps(model)
    for part in (0.1, 0.5, 0.99):
        with pytest.raises((pickle.UnpicklingError, EOFError)):
            pickle.loads(data[: int(len(data) * part)])


def test_checkpoints_are_those_of_the_unpatched_model(build: Build, tmp_path: Path) -> None:
    model = build()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    model.save_pretrained(tmp_path / "before")
    fpp.apply(model)
    model(**_positions(TWO).kwargs)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[k], v) for k, v in before.items())
    model.save_pretrained(tmp_path / "after")
    names = sorted(p.name for p in (tmp_path / "before").iterdir())
    assert sorted(p.name for p in (tmp_path / "after").iterdir()) == names
    for name in names:
        one, two = ((tmp_path / f / name).read_bytes() for f in ("before", "after"))
        if not name.endswith(".bin"):  # a zip file, which holds the time
            assert one == two, name
    other = build(seed=1)
    fpp.apply(other)
    other.load_state_dict(after)
    assert error_of(other, _positions(TWO), References(build())) < LIMIT


def test_errors_and_reports_travel(build: Build) -> None:
    model = build()
    report = fpp.apply(model)
    assert pickle.loads(pickle.dumps(report)) == report
    verdict = fpp.supports(build())
    assert pickle.loads(pickle.dumps(verdict)) == verdict
    error = fpp.UnsupportedModelError("Bert", ["first", "second"])
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert again.reasons == error.reasons


# The registry's files

_SOURCES = sorted(registry.folder().glob("*.toml"))


def read_as(folder: Path, stem: str, text: str | bytes) -> registry.Family:
    path = folder / f"{stem}.toml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return registry.read(path)


@pytest.mark.parametrize("source", _SOURCES, ids=lambda p: p.stem)
def test_truncated_files(source: Path, tmp_path: Path) -> None:
    """Cut anywhere: what is left is whole, or an error that names the file."""
    text = source.read_bytes()
    for end in range(0, len(text), 7):
        try:
            family = read_as(tmp_path, source.stem, text[:end])
        except registry.RegistryError as error:
            assert source.name in str(error)
        else:
            assert family.family == source.stem
            assert family.spans


BAD = [
    (b"\xff\xfe\x00", "not TOML"),
    (b"\x00" * 100, "not TOML"),
    (b"", "family = None"),
    (b"[" * 5000, "not TOML"),
    (b"a = " + b"[" * 5000, "not TOML"),
    (b"x = " + b"9" * 10000, "not TOML"),
    (b'{"family": "toy"}', "not TOML"),
    (b"\x80\x04cos\nsystem\n", "not TOML"),
]


@pytest.mark.parametrize(("data", "says"), BAD)
def test_bytes_that_are_no_registry_file(tmp_path: Path, data: bytes, says: str) -> None:
    with pytest.raises(registry.RegistryError, match=says) as caught:
        read_as(tmp_path, "toy", data)
    assert "toy.toml" in str(caught.value)


GOOD: dict[str, Any] = {
    "family": "toy", "title": "Toy", "model_types": ["toy"], "since": "4.40",
    "module": "transformers.models.toy.modeling_toy", "base": "ToyModel", "causal": "ToyForCausalLM",
    "attention": [{"releases": ">=4.40", "via": "interface", "classes": ["ToyAttention"]}],
}  # fmt: skip


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(toml(v) for v in value) + "]"
    return json.dumps(value)


def document(values: dict[str, Any]) -> str:
    return "".join(f"{json.dumps(k)} = {toml(v)}\n" for k, v in values.items())


def test_the_good_document_is_good(tmp_path: Path) -> None:
    assert read_as(tmp_path, "toy", document(GOOD)).base == "ToyModel"


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"title": 3}, r"title = 3 must be a string"),
    ({"model_types": "toy"}, r"model_types = 'toy' must be a list of strings"),
    ({"model_types": [1]}, r"model_types = \[1\] must be a list of strings"),
    ({"per_token": "ToyForTokenClassification"}, "per_token = .* must be a list of strings"),
    ({"since": 4.4}, r"since = 4\.4 must be a string"),
    ({"since": "spring"}, "spring"),
    ({"module": ["os"]}, r"module = \['os'\] must be a string"),
    ({"module": "os"}, r"module = 'os' must be a modeling module of Transformers"),
    ({"module": "transformers.models.toy.modeling_toy; import os"}, "must be a modeling module"),
    ({"module": "transformers"}, "must be a modeling module"),
    ({"base": "__import__('os')"}, "base = .* must be a name"),
    ({"attention": {}}, "attention = {} must be a list of tables"),
    ({"attention": []}, "attention is empty"),
    ({"attention": ["x"]}, r"attention = \['x'\] must be a list of tables"),
    ({"attention": [{**GOOD["attention"][0], "classes": "Toy"}]}, "classes = 'Toy' must be a list"),
    ({"attention": [{**GOOD["attention"][0], "vai": "x"}]}, r"unknown keys \['vai'\]"),
    ({"attention": [{**GOOD["attention"][0], "via": ["x"]}]}, "via"),
    ({"attention": [{**GOOD["attention"][0], "name": "a.b"}]}, "name = 'a.b' must be a name"),
    ({"attention": [{"via": "interface", "classes": ["A"]}]}, "releases"),
    ({"refuse": [{"when": "alibi", "reason": "r"}]}, "when = 'alibi' must be a table"),
    ({"refuse": [{"when": {"alibi": True}}]}, "reason"),
    ({"refuse": [{"when": {}, "reason": "r", "until": "5"}]}, r"unknown keys \['until'\]"),
    ({"note": [{"releases": "", "text": 3}]}, "text = 3 must be a string"),
    ({"reference": [{"releases": "", "implementations": "sdpa"}]}, "implementations = 'sdpa'"),
    ({"reference": [{"releases": "", "implementations": ["sdpa"], "scale": "big"}]}, "scale"),
    ({"reference": [{"releases": "", "implementations": ["sdpa"], "softcap": "no"}]}, "softcap"),
    ({"varlen_kwargs": 4}, "varlen_kwargs = 4 must be a string"),
    ({"format": 2}, r"unknown keys \['format'\].*later version of fa2_pack_patch"),
    ({"postprocess": "os.system('true')"}, r"unknown keys \['postprocess'\]"),
]


@pytest.mark.parametrize(("change", "says"), CHANGES, ids=lambda v: json.dumps(v)[:60])
def test_values_of_the_wrong_kind_are_named(
    tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    with pytest.raises(registry.RegistryError, match=says) as caught:
        read_as(tmp_path, "toy", document({**GOOD, **change}))
    assert str(caught.value).startswith("toy.toml")


@pytest.mark.parametrize("key", list(GOOD))
def test_a_missing_key_is_named(tmp_path: Path, key: str) -> None:
    values = {k: v for k, v in GOOD.items() if k != key}
    with pytest.raises(registry.RegistryError, match=rf"toy.toml.*{key}"):
        read_as(tmp_path, "toy", document(values))


_scalars = st.one_of(
    st.none().map(lambda _: "x"), st.booleans(), st.integers(-(2**40), 2**40), st.text(max_size=5)
)
_anything = st.recursive(
    _scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
_KEYS = [*GOOD, "per_token", "pooled", "reference", "refuse", "note", "varlen_kwargs"]


@settings(
    max_examples=400,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(key=st.sampled_from(_KEYS), value=_anything)
def test_any_value_is_read_or_refused(tmp_path: Path, key: str, value: Any) -> None:
    try:
        family = read_as(tmp_path, "toy", document({**GOOD, key: value}))
    except registry.RegistryError as error:
        assert "toy.toml" in str(error)
        return
    assert family.span(compat.Version("4.41")) is None or family.spans
    family.reference(compat.Version("4.41"), "sdpa")


def test_reading_runs_nothing_and_imports_nothing() -> None:
    code = (
        "import sys\n"
        "from fa2_pack_patch import registry\n"
        "before = set(sys.modules)\n"
        "def audit(event, args):\n"
        "    bad = ('exec', 'compile', 'import', 'os.system', 'subprocess.Popen')\n"
        "    if on and event in bad:\n"
        "        raise SystemExit(f'{event} {args!r:.200}')\n"
        "on = False\n"
        "registry.read(next(iter(sorted(registry.folder().glob('*.toml')))))\n"
        "sys.addaudithook(audit)\n"
        "on = True\n"
        "registry.families()\n"
        "on = False\n"
        "print(len(registry.families()))\n"
        "assert 'transformers' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) == len(_SOURCES)


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(registry.RegistryError, match=r"gone\.toml"):
        registry.read(tmp_path / "gone.toml")
    (tmp_path / "dir.toml").mkdir()
    with pytest.raises(registry.RegistryError, match=r"dir\.toml"):
        registry.read(tmp_path / "dir.toml")


def test_one_bad_file_does_not_half_fill_the_registry(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """apply raises the same error each time, and is right once the file is."""
    model = build()
    for source in _SOURCES:
        (tmp_path / source.name).write_bytes(source.read_bytes())
    good = (tmp_path / "phi.toml").read_bytes()
    (tmp_path / "phi.toml").write_bytes(good[: len(good) // 2])
    monkeypatch.setattr(registry, "folder", lambda: tmp_path)
    registry.families.cache_clear()
    try:
        for _ in range(2):
            with pytest.raises(registry.RegistryError, match=r"phi\.toml"):
                fpp.apply(model)
        assert ours(model) == []
        (tmp_path / "phi.toml").write_bytes(good)
        fpp.apply(model)
    finally:
        registry.families.cache_clear()


def test_two_files_that_claim_one_model_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "toy.toml").write_text(document(GOOD))
    (tmp_path / "toy2.toml").write_text(document({**GOOD, "family": "toy2"}))
    monkeypatch.setattr(registry, "folder", lambda: tmp_path)
    registry.families.cache_clear()
    try:
        with pytest.raises(registry.RegistryError, match=r"toy2\.toml.*toy\.toml.*'toy'"):
            registry.families()
    finally:
        registry.families.cache_clear()
