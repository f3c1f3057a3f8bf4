"""Draft heads: small networks that continue what the target has computed.

Of a target pass they read hidden states: `feature i` is what the target has made of tokens 0 .. i.
Medusa's heads map it to the logits of several tokens ahead. The others, `FeatureHead`, go on by
one layer with K/V of its own: token i + 1 and feature i, a pair, make feature i + 1, and that the
logits of token i + 2. They have

    config, taps                                  of the layer; and the target layers it reads
    read(target) -> [T, F]                        what it wants of a target pass
    fuse([T, F]) -> [T, hidden]                   features from that
    head(ids, features, positions, attend)        the next features [T, hidden] of T pairs
    logits([R, hidden]) -> [R, V_d]               float32 or wider
    target_ids                                    which token each of V_d is, [V_d]; None is all

One head, one file; names of attributes are those of the head's public checkpoints.
"""

from slipstream.models.heads.base import Borrowed, tensor_bytes
from slipstream.models.heads.eagle import EagleHead
from slipstream.models.heads.eagle3 import Eagle3Head
from slipstream.models.heads.medusa import MedusaHead
from slipstream.models.heads.mtp import MTPHead

FeatureHead = EagleHead | Eagle3Head | MTPHead

__all__ = [
    "Borrowed",
    "Eagle3Head",
    "EagleHead",
    "FeatureHead",
    "MTPHead",
    "MedusaHead",
    "tensor_bytes",
]
