"""torch.compile for an H100 that is not there: dynamo, Inductor, Triton and the assembler, up to machine code.

Tensors are fake ones on "cuda", so nothing is computed, and nothing can be: what reads a value of the device, or copies
from the host to it, is refused. What Inductor's code would launch is compiled, and listed instead.

The mock is global, and so is for processes of its own: `start` is what such a process begins with. torch may be built
with CUDA or without.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

__all__ = ["Kernel", "compiled", "start", "to_device"]

SHARED_MEMORY = 232448
"""Bytes that a program may have on an H100."""

LACKING = """
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace c10::impl {
struct OneDevice : DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return getDevice(); }
  Device getDevice() const override { return Device(DeviceType::CUDA, 0); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream getNewStream(Device device, int) const override { return getStream(device); }
  Stream exchangeStream(Stream stream) const override { return stream; }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, OneDevice)
}
namespace at {
struct CUDAHooks : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
};
REGISTER_CUDA_HOOKS(CUDAHooks)
}
"""
"""What torch without CUDA lacks for fake tensors on it to be indexed and differentiated."""

H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", major=9, minor=0, total_memory=80 * 2**30, multi_processor_count=132, warp_size=32,
    max_threads_per_multi_processor=2048, max_threads_per_block=1024, regs_per_multiprocessor=65536,
    shared_memory_per_block=49152, shared_memory_per_block_optin=SHARED_MEMORY, shared_memory_per_multiprocessor=233472,
    L2_cache_size=50 * 2**20, clock_rate=1755000, memory_clock_rate=2619000, memory_bus_width=5120, gcnArchName="",
    is_integrated=0, uuid="", pci_bus_id=0,
)  # fmt: skip

_KERNELS: list[Kernel] = []


@dataclass(frozen=True)
class Kernel:
    """Machine code that would have been launched."""

    name: str
    shared: int
    """Bytes of shared memory of a program."""
    ptx: str


class _Driver:
    """As much of Triton's driver as compiling asks for."""

    launcher_cls = None
    utils = SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": SHARED_MEMORY})

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cuda", 0)

    def get_device_interface(self) -> Any:
        import torch

        return torch.cuda

    def map_python_to_cpp_type(self, kind: str) -> str:
        return kind

    def get_benchmarker(self) -> None:
        return None


def start(cache: Path) -> None:
    """Pretend, for as long as this process lives, that there is an H100."""
    os.environ |= {
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"), "TRITON_CACHE_DIR": str(cache / "triton"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1", "TRITON_DEFAULT_FP_FUSION": "1",
    }  # fmt: skip
    _library(cache)
    _cuda()
    _triton()
    _inductor()


def _library(cache: Path) -> None:
    """Before torch asks for the first time what there is."""
    home = Path(find_spec("torch").origin).parent
    if (home / "lib" / "libtorch_cuda.so").exists():
        import torch

        torch._C._ensureCUDADeviceGuardSet()  # enough where torch is built with CUDA
        return
    library, libraries = cache / "lacking.so", home / "lib"
    command = ["c++", "-std=c++20", "-shared", "-fPIC", f"-I{home / 'include'}", "-x", "c++", "-", "-o", library]
    linked = [f"-L{libraries}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{libraries}"]
    subprocess.run([*command, *linked], input=LACKING, text=True, check=True)
    ctypes.CDLL(str(library))


class _Nothing:
    """A guard of a device: nothing is to be switched."""

    def __init__(self, *_: object) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def _cuda() -> None:
    import torch
    import torch.cuda.random

    answers = {
        "is_available": True, "device_count": 1, "current_device": 0, "is_initialized": False, "_lazy_init": None,
        "get_device_properties": H100, "_get_device_properties": H100, "get_device_capability": (9, 0),
        "get_device_name": H100.name, "is_bf16_supported": True, "synchronize": None,
        "current_stream": SimpleNamespace(cuda_stream=0), "memory_allocated": 0, "max_memory_allocated": 0,
        "is_current_stream_capturing": False, "_get_device_index": 0, "set_rng_state": None,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, _always(answer))
    for name in ("get_rng_state", "set_rng_state"):
        setattr(torch.cuda.random, name, getattr(torch.cuda, name))
    torch.cuda.device = torch.cuda._DeviceGuard = _Nothing
    for name, answer in {"_cuda_getDeviceCount": 1, "_cuda_getCurrentRawStream": 0, "_cuda_setDevice": None}.items():
        setattr(torch._C, name, _always(answer))


