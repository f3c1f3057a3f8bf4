"""The operations a model is made of. Models import them from here and know no backend.

`reference` holds the plain torch version of each; faster backends are tested against it.
"""

from slipstream.kernels.attention import (
    AttentionGroup,
    AttentionPlan,
    dense_attention,
    paged_attention,
    plan_attention,
)
from slipstream.kernels.reference import gated_gelu, gated_silu, linear, rms_norm, rotate

__all__ = [
    "AttentionGroup",
    "AttentionPlan",
    "dense_attention",
    "gated_gelu",
    "gated_silu",
    "linear",
    "paged_attention",
    "plan_attention",
    "rms_norm",
    "rotate",
]
