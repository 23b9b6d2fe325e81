"""Kernels that are known are not compiled, all others are, and what is written down of the known is true."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from tests.gpu_without_gpu import cases, outcomes
from tests.gpu_without_gpu.launcher import Launch, fresh_process

triton = pytest.importorskip("triton", reason="there is no Triton for this platform")


def launched(case: str, capability: int = 90) -> tuple[list[Launch], int]:
    """What this case launches, and how many kernels the assembler made of it."""
    from triton.backends.nvidia.compiler import CUDABackend

    assemble = CUDABackend.make_cubin
    with mock.patch.object(CUDABackend, "make_cubin", autospec=True, side_effect=assemble) as made:
        return cases.launched(case, capability), made.call_count


@pytest.mark.slow
def test_what_is_known_is_not_compiled_and_what_differs_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = tmp_path / "record.jsonl"
    monkeypatch.setenv(outcomes.ANEW, "1")
    with fresh_process(tmp_path / "first", record=record) as there:
        compiled, count = there(launched, "half")
        assert count == len(compiled) == len(record.read_text().splitlines()) == 1
    monkeypatch.delenv(outcomes.ANEW)
    with fresh_process(tmp_path / "second", record=record) as there:
        known, count = there(launched, "half")
        assert count == 0
        assert known[0].outcome == compiled[0].outcome
        for case, capability in (("interleaved", 90), ("half", 80)):
            assert there(launched, case, capability)[1] == 1
    assert len(record.read_text().splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("case", ["half", "several axes, partial, far, YaRN", "learned bias"])
def test_what_is_written_down_is_what_comes_out_wherever_triton_lies(case: str, tmp_path: Path) -> None:
    (tmp_path / "triton").symlink_to(Path(triton.__file__).parent)
    found = []
    for name, folder, record in (("anew", None, None), ("known", tmp_path, outcomes.RECORD)):
        with fresh_process(tmp_path / name, folder, record) as there:
            found.append(there(launched, case))
    (anew, made), (known, none) = found
    assert none == 0, "`make kernels` writes down what has changed"
    assert made == len({launch.kernel for launch in anew})
    assert [launch.outcome for launch in known] == [launch.outcome for launch in anew]
