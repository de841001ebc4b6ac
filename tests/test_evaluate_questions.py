"""Questions from files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cachecraft_rag.evaluate import load_corpus, load_questions
from cachecraft_rag.prompt import PromptEncoder
from tests.conftest import passage
from tests.tiny_tokenizers import byte_level, metaspace

CHUNK_TOKENS = 48


@pytest.fixture(scope="module")
def prompts() -> PromptEncoder:
    return PromptEncoder(byte_level())


def write(path: Path, *rows: Any) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return path


def row(number: int, **changes: Any) -> dict[str, Any]:
    fields = {
        "id": f"q{number}",
        "question": f"What is {number}?",
        "answers": [str(number), "a number"],
        "docs": [{"id": "a", "title": f"Title {number}", "text": f" Text {number}. "}, {"text": "Untitled."}],
    }
    return {name: value for name, value in {**fields, **changes}.items() if value is not None}


def contract(path: Path, text: str, *spans: tuple[int, int], **changes: Any) -> Path:
    """A file of one question about one document, in a file beside it."""
    write(path.with_name(f"{path.stem}_docs.jsonl"), {"id": "doc", "title": "Contract", "text": text})
    marked = [{"start": start, "end": end} for start, end in spans]
    return write(path, row(1, docs=[{"id": "doc"}], spans=marked, **changes))


def test_every_document_is_a_chunk_with_its_title(tmp_path: Path, prompts: PromptEncoder) -> None:
    (question,) = load_questions(write(tmp_path / "qa.jsonl", row(7)), prompts)
    assert (question.id, question.question, question.answers) == ("q7", "What is 7?", ("7", "a number"))
    assert question.chunks == ("Title 7\nText 7.", "Untitled.")
    prompt = question.prompt("Be brief.")
    assert (prompt.system, prompt.chunks) == ("Be brief.", question.chunks)
    assert "What is 7?" in prompt.question


def test_the_corpus_is_every_passage_once_and_every_chunk_of_documents_that_are_cut(
    tmp_path: Path, prompts: PromptEncoder
) -> None:
    passages = load_corpus(write(tmp_path / "qa.jsonl", row(7), row(8)), prompts)
    assert sorted(passages) == ["Title 7\nText 7.", "Title 8\nText 8.", "Untitled."]
    assert len(load_corpus(tmp_path / "qa.jsonl", prompts, limit=2)) == 2
    path = contract(tmp_path / "cut.jsonl", passage(1, 20), (0, 10))
    chunks = load_corpus(path, prompts, chunk_tokens=CHUNK_TOKENS)
    (question,) = load_questions(path, prompts, chunk_tokens=CHUNK_TOKENS, num_chunks=4)
    assert len(chunks) > 4
    assert set(question.chunks) < set(chunks)
    assert "".join(chunks).replace(" ", "") in passage(1, 20).replace(" ", "")  # in order, but for the rest at the end


def test_documents_without_text_are_those_of_the_file_beside(tmp_path: Path, prompts: PromptEncoder) -> None:
    write(tmp_path / "qa_docs.jsonl", {"id": "b", "title": "B", "text": "Beside."}, {"id": "c", "text": "Other."})
    path = write(tmp_path / "qa.jsonl", row(1, docs=[{"id": "c"}, {"id": "b"}]))
    assert load_questions(path, prompts)[0].chunks == ("Other.", "B\nBeside.")


def test_the_seed_draws_the_questions(tmp_path: Path, prompts: PromptEncoder) -> None:
    path = write(tmp_path / "qa.jsonl", *map(row, range(30)))
    drawn = [[q.id for q in load_questions(path, prompts, limit=6, seed=seed)] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2]
    assert len(set(drawn[0])) == 6
    assert drawn[0] == [q.id for q in load_questions(path, prompts, seed=1)][:6]
    assert len(load_questions(path, prompts, limit=99)) == 30


@pytest.mark.parametrize("make", [byte_level, metaspace])
def test_a_long_document_is_cut_and_the_chunk_of_the_answer_is_among_those_taken(tmp_path: Path, make: Any) -> None:
    encoder = PromptEncoder(make())
    text = "\n\n".join(passage(number, 4) for number in range(20)) + " Ärger, naïve — 漢字 👍🏽 " * 9
    for start in range(0, 1800, 150):
        path = contract(tmp_path / "qa.jsonl", text, (start, start + 12))
        (question,) = load_questions(path, encoder, chunk_tokens=CHUNK_TOKENS, num_chunks=5)
        assert len(question.chunks) == len(set(question.chunks)) == 5
        places = [text.index(chunk) for chunk in question.chunks]
        holding = [
            at for at, chunk in zip(places, question.chunks, strict=True) if at < start + 12 and start < at + len(chunk)
        ]
        assert holding, "no chunk holds any part of the answer"
        covered = sum(
            min(at + len(c), start + 12) - max(at, start)
            for at, c in zip(places, question.chunks, strict=True)
            if at in holding
        )
        assert covered >= 12 - 2  # white space between two chunks goes


def test_chunks_have_the_length_that_was_asked_for_and_do_not_overlap(tmp_path: Path, prompts: PromptEncoder) -> None:
    text = " ".join(passage(number, 4) for number in range(12))
    path = contract(tmp_path / "qa.jsonl", text, (5, 9))
    most = len(prompts.encode_chunk(text)) // CHUNK_TOKENS
    (question,) = load_questions(path, prompts, chunk_tokens=CHUNK_TOKENS, num_chunks=most)
    in_order = sorted(question.chunks, key=text.index)
    assert list(question.chunks) != in_order, "as a retriever might return them"
    assert "".join(in_order).replace(" ", "") == text.replace(" ", "")[: len("".join(in_order).replace(" ", ""))]
    for chunk in in_order:
        assert abs(len(prompts.encode_chunk(chunk)) - CHUNK_TOKENS) <= 3


def test_chunks_are_drawn_by_the_seed(tmp_path: Path, prompts: PromptEncoder) -> None:
    path = contract(tmp_path / "qa.jsonl", " ".join(passage(number, 4) for number in range(30)), (700, 720))

    def chunks(seed: int) -> tuple[str, ...]:
        return load_questions(path, prompts, seed=seed, chunk_tokens=CHUNK_TOKENS, num_chunks=4)[0].chunks

    assert chunks(1) == chunks(1)
    assert set(chunks(1)) != set(chunks(2))


def test_all_answers_of_a_document_are_taken_while_there_is_room(tmp_path: Path, prompts: PromptEncoder) -> None:
    text = " ".join(passage(number, 4) for number in range(30))
    spans = [(at, at + 5) for at in (2000, 30, 900, 1500)]
    path = contract(tmp_path / "qa.jsonl", text, *spans)
    for num_chunks in (1, 2, 4):
        (question,) = load_questions(path, prompts, chunk_tokens=CHUNK_TOKENS, num_chunks=num_chunks)
        held = [any(text[start:end] in chunk for chunk in question.chunks) for start, end in spans[:num_chunks]]
        assert all(held)


def test_questions_whose_document_is_too_short_or_whose_answer_is_too_long_are_left_out(
    tmp_path: Path, prompts: PromptEncoder
) -> None:
    short, long = passage(1, 2), " ".join(passage(number, 4) for number in range(30))
    write(tmp_path / "qa_docs.jsonl", {"id": "short", "text": short}, {"id": "long", "text": long})
    rows = [
        row(1, docs=[{"id": "short"}], spans=[{"start": 0, "end": 5}]),
        row(2, docs=[{"id": "long"}], spans=[{"start": 0, "end": 2500}]),
        row(3, docs=[{"id": "long"}], spans=[{"start": 0, "end": 5}]),
    ]
    options: dict[str, Any] = {"chunk_tokens": CHUNK_TOKENS, "num_chunks": 4}
    assert [q.id for q in load_questions(write(tmp_path / "qa.jsonl", *rows), prompts, **options)] == ["q3"]
    with pytest.raises(ValueError, match="no question has a document of 4 chunks of 48 tokens"):
        load_questions(write(tmp_path / "qa.jsonl", *rows[:2]), prompts, **options)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (row(2, id=None), "line 2, id: None"),
        (row(2, id="q1"), "id: 'q1' is also that of line"),
        (row(2, question=" "), "line 2, question: ' '"),
        (row(2, answers=None), "line 2, answers: None"),
        (row(2, answers=[]), r"line 2, answers: \[\]"),
        (row(2, answers="Cork"), "line 2, answers: 'Cork'"),
        (row(2, docs=[]), r"line 2, docs: \[\]"),
        (row(2, docs=["text"]), "line 2, docs:"),
        (row(2, docs=[{"id": "a", "text": "A"}, {"id": "b"}]), r"line 2, docs\[1\]: no text, and 'b' .* qa_docs.jsonl"),
        (row(2, docs=[{"id": ["a"]}]), r"line 2, docs\[0\]: no text, and \['a'\] is no document"),
        (row(2, docs=[{"text": ""}]), r"line 2, docs\[0\].text: ''"),
        (row(2, spans=[{"start": 0, "end": 1}]), "line 2, docs: 2 documents"),
        (
            row(2, docs=[{"text": "A."}], spans=[{"start": 1, "end": 9}]),
            "line 2, spans: .* of the document's 2 characters",
        ),
        (row(2, docs=[{"text": "A."}], spans=[{"start": "0", "end": 1}]), "line 2, spans:"),
        ("{not json", "line 2: this is no JSON"),
        ("[1]", "line 2: list is no JSON object"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, prompts: PromptEncoder, bad: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"qa\.jsonl, .*{message}|{message}") as raised:
        load_questions(write(tmp_path / "qa.jsonl", row(1), bad), prompts)
    assert "qa.jsonl" in str(raised.value)


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_a_file_without_a_question_is_told_from_one_whose_questions_are_left_out(
    tmp_path: Path, prompts: PromptEncoder, text: str
) -> None:
    with pytest.raises(ValueError, match=r"qa\.jsonl: there is no question"):
        load_questions(write(tmp_path / "qa.jsonl", text), prompts)


def test_a_file_that_is_no_utf_8_is_named(tmp_path: Path, prompts: PromptEncoder) -> None:
    path = tmp_path / "qa.jsonl"
    path.write_bytes(json.dumps(row(1, question="Ärger?"), ensure_ascii=False).encode("latin-1"))
    with pytest.raises(ValueError, match=r"qa\.jsonl: this is no text in UTF-8"):
        load_questions(path, prompts)


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path, prompts: PromptEncoder) -> None:
    path = tmp_path / "qa.jsonl"
    path.write_text(json.dumps(row(1)), encoding="utf-8-sig")
    assert load_questions(path, prompts)[0].id == "q1"


def test_only_line_ends_end_a_line(tmp_path: Path, prompts: PromptEncoder) -> None:
    question = "What is\N{LINE SEPARATOR}it\x85?"
    path = tmp_path / "qa.jsonl"
    rows = [json.dumps(row(number, question=question), ensure_ascii=False) for number in range(2)]
    path.write_bytes("\r\n".join(rows).encode())
    assert [found.question for found in load_questions(path, prompts)] == [question] * 2


@pytest.mark.parametrize("option", ["limit", "chunk_tokens", "num_chunks"])
def test_useless_options_are_refused_by_name(tmp_path: Path, prompts: PromptEncoder, option: str) -> None:
    with pytest.raises(ValueError, match=f"{option}: 0"):
        load_questions(write(tmp_path / "qa.jsonl", row(1)), prompts, **{option: 0})
