"""What is read of a foreign call is looked up by name when it is attached, and refused if no name is known."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, GPT2LMHeadModel, LlamaForCausalLM, masking_utils
from transformers.models.gpt2.modeling_gpt2 import GPT2Model
from transformers.models.llama.modeling_llama import LlamaModel

import locant
from locant.errors import InputError
from locant.swapping.forward_arguments import CACHE, cache_argument
from tests.refusal import refuses
from tests.swapping.families import LLAMA, Family, telling, tiny
from tests.swapping.test_handle import state
from tests.swapping.work import ids, off
from tests.tolerances import LOGITS


class Memory(LlamaModel):
    """The cache of a release to come."""

    def forward(self, input_ids: Any = None, position_ids: Any = None, memory: Any = None, **options: Any) -> Any:
        return super().forward(
            input_ids, position_ids=position_ids, **{str(cache_argument(LlamaModel)): memory}, **options
        )


class Memory2(GPT2Model):
    def forward(self, input_ids: Any = None, memory: Any = None, **options: Any) -> Any:
        return super().forward(input_ids, **{str(cache_argument(GPT2Model)): memory}, **options)


class Words(LlamaModel):
    def forward(self, words: Any = None, **options: Any) -> Any:
        return super().forward(words, **options)


def with_inner(model: Any, name: str, cls: type[nn.Module]) -> Any:
    """The model, whose inner one is of another class."""
    getattr(model, name).__class__ = cls
    return model


UNKNOWN: dict[str, tuple[Callable[[], Any], Any, str]] = {
    "scores": (lambda: with_inner(tiny(LLAMA), "model", Memory), locant.ALiBi(4), "its cache in Memory.forward"),
    "embeddings": (
        lambda: with_inner(tiny(LLAMA), "model", Memory), locant.Sinusoidal(64), "its cache in Memory.forward"
    ),
    "a table": (
        lambda: with_inner(tiny(Family("gpt2", "GPT2LMHeadModel")), "transformer", Memory2), locant.ALiBi(4),
        "its cache in Memory2.forward",
    ),
    "tokens": (lambda: with_inner(tiny(LLAMA), "model", Words), locant.ALiBi(4), "its tokens in Words.forward"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_name_that_nobody_knows_is_refused_and_nothing_is_changed(name: str) -> None:
    make, encoding, words = UNKNOWN[name]
    model = make()
    assert isinstance(model, (LlamaForCausalLM, GPT2LMHeadModel))
    before = state(model)
    with refuses(InputError, f"found no argument for {words}(", "known names are", "a newer locant"):
        locant.swap(model, encoding)
    assert state(model) == before


def test_what_reads_no_cache_needs_no_name_for_it() -> None:
    model = with_inner(tiny(LLAMA), "model", Memory)
    with locant.swap(model) as swapped:
        assert "exact" in swapped.sentences[0]


def test_a_function_for_masks_that_nobody_knows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(LLAMA)
    before = state(model)
    monkeypatch.setattr(masking_utils, "sdpa_mask", lambda batch_size, queries, kv_length, **others: None)
    with refuses(InputError, "found no argument for the slots of queries", "whose known names are q_length"):
        locant.swap(model, locant.ALiBi(4))
    assert state(model) == before


@pytest.mark.filterwarnings("ignore:.*past_key_values:FutureWarning")  # that the old name is old
@pytest.mark.parametrize("name", CACHE)
@pytest.mark.parametrize("encoding", [locant.ALiBi(4), locant.Sinusoidal(64)], ids=["scores", "embeddings"])
@torch.no_grad()
def test_a_cache_is_read_under_every_name_that_the_model_takes(name: str, encoding: Any) -> None:
    """The inner model is called as users may call it: hooks are given the name that they wrote."""
    model = telling()
    if name == "cache" and cache_argument(model) != name:
        pytest.skip("this release has another name")
    inner, tokens, cache = model.model, ids()[:1], DynamicCache(config=model.config)
    places = torch.tensor([[*range(5), *range(105, 112)]])

    def hidden(begin: int, end: int, **options: Any) -> Tensor:
        return inner(tokens[:, begin:end], position_ids=places[:, begin:end], **options).last_hidden_state

    with locant.swap(model, encoding):
        whole = hidden(0, 12, attention_mask=torch.ones_like(tokens), use_cache=False)
        parts = [hidden(begin, end, **{name: cache}) for begin, end in ((0, 7), (7, 8), (8, 12))]
        assert off(torch.cat(parts, 1), whole) <= LOGITS
        cache = DynamicCache(config=model.config)
        plain = inner(tokens, use_cache=False).last_hidden_state
        slots = [inner(tokens[:, begin:end], **{name: cache}) for begin, end in ((0, 7), (7, 12))]
        assert off(torch.cat([each.last_hidden_state for each in slots], 1), plain) <= LOGITS


# ---------------------------------------------------------------------- models without numbers


GEMMA = Family("gemma3_text", "Gemma3ForCausalLM")


def on_meta(family: Family) -> Any:
    model = tiny(family)
    with torch.device("meta"):
        return type(model)(model.config)


@pytest.mark.parametrize("encoding", [None, locant.ALiBi(4), locant.Kerple(4), locant.Rotary(16)])
@pytest.mark.parametrize("family", [LLAMA, GEMMA], ids=lambda family: family.model_type)
def test_a_rotary_module_without_numbers_is_refused(family: Family, encoding: Any) -> None:
    model = on_meta(family)
    before = state(model)
    with refuses(InputError, "rotary_emb", "meta device", "from_pretrained"):
        locant.swap(model, encoding)
    assert state(model) == before


@pytest.mark.parametrize("family", [Family("gpt2", "GPT2LMHeadModel"), LLAMA], ids=lambda family: family.model_type)
@torch.no_grad()
def test_an_encoding_keeps_its_numbers_in_a_model_whose_weights_come_later(family: Family) -> None:
    """As checkpoints are loaded in parts: the weights have none, the angles have."""
    ready, later, encoding = telling(family), telling(family), locant.Kerple(4)
    same = copy.deepcopy(encoding)
    for module in later.modules():
        for name, each in [*module.named_parameters(recurse=False)]:
            setattr(module, name, nn.Parameter(each.to("meta"), requires_grad=False))
    locant.swap(later, encoding)
    assert torch.equal(encoding.r1, same.r1.double())
    held = {name: each for name, each in later.state_dict().items() if "locant" in name}
    later.load_state_dict({**held, **ready.state_dict()}, assign=True)
    with locant.swap(ready, same):
        assert off(later(ids()).logits, ready(ids()).logits) <= LOGITS
