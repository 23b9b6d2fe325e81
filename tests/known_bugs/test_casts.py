"""Entries whose table lost its precision because somebody cast something."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from locant import InputEmbedding, PositionEncoding, Positions, Rotary, Sinusoidal
from locant.kernels.rotary import rotate_pairs
from tests.known_bugs.exhibit import exhibit
from tests.known_bugs.oracle import frequencies, rounded_frequencies, true_cos_sin
from tests.known_bugs.subjects import CONSTANT, EACH_CODE, WIDTH, Build, differences, queries, use
from tests.known_bugs.twins import BufferRotary, MultipliedRotary
from tests.tolerances import ROTATED_TOKEN

FAR = Positions.of([0, 1, 127, 128, 1857, 2049, 4095, 65_535, 65_536, 1_000_001, 2**24 + 1, 2**31 - 1])
"""Positions at which a table shows what it is made of."""

ONCE = [build for name, build in CONSTANT.items() if name in EACH_CODE]
"""Constants as often as their code differs; those of every scaling are asked about one cast and one default dtype."""

Perturb = Callable[[nn.Module], object]


def far(encoding: PositionEncoding) -> dict[str, Tensor]:
    return use(encoding, queries(encoding, FAR.seq_len), FAR)


def stands(perturb: Perturb) -> Callable[[Build], None]:
    """A check that nothing moves when a module, alone or inside a model, is perturbed in this way."""

    def check(build: Build) -> None:
        expected = far(build())
        alone, inside = build(), build()
        perturb(alone)
        perturb(nn.Sequential(nn.Linear(2, 2), inside))
        for encoding in (alone, inside):
            moved = differences(expected, far(encoding))
            assert not moved, f"{encoding}: the cast moved {moved}"

    return check


def test_01_tables_survive_half() -> None:
    """Cosines and sines are computed in float16.

    EleutherAI/gpt-neox#1003: The table of cosines was computed in the dtype of the model, and a product of position and
    frequency has only 11 bits in float16. The cosine at position 1,857 was off by 0.78.

    Check: `locant.probe(rotate, head_dim=64)` reports scores that depend on more than distances.

    Test: cosines after `half()` against 50 digits; constants of every code, alone and inside a model.
    """
    index = [*range(0, 4096, 37), 1857]

    def check(rotary: Rotary | BufferRotary) -> None:
        in_float32 = isinstance(rotary, Rotary) and rotary.angles.mode == "float32"
        true = true_cos_sin(index, (rounded_frequencies if in_float32 else frequencies)(WIDTH, 10_000.0))
        pairs = zip(rotary.half().cos_sin(Positions.of(index)), true, strict=True)
        off = max(float((ours[0] - truth).abs().max()) for ours, truth in pairs)
        assert off <= 2.0**-24 + in_float32 * 2.0**-24, f"{rotary}: after half() a cosine is off by {off:.2g}"

    ours = [Rotary(WIDTH, angles=angles) for angles in ("exact", "float32")]
    exhibit(check, *ours, twin=BufferRotary(), because="after half.. a cosine is off by [01]")
    exhibit(stands(lambda module: module.half()), *ONCE, twin=BufferRotary, because="the cast moved")


def test_02_autocast_does_not_reach_the_angles() -> None:
    """Autocast computes the angles in bfloat16.

    huggingface/transformers#29285: The loss of Gemma and Llama diverged under bfloat16 autocast. The angles were a
    matrix product of frequencies and positions, and autocast casts matrix products.

    Check: Call your rotary module inside and outside of `torch.autocast("cpu", torch.bfloat16)`, and compare the
    cosines.

    Test: constants of every code under bfloat16 autocast.
    """

    def check(build: Build) -> None:
        encoding = build()
        expected = far(encoding)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            moved = differences(expected, far(encoding))
        assert not moved, f"{encoding}: autocast moved {moved}"

    exhibit(check, *ONCE, twin=MultipliedRotary, because="autocast moved")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_03_the_default_dtype_does_not_reach_the_table(dtype: torch.dtype) -> None:
    """The default dtype gets into the table.

    huggingface/transformers#25681: The cache of cosines was wrong in half precision. Models are often built while half
    precision is the default dtype, and the frequencies were made in the default dtype.

    Check: After `torch.set_default_dtype(torch.bfloat16)`, build the rotary module and print the dtype of its
    `inv_freq`.

    Test: built while bfloat16, float16 or float64 is the default dtype.
    """

    def built_under(build: Build) -> PositionEncoding:
        torch.set_default_dtype(dtype)
        try:
            return build()
        finally:
            torch.set_default_dtype(torch.float32)

    def check(build: Build) -> None:
        encoding = built_under(build)
        moved = differences(far(build()), far(encoding.float()))
        assert not moved, f"{encoding}: a default dtype of {dtype} moved {moved}"

    ours = CONSTANT.values() if dtype == torch.bfloat16 else ONCE
    exhibit(check, *ours, twin=BufferRotary, because="a default dtype of .* moved")


def test_04_a_cast_before_the_sequence_outgrows_a_cache() -> None:
    """A cast module builds its longer cache from rounded frequencies.

    huggingface/transformers#29496: Mistral was wrong, but only from the first input of maximal length on. The first
    cache was made before the model was cast, and the longer one was made afterwards, from bfloat16 frequencies.

    Check: Compare the cosines of position 100 before and after a call with a longer input: they must be equal.

    Test: cast first, then a longer sequence.
    """

    class Growing(BufferRotary):
        def __init__(self) -> None:
            super().__init__()
            self.cached = super().cos_sin(Positions.arange(16))

        def cos_sin(self, positions: Positions) -> tuple[Tensor, Tensor]:
            if positions.seq_len > self.cached[0].shape[1]:
                self.cached = super().cos_sin(Positions.arange(positions.seq_len))
            cos, sin = self.cached
            return cos[:, : positions.seq_len], sin[:, : positions.seq_len]

    def check(build: Build) -> None:
        encoding, fresh = build().bfloat16(), build()
        for seq_len in (8, 200):  # inside the cache, and past it
            positions, x = Positions.arange(seq_len), queries(fresh, seq_len)
            moved = differences(use(fresh, x, positions), use(encoding, x, positions))
            assert not moved, f"{encoding}: at length {seq_len} the cast moved {moved}"

    exhibit(check, *ONCE, twin=Growing, because="at length 200 the cast moved")


CASTS: dict[str, Perturb] = {
    "bfloat16()": lambda module: module.bfloat16(),
    "half()": lambda module: module.half(),
    "double()": lambda module: module.double(),
    "to(bfloat16)": lambda module: module.to(torch.bfloat16),
    "type(half)": lambda module: module.type(torch.float16),
    "to(like=)": lambda module: module.to(torch.zeros(1, dtype=torch.bfloat16)),
}


@pytest.mark.parametrize("cast", CASTS)
def test_08_a_blanket_cast_leaves_constants_alone(cast: str) -> None:
    """`model.bfloat16()` rounds the frequencies.

    deepspeedai/DeepSpeed#8066: Logits at long contexts drifted away from those of FSDP2. The engine called
    `module.bfloat16()` on a whole model, which casts the buffers together with the parameters.

    Check: `locant probe FOLDER` notes whether a cast of the rotary module casts its table.

    Test: six ways to cast a whole model, one of them with the constants of every scaling.
    """
    ours = CONSTANT.values() if cast == "bfloat16()" else ONCE
    exhibit(stands(CASTS[cast]), *ours, twin=BufferRotary, because="the cast moved")


def test_09_a_cast_and_back_leaves_the_same_bits() -> None:
    """A cast to half precision and back rounds the buffers.

    NVIDIA-NeMo/Automodel#2549: A model that was saved and loaded elsewhere had moved by a KL divergence of 1.1e-2. A
    cast of the whole model rounded float32 buffers, and `float()` afterwards only widened the rounded numbers.

    Check: Copy `dict(model.named_buffers())`, run `model.bfloat16().float()`, and compare with `torch.equal`.

    Test: to bfloat16, to float16 and back.
    """

    def there_and_back(module: nn.Module) -> None:
        module.bfloat16().half().float()

    exhibit(stands(there_and_back), *ONCE, twin=BufferRotary, because="the cast moved")


def test_10_there_is_no_buffer_to_cast() -> None:
    """Half-precision wrappers cast the frequencies.

    NVIDIA/Megatron-LM#744, InternLM/InternLM#239: Wrappers for half precision walk over all parameters and buffers and
    replace what they find. Rotary frequencies are among the buffers.

    Check: Print `b.dtype` for every `n, b in model.named_buffers()` inside the wrapper.

    Test: a loop over buffers finds none.
    """

    def casts_what_it_finds(module: nn.Module) -> None:
        for buffer in module.buffers():
            buffer.data = buffer.data.half()

    def check(build: Build) -> None:
        stands(casts_what_it_finds)(build)
        found = [name for name, _ in build().named_buffers()]
        assert not found, f"{build()}: buffers {found}"

    exhibit(check, *ONCE, twin=BufferRotary, because="the cast moved")
    assert not [name for name, build in CONSTANT.items() if [*build().buffers()]]
    model = InputEmbedding(8, WIDTH, encoding=Sinusoidal(WIDTH), num_segments=2, norm="layer_norm")
    assert not list(model.buffers())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_12_half_precision_tokens_are_rotated_by_float32_tables(layout: str, dtype: torch.dtype) -> None:
    """A kernel takes cosines and sines in the dtype of the tokens.

    Dao-AILab/flash-attention#823: Results in bfloat16 were off by up to 24%. The kernel asked for cosines and sines in
    the dtype of the tokens, so both were rounded before they were used.

    Check: `cos.dtype` at the call of your kernel must be `torch.float32`.

    Test: bfloat16 and float16 tokens, one rounding away from float64.
    """
    positions = Positions.of([*range(64), 4095, 65_537, 131_071])
    x = torch.randn(2, 3, positions.seq_len, WIDTH).to(dtype)
    true_cos, true_sin = (
        table[None] for table in true_cos_sin(positions.index[0].tolist(), frequencies(WIDTH, 10_000.0))
    )
    truth = _rotated(x.double(), true_cos, true_sin, layout)

    def check(rotate: Callable[[Tensor], Tensor]) -> None:
        off = (rotate(x).double() - truth).abs()
        one_rounding = torch.finfo(dtype).eps / 2 * truth.abs() + ROTATED_TOKEN
        worst = float((off / one_rounding).max())
        assert worst <= 1, f"off by {worst:.3g} times what one rounding to {dtype} costs"

    rotary = Rotary(WIDTH, layout=layout)  # type: ignore[arg-type]
    tables = rotary.cos_sin(positions)
    exhibit(
        check,
        lambda x: rotary.rotate(x, x, positions)[0],
        lambda x: rotate_pairs(x, *tables, layout),  # type: ignore[arg-type]
        twin=lambda x: _rotated(x, *(table.to(x.dtype) for table in tables), layout),
        because="times what one rounding",
    )


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """The paper's rotation, pair by pair, in whatever dtype comes in."""
    pairs = x.shape[-1] // 2
    out = torch.empty_like(x)
    for i in range(pairs):
        first, second = (i, i + pairs) if layout == "half" else (2 * i, 2 * i + 1)
        a, b, c, s = x[..., first], x[..., second], cos[:, None, :, i], sin[:, None, :, i]
        out[..., first], out[..., second] = a * c - b * s, a * s + b * c
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_13_frequencies_are_not_cast_before_the_product(dtype: torch.dtype) -> None:
    """Frequencies are cast before they are multiplied by positions.

    huggingface/candle#3520, sgl-project/sglang-jax#1473: At position 4,095, 72 of 128 values were off, by up to 0.83.
    The frequencies followed the model into half precision, and the position multiplies their error.

    Check: `locant probe FOLDER` notes how far angles are off after a cast of the rotary module.

    Test: position 4095 of a model in half precision.
    """
    head_dim, position = 128, 4095
    truth = torch.cat(true_cos_sin([position], frequencies(head_dim, 10_000.0)), dim=1)[0]
    unit = torch.cat([torch.ones(64), torch.zeros(64)]).to(dtype)[None, None, None]

    def check(rotary: PositionEncoding) -> None:
        rotated, _ = rotary.to(dtype).rotate(unit, unit, Positions.after(position, 1))
        wrong = int(((rotated[0, 0, 0].double() - truth).abs() > torch.finfo(dtype).eps).sum())
        assert not wrong, f"{rotary}: {wrong} of 128 values off at position {position}"

    ours = [Rotary(head_dim, angles=angles) for angles in ("exact", "float32")]
    exhibit(check, *ours, twin=BufferRotary(head_dim), because="of 128 values off")
