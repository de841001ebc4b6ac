"""Headings are found at the start of lines, nest by their style, and name what stands under them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachecraft_rag.headings import CHARACTER, ITEM, SENTENCE, Headings, Outline, Preset

CONTRACT = """SUPPLY AGREEMENT

This Agreement is made between the parties.

PART A

ARTICLE 1
TERM

1.1 Start. It begins on the Effective Date.

(a) That date is set by the Buyer.

1.2 The term of this Agreement is five years from the date on which the first delivery was made to the Buyer.

1.2.1 It renews yearly.

ARTICLE 2 - FEES

as set out in
Section 1.2 and in
Article 1 above.

SCHEDULE 1

PRICES
"""


def outline(text: str, preset: Preset = "contract") -> Outline:
    return Outline([*Headings(preset).find(text)])


def path(text: str, words: str, preset: Preset = "contract") -> tuple[str, ...]:
    return outline(text, preset).path(text.index(words))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("SUPPLY", ("SUPPLY AGREEMENT",)),
        ("This Agreement is", ("SUPPLY AGREEMENT",)),
        ("It begins", ("PART A", "ARTICLE 1 TERM", "1.1 Start")),
        ("(a)", ("PART A", "ARTICLE 1 TERM", "1.1 Start")),
        ("five years", ("PART A", "ARTICLE 1 TERM", "1.2")),
        ("renews", ("PART A", "ARTICLE 1 TERM", "1.2", "1.2.1 It renews yearly")),
        ("as set out", ("PART A", "ARTICLE 2 FEES")),
        ("above.", ("PART A", "ARTICLE 2 FEES")),
        ("PRICES", ("SCHEDULE 1 PRICES",)),
    ],
)
def test_a_place_in_a_contract_stands_under_its_sections(words: str, expected: tuple[str, ...]) -> None:
    assert path(CONTRACT, words) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# Lease\n\n## Rent ##\n\n### Due dates\n\nhere", ("Lease", "Rent", "Due dates")),
        ("# Lease\n\n### Deep\n\n## Rent\n\nhere", ("Lease", "Rent")),
        ("Lease\n=====\n\nRent\n----\n\nhere", ("Lease", "Rent")),
        ("# Lease\n\n```\n# a comment\n```\n\nhere", ("Lease",)),
        ("# Lease\n\n- an item\n\n1. another\n\nhere", ("Lease",)),
        ("ARTICLE 1\n\nhere", ()),
    ],
)
def test_a_place_in_markdown_stands_under_its_headings(text: str, expected: tuple[str, ...]) -> None:
    assert path(text, "here", "markdown") == expected


def test_a_contract_may_be_written_in_markdown() -> None:
    text = "# LEASE\n\n## Part B: Money\n\n### Rent\n\n2.1 Amount. It is due.\n\n## Part C: Use\n\nhere"
    assert path(text, "It is due") == ("LEASE", "Part B Money", "Rent", "2.1 Amount")
    assert path(text, "here") == ("LEASE", "Part C Use")


def test_a_number_alone_takes_the_next_line_only_if_that_is_a_title() -> None:
    assert path("ARTICLE 1\n\nARTICLE 2\n\nhere we are.", "here") == ("ARTICLE 2",)
    assert path("ARTICLE 1\n\n(a) here", "here") == ("ARTICLE 1",)
    assert path("ARTICLE 1\n\n" + "word " * 30 + "\n\nhere", "here") == ("ARTICLE 1",)
    assert path("ARTICLE 1", "ART") == ("ARTICLE 1",)


def test_a_long_heading_is_shortened() -> None:
    (title,) = path(f"# {'long ' * 60}\n\nhere", "here")
    assert len(title) <= 80


def test_plain_text_has_no_headings() -> None:
    assert path(CONTRACT, "PRICES", "plain") == ()
    assert Headings("plain").kind("# Lease", 0) == CHARACTER


def test_items_are_places_to_cut_but_no_headings() -> None:
    assert Headings("contract").kind("(a) The fee", 0) == ITEM
    assert Headings("markdown").kind("- The fee", 0) == SENTENCE
    assert path("(a) The fee", "fee") == path("- The fee", "fee", "markdown") == ()


@given(st.text(alphabet="#=-. \n1AaT(`~", max_size=80), st.sampled_from(["contract", "markdown", "plain"]))
def test_any_text_has_an_outline(text: str, preset: Preset) -> None:
    headings = [*Headings(preset).find(text)]
    assert all(text[one.start].strip() for one in headings)
    assert [one.start for one in headings] == sorted({one.start for one in headings})
    paths = [Outline(headings).path(at) for at in range(len(text))]
    assert all(paths[one.start][-1] == one.title for one in headings)


def test_an_unknown_preset_is_refused() -> None:
    with pytest.raises(ValueError, match="preset='html': must be one of 'contract', 'markdown', 'plain'"):
        Headings("html")  # type: ignore[arg-type]
