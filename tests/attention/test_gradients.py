"""Derivatives otherwise than by ``backward``: forward mode, `torch.func`, gradients of gradients. Right, or refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jvp, vmap

from locant import ALiBi, Cope, Fire, LocantError, PositionEncoding, Positions, Shaw, T5Bias, attend
from locant.attention import choice
from locant.attention.mask import AttentionMask
from locant.kernels.distance_attention import distance_attention
from locant.kernels.transforms import is_differentiated
from tests.refusal import refuses
from tests.tolerances import assert_close

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's forward mode, about itself

HEADS, LENGTH, HEAD_DIM = 2, 5, 3

ENCODINGS: dict[str, Callable[[], PositionEncoding | None]] = {
    "none": lambda: None,
    "alibi": lambda: ALiBi(HEADS),
    "alibi, learned": lambda: ALiBi(HEADS, learned=True),
    "fire": lambda: Fire(HEADS, hidden=3),
}


@pytest.fixture(autouse=True)
def _everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that `auto` thinks of tiles."""
    monkeypatch.setattr(choice, "FAST_MATRIX_SCORES", 0)


def drawn() -> Tensor:
    return torch.randn(1, HEADS, LENGTH, HEAD_DIM, dtype=torch.float64)


class Layer(nn.Module):
    def __init__(self, encoding: PositionEncoding | None, backend: str) -> None:
        super().__init__()
        self.encoding, self.backend = encoding if encoding is None else encoding.double(), backend
        self.k, self.v = drawn(), drawn()

    def forward(self, q: Tensor, *, written_out: bool = False) -> Tensor:
        where = Positions.arange(LENGTH)
        if not written_out:
            y = attend(q, self.k, self.v, encoding=self.encoding, positions=where, backend=self.backend)
            return y.sin()
        scores = q @ self.k.mT * HEAD_DIM**-0.5
        if self.encoding is not None:
            scores = scores + self.encoding.bias(q, self.k, where)
        later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        return (scores.masked_fill(later, float("-inf")).softmax(-1) @ self.v).sin()

    def written_out(self, q: Tensor) -> Tensor:
        return self(q, written_out=True)


def in_a_dual_level(function: Callable[[Tensor], Tensor], q: Tensor, tangent: Tensor) -> Tensor | None:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(q, tangent))).tangent


WAYS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor, Tensor], Tensor | None]] = {
    "jvp": lambda f, q, t: jvp(f, (q,), (t,))[1],
    "dual level": in_a_dual_level,
    "jacfwd": lambda f, q, t: jacfwd(f)(q),
    "grad": lambda f, q, t: grad(lambda q: (f(q) * t).sum())(q),
    "grad per sample": lambda f, q, t: vmap(grad(lambda q: (f(q) * t).sum()))(torch.stack([q, t])),
    "grad of grad": lambda f, q, t: grad(lambda q: (grad(lambda q: (f(q) * t).sum())(q) * t).sum())(q),
    "hessian": lambda f, q, t: hessian(lambda q: (f(q) * t).sum())(q),
}


@pytest.mark.parametrize("backend", ["auto", "sdpa"])
@pytest.mark.parametrize("encoding_name", ENCODINGS)
@pytest.mark.parametrize("way", WAYS)
def test_the_derivative_of_the_formula(way: str, encoding_name: str, backend: str) -> None:
    layer = Layer(ENCODINGS[encoding_name](), backend)
    q, tangent = drawn(), drawn()
    found, truth = WAYS[way](layer, q, tangent), WAYS[way](layer.written_out, q, tangent)
    assert found is not None
    assert bool(truth.any())
    assert_close(found, truth)


@pytest.mark.parametrize("encoding_name", ENCODINGS)
@pytest.mark.parametrize("way", WAYS)
def test_tiles_refuse_rather_than_answer_with_zeros(way: str, encoding_name: str) -> None:
    layer = Layer(ENCODINGS[encoding_name](), "tiled")
    with refuses(LocantError, "backend='tiled'", "torch.func", "eager"):
        WAYS[way](layer, drawn(), drawn())


@pytest.mark.parametrize("encoding_name", ["alibi, learned", "fire"])
@pytest.mark.parametrize("backend", ["auto", "sdpa"])
def test_the_derivative_at_parameters(backend: str, encoding_name: str) -> None:
    layer, q = Layer(ENCODINGS[encoding_name](), backend), drawn()
    parameters = {name: each.detach() for name, each in layer.named_parameters()}
    tangents = {name: torch.randn_like(each) for name, each in parameters.items()}

    def through(parameters: dict[str, Tensor], **options: bool) -> Tensor:
        return functional_call(layer, parameters, (q,), options).sum()

    found = jvp(through, (parameters,), (tangents,))[1]
    truth = jvp(lambda each: through(each, written_out=True), (parameters,), (tangents,))[1]
    assert bool(truth != 0)
    assert_close(found, truth)
    layer.backend = "tiled"
    for way in (lambda: jvp(through, (parameters,), (tangents,)), lambda: grad(through)(parameters)):
        with refuses(LocantError, "backend='tiled'", "eager"):
            way()


