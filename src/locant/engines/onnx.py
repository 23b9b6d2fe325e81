"""The standard rotary operator of ONNX, with the tables of an encoding."""

from __future__ import annotations

from typing import Any, Literal

from locant.arguments import MAX_INT32, one_of, whole
from locant.errors import LocantError
from locant.extras import require
from locant.positions import Rotary

OPSETS = {"": 23, "com.microsoft": 1}
IR_VERSION = 10


def rotary_model(
    rotary: Rotary, *, num_heads: int, max_seq_len: int, domain: Literal["", "com.microsoft"] = ""
) -> bytes:
    """Return a model with one operator, ``RotaryEmbedding``, that rotates as `rotary` does and contains its tables.

    The inputs are ``x``, float32 ``[batch, num_heads, seq, head_dim]``, and ``positions``, int64 ``[batch, seq]``. The
    output is ``y``. To use it in a larger model, copy its node and its two initialisers. You can also export a module
    that calls `Rotary.rotate`, which computes the same angles at any position and needs no tables.

    Args:
        num_heads: the number of heads of `x`.
        max_seq_len: the number of positions in the tables, with 4 x rotary_dim bytes each.
        domain: ``""`` for the operator of opset 23, or ``"com.microsoft"`` for the older operator of ONNX Runtime.

    Raises:
        InputError: the package ``onnx`` is missing.
        LocantError: the operator cannot express the pairs, axes or temperature of the encoding.

    >>> len(rotary_model(Rotary(64), num_heads=4, max_seq_len=128)) > 128 * 64 * 4
    True
    """
    require("onnx", "an ONNX model")
    from onnx import TensorProto, helper, numpy_helper

    one_of("domain", domain, OPSETS)
    whole("num_heads", num_heads, 1, MAX_INT32, remedy="pass the number of heads of x")
    if not rotary.has_named_layout or rotary.sections is not None or rotary.temperature is not None:
        got = f"got {rotary}, which ONNX's RotaryEmbedding cannot express"
        raise LocantError(got, "use torch.onnx.export for a module that calls rotary.rotate")
    cos, sin = rotary.tables(max_seq_len)
    part = 0 if rotary.rotary_dim == rotary.head_dim else rotary.rotary_dim
    attributes: dict[str, Any] = {"interleaved": int(rotary.layout == "interleaved"), "rotary_embedding_dim": part}
    if domain:
        order, attributes["num_heads"] = ["x", "positions", "cos", "sin"], num_heads if part else 0
    else:
        order = ["x", "cos", "sin", "positions"]
    shape = ["batch", num_heads, "seq", rotary.head_dim]
    graph = helper.make_graph(
        [helper.make_node("RotaryEmbedding", order, ["y"], domain=domain, **attributes)],
        "rotary",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, shape),
            helper.make_tensor_value_info("positions", TensorProto.INT64, ["batch", "seq"]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        initializer=[numpy_helper.from_array(cos, "cos"), numpy_helper.from_array(sin, "sin")],
    )
    opsets = [helper.make_opsetid("", 23 if not domain else 18)]
    opsets += [helper.make_opsetid(domain, OPSETS[domain])] if domain else []
    return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION).SerializeToString()
