"""What `locant embed` shows and writes: every token of a text, embedded."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from locant.embedding.flow import EmbeddingResult, Plan, embed, save_vectors
from locant.errors import InputError, RangeError
from locant.report.embedding import shapes
from locant.text.corpus import Corpus, read_corpus
from tests.refusal import refuses
from tests.tolerances import ANGLE

TEXT = "the cat sat on the mat; the rat sat on the cat. " * 7


def plan(**changes: object) -> Plan:
    """The command line's usual plan, with these changes."""
    usual = {"encoding": "learned", "d_model": 256, "num_heads": 4, "context": 4, "batch": 8, "seed": 0}
    return Plan(**{**usual, **changes})


@pytest.fixture
def source(tmp_path: Path) -> Corpus:
    (tmp_path / "text.txt").write_text(TEXT)
    return read_corpus([str(tmp_path / "text.txt")], tokenizer="bytes", default_vocab_size=300)


def test_the_worked_example_has_the_shapes_of_the_field(source: Corpus) -> None:
    flow = embed(source, plan(d_model=256, context=4, batch=8, encoding="learned")).flow
    assert shapes(flow) == "[8, 4] → [8, 4, 256] + [4, 256] → [8, 4, 256]"
    assert {table.name: (table.shape, table.parameters) for table in flow.tables} == {
        "token": ((257, 256), 257 * 256),
        "position": ((4, 256), 1024),
    }
    assert [table.bytes for table in flow.tables] == [
        {"float32": 257 * 1024, "bfloat16": 257 * 512},
        {"float32": 4096, "bfloat16": 2048},
    ]


def test_windows_are_the_text_and_targets_the_token_after_each(source: Corpus) -> None:
    vectors = embed(source, plan(context=5, batch=None)).vectors
    ids, targets = list(TEXT.encode()), [*TEXT.encode()[1:]]
    assert vectors.ids.flatten()[: len(ids)].tolist() == ids
    assert vectors.targets.flatten()[: len(ids)].tolist() == [*targets, -100]
    assert vectors.positions[0].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("stride", [1, 2, 3, 5])
@pytest.mark.parametrize("size", [1, 2, 4, 5, 6, 10, 11])
def test_every_token_is_embedded_also_the_last(tmp_path: Path, size: int, stride: int) -> None:
    (tmp_path / "x").write_bytes(bytes(range(65, 65 + size)))
    corpus = read_corpus([str(tmp_path / "x")], tokenizer="bytes", default_vocab_size=300)
    vectors = embed(corpus, plan(context=5, stride=stride, batch=None)).vectors
    seen, following = [], {}
    for row in zip(vectors.ids, vectors.targets, vectors.positions, strict=True):
        real = row[2] >= 0
        seen += row[0][real].tolist()
        following |= dict(zip(row[0][real].tolist(), row[1][real].tolist(), strict=True))
    assert {*seen} == {*range(65, 65 + size)}
    assert following == {**{one: one + 1 for one in range(65, 64 + size)}, 64 + size: -100}
    assert stride < 5 or len(seen) == size


def test_equal_tokens_differ_by_the_positions_of_the_paper(source: Corpus) -> None:
    vectors = embed(source, plan(context=48, batch=1, d_model=6, encoding="sinusoidal")).vectors
    first, second = 0, TEXT.index("the mat")  # two times the letter t
    pairs = np.repeat(np.arange(3), 2)
    angle = np.array([[first], [second]]) / 10_000.0 ** (2 * pairs / 6)
    expected = np.where(np.arange(6) % 2, np.cos(angle), np.sin(angle))
    got = (vectors.embeddings[0, second] - vectors.embeddings[0, first]).numpy()
    np.testing.assert_allclose(got, expected[1] - expected[0], rtol=0, atol=4 * ANGLE)


