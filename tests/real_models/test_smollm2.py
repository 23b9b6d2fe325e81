"""SmolLM2-135M from its GGUF file, on 512 tokens of Python's documentation: `make test-real`."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.real_models import weights
from locant.cli import main
from locant.errors import InputError
from locant.lab import audit as audits
from tests.tolerances import LOSS

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


def test_the_loss_is_that_of_transformers(file: Path, text: Path, tmp_path: Path) -> None:
    line = ["evaluate", file, text, "--lengths", 511, "--windows", 1, "--with", "own", "--keys", 0]
    result = CliRunner().invoke(main, [*map(str, line), "-o", str(tmp_path / "report"), "--json"])
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    ids = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)(text.read_text(), return_tensors="pt")
    ids = ids.input_ids[:, :512]
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(ids).logits[0, :-1].double()
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
    monkeypatch.setattr(audits, "ROTARY", {"base": (1e5, 1e6)})  # all readings take three minutes
    found = audits.audit(str(lie), [str(text)], length=WINDOW, windows=WINDOWS)
    assert "base=10000000" in found["configuration"]
    assert found["verdict"] == "another fits"
    assert found["best"] == "base 100,000"
