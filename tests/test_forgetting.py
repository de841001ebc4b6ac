"""What was computed before something was forgotten is not stored after it."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from cachecraft_rag import RagPrompt
from cachecraft_rag.forgetting import Forgetting
from tests.conftest import EngineMaker, passage, rag_prompt


def test_only_what_was_noted_before_is_unwanted() -> None:
    forgetting = Forgetting()
    before, elsewhere = forgetting.count("a"), forgetting.count("b")
    with forgetting.forgetting("a"):
        pass
    with forgetting.keeping("a", before) as is_wanted:
        assert not is_wanted
    with forgetting.keeping("a", forgetting.count("a")) as is_wanted:
        assert is_wanted
    with forgetting.keeping("b", elsewhere) as is_wanted:
        assert is_wanted


def test_a_count_is_not_given_while_something_is_being_forgotten() -> None:
    forgetting, counts = Forgetting(), list[int]()
    thread = threading.Thread(target=lambda: counts.append(forgetting.count("a")))
    with forgetting.forgetting("a"):
        thread.start()
        thread.join(0.05)
        assert not counts
    thread.join(10)
    assert counts == [1]


LONG = passage(7, 16)  # long enough to be a chunk of its own where nobody registered it


def as_text() -> RagPrompt:
    return RagPrompt.from_text(f"Read this.\n\n{LONG}\n\nWhat ends first?")


def as_chunk() -> RagPrompt:
    return RagPrompt(chunks=(LONG,), question="What ends first?")


@pytest.mark.parametrize("what", [{"texts": [LONG]}, {}], ids=["the chunk", "everything"])
@pytest.mark.parametrize(
    ("options", "prompt"),
    [
        ({"ratio": 1.0}, as_chunk()),
        ({"policy": "inter_attention"}, as_chunk()),
        ({"auto_chunks": True}, as_text()),
        ({}, as_chunk()),
    ],
    ids=["exact", "variant", "automatic", "default"],
)
def test_a_request_under_way_does_not_bring_back_what_is_invalidated(
    options: dict[str, Any], prompt: RagPrompt, what: dict[str, Any], make_engine: EngineMaker
) -> None:
    engine = make_engine(**options)
    engine.generate(rag_prompt(8))
    stream = engine.stream(prompt)
    next(stream)
    engine.invalidate(**what)
    for _ in stream:
        continue
    assert engine.is_stored([LONG]) == [False]
    if not what:
        assert len(engine.store) == 0
    engine.generate(prompt)
    assert engine.is_stored([LONG]) == [True]  # a later one does


def test_a_request_in_line_does_not_either(make_engine: EngineMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(ratio=0.3)
    prefill = engine._prefiller.run

    def forget_first(*arguments: Any) -> None:
        engine.invalidate([LONG])
        prefill(*arguments)

    monkeypatch.setattr(engine._prefiller, "run", forget_first)
    engine.generate(as_chunk())
    assert engine.is_stored([LONG]) == [False]
