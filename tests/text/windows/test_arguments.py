"""What windows are asked for: a mode, documents and numbers, or an error that names what is none."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import locant.text.windows
from locant.errors import InputError, LocantError, RangeError, ShapeError
from locant.text import Windows
from tests.refusal import refuses
from tests.text.windows.definition import targets_of


class TestWhatIsAskedFor:
    def test_an_unknown_mode_is_named(self) -> None:
        with refuses(RangeError, "'documents'", "mode='document'"):
            Windows(np.arange(9), 4, mode="documents")  # type: ignore[arg-type]
        for mode in (np.array(["flat", "a"]), ["flat"], None):
            with refuses(RangeError, "for mode", "'packed'"):
                Windows(np.arange(9), 4, mode=mode)  # type: ignore[arg-type]

    @pytest.mark.parametrize("value", ["no", None, 1, np.array([True, True])])
    def test_a_truth_value_is_one(self, value: object) -> None:
        with refuses(RangeError, "drop_last", "True or False"):
            Windows(np.arange(9), 4, drop_last=value)  # type: ignore[arg-type]

    def test_document_mode_needs_documents_and_flat_mode_refuses_them(self) -> None:
        with pytest.raises(InputError, match="without documents"):
            Windows(np.arange(9), 4, mode="document")
        with pytest.raises(InputError, match=r"flat mode.*try: mode='document'"):
            Windows(np.arange(9), 4, documents=[0, 9])

    @pytest.mark.parametrize(
        ("documents", "kind"),
        [
            *((offsets, InputError) for offsets in ([], [0], [9], [0, 8], [1, 9], [0, 5, 4, 9], [0, 10], [-1, 9])),
            *((offsets, ShapeError) for offsets in ([[0, 9]], [0.0, 9.0])),
        ],
    )
    def test_documents_that_do_not_fit_are_refused(self, documents: list[int], kind: type[LocantError]) -> None:
        with refuses(kind, "got ", "expected"):
            Windows(np.arange(9), 4, mode="document", documents=documents)

    @pytest.mark.parametrize("kind", [list, np.array, torch.tensor, lambda x: np.array(x, dtype=np.uint32)])
    def test_documents_may_be_any_integers(self, kind: type) -> None:
        windows = Windows(np.arange(9), 4, mode="document", documents=kind([0, 4, 4, 9]))
        assert targets_of(windows) == [[1, 2, 3], [5, 6, 7, 8]]

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("length", 0), ("length", -1), ("length", 2.0), ("length", True), ("length", None), ("stride", 0),
            ("stride", 1.5), ("pad_id", -1), ("pad_id", None),
        ],
    )  # fmt: skip
    def test_a_number_that_is_none_is_named(self, name: str, value: object) -> None:
        options = {"length": 4, name: value}
        with refuses(RangeError, f"got {value!r} for {name}, expected an integer of "):
            Windows(np.arange(9), **options)  # type: ignore[arg-type]

    def test_numbers_that_no_text_has_are_refused_before_memory_is_asked_for(self) -> None:
        for name, value in (("length", 2**31), ("length", 2**70), ("stride", 2**70), ("pad_id", 2**63)):
            with refuses(RangeError, f"got {value} for {name}, expected at most"):
                Windows(np.arange(9), **{"length": 4, name: value})  # type: ignore[arg-type]
        assert len(Windows(np.arange(9), 2**31 - 1, 2**62)) == 1

    def test_documents_beyond_int64_do_not_wrap(self) -> None:
        with refuses(InputError, "expected them to rise from 0 to 9"):
            Windows(np.arange(9), 4, mode="document", documents=np.array([0, 2**64 - 1, 9], dtype=np.uint64))

    def test_the_names_show_what_it_is(self) -> None:
        assert repr(Windows(np.arange(9), 4)) == "Windows(2 of length 4, stride 4, flat, over 9 tokens)"
        assert "_WindowError" not in locant.text.windows.__all__
