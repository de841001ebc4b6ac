"""The package as LlamaHub and others see it: its names, its type marker, its license and its metadata."""

from __future__ import annotations

from importlib.metadata import metadata
from pathlib import Path

from llama_index.core.base.llms.base import BaseLLM
from llama_index.llms import cachecraft

FOLDER = Path(__file__).resolve().parents[1]


def test_the_package_gives_out_what_it_says() -> None:
    assert cachecraft.__all__ == sorted(set(cachecraft.__all__))
    assert all(getattr(cachecraft, name) is not None for name in cachecraft.__all__)


def test_the_llm_is_one_of_llama_index() -> None:
    assert BaseLLM.__name__ in [base.__name__ for base in cachecraft.CacheCraftLLM.__mro__]


def test_llama_hub_finds_the_llm() -> None:
    project = (FOLDER / "pyproject.toml").read_text()
    assert f'[tool.llamahub]\ncontains_example = false\nimport_path = "{cachecraft.__name__}"' in project
    assert f"[tool.llamahub.class_authors]\n{cachecraft.CacheCraftLLM.class_name()} = " in project


def test_the_package_is_typed_and_licensed_and_describes_itself() -> None:
    assert (Path(cachecraft.__file__).parent / "py.typed").is_file()
    assert (FOLDER / "LICENSE").read_text() == (FOLDER.parents[1] / "LICENSE").read_text()
    described = metadata("llama-index-llms-cachecraft")
    assert described["License-Expression"] == "Apache-2.0"
    assert described["Description-Content-Type"] == "text/markdown"
    assert described["Version"] == metadata("cachecraft-rag")["Version"]
    required = described.get_all("Requires-Dist") or []
    assert [name for name in required if name.startswith("llama-index-core") and "extra" not in name]
