"""Norm the heads of queries and keys and rotate them, in one operation.

Kernels have these signatures. `kernels/rotary/op.py` has others, and describes the arguments that all share::

    reference.norm_and_rotate(q, k, positions, tables, layout, norm) -> (q, k)                         any device
    reference.norm_and_rotate_backward(grad_q, grad_k, q, k, positions, tables, layout, norm)
        -> (dq, dk, dq_weight, dk_weight)
    cpu.norm_and_rotate_(q, k, out_q, out_k, positions, tables, layout, norm, v, out_v) -> None        C
    cpu.norm_and_rotate_backward(grad_q, grad_k, q, k, positions, tables, layout, norm) -> as above
    triton.norm_and_rotate_, triton.norm_and_rotate_backward                                           the same

    norm         `HeadNorm`. Its weights may be None, may have any floating dtype and any stride, and have head_dim
                 elements (a norm of each head) or heads * head_dim (one norm over all heads of a token).
                 `norm_and_rotate_` also takes None: rotation without a norm
    out_q, out_k any strides without overlap: new memory, q and k themselves, or views into a cache
    v, out_v     optional, together: v [batch, kv_heads, seq, any width] is copied into out_v in the same launch

`triton.norm_and_rotate_` also takes `slots`, int64 [batch or 1, seq], with which tokens go to any places of a cache.

The backward is deterministic. Its results are new tensors in the dtypes of q, k and the weights, None where the tensor
is None.
"""

from locant.kernels.norm_rotary.choice import choose_kernel as choose_kernel
from locant.kernels.norm_rotary.head_norm import HeadNorm as HeadNorm
from locant.kernels.norm_rotary.head_norm import require_norm as require_norm
from locant.kernels.norm_rotary.op import can_write_into as can_write_into
from locant.kernels.norm_rotary.op import norm_and_rotate as norm_and_rotate
from locant.kernels.norm_rotary.op import norm_and_rotate_into as norm_and_rotate_into
