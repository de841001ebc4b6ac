"""A file of results that is written line by line, and read again when a run goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class ResultsFile:
    """Rows of one measurement; the first line says what was measured.

    Args:
        path: JSONL file; made with the first row.
        run: What every row was measured with.

    Attributes:
        rows: What is in the file.

    Raises:
        SystemExit: The file holds what was measured in another way.
    """

    def __init__(self, path: Path, run: dict[str, Any]) -> None:
        self._path, self._run = path, run
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        self._whole = text[: text.rfind("\n") + 1]  # a line that was being written when a run ended goes
        head, *self.rows = [json.loads(line) for line in self._whole.splitlines()] or [run]
        if head != run:
            changed = ", ".join(name for name in run if head.get(name) != run[name])
            raise SystemExit(f"{path} was measured with another {changed}; give another --out")
        self._is_open = False

    def append(self, row: dict[str, Any]) -> None:
        """Add a row, on disk at once."""
        if not self._is_open:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(self._whole or json.dumps(self._run) + "\n", encoding="utf-8")
            self._is_open = True
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        self.rows.append(row)
