"""The statistics against scipy, published tables, and simulated samplers, right and wrong."""

import math
from collections.abc import Callable

import pytest
import scipy.stats
import torch
from torch import Tensor

from slipstream.maths.stats import (
    Outcome,
    chi_square_sf,
    chi_square_test,
    detectable_tv,
    expected_tv,
    g_test,
    holm,
    noncentral_chi_square_sf,
    normal_two_sided,
    pit_test,
    pool_bins,
    randomised_pit,
    required_noncentrality,
    samples_for_tv,
    total_variation,
    tv_threshold,
    two_sample_test,
    z_test,
)

P8 = torch.tensor([0.3, 0.2, 0.15, 0.1, 0.1, 0.08, 0.05, 0.02], dtype=torch.float64)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def sampled_counts(p: Tensor, num_samples: int, generator: torch.Generator) -> Tensor:
    u = torch.rand(num_samples, dtype=torch.float64, generator=generator)
    drawn = torch.searchsorted(p.cumsum(0), u).clamp(max=len(p) - 1)
    return drawn.bincount(minlength=len(p))


def hardest_error(p: Tensor, tv: float) -> Tensor:
    """Move `tv` between two halves of equal mass, in proportion to p."""
    half = torch.tensor([1, 1, 0, 0, 0, 0, 0, 0]) == 1  # 0.3 + 0.2
    return p * torch.where(half, 1 + 2 * tv, 1 - 2 * tv)


# ---------------------------------------------------------------------------------------------
# Laws of the statistics


@pytest.mark.parametrize("dof", [1, 7, 63, 511])
@pytest.mark.parametrize("x", [0.0, 0.5, 7.0, 40.0, 150.0, 900.0])
def test_chi_square_tail_equals_scipy(dof: int, x: float) -> None:
    assert chi_square_sf(x, dof) == pytest.approx(scipy.stats.chi2.sf(x, dof), rel=1e-8)


@pytest.mark.parametrize("dof", [1, 19, 300])
@pytest.mark.parametrize("noncentrality", [0.0, 0.7, 45.0, 1400.0])
@pytest.mark.parametrize("x", [0.1, 30.0, 400.0, 1900.0])
def test_noncentral_tail_equals_scipy(dof: int, noncentrality: float, x: float) -> None:
    law = scipy.stats.ncx2(dof, noncentrality) if noncentrality else scipy.stats.chi2(dof)
    assert noncentral_chi_square_sf(x, dof, noncentrality) == pytest.approx(
        law.sf(x), rel=1e-6, abs=1e-12
    )


def test_normal_tail_is_two_sided() -> None:
    assert normal_two_sided(0) == 1
    assert normal_two_sided(-1.959964) == pytest.approx(0.05, rel=1e-6)
    assert normal_two_sided(6.0) == pytest.approx(2 * scipy.stats.norm.sf(6.0), rel=1e-12)


# ---------------------------------------------------------------------------------------------
# Counts against a law


def test_pools_keep_large_bins_and_merge_the_tail() -> None:
    expected = torch.tensor([3.0, 50.0, 8.0, 0.0, 12.0, 4.0])
    pools = pool_bins(expected, 10.0)
    assert pools.tolist() == [2, 0, 2, 2, 1, 2]  # 50 | 12 | 8 + 4 + 3 + 0
    assert pool_bins(torch.tensor([4.0, 3.0]), 10.0).tolist() == [0, 0]
    assert pool_bins(torch.tensor([6.0, 6.0, 6.0, 6.0, 5.0]), 10.0).tolist() == [0, 0, 1, 1, 1]


def test_chi_square_and_g_equal_scipy() -> None:
    counts = sampled_counts(P8, 1000, seeded(0))
    for test, power in [(chi_square_test, "pearson"), (g_test, "log-likelihood")]:
        outcome = test(counts, P8)
        scipys = scipy.stats.power_divergence(counts, 1000 * P8, lambda_=power)
        assert outcome.statistic == pytest.approx(scipys.statistic)
        assert outcome.p_value == pytest.approx(scipys.pvalue)
        assert (outcome.dof, outcome.num_samples) == (7, 1000)


