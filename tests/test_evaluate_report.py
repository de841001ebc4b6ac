"""From outcomes to figures, tables and files."""

from __future__ import annotations

import csv
import io
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from cachecraft_rag.evaluate import Interval, Outcome, against_published, as_markdown, summarise, write_report
from cachecraft_rag.evaluate.report import as_rich, write_plot
from cachecraft_rag.evaluate.run import FULL, PUBLISHED
from cachecraft_rag.evaluate.summary import DEFAULT
from cachecraft_rag.selection import POLICIES


def outcome(question: str = "q0", label: str = DEFAULT, setting: str = "charged 0.1", **changes: object) -> Outcome:
    made = Outcome(
        question=question,
        label=label,
        setting=setting,
        policy=label,
        ratio=0.05,
        charged_ratio=0.1,
        is_reached=True,
        prompt_tokens=100,
        reference_tokens=8,
        kl=0.1,
        top1=0.9,
        f1=0.5,
        exact_match=0.0,
        rouge_l=0.7,
        ttft_s=0.2,
        ttft_ratio=0.2,
        answer="Cork",
        fallback_reason=None,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def full(question: str, f1: float = 0.5) -> Outcome:
    return outcome(question, FULL, "", kl=0.0, top1=1.0, f1=f1, charged_ratio=1.0, is_reached=None, ttft_ratio=1.0)


def some_outcomes() -> list[Outcome]:
    draw = random.Random(1)
    made = []
    for number in range(12):
        made.append(full(f"q{number}"))
        for setting, charged in (("charged 0.1", 0.1), ("charged 0.2", 0.2)):
            for label in ("key_deviation", "chunk_start", DEFAULT):
                kl = draw.random() * 0.1 / charged
                made.append(outcome(f"q{number}", label, setting, kl=kl, charged_ratio=charged))
    return made


def test_figures_of_a_variant_are_means_and_medians_over_its_questions() -> None:
    found = summarise([outcome(f"q{number}", kl=kl, ttft_ratio=kl) for number, kl in enumerate((0.1, 0.2, 0.9))])
    (summary,) = found
    assert (summary.label, summary.setting, summary.num_questions) == (DEFAULT, "charged 0.1", 3)
    assert summary.kl.value == pytest.approx(0.4)
    assert summary.kl.low < 0.4 < summary.kl.high
    assert (summary.kl_median.value, summary.ttft_ratio.value) == (0.2, 0.2)
    assert summary.charged_ratio == pytest.approx(0.1)
    assert summary.f1 == Interval(0.5, 0.5, 0.5)
    assert summary.num_off_target == 0


def test_a_variant_is_compared_with_the_baseline_on_the_questions_that_both_answered() -> None:
    made = []
    for number, kl in enumerate((0.1, 0.3, 0.2)):
        made.append(outcome(f"q{number}", kl=kl))
        if number < 2:
            made.append(outcome(f"q{number}", "random", kl=2 * kl + 0.1, f1=0.25))
    made.append(outcome("q0", "random", "charged 0.3"))  # no baseline in this setting
    own, rival, alone = summarise(made)
    assert (own.kl_difference, own.kl_ratio, own.f1_difference) == (None, None, None)
    assert rival.num_questions == 2
    assert rival.kl_difference is not None
    assert rival.kl_difference.value == pytest.approx(0.3)
    assert rival.kl_ratio is not None
    assert rival.kl_ratio.value == pytest.approx(2.5)
    assert rival.f1_difference == Interval(-0.25, -0.25, -0.25)
    assert (alone.kl_difference, alone.kl_ratio) == (None, None)


def test_another_baseline_may_be_named() -> None:
    made = [outcome(label=label, kl=kl) for label, kl in ((DEFAULT, 0.1), ("random", 0.2))]
    (own, other) = summarise(made, baseline="random")
    assert own.kl_ratio is not None
    assert own.kl_ratio.value == pytest.approx(0.5)
    assert other.kl_ratio is None


def test_f1_is_held_against_that_of_full_prefill() -> None:
    made = [full("q0", 0.5), full("q1", 1.0), outcome("q0", f1=0.4), outcome("q1", f1=0.8)]
    reference, own = summarise(made)
    assert own.f1_share is not None
    assert own.f1_share.value == pytest.approx(0.8)
    assert (reference.f1_share, reference.rouge_l) == (None, None)
    nothing = summarise([full("q0", 0.0), outcome("q0", f1=0.4)])[1]
    assert nothing.f1_share is None, "there is no share of nothing"


def test_a_variant_without_answers_has_no_figures_of_them() -> None:
    (summary,) = summarise([outcome(f1=None, exact_match=None, rouge_l=None, answer=None)])
    assert (summary.f1, summary.exact_match, summary.rouge_l, summary.f1_share) == (None, None, None, None)
    assert summary.kl.value == pytest.approx(0.1)


def test_questions_off_target_are_counted_and_shown() -> None:
    made = [outcome(f"q{number}", is_reached=number != 1) for number in range(4)]
    assert summarise(made)[0].num_off_target == 1
    assert "1 of 4 off target" in as_markdown(made, "Title")
    assert summarise([outcome(is_reached=None)])[0].num_off_target is None


def test_the_best_published_selector_is_found_by_mean_and_by_median() -> None:
    kls = {DEFAULT: (0.1, 0.1, 0.1), "key_deviation": (0.2, 0.2, 0.2), "chunk_start": (0.15, 0.15, 0.9)}
    made = [outcome(f"q{n}", label, kl=kl) for label, of_label in kls.items() for n, kl in enumerate(of_label)]
    made.append(outcome("q9", kl=9.0))  # no rival answered it
    made += [outcome("q0", "random", kl=0.01)]  # nobody's
    (rival,) = against_published(made)
    assert (rival.setting, rival.num_questions) == ("charged 0.1", 3)
    assert (rival.best_mean, rival.best_median) == ("key_deviation", "chunk_start")
    assert rival.mean_ratio is not None
    assert rival.median_ratio is not None
    assert rival.mean_ratio.value == pytest.approx(0.5)
    assert rival.median_ratio.value == pytest.approx(0.1 / 0.15)
    assert against_published([outcome()]) == []


def test_published_selectors_are_policies_and_the_default_is_none_of_them() -> None:
    assert set(PUBLISHED) < set(POLICIES)
    assert DEFAULT not in PUBLISHED


def test_tables_fit_into_80_columns_and_hold_every_variant() -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(as_rich(some_outcomes()))
    text = console.export_text()
    for name in ("key_deviation", "chunk_start", DEFAULT, "charged 0.1", "charged 0.2", FULL):
        assert name in text
    assert "…" not in text
    assert "12 questions" in text


def test_every_row_of_the_markdown_has_the_cells_of_its_header() -> None:
    text = as_markdown(some_outcomes(), "A title")
    assert text.startswith("# A title\n")
    tables = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    assert len(tables) == 5
    for table in tables:
        assert len({line.count(" | ") for line in table}) == 1
        assert len(table) >= 4


def test_a_report_is_three_files(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    made = [*some_outcomes(), outcome("q0", "random", answer='with "quotes", commas\nand lines', is_reached=None)]
    paths = write_report(made, tmp_path / "new" / "folder", "Title")
    assert [path.name for path in paths] == ["answers.csv", "summary.md", "divergence.png"]
    with paths[0].open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(made)
    assert rows[-1]["answer"] == 'with "quotes", commas\nand lines'
    assert [float(row["kl"]) for row in rows] == [one.kl for one in made]
    assert (rows[-1]["is_reached"], rows[-1]["fallback_reason"]) == ("", "")
    assert paths[1].read_text(encoding="utf-8") == as_markdown(made, "Title")
    assert paths[2].read_bytes().startswith(b"\x89PNG")


def test_divergence_of_nothing_is_plotted_too(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write_plot([outcome(kl=0.0), outcome("q1", kl=0.0)], tmp_path / "plot.png", "Title")
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_a_plot_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"cachecraft-rag\[bench\]"):
        write_plot(some_outcomes(), tmp_path / "plot.png", "Title")
