"""The leak map: which input token changes which output token, stock and patched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from .batches import Batch, pack
from .gradients import embedded
from .hooks import CountHook, ModelHook
from .probe import Probe, undisturbed
from .runs import Runs

_LENGTHS = (8, 6, 8)
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


@contextmanager
def stock(probe: Probe) -> Iterator[None]:
    """The model as it was before :func:`fa2_pack_patch.apply`, in the block alone."""
    patch = probe.patch
    if patch is None:
        yield
        return
    runs, patch.runs = patch.runs, Runs()  # runs of earlier forwards are not to be found
    kept = []
    for module in probe.model.modules():
        for name in _HOOKS:
            hooks = getattr(module, name)
            if any(isinstance(h, (ModelHook, CountHook)) for h in hooks.values()):
                kept.append((hooks, list(hooks.items())))
    try:
        for hooks, items in kept:
            for key, hook in items:
                if isinstance(hook, (ModelHook, CountHook)):
                    del hooks[key]
        yield
    finally:
        patch.runs = runs
        for hooks, items in kept:  # in the order that they had
            hooks.clear()
            hooks.update(items)


def influence(probe: Probe, batch: Batch) -> torch.Tensor:
    """``(tokens, tokens)``: how much each output token (row) moves with each input token."""
    with embedded(probe) as seen:
        out = probe.packed(batch)[0]
        wide = out.to(torch.promote_types(out.dtype, torch.float32))
        rows = []
        for token in range(wide.shape[0]):
            loss = wide[token].square().sum()
            (gradient,) = torch.autograd.grad(loss, seen[-1], retain_graph=True)
            rows.append(gradient[0].float().norm(dim=-1))
    return torch.stack(rows).detach().cpu()


def leak_maps(model: torch.nn.Module) -> tuple[Batch, dict[str, torch.Tensor]]:
    """A packed row of three examples, and its influence maps: ``stock`` and, if so, ``patched``."""
    probe = Probe.of(model)
    generator = torch.Generator().manual_seed(3)
    vocabulary = int(probe.base.config.vocab_size)  # type: ignore[union-attr,arg-type]
    row = [torch.randint(1, vocabulary, (n,), generator=generator) for n in _LENGTHS]
    batch = pack([row], "leak map")
    maps = {}
    with undisturbed(model):
        with stock(probe):
            maps["stock"] = influence(probe, batch)
        if probe.patch is not None:
            maps["patched"] = influence(probe, batch)
    return batch, maps


def draw_leaks(model: torch.nn.Module, path: Path) -> None:
    """Write the leak maps of a model to ``path``, side by side.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "the leak map is drawn by matplotlib, which is not installed: pip install matplotlib"
        ) from error
    batch, maps = leak_maps(model)
    from . import compat

    title = f"{type(model).__name__}, Transformers {compat.release()}"
    draw_maps(maps, [p.start for p in batch.pieces], title, path)


def draw_maps(maps: Mapping[str, torch.Tensor], starts: list[int], title: str, path: Path) -> None:
    """Influence maps by name, side by side, with a line where an example starts."""
    from matplotlib.figure import Figure  # no pyplot: the user's backend stays as it is

    figure = Figure(figsize=(4.6 * len(maps), 4.6))
    axes = figure.subplots(1, len(maps), squeeze=False)[0]
    for axis, (name, matrix) in zip(axes, maps.items()):
        largest = matrix.max(dim=1, keepdim=True).values.clamp_min(1e-30)
        shown = (matrix / largest + 1e-9).log10()
        axis.imshow(shown.tolist(), vmin=-4, vmax=0, cmap="viridis", interpolation="nearest")
        axis.set_title(name)
        axis.set_xlabel("input token")
        for edge in (*starts, matrix.shape[0]):
            axis.axhline(edge - 0.5, color="white", linewidth=0.8)
            axis.axvline(edge - 0.5, color="white", linewidth=0.8)
    axes[0].set_ylabel("output token")
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
