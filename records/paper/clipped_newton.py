"""Section "Theoretical Analysis": steps against the condition number, for clipped Newton and for SignGD.

  python records/paper/clipped_newton.py --output out/theory.png

Left: the method of equation clipped_newton_for_convex_loss (full eigendecomposition, η = 1/2, ρ = R / (2√d)) on
strictly convex functions that satisfy both assumptions: L(θ) = Σ σ_i φ(z_i) with z = U(θ − θ*), U a random rotation and
φ''(0) = 1. Then μ = min σ_i, and R follows from |d ln φ''/dz| ≤ ln 2 / R. All coordinates have an equal share of
L − min L = Δ at the start, so that the bound is the same for all condition numbers max σ_i / min σ_i.

Right: SignGD on the quadratic μ/2 θ1² + β/2 θ2² with the best of many learning rates, from the two starts of the
theorem's proof, against its lower bound ½ (√(Δ/ε) − √2) √(β/μ), and clipped Newton on the same problem.
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import brentq

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from analysis.figures import argparser, figure, print_table, save

D = 10  # coordinates of the convex functions
DELTA, EPS = 10.0, 1e-3  # L(θ0) − min L, and the loss to reach; in units of μ


@dataclass
class Phi:
    """A convex φ: R → R with φ(0) = φ'(0) = 0 and φ''(0) = 1, and the R of the assumption on the Hessian."""
    value: callable
    first: callable
    second: callable
    R: float


# Where |d ln φ''/dz| is at most a slope, R is ln 2 / slope.
FUNCTIONS = {
    'log cosh z': Phi(lambda z: np.logaddexp(z, -z) - math.log(2), np.tanh, lambda z: np.cosh(z) ** -2.0,
                      math.log(2) / 2),
    'cosh z - 1': Phi(lambda z: 2 * np.sinh(z / 2) ** 2, np.sinh, np.cosh, math.log(2)),
    'z²/2 + z⁴/12': Phi(lambda z: z ** 2 / 2 + z ** 4 / 12, lambda z: z + z ** 3 / 3, lambda z: 1 + z ** 2,
                        math.log(2)),
}
QUADRATIC = Phi(lambda z: z ** 2 / 2, lambda z: z, np.ones_like, 1.0)  # with any R


class Problem:
    """L(θ) = Σ σ_i φ((U(θ − θ*))_i), whose minimum is 0. sigma: (d,); U and θ* are random, I and 0 without `rng`."""

    def __init__(self, phi, sigma, rng=None):
        self.phi, self.sigma, d = phi, np.asarray(sigma, dtype=float), len(sigma)
        self.U = np.linalg.qr(rng.standard_normal((d, d)))[0] if rng else np.eye(d)
        self.minimizer = rng.standard_normal(d) if rng else np.zeros(d)

    def z(self, theta):
        return self.U @ (theta - self.minimizer)

    def loss(self, theta):
        return float(self.sigma @ self.phi.value(self.z(theta)))

    def gradient(self, theta):
        return self.U.T @ (self.sigma * self.phi.first(self.z(theta)))

    def hessian(self, theta):
        return self.U.T @ ((self.sigma * self.phi.second(self.z(theta)))[:, None] * self.U)

    def start(self, delta, rng):
        """Return a θ with L(θ) = delta, equally shared by the coordinates z_i, their signs random."""
        z = [brentq(lambda z, share: self.phi.value(z) - share, 0, 100, args=share)
             for share in delta / len(self.sigma) / self.sigma]
        return self.minimizer + self.U.T @ (z * rng.choice([-1.0, 1.0], len(z)))


def clipped_newton(problem, theta, eps, eta=0.5):
    """Count the steps until L(θ) ≤ eps under θ ← θ − η Vᵀ clip(V H⁻¹ ∇L, ρ), V the eigenvectors of H."""
    rho, steps = problem.phi.R / (2 * math.sqrt(len(theta))), 0
    while problem.loss(theta) > eps:
        eigenvalues, eigenvectors = np.linalg.eigh(problem.hessian(theta))
        newton = (eigenvectors.T @ problem.gradient(theta)) / eigenvalues
        theta = theta - eta * eigenvectors @ np.clip(newton, -rho, rho)
        steps += 1
    return steps


def theorem_bound(d, delta, mu, R, eps):
    """Return the theorem's T with the constants of its lemmas: 320 d Δ / (μR²) + ln(μR² / (32 d ε)) / ln(4/3).

    First phase: while Σ min(…) > μρ²/20, the descent lemma takes at least (η − η²) μρ²/20 = μρ²/80 off the loss, and
    ρ² = R²/(4d). Second phase: from μρ²/8 on, the loss falls by the factor 1 − η(1 − η) = 3/4 a step.
    """
    return 320 * d * delta / (mu * R ** 2) + max(0.0, math.log(mu * R ** 2 / (32 * d * eps)) / math.log(4 / 3))


