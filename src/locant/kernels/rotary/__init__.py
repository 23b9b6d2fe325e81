"""Turning pairs of dimensions by an angle per position."""

from locant.kernels.rotary.reference import Layout as Layout
from locant.kernels.rotary.reference import rotate as rotate
