"""The input embedding in one pass: the same as module after module, and when it is taken."""

from __future__ import annotations

import copy
import pickle  # modules are sent to other processes with it; nothing is read here that was not written here
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from locant import (
    InputEmbedding,
    Learned,
    LocantError,
    PositionEncoding,
    Positions,
    RangeError,
    Rotary,
    ShapeError,
    Sinusoidal,
)
from locant.embedding.input import why_plain
from locant.embedding.table import DeferredErrors
from locant.kernels import native
from locant.kernels.input_embedding.native import FORWARD
from tests.gpu_without_gpu.device import pretended
from tests.refusal import refuses
from tests.tolerances import assert_close

VOCAB, WIDTH, BATCH, LENGTH = 29, 14, 3, 7

pytestmark = pytest.mark.skipif(native.function(FORWARD) is None, reason=f"native kernels are {native.status()}")

ENCODINGS: dict[str, Callable[[], PositionEncoding | None]] = {
    "none": lambda: None,
    "rotary": lambda: Rotary(WIDTH),
    "learned": lambda: Learned(41, WIDTH),
    "learned with offset": lambda: Learned(41, WIDTH, offset=2),
    "sinusoidal": lambda: Sinusoidal(WIDTH),
}
POSITIONS: dict[str, Callable[[], Positions | None]] = {
    "unsaid": lambda: None,
    "a row each": lambda: Positions.arange(LENGTH, batch=BATCH),
    "after a cache": lambda: Positions.after([3, 30, 0], LENGTH),
    "packed": lambda: Positions.packed([2, 0, 4], length=LENGTH),
    "padded": lambda: Positions.from_mask(torch.tensor([[0] * 3 + [1] * 4, [1] * 7, [1] * 2 + [0] * 5])),
    "any": lambda: Positions.of(torch.randint(41, (BATCH, LENGTH))),
}


def pair(dtype: torch.dtype = torch.float32, **options: Any) -> tuple[InputEmbedding, InputEmbedding]:
    """The same embedding twice: in one pass, and module after module."""
    fused = InputEmbedding(VOCAB, WIDTH, **options, backend="fused")
    with torch.no_grad():
        for parameter in fused.parameters():
            parameter.normal_()
    plain = copy.deepcopy(fused)
    plain.backend = "plain"
    return fused.to(dtype), plain.to(dtype)


