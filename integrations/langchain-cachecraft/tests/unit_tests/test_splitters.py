"""The text splitter."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.documents import Document

from cachecraft_rag import CacheCraftEngine, ChunkSplitter
from langchain_cachecraft import CacheAlignedTextSplitter
from langchain_cachecraft.callbacks import RETRIEVED
from tests.conftest import passage
from tests.tiny_tokenizers import byte_level

SIZES: dict[str, Any] = {"min_tokens": 60, "max_tokens": 100}
# The same clause again and again: its place can't be found by looking for its text.
TEXT = "\n\n".join(["  1. Term", *[passage(7, 2)] * 20, *(passage(n, 3) for n in range(20))]) + "\n "


@pytest.fixture
def splitter() -> CacheAlignedTextSplitter:
    return CacheAlignedTextSplitter.from_huggingface_tokenizer(
        byte_level(), add_start_index=True, auto_register=False, **SIZES
    )


def test_chunks_join_to_the_text(splitter: CacheAlignedTextSplitter) -> None:
    chunks = splitter.split_text(TEXT)
    assert len(chunks) > 10
    assert "".join(chunks) == TEXT
    assert chunks == ChunkSplitter.from_tokenizer(byte_level(), **SIZES).split(TEXT)


def test_start_indexes_are_exact_where_text_repeats(splitter: CacheAlignedTextSplitter) -> None:
    chunks = splitter.create_documents([TEXT])
    position = 0
    for chunk in chunks:
        assert chunk.metadata["start_index"] == position
        position += len(chunk.page_content)
    assert position == len(TEXT)


def test_documents_keep_their_metadata_apart(splitter: CacheAlignedTextSplitter) -> None:
    metadata: dict[str, Any] = {"source": "a", "tags": ["x"]}
    chunks = splitter.split_documents([Document(TEXT, metadata=metadata), Document("b", metadata={"source": "b"})])
    chunks[0].metadata["tags"].append("y")
    assert metadata == {"source": "a", "tags": ["x"]}
    assert chunks[1].metadata["tags"] == ["x"]
    assert (chunks[-1].page_content, chunks[-1].metadata) == ("b", {"source": "b", "start_index": 0})


def test_without_the_option_there_is_no_start_index() -> None:
    splitter = CacheAlignedTextSplitter.from_huggingface_tokenizer(byte_level(), auto_register=False)
    assert splitter.create_documents(["a", " \n", ""]) == [Document("a")]


def agreement() -> str:
    """Two articles with two clauses each, every one longer than a chunk."""
    lines = ["# SUPPLY AGREEMENT"]
    for article, title in ((1, "FEES"), (2, "NOTICES")):
        lines.append(f"ARTICLE {article}\n{title}")
        lines += [f"{article}.{n} Clause {n}. {passage(10 * article + n, 8)}" for n in (1, 2)]
    return "\n\n".join(lines)


def test_chunks_name_the_headings_they_stand_under_beside_their_text(splitter: CacheAlignedTextSplitter) -> None:
    text = agreement()
    chunks = splitter.create_documents([text])
    assert "".join(chunk.page_content for chunk in chunks) == text
    breadcrumbs = [chunk.metadata["breadcrumb"] for chunk in chunks]
    assert breadcrumbs[0] == "SUPPLY AGREEMENT"
    assert breadcrumbs[-1] == "SUPPLY AGREEMENT > ARTICLE 2 NOTICES > 2.2 Clause 2"
    assert sorted(breadcrumbs) == breadcrumbs
    assert all("> " not in chunk.page_content for chunk in chunks)


def test_another_title_of_a_section_changes_only_the_metadata_of_later_chunks(
    splitter: CacheAlignedTextSplitter,
) -> None:
    before, after = (splitter.create_documents([text]) for text in (agreement(), agreement().replace("FEES", "RENT")))
    assert before[0] != after[0]
    clause = [index for index, chunk in enumerate(before) if "> 1.2" in chunk.metadata["breadcrumb"]]
    assert clause
    for index in clause:
        assert after[index].page_content == before[index].page_content
        assert "ARTICLE 1 RENT" in after[index].metadata["breadcrumb"]


def test_the_key_of_the_headings_can_be_named_and_left_out() -> None:
    def metadata(key: str | None, own: dict[str, Any]) -> dict[str, Any]:
        splitter = CacheAlignedTextSplitter.from_huggingface_tokenizer(
            byte_level(), auto_register=False, breadcrumb_key=key, **SIZES
        )
        return splitter.create_documents([agreement()], [own])[0].metadata

    assert metadata("section", {}) == {"section": "SUPPLY AGREEMENT"}
    assert metadata(None, {}) == {}
    assert metadata("breadcrumb", {"breadcrumb": "home"}) == {"breadcrumb": "home"}
    with pytest.raises(ValueError, match="breadcrumb_key=''"):
        metadata("", {})


@pytest.mark.parametrize(
    ("preset", "headings"),
    [
        ("contract", "SUPPLY AGREEMENT > ARTICLE 2 NOTICES > 2.2 Clause 2"),
        ("markdown", "SUPPLY AGREEMENT"),
        ("plain", None),
    ],
)
def test_a_preset_says_which_headings_are_known(preset: str, headings: str | None) -> None:
    splitter = CacheAlignedTextSplitter.from_huggingface_tokenizer(
        byte_level(), auto_register=False, preset=preset, **SIZES
    )
    assert splitter.split_text(agreement()) == ChunkSplitter.from_tokenizer(byte_level(), preset=preset, **SIZES).split(
        agreement()
    )
    breadcrumb = splitter.create_documents([agreement()])[-1].metadata.get("breadcrumb")
    assert breadcrumb == headings


def test_an_edit_leaves_distant_chunks_as_they_are(splitter: CacheAlignedTextSplitter) -> None:
    edited = TEXT.replace("  1. Term", "  1. Term and termination of the lease")
    before, after = splitter.split_text(TEXT), splitter.split_text(edited)
    assert before != after
    assert before[-5:] == after[-5:]


def test_the_tokenizer_of_a_model_is_found_by_its_name(model_folder: str, splitter: CacheAlignedTextSplitter) -> None:
    named = CacheAlignedTextSplitter.from_model(model_folder, auto_register=False, **SIZES)
    assert named.split_text(TEXT) == splitter.split_text(TEXT)


def test_chunks_are_registered_with_the_document_they_are_of(engine: CacheCraftEngine) -> None:
    splitter = CacheAlignedTextSplitter.from_huggingface_tokenizer(byte_level(), document_id_key="source", **SIZES)
    RETRIEVED.feed.subscribe(engine, "split")
    (first, *_) = splitter.split_documents([Document(TEXT, metadata={"source": "lease.pdf"})])
    assert engine.register([first.page_content], "split") == 0
    engine.warm([first.page_content], namespace="split")
    assert engine.invalidate(namespace="split", document_ids=["lease.pdf"]) == 1


def test_bad_arguments_are_refused_by_name(splitter: CacheAlignedTextSplitter) -> None:
    with pytest.raises(ValueError, match="max_tokens=10"):
        CacheAlignedTextSplitter.from_huggingface_tokenizer(byte_level(), max_tokens=10)
    with pytest.raises(ValueError, match="tokenizer="):
        CacheAlignedTextSplitter.from_huggingface_tokenizer("smollm2")
    with pytest.raises(ValueError, match="metadatas: 1 for 2 texts"):
        splitter.create_documents(["a", "b"], [{}])
