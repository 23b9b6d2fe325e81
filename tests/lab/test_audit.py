"""Tiny models, trained under a hypothesis by code that is not ours, and saved under configurations that lie, or do not.

The text is words of nine random letters, each written twice: the second time a letter is known by what stands ten
places before it, and by nothing else.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from click.testing import CliRunner
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.models.bloom import modeling_bloom
from transformers.models.llama import modeling_llama

from locant.cli import main
from locant.errors import InputError, RangeError
from locant.lab import audit as audit_file
from locant.lab.audit import _is_clear, _is_worse, _Search, audit
from locant.lab.audit_subject import OWN, Hypothesis, TransformersSubject
from locant.text.corpus import read_corpus
from tests.minilm import MINILM
from tests.tolerances import LOGITS

LETTERS = "abcdefghijklmnop"
VOCAB = {letter: place for place, letter in enumerate(LETTERS + "=.")}
LENGTH, WINDOWS = 64, 24
SIZES: dict[str, Any] = {
    "vocab_size": len(VOCAB), "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
LARGER = {"rope_type": "default", "rope_theta": 5e5}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}


def text(words: int, seed: int) -> str:
    draw = np.random.default_rng(seed)
    return "".join(f"{word}={word}." for word in ("".join(draw.choice([*LETTERS], 9)) for _ in range(words)))


def ids_of(some: str) -> Tensor:
    return torch.tensor([VOCAB[letter] for letter in some])


def loss_of(model: Any, rows: Tensor) -> Tensor:
    return F.cross_entropy(model(rows[:, :-1], use_cache=False).logits.transpose(1, 2), rows[:, 1:])


def trained(model: Any, steps: int = 120) -> Any:
    ids, draw = ids_of(text(5_000, seed=1)), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, steps)
    for _ in range(steps):
        starts = torch.randint(len(ids) - LENGTH, (24, 1), generator=draw)
        loss_of(model, ids[starts + torch.arange(LENGTH + 1)]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model.eval()


def llama(rope: dict[str, Any], **others: Any) -> Any:
    return LlamaForCausalLM(LlamaConfig(**SIZES | others, rope_parameters=dict(rope)))


def neighbours_rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    """The paper's rotation, of 2i with 2i + 1."""
    cos, sin = (each[:, None, :, : each.shape[-1] // 2].repeat_interleave(2, -1) for each in (cos, sin))
    turned = (torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2) for x in (q, k))
    return tuple(x * cos + y * sin for x, y in zip((q, k), turned, strict=True))


@contextmanager
def interleaved_code() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_llama, "apply_rotary_pos_emb", neighbours_rotated)
        yield


def rotated_backwards(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    """By the negative angle, as models do that take a pair's second dimension for its first."""
    cos, sin = (each[:, None] for each in (cos, sin))
    turned = (torch.cat([*x.chunk(2, -1)[::-1]], -1) * torch.cat([torch.ones(16), -torch.ones(16)]) for x in (q, k))
    return tuple(x * cos + y * sin for x, y in zip((q, k), turned, strict=True))


@contextmanager
def backward_code() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_llama, "apply_rotary_pos_emb", rotated_backwards)
        yield


@contextmanager
def rising_slopes() -> Iterator[None]:
    slopes = modeling_bloom._get_alibi_slopes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_bloom, "_get_alibi_slopes", lambda *sizes: -slopes(*sizes))
        yield


@contextmanager
def own_code() -> Iterator[None]:
    yield


def bloom() -> Any:
    sizes = {"vocab_size": len(VOCAB), "hidden_size": 64, "n_layer": 2, "n_head": 4}
    return BloomForCausalLM(BloomConfig(**sizes))


def neox(share: float) -> Any:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": share}
    return GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES, rope_parameters=rope))


TRUTHS = {
    "plain": (lambda: llama(PLAIN), own_code),
    "linear": (lambda: llama(LINEAR), own_code),
    "interleaved": (lambda: llama(LARGER), interleaved_code),
    "reversed": (lambda: llama(PLAIN), backward_code),
    "half of the head": (lambda: neox(0.5), own_code),
    "rising": (bloom, rising_slopes),
    "falling": (bloom, own_code),
}


@pytest.fixture(scope="module")
def truths() -> dict[str, tuple[dict[str, Tensor], float]]:
    """Filled when they are first asked for: weights, and the loss of their own code on the text of the audit."""
    return {}


