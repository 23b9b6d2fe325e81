"""Entries about what numbers do on their way: factors of embeddings, biases of scores, sums in another order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from locant import ALiBi, InputEmbedding, Positions, Rotary, TokenEmbedding, attend
from locant.kernels.rotary import rotate_pairs
from tests.known_bugs.exhibit import exhibit, same_alone
from tests.known_bugs.subjects import WIDTH
from tests.positions import alone
from tests.positions.claims import alibi_row, all_differ
from tests.positions.oracles_of_biases import alibi_slopes_of_the_paper
from tests.tolerances import ONE_ROUNDING

NUMBERS = torch.arange(8192.0)


def tf32(x: Tensor) -> Tensor:
    """float32 with the 10 bits of fraction that TF32 keeps."""
    return (x.view(torch.int32) & ~0x1FFF).view(torch.float32)


def through_attention(backend: str) -> Callable[[Tensor], Tensor]:
    """8192 sequences of one token, which can only attend to itself: out comes what went in."""

    def path(x: Tensor) -> Tensor:
        v = x[:, None, None, None]
        return attend(torch.ones_like(v), v, v, positions=Positions.arange(1), backend=backend).flatten()

    return path


def through_tied_head(x: Tensor, product: Callable[[Tensor, Tensor], Tensor] | None = None) -> Tensor:
    embedding = TokenEmbedding(len(x), 1)
    with torch.no_grad():
        embedding.weight.copy_(x[:, None])
        one = torch.ones(1, 1)
        return (embedding.logits(one) if product is None else product(one, embedding.weight)).flatten()


def test_06_whole_numbers_pass_through_exactly() -> None:
    """Products of float32 numbers lose 13 bits.

    thinking-machines-lab/batch_invariant_ops#23: A kernel left its dot product at the default precision, so float32
    products became TF32 products with 11 bits. 2,049 is the first whole number that is lost.

    Check: `torch.arange(4096.0).view(-1, 1) @ torch.ones(1, 1)` must return every number unchanged.

    Test: 0 to 8191 through the tied head and both attention backends.
    """

    def check(path: Callable[[Tensor], Tensor]) -> None:
        wrong = int((path(NUMBERS) != NUMBERS).sum())
        assert not wrong, f"{wrong} of {len(NUMBERS)} whole numbers came out as others"

    def as_tf32(x: Tensor) -> Tensor:
        return through_tied_head(x, lambda a, b: F.linear(tf32(a), tf32(b)))

    ours = through_tied_head, through_attention("sdpa"), through_attention("eager")
    exhibit(check, *ours, twin=as_tf32, because="of 8192 whole numbers came out as others")


GOLDEN = {
    torch.float32: (498.83062744140625, 498.83062744140625),
    torch.bfloat16: (498.0, 500.0),
    torch.float16: (498.75, 499.0),
}
"""9 sqrt(3072) = 498.8306 in each dtype, rounded once; and with the factor rounded first, to 55.5 or 55.4375."""


def test_18_how_the_scale_is_rounded_is_chosen_and_not_found() -> None:
    """The scale of embeddings is rounded to the dtype of the weights.

    huggingface/transformers#29402 and #37109, google/gemma_pytorch#67: The factor of Gemma's embeddings was sometimes
    55.4256 and sometimes 55.5. The square root of 3,072 was rounded to the dtype that the weights had, in training or
    later.

    Check: Print the factor that multiplies the embeddings: `embed(ids) / weight[ids]`.

    Test: golden numbers for both policies in three dtypes.
    """

    def check(embed: Callable[[TokenEmbedding, Tensor], Tensor]) -> None:
        for dtype, golden in GOLDEN.items():
            for scale, expected in zip(("sqrt_d_model", "sqrt_d_model_rounded"), golden, strict=True):
                table = TokenEmbedding(2, 3072, scale=scale).to(dtype)  # type: ignore[arg-type]
                table.weight.data.fill_(9)
                out = embed(table, torch.tensor([[0, 1]]))
                assert out.dtype == dtype
                assert (out == expected).all(), f"{scale} in {dtype}: 9 became {out.max().item()}, not {expected}"

    def in_the_dtype_of_the_weights(table: TokenEmbedding, ids: Tensor) -> Tensor:
        return F.embedding(ids, table.weight) * torch.tensor(3072**0.5, dtype=table.weight.dtype)

    because = "sqrt_d_model in torch.bfloat16: 9 became 500.0, not 498.0"
    exhibit(check, lambda table, ids: table(ids), twin=in_the_dtype_of_the_weights, because=because)


SCALES: dict[str | float | None, float] = {None: 1.0, 2.5: 2.5, "sqrt_d_model": 8.0, "sqrt_d_model_rounded": 8.0}


def growth(out: Tensor, rows: Tensor) -> float:
    """The root mean square of what comes out over that of the rows of the table."""
    return float(out.detach().double().square().mean().sqrt() / rows.detach().double().square().mean().sqrt())


def test_19_the_scale_is_applied_once() -> None:
    """Embeddings are scaled twice.

    TensorAuto/OpenTau#179: Text embeddings were multiplied by the square root of the width twice, so they were some 51
    times too large. The factor had moved into the embedding layer, and the model still applied it, too.

    Check: Compare `x.norm(dim=-1)` in front of the first layer with `weight[ids].norm(dim=-1)`.

    Test: growth of rows through `TokenEmbedding` and `InputEmbedding`.
    """
    ids = torch.randint(100, (4, 50))

    def check(build: Callable[..., torch.nn.Module]) -> None:
        for scale, factor in SCALES.items():
            model = build(100, 64, scale=scale)
            token = model.token if isinstance(model, InputEmbedding) else model
            grown = growth(model(ids), token.weight[ids])
            assert grown == pytest.approx(factor, rel=ONE_ROUNDING[torch.float32], abs=0), (
                f"scale={scale}: rows grew by {grown:.4g}, not {factor:.4g}"
            )

    class AppliesItToo(InputEmbedding):
        def forward(self, ids: Tensor, positions: Any = None, segments: Any = None) -> Tensor:
            factor = SCALES[self.token.scale]
            return super().forward(ids, positions, segments) * factor

    exhibit(check, TokenEmbedding, InputEmbedding, twin=AppliesItToo, because="rows grew by 6.25, not 2.5")


def test_20_vectors_that_are_embedded_already_are_not_scaled() -> None:
    """Image embeddings are divided by a scale that is no longer applied.

    vllm-project/vllm#52667: Image embeddings were too small by the square root of the width. They were divided by the
    factor because the layer would multiply them again, and then the layer stopped multiplying.

    Check: Compare the norms of image tokens and text tokens in front of the first layer.

    Test: growth of vectors through `InputEmbedding.combine`.
    """
    ids, patches = torch.randint(100, (4, 50)), torch.randn(4, 50, 64)

    def check(build: Callable[..., InputEmbedding]) -> None:
        for scale in SCALES:
            model = build(100, 64, scale=scale)
            grown = growth(model.combine(patches), patches)
            assert grown == pytest.approx(1, rel=ONE_ROUNDING[torch.float32], abs=0), (
                f"scale={scale}: embedded vectors grew by {grown:.4g}"
            )
            assert torch.equal(model.combine(model.token(ids)), model(ids)), f"scale={scale}: the two paths differ"

    class StillMakesUpForIt(InputEmbedding):
        def combine(self, x: Tensor, positions: Any = None, segments: Any = None) -> Tensor:
            return super().combine(x / SCALES[self.token.scale], positions, segments)

    exhibit(check, InputEmbedding, twin=StillMakesUpForIt, because="embedded vectors grew by 0.4")


class InBFloat16(ALiBi):
    """Slopes and distances in the dtype of the model, as in the reference implementation of Falcon."""

    def bias(self, q: Tensor, k: Tensor, positions: Positions, k_positions: Positions | None = None) -> Tensor:
        return super().bias(q, k, positions, k_positions).bfloat16().float()


@pytest.mark.parametrize("heads", [8, 71])  # 71: Falcon 7B, no power of two
def test_21_biases_are_the_exact_ones(heads: int) -> None:
    """A port rounds ALiBi differently from its reference.

    NVIDIA/TensorRT-Model-Connect#667: Falcon-RW diverged on long prompts. Either its reference rounds ALiBi to bfloat16
    and the port does not, or the other way round, and neither stated it.

    Check: Your bias at distance 1,000 must be `-1000 * locant.ALiBi(num_heads).slopes`.

    Test: six distances for 8 and for 71 heads; there is no mode that repeats the reference's rounding, so half of the
    entry is open.
    """
    distances = [1, 2, 255, 257, 8191, 1_000_001]
    exact = [[float(-slope * distance) for distance in distances] for slope in alibi_slopes_of_the_paper(heads)]
    truth = torch.tensor(exact, dtype=torch.float64)
    keys = Positions.of([max(distances) - distance for distance in distances])

    def check(alibi: ALiBi) -> None:
        q, k = torch.zeros(1, heads, 1, 1).bfloat16(), torch.zeros(1, 1, len(distances), 1).bfloat16()
        bias = alibi.bias(q, k, Positions.after(max(distances), 1), keys)[0, :, 0]
        off = float((bias.double() / truth - 1).abs().max())
        assert off <= 2 * ONE_ROUNDING[torch.float32], f"a bias is off by {off:.2g} of its size"

    exhibit(check, ALiBi(heads), twin=InBFloat16(heads), because="a bias is off by 0.00")


def test_22_every_distance_has_a_bias_of_its_own() -> None:
    """ALiBi in bfloat16 gives many distances the same bias.

    HabanaAI/vllm-fork#503: ALiBi was inaccurate on long sequences. bfloat16 represents only few of the distances, so
    dozens of keys share one bias.

    Check: `len(bias[head, -1].unique())` must be the number of keys.

    Test: 131,072 distances, and the weights that attention makes of far ones.
    """
    ours = alibi_row(8, torch.float32), alibi_row(12, torch.bfloat16)
    exhibit(all_differ, *ours, twin=ours[0].bfloat16().float(), because="head 0 has [0-9]+ biases for 131072 distances")


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_22_attention_keeps_far_distances_apart(backend: str, autocast: bool, dtype: torch.dtype) -> None:
    """HabanaAI/vllm-fork#503: the same where it matters, in the weights of 16 keys some 1000 tokens away.

    The bias that an encoding hands over in float32 may still be rounded on its way into the softmax.
    """
    q, k = torch.zeros(1, 8, 1, WIDTH, dtype=dtype), torch.zeros(1, 8, 16, WIDTH, dtype=dtype)
    v = torch.eye(16, dtype=dtype).expand(1, 8, 16, 16)
    query, keys = Positions.after(1000, 1), Positions.arange(16)
    steps = torch.arange(16, dtype=torch.float64)
    truth = torch.stack([(steps * 2.0 ** -(head + 1)).softmax(0) for head in range(8)])

    def check(alibi: ALiBi) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            y = attend(q, k, v, encoding=alibi, positions=query, k_positions=keys, backend=backend)  # type: ignore[arg-type]
        off = float((y[0, :, 0].double() - truth).abs().max())
        assert off <= 2.0**-8, f"weights are off by {off:.2g}"

    exhibit(check, ALiBi(8), twin=InBFloat16(8), because="weights are off by 0.")


class StepByStep(Rotary):
    """The next angle from the one before, by one more rotation: every step adds its rounding."""

    def rotate(self, q, k, positions, k_positions=None, *, inplace=False):
        keys = positions if k_positions is None else k_positions
        return tuple(rotate_pairs(x, *self.steps(where), "half") for x, where in ((q, positions), (k, keys)))

    def steps(self, positions: Positions) -> tuple[Tensor, Tensor]:
        first, one = self.cos_sin(positions.slice(0, 1)), self.cos_sin(Positions.after(1, 1))
        rows = [first]
        for _ in range(positions.seq_len - 1):
            (cos, sin), (c, s) = rows[-1], one
            rows.append((cos * c - sin * s, sin * c + cos * s))
        return torch.cat([cos for cos, _ in rows], 1), torch.cat([sin for _, sin in rows], 1)


def test_23_cached_tokens_are_rotated_to_the_same_bits() -> None:
    """Logits with and without a cache differ.

    huggingface/transformers#25420 and #36536: Logits differ with and without a cache, even in float32, because sums are
    taken in another order. Rotated queries and keys must not differ.

    Check: Rotate a row at once and token by token, and compare with `torch.equal`.

    Test: rotated queries and keys in chunks and at once; logits are not promised.
    """
    dim = alone.HEAD_DIM
    ours = [Rotary(dim), Rotary(dim, angles="float32"), Rotary(dim, layout="interleaved", rotary_dim=6)]
    exhibit(same_alone("chunked"), *ours, twin=StepByStep(dim), because="[qk] is not what the row alone gets")
