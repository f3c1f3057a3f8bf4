"""How often two laws that share their noise agree.

Two exponential races with the same noise have the winner v in common where E_v / p_v and E_v / q_v
are both first: where E_v is less than every other E_u / max(p_u / p_v, q_u / q_v). Hence

    P(agree) = sum_v 1 / sum_u max(p_u / p_v, q_u / q_v)

which lies between (1 - TV) / (1 + TV) and 1 - TV.
"""

import torch
from torch import Tensor


def coupled_chance(p: Tensor, q: Tensor) -> Tensor:
    """P(argmin E / p = argmin E / q) of rows of laws: [R, V], [R, V] -> [R] float64."""
    p, q = p.double(), q.double()
    # In order of p / q the maximum is q_u / q_v before v and p_u / p_v from v on.
    order = torch.argsort(torch.atan2(p, q), dim=-1)
    p, q = p.gather(-1, order), q.gather(-1, order)
    q_before = q.cumsum(-1) - q
    p_after = p.flip(-1).cumsum(-1).flip(-1)
    both = (p > 0) & (q > 0)
    share = p_after / p.where(both, torch.ones(())) + q_before / q.where(both, torch.ones(()))
    return (1 / share).where(both, torch.zeros(())).sum(-1)
