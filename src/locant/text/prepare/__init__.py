"""Preparing: from files of text to a token store."""

from locant.text.prepare.estimate import Estimate as Estimate
from locant.text.prepare.estimate import estimate as estimate
from locant.text.prepare.finalize import finalize as finalize
from locant.text.prepare.run import prepare as prepare

__all__ = ["Estimate", "estimate", "finalize", "prepare"]
