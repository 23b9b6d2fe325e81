"""`NGramGate`: the layer of Qwen4 and the formulas of Engram, in packed and padded rows and in pieces."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen4ExpTextConfig

from locant import InputError, LocantError, NGramEmbedding, Positions, ShapeError
from locant.embedding import NGramGate, TokenHistory
from tests.embedding.ngram_models import BLT, ENGRAM, QWEN, qwen
from tests.refusal import refuses
from tests.tolerances import SHORT_SUM, assert_close


def random_gate(**options: int) -> NGramGate:
    gate = NGramGate(6, 4, num_streams=2, **options)
    with torch.no_grad():
        for parameter in gate.parameters():
            parameter.normal_(std=0.5)
    return gate


GATE = random_gate(kernel_size=3, dilation=2)


@torch.no_grad()
@pytest.mark.parametrize("index", [0, 1])
def test_a_folder_of_qwen4_has_its_gates(index: int, tmp_path: Path) -> None:
    """Only the sum of the convolution's taps is in another order."""
    theirs = qwen()
    theirs.save_pretrained(tmp_path)
    layer = theirs.layers[(0, 2)[index]].ple
    table, gate = NGramEmbedding.from_pretrained(tmp_path, index), NGramGate.from_pretrained(tmp_path, index)
    ids, hidden = torch.randint(97, (2, 17)), torch.randn(2, 17, 3 * 32)
    torch.testing.assert_close(gate(hidden, table(ids)), layer(hidden, ids, None), **SHORT_SUM)
    layer.conv1d.weight.zero_()
    gate.taps = torch.nn.Parameter(torch.zeros_like(gate.taps))
    assert torch.equal(gate(hidden, table(ids)), layer(hidden, ids, None))


def test_the_gate_follows_its_formula() -> None:
    """Written token by token, in float64."""
    hidden, rows = torch.randn(1, 7, 8).double(), torch.randn(1, 7, 6).double()
    gate = random_gate(kernel_size=3, dilation=2).double()

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean() + gate.eps).sqrt() * (1 + weight)

    gated, normed = torch.zeros(7, 2, 4).double(), torch.zeros(7, 2, 4).double()
    for token in range(7):
        key, value = gate.key.weight @ rows[0, token], gate.value.weight @ rows[0, token]
        for stream in range(2):
            part = slice(4 * stream, 4 * stream + 4)
            score = norm(key[part], gate.key_norm[stream]) @ norm(hidden[0, token, part], gate.query_norm[stream]) / 2
            gated[token, stream] = torch.sigmoid(score.sign() * score.abs().clamp_min(1e-6).sqrt()) * value
            normed[token, stream] = norm(gated[token, stream], gate.conv_norm[stream])
    expected = torch.zeros(7, 8).double()
    for token in range(7):
        taps = [(normed[token - 2 * back].flatten(), gate.taps[:, 2 - back]) for back in range(3) if token >= 2 * back]
        expected[token] = gated[token].flatten() + F.silu(sum(x * tap for x, tap in taps))
    assert_close(gate(hidden, rows)[0], expected)


@given(st.data())
def test_every_row_has_the_bits_of_its_documents_alone(data: st.DataObject) -> None:
    """Packed, with padding anywhere, whole and in pieces."""
    length = data.draw(st.integers(1, 14))
    document = torch.tensor(
        data.draw(st.lists(st.sampled_from([0, 0, 0, 1]), min_size=length, max_size=length))
    ).cumsum(0)
    is_padding = torch.tensor(data.draw(st.lists(st.booleans(), min_size=length, max_size=length)))
    positions = Positions.of(torch.arange(length), document.masked_fill(is_padding, -1))
    hidden, rows = torch.randn(1, length, 8), torch.randn(1, length, 6)
    whole = GATE(hidden, rows, positions)
    for number in document[~is_padding].unique().tolist():
        slots = ((document == number) & ~is_padding).nonzero()[:, 0]
        alone = GATE(hidden[:, slots], rows[:, slots], Positions.arange(len(slots)))
        assert_close(whole[:, slots], alone)
    assert not whole[:, is_padding].any()
    cut, history = data.draw(st.integers(0, length)), TokenHistory()
    pieces = [
        GATE(hidden[:, part], rows[:, part], positions.slice(part.start, part.stop), history=history)
        for part in (slice(0, cut), slice(cut, length))
    ]
    assert_close(torch.cat(pieces, 1), whole)


def test_no_gradient_crosses_a_document_or_padding() -> None:
    hidden, rows = torch.randn(1, 6, 8), torch.randn(1, 6, 6, requires_grad=True)
    GATE(hidden, rows, Positions.packed([3, 2], length=6))[:, 3:].sum().backward()
    touched = rows.grad.abs().sum(-1)[0] > 0
    assert touched.tolist() == [False, False, False, True, True, False]


def test_the_gate_of_deepseek_has_no_convolution() -> None:
    gate = NGramGate.from_config(ENGRAM)
    assert (gate.num_streams, gate.kernel_size, gate.rows_width, gate.taps) == (2, 0, 36, None)
    hidden, rows = torch.randn(1, 3, 16), torch.randn(1, 3, 36)
    assert torch.equal(gate(hidden, rows, Positions.after(5, 3)), gate(hidden, rows)), "each token for itself"


def test_what_does_not_fit_is_an_error() -> None:
    hidden, rows = torch.randn(1, 5, 8), torch.randn(1, 5, 6)
    with refuses(ShapeError, "2 x 4"):
        GATE(hidden[..., :4], rows)
    with refuses(ShapeError, "a last dimension of 6"):
        GATE(hidden, rows[..., :4])
    with refuses(ShapeError, "rows of dtype bfloat16", "NGramGate have float32"):
        GATE(hidden, rows.bfloat16())
    with refuses(LocantError, "from position 3"):
        GATE(hidden, rows, Positions.after(3, 5))
    with refuses(InputError, "at its input"):
        NGramGate.from_config({**BLT, "model_type": "blt"})
    assert NGramGate.from_config(Qwen4ExpTextConfig(**QWEN), 1).dilation == 3
