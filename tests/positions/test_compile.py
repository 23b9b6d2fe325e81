"""Under `torch.compile`: one graph, few compilations, and the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from locant import InputEmbedding, PositionEncoding, Positions, Rotary, attend
from tests.known_bugs.subjects import EVERY, differences, queries, use
from tests.positions.all_methods import D_MODEL, HEAD_DIM, HEADS, LENGTHS, PLACES, AllMethods, require_same, tokens
from tests.positions.alone import encodings_of
from tests.tolerances import ANGLE

ENCODINGS = encodings_of(HEADS, HEAD_DIM, D_MODEL, rows=256)

pytestmark = pytest.mark.unchecked


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


USED = [(name, "arange") for name in ENCODINGS if name not in ("nope", "rotary interleaved", "t5")]
USED += [("rotary", place) for place in PLACES if place not in ("arange", "packed")] + [("t5", "padded")]


@pytest.mark.parametrize(("name", "place"), USED)
def test_all_lengths_take_two_compilations_and_no_graph_break(name: str, place: str) -> None:
    """One for the first length, one for all lengths."""
    counter, subject = CompileCounter(), AllMethods(ENCODINGS[name]())
    compiled = torch.compile(subject, fullgraph=True, backend=counter)
    with torch.no_grad():
        for n in LENGTHS:
            x, q, k = tokens(n)
            require_same(compiled(x, q, k, PLACES[place](n)), subject(x, q, k, PLACES[place](n)))
    assert 1 <= counter.frame_count <= 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's compiler, about itself
@pytest.mark.parametrize("name", ["rotary", "rotary interleaved", "sinusoidal"])
def test_the_compiled_code_gives_the_same_bits(name: str) -> None:
    """Through the real compiler, which fuses: cosines, sines, rotated tokens in float32 and bfloat16."""
    encoding = ENCODINGS[name]()
    x, q, _ = tokens(FAR.seq_len)
    inputs = x, x.bfloat16(), q, q.bfloat16(), FAR
    require_same(torch.compile(_use(encoding), fullgraph=True)(*inputs), _use(encoding)(*inputs))


FAR = Positions.of([0, 1, 127, 2049, 65_535, 1_000_001, 2**24 + 1, 2**31 - 1])


def _use(encoding: PositionEncoding) -> Callable[..., tuple[Tensor, ...]]:
    def use(x: Tensor, x_low: Tensor, q: Tensor, q_low: Tensor, positions: Positions) -> tuple[Tensor, ...]:
        if isinstance(encoding, Rotary):
            rotated = *encoding.rotate(q, q, positions), *encoding.rotate(q_low, q_low, positions)
            return *encoding.cos_sin(positions), *rotated
        return encoding.vectors(positions), encoding.embed(x, positions), encoding.embed(x_low, positions)

    return use


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's compiler, about itself
@pytest.mark.slow
def test_float32_angles_compiled_differ_in_the_last_bit_only() -> None:
    """Here the compiler's cosine is asked, not a table: of the same rounded angle, which is what the mode promises."""
    rotary = Rotary(HEAD_DIM, angles="float32")
    for ours, expected in zip(torch.compile(rotary.cos_sin, fullgraph=True)(FAR), rotary.cos_sin(FAR), strict=True):
        assert float((ours - expected).abs().max()) <= 2 * ANGLE


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's compiler, about itself
@pytest.mark.slow
@pytest.mark.parametrize("name", ["learned", "rotary partial", "alibi", "t5 both ways"])
def test_encodings_compiled_give_the_same_bits_at_padded_rows_of_any_length(name: str) -> None:
    subject = AllMethods(ENCODINGS[name]())
    compiled = torch.compile(subject, fullgraph=True)
    with torch.no_grad():
        for n in (5, 6, 31):
            x, q, k = tokens(n)
            positions = Positions.from_mask(torch.arange(n)[None] >= torch.tensor([[0], [n // 3]]))
            require_same(compiled(x, q, k, positions), subject(x, q, k, positions))


@pytest.mark.parametrize("name", ["learned", "rotary", "t5"])
def test_gradients_of_compiled_code_are_the_same(name: str) -> None:
    subject = AllMethods(ENCODINGS[name]())
    compiled = torch.compile(subject, fullgraph=True, backend="aot_eager")
    x, q, k = (t.requires_grad_() for t in tokens(5))
    leaves = [x, q, k, *subject.parameters()]
    results: list[tuple[Tensor | None, ...]] = []
    generator = torch.Generator().manual_seed(1)
    outputs = [o for o in subject(x, q, k) if o is not None]
    cotangents = [torch.randn(o.shape, generator=generator) for o in outputs]
    for run in (subject, compiled):
        outputs = [o for o in run(x, q, k) if o is not None]
        pairs = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if o.requires_grad]
        results.append(torch.autograd.grad([o for o, _ in pairs], leaves, [c for _, c in pairs]))
    require_same(*results)


class Model(nn.Module):
    """From ids to attention, as a user writes it."""

    def __init__(self, encoding: PositionEncoding) -> None:
        super().__init__()
        self.embedding = InputEmbedding(13, HEADS * HEAD_DIM, scale="sqrt_d_model")
        self.encoding = encoding

    def forward(self, ids: Tensor, positions: Positions) -> Tensor:
        x = self.embedding(ids, positions)
        q = x.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2)
        rotated, keys = self.encoding.rotate(q, q, positions)
        return attend(rotated, keys, q, encoding=self.encoding, positions=positions)


@pytest.mark.parametrize(
    ("name", "place"), [("rotary", "packed"), ("alibi", "padded"), pytest.param("t5", "packed", marks=pytest.mark.slow)]
)
def test_a_model_from_ids_to_attention_is_one_graph(name: str, place: str) -> None:
    counter, model = CompileCounter(), Model(ENCODINGS[name]())
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    with torch.no_grad():
        for n in (5, 9, 14, 15, 33):
            ids, positions = torch.randint(13, (2, n)), PLACES[place](n)
            assert torch.equal(compiled(ids, positions), model(ids, positions))
    assert 1 <= counter.frame_count <= 2


@pytest.mark.parametrize("name", ["rotary", pytest.param("alibi", marks=pytest.mark.slow)])
def test_decoding_token_by_token_takes_three_compilations(name: str) -> None:
    """One query behind a cache that grows: one for the first length, one for any other, and below 16 keys, where it is
    not taken for decoding but for a small matrix, another. From 16 on, or below, there are two.
    """
    counter, encoding = CompileCounter(), ENCODINGS[name]()

    def step(q: Tensor, k: Tensor, positions: Positions, k_positions: Positions) -> Tensor:
        rotated, keys = encoding.rotate(q, k, positions, k_positions)
        return attend(rotated, keys, k, encoding=encoding, positions=positions, k_positions=k_positions)

    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for cached in LENGTHS:
        q, k = torch.randn(2, HEADS, 1, HEAD_DIM), torch.randn(2, 2, cached + 1, HEAD_DIM)
        where = Positions.after(cached, 1), Positions.arange(cached + 1)
        assert torch.equal(compiled(q, k, *where), step(q, k, *where))
    assert 1 <= counter.frame_count <= 3


@pytest.mark.gpu
@pytest.mark.parametrize("name", EVERY)
def test_every_encoding_can_be_captured(name: str) -> None:
    """Captured once and replayed with other tokens. A failed capture raises at once."""
    encoding = EVERY[name]().cuda()
    x = queries(encoding, 6, device="cuda")
    other = torch.randn_like(x)
    grid = Positions.grid(1, 2, 3) if getattr(encoding, "sections", None) else Positions.arange(6)
    for positions in (Positions.arange(6), Positions.after(2000, 6), Positions.packed([2, 4]), grid):
        where = positions.to("cuda")
        use(encoding, x, where)  # constants reach the device before the capture
        torch.cuda.synchronize()
        graph, tokens = torch.cuda.CUDAGraph(), x.clone()
        with torch.cuda.graph(graph):
            out = use(encoding, tokens, where)
        tokens.copy_(other)
        graph.replay()
        assert not differences(use(encoding, other, where), out), f"{encoding} replayed something else"
