"""Releases and modeling code that nobody verified: the twin, its cache, and its refusals."""

from __future__ import annotations

import json
import multiprocessing
import os
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fa2_pack_patch as fpp
from fa2_pack_patch import compat, registry, twin
from tests.matrix import models
from tests.test_apply import state

Build = Callable[..., torch.nn.Module]
RELEASE = str(compat.release())
HERE = [name for name, case in models.FAMILIES.items() if models.available(case, RELEASE)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FA2_PACK_PATCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> None:
    """This release is newer than any verified one, which ended a minor before."""
    release = compat.release()
    before = f"{release.major}.{release.minor - 1}"
    monkeypatch.setattr(compat, "NEWEST", compat.Version(before))


@pytest.mark.parametrize("family", HERE)
def test_a_newer_release_is_tried_on_a_twin(build: Build, newer: None, family: str) -> None:
    model = build(family)
    report = fpp.apply(model)
    assert not report.verified
    assert "not verified" in report.notes[0] and "passed verify just now" in report.notes[0]
    assert fpp.verify(model)
    fpp.revert(model)
    assert "before" in fpp.apply(model).notes[0]


def test_a_release_number_faked_upwards(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    if compat.release() < compat.Version("5"):
        pytest.skip("an old release is reached otherwise than a new one: the registry goes by it")
    import transformers

    monkeypatch.setattr(transformers, "__version__", "5.99.0")
    model = build("mistral")
    report = fpp.apply(model)
    assert report.release == "5.99.0" and "5.99.0 is not verified" in report.notes[0]


def breaking(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modeling code that looks like itself but mixes examples: it adds what came before."""
    module = sys.modules[registry.families()[family].module]
    name = next(n for n in ("LlamaMLP", "MistralMLP") if hasattr(module, n))
    cls = getattr(module, name)
    forward = cls.forward

    def leaking(self: Any, x: torch.Tensor) -> torch.Tensor:
        return forward(self, x + 0.01 * x.cumsum(1))  # type: ignore[no-any-return]

    monkeypatch.setattr(cls, "forward", leaking)


def test_altered_code_that_breaks_packing_is_refused_with_figures(
    build: Build, newer: None, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    model = build("llama")
    before = state(model)
    breaking("llama", monkeypatch)
    for _ in range(2):
        with pytest.raises(fpp.UnsupportedReleaseError) as caught:
            fpp.apply(model)
        assert "logits, one row" in str(caught.value) and "FAILED" in str(caught.value)
        assert "allow_unverified" not in str(caught.value)
        assert "install an earlier Transformers or a later" in str(caught.value)
    assert state(model) == before
    assert not list(cache.glob("*"))
    assert fpp.apply(model, allow_unverified=True).notes


def test_a_twin_that_cannot_be_built_is_refused(
    build: Build, newer: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise AttributeError("no such name any more")

    monkeypatch.setattr(twin, "build", fail)
    with pytest.raises(fpp.UnsupportedReleaseError, match="no such name any more"):
        fpp.apply(build("llama"))


def test_code_that_is_not_as_released_is_tried(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = registry.families()["llama"]
    assert twin.altered(family) is None
    path = twin.code_files(family)[0]
    monkeypatch.setitem(twin._record(), os.path.realpath(path), "x" * 43)  # type: ignore[arg-type]
    assert twin.altered(family) == "modeling_llama.py"
    report = fpp.apply(build("llama"))
    assert "modeling_llama.py" in report.notes[0] and "is not as it was released" in report.notes[0]
    model = build("llama")
    breaking("llama", monkeypatch)
    monkeypatch.setattr(twin, "passed_before", lambda _: False)  # the file's bytes are the same
    with pytest.raises(
        fpp.UnsupportedReleaseError,
        match=r"(?s)modeling_llama.py.*reinstall transformers .*so that",
    ):
        fpp.apply(model)
    report = fpp.apply(model, allow_unverified=True)
    assert "modeling_llama.py" in report.notes[0] and "without a proof" in report.notes[0]
    assert "(not verified)" in str(report)


def agrees(target: Any, model: torch.nn.Module) -> fpp.Verdict:
    """What supports() says, once apply has been seen to do the same."""
    before = state(model)
    verdict = fpp.supports(target)
    assert state(model) == before
    try:
        fpp.apply(model)
    except (fpp.UnsupportedModelError, fpp.UnsupportedReleaseError):
        assert not verdict, str(verdict)
    else:
        assert verdict, str(verdict)
    return verdict


@pytest.mark.parametrize("of", ["model", "config"])
@pytest.mark.parametrize("why", ["newer", "altered"])
def test_supports_says_what_apply_will_do(
    build: Build, monkeypatch: pytest.MonkeyPatch, of: str, why: str, request: Any
) -> None:
    family = registry.families()["llama"]
    path = twin.code_files(family)[0]
    if why == "newer":
        request.getfixturevalue("newer")
    else:
        digest = {os.path.realpath(path): "x" * 43}
        monkeypatch.setattr(twin, "_record", lambda: digest)
    model = build("llama")
    verdict = agrees(model if of == "model" else model.config, model)
    assert "passed verify just now" in verdict.notes[0]
    assert "before" in fpp.supports(model).notes[1]  # patched by now, with the notes of apply
    breaking("llama", monkeypatch)
    monkeypatch.setattr(twin, "passed_before", lambda _: False)
    model = build("llama")
    verdict = agrees(model if of == "model" else model.config, model)
    assert "logits, one row" in str(verdict) and "FAILED" in str(verdict)


def test_what_supports_tried_for_a_config_apply_need_not_try_again(
    build: Build, newer: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("llama")
    assert fpp.supports(type(model.config)(**model.config.to_dict()))
    monkeypatch.setattr(twin, "try_twin", None)
    assert fpp.apply(model)


def test_no_twin_is_tried_for_what_is_refused_anyway(
    build: Build, newer: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(twin, "try_twin", None)
    model = build("falcon", alibi=True)
    assert "alibi" in str(agrees(model, model))
    assert "alibi" in str(agrees(model.config, model))


def test_nothing_is_tried_on_a_verified_release(build: Build, cache: Path) -> None:
    assert fpp.apply(build("llama")).verified
    assert not cache.exists()


def test_a_twin_takes_two_seconds(build: Build) -> None:
    family = registry.families()["llama"]
    config = build("llama").config
    began = time.perf_counter()
    assert twin.try_twin(config, family)
    assert time.perf_counter() - began < 2


def test_the_full_size_config_of_every_family_has_a_twin() -> None:
    import importlib

    for family in registry.families().values():
        if family.span(compat.release()) is None or family.family == "dbrx":
            continue  # DBRX's own default config cannot be built in 5.24
        cls = getattr(importlib.import_module(family.module), family.causal)
        config = cls.config_class()
        before = config.to_dict()
        small = twin.twin_config(config)
        assert config.to_dict() == before
        assert small.num_hidden_layers == 2
        assert small.hidden_size <= 1152


BAD = [
    b"",
    b"{",
    b"\xff\xfe\x00",
    b"[]",
    b"null",
    b'"passed"',
    b'{"format": 1, "passed": true}',
    b'{"format": 1, "passed": true, "key": {}}',
    b"[" * 100_000,
    b"cos\nsystem\n(S'exit 3'\ntR.",  # a pickle
]


@pytest.mark.parametrize("content", BAD, ids=range(len(BAD)))
def test_malformed_files_are_no_pass(build: Build, newer: None, content: bytes) -> None:
    model = build("llama")
    fpp.apply(model)
    (path,) = twin.cache_folder().iterdir()
    good = path.read_bytes()
    path.write_bytes(content)
    fpp.revert(model)
    assert "just now" in fpp.apply(model).notes[0]
    assert path.read_bytes() == good  # written again


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"format": "1"},
        {"passed": 1},
        {"passed": "true"},
        {"passed": False},
        {"key": {"torch": "0"}},
    ],
)
def test_other_files_are_no_pass(change: dict[str, Any]) -> None:
    wanted = {"torch": "1", "transformers": "9"}
    twin.remember(wanted)
    assert twin.passed_before(wanted)
    (path,) = twin.cache_folder().iterdir()
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert not twin.passed_before(wanted)
    path.write_text(json.dumps(json.loads(path.read_text()))[:-9])
    assert not twin.passed_before(wanted)


def test_versions_code_and_config_are_in_the_key(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, config = registry.families()["llama"], build("llama").config
    first = twin.key(config, family, "sdpa")
    assert first == twin.key(config, family, "sdpa")
    assert first["transformers"] == RELEASE and first["torch"] == torch.__version__
    if compat.release() >= compat.Version("4.36"):  # before, there is eager alone
        assert first != twin.key(config, family, "eager")
    assert first == twin.key(config, family, "flash_attention_2" if twin._chosen() else "eager")
    config.rms_norm_eps = 0.5
    assert first["config"] != twin.key(config, family, "sdpa")["config"]
    monkeypatch.setattr(twin, "code_files", lambda _: [Path(__file__)])
    assert first["code"] != twin.key(config, family, "sdpa")["code"]


def test_a_home_that_cannot_be_written(
    build: Build, newer: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    home.chmod(stat.S_IRUSR | stat.S_IXUSR)
    if os.access(home, os.W_OK):  # root writes anywhere: a file stands in the way instead
        home.chmod(0o755)
        (home / ".cache").write_text("a file")
    monkeypatch.delenv("FA2_PACK_PATCH_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(home))
    model = build("llama")
    for _ in range(2):
        assert "just now" in fpp.apply(model).notes[0]
        fpp.revert(model)

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert "just now" in fpp.apply(model).notes[0]


def _write(folder: str, count: int) -> None:
    os.environ["FA2_PACK_PATCH_CACHE"] = folder
    for _ in range(count):
        twin.remember({"torch": "1", "long": "x" * 10_000})


def test_two_processes_write_at_once(cache: Path) -> None:
    wanted = {"torch": "1", "long": "x" * 10_000}
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write, args=(str(cache), 200)) for _ in range(2)]
    twin.remember(wanted)
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert twin.passed_before(wanted)  # never half a file
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert len(list(cache.iterdir())) == 1  # and no temporary is left
