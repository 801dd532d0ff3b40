"""What this release does with packed input: measured here, on tiny models, stock and patched."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Callable, Optional

import torch

from . import compat, kernels, twin
from .apply import applied
from .batches import Batch, Piece, pack
from .errors import Fa2PackPatchError
from .probe import Probe, undisturbed
from .registry import families
from .rounding import distance

_ONE: list[list[int]] = [[4, 9, 1, 6]]
_TWO: list[list[int]] = [[4, 9, 7], [11, 1, 8]]
#: Right is this near (in multiples of a typical logit), and wrong is off by 1 and more.
_LIMIT = {torch.float32: 2000 * 2.0**-23, torch.bfloat16: 16 * 2.0**-7}


@dataclass(frozen=True)
class Outcome:
    """One kind of input as one implementation: ``stock`` and ``patched`` are right, wrong, refused
    or error."""

    kind: str
    title: str
    implementation: str
    stock: str
    patched: str


def _draw(rows: Sequence[Sequence[int]], vocabulary: int) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    return [[torch.randint(3, vocabulary, (n,), generator=generator) for n in row] for row in rows]


def _plain(rows: Sequence[Sequence[int]], vocabulary: int, *, first: int = 0) -> Batch:
    batch = pack(_draw(rows, vocabulary), "doctor")
    pieces = [Piece(p.row, p.start, p.ids, p.positions + first) for p in batch.pieces]
    ids = batch.kwargs["input_ids"]
    positions = batch.kwargs["position_ids"] + first
    return Batch("", {"input_ids": ids, "position_ids": positions, "use_cache": False}, pieces)


def _with(batch: Batch, **more: Any) -> Batch:
    kwargs = {k: v for k, v in {**batch.kwargs, **more}.items() if v is not None}
    return Batch("", kwargs, batch.pieces)


def _segments(batch: Batch) -> torch.Tensor:
    found = torch.zeros_like(batch.kwargs["input_ids"])
    counts: dict[int, int] = {}
    for piece in batch.pieces:
        counts[piece.row] = counts.get(piece.row, 0) + 1
        found[piece.place] = counts[piece.row]
    return found


def _padded(rows: Sequence[Sequence[int]], vocabulary: int, at: Callable[[int], int]) -> Batch:
    """Three tokens of padding in every row, in front of the ``at(examples)``-th example."""
    plain = _plain(rows, vocabulary)
    shape = len(rows), plain.kwargs["input_ids"].shape[1] + 3
    ids, positions, mask = (torch.zeros(shape, dtype=torch.long) for _ in range(3))
    pieces, number = [], dict.fromkeys(range(len(rows)), 0)
    for piece in plain.pieces:
        late = number[piece.row] >= at(len(rows[piece.row]))
        number[piece.row] += 1
        moved = Piece(piece.row, piece.start + 3 * late, piece.ids, piece.positions)
        ids[moved.place], positions[moved.place], mask[moved.place] = piece.ids, piece.positions, 1
        pieces.append(moved)
    kwargs = {"input_ids": ids, "position_ids": positions, "attention_mask": mask}
    return Batch("", {**kwargs, "use_cache": False}, pieces)


def _varlen(batch: Batch) -> Batch:
    lengths = [len(p.ids) for p in batch.pieces]
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    longest = max(lengths)
    return _with(
        batch, cu_seq_lens_q=cu, cu_seq_lens_k=cu, max_length_q=longest, max_length_k=longest
    )


def _end(examples: int) -> int:
    return examples


def kinds(model: torch.nn.Module, vocabulary: int) -> list[tuple[str, str, Batch]]:
    """Name, title and batch of every kind of packed input."""
    one, two = _plain(_ONE, vocabulary), _plain(_TWO, vocabulary)
    equal = _plain([[4, 9, 7], [4, 9, 7]], vocabulary)
    positions = two.kwargs["position_ids"]
    padded = _padded(_TWO, vocabulary, _end)
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    embeds = embedding(two.kwargs["input_ids"].to(embedding.weight.device)).detach()
    rotated = positions.int().t().contiguous().t()
    ones = torch.ones_like(positions)
    return [
        ("positions", "one packed row, position_ids", one),
        ("rows", "two packed rows, position_ids", two),
        (
            "shared",
            "position_ids (1, tokens) for two rows",
            _with(equal, position_ids=equal.kwargs["position_ids"][:1]),
        ),
        ("int32", "int32, non-contiguous position_ids", _with(two, position_ids=rotated)),
        (
            "row_ones",
            "one packed row, all-ones mask",
            _with(one, attention_mask=torch.ones_like(one.kwargs["position_ids"])),
        ),
        ("ones", "two rows, all-ones mask", _with(two, attention_mask=ones)),
        ("padded_right", "packed row, padded right", _padded(_ONE, vocabulary, _end)),
        ("padded_left", "packed row, padded left", _padded(_ONE, vocabulary, lambda _: 0)),
        ("padded_middle", "packed row, padding inside", _padded(_ONE, vocabulary, lambda _: 1)),
        ("padded_rows", "two packed rows, padded", padded),
        (
            "segments",
            "segment-id mask, no padding",
            _with(one, position_ids=None, attention_mask=_segments(one)),
        ),
        (
            "segments_rows",
            "segment-id mask, two rows, padded",
            _with(padded, position_ids=None, attention_mask=_segments(padded)),
        ),
        ("varlen", "cu_seq_lens and max_length given", _varlen(two)),
        ("embeds", "inputs_embeds, two rows", _with(two, input_ids=None, inputs_embeds=embeds)),
        ("one_token", "examples of one token", _plain([[1, 1, 3, 1]], vocabulary)),
        ("offset", "examples that start at 3", _plain(_TWO, vocabulary, first=3)),
        ("default_cache", "use_cache left at its default", _with(two, use_cache=None)),
    ]


def tiny(implementation: str, family: str = "llama") -> torch.nn.Module:
    """A two-layer model of a family in the installed release, float32, on the CPU.

    Raises:
        ValueError, ImportError: this release cannot load it so.
    """
    known = families()[family]
    cls = getattr(importlib.import_module(known.module), known.causal)
    config = twin.twin_config(cls.config_class())
    model = twin.build(config, known, implementation)
    span = known.span(compat.release())
    assert span is not None
    base = Probe.of(model).base
    code = importlib.import_module(known.module)
    classes = {getattr(code, n) for n in span.classes if hasattr(code, n)}
    first = next(m for m in model.modules() if type(m) in classes)
    found = compat.implementation_of(first, base.config, span.via)
    if found != implementation:
        raise ValueError(f"asked for {implementation}, this release gives {found}; take that")
    return model


def _status(probe: Probe, batch: Batch, references: Sequence[Optional[torch.Tensor]]) -> str:
    try:
        out = probe.packed(batch).detach()
    except Fa2PackPatchError:
        return "refused"
    except Exception:
        return "error"
    wrong = any(
        distance(out[p.place], r) > _LIMIT[out.dtype]
        for p, r in zip(batch.pieces, references)
        if r is not None
    )
    return "wrong" if wrong else "right"


def _alone(probe: Probe, piece: Piece) -> torch.Tensor:
    """An example by itself; where stock loses one that starts at 3, the same one from 0 on."""
    out = probe.alone(piece).detach()
    if not bool(out.isfinite().all()):
        out = probe.alone(Piece(0, 0, piece.ids, piece.positions - piece.positions[0])).detach()
    return out


def examine(implementations: Optional[Sequence[str]] = None) -> list[Outcome]:
    """Every kind of packed input, stock and patched, for each implementation that loads here.

    All on the CPU in float32, but ``flash_attention_2`` on the GPU in bfloat16, by default if
    there is one and flash-attn.
    """
    found = []
    flash = torch.cuda.is_available() and kernels.KERNELS["flash_attn"].unavailable() is None
    by_default = ("eager", "sdpa", *(["flash_attention_2"] if flash else []))
    for implementation in implementations or by_default:
        try:
            model = tiny(implementation)
        except (ValueError, ImportError):
            continue
        if implementation == "flash_attention_2":
            model.to("cuda" if torch.cuda.is_available() else "cpu", torch.bfloat16)
        probe = Probe.of(model)
        with torch.no_grad(), undisturbed(model):
            batches = kinds(model, 128)
            alone = [[_alone(probe, p) for p in b.pieces] for _, _, b in batches]
            stock = [_status(probe, b, a) for (_, _, b), a in zip(batches, alone)]
            with applied(model, allow_unverified=True):
                patched = [_status(Probe.of(model), b, a) for (_, _, b), a in zip(batches, alone)]
        for (name, title, _), before, after in zip(batches, stock, patched):
            found.append(Outcome(name, title, implementation, before, after))
    return found


def decisions() -> dict[str, str]:
    """What would be chosen here, and why."""
    release = compat.release()
    found = {"release": f"transformers {release}: verified (the matrix was run)"}
    try:
        note = compat.check_release(release)
        if note:
            found["release"] = f"{note}; apply tries a two-layer twin of the model first"
    except Fa2PackPatchError as error:
        found["release"] = str(error)
    changed = [
        f.family for f in families().values() if f.span(release) and twin.altered(f) is not None
    ]
    found["code"] = (
        f"altered since it was installed: {', '.join(changed)}; apply tries a twin first"
        if changed
        else "as it was installed"
    )
    for name, dtype, device in _calls():
        call = kernels.AttentionCall(
            device=device, dtype=dtype, heads=8, kv_heads=8, head_dim=64, window=None,
            softcap=None, dropout=0.0, needs_grad=True,
        )  # fmt: skip
        chosen = kernels.choose("auto", call).name
        passed_over = []
        for kernel in kernels.KERNELS.values():
            if kernel.name == chosen:
                break
            why = kernel.unavailable() or "; ".join(kernel.refuses(call))
            passed_over.append(f"{kernel.name}: {why}")
        found[f"kernel, {name}"] = chosen + "".join(f" ({p})" for p in passed_over)
    return found


def _calls() -> list[tuple[str, torch.dtype, torch.device]]:
    found = [("float32 on the CPU", torch.float32, torch.device("cpu"))]
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        found += [
            ("bfloat16 on the GPU", torch.bfloat16, device),
            ("float32 on the GPU", torch.float32, device),
        ]
    return found
