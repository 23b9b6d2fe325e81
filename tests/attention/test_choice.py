"""Which backend runs, why, and what is refused with a way out."""

from __future__ import annotations

import dataclasses
import importlib

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from locant import (
    ALiBi,
    Cope,
    Fire,
    LocantError,
    PositionEncoding,
    Positions,
    RangeError,
    Rotary,
    Sandwich,
    Shaw,
    TransformerXL,
    attend,
)
from locant.attention.backends import flex
from locant.attention.choice import FAST_MATRIX_SCORES, BackendChoice, choose_backend
from locant.attention.inputs import AttentionInputs
from locant.attention.mask import AttentionMask
from tests.refusal import refuses

ATTEND = importlib.import_module("locant.attention.attend")  # the module; its name in the package is the function
HEADS, LENGTH = 4, 512
X = torch.zeros(1, HEADS, 5, 16)
DEVICES = ["cpu", "cuda", "mps"]


def large(device: str = "cpu", length: int = LENGTH, head_dim: int = 16, **options: object) -> AttentionInputs:
    """As many scores as are too many for a matrix; on devices that need not be there."""
    encoding = options.pop("encoding", Shaw(head_dim, 3).requires_grad_(requires_grad=False))
    with FakeTensorMode():
        dtype = options.pop("dtype", torch.float32)
        q = torch.zeros(
            1, HEADS, length, head_dim, device=device, dtype=dtype, requires_grad=options.pop("grad", False)
        )
        mask = AttentionMask(Positions.arange(length, device=device), window=options.pop("window", None))
        return AttentionInputs(q, q, q, mask, encoding, **options)


def chosen(**options: object) -> str:
    return choose_backend("auto", large(**options)).name


@pytest.mark.parametrize("device", DEVICES)
def test_auto_on_every_device(device: str) -> None:
    assert large().num_scores == FAST_MATRIX_SCORES
    assert chosen(device=device, return_weights=True) == "eager"
    assert chosen(device=device, encoding=None) == "sdpa"
    assert chosen(device=device, length=LENGTH - 1) == "sdpa"
    assert chosen(device=device, encoding=None, window=9, length=LENGTH - 1) == "sdpa"
    without_matrix = "flex" if device == "cuda" else "tiled"
    assert chosen(device=device) == without_matrix
    assert chosen(device=device, grad=True) == without_matrix
    assert chosen(device=device, encoding=None, window=9) == without_matrix


class NoScoreMod(PositionEncoding):
    def bias(self, q: Tensor, *rest: object) -> Tensor:
        return torch.zeros(1, q.shape[1], q.shape[2], q.shape[2])


@pytest.mark.parametrize(
    "fact", [{"dropout_p": 0.5}, {"encoding": NoScoreMod()}, {"dtype": torch.float64}, {"head_dim": 15}], ids=str
)
def test_auto_on_cuda_goes_round_what_flex_cannot_do(fact: dict[str, object]) -> None:
    assert chosen(device="cuda") == "flex"
    assert chosen(device="cuda", **fact) == "tiled"


