"""`probe` tells T5's buckets from their values alone, and says which settings share values out alike."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import locant
from locant import ALiBi, T5Bias
from locant.probing.bias import BiasReport
from tests.tolerances import ROTATED_TOKEN, SIX_DIGITS


def probed(bias: Callable[..., Tensor]) -> BiasReport:
    report = locant.probe(bias)
    assert isinstance(report, BiasReport)
    return report


def bucketed(bucket: Callable[[int], int], later: Callable[[int], int]) -> Callable[[int, int], Tensor]:
    """A bias of two heads with a random number for each bucket, which counts queries and keys from 0."""

    def bias(query_len: int, key_len: int) -> Tensor:
        table = torch.randn(999, 2, generator=torch.Generator().manual_seed(0))
        signed = torch.arange(query_len)[:, None] - torch.arange(key_len)
        rows = torch.tensor([bucket(each) if each >= 0 else later(-each) for each in range(-key_len + 1, query_len)])
        return table[rows[signed + key_len - 1]].permute(2, 0, 1)

    return bias


def t5_bucket(exact: int, buckets: int, max_distance: int) -> Callable[[int], int]:
    """The paper's formula for one side, of which `exact` buckets hold one distance each."""

    def bucket(distance: int) -> int:
        if distance < exact:
            return distance
        share = math.log(distance / exact) / math.log(max_distance / exact)
        return min(exact + int(share * (buckets - exact)), buckets - 1)

    return bucket


SETTINGS = [(16, 128, False), (8, 64, False), (12, 100, False), (33, 128, False), (16, 128, True), (320, 800, True)]


@pytest.mark.parametrize(("num_buckets", "max_distance", "bidirectional"), SETTINGS)
def test_any_number_of_buckets_is_told(num_buckets: int, max_distance: int, bidirectional: bool) -> None:
    side = num_buckets // 2 if bidirectional else num_buckets
    bucket = t5_bucket(side // 2, side, max_distance)
    found = probed(bucketed(bucket, (lambda each: side + bucket(each)) if bidirectional else lambda each: 0))
    assert isinstance(found.encoding, T5Bias)
    settings = (found.encoding.num_buckets, found.encoding.max_distance, found.encoding.bidirectional)
    assert settings == (num_buckets, max_distance, bidirectional)
    assert found.agrees == 0
    assert found.buckets == (side - 1, side - 1 if bidirectional else 1)


def test_t5_of_transformers_is_told_with_a_cache_too() -> None:
    from transformers.models.t5.configuration_t5 import T5Config
    from transformers.models.t5.modeling_t5 import T5Attention

    for num_buckets, max_distance, is_decoder in ((16, 128, True), (32, 128, False), (64, 256, True)):
        config = T5Config(
            num_heads=4, d_model=16, d_kv=4, is_decoder=is_decoder, relative_attention_num_buckets=num_buckets,
            relative_attention_max_distance=max_distance,
        )  # fmt: skip
        report = probed(T5Attention(config, has_relative_attention_bias=True, layer_idx=0))
        assert isinstance(report.encoding, T5Bias)
        settings = (report.encoding.num_buckets, report.encoding.max_distance, report.encoding.bidirectional)
        assert settings == (num_buckets, max_distance, not is_decoder)
        assert report.agrees is not None
        assert report.agrees <= ROTATED_TOKEN
        assert report.of_distance
        assert report.warnings == ()  # its queries are told how many tokens came before


def test_alibi_of_transformers_is_told_up_to_a_constant_per_row() -> None:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    def bloom(query_len: int, key_len: int) -> Tensor:
        return build_alibi_tensor(torch.ones(1, key_len), 6, torch.float32).expand(-1, query_len, -1)

    report = probed(bloom)
    assert (report.of_distance, report.up_to_rows) == (False, True), "it counts keys from the first one"
    assert report.slopes == pytest.approx(ALiBi(6).slopes.tolist(), rel=SIX_DIGITS, abs=0)


def test_settings_that_share_values_out_alike_are_all_said() -> None:
    def has_the_same_buckets(max_distance: int) -> bool:
        distance = torch.arange(4096)
        tables = [T5Bias(1, num_buckets=10, max_distance=far).buckets(distance) for far in (40, max_distance)]
        return torch.equal(*tables)

    found = probed(bucketed(t5_bucket(5, 10, 40), lambda each: 0))
    same = [far for far in range(6, 100) if has_the_same_buckets(far)]
    assert len(same) > 1
    said = f"num_buckets=10, max_distance={same[0]} to {same[-1]}, bidirectional=False"
    assert found.alike == (said,)
    assert f"Distances up to 4,095 do not distinguish T5Bias with {said}." in str(found)


def test_what_lies_beyond_the_tokens_is_left_open() -> None:
    assert "or more" in probed(bucketed(t5_bucket(1, 2, 100), lambda each: 0)).alike[0]
    assert probed(bucketed(t5_bucket(4, 8, 100_000), lambda each: 0)).encoding is None
    hidden = torch.ones(300, 300, dtype=torch.bool).triu(1)

    def masked(query_len: int, key_len: int) -> Tensor:
        if (query_len, key_len) not in ((5, 7), (300, 300)):
            raise ValueError("square only")
        bias = bucketed(t5_bucket(16, 32, 128), lambda each: 0)(query_len, key_len)
        return bias.masked_fill(hidden[:query_len, :key_len], -torch.inf)

    found = probed(masked)
    assert found.causal
    assert [each.rpartition("=")[2] for each in found.alike] == ["False", "True", "True"]  # 32, or 64 of two sides
    assert found.farthest == 299


OTHERS: dict[str, Callable[[int], int]] = {
    "one distance more in the exact half": t5_bucket(9, 16, 128),
    "rounded up": lambda each: each if each < 8 else min(15, 8 + math.ceil(math.log(each / 8) / math.log(16) * 8)),
    "logarithms of one less": lambda each: each if each < 8 else min(15, 8 + int(math.log2(each / 8) * 7 / 4)),
    "as wide throughout": lambda each: min(each // 8, 15),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_buckets_that_begin_elsewhere_are_not_called_t5(kind: str) -> None:
    found = probed(bucketed(OTHERS[kind], lambda each: 0))
    assert found.encoding is None
    assert found.buckets is not None


def test_a_smooth_bias_under_a_mask_has_no_buckets() -> None:
    def masked(query_len: int, key_len: int) -> Tensor:
        distance = torch.arange(key_len - query_len, key_len)[:, None] - torch.arange(key_len)
        return -distance.clamp(min=0).double().add(1).log().masked_fill(distance < 0, torch.inf)[None]

    assert probed(masked).buckets is None


@pytest.mark.slow
def test_later_keys_that_differ_are_not_called_the_same() -> None:
    def signed(query_len: int, key_len: int) -> Tensor:
        distance = torch.arange(key_len - query_len, key_len)[:, None] - torch.arange(key_len)
        return -ALiBi(4).slopes[:, None, None] * distance

    found = probed(signed)
    assert isinstance(found.encoding, ALiBi)
    assert "for earlier keys alone: a causal mask is needed." in str(found)
    assert "earlier keys alone" not in str(probed(lambda q, k: ALiBi(4).matrix(q, k)))
