"""Statistics of a few final losses: noise over seeds, tests of a difference, the expected best of n trials.

For normally distributed losses; without scipy. Student's distribution is exact, Welch's degrees of freedom and
`seeds_needed` are the usual approximations.
"""

import math
from statistics import NormalDist, mean, variance


def expected_best(losses, n):
    """The expected lowest of n of these losses, drawn without replacement: what n trials would have found."""
    N = len(losses)
    return sum(loss * math.comb(N - 1 - i, n - 1) for i, loss in enumerate(sorted(losses))) / math.comb(N, n)


def pooled_sd(groups):
    """(σ, degrees of freedom) of the noise over seeds, from lists of losses that differ in their seed only.

    (None, 0) when no list has two.
    """
    df = sum(len(group) - 1 for group in groups)
    squares = sum((len(group) - 1) * variance(group) for group in groups if len(group) > 1)
    return (math.sqrt(squares / df), df) if df else (None, 0)


def difference(one, two, pooled=(None, 0)):
    """Whether mean(one) − mean(two) is more than noise.

    Welch's test where both lists have at least three losses; else Student's against the `pooled` σ, (σ, degrees of
    freedom), which takes the noise of all settings to be the same. Without either there is no test.

    Returns a dict: difference, standard_error, df, p (two-sided) and test, its name; None where there is no test.
    """
    found = dict(difference=mean(one) - mean(two), standard_error=None, df=None, p=None, test=None)
    if min(len(one), len(two)) >= 3:
        parts = [variance(losses) / len(losses) for losses in (one, two)]
        se = math.sqrt(sum(parts))
        scale = sum(part ** 2 / (len(losses) - 1) for part, losses in zip(parts, (one, two)))
        found.update(standard_error=se, df=se ** 4 / scale if scale else math.inf, test='Welch')
    elif pooled[1]:
        se = pooled[0] * math.sqrt(1 / len(one) + 1 / len(two))
        found.update(standard_error=se, df=pooled[1], test='pooled σ')
    else:
        return found
    t = abs(found['difference']) / se if se else math.inf if found['difference'] else 0.0
    return dict(found, p=student_p(t, found['df']))


def seeds_needed(delta, sd, p=0.05, power=0.8):
    """Seeds per side with which a true difference `delta` between losses of noise `sd` is found at level `p` with
    probability `power`: the least n ≥ 2((t₁₋ₚ⸝₂ + t_power) σ/δ)², t with 2n − 2 degrees of freedom. None for delta = 0.
    """
    if not delta:
        return None

    def enough(z, z_power):
        return 2 * ((z + z_power) * sd / delta) ** 2

    n = max(2, math.floor(enough(NormalDist().inv_cdf(1 - p / 2), NormalDist().inv_cdf(power))))
    while n < enough(student_quantile(p, 2 * n - 2), student_quantile(2 * (1 - power), 2 * n - 2)):
        n += 1
    return n


def student_p(t, df):
    """The two-sided p-value of Student's t with `df` degrees of freedom (math.inf: the normal distribution)."""
    if math.isinf(t):
        return 0.0
    if math.isinf(df):
        return 2 * NormalDist().cdf(-abs(t))
    return incomplete_beta(df / 2, 0.5, df / (df + t * t))


def student_quantile(p, df):
    """The t whose two-sided p-value with `df` degrees of freedom is `p`: with p = 0.05 the factor of the 95 % interval.
    """
    low, high = 0.0, 1.0
    while student_p(high, df) > p:
        high *= 2
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if student_p(middle, df) > p else (low, middle)
    return high


def incomplete_beta(a, b, x):
    """The regularized incomplete beta function I_x(a, b), by its continued fraction (modified Lentz)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # where the fraction would converge slowly
        return 1 - incomplete_beta(b, a, 1 - x)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)) / a
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, 1000):
        for term in (m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
                     -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))):
            d, c = 1 / (1 + term * d), 1 + term / c
            value *= c * d
        if abs(c * d - 1) < 1e-14:
            break
    return front * value
