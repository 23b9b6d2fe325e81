"""Entries about compilers and captured graphs: what an encoding may not do between its input and its output."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode

from locant import PositionEncoding, Positions
from locant.positions import constant, earlier_tokens
from locant.positions.rotary_by_class import RotaryByClass
from tests.known_bugs.exhibit import exhibit
from tests.known_bugs.subjects import EACH_CODE, EVERY, Build, differences, queries, use
from tests.known_bugs.twins import BufferRotary


@pytest.fixture(autouse=True)
def _forget_compiled_code() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


SOME = ("rotary dynamic", "t5")
SOME_OR_ALL = pytest.mark.parametrize(
    "kinds", [pytest.param(SOME, id="some"), pytest.param(tuple(EACH_CODE), id="all", marks=pytest.mark.slow)]
)
"""Compilers take long. `tests/positions` compiles every encoding as well, once."""
SWEEP = [pytest.mark.slow, pytest.mark.sweep]


class Switching(BufferRotary):
    """Other frequencies from a certain position on, which is looked for in the data."""

    def cos_sin(self, positions: Positions) -> tuple[Tensor, Tensor]:
        cos, sin = super().cos_sin(positions)
        if positions.index.max() >= 2048:
            return cos * 1.1, sin * 1.1
        return cos, sin


def one_graph(build: Build) -> None:
    """Raise unless the compiler makes one graph of it, with the same bits."""
    encoding, counter = build(), CompileCounter()
    x, positions = queries(encoding, 6), Positions.packed([2, 4])
    torch.compiler.reset()
    found = torch.compile(use, backend=counter)(encoding, x, positions)
    assert counter.frame_count == 1, f"{encoding}: {counter.frame_count} graphs"
    assert not differences(use(encoding, x, positions), found), f"{encoding}: other bits"


@pytest.mark.unchecked
@pytest.mark.parametrize(
    "kinds", [pytest.param(SOME, id="some"), pytest.param(tuple(EACH_CODE), id="all", marks=SWEEP)]
)
def test_33_every_encoding_is_one_graph(kinds: tuple[str, ...]) -> None:
    """A comparison with the largest position breaks the graph.

    huggingface/transformers#35716: Compilation made four graphs instead of one, and a slower model. Which frequencies
    to use depended on a comparison with the largest position, and data in a condition ends a graph.

    Check: `torch.compile(model, fullgraph=True)` raises an error at the comparison.

    Test: one graph and the same bits; for every encoding in `make test-slow`.
    """

    exhibit(one_graph, *[EVERY[name] for name in kinds], twin=Switching, because="[2-9] graphs")


class NoReading(TorchDispatchMode):
    """Finds what a stream cannot do while it is captured: let the host read, or send it something of its own."""

    READS = frozenset({"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2"})
    SENDS = frozenset({"lift_fresh"})  # a tensor made from Python numbers, which a device would have to be sent

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        unsized = name == "repeat_interleave" and not (kwargs or {}).get("output_size")
        if name in self.READS | self.SENDS or unsized:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


PLACES = {"counting": Positions.arange(6), "decoding": Positions.after(2000, 6), "packed": Positions.packed([2, 4])}


def test_34_the_host_neither_reads_nor_sends() -> None:
    """The host reads positions during graph capture.

    vllm-project/vllm#58064: An engine could not start, because its CUDA graphs could not be captured.
    `torch.max(position_ids)` in a condition makes the host wait for a number, which is impossible while a stream is
    captured.

    Check: `torch.cuda.set_sync_debug_mode("error")` around a forward pass.

    Test: no host read and no host tensor in any method; on a GPU a capture and a replay, where there is one.
    """

    def check(build: Build) -> None:
        encoding = build()
        x = queries(encoding, 6)
        grid = Positions.grid(1, 2, 3) if getattr(encoding, "sections", None) else Positions.arange(6)
        for place, positions in {**PLACES, "grid": grid}.items():
            # On a CPU the host reads positions of which it does not know whether tokens are missing. Here it may not.
            with patch.object(earlier_tokens, "host_can_read", return_value=False), NoReading() as mode:
                use(encoding, x, positions)
            assert not mode.found, f"{encoding}: {place}, the host does {mode.found}"

    exhibit(check, *EACH_CODE.values(), twin=Switching, because=r"the host does \['_local_scalar_dense'\]")


class LengthInABuffer(BufferRotary):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("length", torch.tensor(0), persistent=False)

    def cos_sin(self, positions: Positions) -> tuple[Tensor, Tensor]:
        if positions.seq_len > self.length.item():
            self.length.fill_(positions.seq_len)
        return super().cos_sin(positions)


@pytest.mark.unchecked
def test_36_lengths_are_no_tensors() -> None:
    """A length in a buffer breaks the graph.

    lucidrains/rotary-embedding-torch#38: Compilation failed on `.item()`. The length of a cache was kept in a buffer,
    so every call read it back.

    Check: `torch.compile(model, fullgraph=True)`.

    Test: no graph break where positions are made inside.
    """
    exhibit(one_graph, *[EVERY[name] for name in SOME], twin=LengthInABuffer, because="[2-9] graphs")


@pytest.fixture
def constants_made(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Every constant of the package that is made from now on."""
    made: list[object] = []
    init = constant.Constant.__init__

    def counted(self: constant.Constant, value: Tensor) -> None:
        made.append(self)
        init(self, value)

    monkeypatch.setattr(constant.Constant, "__init__", counted)
    return made


