"""Rotary positions: the properties of the paper, several axes, keys that move, and agreement with `transformers`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPTJConfig, LlamaConfig
from transformers.models.gptj import modeling_gptj
from transformers.models.llama import modeling_llama

from locant import Positions, RangeError, Rotary, ShapeError
from locant.positions.scaling import DynamicNTK, LongRoPE, Scaling
from tests import oracles
from tests.refusal import refuses
from tests.tolerances import DIFFERENT, assert_close

LAYOUTS = ["half", "interleaved"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rotary_dim", [14, 6])
def test_rotation_is_the_papers_matrix_at_the_papers_angles(layout: str, rotary_dim: int) -> None:
    index = [0, 1, 2, 700, 2355, 1_000_003]
    x = torch.randn(2, 3, len(index), 14, dtype=torch.float64)
    cos, sin = oracles.true_angles(index, rotary_dim, 5e5)
    expected = torch.from_numpy(oracles.rotate(x.numpy(), cos, sin, layout))
    rotary = Rotary(14, base=5e5, layout=layout, rotary_dim=rotary_dim)
    assert_close(rotary.rotate(x, x, Positions.of(index))[0], expected)
    assert_close(rotary.rotate(x.float(), x.float(), Positions.of(index))[1], expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_place_writes_the_same_bits_into_the_memory_of_q_and_k(layout: str, dtype: torch.dtype) -> None:
    rotary, positions = Rotary(14, layout=layout, rotary_dim=6), Positions.packed([2, 3])
    q, k = torch.randn(2, 6, 5, 14).to(dtype), torch.randn(2, 3, 5, 14).to(dtype)
    expected = rotary.rotate(q.clone(), k.clone(), positions)
    before = q.clone(), k.clone()
    rotary.rotate(q, k, positions)
    assert torch.equal(q, before[0])
    assert torch.equal(k, before[1])
    rotated = rotary.rotate(q, k, positions, inplace=True)
    for out, given_tensor, wanted in zip(rotated, (q, k), expected, strict=True):
        assert out.data_ptr() == given_tensor.data_ptr()
        assert torch.equal(given_tensor, wanted)


def test_in_place_keys_have_places_of_their_own_and_nothing_is_written_where_they_are_refused() -> None:
    """What memory queries and keys may share: `tests/kernels/rotary/test_inplace.py`."""
    rotary, x, here = Rotary(8), torch.randn(1, 4, 16, 8), Positions.arange(16)
    expected = rotary.rotate(x, x, here)[0]
    for out in rotary.rotate(x, x.view(x.shape), here, Positions.arange(16), inplace=True):
        assert torch.equal(out, expected)
    with refuses(ShapeError, "different positions", "clone"):
        rotary.rotate(x, x, here, Positions.after(1, 16), inplace=True)
    with refuses(RangeError, "for_length"):
        Rotary(8, scaling=DynamicNTK(factor=4.0, original_max_seq_len=8)).rotate(x, x.clone(), here, inplace=True)
    assert torch.equal(x, expected)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int32], ids=str)
def test_dtypes_without_arithmetic_are_refused(dtype: torch.dtype) -> None:
    q, k = torch.ones(1, 2, 5, 8), torch.ones(1, 2, 5, 8)
    for given_q, given_k, name in ((q.to(dtype), k, "q"), (q, k.to(dtype), "k")):
        with refuses(ShapeError, f"{name} of dtype {str(dtype)[6:]}", "16 bits", f"{name}.float()"):
            Rotary(8).rotate(given_q, given_k, Positions.arange(5))


def test_sections_rotate_each_pair_by_its_axis() -> None:
    rotary, positions = Rotary(14, sections=(2, 4, 1)), Positions.grid(2, 3, 5)
    cos, sin = rotary.cos_sin(positions, torch.float64)
    assert cos.shape == sin.shape == (1, 30, 7)
    for pair, axis in enumerate([0, 0, 1, 1, 1, 1, 2]):
        alone = oracles.true_angles(positions.index[0, :, axis].tolist(), 14, 1e4)
        assert_close(cos[0, :, pair], torch.from_numpy(alone[0][:, pair]))
        assert_close(sin[0, :, pair], torch.from_numpy(alone[1][:, pair]))


def test_text_with_one_index_on_every_axis_is_plain_rotary() -> None:
    index = torch.tensor([[0, 5, 9]])
    spread_out, plain = Rotary(14, sections=(2, 4, 1)), Rotary(14)
    for positions in (Positions.of(index), Positions.of(index[..., None].expand(1, 3, 3))):
        for ours, other in zip(spread_out.cos_sin(positions), plain.cos_sin(Positions.of(index)), strict=True):
            assert torch.equal(ours, other)


FAR = [8191, 8192, 65_535, 131_071, 1_000_000, 2**24, 2**24 + 1, 2**31 - 1]


@pytest.mark.parametrize(("dim", "base"), [(2, 1e4), (6, 1e7), (80, 5e5), (256, 1e6)])
def test_float32_angles_are_llamas_bit_for_bit(dim: int, base: float) -> None:
    config = LlamaConfig(
        hidden_size=2 * dim, num_attention_heads=2, head_dim=dim,
        rope_parameters={"rope_type": "default", "rope_theta": base},
    )  # fmt: skip
    theirs = modeling_llama.LlamaRotaryEmbedding(config)
    index = torch.cat([torch.arange(4097), torch.tensor(FAR)])
    rotary = Rotary(dim, base=base, angles="float32")
    for part in (index, index[:1], index[:7], index[4090:], index[-3:]):  # also where vector instructions have a tail
        wanted = theirs(torch.zeros(1, dtype=torch.float32), part[None])
        for ours, expected in zip(rotary.cos_sin(Positions.of(part)), wanted, strict=True):
            assert torch.equal(torch.cat([ours, ours], dim=-1), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 3, 5, 14), (1, 8, 67, 64)])
def test_queries_and_keys_are_rotated_as_in_llama(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    batch, heads, seq_len, dim = shape
    config = LlamaConfig(hidden_size=heads * dim, num_attention_heads=heads, head_dim=dim)
    q = torch.randn(shape, dtype=torch.float32).to(dtype).requires_grad_()
    k = torch.randn(batch, 1, seq_len, dim).to(dtype).requires_grad_()
    cotangents = torch.randn_like(q), torch.randn_like(k)
    positions = Positions.after([3, 1000][:batch], seq_len)
    cos, sin = modeling_llama.LlamaRotaryEmbedding(config)(torch.zeros(1, dtype=torch.float32), positions.index)
    expected = modeling_llama.apply_rotary_pos_emb(q.float(), k.float(), cos, sin)
    ours = Rotary(dim, angles="float32").rotate(q, k, positions)
    for a, b in zip(ours, expected, strict=True):
        assert torch.equal(a, b.to(dtype))
    gradients = torch.autograd.grad(ours, (q, k), cotangents)
    wanted = torch.autograd.grad(expected, (q, k), tuple(c.float() for c in cotangents))
    for a, b in zip(gradients, wanted, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("rotary_dim", [14, 6])
def test_interleaved_and_partial_is_gpt_j(rotary_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config = GPTJConfig(n_embd=42, n_head=3, n_layer=1, rotary_dim=rotary_dim, n_positions=64, vocab_size=11)
    attention = modeling_gptj.GPTJAttention(config, layer_idx=0)
    seen: list[Tensor] = []
    attend = lambda module, q, k, v, *rest, **options: (seen.extend([q, k]), (v.transpose(1, 2), None))[1]  # noqa: E731
    monkeypatch.setattr(modeling_gptj, "eager_attention_forward", attend)
    x = torch.randn(2, 5, 42)
    positions = Positions.after([3, 17], 5)
    attention(x, modeling_gptj.GPTJRotaryEmbedding(config)(x, positions.index))
    plain = [project(x).view(2, 5, 3, 14).transpose(1, 2) for project in (attention.q_proj, attention.k_proj)]
    rotary = Rotary(14, layout="interleaved", rotary_dim=rotary_dim, angles="float32")
    for ours, expected, before in zip(rotary.rotate(*plain, positions), seen, plain, strict=True):
        assert torch.equal(ours, expected)
        assert not torch.equal(ours, before)


WRONG: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    *(({"head_dim": head_dim}, (f"got {head_dim} for head_dim", "even")) for head_dim in (-2, 0, 1, 7)),
    *(({"rotary_dim": n}, (f"got {n} for rotary_dim", "head_dim=8", "even")) for n in (-2, 0, 3, 10)),
    ({"layout": "neox"}, ("'neox'", "'half'", "'interleaved'")),
    ({"axial": True}, ("sections",)),
    *(({"sections": sections}, (str(sections), "4 pairs")) for sections in ((1, 2), (4, 4), ())),
    # These do add up; used, they made torch write outside of its memory.
    *(({"sections": parts}, (f"got {min(parts)} for an entry of sections",)) for parts in ((6, -2), (4, 0, -1, 1))),
]


@pytest.mark.parametrize(("options", "words"), WRONG, ids=str)
def test_wrong_options_are_refused(options: dict[str, Any], words: tuple[str, ...]) -> None:
    with refuses(RangeError, *words):
        Rotary(**{"head_dim": 8, **options})


def test_several_axes_without_sections_are_refused() -> None:
    x = torch.zeros(1, 2, 6, 8)
    with refuses(ShapeError, "2 axes", "sections"):
        Rotary(8).rotate(x, x, Positions.grid(2, 3))
    with refuses(ShapeError, "2 axes", "3 sections"):
        Rotary(8, sections=(1, 2, 1)).rotate(x, x, Positions.grid(2, 3))


@pytest.mark.parametrize("shape", [(2, 3, 5, 6), (2, 3, 5, 10), (2, 5, 8), (2, 3, 5, 8, 1)])
def test_queries_and_keys_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    good, bad = torch.zeros(2, 3, 5, 8), torch.zeros(shape)
    with refuses(ShapeError, "q", str(shape), "head_dim=8"):
        Rotary(8).rotate(bad, good, Positions.arange(5))
    with refuses(ShapeError):
        Rotary(8).rotate(good, bad, Positions.arange(5))


def test_positions_of_another_length_batch_or_device_are_refused() -> None:
    q, five = torch.zeros(2, 3, 5, 8), Positions.arange(5)
    longer, elsewhere = torch.zeros(2, 3, 7, 8), q.to("meta")
    cases: list[tuple[Tensor, Positions, Positions | None, tuple[str, ...]]] = [
        (q, Positions.arange(4), None, ("1 x 4", "2 x 5")),
        (q, Positions.arange(5, batch=3), None, ("3 x 5", "2 x 5")),
        (q, Positions.arange(5, device="meta"), None, ("meta", "cpu")),
        (longer, five, None, ("7", "5")),
        (longer, five, Positions.arange(6), ("k has 2 x 7",)),
        (elsewhere, five, None, ("meta",)),
    ]
    for k, positions, k_positions, words in cases:
        with refuses(ShapeError, *words):
            Rotary(8).rotate(q, k, positions, k_positions)


def test_keys_of_a_wider_dtype_keep_what_they_hold() -> None:
    k = torch.randn(1, 2, 5, 8, dtype=torch.float64)
    _, rotated = Rotary(8).rotate(k.float(), k, Positions.after(3, 5))
    assert_close(rotated, Rotary(8).rotate(k, k, Positions.after(3, 5))[1], torch.float64)


def scalings() -> list[Scaling]:
    factors = {"short_factor": [1.0 + 0.01 * i for i in range(32)], "long_factor": [1.0 + 0.3 * i for i in range(32)]}
    longrope = LongRoPE(**factors, original_max_seq_len=16, factor=32.0)
    return [DynamicNTK(factor=4.0, original_max_seq_len=16), longrope]


@pytest.mark.parametrize("scaling", scalings(), ids=lambda scaling: type(scaling).__name__)
@pytest.mark.parametrize(
    ("layout", "rotary_dim", "dtype"), [("half", 64, torch.float32), ("interleaved", None, torch.float64)]
)
@pytest.mark.parametrize(("from_len", "to_len"), [(16, 17), (17, 4096), (4096, 16)])
def test_rerotated_keys_are_those_rotated_for_the_other_length(scaling, layout, rotary_dim, dtype, from_len, to_len):
    head_dim = 64 if rotary_dim is None else 80
    rotary = Rotary(head_dim, scaling=scaling, layout=layout, rotary_dim=rotary_dim)
    k, positions = torch.randn(2, 3, 5, head_dim, dtype=dtype), Positions.of([[0, 1, 3, 7, 15]])
    before = rotary.for_length(from_len).rotate(k, k, positions)[1]
    after = rotary.for_length(to_len).rotate(k, k, positions)[1]
    assert_close(rotary.rerotate(before, positions, from_len, to_len), after)
    if {from_len > 16, to_len > 16} == {True, False}:
        assert not torch.allclose(before, after, atol=DIFFERENT)  # or there would be nothing to show


@pytest.mark.parametrize("scaling", scalings(), ids=lambda scaling: type(scaling).__name__)
def test_past_the_trained_length_the_sequence_length_is_required(scaling):
    rotary = Rotary(64, scaling=scaling)
    assert rotary.cos_sin(Positions.arange(16))[0].shape == (1, 16, 32)
    with pytest.raises(RangeError, match="for_length"):
        rotary.cos_sin(Positions.arange(17))
    assert rotary.for_length(17).cos_sin(Positions.arange(17))[0].shape == (1, 17, 32)
    with pytest.raises(RangeError, match="for_length"):
        rotary.for_length(17).cos_sin(Positions.after(17, 1))
