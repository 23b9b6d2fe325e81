"""Rotary modules of `diffusers` that no row is about: what of them is no `Rotary`, or belongs to another part."""

from __future__ import annotations

import importlib
import math

import pytest
import torch
from torch import Tensor

from locant import InputError, Positions, RangeError, Rotary
from locant.engines.diffusers import encoding_from_diffusers, positions_from_diffusers
from locant.positions import MixedRotary, Pairs, PositionEncoding, UnequalAngles
from tests.refusal import refuses
from tests.tolerances import DIFFERENT, OF_FLOAT32_ANGLES, PEER, ROTATED_TOKEN, SIX_DIGITS

pytest.importorskip("diffusers", reason="diffusers is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # those of other packages

from tests.engines.diffusers_modules import (  # noqa: E402
    CASES,
    GRID,
    OPTIONS,
    TEXT,
    Turn,
    built,
    class_of,
    defaults,
    module_of,
    nested,
)  # fmt: skip

CPU = torch.device("cpu")


def apart(ours: PositionEncoding, where: Positions, turn: Turn, width: int) -> float:
    q = 2 * torch.rand(1, 2, where.seq_len, width, generator=torch.Generator().manual_seed(0)) - 1
    return float((ours.rotate_one(q, where) - turn(q)).abs().max())


def of_tables(cos: Tensor, sin: Tensor, half: bool = True) -> Turn:
    from diffusers.models.embeddings import apply_rotary_emb

    return lambda q: apply_rotary_emb(q, (cos, sin), use_real_unbind_dim=-2 if half else -1)


def test_ernie_image_does_not_rotate_and_is_known() -> None:
    """Frequencies are doubled for pairs side by side, and then pair dimensions half a head apart."""
    name = "ErnieImageTransformer2DModel"
    where = Positions.grid(*GRID)
    angles = built(name, "ErnieImageEmbedND3", defaults(name))(where.index.float())
    turn = nested(module_of(name).__file__, "apply_rotary_emb", torch=torch)
    places = [(axis, 2 * count, rung) for axis, count in enumerate((16, 24, 24)) for rung in range(count)]
    doubled = [place for place in places for _ in range(2)]
    dims = Pairs.of(128).dims
    first, second = (
        Rotary(
            128,
            base=256.0,
            pairs=Pairs(
                dims=dims,
                axes=[axis for axis, *_ in half],
                rungs=[(of, rung) for _, of, rung in half],
                num_axes=3,
            ),
        )
        for half in (doubled[:64], [*doubled[64:]])
    )
    theirs: Turn = lambda q: turn(q.transpose(1, 2), angles).transpose(1, 2)  # noqa: E731
    assert apart(UnequalAngles(first, second), where, theirs, 128) <= ROTATED_TOKEN
    q = torch.randn(1, 2, where.seq_len, 128)
    assert (theirs(q).norm(dim=-1) / q.norm(dim=-1) - 1).abs().max() > DIFFERENT
    with refuses(InputError, "not a rotation"):
        encoding_from_diffusers(defaults(name))


def test_mochi_is_a_rotation_by_learned_frequencies() -> None:
    frames, rows, columns = GRID
    heads, width = 2, 16
    frequencies = torch.randn(3, heads, width // 2)
    module = module_of("MochiTransformer3DModel").MochiRoPE()
    cos, sin = module(frequencies, frames, rows, columns, CPU, torch.float32)
    processors = importlib.import_module("diffusers.models.attention_processor").__file__
    turn = nested(str(processors), "apply_rotary_emb", "MochiAttnProcessor2_0", torch=torch)
    scale = (192 * 192 / (rows * columns)) ** 0.5
    centred = Positions.grid(rows, columns, centred=True)  # of cells of a side of 2 over their number
    index = centred.index[0] * torch.tensor([rows, columns]) / centred.denominator  # in halves
    where = Positions.of(
        [[[2 * frame, *map(round, cell)] for frame in range(frames) for cell in index.tolist()]], denominator=2
    )
    ours = MixedRotary(width, heads, num_axes=3)
    with torch.no_grad():
        ours.frequencies.copy_(frequencies * torch.tensor([1, scale, scale])[:, None, None])
        q = torch.randn(1, heads, where.seq_len, width)
        theirs = turn(q.transpose(1, 2), cos[None], sin[None]).transpose(1, 2)
        halves = torch.cat([q[..., ::2], q[..., 1::2]], dim=-1)  # which `MixedRotary` pairs
        first, second = ours.rotate_one(halves, where).chunk(2, dim=-1)
        rotated = torch.stack([first, second], dim=-1).flatten(-2)
        assert (rotated - theirs).abs().max() <= OF_FLOAT32_ANGLES[1_000]
    with refuses(InputError, "MixedRotary"):
        encoding_from_diffusers(defaults("MochiTransformer3DModel"))


def ltx(heads: int, head_dim: int, sizes: tuple[int, ...], base: float = 1e4, split: bool = False) -> Rotary:
    """All heads as one: frequencies rise from a quarter turn over the trained size, and axes take turns."""
    width, half, axes = heads * head_dim, head_dim // 2, len(sizes)
    count = width // (2 * axes)
    pairs = range(width // 2 - axes * count, width // 2)
    halves = [(pair // half * half + pair, pair // half * half + half + pair) for pair in pairs]
    rungs = [base ** (rung / (count - 1)) * math.pi / 2 for rung in range(count)]
    table = Pairs(
        dims=halves if split else [(2 * pair, 2 * pair + 1) for pair in pairs],
        axes=[*range(axes)] * count,
        inv_freq=[rung / size for rung in rungs for size in sizes],
    )
    return Rotary(width, pairs=table)


def test_ltx_rotates_all_heads_as_one() -> None:
    name, sizes = "LTXVideoTransformer3DModel", (20, 2048, 2048)
    config, (frames, rows, columns) = defaults(name), GRID
    module, code = built(name, "LTXVideoRotaryPosEmbed", config), module_of(name)
    fps = 25
    angles = module(torch.zeros(1), frames, rows, columns, (8 / fps, 32, 32))
    index = Positions.grid(*GRID).index[0] * torch.tensor([2 * 8, 2 * 32 * fps, 2 * 32 * fps])
    where = Positions.of((index - fps * torch.tensor(sizes))[None], denominator=fps)
    turn: Turn = lambda q: code.apply_rotary_emb(q[:, 0], angles)[:, None]  # noqa: E731
    q = 2 * torch.rand(1, 1, where.seq_len, 2048) - 1
    difference = (ltx(32, 64, sizes).rotate_one(q, where) - turn(q)).abs().max()
    assert difference <= OF_FLOAT32_ANGLES[15_708]
    with refuses(InputError, "whole width"):
        encoding_from_diffusers(config)


@pytest.mark.parametrize("rope_type", ["interleaved", "split"])
@pytest.mark.parametrize("name", ["LTX2VideoTransformer3DModel", "SanaWMLTX2RefinerTransformer3DModel"])
def test_ltx_2_rotates_all_heads_as_one(name: str, rope_type: str) -> None:
    rotary = next(key for key in vars(module_of(name)) if key.endswith("LTX2AudioVideoRotaryPosEmbed"))
    module = built(name, rotary, {**defaults(name), "rope_type": rope_type})
    fps, sizes = 24, (20, 2048, 2048)
    coords = module.prepare_video_coords(1, *GRID, CPU, fps=fps)
    cos, sin = module(coords)
    whole = (coords.sum(-1)[0].T - torch.tensor(sizes)) * fps  # twice the middle, in frames
    where = Positions.of(whole.round().long()[None], denominator=fps)
    ours = ltx(32, 128, sizes, split=rope_type == "split")
    q = 2 * torch.rand(1, 1, where.seq_len, 4096) - 1
    if rope_type == "interleaved":
        theirs = module_of(name).apply_interleaved_rotary_emb(q[:, 0], (cos, sin))
    else:
        theirs = module_of(name).apply_split_rotary_emb(q[:, 0], (cos, sin))
    assert (ours.rotate_one(q, where)[:, 0] - theirs).abs().max() <= OF_FLOAT32_ANGLES[15_708]


def test_the_text_connectors_of_ltx_2_rotate_all_heads_as_one() -> None:
    module = importlib.import_module("diffusers.pipelines.ltx2.connectors")
    cos, sin = module.LTX2RotaryPosEmbed1d(64, base_seq_len=4096, num_attention_heads=2)(1, 40, CPU)
    where = Positions.of(2 * torch.arange(40) - 4096)
    q = torch.rand(1, 1, 40, 64)
    theirs = module_of("LTX2VideoTransformer3DModel").apply_interleaved_rotary_emb(q[:, 0], (cos, sin))
    assert (ltx(2, 32, (4096,)).rotate_one(q, where)[:, 0] - theirs).abs().max() <= OF_FLOAT32_ANGLES[15_708]


def test_layers_of_qwen_image_stand_one_behind_another_and_the_condition_at_minus_one() -> None:
    name, (_, rows, columns) = "QwenImageTransformer2DModel", GRID
    module = module_of(name).QwenEmbedLayer3DRope(10_000, [16, 56, 56], scale_rope=True)
    picture, text = module([[(1, rows, columns)] * 3], TEXT, CPU)
    one = positions_from_diffusers(defaults(name), 1, rows, columns).index[0]
    layers = [one + torch.tensor([layer, 0, 0]) for layer in (0, 1, -1)]
    words = (max(rows // 2, columns // 2, 2) + torch.arange(TEXT))[:, None].expand(-1, 3)
    where = Positions.of(torch.cat([*layers, words])[None])
    cos, sin = encoding_from_diffusers(defaults(name)).cos_sin(where)
    theirs = torch.cat([picture, text])
    torch.testing.assert_close(torch.complex(cos, sin)[0], theirs, **PEER)


def test_compressed_frames_of_any_flow_stand_in_the_middle_of_their_patches() -> None:
    name = "AnyFlowFARTransformer3DModel"
    config = defaults(name)
    module = built(name, "AnyFlowCausalRotaryPosEmbed", config)
    angles = module._forward_compressed_frame(*GRID, CPU).reshape(-1, 64)
    index = Positions.grid(*GRID).index * torch.tensor([2, 4, 4]) + torch.tensor([0, 1, 1])  # in halves
    cos, sin = encoding_from_diffusers(config).cos_sin(Positions.of(index, denominator=2))
    torch.testing.assert_close(torch.complex(cos, sin)[0], angles.to(torch.complex64), **PEER)


def test_two_frames_of_chrono_edit_are_far_apart() -> None:
    name = "ChronoEditTransformer3DModel"
    cos, _ = built(name, "ChronoEditRotaryPosEmbed", defaults(name))(torch.zeros(1, 1, 2, 8, 12))
    index = Positions.grid(2, 4, 6).index * torch.tensor([7, 1, 1])
    ours, _ = encoding_from_diffusers(defaults(name)).cos_sin(Positions.of(index))
    assert torch.equal(ours[0], cos[0, :, 0, ::2])


@pytest.mark.parametrize("name", ["HeliosTransformer3DModel", "HunyuanVideoFramepackTransformer3DModel"])
def test_averaged_cosines_of_earlier_frames_are_no_rotation(name: str) -> None:
    rotary, code = CASES[name][0], module_of(name)
    module = built(name, rotary, defaults(name))
    if name.startswith("Helios"):
        angles = module(torch.arange(4)[None], 8, 12, CPU)
        cos, sin = code.center_down_sample_3d(code.pad_for_3d_conv(angles, (4, 4, 4)), (4, 4, 4)).chunk(2, dim=1)
    else:
        tables = module(torch.arange(4), 16, 24, CPU)
        cos, sin = class_of(name)._pad_rotary_emb(None, tables, 8, 12, (4, 4, 4))
    assert (cos**2 + sin**2).min() < 0.5


def test_rows_of_a_batch_of_omnigen_have_the_places_of_the_first() -> None:
    name = "OmniGenTransformer2DModel"
    module = built(name, "OmniGenSuScaledRotaryEmbedding", {**defaults(name), **OPTIONS[name]})
    first, second = torch.arange(6), torch.tensor([0, 0, 0, 1, 2, 3])
    cos, _ = module(torch.zeros(1), torch.stack([first, second]))
    assert cos.shape == (6, 96)  # one for all rows
    assert torch.equal(cos, module(torch.zeros(1), first[None])[0])


def test_grids_that_are_cropped_end_before_the_published_ones() -> None:
    """`linspace` to ``stop * (n - 1) / n`` is NumPy's without its end where a crop begins at 0, and nowhere else."""
    from diffusers.models.embeddings import get_2d_rotary_pos_embed

    cos, sin = get_2d_rotary_pos_embed(8, ((0, 4), (32, 28)), (64, 48))  # Hunyuan-DiT, 1024 x 768
    last = math.atan2(float(sin[47, 2]), float(cos[47, 2])) * 100  # the slower pair of columns, 0.01 for each
    assert last == pytest.approx(28 * 47 / 48, rel=SIX_DIGITS, abs=0)
    assert (4 + 24 * 47 / 48) - last > DIFFERENT
    with refuses(RangeError, "scales"):
        positions_from_diffusers({**defaults("HunyuanDiT2DModel"), "patch_size": 2}, 1, 64, 48)


def test_modules_of_other_parts_are_rotary_as_they_are_named() -> None:
    index, line = torch.arange(40), Positions.arange(40)
    part = importlib.import_module
    freqs = part("diffusers.models.autoencoders.autoencoder_same").RotaryEmbedding(32)(40, CPU)
    assert apart(Rotary(32), line, of_tables(freqs.cos(), freqs.sin()), 32) <= OF_FLOAT32_ANGLES[50]
    anima = part("diffusers.models.condition_embedders.condition_embedder_anima").AnimaRotaryEmbedding(64)
    cos, sin = anima(torch.zeros(1), index[None])
    assert apart(Rotary(64), line, of_tables(cos[0], sin[0]), 64) <= OF_FLOAT32_ANGLES[50]
    for name, rotary in (("Kandinsky5Transformer3DModel", "Kandinsky5RoPE1D"),
                         ("Kandinsky6Transformer3DModel", "Kandinsky6RoPE1D")):  # fmt: skip
        matrices = getattr(module_of(name), rotary)(64)(index)[:, 0]
        cos, sin = Rotary(64, layout="interleaved").cos_sin(line)
        torch.testing.assert_close(
            torch.stack([cos[0], sin[0]]), torch.stack([matrices[..., 0, 0], matrices[..., 1, 0]]), **PEER
        )
    bria = module_of("BriaTransformer2DModel").BriaPosEmbed(10_000, [16, 56, 56])(Positions.grid(*GRID).index[0])
    ours = encoding_from_diffusers(defaults("BriaTransformer2DModel"))
    assert apart(ours, Positions.grid(*GRID), of_tables(*bria, half=False), 128) == 0
    control, own = (part(f"diffusers.models.{file}").RopeEmbedder() for file in (
        "controlnets.controlnet_z_image", "transformers.transformer_z_image"))  # fmt: skip
    assert torch.equal(control(Positions.grid(*GRID).index[0]), own(Positions.grid(*GRID).index[0]))


def test_the_decoder_of_ltx_2_has_a_ladder_for_each_axis() -> None:
    decoder = importlib.import_module("diffusers.models.autoencoders.ltx2_diffusion_decoder")
    module = decoder.LTX2VideoVaeRotaryPosEmbed3D(64)
    ours = Rotary(64, layout="interleaved", sections=[each // 2 for each in module.rope_dim_split], axial=True)
    turn: Turn = lambda q: module(q.permute(0, 2, 1, 3).reshape(1, *GRID, 2, 64)).reshape(1, -1, 2, 64).transpose(1, 2)  # noqa: E731
    assert apart(ours, Positions.grid(*GRID), turn, 64) <= ROTATED_TOKEN


def test_the_decoder_of_minimax_h3_turns_whole_circles() -> None:
    decoder = importlib.import_module("diffusers.models.autoencoders.autoencoder_kl_minimax_h3")
    module, where = (
        decoder.MiniMaxH3VideoRotaryPosEmbed(48),
        Positions.of(Positions.grid(*GRID).index - 3, denominator=8),
    )
    cos, sin = module(where.index / 8)
    frequencies = [2 * math.pi * 100.0 ** (-6 * rung / 48) for rung in range(8)]
    pairs = Pairs(dims=Pairs.of(48).dims, axes=[axis for axis in range(3) for _ in range(8)], inv_freq=frequencies * 3)
    assert apart(Rotary(48, pairs=pairs), where, of_tables(cos[0, :, 0], sin[0, :, 0]), 48) <= OF_FLOAT32_ANGLES[50]


def test_the_text_model_of_kolors_is_chat_glm() -> None:
    kolors = importlib.import_module("diffusers.pipelines.kolors.text_encoder")
    cache = kolors.RotaryEmbedding(64)(40)
    turn: Turn = lambda q: kolors.apply_rotary_pos_emb(q.permute(2, 0, 1, 3), cache[:, None]).permute(1, 2, 0, 3)  # noqa: E731
    ours = Rotary(128, layout="interleaved", rotary_dim=64)
    assert apart(ours, Positions.arange(40), turn, 128) <= OF_FLOAT32_ANGLES[50]
