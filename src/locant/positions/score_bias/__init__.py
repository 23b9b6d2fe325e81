"""The bias that an encoding adds to the scores of some queries and keys, as a value of one of four kinds.

`PositionEncoding.score_bias` returns it once per call of attention. Backends match on the kind, never on the class of
an encoding. The matrix, the function for FlexAttention, the table of distances, tiles, the heads of a rank and the
tensors that need a gradient all follow from the value. No ``query x key`` matrix is computed before `dense` is called.

* `ByDistance`: a function of head and distance. There is no largest distance.
* `Lookup`: entries of tables, by distance or by offset on a grid. An entry is a number per head, or a row that
  multiplies the vector of a query or a key.
* `Pairwise`: a function of two tokens.
* `Written`: a matrix that an encoding computes for some queries and all keys that they attend to.
"""

from locant.positions.score_bias.by_distance import ByDistance as ByDistance
from locant.positions.score_bias.kinds import Pairwise as Pairwise
from locant.positions.score_bias.kinds import ScoreBias as ScoreBias
from locant.positions.score_bias.kinds import Written as Written
from locant.positions.score_bias.lookup import Entries as Entries
from locant.positions.score_bias.lookup import Lookup as Lookup
