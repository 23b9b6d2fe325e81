"""`SameRotationForQueriesAndKeys`: the base class of encodings that rotate queries and keys in the same way."""

from __future__ import annotations

from torch import Tensor

from locant.kernels.norm_rotary import HeadNorm
from locant.positions.base import Keys, PositionEncoding, Queries, resolve_positions
from locant.positions.positions import OptionalPositions


class SameRotationForQueriesAndKeys(PositionEncoding):
    """The base class of encodings that apply the same rotation to queries and keys.

    A subclass implements `_rotate_tensor`.
    """

    def rotate_one(self, x: Queries, positions: OptionalPositions = None) -> Queries:
        """Rotate one tensor, queries or keys."""
        return self._rotate_tensor("x", x, positions)

    def rotate(
        self,
        q: Queries,
        k: Keys,
        positions: OptionalPositions = None,
        k_positions: OptionalPositions = None,
        *,
        inplace: bool = False,
        norm: HeadNorm | None = None,
    ) -> tuple[Queries, Keys]:
        """Rotate queries and keys in their own dtype, with arithmetic in float32 or wider.

        With `norm`, apply this norm to each head before the rotation.
        """
        positions, keys = resolve_positions(self, q, k, positions, k_positions)
        normed_q, normed_k = (q, k) if norm is None else norm.apply(q, k)
        rotated = self._rotate_tensor("q", normed_q, positions), self._rotate_tensor("k", normed_k, keys)
        return (q.copy_(rotated[0]), k.copy_(rotated[1])) if inplace else rotated

    def _rotate_tensor(self, name: str, x: Tensor, positions: OptionalPositions) -> Tensor:
        """Rotate one tensor. Errors call it `name`."""
        raise NotImplementedError
