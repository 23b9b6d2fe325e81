r"""The gate of n-gram rows: a layer weighs them by its hidden state, and mixes neighbouring tokens.

With the rows r of a token, one value v and one key k for each residual stream h (Engram, Qwen4):

.. math::
    g = \frac{norm(k) \cdot norm(h)}{\sqrt{d}}, \quad
    u = \sigma\bigl(sign(g) \sqrt{\max(|g|, 10^{-6})}\bigr) \, v, \quad
    y = u + silu(conv(norm(u)))

A model adds y to its residual streams. The convolution has one kernel for each channel, and its taps are as far apart
as the longest n-gram. DeepSeek-V4.1 has none. All norms are root mean squares, with a factor of ``1 + weight``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from locant.arguments import MAX_WIDTH, Real, flag, real, shape_error, whole
from locant.embedding.look_back import TokenHistory, look_back, resolve_documents
from locant.positions.documents import PADDING
from locant.positions.positions import OptionalPositions

LEAST = 1e-6
"""The least size of a score before the square root, whose gradient is infinite at 0."""


class NGramGate(nn.Module):
    """Weigh the rows of n-grams by the hidden state, and convolve them over the tokens of a document.

    The convolution does not cross a document. Padding does not count, and its output is zero.

    Args:
        rows_width: the width of the n-gram rows of a token, `NGramEmbedding.output_width`.
        d_model: the width of a residual stream.
        num_streams: the number of residual streams (hyper-connections).
        kernel_size: the number of taps of the convolution, or 0 for no convolution.
        dilation: the number of tokens between two taps: the order of the longest n-gram.
        eps: the epsilon of the norms.
        bias: whether keys and values have a bias.

    >>> gate = NGramGate(128, 64, num_streams=4)
    >>> hidden, rows = torch.randn(2, 5, 4 * 64), torch.randn(2, 5, 128)
    >>> gate(hidden, rows).shape
    torch.Size([2, 5, 256])
    """

    def __init__(
        self,
        rows_width: int,
        d_model: int,
        *,
        num_streams: int = 1,
        kernel_size: int = 4,
        dilation: int = 3,
        eps: Real = 1e-6,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.rows_width = whole("rows_width", rows_width, 1, MAX_WIDTH, remedy="pass embedding.output_width")
        self.d_model = whole("d_model", d_model, 1, MAX_WIDTH, remedy="pass the width of the model")
        self.num_streams = whole("num_streams", num_streams, 1, remedy="num_streams=1")
        self.kernel_size = whole("kernel_size", kernel_size, 0, remedy="kernel_size=4, or 0 for no convolution")
        self.dilation = whole("dilation", dilation, 1, remedy="pass the order of the longest n-gram")
        self.eps = float(real("eps", eps, low=0, remedy="eps=1e-6"))
        width = self.num_streams * self.d_model
        self.key = nn.Linear(self.rows_width, width, bias=flag("bias", bias))
        self.value = nn.Linear(self.rows_width, self.d_model, bias=bias)
        self.key_norm = nn.Parameter(torch.zeros(self.num_streams, self.d_model))
        self.query_norm = nn.Parameter(torch.zeros(self.num_streams, self.d_model))
        has_taps = self.kernel_size > 0
        self.conv_norm = nn.Parameter(torch.zeros(self.num_streams, self.d_model)) if has_taps else None
        self.taps = nn.Parameter(torch.zeros(width, self.kernel_size)) if has_taps else None

    @classmethod
    def from_config(cls, config: Any, index: int = 0) -> NGramGate:
        """Return the untrained gate of the `index`-th layer that has an n-gram table (Qwen4, DeepSeek-V4.1).

        Raises:
            InputError: the model has no such layer.

        >>> qwen = {"model_type": "qwen4_exp_text", "vocab_size": 90, "hidden_size": 64, "ple_layer_ids": [1],
        ...         "eos_token_id": 1}
        >>> NGramGate.from_config(qwen).num_streams
        4
        """
        from locant.models.ngram_tables import gate_options

        return cls(**gate_options(config, index))

    @classmethod
    def from_pretrained(
        cls, folder: Path | str, index: int = 0, *, dtype: torch.dtype | str | None = None
    ) -> NGramGate:
        """Load the gate of the `index`-th layer of a Qwen4 model that has an n-gram table.

        >>> NGramGate.from_pretrained("Qwen4-Exp")  # doctest: +SKIP
        """
        from locant.checkpoints.pretrained_ngrams import read_pretrained_gate

        config, tensors = read_pretrained_gate(folder, index, dtype)
        with torch.device("meta"):
            gate = cls.from_config(config, index)
        gate.load_state_dict(tensors, assign=True)
        return gate.eval()

    def forward(
        self,
        hidden: Float[Tensor, "batch seq streams_d_model"],
        rows: Float[Tensor, "batch seq rows_width"],
        positions: OptionalPositions = None,
        *,
        history: TokenHistory | None = None,
    ) -> Float[Tensor, "batch seq streams_d_model"]:
        """Return what the layer adds to its residual streams, which `hidden` holds side by side.

        `history` is for decoding: the last inputs of the convolution, a `TokenHistory` of this module alone.
        """
        width = self.num_streams * self.d_model
        if hidden.shape[-1] != width:
            expected = f"a last dimension of {self.num_streams} x {self.d_model}"
            raise shape_error("hidden", hidden, expected, "hidden.flatten(-2) for streams in a dimension of their own")
        if rows.shape[-1] != self.rows_width:
            raise shape_error("rows", rows, f"a last dimension of {self.rows_width}", "embedding(ids, positions)")
        document = resolve_documents(
            hidden, positions, history, "hidden", "the convolution of NGramGate", matter=self.kernel_size > 1
        )
        key = self._norm(self.key(rows).unflatten(-1, (self.num_streams, -1)), self.key_norm)
        query = self._norm(hidden.unflatten(-1, (self.num_streams, -1)), self.query_norm)
        score = (key * query).sum(-1, keepdim=True) / self.d_model**0.5
        score = score.abs().clamp_min(LEAST).sqrt() * score.sign()
        gated = torch.sigmoid(score) * self.value(rows).unsqueeze(-2)
        gated = gated if document is None else gated.masked_fill((document == PADDING)[..., None, None], 0)
        if self.taps is None or self.conv_norm is None:
            return gated.flatten(-2)
        mixed = F.silu(self._convolve(self._norm(gated, self.conv_norm).flatten(-2), document, history, self.taps))
        result = gated.flatten(-2) + mixed
        return result if document is None else result.masked_fill((document == PADDING)[..., None], 0)

    def _norm(
        self, x: Float[Tensor, "*batch streams d_model"], weight: Tensor
    ) -> Float[Tensor, "*batch streams d_model"]:
        """Divide by the root mean square in float32 or more, and multiply there, too."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * (1.0 + weight.to(wide))).type_as(x)

    def _convolve(
        self,
        x: Float[Tensor, "batch seq channels"],
        document: Tensor | None,
        history: TokenHistory | None,
        taps: Tensor,
    ) -> Float[Tensor, "batch seq channels"]:
        """Add the taps from the earliest token to the latest, so that the bits do not depend on the row."""
        shifts = [self.dilation * back for back in range(self.kernel_size - 1, 0, -1)]
        seen, exists = look_back(x, document, shifts, history=history)
        earlier = [each.masked_fill(~present[..., None], 0) for each, present in zip(seen, exists, strict=True)]
        result = torch.zeros_like(x)
        for number, each in enumerate((*earlier, x)):
            result = result + each * taps[:, number]
        return result

    def extra_repr(self) -> str:
        names = ("rows_width", "d_model", "num_streams", "kernel_size", "dilation")
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)
