"""What a step costs: measured once, then corrected by every step that runs.

    target    T(rows, context) = speed * (offset(rows) * base(rows) + context * attention(rows))
    drafter   seconds by (sequences drafted for, depth of the drafts)

`base` and `attention` are measured at load (`engine.calibration`), alone and without sampling.
Real steps bring sampling, bookkeeping, other batch shapes and a machine that others use too. What
slows all steps alike goes into `speed`, quickly; what is peculiar to a number of rows into its
`offset`, slowly. So plain decoding's estimate stays right while only speculative steps run.

What is thought dear is not tried, and what is not tried is not measured: a hiccup in the first
step of some size would be believed for ever. So what larger steps and deeper drafts cost beyond
those that run fades, until they are worth another look.

No clock is read here: seconds come from whoever measured them.
"""

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

# A single measurement moves an estimate by at most this factor: hiccups are not costs.
LARGEST_SURPRISE = 3.0
# Shares of a surprise taken over: by the speed of everything, by the offset of the rows at hand,
# and by that offset when it has not been seen for a long time.
SPEED_SHARE, OFFSET_SHARE, STALE_OFFSET_SHARE = 0.2, 0.1, 0.5
STALE_STEPS = 64
# What is left, with each step, of what larger ones cost beyond it.
FADE = 0.99
# Steps of up to so many times the most rows measured at load are guessed, and learnt from. Larger
# ones, of long prompts, teach nothing.
STRETCH = 4


@dataclass(frozen=True, slots=True)
class CostTable:
    """A target step as measured at load.

    Attributes:
        rows: tokens computed in a pass, ascending.
        sec: seconds of such a pass over a short context, for each; never falling.
        sec_per_key: what each further token of context adds by being read.
        sec_per_pair: what it adds for each row that attends to it.
    """

    rows: tuple[int, ...]
    sec: tuple[float, ...]
    sec_per_key: float = 0.0
    sec_per_pair: float = 0.0


class CostModel:
    """Predicts seconds of a target step.

    Args:
        table: measured at load.

    Attributes:
        max_rows: steps of more rows teach nothing.
    """

    def __init__(self, table: CostTable):
        assert len(table.rows) == len(table.sec) > 0, "one time per number of rows"
        assert sorted(set(table.rows)) == list(table.rows), "rows ascend"
        assert sorted(table.sec) == list(table.sec), "more rows never take less time"
        self.table = table
        rows, sec = list(table.rows), list(table.sec)
        per_row = (sec[-1] - sec[-2]) / (rows[-1] - rows[-2]) if len(rows) > 1 else 0.0
        sec.append(sec[-1] + per_row * (STRETCH - 1) * rows[-1])
        rows.append(STRETCH * rows[-1])
        self.max_rows = rows[-1]
        self._rows = rows
        self._base = sec
        self._speed = 1.0
        self._offset = [1.0] * len(rows)
        self._num_seen = [0] * len(rows)
        self._last_seen = [0] * len(rows)
        self._num_steps = 0
        self._known = sec  # with offsets, made anew when they change

    def predict(self, rows: ArrayLike, context: ArrayLike = 0, num_seqs: ArrayLike = 1) -> Floats:
        """Seconds of a step, elementwise.

        Args:
            rows: tokens computed; fractions are expected values.
            context: tokens of all sequences together that are attended to.
            num_seqs: sequences among which rows and context are divided.
        """
        rows = np.asarray(rows, dtype=np.float64)
        sec = np.interp(rows, self._rows, self._known)
        sec = sec + self._slope(len(self._rows) - 2) * np.maximum(rows - self._rows[-1], 0.0)
        rows_per_seq = rows / np.maximum(num_seqs, 1)
        per_key = self.table.sec_per_key + self.table.sec_per_pair * rows_per_seq
        return self._speed * (sec + np.asarray(context) * per_key)

    def sec(self, rows: int, context: int = 0, num_seqs: int = 1) -> float:
        """`predict` of one step, without the cost of arrays: every step asks."""
        left = min(max(bisect_right(self._rows, rows) - 1, 0), len(self._rows) - 2)
        sec = self._known[left] + self._slope(left) * max(rows - self._rows[left], 0)
        per_key = self.table.sec_per_key + self.table.sec_per_pair * rows / max(num_seqs, 1)
        return self._speed * (sec + context * per_key)

    def observe(self, rows: int, context: int, num_seqs: int, sec: float) -> None:
        """Learn from a step that took `sec`."""
        self._num_steps += 1
        if rows > self.max_rows:
            return
        surprise = sec / self.sec(rows, context, num_seqs)
        surprise = min(max(surprise, 1 / LARGEST_SURPRISE), LARGEST_SURPRISE) - 1
        here = self._nearest(rows)
        staleness = 1.0
        if self._num_seen[here]:
            staleness -= 0.5 ** ((self._num_steps - self._last_seen[here]) / STALE_STEPS)
        share = OFFSET_SHARE + staleness * (STALE_OFFSET_SHARE - OFFSET_SHARE)
        before = self._offset[here] if self._num_seen[here] else self._offsets()[here]
        self._offset[here] = before * (1 + share * surprise)
        for larger in range(here + 1, len(self._offset)):
            if self._num_seen[larger]:
                self._offset[larger] = _faded(self._offset[larger], self._offset[here])
        self._speed *= 1 + SPEED_SHARE * surprise
        self._num_seen[here] += 1
        self._last_seen[here] = self._num_steps
        known = [offset * sec for offset, sec in zip(self._offsets(), self._base, strict=True)]
        self._known = list(accumulate(known, max))

    def is_fresh(self, rows: int, max_age: int) -> bool:
        """Whether real steps of about so many rows ran twice, and lately."""
        here = self._nearest(rows)
        age = self._num_steps - self._last_seen[here]
        return self._num_seen[here] >= 2 and age <= max_age

    def _slope(self, left: int) -> float:
        """Seconds per row from one number of rows that was measured to the next."""
        known, rows = self._known, self._rows
        return (known[left + 1] - known[left]) / (rows[left + 1] - rows[left])

    def _nearest(self, rows: int) -> int:
        """The row count measured that is the smallest factor away."""
        rows = max(rows, 1)
        right = min(bisect_right(self._rows, rows), len(self._rows) - 1)
        left = max(right - 1, 0)
        return left if rows * rows <= self._rows[left] * self._rows[right] else right

    def _offsets(self) -> list[float]:
        """Offsets of all rows; those never seen take after their neighbours."""
        seen = [i for i, count in enumerate(self._num_seen) if count]
        if not seen:
            return self._offset
        every = range(len(self._offset))
        return np.interp(every, seen, [self._offset[i] for i in seen]).tolist()


