"""Every encoding gives each row, padded, packed, cached, chunked or sharded, bit for bit what the row gets alone.

Code that counts slots fails the same check: `tests/known_bugs/test_rows.py`.
"""

from __future__ import annotations

import pytest
import torch

from tests.positions.alone import ARRANGEMENTS, ENCODINGS, require_same_alone, three_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ENCODINGS)
def test_every_row_gets_the_same_result_as_alone(name: str, dtype: torch.dtype) -> None:
    for arrangement in ARRANGEMENTS:
        require_same_alone(ENCODINGS[name]().to(dtype), arrangement, three_rows(dtype))
