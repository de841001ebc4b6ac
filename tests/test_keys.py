"""Keys and fingerprints: the same everywhere, and different wherever the KV would be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cachecraft_rag.keys import (
    ChunkKey,
    KeyMaker,
    context_hash,
    digest,
    model_fingerprint,
    tensor_bytes,
    token_bytes,
    tokenizer_fingerprint,
)
from tests.tiny_models import make
from tests.tiny_tokenizers import byte_level, byte_level_with_bos, metaspace

REPOSITORY = Path(__file__).resolve().parent.parent
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "sliding_window": None,
}
IN_A_NEW_PROCESS = """
import torch
from cachecraft_rag.keys import KeyMaker, context_hash, model_fingerprint, tokenizer_fingerprint
from tests.tiny_tokenizers import byte_level
config = {"b": 1, "a": {"theta": 1e4, "kind": "default"}}
model = model_fingerprint(config, [("w", torch.arange(6.0)), ("v", torch.ones(2, dtype=torch.bfloat16))], "lora")
print(KeyMaker(model, tokenizer_fingerprint(byte_level()), "tenant").key([5, 6, 7], context_hash([1, 2])))
"""


def weights() -> dict[str, torch.Tensor]:
    return {"embed": torch.arange(12.0).reshape(4, 3), "norm": torch.ones(3), "inv_freq": torch.tensor([1.0, 0.1])}


def fingerprint(
    config: dict[str, Any] | None = None, changed: dict[str, torch.Tensor] | None = None, adapters: str = ""
) -> str:
    return model_fingerprint(config or CONFIG, {**weights(), **(changed or {})}.items(), adapters)


def keys(model: str = "m", tokenizer: str = "t", namespace: str = "n") -> KeyMaker:
    return KeyMaker(model, tokenizer, namespace)


def test_every_process_makes_the_same_keys() -> None:
    printed = {
        subprocess.run(
            [sys.executable, "-c", IN_A_NEW_PROCESS],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(REPOSITORY)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("0", "1", "4711")
    }
    assert len(printed) == 1
    assert len(printed.pop().strip()) == 65  # two digests and a dash


def test_a_digest_never_changes_between_releases() -> None:
    # Stored entries live longer than a release: a new digest needs a new FORMAT_VERSION.
    assert digest("chunk", b"\x01\x02") == "71f519887abccb7e79d6f4737299760c"


def test_parts_of_a_digest_keep_their_borders() -> None:
    assert digest("ab", "c") != digest("a", "bc")
    assert digest("ab") != digest("ab", "")
    assert digest("a", "b") != digest("b", "a")


def test_texts_and_their_bytes_have_one_digest() -> None:
    assert digest("é") == digest("é".encode())


def test_a_digest_is_32_hexadecimal_digits() -> None:
    assert len(digest()) == 32
    assert set(digest("x")) <= set("0123456789abcdef")


def test_a_lone_surrogate_has_a_digest() -> None:
    assert digest("\ud800") != digest("\udfff")


@given(st.lists(st.text(max_size=4), max_size=4), st.lists(st.text(max_size=4), max_size=4))
def test_different_parts_have_different_digests(left: list[str], right: list[str]) -> None:
    surrogates_kept = [part.encode("utf-8", "surrogatepass") for part in left]
    assert (digest(*left) == digest(*right)) == (left == right)
    assert digest(*left) == digest(*surrogates_kept)


def test_ids_are_hashed_alike_whatever_holds_them() -> None:
    ids = [1, 2, 70_000]
    assert token_bytes(ids) == token_bytes(tuple(ids)) == token_bytes(np.array(ids, dtype=np.int32))
    assert token_bytes(ids) == b"\x01\0\0\0\x02\0\0\0\x70\x11\x01\0"


def test_the_context_depends_on_every_id_and_its_place() -> None:
    contexts = {context_hash(ids) for ids in ((), (0,), (0, 0), (1, 2), (2, 1), (1, 2, 3), (258,))}
    assert len(contexts) == 7


def test_the_fingerprint_of_the_same_model_is_the_same() -> None:
    assert fingerprint() == fingerprint()
    assert fingerprint({**CONFIG, "_name_or_path": "here"}) == fingerprint({**CONFIG, "_name_or_path": "there"})


@pytest.mark.parametrize(
    "entry",
    [
        "_name_or_path",
        "architectures",
        "dtype",
        "torch_dtype",
        "transformers_version",
        "use_cache",
        "output_attentions",
        "eos_token_id",
    ],
)
def test_entries_that_change_no_activation_leave_the_fingerprint_alone(entry: str) -> None:
    assert fingerprint({**CONFIG, entry: "anything"}) == fingerprint()


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "qwen2"},
        {"num_hidden_layers": 2},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}},
        {"sliding_window": 4096},
        {"quantization_config": {"bits": 4}},
    ],
)
def test_entries_that_change_activations_change_the_fingerprint(change: dict[str, Any]) -> None:
    assert fingerprint({**CONFIG, **change}) != fingerprint()


def test_the_order_of_the_configuration_does_not_matter() -> None:
    assert fingerprint(dict(reversed(CONFIG.items()))) == fingerprint()


@pytest.mark.parametrize("name", ["embed", "norm", "inv_freq"])
def test_the_smallest_change_of_any_weight_changes_the_fingerprint(name: str) -> None:
    for index in range(weights()[name].numel()):
        changed = weights()[name].clone()
        element = changed.view(-1)[index]
        element.copy_(torch.nextafter(element, torch.tensor(torch.inf)))
        assert fingerprint(changed={name: changed}) != fingerprint()


def test_dtype_shape_and_name_of_a_weight_change_the_fingerprint() -> None:
    embed = weights()["embed"]
    assert fingerprint(changed={"embed": embed.view(torch.int32)}) != fingerprint()  # the same bytes
    assert fingerprint(changed={"embed": embed.reshape(3, 4)}) != fingerprint()
    assert fingerprint(changed={"embed": embed.to(torch.bfloat16)}) != fingerprint()
    renamed = [("embedding" if name == "embed" else name, tensor) for name, tensor in weights().items()]
    assert model_fingerprint(CONFIG, renamed, "") != fingerprint()


def test_swapped_and_missing_weights_change_the_fingerprint() -> None:
    w = weights()
    first, second = {"a": w["norm"], "b": 2 * w["norm"]}, {"a": 2 * w["norm"], "b": w["norm"]}
    assert model_fingerprint(CONFIG, first.items(), "") != model_fingerprint(CONFIG, second.items(), "")
    w.pop("norm")
    assert model_fingerprint(CONFIG, w.items(), "") != fingerprint()


def test_adapters_change_the_fingerprint() -> None:
    assert len({fingerprint(), fingerprint(adapters="legal"), fingerprint(adapters="medical")}) == 3


def test_a_real_model_has_one_fingerprint_for_the_same_weights() -> None:
    def of(model: Any) -> str:
        return model_fingerprint(model.config.to_dict(), [*model.named_parameters(), *model.named_buffers()], "")

    assert of(make("llama")) == of(make("llama"))
    others = (
        make("llama", dtype=torch.bfloat16),
        make("llama", num_hidden_layers=2),
        make("llama", rms_norm_eps=1e-3),
        make("mistral"),
        make("llama-linear"),
    )
    assert len({of(make("llama")), *map(of, others)}) == 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.int64, torch.bool])
def test_the_bytes_of_any_dtype_are_read(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[0, 1], [1, 0]]).to(dtype)
    assert len(tensor_bytes(tensor)) == tensor.nbytes
    assert tensor_bytes(tensor) != tensor_bytes(tensor.flip(0))


def test_the_bytes_of_a_transposed_tensor_are_those_of_its_elements_in_order() -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    assert bytes(tensor_bytes(tensor.t())) == bytes(tensor_bytes(tensor.t().contiguous()))


def test_empty_and_single_tensors_have_bytes() -> None:
    assert len(tensor_bytes(torch.empty(0, 3))) == 0
    assert len(tensor_bytes(torch.tensor(1.5))) == 4


def test_tokenizers_that_split_differently_have_different_fingerprints() -> None:
    assert tokenizer_fingerprint(byte_level()) == tokenizer_fingerprint(byte_level())
    prints = {tokenizer_fingerprint(tokenizer) for tokenizer in (byte_level(), byte_level_with_bos(), metaspace())}
    assert len(prints) == 3


def test_an_added_token_changes_the_fingerprint_of_a_tokenizer() -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens(["<cite>"])
    assert tokenizer_fingerprint(tokenizer) != tokenizer_fingerprint(byte_level())


def test_using_a_tokenizer_does_not_change_its_fingerprint() -> None:
    tokenizer = byte_level()
    before = tokenizer_fingerprint(tokenizer)
    tokenizer("some text", split_special_tokens=True)
    tokenizer(["some text", "more"], padding=True, truncation=True, max_length=2)
    assert tokenizer_fingerprint(tokenizer) == before


def test_a_slow_tokenizer_is_identified_by_its_vocabulary() -> None:
    class Slow:
        special_tokens_map = {"eos_token": "</s>"}  # noqa: RUF012 - as transformers' attribute of that name

        def __init__(self, vocabulary: dict[str, int]) -> None:
            self._vocabulary = vocabulary

        def get_vocab(self) -> dict[str, int]:
            return self._vocabulary

    assert tokenizer_fingerprint(Slow({"a": 0, "b": 1})) == tokenizer_fingerprint(Slow({"b": 1, "a": 0}))
    assert tokenizer_fingerprint(Slow({"a": 0, "b": 1})) != tokenizer_fingerprint(Slow({"a": 1, "b": 0}))


def test_a_key_is_a_short_text_without_the_namespace() -> None:
    key = keys(namespace="../../etc").key([1, 2], "c" * 32)
    assert str(key) == f"{key.chunk}-{'c' * 32}"
    assert len(str(key)) == 65
    assert key.namespace == "../../etc"


@pytest.mark.parametrize("change", [{"model": "x"}, {"tokenizer": "x"}, {"namespace": "x"}])
def test_model_tokenizer_and_namespace_are_part_of_a_key(change: dict[str, str]) -> None:
    assert keys(**change).chunk([1, 2, 3]) != keys().chunk([1, 2, 3])


def test_fields_of_a_key_do_not_run_into_each_other() -> None:
    assert keys(model="ab", tokenizer="c").chunk([1]) != keys(model="a", tokenizer="bc").chunk([1])


@pytest.mark.parametrize("other", [(), (1,), (1, 2), (1, 2, 4), (3, 2, 1), (1, 2, 3, 0)])
def test_other_tokens_have_another_key(other: tuple[int, ...]) -> None:
    assert keys().chunk(other) != keys().chunk((1, 2, 3))


def test_what_stands_before_a_chunk_changes_only_the_context_part() -> None:
    first, second = (keys().key([1, 2, 3], context_hash(before)) for before in ((), (9,)))
    assert first != second
    assert (first.chunk, first.namespace) == (second.chunk, second.namespace)
    assert first.context != second.context


def test_equal_keys_find_each_other_in_a_dictionary() -> None:
    assert {keys().key([1], "c"): "entry"}[ChunkKey("n", keys().chunk((1,)), "c")] == "entry"
