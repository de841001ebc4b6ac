"""A schema of answers, in two of the forms that LangChain takes."""

from __future__ import annotations

from pydantic import BaseModel
from typing_extensions import TypedDict


class Joke(BaseModel):
    """A joke."""

    setup: str
    punchline: str


class JokeDict(TypedDict):
    """A joke."""

    setup: str
    punchline: str
