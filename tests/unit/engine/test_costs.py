"""Step times: what is read between measurements, what is learnt from real steps, and the file."""

import itertools
import json
import os
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch

from slipstream.check.tiny import tiny_model
from slipstream.engine import calibration
from slipstream.engine.calibration import cache_key, calibrated, measure, read_table, write_table
from slipstream.engine.costs import CostModel, CostTable, DraftCosts
from slipstream.kv.cache import KVCache
from slipstream.models.runner import ModelRunner

TABLE = CostTable(rows=(1, 2, 4, 8, 16), sec=(1.0, 1.1, 1.3, 1.3, 3.0))


# ---------------------------------------------------------------------------------------------
# The target


def test_between_measurements_and_past_them():
    costs = CostModel(TABLE)
    assert costs.predict([1, 3, 12, 20]) == pytest.approx([1.0, 1.2, 2.15, 3.85])
    assert (np.diff(costs.predict(np.arange(1, 200))) >= 0).all(), "more rows took less time"
    assert CostModel(CostTable((1,), (2.0,))).predict(50) == 2.0


def test_context_is_read_once_and_attended_to_by_each_row():
    costs = CostModel(CostTable((1, 8), (1.0, 1.0), sec_per_key=0.01, sec_per_pair=0.001))
    assert costs.predict(1, context=100) == pytest.approx(1 + 1 + 0.1)
    assert costs.predict(8, context=100) == pytest.approx(1 + 1 + 0.8)
    # The same keys spread over 8 sequences: each is attended to by one row only.
    assert costs.predict(8, context=100, num_seqs=8) == pytest.approx(1 + 1 + 0.1)


def test_real_steps_correct_the_table():
    costs = CostModel(TABLE)
    for _ in range(60):
        costs.observe(1, 0, 1, sec=1.5)
        costs.observe(8, 0, 1, sec=1.4)
    assert costs.predict([1, 8]) == pytest.approx([1.5, 1.5], rel=0.05)  # 8 rows >= 1 row
    assert 1.4 < costs.predict(4) < 2.0, "rows never seen take after their neighbours"


def test_what_slows_all_steps_slows_those_not_seen():
    costs = CostModel(TABLE)
    for _ in range(30):
        costs.observe(1, 0, 1, sec=1.0)
        costs.observe(8, 0, 1, sec=1.3)
    before = costs.predict(1)
    for _ in range(12):
        costs.observe(8, 0, 1, sec=2.6)
    assert costs.predict(8) == pytest.approx(2.6, rel=0.05)
    assert costs.predict(1) / before > 1.4
    for _ in range(12):
        costs.observe(8, 0, 1, sec=1.3)
    assert costs.predict(1) == pytest.approx(before, rel=0.05), "a passing load left a mark"


def test_rows_long_unseen_are_learnt_anew_at_once():
    costs = CostModel(TABLE)
    costs.observe(1, 0, 1, sec=1.0)
    costs.observe(1, 0, 1, sec=1.0)
    for _ in range(300):
        costs.observe(8, 0, 1, sec=1.3)
    costs.observe(1, 0, 1, sec=0.8)
    costs.observe(1, 0, 1, sec=0.8)
    assert costs.predict(1) < 0.9


def test_a_hiccup_is_not_a_cost():
    costs = CostModel(TABLE)
    for _ in range(20):
        costs.observe(1, 0, 1, sec=1.0)
    costs.observe(1, 0, 1, sec=1000.0)
    assert costs.predict(1) < 2.0


def test_a_hiccup_in_the_first_step_of_a_size_is_not_believed_for_ever():
    """While nobody tries that size again, and plain steps go on as ever."""
    costs = CostModel(TABLE)
    for _ in range(20):
        costs.observe(1, 0, 1, sec=1.0)
    costs.observe(4, 0, 1, sec=9.0)
    assert costs.predict(4) / costs.predict(1) > 2
    for _ in range(150):
        costs.observe(1, 0, 1, sec=1.0)
    assert costs.predict([1, 4]) == pytest.approx([1.0, 1.3], rel=0.05)


