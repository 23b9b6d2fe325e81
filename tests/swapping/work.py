"""What is done with a model of `transformers`, before it is swapped and while it is: each gives a tensor to compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from locant.swapping.forward_arguments import cache_argument

__all__ = [
    "Work", "adapted", "behind", "called", "compiled", "generated", "ids", "in_bfloat16", "of_bfloat16", "off",
    "packed", "padded", "shard", "sharded", "trained",
]  # fmt: skip

Work = Callable[[Any], Tensor]


def called(model: Any, tokens: Tensor, **options: Any) -> Any:
    """Its output; of an encoder and a decoder with the same tokens for both."""
    both = {"decoder_input_ids": tokens} if getattr(model.config, "is_encoder_decoder", False) else {}
    return model(tokens, **both, **options)


def off(actual: Tensor, expected: Tensor) -> float:
    """By how much they differ, at most; models compute norms in float32 whatever they are in."""
    return (actual - expected).abs().max().item()


def behind(model: Any, cache: Any) -> dict[str, Any]:
    """How the installed `transformers` is told that there is a cache."""
    return {str(cache_argument(model)): cache}


def ids() -> Tensor:
    """Two rows of twelve tokens, none of them special."""
    return torch.arange(3, 27).view(2, 12)


def padded() -> tuple[Tensor, Tensor, Tensor]:
    """The second row has three tokens of padding before it."""
    tokens, mask = ids(), torch.ones(2, 12, dtype=torch.int64)
    tokens[1, :3], mask[1, :3] = 0, 0
    return tokens, mask, (mask.cumsum(1) - 1).clamp(min=0)


def generated(model: Any, count: int = 6, **options: Any) -> Tensor:
    tokens, mask, _ = padded()
    found = model.generate(
        tokens, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0,
        output_logits=True, return_dict_in_generate=True, **options,
    )  # fmt: skip
    return torch.stack(found.logits)


def packed(model: Any) -> Tensor:
    """Two documents in a row, which `transformers` tells by their position ids where there is no cache."""
    return called(model, ids(), position_ids=torch.tensor([[*range(5), *range(7)]] * 2), use_cache=False).logits


def trained(model: Any) -> Tensor:
    """A step with gradient checkpointing: every gradient."""
    model.train()
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")  # the older name last
    getattr(model, next(name for name in names if hasattr(model, name)))()
    model(ids(), labels=ids()).loss.backward()
    return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])


def in_bfloat16(model: Any) -> Tensor:
    return called(model.bfloat16(), ids()).logits


def adapted(model: Any) -> Tensor:
    """LoRA on all linear layers: every gradient of its weights."""
    import peft

    torch.manual_seed(0)
    lora = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    lora(ids(), labels=ids()).loss.backward()
    return torch.cat([each.grad.flatten() for each in lora.parameters() if each.grad is not None])


def of_bfloat16(model: Any) -> Tensor:
    """With weights in bfloat16, and frequencies in float32, as `from_pretrained(dtype=torch.bfloat16)` leaves both."""
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return called(model, ids()).logits


def compiled(model: Any) -> Tensor:
    """The logits of one graph, whose operators run as they are traced."""
    torch.compiler.reset()
    with torch.no_grad():
        return called(torch.compile(model, fullgraph=True, backend="eager"), ids()).logits


def sharded(model: Any) -> Tensor:
    """FSDP2 on the processes that run this, with the same tokens: those of others may ask for other experts."""
    shard(model)
    found = model(ids(), labels=ids())
    found.loss.backward()
    whole = [each.grad.full_tensor() for each in model.parameters() if each.grad is not None]
    return torch.cat([each.detach().flatten() for each in (found.logits, *whole)])


def shard(model: Any) -> None:
    """Every layer by itself, and the rest."""
    from torch.distributed.fsdp import fully_shard

    lists = [name for name, each in model.named_modules() if isinstance(each, torch.nn.ModuleList)]
    for name in lists:
        if not any(name.startswith(f"{other}.") for other in lists):  # layers, not what they have of each kind
            for layer in model.get_submodule(name):
                fully_shard(layer)
    fully_shard(model)
