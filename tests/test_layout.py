"""The layout of the engine: who may import whom, and what no module of it may do.

Everything is read from the source with ``ast``, so a rule also holds for imports inside functions and for code that no
other test runs.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

import cachecraft_rag

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGE = Path(cachecraft_rag.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
MAX_LINES = 350

# From low to high: a module imports from its own row and from rows above it in this list, never from below it.
# A package counts as one module here. Names of modules that are still to be written may stand in the table.
LAYERS = (
    ("errors", "neutral_passages", "store_config", "settings_file", "stats"),
    ("single_flight", "in_flight", "cancellation", "thread_workers", "forgetting"),
    ("config",),
    ("keys", "cfo", "variants", "deviation", "calibration"),
    ("rope", "attention", "attention_record", "sparse_attention", "history", "similar"),
    ("chunk_kv", "prompt_kv", "piece_kv", "kv_pool"),
    ("registry", "pieces", "chunk_forms", "document_texts", "segment_tokenizer", "tool_calls"),
    ("headings",),
    ("units",),
    ("splitting",),
    ("chat_template", "piece_ids", "auto_chunks"),
    ("prompt", "detokenizer"),
    ("tools",),
    ("plan",),
    ("selection", "offset", "candidates"),
    ("model_adapter", "model_attention", "model_cache", "linear_rows"),
    ("model_loader", "model_state", "capability", "verify"),
    ("quality",),
    ("prefill", "sampling"),
    ("decode", "encoder"),
    ("store",),
    ("assembly", "variant_choice", "request_chunk", "prompt_heads", "neighbours"),
    ("look_up", "document_links"),
    ("library", "result"),
    ("request",),
    ("answer", "full_prefill", "intake"),
    ("prefiller", "refinement"),
    ("ticket", "batch_decode", "turns"),
    ("waiting_line",),
    ("step_runner",),
    ("scheduler",),
    ("engine",),
    ("engine_pool", "feed", "steps"),
    ("__init__",),
    ("evaluate", "server"),
    ("cli",),
    ("__main__",),
)
LEVELS = {name: level for level, names in enumerate(LAYERS) for name in names}
STORE_MAY_IMPORT = {"store", "errors", "store_config", "keys", "chunk_kv", "stats", "variants", "thread_workers"}
WITHOUT_TORCH = {
    "cfo",
    "plan",
    "registry",
    "headings",
    "units",
    "splitting",
    "variants",
    "document_texts",
    "tool_calls",
    "pieces",
    "chunk_forms",
    "auto_chunks",
}
TRANSFORMERS_INTERNALS = (
    "transformers.cache_utils",
    "transformers.integrations",
    "transformers.masking_utils",
    "transformers.modeling_attn_mask_utils",
    "transformers.modeling_flash_attention_utils",
    "transformers.modeling_utils",
    "transformers.models",
)


class Import(NamedTuple):
    """One imported name: ``from module import name``, or ``import module`` with no name."""

    module: str
    name: str | None
    line: int


def read_imports(source: str, package: str) -> Iterator[Import]:
    """Yield every import of a source text, those inside functions and ``if TYPE_CHECKING`` included.

    Args:
        source: Python source.
        package: dotted name of the package that the source lies in; relative imports are resolved against it.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, None, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield Import(module, alias.name, node.lineno)


def engine_imports() -> Iterator[tuple[Path, Import]]:
    """Yield every import of every file of the engine."""
    for path in SOURCES:
        package = ".".join([PACKAGE.name, *path.relative_to(PACKAGE).parent.parts])
        for item in read_imports(path.read_text(encoding="utf-8"), package):
            yield path, item


