"""Where tokens stand: `Positions`, and what masks, documents and joins are made of."""

from locant.positions.where.positions import MAX_INDEX as MAX_INDEX
from locant.positions.where.positions import Positions as Positions
from locant.positions.where.positions import require_positions as require_positions
