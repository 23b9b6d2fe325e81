"""Which backend runs, why, and what is refused with a way out."""

from __future__ import annotations

import dataclasses
import importlib

import pytest
import torch

from locant import ALiBi, Cope, LocantError, PositionEncoding, Positions, Rotary, attend
from locant.attention import backends
from locant.attention.backends import SMALL, Request, choose_backend
from tests.refusal import refuses

ATTEND = importlib.import_module("locant.attention.attend")  # the module; its name in the package is the function
LARGE = Request(device="cpu", scores=SMALL, bias=True)


def choice(**facts: object) -> str:
    return choose_backend("auto", dataclasses.replace(LARGE, **facts)).name


@pytest.mark.parametrize("device", ["cpu", "cuda", "mps"])
def test_auto_on_every_device(device: str) -> None:
    assert choice(device=device, return_weights=True) == "eager"
    assert choice(device=device, bias=False) == "sdpa"
    assert choice(device=device, scores=SMALL - 1) == "sdpa"
    assert choice(device=device, bias=False, mask=True, scores=SMALL - 1) == "sdpa"
    large = "flex" if device == "cuda" else "tiled"
    assert choice(device=device) == large
    assert choice(device=device, gradient=True) == large
    assert choice(device=device, bias=False, mask=True) == large


@pytest.mark.parametrize(
    "fact", [{"dropout": True}, {"score_mod": False}, {"dtype": torch.float64}, {"head_dim": 15}], ids=str
)
def test_auto_on_cuda_goes_round_what_flex_cannot_do(fact: dict[str, object]) -> None:
    assert choice(device="cuda") == "flex"
    assert choice(device="cuda", **fact) == "tiled"


def test_a_compiled_graph_is_not_filled_with_tiles_unless_one_operation_does_them_all() -> None:
    assert choice(compiling=True) == "sdpa"
    assert choice(compiling=True, table=True) == "tiled"
    assert choose_backend("tiled", dataclasses.replace(LARGE, compiling=True)).name == "tiled"


def test_every_choice_says_why() -> None:
    reasons = {
        choose_backend(backend, dataclasses.replace(LARGE, return_weights=weights, table=table)).reason
        for backend in ("auto", "eager")
        for weights in (True, False)
        for table in (True, False)
    }
    assert len(reasons) == 4
    assert all(len(reason) > 8 for reason in reasons)


@pytest.mark.parametrize("backend", ["sdpa", "flex", "tiled"])
def test_weights_are_refused_by_who_never_holds_them(backend: str) -> None:
    x = torch.zeros(2, 6, 5, 4)
    with refuses(LocantError, f"backend={backend!r}", "return_weights", "eager"):
        attend(x, x, x, positions=Positions.arange(5), backend=backend, return_weights=True)


def test_flex_is_refused_where_it_cannot_run() -> None:
    x, positions = torch.zeros(2, 6, 5, 4), Positions.arange(5)
    with refuses(LocantError, "backend='flex'", "backward on a CPU", "tiled"):
        attend(x.clone().requires_grad_(), x, x, positions=positions, backend="flex")
    with refuses(LocantError, "backend='flex'", "backward on a CPU", "tiled"):
        attend(x, x, x, encoding=ALiBi(6, learned=True), positions=positions, backend="flex")
    with refuses(LocantError, "backend='flex'", "drops no weights", "tiled"):
        attend(x, x, x, positions=positions, backend="flex", dropout_p=0.1)
    with refuses(LocantError, "backend='flex'", "torch.float64", "tiled"):
        attend(x.double(), x.double(), x.double(), positions=positions, backend="flex")

    class NoScoreMod(PositionEncoding):
        def bias(self, q: torch.Tensor, *rest: object) -> torch.Tensor:
            return torch.zeros(1, 6, 5, 5)

    with refuses(LocantError, "backend='flex'", "no score_mod", "tiled"):
        attend(x, x, x, encoding=NoScoreMod(), positions=positions, backend="flex")
    with refuses(LocantError, "backend='flex'", "mps", "tiled"):
        choose_backend("flex", dataclasses.replace(LARGE, device="mps"))
    with refuses(LocantError, "backend='flex'", "15 dimensions", "tiled"):
        choose_backend("flex", dataclasses.replace(LARGE, device="cuda", head_dim=15))


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({}, {"bias": False, "mask": False}),
        ({"encoding": Rotary(4)}, {"bias": False, "mask": False}),
        ({"encoding": ALiBi(6)}, {"bias": True, "table": True, "gradient": False}),
        ({"encoding": ALiBi(6, learned=True)}, {"bias": True, "table": True, "gradient": True}),
        ({"encoding": Cope(4)}, {"bias": True, "table": False, "gradient": True}),
        ({"window": 3}, {"mask": True, "table": True}),
        ({"dropout_p": 0.5}, {"dropout": True, "table": False}),
        ({"positions": Positions.packed([2, 3])}, {"mask": True, "table": False}),
        ({"positions": Positions.after(3, 5), "k_positions": Positions.arange(5)}, {"mask": True, "table": True}),
        ({"positions": Positions.after(3, 5), "k_positions": Positions.arange(5), "causal": False}, {"mask": False}),
    ],
    ids=str,
)
def test_what_the_choice_is_told(
    options: dict[str, object], asked: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, seen = torch.zeros(2, 6, 5, 4), []
    original = backends.choose_backend

    def listening(backend: str, request: Request) -> backends.Choice:
        seen.append(request)
        return original(backend, request)

    monkeypatch.setattr(ATTEND, "choose_backend", listening)
    attend(x, x, x, **{"positions": Positions.arange(5), **options})
    facts = dataclasses.asdict(seen[0])
    assert facts["scores"] == 2 * 6 * 5 * 5
    assert {name: facts[name] for name in asked} == asked


def test_without_gradients_none_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(2, 6, 5, 4, requires_grad=True)
    asked = []
    original = backends.choose_backend
    monkeypatch.setattr(
        ATTEND,
        "choose_backend",
        lambda backend, request: (asked.append(request.gradient), original(backend, request))[1],
    )
    attend(x, x, x, positions=Positions.arange(5))
    with torch.no_grad():
        attend(x, x, x, positions=Positions.arange(5))
    assert asked == [True, False]
