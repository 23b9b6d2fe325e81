"""What must hold where locant cannot be run here: it imports, and does its work, without what Windows lacks.

The processes below load `without_posix/sitecustomize.py` when they start, and so do those that they start.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="open files are looked up in /proc"),
]


def run(code: str, folder: Path, *, fails: bool = False) -> str:
    """What a process prints, or says last where it fails."""
    paths = os.pathsep.join([str(HERE / "without_posix"), str(HERE.parents[1] / "src"), *filter(None, sys.path)])
    surroundings = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "LOCANT_NATIVE": "off"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=folder, env=surroundings, capture_output=True, text=True, check=False)
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    return done.stderr.strip().splitlines()[-1] if fails else done.stdout


IMPORTS = """
import importlib, pkgutil
import locant
for module in pkgutil.walk_packages(locant.__path__, "locant."):
    last = module.name.rpartition(".")[2]
    if last != "__main__" and not last.startswith("locant-"):  # which is the native library
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            print(module.name, error.name)
"""


def test_every_module_imports_but_those_of_triton(tmp_path: Path) -> None:
    missing = dict(line.split() for line in run(IMPORTS, tmp_path).splitlines())
    assert missing
    assert {*missing.values()} == {"triton"}, missing
    assert all(name.rpartition(".")[2].startswith("triton") for name in missing), missing


def locant(*words: str) -> str:
    return f"from locant.cli import main\nmain({[*words]!r})"


WORK = """
import json, os
from pathlib import Path
import numpy as np
import locant

if __name__ == "__main__":
    Path("texts").mkdir()
    for number in range(6):
        Path(f"texts/{number}.txt").write_bytes(f"the text of number {number}, and more of it. ".encode() * 400_000)
    done, options = [], {"tokenizer": "bytes", "shard_size": 2**24}
    store = locant.prepare("texts", "store", workers=2, progress=lambda *each: done.append(each), **options)
    again = locant.TokenStore("store", mode="read")
    print(len(store.shards) > 2, len(done) > 1, store.tokenizer.decode(store[:50]), store == again)
    middle = len(store) // 2
    print((store[middle - 3 : middle + 3] == again[middle - 3 : middle + 3]).all())
    windows = locant.Windows(store, 16)
    print(windows[1_000_000]["ids"].tolist() == again[16_000_000:16_000_016].tolist())
    loader = windows.loader(4, num_workers=1, seed=0)
    print(next(iter(loader))["ids"].shape)
    print(locant.prepare("texts", "store", **options) == store)
    print(sorted(path.name for path in Path("store").iterdir() if not path.name.startswith("shard")))
"""


def test_a_store_is_prepared_by_several_processes_and_read(tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(WORK, encoding="utf-8")  # a file: what is spawned reads it again
    said = run("import runpy; runpy.run_path('work.py', run_name='__main__')", tmp_path).splitlines()
    assert said == [
        "True True the text of number 0, and more of it. the text of  True", "True", "True", "torch.Size([4, 16])",
        "True", "['store.json', 'tokenizer.json']",
    ]  # fmt: skip


def test_the_command_line_works_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("to be, or not to be: that is the question. " * 400, encoding="utf-8")
    (tmp_path / "store").mkdir()  # an empty folder may be replaced
    small = [
        "--steps",
        "2",
        "--train-length",
        "16",
        "--multiples",
        "1,2",
        "--encodings",
        "rotary,alibi",
        "--seeds",
        "0",
    ]
    for words in (
        ["embed", "a.txt", "-o", "a.safetensors"],
        ["plot", "alibi", "-o", "alibi.png"],
        ["prepare", "a.txt", "-o", "store"],
        ["export", "store", "-o", "exported", "--to", "nanogpt"],
        ["compare", "a.txt", "-o", "report", *small],
        ["compare", "a.txt", "-o", "report", *small, "--force"],
        ["explore", "--export", "page.html"],
    ):
        run(locant(*words), tmp_path)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"a.txt", "a.safetensors", "alibi.png", "store", "exported", "report", "page.html"}


STATE = """
from pathlib import Path
import torch
from locant.lab.resume_state import StateFolder
layer = torch.nn.Linear(2, 2)
optimizer = torch.optim.AdamW(layer.parameters())
layer(torch.ones(2)).sum().backward()
optimizer.step()
for _ in range(2):  # the second replaces the state of the first
    with StateFolder(Path("out")) as state:
        if facts := state.facts():
            state.read(dict(layer.named_parameters()), optimizer)
        state.write(dict(layer.named_parameters()), optimizer, {"step": 1})
        state.write(dict(layer.named_parameters()), optimizer, {"step": 2})
print(facts, sorted(path.name for path in Path("out-unfinished").iterdir()))
"""


def test_an_unfinished_run_is_kept(tmp_path: Path) -> None:
    assert run(STATE, tmp_path) == "{'step': 2} ['lock', 'state.safetensors']\n"


IMPOSTOR = "import sys, types\ncode = {code!r}\nexec(code, {{'__name__': 'locant.somewhere'}})"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import fcntl", "No module named 'fcntl'"),
        ("import os\nos.fork()", "has no attribute 'fork'"),
        ("import os\nos.open('.', os.O_RDONLY)", "Permission denied"),
        ("import ctypes\nctypes.CDLL(None)", "TypeError"),
        ("import os\nos.fsync(os.open('a', os.O_RDONLY))", "Bad file descriptor"),
        ("import pathlib\nf = open('folder/b')\npathlib.Path('folder').replace('moved')", "open in process"),
        ("import pathlib\npathlib.Path('folder').replace('empty')", "Permission denied"),
        ("import pathlib\nf = open('a')\npathlib.Path('a').unlink()", "open in process"),
        ("import numpy, pathlib\nf = numpy.memmap('a', 'u1', 'r')\npathlib.Path('folder/b').replace('a')", "open in"),
        ("open('12:30', 'w')", "Invalid argument"),
    ],
)
def test_what_windows_refuses_is_refused(code: str, said: str, tmp_path: Path) -> None:
    for folder in ("folder", "empty"):
        (tmp_path / folder).mkdir()
    for file in ("a", "folder/b"):
        (tmp_path / file).write_text("text", encoding="utf-8")
    assert said in run(IMPOSTOR.format(code=code), tmp_path, fails=True)
