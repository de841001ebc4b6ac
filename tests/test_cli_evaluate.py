"""The command ``cachecraft evaluate`` on a tiny model."""

from __future__ import annotations

import csv
import json
import sys
from functools import partial
from pathlib import Path

import pytest

from tests import cli_runs
from tests.conftest import passage

pytest.importorskip("matplotlib")
pytest.importorskip("rouge_score")


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """Three questions on three passages each, and one that is longer than the model's context window."""
    rows = [
        {
            "id": f"q{number}",
            "question": "What ends first?",
            "answers": ["the lease"],
            "docs": [{"text": passage(10 * number + index, 40 if number == 3 else 8)} for index in range(3)],
        }
        for number in range(4)
    ]
    path = tmp_path / "qa.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


run = partial(cli_runs.run, "evaluate")


def test_it_prints_tables_and_writes_what_it_measured(model: Path, questions: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ("--policies", "chunk_start, question_sensitivity", "--ratios", "0.3,0.6", "--max-new-tokens", 4)
    text = run(model, questions, *options, "--out", out)
    for expected in (
        "3 questions",
        "charged 0.3",
        "charged 0.6",
        "chunk_start",
        "question_sensitivity",
        "full prefill",
    ):
        assert expected in text
    assert "1 questions left out: longer than the model's context window" in text
    assert {path.name for path in out.iterdir()} == {"answers.csv", "summary.md", "divergence.png"}
    assert "answers.csv" in text
    with (out / "answers.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 * (1 + 2 * 2)
    assert {row["question"] for row in rows} == {"q0", "q1", "q2"}
    assert all(float(row["charged_ratio"]) <= 0.6 + 1e-9 for row in rows if row["setting"])


def test_ratios_may_be_those_of_the_chunks_and_answers_may_be_left_out(
    model: Path, questions: Path, tmp_path: Path
) -> None:
    options = ("--policies", "random", "--ratios", "0,1", "--no-charged", "--no-answers", "--questions", 2)
    run(model, questions, *options, "--out", tmp_path / "out")
    with (tmp_path / "out" / "answers.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    found = {row["setting"]: row for row in rows}
    assert set(found) == {"", "ratio 0", "ratio 1"}
    assert float(found["ratio 1"]["kl"]) < 1e-6 < float(found["ratio 0"]["kl"])
    assert (found["ratio 1"]["answer"], found["ratio 1"]["f1"]) == ("", "")
    assert found[""]["f1"] != ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--policies", "nonsense"), "policies: 'nonsense'"),
        (("--ratios", "a,b"), "--ratios: 'a,b'"),
        (("--ratios", "2"), "amounts: 2"),
        (("--memory", "many"), "--memory: 'many' is not a size"),
    ],
)
def test_bad_options_end_it_with_a_message(
    model: Path, questions: Path, tmp_path: Path, options: tuple[str, str], message: str
) -> None:
    text = run(model, questions, *options, "--out", tmp_path / "out", code=1)
    assert text.startswith("Error: ")
    assert message in text
    assert not (tmp_path / "out").exists()


def test_a_target_that_can_not_be_written_is_noticed_before_the_model_is_loaded(
    questions: Path, tmp_path: Path
) -> None:
    text = run(tmp_path / "no-model", questions, "--out", questions, code=1)
    assert "--out: " in text
    assert "is a file; give a folder" in text


def test_a_missing_file_and_a_missing_model_end_it_with_a_message(model: Path, questions: Path, tmp_path: Path) -> None:
    assert "Error: " in run(model, tmp_path / "none.jsonl", code=1)
    assert "Error: " in run(tmp_path / "no-model", questions, code=1)


def test_a_missing_extra_is_noticed_before_anything_is_computed(
    questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "cachecraft-rag[bench]" in run(tmp_path / "no-model", questions, code=1)
