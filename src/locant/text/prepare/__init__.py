"""Prepare a token store from files of text.

`prepare.prepare` describes the whole process, and the effect of Ctrl-C at each stage. The modules in the order of work:
`sources` (the inputs), `plan` (the request, and its division into parts), `workers` (processes that make parts),
`parts` and `readers` (how a part is made, and how all parts are joined).
"""

from locant.text.prepare.parts import finalize
from locant.text.prepare.prepare import Estimate, Problems, estimate, prepare, problems

__all__ = ["Estimate", "Problems", "estimate", "finalize", "prepare", "problems"]