def test_two_samples_equal_scipys_contingency_table() -> None:
    a, b = sampled_counts(P8, 900, seeded(1)), sampled_counts(P8, 2100, seeded(2))
    outcome = two_sample_test(a, b)
    scipys = scipy.stats.chi2_contingency(torch.stack([a, b]).numpy(), correction=False)
    assert outcome.statistic == pytest.approx(scipys.statistic)
    assert outcome.p_value == pytest.approx(scipys.pvalue)
    assert (outcome.dof, outcome.num_samples) == (7, 900)


@pytest.mark.parametrize("test", [chi_square_test, g_test])
def test_rare_outcomes_are_pooled(test: Callable[..., Outcome]) -> None:
    p = torch.tensor([0.5, 0.44, 0.03, 0.02, 0.01])
    outcome = test(torch.tensor([50, 44, 3, 2, 1]), p)
    assert outcome.dof == 1  # the last three join 0.44
    assert 0 <= outcome.statistic < 1e-9
    assert outcome.p_value == pytest.approx(1)
    assert test(torch.tensor([50, 44, 3, 2, 1]), p, min_expected=0.9).dof == 4


def test_two_samples_are_pooled_by_the_smaller() -> None:
    a, b = torch.tensor([60, 35, 5]), torch.tensor([6000, 3500, 500])
    assert two_sample_test(a, b).dof == 1
    assert two_sample_test(10 * a, b).dof == 2


def test_one_impossible_hit_fails_at_once() -> None:
    p = torch.tensor([0.5, 0.5, 0.0])
    assert chi_square_test(torch.tensor([500_000, 500_000, 0]), p).p_value == 1
    for test in (chi_square_test, g_test):
        outcome = test(torch.tensor([500_000, 499_999, 1]), p)
        assert outcome.p_value == 0
        assert math.isinf(outcome.statistic)


def test_a_single_pool_is_no_evidence() -> None:
    outcome = chi_square_test(torch.tensor([100, 0]), torch.tensor([1.0, 0.0]))
    assert (outcome.dof, outcome.p_value) == (0, 1.0)
    assert two_sample_test(torch.tensor([3, 2]), torch.tensor([0, 5])).p_value == 1.0


def test_what_cannot_be_tested_is_refused() -> None:
    two = torch.tensor([0.5, 0.5])
    with pytest.raises(ValueError, match=r"shape \(3,\), p has \(2,\)"):
        chi_square_test(torch.ones(3), two)
    with pytest.raises(ValueError, match="p sums to 2"):
        g_test(torch.ones(2), 2 * two)
    with pytest.raises(ValueError, match="nothing to test"):
        chi_square_test(torch.zeros(2), two)
    with pytest.raises(ValueError, match="a sample is empty"):
        two_sample_test(torch.ones(2), torch.zeros(2))
    with pytest.raises(ValueError, match=r"shapes \(2,\) and \(3,\)"):
        two_sample_test(torch.ones(2), torch.ones(3))


def test_right_samplers_alarm_as_often_as_promised() -> None:
    """1000 right samplers at a = 0.05: 50 alarms, standard deviation 7."""
    generator = seeded(3)
    alarms = [0, 0, 0]
    for _ in range(1000):
        a, b = sampled_counts(P8, 600, generator), sampled_counts(P8, 600, generator)
        for i, outcome in enumerate([chi_square_test(a, P8), g_test(a, P8), two_sample_test(a, b)]):
            alarms[i] += outcome.p_value <= 0.05
    assert all(20 <= count <= 80 for count in alarms), alarms


@pytest.mark.parametrize(("alpha", "chi_square_excess"), [(1e-4, 2.9), (1e-6, 17.5)])
def test_g_keeps_its_promise_in_the_tail_where_chi_square_does_not(
    alpha: float, chi_square_excess: float
) -> None:
    """The exact false-alarm rate with one bin of 10 expected hits among 10,000 samples."""
    p, counts = torch.tensor([0.001, 0.999]), range(60)
    chance = scipy.stats.binom.pmf(counts, 10_000, 0.001)
    rate = {
        test: sum(
            chance[k] for k in counts if test(torch.tensor([k, 10_000 - k]), p).p_value <= alpha
        )
        for test in (chi_square_test, g_test)
    }
    assert rate[chi_square_test] / alpha == pytest.approx(chi_square_excess, rel=0.02)
    assert rate[g_test] < 1.3 * alpha


