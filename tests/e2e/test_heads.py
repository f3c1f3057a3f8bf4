"""Draft heads in the engine, wired as users wire them, change the number of passes and no token."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import heads
from engines import EOS, TREE, answers, engine_for, requests
from packing import packed_model
from sequences import sequence
from slipstream import native, reference
from slipstream.build import build_engine, draft_bytes
from slipstream.check import planted
from slipstream.check.tiny import loaded, tiny_model
from slipstream.cli.answers import stats_lines
from slipstream.core.config import EngineConfig
from slipstream.core.controls import Row, controls
from slipstream.core.counts import DraftCounts
from slipstream.core.draft import Draft
from slipstream.core.errors import ConfigError, ModelError
from slipstream.core.params import SamplingParams
from slipstream.core.speculative import SpeculativeConfig, TreeConfig
from slipstream.drafters.combined import CombinedDrafter
from slipstream.drafters.eagle import EagleDrafter
from slipstream.drafters.levels import LevelGrower, Run
from slipstream.drafters.vocabulary import DraftVocabulary
from slipstream.engine.verifier import make_verifier
from slipstream.loading.head_files import write_head
from slipstream.loading.head_packing import pack_head
from slipstream.maths.distributions import probabilities
from slipstream.maths.stats import g_test
from slipstream.models.heads.base import packed_weights

FALSE_ALARM = 1e-6
METHODS = ("eagle", "eagle3", "mtp", "medusa")


@pytest.fixture(scope="module")
def target():
    return tiny_model()


@pytest.fixture(scope="module")
def folder(target, tmp_path_factory):
    """A directory with a head of each method, named after it."""
    folder = tmp_path_factory.mktemp("heads")
    for method in METHODS:
        write_head(getattr(heads, method)(target), folder / method, target.config)
    return folder


@pytest.fixture(scope="module")
def plain(target):
    return [
        reference.generate(target, prompt, params, stop_ids=EOS, num_tokens=params.max_tokens)
        for prompt, params in requests(9)
    ]


def engine_with(target, folder, method, *, num_blocks, is_combined=False, **settings):
    bytes_per_token = 2 * 3 * 2 * 8 * 8
    return build_engine(
        loaded(target, EOS),
        EngineConfig(
            kv_cache_memory=num_blocks * 4 * bytes_per_token,
            block_size=4,
            max_num_batched_tokens=24,
        ),
        SpeculativeConfig(
            method="combined" if is_combined else method,
            head=method if is_combined else None,
            model=str(folder / method),
            controller="fixed",
            num_speculative_tokens=6,
            **settings,
        ),
    )


def listen(owner, name, hear):
    """Tell `hear` whatever a method returns."""
    method = getattr(owner, name)

    def heard(*args):
        result = method(*args)
        hear(result)
        return result

    setattr(owner, name, heard)


@pytest.mark.parametrize("num_blocks", [24, 400])
@pytest.mark.parametrize("tree", [None, TREE], ids=["chains", "trees"])
@pytest.mark.parametrize("method", METHODS)
def test_same_tokens(target, folder, plain, method, tree, num_blocks):
    """A growing batch, prompts in chunks and with a common beginning, blocks scarce or plenty."""
    engine = engine_with(target, folder, method, num_blocks=num_blocks, tree=tree)
    outputs = answers(engine, requests(9), stagger=1)
    assert [output.token_ids for output in outputs] == plain
    counts = DraftCounts()
    for output in outputs:
        counts.merge(output.draft_counts)
    assert counts.num_draft_tokens > counts.num_accepted_draft_tokens > 0
    assert (engine.stats().num_preemptions > 0) == (num_blocks == 24)
    drafter = engine.parts.drafter
    assert (
        0
        < draft_bytes(drafter)
        == sum(slot.nbytes for slot in [*drafter.head.parameters(), *drafter.head.buffers()])
    )
    if isinstance(drafter, EagleDrafter):
        drafter.blocks.check_integrity()
        assert drafter.blocks.num_used == 0


ENGINE_BUGS = {
    bug.name: bug
    for bug in planted.BUGS
    if bug.name
    in (
        "logits of the wrong row",
        "K/V kept of a rejected token",
        "accepted path not moved together",
        "tree positions by index",
        "siblings see each other",
    )
}


@pytest.mark.parametrize("name", ENGINE_BUGS)
@pytest.mark.parametrize("method", METHODS)
def test_planted_bugs_are_seen_with_every_head(target, folder, plain, method, name):
    """Equality above means something: the same answers are wrong as soon as the engine is."""
    engine = engine_with(target, folder, method, num_blocks=400, tree=TREE)
    with ENGINE_BUGS[name].planted():
        try:
            outputs = answers(engine, requests(9), stagger=1)
        except (AssertionError, IndexError):
            return  # seen even earlier
    assert [output.token_ids for output in outputs] != plain


def test_a_head_with_the_targets_law_is_followed():
    """A target that says the same after all tokens, and a head that passes its features on."""
    indifferent = tiny_model()
    for layer in indifferent.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    table = indifferent.model.embed_tokens.weight.data
    table[:] = table[3]
    table[5] *= 1.5  # more likely than the others; as an input it is normed to the same
    head = heads.eagle(indifferent, bias=False)
    for module in (head.layers[0].self_attn.o_proj, head.layers[0].mlp.down_proj):
        module.weight.data.zero_()
    head.fc.weight.data.zero_()
    head.fc.weight.data[:, 16:] = torch.eye(16)
    drafter = heads.drafter_for(head, 32)
    engine = engine_for(indifferent, drafter=drafter, num_draft_tokens=4)
    params = SamplingParams(temperature=1.0, seed=2, max_tokens=20, ignore_eos=True)
    (output,) = answers(engine, [([1, 2, 3], params)])
    counts = output.draft_counts
    assert counts.num_accepted_draft_tokens > 0.9 * counts.num_draft_tokens > 5


@pytest.mark.skipif(not native.is_available(), reason="no native kernels here")
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_on_packed_weights_not_a_bit_moves(method, is_packed):
    """Hidden states and taps come from the native program; the head in torch, or packed as well."""
    packed = packed_model("llama")
    wanted = [(prompt, replace(params, logprobs=1)) for prompt, params in requests(6)]
    plain = answers(engine_for(packed), wanted)
    head = getattr(heads, method)(packed)
    if is_packed:
        pack_head(head)
        assert packed_weights(head)
    kind = {} if method == "medusa" else {"kv_dtype": torch.float16}
    drafter = heads.drafter_for(head, tree=TREE, **kind)
    engine = engine_for(packed, drafter=drafter, num_draft_tokens=6, block_size=4)
    drafted = answers(engine, wanted, stagger=1)
    for ours, theirs in zip(drafted, plain, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.logprobs == theirs.logprobs
    assert sum(output.draft_counts.num_accepted_draft_tokens for output in drafted) > 0


@pytest.mark.skipif(not native.is_available(), reason="no native kernels here")
@pytest.mark.parametrize("method", heads.FEATURE_HEADS)
def test_greedy_chains_are_drafted_in_one_call_as_level_by_level(method, monkeypatch):
    packed = packed_model("llama")
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    wanted = [(prompt, params) for prompt, _ in requests(5)]
    head = getattr(heads, method)(packed)
    pack_head(head)
    drafts: list[list[Draft]] = [[], []]
    for is_at_once, seen in zip((True, False), drafts, strict=True):
        drafter = heads.drafter_for(head, kv_dtype=torch.float16)
        calls = []
        monkeypatch.setattr(
            LevelGrower, "wants_likeliest", lambda grower, runs, given=is_at_once: given
        )
        listen(drafter, "propose", seen.extend)
        listen(drafter._runner, "chains", calls.append)
        engine = engine_for(packed, drafter=drafter, num_draft_tokens=4, block_size=4)
        answers(engine, wanted, stagger=1)
        assert bool(calls) == is_at_once
    assert drafts[0] == drafts[1]
    assert sum(len(draft) for draft in drafts[0]) > 100


def test_only_greedy_requests_by_themselves_are_chains_of_likeliest_tokens():
    runs = [
        Run(0, sequence([1, 2, 3], params=SamplingParams(temperature=t, presence_penalty=p)), 2, 2)
        for t, p in ((0, 0), (0, 0), (0.5, 0), (0, 0.5))
    ]
    vocabulary = DraftVocabulary(32)
    chains = LevelGrower("match", None, vocabulary)
    assert chains.wants_likeliest(runs[:2])
    assert not chains.wants_likeliest([runs[0], runs[2]])
    assert not chains.wants_likeliest([runs[0], runs[3]])
    assert not LevelGrower("ratio", None, vocabulary).wants_likeliest(runs[:2])
    assert not LevelGrower("match", TREE, vocabulary).wants_likeliest(runs[:2])


@pytest.mark.parametrize("tree", [None, TreeConfig(depth=2, topk=3, max_tokens=6)])
@pytest.mark.parametrize("method", ["eagle", "medusa"])
def test_ratio_keeps_the_law(method, tree):
    """The joint law of three sampled tokens is the target's: q is what was drawn from."""
    target = tiny_model(vocab_size=5, num_layers=1, seed=3)
    settings = {"rule": "ratio", "tree": tree}
    head = getattr(heads, method)(target)
    drafter = heads.drafter_for(head, 5, num_blocks=2048, **settings)
    engine = engine_for(
        target, drafter=drafter, num_draft_tokens=6, max_num_seqs=256, kv_cache_memory=2**21
    )
    engine.parts = replace(engine.parts, verifier=make_verifier("ratio"))
    params = SamplingParams(temperature=1.5, max_tokens=4, ignore_eos=True)
    prompt = [1, 3, 2]
    ids = [engine.add(prompt, replace(params, seed=seed)) for seed in range(2500)]
    while engine.has_work:
        engine.step()
    outputs = [engine.output(request).outputs[0] for request in ids]
    assert sum(output.draft_counts.num_accepted_draft_tokens for output in outputs) > 500
    tokens = torch.tensor([output.token_ids[:3] for output in outputs])
    counts = torch.bincount(tokens @ torch.tensor([25, 5, 1]), minlength=125)

    def law(before: list[int], length: int) -> torch.Tensor:
        row = Row(params, before, len(prompt))
        p = probabilities(reference.logits(target, before)[-1:], controls([row]))[0].double()
        p = p / p.sum()
        if length == 1:
            return p
        return torch.cat([p[token] * law([*before, token], length - 1) for token in range(5)])

    assert g_test(counts, law(prompt, 3)).p_value >= FALSE_ALARM


