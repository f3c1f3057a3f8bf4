"""Tests of a sampler against its law, and what such a test can see.

Convention: under the null hypothesis P(p_value <= a) is about a, for every a. A caller fixes the
false-alarm rate a before looking, rejects when p_value <= a, and passes the p-values of several
tests through `holm` first. A pass says only that an error of `detectable_tv` was not present;
report that number beside it.

The p-values are asymptotic. For a single bin that expects 10 hits, the default minimum, the
chi-square statistic alarms 3 times too often at a = 1e-4 and 17 times at a = 1e-6; G stays below
1.3 times. Use `g_test` for small rates, or raise `min_expected`.

No random numbers are drawn here: samples and noise come from the caller. All sums are float64.

Sources: Cochran 1952 (chi-square, pooling, noncentral power), Holm 1979, Anderson and Goodman
1957 (independence of overlapping pairs), McDiarmid 1989 (concentration of the plug-in TV).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MIN_EXPECTED = 10.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a hypothesis test found.

    Attributes:
        statistic: a chi-square, G or z; infinite where an impossible outcome occurred.
        dof: degrees of freedom of a chi-square or G; 1 for a z, whose square has one.
        p_value: chance of a statistic at least as extreme if the sampler is right.
        num_samples: observations that went in.
    """

    statistic: float
    dof: int
    p_value: float
    num_samples: int


# ---------------------------------------------------------------------------------------------
# Laws of the statistics


def chi_square_sf(statistic: float, dof: float) -> float:
    """Return P(X > statistic) for X chi-square with `dof` > 0 degrees of freedom."""
    half = torch.tensor([dof, statistic], dtype=torch.float64) / 2
    return float(torch.special.gammaincc(half[0], half[1]))


def noncentral_chi_square_sf(statistic: float, dof: float, noncentrality: float) -> float:
    """Return P(X > statistic) for X noncentral chi-square: a Poisson mixture of central ones.

    X has dof + 2 J degrees of freedom, J Poisson with mean noncentrality / 2. J is summed to 12
    standard deviations, beyond which lies less than 1e-20.
    """
    mean = noncentrality / 2
    j = torch.arange(mean + 12 * math.sqrt(mean) + 40, dtype=torch.float64)
    log_weight = torch.special.xlogy(j, mean) - mean - torch.lgamma(j + 1)
    tail = torch.special.gammaincc(j + dof / 2, torch.full_like(j, statistic / 2))
    return float((log_weight.exp() * tail).sum())


def normal_two_sided(z: float) -> float:
    """Return P(|Z| > |z|) for Z standard normal."""
    return math.erfc(abs(z) / math.sqrt(2))


# ---------------------------------------------------------------------------------------------
# Counts against a law


def chi_square_test(counts: Tensor, p: Tensor, min_expected: float = MIN_EXPECTED) -> Outcome:
    """Test counts against known probabilities by X^2 = sum (O - E)^2 / E.

    Args:
        counts: hits of each outcome, [V].
        p: its probability, [V]; sums to 1. A hit where p is 0 fails at once, with p_value 0.
        min_expected: outcomes are pooled until each pool expects this many hits.

    Raises:
        ValueError: shapes differ, p does not sum to 1, or there are no samples.
    """
    return _fit_test(_pearson, counts, p, min_expected)


def g_test(counts: Tensor, p: Tensor, min_expected: float = MIN_EXPECTED) -> Outcome:
    """Test as `chi_square_test` does, by the likelihood ratio G = 2 sum O ln(O / E)."""
    return _fit_test(_likelihood_ratio, counts, p, min_expected)


def two_sample_test(a: Tensor, b: Tensor, min_expected: float = MIN_EXPECTED) -> Outcome:
    """Test whether two samples have one law, which need not be known.

    X^2 = sum (sqrt(n_b / n_a) a - sqrt(n_a / n_b) b)^2 / (a + b). For the power of a test
    against the known law, each sample must be twice as large.

    Args:
        a, b: hits of each outcome in either sample, [V].
        min_expected: pools expect this many hits in the smaller sample, whose size is the
            `num_samples` of the outcome.

    Raises:
        ValueError: shapes differ, or a sample is empty.
    """
    if a.shape != b.shape:
        raise ValueError(f"samples have shapes {tuple(a.shape)} and {tuple(b.shape)}")
    a, b = a.double().cpu(), b.double().cpu()
    num_a, num_b = int(a.sum()), int(b.sum())
    smaller = min(num_a, num_b)
    if smaller == 0:
        raise ValueError("a sample is empty; there is nothing to test")
    pools = pool_bins((a + b) * smaller / (num_a + num_b), min_expected)
    a, b = pools.bincount(a), pools.bincount(b)
    difference = math.sqrt(num_b / num_a) * a - math.sqrt(num_a / num_b) * b
    return _outcome(float((difference**2 / (a + b)).sum()), len(a) - 1, smaller)


