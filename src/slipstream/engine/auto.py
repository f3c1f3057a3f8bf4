"""The controller that decides each step from measured cost and live acceptance.

A draft of any size is a bet: it surely costs draft time and rows, and it may yield tokens. Nodes
of all sequences are admitted in order of their chance to be accepted, and of all the sets so
reached the one with the most expected tokens per second is drafted, or none (algorithms of
SmartSpec, arXiv 2406.14066, per sequence instead of per batch).

Estimates can be wrong, so a ledger keeps what speculation has cost against what plain decoding
would have. It is a leaky bucket: 1 % of every step is forgiven, and whoever is further in debt
than a few steps decodes plainly until forgiven. So, over any stretch,

    time <= 1.01 * time of plain decoding + a constant

up to the error of the plain step's time, which is why that is measured again now and then.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from slipstream.core.sequence import Sequence
from slipstream.engine.controller import Reasons
from slipstream.engine.costs import LARGEST_SURPRISE, CostModel, DraftCosts, Floats
from slipstream.engine.rates import DraftRates
from slipstream.engine.scheduler import Plan
from slipstream.maths import trees

if TYPE_CHECKING:
    from slipstream.engine.step import StepResult

Number = TypeVar("Number", float, Floats)

# Speculation begins above this expected speedup, and ends at 1: no flapping in between.
START_SPEEDUP = 1.02
# In a batch those who draft gain while the others wait for the larger pass: the sum may gain and
# the last answer still come later. So this much more is asked for where hardly anybody drafts.
FEW_DRAFT_SPEEDUP = 0.12
# Plain decoding is measured again after so many steps of other kinds.
PLAIN_MAX_AGE = 128
# Debts: what is forgiven of each step, and how many plain steps may be owed.
FORGIVEN, MAX_DEBT_STEPS = 0.01, 3.0
# A failed probe doubles the steps until the next, up to where probing takes this share of time.
FIRST_COOL_DOWN, PROBE_SHARE = 4, 0.005
# One in so many sequences is probed, the most hopeful, and at least one.
PROBED_OF = 8
# Drafting one level, in plain steps, before it was ever measured.
DRAFT_GUESS = 0.1
# A decision stands for a few steps: deciding costs a tenth of a small model's step, and one step
# teaches little. Where nothing is drafted it teaches nothing.
STANDS_FOR, DRAFTING_STANDS_FOR = 8, 4


@dataclass(frozen=True, slots=True)
class Load:
    """What a step computes before anything is drafted.

    Attributes:
        batch: sequences that get a token.
        rows: tokens computed; more than `batch` where prompts are among them.
        context, num_seqs: as `CostModel.predict` wants them.
        plain_sec: of the step as it is.
        sec_per_token: of decoding these sequences plainly.
    """

    batch: int
    rows: int
    context: int
    num_seqs: int
    plain_sec: float
    sec_per_token: float

    def plain_sec_of(self, tokens: Number) -> Number:
        """What plain decoding takes for this step and the tokens beyond one per sequence."""
        return self.plain_sec + (tokens - self.batch) * self.sec_per_token


@dataclass(frozen=True, slots=True)
class Bet:
    """Draft sizes for a batch, and what to expect of them.

    Attributes:
        sizes: [B] nodes.
        tokens, sec: expected of the step, in case anything is drafted at all.
        speedup: over plain decoding.
        share: of the sequences, those expected to have a draft.
    """

    sizes: NDArray[np.int64]
    tokens: float
    sec: float
    speedup: float
    share: float


@dataclass(slots=True)
class Standing:
    """The last decision: sizes for sequences in a step of so many rows, and why.

    Attributes:
        num_steps: for which it holds yet.
    """

    rows: int
    seq_ids: list[int]
    sizes: NDArray[np.int64]
    kind: str
    words: str | None
    num_steps: int = STANDS_FOR - 1


class AutoController:
    """Drafts where it pays, and no more than pays.

    Args:
        costs: of the target.
        max_tokens: the largest draft of a sequence.
    """

    def __init__(self, costs: CostModel, max_tokens: int):
        self.costs = costs
        self.max_tokens = max_tokens
        self.reasons = Reasons()
        self.debt_sec = 0.0
        self._draft_costs = DraftCosts()
        self._rates = DraftRates(max_tokens)
        self._is_on = False
        self._is_probe = False
        self._cool_down = FIRST_COOL_DOWN
        self._steps_to_probe = 0
        self._drafting: set[int] = set()  # sequences that had a budget in the last step
        self._standing: Standing | None = None

    def budgets(self, plan: Plan) -> list[int]:
        """Nodes allowed for each planned sequence."""
        budgets = [0] * len(plan.seqs)
        ready = [i for i in range(len(plan.seqs)) if plan.reaches_end(i)]
        self._is_probe = False
        if ready and self.max_tokens:
            seqs, load = [plan.seqs[i] for i in ready], self._load(plan)
            sizes = self._standing_sizes(load, seqs)
            if sizes is None:
                sizes = self._sizes(load, seqs)
            for i, size in zip(ready, sizes, strict=True):
                budgets[i] = int(size)
        return budgets

    def observe(self, result: "StepResult") -> None:
        """Learn what drafting, the pass and the drafts came to."""
        load = self._load(result.plan)
        num_rows = load.rows + sum(map(len, result.drafts))
        draft_sec = self._observe_drafting(result, load)
        target_sec = result.total_sec - draft_sec
        lost_sec = draft_sec
        if num_rows > load.rows:
            tokens = sum(1 + len(verdict.path) for verdict in result.verdicts if verdict)
            expected = self.costs.sec(num_rows, load.context, load.num_seqs)
            # A pass over long prompts is known too badly to be compared with one of few rows less.
            is_known = load.rows <= self.costs.max_rows
            pass_sec = min(target_sec, LARGEST_SURPRISE * expected) if is_known else expected
            lost_sec += pass_sec - load.plain_sec_of(tokens)
        self._book(lost_sec, load)
        self.costs.observe(num_rows, load.context, load.num_seqs, target_sec)
        for seq, budget, draft, verdict in zip(
            result.plan.seqs, result.budgets, result.drafts, result.verdicts, strict=True
        ):
            if verdict is not None:
                self._rates.observe(seq.seq_id, budget, draft, verdict)
        if num_rows > load.rows and self._standing is not None:
            steps = min(self._standing.num_steps, DRAFTING_STANDS_FOR - 1)
            self._standing.num_steps = steps
        if any(result.budgets) and num_rows == load.rows:
            self.reasons.correct("off: lookup found nothing")
        elif self._is_probe and num_rows > load.rows:
            self._judge_probe(lost_sec, load)

    def forget(self, seq_id: int) -> None:
        self._rates.forget(seq_id)

    # -----------------------------------------------------------------------------------------
    # Deciding

    def _load(self, plan: Plan) -> Load:
        batch = sum(map(plan.reaches_end, range(len(plan.seqs))))
        rows, num_seqs = sum(plan.num_tokens), len(plan.seqs)
        context = sum(seq.num_computed for seq in plan.seqs)
        plain_sec, decode_sec = (
            self.costs.sec(count, context, num_seqs) for count in (rows, max(batch, 1))
        )
        return Load(batch, rows, context, num_seqs, plain_sec, decode_sec / max(batch, 1))

    def _standing_sizes(self, load: Load, seqs: Seq[Sequence]) -> NDArray[np.int64] | None:
        """The last decision, where it stands for this step."""
        standing = self._standing
        if standing is None or standing.num_steps == 0:
            return None
        if standing.rows != load.rows:
            return None
        if standing.seq_ids != [seq.seq_id for seq in seqs]:
            return None
        if standing.sizes.any() and not self._can_afford(0.0, load):
            return None
        standing.num_steps -= 1
        self._steps_to_probe = max(self._steps_to_probe - 1, 0)
        self.reasons.give(standing.kind, standing.words)
        return np.minimum(standing.sizes, self._most(seqs))

    def _most(self, seqs: Seq[Sequence]) -> NDArray[np.int64]:
        """The largest drafts that sequences have room for and want."""
        rooms = [min(seq.params.draft_limit(self.max_tokens), seq.room - 1) for seq in seqs]
        return np.maximum(rooms, 0)

    def _sizes(self, load: Load, seqs: Seq[Sequence]) -> NDArray[np.int64]:
        """Choose sizes for the sequences that get a token, and say why."""
        nothing = np.zeros(len(seqs), dtype=np.int64)
        room = self._most(seqs)
        if room.max() == 0:
            self.reasons.give("off: no sequence can have a draft")
            return nothing
        if load.rows == load.batch and not self.costs.is_fresh(load.batch, PLAIN_MAX_AGE):
            self.reasons.give("off: measuring plain decoding")
            return nothing
        seq_ids = [seq.seq_id for seq in seqs]
        accepted, offered = self._rates.accepted(seq_ids), self._rates.offered(seq_ids)
        best = self._best(load, accepted, offered, room)
        needed = 1.0 if self._is_on else START_SPEEDUP
        self._is_on = best.speedup > needed + FEW_DRAFT_SPEEDUP * (1 - best.share)
        if self._is_on and not self._pays_to_catch_up(best, load, seqs):
            self._is_on = False
            self._draft_costs.fade_restart()
            return self._decide(load, seq_ids, nothing, "off: catching up would not pay")
        if self._is_on and not self._can_afford(0.0, load):
            return self._decide(load, seq_ids, nothing, "off: paying back lost time")
        if self._is_on:
            return self._decide(
                load,
                seq_ids,
                best.sizes,
                "draft",
                f"draft {best.sizes.mean():.3g}: expects {best.tokens / load.batch:.1f} tokens "
                f"for {best.sec / load.plain_sec:.1f} plain steps",
            )
        if self._probe_is_due(load, room):
            self._is_probe = True
            self.reasons.give("probing")
            hopeful = np.argsort(-np.where(room > 0, accepted[:, 0], -1.0), kind="stable")
            probed = hopeful[: max(len(seqs) // PROBED_OF, 1)]
            return np.where(np.isin(np.arange(len(seqs)), probed) & (room > 0), 1, 0)
        break_even = self._break_even(load, accepted.mean(0))
        if break_even:
            kind = "off: batch is past break-even"
            words = f"off: batch {load.batch} is past break-even {break_even}"
        else:
            kind = "off: acceptance does not pay"
            words = f"off: acceptance {accepted[:, 0].mean():.2f} does not pay"
        return self._decide(load, seq_ids, nothing, kind, words)

    def _pays_to_catch_up(self, bet: Bet, load: Load, seqs: Seq[Sequence]) -> bool:
        """Whether the sequences last long enough to earn what beginning to draft for them takes."""
        drafting = [seq for seq, size in zip(seqs, bet.sizes, strict=True) if size]
        if all(seq.seq_id in self._drafting for seq in drafting):
            return True
        steps = max(seq.room for seq in drafting) * load.batch / bet.tokens
        saved_sec = steps * (load.plain_sec_of(bet.tokens) - bet.sec)
        return saved_sec > self._draft_costs.restart_sec

    def _decide(
        self,
        load: Load,
        seq_ids: list[int],
        sizes: NDArray[np.int64],
        kind: str,
        words: str | None = None,
    ) -> NDArray[np.int64]:
        """A decision that stands for a while."""
        self.reasons.give(kind, words)
        self._standing = Standing(load.rows, seq_ids, sizes, kind, words)
        return sizes

    def _best(
        self,
        load: Load,
        accepted: Floats,  # [B, N] chance of each node to be accepted once offered
        offered: Floats,  # [B, N] chance of each node to be offered
        room: NDArray[np.int64],  # [B] most nodes
    ) -> Bet:
        """The best of all sets reached by admitting nodes in order of their chance."""
        gains = _non_increasing(accepted)
        allowed = np.arange(self.max_tokens) < room[:, None]
        order = np.argsort(-gains[allowed], kind="stable")  # keeps a sequence's nodes in order
        seq, node = (index[order] for index in np.nonzero(allowed))
        gain, offer = gains[seq, node], offered[seq, node]
        opens = node == 0  # the first node of its sequence
        # Where nobody is offered anything the step is plain and nothing is lost, so what counts
        # is the steps in which somebody is.
        anybody = 1.0 - np.cumprod(np.where(opens, 1.0 - offer, 1.0))
        tokens = load.batch + np.cumsum(gain * offer) / anybody
        rows = load.rows + np.cumsum(offer) / anybody
        levels = 1 + np.array(trees.depths(self._rates.parents))
        sec = self.costs.predict(rows, load.context, load.num_seqs) + self._draft_costs.predict(
            np.cumsum(opens), np.maximum.accumulate(levels[node]), DRAFT_GUESS * load.plain_sec
        )
        speedup = load.plain_sec_of(tokens) / sec
        best = int(np.argmax(speedup))
        sizes = np.bincount(seq[: best + 1], minlength=len(room))
        share = float((offer * opens)[: best + 1].sum() / anybody[best] / load.batch)
        return Bet(sizes, float(tokens[best]), float(sec[best]), float(speedup[best]), share)

    def _break_even(self, load: Load, accepted: Floats) -> int:
        """The largest batch below this one at which such drafts would pay; 0 if none."""
        batch = np.arange(1, load.batch)[:, None]
        size = np.arange(1, self.max_tokens + 1)
        context = batch * (load.context / load.num_seqs)
        plain = self.costs.predict(batch, context, batch)
        sec = self.costs.predict(batch * (1 + size), context, batch)
        sec = sec + self._draft_costs.predict(batch, size, DRAFT_GUESS * load.plain_sec)
        speedup = (1.0 + np.cumsum(accepted)) * plain / sec
        return int(np.max(batch[:, 0], where=(speedup > START_SPEEDUP).any(1), initial=0))

    # -----------------------------------------------------------------------------------------
    # Probing, and the ledger

    def _probe_is_due(self, load: Load, room: NDArray[np.int64]) -> bool:
        """Whether to try one token although it is not expected to pay."""
        if self._steps_to_probe > 0:
            self._steps_to_probe -= 1
            return False
        certain = np.ones((len(room), self.max_tokens))
        return (
            self._can_afford(self._probe_sec(load), load)
            and self._best(load, certain, certain, room).speedup > START_SPEEDUP
        )

    def _probe_sec(self, load: Load) -> float:
        """What a probe costs if it fails."""
        probed = max(load.batch // PROBED_OF, 1)
        sec = self.costs.sec(load.rows + probed, load.context, load.num_seqs)
        draft = float(self._draft_costs.predict(probed, 1, DRAFT_GUESS * load.plain_sec))
        return sec - load.plain_sec + draft + self._draft_costs.restart_sec

    def _judge_probe(self, lost_sec: float, load: Load) -> None:
        """After a probe that paid for itself look again at once; else later and later."""
        if lost_sec <= 0:
            self._cool_down, self._steps_to_probe = FIRST_COOL_DOWN, 0
            return
        self._steps_to_probe = self._cool_down
        affordable = self._probe_sec(load) / (PROBE_SHARE * load.plain_sec)
        self._cool_down = max(min(2 * self._cool_down, int(affordable)), FIRST_COOL_DOWN)

    def _can_afford(self, sec: float, load: Load) -> bool:
        return self.debt_sec + sec <= self._max_debt_sec(load)

    def _max_debt_sec(self, load: Load) -> float:
        # A drafter that must catch up first is an investment, and one such may be owed.
        return MAX_DEBT_STEPS * load.plain_sec + self._draft_costs.restart_sec

    def _book(self, lost_sec: float, load: Load) -> None:
        """Enter a step's loss or gain. Gains are kept only as far as debts may go."""
        debt = self.debt_sec + lost_sec - FORGIVEN * load.plain_sec
        self.debt_sec = max(debt, -self._max_debt_sec(load))

    def _observe_drafting(self, result: "StepResult", load: Load) -> float:
        """What drafting took beyond planning, learnt on the way."""
        drafting = {
            seq.seq_id
            for seq, budget in zip(result.plan.seqs, result.budgets, strict=True)
            if budget
        }
        is_restart = not drafting <= self._drafting
        self._drafting = drafting
        if not drafting:
            self._draft_costs.observe_idle(result.draft_sec)
            return 0.0
        sec = max(result.draft_sec - self._draft_costs.idle_sec, 0.0)
        levels = max(1 + max(trees.depths(d.parents), default=-1) for d in result.drafts)
        if levels:
            self._draft_costs.observe(
                sum(map(bool, result.drafts)),
                levels,
                sec,
                is_restart=is_restart,
                guess_sec=DRAFT_GUESS * load.plain_sec,
            )
        return sec


def _non_increasing(gains: Floats) -> Floats:
    """Average nodes with those after them that are worth more: they are only had together.

    Chains need none of it; in a tree a good child may come after a poor sibling.
    """
    if (np.diff(gains, axis=1) <= 0).all():
        return gains
    smooth = np.empty_like(gains)
    for row, out in zip(gains, smooth, strict=True):
        runs: list[tuple[float, int]] = []  # (mean, length), means falling
        for gain in row:
            mean, length = float(gain), 1
            while runs and runs[-1][0] < mean:
                before, count = runs.pop()
                mean = (before * count + mean * length) / (count + length)
                length += count
            runs.append((mean, length))
        out[:] = np.repeat([mean for mean, _ in runs], [length for _, length in runs])
    return smooth
