"""What the 512 learned rows of a sentence model hold, and what its sentence vectors know of word order.

The model is MiniLM, which adds a row of a table to each token. Its rows are compared with each other, the table is
stretched to 1,024 rows, and sentences are read with their positions exchanged, shuffled, equal or removed. A sentence
vector is the mean of the last hidden states, with length 1, as the model's authors compute it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.real_models import weights
from benchmarks.real_models.record import RESULTS, Record
from locant.text import sample_text

__all__ = ["GROUPS", "READINGS", "Embedder", "rows_of_table", "run", "stretched", "summary"]

PART = "minilm"
MODEL = "minilm"
SHOWN = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""The distances at which the similarity of rows is recorded."""
LONG = 8
"""The number of long texts."""
INNER = 1020
"""The tokens of a long text. Each half has as many as the model can read, with those that begin and end a text."""
EVERY = 8
"""The map of similarities has every eighth row and column."""
SHARES = (0.5, 0.9, 0.99)
SEED = 0

GROUPS: dict[str, tuple[str, str, str]] = {
    "biting": ("The dog bites the man.", "The man bites the dog.", "A dog attacks a person."),
    "loving": ("Mary loves John.", "John loves Mary.", "John is loved by Mary."),
    "selling": ("The company sold the bank.", "The bank sold the company.", "The bank was bought from the company."),
    "order": ("He ate before he slept.", "He slept before he ate.", "He slept after he ate."),
    "negation": ("She is not rich but happy.", "She is rich but not happy.", "She is happy although she is poor."),
    "travel": ("A train from Paris to Rome.", "A train from Rome to Paris.", "A railway journey to Rome from Paris."),
    "comparison": ("Gold is heavier than iron.", "Iron is heavier than gold.", "Iron is lighter than gold."),
    "cause": ("The rain caused the flood.", "The flood caused the rain.", "The flood was caused by the rain."),
}
"""A sentence, its words in another order with another meaning, and other words with nearly the same meaning."""

READINGS = ("own", "reversed", "shuffled", "equal", "removed", "shifted")
"""The positions of the tokens of a sentence: as trained, in reverse, in random order, all position 1, no rows at
all, and later by 100 rows. The tokens that begin and end a sentence keep their rows in the first four."""
AFTER = 100