@pytest.mark.parametrize("tree", [None, TREE], ids=["chains", "trees"])
@pytest.mark.parametrize("kind", METHODS)
def test_a_head_drafts_where_lookup_is_not_sure(target, folder, plain, kind, tree):
    engine = engine_with(target, folder, kind, num_blocks=400, tree=tree, is_combined=True)
    drafter = engine.parts.drafter
    assert isinstance(drafter, CombinedDrafter)
    found, drafted = [], []
    listen(drafter.lookup, "propose_scored", lambda scored: found.extend(scored[0].token_ids))
    listen(
        drafter.model,
        "propose",
        lambda drafts: drafted.extend(token for draft in drafts for token in draft.token_ids),
    )
    outputs = answers(engine, requests(9), stagger=1)
    assert [output.token_ids for output in outputs] == plain
    assert found
    assert drafted
    assert draft_bytes(drafter) == draft_bytes(drafter.model) > 0


def test_combined_knows_whom_it_asks():
    with pytest.raises(ConfigError, match="head must be one of medusa, eagle, eagle3, mtp"):
        SpeculativeConfig(method="combined", head="mpt")
    beside_a_head = SpeculativeConfig(method="combined", head="mtp", model="M")
    assert (beside_a_head.head_kind, beside_a_head.draft_model) == ("mtp", None)
    beside_a_model = SpeculativeConfig(method="combined", model="M")
    assert (beside_a_model.head_kind, beside_a_model.draft_model) == (None, "M")
    by_lookup = SpeculativeConfig(method="suffix", head="mtp", model="M")
    assert (by_lookup.head_kind, by_lookup.draft_model) == (None, None)


def test_a_head_of_another_method_is_refused(target, folder):
    with pytest.raises(ModelError, match="no eagle3 head for this target"):
        other = SpeculativeConfig(method="eagle3", model=str(folder / "eagle"))
        build_engine(loaded(target, EOS), EngineConfig(kv_cache_memory=2**20), other)


def test_the_memory_of_a_head_is_told(target, folder):
    engine = engine_with(target, folder, "medusa", num_blocks=100)
    size = draft_bytes(engine.parts.drafter)
    assert size == 3 * (2 * (16 * 16 + 16) + 32 * 16) * 8
    lines = stats_lines(SimpleNamespace(engine=engine, draft_bytes=10 * 10**6))
    assert "weights for drafting: 10.0 MB" in lines
    lines = stats_lines(SimpleNamespace(engine=engine, draft_bytes=0))
    assert not any("weights" in line for line in lines)


@pytest.mark.parametrize("method", ["medusa", "eagle", "eagle3"])
def test_methods_that_need_a_head_say_so(target, method):
    with pytest.raises(ConfigError, match=f"{method} needs model, its directory"):
        build_engine(
            loaded(target, EOS),
            EngineConfig(kv_cache_memory=2**20),
            SpeculativeConfig(method=method),
        )
