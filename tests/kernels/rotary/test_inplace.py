"""In place: what shares memory is found out exactly; what cannot be overwritten is refused while it is whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import forward_ad

from locant import LocantError, ShapeError
from locant.kernels.rotary import require_writable, rotate
from tests.kernels.rotary.rotating import tables, truth
from tests.refusal import refuses
from tests.tolerances import assert_close

DIM = 6
INDEX, OF = torch.arange(5)[None] + 3, tables(DIM)


def rotated(q: Tensor, k: Tensor | None, **options: Any) -> Any:
    return rotate(q, k, INDEX, OF, "half", **options)


@contextmanager
def untouched(*tensors: Tensor) -> Iterator[None]:
    before = [x.detach().clone() for x in tensors]
    yield
    for x, old in zip(tensors, before, strict=True):
        assert torch.equal(x.detach(), old)


MEMORY = 40
SIZES = st.lists(st.tuples(st.integers(0, 4), st.sampled_from([0, 1, 1, 2, 3, 4, 5, 6, 8, 12])), max_size=4)


@st.composite
def places(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    sizes = draw(SIZES)
    reach = sum((size - 1) * stride for size, stride in sizes if size)
    offset = draw(st.integers(0, max(0, min(20, MEMORY - 1 - reach))))
    while offset + reach >= MEMORY:  # the last dimensions go until it fits
        size, stride = sizes.pop()
        reach -= max(size - 1, 0) * stride
    return [size for size, _ in sizes], [stride for _, stride in sizes], offset


@given(places(), places(), st.booleans())
def test_what_is_shared_is_what_the_lists_of_elements_share(q: Any, k: Any, respelled: bool) -> None:
    memory, numbers = torch.zeros(MEMORY), torch.arange(MEMORY)
    if respelled:  # other strides where nobody steps along them
        k = (q[0], [7 if size == 1 else stride for size, stride in zip(q[0], q[1], strict=True)], q[2])
    at_q, at_k = (numbers.as_strided(*place).flatten().tolist() for place in (q, k))
    repeats = len(set(at_q)) < len(at_q) or len(set(at_k)) < len(at_k)
    same = q[0] == k[0] and at_q == at_k
    if repeats or interlocked(q) or interlocked(k) or (not same and set(at_q) & set(at_k)):
        with pytest.raises(ShapeError):
            require_writable(memory.as_strided(*q), memory.as_strided(*k))
    else:
        assert require_writable(memory.as_strided(*q), memory.as_strided(*k)) == same or not at_q


def interlocked(place: tuple[list[int], list[int], int]) -> bool:
    """Whether a dimension's elements lie between those of another with larger steps; such a view is refused, too."""
    steps = sorted((stride, size) for size, stride in zip(*place[:2], strict=True) if size > 1 and 0 not in place[0])
    return any(
        stride <= sum(smaller * (size - 1) for smaller, size in steps[:i]) for i, (stride, _) in enumerate(steps)
    )


def test_bytes_count_not_elements() -> None:
    memory = torch.zeros(16, dtype=torch.bfloat16)
    wide, narrow = memory[:8].view(torch.float32), memory[8:]
    assert not require_writable(wide, narrow)
    assert not require_writable(narrow, wide)
    pairs = [(wide, x) for x in (memory[7:], memory[:8], memory[1:2], memory.view(torch.int16)[2:4])]
    pairs.append((memory, memory.view(torch.float16)))  # the same places, and other numbers
    for one, other in pairs:
        for pair in ((one, other), (other, one)):
            with refuses(ShapeError, "memory", "inplace=False"):
                require_writable(*pair)


def projections() -> list[tuple[str, Tensor, Callable[[Tensor], tuple[Tensor, Tensor]]]]:
    """Queries and keys in one tensor, side by side or interleaved, as models have them."""
    return [
        ("heads side by side", torch.randn(2, 5, 6 * DIM), lambda x: _heads(x, slice(0, 4), slice(4, 5))),
        ("flat", torch.randn(2, 5, 3 * 2 * DIM), lambda x: (_wide(x[..., :12]), _wide(x[..., 12:24]))),
        ("in turns", torch.randn(2, 2, 5, 3, DIM), lambda x: (x[..., 0, :], x[..., 1, :])),
        ("stacked", torch.randn(2, 5, 3, 2, DIM), lambda x: (x[:, :, 0].transpose(1, 2), x[:, :, 1].transpose(1, 2))),
        ("every other entry", torch.randn(2, 3, 5, 2 * DIM), lambda x: (x[..., 0::2], x[..., 1::2])),
        ("a cache", torch.randn(2, 3, 10, DIM), lambda x: (x[:, :2, :5], x[:, 1:, 5:])),
    ]  # fmt: skip


def _heads(x: Tensor, *parts: slice) -> tuple[Tensor, ...]:
    return tuple(x.view(2, 5, 6, DIM).transpose(1, 2)[:, part] for part in parts)


def _wide(x: Tensor) -> Tensor:
    return x.unflatten(-1, (2, DIM)).transpose(1, 2)


