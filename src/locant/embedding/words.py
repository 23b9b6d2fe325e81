"""Words of a published model: their vectors, their nearest tokens, and the similarities between words of a list."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from locant.arguments import one_of
from locant.embedding.token import Nearest, TokenEmbedding, unit
from locant.errors import InputError
from locant.extras import require
from locant.text import Tokenizer

LAYOUTS = ("pca", "umap")


@dataclass(frozen=True, kw_only=True)
class Term:
    """A word of a sum, with sign 1 if it is added and -1 if it is subtracted."""

    word: str
    sign: int = 1


def terms_of(words: Sequence[str]) -> tuple[Term, ...] | None:
    """Return the terms of a sum such as ``king - man + woman``, or ``None`` for words without ``+`` and ``-``.

    >>> [(term.word, term.sign) for term in terms_of(["king", "-", "man"])]
    [('king', 1), ('man', -1)]
    """
    parts = " ".join(words).split()
    signs = {"+": 1, "-": -1}
    if len(parts) == 1 and parts[0] not in signs:
        return (Term(word=parts[0]),)
    if not set(parts) & signs.keys():
        return None
    parts = parts if parts[0] in signs else ["+", *parts]
    operators, operands = parts[::2], parts[1::2]
    if len(parts) % 2 or not set(operators) <= signs.keys() or set(operands) & signs.keys():
        raise InputError(f"got {' '.join(words)!r}, expected words with + or - between them", "king - man + woman")
    return tuple(Term(word=word, sign=signs[sign]) for sign, word in zip(operators, operands, strict=True))


class Words:
    """The token table of a model, with its tokenizer.

    The vector of a word is the row of its token, or the mean of the rows if it has several tokens.

    >>> Words.from_pretrained("MiniLM-L6").nearest("king", 3).ids  # doctest: +SKIP
    """

    def __init__(self, tokenizer: Tokenizer, table: TokenEmbedding) -> None:
        if tokenizer.vocab_size > table.vocab_size:
            got = f"got a tokenizer of {tokenizer.vocab_size} entries for a table of {table.vocab_size} rows"
            raise InputError(got, "pass the tokenizer of this model")
        self.tokenizer = tokenizer
        self.table = table

    @classmethod
    def from_pretrained(cls, folder: Path | str) -> Words:
        """Load the words of a folder with ``config.json``, safetensors and ``tokenizer.json``."""
        table = TokenEmbedding.from_pretrained(folder)
        return cls(Tokenizer.load(Path(folder)), table)

    def ids(self, word: str) -> tuple[int, ...]:
        """Return the one token of the word after a space, if it exists.

        Otherwise return the word's entry (such as ``##ing``), or the tokens of its parts.
        """
        in_text = self.tokenizer.encode(f" {word}").tolist()
        if len(in_text) == 1:
            return tuple(in_text)
        entry = self.tokenizer.id_of(word)
        parts = tuple(in_text) if entry is None else (entry,)
        if not parts:
            raise InputError(f"got {word!r}, which has no tokens in this tokenizer", "use another word")
        return parts

    @torch.no_grad()
    def vector(self, word: str) -> Float[Tensor, " d_model"]:
        """Return the mean of the word's rows, in float32."""
        return self.table.weight[list(self.ids(word))].float().mean(0)

    @torch.no_grad()
    def nearest(self, terms: str | Sequence[Term], k: int = 10) -> Nearest:
        """Return the tokens nearest to a word or to a sum of words, by cosine, without the tokens of the words.

        The words of a sum are scaled to length 1 before they are added (Mikolov 2013,
        https://aclanthology.org/N13-1090).
        """
        terms = [Term(word=terms)] if isinstance(terms, str) else terms
        total = sum(term.sign * row for term, row in zip(terms, self._unit([term.word for term in terms]), strict=True))
        ids = {number for term in terms for number in self.ids(term.word)}
        return self.table.nearest(total, k, exclude=sorted(ids))

    def similarity(self, words: Sequence[str]) -> Float[Tensor, "words words"]:
        """Return the cosine of every pair of these words."""
        rows = self._unit(words)
        return rows @ rows.T

    def flat_map(self, words: Sequence[str], layout: str = "pca") -> Float[Tensor, "words 2"]:
        """Return a point in the plane for each of these words, as the function `flat_map` does."""
        return flat_map(self._unit(words), layout)

    def _unit(self, words: Sequence[str]) -> Float[Tensor, "words d_model"]:
        """Return the vectors of the words, scaled to length 1."""
        if not words:
            raise InputError("got no word", "['king']")
        return unit(torch.stack([self.vector(word) for word in words]))


def flat_map(vectors: Float[Tensor, "points width"], layout: str = "pca") -> Float[Tensor, "points 2"]:
    """Map vectors into the plane, by the two directions of largest variance (``"pca"``) or by ``umap-learn``."""
    one_of("layout", layout, LAYOUTS)
    if len(vectors) < 3:
        raise InputError(f"got {len(vectors)} words for a map, expected at least 3", "pass more words")
    if layout == "umap":
        umap = require("umap", "layout 'umap'", distribution="umap-learn")
        neighbours = min(15, len(vectors) - 1)
        flat = umap.UMAP(n_components=2, metric="cosine", n_neighbors=neighbours, random_state=0, n_jobs=1)
        return torch.as_tensor(flat.fit_transform(vectors.numpy()))
    centred = vectors - vectors.mean(0)
    _, _, directions = torch.linalg.svd(centred.double(), full_matrices=False)
    places = centred.double() @ directions[:2].T
    flip = places.gather(0, places.abs().argmax(0, keepdim=True)).sign()  # the farthest point is on the positive side
    return (places * flip).float()
