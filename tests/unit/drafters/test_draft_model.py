"""The draft model drafts what it would generate itself, from the tokens that were committed.

`plain` and `reference.logits` recompute everything, with no cache and no batch; whatever K/V is
kept, moved or lost must not show.
"""

import random
from dataclasses import replace

import pytest
import torch

from sequences import sequence
from slipstream import reference
from slipstream.check.tiny import LetterTokenizer, tiny_model
from slipstream.core.controls import Row, controls
from slipstream.core.draft import NO_DRAFT
from slipstream.core.errors import ConfigError
from slipstream.core.params import SamplingParams
from slipstream.core.sequence import Sequence
from slipstream.core.speculative import TreeConfig
from slipstream.drafters.draft_model import DraftModelDrafter, check_same_tokenizer
from slipstream.drafters.sampling import SHARPENING
from slipstream.maths.distributions import finishers, probabilities, sample, scores
from slipstream.maths.noise import Address, Key, StepNoise, Stream
from slipstream.maths.trees import children, depths
from slipstream.models.runner import ModelRunner

GREEDY = SamplingParams(temperature=0)
SAMPLED = SamplingParams(temperature=1.0)
EDITED = SamplingParams(
    temperature=0.8,
    top_k=9,
    top_p=0.95,
    repetition_penalty=1.3,
    frequency_penalty=0.4,
    logit_bias={3: 1.5, 4: -2.0},
    min_tokens=50,
)
TREE = TreeConfig(depth=3, topk=3, max_tokens=12)


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def model(request):
    return tiny_model(request.param)


@pytest.fixture(scope="module")
def llama():
    return tiny_model("llama")


@pytest.fixture
def passes(monkeypatch):
    """How many tokens each forward pass computed, in order."""
    counted: list[int] = []
    forward = ModelRunner.forward

    def counting(self, batch):
        counted.append(len(batch.ids))
        return forward(self, batch)

    monkeypatch.setattr(ModelRunner, "forward", counting)
    return counted


def seq_of(tokens, params=GREEDY, *, seq_id=0, stop_ids=(), salt=b"") -> Sequence:
    seq = sequence(list(tokens), seq_id=seq_id, num_prompt=len(tokens), salt=salt)
    return replace(seq, params=params, key=Key(7, seq_id), stop_ids=frozenset(stop_ids))


def drafter_for(model, *, num_blocks=64, block_size=4, vocab_size=32, **settings):
    return DraftModelDrafter.for_model(
        model, vocab_size, num_blocks=num_blocks, block_size=block_size, **settings
    )


def row_at(seq: Sequence, path=()) -> Row:
    return Row(seq.params, [*seq.tokens, *path], seq.num_prompt, seq.stop_ids)


def plain(model, seq: Sequence, num_tokens: int) -> list[int]:
    """What decoding with this model emits next, its laws sharpened as drafts are."""
    path: list[int] = []
    for _ in range(num_tokens):
        path += ranked(model, seq, path, 1)
    return path


# What is drafted ------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, EDITED], ids=["greedy", "sampled", "edited"])
def test_chains_continue_what_was_committed(model, params):
    """Three ragged sequences, budgets that vary, drafts accepted in full, in part, or not."""
    drafter = drafter_for(model)
    source = random.Random(1)
    seqs = [
        seq_of([source.randrange(1, 32) for _ in range(3 + 4 * i)], params, seq_id=i, stop_ids={0})
        for i in range(3)
    ]
    for _ in range(7):
        budgets = [source.choice([0, 1, 3, 5]) for _ in seqs]
        drafts = drafter.propose(seqs, budgets)
        drafter.blocks.check_integrity()
        for seq, budget, draft in zip(seqs, budgets, drafts, strict=True):
            assert draft.token_ids == plain(model, seq, budget)
            assert draft.is_chain
            assert draft.probs is None
            num_accepted = source.choice([0, budget // 2, budget, budget])
            seq.tokens += [*draft.token_ids[:num_accepted], source.randrange(1, 32)]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, EDITED], ids=["greedy", "sampled", "edited"])