class DraftCosts:
    """Seconds of drafting, learnt from steps that drafted.

    The first draft after a pause is a matter of its own: a draft model then catches up with
    everything it missed, up to a whole prompt.

    Attributes:
        idle_sec: what the time before the pass comes to when nothing is drafted: planning.
        restart_sec: what catching up added, rather too much than too little.
    """

    SHARE = 0.2  # of a surprise taken over
    RESTART_FADE = 0.995  # what is left of a restart's cost each time that it forbids one

    def __init__(self) -> None:
        self.idle_sec = 0.0
        self.restart_sec = 0.0
        self._has_idled = False
        self._sec: dict[int, dict[int, float]] = {}  # bucket of sequences -> depth -> seconds

    def predict(self, num_seqs: ArrayLike, depth: ArrayLike, guess_sec: float) -> Floats:
        """Seconds of drafting to `depth` for `num_seqs` sequences, elementwise.

        Args:
            guess_sec: of one level, before anything was measured.
        """
        buckets, depth = np.broadcast_arrays(_bucket(num_seqs), np.asarray(depth, np.float64))
        sec = np.empty(depth.shape)
        for bucket in np.unique(buckets):
            mine = buckets == bucket
            sec[mine] = self._along(int(bucket), depth[mine], guess_sec)
        return sec

    def observe_idle(self, sec: float) -> None:
        """Learn from a step in which nobody was to draft."""
        self.idle_sec += (self.SHARE if self._has_idled else 1.0) * (sec - self.idle_sec)
        self._has_idled = True

    def observe(
        self, num_seqs: int, depth: int, sec: float, *, is_restart: bool, guess_sec: float
    ) -> None:
        """Learn from drafts to `depth` for `num_seqs` sequences, planning not counted.

        Args:
            is_restart: some of them were not drafted for in the step before.
            guess_sec: as for `predict`.
        """
        expected = float(self.predict(num_seqs, depth, guess_sec))
        if is_restart:
            # Never less than the last one was: what it may come to is budgeted for.
            added = max(sec - expected, 0.0)
            self.restart_sec = max(
                added, self.restart_sec + self.SHARE * (added - self.restart_sec)
            )
            return
        by_depth = self._sec.setdefault(int(_bucket(num_seqs)), {})
        known = by_depth.get(depth)
        if known is None:
            by_depth[depth] = sec
        else:
            # Of what seemed to cost nothing any time would be a surprise.
            most = LARGEST_SURPRISE * max(known, guess_sec)
            by_depth[depth] += self.SHARE * (min(sec, most) - known)
        for deeper in by_depth:
            if deeper > depth:
                by_depth[deeper] = _faded(by_depth[deeper], by_depth[depth] * deeper / depth)

    def fade_restart(self) -> None:
        """Believe less in the cost of catching up, so that it is tried again some day."""
        self.restart_sec *= self.RESTART_FADE

    def _along(self, bucket: int, depth: Floats, guess_sec: float) -> Floats:
        """Through the depths measured for about so many sequences, and through 0 at depth 0."""
        if not self._sec:
            return guess_sec * depth
        nearest = min(self._sec, key=lambda known: abs(known - bucket))
        measured = sorted(self._sec[nearest].items())
        depths = np.array([0, *(d for d, _ in measured)], dtype=np.float64)
        secs = np.array([0.0, *(s for _, s in measured)])
        per_level = secs[-1] / depths[-1]
        return np.interp(depth, depths, secs) + per_level * np.maximum(depth - depths[-1], 0.0)


def _faded(cost: float, enough: float) -> float:
    """A cost that was not seen in this step: less of it, but no less than would be natural."""
    return max(FADE * cost, min(cost, enough))


def _bucket(num_seqs: ArrayLike) -> NDArray[np.int64]:
    """Powers of two: 1, 2, 3-5, 6-11, ..."""
    return np.rint(np.log2(np.maximum(num_seqs, 1))).astype(np.int64)
