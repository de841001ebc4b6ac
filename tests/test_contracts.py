"""The contract collection of the cookbooks keeps the properties that retrieval and quality figures rely on."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

COLLECTION = Path(__file__).resolve().parent.parent / "cookbooks" / "data" / "contracts"
MIN_CONTRACTS = 8
MIN_CONTRACT_CHARS = 10_500
MIN_QUESTIONS = 60
LONG_PARAGRAPH_CHARS = 200
MAX_ANSWER_WORDS = 12


@pytest.fixture(scope="module")
def contracts() -> dict[str, str]:
    """Text of every contract by file name, the README left out."""
    return {
        path.name: path.read_text(encoding="utf-8")
        for path in sorted(COLLECTION.glob("*.md"))
        if path.name != "README.md"
    }


@pytest.fixture(scope="module")
def questions() -> list[dict[str, str]]:
    """All lines of the question file."""
    lines = (COLLECTION / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_there_are_enough_contracts(contracts: dict[str, str]) -> None:
    assert len(contracts) >= MIN_CONTRACTS


def test_every_contract_is_long_enough_to_be_split_into_several_chunks(contracts: dict[str, str]) -> None:
    short = {name: len(text) for name, text in contracts.items() if len(text) < MIN_CONTRACT_CHARS}
    assert not short


def test_there_are_enough_questions(questions: list[dict[str, str]]) -> None:
    assert len(questions) >= MIN_QUESTIONS


def test_every_question_has_exactly_the_four_filled_fields(questions: list[dict[str, str]]) -> None:
    for line in questions:
        assert set(line) == {"id", "contract", "question", "answer"}
        assert all(value.strip() for value in line.values()), line


def test_question_ids_are_unique(questions: list[dict[str, str]]) -> None:
    repeated = [key for key, count in Counter(line["id"] for line in questions).items() if count > 1]
    assert not repeated


def test_question_texts_are_unique(questions: list[dict[str, str]]) -> None:
    repeated = [text for text, count in Counter(line["question"] for line in questions).items() if count > 1]
    assert not repeated


def test_every_answer_is_short_and_stands_verbatim_in_its_contract(
    contracts: dict[str, str], questions: list[dict[str, str]]
) -> None:
    for line in questions:
        assert line["answer"] in contracts[line["contract"]], line["id"]
        assert len(line["answer"].split()) <= MAX_ANSWER_WORDS, line["id"]


def test_no_answer_stands_in_another_contract(contracts: dict[str, str], questions: list[dict[str, str]]) -> None:
    for line in questions:
        holders = [name for name, text in contracts.items() if line["answer"] in text]
        assert holders == [line["contract"]], line["id"]


def test_every_contract_is_asked_about_equally_often(
    contracts: dict[str, str], questions: list[dict[str, str]]
) -> None:
    asked = Counter(line["contract"] for line in questions)
    assert set(asked) == set(contracts)
    assert max(asked.values()) - min(asked.values()) <= 1


def test_no_long_paragraph_occurs_twice_in_the_collection(contracts: dict[str, str]) -> None:
    paragraphs = Counter(
        " ".join(paragraph.split())
        for text in contracts.values()
        for paragraph in text.split("\n\n")
        if len(paragraph.strip()) > LONG_PARAGRAPH_CHARS
    )
    assert paragraphs, "the contracts have no long paragraph, so this test would prove nothing"
    assert not [paragraph for paragraph, count in paragraphs.items() if count > 1]
