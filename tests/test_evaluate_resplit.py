"""The same questions over the same documents at several chunk sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cachecraft_rag.evaluate.questions import Source, load_questions, load_sources
from cachecraft_rag.evaluate.resplit import Resplitter, resplit
from cachecraft_rag.prompt import PromptEncoder
from tests.conftest import passage
from tests.tiny_tokenizers import byte_level


@pytest.fixture(scope="module")
def prompts() -> PromptEncoder:
    return PromptEncoder(byte_level())


def document(number: int, num_paragraphs: int = 10) -> str:
    return "\n\n".join(passage(100 * number + index, 4) for index in range(num_paragraphs))


def source(number: int, answer: str = "lease", spans: tuple[tuple[int, int], ...] = ()) -> Source:
    return Source(f"q{number}", "What ends first?", (answer,), (document(number),), spans)


def test_documents_that_fit_are_taken_whole_and_in_order(prompts: PromptEncoder) -> None:
    one, other = document(1, 3), document(2, 3)
    asked = Resplitter(prompts, 150, 2000).question(Source("q", "What?", ("lease",), (one, other)))
    assert asked is not None
    assert (asked.id, asked.question, asked.answers) == ("q", "What?", ("lease",))
    assert "".join("".join(asked.chunks).split()) == "".join((one + other).split())
    assert len(asked.chunks) == 4


@pytest.mark.parametrize("size", [64, 128, 256])
def test_chunks_are_of_the_size_and_of_about_as_much_text(prompts: PromptEncoder, size: int) -> None:
    asked = Resplitter(prompts, size, 600).question(source(3))
    assert asked is not None
    lengths = [len(prompts.encode_chunk(chunk)) for chunk in asked.chunks]
    assert max(lengths) <= size
    assert 600 - size < sum(lengths) <= 600


def test_the_chunks_that_hold_an_answer_are_among_those_chosen(prompts: PromptEncoder) -> None:
    text = document(4)
    start = len(text) * 2 // 3
    answer = text[start : start + 30]
    by_span = Source("q", "What?", ("unknown",), (text,), ((start, start + 30),))
    by_text = Source("q", "What?", (answer.upper(),), (text,))
    for seed in range(5):
        for asked in (Resplitter(prompts, 100, 250, seed).question(each) for each in (by_span, by_text)):
            assert asked is not None
            assert len(asked.chunks) < 5
            assert any(answer in chunk or answer[:10] in chunk or answer[-10:] in chunk for chunk in asked.chunks)


def test_all_chunks_of_the_documents_are_to_be_had(prompts: PromptEncoder) -> None:
    cutter = Resplitter(prompts, 64, 200)
    asked, chunks = cutter.question(source(6)), cutter.chunks(source(6))
    assert asked is not None
    assert set(asked.chunks) < set(chunks)
    assert "".join("".join(chunks).split()) == "".join(document(6).split())


def test_the_same_seed_draws_the_same_chunks(prompts: PromptEncoder) -> None:
    drawn = [Resplitter(prompts, 64, 300, seed).question(source(5)) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_the_same_questions_are_asked_at_every_size_up_to_the_limit(prompts: PromptEncoder) -> None:
    found = resplit([source(number) for number in range(5)], prompts, (64, 128), 300, limit=3)
    assert [[question.id for question in found[size]] for size in (64, 128)] == [["q0", "q1", "q2"]] * 2
    assert len(found[64][0].chunks) > len(found[128][0].chunks)


def test_a_size_that_does_not_fit_is_refused(prompts: PromptEncoder) -> None:
    with pytest.raises(ValueError, match="chunk_tokens: 128 is more than the 100"):
        resplit([source(1)], prompts, (64, 128), 100)


def test_sources_hold_whole_documents_in_the_order_of_the_questions(prompts: PromptEncoder, tmp_path: Path) -> None:
    path = tmp_path / "qa.jsonl"
    asked = [{"id": f"q{n}", "question": "What?", "answers": ["a"], "docs": [{"id": "d"}]} for n in range(6)]
    asked[2] |= {"docs": [{"title": "Head", "text": " Body "}]}
    asked[3] |= {"spans": [{"start": 4, "end": 9}]}
    path.write_text("\n".join(map(json.dumps, asked)), encoding="utf-8")
    text = "  " + document(1)
    beside = {"id": "d", "title": "T", "text": text}
    path.with_name("qa_docs.jsonl").write_text(json.dumps(beside), encoding="utf-8")
    sources = load_sources(path, seed=3)
    loaded = load_questions(path, prompts, seed=3, chunk_tokens=20, num_chunks=2)
    assert [each.id for each in sources] == [question.id for question in loaded]
    by_id = {each.id: each for each in sources}
    assert by_id["q2"].documents == ("Head\nBody",)
    assert by_id["q0"].documents == (f"T\n{text.strip()}",)
    assert (by_id["q3"].documents, by_id["q3"].spans) == ((text,), ((4, 9),))


def test_an_empty_file_and_spans_outside_the_document_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "qa.jsonl"
    path.write_text("\n")
    with pytest.raises(ValueError, match="no question"):
        load_sources(path)
    row: dict[str, object] = {"id": "q", "question": "What?", "answers": ["a"], "docs": [{"text": "abc"}]}
    row["spans"] = [{"start": 1, "end": 9}]
    path.write_text(json.dumps(row))
    with pytest.raises(ValueError, match=r"line 1, spans: .* 3 characters"):
        load_sources(path)