class Embedder:
    """Computes sentence vectors with any positions."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.table: Tensor = model.embeddings.position_embeddings.weight.detach().clone()

    def __call__(self, text: str, reading: str = "own", length: int | None = None) -> Tensor:
        """Return the vector of a text, cut to `length` tokens."""
        cut = {"truncation": True, "max_length": length} if length else {}
        ids = self.tokenizer(text, return_tensors="pt", **cut).input_ids
        return self.of_ids(ids, self.places(ids.shape[1], reading), without_rows=reading == "removed")

    def places(self, length: int, reading: str) -> Tensor:
        """Return the positions of the tokens of a text."""
        inner = [*range(1, length - 1)]
        match reading:
            case "reversed":
                inner.reverse()
            case "shuffled":
                inner = np.random.default_rng(SEED).permutation(inner).tolist()
            case "equal":
                inner = [1] * len(inner)
            case "shifted":
                return torch.arange(AFTER, AFTER + length)[None]
        return torch.tensor([[0, *inner, length - 1]])

    @torch.inference_mode()
    def of_ids(self, ids: Tensor, places: Tensor, *, without_rows: bool = False) -> Tensor:
        """Return the vector of tokens at these positions."""
        with _zero_rows(self.model) if without_rows else ExitStack():
            types = torch.zeros_like(ids)
            hidden = self.model(input_ids=ids, position_ids=places, token_type_ids=types).last_hidden_state
        return F.normalize(hidden[0].mean(0), dim=0)


def _zero_rows(model: Any) -> AbstractContextManager[object]:
    """Let a model add zeros instead of rows of its table, until the block ends."""
    hook = model.embeddings.position_embeddings.register_forward_hook(lambda module, args, rows: torch.zeros_like(rows))
    undo = ExitStack()
    undo.callback(hook.remove)
    return undo


def rows_of_table(table: Tensor) -> dict[str, Any]:
    """Return what a table of positions holds: lengths, nearest rows, similarity by distance, and the spectrum."""
    rows = table.double()
    unit = F.normalize(rows - rows.mean(0), dim=1)  # what all rows have in common says nothing about a position
    similarity = unit @ unit.T
    nearest = similarity.clone().fill_diagonal_(-torch.inf).argmax(1)
    away = (nearest - torch.arange(len(rows))).abs()
    energy = torch.linalg.svdvals(rows - rows.mean(0)) ** 2
    shares = (energy / energy.sum()).cumsum(0)
    return {
        "rows": len(rows), "width": rows.shape[1],
        "length": {"mean": _round(rows.norm(dim=1).mean()), "first": _round(rows[0].norm())},
        "common": _round(rows.mean(0).norm()),
        "nearest_is_neighbour": _round((away == 1).double().mean()),
        "similarity": {str(by): _round(similarity.diagonal(by).mean()) for by in SHOWN if by < len(rows)},
        "dimensions": {f"{share:.0%}": int((shares < share).sum()) + 1 for share in SHARES},
        "spectrum": [_round(each) for each in (energy / energy.sum())[:32]],
        "map": [[round(each, 2) for each in row] for row in similarity[::EVERY, ::EVERY].tolist()],
    }  # fmt: skip


def stretched(table: Tensor, length: int) -> Tensor:
    """Return a table with as many rows as `length`, by linear interpolation between the rows at both ends."""
    return F.interpolate(table.T[None], size=length, mode="linear", align_corners=True)[0].T.contiguous()


def _round(value: Any) -> float:
    return round(float(value), 5)


def _cosines(embed: Embedder) -> dict[str, Any]:
    """Return how similar the sentences of each group are, and how similar each is to itself at other positions."""
    found = {}
    for name, (sentence, other, same) in GROUPS.items():
        by_reading = {}
        for reading in READINGS:
            one, two, three = (embed(text, reading) for text in (sentence, other, same))
            to_own = _round(one @ embed(sentence))
            by_reading[reading] = {"exchanged": _round(one @ two), "same meaning": _round(one @ three), "own": to_own}
        found[name] = by_reading
    return found


def _long_texts(embed: Embedder) -> list[Tensor]:
    """Return the tokens of long texts, without those that begin and end a text."""
    ids = embed.tokenizer(sample_text(), add_special_tokens=False, return_tensors="pt", verbose=False).input_ids[0]
    return [*ids[: LONG * INNER].split(INNER)]


def _longer(embed: Embedder) -> dict[str, Any]:
    """Return how similar vectors of long texts are to the mean of the vectors of their halves.

    The halves have 512 tokens, as many as the model can read. The whole has nearly twice as many. It is read with the
    table stretched to 1,024 rows, and with its rows repeated.
    """
    begin, end = embed.tokenizer.cls_token_id, embed.tokenizer.sep_token_id
    found: dict[str, list[float]] = {"stretched": [], "repeated": [], "cut": [], "short text, stretched table": []}
    table = embed.table
    wide = stretched(table, 1024)

    def vector(inner: Tensor, rows: Tensor, places: Tensor | None = None) -> Tensor:
        ids = torch.tensor([[begin, *inner.tolist(), end]])
        places = torch.arange(ids.shape[1])[None] if places is None else places
        embed.model.embeddings.position_embeddings.weight.data = rows
        try:
            return embed.of_ids(ids, places)
        finally:
            embed.model.embeddings.position_embeddings.weight.data = table

    for inner in _long_texts(embed):
        halves = torch.stack([vector(part, table) for part in inner.tensor_split(2)])
        reference = F.normalize(halves.mean(0), dim=0)
        found["stretched"].append(_round(vector(inner, wide) @ reference))
        found["repeated"].append(_round(vector(inner, table, torch.arange(INNER + 2)[None] % len(table)) @ reference))
        found["cut"].append(_round(halves[0] @ reference))
        found["short text, stretched table"].append(_round(vector(inner[:254], wide) @ vector(inner[:254], table)))
    return {name: {"mean": _round(np.mean(each)), "lowest": min(each)} for name, each in found.items()}


def _second(embed: Embedder) -> dict[str, Any]:
    """Compute some of the numbers again, by NumPy and sentence vectors of `sentence-transformers`."""
    from sentence_transformers import SentenceTransformer

    table = embed.table.numpy().astype(np.float64)
    centred = table - table.mean(0)
    values = np.linalg.eigvalsh(centred.T @ centred)[::-1]
    unit = centred / np.linalg.norm(centred, axis=1, keepdims=True)
    neighbours = [
        max((unit[row] @ unit[other], abs(row - other)) for other in range(len(unit)) if other != row)[1]
        for row in range(len(unit))
    ]
    encode = SentenceTransformer(str(weights.folder(MODEL)), device="cpu").encode
    pairs = {name: encode([one, two], normalize_embeddings=True) for name, (one, two, _) in GROUPS.items()}
    return {
        "nearest_is_neighbour": _round(np.mean([each == 1 for each in neighbours])),
        "similarity": _round(np.mean([unit[row] @ unit[row + 1] for row in range(len(unit) - 1)])),
        "spectrum": [_round(each) for each in values[:4] / values.sum()],
        "exchanged": {name: _round(one @ two) for name, (one, two) in pairs.items()},
    }


def run(*, anew: bool = False, folder: Path = RESULTS) -> None:
    """Measure the rows, the sentences and the long texts."""
    record = Record(PART, [MODEL], packages=["sentence-transformers"], anew=anew, folder=folder, summary=summary)
    embed = Embedder(*weights.load(MODEL))
    embed.model.requires_grad_(False)
    record.measure("rows", {"shown": SHOWN, "map": EVERY}, lambda: rows_of_table(embed.table))
    record.measure("sentences", {"groups": GROUPS, "readings": READINGS}, lambda: _cosines(embed))
    record.measure("long texts", {"texts": LONG}, lambda: _longer(embed))
    record.measure("second calculation", {"groups": GROUPS}, lambda: _second(embed))
    record.write()


def summary(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rows, the mean similarities for each reading, and the difference from the second calculation.

    The summary is empty until everything is measured.
    """
    if not {"rows", "sentences", "long texts", "second calculation"} <= measured.keys():
        return {}
    sentences, rows, second = (measured[key] for key in ("sentences", "rows", "second calculation"))
    readings = {
        reading: {
            kind: _round(np.mean([group[reading][kind] for group in sentences.values()]))
            for kind in ("exchanged", "same meaning", "own")
        } | {"order seen": sum(_prefers_meaning(group[reading]) for group in sentences.values())}
        for reading in READINGS
    }  # fmt: skip
    differences = [
        abs(rows["nearest_is_neighbour"] - second["nearest_is_neighbour"]),
        abs(rows["similarity"]["1"] - second["similarity"]),
        *(abs(a - b) for a, b in zip(rows["spectrum"], second["spectrum"], strict=False)),
        *(abs(sentences[name]["own"]["exchanged"] - each) for name, each in second["exchanged"].items()),
    ]
    return {
        "rows": {key: value for key, value in rows.items() if key != "map"},
        "sentences": {name: group["own"] for name, group in sentences.items()}, "readings": readings,
        "texts": GROUPS, "long texts": measured["long texts"], "check": _round(max(differences)),
    }  # fmt: skip


def _prefers_meaning(cosines: Mapping[str, float]) -> bool:
    """Return whether the sentence with the same meaning is nearer than the sentence with the same words."""
    return cosines["same meaning"] > cosines["exchanged"]