def test_trees_continue_what_was_committed(model, params):
    """Children of every node are the first to finish its race, wherever its K/V came from."""
    drafter = drafter_for(model, tree=TREE, num_blocks=128)
    source = random.Random(2)
    seqs = [
        seq_of([source.randrange(1, 32) for _ in range(4 + 5 * i)], params, seq_id=i)
        for i in range(2)
    ]
    shapes = set()
    for _ in range(6):
        budgets = [source.choice([2, 7, 12]) for _ in seqs]
        drafts = drafter.propose(seqs, budgets)
        drafter.blocks.check_integrity()
        for seq, budget, draft in zip(seqs, budgets, drafts, strict=True):
            assert 1 <= len(draft) <= budget
            assert max(depths(draft.parents)) < TREE.depth
            paths = paths_of(draft)
            for node, below in enumerate(children(draft.parents)):
                at = node if node < len(draft) else -1
                path = paths[at] if at >= 0 else []
                best = ranked(model, seq, path, TREE.topk)
                tokens = [draft.token_ids[child] for child in below]
                assert tokens == best[: len(tokens)]
            shapes.add(tuple(draft.parents))
            path = source.choice([[], *paths])
            seq.tokens += [*path, source.randrange(1, 32)]
    assert len(shapes) > 2, "trees never varied"


def paths_of(draft) -> list[list[int]]:
    paths: list[list[int]] = []
    for token, parent in zip(draft.token_ids, draft.parents, strict=True):
        paths.append([*(paths[parent] if parent >= 0 else []), token])
    return paths


def ranked(model, seq, path, count) -> list[int]:
    """Tokens after a path by their place in the race; at temperature 0 by logit."""
    row = row_at(seq, path)
    is_greedy = seq.params.temperature == 0
    if is_greedy:
        row = replace(row, params=replace(seq.params, temperature=1.0))
    weights = scores(reference.logits(model, row.tokens)[-1:], controls([row]))
    if is_greedy:
        return weights.topk(count).indices[0].tolist()
    address = Address(seq.key, Stream.TARGET, len(row.tokens))
    return finishers(weights * SHARPENING, [address], count)[0].tolist()


@pytest.mark.parametrize("rule", ["ratio", "block"])
@pytest.mark.parametrize("params", [SAMPLED, EDITED, GREEDY], ids=["sampled", "edited", "greedy"])
def test_samples_come_with_their_law(llama, rule, params):
    drafter = drafter_for(llama, rule=rule)
    seqs = [seq_of(range(1, 5 + i), params, seq_id=i) for i in range(2)]
    drafts = drafter.propose(seqs, [4, 2])
    noise = StepNoise([seq.key for seq in seqs], [len(seq.tokens) for seq in seqs])
    for b, (seq, draft) in enumerate(zip(seqs, drafts, strict=True)):
        assert draft.is_chain
        assert draft.probs is not None
        assert draft.probs.dtype == torch.float32
        for depth, token in enumerate(draft.token_ids):
            row = row_at(seq, draft.token_ids[:depth])
            last, settings = reference.logits(llama, row.tokens)[-1:], controls([row])
            address = noise.drafts(torch.tensor([b]), torch.tensor([depth]))
            assert token == sample(last, settings, address)
            torch.testing.assert_close(draft.probs[depth], probabilities(last, settings)[0])


def test_a_sampled_trees_shape_does_not_depend_on_its_tokens(llama):
    """Where only two tokens are possible, third children are missing and nothing replaces them."""
    shapes: dict[int, set[tuple[tuple[int, ...], ...]]] = {0: set(), 2: set()}
    for seed in range(12):
        for top_k, seen in shapes.items():
            params = SamplingParams(temperature=1.5, top_k=top_k)
            seq = replace(seq_of([5, 6, 7], params), key=Key(seed))
            draft = drafter_for(llama, rule="ratio", tree=TREE).propose([seq], [12])[0]
            assert draft.probs is not None
            assert (draft.probs[range(len(draft)), draft.token_ids] > 0).all()
            seen.add(rank_paths(draft.parents))
    (full,) = shapes[0]
    assert any(2 in path for path in full)
    assert shapes[2] == {tuple(path for path in full if 2 not in path)}