def test_what_smaller_steps_cost_does_not_fade():
    costs = CostModel(TABLE)
    for _ in range(30):
        costs.observe(1, 0, 1, sec=1.2)
        costs.observe(4, 0, 1, sec=1.3)
    for _ in range(100):
        costs.observe(4, 0, 1, sec=1.3)
    assert costs.predict([1, 4]) == pytest.approx([1.2, 1.3], rel=0.05)


def test_a_hiccup_in_the_first_deep_draft_is_not_believed_for_ever():
    costs = DraftCosts()
    for depth, sec in ((1, 0.1), (4, 9.0)):
        costs.observe(1, depth, sec, is_restart=False, guess_sec=0.1)
    assert costs.predict(1, 4, 0.1) == 9.0
    for _ in range(400):
        costs.observe(1, 1, 0.1, is_restart=False, guess_sec=0.1)
    assert costs.predict(1, [1, 4], 0.1) == pytest.approx([0.1, 0.4])
    # Drafts that cost the same at any depth, as lookup's do, stay cheap.
    costs.observe(1, 8, 0.1, is_restart=False, guess_sec=0.1)
    costs.observe(1, 1, 0.1, is_restart=False, guess_sec=0.1)
    assert costs.predict(1, 8, 0.1) == pytest.approx(0.1)


def test_long_prompts_teach_nothing():
    costs = CostModel(TABLE)
    before = costs.predict(np.arange(1, 64))
    costs.observe(costs.max_rows + 1, 0, 1, sec=1e6)
    assert (costs.predict(np.arange(1, 64)) == before).all()


def test_fresh_is_seen_twice_and_lately():
    costs = CostModel(TABLE)
    costs.observe(4, 0, 1, sec=1.3)
    assert not costs.is_fresh(4, 10)
    costs.observe(4, 0, 1, sec=1.3)
    assert costs.is_fresh(4, 10) and not costs.is_fresh(1, 10)
    for _ in range(11):
        costs.observe(1, 0, 1, sec=1.0)
    assert not costs.is_fresh(4, 10) and costs.is_fresh(1, 10)


# ---------------------------------------------------------------------------------------------
# Drafters


def test_drafting_is_guessed_until_measured():
    costs = DraftCosts()
    assert costs.predict(1, [1, 4], guess_sec=0.5).tolist() == [0.5, 2.0]
    costs.observe(1, 4, 1.0, is_restart=False, guess_sec=0.5)
    assert costs.predict(1, [1, 4, 8], guess_sec=0.5) == pytest.approx([0.25, 1.0, 2.0])
    costs.observe(1, 1, 0.6, is_restart=False, guess_sec=0.5)
    assert costs.predict(1, [1, 2, 4], guess_sec=0.5) == pytest.approx([0.6, 0.6 + 0.4 / 3, 1.0])


def test_drafting_for_many_is_another_matter():
    costs = DraftCosts()
    costs.observe(1, 2, 1.0, is_restart=False, guess_sec=0.5)
    costs.observe(16, 2, 3.0, is_restart=False, guess_sec=0.5)
    assert costs.predict([1, 3, 5, 16, 64], [2] * 5, 0.5).tolist() == [1.0, 1.0, 1.0, 3.0, 3.0]


def test_catching_up_is_not_the_price_of_a_draft():
    costs = DraftCosts()
    costs.observe(1, 2, 9.0, is_restart=True, guess_sec=0.5)
    assert costs.predict(1, 2, 0.5) == 1.0
    assert costs.restart_sec == 8.0
    costs.observe(1, 2, 1.0, is_restart=True, guess_sec=0.5)
    assert 0 < costs.restart_sec < 8.0


# ---------------------------------------------------------------------------------------------
# Measuring, and the file


@pytest.fixture
def runner() -> ModelRunner:
    model = tiny_model("llama", dtype=torch.float32)
    cache = KVCache.for_model(
        model.config, num_blocks=16, block_size=16, dtype=torch.float32, device="cpu"
    )
    return ModelRunner(model, cache)


def ticking(*steps: float) -> Callable[[], float]:
    """A clock that advances by each of `steps` in turn, over and over, whenever it is read."""
    return partial(next, itertools.accumulate(itertools.cycle(steps)))


