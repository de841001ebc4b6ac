"""The replay benchmark: its stream, its table, its files, and its engines on a tiny model."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sklearn")
pytest.importorskip("rouge_score")
pytest.importorskip("matplotlib")

from benchmarks.replay_report import as_markdown, as_rich, plot, summarise
from benchmarks.results_file import ResultsFile
from benchmarks.rivals import cachecraft, transformers_full, transformers_prefix
from benchmarks.rivals.base import Clock, Prompt, Settings, peak_bytes
from benchmarks.rivals.catalogue import BY_NAME, ENGINES
from benchmarks.rivals.process import EngineError, EngineProcess
from benchmarks.rivals.transformers_prefix import common_length
from benchmarks.stream import FEWEST, MOST, Asked, Retriever, cut, load_asked, make_stream, recurrence
from cachecraft_rag import RagPrompt
from cachecraft_rag.prompt import PromptEncoder
from tests.conftest import passage
from tests.tiny_tokenizers import byte_level

ASKED = [Asked(f"q{number}", f"What is {number}?", (f"a{number}", "b", f"c{number}")) for number in range(20)]


def settings(model: Path, **options: Any) -> Settings:
    return Settings(str(model), "float32", threads=1, memory=2**24, window=2048, options=options)


def prompt(*numbers: int) -> Prompt:
    parts = RagPrompt("Be brief.", tuple(passage(number, 2) for number in numbers), "What ends first?")
    return Prompt(PromptEncoder(byte_level()).render(parts), parts.system, parts.chunks, parts.question)


def test_a_stream_repeats_what_many_ask_and_a_longer_one_begins_alike() -> None:
    stream = make_stream(ASKED, 400, 20, 1.0, seed=1)
    counts = [sum(one is asked for one in stream) for asked in ASKED]
    assert counts[0] > counts[4] > counts[19]
    assert make_stream(ASKED, 30, 20, 1.0, seed=1) == stream[:30]
    even = make_stream(ASKED, 400, 20, 0.0, seed=1)
    assert max(sum(one is asked for one in even) for asked in ASKED) < counts[0] / 2
    assert {one.id for one in make_stream(ASKED, 50, 3, 1.0, seed=1)} == {"q0", "q1", "q2"}


@pytest.mark.parametrize(("name", "value"), [("length", 0), ("distinct", 0), ("exponent", -1.0)])
def test_a_stream_of_nothing_is_refused(name: str, value: float) -> None:
    options: dict[str, Any] = {"length": 3, "distinct": 3, "exponent": 1.0, name: value}
    with pytest.raises(ValueError, match=f"{name}: {value}"):
        make_stream(ASKED, seed=0, **options)


def test_recurrence_counts_chunks_beginnings_and_questions() -> None:
    assert recurrence([ASKED[0], ASKED[1], ASKED[0]]) == (
        pytest.approx(4 / 9),
        pytest.approx(3 / 9),
        pytest.approx(1 / 3),
    )
    assert recurrence([ASKED[0]]) == (0.0, 0.0, 0.0)


def test_the_retriever_puts_the_chunk_that_fits_first() -> None:
    found = Retriever(["the lease ends in May", "a garden with a bench", "payment is due"]).find(
        "When is payment due?", 2
    )
    assert found[0] == "payment is due"
    assert len(found) == 2


def test_chunks_have_the_length_asked_for_and_stand_in_the_text() -> None:
    text, tokenizer = passage(1, 12), byte_level()
    chunks = cut(text, tokenizer, 32)
    assert chunks
    assert all(chunk in text for chunk in chunks)
    assert all(28 <= len(tokenizer(chunk, add_special_tokens=False).input_ids) <= 32 for chunk in chunks)
    assert cut("short", tokenizer, 32) == []


def test_contracts_are_searched_one_by_one_and_manuals_as_a_whole(tmp_path: Path) -> None:
    def write(name: str, rows: list[dict[str, Any]]) -> None:
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")

    long, short = passage(1, 40), passage(2, 2)
    write("cuad_docs.jsonl", [{"id": "long", "text": long}, {"id": "short", "text": short}])
    questions = [{"id": f"c-{name}", "question": "What ends?", "docs": [{"id": name}]} for name in ("long", "short")]
    write("cuad.jsonl", questions)
    write("manual_tv_docs.jsonl", [{"id": f"t{n}", "title": f"Part {n}", "text": passage(n, 8)} for n in range(5, 12)])
    write("manual_tv.jsonl", [{"id": "m", "question": "Which garden?"}])
    asked = {one.id: one for one in load_asked(tmp_path, byte_level(), 48, seed=0)}
    assert set(asked) == {"c-long", "m"}  # the short contract has too few chunks
    assert all(FEWEST <= len(one.chunks) <= MOST for one in asked.values())
    assert all(chunk in long for chunk in asked["c-long"].chunks)


def row(number: int, ttft_s: float, **changes: Any) -> dict[str, Any]:
    figures = {
        "total_s": 2 * ttft_s,
        "decode_s": 0.5,
        "session": 1,
        "prompt_tokens": 100,
        "computed_tokens": 25.0,
        "output_tokens": 6,
    }
    return {
        "number": number,
        "id": f"q{number}",
        "text": "It ends.",
        "ttft_s": ttft_s,
        "peak_bytes": 2**30,
        **figures,
        **changes,
    }


def test_the_table_has_percentiles_shares_of_the_same_request_and_reasons(tmp_path: Path) -> None:
    entries = [BY_NAME[name] for name in ("transformers", "kvboost", "ours-balanced")]
    rows = {
        "transformers": [row(number, 10.0 + number, computed_tokens=100) for number in range(3)],
        "ours-balanced": [row(number, (10.0 + number) / 5) for number in range(2)] + [row(2, 12.0, session=2)],
    }
    cold = {"transformers": {f"q{n}": "It ends." for n in range(3)}, "ours": {"q0": "It ends.", "q1": "No."}}
    plain, missing, ours = summaries = summarise(
        entries, rows, cold, {"kvboost": "not installed"}, {"ours-balanced": 9.0}
    )
    assert (plain.ttft_p50, plain.share, plain.rouge, plain.speed) == (11.0, 1.0, 1.0, pytest.approx(10.0))
    assert ours.ttft_p50 == pytest.approx(2.2)
    assert ours.ttft_p95 == pytest.approx(2.2 + 0.9 * (12.0 - 2.2))
    assert (ours.share, ours.rouge, ours.computed) == (pytest.approx(0.2), 0.5, (25.0, 100.0))
    assert (missing.requests, missing.failure) == (0, "not installed")
    text = as_markdown(summaries)
    assert "| cachecraft-rag, balanced | 2.20 | 11.02 | 0.200 | 4.40 | 25 of 100 | 0.500 | 1.00 | 10.0 |" in text
    assert "- kvboost: not installed" in text
    assert "- cachecraft-rag, balanced: took the chunks in ahead, 9 s" in text
    assert "- cachecraft-rag, balanced: not in the same run as plain transformers" in text
    assert "transformers, full prefill: not" not in text
    assert as_rich(summaries, "title").row_count == 3
    plot(summaries, "title", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 5000


def test_results_are_read_again_without_a_half_written_line_and_not_with_other_settings(tmp_path: Path) -> None:
    path = tmp_path / "engine.jsonl"
    ResultsFile(path, {"seed": 1}).append({"number": 0})
    with path.open("a", encoding="utf-8") as file:
        file.write('{"numb')
    again = ResultsFile(path, {"seed": 1})
    assert again.rows == [{"number": 0}]
    again.append({"number": 1})
    again.append({"number": 2})
    assert [row["number"] for row in ResultsFile(path, {"seed": 1}).rows] == [0, 1, 2]
    with pytest.raises(SystemExit, match="another seed"):
        ResultsFile(path, {"seed": 2})


def test_every_engine_has_a_module_and_says_when_it_is_not_installed(tmp_path: Path) -> None:
    folder = Path(transformers_full.__file__).parent
    assert len(BY_NAME) == len(ENGINES)
    for entry in ENGINES:
        assert (folder / f"{entry.module}.py").exists()
        assert (entry.python(tmp_path) is None) == (entry.environment is not None)
    script = (folder / "install.sh").read_text(encoding="utf-8")
    assert all(f"install_{entry.environment}()" in script for entry in ENGINES if entry.environment is not None)


def test_a_clock_counts_tokens_and_what_comes_after_them() -> None:
    clock = Clock()
    for _ in range(3):
        clock.token()
    reply = clock.reply("text", 10, 4)
    assert 0.0 <= reply.ttft_s <= reply.ttft_s + reply.decode_s <= reply.total_s
    assert (reply.output_tokens, reply.prompt_tokens, reply.computed_tokens) == (3, 10, 4)
    assert peak_bytes() > 10 * 2**20


def test_the_prefix_cache_answers_as_full_prefill_does_and_computes_what_is_new(model: Path) -> None:
    full, prefix = transformers_full.load(settings(model)), transformers_prefix.load(settings(model))
    first, second = prompt(1, 2, 3), prompt(1, 2, 4)
    once = prefix.ask(first, 4)
    assert once.computed_tokens == once.prompt_tokens
    assert prefix.ask(second, 4).computed_tokens < 0.6 * once.prompt_tokens
    again = prefix.ask(second, 4)
    assert again.computed_tokens == 1
    assert again.text == full.ask(second, 4).text == prefix.cold(second, 4)
    other = prefix.ask(prompt(2, 1, 4), 4)
    assert 0.5 * other.prompt_tokens < other.computed_tokens < other.prompt_tokens
    assert full.ask(second, 4).computed_tokens == again.prompt_tokens
    assert common_length((1, 2, 3), (1, 2, 4, 5)) == 2


def test_our_engine_reuses_chunks_in_any_order(model: Path, tmp_path: Path) -> None:
    chunks = [passage(number, 2) for number in (1, 2, 3)]
    ours = cachecraft.load(settings(model, preset="fast"))
    ours.index(chunks)
    reply = ours.ask(prompt(3, 1, 2), 4)
    assert reply.computed_tokens < 0.6 * reply.prompt_tokens
    assert 0 < reply.output_tokens <= 4
    assert reply.total_s >= reply.ttft_s
    exact = cachecraft.load(settings(model, preset="exact"))
    assert exact.ask(prompt(3, 1, 2), 4).text == exact.cold(prompt(3, 1, 2), 4) == ours.cold(prompt(3, 1, 2), 4)
    shared = [cachecraft.load(settings(model, preset="fast", shared=str(tmp_path / "chunks"))) for _ in range(2)]
    for engine in shared:  # the second reads what the first computed
        engine.index(chunks)
        assert engine.ask(prompt(3, 1, 2), 4).text == reply.text
    assert list((tmp_path / "chunks").rglob("*"))
    for engine in (ours, exact, *shared):
        engine.close()


@pytest.mark.slow
def test_an_engine_runs_in_a_process_of_its_own_and_its_errors_come_back(model: Path, tmp_path: Path) -> None:
    asked = prompt(1, 2)
    process = EngineProcess(Path(sys.executable), "transformers_full", settings(model), tmp_path / "log")
    try:
        answer = process.ask(asked, 3)
        assert set(asdict(Clock().reply("", 0, 0))) | {"peak_bytes"} == set(answer)
        assert process.cold(asked, 3) == answer["text"]
        assert process.keeps is False
        with pytest.raises(EngineError, match="max_new_tokens"):
            process.ask(asked, -1)
        assert process.ask(asked, 3)["text"] == answer["text"]
    finally:
        process.close()


def test_an_engine_that_does_not_load_says_why(model: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"ModuleNotFoundError: No module named 'benchmarks\.rivals\.nothing'"):
        EngineProcess(Path(sys.executable), "nothing", settings(model), tmp_path / "log")
