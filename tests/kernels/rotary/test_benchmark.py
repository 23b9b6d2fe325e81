"""What is timed under the name of torch.compile was compiled, for every shape; a GPU that is not there is not timed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import __main__ as benchmarks
from benchmarks import gpu_rotary, rotary


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """One entry for every graph; carried out as it is, which is quicker than compiling it."""
    made: list[Any] = []

    def backend(graph: nn.Module, inputs: object) -> Any:
        made.append(graph)
        return graph.forward

    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: real(function, backend=backend, **options))
    return made


@pytest.mark.slow
@pytest.mark.unchecked
def test_every_shape_of_the_gpu_benchmark_is_compiled_both_ways(graphs: list[Any]) -> None:
    for i, shape in enumerate(gpu_rotary.SHAPES):
        small = shape._replace(batch=2 + i, seq=min(shape.seq, 7 + i), heads=4, kv_heads=2)
        contenders = gpu_rotary.contenders(small, "cpu")
        q, k = (small.tokens(heads, torch.bfloat16, "cpu") for heads in (4, 2))
        for name in ("usual code, torch.compile", "TransformerEngine's formula, torch.compile"):
            for leaf in (False, True):
                before = len(graphs)
                contenders[name](q.clone().requires_grad_(leaf), k.clone().requires_grad_(leaf))
                assert len(graphs) == before + 1, f"{shape.name}: {name} is timed without a compiler"
            gpu_rotary._require_right(name, contenders[name], q, k, small)


@pytest.mark.unchecked
def test_every_case_of_the_cpu_benchmark_is_compiled(graphs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotary.importlib.util, "find_spec", lambda name: None)  # nothing is asked of others
    for length in range(1, 12):
        case = rotary._Case((1, 2, 1, length, 4), torch.float32)
        before = len(graphs)
        rotary._peers(case)["usual code, torch.compile"]()
        assert len(graphs) == before + 1


def test_without_a_gpu_nothing_of_one_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        benchmarks.main(["gpu"])
    assert ended.value.code == 0
    assert "torch finds no CUDA device" in capsys.readouterr().out


def test_nor_where_the_tests_that_need_one_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(benchmarks.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=1))
    with pytest.raises(SystemExit) as ended:
        benchmarks.main(["gpu"])
    assert ended.value.code == 1