def test_measures_every_size(runner):
    table = measure(runner, ticking(1e-3))
    assert table.rows == (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
    assert table.sec == pytest.approx([1e-3] * 14)


def test_a_small_pool_measures_what_it_can():
    model = tiny_model("llama", dtype=torch.float32)
    cache = KVCache.for_model(
        model.config, num_blocks=3, block_size=8, dtype=torch.float32, device="cpu"
    )
    table = measure(ModelRunner(model, cache), ticking(1e-3))
    assert table.rows == (1, 2, 3, 4, 6, 8)
    assert table.sec_per_key == table.sec_per_pair == 0.0


def test_a_slow_model_measures_the_coarsest_sizes(runner):
    table = measure(runner, ticking(3600))
    assert table == CostTable((1, 8, 64), (3600.0, 3600.0, 3600.0))


def test_interrupted_passes_are_not_believed(runner):
    """Each size has several turns, so that one in seven being a hundred times slower hurts none."""
    assert max(measure(runner, ticking(*[1e-3] * 6, 0.1)).sec) < 0.01


@pytest.fixture
def measured(monkeypatch) -> list[CostTable]:
    """What was really measured, in place of measuring."""
    made: list[CostTable] = []

    def fake(runner: ModelRunner) -> CostTable:
        made.append(CostTable((1, 2), (1.0 + len(made), 9.0)))
        return made[-1]

    monkeypatch.setattr(calibration, "measure", fake)
    return made


def test_measured_once_per_machine(runner, measured, tmp_path, monkeypatch):
    first = calibrated(runner, tmp_path / "costs")
    assert calibrated(runner, tmp_path / "costs") == first == measured[0]
    assert len(measured) == 1
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert calibrated(runner, tmp_path / "costs") == measured[1], "other threads, other times"


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"key": 1}',
        '{"table": []}',
        '{"table": {"rows": [1]}}',
        '{"table": {"rows": [1], "sec": [NaN], "sec_per_key": 0, "sec_per_pair": 0}}',
    ],
)
def test_a_damaged_file_is_measured_again(runner, measured, tmp_path, content):
    calibrated(runner, tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_text(content)
    assert calibrated(runner, tmp_path) == measured[1]
    assert read_table(path, cache_key(runner)) == measured[1]


@pytest.mark.parametrize("sec", [[1.0], [-2.0, 1.0], [1.0, 0.9], [1.0, float("inf")], ["a", "b"]])
def test_a_table_that_makes_no_sense_is_not_believed(tmp_path, sec):
    path = tmp_path / "table.json"
    write_table(path, {"k": 1}, TABLE)
    content = json.loads(path.read_text())
    assert read_table(path, {"k": 1}) == TABLE
    assert read_table(path, {"k": 2}) is None
    content["table"] |= {"rows": [1, 2], "sec": sec}
    path.write_text(json.dumps(content))
    assert read_table(path, {"k": 1}) is None


def test_a_disk_that_refuses_fails_nothing(runner, measured, tmp_path):
    (tmp_path / "costs").write_text("a file where the folder should be")
    assert calibrated(runner, tmp_path / "costs") == measured[0]
    assert os.listdir(tmp_path) == ["costs"]


def test_drafting_that_seemed_free_can_turn_out_not_to_be():
    costs = DraftCosts()
    for sec in (0.0, *[0.002] * 40):
        costs.observe(1, 1, sec, is_restart=False, guess_sec=0.001)
    assert costs.predict(1, 1, 0.001) == pytest.approx(0.002, rel=0.01)


def test_one_step_is_predicted_as_many_are():
    """Between, at, below and beyond the numbers of rows that were measured; learnt ones too."""
    costs = CostModel(CostTable((1, 2, 4, 8), (1.0, 1.5, 3.0, 3.5), 0.01, 0.002))
    for rows, sec in ((1, 3.0), (6, 9.0), (2, 1.0), (30, 50.0)):
        costs.observe(rows, 5, 2, sec)
        every = [1, 2, 3, 5, 8, 9, 20, 32, 33, 100]
        for context, num_seqs in ((0, 1), (70, 3)):
            expected = costs.predict(every, context, num_seqs)
            found = [costs.sec(count, context, num_seqs) for count in every]
            np.testing.assert_allclose(found, expected, rtol=1e-12)
