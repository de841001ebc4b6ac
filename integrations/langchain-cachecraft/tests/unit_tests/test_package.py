"""The package as others see it: its names, its version, its type marker and its license."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import metadata
from pathlib import Path

import pytest

import langchain_cachecraft

FOLDER = Path(__file__).resolve().parents[2]


def test_the_package_gives_out_what_it_says() -> None:
    listed = langchain_cachecraft.__all__
    assert listed == sorted(set(listed))
    assert all(getattr(langchain_cachecraft, name) is not None for name in listed)
    with pytest.raises(AttributeError, match="has no attribute 'ChatGPT'"):
        _ = langchain_cachecraft.ChatGPT


def test_the_version_is_that_of_the_distribution_and_of_the_engine() -> None:
    assert langchain_cachecraft.__version__ == metadata("langchain-cachecraft")["Version"]
    assert langchain_cachecraft.__version__ == metadata("cachecraft-rag")["Version"]


def test_the_package_is_typed_and_licensed_and_describes_itself() -> None:
    assert (Path(langchain_cachecraft.__file__).parent / "py.typed").is_file()
    assert (FOLDER / "LICENSE").read_text() == (FOLDER.parents[1] / "LICENSE").read_text()
    described = metadata("langchain-cachecraft")
    assert described["License-Expression"] == "Apache-2.0"
    assert described["Description-Content-Type"] == "text/markdown"
    required = described.get_all("Requires-Dist") or []
    assert [name for name in required if name.startswith("langchain-core") and "extra" not in name]


def test_importing_it_needs_neither_langchain_nor_langgraph() -> None:
    command = "import sys, langchain_cachecraft; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", command], check=True, capture_output=True, text=True).stdout.split()
    assert "langchain_cachecraft" in loaded
    assert {"langchain", "langchain_classic", "langgraph"}.isdisjoint(loaded)
