"""Entries whose size is published: how far phases and scores are off, measured here and told in the README."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from locant import Positions, Rotary
from tests.known_bugs.exhibit import exhibit
from tests.known_bugs.figures import published
from tests.known_bugs.oracle import frequencies, phase_error, true_cos_sin
from tests.known_bugs.rotations import CosSin, rotations
from tests.known_bugs.subjects import WIDTH
from tests.known_bugs.twins import BufferRotary
from tests.tolerances import PHASE, SHIFTED


def shift_error(cos_sin: CosSin, dtype: torch.dtype = torch.float32) -> float:
    """By how much q . k changes, per unit of length, when both move on together by up to 2**20 positions."""
    dim = 2 * cos_sin(Positions.arange(1))[0].shape[-1]
    q, k = torch.randn(2, 16, dim, dtype=torch.float64).to(dtype)
    starts, lag = torch.arange(16), 100
    lengths = q.double().norm(dim=-1) * k.double().norm(dim=-1)

    def score(shift: int) -> Tensor:
        rotated_q, rotated_k = (
            _rotated(x, *cos_sin(Positions.of(starts + shift + more))).double() for x, more in ((q, lag), (k, 0))
        )
        return (rotated_q * rotated_k).sum(-1) / lengths

    return max(float((score(2**power) - score(0)).abs().max()) for power in range(21))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.to(cos.dtype).chunk(2, -1)
    return torch.cat([a * cos[0] - b * sin[0], b * cos[0] + a * sin[0]], -1).to(x.dtype)


def in_bfloat16(positions: Positions) -> tuple[Tensor, Tensor]:
    cos, sin = Rotary(WIDTH).cos_sin(positions)
    return cos.bfloat16(), sin.bfloat16()


@pytest.mark.parametrize("dtype", SHIFTED)
def test_11_scores_depend_on_the_distance_alone(dtype: torch.dtype) -> None:
    """KellerJordan/modded-nanogpt#39: cosines in bfloat16 cost training loss: 3.2800 against 3.2783 in float32.

    A rounded table rotates q and k by other angles than it should, so their product no longer knows only a distance.
    """

    def check(cos_sin: CosSin) -> None:
        error = shift_error(cos_sin, dtype)
        assert error <= SHIFTED[dtype], f"a common shift changed a score by {error:.2g}"

    def from_bfloat16(positions: Positions) -> tuple[Tensor, Tensor]:
        return BufferRotary().bfloat16().cos_sin(positions)

    ours = [subject.cos_sin for subject in rotations().values() if not isinstance(subject.frequencies, Tensor)]
    exhibit(check, *ours, twin=from_bfloat16, because="a common shift changed a score")
    if dtype == torch.float32:
        exhibit(check, *ours, twin=in_bfloat16, because="a common shift changed a score")


@pytest.mark.parametrize("name", ["exact", "float32", "bfloat16 table"])
def test_11_the_figures_of_the_readme_are_measured(name: str) -> None:
    """KellerJordan/modded-nanogpt#39: what each table costs, as a published figure."""
    tables = {
        "exact": Rotary(WIDTH).cos_sin,
        "float32": Rotary(WIDTH, angles="float32").cos_sin,
        "bfloat16 table": in_bfloat16,
    }

    def check(cos_sin: CosSin) -> None:
        measured, told = shift_error(cos_sin), published("relative shift")[name][0]
        assert told / 2 < measured < told * 2, f"{name}: the README says {told:.2g}, measured {measured:.2g}"

    other = tables["exact" if name != "exact" else "float32"]
    exhibit(check, tables[name], twin=other, because="the README says")


def test_14_the_phase_error_is_a_published_figure() -> None:
    """Modalities/modalities#462: phases off by 0.62 radians at position 512, and by pi at 4096.

    The frequencies were cast to the dtype of the tokens. The README tells the error of each way at four positions.
    """
    figures = published("phase error")
    index = [512, 4096, 65_536, 2**20]

    def errors(cos_sin: CosSin) -> list[float]:
        true = true_cos_sin(index, frequencies(128, 10_000.0))
        cos, sin = (table[0] for table in cos_sin(Positions.of(index)))
        return phase_error(cos, sin, *true).amax(-1).tolist()

    def cast(positions: Positions) -> tuple[Tensor, Tensor]:
        angle = positions.index[..., None].float() * BufferRotary(128).inv_freq.bfloat16().float()
        return angle.cos(), angle.sin()

    def check(cos_sin: CosSin) -> None:
        for position, error in zip(index, errors(cos_sin), strict=True):
            assert error < PHASE, f"at position {position} the phase is off by {error:.2g}"

    exhibit(check, Rotary(128).cos_sin, twin=cast, because="at position 512 the phase is off by 0.")
    tables = {"exact": Rotary(128).cos_sin, "float32": Rotary(128, angles="float32").cos_sin, "bfloat16": cast}
    assert figures.keys() == tables.keys()
    for name, cos_sin in tables.items():
        for told, measured in zip(figures[name], errors(cos_sin), strict=True):
            assert told / 2 < measured < told * 2, f"{name}: the README says {told:.2g}, measured {measured:.2g}"
