"""``python -m tests.engines.vllm_runs JOBS.json OUT``: prompts through vLLM's own engine, on a CPU.

A process of its own, for vLLM reads its plug-ins once, and its import warns. Each job has a name, a model, ids and
options of the engine; written are the log-probabilities of the whole vocabulary, and the model's first table of angles.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
}  # fmt: skip
TABLES = ("cos_sin_cache", "long_short_cos_sin_cache")


def run(model: str, ids: list[int], options: dict[str, Any]) -> dict[str, torch.Tensor]:
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    engine = LLM(
        model=model, skip_tokenizer_init=True, enforce_eager=True, max_num_seqs=1, max_logprobs=-1,
        disable_log_stats=True, **options,
    )  # fmt: skip
    parameters = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=-1, detokenize=False)
    (answer,) = engine.generate({"prompt_token_ids": ids}, parameters, use_tqdm=False)
    rows = [[row[token].logprob for token in sorted(row)] for row in answer.prompt_logprobs[1:]]
    (tables,) = engine.apply_model(
        lambda model: [getattr(part, name) for part in model.modules() for name in TABLES if hasattr(part, name)]
    )
    del engine
    gc.collect()
    return {"logprobs": torch.tensor(rows), "table": tables[0].clone()}


def main(jobs: Path, out: Path) -> None:
    os.environ.update(SETTINGS)  # before the first import of vLLM
    for job in json.loads(jobs.read_text()):
        save_file(run(job["model"], job["ids"], job["options"]), out / f"{job['name']}.safetensors")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
