"""Steps of the model: who is prefilled, decoded and let go in each, driven here by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cachecraft_rag import CacheCraftEngine, EngineConfig, StoreConfig
from cachecraft_rag.config import SchedulerConfig
from cachecraft_rag.errors import DeadlineExceededError, RequestCancelledError
from cachecraft_rag.request import Request
from cachecraft_rag.step_runner import StepRunner
from cachecraft_rag.ticket import LOOKAHEAD, Ticket
from cachecraft_rag.turns import Turns
from tests.conftest import EngineMaker, passage, rag_prompt
from tests.tiny_models import make
from tests.tiny_tokenizers import byte_level


class Driven:
    """An engine whose steps are taken one by one, and what each of them did."""

    def __init__(self, engine: CacheCraftEngine) -> None:
        self.engine = engine
        self.runner: StepRunner = engine._scheduler._runner
        self.seconds = {"prefill": 1.0, "finish": 1.0, "decode": 0.3}
        self._now = 0.0
        self.runner.turns = Turns(lambda: self._now)
        self.done: list[str] = []
        for name in ("_prefill", "_finish", "_decode"):
            self._record(name)

    def _record(self, name: str) -> None:
        original = getattr(self.runner, name)

        def recording(what: Any) -> None:
            tickets = what if isinstance(what, list) else [what]
            self.done.append(f"{name[1]}{''.join(self.name(ticket) for ticket in tickets)}")
            self._now += self.seconds[name[1:]]
            original(what)

        setattr(self.runner, name, recording)

    def name(self, ticket: Ticket) -> str:
        return str(ticket.owner)

    def add(
        self, name: str, *numbers: int, is_whole: bool = True, timeout_s: float | None = None, **options: Any
    ) -> Ticket:
        request = self.engine._request(rag_prompt(*numbers), None, None, timeout_s, {"max_new_tokens": 4, **options})
        ticket = self.runner.ticket(request, True, timeout_s, name, is_whole)
        self.runner.add([ticket])
        return ticket

    def steps(self, count: int = 1000) -> list[str]:
        """Take at most so many steps; what they did: p prefilled, d decoded, f finished, and whom."""
        self.done.clear()
        for _ in range(count):
            if not self.runner.step():
                break
        return list(self.done)


@pytest.fixture
def make_driven(make_engine: EngineMaker) -> Callable[..., Driven]:
    def maker(name: str = "llama", **scheduler: Any) -> Driven:
        engine = make_engine(name, scheduler=SchedulerConfig(**scheduler))
        engine.warm([passage(number) for number in range(1, 7)])
        return Driven(engine)

    return maker


MakeDriven = Callable[..., Driven]


def test_requests_join_and_leave_between_steps(make_driven: MakeDriven) -> None:
    driven = make_driven()
    a = driven.add("A", 1)
    assert driven.steps(2) == ["pA", "dA"]
    b = driven.add("B", 2, max_new_tokens=5)
    assert driven.steps(4) == ["pB", "dAB", "dAB", "fA"]
    assert a.outcome().finish_reason == "length"
    assert driven.steps() == ["dB", "dB", "fB"]
    assert b.outcome().stats.output_tokens == 5


def test_prefills_take_turns_with_the_tokens_of_others(make_driven: MakeDriven) -> None:
    driven = make_driven()
    driven.add("A", 1, max_new_tokens=8)
    driven.steps(1)
    for name in "BCD":
        driven.add(name, 2)
    assert driven.steps(6) == ["dA", "pB", "dAB", "pC", "dABC", "pD"]


def test_tokens_that_take_as_long_as_prefills_come_behind_three_of_them(make_driven: MakeDriven) -> None:
    driven = make_driven()
    driven.seconds["decode"] = 1.0
    driven.add("A", 1, max_new_tokens=8)
    driven.steps(2)
    for name in "BCDE":
        driven.add(name, 2)
    assert driven.steps(6) == ["pB", "pC", "pD", "dABCD", "pE", "dABCDE"]


def test_answers_are_those_of_single_runs_wherever_requests_join(make_driven: MakeDriven) -> None:
    driven = make_driven()
    orders = [(1, 2), (3,), (4, 5, 6), (2, 1)]
    alone = [driven.engine.generate(rag_prompt(*order), max_new_tokens=12).token_ids for order in orders]
    tickets = []
    for number, order in enumerate(orders):
        tickets.append(driven.add(str(number), *order, max_new_tokens=12))
        driven.steps(3)
    driven.steps()
    assert [ticket.outcome().token_ids for ticket in tickets] == alone


def test_more_than_the_largest_batch_wait_in_line(make_driven: MakeDriven) -> None:
    driven = make_driven(max_batch=2)
    a, b, c = (driven.add(name, 1) for name in "ABC")
    assert driven.steps(5) == ["pA", "dA", "pB", "dAB", "dAB"]
    assert driven.runner.num_waiting == 1
    assert driven.steps(2) == ["fA", "dB"]
    assert driven.steps(2) == ["fB", "pC"]
    driven.steps()
    assert [ticket.outcome().stats.output_tokens for ticket in (a, b, c)] == [4, 4, 4]


def test_a_request_waits_until_there_is_memory_for_it(make_driven: MakeDriven) -> None:
    driven = make_driven()
    need = driven.engine._adapter.kv_bytes(len(driven.engine.prompts.encode(rag_prompt(1)).token_ids) + 4)
    driven = make_driven(memory=int(2.5 * need))
    a, b, c = (driven.add(name, 1) for name in "ABC")
    driven.steps(4)
    assert (a.answer is None, b.answer is None, c.answer is None) == (False, False, True)
    assert driven.runner.num_waiting == 1
    driven.steps()
    assert c.outcome().stats.output_tokens == 4
    assert c.outcome().stats.queue_s > a.outcome().stats.queue_s


def test_a_request_larger_than_all_memory_runs_alone(make_driven: MakeDriven) -> None:
    driven = make_driven(memory=1)
    tickets = [driven.add(name, 1) for name in "AB"]
    done = driven.steps()
    assert done.index("pB") > done.index("fA")
    assert all(ticket.outcome().stats.output_tokens == 4 for ticket in tickets)


def test_what_a_request_held_is_let_go_at_its_end(make_driven: MakeDriven) -> None:
    driven = make_driven()
    ticket = driven.add("A", 1)
    driven.steps()
    assert (ticket.request.kv, ticket.request.logits, ticket.request.next_logits) == (None, None, None)
    assert driven.engine._in_flight.count == 0


def test_requests_that_share_chunks_go_together(make_driven: MakeDriven) -> None:
    driven = make_driven(max_batch=1)
    for name, number in (("A", 1), ("B", 2), ("C", 1)):
        driven.add(name, number)
    assert [step for step in driven.steps() if step.startswith("p")] == ["pA", "pC", "pB"]


def test_chunks_that_several_requests_share_are_read_from_disk_once(tmp_path: Path) -> None:
    store = StoreConfig(cold={"size": "64MiB"}, disk={"path": str(tmp_path), "size": "64MiB"})  # type: ignore[arg-type]
    with CacheCraftEngine(make("llama"), byte_level(), EngineConfig(store=store)) as engine:
        engine.warm([passage(1), passage(2)])
    with CacheCraftEngine(make("llama"), byte_level(), EngineConfig(store=store)) as engine:
        engine.register([passage(1), passage(2)])
        results = engine.generate_batch([rag_prompt(1, 2), rag_prompt(2, 1), rag_prompt(1)], max_new_tokens=3)
        assert [result.stats.chunk_hits for result in results] == [2, 2, 1]
        assert {stats.name: stats for stats in engine.store.stats().tiers}["disk"].hits == 2


def test_a_cancelled_request_gets_no_further_token(make_driven: MakeDriven) -> None:
    driven = make_driven()
    a, b = driven.add("A", 1, max_new_tokens=8), driven.add("B", 2, max_new_tokens=8)
    assert driven.steps(4) == ["pA", "dA", "pB", "dAB"]
    a.is_cancelled = True
    assert driven.steps(1) == ["dB"]
    with pytest.raises(RequestCancelledError):
        a.outcome()
    driven.steps()
    assert b.outcome().stats.output_tokens == 8


def test_a_request_that_is_cancelled_in_line_is_never_begun(make_driven: MakeDriven) -> None:
    driven = make_driven(max_batch=1)
    driven.add("A", 1)
    driven.steps(1)
    waiting, arrived = driven.add("B", 2), None
    driven.steps(1)
    arrived = driven.add("C", 3)
    waiting.is_cancelled = arrived.is_cancelled = True
    assert driven.steps() == ["dA", "dA", "fA"]
    assert driven.runner.num_waiting == 0
    for ticket in (waiting, arrived):
        with pytest.raises(RequestCancelledError):
            ticket.outcome()


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_a_request_ends_when_its_time_is_over(num_steps: int, make_driven: MakeDriven) -> None:
    driven = make_driven(max_batch=1)
    other = driven.add("A", 2, max_new_tokens=6)
    driven.steps()
    late = driven.add("B", 1, timeout_s=1000.0, max_new_tokens=6)
    driven.steps(num_steps)
    late.deadline = 0.0
    assert driven.steps() == []
    with pytest.raises(DeadlineExceededError, match="timeout_s"):
        late.outcome()
    assert other.outcome().stats.output_tokens == 6
    assert driven.engine._in_flight.count == 0


def test_an_error_in_a_prefill_stays_with_its_request(make_driven: MakeDriven, monkeypatch: pytest.MonkeyPatch) -> None:
    driven = make_driven()
    run = driven.engine._prefiller.run

    def failing(request: Request, reuse: bool) -> None:
        run(request, reuse)
        if request.sampling.seed == 13:
            raise MemoryError("no room")

    monkeypatch.setattr(driven.engine._prefiller, "run", failing)
    a, b, c = driven.add("A", 1), driven.add("B", 2, seed=13), driven.add("C", 3)
    driven.steps()
    with pytest.raises(MemoryError, match="no room"):
        b.outcome()
    assert (a.outcome().stats.output_tokens, c.outcome().stats.output_tokens) == (4, 4)


def test_an_error_in_drawing_stays_with_its_request(make_driven: MakeDriven) -> None:
    driven = make_driven()
    a, b = driven.add("A", 1), driven.add("B", 2)
    driven.steps(3)
    assert b.answer is not None
    b.answer._detokenizer._decode = lambda ids: 1 / 0  # type: ignore[assignment,return-value]
    driven.steps()
    with pytest.raises(ZeroDivisionError):
        b.outcome()
    assert a.outcome().stats.output_tokens == 4


def test_an_error_after_the_answer_takes_no_answer_away(
    make_driven: MakeDriven, monkeypatch: pytest.MonkeyPatch
) -> None:
    driven = make_driven()
    a, b = driven.add("A", 1), driven.add("B", 2, seed=13)
    learn = driven.engine._prefiller.learn
    monkeypatch.setattr(
        driven.engine._prefiller, "learn", lambda request: 1 / 0 if request.sampling.seed == 13 else learn(request)
    )
    with pytest.warns(UserWarning, match="what an answer taught was not kept: ZeroDivisionError"):
        driven.steps()
    assert b.outcome().stats.output_tokens == 4
    assert a.outcome().stats.output_tokens == 4


def test_a_reader_who_stays_away_is_parked_and_holds_nobody_up(make_driven: MakeDriven) -> None:
    driven = make_driven(max_batch=1)
    slow = driven.add("A", 1, is_whole=False, max_new_tokens=40)
    other = driven.add("B", 2)
    driven.steps()
    assert slow.is_parked
    assert slow.pieces.qsize() == LOOKAHEAD
    assert other.outcome().stats.output_tokens == 4
    pieces = [slow.pieces.get() for _ in range(LOOKAHEAD)]
    driven.steps()
    while slow.error is None and slow.result is None:
        pieces.append(slow.pieces.get())
        driven.steps()
    while (piece := slow.pieces.get()) is not None:
        pieces.append(piece)
    assert "".join(map(str, pieces)) == slow.outcome().text


def test_readers_who_come_back_all_get_their_turn(make_driven: MakeDriven) -> None:
    driven = make_driven(max_batch=1)
    tickets = [driven.add(name, 1, is_whole=False, max_new_tokens=40) for name in "AB"]
    driven.steps()
    for ticket in tickets:
        for _ in range(3):
            ticket.pieces.get()
    assert driven.steps(4) in (["dA", "dB", "dA", "dB"], ["dB", "dA", "dB", "dA"])


def test_a_model_with_its_own_cache_serves_one_after_the_other(make_engine: EngineMaker) -> None:
    with pytest.warns(UserWarning, match="prefilled in full"):
        driven = Driven(make_engine("mamba"))
    alone = [driven.engine.generate(rag_prompt(number), max_new_tokens=4).token_ids for number in (1, 2)]
    a, b = driven.add("A", 1), driven.add("B", 2)
    done = driven.steps()
    first, second = (step[1] for step in done if step.startswith("p"))
    assert done.index(f"p{second}") > done.index(f"f{first}")
    assert [a.outcome().token_ids, b.outcome().token_ids] == alone


def test_rows_that_a_hook_sees_are_computed_alone(make_driven: MakeDriven) -> None:
    driven = make_driven()
    sizes: list[int] = []

    def seen(module: Any, inputs: Any, output: torch.Tensor) -> None:
        sizes.append(output.shape[0])

    hook = driven.engine.model.model.layers[0].mlp.register_forward_hook(seen)
    tickets = [driven.add(name, 1) for name in "AB"]
    with pytest.warns(UserWarning, match="forward hook"):
        driven.steps()
    hook.remove()
    assert set(sizes) == {1}
    assert all(ticket.outcome().stats.fallback_reason for ticket in tickets)
