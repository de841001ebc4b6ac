"""Curves measured on a tiny model: what stays the same whatever the setting, and what must change with it."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from cachecraft_rag import RecomputeConfig, StoreConfig
from cachecraft_rag.evaluate.bootstrap import Interval
from cachecraft_rag.evaluate.curve import Curve, Point
from cachecraft_rag.evaluate.curve_report import as_markdown, write_curves
from cachecraft_rag.evaluate.curves import FULL_EXTENT, CurveMaker
from cachecraft_rag.evaluate.hot_share import hot_share_curve, zipf_stream
from cachecraft_rag.evaluate.load_ahead import forget_pages
from cachecraft_rag.evaluate.quality_curves import BEHIND
from cachecraft_rag.evaluate.questions import Source
from cachecraft_rag.evaluate.stored_sample import distinct_chunks, engine_with, stored_chunks
from tests.conftest import EngineMaker, passage
from tests.curve_samples import SMALL, maker, settled, sources

pytest.importorskip("matplotlib")


def test_what_chunks_are_computed_behind_is_measured_on_the_same_questions(make_engine: EngineMaker) -> None:
    engine = make_engine(ratio=0.6)
    with maker(engine) as made:
        curve = made.behind(64)
        assert curve is not None
        assert [curve.label(point.x) for point in curve.points] == list(BEHIND)
        assert "ratio 0.15, offset 0.5" in curve.title
        divergences, changes = dict(curve.values("kl")), dict(curve.values("kl_change"))
        assert list(changes) == [0, 1, 2, 3]  # compared with 4, neighbours, which is the engine's
        for x, change in changes.items():
            assert change.value == pytest.approx(divergences[x].value - divergences[4].value)
        assert len({point.value for point in divergences.values()}) == 5
        by_hand = {behind: made.ratio(64, behind=behind) for behind in BEHIND}
        own = made.ratio(64).values("kl")
        assert by_hand["neighbours"].values("kl") == own
        assert by_hand["none"].values("kl")[0] != own[0]
    assert not engine.is_closed


def test_engines_that_are_made_for_it_have_no_tiers_of_the_users_and_are_closed(
    make_engine: EngineMaker, tmp_path: Path
) -> None:
    engine = make_engine(store=StoreConfig.model_validate({"disk": {"path": str(tmp_path / "kv")}}))
    with maker(engine) as made:
        made.behind(64)
        evaluator = made._evaluator_beside()
        engines = [evaluator._engine, *evaluator._others.values()]
        assert sorted(one.config.encode.behind for one in engines) == sorted(BEHIND)
        assert engine not in engines
        for one in engines:
            assert (one.config.store.disk, one.config.store.cold.size) == (None, 2**30)
    assert all(one.is_closed for one in engines)
    assert not engine.is_closed
    assert made.behind(64) is not None  # measured anew
    made.close()


def test_the_offset_is_measured_on_chunks_computed_behind_what_is_asked_for(make_engine: EngineMaker) -> None:
    with maker(make_engine(), replace(SMALL, offsets=(0.0, 1.0))) as made:
        own, other = made.offset(64), made.offset(64, "none")
    for curve in (own, other):
        assert [point.x for point in curve.points] == [0.0, 0.5, 1.0]  # with the one that is set
        divergences = dict(curve.values("kl"))
        assert len({kl.value for kl in divergences.values()}) == 3
        for x, change in curve.values("kl_change"):
            assert change.value == pytest.approx(divergences[x].value - divergences[0.5].value)
    assert own.values("kl") != other.values("kl")


def test_more_recompute_means_less_divergence_and_none_at_1(make_engine: EngineMaker) -> None:
    curve = maker(make_engine()).ratio(64)
    divergences = {ratio: kl.value for ratio, kl in curve.values("kl")}
    assert list(divergences) == [0.0, 0.3, 1.0]
    assert divergences[1.0] < 1e-6 < divergences[0.0]
    assert "2 questions" in curve.sample
    assert "f1" not in curve.names


def test_every_chunk_size_is_measured_on_as_much_text_and_sizes_that_do_not_fit_are_left_out(
    make_engine: EngineMaker,
) -> None:
    made = CurveMaker(make_engine(), sources(), SMALL, max_new_tokens=3, with_answer=True)
    assert made.chunk_sizes == (64, 128)
    pytest.importorskip("rouge_score")
    curve = made.chunk_size()
    assert [point.x for point in curve.points] == [64, 128]
    assert {"kl", "tokens_per_s", "ttft_s", "f1", "full_f1"} <= set(curve.names)
    assert curve.points[0].figures["kl"] != curve.points[1].figures["kl"]


def test_sizes_that_cut_the_same_chunks_are_measured_once(make_engine: EngineMaker) -> None:
    short = [Source("q0", "What?", ("lease",), (passage(1, 1), passage(2, 1)))]
    curve = CurveMaker(make_engine(), short, SMALL, max_new_tokens=3).chunk_size()
    assert curve.points[0].figures == curve.points[1].figures


def repeated(stream: list[tuple[int, ...]], lag: int) -> float:
    """Share of the chunks of a request that the one so many requests before asked for too."""
    pairs = list(zip(stream, stream[lag:], strict=False))
    return sum(len(set(a) & set(b)) for a, b in pairs) / (3 * len(pairs))


def test_requests_ask_for_different_chunks_of_falling_popularity() -> None:
    stream = zipf_stream(20, 3, 400, seed=1)
    assert stream == zipf_stream(20, 3, 400, seed=1) != zipf_stream(20, 3, 400, seed=2)
    assert all(len(set(request)) == 3 for request in stream)
    # Drawn evenly, 3 of 20 would come again. What is popular comes again soon, and is no longer popular much later.
    assert repeated(stream, 1) > 0.25 > 0.2 > repeated(stream, 200)
    assert set(range(20)) == {index for request in stream for index in request}
    for per_request in (0, 21):
        with pytest.raises(ValueError, match=f"per_request: {per_request}"):
            zipf_stream(20, per_request, 1)


def test_hits_are_those_of_a_store_with_that_hot_share(make_engine: EngineMaker) -> None:
    engine = make_engine()
    made = maker(engine)
    curve = made.hot_share(64)
    assert curve is not None
    rates = [rate.value for _, rate in curve.values("hit_rate")]
    assert all(0.1 < rate < 0.9 for rate in rates)
    assert len(set(rates)) > 1
    again = made.hot_share(64)
    assert again is not None
    assert [rate for _, rate in again.values("hit_rate")] == [rate for _, rate in curve.values("hit_rate")]
    assert all(seconds.value > 0 for _, seconds in curve.values("ttft_s"))


def test_a_sample_of_too_few_chunks_has_no_hot_share(make_engine: EngineMaker) -> None:
    engine = make_engine()
    short = [Source("q0", "What?", ("lease",), (passage(1, 1), passage(2, 1)))]
    assert CurveMaker(engine, short, SMALL, max_new_tokens=3).hot_share(64) is None
    chunks = stored_chunks(engine, [passage(1, 1), passage(2, 1)])
    assert maker(engine, replace(SMALL, distinct=1000, fewest=1000)).hot_share(64) is None
    with pytest.raises(ValueError, match="chunks: 2 are too few for 2 per request; give at least 6"):
        hot_share_curve(engine, chunks, ["What?"], (0.5,), RecomputeConfig(), per_request=2)


def test_questions_that_are_too_long_are_left_out_of_every_curve(make_engine: EngineMaker) -> None:
    long = Source("long", passage(7, 60), ("lease",), (passage(8, 3),))
    extent = replace(SMALL, questions=3, loads=3)
    made = CurveMaker(make_engine(context_window=600), [long, *sources()], extent, max_new_tokens=3)
    assert len(made.questions(64)) == 3
    loads, hot = made.load_ahead(64), made.hot_share(64)
    assert "3 requests" in loads.sample
    assert hot is not None
    assert len(hot.points) == 3
    alone = CurveMaker(made.engine, [long], extent, max_new_tokens=3)
    with pytest.raises(ValueError, match="questions: all 1 are longer"):
        alone.load_ahead(64)
    chunks = stored_chunks(made.engine, [passage(number, 1) for number in range(3)])
    with pytest.raises(ValueError, match="questions: beside 1 chunks all 1 are longer"):
        hot_share_curve(made.engine, chunks, [long.question], (0.5,), RecomputeConfig(), per_request=1)


def test_a_chunk_size_that_is_not_measured_is_refused_by_name(make_engine: EngineMaker) -> None:
    with pytest.raises(ValueError, match="chunk_tokens: 5000 is none of 64, 128"):
        maker(make_engine()).all(5000)


def test_chunks_come_from_disk_and_nothing_is_left_there(make_engine: EngineMaker, tmp_path: Path) -> None:
    made = CurveMaker(make_engine(), sources(), SMALL, max_new_tokens=3, disk=tmp_path / "disk")
    curve = made.load_ahead(64)
    assert [window for window, _ in curve.values("load_s")] == [0, 2]
    assert all(0 < seconds.value < curve.points[0].figures["ttft_s"].high for _, seconds in curve.values("load_s"))
    assert list((tmp_path / "disk").iterdir()) == []


def test_an_engine_for_a_measurement_has_no_tiers_but_its_own(make_engine: EngineMaker, tmp_path: Path) -> None:
    store = StoreConfig.model_validate({"disk": {"path": str(tmp_path / "kv")}, "device_size": "1MiB", "hot_after": 3})
    engine = make_engine(store=store)
    chunks = stored_chunks(engine, [passage(1), passage(2)])
    assert [chunk.text for chunk in chunks] == [passage(1), passage(2)]
    assert all(chunk.kv.sensitivity is not None for chunk in chunks)
    with engine_with(engine, device_size=2**20, hot_share=0.25) as small:
        assert not small.store.contains(chunks[0].key)
        tiers = [(tier.name, tier.capacity) for tier in small.store.stats().tiers]
        assert tiers == [("hot", 2**18), ("warm", 3 * 2**18)]
        assert small.config.store.hot_after == 3


def test_files_are_as_they_were_when_their_pages_are_forgotten(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "entry").write_bytes(b"kv" * 5000)
    forget_pages(tmp_path)
    assert (tmp_path / "sub" / "entry").read_bytes() == b"kv" * 5000


def test_distinct_chunks_are_in_order_and_limited(make_engine: EngineMaker) -> None:
    questions = maker(make_engine()).questions(64)
    prompts = [question.chunks for question in questions]
    assert distinct_chunks([prompts[0], prompts[0], prompts[1]]) == [*prompts[0], *prompts[1]]
    assert distinct_chunks(prompts, 3) == [*prompts[0]][:3]


@pytest.mark.parametrize("policy", ["inter_attention", "none", "all"])
def test_a_policy_without_a_ratio_can_not_be_tuned(make_engine: EngineMaker, policy: str) -> None:
    with pytest.raises(ValueError, match=f"policy: '{policy}' has no ratio"):
        maker(make_engine(policy=policy))


def test_sizes_that_all_are_too_large_are_refused(make_engine: EngineMaker) -> None:
    with pytest.raises(ValueError, match="chunk_sizes: none of 5000 fits into 400"):
        maker(make_engine(), replace(SMALL, chunk_sizes=(5000,)))
    with pytest.raises(ValueError, match="chunk_sizes: none of 1024 fits into 448"):
        maker(make_engine(context_window=501), replace(FULL_EXTENT, chunk_sizes=(1024,)))


def test_values_that_are_words_are_in_the_report(tmp_path: Path) -> None:
    curve = settled("behind", dict(enumerate(BEHIND)), "none", "passages", BEHIND)
    assert "| none | 0.0100 [0.0100, 0.0100] | -0.0400 [-0.0400, -0.0400] |" in as_markdown(curve)
    assert "| passages | 0.0500 [0.0500, 0.0500] |  |" in as_markdown(curve)
    paths = write_curves([curve], tmp_path, "Title", chosen={"behind": "none"})
    with paths[0].open(encoding="utf-8", newline="") as file:
        assert [row["x"] for row in csv.DictReader(file) if row["figure"] == "kl"] == list(BEHIND)
    assert paths[2].read_bytes().startswith(b"\x89PNG")


def test_a_report_holds_every_figure(tmp_path: Path) -> None:
    figures = {"kl": Interval(0.01234, 0.01, 0.02), "ttft_s": Interval(1.5, 1.0, 2.0)}
    points = (Point(0.0, figures), Point(0.5, {"kl": figures["kl"]}))
    curve = Curve("ratio", "Quality", "recompute ratio", ("kl",), points, "3 q")
    text = as_markdown(curve)
    assert "| 0 | 0.0123 [0.0100, 0.0200] | 1.500 [1.000, 2.000] |" in text
    assert "| 0.5 | 0.0123 [0.0100, 0.0200] |  |" in text
    paths = write_curves([curve], tmp_path / "new", "Title", head=["Head."], chosen={"ratio": 0.5})
    assert [path.name for path in paths] == ["figures.csv", "figures.md", "ratio.png"]
    with paths[0].open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["x"], row["figure"], float(row["high"])) for row in rows] == [
        ("0", "kl", 0.02),
        ("0", "ttft_s", 2.0),
        ("0.5", "kl", 0.02),
    ]
    assert paths[1].read_text(encoding="utf-8").startswith("# Title\n\nHead.\n\n**Quality** (3 q)")
    assert paths[2].read_bytes().startswith(b"\x89PNG")
