"""Pieces in tokens, with every kind of tokenizer."""

from __future__ import annotations

import json

import pytest

from cachecraft_rag.chunk_forms import forms_of
from cachecraft_rag.piece_ids import tokens_of
from cachecraft_rag.pieces import PieceSpan
from cachecraft_rag.prompt import EncodedPrompt, PromptEncoder, RagPrompt
from cachecraft_rag.registry import ChunkRegistry
from cachecraft_rag.segment_tokenizer import SegmentTokenizer
from tests.conftest import passage
from tests.tiny_tokenizers import ALL, byte_level

CHUNK = "\n".join(f'"{passage(number, 6)}" — § 契約 👩‍👩‍👧 {number}' for number in range(4))
ENCODERS = {name: PromptEncoder(make()) for name, make in ALL.items()}


def encode(name: str, content: str) -> EncodedPrompt:
    registry = ChunkRegistry()
    registry.register([CHUNK])
    return ENCODERS[name].encode(RagPrompt.from_messages([{"role": "user", "content": content}]), registry)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    ("first", "last"),
    [(0, 500), (303, None), (211, 660), (CHUNK.index("契") + 1, None), (0, CHUNK.rindex("👩") + 1)],
    ids=["head", "tail", "middle", "behind a letter of several bytes", "within an emoji"],
)
@pytest.mark.parametrize("escape", [str, repr, json.dumps], ids=["plain", "repr", "json"])
def test_a_piece_has_the_ids_that_it_has_in_its_chunk(name: str, first: int, last: int | None, escape: object) -> None:
    assert callable(escape)
    encoder = ENCODERS[name]
    encoded = encode(name, f"Context:  {escape(CHUNK[first:last])}\n\nWhy?")
    assert encoder.decode(encoded.token_ids) == encoded.text
    (span,) = encoded.spans
    assert span.piece is not None
    assert span.origins == (CHUNK,)
    ids = encoded.token_ids[span.start : span.end]
    assert ids == span.piece.token_ids[span.piece.start : span.piece.start + span.num_tokens]
    assert ids == encoder.encode_chunk(span.text)
    assert span.piece.token_ids in {encoder.encode_chunk(form) for form in forms_of(CHUNK)}
    assert len(span.text) > len(escape(CHUNK[first:last])) - 40
    assert (span.piece.start == 0) == (first == 0)


@pytest.mark.parametrize("name", ALL)
def test_a_whole_chunk_is_no_piece_and_beside_its_pieces(name: str) -> None:
    encoded = encode(name, f"{CHUNK[:450]} ... {CHUNK} ... {CHUNK[300:]}")
    assert [None if span.piece is None else span.piece.start > 0 for span in encoded.spans] == [False, None, True]
    assert ENCODERS[name].decode(encoded.token_ids) == encoded.text


def test_pieces_are_looked_for_in_the_contents_of_messages_only() -> None:
    encoder = PromptEncoder(byte_level())
    encoder.tokenizer.chat_template = f"{CHUNK[:450]}{{{{ messages[0]['content'] }}}}"
    registry = ChunkRegistry()
    registry.register([CHUNK])
    assert encoder.encode(RagPrompt.from_messages([{"role": "user", "content": "a " * 200}]), registry).spans == ()


def test_too_few_tokens_are_no_piece() -> None:
    segments = SegmentTokenizer(byte_level())
    assert tokens_of(PieceSpan(0, 12, CHUNK, CHUNK, 0), segments) is None
    found = tokens_of(PieceSpan(7, 107, CHUNK, CHUNK, 50), segments)
    assert found is not None
    assert 7 <= found.start < found.end <= 107
    assert found.token_ids == segments.encode_chunk(CHUNK[found.start + 43 : found.end + 43])
