"""locant: raw text to attention-ready tensors, with every position encoding behind one interface.

``__init__.pyi`` lists the public names. Each name is imported when it is first used. Importing torch takes a second and
200 MB. The workers of `prepare` do not import it, and the command line does not until it knows which verb to run.
"""

import lazy_loader

from locant._version import __version__ as __version__

SUBMODULES = {
    "attention", "checkpoints", "embedding", "errors", "formats", "lab", "models", "parallel", "positions", "text",
}  # fmt: skip

_attribute, __dir__, _names = lazy_loader.attach_stub(__name__, __file__)
# Type checkers read the stub.
__all__ = [name for name in _names if name not in {*SUBMODULES, "__version__"}]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    """Return a public object. For another name of an encoding or scaling, the `AttributeError` has the public one."""
    try:
        return _attribute(name)
    except AttributeError as error:
        if not name[:1].isupper():  # a module that is not imported yet, or a name that Python itself asks for
            raise
        from locant.positions import scaling
        from locant.positions.registry import find_class, meanings

        kind = find_class(name)
        if kind is None and (several := meanings(name)):
            candidates = " or ".join(f"locant.{each.__name__}" for each in several)
            raise AttributeError(f"locant has no {name}; use {candidates}", name=name, obj=error.obj) from None
        if kind is None:
            raise
        package = "locant" if kind.__name__ in __all__ else "locant.scaling"
        module = package if package == "locant" or hasattr(scaling, kind.__name__) else kind.__module__
        raise AttributeError(f"locant has no {name}; use {module}.{kind.__name__}", name=name, obj=error.obj) from None