@pytest.mark.parametrize("encoding", [Cope(16), TransformerXL(HEADS, 64), Fire(HEADS)], ids=lambda each: each.info.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_no_score_function_is_fit_for_is_taken_by_tiles_compiled_or_not(
    encoding: PositionEncoding, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 384 tokens and 32 heads would be 32 GiB."""
    inputs = large("cuda", length=2**13, dtype=dtype, encoding=encoding)
    with refuses(LocantError, "backend='flex'", "no score_mod", "tiled"):
        choose_backend("flex", inputs)
    choice = choose_backend("auto", inputs)
    assert choice.name == "tiled"
    assert f"{type(encoding).__name__} has a bias but no score_mod on cuda" in choice.reason
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert choose_backend("auto", inputs).name == "sdpa"
    inputs = large("cuda", length=2**13 + 1, dtype=dtype, encoding=encoding)
    assert choose_backend("auto", inputs).name == "tiled"


def test_positions_without_bounds_are_taken_by_tiles_where_a_score_function_would_need_a_matrix() -> None:
    with FakeTensorMode():
        index = torch.zeros(1, LENGTH, dtype=torch.int64, device="cuda")
    known = large("cuda", encoding=Sandwich(HEADS))
    unknown = dataclasses.replace(known, mask=AttentionMask(Positions(index)))
    few = AttentionMask(Positions(index, min_index=0, max_index=2**20))
    assert choose_backend("auto", known).name == "flex"
    assert choose_backend("auto", unknown).name == "tiled"
    assert choose_backend("auto", dataclasses.replace(known, mask=few)).name == "tiled", "more distances than pairs"


def test_a_compiled_graph_is_not_filled_with_tiles_unless_one_operation_does_them_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tiles, table = large(), large(encoding=ALiBi(HEADS))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert choose_backend("auto", tiles).name == "sdpa"
    assert choose_backend("auto", table).name == "tiled"
    assert choose_backend("tiled", tiles).name == "tiled"


@pytest.mark.parametrize(
    ("positions", "encoding", "options", "way"),
    [
        (Positions.arange(300), ALiBi(HEADS), {}, "table"),
        (Positions.arange(300), None, {}, "table"),
        (Positions.after(7, 300), Rotary(16), {}, "table"),
        (Positions.packed([140, 160]), ALiBi(HEADS), {}, "documents"),
        (Positions.packed([100] * 3), ALiBi(HEADS), {}, "tiles"),
        (Positions.packed([140, 160]), Fire(HEADS), {}, "tiles"),
        (Positions.arange(300), Cope(16), {}, "tiles"),
        (Positions.arange(300), Fire(HEADS), {}, "tiles"),
        (Positions.arange(300), Fire(HEADS), {"dropout_p": 0.5}, "tiles"),
        (Positions.arange(300), ALiBi(HEADS), {"dropout_p": 0.5}, "tiles"),
    ],
)
def test_tiled_says_which_way_it_goes(
    positions: Positions, encoding: PositionEncoding | None, options: dict[str, float], way: str
) -> None:
    x = torch.zeros(1, HEADS, 300, 16)
    choice = choose_backend("tiled", AttentionInputs(x, x, x, AttentionMask(positions), encoding, **options))
    assert choice.method.name == way
    assert len(choice.method.reason) > 8


@pytest.mark.parametrize("backend", ["sdpa", "flex", "tiled"])
def test_weights_are_refused_by_backends_that_never_hold_them(backend: str) -> None:
    with refuses(LocantError, f"backend={backend!r}", "return_weights", "eager"):
        attend(X, X, X, positions=Positions.arange(5), backend=backend, return_weights=True)


@pytest.mark.parametrize("backend", ["Eager", "cudnn", "", "flash", None])
def test_an_unknown_backend_is_refused(backend: str) -> None:
    with refuses(RangeError, f"got {backend!r} for backend", "'auto', 'sdpa', 'flex', 'tiled' or 'eager'"):
        attend(X, X, X, positions=Positions.arange(5), backend=backend)


def test_flex_is_refused_where_it_cannot_run() -> None:
    positions = Positions.arange(5)
    with refuses(LocantError, "backend='flex'", "backward on a CPU", "tiled"):
        attend(X.clone().requires_grad_(), X, X, positions=positions, backend="flex")
    with refuses(LocantError, "backend='flex'", "backward on a CPU", "tiled"):
        attend(X, X, X, encoding=ALiBi(HEADS, learned=True), positions=positions, backend="flex")
    with refuses(LocantError, "backend='flex'", "does not support dropout", "tiled"):
        attend(X, X, X, positions=positions, backend="flex", dropout_p=0.1)
    with refuses(LocantError, "backend='flex'", "in float64", "tiled"):
        attend(X.double(), X.double(), X.double(), positions=positions, backend="flex")
    with refuses(LocantError, "backend='flex'", "no score_mod", "tiled"):
        attend(X, X, X, encoding=NoScoreMod(), positions=positions, backend="flex")
    with refuses(LocantError, "backend='flex'", "mps", "tiled"):
        choose_backend("flex", large(device="mps"))
    with refuses(LocantError, "backend='flex'", "15 dimensions", "tiled"):
        choose_backend("flex", large(device="cuda", head_dim=15))


def test_the_widest_of_keys_and_values_counts() -> None:
    wide, narrow = large("cuda", head_dim=40), large("cuda", head_dim=15)
    assert flex.obstacle(dataclasses.replace(narrow, v=wide.v)) is None
    assert flex.obstacle(dataclasses.replace(wide, v=narrow.v)) is None


def handed_over(monkeypatch: pytest.MonkeyPatch, x: Tensor = X, **options: object) -> AttentionInputs:
    seen: list[AttentionInputs] = []
    monkeypatch.setattr(
        ATTEND, "choose_backend", lambda _, inputs: (seen.append(inputs), BackendChoice("eager", ""))[1]
    )
    attend(x, x, x, **{"positions": Positions.arange(5), **options})
    return seen[0]


AFTER = {"positions": Positions.after(3, 5), "k_positions": Positions.arange(5)}


@pytest.mark.parametrize(
    ("options", "plain"),
    [
        ({}, True),
        ({"window": 3}, False),
        ({"causal": False}, True),
        ({"positions": Positions.packed([2, 3])}, False),
        ({"positions": Positions.from_mask(torch.ones(1, 5))}, True),
        ({"positions": Positions.from_mask(torch.eye(5)[:1])}, False),
        (AFTER, False),
        ({**AFTER, "causal": False}, True),
    ],
    ids=str,
)
def test_a_mask_is_plain_where_fused_kernels_need_no_matrix(
    options: dict[str, object], plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert handed_over(monkeypatch, **options).mask.is_plain == plain


def test_a_gradient_is_seen_wherever_it_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    def wanted(x: Tensor = X, **options: object) -> bool:
        return handed_over(monkeypatch, x, **options).needs_gradient

    learned = X.clone().requires_grad_()
    assert wanted(learned)
    with torch.no_grad():
        assert not wanted(learned)
    assert not wanted(encoding=ALiBi(HEADS))
    assert wanted(encoding=ALiBi(HEADS, learned=True))
    encoding = NoScoreMod()
    encoding.register_buffer("learned_elsewhere", torch.zeros(3, requires_grad=True))
    assert wanted(encoding=encoding)
