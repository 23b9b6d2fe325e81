"""The arguments of a foreign forward, found by the names in its signature.

Releases rename arguments. The cache of `transformers` was `past_key_values` up to 5.23 and is `cache` since 5.24.
Code that reads the old name silently gets no value. So we look up the names once, when a hook is attached. If a forward
has no known name for a necessary argument, we raise `InputError`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from locant.errors import InputError

CACHE = ("cache", "past_key_values")
"""The names of a model's cache in releases of `transformers`, as an argument and as an entry of the model's result."""
TOKENS = ("input_ids", "inputs_embeds")
"""The arguments that hold the token ids or their embeddings."""
USES_CACHE = "use_cache"
CACHE_TYPE = re.compile(r"\b(Dynamic|Static|EncoderDecoder)?Cache\b")


class ForwardArguments:
    """The arguments of a model's forward, by name.

    Args:
        model: the module whose forward is called.
        generates: whether the module is part of a model that generates text, which needs a cache.

    Raises:
        InputError: the forward has no argument with a known name for its tokens, or for a cache that it needs.
    """

    def __init__(self, model: nn.Module, *, generates: bool = False) -> None:
        parameters = inspect.signature(model.forward).parameters
        self.names = [*parameters]
        if not set(self.names) & {*TOKENS}:
            raise _no_forward_argument("its tokens", model, TOKENS)
        self.cache = cache_argument(model)
        if self.cache is None and (generates or _has_cache(model)):
            raise _no_forward_argument("its cache", model, CACHE)

    def read(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of one call by name. A cache with an old name gets the name of this release."""
        arguments = dict(zip(self.names, args, strict=False)) | dict(kwargs)
        if self.cache is not None and self.cache not in arguments:  # a forward may also accept its old names
            old_name = next((name for name in CACHE if name in arguments), None)
            if old_name is not None:
                arguments[self.cache] = arguments.pop(old_name)
        return arguments

    def cache_of(self, arguments: Mapping[str, Any]) -> Any:
        """Return the cache among arguments from `read`, or ``None`` if there is none."""
        return None if self.cache is None else arguments.get(self.cache)


def cache_argument(model: Any) -> str | None:
    """Return the name of a model's argument for the cache, or ``None`` if no argument has a known name."""
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in CACHE if name in parameters), None)


def cache_in(result: Any) -> Any:
    """Return the cache in the result of a model, or ``None`` if there is none."""
    values = [*result.values()] if isinstance(result, Mapping) else result
    return next((each for each in values if hasattr(each, "get_seq_length")), None)


def _has_cache(model: nn.Module) -> bool:
    """Return whether a model needs a cache.

    It does if its attention is causal, or if its forward or an overridden forward has an argument for a cache.
    """
    if any(getattr(each, "is_causal", None) is True for each in model.modules()):
        return True
    forwards = [cls.forward for cls in type(model).__mro__ if "forward" in vars(cls)]
    parameters = {name: each for forward in forwards for name, each in inspect.signature(forward).parameters.items()}
    if {*parameters} & {*CACHE, USES_CACHE}:
        return True
    return any(CACHE_TYPE.search(str(each.annotation)) for each in parameters.values())


def named_argument(function: Callable[..., Any], what: str, *known: str) -> str:
    """Return the first of the known names that is an argument of a function.

    Args:
        what: the meaning of the argument, for the error.

    Raises:
        InputError: the function has no argument with any of these names.
    """
    names = [*inspect.signature(function).parameters]
    name = next((name for name in known if name in names), None)
    if name is None:
        raise _no_argument(what, f"{function.__qualname__}({', '.join(names)})", known)
    return name


def _no_forward_argument(what: str, model: nn.Module, known: tuple[str, ...]) -> InputError:
    names = ", ".join(inspect.signature(model.forward).parameters)
    return _no_argument(what, f"{type(model).__name__}.forward({names})", known)


def _no_argument(what: str, call: str, known: tuple[str, ...]) -> InputError:
    got = f"found no argument for {what} in {call}, whose known names are {', '.join(known)}"
    remedy = f"name it {known[0]} in your class, or install an older transformers or a newer locant"
    return InputError(got, remedy)
