"""Entries about training on several processes: two of them, over gloo, with the wrappers of torch itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import multiprocessing

from tests.known_bugs.exhibit import exhibit
from tests.known_bugs.ranks import KINDS, WORLD, find_out

pytestmark = [
    pytest.mark.slow,  # two processes
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch is built without gloo"),
]

OURS = [name for name in KINDS if not name.startswith("twin")]

Found = list[dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each rank found: by wrapper, then by encoding."""
    folder = tmp_path_factory.mktemp("ranks")
    multiprocessing.spawn(find_out, args=(str(folder),), nprocs=WORLD)
    return [json.loads((Path(folder) / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(WORLD)]


@pytest.mark.parametrize("way", ["FSDP1", "FSDP2"])
def test_29_sharding_in_half_precision_leaves_constants_alone(found: Found, way: str) -> None:
    """facebookresearch/fairseq2#480: FSDP casts buffers, and could not broadcast a complex one.

    Mixed precision has a dtype for buffers, which is meant for running means and hits tables of cosines.
    """

    def check(name: str) -> None:
        for rank in found:
            result = rank[way][name]
            assert not result["complex"], f"{name}: complex buffers {result['complex']}"
            assert not result["moved"], f"{name}: in {way} the table moved by {result['moved']}"
            assert result["gradients"], f"{name}: nothing was trained"

    exhibit(check, *OURS, twin="twin: complex", because=r"complex buffers \['encoding.rotations'\]")
    if way == "FSDP1":  # its successor leaves buffers alone
        exhibit(check, *OURS, twin="twin: buffer", because="in FSDP1 the table moved by")


def test_30_ranks_may_see_sequences_of_different_lengths(found: Found) -> None:
    """lucidrains/CoCa-pytorch#17, modelscope/ms-swift#10187: data-parallel training crashed.

    Each rank grew a buffer to the length that it had seen, and the next step broadcast buffers of different shapes.
    """

    def check(name: str) -> None:
        one, other = (rank["DDP"][name] for rank in found)
        assert one["shapes"] == other["shapes"], f"{name}: buffers are {one['shapes']} here, {other['shapes']} there"
        assert one["gradients"] == other["gradients"] != [], f"{name}: the ranks do not agree on a gradient"
        assert not one["moved"] | other["moved"], f"{name}: the table moved"

    exhibit(check, *OURS, twin="twin: growing", because=r"\[2, 1, 8, 8\]} here, .*\[2, 1, 16, 8\]} there")
