"""`torch.compile` and FSDP2 in every model class that can be swapped: what takes too long for the tests.

``python -m tests.swapping.compiled_and_sharded`` writes `compiled_and_sharded.json`, class by class. Begun
again it goes on where it was ended, or anew with other releases of torch or transformers.
``python -m tests.swapping.families`` then writes its columns into the page.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

import torch
import transformers

import locant
from tests.ranks import found_on
from tests.swapping.families import LLAMA, LONG, Family, families, tiny, worked
from tests.swapping.work import compiled, ids, shard, sharded

__all__ = ["SPREAD", "found_by_two", "losses_on_two"]

SPREAD = [
    LLAMA,
    Family("gemma3_text", "Gemma3ForCausalLM"),  # rope parameters for each type of layers
    Family("gpt_neox", "GPTNeoXForCausalLM"),  # a part of each head
    Family("llama4_text", "Llama4ForCausalLM"),  # complex numbers
    Family("deepseek_v3", "DeepseekV3ForCausalLM"),  # latent attention, neighbours as pairs, experts
    Family("modernbert", "ModernBertForMaskedLM"),  # both directions
]
"""What the tests repeat."""

AT_ONCE = 16
"""Families that one pair of processes takes, before what they found is written."""


def found_by_two(pairs: list[list[str]]) -> list[str]:
    """What one of two processes finds of each of these, named by configuration and class."""
    _quiet()
    return [worked(tiny(Family(*each)), sharded) for each in pairs]


def losses_on_two(name: str, sharded: bool = True) -> list[float]:
    """The losses of three steps of plain gradient descent."""
    model = tiny(LLAMA)
    torch.manual_seed(0)
    if name == "own":
        locant.swap(model, angles="float32")
    else:
        locant.swap(model, locant.Kerple(4))
    if sharded:
        shard(model)
    losses = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        loss = model(ids(), labels=ids()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# ---------------------------------------------------------------------- the run


def swappable() -> list[Family]:
    return [family for family in families() if _can_be_swapped(family)]


def _can_be_swapped(family: Family) -> bool:
    try:
        locant.swap(tiny(family))
    except Exception:  # noqa: BLE001  # refused, or not built: the other columns tell why
        return False
    return True


def _quiet() -> None:
    warnings.simplefilter("ignore")  # those of other people's code
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)


def _run() -> None:
    _quiet()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    found: dict[str, dict[str, Any]] = {"versions": versions, "compiled": {}, "sharded": {}}
    if LONG.exists() and (earlier := json.loads(LONG.read_text(encoding="utf-8")))["versions"] == versions:
        found = earlier

    def left(name: str, all_of_them: list[Family]) -> list[Family]:
        return [family for family in all_of_them if family.id not in found[name]]

    def write(name: str, of: dict[str, Any]) -> None:
        found[name] = dict(sorted({**found[name], **of}.items()))
        LONG.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(name, of, file=sys.stderr)  # noqa: T201  # it takes long

    every = swappable()
    rest = left("sharded", every)
    for at in range(0, len(rest), AT_ONCE):
        some = rest[at : at + AT_ONCE]
        first, second = found_on(2, found_by_two, [[family.model_type, family.cls] for family in some])
        both = zip(some, first, second, strict=True)
        write("sharded", {family.id: one if one == other else "differs" for family, one, other in both})
    for family in left("compiled", every):
        write("compiled", {family.id: worked(tiny(family), compiled)})


if __name__ == "__main__":
    torch.set_num_threads(1)
    _run()