@pytest.mark.unchecked
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("place", range(6))
def test_queries_and_keys_of_one_tensor_are_rotated_where_they_lie(place: int, compiled: bool) -> None:
    _, whole, parts = projections()[place]
    expected = [truth(x, INDEX, "half", DIM) for x in parts(whole.clone())]
    use = lambda x: rotated(*parts(x), inplace=True)  # noqa: E731
    (torch.compile(use, backend="aot_eager") if compiled else use)(whole)
    for x, wanted in zip(parts(whole), expected, strict=True):
        assert_close(x, wanted)


GUISES: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda x: x,
    "view": lambda x: x.view(x.shape),
    "slice": lambda x: x[:, :],
    "detached": lambda x: x.detach(),
    "of NumPy": lambda x: torch.from_numpy(x.detach().numpy()),
    "other strides of one row": lambda x: x.as_strided(x.shape, (7, *x.stride()[1:])),
}


@pytest.mark.parametrize(("guise", "grad"), [*((guise, False) for guise in GUISES), ("itself", True), ("slice", True)])
def test_the_same_elements_are_rotated_once(guise: str, grad: bool) -> None:
    x = torch.randn(1, 2, 5, DIM, requires_grad=grad) * 1
    expected = rotated(x.clone(), None)[0]
    for out in rotated(x, GUISES[guise](x), inplace=True):
        assert torch.equal(out, expected)
    assert torch.equal(x, expected)


