"""``python benchmarks/small_model.py``: train the small model of the explorer's screen "Your text" again.

The text is the Python documentation that ships with CPython. Training steps alternate between the encodings, which
share all other weights. So if the encoding on the page changes, all other weights stay the same. This takes some
minutes.
"""

from __future__ import annotations

import json
import sys

import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from locant.explore.models import (
    ENCODING_PREFIX,
    ENCODINGS,
    FOLDER,
    LENGTH,
    VOCAB_SIZE,
    WEIGHTS,
    build_encoding,
    untrained_model,
)
from locant.lab.results import environment
from locant.lab.text_learning import losses_in_windows, optimizer_of, schedule, split_held_out, update
from locant.text import Tokenizer, Windows, sample_text

STEPS, BATCH, HIGHEST = 2000, 16, 4e-3


def main(steps: int) -> None:
    """Train, measure each encoding on the last tenth of the text, and write the weights in float16."""
    torch.manual_seed(0)
    text = sample_text()
    tokenizer = Tokenizer.train(text, VOCAB_SIZE)
    training, held_out = split_held_out(tokenizer.encode(text), LENGTH)
    model = untrained_model("nope", VOCAB_SIZE)
    encodings = {name: build_encoding(name) for name in ENCODINGS}
    modules = torch.nn.ModuleDict(encodings)
    parameters = [*model.parameters(), *modules.parameters()]
    optimizer = optimizer_of(parameters, HIGHEST)
    windows = Windows(training, LENGTH, stride=1)
    model.train()
    for step in range(steps):
        model.embedding.encoding = encodings[ENCODINGS[step % len(ENCODINGS)]]
        batch = windows.__getitems__(torch.randint(len(windows), (BATCH,)).tolist())
        loss = F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["targets"].flatten())
        loss.backward()
        update(parameters, (optimizer, HIGHEST * schedule(step, steps)))
        if step % 200 < len(ENCODINGS):
            print(step, ENCODINGS[step % len(ENCODINGS)], round(loss.item(), 3), flush=True)
    losses = {}
    for name, encoding in encodings.items():
        model.embedding.encoding = encoding
        losses[name] = round(losses_in_windows(model, held_out, LENGTH).mean, 3)
    model.embedding.encoding = encodings["nope"]
    weights = {**model.state_dict(), **modules.state_dict(prefix=ENCODING_PREFIX)}
    about = {"text": "Python's own documentation, pydoc_data.topics", "tokens": len(training), "steps": steps,
             "batch_size": BATCH, "length": LENGTH, "held_out_loss": losses, "environment": environment()}  # fmt: skip
    FOLDER.mkdir(exist_ok=True)
    half = {name: weight.half().contiguous() for name, weight in weights.items()}
    save_file(half, FOLDER / WEIGHTS, {"about": json.dumps(about)})
    tokenizer.save(FOLDER)
    (FOLDER / WEIGHTS).chmod(0o644)
    print(f"{(FOLDER / WEIGHTS).stat().st_size:,} bytes; nats per token, held out: {losses}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else STEPS)