def require_alike(fused: InputEmbedding, plain: InputEmbedding, *arguments: Any) -> None:
    ours, expected = fused(*arguments), plain(*arguments)
    if ours.dtype in (torch.float32, torch.float64) and fused.norm is None:
        assert torch.equal(ours, expected), "in one pass other bits come out"
    else:
        assert_close(ours, expected)
    cotangent = torch.randn_like(expected)
    ours.backward(cotangent)
    expected.backward(cotangent)
    for (name, one), other in zip(fused.named_parameters(), plain.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        if one.grad is not None and other.grad is not None:
            scale = max(1.0, float(other.grad.abs().max()))
            assert_close(one.grad / scale, other.grad / scale)


@pytest.mark.parametrize("where", POSITIONS)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_it_is_what_the_modules_give(encoding: str, where: str) -> None:
    fused, plain = pair(
        encoding=ENCODINGS[encoding](), num_segments=3, norm="layer_norm", padding_idx=4, scale="sqrt_d_model"
    )
    ids, segments = torch.randint(VOCAB, (BATCH, LENGTH)), torch.randint(3, (BATCH, LENGTH))
    require_alike(fused, plain, ids, POSITIONS[where](), segments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [None, 0.3, "sqrt_d_model", "sqrt_d_model_rounded"])
def test_every_scale_in_every_dtype(scale: float | str | None, dtype: torch.dtype) -> None:
    fused, plain = pair(dtype, encoding=Sinusoidal(WIDTH), norm="layer_norm", scale=scale)
    require_alike(fused, plain, torch.randint(VOCAB, (BATCH, LENGTH)))


@pytest.mark.parametrize(
    "options",
    [
        {"num_segments": 2}, {"norm": nn.LayerNorm(WIDTH, eps=1e-12)}, {"norm": nn.LayerNorm(WIDTH, bias=False)},
        {"norm": nn.LayerNorm(WIDTH, elementwise_affine=False)}, {"encoding": Learned(9, WIDTH)},
        {"encoding": Sinusoidal(WIDTH), "padding_idx": -1},
    ],
    ids=str,
)  # fmt: skip
def test_parts_that_are_missing(options: dict[str, Any]) -> None:
    fused, plain = pair(**options)
    require_alike(fused, plain, torch.randint(VOCAB, (BATCH, LENGTH), dtype=torch.int32))


def test_few_roundings_are_better_than_many() -> None:
    """In bfloat16 the plain path rounds after every step."""
    fused, plain = pair(torch.bfloat16, encoding=Sinusoidal(WIDTH), num_segments=2, norm="layer_norm")
    exact = copy.deepcopy(plain).double()
    ids = torch.randint(VOCAB, (64, LENGTH))
    true = exact(ids).detach()
    errors = [float((path(ids).detach().double() - true).abs().mean()) for path in (fused, plain)]
    assert errors[0] < 0.85 * errors[1]


def test_dropout_is_that_of_the_generator_and_only_in_training() -> None:
    fused, plain = pair(encoding=Sinusoidal(WIDTH), norm="layer_norm", dropout=0.25)
    ids = torch.randint(VOCAB, (50, LENGTH))
    whole = plain.eval()(ids)
    assert_close(fused.eval()(ids), whole)
    fused.train()
    torch.manual_seed(1)
    first = fused(ids)
    second = fused(ids)
    torch.manual_seed(1)
    assert torch.equal(fused(ids), first)
    assert not torch.equal(second, first)
    dropped = first == 0
    assert abs(float(dropped.double().mean()) - 0.25) < 5 * (0.25 * 0.75 / first.numel()) ** 0.5
    assert_close(first[~dropped], (whole / 0.75)[~dropped])


class Whispering(Learned):
    pass


def with_hook(embedding: InputEmbedding) -> None:
    embedding.token.register_forward_hook(lambda *_: None)


def with_own_forward(embedding: InputEmbedding) -> None:
    embedding.dropout.forward = lambda x: x  # type: ignore[method-assign]


def with_a_narrow_norm(embedding: InputEmbedding) -> None:
    embedding.norm.bfloat16()


def with_parametrization(embedding: InputEmbedding) -> None:
    nn.utils.parametrize.register_parametrization(embedding.token, "weight", nn.Identity())


REASONS: list[tuple[str, dict[str, Any], Callable[[InputEmbedding], Any]]] = [
    ("the encoding is a Whispering", {"encoding": Whispering(9, WIDTH)}, lambda _: None),
    ("the encoding is of another width", {}, lambda e: setattr(e, "encoding", Learned(9, WIDTH + 1))),
    ("the sum is scaled", {"scale_sum": 2.0}, lambda _: None),
    ("the norm is a RMSNorm", {"norm": nn.RMSNorm(WIDTH)}, lambda _: None),
    ("the norm is a LayerNorm", {"norm": nn.LayerNorm((LENGTH, WIDTH))}, lambda _: None),
    ("there is nothing to add", {"norm": None}, lambda _: None),
    ("the dropout is Dropout(p=0.9999", {"dropout": 0.99999}, lambda _: None),
    ("the dropout is Identity", {}, lambda e: setattr(e, "dropout", nn.Identity())),
    ("the TokenEmbedding has hooks", {}, with_hook),
    ("the Dropout has hooks or a forward of its own", {}, with_own_forward),
    ("differ in dtype", {}, with_a_narrow_norm),
    ("the token table is split or of another kind", {}, with_parametrization),
    ("no kernel for meta", {}, lambda e: e.to("meta")),
    ("dtype torch.float8", {}, lambda e: e.to(torch.float8_e4m3fn)),
]


@pytest.mark.parametrize(("why", "options", "change"), REASONS, ids=[why for why, _, _ in REASONS])
def test_it_says_why_it_calls_the_modules(
    why: str, options: dict[str, Any], change: Callable[[InputEmbedding], Any]
) -> None:
    embedding = InputEmbedding(VOCAB, WIDTH, **{"norm": "layer_norm", **options})
    change(embedding)
    assert why in str(why_plain(embedding))
    embedding.backend = "fused"
    with refuses(LocantError, "backend='fused'", why):
        embedding(torch.zeros(1, LENGTH, dtype=torch.long))


@pytest.mark.unchecked  # an event of the device is none of torch's
def test_on_a_gpu_the_modules_are_called() -> None:
    """And a compiler makes one kernel of them; what they give is what the operators for a CPU give."""
    fused, plain = pair(encoding=Learned(LENGTH, WIDTH), num_segments=2, norm="layer_norm")
    fused.backend = "auto"
    ids = torch.randint(VOCAB, (BATCH, LENGTH))
    expected = plain(ids)
    with pretended():
        assert why_plain(fused) == "there is no kernel for cuda"
        assert why_plain(InputEmbedding(VOCAB, WIDTH, num_segments=2)) == "there is no kernel for cuda"
        y = fused(ids)
    assert torch.equal(y, expected)


def test_hooks_see_what_they_are_there_for() -> None:
    embedding, seen = InputEmbedding(VOCAB, WIDTH, norm="layer_norm"), []
    assert why_plain(embedding) is None
    handle = embedding.norm.register_forward_hook(lambda *_: seen.append("norm"))  # type: ignore[union-attr]
    embedding(torch.zeros(1, 2, dtype=torch.long))
    handle.remove()
    assert why_plain(embedding) is None
    everywhere = nn.modules.module.register_module_forward_hook(lambda m, *_: seen.append(type(m).__name__))
    try:
        assert why_plain(embedding) == "there are hooks on every module"
        embedding(torch.zeros(1, 2, dtype=torch.long))
    finally:
        everywhere.remove()
    assert seen[0] == "norm"
    assert {"TokenEmbedding", "LayerNorm"} <= set(seen[1:])


def test_autocast_decides_for_narrow_tables_only() -> None:
    embedding = InputEmbedding(VOCAB, WIDTH, norm="layer_norm")
    with torch.autocast("cpu", torch.bfloat16):
        assert why_plain(embedding) is None
        assert "autocast" in str(why_plain(embedding.bfloat16()))


def test_a_graph_that_leaves_the_package_has_no_operation_of_ours() -> None:
    embedding = InputEmbedding(VOCAB, WIDTH, encoding=Learned(9, WIDTH), norm="layer_norm").eval()
    program = torch.export.export(embedding, (torch.zeros(1, LENGTH, dtype=torch.long),))
    assert not [node for node in program.graph.nodes if "locant" in str(node.target)]


ASKED: list[tuple[type[LocantError], tuple[Any, ...]]] = [
    (RangeError, (torch.tensor([[0, VOCAB]]),)),
    (RangeError, (torch.tensor([[0, -1]]),)),
    (ShapeError, (torch.zeros(1, 2),)),
    (ShapeError, (torch.zeros(2, 1, 3, dtype=torch.long),)),
    (LocantError, (torch.zeros(2, 1, dtype=torch.long),)),
    (RangeError, (torch.zeros(1, 10, dtype=torch.long),)),
    (RangeError, (torch.zeros(1, 2, dtype=torch.long), Positions.of([[0, -1]]))),
    (ShapeError, (torch.zeros(1, 2, dtype=torch.long), Positions.arange(3))),
    (ShapeError, (torch.zeros(1, 4, dtype=torch.long), Positions.grid(2, 2))),
    (LocantError, (torch.zeros(1, 2, dtype=torch.long), torch.zeros(1, 2))),
    (RangeError, (torch.zeros(1, 2, dtype=torch.long), None, torch.tensor([[0, 2]]))),
    (ShapeError, (torch.zeros(1, 2, dtype=torch.long), None, torch.tensor([[0]]))),
]


@pytest.mark.parametrize(("kind", "arguments"), ASKED)
def test_mistakes_are_told_in_the_same_words(kind: type[LocantError], arguments: tuple[Any, ...]) -> None:
    fused, plain = pair(encoding=Learned(9, WIDTH, offset=2), num_segments=2, norm="layer_norm")
    words = []
    for embedding in (fused, plain):
        with refuses(kind):
            embedding(*arguments)
        try:
            embedding(*arguments)
        except Exception as error:  # noqa: BLE001  # while shapes are checked, what the signature says
            words.append(str(error))
    if not words[0].startswith("Type-check"):
        assert words[0] == words[1]


def asked(ids: Tensor) -> tuple[Tensor, int, str]:
    return ids, 29, "TokenEmbedding has vocab_size=29"


def test_an_error_that_comes_late() -> None:
    deferred = DeferredErrors()
    assert not deferred.watch(*asked(torch.tensor([[3, 4], [0, 28]]))).any()
    assert deferred.watch(*asked(torch.zeros(0, 3, dtype=torch.long))).shape == (0, 3)
    deferred.raise_arrived()
    for ids in ([[3, 4], [99, 98]], [[3, -1], [-2, 0]]):
        wrong = deferred.watch(*asked(torch.tensor(ids)))
        assert wrong.tolist() == [[not 0 <= each < 29 for each in row] for row in ids]
    assert not copy.deepcopy(deferred)._notes
    assert not pickle.loads(pickle.dumps(deferred))._notes  # noqa: S301  # our own bytes
    with refuses(RangeError, "id 99 at (1, 0) in an earlier call", "TokenEmbedding has vocab_size=29", "NaN"):
        deferred.raise_arrived()
    with refuses(RangeError, "id -1 at (0, 1) in an earlier call"):
        deferred.raise_all()
    deferred.raise_all()


@pytest.mark.parametrize(
    "refill",
    [
        lambda ids: ids.copy_(torch.tensor([[4, 3]])),
        lambda ids: ids.copy_(torch.tensor([[4, 77]])),
        lambda ids: ids.data.copy_(torch.tensor([[4, 3]])),
    ],
)
def test_an_error_that_comes_late_names_no_id_of_a_later_batch(refill: Callable[[Tensor], object]) -> None:
    """Ids of one batch after another are copied into the same memory, as for CUDA graphs."""
    deferred, ids = DeferredErrors(), torch.tensor([[0, 99]])
    deferred.watch(*asked(ids))
    refill(ids)
    with refuses(RangeError, "a bad id at (0, 1) in an earlier call", "TokenEmbedding has vocab_size=29"):
        deferred.raise_all()


def test_an_error_that_comes_late_for_ids_of_inference_mode() -> None:
    """Nobody counts what is written into those."""
    with torch.inference_mode():
        deferred, ids = DeferredErrors(), torch.tensor([[0, 99]])
        deferred.watch(*asked(ids))
        with refuses(RangeError, "a bad id at (0, 1)"):
            deferred.raise_all()


def test_nothing_is_raised_before_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    deferred = DeferredErrors()
    deferred.watch(*asked(torch.tensor([[99]])))
    event = mock.Mock()
    event.query.return_value = False
    object.__setattr__(deferred._notes[0], "arrived", event)
    deferred.raise_arrived()
    with refuses(RangeError, "id 99"):
        deferred.raise_all()
    event.synchronize.assert_called_once_with()


def test_a_capture_is_not_ended_by_asking_for_errors_of_earlier_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA refuses questions about events while a stream is captured, and drops the graph."""
    deferred, event = DeferredErrors(), mock.Mock()
    event.query.side_effect = RuntimeError("CUDA error: operation not permitted when stream is capturing")
    deferred.watch(*asked(torch.tensor([[99]])))
    object.__setattr__(deferred._notes[0], "arrived", event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    deferred.raise_arrived()
    event.query.assert_not_called()
    with refuses(RangeError, "id 99"):
        deferred.raise_all()


@pytest.mark.unchecked
def test_it_compiles_whole_for_every_length() -> None:
    fused, _ = pair(encoding=Learned(41, WIDTH), num_segments=2, norm="layer_norm", padding_idx=4)
    compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
    for length in (3, 7, 11):
        ids, cotangent = torch.randint(VOCAB, (BATCH, length)), torch.randn(BATCH, length, WIDTH)
        found = torch.autograd.grad(compiled(ids), list(fused.parameters()), cotangent)
        expected = torch.autograd.grad(fused(ids), list(fused.parameters()), cotangent)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.unchecked
@pytest.mark.parametrize("backend", ["fused", "plain"])
def test_compiled_code_takes_no_row_before_the_offset_for_a_position(backend: Any) -> None:
    """In a graph nobody knows the positions beforehand; -1 would read the second of the rows that are no places."""
    fused, plain = pair(encoding=Learned(9, WIDTH, offset=2))
    embedding, ids = fused if backend == "fused" else plain, torch.zeros(1, 3, dtype=torch.long)

    def use(index: Tensor) -> Tensor:
        return embedding(ids, Positions(index))

    compiled = torch.compile(use, fullgraph=True, backend="aot_eager")
    good = torch.tensor([[0, 8, 1]])
    assert torch.equal(compiled(good), use(good))
    for bad in (-1, -2, -3, 9):
        with pytest.raises((RangeError, IndexError), match=r"position id|out of range"):
            compiled(torch.tensor([[0, bad, 1]]))


@pytest.mark.gpu
@pytest.mark.parametrize("norm", [None, "layer_norm"])
def test_the_device_works_after_a_refusal(norm: str | None) -> None:
    """It is the embedding that says so, not an assertion of the device."""
    module = InputEmbedding(8, 4, norm=norm).cuda()
    for bad in (-1, 8, 2**31, 2**63 - 1):
        module(torch.tensor([[0, bad, 7]], device="cuda"))
        with refuses(RangeError, str(bad)):
            module.raise_deferred_errors()
    torch.cuda.synchronize()
    assert module(torch.tensor([[0, 7]], device="cuda")).isfinite().all()
