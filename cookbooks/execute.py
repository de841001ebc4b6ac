"""Executes the notebooks and keeps their outputs in place: ``make cookbooks``.

    python cookbooks/execute.py [NOTEBOOK ...] [--model FOLDER_OR_HUB_ID]

With ``--model`` another model answers; that run is printed as Markdown and not kept.
"""

from __future__ import annotations

import argparse
import copy
import os
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

from cachecraft_rag.keys import digest
from cachecraft_rag.model_loader import resolve

FOLDER = Path(__file__).resolve().parent
NOTEBOOKS = tuple(sorted(FOLDER.glob("*.ipynb")))
SAMPLE_MODEL = "smollm2-135m"
"""What the notebooks name."""

# What a run leaves behind besides outputs says something of the machine and nothing of the notebook.
_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def read(path: Path) -> Any:
    """A notebook, as nbformat reads it."""
    return nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]


def execute(notebook: Any, model: str | None = None, timeout_s: int = 900) -> Any:
    """Run all cells in a fresh kernel, and return a copy of the notebook with the new outputs.

    Args:
        notebook: The notebook; left as it is.
        model: What its parameter cell sets ``MODEL`` to; ``None`` for what stands there.
        timeout_s: Most seconds a cell may take.

    Raises:
        nbclient.exceptions.CellExecutionError: A cell raised an exception.
    """
    if model is None:
        resolve(SAMPLE_MODEL)  # converted once, here: outputs must not show how far that is
    executed = copy.deepcopy(notebook)
    parameters = next(cell for cell in executed.cells if "parameters" in cell.metadata.get("tags", ()))
    source = parameters.source
    if model is not None:
        parameters.source = f"MODEL = {model!r}"
    client = NotebookClient(
        executed,
        timeout=timeout_s,
        kernel_name="python3",
        resources={"metadata": {"path": str(FOLDER)}},
        record_timing=False,
        coalesce_streams=True,
    )
    client.execute(env=_environment())
    parameters.source = source
    executed.metadata = nbformat.from_dict({**_METADATA, "sources": sources_digest(notebook)})  # type: ignore[no-untyped-call]
    return executed


def _environment() -> dict[str, str]:
    """The environment of the kernel: without hub and without warnings about how progress bars would be drawn."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore:IProgress not found"}


def sources_digest(notebook: Any) -> str:
    """Stands for the cells without their outputs; kept with the outputs, it tells whether they belong to the cells."""
    return digest(*(f"{cell.cell_type}\n{cell.source}" for cell in notebook.cells))


def texts(cell: Any) -> list[str]:
    """The outputs of a code cell, each in its simplest form."""
    found = []
    for output in cell.get("outputs", ()):
        data = output.get("data", {})
        found.append(output.get("text") or data.get("text/markdown") or data.get("text/plain") or "")
    return found


def main() -> None:
    """Run the notebooks that were named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="*", type=Path, default=NOTEBOOKS, help="default: all of this folder")
    parser.add_argument("--model", help="folder, alias or hub id; default: what the notebooks name")
    arguments = parser.parse_args()
    for path in arguments.notebooks:
        executed = execute(read(path), arguments.model)
        if arguments.model is None:
            nbformat.write(executed, path)  # type: ignore[no-untyped-call]
            print(f"{path.name}: executed")
        else:
            print(*(text for cell in executed.cells for text in texts(cell)), sep="\n\n")


if __name__ == "__main__":
    main()
