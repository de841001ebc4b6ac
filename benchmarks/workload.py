"""Chunks and questions for the benchmarks: from a JSONL file of documents, or from the sample contracts."""

from __future__ import annotations

import json
import platform
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from cachecraft_rag import CacheCraftEngine

CONTRACTS = Path(__file__).resolve().parents[1] / "cookbooks" / "data" / "contracts"


@dataclass(frozen=True)
class Workload:
    """Chunk texts of one length in tokens, and questions."""

    chunks: tuple[str, ...]
    questions: tuple[str, ...]


def load_workload(engine: CacheCraftEngine, data: Path | None, chunk_tokens: int, num_chunks: int) -> Workload:
    """Cut documents into chunks of exactly ``chunk_tokens`` tokens of the engine's tokenizer.

    Args:
        engine: Its tokenizer counts.
        data: A JSONL file of documents with a ``text`` field, and beside it questions in the file without ``_docs``;
            ``None`` takes the sample contracts.
        chunk_tokens: Length of every chunk.
        num_chunks: How many chunks are wanted.

    Raises:
        SystemExit: The documents are too short for so many chunks.
    """
    if data is None:
        texts = [path.read_text(encoding="utf8") for path in sorted(CONTRACTS.glob("*.md")) if path.name != "README.md"]
        questions = [row["question"] for row in _rows(CONTRACTS / "questions.jsonl")]
    else:
        texts = [row["text"] for row in _rows(data)]
        questions = [row["question"] for row in _rows(data.with_name(data.name.replace("_docs", "")))]
    chunks: list[str] = []
    for text in texts:
        ids = engine.prompts.encode_chunk(text)
        for start in range(0, len(ids) - chunk_tokens + 1, chunk_tokens):
            chunk = engine.prompts.decode(ids[start : start + chunk_tokens]).strip()
            if chunk not in chunks:
                chunks.append(chunk)
    if len(chunks) < num_chunks:
        raise SystemExit(
            f"{data or CONTRACTS} holds {len(chunks)} chunks of {chunk_tokens} tokens; {num_chunks} wanted"
        )
    return Workload(tuple(chunks[:num_chunks]), tuple(questions))


def machine() -> str:
    """The machine and the versions, for the head of a result."""
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    else:
        device = f"{_processor()}, {torch.get_num_threads()} threads"
    versions = f"torch {torch.__version__}, transformers {version('transformers')}, Python {platform.python_version()}"
    return f"{device}; {versions}"


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf8") as lines:
        return [json.loads(line) for line in lines]


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        if names:
            return names[0]
    return platform.processor() or platform.machine()
