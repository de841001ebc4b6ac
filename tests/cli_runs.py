"""Runs the command as a user does."""

from __future__ import annotations

from typer.testing import CliRunner

from cachecraft_rag.cli import app


def run(*arguments: object, answer: str | None = None, code: int = 0) -> str:
    """What a command writes; it must end with this exit code.

    Args:
        arguments: The command, its arguments and options.
        answer: What is typed when it asks.
        code: The exit code.
    """
    result = CliRunner().invoke(app, [*map(str, arguments)], input=answer)
    assert result.exit_code == code, (result.output, result.exception)
    return result.output
