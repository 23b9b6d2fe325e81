"""lm-evaluation-harness asks a swapped model through `HFLM` what it asks any model: two tasks, offline."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import locant
from tests.engines.record import record
from tests.tolerances import LOGITS

lm_eval = pytest.importorskip("lm_eval", reason="lm_eval is not installed: make engines ENGINES=lm_eval")

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

TEXTS = [f"counting {first}, then {first + 1}, then {first + 2}. " * 3 for first in range(20)]
TASKS = {
    "tiny_choice": "output_type: multiple_choice\ndoc_to_text: '{{question}}'\ndoc_to_choice: choices\n"
    "doc_to_target: label\nmetric_list: [{metric: acc}]\n",
    "tiny_text": "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: text\n"
    "metric_list: [{metric: byte_perplexity}]\n",
}


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    import datasets
    from lm_eval.tasks import TaskManager

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [
        {"question": f"{number} plus one is", "choices": [f" {number + 1}", f" {number + 2}"], "label": 0, "text": text}
        for number, text in enumerate(TEXTS)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path}/rows.jsonl}}}}\ntest_split: test\n"
    for name, task in TASKS.items():
        (tmp_path / f"{name}.yaml").write_text(f"task: {name}\n{data}{task}")
    return TaskManager(include_path=str(tmp_path), include_defaults=False)


def tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({each: place for place, each in enumerate(["<pad>", "<eos>", *letters])}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    named = {"pad_token": "<pad>", "eos_token": "<eos>"}
    return PreTrainedTokenizerFast(tokenizer_object=inner, **named)


def model(encoding: locant.PositionEncoding | None = None) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = LlamaConfig(**sizes, vocab_size=258, max_position_embeddings=256, initializer_range=0.3)
    made = LlamaForCausalLM(config).eval()
    if encoding is not None:
        locant.swap(made, encoding)
    return made


def scores(asked: Any, tasks: Any) -> tuple[float, float]:
    """The share of right choices, and the perplexity by bytes."""
    from lm_eval.models.huggingface import HFLM

    engine = HFLM(pretrained=asked, tokenizer=tokenizer(), batch_size=4, max_length=256, device="cpu")
    of = lm_eval.simple_evaluate(engine, tasks=[*TASKS], task_manager=tasks, bootstrap_iters=0)["results"]
    return of["tiny_choice"]["acc,none"], of["tiny_text"]["byte_perplexity,none"]


@torch.no_grad()
def perplexity(asked: Any) -> float:
    """By the model's logits alone: each text behind the token that ends one."""
    tokens, nats = tokenizer(), 0.0
    for text in TEXTS:
        ids = torch.tensor([[1, *tokens.encode(text)]])
        nats += F.cross_entropy(asked(ids[:, :-1]).logits[0], ids[0, 1:], reduction="sum").item()
    return math.exp(nats / sum(map(len, TEXTS)))


def test_a_swapped_model_is_scored_as_any_other(tasks: Any) -> None:
    own = locant.Rotary(16, angles="float32")
    plain, swapped, biased = (scores(model(each), tasks) for each in (None, own, locant.ALiBi(4)))
    assert swapped == plain
    assert abs(math.log(biased[1] / plain[1])) > 10 * LOGITS, "the encoding acts"
    for encoding, (_, found) in ((own, swapped), (locant.ALiBi(4), biased)):
        expected = perplexity(model(encoding))
        difference = abs(math.log(found) - math.log(expected))
        assert difference <= LOGITS
        record("lm-evaluation-harness", f"nats per byte under {type(encoding).__name__}", difference, package="lm_eval",
               unit="nats")  # fmt: skip
