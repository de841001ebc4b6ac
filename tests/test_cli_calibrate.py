"""What ``cachecraft calibrate`` says of questions and options that can't be used."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from tests import cli_runs
from tests.conftest import passage


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """Three questions, one of which is longer than the model's context window."""
    rows = [
        {"id": f"q{n}", "question": "What ends?", "answers": ["it"], "docs": [{"text": passage(n, length)}]}
        for n, length in enumerate((8, 200, 8))
    ]
    path = tmp_path / "qa.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


run = partial(cli_runs.run, "calibrate")


def test_a_question_that_is_too_long_is_left_out_and_said(model: Path, questions: Path, tmp_path: Path) -> None:
    text = run(model, questions, "--out", tmp_path / "calibration.json", "--answer-tokens", 2)
    assert "1 questions left out: longer than the model's context window" in text
    assert json.loads((tmp_path / "calibration.json").read_text(encoding="utf-8"))["num_questions"] == 2


@pytest.mark.parametrize("option", ["--policy", "--behind"])
def test_an_unknown_name_is_named_with_its_option_and_what_is_allowed(
    questions: Path, tmp_path: Path, option: str
) -> None:
    text = run(tmp_path / "no-model", questions, option, "nonsense", code=1)
    assert text.startswith(f"Error: {option}: 'nonsense': Input should be 'none', ")
    assert "validation error" not in text


def test_a_target_that_can_not_be_written_is_noticed_before_the_model_is_loaded(
    questions: Path, tmp_path: Path
) -> None:
    text = run(tmp_path / "no-model", questions, "--out", tmp_path, code=1)
    assert "--out: " in text
    assert "is a folder; give a file" in text
