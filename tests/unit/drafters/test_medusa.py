"""Medusa's heads draft from the newest hidden state, in the engine, as their definition gives."""

from dataclasses import replace

import pytest
import torch

import heads
from engines import SETTINGS, engine_for, prompts, run
from slipstream.check.tiny import tiny_model
from slipstream.core.controls import Row, controls
from slipstream.core.speculative import TreeConfig
from slipstream.drafters.medusa import MedusaDrafter
from slipstream.drafters.sampling import SHARPENING
from slipstream.maths.distributions import finishers, scores
from slipstream.maths.noise import Address, Stream
from slipstream.maths.trees import children, depths

TREE = TreeConfig(depth=3, topk=3, max_tokens=10)


@pytest.fixture(scope="module")
def target():
    return tiny_model()


def recorded(drafter):
    """What is drafted: (parameters, key, committed tokens, length of prompt, draft)."""
    seen = []
    propose = drafter.propose

    def remembering(seqs, budgets):
        drafts = propose(seqs, budgets)
        for seq, draft in zip(seqs, drafts, strict=True):
            seen.append((replace(seq, tokens=list(seq.tokens)), draft))
        return drafts

    drafter.propose = remembering
    return seen


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("tree", [None, TREE], ids=["chains", "trees"])
def test_drafts_follow_from_the_newest_state(target, tree, is_tied):
    drafter = MedusaDrafter(heads.medusa(target, is_tied=is_tied), 32, tree=tree)
    seen = recorded(drafter)
    settings = [SETTINGS["sampled"], replace(SETTINGS["penalised"], min_tokens=0)]
    wanted = [
        (prompt, replace(settings[i % 2], max_tokens=9)) for i, prompt in enumerate(prompts(5))
    ]
    engine = engine_for(
        target, drafter=drafter, num_draft_tokens=6, block_size=4, max_num_batched_tokens=16
    )
    run(engine, wanted, stagger=1)
    drafted = [(seq, draft) for seq, draft in seen if draft.token_ids]
    assert len(drafted) > 15
    topk = 1 if tree is None else TREE.topk
    for seq, draft in drafted:
        state = heads.target_pass(target, seq.tokens[:-1]).hidden[-1:]
        depth_of = depths(draft.parents)
        assert max(depth_of) < 3, "there are three heads"
        paths: dict[int, list[int]] = {-1: []}
        for node, (token, parent) in enumerate(zip(draft.token_ids, draft.parents, strict=True)):
            paths[node] = [*paths[parent], token]
        for place, below in enumerate(children(draft.parents)):
            path = paths[place if place < len(draft) else -1]
            if not below:
                continue
            row = Row(seq.params, [*seq.tokens, *path], seq.num_prompt, seq.stop_ids)
            weights = scores(drafter.head.logits(state, len(path) + 1)[-1], controls([row]))
            address = Address(seq.key, Stream.TARGET, len(row.tokens))
            best = finishers(weights * SHARPENING, [address], topk)[0].tolist()
            assert [draft.token_ids[child] for child in below] == best[: len(below)]


def test_under_ratio_q_is_the_heads_law(target):
    drafter = MedusaDrafter(heads.medusa(target), 32, rule="ratio")
    seen = recorded(drafter)
    params = replace(SETTINGS["sampled"], max_tokens=6, ignore_eos=True)
    run(engine_for(target, drafter=drafter, num_draft_tokens=3), [([9, 8, 7], params)])
    seq, draft = next((seq, draft) for seq, draft in seen if len(draft) == 3)
    state = heads.target_pass(target, seq.tokens[:-1]).hidden[-1:]
    q = torch.softmax(drafter.head.logits(state, 3).float(), -1).squeeze(1)
    assert draft.probs is not None
    torch.testing.assert_close(draft.probs, q)