# ---------------------------------------------------------------------------------------------
# Samples with a law each


def test_z_adds_steps_of_different_laws() -> None:
    outcome = z_test(torch.tensor([0.5, 1.0, -0.25]), torch.tensor([0.25, 0.5, 0.25]))
    assert outcome.statistic == pytest.approx(1.25)
    assert outcome.p_value == pytest.approx(2 * scipy.stats.norm.sf(1.25))
    assert (outcome.dof, outcome.num_samples) == (1, 3)
    squared = chi_square_sf(outcome.statistic**2, outcome.dof)
    assert outcome.p_value == pytest.approx(squared)


def test_z_refuses_a_blind_test() -> None:
    with pytest.raises(ValueError, match="cannot see anything"):
        z_test(torch.zeros(5), torch.zeros(5))
    with pytest.raises(ValueError, match=r"shape \(5,\), variances \(1,\)"):
        z_test(torch.zeros(5), torch.ones(1))


def test_pit_lays_tokens_end_to_end_in_the_given_order() -> None:
    p = torch.tensor([0.1, 0.4, 0.2, 0.3]).expand(4, 4)
    order = torch.tensor([2.0, 1.0, 2.0, 0.0]).expand(4, 4)  # 3, 1, then 0 and 2 by index
    tokens = torch.arange(4)
    starts = randomised_pit(p, order, tokens, torch.zeros(4))
    assert starts.tolist() == pytest.approx([0.7, 0.3, 0.8, 0.0])
    middles = randomised_pit(p, order, tokens, torch.full((4,), 0.5))
    assert middles.tolist() == pytest.approx([0.75, 0.5, 0.9, 0.15])


def test_pit_of_a_right_sampler_passes_and_of_a_wrong_one_fails() -> None:
    generator = seeded(4)
    p, q = torch.rand(2, 20_000, 6, generator=generator).double().softmax(-1)
    v = torch.rand(20_000, generator=generator)
    tokens = torch.multinomial(p, 1, generator=generator).squeeze(-1)
    uniformity, independence = pit_test(randomised_pit(p, p / q, tokens, v))
    assert min(uniformity.p_value, independence.p_value) > 1e-3
    assert (uniformity.dof, independence.dof, uniformity.num_samples) == (19, 49, 20_000)

    leaning = torch.multinomial(0.8 * p + 0.2 * q, 1, generator=generator).squeeze(-1)
    uniformity, _ = pit_test(randomised_pit(p, p / q, leaning, v))
    assert uniformity.p_value < 1e-6


def test_pairs_see_dependence_that_single_numbers_do_not() -> None:
    fresh = torch.rand(5000, generator=seeded(5))
    repeated = torch.where(torch.rand(5000, generator=seeded(6)) < 0.1, fresh.roll(1), fresh)
    uniformity, independence = pit_test(repeated)
    assert uniformity.p_value > 1e-3
    assert independence.p_value < 1e-6


def test_overlapping_pairs_have_49_degrees_of_freedom() -> None:
    """The mean over 300 right tables is 49 with standard error 0.57, and not 56 or 63."""
    u = torch.rand(300, 2000, generator=seeded(7))
    statistics = [pit_test(row)[1].statistic for row in u]
    assert sum(statistics) / 300 == pytest.approx(49, abs=2.5)


def test_pit_of_one_repeated_number_fails_on_uniformity_alone() -> None:
    uniformity, independence = pit_test(torch.full((641,), 1.0))
    assert uniformity.p_value < 1e-100
    assert independence.p_value == 1
    with pytest.raises(ValueError, match="640 numbers are too few"):
        pit_test(torch.rand(640, generator=seeded(8)))


# ---------------------------------------------------------------------------------------------
# Many tests


