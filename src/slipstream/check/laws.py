"""The exact law of a rule's output, by running the rule itself under every decision.

Rules make their random choices only through the noise they are given. `Branch` is noise that
follows a list of forced choices, records their probability, and remembers the choices it passed
by; running the rule once per branch enumerates all it can do. Nothing of a rule is written again
here, so what is proved is the code that runs.

A process is given by tables: p(context) and q(context), distributions of the next token after a
context of drafted tokens, float64.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from slipstream.maths import acceptance
from slipstream.maths.acceptance import DraftBatch, Verdicts

Context = tuple[int, ...]
Table = Callable[[Context], Tensor]  # context -> distribution [V], float64
Law = dict[Context, float]  # string -> probability


class Branch:
    """`acceptance.FreshNoise` and a sampler whose every choice is forced.

    Attributes:
        probability: of this branch.
        passed_by: beginnings of the branches that were possible beside it.
    """

    def __init__(self, forced: Sequence[int] = ()):
        self.forced = forced
        self.taken: list[int] = []
        self.probability = 1.0
        self.passed_by: list[list[int]] = []

    def accepts(self, seqs: Tensor, nodes: Tensor, p: Tensor, q: Tensor) -> Tensor:
        chances = (p / q).clamp(max=1).tolist()
        return torch.tensor([self._choose([1 - c, c]) == 1 for c in chances], dtype=torch.bool)

    def recovers(self, seqs: Tensor, depths: Tensor | int, weights: Tensor) -> Tensor:
        rows = (weights / weights.sum(-1, keepdim=True)).tolist()
        return torch.tensor([self._choose(row) for row in rows], dtype=torch.int64)

    def _choose(self, chances: Sequence[float]) -> int:
        possible = [choice for choice, chance in enumerate(chances) if chance > 0]
        if len(self.taken) < len(self.forced):
            choice = self.forced[len(self.taken)]
        else:
            choice = possible[0]
            self.passed_by += [[*self.taken, other] for other in possible[1:]]
        self.taken.append(choice)
        self.probability *= chances[choice]
        return choice


def branches(run: Callable[[Branch], Verdicts]) -> Iterator[tuple[Verdicts, float]]:
    """Every outcome of a random procedure with its probability; outcomes may repeat."""
    unexplored: list[list[int]] = [[]]
    while unexplored:
        branch = Branch(unexplored.pop())
        outcome = run(branch)
        unexplored += branch.passed_by
        yield outcome, branch.probability


@dataclass(frozen=True, slots=True)
class Setting:
    """A rule on one shape of draft.

    Attributes:
        rule: "match", "ratio" or "block".
        parents: the shape.
        certain: children are the most likely tokens under q instead of drawn from it.
        replacement: siblings are drawn independently of each other.
    """

    rule: str
    parents: tuple[int, ...]
    certain: bool = False
    replacement: bool = False


def output_law(setting: Setting, p: Table, q: Table) -> Law:
    """The law of the string one step emits: accepted tokens and the further one."""
    law: Law = {}
    for tokens, chance in _drafts(setting, q):
        contexts = [_context(tokens, setting.parents, node) for node in range(len(tokens))]
        drafts = DraftBatch(
            torch.tensor([tokens], dtype=torch.int64).reshape(1, -1),
            torch.tensor([setting.parents], dtype=torch.int64).reshape(1, -1),
            _laws_of(setting, contexts, q),
            certain=setting.certain,
        )

        def target(seqs: Tensor, nodes: Tensor, contexts: list[Context] = contexts) -> Tensor:
            return torch.stack([p(contexts[n] if n >= 0 else ()) for n in nodes.tolist()])

        def run(
            branch: Branch, drafts: DraftBatch = drafts, target: acceptance.Target = target
        ) -> Verdicts:
            return _apply(setting, drafts, target, branch)

        for verdicts, probability in branches(run):
            path = [tokens[node] for node in verdicts.accepted[0].nonzero().flatten().tolist()]
            emitted = (*path, int(verdicts.next_tokens))
            law[emitted] = law.get(emitted, 0.0) + chance * probability
    return law


def completed(law: Law, p: Table, length: int) -> Law:
    """Strings shorter than `length` continued by p, longer ones never occur: the joint law."""
    joint: Law = {}
    for string, chance in law.items():
        vocab_size = len(p(()))
        for tail in product(range(vocab_size), repeat=max(length - len(string), 0)):
            whole, probability = string, chance
            for token in tail:
                probability *= float(p(whole)[token])
                whole = (*whole, token)
            joint[whole] = joint.get(whole, 0.0) + probability
    return joint


def target_law(p: Table, length: int) -> Law:
    """What plain sampling emits."""
    return completed({(): 1.0}, p, length)


def distance(a: Law, b: Law) -> float:
    """Total variation."""
    return 0.5 * sum(abs(a.get(s, 0.0) - b.get(s, 0.0)) for s in a.keys() | b.keys())


def expected_emitted(law: Law) -> float:
    """Mean tokens per step, the further one included."""
    return sum(len(string) * chance for string, chance in law.items())


def _apply(
    setting: Setting, drafts: DraftBatch, target: acceptance.Target, branch: Branch
) -> Verdicts:
    if setting.rule == "match":
        return acceptance.match(drafts, lambda s, n: branch.recovers(s, 0, target(s, n)))
    if setting.rule == "ratio":
        return acceptance.ratio(drafts, target, branch, replacement=setting.replacement)
    return acceptance.block(drafts, target, branch)


def _drafts(setting: Setting, q: Table) -> Iterator[tuple[list[int], float]]:
    """Every draft of that shape with its probability."""

    def extend(tokens: list[int], chance: float) -> Iterator[tuple[list[int], float]]:
        node = len(tokens)
        if node == len(setting.parents):
            yield tokens, chance
            return
        parent = setting.parents[node]
        law = q(_context(tokens, setting.parents, parent) if parent >= 0 else ()).clone()
        siblings = [tokens[i] for i in range(node) if setting.parents[i] == parent]
        if setting.certain or not setting.replacement:
            law[siblings] = 0.0
        total = float(law.sum())
        if total <= 0:
            raise ValueError(f"q has fewer possible tokens than node {parent} has children")
        if setting.certain:
            yield from extend([*tokens, int(law.argmax())], chance)
            return
        for token in range(len(law)):
            if law[token] > 0:
                yield from extend([*tokens, token], chance * float(law[token]) / total)

    yield from extend([], 1.0)


def _laws_of(setting: Setting, contexts: list[Context], q: Table) -> Tensor | None:
    """q at every node: the law of its parent's next token, [1, N, V]."""
    if setting.certain or not contexts:
        return None
    return torch.stack([q(context[:-1]) for context in contexts]).unsqueeze(0)


def _context(tokens: Sequence[int], parents: Sequence[int], node: int) -> Context:
    """The drafted tokens from the root to a node."""
    path: list[int] = []
    while node >= 0:
        path.append(tokens[node])
        node = parents[node]
    return tuple(reversed(path))
