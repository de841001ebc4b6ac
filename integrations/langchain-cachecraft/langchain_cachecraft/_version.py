"""The version of this distribution."""

from __future__ import annotations

from importlib.metadata import version

__version__ = version("langchain-cachecraft")