def weights_of(name: str, truths: dict[str, tuple[dict[str, Tensor], float]]) -> tuple[dict[str, Tensor], float]:
    if name not in truths:
        build, code = TRUTHS[name]
        with torch.random.fork_rng(), code():
            torch.manual_seed(0)
            model = trained(build())
            ids = ids_of(text(WINDOWS * LENGTH // 20 + 5, seed=2))
            rows = ids[torch.arange(WINDOWS)[:, None] * LENGTH + torch.arange(LENGTH + 1)]
            with torch.no_grad():
                truths[name] = model.state_dict(), loss_of(model, rows).item()
    return truths[name]


def saved(model: Any, folder: Path) -> tuple[str, list[str]]:
    """Its folder, with a tokenizer of letters, and a text."""
    model.save_pretrained(folder / "model")
    tokenizers.Tokenizer(tokenizers.models.BPE(VOCAB, [])).save(str(folder / "model" / "tokenizer.json"))
    (folder / "text.txt").write_text(text(WINDOWS * LENGTH // 20 + 5, seed=2))
    return str(folder / "model"), [str(folder / "text.txt")]


def audited(model: Any, folder: Path) -> dict[str, Any]:
    return audit(*saved(model, folder), length=LENGTH, windows=WINDOWS)


LIES = [
    ("plain", lambda: llama(PLAIN), own_code, "the configuration"),
    ("plain", lambda: llama(LARGER), own_code, "base 10,000"),
    ("plain", lambda: llama(LINEAR), own_code, "scaling none"),
    ("linear", lambda: llama(PLAIN), own_code, "scaling linear:4"),
    ("interleaved", lambda: llama(PLAIN), own_code, "interleaved layout, base 500,000"),
    ("reversed", lambda: llama(PLAIN), own_code, "reversed direction"),
    ("half of the head", lambda: neox(0.5), own_code, "the configuration"),
    ("half of the head", lambda: neox(1.0), own_code, "50% of each head rotated"),
    ("falling", bloom, own_code, "the configuration"),
    ("falling", bloom, rising_slopes, "ALiBi: other sign"),
]
"""Weights, the configuration that they are saved under, the code that reads it, and what is to be found."""
MORE_LIES = [
    ("linear", lambda: llama(LINEAR), own_code, "the configuration"),
    ("interleaved", lambda: llama(LARGER), own_code, "interleaved layout"),  # above, with another base, too
]
"""Lies of the sweep: what they prove, others prove as well."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("truth", "build", "code", "hypothesis"),
    [
        pytest.param(*each, id=f"{each[0]}, {each[3]}", marks=marks)
        for lies, marks in ((LIES, ()), (MORE_LIES, pytest.mark.sweep))
        for each in lies
    ],
)
def test_audit_finds_the_reading_of_the_training(
    truth: str, build: Any, code: Any, hypothesis: str, truths: Any, tmp_path: Path
) -> None:
    weights, loss = weights_of(truth, truths)
    model = build()
    model.load_state_dict(weights)
    with code():
        found = audited(model, tmp_path)
    assert (found["best"], found["within_noise"]) == (hypothesis, []), found["sentence"]
    assert found["verdict"] == ("fits" if hypothesis == "the configuration" else "another fits")
    assert found["losses"][hypothesis] == pytest.approx(loss, abs=LOGITS), "what the code of the training computes"
    assert next(iter(found["losses"])) == hypothesis


@pytest.mark.slow
def test_untrained_weights_allow_no_verdict(tmp_path: Path) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        found = audited(llama(PLAIN, initializer_range=0.1), tmp_path)
    assert found["verdict"] == "cannot tell"
    assert "interleaved layout" in found["within_noise"]


def test_tables_and_learned_biases_leave_nothing_to_find(tmp_path: Path) -> None:
    """MiniLM is an encoder without a head, which no loss of the next token could be asked of."""
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": len(VOCAB), "bos_token_id": 0, "eos_token_id": 1}
    t5 = T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=len(VOCAB))
    T5ForConditionalGeneration(t5).save_pretrained(tmp_path / "t5")
    gpt2, _ = saved(GPT2LMHeadModel(GPT2Config(**sizes)), tmp_path)
    small = {"vocab_size": len(VOCAB), "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    FalconForCausalLM(FalconConfig(**small, alibi=True)).save_pretrained(tmp_path / "falcon")
    for folder, has in {
        gpt2: "GPT2LMHeadModel has a table of learned positions",
        str(tmp_path / "falcon"): "FalconForCausalLM has no positions that could be computed in another way",
        str(MINILM): "has a table of learned positions",
        str(tmp_path / "t5"): "has no positions that could be computed in another way",
    }.items():
        found = audit(folder)
        assert found["verdict"] == "nothing to find"
        assert has in found["sentence"]


@pytest.mark.parametrize(
    "hypothesis",
    [
        Hypothesis(layout="interleaved", base=1e6),
        Hypothesis(share=0.5),
        Hypothesis(scaling="yarn:4"),
        Hypothesis(direction="reversed", scaling="yarn:4"),
    ],
)
def test_a_hypothesis_leaves_the_model_as_it_was(hypothesis: Hypothesis) -> None:
    model, ids = llama(PLAIN, initializer_range=0.3).eval(), torch.arange(12)[None]
    before, weights = model(ids).logits, {name: each.clone() for name, each in model.state_dict().items()}
    subject = TransformersSubject(model)
    with subject.apply(hypothesis):
        assert not torch.allclose(model(ids).logits, before)
    assert torch.equal(model(ids).logits, before)
    assert all(torch.equal(each, weights[name]) for name, each in model.state_dict().items())


def test_the_reversed_direction_reads_weights_with_exchanged_pairs() -> None:
    model, ids = llama(PLAIN, initializer_range=0.3).eval(), torch.arange(12)[None]
    before = model(ids).logits
    for layer in model.model.layers:
        for rows in (layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight):
            rows.data = rows.data.unflatten(0, (2, 2, 16)).flip(1).flatten(0, 2)
    assert not torch.allclose(model(ids).logits, before, atol=LOGITS)
    with TransformersSubject(model).apply(Hypothesis(direction="reversed")):
        assert torch.allclose(model(ids).logits, before, atol=LOGITS)


def fabricated(losses: dict[str, float], unigram: float = 6.0) -> tuple[dict[str, Any], Counter[str]]:
    """What is found where hypotheses have these mean losses, and 5 without one; and how many windows were asked for."""
    asked, noise = Counter[str](), np.random.default_rng(0)

    def losses_of(hypothesis: Hypothesis) -> Iterator[list[float]]:
        for window in range(16):
            asked[hypothesis.name] += 1
            yield [*losses.get(hypothesis.name, 5.0) + np.sin(window) + noise.normal(0, 0.1, size=128)]

    search = _Search(TransformersSubject(llama(PLAIN)), losses_of, 16, unigram, on_step=lambda *_: None)
    return search.run(), asked


def test_a_reading_no_better_than_counting_words_explains_nothing() -> None:
    verdicts = {}
    for unigram in (3.9, 4.5):
        found, _ = fabricated({"base 500,000": 4.0}, unigram)
        assert found["best"] == "base 500,000"
        verdicts[unigram] = found["verdict"]
    assert verdicts == {3.9: "not explained", 4.5: "another fits"}
    assert fabricated({"the configuration": 4.0}, 3.9)[0]["verdict"] == "not explained"


def test_clearly_worse_readings_are_dropped_early_and_others_measured_in_full() -> None:
    found, asked = fabricated({"the configuration": 4.0, "base 500,000": 4.001, "interleaved layout": 4.5})
    assert (found["verdict"], found["within_noise"]) == ("cannot tell", ["base 500,000"])
    assert asked["the configuration"] == asked["base 500,000"] == 16
    assert {*found["dropped"]} == {*found["losses"]} - {"the configuration", "base 500,000"}
    assert {asked[name] for name in found["dropped"]} == {*found["dropped"].values()} == {2}
    assert round(found["losses"]["interleaved layout"] - np.sin(range(16)).mean(), 1) == 4.5, "not that of two windows"


def test_layers_without_positions_stay_without_them_under_another_share() -> None:
    sizes = {**SIZES, "num_key_value_heads": 2, "no_rope_layers": [1, 0], "pad_token_id": 0}
    subject = TransformersSubject(SmolLM3ForCausalLM(SmolLM3Config(**sizes)))
    with pytest.raises(InputError, match="layers that differ"), subject.apply(Hypothesis(share=0.5)):
        pass


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    folder, files = saved(llama(PLAIN), tmp_path)
    with pytest.raises(RangeError, match="got 9 for windows, expected an integer of 10 or more; try: windows=16"):
        audit(folder, files, length=LENGTH, windows=9)
    tokens = len(read_corpus(files, tokenizer=folder, default_vocab_size=512).ids)
    with pytest.raises(InputError, match=r"got [1-9] windows of .* expected 10 or more; try: use a longer text or"):
        audit(folder, files, length=tokens // 9)
    with pytest.raises(InputError, match="a text of more than 5,000 tokens, or a smaller length="):
        audit(folder, files, length=5_000)


def test_a_difference_below_the_printed_digits_does_not_count() -> None:
    """Windows of weights that know nothing of positions differ alike, by a millionth."""
    losses = np.add.outer(np.arange(10) / 10, np.linspace(3.0, 2.0, 128))
    for by, clear in ((1e-6, False), (0.002, True)):
        assert _is_clear((losses - by).mean(1), losses.mean(1), comparisons=1) is clear
        assert _is_worse(losses[:2] + by, losses, looks=100) is clear


@pytest.mark.slow
def test_the_verb_says_what_was_found_and_its_code_whether_another_reading_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, (file,) = saved(llama(PLAIN, initializer_range=0.1), tmp_path)
    words = ["audit", folder, "--text", file, "--length", LENGTH, "--windows", 12, "--dtype", "float32"]
    told = CliRunner().invoke(main, [*map(str, words), "--json"])
    assert told.exit_code == 0, told.output
    facts = json.loads(told.stdout)
    assert facts["verdict"] == "cannot tell"
    assert (facts["windows"], facts["length"]) == (12, LENGTH)
    shown = CliRunner().invoke(main, [*map(str, words)])
    assert facts["sentence"].split(";")[0] in " ".join(shown.stdout.split())
    assert "interleaved layout" in shown.stdout
    monkeypatch.setattr(audit_file, "audit", lambda *_, **__: facts | {"verdict": "another fits"})
    assert CliRunner().invoke(main, [*map(str, words)]).exit_code == 1
    monkeypatch.undo()
    nothing = CliRunner().invoke(main, ["audit", str(MINILM)])
    assert nothing.exit_code == 0
    assert "nothing to find" in nothing.stdout


WINDOWED: dict[str, dict[str, Any]] = {
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"], "head_dim": 32},
    "gemma2": {"layer_types": ["sliding_attention", "full_attention"], "head_dim": 32},
    "qwen2": {"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True},
    "cohere2": {"layer_types": ["sliding_attention", "full_attention"]},
    "olmo3": {"layer_types": ["sliding_attention", "full_attention"]},
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"], "num_local_experts": 4, "head_dim": 32},
    "mistral": {},
}
"""Models whose layers have a sliding window: in some, the types of layers also differ in their base."""


@pytest.mark.parametrize("kind", WINDOWED)
def test_another_window_and_other_full_layers_are_read_as_a_model_of_this_configuration(kind: str) -> None:
    """The oracle is a model that transformers builds from the other configuration, with the same weights."""
    sizes = {**SIZES, "num_key_value_heads": 1, "sliding_window": 4, "pad_token_id": 0, "initializer_range": 0.3}
    config = AutoConfig.for_model(kind, **sizes | WINDOWED[kind])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.arange(16)[None]
    exchanged = [*reversed(WINDOWED[kind].get("layer_types", []))]
    changes: dict[Hypothesis, dict[str, Any]] = {Hypothesis(window=9): {"sliding_window": 9}}
    if exchanged:
        first = exchanged.index("full_attention")
        changes[Hypothesis(full=(2, first))] = {"layer_types": exchanged}
        changes[Hypothesis(full=(1, 0), window=9)] = {"layer_types": ["full_attention"] * 2, "sliding_window": 9}
    subject = TransformersSubject(model)
    subject.length = 16
    with torch.no_grad():
        own = model(ids).logits
        for reading, change in changes.items():
            other = copy.deepcopy(config)
            for key, value in change.items():
                setattr(other, key, value)
            oracle = AutoModelForCausalLM.from_config(other).eval()
            oracle.load_state_dict(model.state_dict())
            with subject.apply(reading):
                read = model(ids).logits
            assert torch.equal(read, oracle(ids).logits), reading.name
            assert torch.equal(model(ids).logits, own), "the model is as it was"


def test_windows_that_a_text_does_not_show_are_not_readings_of_their_own() -> None:
    """The layers of this model differ in their window alone."""
    config = AutoConfig.for_model("qwen2", **SIZES | WINDOWED["qwen2"], sliding_window=64, num_key_value_heads=1)
    subject = TransformersSubject(AutoModelForCausalLM.from_config(config))
    for length, is_shown in ((64, False), (65, True)):
        subject.length = length
        own = repr(subject.positions_key(OWN))
        for reading in (Hypothesis(window=0), Hypothesis(full=(1, 0))):
            assert (repr(subject.positions_key(reading)) != own) is is_shown
        assert repr(subject.positions_key(Hypothesis(full=(2, 0)))) == own, "its own layers"
