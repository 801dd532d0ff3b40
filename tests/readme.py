"""The generated parts of README.md: ``python -m tests.readme [--check]``."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from fa2_pack_patch import cli

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"


def speed() -> tuple[str, str]:
    """Rows of the speed table, and the sentence on synchronisations."""
    head = "| Transformers | padded, flash_attention_2 | packed, stock | packed, patched | patched, `torch_flash` |"
    rows, syncs = [head, "| --- | --- | --- | --- | --- |"], []
    for path in sorted((ROOT / "benchmarks" / "results").glob("h200_*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        rates = result["real_tokens_per_second"]
        padded = rates["padded"]
        cells = [
            f"{v:,} ({v / padded:.2f}x)" if isinstance(v, int) else "–" for v in rates.values()
        ]
        rows.append(f"| {result['transformers']} | " + " | ".join(cells) + " |")
        counted = result["synchronisations"]
        stock = counted["stock"] if isinstance(counted["stock"], int) else "not counted"
        syncs.append(
            f"Transformers {result['transformers']}: stock {stock}, {counted['patched']} patched"
        )
    return "\n".join(rows), "; ".join(syncs) + "."


def current(text: str) -> str:
    """The page with its generated parts made anew."""
    rows, syncs = speed()
    text = _between(text, "families", cli.families_table(markdown=True))
    text = _between(text, "speed", rows)
    return re.sub(r"<!-- sync -->.*", lambda _: f"<!-- sync -->{syncs}", text)


def _between(text: str, name: str, new: str) -> str:
    pattern = rf"<!-- {name} -->\n(?:.*?\n<!-- /{name} -->\n)?"
    return re.sub(
        pattern, lambda _: f"<!-- {name} -->\n{new}\n<!-- /{name} -->\n", text, flags=re.DOTALL
    )


def main() -> int:
    text = README.read_text(encoding="utf-8")
    if "--check" in sys.argv:
        if current(text) == text:
            return 0
        print("README.md is stale: run python -m tests.readme")
        return 1
    README.write_text(current(text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
