"""One query over a cache gets the bias of a whole prompt, bit for bit, although other code computes it.

Without gradients a few queries go through kernels that read each key once, and tables are kept for later calls. With
gradients plain operations compute the whole matrix. `tests/positions/test_same_alone.py` has other arrangements.
"""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

from locant import Cope, Deberta, Fire, PositionEncoding, Positions, Sandwich, Shaw, TransformerXL, attend
from locant.positions import T5Bias
from tests.positions import oracles_of_biases as oracles
from tests.positions.claims import shaken
from tests.tolerances import assert_close

HEADS, KV_HEADS, HEAD_DIM, LENGTH = 4, 2, 12, 90
ENCODINGS: dict[str, Callable[[], PositionEncoding]] = {
    "cope": lambda: Cope(HEAD_DIM, 9),
    "deberta": lambda: Deberta(HEADS, HEAD_DIM, num_buckets=16, max_distance=40),
    "deberta v1": lambda: Deberta(HEADS, HEAD_DIM, num_buckets=None, max_distance=50, terms=("p2c",)),
    "fire": lambda: Fire(HEADS),
    "sandwich": lambda: Sandwich(HEADS, dim=20),
    "shaw": lambda: Shaw(HEAD_DIM, 20, key_term=True),
    "t5": lambda: T5Bias(HEADS),
    "transformer_xl": lambda: TransformerXL(HEADS, 20, head_dim=HEAD_DIM),
}


