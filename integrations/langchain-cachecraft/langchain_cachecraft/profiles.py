"""What a model can do, as far as it is known without loading it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from langchain_core.language_models import ModelProfile

from cachecraft_rag import CacheCraftEngine
from cachecraft_rag.model_loader import context_window, local_folder


def model_profile(model: str, engine: CacheCraftEngine | None, window: int | None) -> ModelProfile:
    """The profile of a model: what it reads and writes, its context window, whether it can be told of tools.

    Window and tools are left out for a hub id, which would have to be asked for over the network, and for a packaged
    model before its first use.

    Args:
        model: Name of the model.
        engine: A ready engine.
        window: A context window that was set by hand.
    """
    profile = ModelProfile(
        text_inputs=True,
        text_outputs=True,
        image_inputs=False,
        audio_inputs=False,
        pdf_inputs=False,
        video_inputs=False,
        structured_output=False,  # its form is asked for, not enforced
    )
    template: object = None
    if engine is not None:
        window, template = engine.context_window, engine.tokenizer.chat_template or ""
    elif (folder := local_folder(model)) is not None:
        window = window or context_window(SimpleNamespace(**_read(folder / "config.json")), None)
        template = _template(folder)
    if window is not None:
        profile["max_input_tokens"] = window
    if template is not None:
        profile["tool_calling"] = "tools" in str(template)
    return profile


def _template(folder: Path) -> object:
    file = folder / "chat_template.jinja"
    return file.read_text() if file.is_file() else _read(folder / "tokenizer_config.json").get("chat_template", "")


def _read(file: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return values
