"""Linear layers on one row and on the row that is read: the same numbers, and nothing of the model left changed."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from cachecraft_rag import linear_rows
from cachecraft_rag.linear_rows import LinearRows
from cachecraft_rag.model_adapter import ModelAdapter
from tests.tiny_models import make

NUM_TOKENS = 40
IDS = torch.randint(3, 500, (NUM_TOKENS,), generator=torch.Generator().manual_seed(0))
HERE = torch.arange(NUM_TOKENS)


@pytest.fixture(autouse=True)
def _where_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_rows, "_pays", lambda num_rows: True)  # else a slow machine would test nothing


def layer_of(dtype: torch.dtype, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(96, 160, bias=bias, dtype=dtype).requires_grad_(False)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(96,), (1, 96), (1, 1, 96), (2, 96), (1, 7, 96), (5, 1, 96), (1, 48, 96)])
def test_few_rows_are_the_linear_layer_to_rounding(shape: tuple[int, ...], bias: bool) -> None:
    layer, rows = layer_of(torch.bfloat16, bias), torch.randn(shape, dtype=torch.bfloat16)
    exact = layer.to(torch.float64)(rows.double())
    found = linear_rows.row_product(layer.bfloat16(), rows)
    assert found.shape == (*shape[:-1], 160)
    assert found.dtype == torch.bfloat16
    assert found.is_contiguous()
    assert torch.allclose(found.double(), exact, rtol=2**-8, atol=2**-9)


def test_rows_that_are_not_contiguous_are_taken_as_they_are() -> None:
    layer, rows = layer_of(torch.bfloat16), torch.randn(96, 6, dtype=torch.bfloat16).t()
    exact = layer.to(torch.float64)(rows.double())
    assert torch.allclose(linear_rows.row_product(layer.bfloat16(), rows).double(), exact, rtol=2**-8, atol=2**-8)


@pytest.mark.parametrize(
    ("dtype", "num_rows"), [(torch.bfloat16, 49), (torch.bfloat16, 0), (torch.float32, 1), (torch.float16, 3)]
)
def test_more_rows_and_other_dtypes_are_left_to_the_layer_bit_by_bit(dtype: torch.dtype, num_rows: int) -> None:
    layer, rows = layer_of(dtype), torch.randn(1, num_rows, 96, dtype=dtype)
    assert torch.equal(linear_rows.row_product(layer, rows), layer(rows))


def test_where_it_does_not_pay_the_layer_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_rows, "_pays", lambda num_rows: num_rows == 1)
    layer, rows = layer_of(torch.bfloat16), torch.randn(1, 3, 96, dtype=torch.bfloat16)
    assert torch.equal(linear_rows.row_product(layer, rows), layer(rows))


def test_a_row_in_another_dtype_fails_as_the_layer_does() -> None:
    with pytest.raises(RuntimeError, match="dtype"):
        linear_rows.row_product(layer_of(torch.bfloat16), torch.randn(1, 96))


def test_layers_are_as_they_were_afterwards_also_behind_an_error() -> None:
    model = nn.Sequential(layer_of(torch.bfloat16), nn.ReLU())
    before = dict(model[0].__dict__)
    with LinearRows(model).active():
        assert isinstance(model[0].forward, partial)
    assert model[0].__dict__ == before
    with pytest.raises(RuntimeError, match="shape"), LinearRows(model).active():
        model(torch.randn(1, 95, dtype=torch.bfloat16))
    assert model[0].__dict__ == before


def test_layers_that_somebody_else_replaced_and_other_types_are_left_alone() -> None:
    class Doubled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2.0 * super().forward(input)

    wrapped = layer_of(torch.bfloat16)
    wrapped.forward = lambda input: input  # type: ignore[method-assign]
    model = nn.ModuleList([wrapped, Doubled(96, 4, dtype=torch.bfloat16)])
    row = torch.randn(1, 96, dtype=torch.bfloat16)
    before = [module(row) for module in model]
    with LinearRows(model).active():
        assert all(torch.equal(module(row), expected) for module, expected in zip(model, before, strict=True))
    assert wrapped(row) is row


@pytest.mark.parametrize("in_place", [True, False])
def test_a_model_with_a_compiled_part_is_left_alone(in_place: bool) -> None:
    compiled = nn.Sequential(layer_of(torch.bfloat16))
    if in_place:
        compiled.compile(backend="eager")
    else:
        compiled = torch.compile(compiled, backend="eager")
    model = nn.Sequential(compiled, layer_of(torch.bfloat16))
    with LinearRows(model).active(5, lambda: True):
        assert not any("forward" in module.__dict__ for module in model.modules() if type(module) is nn.Linear)


def test_a_model_in_another_dtype_is_not_touched_where_every_row_is_read() -> None:
    model = make("llama", torch.float32)
    for num_rows, reads_last in ((1, None), (7, None), (1, lambda: True)):
        with LinearRows(model).active(num_rows, reads_last):
            assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_where_only_the_last_row_is_read_no_other_is_computed(dtype: torch.dtype) -> None:
    model, rows = nn.Sequential(layer_of(dtype)), torch.randn(1, 5, 96, dtype=dtype)
    expected, reads_last = model(rows), False
    with LinearRows(model).active(5, lambda: reads_last):
        assert torch.equal(model(rows), expected)
        reads_last = True
        found = model(rows)
        found += 0.0  # models may write into what a layer gives them
        assert torch.allclose(found[:, -1], expected[:, -1], rtol=2**-7, atol=2**-8)
        assert not found[:, :-1].any()


@pytest.mark.parametrize("shape", [(5, 96), (2, 5, 96), (1, 4, 96)])
def test_what_is_no_list_of_all_rows_is_computed_whole(shape: tuple[int, ...]) -> None:
    model, rows = nn.Sequential(layer_of(torch.float32)), torch.randn(shape)
    expected = model(rows)
    with LinearRows(model).active(5, lambda: True):
        assert torch.equal(model(rows), expected)


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2"])
def test_behind_the_last_attention_a_pass_computes_its_last_row_only(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, counts = make(name), []
    adapter = ModelAdapter(model)
    kv = adapter.new_kv(NUM_TOKENS)
    own = torch.nn.functional.linear

    def counting(rows: torch.Tensor, *weights: torch.Tensor | None) -> torch.Tensor:
        counts.append(rows.shape[1])
        return own(rows, *weights)

    monkeypatch.setattr(torch.nn.functional, "linear", counting)
    found = adapter.forward_rows(IDS, HERE, kv)
    num_layers = adapter.num_layers
    assert counts == [NUM_TOKENS] * (7 * num_layers - 4) + [1] * 5  # output projection, three of the MLP, logits
    monkeypatch.undo()
    with torch.inference_mode():
        assert torch.allclose(found, model(input_ids=IDS[None]).logits[0, -1], atol=1e-4)
    plain = adapter.new_kv(NUM_TOKENS)
    adapter.forward_plain(IDS, plain)
    assert torch.allclose(kv.keys, plain.keys, atol=1e-5)
    assert torch.allclose(kv.values, plain.values, atol=1e-5)


def test_a_pass_whose_rows_are_all_scored_computes_them_all() -> None:
    model = make("llama")
    adapter = ModelAdapter(model)
    found = adapter.forward_rows_scoring(IDS, HERE, adapter.new_kv(NUM_TOKENS))
    with torch.inference_mode():
        assert torch.allclose(found, model(input_ids=IDS[None]).logits[0], atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2"])
def test_decoding_goes_through_it_and_gives_the_models_logits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(name, torch.bfloat16)
    adapter = ModelAdapter(model)
    kv, calls = adapter.new_kv(NUM_TOKENS), []
    adapter.forward_rows(IDS[:-1], HERE[:-1], kv)
    own = torch.mv, torch.addmv
    monkeypatch.setattr(torch, "mv", lambda *given: calls.append(1) or own[0](*given))
    monkeypatch.setattr(torch, "addmv", lambda *given: calls.append(1) or own[1](*given))
    found = adapter.forward_rows(IDS[-1:], HERE[-1:], kv)
    assert len(calls) == sum(type(module) is nn.Linear for module in model.modules())
    with torch.inference_mode():
        expected = model(input_ids=IDS[None]).logits[0, -1].float()
    assert torch.allclose(found, expected, atol=0.02 * float(expected.abs().max()))
