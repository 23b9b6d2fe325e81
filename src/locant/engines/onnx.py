"""The standard rotary operator of ONNX, with tables of ours."""

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
    """A model of one operator, ``RotaryEmbedding``, that rotates as `rotary` does; its tables stand in it.

    Its input ``x`` is float32 ``[batch, num_heads, seq, head_dim]``, ``positions`` is int64 ``[batch, seq]``, and its
    output is ``y``. To have it within a larger model, take its node and its two initialisers, or export a module that
    calls `Rotary.rotate`, which makes the same angles at any position and needs no tables.

    Args:
        num_heads: heads of `x`.
        max_seq_len: positions in the tables, 4 x rotary_dim bytes each.
        domain: ``""`` for the operator of opset 23; ``"com.microsoft"`` for that of ONNX Runtime, which is older.

    Raises:
        InputError: the package ``onnx`` is missing.
        LocantError: an encoding whose pairs, axes or temperature the operator cannot express.

    >>> len(rotary_model(Rotary(64), num_heads=4, max_seq_len=128)) > 128 * 64 * 4
    True
    """
    require("onnx", "an ONNX model")
    from onnx import TensorProto, helper, numpy_helper

    one_of("domain", domain, OPSETS)
    whole("num_heads", num_heads, 1, MAX_INT32, remedy="the heads of x")
    if not rotary.is_short or rotary.sections is not None or rotary.temperature is not None:
        got = f"got {rotary}, which ONNX's RotaryEmbedding cannot express"
        raise LocantError(got, "torch.onnx.export of a module that calls rotary.rotate")
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
