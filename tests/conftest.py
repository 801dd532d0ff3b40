"""Shared fixtures: tiny real models, and what they give for each example alone."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.matrix import models
from tests.matrix.kinds import TWO, Call, _positions

# The same examples in every run; HYPOTHESIS_RANDOM=1 looks for new ones.
settings.register_profile("fixed", derandomize=not os.environ.get("HYPOTHESIS_RANDOM"))
settings.load_profile("fixed")


@pytest.fixture(autouse=True)
def no_cache_at_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Twins that pass are remembered in the user's cache; the tests have their own."""
    # Not by monkeypatch, which would then be undone after the fixtures that rely on its end.
    with mock.patch.dict(
        os.environ, {"FA2_PACK_PATCH_CACHE": str(tmp_path_factory.mktemp("cache"))}
    ):
        yield


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Transformers warns of tiny configs; errors still show."""
    import transformers

    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def build() -> Callable[..., torch.nn.Module]:
    def make(
        family: str = "llama", implementation: str = "sdpa", **more: object
    ) -> torch.nn.Module:
        import transformers

        case = models.FAMILIES[family]
        if implementation not in models.implementations(case, transformers.__version__):
            implementation = "eager"  # sdpa classes came with 4.36 and later
        return models.build(case, implementation, **more)

    return make


@pytest.fixture
def packed() -> Call:
    """Two packed rows of 20 tokens: examples of 4, 9, 7 and 11, 1, 8."""
    call = _positions(TWO)
    del call.kwargs["use_cache"]  # its default is True, with which stock mixes examples
    return call
