"""The arguments of a foreign forward, read by the names in its own signature.

Releases rename arguments: the cache of `transformers` was `past_key_values` up to 5.23 and is `cache` from 5.24 on. A
value that is read under the old name is silently missing. So the names are looked up once, when something is attached,
and a forward that needs an argument and has it under no known name is refused.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from locant.errors import InputError

CACHE = ("cache", "past_key_values")
"""What releases of `transformers` call the cache of a model: its argument, and its entry in what the model returns."""
TOKENS = ("input_ids", "inputs_embeds")
"""What they call the tokens: their ids, and their embeddings."""
USES_CACHE = "use_cache"
CACHE_TYPE = re.compile(r"\b(Dynamic|Static|EncoderDecoder)?Cache\b")


class ForwardArguments:
    """Reads what a model is called with.

    Args:
        model: the module whose forward is called.
        generates: whether it is part of a model that generates text, which needs a cache.

    Raises:
        InputError: the forward has no argument for its tokens, or none for a cache that it needs, under a known name.
    """

    def __init__(self, model: nn.Module, *, generates: bool = False) -> None:
        parameters = inspect.signature(model.forward).parameters
        self.names = [*parameters]
        if not set(self.names) & {*TOKENS}:
            raise _unknown("its tokens", model, TOKENS)
        self.cache = cache_argument(model)
        if self.cache is None and (generates or _has_cache(model)):
            raise _unknown("its cache", model, CACHE)

    def read(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of one call, by name; a cache under the name of this release, whatever the caller wrote."""
        given = dict(zip(self.names, args, strict=False)) | dict(kwargs)
        if self.cache is not None and self.cache not in given:  # a forward may accept its old names as well
            old = next((name for name in CACHE if name in given), None)
            if old is not None:
                given[self.cache] = given.pop(old)
        return given

    def cache_of(self, given: Mapping[str, Any]) -> Any:
        """The cache among arguments that were read; ``None`` if there is none."""
        return None if self.cache is None else given.get(self.cache)


def cache_argument(model: Any) -> str | None:
    """The name under which a model takes its cache; ``None``: it takes none, or under a name that is not known."""
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in CACHE if name in parameters), None)


def cache_in(result: Any) -> Any:
    """The cache in what a model returns; ``None`` if there is none."""
    values = [*result.values()] if isinstance(result, Mapping) else result
    return next((each for each in values if hasattr(each, "get_seq_length")), None)


def _has_cache(model: nn.Module) -> bool:
    """Whether its forward, or one that this replaces, knows of a cache, or its attention looks at no later token."""
    if any(getattr(each, "is_causal", None) is True for each in model.modules()):
        return True
    forwards = [cls.forward for cls in type(model).__mro__ if "forward" in vars(cls)]
    parameters = {name: each for forward in forwards for name, each in inspect.signature(forward).parameters.items()}
    if {*parameters} & {*CACHE, USES_CACHE}:
        return True
    return any(CACHE_TYPE.search(str(each.annotation)) for each in parameters.values())


def named_argument(function: Callable[..., Any], what: str, *known: str) -> str:
    """Which of these names of one thing a function has an argument for.

    Raises:
        InputError: it has none of them.
    """
    names = [*inspect.signature(function).parameters]
    found = next((name for name in known if name in names), None)
    if found is None:
        raise _unknown_in(what, f"{function.__qualname__}({', '.join(names)})", known)
    return found


def _unknown(what: str, model: nn.Module, known: tuple[str, ...]) -> InputError:
    names = ", ".join(inspect.signature(model.forward).parameters)
    return _unknown_in(what, f"{type(model).__name__}.forward({names})", known)


def _unknown_in(what: str, call: str, known: tuple[str, ...]) -> InputError:
    got = f"found no argument for {what} in {call}; known are {', '.join(known)}"
    remedy = f"name it {known[0]} in a class of your own; else install an older transformers, or a newer locant"
    return InputError(got, remedy)
