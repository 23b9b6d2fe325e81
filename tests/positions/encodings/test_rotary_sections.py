"""Several position axes against `transformers`' Qwen2-VL, and keys moved from one length to another."""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig, Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding, Qwen2VLVisionRotaryEmbedding

from locant import Positions, RangeError, Rotary, ShapeError
from locant.errors import LocantError
from locant.positions.scaling import DynamicNTK, LongRoPE, Scaling
from tests.tolerances import DIFFERENT, assert_close

SECTIONS = (16, 24, 24)


def qwen_text() -> Qwen2VLRotaryEmbedding:
    parameters = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": list(SECTIONS)}
    config = Qwen2VLTextConfig(hidden_size=256, num_attention_heads=2, rope_parameters=parameters)
    return Qwen2VLRotaryEmbedding(config)


def test_sections_are_those_of_qwen2_vl_bit_for_bit():
    index = torch.randint(0, 5_000, (2, 7, 3))
    ours = Rotary(128, 1e6, sections=SECTIONS, angles="float32").cos_sin(Positions.of(index))
    theirs = qwen_text()(torch.zeros(1), index.permute(2, 0, 1))
    for mine, reference in zip(ours, theirs, strict=True):
        assert torch.equal(mine, reference[..., :64])


def test_text_with_one_axis_equals_text_with_its_index_on_every_axis():
    rotary = Rotary(128, sections=SECTIONS)
    single, repeated = Positions.arange(11), Positions.of(torch.arange(11)[:, None].expand(1, 11, 3))
    for one, three in zip(rotary.cos_sin(single), rotary.cos_sin(repeated), strict=True):
        assert torch.equal(one, three)


def test_axial_sections_are_those_of_qwen2_vls_vision_encoder():
    height, width, head_dim = 5, 7, 80
    vision = Qwen2VLVisionRotaryEmbedding(Qwen2VLVisionConfig(embed_dim=160, num_heads=2))
    rotary = Rotary(head_dim, sections=(20, 20), axial=True, angles="float32")
    grid = Positions.grid(height, width)
    cos, sin = vision(torch.zeros(1), grid.index[0])
    ours = rotary.cos_sin(grid)
    assert torch.equal(ours[0][0], cos[..., :40])
    assert torch.equal(ours[1][0], sin[..., :40])


@pytest.mark.parametrize("sections", [(16, 24), (16, 24, 25), (-1, 41, 24)])
def test_sections_that_do_not_add_up_are_refused(sections):
    with pytest.raises(RangeError, match="sections"):
        Rotary(128, sections=sections)


def test_axial_needs_sections():
    with pytest.raises(LocantError, match="sections"):
        Rotary(128, axial=True)


@pytest.mark.parametrize("axes", [2, 4])
def test_another_number_of_axes_than_sections_is_refused(axes):
    with pytest.raises(ShapeError, match="axes"):
        Rotary(128, sections=SECTIONS).cos_sin(Positions.of(torch.zeros(1, 5, axes, dtype=torch.long)))


def scalings() -> list[Scaling]:
    factors = {"short_factor": [1.0 + 0.01 * i for i in range(32)], "long_factor": [1.0 + 0.3 * i for i in range(32)]}
    longrope = LongRoPE(**factors, original_max_seq_len=16, factor=32.0)
    return [DynamicNTK(factor=4.0, original_max_seq_len=16), longrope]


@pytest.mark.parametrize("scaling", scalings(), ids=lambda scaling: type(scaling).__name__)
@pytest.mark.parametrize(
    ("layout", "rotary_dim", "dtype"), [("half", 64, torch.float32), ("interleaved", None, torch.float64)]
)
@pytest.mark.parametrize(("from_len", "to_len"), [(16, 17), (17, 4096), (4096, 16), (5, 4096)])
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
def test_past_the_trained_length_the_length_has_to_be_said(scaling):
    rotary = Rotary(64, scaling=scaling)
    assert rotary.cos_sin(Positions.arange(16))[0].shape == (1, 16, 32)
    with pytest.raises(RangeError, match="for_length"):
        rotary.cos_sin(Positions.arange(17))
    assert rotary.for_length(17).cos_sin(Positions.arange(17))[0].shape == (1, 17, 32)
    with pytest.raises(RangeError, match="for_length"):
        rotary.for_length(17).cos_sin(Positions.after(17, 1))


def test_a_cache_that_outgrows_its_length_attends_as_one_shot_does():
    rotary, tokens = Rotary(64, scaling=DynamicNTK(factor=4.0, original_max_seq_len=16)), 40
    k = torch.randn(1, 2, tokens, 64)
    first, rest = Positions.arange(16), Positions.after(16, tokens - 16)
    cached = rotary.rotate(k[:, :, :16], k[:, :, :16], first)[1]
    moved = rotary.rerotate(cached, first, 16, tokens)
    new = rotary.for_length(tokens).rotate(k[:, :, 16:], k[:, :, 16:], rest)[1]
    whole = rotary.for_length(tokens).rotate(k, k, Positions.arange(tokens))[1]
    assert_close(torch.cat([moved, new], dim=2), whole)
