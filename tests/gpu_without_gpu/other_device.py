"""A device of torch that is not the CPU, on a machine that has no other: ``other``, once it is registered.

Its tensors hold tensors of the CPU and say that they are elsewhere. Every operator that is given tensors of both
refuses, as CUDA does, but for copies and numbers without dimensions; so does all that reads memory. What is drawn there
comes from a generator of its own. It cannot be unregistered: that is for a process of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["OTHER", "register"]

OTHER = "other"
COPIES = ("aten::copy_", "aten::_to_copy")


class _Module:
    """What torch asks of ``torch.other``."""

    def __init__(self) -> None:
        self.manual_seed_all(0)

    def manual_seed_all(self, seed: int) -> None:
        self.drawn = torch.Generator().manual_seed(seed ^ 1).get_state()

    def get_rng_state(self) -> Tensor:
        return self.drawn.clone()

    def set_rng_state(self, state: Tensor) -> None:
        self.drawn = state.clone()

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


class _There(Tensor):
    """A tensor of the device."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor) -> _There:
        made = Tensor._make_wrapper_subclass(
            cls, held.size(), held.stride(), held.storage_offset(), dtype=held.dtype, device=torch.device(OTHER, 0)
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(operator, args, kwargs or {})

    def tolist(self) -> Any:
        return self.held.tolist()


def _computed(operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name, given = operator._schema.name, [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    here = [x for x in given if not isinstance(x, _There) and x.ndim]
    if here and len(here) < len(given) and name not in COPIES:
        raise RuntimeError(f"{name} of tensors on two devices, one of the CPU of shape {tuple(here[0].shape)}")
    place = kwargs.get("device")
    if place is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    draws = torch.Tag.nondeterministic_seeded in operator.tags
    before = torch.get_rng_state()
    if draws:
        torch.set_rng_state(MODULE.drawn)
    args_here, kwargs_here = tree_map(lambda x: x.held if isinstance(x, _There) else x, (args, kwargs))
    found = operator(*args_here, **kwargs_here)
    if draws:
        MODULE.drawn = torch.get_rng_state()
        torch.set_rng_state(before)
    if name in ("aten::_local_scalar_dense", "aten::equal"):
        return found
    if name == "aten::copy_":
        return args[0]
    known = {id(x.held): x for x in given if isinstance(x, _There)}
    to_host = place is not None and torch.device(place).type == "cpu"

    def there(x: Any) -> Any:
        if not isinstance(x, Tensor) or to_host:
            return x
        return known[id(x)] if id(x) in known else _There(x)

    return tree_map(there, found)


MODULE = _Module()
LIBRARY = torch.library.Library("_", "IMPL")


def register() -> None:
    """Have torch know the device, for as long as this process lives."""
    backend_registration._setup_privateuseone_for_python_backend(OTHER, backend_module=MODULE)
    LIBRARY.fallback(lambda operator, *args, **kwargs: _computed(operator, args, kwargs), "PrivateUse1")
