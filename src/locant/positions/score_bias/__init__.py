"""What an encoding adds to the scores of some queries and keys, as a value of one of four kinds.

`PositionEncoding.score_bias` is asked for it once per call of attention. Backends match on the kind, never on the class
of an encoding; the matrix, the function for FlexAttention, the table of distances, tiles, the heads of a rank and what
needs a gradient all follow from the value. Nothing of the size ``query x key`` is computed before `dense` is called.

* `ByDistance`: a number for each head and distance, by a function: there is no largest distance.
* `Lookup`: entries of tables, one for each distance, or for each offset on a grid: numbers of a head, or rows that the
  vector of a query or a key is multiplied with.
* `Pairwise`: a function of two tokens.
* `Written`: a matrix that an encoding writes for some queries and all keys that they attend to.
"""

from locant.positions.score_bias.by_distance import ByDistance as ByDistance
from locant.positions.score_bias.kinds import Pairwise as Pairwise
from locant.positions.score_bias.kinds import ScoreBias as ScoreBias
from locant.positions.score_bias.kinds import Written as Written
from locant.positions.score_bias.lookup import Entries as Entries
from locant.positions.score_bias.lookup import Lookup as Lookup