@pytest.mark.parametrize("which", range(4))
def test_the_operation_itself_refuses(which: int) -> None:
    """Whatever it is that has the tangent: a bias may be made of what is no parameter."""
    inputs = [drawn(), drawn(), drawn(), torch.randn(HEADS, 2 * LENGTH - 1, dtype=torch.float64)]
    with forward_ad.dual_level():
        inputs[which] = forward_ad.make_dual(inputs[which], torch.ones_like(inputs[which]))
        with refuses(LocantError, "forward mode", "eager"):
            distance_attention(*inputs, 0, 8, 1.0)


@pytest.mark.parametrize("encoding_name", ["none", "alibi", "alibi, learned"])
def test_a_gradient_of_a_gradient_through_a_table_is_refused(encoding_name: str) -> None:
    q, layer = drawn().requires_grad_(), Layer(ENCODINGS[encoding_name](), "tiled")
    y = (layer(q) * drawn()).sum()
    first = torch.autograd.grad(y, q, create_graph=True)[0]  # asked for, not used: fine
    assert_close(first, torch.autograd.grad(y, q, retain_graph=True)[0])
    with refuses(LocantError, "gradient of a gradient", "tiled", "eager"):
        torch.autograd.grad(first.sum(), q)


def test_a_gradient_of_a_gradient_in_tiles_is_that_of_the_formula() -> None:
    q, layer, cotangent = drawn().requires_grad_(), Layer(Fire(HEADS, hidden=3), "tiled"), drawn()

    def second(function: Callable[[Tensor], Tensor]) -> Tensor:
        first = torch.autograd.grad((function(q) * cotangent).sum(), q, create_graph=True)[0]
        return torch.autograd.grad((first * cotangent).sum(), q)[0]

    assert_close(second(layer), second(layer.written_out))


def test_vmap_alone_is_no_derivative() -> None:
    layer, q = Layer(ALiBi(HEADS), "auto"), torch.stack([drawn(), drawn()])
    asked = []
    vmap(lambda x: (asked.append(is_differentiated(x)), x)[1])(q)
    assert asked == [False]
    assert_close(vmap(layer)(q), torch.stack([layer.written_out(each) for each in q]))


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch runs its fused kernels sample by sample
@pytest.mark.parametrize("backend", ["auto", "sdpa", "tiled", "eager"])
def test_vmap_over_where_the_tokens_stand(backend: str) -> None:
    """Each sample's rows have an order and documents of their own, padding among them."""
    q, index = drawn(), torch.stack([torch.randperm(LENGTH) for _ in range(3)])
    document = torch.tensor([[0, 0, 0, 0, 0], [-1, 0, 0, 0, 0], [0, 0, 1, 1, -1]])

    def run(index: Tensor, document: Tensor) -> Tensor:
        return attend(q, q, q, encoding=ALiBi(HEADS), positions=Positions.of(index, document), backend=backend)

    expected = torch.stack([run(*each) for each in zip(index, document, strict=True)])
    assert_close(vmap(run)(index, document), expected)


OF_VMAP: dict[str, Callable[[], PositionEncoding]] = {
    "alibi, learned": lambda: ALiBi(HEADS, learned=True),
    "t5": lambda: T5Bias(HEADS),
    "cope": lambda: Cope(HEAD_DIM, 4),
    "shaw": lambda: Shaw(HEAD_DIM),
}


def mapped(encoding: PositionEncoding, backend: str) -> Callable[[Tensor, Tensor], Tensor]:
    def run(q: Tensor, index: Tensor) -> Tensor:
        return attend(q, q, q, encoding=encoding, positions=Positions.of(index), backend=backend)

    return vmap(run)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch runs its fused kernels sample by sample
@pytest.mark.parametrize("backend", ["auto", "sdpa", "tiled", "eager"])
@pytest.mark.parametrize("encoding_name", OF_VMAP)
def test_vmap_keeps_the_gradient_of_a_bias_that_differs_by_sample(encoding_name: str, backend: str) -> None:
    encoding = OF_VMAP[encoding_name]().double()
    for parameter in encoding.parameters():
        parameter.data.copy_(torch.randn_like(parameter))
    q, index = torch.stack([drawn() for _ in range(3)]).requires_grad_(), torch.randint(0, 50, (3, LENGTH))
    leaves, cotangent = [q, *encoding.parameters()], torch.randn_like(q)
    y = mapped(encoding, backend)(q, index)
    rows = zip(q, index, strict=True)
    expected = torch.stack(
        [attend(x, x, x, encoding=encoding, positions=Positions.of(where), backend="eager") for x, where in rows]
    )
    assert_close(y, expected)
    truths = torch.autograd.grad(expected, leaves, cotangent)
    for found, truth in zip(torch.autograd.grad(y, leaves, cotangent), truths, strict=True):
        assert bool(truth.any())
        assert_close(found, truth)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("backend", ["auto", "sdpa", "tiled", "eager"])