def pool_bins(expected: Tensor, min_expected: float = MIN_EXPECTED) -> Tensor:
    """Assign each bin to a pool that expects at least `min_expected` hits, [V] int64.

    Bins are taken from the largest down: large ones stay alone, small ones join their neighbours,
    and what is left over at the end joins the last pool.
    """
    order = expected.argsort(descending=True, stable=True)
    pools: list[int] = []
    pool, mass = 0, 0.0
    for hits in expected[order].tolist():
        pools.append(pool)
        mass += hits
        if mass >= min_expected:
            pool, mass = pool + 1, 0.0
    assigned = torch.empty_like(order)
    assigned[order] = torch.tensor(pools).clamp(max=max(pool - 1, 0))
    return assigned


def _fit_test(
    statistic: Callable[[Tensor, Tensor], Tensor], counts: Tensor, p: Tensor, min_expected: float
) -> Outcome:
    if counts.shape != p.shape:
        raise ValueError(f"counts have shape {tuple(counts.shape)}, p has {tuple(p.shape)}")
    counts, p = counts.double().cpu(), p.double().cpu()
    if abs(float(p.sum()) - 1) > 1e-4:
        raise ValueError(f"p sums to {float(p.sum()):.6g}; normalise it")
    num_samples = int(counts.sum())
    if num_samples == 0:
        raise ValueError("all counts are 0; there is nothing to test")
    expected = num_samples * p / p.sum()
    pools = pool_bins(expected, min_expected)
    observed, pooled = pools.bincount(counts), pools.bincount(expected)
    dof = len(pooled) - 1
    if counts[p == 0].any():
        return Outcome(math.inf, dof, 0.0, num_samples)
    return _outcome(float(statistic(observed, pooled)), dof, num_samples)


def _pearson(observed: Tensor, expected: Tensor) -> Tensor:
    return ((observed - expected) ** 2 / expected).sum()


def _likelihood_ratio(observed: Tensor, expected: Tensor) -> Tensor:
    # A perfect fit may round to just below 0, where no law is defined.
    return 2 * torch.xlogy(observed, observed / expected).sum().clamp(min=0)


def _outcome(statistic: float, dof: int, num_samples: int) -> Outcome:
    # One pool holds every sample whatever the sampler does: it is no evidence.
    p_value = chi_square_sf(statistic, dof) if dof else 1.0
    return Outcome(statistic, dof, p_value, num_samples)


# ---------------------------------------------------------------------------------------------
# Samples with a law each


def z_test(deviations: Tensor, variances: Tensor) -> Outcome:
    """Test a martingale: z = sum (f - E f) / sqrt(sum Var f), two-sided.

    The law may differ at every step and depend on all earlier ones. What f looks at must be fixed
    before its token is drawn, and the number of steps before the first: a sum over accepted
    tokens only, or over first tokens of a step, is selected and proves nothing.

    Args:
        deviations: f_t(x_t) - E f_t, under the law of step t, [T].
        variances: Var f_t under that law, [T].

    Raises:
        ValueError: shapes differ, or no step has any variance.
    """
    if deviations.shape != variances.shape:
        raise ValueError(
            f"deviations have shape {tuple(deviations.shape)}, variances {tuple(variances.shape)}"
        )
    variance = float(variances.double().sum())
    if variance <= 0:
        raise ValueError("the variances sum to 0: f is constant and cannot see anything")
    z = float(deviations.double().sum()) / math.sqrt(variance)
    return Outcome(z, 1, normal_two_sided(z), deviations.numel())


def randomised_pit(p: Tensor, order: Tensor, tokens: Tensor, v: Tensor) -> Tensor:
    """Map sampled tokens to numbers that are independent and uniform if each has law p, [T].

    u = (mass of p before the token) + v * p(token), tokens ordered by `order`. Ordering by p / q
    puts what a wrong acceptance rule gives and takes at opposite ends, where a test sees it best.

    Args:
        p: law of each step, [T, V].
        order: sort key of the vocabulary at each step, fixed before the token is drawn, [T, V].
        tokens: what was drawn, [T] int64.
        v: independent uniforms in [0, 1), [T].
    """
    p, column = p.double(), tokens.unsqueeze(-1)
    key = order.gather(-1, column)
    is_earlier = torch.arange(p.shape[-1], device=p.device) < column
    is_before = (order < key) | ((order == key) & is_earlier)
    return (p * is_before).sum(-1) + v * p.gather(-1, column).squeeze(-1)


