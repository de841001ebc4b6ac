"""What prompts begin with is computed once and reused as it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cachecraft_rag import CacheCraftEngine, RagPrompt
from cachecraft_rag.prompt import EncodedPrompt
from cachecraft_rag.prompt_heads import MIN_HEAD_TOKENS
from tests.conftest import EngineMaker, passage, prefill_logits

SYSTEM = "You answer questions about leases. Be brief, and name the clause that your answer is taken from."


def asked(question: str, system: str = SYSTEM, *numbers: int) -> RagPrompt:
    return RagPrompt(system=system, chunks=[passage(n) for n in numbers or (1, 2)], question=question)


def encoded(engine: CacheCraftEngine, prompt: RagPrompt) -> EncodedPrompt:
    return engine.prompts.encode(prompt, engine.library.registry)


def prefilled(engine: CacheCraftEngine, prompt: RagPrompt) -> int:
    """Free tokens that a request computed."""
    return engine.generate(prompt).stats.prefilled_tokens


def num_free(engine: CacheCraftEngine, prompt: RagPrompt) -> int:
    read = encoded(engine, prompt)
    return len(read.token_ids) - sum(span.num_tokens for span in read.spans)


def test_the_head_of_two_different_questions_is_not_computed_a_third_time(make_engine: EngineMaker) -> None:
    engine = make_engine(ratio=0.2)
    engine.warm([passage(1), passage(2)])
    first, second, third = (asked(f"What ends {when}?") for when in ("first", "second", "last"))
    assert prefilled(engine, first) == num_free(engine, first)
    assert prefilled(engine, second) == num_free(engine, second)
    stats = engine.generate(third).stats
    read = encoded(engine, third)
    assert stats.prefilled_tokens == num_free(engine, third) - read.num_head_tokens
    assert read.num_head_tokens == read.spans[0].start > MIN_HEAD_TOKENS
    assert stats.reused_tokens + stats.recomputed_tokens + stats.prefilled_tokens == stats.prompt_tokens


def test_a_question_that_is_repeated_leaves_no_head(make_engine: EngineMaker) -> None:
    engine = make_engine(ratio=0.2)
    engine.warm([passage(1), passage(2)])
    prompt = asked("What ends first?")
    assert {prefilled(engine, prompt) for _ in range(4)} == {num_free(engine, prompt)}


def test_only_what_two_heads_have_in_common_is_kept(make_engine: EngineMaker) -> None:
    engine = make_engine(ratio=0.2)
    engine.warm([passage(1), passage(2)])
    days = ("Monday", "Friday", "Sunday", "Saturday")
    dated = [asked("What ends first?", f"{SYSTEM} Today is {day}.") for day in days]
    reused = [num_free(engine, prompt) - prefilled(engine, prompt) for prompt in dated][-1]
    assert reused > MIN_HEAD_TOKENS
    *earlier, last = (encoded(engine, prompt).token_ids[:reused] for prompt in dated)
    assert last in earlier
    assert len({encoded(engine, prompt).head_ids for prompt in dated}) == len(days)


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-neox"])
def test_logits_are_the_same_with_and_without_a_kept_head(make_engine: EngineMaker, name: str, ratio: float) -> None:
    engine, other = make_engine(name, ratio=ratio), make_engine(name, ratio=ratio)
    for one in (engine, other):
        one.warm([passage(1), passage(2)])
    for when in ("first", "second"):
        engine.generate(asked(f"What ends {when}?"))
    with_head, request = prefill_logits(engine, asked("What ends last?"))
    assert request.plan is not None
    assert request.plan.head == request.encoded.num_head_tokens
    torch.testing.assert_close(with_head, prefill_logits(other, asked("What ends last?"))[0], atol=1e-4, rtol=1e-4)


def test_turns_of_a_conversation_are_no_part_of_a_head(make_engine: EngineMaker) -> None:
    engine = make_engine(ratio=0.2)
    turns = [{"role": "user", "content": "Hello, my name is Ada."}, {"role": "assistant", "content": "Hello, Ada."}]
    last = {"role": "user", "content": f"{passage(1)}\n\nWhat ends first?"}
    prompt = RagPrompt.from_messages([{"role": "system", "content": SYSTEM}, *turns, last], chunks=[passage(1)])
    head = engine.prompts.decode(encoded(engine, prompt).head_ids)
    assert SYSTEM in head
    assert "Ada" not in head


def test_a_question_before_the_chunks_is_no_part_of_a_head(make_engine: EngineMaker) -> None:
    engine = make_engine()
    prompt = RagPrompt(text=f"{SYSTEM}\nQ: What ends first?\n{passage(1)}", chunks=(passage(1),), question="What ends")
    assert engine.prompts.decode(encoded(engine, prompt).head_ids).endswith("Q:")


def test_namespaces_keep_their_heads_apart_and_clearing_one_forgets_it(make_engine: EngineMaker) -> None:
    engine = make_engine(ratio=0.2)
    questions = [asked(f"What ends {when}?") for when in ("first", "second", "last")]
    for namespace in ("a", "b"):
        engine.warm([passage(1), passage(2)], namespace=namespace)
    for prompt in questions[:2]:
        engine.generate(prompt, namespace="a")
    free = num_free(engine, questions[2])
    assert engine.generate(questions[2], namespace="b").stats.prefilled_tokens == free
    assert engine.generate(questions[2], namespace="a").stats.prefilled_tokens < free
    engine.invalidate(namespace="a")
    engine.warm([passage(1), passage(2)], namespace="a")
    assert engine.generate(questions[2], namespace="a").stats.prefilled_tokens == free


def test_forgetting_a_text_drops_the_heads_that_it_may_stand_in_for_every_process(
    make_engine: EngineMaker, tmp_path: Path
) -> None:
    store = {"disk": {"path": str(tmp_path), "size": "64 MiB"}}
    secret = f"{SYSTEM} {passage(3)}"  # not registered when it is first seen
    with make_engine(ratio=0.2, store=store) as engine:
        for when in ("first", "second"):
            engine.generate(asked(f"What ends {when}?", secret))
        engine.store.flush()
    later = make_engine(ratio=0.2, store=store)
    later.invalidate(texts=[passage(3)])
    later.warm([passage(1), passage(2)])
    last = asked("What ends last?", secret)
    assert prefilled(later, last) == num_free(later, last)


def test_a_head_that_was_kept_is_found_by_an_engine_that_never_saw_it(make_engine: EngineMaker, tmp_path: Path) -> None:
    store = {"disk": {"path": str(tmp_path), "size": "64 MiB"}}
    with make_engine(ratio=0.2, store=store) as engine:
        for when in ("first", "second"):
            engine.generate(asked(f"What ends {when}?"))
        engine.store.flush()
    later = make_engine(ratio=0.2, store=store)
    assert prefilled(later, asked("What ends last?")) < num_free(later, asked("What ends last?"))


@pytest.mark.parametrize("ratio", [0.2, 1.0])
def test_weights_that_change_while_an_answer_is_read_leave_nothing_of_it(
    make_engine: EngineMaker, ratio: float
) -> None:
    engine = make_engine(ratio=ratio)
    engine.generate(asked("What ends first?"))
    stream = engine.stream(asked("What ends second?", SYSTEM, 3, 4))  # would keep the head, and its chunks as exact
    next(stream)
    before = {entry.key for entry in engine.store.entries()}
    with torch.no_grad():
        engine.model.get_input_embeddings().weight.mul_(1.01)
    for _ in stream:
        continue
    assert {entry.key for entry in engine.store.entries()} == before
    other = make_engine(ratio=ratio)
    other.model.load_state_dict(engine.model.state_dict())
    last = asked("What ends last?", SYSTEM, 3, 4)
    torch.testing.assert_close(prefill_logits(engine, last)[0], prefill_logits(other, last)[0], atol=1e-4, rtol=1e-4)
