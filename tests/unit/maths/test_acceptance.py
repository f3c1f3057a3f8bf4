"""The rules: published values, edges, a scalar oracle, and the messages of bad input."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from random import Random

import pytest
import torch
from torch import Tensor

from slipstream.check.laws import (
    Context,
    Law,
    Setting,
    completed,
    distance,
    expected_emitted,
    output_law,
    target_law,
)
from slipstream.maths import stats
from slipstream.maths.acceptance import (
    DraftBatch,
    Verdicts,
    block,
    coupled_acceptance,
    match,
    ratio,
    ratio_acceptance,
    residual,
)
from slipstream.maths.distributions import finishers
from slipstream.maths.noise import Address, Key, StepNoise, Stream

CHAIN = (-1, 0)
JUST_BELOW_ONE = 1 - 2.0**-53

Rule = Callable[[DraftBatch, Callable[[Tensor, Tensor], Tensor], "Given"], Verdicts]


def row(*numbers: float | str) -> Tensor:
    return torch.tensor([float(Fraction(number)) for number in numbers], dtype=torch.float64)


@dataclass
class Given:
    """Fresh noise that was decided beforehand.

    Attributes:
        uniforms: [B, K], one per node.
        races: [B, K + 1, V], exponentials at each depth; None where recovery must be certain.
    """

    uniforms: Tensor
    races: Tensor | None = None

    def accepts(self, seqs: Tensor, nodes: Tensor, p: Tensor, q: Tensor) -> Tensor:
        return self.uniforms[seqs, nodes] * q < p

    def recovers(self, seqs: Tensor, depths: Tensor | int, weights: Tensor) -> Tensor:
        if self.races is None:
            assert bool(((weights > 0).sum(-1) == 1).all()), f"several tokens possible: {weights}"
            return weights.argmax(-1)
        return (self.races[seqs, depths] / weights).argmin(-1)


def given(*uniforms: float, race: Sequence[float] | None = None) -> Given:
    """For one chain or one set of siblings: a uniform per node, one race at every depth."""
    races = None if race is None else torch.tensor(race).expand(1, len(uniforms) + 1, -1)
    return Given(torch.tensor([uniforms], dtype=torch.float64), races)


def chain(tokens: Sequence[int], q: Tensor | None = None) -> DraftBatch:
    """One chain; q [V] at every node."""
    parents = torch.arange(-1, len(tokens) - 1).unsqueeze(0)
    every = None if q is None else q.expand(1, len(tokens), -1)
    drafted = torch.tensor([tokens], dtype=torch.int64).reshape(1, -1)
    return DraftBatch(drafted, parents, every, certain=every is None)


def everywhere(p: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda seqs, nodes: p.expand(len(seqs), -1)


def outcome(verdicts: Verdicts, seq: int = 0) -> tuple[list[int], int]:
    """Accepted nodes and the further token of one sequence."""
    accepted = verdicts.accepted[seq].nonzero().flatten().tolist()
    return accepted, int(verdicts.next_tokens[seq])


# Published values ----------------------------------------------------------------------------


def table_p(context: Context) -> Tensor:
    """Three tokens; every context of two or more is a rotation of one row."""
    if len(context) < 2:
        rows = {
            (): row(".5", ".3", ".2"),
            (0,): row(".1", ".6", ".3"),
            (1,): row("1/3", "1/3", "1/3"),
            (2,): row(".5", ".4", ".1"),
        }
        return rows[context]
    return row("1/2", "1/3", "1/6").roll(-(context[0] + 2 * context[1]))


def table_q(context: Context) -> Tensor:
    rows = {
        (): row(".2", ".3", ".5"),
        (0,): row("1/2", "1/4", "1/4"),
        (1,): row("1/6", "1/6", "4/6"),
        (2,): row(".1", ".3", ".6"),
    }
    return rows[context]


def lengths(law: Law) -> list[float]:
    """P(1 token is emitted), P(2), ..."""
    longest = max(map(len, law))
    return [sum(law[s] for s in law if len(s) == n) for n in range(1, longest + 1)]


def fractions(*numbers: str) -> object:
    return pytest.approx([float(Fraction(number)) for number in numbers], abs=1e-12)


def test_block_on_two_tokens_by_hand() -> None:
    p, q = row("1/3", "2/3"), row("2/3", "1/3")
    laws = {
        rule: output_law(Setting(rule, CHAIN), lambda _: p, lambda _: q)
        for rule in ("ratio", "block")
    }
    accepted = [expected_emitted(laws[rule]) - 1 for rule in ("ratio", "block")]
    assert accepted == fractions("10/9", "11/9")
    # aa is either kept whole or thrown away whole: nothing of length 2 begins with a.
    assert lengths(laws["block"]) == fractions("1/3", "1/9", "5/9")
    assert [laws["block"].get(s, 0) for s in [(0,), (1,), (0, 1), (1, 1)]] == fractions(
        "0", "1/3", "0", "1/9"
    )
    two = dict.fromkeys(product(range(2), repeat=2), 0.0)
    for string, chance in completed(laws["block"], lambda _: p, 2).items():
        two[string[:2]] += chance
    assert list(two.values()) == fractions("1/9", "2/9", "2/9", "4/9")


@pytest.mark.parametrize(
    ("rule", "short", "whole", "emitted"),
    [
        ("ratio", ("3/10", "7/100", "1/100", "1/20", "1/20", "2/25", "1/50"), "21/50", "53/25"),
        ("block", ("3/10", "7/100", "1/100", "1/20", "1/20", "1/20", "0"), "47/100", "217/100"),
    ],
)
def test_every_string_of_a_chain(
    rule: str, short: tuple[str, ...], whole: str, emitted: str
) -> None:
    law = output_law(Setting(rule, CHAIN), table_p, table_q)
    strings = [(0,), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert [law.get(string, 0.0) for string in strings] == fractions(*short)
    assert lengths(law)[2] == pytest.approx(float(Fraction(whole)), abs=1e-12)
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)  # and so no other string
    assert expected_emitted(law) == pytest.approx(float(Fraction(emitted)), abs=1e-12)
    assert distance(completed(law, table_p, 3), target_law(table_p, 3)) < 1e-15


@pytest.mark.parametrize(
    ("setting", "accepted"),
    [
        (Setting("ratio", (-1,)), "7/10"),
        (Setting("ratio", (-1, -1), replacement=True), "19/25"),
        (Setting("ratio", (-1, -1, -1), replacement=True), "101/125"),
        (Setting("ratio", (-1, -1)), "41/50"),
        (Setting("ratio", (-1, -1, -1)), "1"),
        (Setting("match", (-1,)), ".29"),
        (Setting("match", (-1, -1)), "1717/2800"),
        (Setting("match", (-1, -1, -1)), "1"),
        (Setting("match", (-1,), certain=True), ".2"),
        (Setting("match", (-1, -1), certain=True), ".5"),
        (Setting("ratio", (-1, -1), certain=True), ".5"),
    ],
    ids=str,
)
def test_siblings_of_three_tokens(setting: Setting, accepted: str) -> None:
    p = row(".5", ".3", ".2")
    law = output_law(setting, lambda _: p, lambda _: p.flip(0))
    assert expected_emitted(law) - 1 == pytest.approx(float(Fraction(accepted)), abs=1e-12)


@pytest.mark.parametrize(
    ("num_siblings", "replacement", "accepted"),
    [(2, True, "18/25"), (2, False, "107/140"), (3, True, "96/125"), (3, False, "14117/16800")],
)
def test_siblings_of_four_tokens(num_siblings: int, replacement: bool, accepted: str) -> None:
    p = row(".4", ".3", ".2", ".1")
    setting = Setting("ratio", (-1,) * num_siblings, replacement=replacement)
    law = output_law(setting, lambda _: p, lambda _: p.flip(0))
    assert expected_emitted(law) - 1 == pytest.approx(float(Fraction(accepted)), abs=1e-12)
    assert distance(completed(law, lambda _: p, 2), target_law(lambda _: p, 2)) < 1e-15


SHAPES = {
    "[1,1]": (-1, 0),
    "[2]": (-1, -1),
    "[2,1]": (-1, -1, 0, 1),
    "[1,2]": (-1, 0, 0),
    "[2,2]": (-1, -1, 0, 0, 1, 1),
}


@pytest.mark.parametrize(
    ("shape", "by_length"),
    [
        ("[1,1]", ("3/10", "7/25", "21/50")),
        ("[2]", ("9/50", "41/50")),
        ("[2,1]", ("9/50", "41/125", "123/250")),
        ("[1,2]", ("3/10", "17/200", "123/200")),
        ("[2,2]", ("9/50", "103/1000", "717/1000")),
    ],
)
def test_ratio_on_trees(shape: str, by_length: tuple[str, ...]) -> None:
    law = output_law(Setting("ratio", SHAPES[shape]), table_p, table_q)
    assert lengths(law) == fractions(*by_length)
    length = len(by_length)
    assert distance(completed(law, table_p, length), target_law(table_p, length)) < 1e-15


@pytest.mark.parametrize(
    ("shape", "certain", "emitted"),
    [
        ("[1,1]", True, "61/50"),
        ("[2]", True, "3/2"),
        ("[2,1]", True, "81/50"),
        ("[1,2]", True, "13/10"),
        ("[2,2]", True, "9/5"),
        ("[1,1]", False, "2741/2000"),
        ("[2]", False, "4517/2800"),
        ("[2,1]", False, "50011/28000"),
        ("[1,2]", False, "30787/21000"),
    ],
)
def test_match_on_trees(shape: str, certain: bool, emitted: str) -> None:
    law = output_law(Setting("match", SHAPES[shape], certain=certain), table_p, table_q)
    assert expected_emitted(law) == pytest.approx(float(Fraction(emitted)), abs=1e-12)


# Edges ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [ratio, block])
@pytest.mark.parametrize("uniform", [0.0, 0.5, JUST_BELOW_ONE])
def test_equal_laws_are_always_accepted(rule: Rule, uniform: float) -> None:
    p = row("1/3", "1/3", "1/3", "0")
    noise = given(uniform, uniform, uniform, race=[3.0, 2.0, 1.0, 0.5])
    accepted, bonus = outcome(rule(chain([0, 2, 2], p), everywhere(p), noise))
    assert (accepted, bonus) == ([0, 1, 2], 2)


@pytest.mark.parametrize("rule", [ratio, block])
@pytest.mark.parametrize("uniform", [0.0, JUST_BELOW_ONE])
def test_a_token_of_probability_zero_is_never_accepted(rule: Rule, uniform: float) -> None:
    p, q = row("0", "1/2", "1/2"), row("1/2", "1/2", "0")
    noise = given(uniform, uniform)
    assert outcome(rule(chain([0, 1], q), everywhere(p), noise)) == ([], 2)


@pytest.mark.parametrize("rule", [ratio, block])
def test_a_token_likelier_than_drafted_is_accepted_at_any_uniform(rule: Rule) -> None:
    p, q = row(".75", ".25"), row(".5", ".5")
    noise = given(JUST_BELOW_ONE, race=[1.0, 9.0])
    assert outcome(rule(chain([0], q), everywhere(p), noise)) == ([0], 0)


@pytest.mark.parametrize("rule", [ratio, block])
@pytest.mark.parametrize("certain", [False, True])
def test_one_hot_rows(rule: Rule, certain: bool) -> None:
    """At temperature 0 every rule is: accept what equals the argmax."""
    p = row("0", "1", "0")
    noise = given(0.5, 0.5)
    for tokens, expected in [
        ([1, 1], ([0, 1], 1)),
        ([1, 0], ([0], 1)),
        ([0, 1], ([], 1)),
    ]:
        q = None if certain else torch.eye(3, dtype=torch.float64)[tokens].unsqueeze(0)
        drafts = DraftBatch(torch.tensor([tokens]), torch.tensor([CHAIN]), q, certain=q is None)
        assert outcome(rule(drafts, everywhere(p), noise)) == expected


@pytest.mark.parametrize("rule", [ratio, block])
def test_an_empty_draft_yields_the_bonus_token(rule: Rule) -> None:
    noise = given(race=[1.0, 0.2, 5.0])
    assert outcome(rule(chain([]), everywhere(row(".4", ".1", ".5")), noise)) == ([], 1)


def test_nothing_left_means_p_itself() -> None:
    p = torch.stack([row(".5", ".5", "0"), row(".5", ".3", ".2")])
    q = torch.stack([row(".5", ".5", "0"), row(".2", ".3", ".5")])
    assert torch.equal(residual(p, q), torch.stack([row(".5", ".5", "0"), row("1", "0", "0")]))


def test_a_rejection_by_rounding_recovers_from_p() -> None:
    """A noise that rejects although p equals q: the recovered token is still one of p."""
    p = row("0", "1", "0")

    class Refuses(Given):
        def accepts(self, seqs: Tensor, nodes: Tensor, p: Tensor, q: Tensor) -> Tensor:
            return torch.zeros_like(seqs, dtype=torch.bool)

    for rule in (ratio, block):
        drafts = chain([1, 1], p)
        assert outcome(rule(drafts, everywhere(p), Refuses(torch.empty(1, 2)))) == ([], 1)


def test_siblings_run_out_when_p_does() -> None:
    """Rejected siblings leave only what they do not carry; the last one is certain."""
    p = row(".5", ".25", ".25")
    drafts = DraftBatch(torch.tensor([[0, 1, 2]]), torch.full((1, 3), -1), certain=True)
    noise = given(0.5, 0.5, JUST_BELOW_ONE, race=[1.0, 1.0, 1.0])
    assert outcome(ratio(drafts, everywhere(p), noise)) == ([2], 0)


def test_a_repeated_sibling_is_a_trial_of_its_own() -> None:
    p, q = row(".3", ".7"), row(".6", ".4")
    drafts = DraftBatch(torch.tensor([[0, 0, 1]]), torch.full((1, 3), -1), q.expand(1, 3, 2))
    noise = given(0.51, 0.0, JUST_BELOW_ONE, race=[1.0, 1.0])
    # After the first rejection p is (0, 1): the second 0 fails at any uniform, 1 passes.
    assert outcome(ratio(drafts, everywhere(p), noise, replacement=True)) == ([2], 1)


def test_block_takes_the_longest_prefix_whatever_failed_before() -> None:
    p, q = row("1/3", "2/3"), row("2/3", "1/3")
    # Drafted ab: prefix a has no chance of its own, prefix ab is certain.
    noise = given(0.9, 0.9, race=[5.0, 1.0])
    assert outcome(block(chain([0, 1], q), everywhere(p), noise)) == ([0, 1], 1)
    assert outcome(ratio(chain([0, 1], q), everywhere(p), noise)) == ([], 1)


def test_match_asks_for_visited_nodes_only() -> None:
    """Children 4 and 7 of the root, then 5 below 7; the samples are 7, 5 and 1."""
    drafts = DraftBatch(torch.tensor([[4, 7, 9, 5, -1]]), torch.tensor([[-1, -1, 0, 1, -1]]))
    asked = []

    def draw(seqs: Tensor, nodes: Tensor) -> Tensor:
        asked.extend(nodes.tolist())
        return torch.tensor([{-1: 7, 1: 5, 3: 1}[node] for node in nodes.tolist()])

    assert outcome(match(drafts, draw)) == ([1, 3], 1)
    assert asked == [-1, 1, 3]


# A scalar oracle -----------------------------------------------------------------------------


@dataclass
class Case:
    """One draft with everything its verification depends on, as plain lists.

    Attributes:
        p, q: after each place, the root first: [N + 1][V]. Node i was drawn from q[parents[i] + 1].
        uniforms: one per node.
        races: exponentials at each depth, [N + 1][V].
    """

    tokens: list[int]
    parents: list[int]
    p: list[list[float]]
    q: list[list[float]]
    uniforms: list[float]
    races: list[list[float]]


def normalised(weights: list[float]) -> list[float]:
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def winner(race: list[float], weights: list[float]) -> int:
    times = [e / w if w > 0 else math.inf for e, w in zip(race, weights, strict=True)]
    return times.index(min(times))


def ratio_by_hand(case: Case, replacement: bool) -> tuple[list[int], int]:
    path, node = [], -1
    while True:
        p, q, accepted = case.p[node + 1], case.q[node + 1], False
        for child in [i for i in range(len(case.tokens)) if case.parents[i] == node]:
            x = case.tokens[child]
            if case.uniforms[child] < p[x] / q[x]:
                accepted = True
                break
            left = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
            if any(left):
                p = normalised(left)
            if not replacement:
                q = [0.0 if v == x else b for v, b in enumerate(q)]
                q = normalised(q) if any(q) else q
        if not accepted:
            return path, winner(case.races[len(path)], p)
        path.append(child)
        node = child


def block_by_hand(case: Case) -> tuple[list[int], int]:
    n = len(case.tokens)
    joint = [1.0]
    for i, x in enumerate(case.tokens):
        joint.append(min(1.0, joint[i] * case.p[i][x] / case.q[i][x]))

    def left(i: int) -> list[float]:
        return [max(joint[i] * a - b, 0.0) for a, b in zip(case.p[i], case.q[i], strict=True)]

    longest = 0
    for i in range(1, n + 1):
        if i == n:
            chance = joint[n]
        else:
            mass = math.fsum(left(i))
            missing = 1 - joint[i]
            chance = mass / (mass + missing) if mass + missing > 0 else 1.0
        if case.uniforms[i - 1] < chance:
            longest = i
    weights = left(longest) if longest < n else case.p[n]
    weights = weights if any(weights) else case.p[longest]
    return list(range(longest)), winner(case.races[longest], weights)


def random_case(random: Random, shape: str, vocab_size: int = 6, max_nodes: int = 6) -> Case:
    """Ragged, with zeros and ties; `shape` is chain, tree (distinct siblings) or copies."""

    def law() -> list[float]:
        weights = [random.choice([0.0, 1.0, 1.0, random.random()]) for _ in range(vocab_size)]
        weights[random.randrange(vocab_size)] = 1.0
        return normalised(weights)

    wanted = random.randrange(max_nodes + 1)
    p, q, tokens, parents = [law()], [law()], [], []
    for node in range(wanted):
        parent = node - 1 if shape == "chain" else random.randrange(-1, node)
        siblings = [tokens[i] for i in range(node) if parents[i] == parent]
        possible = [v for v in range(vocab_size) if q[parent + 1][v] > 0]
        if shape == "tree":
            possible = [v for v in possible if v not in siblings]
        if not possible:
            break
        tokens.append(random.choice(possible))
        parents.append(parent)
        p.append(law())
        q.append(p[-1] if random.random() < 0.2 else law())
    return Case(
        tokens,
        parents,
        p,
        q,
        [random.random() for _ in tokens],
        [[random.expovariate(1) for _ in range(vocab_size)] for _ in p],
    )


def batched(cases: list[Case]) -> tuple[DraftBatch, Tensor, Given]:
    """All cases at once; what lies past the end of a draft is NaN and must not matter."""
    width, vocab_size = max(len(case.tokens) for case in cases), len(cases[0].p[0])
    tokens = torch.full((len(cases), width), -1)
    parents = torch.full((len(cases), width), -1)
    uniforms = torch.full((len(cases), width), torch.nan, dtype=torch.float64)
    p, q, races = torch.full(
        (3, len(cases), width + 1, vocab_size), torch.nan, dtype=torch.float64
    ).unbind()
    for b, case in enumerate(cases):
        n = len(case.tokens)
        tokens[b, :n], parents[b, :n] = torch.tensor([case.tokens, case.parents])
        uniforms[b, :n] = torch.tensor(case.uniforms)
        p[b, : n + 1], races[b, : n + 1] = torch.tensor(case.p), torch.tensor(case.races)
        for i, parent in enumerate(case.parents):
            q[b, i] = torch.tensor(case.q[parent + 1])
    return DraftBatch(tokens, parents, q[:, :width]), p, Given(uniforms, races)


@pytest.mark.parametrize("rule", ["ratio chain", "ratio tree", "ratio copies", "block chain"])
def test_a_batch_equals_the_scalar_rule_with_the_same_numbers(rule: str) -> None:
    name, shape = rule.split()
    random = Random(rule)
    cases = [random_case(random, shape) for _ in range(2500)]
    drafts, p, noise = batched(cases)

    def target(seqs: Tensor, nodes: Tensor) -> Tensor:
        return p[seqs, nodes + 1]

    if name == "block":
        verdicts = block(drafts, target, noise)
        expected = [block_by_hand(case) for case in cases]
    else:
        copies = shape == "copies"
        verdicts = ratio(drafts, target, noise, replacement=copies)
        expected = [ratio_by_hand(case, replacement=copies) for case in cases]
    assert [outcome(verdicts, b) for b in range(len(cases))] == expected
    num_accepted = {len(path) for path, _ in expected}
    assert num_accepted >= {0, 1, 2, 3}  # the comparison saw every way to end


# Batches -------------------------------------------------------------------------------------


def two_level_drafts(num_seqs: int) -> tuple[DraftBatch, Tensor]:
    """Random rows p [B, 4, V], and chains of 0 to 3 tokens drawn from other random rows."""
    generator = torch.Generator().manual_seed(1)
    p, q = torch.randn(2, num_seqs, 4, 9, generator=generator).softmax(-1)
    tokens = torch.multinomial(q[:, :3].flatten(0, 1), 1, generator=generator).view(num_seqs, 3)
    ends = torch.arange(num_seqs).remainder(4).unsqueeze(1)
    tokens = tokens.masked_fill(torch.arange(3) >= ends, -1)
    return DraftBatch(tokens, torch.arange(-1, 2).expand(num_seqs, 3), q[:, :3]), p


@pytest.mark.parametrize("rule", [ratio, block])
def test_a_verdict_does_not_depend_on_the_batch(rule: Callable[..., Verdicts]) -> None:
    drafts, p = two_level_drafts(200)

    def verify(which: list[int]) -> list[tuple[list[int], int]]:
        noise = StepNoise([Key(7, b) for b in which], [11 * b for b in which])
        part = torch.tensor(which)
        assert drafts.q is not None
        verdicts = rule(
            DraftBatch(drafts.tokens[part], drafts.parents[part], drafts.q[part]),
            lambda seqs, nodes: p[part[seqs], nodes + 1],
            noise,
        )
        return [outcome(verdicts, b) for b in range(len(which))]

    together = verify(list(range(200)))
    assert {len(accepted) for accepted, _ in together} == {0, 1, 2, 3}
    assert verify(list(range(199, -1, -1))) == together[::-1]
    assert [verify([b])[0] for b in range(0, 200, 7)] == together[::7]


# Bad input -----------------------------------------------------------------------------------


def test_drafts_of_the_wrong_shape_are_refused() -> None:
    two, three = torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"tokens \[1, 2\] and parents \[1, 3\]"):
        DraftBatch(two, three)
    with pytest.raises(ValueError, match=r"tokens \[2\] and parents \[2\]"):
        DraftBatch(two[0], two[0])
    with pytest.raises(ValueError, match=r"q \[1, 3, 5\] must begin"):
        DraftBatch(two, torch.tensor([CHAIN]), torch.ones(1, 3, 5) / 5)


@pytest.mark.parametrize("parents", [[0, 0], [-1, 1], [1, 0], [-2, 0], [-1, 5]])
def test_a_draft_with_a_cycle_is_refused(parents: list[int]) -> None:
    with pytest.raises(ValueError, match="parents must be -1 or an earlier node"):
        DraftBatch(torch.tensor([[3, 4]]), torch.tensor([parents]))


def test_parents_past_the_end_of_a_draft_are_nobodys_business() -> None:
    drafts = DraftBatch(torch.tensor([[3, -1]]), torch.tensor([[-1, 77]]), certain=True)
    assert drafts.lengths.tolist() == [1]


@pytest.mark.parametrize("rule", [ratio, block])
def test_vocabularies_must_agree(rule: Rule) -> None:
    with pytest.raises(ValueError, match="q has 3 tokens, p has 4"):
        rule(
            chain([0], row(".5", ".25", ".25")),
            everywhere(row(".25", ".25", ".25", ".25")),
            given(0.0),
        )


@pytest.mark.parametrize("rule", [ratio, block])
@pytest.mark.parametrize(
    "bad", [(math.nan, 1.0), (0.5, 0.4), (0.5, 0.6), (1.5, -0.5), (math.inf, 0.0), (0.0, 0.0)]
)
def test_what_is_no_distribution_is_an_error_and_not_a_sample(
    rule: Rule, bad: tuple[float, float]
) -> None:
    good, noise = row(".5", ".5"), given(0.0, race=[1.0, 1.0])
    with pytest.raises(ValueError, match="p has a row that is not a distribution"):
        rule(chain([0], good), everywhere(torch.tensor(bad).double()), noise)
    with pytest.raises(ValueError, match="q has a row that is not a distribution"):
        rule(chain([0], torch.tensor(bad).double()), everywhere(good), noise)


@pytest.mark.parametrize("rule", [ratio, block])
def test_a_token_that_q_cannot_draw_is_an_error(rule: Rule) -> None:
    with pytest.raises(ValueError, match="q is 0 at a drafted token"):
        rule(chain([1], row("1", "0")), everywhere(row(".5", ".5")), given(0.0))


def test_a_sibling_drawn_twice_without_replacement_is_an_error() -> None:
    q = row(".5", ".5")
    drafts = DraftBatch(torch.tensor([[0, 0]]), torch.full((1, 2), -1), q.expand(1, 2, 2))
    noise = given(0.9, 0.9, race=[1.0, 1.0])
    with pytest.raises(ValueError, match="q is 0 at a drafted token"):
        ratio(drafts, everywhere(row(".1", ".9")), noise)


def test_block_refuses_trees() -> None:
    drafts = DraftBatch(torch.tensor([[0, 1]]), torch.tensor([[-1, -1]]), certain=True)
    with pytest.raises(ValueError, match="block verification needs chains"):
        block(drafts, everywhere(row(".5", ".5")), given(0.0, 0.0))


@pytest.mark.parametrize("rule", [ratio, block])
def test_shared_noise_is_refused_where_it_would_bias(rule: Callable[..., Verdicts]) -> None:
    with pytest.raises(TypeError, match="need FreshNoise"):
        rule(chain([0]), everywhere(row(".5", ".5")), lambda seqs, nodes: seqs)


@pytest.mark.parametrize("rule", [ratio, block])
def test_what_else_is_named(rule: Rule) -> None:
    half = row(".5", ".5")
    unsaid = DraftBatch(torch.tensor([[0]]), torch.tensor([[-1]]))
    with pytest.raises(ValueError, match="q is missing"):
        rule(unsaid, everywhere(half), given(0.0))
    outside = DraftBatch(torch.tensor([[2]]), torch.tensor([[-1]]), certain=True)
    with pytest.raises(ValueError, match="tokens has id 2, p has 2 tokens"):
        rule(outside, everywhere(half), given(0.0))
    with pytest.raises(ValueError, match=r"p is torch\.float16"):
        rule(chain([0], half), everywhere(half.half()), given(0.0))
    with pytest.raises(ValueError, match="only past the end"):
        DraftBatch(torch.tensor([[0, -1, 1]]), torch.tensor([[-1, -1, 0]]))


def test_weights_too_small_to_divide_by_still_win_where_they_are_alone() -> None:
    noise = StepNoise([Key(1)], [5])
    weights = torch.tensor([[0.0, 0.0, 1e-40, 0.0]])
    assert noise.recovers(torch.tensor([0]), 0, weights).tolist() == [2]


# How often drafts are accepted ----------------------------------------------------------------


def test_acceptance_of_known_laws() -> None:
    p = row(".5", ".3", ".2")
    assert float(ratio_acceptance(p, p.flip(0))) == pytest.approx(0.7)
    assert float(coupled_acceptance(p, p.flip(0))) == pytest.approx(0.6308, abs=5e-5)
    apart = torch.stack([row("1", "0", "0"), row("0", "1/2", "1/2")])
    for acceptance in (ratio_acceptance, coupled_acceptance):
        assert acceptance(apart, apart.flip(0)).tolist() == [0, 0]
        assert acceptance(apart, apart).tolist() == pytest.approx([1, 1])


def test_coupling_is_between_its_bounds() -> None:
    generator = torch.Generator().manual_seed(2)
    p, q = (3 * torch.randn(2, 300, 12, generator=generator).double()).softmax(-1)
    p[:100, :4], q[50:150, 3:6] = 0, 0
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    tv = 0.5 * (p - q).abs().sum(-1)
    assert torch.allclose(ratio_acceptance(p, q), 1 - tv)
    coupled = coupled_acceptance(p, q)
    assert bool((coupled <= 1 - tv + 1e-12).all())
    assert bool((coupled >= (1 - tv) / (1 + tv) - 1e-12).all())


def test_races_with_the_same_noise_agree_as_often_as_predicted() -> None:
    """20,000 races; tolerances are 4 standard errors."""
    addresses = [Address(Key(3), Stream.TARGET, position) for position in range(20_000)]
    p = row(".5", ".3", ".2")
    emitted = finishers(p.log().expand(20_000, 3), addresses, 1)
    drafted = finishers(p.flip(0).log().expand(20_000, 3), addresses, 2)
    one = (drafted[:, :1] == emitted).double().mean()
    two = (drafted == emitted).any(1).double().mean()
    assert float(one) == pytest.approx(float(coupled_acceptance(p, p.flip(0))), abs=0.0137)
    assert float(two) == pytest.approx(0.8890, abs=0.0089)
    counts = emitted.flatten().bincount(minlength=3)
    assert stats.g_test(counts, p).p_value > 1e-6