def layer_name(path: Path) -> str:
    """Name under which a file stands in LAYERS: that of the module or package right below cachecraft_rag."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_file(item: Import) -> Path | None:
    """The engine's file that an import reads, None when it is none of the engine's."""
    if item.module.split(".")[0] != PACKAGE.name:
        return None
    target = PACKAGE.joinpath(*item.module.split(".")[1:])
    candidates = [target.with_suffix(".py"), target / "__init__.py"]
    if item.name is not None:
        candidates = [target / f"{item.name}.py", target / item.name / "__init__.py", *candidates]
    found = next((path for path in candidates if path.is_file()), None)
    if found is None:
        raise FileNotFoundError(f"no file of the engine for {item}")
    return found


def place(path: Path, line: int) -> str:
    return f"{path.relative_to(PACKAGE.parent)}:{line}"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch.nn", ("torch.nn", None)),
        ("def f():\n    from a.b import c", ("a.b", "c")),
        ("from . import keys", ("cachecraft_rag.store", "keys")),
        ("from .base import Store", ("cachecraft_rag.store.base", "Store")),
        ("from .. import keys", ("cachecraft_rag", "keys")),
        ("from ..keys import ChunkKey", ("cachecraft_rag.keys", "ChunkKey")),
    ],
)
def test_every_form_of_import_is_read(source: str, expected: tuple[str, str | None]) -> None:
    assert [item[:2] for item in read_imports(source, "cachecraft_rag.store")] == [expected]


def test_every_module_has_exactly_one_place_in_the_table() -> None:
    assert len(LEVELS) == sum(len(names) for names in LAYERS)
    assert {layer_name(path) for path in SOURCES} - LEVELS.keys() == set()


def test_a_module_imports_no_higher_one() -> None:
    offenders = [
        f"{place(path, item.line)} imports {layer_name(file)}"
        for path, item in engine_imports()
        if (file := imported_file(item)) and LEVELS[layer_name(file)] > LEVELS[layer_name(path)]
    ]
    assert offenders == []


def test_imports_inside_the_engine_form_no_cycle() -> None:
    graph: dict[Path, set[Path]] = {path: set() for path in SOURCES}
    for path, item in engine_imports():
        if file := imported_file(item):
            graph[path].add(file)
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the cycle


def test_the_store_knows_nothing_of_prompts_and_models() -> None:
    offenders = [
        f"{place(path, item.line)} imports {layer_name(file)}"
        for path, item in engine_imports()
        if layer_name(path) == "store" and (file := imported_file(item)) and layer_name(file) not in STORE_MAY_IMPORT
    ]
    assert offenders == []


def test_planning_and_finding_chunks_need_no_torch() -> None:
    offenders = [
        place(path, item.line)
        for path, item in engine_imports()
        if layer_name(path) in WITHOUT_TORCH and item.module.split(".")[0] == "torch"
    ]
    assert offenders == []


def test_only_the_model_modules_know_the_internals_of_transformers() -> None:
    offenders = []
    for path, item in engine_imports():
        full_name = item.module if item.name is None else f"{item.module}.{item.name}"
        is_cache_class = item.module == "transformers" and item.name is not None and "Cache" in item.name
        if not path.name.startswith("model_") and (is_cache_class or full_name.startswith(TRANSFORMERS_INTERNALS)):
            offenders.append(f"{place(path, item.line)} imports {full_name}")
    assert offenders == []


def test_no_module_reads_environment_variables_but_the_one_that_the_user_names_for_the_master_key() -> None:
    sources = [path for path in SOURCES if path != PACKAGE / "store" / "crypto.py"]
    forbidden = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    offenders = [
        place(path, item.line)
        for path, item in engine_imports()
        if path in sources and item.module == "os" and item.name in forbidden
    ]
    for path in sources:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr in forbidden:
                offenders.append(place(path, node.lineno))
    assert offenders == []


def test_no_file_is_longer_than_the_limit() -> None:
    lengths = {path.relative_to(PACKAGE): len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    assert {path: length for path, length in lengths.items() if length > MAX_LINES} == {}


def test_importing_the_engine_loads_no_framework_and_no_database_client() -> None:
    command = "import sys, cachecraft_rag; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", command], check=True, capture_output=True, text=True).stdout.split()
    assert "cachecraft_rag" in loaded
    foreign = ("llama_index", "langchain", "langgraph", "langsmith", "redis", "valkey")
    assert [name for name in loaded if name.startswith(foreign)] == []


def test_all_is_sorted_and_names_what_is_visible() -> None:
    listed = cachecraft_rag.__all__
    visible = {
        name
        for name, value in vars(cachecraft_rag).items()
        if not name.startswith("_") and not isinstance(value, ModuleType | type(annotations))
    }
    assert listed == sorted(set(listed))
    assert set(listed) - {"__version__"} == visible


def test_the_llama_index_integration_adds_to_a_shared_namespace() -> None:
    namespace = REPOSITORY / "integrations" / "llama-index-llms-cachecraft" / "llama_index"
    assert (namespace / "llms" / "cachecraft").is_dir()
    assert not (namespace / "__init__.py").exists()
    assert not (namespace / "llms" / "__init__.py").exists()
