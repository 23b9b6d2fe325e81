"""Rotate pairs of dimensions by an angle for each position."""

from locant.kernels.rotary.choice import choose_kernel as choose_kernel
from locant.kernels.rotary.inplace import is_transformed as is_transformed
from locant.kernels.rotary.inplace import require_writable as require_writable
from locant.kernels.rotary.op import rotate as rotate
from locant.kernels.rotary.reference import Layout as Layout
from locant.kernels.rotary.reference import Tables as Tables
from locant.kernels.rotary.reference import rotate_pairs as rotate_pairs