def test_holm_by_hand() -> None:
    # 4 * .005, 3 * .01, 2 * .03, then 1 * .04 lifted to its predecessor.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


# ---------------------------------------------------------------------------------------------
# Total variation


def test_total_variation_is_the_mass_out_of_place() -> None:
    assert total_variation(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])) == 1
    assert total_variation(P8, hardest_error(P8, 0.01)) == pytest.approx(0.01)


def test_frequencies_of_a_right_sampler_show_the_expected_noise() -> None:
    generator = seeded(9)
    tvs = [total_variation(sampled_counts(P8, 2000, generator) / 2000, P8) for _ in range(400)]
    mean = sum(tvs) / len(tvs)
    assert mean == pytest.approx(expected_tv(P8, 2000), rel=0.06)
    assert mean < max(tvs) < tv_threshold(P8, 2000, 1e-6)


def test_noise_of_a_whole_vocabulary() -> None:
    uniform = torch.full((50_257,), 1 / 50_257, dtype=torch.float64)
    assert expected_tv(uniform, 10**6) == pytest.approx(0.089, abs=5e-4)
    assert expected_tv(uniform, 10**8) == pytest.approx(0.0089, abs=5e-5)


def test_threshold_is_mean_bound_plus_excess() -> None:
    coin = torch.tensor([0.5, 0.5])
    assert tv_threshold(coin, 100, 1.0) == pytest.approx(0.05)
    assert tv_threshold(coin, 100, math.exp(-2)) == pytest.approx(0.05 + 0.1)


# ---------------------------------------------------------------------------------------------
# Power

# dof: noncentrality at (1e-3, .9), (1e-3, .99), (1e-4, .9); samples in thousands for TV .01, .02,
# .05 at (1e-3, .99)
POWER = {
    1: (20.9, 31.6, 26.8, 79, 20, 3.2),
    7: (31.8, 45.4, 38.8, 113, 28, 4.5),
    15: (39.6, 55.2, 47.6, 138, 34, 5.5),
    19: (42.6, 59.0, 51.1, 147, 37, 5.9),
    31: (50.2, 68.5, 59.7, 171, 43, 6.9),
    49: (59.1, 79.7, 69.8, 199, 50, 8.0),
}


@pytest.mark.parametrize("dof", POWER)
def test_power_table(dof: int) -> None:
    *noncentralities, k01, k02, k05 = POWER[dof]
    settings = [(1e-3, 0.9), (1e-3, 0.99), (1e-4, 0.9)]
    for (alpha, power), noncentrality in zip(settings, noncentralities, strict=True):
        assert required_noncentrality(dof, alpha, power) == pytest.approx(noncentrality, abs=0.051)
    for tv, thousands, rounding in [(0.01, k01, 0.6), (0.02, k02, 0.6), (0.05, k05, 0.06)]:
        samples = samples_for_tv(tv, dof + 1, alpha=1e-3, power=0.99)
        assert samples / 1000 == pytest.approx(thousands, abs=rounding)


def test_required_noncentrality_against_scipy() -> None:
    noncentrality = required_noncentrality(19, 1e-6, 0.99)
    critical = scipy.stats.chi2.isf(1e-6, 19)
    assert scipy.stats.ncx2.sf(critical, 19, noncentrality) == pytest.approx(0.99, abs=1e-9)


def test_detectable_tv_inverts_samples_for_tv() -> None:
    samples = samples_for_tv(0.02, 20, 1e-4, 0.99)
    assert detectable_tv(samples, 20, 1e-4, 0.99) <= 0.02
    assert detectable_tv(samples - 1, 20, 1e-4, 0.99) > 0.02


def test_the_promised_power_is_delivered_in_the_hardest_direction() -> None:
    """300 wrong samplers at power 0.9: 270 alarms, standard deviation 5."""
    samples = samples_for_tv(0.05, 8, alpha=1e-3, power=0.9)
    wrong, generator = hardest_error(P8, 0.05), seeded(10)
    alarms = sum(
        chi_square_test(sampled_counts(wrong, samples, generator), P8).p_value <= 1e-3
        for _ in range(300)
    )
    assert 245 <= alarms <= 292
