"""The forget gates of the Forgetting Transformer: Lin et al. 2025, https://arxiv.org/abs/2503.02130."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from locant.arguments import Real, real
from locant.positions.base import EncodingInfo
from locant.positions.running_sums import RunningSums


class Fox(RunningSums):
    r"""Adds the logarithm of each token's gate to the scores of earlier keys, so that the token can forget them.

    .. math:: b_{ij} = - \left| c_i - c_j \right|, \qquad c_i = \sum_{l \le i} \log \sigma(w_h \cdot x_l + \beta_h)

    For an earlier key, this is the paper's sum of logarithms over the tokens after the key, up to the query. It is
    ALiBi with distances that depend on the data: if all gates are equal, the bias falls by the same amount per token.
    The paper uses only causal attention. Here a later key is as far away as an earlier one.

    In the paper every layer has its own gates, so build an encoding for each layer. A token needs one number per head,
    the running sum within its document. See `RunningSums`.

    Args:
        num_heads, d_model, head_slice: as in `HiddenBias`.
        initial: the initial bias of the gates. With 0, as in the paper's models, gates begin near one half. With 5, a
            key loses about 0.7 % of its weight per token.

    On a CPU with two threads, for 8,192 tokens and 8 heads of width 64, it takes 1.3 times the time of plain causal
    attention and 1.06 times the memory (without queries, keys and values). With the backward pass it takes 2.0 times
    the time.

    Limits:
        Forgotten tokens stay forgotten, because a sum only falls. `KVCache` stores the running sums. `StaticKVCache`
        and `PagedKVCache` store them if you pass the encoding. A static graph of `torch.compile` stores a matrix. Use
        it with a causal mask: without one, torch's fused kernel cannot compute it.

    Tested against:
        The paper's formula in NumPy, forward and every gradient, and attention in float64 with the full matrix.

    >>> from locant import Positions
    >>> fox, x, q = Fox(8, 512), torch.randn(2, 5, 512), torch.randn(2, 8, 5, 64)
    >>> positions = fox.read(x, Positions.arange(5))
    >>> fox.bias(q, q, positions).shape
    torch.Size([2, 8, 5, 5])
    """

    info = EncodingInfo(
        name="fox",
        aliases=("forgetting", "forget_gates"),
        kind="relative",
        parameters="num_heads x (d_model + 1)",
        cost_of_tokens="a product per head",
        cost_of_pairs="one difference",
        extrapolation="good: forgotten tokens stay forgotten",
        used_by="its paper's models",
        paper="Lin 2025, arXiv 2503.02130",
    )

    def __init__(self, num_heads: int, d_model: int, *, initial: Real = 0.0, head_slice: slice | None = None) -> None:
        super().__init__(num_heads, d_model, head_slice=head_slice)
        self.initial = real("initial", initial, remedy="initial=0.0, so that gates begin at one half")
        self.offset = nn.Parameter(torch.empty(len(self.heads)))
        nn.init.constant_(self.offset, self.initial)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.constant_(self.offset, self.initial)

    def gates(self, x: Float[Tensor, "batch seq d_model"]) -> Float[Tensor, "batch seq heads"]:
        """Return the logarithm of every token's gate, in float64."""
        return self.rounded_product(x)

    def of_product(self, product: Float[Tensor, "batch seq heads"]) -> Float[Tensor, "batch seq heads"]:
        return F.logsigmoid(product + self.offset.double())
