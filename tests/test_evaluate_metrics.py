"""Answers against texts."""

from __future__ import annotations

import sys

import pytest

from cachecraft_rag.evaluate import exact_match, normalise, rouge_l, token_f1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Cat,\nsat.", "cat sat"),
        ("An apple a day", "apple day"),
        ("Theatre and anthem", "theatre and anthem"),
        ("U.S.A.", "usa"),
        ("the-a", "thea"),  # punctuation goes first, as in SQuAD's own script
        ("...", ""),
        ("«Ärger»", "«ärger»"),
    ],
)
def test_texts_are_normalised_as_in_squad(text: str, expected: str) -> None:
    assert normalise(text) == expected


@pytest.mark.parametrize(
    ("prediction", "answers", "expected"),
    [
        ("the cat sat", ["a cat sat"], 1.0),
        ("the cat sat down", ["cat"], 0.5),  # precision 1/3, recall 1
        ("cat cat", ["cat dog"], 0.5),  # a word counts as often as both have it
        ("paris", ["london"], 0.0),
        ("new york city", ["london", "New York"], 0.8),  # the best answer counts: precision 2/3, recall 1
        ("", ["the"], 1.0),
        ("", ["cat"], 0.0),
        ("cat", [""], 0.0),
    ],
)
def test_token_f1_is_that_of_the_answer_that_fits_best(prediction: str, answers: list[str], expected: float) -> None:
    assert token_f1(prediction, answers) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("prediction", "answers", "expected"),
    [("The Cork!", ["Dublin", "cork"], 1.0), ("Cork city", ["Cork"], 0.0), ("", ["..."], 1.0)],
)
def test_exact_match_compares_normalised_texts(prediction: str, answers: list[str], expected: float) -> None:
    assert exact_match(prediction, answers) == expected


@pytest.mark.parametrize("metric", [token_f1, exact_match])
@pytest.mark.parametrize("answers", [[], "Cork"])
def test_answers_must_be_a_list_of_some(metric: object, answers: object) -> None:
    assert callable(metric)
    with pytest.raises(ValueError, match="answers"):
        metric("Cork", answers)


@pytest.mark.parametrize(
    ("prediction", "reference", "expected"),
    [
        ("the cat sat on the mat", "the cat sat on the mat", 1.0),
        ("the cat on the mat", "the cat sat on the mat", 10 / 11),  # a common subsequence of 5; 5/5 and 5/6
        ("mat the on sat cat the", "the cat sat on the mat", 1 / 2),  # order counts: "the on the" is common
        ("dog", "cat", 0.0),
        ("cats", "cat", 0.0),  # not stemmed
        ("", "cat", 0.0),
        ("", "", 1.0),
        ("…", "…", 1.0),
    ],
)
def test_rouge_l_is_the_f_measure_of_the_longest_common_subsequence(
    prediction: str, reference: str, expected: float
) -> None:
    pytest.importorskip("rouge_score")
    assert rouge_l(prediction, reference) == pytest.approx(expected)


def test_rouge_l_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    with pytest.raises(ImportError, match=r"cachecraft-rag\[bench\]"):
        rouge_l("cat", "cat")
