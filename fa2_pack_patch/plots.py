"""The leak map: which input token changes which output token, stock and patched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Optional, Union

import torch

from .batches import Batch, given_batch
from .gradients import embedded
from .probe import Probe, stock, undisturbed

_LENGTHS = (8, 6, 8)


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


def leak_maps(
    model: torch.nn.Module, examples: Optional[Sequence[Any]] = None
) -> tuple[Batch, dict[str, torch.Tensor]]:
    """One packed row, and its influence maps: ``stock`` and, if the model is so, ``patched``.

    Args:
        model: as for :func:`fa2_pack_patch.verify`.
        examples: sequences of token ids; three short random ones by default.
    """
    probe = Probe.of(model)
    if examples is None:
        generator = torch.Generator().manual_seed(3)
        known = min(probe.rows, probe.vocabulary)
        examples = [
            torch.randint(1, known, (n,), generator=generator, device="cpu") for n in _LENGTHS
        ]
    batch = given_batch(examples, probe.rows)
    maps = {}
    with undisturbed(model):
        with stock(probe):
            maps["stock"] = influence(probe, batch)
        if probe.patch is not None:
            maps["patched"] = influence(probe, batch)
    return batch, maps


def foreign_share(batch: Batch, influences: torch.Tensor) -> float:
    """How much of all influence in a map comes from another example."""
    owners = [torch.full((len(p.ids),), n, device="cpu") for n, p in enumerate(batch.pieces)]
    owner = torch.cat(owners)
    others = influences[owner[:, None] != owner].sum()
    return float(others / influences.sum())


def check_picture(path: Union[str, Path]) -> None:
    """Refuse to draw what could not be written in the end.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: ``path`` is in no folder, or of no format that can be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "the leak map is drawn by matplotlib, which is not installed; pip install matplotlib"
        ) from error
    path = Path(path)
    if not path.parent.is_dir() or path.is_dir():
        raise ValueError(
            f"the leak map cannot be written to {str(path)!r}; give a file name in a folder that "
            "there is."
        )
    known = sorted(Figure().canvas.get_supported_filetypes())
    if path.suffix and path.suffix[1:].lower() not in known:
        raise ValueError(
            f"the leak map cannot be written to {str(path)!r} as {path.suffix!r}; use one of "
            f"{known}."
        )


def draw_leaks(
    model: torch.nn.Module,
    path: Path,
    examples: Optional[Sequence[Any]] = None,
    title: Optional[str] = None,
) -> None:
    """Write the leak maps of a model to ``path``, side by side.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: ``path`` is in no folder, or of no format that can be written.
    """
    check_picture(path)
    batch, maps = leak_maps(model, examples)
    from . import compat

    title = title or f"{type(model).__name__}, Transformers {compat.release()}"
    _draw(maps, [p.start for p in batch.pieces], title, path)


def _draw(maps: Mapping[str, torch.Tensor], starts: list[int], title: str, path: Path) -> None:
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
