"""Kernels of notebooks, forked from one process, are as good as those that are started by themselves."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from jupyter_cache.executors.utils import single_nb_execution
from jupyter_client.provisioning import local_provisioner
from nbformat.v4 import new_code_cell, new_notebook

from docs.generator import kernels

pytestmark = pytest.mark.slow

Runs = Callable[..., tuple[object, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Runs:
    """Runs cells as the site does; returns the error, if any, and what they printed."""
    monkeypatch.setattr(local_provisioner, "launch_kernel", kernels._launch)

    def execute(*cells: str) -> tuple[object, str]:
        notebook = new_notebook(cells=[new_code_cell(cell) for cell in cells])
        result = single_nb_execution(notebook, cwd=str(tmp_path), timeout=None, allow_errors=False)
        outputs = [output for cell in notebook.cells for output in cell.outputs]
        return result.err, "".join(output.text for output in outputs if output.output_type == "stream")

    return execute


def test_a_notebook_sees_its_folder_and_nothing_of_another_one_and_leaves_no_process(run: Runs, tmp_path: Path) -> None:
    error, told = run("import os, locant", "locant.left = left = 1", "print(os.getpid(), os.getppid(), os.getcwd())")
    assert error is None
    kernel, server, folder = told.split()
    assert folder == str(tmp_path)
    with pytest.raises(ProcessLookupError):
        os.kill(int(kernel), 0)
    error, told = run("import os, locant", "print(os.getppid(), hasattr(locant, 'left'), 'left' in globals())")
    assert (error, told) == (None, f"{server} False False\n"), "forked from the same process"


def test_what_a_cell_raises_is_told(run: Runs) -> None:
    error, _ = run("1 / 0")
    assert "ZeroDivisionError" in str(error)
