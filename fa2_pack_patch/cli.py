"""``python -m fa2_pack_patch env | families | check DIR | verify DIR | doctor | matrix``.

Exit status: 0 fine; 1 not supported, not proved or not right; 2 wrong use, or nothing could be
read. ``verify``, ``doctor`` and ``matrix --release`` print one JSON object with ``--json``.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Optional

from packaging.version import InvalidVersion, Version

from . import __version__, compat, kernels
from .apply import supports
from .errors import Fa2PackPatchError, in_words
from .registry import Family, families

#: What a default config lacks in some releases.
_OPTIONS: dict[str, dict[str, Any]] = {
    "dbrx": {"attn_config": {"kv_n_heads": 8, "clip_qkv": 8.0, "rope_theta": 10000.0}}
}


def versions() -> dict[str, Optional[str]]:
    """The installed packages that matter, None where one is not there."""
    found: dict[str, Optional[str]] = {"fa2_pack_patch": __version__}
    found.update(platform=platform.platform(), python=platform.python_version())
    for name in ("transformers", "torch", "flash-attn", "accelerate", "peft", "trl"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def env() -> str:
    """What a bug report should hold, as ``- key: value`` lines."""
    lines = ["Copy the text below into your issue.", "", f"- `fa2_pack_patch`: {__version__}"]
    lines.append(f"- platform: {platform.platform()}")
    lines.append(f"- Python: {platform.python_version()}")
    for name in ("transformers", "torch", "flash-attn", "accelerate", "peft", "trl"):
        try:
            lines.append(f"- {name}: {version(name)}")
        except PackageNotFoundError:
            lines.append(f"- {name}: not installed")
    import torch

    if torch.cuda.is_available():
        lines.append(f"- GPU: {torch.cuda.get_device_name()} (CUDA {torch.version.cuda})")
    else:
        lines.append("- GPU: none seen by torch")
    for kernel in kernels.KERNELS.values():
        lines.append(f"- kernel {kernel.name}: {kernel.unavailable() or 'available'}")
    lines.append(f"- verified Transformers: {compat.OLDEST} to {compat.NEWEST}")
    return "\n".join(lines)


def families_table(markdown: bool = False) -> str:
    """The registry as a table: family, model types, since which release, how it is reached."""
    rows = [("family", "model types", "since", "reached by", "refuses")]
    for family in families().values():
        rows.append(
            (
                family.title,
                ", ".join(family.model_types),
                str(family.since),
                _reached(family),
                "; ".join(
                    ", ".join(f"{k}={v}" for k, v in r.when.items())
                    + (f" in {r.releases}" if str(r.releases) else "")
                    for r in family.refusals
                ),
            )
        )
    if markdown:
        lines = ["| " + " | ".join(row) + " |" for row in rows]
        lines.insert(1, "|" + " --- |" * len(rows[0]))
        return "\n".join(lines)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in rows)


def _reached(family: Family) -> str:
    return ", ".join(f"{s.via} {s.releases}" for s in family.spans)


def check(target: str) -> int:
    """The verdict on a config file or a model folder; 0 supported, 1 not, 2 unreadable."""
    path = Path(target)
    if not path.exists():
        print(
            f"{target!r} is neither a config.json nor a folder with one; give the path of one "
            "that is on this machine (nothing is downloaded).",
            file=sys.stderr,
        )
        return 2
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(str(path), trust_remote_code=False)
    except Exception as error:
        print(f"{target!r} could not be read as a config: {error}", file=sys.stderr)
        return 2
    verdict = supports(config)
    print(verdict)
    return 0 if verdict else 1


def _load(options: argparse.Namespace) -> Any:
    """The causal model in a folder, in its own dtype unless another is given."""
    import torch
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, options.dtype) if options.dtype else "auto"
    name = compat.dtype_keyword(compat.release())
    more: dict[str, Any] = {name: dtype, "trust_remote_code": False}
    if options.implementation:
        more["attn_implementation"] = options.implementation
    return AutoModelForCausalLM.from_pretrained(options.target, **more)


def prove(options: argparse.Namespace) -> int:
    """Load a model, patch it and verify it; 0 passed, 1 refused or failed, 2 unreadable."""
    import torch

    from .apply import apply
    from .plots import check_picture
    from .verify import verify

    if not Path(options.target).is_dir():
        print(
            f"{options.target!r} is not a folder with a model; give one that is on this machine "
            "(nothing is downloaded).",
            file=sys.stderr,
        )
        return 2
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(1, device=device)
        if options.plot:
            check_picture(options.plot)
    except (ImportError, ValueError) as error:
        print(f"--plot {options.plot}: {error}", file=sys.stderr)
        return 2
    except (RuntimeError, AssertionError) as error:
        print(f"--device {device} cannot be used: {error}", file=sys.stderr)
        return 2
    try:
        model = _load(options).to(device)
    except Exception as error:
        print(f"{options.target!r} could not be loaded as a model: {error}", file=sys.stderr)
        return 2
    result: dict[str, Any] = {"target": options.target, "versions": versions()}
    try:
        patched = apply(model, kernel=options.kernel, allow_unverified=options.allow_unverified)
        report = verify(model)
    except Fa2PackPatchError as error:
        _print(options, {**result, "passed": False, "refused": str(error)}, str(error))
        return 1
    result.update(passed=report.passed, patch=str(patched), verify=report.to_dict())
    text = f"{patched}\n{report}"
    if not report.passed:
        text += (
            "\nDo not train on packed rows with this. Please open an issue with this output and "
            "that of `python -m fa2_pack_patch doctor`."
        )
    if options.plot:
        try:
            report.plot(options.plot)
            text += f"\nleak map: {options.plot}"
        except OSError as error:
            text += f"\nleak map: could not be written to {options.plot!r}: {error}"
    _print(options, result, text)
    return 0 if report.passed else 1


def doctor(options: argparse.Namespace) -> int:
    """What this installation does with packed rows; 0 all right after apply, 1 not."""
    from . import doctor as measured

    outcomes = measured.examine()
    decided = measured.decisions()
    bad = [o for o in outcomes if o.patched != "right"]
    wrong = [o for o in outcomes if o.stock != "right"]
    result = {
        "passed": bool(outcomes) and not bad,
        "versions": versions(),
        "decisions": decided,
        "kinds": [vars(o) for o in outcomes],
    }
    lines = [env(), "", "What is decided here, and why:"]
    lines += [f"- {name}: {value}" for name, value in decided.items()]
    where = "float32, CPU; as flash-attention bfloat16, where there is a GPU for it"
    lines += ["", f"Packed input that stock gets wrong here (tiny Llama, {where}):"]
    for implementation in dict.fromkeys(o.implementation for o in outcomes):
        own = [o for o in wrong if o.implementation == implementation]
        lines.append(f"- loaded as {implementation}: {len(own)} kinds" if own else "- none")
        lines += [f"    {o.kind} ({o.title}): {o.stock}" for o in own]
    lines += ["", f"After apply: {len(outcomes) - len(bad)} of {len(outcomes)} right."]
    lines += [f"- {o.implementation}, {o.kind} ({o.title}): {o.patched}" for o in bad]
    lines.append(
        "Next: open an issue with this output."
        if bad
        else "Next: python -m fa2_pack_patch verify MODEL_DIR, the proof on your own model."
    )
    _print(options, result, "\n".join(lines))
    return 0 if result["passed"] else 1


def release_check(options: argparse.Namespace) -> int:
    """Every family of the installed release, a small model each, patched and verified."""
    from . import twin

    installed = str(compat.release())
    try:
        asked = Version(options.release)
    except InvalidVersion:
        print(
            f"--release {options.release!r} is no version; give one like 5.24.0.", file=sys.stderr
        )
        return 2
    if asked != compat.release():
        print(
            f"--release {options.release} was asked for, but transformers {installed} is "
            f"installed; pip install transformers=={options.release} first.",
            file=sys.stderr,
        )
        return 2
    chosen = [n.strip() for n in (options.families or "").split(",") if n.strip()]
    chosen = chosen or list(families())
    unknown = sorted(set(chosen) - set(families()))
    if unknown:
        print(
            f"--families {options.families}: unknown are {unknown}; known: "
            f"{', '.join(families())}.",
            file=sys.stderr,
        )
        return 2
    rows: dict[str, Any] = {}
    lines = [f"transformers {installed}"]
    for name in chosen:
        family = families()[name]
        if family.span(compat.release()) is None:
            continue
        try:
            cls = getattr(importlib.import_module(family.module), family.causal)
            config = cls.config_class(**_OPTIONS.get(name, {}))
            report = twin.try_twin(config, family)
            rows[name] = report.to_dict()
            lines.append(f"{name}: {'passed' if report.passed else report}")
        except Exception as error:
            why = in_words(error)
            rows[name] = {"passed": False, "error": why}
            lines.append(f"{name}: FAILED, {why}")
    passed = bool(rows) and all(row["passed"] for row in rows.values())
    lines.append(f"{sum(row['passed'] for row in rows.values())} of {len(rows)} families passed")
    result = {"passed": passed, "release": installed, "versions": versions(), "families": rows}
    _print(options, result, "\n".join(lines))
    return 0 if passed else 1


def _print(options: argparse.Namespace, result: dict[str, Any], text: str) -> None:
    print(json.dumps(result, indent=1) if options.json else text)


def matrix() -> int:
    """Where the compatibility matrix is, and how to run it."""
    try:
        run = importlib.import_module("tests.matrix.run")
    except ImportError:
        print(
            "The matrix is run from a checkout of the repository: "
            "python -m tests.matrix.run --add RELEASE; its results are in compat_matrix.md.",
            file=sys.stderr,
        )
        return 2
    return int(run.main(sys.argv[2:]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fa2_pack_patch",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("env", help="versions and kernels, for a bug report")
    listing = commands.add_parser("families", help="the registry as a table")
    listing.add_argument("--markdown", action="store_true")
    checking = commands.add_parser("check", help="is this config or model folder supported?")
    checking.add_argument("target", metavar="CONFIG_OR_MODEL_DIR")
    proving = commands.add_parser("verify", help="patch the model in a folder and prove it")
    proving.add_argument("target", metavar="MODEL_DIR")
    proving.add_argument("--device", help="cuda if there is one, else cpu")
    proving.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    proving.add_argument("--implementation", help="eager, sdpa, flash_attention_2, …")
    proving.add_argument("--kernel", default="auto", choices=("auto", *kernels.KERNELS))
    proving.add_argument("--allow-unverified", action="store_true")
    proving.add_argument("--plot", metavar="FILE", help="draw the leak map (needs matplotlib)")
    examining = commands.add_parser(
        "doctor", help="what stock gets wrong here, and what is decided"
    )
    matrices = commands.add_parser(
        "matrix", help="every family of the installed release; without --release, the whole matrix"
    )
    matrices.add_argument("--release", required=True, metavar="X.Y.Z")
    matrices.add_argument("--families", help="comma-separated; all by default")
    for command in (proving, examining, matrices):
        command.add_argument("--json", action="store_true", help="one JSON object")
    return parser


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """The command line; exit status 0 fine, 1 not supported or not right, 2 wrong use."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    ours = ("--release", "--families", "--json", "-h", "--help")
    if given[:1] == ["matrix"] and not any(g.split("=")[0] in ours for g in given):
        return matrix()
    options = _parser().parse_args(given)
    try:
        if options.command == "env":
            print(env())
        elif options.command == "families":
            print(families_table(options.markdown))
        elif options.command == "verify":
            return prove(options)
        elif options.command == "doctor":
            return doctor(options)
        elif options.command == "matrix":
            return release_check(options)
        else:
            return check(options.target)
    except Fa2PackPatchError as error:
        print(error, file=sys.stderr)
        return 1
    return 0
