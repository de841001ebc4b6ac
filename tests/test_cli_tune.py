"""The command ``cachecraft tune`` on a tiny model, and the figures of ``cachecraft evaluate``."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from cachecraft_rag import EngineConfig
from cachecraft_rag.evaluate import curves as curves_module
from cachecraft_rag.evaluate.curves import CurveMaker
from tests.cli_runs import run
from tests.conftest import passage

pytest.importorskip("matplotlib")

CURVES = {"chunk_size", "behind", "offset", "ratio", "hot_share", "load_ahead"}
PLOTS = {f"{name}.png" for name in CURVES}


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three questions, each on a document of twelve paragraphs."""
    texts = ["\n\n".join(passage(100 * number + index, 3) for index in range(12)) for number in range(3)]
    rows = [
        {"id": f"q{number}", "question": "What ends first?", "answers": ["the lease"], "docs": [{"text": text}]}
        for number, text in enumerate(texts)
    ]
    path = tmp_path_factory.mktemp("data") / "qa.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def curves(path: Path) -> dict[str, set[float | str]]:
    """The measured values of every setting in a CSV of curves."""
    found: dict[str, set[float | str]] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            value = row["x"] if row["curve"] == "behind" else float(row["x"])
            found.setdefault(row["curve"], set()).add(value)
    return found


def test_it_recommends_and_writes_settings_that_an_engine_reads(model: Path, questions: Path, tmp_path: Path) -> None:
    base = tmp_path / "base.json"
    base.write_text(json.dumps({"namespace": "legal", "store": {"disk": {"path": str(tmp_path / "kv")}}}))
    out = tmp_path / "new" / "out"
    options = ("--quick", "--questions", 2, "--chunk-sizes", "64, 128", "--context", 300, "--max-new-tokens", 3)
    text = run("tune", model, questions, *options, "--config", base, "--out", out, "--max-divergence", 100)
    fields = ("chunk_tokens", "encode.behind", "recompute.offset", "recompute.ratio", "store.hot_share")
    for expected in ("recommended", "why", *fields, "store.load_ahead"):
        assert expected in text
    assert "Note: 2 questions" in text
    assert {path.name for path in out.iterdir()} == {"config.json", "tuning.csv", "tuning.md", *PLOTS}
    config = EngineConfig.from_file(out / "config.json")
    assert (config.namespace, config.recompute.ratio) == ("legal", 0.0)
    assert config.chunk_tokens in (64, 128)
    assert config.store.disk is not None
    assert {path.name for path in tmp_path.iterdir()} == {"base.json", "new"}  # the user's own tiers are not touched
    found = curves(out / "tuning.csv")
    assert found["chunk_size"] == {64, 128}
    assert found["load_ahead"] == set(range(9))
    assert found["behind"] == {"none", "chat_head", "prefix", "passages", "neighbours"}
    assert found["offset"] == {0.0, 0.5, 1.0}
    written = json.loads((out / "config.json").read_text(encoding="utf-8"))
    assert written["encode"]["behind"] in found["behind"]
    assert written["recompute"]["offset"] in found["offset"]
    assert config.store.hot_share in found["hot_share"]
    assert "| store.load_ahead | 3 | " in (out / "tuning.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--chunk-sizes", "a,b"), "--chunk-sizes: 'a,b'"),
        (("--chunk-sizes", "4000"), "chunk_sizes: none of 4000 fits"),
        (("--max-divergence", "0"), "max_divergence: 0"),
        (("--chunk-sizes", "0"), "--chunk-sizes: 0: Input should be greater than or equal to 2"),
        (("--memory", "many"), "--memory: 'many' is not a size"),
        (("--config", "none.json"), "none.json"),
        (("--calibration", "none.json"), "calibration: 'none.json'"),
    ],
)
def test_bad_options_end_it_with_a_message(
    model: Path, questions: Path, tmp_path: Path, options: tuple[str, str], message: str
) -> None:
    text = run("tune", model, questions, "--quick", *options, "--out", tmp_path / "out", code=1)
    assert "Error: " in text
    assert message in text
    assert not (tmp_path / "out").exists()


def test_a_missing_extra_is_noticed_before_anything_is_computed(
    questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "cachecraft-rag[bench]" in run("tune", tmp_path / "no-model", questions, code=1)


@pytest.mark.parametrize("option", ["--out", "--disk"])
def test_a_target_that_can_not_be_written_is_noticed_before_the_model_is_loaded(
    questions: Path, tmp_path: Path, option: str
) -> None:
    text = run("tune", tmp_path / "no-model", questions, option, questions, code=1)
    assert f"{option}: " in text
    assert "is a file; give a folder" in text


def test_figures_of_a_chunk_size_that_does_not_fit_are_refused_before_the_first_question(
    model: Path, questions: Path, tmp_path: Path
) -> None:
    pytest.importorskip("rouge_score")
    out = tmp_path / "out"
    options = ("--policies", "random", "--ratios", 0.5, "--questions", 1, "--max-new-tokens", 3, "--out", out)
    text = run("evaluate", model, questions, *options, "--chunk-tokens", 100_000, "--figures", "--quick", code=1)
    assert "--chunk-tokens: 100000 does not fit into " in text
    assert not out.exists()
    text = run("evaluate", model, questions, *options, "--chunk-tokens", 1, "--figures", "--quick", code=1)
    assert "--chunk-tokens: 1: Input should be greater than or equal to 2" in text
    assert not out.exists()


def test_evaluate_gives_the_engines_of_its_figures_a_share_of_the_memory_each(
    model: Path, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rouge_score")
    given: list[int] = []

    class Recorded(CurveMaker):
        def __init__(self, *arguments: Any, memory: int, **options: Any) -> None:
            given.append(memory)
            raise ValueError("enough was seen")

    monkeypatch.setattr(curves_module, "CurveMaker", Recorded)
    options = ("--policies", "random", "--ratios", 0.5, "--questions", 1, "--max-new-tokens", 3, "--memory", "64MiB")
    text = run("evaluate", model, questions, *options, "--figures", "--quick", "--out", tmp_path / "out", code=1)
    assert "enough was seen" in text
    assert given == [64 * 2**20 // 5]  # for what chunks are computed behind there are five


def test_evaluate_makes_the_same_curves_as_figures(model: Path, questions: Path, tmp_path: Path) -> None:
    pytest.importorskip("rouge_score")
    out = tmp_path / "out"
    options = ("--policies", "random", "--ratios", 0.5, "--questions", 2, "--chunk-tokens", 128, "--chunks", 3)
    text = run("evaluate", model, questions, *options, "--max-new-tokens", 3, "--figures", "--quick", "--out", out)
    assert "figures.md" in text
    names = {"answers.csv", "summary.md", "divergence.png", "figures.csv", "figures.md", *PLOTS}
    assert {path.name for path in out.iterdir()} == names
    found = curves(out / "figures.csv")
    assert found["chunk_size"] == {128, 256}  # of the usual sizes, that which fits into three chunks of 128
    assert set(found) == CURVES
    assert "token F1" in (out / "figures.md").read_text(encoding="utf-8")
