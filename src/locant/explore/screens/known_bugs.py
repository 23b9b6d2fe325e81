"""The screen Known bugs: all bugs with a test in this repository, their sources, and drawings of some of them.

``known_bugs.json`` holds the descriptions in the tests. ``python -m tests.known_bugs.catalog`` writes it.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from locant.explore.screens import Screen
from locant.explore.session import Session, State
from locant.positions import ALiBi, Positions, Rotary, T5Bias
from locant.positions.scaling import DynamicNTK

ENTRIES = Path(__file__).parents[1] / "known_bugs.json"


class Bug(NamedTuple):
    """A bug with a drawing."""

    title: str
    entry: str
    """Its number in ``tests/known_bugs``."""
    story: str
    axes: tuple[str, str]
    """The names of the axes of a curve, or of the rows and columns of a map."""
    draw: Callable[[int], tuple[np.ndarray, np.ndarray, np.ndarray]]
    """A function of a position that returns the places on the first axis, the right and the wrong values."""
    first: int = 0
    """The default position. 0 means that the drawing does not depend on it."""


def rounded_angles(position: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    places = np.arange(position, position + 96)
    rotary = Rotary(64)
    right, _ = rotary.cos_sin(Positions.of(places[None].tolist()))
    frequency = rotary.inv_freq.float().bfloat16()  # model.bfloat16() casts the buffer
    wrong = (torch.from_numpy(places)[:, None].float() * frequency.float()).cos()
    pair = 8
    return places, right[0, :, pair].numpy(), wrong[:, pair].numpy()


def counted_in_bfloat16(position: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    places = np.arange(position, position + 48)
    return places, places, torch.from_numpy(places).bfloat16().float().numpy()


def other_layout(position: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    distances = np.arange(64)
    content, other = torch.randn(2, 1, 1, 1, 64, generator=torch.Generator().manual_seed(0))
    q = content.expand(1, 1, 64, 64)
    k = q + 0.3 * other
    q_positions, k_positions = Positions.of([[100] * 64]), Positions.of([(100 - distances).tolist()])

    def scores(rotary: Rotary) -> np.ndarray:
        products = rotary.rotate_one(q, q_positions) * rotary.rotate_one(k, k_positions)
        return products.sum(-1)[0, 0].numpy() / 8

    return distances, scores(Rotary(64)), scores(Rotary(64, layout="interleaved"))


def padding_counted(position: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    padding = torch.tensor([[0] * 5 + [1] * 11])
    right = Positions.from_mask(padding).index[0].numpy()
    wrong = Positions.arange(16).index[0].numpy()
    return np.arange(16), np.where(padding[0] == 1, right, np.nan), np.where(padding[0] == 1, wrong, np.nan)


def documents_run_on(position: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    def distances(positions: Positions) -> np.ndarray:
        order = positions.order[0]
        away = (order[:, None] - order).double()
        return away.masked_fill(~positions.mask()[0, 0], torch.nan).numpy()

    return np.arange(18), distances(Positions.packed([5, 4, 9])), distances(Positions.arange(18))


def cache_forgotten(position: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    alibi, keys = ALiBi(8), 24
    q, k = torch.zeros(1, 8, 1, 16), torch.zeros(1, 8, keys, 16)
    right, wrong = (
        alibi.score_bias(q, k, query, Positions.arange(keys)).dense()[0, 1, 0].numpy()
        for query in (Positions.after(keys - 1, 1), Positions.arange(1))
    )
    return np.arange(keys), right, wrong


def mixed_frequencies(position: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    dynamic = Rotary(64, scaling=DynamicNTK(factor=8.0, original_max_seq_len=2048))
    places = np.arange(0, 2048, 8)
    positions = Positions.of([places.tolist()])
    (cos, sin), (new_cos, new_sin) = (dynamic.for_length(n).cos_sin(positions) for n in (2048, 16384))
    fit = (cos * new_cos + sin * new_sin)[0].mean(-1)  # 1 if a key is rotated as the query expects
    return places, np.ones(len(places)), fit.numpy()


def rounded_bias(position: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    distances = np.arange(position, position + 64)
    right = -ALiBi(8).slopes[3].item() * distances
    return distances, right, torch.from_numpy(right).bfloat16().float().numpy()


def direction_swapped(position: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    distances = np.arange(-48, 49)
    bias, distance = T5Bias(1, bidirectional=True), torch.from_numpy(distances)
    return distances, bias.buckets(distance).numpy(), bias.buckets(-distance).numpy()


def ids_wrapped(position: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    ids = np.arange(65_536 - 32, 65_536 + 32)
    return ids, ids, ids.astype(np.uint16)


BUGS: dict[str, Bug] = {
    "rounded-angles": Bug(
        "Casting a model rounds its frequencies", "14",
        "model.bfloat16() also casts the buffer of inverse frequencies. After a few hundred positions, every rotation "
        "is wrong. locant has no such buffer that a cast could change.",
        ("position", "cosine of pair 8"), rounded_angles, 4000,
    ),
    "bfloat16-positions": Bug(
        "Positions counted in bfloat16", "7",
        "bfloat16 has eight bits for a number: above 256 it counts in twos, above 512 in fours. Neighbouring tokens "
        "get the same position.",
        ("position", "position in the model"), counted_in_bfloat16, 500,
    ),
    "other-layout": Bug(
        "Pairs of the other layout", "52",
        "Weights trained with pairs (i, i + d/2) are rotated in pairs (2i, 2i + 1). There is no "
        "error, but the scores are meaningless.",
        ("distance (tokens)", "score"), other_layout,
    ),
    "padding-counted": Bug(
        "Padding counts as text", "72",
        "A row padded on the left in a batch begins at position 5 instead of 0, so its answers depend on the "
        "other rows.",
        ("slot of the row", "position"), padding_counted,
    ),
    "documents-run-on": Bug(
        "Packed documents see each other", "77",
        "Three documents share a row. Without their boundaries, the third attends to the first two, and its positions "
        "continue theirs.",
        ("slot of the key", "slot of the query"), documents_run_on,
    ),
    "cache-forgotten": Bug(
        "The cache is forgotten", "74",
        "During decoding, the newest token gets the first position. With ALiBi it no longer prefers near tokens.",
        ("key", "bias of the newest query"), cache_forgotten,
    ),
    "mixed-frequencies": Bug(
        "Cached keys keep old frequencies", "38",
        "Dynamic NTK changes frequencies as the text grows. Keys in the cache were rotated with the old frequencies. "
        "Rotary.rerotate updates them.",
        ("position of the cached key", "fit to the query's frequencies"), mixed_frequencies,
    ),
    "rounded-bias": Bug(
        "A bias in bfloat16", "22",
        "Large distances are rounded to steps, so dozens of keys share one bias. locant adds biases in float32.",
        ("distance (tokens)", "bias of head 3"), rounded_bias, 3000,
    ),
    "direction-swapped": Bug(
        "Key minus query, or query minus key", "80",
        "T5 counts from the query to the key, other encodings from the key to the query. With the wrong sign, earlier "
        "and later keys exchange their buckets.",
        ("distance: query minus key (tokens)", "bucket"), direction_swapped,
    ),
    "ids-wrapped": Bug(
        "Ids in 16 bits", "84a",
        "A vocabulary of more than 65,536 entries does not fit into uint16. The file is written without an error, but "
        "with wrong tokens. A store checks the largest id.",
        ("token id", "id in the file"), ids_wrapped,
    ),
}  # fmt: skip


@cache
def entries() -> list[dict[str, Any]]:
    """Return every known bug without markup: its number, title, story, sources with URLs, check and test."""
    drawn = {bug.entry: name for name, bug in BUGS.items()}
    bugs = json.loads(ENTRIES.read_text("utf-8").replace("`", ""))
    return [{**each, "drawn": drawn.get(each["entry"])} for each in bugs]


def numbers(state: State, session: Session) -> Mapping[str, Any]:
    """Return the right and wrong values of a bug on one axis, and all bugs that contain the words in `find`."""
    name = state.one_of("bug", next(iter(BUGS)), list(BUGS), {name: each.title for name, each in BUGS.items()})
    bug, words = BUGS[name], state.text("find", longest=200).lower().split()
    position = state.whole("position", bug.first, 0, 2**20, log=True) if bug.first else 0
    values = (np.asarray(each, np.float64) for each in bug.draw(position))
    python = (
        "import numpy as np\nimport torch\n\n"
        "from locant import ALiBi, Positions, Rotary, T5Bias\nfrom locant.scaling import DynamicNTK\n\n\n"
        f"{inspect.getsource(bug.draw)}\n\nplaces, right, wrong = {bug.draw.__name__}({position})\n"
    )
    matches = [each for each in entries() if all(word in str(each).lower() for word in words)]
    return {
        **{name: getattr(bug, name) for name in ("title", "entry", "story", "axes")},
        "sources": next(each["sources"] for each in entries() if each["entry"] == bug.entry),
        "entries": matches,
        "total": len(entries()),
        **dict(zip(("places", "right", "wrong"), values, strict=True)),
        "python": python,
    }


ABOUT = "Bugs of real code. Most of them raise no error, and all of them change what a model learns or writes."
SCREENS = {"known_bugs": Screen("Known bugs", 9, ABOUT, numbers)}
