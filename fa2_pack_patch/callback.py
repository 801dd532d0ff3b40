"""``Fa2PackPatchCallback`` for Transformers' ``Trainer``: applies, checks, reports.

The class is made when its name is first asked for, since its base is in Transformers.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Optional

import torch

from .apply import apply, is_applied, revert
from .compat import is_compiling
from .detect import find_base
from .errors import PackingError
from .layout import PackedLayout
from .patch import ATTRIBUTE, PatchReport

if TYPE_CHECKING:
    Fa2PackPatchCallback: Any

NAME = "Fa2PackPatchCallback"


@dataclass
class Seen:
    """What the training forwards since the last log were."""

    forwards: int = 0
    packed: int = 0
    real: Any = 0
    computed: int = 0
    padded: Any = 0


class PackingEvents:
    """Applies :func:`fa2_pack_patch.apply` when the trainer is made, or, if it was added later or
    is to revert, when training begins; checks that training runs packed, and reports how it went.

    ::

        trainer = Trainer(model, args, data_collator=DataCollatorWithFlattening(), ...,
                          callbacks=[Fa2PackPatchCallback()])

    Each log line of the training loss gets three more values, of this process since the last one:
    ``packed_share`` (packed forwards of all training forwards), ``padding_saved`` (the share of
    tokens that padding to the longest example would have added, 0 to 1), and
    ``packed_tokens_per_second`` (real tokens). They are in ``trainer.state.log_history`` as well.
    ``Trainer`` calls the integrations of ``report_to`` before the callbacks of ``callbacks=``; for
    them to see the values too, call :meth:`put_first` with the trainer. Compiled forwards
    (``torch_compile=True``) are neither counted nor checked, so that the graph stays whole.

    Args:
        kernel: as for :func:`fa2_pack_patch.apply`.
        allow_unverified: likewise.
        check_steps: raise when no forward of the first so many optimizer steps was packed;
            0 never raises.
        revert_at_end: undo the patch when training ends, if it was made here. Then only training
            is patched, and no evaluation before or after it.

    Raises:
        PackingError: at the end of step ``check_steps``, with what the model was given instead.
    """

    def __init__(
        self,
        *,
        kernel: str = "auto",
        allow_unverified: bool = False,
        check_steps: int = 2,
        revert_at_end: bool = False,
    ) -> None:
        if check_steps < 0:
            raise PackingError(f"check_steps must be 0 or more, got {check_steps}.")
        self.kernel = kernel
        self.allow_unverified = allow_unverified
        self.check_steps = check_steps
        self.revert_at_end = revert_at_end
        #: what :func:`fa2_pack_patch.apply` reported
        self.report: Optional[PatchReport] = None
        self._seen = Seen()
        self._steps = self._packed_in_all = 0
        self._last = ""
        self._since = 0.0
        self._mine = False
        self._compiled = False
        self._mask: Any = None
        self._handles: list[Any] = []

    def put_first(self, trainer: Any) -> None:
        """Move this callback before all others of ``trainer``, so that all of them see its values.

        Raises:
            PackingError: it is none of the trainer's callbacks.
        """
        callbacks = trainer.callback_handler.callbacks
        if not any(callback is self for callback in callbacks):
            raise PackingError(
                f"this {NAME} is not a callback of the trainer; give it as callbacks=[...] first."
            )
        callbacks[:] = [self, *(callback for callback in callbacks if callback is not self)]

    def on_init_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Apply, so that ``evaluate`` and ``predict`` before training run packed too."""
        model = more.get("model")
        if model is not None and not self.revert_at_end:
            self.report = apply(model, kernel=self.kernel, allow_unverified=self.allow_unverified)

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Apply (harmless when it was done before), and start counting."""
        model = more["model"]
        self._stop()
        self._mine |= not is_applied(model)  # or by a try that failed
        self.report = apply(model, kernel=self.kernel, allow_unverified=self.allow_unverified)
        base = next(base for _, base, _ in find_base(model) if ATTRIBUTE in base.__dict__)
        self._handles = [
            base.register_forward_pre_hook(self._before, with_kwargs=True),
            base.register_forward_hook(self._after, with_kwargs=True),
        ]
        # First of all, but not by prepend=True: that moves an entry of an OrderedDict, and Dynamo
        # goes by the order in which they came (in torch 2.11; not in 2.13).
        hooks = base._forward_pre_hooks
        for key in [key for key in hooks if key != self._handles[0].id]:
            hooks[key] = hooks.pop(key)
        self._seen, self._steps, self._packed_in_all = Seen(), 0, 0
        self._since = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """After the first steps: has anything been packed at all?"""
        self._steps += 1
        if self._steps == self.check_steps and not self._packed_in_all and not self._compiled:
            raise PackingError(
                f"no forward of the first {self._steps} training steps was packed; the last one "
                f"got {self._last or 'nothing'}. Use a data collator that flattens the batch and "
                "returns position_ids that start anew at each example, and a "
                "per_device_train_batch_size above 1. Pass check_steps=0 if this is meant."
            )

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: Optional[dict[str, Any]] = None,
        **more: Any,
    ) -> None:
        """Add the values to a log line of the training loss."""
        seen, now = self._seen, time.perf_counter()
        if logs is None or "loss" not in logs or not seen.computed:
            return
        values = {
            "packed_share": round(seen.packed / seen.forwards, 4),
            "padding_saved": round(1 - seen.computed / max(int(seen.padded), 1), 4),
            "packed_tokens_per_second": round(int(seen.real) / max(now - self._since, 1e-9), 1),
        }
        logs.update(values)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(values)
        self._seen, self._since = Seen(), now

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Stop counting; undo the patch if that was asked for."""
        self._stop()
        if self.revert_at_end and self._mine:
            revert(more["model"])
            self._mine = False

    def _stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _before(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if is_compiling():
            self._compiled = True  # a graph must not read or count anything here
        else:
            self._mask = kwargs.get("attention_mask")  # the patch takes it away

    def _after(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if is_compiling() or not module.training:
            return  # not counted: evaluation in between
        seen, mask, self._mask = self._seen, self._mask, None
        seen.forwards += 1
        positions = kwargs.get("position_ids")
        patch = module.__dict__.get(ATTRIBUTE)
        run = None
        if patch is not None and isinstance(positions, torch.Tensor):
            run = patch.runs.bound(positions, patch)
        if run is not None:
            real, padded = counts(run.layout, mask)
            seen.packed += 1
            self._packed_in_all += 1
            seen.real = seen.real + real
            seen.computed += run.layout.tokens
            seen.padded = seen.padded + padded
            return
        inputs = kwargs.get("input_ids")
        if inputs is None:
            inputs = kwargs.get("inputs_embeds", args[0] if args else None)
        shape = tuple(inputs.shape) if isinstance(inputs, torch.Tensor) else ()
        given = sorted(k for k, v in kwargs.items() if v is not None)
        self._last = f"an input of shape {shape} with {given}"
        if len(shape) >= 2:
            plain = isinstance(mask, torch.Tensor) and mask.shape == shape[:2]
            tokens = shape[0] * shape[1]
            seen.real = seen.real + (mask.ne(0).sum() if plain else tokens)
            seen.computed += tokens
            seen.padded = seen.padded + tokens


def counts(layout: Any, mask: Optional[torch.Tensor]) -> tuple[Any, Any]:
    """Real tokens, and tokens of the padded batch; nothing waits for the device.

    Args:
        layout: a :class:`PackedLayout`, or one whose lengths are on the device alone.
        mask: the call's 0/1 mask, or None; a layout on the device does not know its padding.

    Returns:
        Python ints, or int64 scalars on the device.
    """
    if isinstance(layout, PackedLayout):
        flags = layout.padding or (False,) * layout.examples
        lengths = [n for n, pad in zip(layout.lengths, flags) if not pad]
        return sum(lengths), len(lengths) * max(lengths, default=0)
    starts = layout.cu_seqlens[:-1].to(torch.int64)
    sizes = layout.cu_seqlens.diff().to(torch.int64)
    if mask is not None and mask.numel() == layout.tokens:
        sizes = sizes * mask.reshape(-1).ne(0)[starts.clamp(max=layout.tokens - 1)]
    return sizes.sum(), sizes.ne(0).sum() * sizes.max()


def __getattr__(name: str) -> Any:
    if name != NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from transformers import TrainerCallback

    made = type(NAME, (PackingEvents, TrainerCallback), {"__doc__": PackingEvents.__doc__})
    made.__module__ = __name__
    globals()[NAME] = made  # so that pickle finds the one class
    return made
