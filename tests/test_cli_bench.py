"""The command ``cachecraft bench`` on a tiny model."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from cachecraft_rag.cli import app
from tests.conftest import passage

SMALL = ("--chunks", 2, "--chunk-tokens", 32, "--requests", 2, "--max-new-tokens", 3)


def run(*arguments: object, code: int = 0) -> str:
    """What the command writes; it must end with this exit code."""
    result = CliRunner().invoke(app, ["bench", *map(str, arguments)])
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


def test_it_compares_reuse_with_full_prefill(model: Path) -> None:
    text = run(model, *SMALL)
    assert "2 stored chunks, 2 requests" in text
    for row in ("full prefill", "chunks reused", "cold 2"):
        assert row in text
    assert "operator" not in text


def test_a_profile_shows_every_part_and_the_top_operators(model: Path) -> None:
    text = run(model, *SMALL, "--profile", "--top", 3)
    parts = ("tokenise", "look up", "load", "place", "select", "recompute, all layers", "decode, per token")
    for part in (*parts, "first token", "operators of one request"):
        assert part in text
    assert text.count("aten::") >= 1
    assert len(text.split("operators of one request", 1)[1].strip().splitlines()) == 1 + 1 + 3


def test_chunks_may_be_cut_from_a_text_that_is_long_enough(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text(passage(1, 20), encoding="utf-8")
    assert "2 stored chunks" in run(model, *SMALL, "--text", path)
    path.write_text("Too short.", encoding="utf-8")
    assert "holds 0 chunks of 32 tokens; 2 are wanted" in run(model, *SMALL, "--text", path, code=1)


def test_a_missing_model_ends_it_with_a_message(tmp_path: Path) -> None:
    assert run(tmp_path / "none", code=1).startswith("Error: ")