def rank_paths(parents) -> tuple[tuple[int, ...], ...]:
    """Of every node, which child of which child it is."""
    below = children(parents)
    paths: list[tuple[int, ...]] = []
    for node, parent in enumerate(parents):
        above = paths[parent] if parent >= 0 else ()
        paths.append((*above, below[parent].index(node)))
    return tuple(paths)


@pytest.mark.parametrize("rule", ["match", "ratio"])
@pytest.mark.parametrize("vocab_size", [24, 40])
def test_vocabularies_of_other_sizes(llama, rule, vocab_size):
    """The draft model's 32 tokens, seen as the target's 24 or 40."""
    seq = seq_of([1, 2, 3], SamplingParams(temperature=3.0))
    draft = drafter_for(llama, rule=rule, vocab_size=vocab_size).propose([seq], [8])[0]
    assert max(draft.token_ids) < min(vocab_size, 32)
    if rule == "ratio":
        assert draft.probs is not None
        assert draft.probs.shape == (8, vocab_size)
        assert not draft.probs[:, 32:].any()
        torch.testing.assert_close(draft.probs.sum(1), torch.ones(8))


# What it costs --------------------------------------------------------------------------------


def test_one_pass_a_level_for_all_sequences(llama, passes):
    drafter = drafter_for(llama)
    seqs = [seq_of(range(1, 4 + i), seq_id=i) for i in range(4)]
    drafter.propose(seqs, [5, 2, 1, 3])
    assert passes == [3 + 4 + 5 + 6, 3, 2, 1, 1]


def test_tokens_it_has_are_not_computed_again(llama, passes):
    drafter = drafter_for(llama)
    seq = seq_of([1, 2, 3, 4])
    for num_accepted, num_missing in ((5, 2), (4, 1), (0, 1), (2, 1)):
        draft = drafter.propose([seq], [5])[0]
        seq.tokens += [*draft.token_ids[:num_accepted], 31]
        passes.clear()
        assert drafter.propose([seq], [1])[0].token_ids == plain(llama, seq, 1)
        assert passes == [num_missing]


def test_accepted_nodes_of_a_tree_are_not_computed_again(llama, passes):
    drafter = drafter_for(llama, tree=TREE)
    seq = seq_of([1, 2, 3, 4], SAMPLED)
    draft = drafter.propose([seq], [12])[0]
    inner = max(set(draft.parents))  # expanded, so fed; the last one is not the first fed
    assert inner > 0
    path = paths_of(draft)[inner]
    passes.clear()
    seq.tokens += [*path, 31]
    drafter.propose([seq], [1])
    assert passes == [1]


def test_no_budget_costs_nothing(llama, passes):
    drafter = drafter_for(llama)
    assert drafter.propose([seq_of([1, 2, 3])], [0]) == [NO_DRAFT]
    assert drafter.propose([], []) == []
    assert passes == []
    assert drafter.blocks.num_used == 0


def test_one_node_needs_one_pass(llama, passes):
    drafter = drafter_for(llama, tree=TREE)
    assert len(drafter.propose([seq_of([1, 2, 3])], [1])[0]) == 1
    assert passes == [3]


def test_long_prompts_in_chunks_delay_nobody(llama, passes):
    drafter = drafter_for(llama, chunk_tokens=8)
    long, short = seq_of(range(1, 21), seq_id=0), seq_of([1, 2, 3], seq_id=1)
    drafted = []
    for _ in range(4):
        drafts = drafter.propose([long, short], [2, 2])
        assert drafts[1].token_ids == plain(llama, short, 2)
        drafted.append(drafts[0].token_ids)
        short.tokens.append(drafts[1].token_ids[0])
    # 5, 7 and 7 of the 20 tokens beside the short one's 3, 1 and 1; then the last.
    assert drafted == [[], [], [], plain(llama, long, 2)]
    assert max(passes) <= 8