def signgd_bound(mu, beta, delta, eps):
    """Return the lower bound of theorem signgd_lower_bound."""
    return 0.5 * (math.sqrt(delta / eps) - math.sqrt(2)) * math.sqrt(beta / mu)


def signgd_steps(mu, beta, delta, eps, candidates=200):
    """Return (T, η): the fewest steps, over learning rates η, until SignGD has had loss ≤ eps twice in a row from both
    starts of the proof, (0, √(2Δ/β)) and (√(2Δ/μ), 0). sign(0) counts as 1: else a step could end there."""
    # Beyond √(8ε/β) two losses in a row cannot be ≤ ε; far below, the flat direction takes longer than it need.
    eta = np.geomspace(0.05, 1.0, candidates) * math.sqrt(8 * eps / beta)
    curvature = np.array([mu, beta])[:, None]
    theta = np.zeros((2, 2, candidates))  # start, coordinate, learning rate
    theta[0, 1], theta[1, 0] = math.sqrt(2 * delta / beta), math.sqrt(2 * delta / mu)
    below = reached = np.zeros((2, candidates), dtype=bool)
    t = 0
    while not reached.all(0).any():
        theta = theta - eta * np.where(theta >= 0, 1.0, -1.0)
        before, below = below, (curvature / 2 * theta ** 2).sum(1) <= eps
        reached = reached | (before & below)
        t += 1
    return t, float(eta[reached.all(0).argmax()])


def convex_rows(conditions, rng):
    """Count clipped Newton's steps on each of FUNCTIONS, by condition number."""
    rows = []
    for name, phi in FUNCTIONS.items():
        for condition in conditions:
            problem = Problem(phi, np.geomspace(1, condition, D), rng)
            rows.append({'method': 'clipped Newton', 'function': name, 'condition': condition,
                         'steps': clipped_newton(problem, problem.start(DELTA, rng), EPS),
                         'bound': theorem_bound(D, DELTA, 1.0, phi.R, EPS)})
    return rows


def quadratic_rows(conditions):
    """Count SignGD's and clipped Newton's steps on the quadratic from the worse start, by condition number."""
    rows = []
    for beta in conditions:
        steps, lr = signgd_steps(1.0, beta, DELTA, EPS)
        rows.append({'method': 'SignGD', 'function': 'quadratic', 'condition': beta, 'steps': steps,
                     'bound': signgd_bound(1.0, beta, DELTA, EPS), 'learning rate': lr})
        problem = Problem(QUADRATIC, [1.0, beta])
        starts = np.diag(np.sqrt(2 * DELTA / problem.sigma))
        rows.append({'method': 'clipped Newton', 'function': 'quadratic', 'condition': beta,
                     'steps': max(clipped_newton(problem, theta, EPS) for theta in starts),
                     'bound': theorem_bound(2, DELTA, 1.0, 1.0, EPS)})
    return rows


def main(argv=None):
    parser = argparser(__doc__, 'clipped_newton.png')
    parser.add_argument('--max_condition', type=float, default=1e6, help='largest condition number (default: 1e6)')
    args = parser.parse_args(argv)
    conditions = [10 ** power for power in range(int(math.log10(args.max_condition)) + 1)]
    rows = convex_rows(conditions, np.random.default_rng(0)) + quadratic_rows(conditions)
    print_table(rows)

    def draw(ax, style, label, key='steps', **where):
        ax.plot(conditions, [row[key] for row in rows if where.items() <= row.items()], style, label=label)

    fig, (left, right) = figure(2, width=5.5, height=4.2)
    bounds = {}  # by its R, on which alone a function's bound depends
    for (name, phi), style in zip(FUNCTIONS.items(), ('C0o-', 'C1s-', 'C2^:')):
        draw(left, style, name, function=name)
        bounds.setdefault(phi.R, []).append(name)
    for names, style in zip(bounds.values(), ('C0--', 'C2--')):
        draw(left, style, f"the theorem's bound, {' and '.join(names)}", 'bound', function=names[0])
    draw(right, 'C3o-', 'SignGD', function='quadratic', method='SignGD')
    draw(right, 'C3--', 'SignGD: lower bound', 'bound', function='quadratic', method='SignGD')
    draw(right, 'C0o-', 'clipped Newton', function='quadratic', method='clipped Newton')
    for ax, title in ((left, "Clipped Newton's steps do not depend on\nthe condition number"),
                      (right, "SignGD's steps grow with its square root,\neven at the best learning rate")):
        ax.set(xscale='log', yscale='log', xlabel='condition number', ylabel=f'steps to loss {EPS:g} μ', title=title)
        ax.legend(fontsize=7, loc='upper center', bbox_to_anchor=(0.5, -0.18), frameon=False)
    save(args.output, fig, rows)


if __name__ == '__main__':
    main()
