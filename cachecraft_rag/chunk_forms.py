"""How a chunk's text may stand in a prompt: as it is, or as Python and JSON print it."""

from __future__ import annotations

import json

#: Most forms that a text has.
MAX_FORMS = 4


def forms_of(text: str) -> list[str]:
    """The forms of a text, each once: the text itself, its ``repr`` and its JSON strings, without their quotes.

    Some pipelines print the chunks inside a list or a tool's result. JSON comes in two kinds: with other characters
    than ASCII as they are, and escaped, which is what ``json.dumps`` does unless it is told otherwise.
    """
    forms = [text, repr(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1]]
    if not text.isascii():
        forms.append(json.dumps(text)[1:-1])
    return list(dict.fromkeys(forms))
