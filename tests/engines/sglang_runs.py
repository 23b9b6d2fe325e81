"""``python -m tests.engines.sglang_runs JOBS.json OUT``: the tables of angles that SGLang makes, on a CPU.

A process of its own, for SGLang reads its plug-ins once, and its import warns. Its engine does not run on a CPU; its
arguments, its configuration and its rotary classes do.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig  # noqa: F401  # before the stub below, whose presence transformers would notice

STUBBED = ("torchvision", "torchvision.transforms", "torchvision.transforms.functional", "vllm", "vllm._custom_ops")
"""For pictures, and for kernels of GPUs: their wheels need CUDA."""


def run(model: str, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """As SGLang's own models ask for their table, after its options are made known to the process."""
    from sglang.srt.configs.model_config import ModelConfig  # pyright: ignore[reportMissingImports]
    from sglang.srt.layers.rotary_embedding import get_rope  # pyright: ignore[reportMissingImports]
    from sglang.srt.runtime_context import publish  # pyright: ignore[reportMissingImports]
    from sglang.srt.server_args import ServerArgs  # pyright: ignore[reportMissingImports]

    server = ServerArgs(model_path=model, device="cpu", **options)
    publish(server, role="scheduler")
    read = ModelConfig.from_server_args(server)
    config, rope = read.hf_text_config, read.hf_text_config.rope_parameters
    size = config.hidden_size // config.num_attention_heads
    made = get_rope(
        size, size, config.max_position_embeddings, rope["rope_theta"],
        rope_scaling=None if rope["rope_type"] == "default" else rope,
        partial_rotary_factor=rope.get("partial_rotary_factor", 1.0), dtype=torch.float32,
    )  # fmt: skip
    table = made.long_short_cos_sin_cache if rope["rope_type"] == "longrope" else made.cos_sin_cache
    return {"table": table, "context": torch.tensor(read.context_len)}


def main(jobs: Path, out: Path) -> None:
    for name in STUBBED:
        sys.modules[name] = MagicMock()
    from sglang.srt.plugins import load_plugins  # pyright: ignore[reportMissingImports]

    load_plugins()
    for job in json.loads(jobs.read_text()):
        save_file(run(job["model"], job["options"]), out / f"{job['name']}.safetensors")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
