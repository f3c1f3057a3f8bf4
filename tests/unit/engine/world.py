"""A machine on paper: steps take what a cost curve says, drafts come true as a process says.

Nothing is timed, so a controller can be run for thousands of steps and judged exactly.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from slipstream.core.draft import Draft, Verdict
from slipstream.core.params import SamplingParams
from slipstream.core.sequence import Sequence
from slipstream.engine.controller import Controller
from slipstream.engine.costs import CostTable
from slipstream.engine.scheduler import Plan
from slipstream.engine.step import StepResult
from slipstream.maths.noise import Key

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


def make_sequence(seq_id: int, max_tokens: int = 10**6) -> Sequence:
    """One that has its prompt computed and generates."""
    return Sequence(
        seq_id=seq_id,
        request_id=str(seq_id),
        index=0,
        tokens=[0] * 17,
        num_prompt=16,
        params=SamplingParams(),
        max_tokens=max_tokens,
        stop_ids=frozenset(),
        key=Key(seq_id),
        num_computed=16,
    )


def plan_of(seqs: list[Sequence]) -> Plan:
    return Plan(seqs, [seq.num_pending for seq in seqs])


@dataclass
class World:
    """Where a controller lives.

    Attributes:
        batch: sequences, always the same number.
        target_sec: seconds of a pass, by rows.
        acceptance: chance that a drafted token is accepted, by step.
        level_sec: seconds of drafting one token for everybody.
        offer: chance that the drafter has anything to offer a sequence.
        restart_sec: catching up, when a sequence was not drafted for in the step before.
        noise: times vary by up to this share.
        sec, plain_sec: time spent so far, and what plain decoding of the same tokens takes.
        budgets: of every step.
    """

    batch: int
    target_sec: Callable[[float], float]
    acceptance: Callable[[int], float]
    level_sec: float = 0.0
    offer: float = 1.0
    restart_sec: float = 0.0
    noise: float = 0.0
    overhead_sec: float = 0.0
    seed: int = 0
    sec: float = 0.0
    plain_sec: float = 0.0
    budgets: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.seqs = [make_sequence(i) for i in range(self.batch)]
        self.source = random.Random(self.seed)

    def table(self, error: float = 1.0) -> CostTable:
        """What measuring at load would find, wrong by a factor."""
        return CostTable(ROWS, tuple(error * self.target_sec(rows) for rows in ROWS))

    def run(self, controller: Controller, num_steps: int) -> None:
        for _ in range(num_steps):
            self._step(controller)

    @property
    def slowdown(self) -> float:
        """Time taken, in times of plain decoding."""
        return self.sec / self.plain_sec

    def _step(self, controller: Controller) -> None:
        plan = plan_of(self.seqs)
        budgets = controller.budgets(plan)
        chance = self.acceptance(len(self.budgets))
        last = self.budgets[-1] if self.budgets else [0] * self.batch
        drafts, verdicts = [], []
        for budget in budgets:
            size = budget if self.source.random() < self.offer else 0
            accepted = 0
            while accepted < size and self.source.random() < chance:
                accepted += 1
            drafts.append(Draft([0] * size, list(range(-1, size - 1))))
            verdicts.append(Verdict(list(range(accepted)), 0))
        is_restart = any(now and not before for now, before in zip(budgets, last, strict=True))
        draft_sec = self.level_sec * max(map(len, drafts)) + self.restart_sec * is_restart
        rows = self.batch + sum(map(len, drafts))
        jitter = 1 + self.noise * self.source.uniform(-1, 1)
        total_sec = draft_sec + jitter * (self.target_sec(rows) + self.overhead_sec)
        controller.observe(
            StepResult(
                plan,
                budgets=budgets,
                drafts=drafts,
                verdicts=list(verdicts),
                draft_sec=draft_sec,
                verify_sec=total_sec - draft_sec,
                total_sec=total_sec,
            )
        )
        self.budgets.append(budgets)
        tokens = sum(1 + len(verdict.path) for verdict in verdicts)
        self.sec += total_sec
        self.plain_sec += tokens * (self.target_sec(self.batch) + self.overhead_sec) / self.batch


def best_fixed_speedup(world: World, max_tokens: int) -> float:
    """Of the best draft size that is the same in every step, acceptance being what it is."""
    chance = world.acceptance(0)
    plain = world.target_sec(world.batch) + world.overhead_sec

    def speedup(size: int) -> float:
        # Each sequence is offered a draft or not; for a curve that is not straight the mean time
        # is that of the mean rows only for one sequence or for drafters that always offer.
        assert world.offer == 1.0 or world.batch == 1
        tokens = 1 + world.offer * sum(chance**i for i in range(1, size + 1))
        drafted = world.target_sec(world.batch * (1 + size)) + world.level_sec * size
        sec = world.offer * (drafted + world.overhead_sec) + (1 - world.offer) * plain
        return tokens * plain / sec

    return max(map(speedup, range(max_tokens + 1)))
