"""Tables of 8 bits: the codes of the formula, the error that the code allows, and the place of a `TokenEmbedding`."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from locant import InputEmbedding, RangeError, TokenEmbedding
from locant.embedding.quantised import QuantisedEmbedding
from tests.minilm import MINILM
from tests.refusal import refuses
from tests.tolerances import ONE_ROUNDING, assert_close

HALF_STEP = {"int8": 0.5 / 127, "fp8": 2.0**-4}
"""How far rounding to the nearest moves an entry, over the largest of its row: of E4M3, the largest entry's own."""


@pytest.mark.parametrize("code", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_rounded_to_the_nearest_code(code: str, dtype: torch.dtype) -> None:
    table = TokenEmbedding(41, 7, padding_idx=5).to(dtype)
    small = QuantisedEmbedding(table, code)  # type: ignore[arg-type]
    weight = table.weight.detach().double().numpy()
    most = np.abs(weight).max(1, keepdims=True)
    rows = small(torch.arange(41)).double().numpy()
    off = np.abs(rows - weight) / np.where(most == 0, 1, most)
    assert off.max() <= HALF_STEP[code] + 2 * ONE_ROUNDING[dtype]
    assert rows[5].tolist() == [0.0] * 7
    assert rows.dtype == np.float64
    if code == "int8":
        expected = np.round(weight[:5] / (most[:5] / 127))
        assert small.codes[:5].tolist() == expected.tolist()
    assert (small.codes.dtype, small.num_bytes) == (torch.int8, 41 * 7 + 41 * 4)


@pytest.mark.parametrize(("code", "relative"), [("int8", 0.01), ("fp8", 0.03)])
def test_the_error_of_real_weights_is_measured(code: str, relative: float) -> None:
    table = TokenEmbedding.from_pretrained(MINILM)
    small = QuantisedEmbedding(table, code)  # type: ignore[arg-type]
    off = (small(torch.arange(30_522)) - table.weight).detach().double()
    relative_here = off.norm() / table.weight.detach().double().norm()
    assert_close(torch.tensor(small.error.relative, dtype=torch.float64), relative_here)
    assert 0.001 < small.error.relative < relative
    assert small.num_bytes < table.weight.nbytes / 3.9
    near = small.logits(table.weight[2332:2333].detach())[0].topk(1).indices
    assert near.tolist() == (table.weight @ table.weight[2332]).topk(1).indices.tolist()


def test_it_takes_the_place_of_the_table_and_no_cast_touches_it() -> None:
    model = InputEmbedding(11, 6, scale="sqrt_d_model")
    ids = torch.randint(11, (2, 3))
    model.token = QuantisedEmbedding(model.token, "int8")  # type: ignore[assignment]
    rows = model(ids)
    assert_close(rows, model.token(ids))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.half()
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert torch.equal(model(ids), rows)


def test_logits_are_those_of_the_widened_rows() -> None:
    small = QuantisedEmbedding(TokenEmbedding(9_001, 4), "fp8")
    x = torch.randn(2, 3, 4)
    assert_close(small.logits(x), x @ small(torch.arange(9_001)).T)


def test_what_cannot_be_quantised_or_found_is_refused() -> None:
    with refuses(RangeError, "'int8' or 'fp8'"):
        QuantisedEmbedding(TokenEmbedding(3, 2), "int4")  # type: ignore[arg-type]
    with refuses(RangeError, "got id 3"):
        QuantisedEmbedding(TokenEmbedding(3, 2))(torch.tensor([3]))
