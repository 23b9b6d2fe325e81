"""Training and measuring a decoder: what is trained, for how long, and what the losses are means of."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch

from locant import RangeError
from locant.lab import Settings, generate, train
from locant.lab.candidate import Candidate
from locant.lab.text_learning import build, count, in_context, losses_in_windows, schedule
from tests.lab.fabricated import SMALL, VOCAB, ids
from tests.refusal import refuses
from tests.tolerances import FEW_ROUNDINGS, LOSS


def model(name: str, seed: int = 0):
    return build(Candidate(name), seed, VOCAB, Settings(**SMALL), longest=40)


def test_all_models_of_a_seed_start_alike_but_for_the_encoding() -> None:
    models = [model(name, 4) for name in ("nope", "learned", "t5")]
    for key, parameter in models[0].named_parameters():
        for other in models[1:]:
            assert torch.equal(dict(other.named_parameters())[key], parameter)


def test_there_is_room_for_an_encoding_that_makes_more_heads() -> None:
    assert model("rope_plus_plus")(torch.zeros(1, 5, dtype=torch.int64)).shape == (1, 5, VOCAB)


def test_evaluation_is_the_mean_over_all_targets_and_ignores_filling() -> None:
    """Against probabilities summed up one token at a time; the last of the windows is filled up."""
    decoder, text = model("alibi"), ids(43)
    losses = losses_in_windows(decoder, text, 8)
    decoder.embedding.dropout.p = 0.5
    assert losses_in_windows(decoder.train(), text, 8) == losses, "nothing is dropped while measuring"
    by_position, by_window = [[] for _ in range(8)], []
    for start in range(0, 42, 8):
        window = torch.from_numpy(text[start : start + 9])
        probabilities = decoder(window[None, :-1]).detach().double().softmax(-1)[0]
        by_window.append([-math.log(probabilities[place, target]) for place, target in enumerate(window[1:].tolist())])
        for place, loss in enumerate(by_window[-1]):
            by_position[place].append(loss)
    assert losses.mean == pytest.approx(np.mean(np.concatenate(by_position)), abs=LOSS)
    assert losses.by_position == pytest.approx([np.mean(row) for row in by_position], abs=LOSS)
    assert losses.by_window == pytest.approx([np.mean(row) for row in by_window], abs=LOSS)


@pytest.mark.parametrize(("length", "longest"), [(8, 16), (16, 16), (4, 16), (5, 40), (10, 40), (24, 96)])
@pytest.mark.parametrize("count", [600, 61])
def test_in_context_every_target_has_nearly_so_many_tokens_before_it(length: int, longest: int, count: int) -> None:
    """Against one target at a time, with from seven eighths to all of the context; the same targets at any length."""
    decoder, text = model("alibi"), ids(max(count, longest + 7))
    stride = next(each for each in range(max(1, length // 8), 0, -1) if longest % each == 0)
    first = max(len(text) - 16 * longest, longest)
    first += (len(text) - first) % longest if len(text) - first >= longest else 0
    wanted = []
    for target in range(first, len(text)):
        end = min(first + stride * (1 + (target - first) // stride), len(text) + (-(len(text) - first)) % stride)
        context = torch.from_numpy(text[end - 1 - length : target])
        assert length - stride < len(context) <= length
        scores = decoder(context[None]).detach().double().log_softmax(-1)
        wanted.append(-float(scores[0, -1, text[target]]))
    stretches = [np.mean(wanted[start : start + longest]) for start in range(0, len(wanted), longest)]
    assert in_context(decoder, text, length, longest) == pytest.approx(stretches, abs=LOSS)
    assert len(stretches) == max(1, min(16, len(text) // longest - 1))


@pytest.mark.parametrize("vocab_size", [VOCAB, 1000])
def test_a_unigram_count_is_measured_as_a_model_is(vocab_size: int) -> None:
    """On the same tokens at any length, as a model that gives each token its share wherever it stands."""
    training, held_out = np.minimum(ids() ** 2 % VOCAB, ids()), ids(43)
    times = Counter(training.tolist())
    assert len(times) < VOCAB, "some do not occur"
    weights = torch.tensor([times[token] + len(times) / vocab_size for token in range(vocab_size)]).double()
    shares = weights / (900 + len(times))

    class CountingLosses(torch.nn.Module):
        def losses(self, ids: torch.Tensor, targets: torch.Tensor, positions: object) -> torch.Tensor:
            logits = shares.log().expand(*targets.shape, -1)
            return torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")

    assert float(shares.sum()) == pytest.approx(1, abs=LOSS)
    for length in (5, 8, 42):
        assert count(training, held_out, vocab_size).unigram == pytest.approx(
            losses_in_windows(CountingLosses(), held_out, length).mean, abs=LOSS
        )


@pytest.mark.parametrize("vocab_size", [VOCAB, 1000])
def test_a_bigram_count_leaves_what_is_new_to_the_unigram_count(vocab_size: int) -> None:
    """Witten & Bell's formula, with dictionaries; one token stands nowhere but at the end, so nothing follows it."""
    training, held_out = [*(ids() ** 2 % 13).tolist(), 15], [*ids(43).tolist(), 15, 3]
    times, pairs = Counter(training), Counter(itertools.pairwise(training))
    losses = []
    for before, after in itertools.pairwise(held_out):
        unigram = (times[after] + len(times) / vocab_size) / (len(training) + len(times))
        behind = {pair: number for pair, number in pairs.items() if pair[0] == before}
        share = unigram
        if behind:
            share = (pairs[before, after] + len(behind) * unigram) / (sum(behind.values()) + len(behind))
        losses.append(-math.log(share))
    assert count(np.array(training), np.array(held_out), vocab_size).bigram == pytest.approx(np.mean(losses), abs=LOSS)
    assert any((15, after) not in pairs for after in held_out)


def test_the_rate_rises_over_a_tenth_and_falls_to_a_tenth() -> None:
    rates = [schedule(step, 100) for step in range(100)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)], rel=FEW_ROUNDINGS, abs=0)
    assert rates[10] == 1
    assert all(a > b for a, b in itertools.pairwise(rates[10:]))
    assert 0.1 < rates[-1] < 0.11


def test_a_text_is_trained_on_and_continued() -> None:
    text = "abcdefgh" * 60
    decoder, tokenizer = train(
        text, "rotary", vocab_size=257, num_steps=60, train_length=16, batch_size=8, d_model=32, num_heads=2
    )
    continued = generate(decoder, tokenizer.encode("abcdefgha"), 10, temperature=0)
    assert tokenizer.decode(continued) == ("abcdefgh" * 3)[:19]


def test_a_tokenizer_of_ones_own_is_kept_and_the_seed_decides() -> None:
    _, tokenizer = train("some text " * 30, **SMALL)
    options = {**SMALL, "tokenizer": tokenizer}
    models = [train("some text " * 30, "alibi", seed=seed, **options)[0] for seed in (0, 0, 1)]
    assert train("some text " * 30, **options)[1] is tokenizer
    first, again, other = (next(decoder.parameters()) for decoder in models)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    with refuses(RangeError, "rotary+yarn"):  # a scaling is nothing to train
        train("some text " * 30, "rotary+yarn", **SMALL)
