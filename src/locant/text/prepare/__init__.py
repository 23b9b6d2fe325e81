"""Preparing: from files of text to a token store.

`prepare.prepare` tells the story. In its order: `request` (what was asked, checked) and `inputs` (paths to sources);
`plan` (the parts of the work, written down); `workers`, `cluster` (processes that make parts) and `parts`, `readers`
(how one is made); `finalize` (parts to a store). `prepare.prepare` also says what Ctrl-C does at each stage.
"""

from locant.text.prepare.parts import finalize
from locant.text.prepare.prepare import Estimate, estimate, prepare

__all__ = ["Estimate", "estimate", "finalize", "prepare"]
