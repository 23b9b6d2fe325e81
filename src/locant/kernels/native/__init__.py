"""Kernels in C for the CPU: how they are built, and how they are loaded. What calls them stands with each operation."""

from locant.kernels.native.library import DTYPES as DTYPES
from locant.kernels.native.library import function as function
from locant.kernels.native.library import has as has
from locant.kernels.native.library import is_in_rows as is_in_rows
from locant.kernels.native.library import runnable as runnable
from locant.kernels.native.library import status as status
from locant.kernels.native.library import threads as threads
