"""What real weights know of words: those of all-MiniLM-L6-v2."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer as Library

from locant import InputError, RangeError, TokenEmbedding, Tokenizer
from locant.embedding.words import Words, flat_map, terms_of
from tests.minilm import MINILM
from tests.refusal import refuses
from tests.tolerances import LENGTH, assert_close


@pytest.fixture(scope="module")
def words() -> Words:
    return Words.from_pretrained(MINILM)


@pytest.mark.parametrize(
    ("word", "near"),
    [
        ("king", {"kings", "queen", "monarch", "prince"}),
        ("paris", {"parisian", "france", "london"}),
        ("##ing", {"##ed", "##ings"}),
    ],
)
def test_the_nearest_tokens_are_those_of_the_whole_table(words: Words, word: str, near: set[str]) -> None:
    library = Library.from_file(str(MINILM / "tokenizer.json"))
    rows = load_file(MINILM / "model.safetensors")["embeddings.word_embeddings.weight"].double().numpy()
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    own = library.token_to_id(word)
    expected = [number for number in np.argsort(-(rows @ rows[own])).tolist() if number != own][:10]
    found = words.nearest(word, 10)
    assert found.ids.tolist() == expected
    assert near <= {words.tokenizer.token(number) for number in expected}
    assert abs(float(found.scores[0]) - rows[expected[0]] @ rows[own]) < LENGTH


@pytest.mark.parametrize(
    ("text", "answer"),
    [("king - man + woman", "queen"), ("paris - france + italy", "rome"), ("walking - walk + swim", "swimming")],
)
def test_analogies(words: Words, text: str, answer: str) -> None:
    terms = terms_of([text])
    assert answer in [words.tokenizer.token(number) for number in words.nearest(terms, 3).ids.tolist()]


def test_a_cat_is_nearer_to_a_dog_than_to_a_refrigerator(words: Words) -> None:
    similarity = words.similarity(["cat", "dog", "refrigerator"])
    assert similarity[0, 1] > 0.3 > 0.1 > similarity[0, 2]
    assert_close(similarity, similarity.T)


def test_a_word_of_several_tokens_is_the_mean_of_their_rows(words: Words) -> None:
    ids = words.ids("tokenizer")
    assert [words.tokenizer.token(number) for number in ids] == ["token", "##izer"]
    assert torch.equal(words.vector("tokenizer"), words.table.weight[list(ids)].detach().mean(0))
    assert words.ids("[CLS]") == (101,)


def test_a_word_is_meant_as_it_stands_in_a_text() -> None:
    """Byte-level vocabularies have a token for a word at the start of a text, and one for it after a space."""
    tokenizer = Tokenizer.train("the hat on the cat on the hat on the mat", vocab_size=270)
    words = Words(tokenizer, TokenEmbedding(270, 4))
    assert tokenizer.decode(list(words.ids("hat"))) == " hat"


def test_terms_of_a_sum() -> None:
    def signs(*words: str) -> list[tuple[str, int]] | None:
        terms = terms_of(words)
        return None if terms is None else [(term.word, term.sign) for term in terms]

    assert signs("king") == [("king", 1)]
    assert signs("king - man + woman") == signs("king", "-", "man", "+", "woman")
    assert signs("-", "man") == [("man", -1)]
    assert signs("##ing", "x-ray") is None
    for wrong in (["king", "-"], ["king", "man", "-", "x"], ["king", "-", "+", "x"], ["+"]):
        with refuses(InputError, "king - man + woman"):
            terms_of(wrong)


def test_a_flat_map_has_the_two_largest_variances() -> None:
    vectors = torch.randn(9, 5, dtype=torch.float64) * torch.tensor([0.1, 3.0, 0.2, 1.0, 0.3])
    places = flat_map(vectors)
    variances = np.linalg.eigvalsh(np.cov(vectors.numpy().T))[::-1][:2]
    assert_close(places.T.cov(), torch.diag(torch.tensor(variances.copy())))
    assert_close(flat_map(vectors.flip(0)), places.flip(0))  # the order says nothing
    with refuses(InputError, "at least 3"):
        flat_map(vectors[:2])
    with refuses(RangeError, "'pca' or 'umap'"):
        flat_map(vectors, "tsne")


def test_umap_gets_the_vectors_and_its_own_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a module of that name in its place: what umap-learn documents is what it is called with."""

    class UMAP:
        def __init__(self, *, n_neighbors: int, n_components: int, metric: str, random_state: int, n_jobs: int) -> None:
            assert (n_neighbors, n_components, metric, random_state, n_jobs) == (8, 2, "cosine", 0, 1)

        def fit_transform(self, X: np.ndarray) -> np.ndarray:  # as umap-learn calls it
            assert (type(X), X.dtype) == (np.ndarray, np.float32)
            return X[:, [3, 2]]

    monkeypatch.setitem(sys.modules, "umap", types.SimpleNamespace(UMAP=UMAP))  # type: ignore[arg-type]
    vectors = torch.randn(9, 5)
    assert torch.equal(flat_map(vectors, "umap"), vectors[:, [3, 2]])


def test_umap_places_like_words_together() -> None:
    pytest.importorskip("umap", reason="umap-learn is not installed: its own part is not tested")
    group = torch.arange(40) % 2
    vectors = torch.randn(2, 12)[group] + 0.05 * torch.randn(40, 12)
    places = flat_map(vectors, "umap")
    nearest = torch.cdist(places, places).fill_diagonal_(torch.inf).argmin(1)
    assert torch.equal(group[nearest], group)


def test_no_word_is_refused(words: Words) -> None:
    with refuses(InputError, "got no word"):
        words.similarity([])


def test_a_tokenizer_of_another_model_is_refused(words: Words) -> None:
    with refuses(InputError, "30522 entries", "100 rows"):
        Words(words.tokenizer, TokenEmbedding(100, 4))
