"""Published configurations are read as `transformers` reads them, or refused for a true reason."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING

from tests.models.published_configurations import FOLDER, FOREIGN, NO_ROTARY_MODULE, REFUSED, UNBUILT, outcome_of

SAMPLE = (
    "DeepSeek-V4-Flash", "EXAONE-4.5-33B", "GLM-5.1-NVFP4", "Hunyuan-7B-Instruct", "MiMo-V2-Flash",
    "SmolVLM-256M-Instruct", "aya-vision-8b-4bit", "c4ai-command-a-03-2025-bf16", "codegen-350M-nl", "fuyu-8b",
    "ministral-3", "nomic-embed-text-v1", "phi-1", "poolside-Laguna-XS.2-FP8", "videollava-7b-video-eval-20k_2048",
)  # fmt: skip
"""Files that were refused or misread: for a key that nobody reads, another spelling, or a size that is missing."""

AS_THEIRS = ("same bits", "equal")
MOST_REFUSED = 0.03


@pytest.fixture
def configurations() -> Path:
    if not FOLDER.is_dir():
        pytest.skip(f"no configurations at {FOLDER}; set LOCANT_CONFIGS to a folder that holds them")
    return FOLDER


@pytest.mark.unchecked  # importing so many models under runtime checks takes minutes
@pytest.mark.parametrize("name", SAMPLE)
def test_a_published_configuration_is_read_as_transformers_reads_it(configurations: Path, name: str) -> None:
    config = json.loads((configurations / f"{name}.json").read_text())
    assert CONFIG_MAPPING[config["model_type"]]
    result = outcome_of(config)
    assert result.verdict in AS_THEIRS, result


@pytest.mark.slow
@pytest.mark.unchecked
def test_no_published_configuration_is_misread_and_few_raise(configurations: Path) -> None:
    results = {path.name: outcome_of(json.loads(path.read_text())) for path in sorted(configurations.glob("*.json"))}
    count = Counter(result.verdict for result in results.values())
    compared = sum(count.values()) - sum(count[verdict] for verdict in (FOREIGN, UNBUILT, NO_ROTARY_MODULE))
    assert compared > len(results) / 3
    wrong = {name: result for name, result in results.items() if result.verdict not in (*AS_THEIRS, REFUSED)}
    assert not {name: result for name, result in wrong.items() if result.verdict == "differs"}
    refused = {name: result.detail for name, result in results.items() if result.verdict == REFUSED}
    assert len(refused) <= MOST_REFUSED * compared, refused
    assert all("contradicts" in detail for detail in refused.values()), refused