def tokens(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.randn(2, HEADS, LENGTH, HEAD_DIM).to(dtype), torch.randn(2, KV_HEADS, LENGTH, HEAD_DIM).to(dtype)


def bias(encoding: PositionEncoding, q: Tensor, k: Tensor, first: int, stop: int) -> Tensor:
    """For the queries from `first` to `stop`, with all keys so far."""
    where = Positions.arange(stop)
    return encoding.bias(q[:, :, first:stop], k[:, :, :stop], where.slice(first, stop), where)  # type: ignore[return-value]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ENCODINGS)
def test_a_cached_token_gets_the_bits_of_the_whole_prompt(name: str, dtype: torch.dtype) -> None:
    encoding, (q, k) = shaken(ENCODINGS[name](), 1.0), tokens(dtype)
    whole = bias(encoding, q, k, 0, LENGTH).detach()
    with torch.no_grad():
        for first, stop in ((LENGTH - 1, LENGTH), (33, 34), (0, 40), (64, 66), (50, LENGTH), (0, LENGTH)):
            assert torch.equal(bias(encoding, q, k, first, stop), whole[:, :, first:stop, :stop]), (first, stop)
        packed = Positions.of(list(range(LENGTH)), document=[0] * LENGTH)  # these do not count from a start
        assert torch.equal(encoding.bias(q, k, packed), whole)  # type: ignore[arg-type]


@torch.no_grad()
@pytest.mark.parametrize("name", ENCODINGS)
def test_without_keys_the_bias_is_empty(name: str) -> None:
    q, k = tokens()
    for queries in (0, 1, 20):
        none = ENCODINGS[name]().bias(q[:, :, :queries], k[:, :, :0], Positions.arange(queries), Positions.arange(0))
        assert none is not None
        assert none.shape[2:] == (queries, 0)


@pytest.mark.parametrize("name", ["deberta", "fire", "transformer_xl"])
def test_a_table_is_kept_only_for_the_same_values(name: str) -> None:
    """Values change in ways that torch does not count. Copies and pickles begin without a table."""
    encoding, (q, k) = shaken(ENCODINGS[name](), 1.0), tokens()

    def require_up_to_date(each: PositionEncoding) -> None:
        with torch.no_grad():
            kept = bias(each, q, k, LENGTH - 1, LENGTH)
        assert torch.equal(kept, bias(each, q, k, LENGTH - 1, LENGTH).detach())

    require_up_to_date(encoding)
    for parameter in encoding.parameters():
        parameter.data.mul_(1.5)
        require_up_to_date(encoding)
    others = copy.deepcopy(encoding), pickle.loads(pickle.dumps(encoding))  # noqa: S301 -- our own bytes
    one_parameter = next(encoding.parameters())
    one_parameter.data.zero_()
    for each in (encoding, *others):
        require_up_to_date(each)
    with torch.inference_mode():
        bias(encoding, q, k, 0, LENGTH)
    one_parameter.data.normal_()
    with torch.inference_mode():
        bias(encoding, q, k, 0, LENGTH)
    bias(encoding, q, k, 0, LENGTH).sum().backward()  # no inference tensor is left behind


def deberta(q: np.ndarray, k: np.ndarray, query: int, encoding: Deberta) -> np.ndarray:
    """He et al. 2021, with the buckets of transformers: both terms of the last query and all keys."""
    distance = torch.arange(query, -1, -1)
    rows = (make_log_bucket_position(distance, 16, 40) + 16).clamp(0, 31).long().numpy()
    table = encoding.weight.detach().double().numpy()
    of_query, of_key = (
        (table @ layer.weight.detach().double().numpy().T + layer.bias.detach().double().numpy())
        .reshape(32, HEADS, HEAD_DIM).transpose(1, 0, 2)[:, rows]
        for layer in (encoding.key_projection, encoding.query_projection) if layer is not None
    )  # fmt: skip
    keys = k.repeat(HEADS // KV_HEADS, axis=1)
    both = np.einsum("bhd,hjd->bhj", q[:, :, -1], of_query) + np.einsum("bhjd,hjd->bhj", keys, of_key)
    return encoding.scale * both[:, :, None]


@torch.no_grad()
@pytest.mark.parametrize("name", ["cope", "deberta", "sandwich", "transformer_xl"])
def test_one_query_over_a_cache_against_float64(name: str) -> None:
    """The formulas of the papers in NumPy, and the softmax over them. Each backend computes the same."""
    encoding = shaken(ENCODINGS[name](), 0.5)
    q, k = (x[:1] for x in tokens())
    v, query, keys = torch.randn(1, KV_HEADS, LENGTH, HEAD_DIM), [LENGTH - 1], list(range(LENGTH))
    q64, k64, v64 = (x.double().numpy() for x in (q[:, :, -1:], k, v))
    weights = {n: x.detach().double().numpy() for n, x in encoding.named_parameters()}
    if isinstance(encoding, Cope):
        expected = oracles.cope(q64, k64, query, keys, weights["weight"], encoding.scale)
    elif isinstance(encoding, Sandwich):
        expected = oracles.sandwich(query, keys, HEADS, 20)[None]
    elif isinstance(encoding, TransformerXL):
        projection = weights["weight"].reshape(HEADS, HEAD_DIM, 20)
        expected = oracles.transformer_xl(q64, k64, query, keys, projection, weights["u"], weights["v"], encoding.scale)
    else:
        assert isinstance(encoding, Deberta)
        expected = deberta(q64, k64, LENGTH - 1, encoding)
    positions, k_positions = Positions.after(LENGTH - 1, 1), Positions.arange(LENGTH)
    assert_close(encoding.bias(q[:, :, -1:], k, positions, k_positions), torch.from_numpy(expected))
    repeated = HEADS // KV_HEADS
    scores = q64 @ k64.repeat(repeated, axis=1).transpose(0, 1, 3, 2) / math.sqrt(HEAD_DIM) + expected
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    y = shares / shares.sum(-1, keepdims=True) @ v64.repeat(repeated, axis=1)
    for backend in ("auto", "sdpa", "tiled", "eager"):
        found = attend(
            q[:, :, -1:], k, v, encoding=encoding, positions=positions, k_positions=k_positions, backend=backend
        )
        assert_close(found, torch.from_numpy(y), torch.float32)
