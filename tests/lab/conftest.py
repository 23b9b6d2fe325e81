"""What tests of comparisons share."""

from __future__ import annotations

import pytest

from locant.lab import training as trainings
from locant.lab.training import Training


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Training]:
    """What is trained from here on."""
    ran, real = list[Training](), trainings.run
    monkeypatch.setattr("locant.lab.pool.run", lambda training, *rest: ran.append(training) or real(training, *rest))
    return ran
