"""What `attend` cannot take ends in an error of ours that names it and says what to do; what it can take is taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from locant import ALiBi, LocantError, Positions, RangeError, ShapeError, attend
from locant.attention.backends import flex
from locant.spelling import dtype_name
from tests.refusal import refuses
from tests.tolerances import assert_close

X, WHERE = torch.randn(1, 2, 5, 16), Positions.arange(5)


@pytest.mark.parametrize("backend", ["auto", "sdpa", "tiled", "eager", "flex"])
def test_a_head_without_dimensions(backend: str) -> None:
    x = torch.zeros(1, 2, 5, 0)
    with refuses(ShapeError, "(1, 2, 5, 0)", "head_dim"):
        attend(x, x, X, positions=WHERE, backend=backend)


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("odd", [X.tolist(), X.numpy(), None, 1.0], ids=["list", "array", "None", "number"])
def test_what_is_no_tensor(odd: Any, name: str) -> None:
    with refuses(ShapeError, f"got {name} of type {type(odd).__name__}"):
        attend(**{"q": X, "k": X, "v": X, name: odd}, positions=WHERE)


UNUSUAL: dict[str, Callable[[], Tensor]] = {
    "sparse_coo": lambda: X.to_sparse(),
    "sparse_csr": lambda: X[0].to_sparse_csr(),
    "mkldnn": lambda: X.to_mkldnn(),
    "nested": lambda: torch.nested.nested_tensor(list(X)),
    "nested, jagged": lambda: torch.nested.nested_tensor(list(X), layout=torch.jagged),
    "masked": lambda: torch.masked.masked_tensor(X, X > 0),
}


@pytest.mark.filterwarnings("ignore:.*:UserWarning")  # torch's, of what it calls a prototype or beta
@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("kind", UNUSUAL)
def test_what_is_no_dense_tensor(kind: str, name: str) -> None:
    with refuses(ShapeError, f"got {name} as a {kind.split(',')[0]} tensor", "dense"):
        attend(**{"q": X, "k": X, "v": X, name: UNUSUAL[kind]()}, positions=WHERE)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int64, torch.bool, torch.complex64])
def test_what_is_not_computed_in(dtype: torch.dtype) -> None:
    x = X.to(dtype)
    with refuses(ShapeError, f"of {dtype_name(dtype)}, ", "one dtype", "bfloat16"):
        attend(x, x, x, positions=WHERE)


@pytest.mark.parametrize(
    ("encoding", "words"),
    [
        ("alibi", ("'alibi'", "locant.encoding")),
        (ALiBi, ("the class ALiBi", "ALiBi(num_heads)")),
        (torch.nn.Linear, ("the class Linear",)),
        (torch.compile(ALiBi(2), backend="eager"), ("OptimizedModule", "itself")),
        (torch.nn.DataParallel(ALiBi(2)), ("DataParallel", "itself")),
        (torch.zeros(2), ("tensor",)),
        (len, ("len",)),
    ],
    ids=["name", "class", "another class", "compiled", "wrapped", "tensor", "function"],
)
def test_what_is_no_encoding(encoding: Any, words: tuple[str, ...]) -> None:
    with refuses(RangeError, "for encoding", "PositionEncoding", *words):
        attend(X, X, X, encoding=encoding, positions=WHERE)


@pytest.mark.parametrize(
    "scale",
    ["1", True, float("nan"), float("inf"), -float("inf"), 1e39, 1j, torch.zeros(2), [0.3], torch.tensor(float("nan"))],
    ids=str,
)
@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_a_scale_that_is_no_finite_number(backend: str, scale: Any) -> None:
    with refuses(RangeError, "for scale", "finite"):
        attend(X, X, X, positions=WHERE, scale=scale, backend=backend)


def test_a_scale_that_would_not_be_learned() -> None:
    with refuses(RangeError, "scale", "gradient", "q * scale"):
        attend(X, X, X, positions=WHERE, scale=torch.tensor(0.3, requires_grad=True))


@pytest.mark.unchecked
@pytest.mark.parametrize("scale", [torch.tensor(0.25), np.float32(0.25), np.array(0.25), 0.25])
@pytest.mark.parametrize("backend", ["sdpa", "tiled", "eager", "flex"])
def test_numbers_of_every_kind_are_scales(backend: str, scale: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(flex, "_compile_for", lambda device: lambda q, k, v, **o: (given.append(o["scale"]), v)[1])
    y = attend(X, X, X, positions=WHERE, scale=scale, backend=backend)
    if backend == "flex":
        assert [type(each) for each in given] == [float]
        return
    scores = (X @ X.mT * 0.25).masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf"))
    assert_close(y, scores.softmax(-1) @ X)


@pytest.mark.parametrize("dropout_p", ["0", True, None, -0.1, 1, float("nan"), 2**70])
def test_a_dropout_that_is_no_probability(dropout_p: Any) -> None:
    with refuses(RangeError, "for dropout_p"):
        attend(X, X, X, positions=WHERE, dropout_p=dropout_p)


@pytest.mark.parametrize("window", ["3", True, 0, -1, 1.5, 2**70, 2**31, torch.tensor([3])], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_a_window_that_is_no_number_of_steps(causal: bool, window: Any) -> None:
    with refuses(RangeError, "for window", "window=None"):
        attend(X, X, X, positions=WHERE, window=window, causal=causal)
    with refuses(RangeError, "for window", "window=None"):
        WHERE.mask(window=window, causal=causal)


@pytest.mark.unchecked
@pytest.mark.parametrize("window", [np.int64(3), np.uint8(3), torch.tensor(3)], ids=str)
@pytest.mark.parametrize("backend", ["sdpa", "tiled", "eager"])
def test_integers_of_every_kind_are_windows(backend: str, window: Any) -> None:
    expected = attend(X, X, X, positions=WHERE, window=3, backend="eager")
    assert_close(attend(X, X, X, positions=WHERE, window=window, backend=backend), expected)
    assert torch.equal(WHERE.mask(window=window), WHERE.mask(window=3))


@pytest.mark.parametrize("odd", ["no", 0, 1, None], ids=repr)
@pytest.mark.parametrize("name", ["causal", "return_weights"])
def test_a_flag_is_true_or_false(name: str, odd: Any) -> None:
    with refuses(RangeError, f"for {name}", "True or False"):
        attend(X, X, X, positions=WHERE, **{name: odd})


def test_a_compiler_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.exc import InductorError

    def failing(*_: object, **__: object) -> Tensor:
        raise InductorError(RuntimeError("No working C++ compiler found"), None)

    monkeypatch.setattr(flex, "_compile_for", lambda device: failing)
    with refuses(LocantError, "FlexAttention", "No working C++ compiler", "tiled"):
        attend(X, X, X, positions=WHERE, backend="flex")


def test_padding_is_made_where_the_tokens_are(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Tensor] = []

    def listening(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        given.append(q)
        return torch.zeros_like(q)

    monkeypatch.setattr(flex, "_compile_for", lambda device: listening)
    with torch.device("meta"):
        y = attend(X, X, X, positions=WHERE, backend="flex")
    assert (given[0].shape[2], given[0].device.type, y.device.type) == (128, "cpu", "cpu")


def test_weights_are_those_before_dropout() -> None:
    y, weights = attend(X, X, X, positions=WHERE, dropout_p=0.5, return_weights=True)
    scores = (X @ X.mT * 16**-0.5).masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf"))
    assert_close(weights, scores.softmax(-1))
    assert not torch.allclose(y, weights @ X)
