"""The chance that coupled races share a winner, against races that were run."""

import torch

from slipstream.maths.coupling import coupled_chance


def test_the_chance_is_what_races_come_to() -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = torch.rand(2, 6, 5, generator=generator, dtype=torch.float64)
    p[1, 2] = q[2, 3] = 0.0  # impossible for one of the two
    p[3] = q[3]
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    noise = -torch.rand(200_000, 1, 5, generator=generator, dtype=torch.float64).log()
    share = ((noise / p).argmin(-1) == (noise / q).argmin(-1)).double().mean(0)
    chance = coupled_chance(p, q)
    # Five standard errors of 200,000 races.
    assert torch.allclose(chance, share, atol=5 * 0.5 / 200_000**0.5)
    assert torch.isclose(chance[3], torch.ones((), dtype=torch.float64))
    overlap = torch.minimum(p, q).sum(-1)
    assert bool((overlap / (2 - overlap) - 1e-12 <= chance).all())
    assert bool((chance <= overlap + 1e-12).all())
