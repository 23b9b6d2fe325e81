"""On accelerators no fused kernel gets a mask of another dtype than its queries: some read its bytes as theirs.

cuDNN in torch 2.11 to 2.13 does (pytorch#191612). Tensors without values say what would be handed over.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from locant import ALiBi, Kerple, PositionEncoding, Positions, attend
from locant.attention.backends import dense
from locant.attention.choice import choose_backend
from locant.attention.inputs import AttentionInputs
from locant.attention.mask import AttentionMask
from locant.positions import ModelShape
from locant.positions.hidden_bias import HiddenBias
from locant.positions.registry import encodings

BATCH, HEADS, LENGTH, HEAD_DIM = 2, 8, 512, 16
SHAPE = ModelShape(d_model=HEADS * HEAD_DIM, num_heads=HEADS, max_seq_len=LENGTH)
BIASES = {
    **{
        name: partial(kind.for_model, SHAPE)
        for name, kind in encodings().items()
        if "bias" in kind.methods() and not issubclass(kind, HiddenBias)
    },
    "learned alibi": partial(ALiBi, HEADS, learned=True),
    "kerple, power": partial(Kerple, HEADS, "power"),
}
ARRANGEMENTS = {
    "prefill": lambda: {"positions": Positions.arange(LENGTH)},
    "window": lambda: {"positions": Positions.arange(LENGTH), "window": 100},
    "packed": lambda: {"positions": Positions.packed([[200, 312], [512]], device=torch.get_default_device())},
    "decode": lambda: {"positions": Positions.after(LENGTH - 1, 1), "k_positions": Positions.arange(LENGTH)},
}
IN_FLOAT32 = ("cope", "transformer_xl", "fire")
"""Queries, keys, values and mask: FlexAttention has no function for these."""
SIXTEEN_BITS = (torch.bfloat16, torch.float16)


class Masks:
    """Stands where torch's fused attention does, and keeps the dtypes of queries and masks."""

    def __init__(self) -> None:
        self.seen: list[tuple[torch.dtype, torch.dtype]] = []

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None = None, **options: object
    ) -> Tensor:
        assert q.dtype == k.dtype == v.dtype
        if attn_mask is not None:
            self.seen.append((q.dtype, attn_mask.dtype))
        return q.new_zeros(*q.shape[:3], v.shape[-1])


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> Masks:
    masks = Masks()
    monkeypatch.setattr(dense.F, "scaled_dot_product_attention", masks)
    return masks


def drawn(arrangement: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, dict[str, object]]:
    options = ARRANGEMENTS[arrangement]()
    q = torch.empty(BATCH, HEADS, options["positions"].seq_len, HEAD_DIM, dtype=dtype)
    return q, torch.empty(BATCH, 2, LENGTH, HEAD_DIM, dtype=dtype), options


def attended(arrangement: str, dtype: torch.dtype, encoding: Callable[[], PositionEncoding], backend: str) -> Tensor:
    """On the device of torch that any machine has beside its CPU."""
    with torch.device("meta"), torch.no_grad():
        q, k, options = drawn(arrangement, dtype)
        return attend(q, k, k, encoding=encoding(), backend=backend, **options)


@pytest.mark.parametrize("backend", ["sdpa", "tiled"])
@pytest.mark.parametrize("name", BIASES)
def test_a_mask_has_the_dtype_of_the_queries(name: str, backend: str, masks: Masks) -> None:
    """Arrangements and dtypes take turns: any two of them meet in either backend."""
    turn = [*BIASES].index(name)
    dtype, arrangement = (*SIXTEEN_BITS, torch.float32)[turn % 3], [*ARRANGEMENTS][turn % 4]
    y = attended(arrangement, dtype, BIASES[name], backend)
    assert (y.dtype, y.shape[:2]) == (dtype, (BATCH, HEADS))
    assert masks.seen
    assert set(masks.seen) == {(torch.float32, torch.float32)}


class InDouble(ALiBi):
    """A bias of one's own, in a dtype of its own."""

    def bias(self, q: Tensor, k: Tensor, positions: Positions, k_positions: Positions | None = None) -> Tensor:
        return super().bias(q.double(), k, positions, k_positions)


@pytest.mark.parametrize("dtype", [*SIXTEEN_BITS, torch.float32], ids=str)
def test_so_has_that_of_a_bias_in_another_dtype(dtype: torch.dtype, masks: Masks) -> None:
    attended("prefill", dtype, partial(InDouble, HEADS), "sdpa")
    assert set(masks.seen) == {(torch.float32, torch.float32)}


@pytest.mark.parametrize("name", BIASES)
def test_auto_takes_biases_of_16_bit_queries_to_a_kernel_that_holds_no_mask(name: str) -> None:
    for number, arrangement in enumerate(ARRANGEMENTS):
        with FakeTensorMode(), torch.device("cuda"):
            q, k, options = drawn(arrangement, SIXTEEN_BITS[number % 2])
            mask = AttentionMask(options["positions"], options.get("k_positions"), window=options.get("window"))
        inputs = AttentionInputs(q, k, k, mask, BIASES[name]())
        assert choose_backend("auto", inputs).name in (("tiled", "sdpa") if name in IN_FLOAT32 else ("flex",))


def test_on_a_cpu_the_mask_stays_beside_16_bit_queries(masks: Masks) -> None:
    q = torch.zeros(1, HEADS, 4, HEAD_DIM, dtype=torch.bfloat16)
    attend(q, q, q, encoding=ALiBi(HEADS), positions=Positions.arange(4), backend="sdpa")
    assert masks.seen == [(torch.bfloat16, torch.float32)]