@pytest.mark.parametrize(
    ("encoding", "cos_sin", "bias"),
    [
        ("rotary", (12, 4), None), ("alibi", None, (3, 12, 12)), ("t5", None, (3, 12, 12)), ("nope", None, None),
        ("xpos", (12, 4), None), ("shaw", None, (3, 12, 12)), ("deberta", None, (3, 12, 12)),
    ],
)  # fmt: skip
def test_encodings_of_other_doors_leave_embeddings_alone(
    source: Corpus, encoding: str, cos_sin: tuple[int, ...] | None, bias: tuple[int, ...] | None
) -> None:
    embedded = embed(source, plan(encoding=encoding, context=12, d_model=24, num_heads=3, batch=2))
    assert (embedded.flow.cos_sin, embedded.flow.bias, embedded.flow.position_vectors) == (cos_sin, bias, None)
    assert shapes(embedded.flow) == "[2, 12] → [2, 12, 24]"
    same = embedded.vectors.ids[0, 0] == embedded.vectors.ids
    assert (embedded.vectors.embeddings[same] == embedded.vectors.embeddings[0, 0]).all()


def test_a_text_shorter_than_a_window_is_filled_up_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("abc")
    source = read_corpus([str(tmp_path / "short.txt")], tokenizer="bytes", default_vocab_size=300)
    embedded = embed(source, plan(context=5))
    assert embedded.vectors.positions.tolist() == [[0, 1, 2, -1, -1]]
    assert embedded.vectors.targets.tolist() == [[98, 99, -100, -100, -100]]
    assert (embedded.flow.windows, embedded.flow.padding) == (1, 2)
    assert [token.text for token in embedded.flow.first] == ["a", "b", "c"]


def test_no_window_reaches_from_one_file_into_the_next(tmp_path: Path) -> None:
    for name, text in (("a", "aaaaa"), ("b", "bbbbbbb")):
        (tmp_path / name).write_text(text)
    source = read_corpus([str(tmp_path / "a"), str(tmp_path / "b")], tokenizer="bytes", default_vocab_size=300)
    vectors = embed(source, plan(context=3, batch=None)).vectors
    for row, targets, positions in zip(vectors.ids, vectors.targets, vectors.positions, strict=True):
        assert len({*row[positions >= 0].tolist(), *targets[targets >= 0].tolist()}) == 1
    assert int((vectors.positions >= 0).sum()) == 5 + 7
    assert int((vectors.targets >= 0).sum()) == 4 + 6


def test_a_seed_decides_the_tables_and_leaves_other_random_numbers_alone(source: Corpus) -> None:
    before = torch.random.get_rng_state()
    one, same, other = (embed(source, plan(seed=seed)).vectors.embeddings for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.equal(before, torch.random.get_rng_state())


def test_the_file_holds_the_vectors_and_the_facts(source: Corpus, tmp_path: Path) -> None:
    embedded = embed(source, plan(context=6, batch=3))
    save_vectors(embedded, tmp_path / "x.safetensors")
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert {*file.keys()} == {"ids", "targets", "positions", "embeddings"}
        for name in file.keys():  # noqa: SIM118  # not a dictionary
            assert torch.equal(file.get_tensor(name), getattr(embedded.vectors, name))
        facts = {name: json.loads(value) for name, value in file.metadata().items()}
    assert facts["fingerprint"] == source.tokenizer.fingerprint
    assert (facts["encoding"], facts["embeddings"], facts["seed"]) == ("learned", [3, 6, 256], 0)


def test_a_failed_write_leaves_the_earlier_file(source: Corpus, tmp_path: Path) -> None:
    embedded: EmbeddingResult = embed(source, plan())
    (tmp_path / "x.safetensors").write_text("earlier")
    object.__setattr__(embedded.vectors, "ids", embedded.vectors.ids.t())  # safetensors refuses what is not contiguous
    with pytest.raises(ValueError, match="contiguous"):
        save_vectors(embedded, tmp_path / "x.safetensors")
    assert [path.read_text() for path in tmp_path.glob("*safetensors*")] == ["earlier"]
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("name", ["x.pt", "x", "x.safetensors.txt"])
def test_another_suffix_than_safetensors_is_refused(source: Corpus, tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=r"name ending in \.safetensors"):
        save_vectors(embed(source, plan()), tmp_path / name)


def test_a_width_that_heads_cannot_share_is_an_error() -> None:
    with refuses(RangeError, "d_model=10", "4 heads"):
        plan(encoding="alibi", d_model=10)


def test_d_model_need_not_fit_the_heads_of_an_encoding_that_has_none(source: Corpus) -> None:
    assert embed(source, plan(encoding="sinusoidal", d_model=7)).vectors.embeddings.shape == (8, 4, 7)
