"""Entries about what a module keeps: buffers that a device move, a load or a forward pass changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import pytest
import torch
from torch import Tensor, nn

from locant import InputEmbedding, Learned, PositionEncoding, Positions
from tests.known_bugs.exhibit import exhibit
from tests.known_bugs.subjects import DISTINCT, EACH_CODE, EVERY, WIDTH, Build, differences, queries, use
from tests.known_bugs.twins import BufferRotary, GrowingRotary

SOME_OF_EACH = [EVERY[name] for name in DISTINCT]
SOME = Positions.of([0, 1, 2, 100, 1857, 4095])


def some(encoding: PositionEncoding) -> dict[str, Tensor]:
    return use(encoding, queries(encoding, SOME.seq_len), SOME)


def poison(module: nn.Module) -> None:
    """What memory that nobody has written to may hold, at its worst."""
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data.fill_(float("nan"))


def recover(module: nn.Module) -> set[str]:
    """The loop of every trainer: reset what can be reset, and say what that was."""
    torch.manual_seed(7)
    able = {name: part for name, part in module.named_modules() if hasattr(part, "reset_parameters")}
    for part in able.values():
        part.reset_parameters()
    return set(able)


def on_meta_and_back(build: Callable[[], nn.Module]) -> tuple[nn.Module, set[str]]:
    with torch.device("meta"):
        module = build()
    module = module.to_empty(device="cpu")
    poison(module)
    return module, recover(module)


class Model(nn.Module):
    """Any encoding where it stands in a model: next to layers with a state of their own."""

    def __init__(self, build: Callable[[], PositionEncoding]) -> None:
        super().__init__()
        self.input = InputEmbedding(50, WIDTH, num_segments=2, norm="layer_norm", padding_idx=0)
        self.encoding = build()
        self.head = nn.Linear(WIDTH, WIDTH)


def test_25_a_model_made_on_the_meta_device_is_the_same() -> None:
    """Frequencies are uninitialised memory after `to_empty`.

    huggingface/transformers#45902: A model was made on the meta device and moved by `to_empty`. A buffer that is not in
    the checkpoint gets no values there, so the frequencies were whatever was in memory.

    Check: After loading, compare `inv_freq` with that of a model built without the meta device.

    Test: meta, `to_empty`, NaN, reset: encodings of every kind inside a model.
    """

    def check(build: Build) -> None:
        empty, _ = on_meta_and_back(lambda: Model(build))
        usual = Model(build)
        recover(usual)
        with torch.no_grad():
            moved = differences(some(usual.encoding), some(empty.encoding))  # type: ignore[union-attr,arg-type]
        assert not moved, f"{usual.encoding}: not the same after to_empty and a reset"
        for key, value in usual.state_dict().items():
            assert torch.equal(value, empty.state_dict()[key]), f"{key} differs"

    exhibit(check, *SOME_OF_EACH, twin=BufferRotary, because="not the same after to_empty")


def test_26_what_has_a_state_is_recovered_and_says_so() -> None:
    """Buffers are not repaired because a method was renamed.

    pytorch/torchtitan#4817: The loop that should repair uninitialised frequencies did nothing. It asked each module for
    a method that had been renamed, and `hasattr` returned False for all of them.

    Check: Count the modules that your loop resets, and compare `inv_freq` before and after.

    Test: what the reset reached, counted.
    """

    class Renamed(Learned):
        """Its own method is under a name that no loop knows."""

        reset_parameters = property()  # type: ignore[assignment]  # raises AttributeError: `hasattr` says no

        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.max_seq_len, self.offset = 4096, 0
            self.weight = nn.Parameter(torch.zeros(4096, WIDTH))

    def check(build: Build) -> None:
        model, recovered = on_meta_and_back(lambda: Model(build))
        owners = {
            name
            for name, part in model.named_modules()
            if [*part.parameters(recurse=False), *part.buffers(recurse=False)]
        }
        assert {"input.token", "input.segment", "input.norm", "head"} <= owners, "the check looks at nothing"
        assert owners <= recovered, f"the loop passed over {owners - recovered}"
        assert not any(tensor.isnan().any() for tensor in model.state_dict().values()), "unwritten memory is left"

    exhibit(check, *SOME_OF_EACH, twin=Renamed, because="the loop passed over {'encoding'}")
    exhibit(check, EVERY["rotary"], twin=BufferRotary, because="the loop passed over {'encoding'}")


LEGACY = ("inv_freq", "original_inv_freq", "freqs", "cos_cached", "sin_cached")


def refused(module: nn.Module, state: Mapping[str, Tensor]) -> str:
    """What a strict load says against this state; nothing where it is taken."""
    try:
        module.load_state_dict(state, strict=True)
    except RuntimeError as error:
        return str(error)
    return ""


def test_27_checkpoints_load_with_and_without_old_buffers() -> None:
    """Checkpoints have `inv_freq` or lack it.

    pytorch/torchtitan#201, EleutherAI/gpt-neox#1168, meta-pytorch/gpt-fast#42, huggingface/transformers#35255: Loading
    failed with missing or unexpected `inv_freq` or `rope.freqs`. The buffer had become persistent in one release, or
    had stopped being persistent.

    Check: `[k for k in model.state_dict() if "inv_freq" in k or "freqs" in k]` in both releases.

    Test: strict loads with and without five old names; any other name is refused. Rotary alone: old buffers of other
    encodings are refused.
    """

    def check(build: Build) -> None:
        encoding = build()
        model, before = nn.Sequential(nn.Linear(2, 2), nn.Sequential(encoding)), some(encoding)
        own = {name: value for name, value in model.state_dict().items() if "inv_freq" not in name}
        assert not refused(model, own), f"without the old buffer: {refused(model, own)}"
        for key in LEGACY:
            said = refused(model, {**own, f"1.0.{key}": torch.full((WIDTH // 2,), 9.0)})
            assert not said, f"with the old buffer: {said}"
            assert not refused(encoding, {**encoding.state_dict(), key: torch.ones(1)}), "with it in a file of its own"
            assert not differences(before, some(encoding)), "the old buffer replaced what the configuration says"
        assert "bogus" in refused(model, {**own, "1.0.bogus": torch.ones(1)}), "any key at all is taken"

    ours = EVERY["rotary"], EVERY["rotary dynamic"], EVERY["rotary float32 yarn"]
    exhibit(check, *ours, twin=BufferRotary, because="(?s)with the old buffer: .*Unexpected key")
    because = "(?s)without the old buffer: .*Missing key"
    exhibit(check, *ours, twin=lambda: BufferRotary(persistent=True), because=because)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_28_loading_in_a_dtype_is_casting_to_it(dtype: torch.dtype) -> None:
    """Loading in a dtype and casting to it differ.

    huggingface/transformers#30709: `from_pretrained(dtype)` and `.to(dtype)` gave different logits. One of them casts
    buffers and the other does not.

    Check: Load both ways and compare `dict(model.named_buffers())`.

    Test: built in a dtype, assigned in it, cast to it.
    """

    def check(build: Build) -> None:
        torch.manual_seed(0)
        original = Model(build)
        state = {name: value.to(dtype) for name, value in original.state_dict().items()}
        torch.set_default_dtype(dtype)
        try:
            built = Model(build)
        finally:
            torch.set_default_dtype(torch.float32)
        built.load_state_dict(state)
        assigned = Model(build)
        assigned.load_state_dict(state, assign=True)
        routes = [original.to(dtype), built, assigned]
        ids = torch.arange(SOME.seq_len)[None]
        with torch.no_grad():
            outs = [{"x": route.input(ids, SOME), **some(route.encoding)} for route in routes]
        for other in outs[1:]:
            moved = differences(outs[0], other)
            assert not moved, f"{original.encoding}: the routes differ by {moved}"

    class Careful(BufferRotary):
        """Made in float32 whatever the default: right when built in a dtype, and cast by ``.to(dtype)``."""

        def __init__(self) -> None:
            super().__init__()
            self.inv_freq = 1.0 / 10_000.0 ** (torch.arange(0, WIDTH, 2).float() / WIDTH)

    exhibit(check, *SOME_OF_EACH, twin=Careful, because="the routes differ by")


def test_31_nothing_is_left_behind_on_another_device() -> None:
    """A forward pass leaves a buffer on another device.

    unslothai/unsloth#6662: Data-parallel training stopped with "No backend type associated with device type cpu". The
    model was on its GPU except for one buffer, which the first forward pass made again on the CPU.

    Check: `{b.device for b in model.buffers()}` after a forward pass.

    Test: the meta device in place of a GPU.
    """

    class MadeOnTheCpu(BufferRotary):
        def cos_sin(self, positions: Positions) -> tuple[Tensor, Tensor]:
            self.inv_freq = 1.0 / 10_000.0 ** (torch.arange(0, WIDTH, 2, device="cpu") / WIDTH)
            return tuple(table.to(positions.device) for table in BufferRotary().cos_sin(SOME))  # type: ignore[return-value]

    def check(build: Build) -> None:
        encoding = build().to("meta")
        out = use(encoding, queries(encoding, SOME.seq_len, device="meta"), SOME.to("meta"))
        assert {value.device.type for value in out.values()} == {"meta"}, "an output on another device"
        kept = [*encoding.named_parameters(), *encoding.named_buffers()]
        behind = {name: value.device.type for name, value in kept if value.device.type != "meta"}
        assert not behind, f"left behind: {behind}"

    exhibit(check, *EACH_CODE.values(), twin=MadeOnTheCpu, because="left behind: {'inv_freq': 'cpu'}")


def test_32_buffers_are_the_same_objects_after_a_forward_pass() -> None:
    """A forward pass replaces a registered buffer.

    pytorch/pytorch#63916: Data-parallel training did not synchronise buffers. `self.buffer = new` puts another tensor
    in the place of the registered one.

    Check: Compare `[id(b) for b in model.buffers()]` before and after a forward pass.

    Test: identities of buffers over three lengths.
    """

    def check(build: Build) -> None:
        encoding = build()
        before = {name: (id(value), value.data_ptr()) for name, value in encoding.named_buffers()}
        for seq_len in (4, 1, 40):
            use(encoding, queries(encoding, seq_len), Positions.arange(seq_len))
            after = {name: (id(value), value.data_ptr()) for name, value in encoding.named_buffers()}
            assert after == before, f"at length {seq_len} the buffers are other ones"

    exhibit(check, *EACH_CODE.values(), twin=GrowingRotary, because="at length 4 the buffers are other ones")


def kept(thing: object, path: str = "") -> Iterator[tuple[str, int, int]]:
    """Everything that an object of this package or of these tests holds, with identities and versions of tensors."""
    if isinstance(thing, Tensor):
        yield path, id(thing), thing._version
    elif isinstance(thing, Mapping):
        for key, value in thing.items():
            yield from kept(value, f"{path}[{key}]")
    elif isinstance(thing, list | tuple):
        for place, value in enumerate(thing):
            yield from kept(value, f"{path}[{place}]")
    elif type(thing).__module__.startswith(("locant", "tests")):
        for name, value in vars(thing).items():
            yield from kept(value, f"{path}.{name}")
    else:
        yield path, id(thing), 0


@pytest.mark.parametrize("way", ["eager", pytest.param("compiled", marks=pytest.mark.unchecked)])
def test_35_a_forward_pass_leaves_no_trace(way: str) -> None:
    """Frequencies are kept in the memory of a CUDA graph.

    huggingface/transformers#30775: PyTorch raised "accessing tensor output of CUDAGraphs that has been overwritten".
    The first forward pass made the frequencies and kept them, inside a graph and in memory that belongs to the graph.

    Check: Compare `vars(module)` before and after a compiled forward pass.

    Test: everything a module holds, before and after, eager and compiled.
    """

    class Lazy(BufferRotary):
        def cos_sin(self, positions: Positions) -> tuple[Tensor, Tensor]:
            self.inv_freq = 1.0 / 10_000.0 ** (torch.arange(0, WIDTH, 2, device=positions.device) / WIDTH)
            return super().cos_sin(positions)

    def check(build: Build) -> None:
        encoding = build()
        before = set(kept(encoding))
        assert ".training" in {path for path, *_ in before}, "the check looks at nothing"
        torch.compiler.reset()
        run = use if way == "eager" else torch.compile(use, backend="eager")
        run(encoding, queries(encoding, 5), Positions.arange(5))
        traces = sorted(path for path, *_ in set(kept(encoding)) ^ before)
        assert not traces, f"the forward pass changed {traces}"

    ours = SOME_OF_EACH if way == "eager" else [EVERY["rotary dynamic"], EVERY["t5"]]
    exhibit(check, *ours, twin=Lazy, because=r"the forward pass changed \['._buffers\[inv_freq\]'")
