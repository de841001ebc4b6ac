"""Chunks join to the text, keep within their limits, and stay the same where the text does."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from cachecraft_rag.headings import Preset
from cachecraft_rag.splitting import ChunkSplitter

CONTRACTS = Path(__file__).resolve().parents[2] / "shared" / "data" / "cuad_docs.jsonl"


def count_words(text: str) -> int:
    return len(re.findall(r"\w+|[^\w\s]|\s\s+", text))


@cache
def sentences() -> list[str]:
    rng = random.Random(1)
    nouns = ["Supplier", "Buyer", "Agreement", "Products", "notice", "liability", "Territory", "Fee", "audit", "term"]
    verbs = ["shall deliver", "may terminate", "agrees to indemnify", "warrants", "shall not assign", "accepts"]
    tails = ["within thirty days", "at its own expense", "in writing", "as set out above", "without undue delay"]
    made = []
    for _ in range(4000):
        parts = [f"the {rng.choice(nouns)} {rng.choice(verbs)} the {rng.choice(nouns)} {rng.choice(tails)}"]
        parts += [f"{rng.choice(nouns)} {rng.randint(1, 999)} {rng.choice(tails)}" for _ in range(rng.randint(0, 3))]
        made.append(", ".join(parts).capitalize() + ".")
    return made


def contract(num_articles: int = 12, seed: int = 2) -> str:
    """A contract of about 5,000 characters per article."""
    rng = random.Random(seed)
    lines = ["SUPPLY AGREEMENT", f"This Agreement is made on {rng.randint(1, 28)} March 2021."]
    for article in range(1, num_articles + 1):
        lines.append(f"ARTICLE {article}\n\n{' '.join(rng.sample(['TERM', 'FEES', 'NOTICES', 'AUDIT'], 2))}")
        for clause in range(1, rng.randint(6, 12)):
            lines.append(f"{article}.{clause} " + " ".join(rng.choices(sentences(), k=rng.randint(2, 6))))
            lines += [f"({letter}) {rng.choice(sentences())}" for letter in "abcde"[: rng.randint(0, 5)]]
    return "\n\n".join(lines)


@cache
def tokenizer() -> Any:
    """A byte-level BPE tokenizer as Hugging Face has them, with a special token."""
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1500, special_tokens=["<|end|>"], initial_alphabet=alphabet)
    model.train_from_iterator(sentences(), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<|end|>")


def true_counts(texts: list[str]) -> list[int]:
    return [len(tokens) for tokens in tokenizer().backend_tokenizer.encode_batch(texts, add_special_tokens=False)]


def quick_splitter(preset: Preset = "contract") -> ChunkSplitter:
    """As `from_tokenizer` makes it, but remembers counts: most units of an edited text are those of the original."""
    known: dict[str, int] = {}

    def count_many(texts: list[str]) -> list[int]:
        new = [text for text in dict.fromkeys(texts) if text not in known]
        known.update(zip(new, true_counts(new), strict=True))
        return [known[text] for text in texts]

    return ChunkSplitter(count_words, count_many=count_many, preset=preset)


def edits(texts: list[str], count: int, seed: int) -> Iterator[tuple[str, str]]:
    """Texts with and without the insertion, the deletion or a change of one paragraph."""
    rng = random.Random(seed)
    for number in range(count):
        text = rng.choice(texts)
        paragraphs = re.split(r"(?<=\n\n)", text)
        at = rng.choice([index for index, part in enumerate(paragraphs) if 40 < len(part) < 3000])
        new = " ".join(rng.choices(sentences(), k=rng.randint(1, 6)))
        edited = {
            0: [*paragraphs[:at], new + "\n\n", *paragraphs[at:]],
            1: paragraphs[:at] + paragraphs[at + 1 :],
            2: [*paragraphs[:at], paragraphs[at].replace(" ", f" {new[:80]} ", 1), *paragraphs[at + 1 :]],
        }
        yield text, "".join(edited[number % 3])


def changes(split: Callable[[str], list[str]], texts: list[str], count: int, seed: int) -> list[int]:
    """For each of some edits, how many chunks of the edited text are new."""
    known = {text: set(split(text)) for text in texts}
    return [sum(chunk not in known[text] for chunk in split(edited)) for text, edited in edits(texts, count, seed)]


PIECES = st.one_of(
    st.text(max_size=30),
    st.text(alphabet=" \n\r\t.a", max_size=40),
    st.sampled_from(["x" * 300, " " * 90, "\n" * 50, "\ud800", "\U0001f44d\U0001f3fd" * 20, "\u5951\u7d04\u3002" * 30]),
    st.sampled_from(["\n\nARTICLE IV\n\n", "\n1.2 ", " (a) ", ". ", "; ", "\r\n\r\n"]),
    st.sampled_from(["\n## Fees\n", "Fees\n====\n", "# A\n```\n# b\n```\n", "\n~~~\n"]),
    st.sampled_from(sentences()[:50]),
)
TEXTS = st.lists(PIECES, max_size=40).map("".join)


@settings(max_examples=150, deadline=None)
@given(TEXTS, st.integers(1, 40), st.integers(1, 60), st.sampled_from(["contract", "markdown", "plain"]))
def test_any_text_splits_without_loss_and_within_the_limit(text: str, low: int, extra: int, preset: Any) -> None:
    splitter = ChunkSplitter.from_tokenizer(tokenizer(), min_tokens=low, max_tokens=low + extra, preset=preset)
    spans = splitter.split_spans(text)
    chunks = splitter.split(text)
    assert "".join(chunks) == text
    assert chunks == [text[start:end] for start, end in spans] == splitter.split(text)
    assert all(chunks)
    encodable = [chunk.encode("utf-8", "replace").decode() for chunk in chunks]
    limits = [low + extra if len(chunk) > 1 else 4 + low + extra for chunk in chunks]
    assert all(count <= limit for count, limit in zip(true_counts(encodable), limits, strict=True))


@settings(max_examples=50, deadline=None)
@given(TEXTS, st.sampled_from([len, lambda text: len(text) ** 2 // 40, lambda text: len(text.split()) * 3]))
def test_the_limit_holds_however_tokens_are_counted(text: str, count_tokens: Callable[[str], int]) -> None:
    chunks = ChunkSplitter(count_tokens, min_tokens=20, max_tokens=30).split(text)
    assert "".join(chunks) == text
    assert all(count_tokens(chunk) <= 30 for chunk in chunks)


def test_an_empty_text_has_no_chunks() -> None:
    assert ChunkSplitter(count_words).split("") == []
    assert ChunkSplitter(count_words).split_spans("") == []


def test_a_short_text_is_one_chunk() -> None:
    assert ChunkSplitter(count_words).split("Just this.\n") == ["Just this.\n"]


@pytest.mark.parametrize("preset", ["contract", "markdown", "plain"])
def test_chunks_of_contracts_keep_within_the_limits(preset: Preset) -> None:
    splitter = ChunkSplitter.from_tokenizer(tokenizer(), preset=preset)
    counts = [count for seed in range(2, 6) for count in true_counts(splitter.split(contract(seed=seed)))]
    assert len(counts) > 60
    assert max(counts) <= 768
    assert sum(count >= 512 for count in counts) >= 0.9 * len(counts)


def test_chunks_start_where_clauses_start() -> None:
    chunks = ChunkSplitter.from_tokenizer(tokenizer()).split(contract())
    starts = [bool(re.match(r"ARTICLE \d|\d+\.\d+ |\([a-e]\) ", chunk)) for chunk in chunks[1:]]
    assert sum(starts) >= 0.9 * len(starts)


@pytest.mark.parametrize(("first", "second"), [("PART {n}", "ARTICLE {n}"), ("General", "Terms")])
def test_a_title_stays_with_what_follows_it(first: str, second: str) -> None:
    body = " ".join(["Word"] * 40) + "."
    text = "\n\n".join(f"{first}\n\n{second}\n\n{{n}} {body}".format(n=n) for n in range(30))
    chunks = ChunkSplitter(count_words, min_tokens=40, max_tokens=100).split(text)
    assert len(chunks) > 10
    assert all(chunk.startswith(first[:4]) for chunk in chunks)


def test_numbers_and_abbreviations_end_no_sentence() -> None:
    text = "This is the text of it. 3. Acme Inc. The price is due. No. 4 applies. " * 40
    chunks = ChunkSplitter(count_words, min_tokens=10, max_tokens=40, preset="plain").split(text)
    assert {chunk.split()[0] for chunk in chunks} <= {"This", "3.", "No."}


def test_a_hash_in_fenced_code_is_no_heading_of_markdown() -> None:
    code = "```python\n" + "# comment\nvalue = 1\n\n" * 4 + "```\n\n"
    text = "".join(f"## Part {n}\n\n{'Some words here. ' * 6}\n\n{code}" for n in range(20))
    chunks = ChunkSplitter(count_words, min_tokens=60, max_tokens=130, preset="markdown").split(text)
    assert len(chunks) > 5
    assert all(chunk.startswith("## Part") for chunk in chunks)


def test_a_text_without_spaces_is_cut_where_its_characters_say() -> None:
    word = "".join(random.Random(3).choices("abcdefghijklmnop", k=20_000))
    splitter = ChunkSplitter.from_tokenizer(tokenizer())
    chunks, edited = splitter.split(word), splitter.split(word[:9000] + "xyz" + word[9000:])
    assert max(true_counts(chunks)) <= 768
    assert len(set(edited) - set(chunks)) <= 4


def test_an_edit_changes_the_chunks_around_it_and_no_others() -> None:
    splitter = quick_splitter()
    changed = changes(splitter.split, [contract(seed=seed) for seed in range(3)], count=60, seed=5)
    assert sum(changed) / len(changed) <= 2.0
    assert max(changed) <= 8


def test_an_edit_is_as_local_where_no_heading_is_known() -> None:
    splitter = quick_splitter("plain")
    changed = changes(splitter.split, [contract(seed=seed) for seed in range(3)], count=60, seed=5)
    assert sum(changed) / len(changed) <= 2.0
    assert max(changed) <= 8


def test_a_chunk_has_the_headings_that_it_starts_under() -> None:
    text = contract(3)
    splitter = ChunkSplitter.from_tokenizer(tokenizer(), min_tokens=100, max_tokens=200)
    spans = splitter.split_spans(text)
    breadcrumbs = splitter.breadcrumbs(text, spans)
    assert len(breadcrumbs) == len(spans) > 10
    assert breadcrumbs[0] == ("SUPPLY AGREEMENT",)
    for (start, _), breadcrumb in zip(spans[1:], breadcrumbs[1:], strict=True):
        article = re.findall(r"^ARTICLE \d+$", text[: start + len("ARTICLE 1")], re.MULTILINE)[-1]
        assert breadcrumb[0].startswith(article + " ")


def test_breadcrumbs_follow_any_spans_of_the_text() -> None:
    text = "# Lease\n\n## Rent\n\nIt is due monthly.\n\n \n## Term\n\nIt ends."
    splitter = ChunkSplitter(count_words, preset="markdown")
    spans = [(0, 5), (text.index("It is"), text.index(" \n##")), (text.index(" \n##"), len(text))]
    assert splitter.breadcrumbs(text, spans) == [("Lease",), ("Lease", "Rent"), ("Lease", "Term")]
    assert splitter.breadcrumbs(text, []) == []
    assert ChunkSplitter(count_words, preset="plain").breadcrumbs(text, spans) == [(), (), ()]


def test_text_put_before_a_document_leaves_its_later_chunks_alone() -> None:
    splitter = ChunkSplitter.from_tokenizer(tokenizer())
    text = contract()
    shifted = splitter.split(" ".join(sentences()[:20]) + "\n\n" + text)
    assert len(set(splitter.split(text)) - set(shifted)) <= 4


def test_every_unit_is_counted_once() -> None:
    batches: list[list[str]] = []

    def count_many(texts: list[str]) -> list[int]:
        batches.append(texts)
        return [count_words(text) for text in texts]

    text = " ".join(f"word{number}" for number in range(2000)) + ".\n\n"
    text += "\n\n".join(f"{number}. {sentence}" for number, sentence in enumerate(sentences()[:500]))
    chunks = ChunkSplitter(count_words, count_many=count_many).split(text)
    *unit_batches, chunk_batch = batches
    assert chunk_batch == chunks
    units = [unit for batch in unit_batches for unit in batch]
    assert len(units) == len(set(units))
    # The sentence of 2,000 words is so long that it is counted in pieces only.
    assert "".join(units) == text


def test_repeated_text_is_cut_within_the_limits() -> None:
    text = "The same line again and again.\n\n" * 5000
    chunks = ChunkSplitter(count_words).split(text)
    assert "".join(chunks) == text
    assert all(512 <= count_words(chunk) <= 768 for chunk in chunks)


def test_special_tokens_in_a_document_are_counted_as_text() -> None:
    text = "Stop <|end|> here. " * 100
    chunks = ChunkSplitter.from_tokenizer(tokenizer(), min_tokens=20, max_tokens=30).split(text)
    assert "".join(chunks) == text
    ids = copy.deepcopy(tokenizer())(chunks, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert max(map(len, ids)) <= 30


def test_the_given_tokenizer_stays_as_it_is() -> None:
    before = tokenizer().backend_tokenizer.to_str()
    ChunkSplitter.from_tokenizer(tokenizer()).split(contract(2))
    assert tokenizer().backend_tokenizer.to_str() == before
    assert not tokenizer().backend_tokenizer.encode_special_tokens


def test_a_tokenizer_without_a_fast_backend_will_do() -> None:
    text = " ".join(sentences()[:100])
    chunks = ChunkSplitter.from_tokenizer(ByT5Tokenizer(), min_tokens=400, max_tokens=600).split(text)
    assert chunks == ChunkSplitter(len, min_tokens=400, max_tokens=600).split(text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_tokens": 0}, "min_tokens=0: must be at least 1"),
        ({"min_tokens": -3}, "min_tokens=-3: must be at least 1"),
        ({"max_tokens": 512}, "max_tokens=512: must be above min_tokens=512"),
        ({"min_tokens": 800}, "max_tokens=768: must be above min_tokens=800"),
        ({"region_tokens": 1000}, r"region_tokens=1000: must be at least 2 \* min_tokens=1024"),
        ({"preset": "html"}, "preset='html': must be one of 'contract', 'markdown', 'plain'"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChunkSplitter(count_words, **options)


def test_what_is_no_tokenizer_is_refused() -> None:
    with pytest.raises(ValueError, match="tokenizer='gpt2': must be a Hugging Face tokenizer"):
        ChunkSplitter.from_tokenizer("gpt2")


@pytest.fixture(scope="module")
def real_contracts() -> list[str]:
    if not CONTRACTS.exists():
        pytest.skip("the evaluation data is not here")
    with CONTRACTS.open(encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line in lines][:15]


def test_chunks_of_real_contracts_keep_within_the_limits(real_contracts: list[str]) -> None:
    splitter = ChunkSplitter.from_tokenizer(tokenizer())
    chunks = [chunk for text in real_contracts for chunk in splitter.split(text)]
    assert "".join(chunks) == "".join(real_contracts)
    counts = true_counts(chunks)
    assert max(counts) <= 768
    assert sum(count >= 512 for count in counts) >= 0.9 * len(counts)


def test_an_edit_of_a_real_contract_changes_few_chunks(real_contracts: list[str]) -> None:
    splitter = quick_splitter()
    changed = changes(splitter.split, real_contracts, count=80, seed=6)
    assert sum(changed) / len(changed) <= 2.0
    assert max(changed) <= 8