def calls(encoding: PositionEncoding, run: Callable[..., object], lengths: Iterable[int]) -> None:
    for seq_len in lengths:
        run(encoding, queries(encoding, seq_len), Positions.arange(seq_len))


class RebuiltWhenShorter(BufferRotary):
    """A cache compared with ``!=`` where ``>`` was meant."""

    def __init__(self) -> None:
        super().__init__()
        self.cached: tuple[Tensor, Tensor] | None = None
        self.builds = 0

    def cos_sin(self, positions: Positions) -> tuple[Tensor, Tensor]:
        if self.cached is None or self.cached[0].shape[1] != positions.seq_len:
            self.cached, self.builds = super().cos_sin(positions), self.builds + 1
        return self.cached


def test_37_tables_are_built_once(constants_made: list[object]) -> None:
    """Tables are built again for every shorter input.

    foundation-model-stack/foundation-model-stack#64, facebookresearch/xformers#728: A table was built again for each
    input that is shorter than the last one. Compilation made a new graph for every length.

    Check: `TORCH_LOGS=recompiles` with a prompt, one token and a prompt again.

    Test: no table made by a call; two compilations at most, for every encoding in `make test-slow`.
    """

    def check(build: Build) -> None:
        encoding = build()
        constants_made.clear()
        calls(encoding, use, (16, 1, 16, 7))
        builds = len(constants_made) + getattr(encoding, "builds", 0)
        assert builds <= 1, f"{builds} tables for four calls"

    exhibit(check, *EACH_CODE.values(), twin=RebuiltWhenShorter, because="4 tables for four calls")
    EVERY["rotary"]()
    assert constants_made, "no table was seen, nor would be"


BESIDE_POWERS = (2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 127, 128, 129, 300)


@pytest.mark.unchecked
@SOME_OR_ALL
def test_37_two_compilations_serve_every_length(kinds: tuple[str, ...]) -> None:
    """foundation-model-stack/foundation-model-stack#64, facebookresearch/xformers#728: a graph for every length.

    A token, a prompt and a token again, then other lengths: one graph for the first, one for the others. A graph asks
    whether a length is 0, 1 or below a bound, so the others are those beside the powers of two.
    Encodings by class of pair have one more graph for two tokens, which they are not given.
    """

    def check(build: Build) -> None:
        torch.compiler.reset()
        counter, encoding = CompileCounter(), build()
        others = BESIDE_POWERS[isinstance(encoding, RotaryByClass) :]
        calls(encoding, torch.compile(use, backend=counter), (1, 512, 1, *others, 512))
        assert counter.frame_count <= 2, f"{encoding}: {counter.frame_count} compilations for {len(others)} lengths"

    exhibit(check, *(EVERY[name] for name in kinds), twin=RebuiltWhenShorter, because="compilations for 15 lengths")