def test_vmap_does_not_hide_that_a_gradient_is_wanted_behind_a_cache_of_ones_own(backend: str) -> None:
    k = drawn().repeat(1, 1, 4, 1)[None]
    k[..., :3, :] = float("nan")
    k.requires_grad_()
    places = Positions.from_mask(torch.tensor([[0] * 3 + [1] * 17]))

    def run(k: Tensor) -> Tensor:
        return attend(k[:, :, -1:], k, k, positions=places.slice(19, 20), k_positions=places, backend=backend)

    assert bool(torch.autograd.grad(vmap(run)(k).sum(), k)[0].isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("encoding_name", ["none", "alibi", "alibi, learned"])
@pytest.mark.parametrize("arrangement", [Positions.arange(400), Positions.packed([200, 180], length=400)], ids=str)
def test_autocast_does_not_reach_into_a_backward_pass_by_table(
    arrangement: Positions, encoding_name: str, dtype: torch.dtype
) -> None:
    encoding, inputs = (
        ENCODINGS[encoding_name](),
        [torch.randn(1, HEADS, arrangement.seq_len, 8).to(dtype) for _ in range(3)],
    )
    assert arrangement.start is not None or AttentionMask(arrangement).packed_documents() is not None
    leaves = [*(each.requires_grad_() for each in inputs), *([] if encoding is None else encoding.parameters())]
    y = attend(*inputs, encoding=encoding, positions=arrangement, backend="tiled")
    plain = torch.autograd.grad(y, leaves, y.detach(), retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        within = torch.autograd.grad(y, leaves, y.detach())
    assert all(torch.equal(a, b) for a, b in zip(plain, within, strict=True))


REFUSED = r"got backend='tiled', which has no derivative in forward mode or inside torch\.func\.grad.*eager"


@pytest.mark.unchecked
@pytest.mark.parametrize(("way", "words"), [("jvp", r"torch\.func"), ("grad", REFUSED)])
@pytest.mark.parametrize("backend", ["auto", "sdpa", "tiled"])
def test_compiled_a_transform_is_right_or_refused(backend: str, way: str, words: str) -> None:
    layer, q, tangent = Layer(ALiBi(HEADS), backend), drawn(), drawn()
    compiled = torch.compile(lambda q: WAYS[way](layer, q, tangent), backend="aot_eager")
    if backend != "tiled":
        assert_close(compiled(q), WAYS[way](layer.written_out, q, tangent))
        return
    with pytest.raises(Exception, match=words):  # whatever torch's tracer makes of it
        compiled(q)


@pytest.mark.unchecked
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize(
    ("encoding_name", "backend"), [("t5", "auto"), pytest.param("cope", "sdpa", marks=pytest.mark.slow)]
)
def test_compiled_vmap_keeps_the_gradient_of_a_bias(encoding_name: str, backend: str) -> None:
    encoding = OF_VMAP[encoding_name]().double()
    q, index = torch.stack([drawn() for _ in range(3)]), torch.randint(0, 50, (3, LENGTH))
    leaves, cotangent = list(encoding.parameters()), torch.randn_like(q)
    y = torch.compile(mapped(encoding, backend), backend="aot_eager")(q, index)
    truths = torch.autograd.grad(mapped(encoding, "eager")(q, index), leaves, cotangent)
    for found, truth in zip(torch.autograd.grad(y, leaves, cotangent), truths, strict=True):
        assert_close(found, truth)


@pytest.mark.unchecked
@pytest.mark.parametrize("backend", ["auto", "sdpa", "tiled"])
def test_compiled_it_loses_no_tangent_of_those_who_call_it(backend: str) -> None:
    """Compiled for plain tensors before, and used for such again: neither graph is taken for the other."""
    layer, q, tangent = Layer(ALiBi(HEADS), backend), drawn(), drawn()
    compiled = torch.compile(layer, backend="aot_eager")
    for _ in range(2):
        assert_close(compiled(q), layer.written_out(q))
        if backend != "tiled":
            found, truth = (in_a_dual_level(function, q, tangent) for function in (compiled, layer.written_out))
            assert_close(found, truth)
            continue
        with refuses(LocantError, "backend='tiled'", "forward mode", "eager"):
            in_a_dual_level(compiled, q, tangent)
