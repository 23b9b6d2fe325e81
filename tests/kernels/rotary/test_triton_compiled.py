"""What a GPU would be given: how often the kernel is compiled, and what into. Nothing here runs on one.

Triton brings the assembler with it, so machine code is made without a device; how fast it is, only a device can say.
"""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.rotary.rotating import launch, tables

pytest.importorskip("triton", reason="there is no Triton for this platform")

LAYOUTS = ["half", "interleaved"]
NAMES = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float64: "*fp64"}
NAMES[torch.int64] = "*i64"


def compiled_for(arguments: dict[str, Any]) -> tuple[object, ...]:
    """What of a launch Triton compiles anew for: constants, dtypes, and what it may assume of the free integers."""
    key = []
    for name, value in sorted(arguments.items()):
        if isinstance(value, Tensor):
            key.append((name, value.dtype, value.data_ptr() % 16 == 0))
        elif name.isupper() or isinstance(value, bool):
            key.append((name, value))
        elif name.endswith("_dim"):
            key.append((name, value == 1, value % 16 == 0))
    return tuple(key)


LENGTHS = [*range(1, 40), 63, 64, 100, 127, 128, 1000, 1023, 1024, 4095, 4096, 4099]


@pytest.mark.parametrize("head_dim", [64, 72, 128])
@pytest.mark.parametrize("tokens_first", [False, True])
def test_one_compilation_serves_all_lengths_and_batches(tokens_first: bool, head_dim: int) -> None:
    def queries(batch: int, heads: int, seq: int) -> Tensor:
        shape = (batch, seq, heads, head_dim) if tokens_first else (batch, heads, seq, head_dim)
        x = torch.empty(shape, dtype=torch.bfloat16)
        return x.transpose(1, 2) if tokens_first else x

    keys = {compiled_for(launch(queries(1, 8, seq), queries(1, 2, seq))) for seq in LENGTHS}
    keys |= {compiled_for(launch(queries(batch, 8, 1), queries(batch, 2, 1))) for batch in (2, 17, 256)}
    assert len(keys) == 1
    assert len(keys | {compiled_for(launch(queries(1, 8, 5).double(), queries(1, 2, 5).double()))}) == 2


def test_the_stride_of_a_single_row_says_nothing_about_alignment() -> None:
    x = torch.empty(1, 4, 5, 64, dtype=torch.bfloat16)
    odd = x.as_strided(x.shape, (7, *x.stride()[1:]))
    assert launch(odd, odd)["UNIT"] == launch(x, x)["UNIT"] == 8


def test_the_backward_and_in_place_need_no_compilation_of_their_own() -> None:
    x = torch.empty(1, 4, 5, 64)
    forward = launch(x, x)
    assert forward["direction"] == 1
    assert compiled_for(forward) == compiled_for({**forward, "direction": -1, "out_q": x, "out_k": x})


def test_few_tokens_share_out_their_heads() -> None:
    """So that a GPU is not left idle while one program rotates all heads of the newest token."""

    def shares(batch: int, seq: int) -> int:
        x = torch.empty(batch, 32, seq, 128, dtype=torch.bfloat16)
        return launch(x, x[:, :8])["shares"]

    assert shares(1, 1) == 8  # one block of four heads each
    assert shares(1, 4096) == 2
    assert shares(1, 16_384) == 1


MachineCode = Callable[[dict[str, Any], int], str]


@pytest.fixture(scope="module")
def machine_code(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MachineCode]:
    """PTX for a compute capability, after the assembler has accepted it.

    Made in a process of its own: once Triton 3.5 has interpreted a kernel, it compiles none.
    """
    cache = tmp_path_factory.mktemp("triton")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
        yield lambda arguments, capability: fresh.submit(_machine_code, arguments, capability, cache).result()


def _machine_code(arguments: dict[str, Any], capability: int, cache: Path) -> str:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from locant.kernels.rotary import triton as module

    signature, constants, hints = {}, {}, {}
    for place, parameter in enumerate(module._rotate_kernel.params):
        value = arguments[parameter.name]
        if parameter.is_constexpr or (parameter.name.endswith("_dim") and value == 1):
            signature[parameter.name], constants[place,] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[parameter.name], hints[place,] = NAMES[value.dtype], [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = parameter.annotation_type or "i32"
    options = {name: arguments[name] for name in ("num_warps", "enable_fp_fusion")}
    source = ASTSource(module._rotate_kernel, signature, constexprs=constants, attrs=hints)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(cache))
        kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert kernel.asm["cubin"]
    return kernel.asm["ptx"]


def contracted(ptx: str) -> list[str]:
    """Products that are not rounded before they are added to something."""
    return re.findall(r"\bfma\.rn\S*\.f(?:32|64)", ptx)


def widths(ptx: str, access: str) -> set[str]:
    """Of the accesses to bfloat16 tokens: so many registers of 32 bits at once."""
    return set(re.findall(rf"\b{access}\.global\S*?((?:\.v[248])?\.b(?:16|32))", ptx))


def tokens(head_dim: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    return torch.empty(1, 8, 5, head_dim, dtype=dtype), torch.empty(1, 2, 5, head_dim, dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_move_16_bytes_at_a_time_and_products_are_rounded(layout: str, machine_code: MachineCode) -> None:
    ptx = machine_code(launch(*tokens(128), layout=layout, levels=2), 90)
    assert contracted(ptx) == []
    assert ".local" not in ptx, "registers do not suffice"
    assert widths(ptx, "st") == {".v4.b32"}
    assert widths(ptx, "ld") == {".v4.b32"}


@pytest.mark.slow
def test_contracted_products_would_be_seen(machine_code: MachineCode) -> None:
    fused = {**launch(*tokens(64), levels=2), "enable_fp_fusion": True}
    assert contracted(machine_code(fused, 90))


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("head_dim", "capability"),
    [(2, 90), (40, 90), (72, 80), (80, 90), (96, 100), (128, 80), (192, 90), (256, 90), (512, 90)],
)
def test_it_compiles_for_every_head(head_dim: int, layout: str, capability: int, machine_code: MachineCode) -> None:
    """Whole and partial, with one axis and with several, in every dtype."""
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        ptx = machine_code(launch(*tokens(head_dim, dtype), layout=layout), capability)
        assert contracted(ptx) == []
        assert ".local" not in ptx
    rotary_dim = max(2, head_dim // 4 * 2)
    machine_code(launch(*tokens(head_dim), layout=layout, rotary_dim=rotary_dim, attention_factor=1.25), capability)


@pytest.mark.gpu
def test_fifty_lengths_compile_once_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    from locant.kernels.rotary import triton as module

    made: list[object] = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **about: made.append(about))
    of = tables(44, "cuda", levels=2)
    for seq in LENGTHS:
        x = torch.randn(1, 5, seq, 44, device="cuda")
        index = torch.arange(seq, device="cuda")[None]
        module.rotate_(x, x[:, :3], x, x[:, :3], index, of, "half", seq % 2 == 0)
    assert len(made) <= 1
