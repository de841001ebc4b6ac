"""The command ``cachecraft bench`` on a tiny model."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from cachecraft_rag.cli import bench
from tests import cli_runs
from tests.conftest import passage
from tests.tiny_models import make
from tests.tiny_tokenizers import byte_level

SMALL = ("--chunks", 2, "--chunk-tokens", 32, "--requests", 2, "--max-new-tokens", 3)


run = partial(cli_runs.run, "bench")


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


def test_a_text_that_is_no_utf_8_is_named(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes("Ärger".encode("latin-1"))
    assert "text.txt: this is no text in UTF-8" in run(model, *SMALL, "--text", path, code=1)


@pytest.mark.filterwarnings("ignore:prompts are prefilled in full")
def test_why_nothing_is_reused_stands_below_the_table_and_a_profile_has_no_parts_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    make("gpt2").save_pretrained(tmp_path)
    byte_level().save_pretrained(tmp_path)
    lines = run(tmp_path, *SMALL, "--profile", "--top", 1).splitlines()
    start = next(number for number, line in enumerate(lines) if "stored chunks, 2 requests" in line)
    header, full, reused, reason = lines[start + 1 : start + 5]
    assert header.split() == ["TTFT", "of", "full", "prefill", "computed", "tokens/s", "from"]
    assert full.startswith("full prefill ")
    assert reused.startswith("chunks reused ")
    assert reason.startswith("nothing was reused: gpt2 has no rotary position embedding")
    parts = "\n".join(lines[start + 5 :])
    assert "full prefill" in parts
    for part in ("look up", "place", "compute what was not stored", "recompute"):
        assert part not in parts


def test_what_is_timed_alone_is_a_median_without_the_first_try(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = iter([900.0, 7.0, 5.0, 6.0, 9.0, 8.0])
    monkeypatch.setattr(bench, "_tried", lambda engine, prompt: (next(tries), 0.0, 0.0))
    text = run(model, *SMALL, "--profile", "--top", 1)
    (row,) = [line for line in text.splitlines() if line.startswith("tokenise and find chunks ")]
    assert "7,000.0 ms" in row


def test_a_missing_model_ends_it_with_a_message(tmp_path: Path) -> None:
    assert run(tmp_path / "none", code=1).startswith("Error: ")