def _always(answer: object) -> Callable[..., Any]:
    return lambda *_, **__: answer


def _triton() -> None:
    import triton
    from triton.compiler import CompiledKernel
    from triton.runtime import driver
    from triton.runtime.errors import OutOfResources

    driver.set_active(_Driver())

    def load(kernel: Any) -> None:
        if kernel.metadata.shared > SHARED_MEMORY:
            raise OutOfResources(kernel.metadata.shared, SHARED_MEMORY, "shared memory")
        kernel.n_regs = kernel.n_spills = 0
        kernel.n_max_threads, kernel.module, kernel.function = 1024, None, None
        kernel._run = lambda *_, **__: None

    CompiledKernel._init_handles = load
    compile_ = triton.compile

    def compile_and_keep(source: Any, *arguments: Any, **options: Any) -> Any:
        made = compile_(source, *arguments, **options)
        _KERNELS.append(Kernel(made.metadata.name, made.metadata.shared, made.asm["ptx"]))
        return made

    triton.compile = compile_and_keep


def _inductor() -> None:
    import torch
    import torch._dynamo.device_interface as interface
    from torch._functorch import config as functorch
    from torch._inductor import config
    from torch._inductor.fx_passes import fuse_attention, joint_graph, misc_patterns, pad_mm
    from torch._inductor.runtime import triton_helpers, triton_heuristics
    from torch._inductor.select_algorithm import extern_kernels
    from torch._subclasses import fake_tensor

    fake_tensor.init_gpu_context = _always(None)
    interface.DeviceGuard.__enter__ = _always(None)
    interface.DeviceGuard.__exit__ = _always(False)
    for module in (triton_heuristics.triton_helpers, triton_helpers):
        module.set_driver_to_gpu = _always(None)
    for module in (fuse_attention, joint_graph, misc_patterns, pad_mm):  # they try their patterns on the device
        for name in ("_sfdp_init", "_misc_patterns_init", "_pad_mm_init"):
            if hasattr(module, name):
                setattr(module, name, _always(None))
    settings = {
        "joint_graph_constant_folding": False, "pattern_matcher": False, "fx_graph_cache": False,
        "force_disable_caches": True, "compile_threads": 1, "use_static_triton_launcher": False,
        "use_static_cuda_launcher": False, "strict_static_triton_launcher": False,
    }  # fmt: skip
    for name, value in settings.items():
        if hasattr(config, name):
            setattr(config, name, value)
    if hasattr(functorch, "force_non_lazy_backward_lowering"):
        functorch.force_non_lazy_backward_lowering = False

    def empty(size: Any, stride: Any, dtype: Any) -> Any:
        return torch.empty_strided(size, stride, dtype=dtype, device="cuda")

    torch._C._dynamo.guards._empty_strided_cuda = empty
    triton_heuristics.CachingAutotuner.bench = _always(1.0)  # all are as quick as one another
    for name in ("mm", "addmm", "bmm", "baddbmm"):  # libraries' products; torch has none that write to fake tensors
        setattr(extern_kernels, name, lambda *_, out: out)


def to_device(module: Any, *, learning: bool = False) -> None:
    """Give a module, if it is one, parameters on the device."""
    import torch

    for each in () if module is None else module.modules():
        for name, parameter in list(each._parameters.items()):
            if parameter is not None:
                there = torch.empty(parameter.shape, dtype=parameter.dtype, device="cuda")
                each._parameters[name] = torch.nn.Parameter(there, requires_grad=learning)


def compiled(function: Callable[..., Any], *arguments: Any) -> list[Kernel]:
    """What `function` launches, compiled anew. Tensors that it makes are fake ones."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    torch.compiler.reset()
    _KERNELS.clear()
    with FakeTensorMode(allow_non_fake_inputs=True):
        function(*arguments)
    return list(_KERNELS)
