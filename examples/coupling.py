"""How long drafts live under each rule: `python examples/coupling.py [--plot docs/coupling.svg]`.

Target and draft are synthetic: p = softmax(3 z) over 64 tokens, and q the same with its logits
disturbed until TV(p, q) is exactly what the table says. A chain of 4 tokens has one pair (p, q) at
every position, so that theory is exact; siblings are 4 candidates for one position.

    coupled   rule `match`, drafted by the race that the target runs (for siblings: its first 4)
    greedy    rule `match`, drafted without noise: the most likely tokens of q
    ratio     drafted from q with noise of its own, accepted with min(1, p / q)
    block     the same chain, accepted jointly

Prints Markdown tables of the mean tokens per target pass, the further token included. The plot
needs matplotlib: `pip install "slipstream[plot]"`.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from slipstream.maths import acceptance, trees
from slipstream.maths.acceptance import DraftBatch, Verdicts
from slipstream.maths.distributions import finishers, race
from slipstream.maths.noise import Address, Key, StepNoise, Stream

VOCAB_SIZE, GAMMA, NUM_SIBLINGS = 64, 4, 4
NUM_PAIRS = 20  # (p, q) for each total variation
TVS = [0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6]

Row = dict[str, float]  # column -> tokens per target pass


def main() -> None:
    parser = argparse.ArgumentParser(description="Acceptance length of coupled drafting.")
    parser.add_argument("--drafts", type=int, default=4_000, help="per total variation and rule")
    parser.add_argument("--plot", type=Path, help="where to save the figure")
    args = parser.parse_args()

    chains, siblings = [], []
    for tv in TVS:
        p, q = pairs(tv)
        which = torch.arange(args.drafts) % NUM_PAIRS
        experiment = Experiment(p[which], q[which])
        coupled = acceptance.coupled_acceptance(p, q)
        chains.append({"TV(p, q)": tv, **experiment.chains(), **chain_theory(tv, coupled)})
        siblings.append({"TV(p, q)": tv, **experiment.siblings()})

    print(f"Chains of {GAMMA}\n")
    print_table(chains)
    print(f"\n{NUM_SIBLINGS} siblings\n")
    print_table(siblings)
    if args.plot:
        plot(chains, siblings, args.plot)
        print(f"\nSaved {args.plot}.")


def pairs(tv: float) -> tuple[Tensor, Tensor]:
    """Distributions p and q [NUM_PAIRS, V], every pair at that total variation."""
    generator = torch.Generator().manual_seed(0)
    z, disturbance = torch.randn(2, NUM_PAIRS, VOCAB_SIZE, generator=generator).double()
    p = (3 * z).softmax(-1)

    def q(strength: Tensor) -> Tensor:
        return (3 * z + strength * disturbance).softmax(-1)

    low, high = torch.tensor([0.0, 32.0]).double().expand(NUM_PAIRS, 1, 2).unbind(-1)
    for _ in range(60):  # bisection: the total variation grows with the strength
        middle = (low + high) / 2
        is_weak = (p - q(middle)).abs().sum(-1, keepdim=True) / 2 < tv
        low, high = torch.where(is_weak, middle, low), torch.where(is_weak, high, middle)
    return p.float(), q(high).float()


def chain_theory(tv: float, coupled: Tensor) -> Row:
    """(1 - a^(gamma + 1)) / (1 - a) for what each rule accepts of one token."""

    def length(acceptance_rate: Tensor) -> float:
        return float(sum((acceptance_rate**i).mean() for i in range(GAMMA + 1)))

    return {
        "coupled, theory": length(coupled),
        "coupled, at least": length(torch.tensor((1 - tv) / (1 + tv))),
        "ratio, theory": length(torch.tensor(1 - tv)),
    }


class Experiment:
    """Drafts of n sequences and what becomes of them.

    Args:
        p, q: of each sequence, the same at every position, [n, V].
    """

    def __init__(self, p: Tensor, q: Tensor):
        self.p, self.q = p, q
        self.keys = [Key(seed) for seed in range(len(p))]
        self.fresh = StepNoise(self.keys, [0] * len(p))

    def chains(self) -> Row:
        parents = list(range(-1, GAMMA - 1))
        depths = range(GAMMA)
        log_q = self.q.log()
        coupled = torch.stack([race(log_q, self.shared_noise(d)) for d in depths], dim=1)
        alone = torch.stack([race(log_q, self.own_noise(d)) for d in depths], dim=1)
        greedy = self.q.argmax(-1, keepdim=True).expand(-1, GAMMA)
        return {
            "coupled": self.by_match(coupled, parents),
            "ratio": self.by_fresh_noise(acceptance.ratio, alone, parents),
            "block": self.by_fresh_noise(acceptance.block, alone, parents),
            "greedy": self.by_match(greedy, parents),
        }

    def siblings(self) -> Row:
        parents = [-1] * NUM_SIBLINGS
        log_q = self.q.log()
        coupled = finishers(log_q, self.shared_noise(0), NUM_SIBLINGS)
        alone = finishers(log_q, self.own_noise(0), NUM_SIBLINGS)
        return {
            "coupled": self.by_match(coupled, parents),
            "ratio": self.by_fresh_noise(acceptance.ratio, alone, parents),
            "greedy": self.by_match(self.q.topk(NUM_SIBLINGS).indices, parents),
        }

    def shared_noise(self, depth: int) -> list[Address]:
        return [Address(key, Stream.TARGET, depth) for key in self.keys]

    def own_noise(self, depth: int) -> list[Address]:
        return self.fresh.drafts(*torch.tensor([[b, depth] for b in range(len(self.p))]).unbind(1))

    def by_match(self, tokens: Tensor, parents: list[int]) -> float:
        depths = trees.depths(parents)

        def draw(seqs: Tensor, nodes: Tensor) -> Tensor:
            positions = [depths[node] + 1 if node >= 0 else 0 for node in nodes.tolist()]
            places = zip(seqs.tolist(), positions, strict=True)
            addresses = [Address(self.keys[b], Stream.TARGET, position) for b, position in places]
            return race(self.p[seqs].log(), addresses)

        return mean_length(acceptance.match(self.batch(tokens, parents), draw))

    def by_fresh_noise(
        self, rule: Callable[..., Verdicts], tokens: Tensor, parents: list[int]
    ) -> float:
        drafts = self.batch(tokens, parents)
        return mean_length(rule(drafts, lambda seqs, nodes: self.p[seqs], self.fresh))

    def batch(self, tokens: Tensor, parents: list[int]) -> DraftBatch:
        num_nodes = len(parents)
        return DraftBatch(
            tokens,
            torch.tensor(parents).expand(len(tokens), -1),
            self.q.unsqueeze(1).expand(-1, num_nodes, -1),
        )


def mean_length(verdicts: Verdicts) -> float:
    return float(verdicts.accepted.sum(1).double().mean()) + 1


# Showing -------------------------------------------------------------------------------------


def print_table(rows: list[Row]) -> None:
    names = list(rows[0])
    print("| " + " | ".join(names) + " |")
    print("|---" * len(names) + "|")
    for row in rows:
        print("| " + " | ".join(f"{row[name]:.2f}" for name in names) + " |")


def plot(chains: list[Row], siblings: list[Row], path: Path) -> None:
    """Measured lengths as points, theory as lines."""
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    from matplotlib import pyplot

    # Text stays text, and equal numbers give an equal file.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "coupling"})
    points = {"coupled": "C0o", "ratio": "C1s", "block": "C2^", "greedy": "C3x"}
    theory = {"coupled, theory": "C0-", "coupled, at least": "C0:", "ratio, theory": "C1-"}

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axes, rows in ((left, chains), (right, siblings)):
        for name, style in (points | theory).items():
            if name in rows[0]:
                axes.plot(TVS, [row[name] for row in rows], style, label=name)
        axes.set_xlabel("TV(p, q)")
        axes.grid(alpha=0.3)
        axes.legend()
    left.set(title=f"Chains of {GAMMA}", ylabel="tokens per target pass", ylim=(1, GAMMA + 1))
    right.set(title=f"{NUM_SIBLINGS} siblings", ylim=(1, 2.02))
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
