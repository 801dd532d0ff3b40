"""Running a model on packed batches and on their examples alone, and how exact PyTorch itself is.

Nothing here uses :mod:`fa2_pack_patch.layout`: what is proved must not be its own witness.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Callable, Optional, Union

import torch

from .detect import find_base
from .errors import PackingError, UnsupportedModelError
from .patch import ATTRIBUTE, Patch
from .registry import Family
from .runs import Run, Runs

#: One example a sequence of token ids, or a packed batch as the model is called with.
Examples = Union[Mapping[str, Any], Sequence[Union[Sequence[int], torch.Tensor]]]
#: Gradients by name: ``embeddings`` per example, and a sketch of each parameter's.
Gradients = dict[str, torch.Tensor]

_ONE: list[int] = [6, 9, 2, 7]
_ROWS: list[list[int]] = [[4, 9], [8, 3]]
_REACH = 1024
#: A sketch holds no fewer numbers: the norm of a few random ones says little.
_KEPT = 64


@dataclass(frozen=True)
class Piece:
    """One example and where it stands: ``ids`` and ``positions`` are int64 ``(length,)``."""

    row: int
    start: int
    ids: torch.Tensor
    positions: torch.Tensor

    @property
    def place(self) -> tuple[int, slice]:
        return self.row, slice(self.start, self.start + len(self.ids))


@dataclass(frozen=True)
class Batch:
    """Keyword arguments of one packed call, the examples in it, and its padding ``(rows, T)``."""

    name: str
    kwargs: dict[str, Any]
    pieces: list[Piece]
    padding: Optional[torch.Tensor] = None


def pack(rows: Sequence[Sequence[torch.Tensor]], name: str) -> Batch:
    """Examples end to end, one row for each list; shorter rows are padded right with a mask."""
    width = max(sum(len(ids) for ids in row) for row in rows)
    shape = len(rows), width
    ids, positions = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    mask, pieces = torch.zeros(shape, dtype=torch.long), []
    for r, row in enumerate(rows):
        at = 0
        for tokens in row:
            piece = Piece(r, at, tokens, torch.arange(len(tokens)))
            ids[piece.place], positions[piece.place], mask[piece.place] = tokens, piece.positions, 1
            pieces.append(piece)
            at += len(tokens)
    kwargs: dict[str, Any] = {"input_ids": ids, "position_ids": positions}
    if bool(mask.all()):
        return Batch(name, kwargs, pieces)
    return Batch(name, {**kwargs, "attention_mask": mask}, pieces, mask == 0)


def random_batches(vocabulary: int, window: Optional[int]) -> list[Batch]:
    """Two small packed batches: one row without padding, two rows with padding.

    With a sliding window of up to 1024 tokens the first example of the row is longer than it.
    """
    generator = torch.Generator().manual_seed(20)

    def draw(length: int) -> torch.Tensor:
        return torch.randint(1, vocabulary, (length,), generator=generator)

    lengths = list(_ONE)
    if window and window <= _REACH:
        lengths[0] = max(lengths[0], window + 4)
    return [
        pack([[draw(n) for n in lengths]], "one row"),
        pack([[draw(n) for n in row] for row in _ROWS], "padded rows"),
    ]


def given_batch(examples: Examples) -> Batch:
    """The user's own examples, or packed batch, as a :class:`Batch`.

    Raises:
        PackingError: fewer than two examples, an empty one, or a batch without boundaries.
    """
    if isinstance(examples, Mapping):
        return _read_batch(examples)
    tokens = [torch.as_tensor(e).detach().cpu().to(torch.int64).reshape(-1) for e in examples]
    if len(tokens) < 2 or any(len(t) == 0 for t in tokens):
        raise PackingError(
            f"verify needs at least two examples of at least one token, got lengths "
            f"{[len(t) for t in tokens]}."
        )
    return pack([tokens], "your examples")


def _read_batch(given: Mapping[str, Any]) -> Batch:
    kwargs = {k: v for k, v in given.items() if v is not None and k != "labels"}
    ids = kwargs.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        raise PackingError(
            "verify needs a batch with input_ids (rows, tokens), got "
            f"{tuple(ids.shape) if isinstance(ids, torch.Tensor) else sorted(kwargs)}."
        )
    ids = ids.detach().cpu().to(torch.int64)
    rows, width = ids.shape
    starts = torch.zeros(rows, width, dtype=torch.bool)
    starts[:, 0] = True
    positions = kwargs.get("position_ids")
    if positions is not None:
        positions = positions.detach().cpu().to(torch.int64).reshape(-1, width).expand(rows, width)
        starts[:, 1:] |= positions[:, 1:] <= positions[:, :-1]
    mask = kwargs.get("attention_mask")
    real = torch.ones(rows, width, dtype=torch.bool)
    if mask is not None:
        mask = mask.detach().cpu().to(torch.int64)
        real = mask != 0
        starts[:, 1:] |= mask[:, 1:] != mask[:, :-1]
    lengths = kwargs.get("cu_seq_lens_q")
    if lengths is not None:
        inner = torch.as_tensor(lengths).detach().cpu().to(torch.int64)
        starts.view(-1)[inner[inner < rows * width]] = True
    pieces = []
    for r in range(rows):
        edges = [*starts[r].nonzero().reshape(-1).tolist(), width]
        for a, b in zip(edges, edges[1:]):
            if bool(real[r, a]):
                place = torch.arange(b - a) if positions is None else positions[r, a:b]
                pieces.append(Piece(r, a, ids[r, a:b], place))
    if len(pieces) <= rows:
        raise PackingError(
            f"verify needs a packed batch, but {rows} rows of {width} tokens hold "
            f"{len(pieces)} examples: position_ids must start anew inside a row."
        )
    return Batch("your batch", kwargs, pieces, None if bool(real.all()) else ~real)


@dataclass
class Probe:
    """A model and how it is called for a proof."""

    model: torch.nn.Module
    base: torch.nn.Module
    family: Family
    embedding: torch.nn.Module
    device: torch.device
    reference: torch.nn.Module
    patch: Optional[Patch]
    runs: list[Run] = field(default_factory=list)

    @classmethod
    def of(cls, model: torch.nn.Module) -> Probe:
        """Look through wrappers for the model to call.

        Raises:
            UnsupportedModelError: no language model of a known family in it, or several.
        """
        bases = find_base(model)
        if len(bases) != 1:
            raise UnsupportedModelError(
                type(model).__name__,
                [f"it holds {len(bases)} language models of known families; one can be verified"],
            )
        _, base, family = bases[0]
        call = model
        while type(call).__name__ in ("DistributedDataParallel", "DataParallel"):
            call = call.module  # type: ignore[assignment]
        if any(type(m).__name__ in family.pooled for m in model.modules()):
            call = base
        embedding = base.get_input_embeddings()  # type: ignore[operator]
        patch = base.__dict__.get(ATTRIBUTE)
        return cls(
            model=call,
            base=base,
            family=family,
            embedding=embedding,
            device=_device(base, embedding),
            reference=getattr(call, "_orig_mod", call),  # the eager model under torch.compile
            patch=patch if isinstance(patch, Patch) else None,
        )

    @property
    def layers(self) -> int:
        return int(self.base.config.num_hidden_layers)  # type: ignore[union-attr,arg-type]

    def packed(self, batch: Batch, **changed: torch.Tensor) -> torch.Tensor:
        """``(rows, T, width)``: logits, or hidden states of a bare base model."""
        moved = {
            k: v.to(self.device) if isinstance(v, torch.Tensor) else v
            for k, v in {**batch.kwargs, **changed}.items()
        }
        return _output(self.model(**moved))

    def alone(self, piece: Piece) -> torch.Tensor:
        """``(length, width)`` of one example by itself."""
        ids = piece.ids[None].to(self.device)
        positions = piece.positions[None].to(self.device)
        try:
            out = self.reference(input_ids=ids, position_ids=positions, use_cache=False)
        except (IndexError, RuntimeError, TypeError):
            # Rotary tables of old releases end at the row's length, and Falcon's eager of 4.36 to
            # 4.43 wants a mask for one token.
            out = self.reference(
                input_ids=ids,
                position_ids=positions - positions[0, 0],
                attention_mask=torch.ones_like(ids),
                use_cache=False,
            )
        return _output(out)[0]

    def mixed(self, batch: Batch) -> list[torch.Tensor]:
        """The same as :meth:`alone`, each row run as if it were one example."""
        ids = batch.kwargs["input_ids"].to(self.device)
        rows = torch.arange(ids.shape[1], device=self.device).expand(ids.shape)
        out = _output(self.reference(input_ids=ids, position_ids=rows, use_cache=False))
        return [out[p.place] for p in batch.pieces]

    @contextmanager
    def recorded(self) -> Iterator[list[Run]]:
        """Keep the runs of packed forwards in the block."""
        patch = self.patch
        if patch is None:
            yield []
            return
        before, seen = patch.runs, patch.explicit_seen
        patch.runs = recorder = _Recorder()
        try:
            yield recorder.seen
        finally:
            patch.runs, patch.explicit_seen = before, seen


class _Recorder(Runs):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Run] = []

    def bind(self, position_ids: torch.Tensor, run: Run) -> None:
        if all(run is not other for other in self.seen):
            self.seen.append(run)
        super().bind(position_ids, run)


def _device(base: torch.nn.Module, embedding: torch.nn.Module) -> torch.device:
    weight = next(embedding.parameters(), None)
    if weight is not None and weight.device.type != "meta":
        return weight.device
    hook = getattr(embedding, "_hf_hook", None)
    hooks = [hook, *getattr(hook, "hooks", ())]
    for found in (getattr(h, "execution_device", None) for h in hooks):
        if found is not None:
            return torch.device(found if not isinstance(found, int) else f"cuda:{found}")
    real = (p.device for p in base.parameters() if p.device.type != "meta")
    return next(real, torch.device("cpu"))


def _output(out: Any) -> torch.Tensor:
    for name in ("logits", "last_hidden_state"):
        found = getattr(out, name, None)
        if isinstance(found, torch.Tensor):
            return found
    assert isinstance(out[0], torch.Tensor)
    return out[0]


def unit(tensor: torch.Tensor) -> float:
    """The relative rounding error of one matrix product whose result is ``tensor``, as a deviation.

    One rounding to its dtype, and those of a sum of as many terms as it is wide in float32, in
    which PyTorch accumulates half precision and Transformers computes norms, softmax and rotary
    phases of any dtype; errors of a sum grow with the root of its length. A rounding is off by
    anything within half an epsilon, which deviates by epsilon / sqrt(12).
    """
    accumulated = torch.finfo(torch.float32).eps
    coarse = torch.get_float32_matmul_precision() != "highest"
    if coarse and tensor.device.type == "cuda" and tensor.dtype == torch.float32:
        accumulated = 2.0**-10  # TF32
    width = tensor.shape[-1] if tensor.dim() else 1
    own = torch.finfo(tensor.dtype).eps
    return float(own + math.sqrt(width) * accumulated) / math.sqrt(12)


@contextmanager
def rounded(model: torch.nn.Module, seed: int) -> Iterator[None]:
    """Every module without children rounds otherwise: its output, and the gradient of it.

    What PyTorch itself does when it is given the same numbers in another shape, so the distance to
    an undisturbed run is PyTorch's own error.
    """
    generators: dict[torch.device, torch.Generator] = {}

    def disturb(tensor: torch.Tensor) -> torch.Tensor:
        device = tensor.device
        if device not in generators:
            generators[device] = torch.Generator(device).manual_seed(seed)
        noise = torch.randn(tensor.shape, generator=generators[device], device=device)
        wide = tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))
        size = wide.square().mean(-1, keepdim=True).sqrt() * unit(tensor)
        return tensor + (noise * size).to(tensor.dtype)

    def hook(_: torch.nn.Module, __: Any, out: Any) -> Any:
        if not isinstance(out, torch.Tensor) or not out.is_floating_point() or not out.dim():
            return None
        changed = disturb(out)
        if changed.requires_grad:
            changed.register_hook(disturb)  # type: ignore[no-untyped-call]
        return changed

    leaves = [m for m in model.modules() if not any(True for _ in m.children())]
    with ExitStack() as stack:
        for leaf in leaves:
            stack.callback(leaf.register_forward_hook(hook).remove)
        yield


@contextmanager
def embedded(probe: Probe) -> Iterator[list[torch.Tensor]]:
    """Collects the embeddings that enter the model, with gradients on."""
    seen: list[torch.Tensor] = []

    def hook(_: torch.nn.Module, __: Any, out: torch.Tensor) -> torch.Tensor:
        if not out.requires_grad:
            out = out.detach().requires_grad_()
        seen.append(out)
        return out

    handle = probe.embedding.register_forward_hook(hook)
    try:
        with torch.enable_grad():
            yield seen
    finally:
        handle.remove()


def weights_of(pieces: Sequence[Piece], outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Fixed random weights ``(length, width)`` of each example's outputs: the loss is their sum."""
    found = []
    for n, (piece, out) in enumerate(zip(pieces, outputs)):
        generator = torch.Generator().manual_seed(500 + n)
        shape = len(piece.ids), out.shape[-1]
        found.append(torch.randn(shape, generator=generator) / math.sqrt(out.shape[-1]))
    return found