@pytest.mark.unchecked
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("guise", ["itself", "view", "slice"])
def test_the_same_elements_are_rotated_once_by_compiled_code(guise: str, grad: bool) -> None:
    leaf = torch.randn(1, 2, 5, DIM, requires_grad=grad)
    expected = rotated(leaf, None)[0]

    def inside(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = x * 1
        return x, *rotated(x, GUISES[guise](x), inplace=True)

    for x in torch.compile(inside, backend="aot_eager")(leaf):
        assert torch.equal(x, expected)
    if not grad:
        outside = torch.compile(lambda q, k: rotated(q, k, inplace=True), backend="aot_eager")
        for x in (*outside(leaf, GUISES[guise](leaf)), leaf):
            assert torch.equal(x, expected)


def shared() -> list[tuple[Tensor, Tensor]]:
    x = torch.randn(2, 4, 5, DIM)
    square = torch.randn(1, 5, 5, DIM)
    long = torch.randn(1, 2, 9, DIM)
    return [
        (x, x[:, :2]),
        (x[:, :3], x[:, 1:]),
        (x[:, :3], x[:, 3:].as_strided((2, 1, 5, DIM), x.stride(), x.stride(1) * 2)),
        (square, square.transpose(1, 2)),
        (x, x[:, 1::2]),
        (long[:, :, :5], long[:, :, 4:]),
    ]


@pytest.mark.unchecked
@pytest.mark.parametrize("which", range(6))
def test_what_only_some_share_is_refused_before_anything_is_written(which: int) -> None:
    q, k = shared()[which]
    compiled = torch.compile(lambda q, k: rotated(q, k, inplace=True), backend="aot_eager")
    for use in (lambda: rotated(q, k, inplace=True), lambda: compiled(q, k)):
        with untouched(q, k), refuses(ShapeError, "share", "inplace=False"):
            use()
    with torch.no_grad(), untouched(q, k):
        for x, own in zip(rotated(q, k), (q, k), strict=True):
            assert_close(x, truth(own, INDEX, "half", DIM))


def test_a_tensor_that_overlaps_itself_is_refused() -> None:
    memory = torch.randn(100)
    q = memory.as_strided((1, 2, 5, DIM), (8, 4, 8, 1))
    with untouched(memory), refuses(ShapeError, "repeats", "contiguous"):
        rotated(q, None, inplace=True)
    with untouched(memory), refuses(ShapeError, "repeats", "contiguous"):
        rotated(torch.randn(1, 1, 5, DIM), q, inplace=True)
    one = torch.randn(1, 1, 5, DIM)
    with untouched(one), refuses(ShapeError, "stride 0", "contiguous"):
        rotated(one.expand(1, 3, 5, DIM), one, inplace=True)
    odd = memory.as_strided((1, 1, 5, DIM), (100, 100, 13, 2))  # in no order of size, and apart all the same
    expected = rotated(odd, None)[0]
    assert torch.equal(rotated(odd, None, inplace=True)[0], expected)


def test_another_batch_is_refused() -> None:
    for q_rows, k_rows in ((1, 2), (3, 2)):
        q, k = torch.randn(q_rows, 2, 5, DIM), torch.randn(k_rows, 1, 5, DIM)
        for inplace in (False, True):
            with untouched(q, k), refuses(ShapeError, f"({q_rows}, 2, 5, 6)", f"({k_rows}, 1, 5, 6)", "same"):
                rotated(q, k, inplace=inplace)


@pytest.mark.parametrize("cut", ["chunk", "split", "unbind", "view of a chunk"])
def test_views_that_came_with_others_are_refused_while_they_are_whole(cut: str) -> None:
    """The way most models get q and k; torch would complain as well, but with q overwritten."""
    whole = torch.nn.Linear(DIM, 3 * DIM)(torch.randn(2, 2, 5, DIM))
    parts = {
        "chunk": lambda x: x.chunk(3, -1),
        "split": lambda x: x.split(DIM, -1),
        "unbind": lambda x: x.unflatten(-1, (3, DIM)).unbind(-2),
        "view of a chunk": lambda x: [part[:, :] for part in x.chunk(3, -1)],
    }[cut]
    q, k, _ = parts(whole)
    apart = whole[..., :DIM], whole[..., DIM : 2 * DIM]
    for pair in ((q, k), (apart[0], k), (q, apart[1])):
        with untouched(*pair), refuses(LocantError, "chunk", "inplace=False", "slices"):
            rotated(*pair, inplace=True)
    expected = rotated(*apart)
    with torch.no_grad():  # there is no graph to follow
        q, k, _ = parts(whole)
        for x, wanted in zip(rotated(q, k, inplace=True), expected, strict=True):
            assert torch.equal(x, wanted)


def test_views_made_without_gradients_are_refused_with_them() -> None:
    whole = torch.randn(2, 2, 5, DIM, requires_grad=True) * 1
    with torch.no_grad():
        view = whole[:, :1]
    for pair in ((view, torch.randn(2, 1, 5, DIM)), (torch.randn(2, 1, 5, DIM), view)):
        with untouched(*pair), refuses(LocantError, "without gradients", "inplace=False"):
            rotated(*pair, inplace=True)


@pytest.mark.parametrize("grad", [False, True])
def test_tensors_of_inference_mode_are_refused_outside_of_it(grad: bool) -> None:
    with torch.inference_mode():
        made = torch.randn(1, 2, 5, DIM)
    other = torch.randn(1, 2, 5, DIM)
    with torch.set_grad_enabled(grad):
        for pair in ((made, other), (other, made)):
            with untouched(*pair), refuses(LocantError, "inference mode", "inplace=False"):
                rotated(*pair, inplace=True)
        assert_close(rotated(made, other)[0], truth(made, INDEX, "half", DIM))


def test_positions_of_inference_mode_are_refused_for_gradients() -> None:
    with torch.inference_mode():
        index = torch.arange(5)[None]
    q, k = (torch.randn(1, 2, 5, DIM, requires_grad=True) * 1 for _ in range(2))
    with untouched(q, k), refuses(LocantError, "positions", "inference mode", "outside"):
        rotate(q, k, index, OF, "half", inplace=True)


@pytest.mark.parametrize("inplace", [False, True])
def test_in_place_is_the_same_where_memory_is_made_functional(inplace: bool) -> None:
    q, k = torch.randn(2, 1, 2, 5, DIM, dtype=torch.float64)
    both = torch.func.functionalize(lambda q, k: rotated(q * 1, k * 1, inplace=inplace))(q, k)
    assert all(map(torch.equal, both, rotated(q, k)))
    (alone, _) = torch.func.functionalize(lambda q: rotated(q * 1, None, inplace=inplace))(q)
    assert torch.equal(alone, both[0])


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's forward mode, about itself
@pytest.mark.parametrize("grad", [False, True])
def test_in_place_a_tangent_is_rotated_with_its_vector(grad: bool) -> None:
    q, along = torch.randn(2, 1, 2, 5, DIM, dtype=torch.float64)
    k = torch.randn(1, 2, 5, DIM, dtype=torch.float64)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q.clone().requires_grad_(grad), along.clone()) * 1
        out, still = rotated(dual, k, inplace=True)
        value, tangent = forward_ad.unpack_dual(out)
        assert_close(tangent, truth(along, INDEX, "half", DIM))
        assert_close(value, truth(q, INDEX, "half", DIM))
        assert not forward_ad.unpack_dual(still).tangent.any()


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("inplace", [False, True])
def test_many_gradients_at_once(inplace: bool, layout: str) -> None:
    """``is_grads_batched``, which `torch.autograd.functional` takes to make Jacobians faster."""
    q, k = torch.randn(2, 3, 5, DIM + 1, requires_grad=True), torch.randn(2, 1, 5, DIM + 1, requires_grad=True)
    out = rotate(q * 1, k * 1, INDEX, OF, layout, inplace=inplace)  # type: ignore[arg-type]
    cotangents = [torch.randn(4, *x.shape) for x in out]
    together = torch.autograd.grad(out, (q, k), cotangents, is_grads_batched=True, retain_graph=True)
    for i in range(4):
        alone = torch.autograd.grad(out, (q, k), [x[i] for x in cotangents], retain_graph=True)
        for many, one in zip(together, alone, strict=True):
            assert torch.equal(many[i], one)
    small = torch.randn(1, 1, 5, DIM)
    jacobian = torch.autograd.functional.jacobian(lambda x: rotated(x, None)[0], small, vectorize=True)
    assert_close(jacobian.flatten(4) @ small.flatten(), rotated(small, None)[0])
