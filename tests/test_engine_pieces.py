"""Prompts that hold parts of chunks, through the whole engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cachecraft_rag import CacheCraftEngine, RagPrompt, StoreConfig
from cachecraft_rag.piece_kv import PieceKV
from tests.conftest import EngineMaker, passage, prefill_logits

CHUNK, OTHER = passage(1, 30), passage(2, 12)
CUTS = {"head": CHUNK[:520], "tail": CHUNK[333:], "middle": CHUNK[201:640]}


def asked(*parts: str, question: str = "What ends first?") -> RagPrompt:
    return RagPrompt.from_messages([{"role": "user", "content": "\n###\n".join(["Context:", *parts, question])}])


def answer(engine: CacheCraftEngine, *parts: str, **options: Any) -> dict[str, Any]:
    return engine.generate(asked(*parts), **options).stats.model_dump()


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-neox"])
def test_a_piece_of_a_stored_chunk_is_reused_and_counted_like_a_chunk(
    make_engine: EngineMaker, name: str, cut: str
) -> None:
    engine = make_engine(name, ratio=0.25)
    engine.warm([CHUNK])
    stats = answer(engine, CUTS[cut])
    (span,) = engine.prompts.encode(asked(CUTS[cut]), engine.library.registry).spans
    assert (stats["chunk_hits"], stats["chunk_misses"], stats["stored_tokens"]) == (1, 0, 0)
    assert stats["reused_tokens"] + stats["recomputed_tokens"] == span.num_tokens
    assert stats["recomputed_tokens"] == pytest.approx(0.25 * span.num_tokens, abs=1)
    assert sum(stats[f"{kind}_tokens"] for kind in ("reused", "recomputed", "prefilled")) == stats["prompt_tokens"]


@pytest.mark.parametrize("cut", CUTS)
def test_at_ratio_one_an_answer_over_pieces_is_that_of_full_prefill(make_engine: EngineMaker, cut: str) -> None:
    engine = make_engine(ratio=1.0)
    engine.warm([CHUNK, OTHER])
    prompt = asked(OTHER, CUTS[cut], OTHER[100:])
    logits, request = prefill_logits(engine, prompt)
    assert [type(chunk.chunk_kv) is PieceKV for chunk in request.chunks] == [False, True, True]
    torch.testing.assert_close(logits, prefill_logits(engine, prompt, reuse=False)[0], atol=1e-4, rtol=1e-4)


def test_what_is_put_into_the_prompt_is_the_part_of_the_stored_kv(make_engine: EngineMaker) -> None:
    engine = make_engine(ratio=0.0)
    engine.warm([CHUNK])
    _, request = prefill_logits(engine, asked(CUTS["tail"]))
    (chunk,), (span,) = request.chunks, request.encoded.spans
    assert isinstance(chunk.chunk_kv, PieceKV)
    assert span.piece is not None
    assert request.kv is not None
    stored = engine.store.get(chunk.key)
    assert stored is not None
    values = stored.values[:, :, span.piece.start : span.piece.start + span.num_tokens]
    assert request.kv.slice(span.start, span.end)[1].equal(values)


def test_the_beginning_of_an_exact_chunk_is_exact(make_engine: EngineMaker) -> None:
    engine = make_engine(ratio=1.0)
    engine.register([CHUNK])
    answer(engine, CHUNK)
    cut = asked(CUTS["head"])
    logits, request = prefill_logits(engine, cut)
    assert (request.chunks[0].is_exact, request.stats().recomputed_tokens) == (True, 0)
    assert request.stats().reused_tokens == request.encoded.spans[0].num_tokens
    torch.testing.assert_close(logits, prefill_logits(engine, cut, reuse=False)[0], atol=1e-4, rtol=1e-4)
    assert not prefill_logits(engine, asked(CUTS["tail"]))[1].chunks[0].is_exact


def test_a_piece_of_a_chunk_that_is_not_stored_is_a_chunk_of_its_own(make_engine: EngineMaker) -> None:
    engine = make_engine(ratio=0.25)
    engine.register([CHUNK])
    first = answer(engine, CHUNK[:520], CHUNK[520:])
    assert (first["chunk_hits"], first["chunk_misses"]) == (0, 2)
    second = answer(engine, CHUNK[520:], CHUNK[:520])
    assert (second["chunk_hits"], second["chunk_misses"]) == (2, 0)
    assert engine.is_stored([CHUNK]) == [False]


def test_other_namespaces_find_no_pieces(make_engine: EngineMaker) -> None:
    engine = make_engine()
    engine.warm([CHUNK], namespace="a")
    assert answer(engine, CUTS["tail"], namespace="b")["fallback_reason"] == "no known chunk in the prompt"
    assert answer(engine, CUTS["tail"], namespace="a")["chunk_hits"] == 1


def test_pieces_are_found_in_what_tools_print(make_engine: EngineMaker) -> None:
    engine = make_engine(ratio=0.25)
    text = CHUNK.replace(". ", '."\n"')
    whole, cut = json.dumps([{"text": text}]), json.dumps([{"text": text[300:]}])
    engine.register([text])
    assert answer(engine, whole)["chunk_misses"] == 1
    assert (answer(engine, cut)["chunk_hits"], answer(engine, whole)["chunk_hits"]) == (1, 1)


def test_pieces_are_cut_from_entries_that_are_read_layer_by_layer(make_engine: EngineMaker, tmp_path: Path) -> None:
    store = StoreConfig(disk={"path": str(tmp_path)})
    with make_engine(store=store) as engine:
        engine.warm([CHUNK])
        expected = prefill_logits(engine, asked(CUTS["tail"]), ratio=0.0)[0]
    engine = make_engine(store=store, ratio=0.0)
    engine.register([CHUNK])
    stats = answer(engine, CUTS["tail"], CUTS["head"])
    assert stats["hits_by_tier"] == {"disk": 2}
    logits, request = prefill_logits(engine, asked(CUTS["tail"]), ratio=0.0)
    assert request.chunks[0].tier == "cold"  # the whole entry has moved to memory
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_sensitivity_that_is_missing_is_measured_for_the_whole_chunk(make_engine: EngineMaker) -> None:
    engine = make_engine(ratio=0.25)
    engine.register([CHUNK])
    answer(engine, CHUNK, recompute=engine.config.recompute.changed(policy="chunk_start"))
    key = prefill_logits(engine, asked(CHUNK))[1].chunks[0].key
    assert engine.store.get(key).sensitivity is None  # type: ignore[union-attr]
    answer(engine, CUTS["tail"])
    measured = engine.store.get(key).sensitivity  # type: ignore[union-attr]
    assert measured is not None
    assert measured.shape[1] == len(engine.prompts.encode_chunk(CHUNK))


def test_variants_are_planned_for_pieces_too(make_engine: EngineMaker) -> None:
    engine = make_engine(policy="inter_attention")
    engine.warm([CHUNK])
    stats = answer(engine, OTHER, CUTS["tail"])
    assert (stats["chunk_hits"], stats["chunk_misses"]) == (1, 0)
    assert 0 < stats["recomputed_tokens"] < stats["reused_tokens"] + stats["recomputed_tokens"]


@pytest.mark.parametrize("how", ["texts", "document_ids"])
def test_forgetting_a_chunk_drops_its_pieces_and_all_its_forms(make_engine: EngineMaker, how: str) -> None:
    engine = make_engine(ratio=0.25)
    text = CHUNK.replace(". ", ".\n")
    engine.register([text], document_id="lease.pdf")
    answer(engine, text[:500], json.dumps(text), OTHER)
    answer(engine, text)
    assert len(engine.store) == 4  # and what both prompts begin with
    forgotten: dict[str, Any] = {"texts": [text]} if how == "texts" else {"document_ids": ["lease.pdf"]}
    assert engine.invalidate(**forgotten) == 3
    assert len(engine.store) == 0
    assert answer(engine, text[:500], json.dumps(text))["chunk_misses"] == 0  # nobody looks for it any more


def test_what_is_stored_is_told_without_loading_it(make_engine: EngineMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    engine.warm([CHUNK], namespace="a")
    engine.register([OTHER], namespace="a")
    monkeypatch.setattr(engine.store, "open", None)
    monkeypatch.setattr(engine.store, "get", None)
    assert engine.is_stored([f"  {CHUNK}\n", OTHER, ""], "a") == [True, False, False]
    assert engine.is_stored([CHUNK]) == [False]
    with pytest.raises(ValueError, match="is one string; give a list of strings"):
        engine.is_stored(CHUNK)


def test_an_answer_goes_on_from_what_it_is_said_to_begin_with(make_engine: EngineMaker) -> None:
    engine = make_engine(ratio=0.0)
    messages = [{"role": "user", "content": f"{CHUNK}\n\nWhy?"}]
    prompt = RagPrompt.from_messages(messages, [CHUNK], answer_start="Because <|im_start|> the")
    bare = engine.prompts.encode(RagPrompt.from_messages(messages, [CHUNK]))
    encoded = engine.prompts.encode(prompt)
    assert encoded.text == f"{bare.text}Because <|im_start|> the" == engine.prompts.decode(encoded.token_ids)
    assert encoded.spans == bare.spans
    by_hand = RagPrompt.from_text(f"{bare.text}Because <|im_start|> the", [CHUNK])
    assert engine.generate(prompt).token_ids == engine.generate(by_hand).token_ids


def test_no_chunk_is_looked_for_in_the_beginning_of_an_answer(make_engine: EngineMaker) -> None:
    engine = make_engine()
    engine.register([CHUNK])
    messages = [{"role": "user", "content": "Repeat it."}]
    prompt = RagPrompt.from_messages(messages, answer_start=f"Here: {CHUNK} and {CHUNK[:500]}")
    assert engine.prompts.encode(prompt, engine.library.registry).spans == ()


def test_a_beginning_of_an_answer_is_a_text_and_belongs_to_messages() -> None:
    with pytest.raises(ValueError, match="answer_start: 'a' beside text; put it at the end of the text"):
        RagPrompt(text="b", answer_start="a")
    start: Any = 3
    with pytest.raises(ValueError, match="answer_start: 3 is not a string"):
        RagPrompt(question="b", answer_start=start)
