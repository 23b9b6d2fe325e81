"""Preparing: from files of text to a token store.

`prepare.prepare` tells the story, and what Ctrl-C does at each stage. In its order: `sources` (what there is to read),
`plan` (what was asked for, and the parts of the work, written down), `workers` (processes that make parts), `parts` and
`readers` (how one is made, and how all are joined).
"""

from locant.text.prepare.parts import finalize
from locant.text.prepare.prepare import Estimate, Problems, estimate, prepare, problems

__all__ = ["Estimate", "Problems", "estimate", "finalize", "prepare", "problems"]
