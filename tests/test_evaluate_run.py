"""Questions answered by full prefill and by variants, and what variants are charged."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from cachecraft_rag import CacheCraftEngine, EngineConfig, PromptTooLongError, RagPrompt, RecomputeConfig
from cachecraft_rag.config import EncodeConfig
from cachecraft_rag.evaluate import (
    Evaluator,
    Outcome,
    Question,
    Variant,
    answer_and_score,
    charge_for,
    exact_match,
    kl_divergence,
    plan_of,
    rouge_l,
    score,
    token_f1,
    variants,
)
from cachecraft_rag.evaluate.run import FULL, PUBLISHED
from cachecraft_rag.selection import POLICIES
from tests.conftest import EngineMaker, passage, rag_prompt
from tests.tiny_models import make
from tests.tiny_tokenizers import byte_level

pytest.importorskip("rouge_score")

TARGETS = (0.1, 0.137, 0.2, 0.35, 0.6, 0.9, 1.0)
BY_RATIO = [name for name in POLICIES if name not in ("none", "all", "inter_attention", "predicted")]


def question(*numbers: int) -> Question:
    return Question(f"q{numbers}", "What ends first?", ("The lease", "lease"), tuple(map(passage, numbers)))


def warmed(engine: CacheCraftEngine, prompt: RagPrompt) -> RagPrompt:
    engine.warm(prompt.chunks)
    return prompt


def prompt_behind(engine: CacheCraftEngine, *numbers: int) -> RagPrompt:
    """A prompt whose first chunk stands right behind the canonical prefix, so that its KV is exact."""
    chunks = [passage(number) for number in numbers]
    content = engine.config.encode.instruction + "\n\n".join(chunks) + "\n\nWhat ends first?"
    return RagPrompt.from_messages([{"role": "user", "content": content}], chunks)


@pytest.mark.parametrize("policy", BY_RATIO)
@pytest.mark.parametrize("first_is_exact", [False, True])
def test_a_charged_target_is_met_from_below_and_within_one_token(policy: str, first_is_exact: bool) -> None:
    config = EngineConfig(keep_exact=False, encode=EncodeConfig(behind="prefix"))
    engine = CacheCraftEngine(make("llama", num_hidden_layers=8), byte_level(), config)
    prompt = warmed(engine, prompt_behind(engine, 1, 2, 3, 4) if first_is_exact else rag_prompt(1, 2, 3, 4))
    plan = plan_of(engine, prompt, RecomputeConfig())
    assert bool(plan.chunks[0].is_exact) is first_is_exact
    num_reached = 0
    for target in TARGETS:
        charge = charge_for(engine, prompt, RecomputeConfig(policy=policy), target)
        recompute = charge.recompute
        stats = score(engine, prompt, [5], recompute=recompute).stats
        assert stats.charged_ratio == pytest.approx(charge.charged_ratio, abs=1e-12)
        if charge.is_reached:
            num_reached += 1
            assert stats.charged_ratio <= target + 1e-9
            assert stats.charged_ratio > target - 1 / stats.prompt_tokens - 1e-9
    assert num_reached >= 2  # between the cost of choosing and that of everything but the exact chunk
    engine.close()


def test_a_target_below_what_is_computed_in_any_case_is_not_reached(make_engine: EngineMaker) -> None:
    engine = make_engine()
    prompt = warmed(engine, rag_prompt(1, 2))
    charge = charge_for(engine, prompt, RecomputeConfig(), 0.01)
    assert charge.recompute.ratio == 0.0
    assert charge.charged_ratio > 0.02
    assert not charge.is_reached


def test_a_target_that_does_not_pay_for_choosing_recomputes_nothing_and_says_so(make_engine: EngineMaker) -> None:
    engine = make_engine()
    prompt = warmed(engine, rag_prompt(1, 2))
    plan = plan_of(engine, prompt, RecomputeConfig())
    free = plan.num_tokens - plan.num_candidates
    target = 1.5 * free / plan.num_tokens  # the question pass alone costs as much again
    charge = charge_for(engine, prompt, RecomputeConfig(policy="question_attention"), target)
    assert (charge.recompute.ratio, charge.is_reached) == (0.0, False)
    assert charge.charged_ratio == pytest.approx(free / plan.num_tokens)
    assert charge_for(engine, prompt, RecomputeConfig(policy="chunk_start"), target).is_reached


def test_a_target_of_everything_recomputes_everything(make_engine: EngineMaker) -> None:
    engine = make_engine()
    prompt = warmed(engine, rag_prompt(1, 2))
    for policy in BY_RATIO:
        charge = charge_for(engine, prompt, RecomputeConfig(policy=policy), 1.0)
        assert (charge.recompute.ratio, charge.charged_ratio, charge.is_reached) == (1.0, 1.0, True)


@pytest.mark.parametrize(("policy", "ratio"), [("none", 0.0), ("all", 1.0)])
def test_policies_without_a_choice_have_one_charge(make_engine: EngineMaker, policy: str, ratio: float) -> None:
    engine = make_engine(keep_exact=False)
    prompt = warmed(engine, rag_prompt(1, 2))
    charge = charge_for(engine, prompt, RecomputeConfig(policy=policy), 0.3)
    stats = score(engine, prompt, [5], recompute=RecomputeConfig(policy=policy)).stats
    assert (charge.recompute.ratio, charge.is_reached) == (ratio, False)
    assert charge.charged_ratio == pytest.approx(stats.charged_ratio)


def test_a_chunk_that_is_not_stored_can_not_be_planned(make_engine: EngineMaker) -> None:
    engine = make_engine()
    engine.warm([passage(1)])
    with pytest.raises(RuntimeError, match="1 of 2 chunks are not stored"):
        plan_of(engine, rag_prompt(1, 2), RecomputeConfig())


def test_a_charged_target_beside_a_target_divergence_is_refused(make_engine: EngineMaker) -> None:
    engine = make_engine()
    prompt = warmed(engine, rag_prompt(1, 2))
    with pytest.raises(ValueError, match=r"charged: 0\.2 can't be met"):
        charge_for(engine, prompt, RecomputeConfig(target_divergence=0.1), 0.2)
    with pytest.raises(ValueError, match=r"charged: 1\.5"):
        charge_for(engine, prompt, RecomputeConfig(), 1.5)


def test_an_answer_is_that_of_generate_and_its_scores_those_of_a_prefill_of_their_own(make_engine: EngineMaker) -> None:
    engine = make_engine(keep_exact=False)
    prompt = warmed(engine, rag_prompt(1, 2, 3))
    other = [40, 41, 300, 7, 7, 99, 12, 13, 14, 15, 16]  # longer than the answer
    for options in ({"reuse": False}, {"recompute": RecomputeConfig(ratio=0.2)}):
        both = answer_and_score(engine, prompt, other, max_new_tokens=6, **options)  # type: ignore[arg-type]
        assert both.answer.token_ids == engine.generate(prompt, max_new_tokens=6, **options).token_ids
        assert len(both.answer.token_ids) <= 6
        torch.testing.assert_close(both.logits, score(engine, prompt, other, **options).logits)  # type: ignore[arg-type]
        assert both.answer.stats.ttft_s > 0
        own = answer_and_score(engine, prompt, max_new_tokens=6, **options)  # type: ignore[arg-type]
        assert tuple(own.logits.argmax(-1).tolist()) == own.answer.token_ids


def test_an_own_answer_ends_at_a_stop_text(make_engine: EngineMaker) -> None:
    engine = make_engine()
    prompt = warmed(engine, rag_prompt(1, 2))
    text = engine.generate(prompt, reuse=False, max_new_tokens=8).text
    stop = text[len(text) // 2]
    assert (
        answer_and_score(engine, prompt, max_new_tokens=8, stop=[stop], reuse=False).answer.text == text.split(stop)[0]
    )


def test_an_empty_answer_is_scored_where_it_ended(make_engine: EngineMaker) -> None:
    engine = make_engine(keep_exact=False)
    engine.warm(question(1, 2).chunks)
    prompt = question(1, 2).prompt()
    first = int(answer_and_score(engine, prompt, max_new_tokens=1, reuse=False).logits.argmax())
    engine.model.generation_config.eos_token_id = first
    both = answer_and_score(engine, prompt, max_new_tokens=5, reuse=False)
    assert both.answer.token_ids == ()
    assert both.logits.argmax(-1).tolist() == [first]
    (full, everything) = Evaluator(engine).run(question(1, 2), [Variant("all", RecomputeConfig(ratio=1.0))])
    assert (full.reference_tokens, everything.reference_tokens) == (0, 0)
    assert everything.kl < 1e-6


def test_a_model_that_can_not_reuse_chunks_is_refused() -> None:
    with pytest.warns(UserWarning, match="prefilled in full"):
        engine = CacheCraftEngine(make("gpt2"), byte_level())
    with pytest.raises(ValueError, match="can't reuse chunks"):
        Evaluator(engine)
    with pytest.raises(ValueError, match="can't reuse chunks"):
        answer_and_score(engine, rag_prompt(1), [1])
    engine.close()


def outcomes_of(engine: CacheCraftEngine, asked: Question, *tried: Variant, **options: Any) -> list[Outcome]:
    return list(Evaluator(engine, max_new_tokens=8, **options).run(asked, tried))


def test_recomputing_everything_is_full_prefill_and_reusing_all_is_not(make_engine: EngineMaker) -> None:
    engine = make_engine()
    tried = [Variant("ours", RecomputeConfig(ratio=ratio)) for ratio in (1.0, 0.0)]
    full, everything, nothing = outcomes_of(engine, question(1, 2, 3), *tried)
    assert (full.label, full.kl, full.top1, full.charged_ratio, full.rouge_l) == (FULL, 0.0, 1.0, 1.0, 1.0)
    assert everything.kl < 1e-6
    assert (everything.top1, everything.charged_ratio, everything.answer) == (1.0, 1.0, full.answer)
    assert (everything.rouge_l, everything.f1, everything.setting) == (1.0, full.f1, "ratio 1")
    assert nothing.kl > 1e-3
    assert nothing.charged_ratio < 0.5
    assert nothing.is_reached is None


def test_figures_are_those_of_the_metrics(make_engine: EngineMaker) -> None:
    engine = make_engine(keep_exact=False)
    asked = question(1, 2, 3)
    variant = Variant("none", RecomputeConfig(policy="none"))
    full, found = outcomes_of(engine, asked, variant, instruction="Be brief.", stop=())
    prompt = asked.prompt("Be brief.")
    reference = engine.generate(prompt, reuse=False, max_new_tokens=8)
    own = engine.generate(prompt, recompute=variant.recompute, max_new_tokens=8)
    assert (full.answer, found.answer) == (reference.text, own.text)
    assert found.reference_tokens == len(reference.token_ids)
    assert found.f1 == token_f1(own.text, asked.answers)
    assert found.exact_match == exact_match(own.text, asked.answers)
    assert found.rouge_l == rouge_l(own.text, reference.text)
    logits = [score(engine, prompt, reference.token_ids, reuse=False).logits]
    logits.append(score(engine, prompt, reference.token_ids, recompute=variant.recompute).logits)
    assert found.kl == pytest.approx(float(kl_divergence(*logits).mean()), abs=1e-6)
    assert found.ttft_ratio == pytest.approx(found.ttft_s / full.ttft_s)
    assert found.prompt_tokens == reference.stats.prompt_tokens


def test_the_order_of_variants_does_not_matter(make_engine: EngineMaker) -> None:
    tried = [Variant("ours", RecomputeConfig(ratio=ratio)) for ratio in (1.0, 0.0, 0.3)]
    forwards = outcomes_of(make_engine(), question(1, 2, 3), *tried)[1:]
    backwards = outcomes_of(make_engine(), question(1, 2, 3), *reversed(tried))[1:]
    assert [o.kl for o in forwards] == [o.kl for o in reversed(backwards)]
    assert [o.charged_ratio for o in forwards] == [o.charged_ratio for o in reversed(backwards)]


def test_a_charged_variant_reports_what_was_measured_and_whether_the_target_was_met(make_engine: EngineMaker) -> None:
    engine = make_engine()
    low, met = outcomes_of(engine, question(1, 2, 3, 4), *variants(["question_sensitivity"], [0.01, 0.4]))[1:]
    assert (low.setting, low.ratio, low.is_reached) == ("charged 0.01", 0.0, False)
    assert low.charged_ratio > 0.02
    assert (met.setting, met.is_reached) == ("charged 0.4", True)
    assert 0.0 < met.ratio < 0.4
    assert 0.0 <= 0.4 - met.charged_ratio <= 1 / met.prompt_tokens


def test_the_policy_that_goes_by_cfo_is_given_earlier_prompts_and_its_alpha_meets_the_target(
    make_engine: EngineMaker,
) -> None:
    engine = make_engine()
    asked = question(1, 2, 3, 4)
    low, high = outcomes_of(engine, asked, *variants(["inter_attention"], [0.3, 0.6]))[1:]
    assert (low.policy, low.setting) == ("inter_attention", "charged 0.3")
    for outcome, target in ((low, 0.3), (high, 0.6)):
        assert outcome.is_reached
        assert 0.0 <= target - outcome.charged_ratio <= len(asked.chunks) / outcome.prompt_tokens
    fixed = Variant("fixed", RecomputeConfig(policy="inter_attention", alpha=0.5))
    assert outcomes_of(engine, asked, fixed)[1].setting == "alpha 0.5"
    again = outcomes_of(engine, asked, *variants(["inter_attention"], [0.3]))[1]
    assert (again.kl, again.charged_ratio) == (low.kl, low.charged_ratio), "what earlier questions left has no say"


def test_a_variant_without_an_answer_has_the_same_divergence(make_engine: EngineMaker) -> None:
    engine = make_engine(keep_exact=False)
    with_answer, without = (
        outcomes_of(engine, question(1, 2, 3), *variants(["chunk_start"], [0.2], charged=False, with_answer=flag))[1]
        for flag in (True, False)
    )
    assert without.kl == pytest.approx(with_answer.kl, abs=1e-9)
    assert (without.answer, without.f1, without.exact_match, without.rouge_l) == (None, None, None, None)
    assert without.ttft_s > 0
    assert with_answer.answer is not None


def test_an_outcome_survives_a_round_trip_through_plain_values(make_engine: EngineMaker) -> None:
    found = outcomes_of(make_engine(), question(1, 2), *variants(["random"], [0.3]))
    assert [Outcome(**outcome.as_dict()) for outcome in found] == found  # type: ignore[arg-type]
    assert all(math.isfinite(outcome.kl) for outcome in found)


def test_a_store_without_room_is_an_error_and_not_a_figure(make_engine: EngineMaker) -> None:
    engine = make_engine(store={"cold": {"size": 1}})
    with pytest.raises(RuntimeError, match="not stored"):
        outcomes_of(engine, question(1, 2), Variant("ours", RecomputeConfig()))


def test_a_prompt_over_the_context_window_is_refused(make_engine: EngineMaker) -> None:
    with pytest.raises(PromptTooLongError):
        outcomes_of(make_engine(context_window=64), question(1, 2))


def test_variants_are_every_policy_with_every_amount() -> None:
    made = variants(["random", "chunk_start"], [0.1, 0.2], charged=False)
    assert [(v.label, v.setting, v.recompute.ratio) for v in made] == [
        ("random", "ratio 0.1", 0.1),
        ("chunk_start", "ratio 0.1", 0.1),
        ("random", "ratio 0.2", 0.2),
        ("chunk_start", "ratio 0.2", 0.2),
    ]
    assert [v.charged for v in variants(["random"], [0.1, 0.2])] == [0.1, 0.2]
    assert Variant("x", RecomputeConfig(target_divergence=0.05)).setting == "target 0.05"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((["nonsense"], [0.1]), "policies: 'nonsense' is none of none, all"),
        ((["random"], [1.5]), "amounts: 1.5"),
        (([], [0.1]), "at least one"),
        ((["random"], []), "at least one"),
    ],
)
def test_variants_that_do_not_exist_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        variants(*arguments)


def test_selectors_of_others_run_without_our_offset() -> None:
    made = {variant.label: variant.recompute.offset for variant in variants(list(POLICIES), [0.1])}
    assert made["question_sensitivity"] == RecomputeConfig().offset > 0.0
    assert [made[name] for name in PUBLISHED] == [0.0] * 4


def test_the_policy_without_a_ratio_is_refused_one() -> None:
    with pytest.raises(ValueError, match="'inter_attention' goes by alpha"):
        variants(["inter_attention"], [0.1], charged=False)


def test_labels_and_targets_are_checked() -> None:
    for label in ("", FULL):
        with pytest.raises(ValueError, match="label"):
            Variant(label, RecomputeConfig())
    with pytest.raises(ValueError, match="charged: -1"):
        Variant("ours", RecomputeConfig(), -1)
    with pytest.raises(ValueError, match="max_new_tokens: 0"):
        Evaluator(CacheCraftEngine(make("llama"), byte_level()), max_new_tokens=0)


def test_published_selectors_work_on_kv_behind_the_prefix_and_the_default_on_averaged_kv(
    make_engine: EngineMaker,
) -> None:
    engine = make_engine()
    contexts: dict[str, str] = {}
    with Evaluator(engine, max_new_tokens=4) as evaluator:
        list(evaluator.run(question(1, 2, 3), variants(["question_attention", "question_sensitivity"], [0.5])))
        others = dict(evaluator._others)
        for name, one in {"own": engine, **others}.items():
            contexts[name] = one.library._encoder.context
        assert others["prefix"].config.encode.behind == "prefix"
    assert len(set(contexts.values())) == len(contexts) == 2
    assert all(one.is_closed for one in others.values())
    assert not engine.is_closed
