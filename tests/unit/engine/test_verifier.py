"""The walk of `MatchVerifier` against the rule it is a plain form of."""

import random

import pytest
import torch

from sequences import sequence
from slipstream.core.controls import Row, controls
from slipstream.core.draft import NO_DRAFT, Draft, Verdict
from slipstream.core.params import SamplingParams
from slipstream.engine.verifier import MatchVerifier
from slipstream.maths import acceptance, distributions
from slipstream.maths.acceptance import DraftBatch
from slipstream.maths.noise import Address, Stream

VOCAB = 5


def random_tree(chance: random.Random, num_nodes: int) -> Draft:
    """Nodes with random parents; siblings carry different tokens."""
    tokens: list[int] = []
    parents: list[int] = []
    for _ in range(num_nodes):
        parent = chance.randrange(-1, len(tokens))
        siblings = {tokens[i] for i, p in enumerate(parents) if p == parent}
        free = sorted(set(range(VOCAB)) - siblings)
        if free:
            tokens.append(chance.choice(free))
            parents.append(parent)
    return Draft(tokens, parents)


def by_the_rule(logits, first_rows, seqs, drafts) -> list[Verdict]:
    """`acceptance.match` on the same drafts, as tensors."""
    longest = max(map(len, drafts))
    tokens, parents = torch.full((2, len(drafts), longest), -1)
    for b, draft in enumerate(drafts):
        tokens[b, : len(draft)] = torch.tensor(draft.token_ids)
        parents[b, : len(draft)] = torch.tensor(draft.parents)

    def depth(draft: Draft, node: int) -> int:
        return 0 if node < 0 else 1 + depth(draft, draft.parents[node])

    def draw(which, nodes):
        places = list(zip(which.tolist(), nodes.tolist(), strict=True))
        rows = [Row(seqs[b].params, seqs[b].tokens, seqs[b].num_prompt) for b, _ in places]
        noise = [
            Address(seqs[b].key, Stream.TARGET, len(seqs[b].tokens) + depth(drafts[b], node))
            for b, node in places
        ]
        index = [first_rows[b] + 1 + node for b, node in places]
        return distributions.sample(logits[index], controls(rows), noise)

    found = acceptance.match(DraftBatch(tokens, parents), draw)
    return [
        Verdict(path.nonzero().flatten().tolist(), token)
        for path, token in zip(found.accepted, found.next_tokens.tolist(), strict=True)
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.5, 2.0])
def test_the_walk_is_the_rule(temperature: float) -> None:
    chance = random.Random(1)
    longest = 0
    for trial in range(60):
        drafts = [random_tree(chance, chance.randrange(13)) for _ in range(4)] + [NO_DRAFT]
        params = SamplingParams(temperature=temperature, seed=trial)
        seqs = [sequence([1, 2, 3 + b], seq_id=b, params=params) for b in range(len(drafts))]
        first_rows = [sum(1 + len(draft) for draft in drafts[:b]) for b in range(len(drafts))]
        generator = torch.Generator().manual_seed(trial)
        logits = 3 * torch.randn(first_rows[-1] + 1, VOCAB, generator=generator)
        verdicts = MatchVerifier()(logits, first_rows, seqs, drafts)
        assert verdicts == by_the_rule(logits, first_rows, seqs, drafts)
        longest = max(longest, *(len(verdict.path) for verdict in verdicts))
    assert longest >= 3, "the walks went nowhere"