def loss_of(out: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    wide = torch.promote_types(out.dtype, torch.float32)
    return (out.to(wide) * weights.to(out.device)).sum()


def trained(probe: Probe) -> dict[str, torch.nn.Parameter]:
    """The parameters whose gradients can be compared."""
    return {
        n: p
        for n, p in probe.reference.named_parameters()
        if p.requires_grad and p.numel() and p.device.type != "meta"
    }


def sketches(
    names: Sequence[str], gradients: Sequence[Optional[torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """Each gradient summed over its last dimension with fixed random signs; small ones as they are.

    Linear and of the same expected norm, so sketches are added and compared in place of gradients.
    """
    found = {}
    for name, gradient in zip(names, gradients):
        if gradient is None:
            continue
        if gradient.dim() < 2 or gradient.numel() < _KEPT * gradient.shape[-1]:
            found[name] = gradient.detach().double().cpu()
            continue
        generator = torch.Generator().manual_seed(gradient.shape[-1])
        signs = torch.randint(0, 2, (gradient.shape[-1],), generator=generator) * 2 - 1
        wide = torch.promote_types(gradient.dtype, torch.float32)
        found[name] = (gradient.detach().to(wide) @ signs.to(gradient.device, wide)).double().cpu()
    return found


def distance(got: torch.Tensor, want: torch.Tensor, *, typical: bool = False) -> float:
    """The 2-norm of a token's difference, over the root mean square of the tokens' norms.

    The largest of all tokens, or with ``typical`` their upper quartile.
    """
    size = want.double().norm(dim=-1).square().mean().sqrt()
    each_token = (got.double() - want.double()).norm(dim=-1)
    if not bool(each_token.isfinite().all()):
        return math.inf
    found = float(each_token.quantile(0.75) if typical else each_token.max())
    return found / float(size) if float(size) else found


@contextmanager
def undisturbed(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode inside; random state, training modes and modules' caches as before after."""
    cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    training = [(m, m.training) for m in model.modules()]
    own = [m for m in model.modules() if type(m).__module__.startswith("transformers.")]
    before = [(m, dict(m.__dict__), dict(m._buffers)) for m in own]
    try:
        with torch.random.fork_rng(devices=range(cuda)):
            for module, _ in training:
                module.training = False
            yield
    finally:
        for module, mode in training:
            module.training = mode
        for module, attributes, buffers in before:
            _restore(module, attributes, buffers)


_PLAIN = (torch.Tensor, int, float, bool, str, type(None))


def _restore(
    module: torch.nn.Module, attributes: dict[str, Any], buffers: dict[str, Optional[torch.Tensor]]
) -> None:
    for name, value in attributes.items():  # lengths and tables that a rotary embedding keeps
        if isinstance(value, _PLAIN) and module.__dict__.get(name, value) is not value:
            module.__dict__[name] = value
    for name, old in buffers.items():
        new = module._buffers.get(name)
        moved = old is not None and new is not None and old.device != new.device
        if new is not old and not moved:
            module._buffers[name] = old


def losses(out: torch.Tensor, batch: Batch, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [loss_of(out[p.place], w) for p, w in zip(batch.pieces, weights)]


def gradients_alone(
    probe: Probe, pieces: Sequence[Piece], weights: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], Gradients]:
    """Of each example by itself: of its embeddings, and summed over all, of each parameter."""
    parameters = trained(probe)
    tokens: list[torch.Tensor] = []
    total: Gradients = {}
    for piece, weight in zip(pieces, weights):
        with embedded(probe) as seen:
            loss = loss_of(probe.alone(piece), weight)
            inputs = [seen[-1], *parameters.values()]
            found = torch.autograd.grad(loss, inputs, allow_unused=True)
        assert found[0] is not None
        tokens.append(found[0][0].detach().cpu())
        for name, sketch in sketches(list(parameters), found[1:]).items():
            total[name] = total[name] + sketch if name in total else sketch
    return tokens, total


def each(function: Callable[[Piece], torch.Tensor], pieces: Sequence[Piece]) -> list[torch.Tensor]:
    """``function`` of every example, detached and on the CPU in at least float32."""
    found = []
    for piece in pieces:
        out = function(piece).detach()
        found.append(out.to(torch.promote_types(out.dtype, torch.float32)).cpu())
    return found
