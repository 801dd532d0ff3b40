"""The results files, read for rendering: the latest row of each cell and variant."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .measure import latest, read

Row = dict[str, Any]
#: Folders in that of the results: cells that were measured once more, by shorter runs.
AGAIN = "again*"
FOLDER = Path(__file__).resolve().parents[1] / "results" / "speed"


@dataclass
class Section:
    """One section's rows, and the machines they were measured on."""

    rows: list[Row] = field(default_factory=list)
    machines: list[Row] = field(default_factory=list)

    def cells(self) -> list[str]:
        """Names of cells, in the order of the file."""
        return list(dict.fromkeys(str(r["cell"]) for r in self.rows))

    def of(self, cell: str) -> dict[str, Row]:
        """A cell's rows by variant; where there are several releases, the last."""
        return {str(r["variant"]): r for r in self.rows if r["cell"] == cell}

    def where(self, **wanted: Any) -> list[Row]:
        """Rows whose fields are as given."""
        return [r for r in self.rows if all(r.get(k) == v for k, v in wanted.items())]


Results = dict[str, Section]


def load(folder: Path = FOLDER) -> Results:
    """All sections in ``folder/*.jsonl``; several files may hold rows of one section."""
    every: list[Row] = []
    for path in sorted(folder.glob("*.jsonl")):
        every += read(path)
    found: Results = {}
    for row in latest(every):
        found.setdefault(str(row["section"]), Section()).rows.append(row)
    for row in every:
        if row.get("kind") == "machine":
            machines = found.setdefault(str(row["section"]), Section()).machines
            kept = {k: v for k, v in row.items() if k not in ("section", "kind")}
            if kept not in machines:
                machines.append(kept)
    return found


def ratio(a: Row | None, b: Row | None, key: str = "tokens_per_second") -> float | None:
    """``a`` over ``b`` by one field, or None where one of them was not measured."""
    if a is None or b is None or a.get("error") or b.get("error"):
        return None
    over, under = a.get(key), b.get(key)
    return None if over is None or not under else float(over) / float(under)


def smoke(results: Results) -> bool:
    """Whether any row is of a --smoke run."""
    return any(row.get("smoke") for section in results.values() for row in section.rows)
