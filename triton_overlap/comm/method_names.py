"""Methods of products and their collectives, by name. Plain Python.

The one list that headers (signals.py), TransformerEngine's configurations (gemm_configs.py) and planning
(kernels/methods.py, which says what each method does) have in common.
"""

from __future__ import annotations

#: Options by method; those of one name mean the same for each.
OPTIONS: dict[str, tuple[str, ...]] = {
    "fused": ("use_ce", "tiles"),
    "ring_exchange": ("aggregate", "use_ce", "num_sm"),
    "pipeline": ("num_splits", "num_sm"),
    "bulk": ("use_ce", "num_sm"),
    "nccl": (),
    "auto": (),
}
#: Methods of a product of gathered rows, and of one whose results are reduce-scattered.
GATHER_METHODS = ("fused", "ring_exchange", "nccl", "auto")
REDUCE_METHODS = ("fused", "ring_exchange", "pipeline", "nccl", "auto")
#: Methods of a collective beside a product that does not depend on it.
BESIDE_METHODS = ("bulk",)
