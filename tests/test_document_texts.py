"""Texts of documents that are not linked yet."""

from __future__ import annotations

from cachecraft_rag.document_texts import RELINK_S, DocumentTexts
from cachecraft_rag.store.documents import LINK_LIFE_S
from tests.store_entries import FakeClock


def test_a_text_is_to_be_linked_once_with_each_of_its_documents() -> None:
    texts = DocumentTexts(10)
    texts.add([" clause one "], "us", "lease.pdf")
    texts.add(["clause one"], "us", "letter.pdf")
    assert texts.to_link("clause one", "us", "1") == ["lease.pdf", "letter.pdf"]
    assert texts.to_link("clause one", "us", "1") == []
    texts.add(["clause one"], "us", "lease.pdf")
    assert texts.to_link("clause one", "us", "1") == []
    assert texts.to_link("clause one", "them", "1") == []


def test_every_form_of_a_text_is_linked() -> None:
    texts = DocumentTexts(10)
    texts.add(["clause one"], "us", "lease.pdf")
    assert [texts.to_link("clause one", "us", chunk) for chunk in ("1", "2", "1")] == [["lease.pdf"], ["lease.pdf"], []]


def test_taking_a_document_gives_its_texts_and_forgets_them() -> None:
    texts = DocumentTexts(10)
    texts.add(["a", "b"], "us", "lease.pdf")
    texts.add(["c"], "us", "letter.pdf")
    texts.add(["a"], "them", "lease.pdf")
    assert sorted(texts.take("us", "lease.pdf")) == ["a", "b"]
    assert texts.take("us", "lease.pdf") == []
    assert texts.to_link("c", "us", "3") == ["letter.pdf"]
    assert texts.to_link("a", "them", "1") == ["lease.pdf"]


def test_the_longest_registered_text_goes_first_when_there_are_too_many() -> None:
    texts = DocumentTexts(2)
    texts.add(["a", "b"], "us", "lease.pdf")
    texts.add(["a", "c"], "us", "lease.pdf")
    assert sorted(texts.take("us", "lease.pdf")) == ["a", "c"]


def test_clearing_a_namespace_leaves_others() -> None:
    texts = DocumentTexts(10)
    for namespace in ("us", "them"):
        texts.add(["a"], namespace, "lease.pdf")
    texts.clear("us")
    assert texts.to_link("a", "us", "1") == []
    assert texts.to_link("a", "them", "1") == ["lease.pdf"]


def test_a_text_of_two_documents_stays_with_the_one_that_is_not_taken() -> None:
    texts = DocumentTexts(10)
    for document in ("lease.pdf", "letter.pdf"):
        texts.add(["a"], "us", document)
    assert texts.take("us", "lease.pdf") == ["a"]
    assert texts.to_link("a", "us", "1") == ["letter.pdf"]
    assert texts.take("us", "letter.pdf") == ["a"]
    assert not texts._documents


def test_a_text_that_is_still_used_is_linked_again_now_and_then() -> None:
    clock = FakeClock()
    texts = DocumentTexts(10, clock)
    texts.add(["a"], "us", "lease.pdf")
    assert texts.to_link("a", "us", "1") == ["lease.pdf"]
    clock.now += RELINK_S - 1
    assert texts.to_link("a", "us", "1") == []
    clock.now += 2
    assert texts.to_link("a", "us", "1") == ["lease.pdf"]
    assert texts.to_link("a", "us", "1") == []
    assert RELINK_S < LINK_LIFE_S / 2