def pit_test(u: Tensor) -> tuple[Outcome, Outcome]:
    """Test that numbers are uniform in [0, 1), and that neighbours are independent.

    Two tests, so correct for two. The first is a chi-square over 20 bins. The second is one over
    the 8 x 8 table of (u_t, u_{t+1}) against the product of its margins, with 7 * 7 degrees of
    freedom: pairs overlap, which a comparison with the fixed 1/64 would not survive.

    Args:
        u: the numbers in the order they arose, [T].

    Raises:
        ValueError: fewer than 641 numbers, which would leave less than 10 for a cell.
    """
    if u.numel() < 641:
        raise ValueError(f"{u.numel()} numbers are too few for a table of 64 cells; give 641")
    bins = (u * 20).long().clamp(0, 19).cpu()
    uniformity = chi_square_test(bins.bincount(minlength=20), torch.full((20,), 1 / 20))

    cells = (u * 8).long().clamp(0, 7).cpu()
    table = (cells[:-1] * 8 + cells[1:]).bincount(minlength=64).view(8, 8).double()
    product = table.sum(1, keepdim=True) * table.sum(0, keepdim=True) / table.sum()
    is_seen = product > 0
    independence = _outcome(float(_pearson(table[is_seen], product[is_seen])), 49, u.numel())
    return uniformity, independence


# ---------------------------------------------------------------------------------------------
# Many tests


def holm(p_values: Sequence[float]) -> list[float]:
    """Return Holm's adjusted p-values, in the order given.

    Rejecting those at or below a keeps the chance of any false alarm at or below a, however the
    tests depend on each other.
    """
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    ascending = sorted(range(len(p_values)), key=p_values.__getitem__)
    for rank, test in enumerate(ascending):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[test]))
        adjusted[test] = largest
    return adjusted


# ---------------------------------------------------------------------------------------------
# Total variation


def total_variation(p: Tensor, q: Tensor) -> float:
    """Return TV = 1/2 sum |p - q| of two laws, [V] each: the largest error in any event."""
    return 0.5 * float((p.double() - q.double()).abs().sum())


def expected_tv(p: Tensor, num_samples: int) -> float:
    """Return the TV that a right sampler's frequencies show anyway: sum sqrt(p(1-p) / (2 pi n)).

    The normal approximation of E[TV]; it overstates outcomes expected less than once.
    """
    return _binomial_spread(p) / math.sqrt(2 * math.pi * num_samples)


def tv_threshold(p: Tensor, num_samples: int, false_alarm: float) -> float:
    """Return the TV that a right sampler's frequencies exceed with chance at most `false_alarm`.

    1/2 sum sqrt(p(1-p) / n) bounds the mean, sqrt(ln(1 / false_alarm) / (2 n)) the excess over it
    (McDiarmid); both hold for every n. Measured TV minus this is a lower bound of the true TV.
    """
    mean_bound = 0.5 * _binomial_spread(p) / math.sqrt(num_samples)
    return mean_bound + math.sqrt(math.log(1 / false_alarm) / (2 * num_samples))


def _binomial_spread(p: Tensor) -> float:
    p = p.double()
    return float((p * (1 - p)).sqrt().sum())


# ---------------------------------------------------------------------------------------------
# Power


def required_noncentrality(dof: int, alpha: float, power: float) -> float:
    """Return the noncentrality at which a chi-square test of level `alpha` has this `power`."""
    critical = _first(lambda x: chi_square_sf(x, dof) <= alpha)
    return _first(lambda x: noncentral_chi_square_sf(critical, dof, x) >= power)


def detectable_tv(num_samples: int, num_bins: int, alpha: float, power: float) -> float:
    """Return the smallest TV that a chi-square or G-test detects in any direction.

    An error D has noncentrality n sum D^2 / p >= 4 n TV^2, with equality where it moves mass
    between two halves of the law in proportion to p: the direction hardest to see. An error
    within a pool of bins is not seen at all.

    Args:
        num_samples: n.
        num_bins: pools compared, `dof` + 1; at least 2.
        alpha: false-alarm rate of the test.
        power: chance of detection wanted.
    """
    return math.sqrt(required_noncentrality(num_bins - 1, alpha, power) / (4 * num_samples))


def samples_for_tv(tv: float, num_bins: int, alpha: float, power: float) -> int:
    """Return the samples with which an error of `tv` is detected; inverse of `detectable_tv`."""
    return math.ceil(required_noncentrality(num_bins - 1, alpha, power) / (4 * tv**2))


def _first(holds: Callable[[float], bool]) -> float:
    """Return the least x >= 0 from which a monotone condition holds, by bisection."""
    low, high = 0.0, 1.0
    while not holds(high):
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