def test_equal_prompts_share_pages_under_equal_salts(llama, passes):
    drafter = drafter_for(llama)
    prompt = range(1, 15)
    counts = []
    for seq_id, salt in enumerate((b"", b"", b"other")):
        passes.clear()
        drafter.propose([seq_of(prompt, seq_id=seq_id, salt=salt)], [1])
        counts.append(passes[0])
    assert counts == [14, 2, 14]


# What it cannot do ----------------------------------------------------------------------------


def test_a_scarce_pool_goes_to_those_drafted_for_now(llama):
    """Room for two sequences of three: the one idle longest loses its pages, then the last."""
    drafter = drafter_for(llama, num_blocks=8)
    seqs = [seq_of(range(1 + i, 11 + i), seq_id=i) for i in range(3)]
    for seq in seqs:
        assert drafter.propose([seq], [4])[0].token_ids == plain(llama, seq, 4)
        drafter.blocks.check_integrity()
    assert [drafter.blocks.has(i) for i in range(3)] == [False, True, True]
    drafts = drafter.propose(seqs, [4, 4, 4])
    assert [len(draft) for draft in drafts].count(4) == 2
    assert NO_DRAFT in drafts
    drafter.blocks.check_integrity()
    for seq in seqs:
        drafter.forget(seq.seq_id)
        drafter.forget(seq.seq_id)
    assert drafter.blocks.num_used == 0


def test_a_sequence_larger_than_the_pool(llama):
    drafter = drafter_for(llama, num_blocks=2)
    assert drafter.propose([seq_of(range(1, 11))], [4]) == [NO_DRAFT]
    assert drafter.blocks.num_used == 0


def test_after_preemption(llama):
    drafter = drafter_for(llama)
    seq = seq_of([1, 2, 3, 4, 5], SAMPLED)
    seq.tokens += drafter.propose([seq], [3])[0].token_ids
    drafter.forget(seq.seq_id)
    assert drafter.propose([seq], [3])[0].token_ids == plain(llama, seq, 3)


def test_drafts_end_where_the_answer_must(llama):
    ends_soon = replace(seq_of([1, 2, 3], seq_id=0), max_tokens=3)
    fills_context = seq_of([1 + i % 31 for i in range(254)], seq_id=1)
    full = seq_of([1 + i % 31 for i in range(256)], seq_id=2)
    drafter = drafter_for(llama, num_blocks=256, chunk_tokens=1024)
    drafts = drafter.propose([ends_soon, fills_context, full], [9, 9, 9])
    assert [len(draft) for draft in drafts] == [2, 2, 0]


def test_what_the_draft_model_cannot_say_is_not_drafted():
    broken = tiny_model("llama", tied=False)
    broken.model.embed_tokens.weight.data[31] = torch.nan
    healthy, poisoned = seq_of([1, 2, 3], seq_id=0), seq_of([1, 31, 3], seq_id=1)
    unknown_wanted = seq_of([1, 2, 3], SamplingParams(min_tokens=1), stop_ids=range(32), seq_id=2)
    unknown_said = seq_of([1, 33, 3], seq_id=3)
    seqs = [healthy, poisoned, unknown_wanted, unknown_said]
    for tree in (None, TREE):
        for rule in ("match", "ratio"):
            drafter = drafter_for(broken, vocab_size=40, tree=tree, rule=rule)
            drafts = drafter.propose(seqs, [1, 1, 1, 1])
            assert drafts[0].token_ids == plain(broken, healthy, 1)
            assert drafts[1:] == [NO_DRAFT] * 3


def test_tokenizers_are_compared_by_content():
    target = LetterTokenizer(32)
    check_same_tokenizer(target, target)
    padded = LetterTokenizer(32)
    padded.vocab_size = 40
    padded._pieces = [*padded._pieces, *[b""] * 7, b"new"]
    check_same_tokenizer(target, padded)
    check_same_tokenizer(padded, target)
    other = LetterTokenizer(32)
    other._pieces[5:7] = [b"!", b"?"]
    with pytest.raises(ConfigError, match=r"5: 'f' and '!'; 6: 'g' and '\?'\."):
        check_same_tokenizer(target, other)
