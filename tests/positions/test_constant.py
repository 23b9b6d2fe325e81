"""Constants go to a device once, and enter a graph as inputs on it, whoever calls first."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor, fx
from torch._C import _functorch as functorch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.func import functionalize, grad

from locant import ALiBi, PositionEncoding, Positions
from locant.positions import ModelShape
from locant.positions.constant import Constant
from locant.positions.registry import encodings

SHAPE = ModelShape(d_model=32, num_heads=2, max_seq_len=64)
EVERY = {name: partial(kind.for_model, SHAPE) for name, kind in encodings().items()}
ELSEWHERE = torch.device("meta")  # the device of torch that any machine has beside its CPU
HOST = torch.device("cpu")


class Graphs:
    """A compiler that keeps what it is given, and runs it as it is."""

    def __init__(self) -> None:
        self.inputs: list[list[Tensor]] = []
        self.made_of: list[Tensor] = []

    def __call__(self, graph: fx.GraphModule, inputs: list[object]) -> object:
        self.inputs.append([x for x in inputs if isinstance(x, Tensor)])
        self.made_of += [x for x in (*graph.buffers(), *graph.parameters()) if isinstance(x, Tensor)]
        return graph.forward

    def compiled(self) -> object:
        return torch.compile(every_door, backend=self, fullgraph=True)

    @property
    def on_the_host(self) -> list[Tensor]:
        return [x for x in (*self.made_of, *(x for inputs in self.inputs for x in inputs)) if x.device == HOST]


def every_door(encoding: PositionEncoding, x: Tensor, q: Tensor, positions: Positions) -> tuple[Tensor | None, ...]:
    positions = encoding.read(x, positions)
    return encoding.embed(x, positions), *encoding.rotate(q, q, positions), encoding.bias(q, q, positions)


def operands() -> tuple[Tensor, Tensor, Positions]:
    return (
        torch.empty(1, 5, 32, device=ELSEWHERE),
        torch.empty(1, 2, 5, 16, device=ELSEWHERE),
        Positions.arange(5, device=ELSEWHERE),
    )


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.unchecked
@pytest.mark.parametrize(
    "name", [name if name in ("rotary", "t5", "fire") else pytest.param(name, marks=pytest.mark.slow) for name in EVERY]
)
def test_a_graph_compiled_before_any_other_call_has_its_constants_on_the_device(name: str) -> None:
    graphs, encoding = Graphs(), EVERY[name]().to(ELSEWHERE)
    run = graphs.compiled()
    with torch.no_grad():
        run(encoding, *operands())
        run(encoding, *operands())
    assert len(graphs.inputs) <= 1, "compiled again by the second call"
    assert not graphs.on_the_host


@pytest.mark.unchecked
def test_layers_with_separate_encodings_share_one_graph() -> None:
    graphs = Graphs()
    layers = [ALiBi(2) for _ in range(12)]
    run = graphs.compiled()
    with torch.no_grad():
        for layer in layers:
            run(layer, *operands())
    assert len(graphs.inputs) == 1


@pytest.mark.unchecked
def test_an_exported_graph_leaves_no_fake_tensor_behind() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoding = ALiBi(2)

        def forward(self, q: Tensor) -> Tensor:
            return self.encoding.bias(q, q, Positions.arange(5, device=q.device))

    model = Model()
    for strict in (True, False):
        torch.export.export(model, (torch.empty(1, 2, 5, 16, device=ELSEWHERE),), strict=strict)
    copies = model.encoding._initial._copies
    assert not any(isinstance(copied, FakeTensor) for copied in copies.values())


def test_a_constant_is_copied_once() -> None:
    constant = Constant(torch.arange(3))
    assert constant.on(ELSEWHERE) is constant.on(ELSEWHERE)
    assert constant.on(HOST) is constant.on(HOST)


def test_a_constant_stores_no_fake_tensor() -> None:
    constant = Constant(torch.arange(3))
    with FakeTensorMode():
        assert isinstance(constant.on(ELSEWHERE), FakeTensor)
    assert not constant._copies


def test_a_copy_from_inference_mode_works_in_training() -> None:
    constant = Constant(torch.ones(3))
    with torch.inference_mode():
        constant.on(ELSEWHERE)
    assert not constant.on(ELSEWHERE).is_inference()
    weight = torch.ones(3, device=ELSEWHERE, requires_grad=True)
    (weight * constant.on(ELSEWHERE)).sum().backward()


@pytest.mark.parametrize("transform", [grad, lambda f: grad(lambda x: grad(f)(x).sum()), functionalize])
def test_a_copy_from_a_transform_works_outside_of_it(transform: Callable[..., Callable[..., object]]) -> None:
    made: list[Constant] = []

    def scaled(x: Tensor) -> Tensor:
        made.append(Constant(torch.arange(3.0)))
        made[0].on(ELSEWHERE)
        return (x * made[0].on(HOST)).sum()

    transform(scaled)(torch.ones(3))
    assert torch.equal(pickle.loads(pickle.dumps(made[0])).on(HOST), torch.arange(3.0))  # noqa: S301
    assert not functorch.is_functorch_wrapped_tensor(made[0].on(ELSEWHERE))
    assert made[0].on(ELSEWHERE) is made[0].on(ELSEWHERE)


def test_pickling_drops_copies() -> None:
    constant = Constant(torch.arange(3))
    constant.on(ELSEWHERE)
    other = pickle.loads(pickle.dumps(constant))  # noqa: S301
    assert torch.equal(other.on(HOST), torch.arange(3))
    assert not other._copies


def test_copied_layers_share_the_constant() -> None:
    constant = Constant(torch.arange(3))
    assert copy.deepcopy([constant])[0] is constant
