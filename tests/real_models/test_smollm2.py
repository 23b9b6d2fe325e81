"""SmolLM2-135M from its GGUF file, on 512 tokens of Python's documentation: `make test-real`."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from benchmarks.real_models import weights
from locant import Tokenizer
from locant.cli import main
from locant.errors import InputError
from locant.gguf_file import open_gguf
from locant.lab import audit_subject
from locant.lab.audit import audit
from tests.tolerances import LOSS

dequantize = pytest.importorskip("gguf.quants", reason="gguf is not installed").dequantize
pytestmark = pytest.mark.real

WINDOW, WINDOWS = 51, 10
BASE = b"llama.rope.freq_base"


@pytest.fixture(scope="module")
def file() -> Path:
    try:
        return weights.path("smollm2")
    except InputError as error:
        pytest.skip(str(error))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(topics[name] for name in sorted(topics))[:4_000])
    return path


def plain_llama(file: Path) -> LlamaForCausalLM:
    """Return SmolLM2 with the sizes of its model card and the dequantised tensors of a file, by code that is not ours.

    To convert a model, llama.cpp splits the rows of a head of queries and keys into two halves, and takes a row of each
    in turn.
    """
    heads = {"attn_q": 9, "attn_k": 3}
    names = {
        "token_embd": "model.embed_tokens", "output_norm": "model.norm", "blk": "model.layers",
        "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    config = LlamaConfig(
        vocab_size=49_152, hidden_size=576, intermediate_size=1_536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8_192, rms_norm_eps=1e-5, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).eval()
    weights: dict[str, torch.Tensor] = {}
    for tensor in open_gguf(file).tensors.values():
        array = dequantize(tensor.data, tensor.tensor_type)
        parts = tensor.name.split(".")
        if (count := heads.get(parts[-2])) is not None:
            array = array.reshape(count, 32, 2, 576).swapaxes(1, 2).reshape(array.shape)
        weights[".".join(names.get(part, part) for part in parts)] = torch.from_numpy(np.array(array, np.float32))
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, assign=True)
    model.model.rotary_emb = LlamaRotaryEmbedding(config)  # its frequencies are computed, and not in the file
    return model


def test_the_loss_is_that_of_transformers(file: Path, text: Path, tmp_path: Path) -> None:
    line = ["evaluate", file, text, "--lengths", 511, "--windows", 1, "--with", "own", "--keys", 0]
    result = CliRunner().invoke(main, [*map(str, line), "-o", str(tmp_path / "report"), "--json"])
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    ids = torch.as_tensor(Tokenizer.load(file).encode(text.read_text())[None, :512], dtype=torch.long)
    with torch.inference_mode():
        logits = plain_llama(file)(ids).logits[0, :-1].double()
    loss = torch.nn.functional.cross_entropy(logits, ids[0, 1:]).item()
    assert facts["records"][0]["loss_by_length"]["511"] == pytest.approx(loss, abs=LOSS)
    assert facts["weights"]["types"]["Q4_1"] > 0.7
    assert result.stderr.count("dequantised to float32 (538 MB in memory)") == 1


def test_an_audit_finds_a_wrong_base_in_the_metadata(
    file: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = bytearray(file.read_bytes())
    place = content.index(BASE) + len(BASE) + 4  # after the key and the number of the type float32
    assert struct.unpack_from("<f", content, place) == (100_000.0,)
    struct.pack_into("<f", content, place, 1e7)
    lie = tmp_path / "lie.gguf"
    lie.write_bytes(content)
    monkeypatch.setattr(audit_subject, "ROTARY", {"base": (1e5, 1e6)})  # all readings take three minutes
    found = audit(str(lie), [str(text)], length=WINDOW, windows=WINDOWS)
    assert "base=10000000" in found["configuration"]
    assert found["verdict"] == "another fits"
    assert found["best"] == "base 100,000"
