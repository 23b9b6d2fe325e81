"""A checkpoint on disk in the other layout: all of it or nothing, byte for byte, and one head in memory at a time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from locant import InputError
from locant.checkpoints import convert_layout, layout_folder
from locant.checkpoints.checkpoint_folder import read_header
from locant.checkpoints.layout import LayoutChange
from locant.checkpoints.layout_folder import convert_folder
from tests.checkpoints.other_layout import MODELS, build
from tests.refusal import refuses, shapes_unchecked

CONFIG = {
    "model_type": "qwen3", "hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "rope_theta": 1e6, "name": "größer",
}  # fmt: skip
INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def weights_of(layer: int) -> dict[str, Tensor]:
    prefix = f"model.layers.{layer}.self_attn"
    return {
        f"{prefix}.q_proj.weight": torch.randn(32, 24).bfloat16(), f"{prefix}.q_proj.bias": torch.randn(32),
        f"{prefix}.k_proj.weight": torch.randn(16, 24).to(torch.float8_e4m3fn),
        f"{prefix}.k_norm.weight": torch.randn(8), f"{prefix}.v_proj.weight": torch.randn(16, 24).half(),
        f"model.layers.{layer}.counts": torch.arange(5),
        f"model.layers.{layer}.empty": torch.zeros(0, 3), f"model.layers.{layer}.scalar": torch.tensor(True),
    }  # fmt: skip


def saved(folder: Path, *names: str) -> Path:
    """A layer in each of these files."""
    folder.mkdir()
    for layer, name in enumerate(names):
        save_file(weights_of(layer), folder / name, metadata={"format": "pt", "by": "ä"})
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return folder


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return saved(tmp_path / "whole", "model.safetensors")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    folder = saved(tmp_path / "sharded", *SHARDS)
    weight_map = {name: file for layer, file in enumerate(SHARDS) for name in weights_of(layer)}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 3}, "weight_map": weight_map}))
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def raw(tensor: Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def require_equal(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape)
        assert raw(got[name]) == raw(tensor), f"{name} differs"


# ---------------------------------------------------------------------- what comes out


@pytest.mark.parametrize("kind", ["whole", "sharded"])
def test_the_files_hold_what_the_function_returns_and_come_back(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str
) -> None:
    folder: Path = request.getfixturevalue(kind)
    before = files(folder)
    made = convert_folder(folder, tmp_path / "out", to="interleaved")
    require_equal(tensors(tmp_path / "out"), convert_layout(tensors(folder), CONFIG, to="interleaved"))
    assert files(folder) == before, "the input was written to"
    assert made.files == (("model.safetensors",) if kind == "whole" else SHARDS)
    assert (made.tensors, made.converted) == ((8, 4) if kind == "whole" else (16, 8))
    for name in made.files:
        with safe_open(folder / name, "pt") as old, safe_open(tmp_path / "out" / name, "pt") as new:
            assert new.metadata() == old.metadata()
            assert list(new.keys()) == list(old.keys())
    assert (tmp_path / "out" / INDEX).exists() == (kind == "sharded")
    convert_folder(tmp_path / "out", tmp_path / "back", to="half")
    there, back = files(tmp_path / "out"), files(tmp_path / "back")
    assert json.loads(back.pop("config.json")) == json.loads(before.pop("config.json"))
    assert back == before
    assert any(there[name] != before[name] for name in before)


@pytest.mark.parametrize("name", ["phi", "phi3", "falcon", "codegen", "cohere", "deepseek_v3", "gemma4"])
def test_every_order_of_rows_is_streamed_as_it_is_converted(tmp_path: Path, name: str) -> None:
    small = MODELS[name]
    model = build(small)
    weights = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    model.config.to_json_file(folder / "config.json", use_diff=False)
    convert_folder(folder, tmp_path / "out", to=small.other)  # type: ignore[arg-type]
    require_equal(tensors(tmp_path / "out"), convert_layout(weights, model.config, to=small.other))  # type: ignore[arg-type]


def test_the_configuration_says_what_the_weights_became(whole: Path, tmp_path: Path) -> None:
    convert_folder(whole, tmp_path / "there", to="interleaved")
    said = json.loads((tmp_path / "there" / "config.json").read_text(encoding="utf-8"))
    assert said == {**CONFIG, "rope_interleave": True}
    with refuses(InputError, "already have the layout 'interleaved'"):
        convert_folder(tmp_path / "there", tmp_path / "again", to="interleaved")


@pytest.mark.parametrize(
    ("model_type", "source", "said"), [("unheard of", "interleaved", False), ("qwen3", None, True)]
)
def test_a_layout_that_does_not_go_without_saying_is_said(
    whole: Path, tmp_path: Path, model_type: str, source: Any, said: bool
) -> None:
    text = {**CONFIG, "model_type": model_type}
    (whole / "config.json").write_text(json.dumps({"model_type": "wrapper", "text_config": text}))
    convert_folder(whole, tmp_path / "out", to="half" if source else "interleaved", source=source)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written == {"model_type": "wrapper", "text_config": {**text, "rope_interleave": said}}


def test_what_belongs_to_the_checkpoint_comes_along_and_the_rest_is_named(whole: Path, tmp_path: Path) -> None:
    along = {"tokenizer.json": b"{}", "LICENSE": b"free", "README.md": b"read", "tokenizer.model": b"\0\1"}
    rest = {"pytorch_model.bin": b"pickle", "run.py": b"import os", ".hidden": b"", "other.safetensors": b""}
    for name, content in {**along, **rest}.items():
        (whole / name).write_bytes(content)
    (whole / "folder").mkdir()
    made = convert_folder(whole, tmp_path / "out", to="interleaved")
    out = files(tmp_path / "out")
    assert out.keys() == {*along, "config.json", "model.safetensors"}
    assert {name: out[name] for name in along} == along
    assert set(made.left_out) == {*rest, "folder"}


def test_an_adapter_takes_the_configuration_of_its_model(tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    weights = {
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.randn(2, 24),
        "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight": torch.randn(32, 2),
    }
    save_file(weights, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text("{}")
    (tmp_path / "model.json").write_text(json.dumps(CONFIG))
    with refuses(InputError, "config.json"):
        convert_folder(adapter, tmp_path / "out", to="interleaved")
    convert_folder(adapter, tmp_path / "out", to="interleaved", config=tmp_path / "model.json")
    require_equal(tensors(tmp_path / "out"), convert_layout(weights, CONFIG, to="interleaved"))
    assert files(tmp_path / "out").keys() == {"adapter_model.safetensors", "adapter_config.json"}


def test_links_are_followed_and_an_empty_folder_may_take_what_they_lead_to(whole: Path, tmp_path: Path) -> None:
    """A local cache of models is a folder of links."""
    links, out = tmp_path / "links", tmp_path / "out"
    links.mkdir()
    out.mkdir()
    for path in whole.iterdir():
        (links / path.name).symlink_to(path)
    convert_folder(links, out, to="interleaved")
    assert (out / "model.safetensors").exists()
    assert not any(path.is_symlink() for path in out.iterdir())


def test_progress_ends_at_the_total(sharded: Path, tmp_path: Path) -> None:
    steps: list[tuple[int, int]] = []
    made = convert_folder(
        sharded, tmp_path / "out", to="interleaved", progress=lambda done, total: steps.append((done, total))
    )
    assert steps[-1] == (made.bytes, made.bytes)
    assert steps == sorted(steps)
    assert made.bytes == sum(tensor.nbytes for tensor in tensors(sharded).values())


# ---------------------------------------------------------------------- memory

WIDE = {"model_type": "llama", "hidden_size": 8192, "num_attention_heads": 8, "head_dim": 64}
TENSOR = 8 * 64 * 8192 * 4


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three tensors of 16 MiB each, with a head of 2 MiB."""
    path = tmp_path_factory.mktemp("wide") / "model.safetensors"
    names = [f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv"]
    save_file({name: torch.rand(512, 8192) for name in names}, path)
    return path


def test_memory_holds_a_few_copies_of_one_head_and_never_a_tensor(wide: Path) -> None:
    """The most that Python holds while a file is converted, and nothing of what was there before."""
    change, header = LayoutChange(WIDE, to="interleaved"), read_header(wide)
    moves = change.moves({tensor.name: tensor.shape for tensor in header.tensors})
    assert len(moves) == 2
    with shapes_unchecked(), wide.open("rb") as file, Path(os.devnull).open("wb") as target:  # no `NewFile`
        assert file.read(len(header.raw)) == header.raw
        tracemalloc.start()
        try:
            for _ in layout_folder.write_reordered(file, target, header, moves, "interleaved"):  # type: ignore[arg-type]
                pass
            assert tracemalloc.get_traced_memory()[1] < TENSOR / 2
        finally:
            tracemalloc.stop()


# ---------------------------------------------------------------------- all or nothing


class StopError(Exception):
    pass


def test_a_failure_half_way_leaves_nothing_behind(sharded: Path, tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise StopError

    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(StopError):
        convert_folder(sharded, tmp_path / "out", to="interleaved", progress=stop)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_full_disk_leaves_nothing_behind(sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = sorted(tmp_path.rglob("*"))

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with refuses(InputError, "No space left"):
        convert_folder(sharded, tmp_path / "out", to="interleaved")
    assert sorted(tmp_path.rglob("*")) == before


KILLED = """
import os, signal, sys
from locant.checkpoints.layout_folder import convert_folder
def die(done, total):
    if done > total // 2:
        os.kill(os.getpid(), signal.SIGKILL)
convert_folder(sys.argv[1], sys.argv[2], to="interleaved", progress=die)
"""


def test_a_killed_run_leaves_no_folder_of_that_name(sharded: Path, tmp_path: Path) -> None:
    before = files(sharded)
    out = tmp_path / "out"
    done = subprocess.run([sys.executable, "-c", KILLED, sharded, out], capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not out.exists()
    assert files(sharded) == before
    convert_folder(sharded, out, to="interleaved")


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="only Linux says which file a handle is of")
def test_everything_is_on_the_disk_before_the_folder_has_its_name(
    sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def flushed(handle: int) -> None:
        events.append(f"flush {Path(f'/proc/self/fd/{handle}').readlink().suffix.removeprefix('.')}")
        fsync(handle)

    def renamed(self: Path, target: Path) -> Path:
        events.append(f"name {target.name}")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(Path, "replace", renamed)
    convert_folder(sharded, tmp_path / "out", to="interleaved")
    last = events.index("name out")
    assert events[:last].count("flush json") == 2  # the index is copied as it is
    for name in (*SHARDS, "config.json"):
        place = events.index(f"name {name}")
        assert place < last
        assert events[place - 1] == f"flush {name.split('.')[-1]}"
    assert len(events) == last + 2
    assert events[-1].startswith("flush")


# ---------------------------------------------------------------------- what is refused


def test_a_file_that_shrinks_while_it_is_read_is_noticed(whole: Path, tmp_path: Path) -> None:
    path = whole / "model.safetensors"
    save_file({**weights_of(0), "z": torch.zeros(100_000)}, path)  # more than what is read ahead

    def cut(done: int, total: int) -> None:
        os.truncate(path, 1000)

    with refuses(InputError, "ended while it was read"):
        convert_folder(whole, tmp_path / "out", to="interleaved", progress=cut)
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_exchanged_is_noticed(sharded: Path, tmp_path: Path) -> None:
    def exchange(done: int, total: int) -> None:
        save_file({"x": torch.zeros(1)}, sharded / SHARDS[1])

    with refuses(InputError, SHARDS[1], "changed while it was read"):
        convert_folder(sharded, tmp_path / "out", to="interleaved", progress=exchange)


def broken_index(sharded: Path, change: Callable[[dict[str, Any]], None]) -> None:
    index = json.loads((sharded / INDEX).read_text())
    change(index)
    (sharded / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda index: index["weight_map"].update(extra=SHARDS[0]), ("extra in its index but not in", SHARDS[0])),
        (lambda index: index["weight_map"].pop("model.layers.0.counts"), ("counts in", "but not in its index")),
        (lambda index: index["weight_map"].update({"model.layers.0.counts": SHARDS[1]}), ("model.layers.0.counts",)),
        (
            lambda index: index["weight_map"].update(x="../model.safetensors"),
            ("../model.safetensors", "in the same folder"),
        ),
        (
            lambda index: index["weight_map"].update(x="model.bin"),
            ("model.bin", "expected a safetensors file"),
        ),
        (lambda index: index["weight_map"].update(x="gone.safetensors"), ("gone.safetensors",)),
        (lambda index: index["weight_map"].update(x=3), ("without a weight_map",)),
        (lambda index: index.pop("weight_map"), ("without a weight_map",)),
        (lambda index: index.update(weight_map={}), ("without a weight_map",)),
        (lambda index: index["weight_map"].update(x=f"{'x' * 999}.safetensors"), ("xxx...", "in the same folder")),
        (lambda index: index.update(metadata=3), ("metadata that is not an object",)),
    ],
)
def test_an_index_of_another_checkpoint_is_refused(
    sharded: Path, tmp_path: Path, change: Any, words: tuple[str, ...]
) -> None:
    broken_index(sharded, change)
    with refuses(InputError, *words):
        convert_folder(sharded, tmp_path / "out", to="interleaved")
    assert not (tmp_path / "out").exists()


def test_a_tensor_in_two_files_is_refused(sharded: Path, tmp_path: Path) -> None:
    save_file(weights_of(0), sharded / SHARDS[1])
    with refuses(InputError, "model.layers.0", SHARDS[1], "not in its index"):
        convert_folder(sharded, tmp_path / "out", to="interleaved")


def test_rows_that_are_no_whole_bytes_are_refused(tmp_path: Path, whole: Path) -> None:
    """Three elements of four bits in a row: the next row begins within a byte."""
    entry = {"dtype": "F4", "shape": [32, 3], "data_offsets": [0, 48]}
    header = json.dumps({"model.layers.0.self_attn.q_proj.weight": entry}).encode()
    (whole / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(48))
    with refuses(InputError, "of f4", "not whole bytes"):
        convert_folder(whole, tmp_path / "out", to="interleaved")


def test_folders_that_are_none_are_refused(whole: Path, tmp_path: Path) -> None:
    cases: list[tuple[Path, Path, tuple[str, ...]]] = [
        (whole, whole, ("as input and output",)),
        (whole, whole / ".." / "whole", ("as input and output",)),
        (whole, tmp_path, ("not empty",)),
        (whole, whole / "config.json", ("is a file",)),
        (whole, tmp_path / "no" / "out", ("there is no folder",)),
        (tmp_path / "gone", tmp_path / "out", ("is not a folder",)),
        (whole / "config.json", tmp_path / "out", ("is not a folder",)),
    ]
    before = sorted(tmp_path.rglob("*"))
    for folder, output, words in cases:
        with refuses(InputError, *words):
            convert_folder(folder, output, to="interleaved")
        assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "last.ckpt"])
def test_pickles_are_refused_and_never_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    folder = tmp_path / "old"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / name).write_bytes(b"\x80\x04.")
    opened: list[str] = []
    real = Path.open
    monkeypatch.setattr(
        Path, "open", lambda self, *args, **more: (opened.append(self.name), real(self, *args, **more))[1]
    )
    with refuses(InputError, name, "pickle", "safetensors"):
        convert_folder(folder, tmp_path / "out", to="interleaved")
    assert name not in opened


def test_weights_twice_or_not_at_all_are_refused(sharded: Path, tmp_path: Path) -> None:
    save_file(weights_of(0), sharded / "model.safetensors")
    with refuses(InputError, "model.safetensors and model.safetensors.index.json"):
        convert_folder(sharded, tmp_path / "out", to="interleaved")
    for path in (sharded / "model.safetensors", sharded / INDEX):
        path.unlink()
    with refuses(InputError, "without model.safetensors or model.safetensors.index.json"):
        convert_folder(sharded, tmp_path / "out", to="interleaved")
