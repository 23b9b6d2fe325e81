"""A tiny random model in a folder, in the place of trained weights."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.real_models.cost_of_bugs import texts
from benchmarks.real_models.reach import Subject
from locant import Tokenizer
from locant.lab.readable_model import read_language_model

TRAINED = 128


@pytest.fixture(scope="package")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    folder = tmp_path_factory.mktemp("weights") / "tiny"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=400, hidden_size=32, intermediate_size=32, num_hidden_layers=2, head_dim=16,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=TRAINED, initializer_range=0.3,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer.train([texts()["documentation"][:20_000]], 400)
    tokenizer.save(folder / "tokenizer.json")
    return Subject(folder, read_language_model(folder), Tokenizer.load(folder))
