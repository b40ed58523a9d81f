"""Section "Theoretical Analysis": steps against the condition number, for clipped Newton and for SignGD.

  python scripts/paper/clipped_newton.py --output out/theory.png

Left: the method of equation clipped_newton_for_convex_loss (full eigendecomposition, η = 1/2, ρ = R / (2√d)) on
strictly convex functions that satisfy both assumptions: L(θ) = Σ σ_i φ(z_i) with z = U(θ − θ*), U a random rotation and
φ''(0) = 1. Then μ = min σ_i, and R follows from |d ln φ''/dz| ≤ ln 2 / R. Every start has L − min L = Δ, equally shared
by the coordinates, so that the theorem's bound is the same for all condition numbers max σ_i / min σ_i.

Right: SignGD on the quadratic μ/2 θ1² + β/2 θ2² with the best of many learning rates, from the two starts of the
theorem's proof, against its lower bound ½ (√(Δ/ε) − √2) √(β/μ), and clipped Newton on the same problem.
"""

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from analysis.figures import figure, png_path, print_table, save

D = 10  # coordinates of the convex functions
DELTA, EPS = 10.0, 1e-3  # L(θ0) − min L, and the loss to reach; in units of μ


@dataclass
class Phi:
    """A convex φ: R → R with φ(0) = φ'(0) = 0, φ''(0) = 1 and |d ln φ''/dz| ≤ slope."""
    value: callable
    first: callable
    second: callable
    slope: float

    @property
    def R(self):
        return math.log(2) / self.slope


FUNCTIONS = {
    'log cosh z': Phi(lambda z: np.logaddexp(z, -z) - math.log(2), np.tanh, lambda z: np.cosh(z) ** -2.0, 2.0),
    'cosh z - 1': Phi(lambda z: 2 * np.sinh(z / 2) ** 2, np.sinh, np.cosh, 1.0),
    'z²/2 + z⁴/12': Phi(lambda z: z ** 2 / 2 + z ** 4 / 12, lambda z: z + z ** 3 / 3, lambda z: 1 + z ** 2, 1.0),
}


class Problem:
    """L(θ) = Σ σ_i φ((U(θ − θ*))_i). `sigma`: (d,); U and θ* are random."""

    def __init__(self, phi, sigma, rng):
        self.phi, self.sigma = phi, np.asarray(sigma, dtype=float)
        d = len(self.sigma)
        self.U, _ = np.linalg.qr(rng.standard_normal((d, d)))
        self.minimizer = rng.standard_normal(d)

    def z(self, theta):
        return self.U @ (theta - self.minimizer)

    def loss(self, theta):
        """L(θ); its minimum is 0."""
        return float(self.sigma @ self.phi.value(self.z(theta)))

    def gradient(self, theta):
        return self.U.T @ (self.sigma * self.phi.first(self.z(theta)))

    def hessian(self, theta):
        return self.U.T @ ((self.sigma * self.phi.second(self.z(theta)))[:, None] * self.U)

    def start(self, delta, rng):
        """A θ with L(θ) = delta, equally shared by the coordinates z_i, their signs random."""
        share, low, high = delta / len(self.sigma) / self.sigma, np.zeros_like(self.sigma), np.ones_like(self.sigma)
        while (self.phi.value(high) < share).any():
            high = np.where(self.phi.value(high) < share, 2 * high, high)
        for _ in range(200):
            middle = (low + high) / 2
            below = self.phi.value(middle) < share
            low, high = np.where(below, middle, low), np.where(below, high, middle)
        return self.minimizer + self.U.T @ (high * rng.choice([-1.0, 1.0], len(high)))


def clipped_newton(gradient, hessian, loss, theta, rho, eps, eta=0.5, max_steps=10 ** 6):
    """Steps until loss(θ) ≤ eps under θ ← θ − η Vᵀ clip(V H⁻¹ ∇L, ρ), V the eigenvectors of the Hessian H."""
    for t in range(max_steps):
        if loss(theta) <= eps:
            return t
        eigenvalues, eigenvectors = np.linalg.eigh(hessian(theta))
        newton = (eigenvectors.T @ gradient(theta)) / eigenvalues
        theta = theta - eta * eigenvectors @ np.clip(newton, -rho, rho)
    raise RuntimeError(f'loss {loss(theta)} after {max_steps} steps')


def theorem_bound(d, delta, mu, R, eps):
    """The theorem's T with the constants of its lemmas: 320 d Δ / (μR²) + ln(μR² / (32 d ε)) / ln(4/3).

    First phase: while Σ min(…) > μρ²/20, the descent lemma takes at least (η − η²) μρ²/20 = μρ²/80 off the loss, and
    ρ² = R²/(4d). Second phase: from μρ²/8 on, the loss falls by the factor 1 − η(1 − η) = 3/4 a step.
    """
    return 320 * d * delta / (mu * R ** 2) + max(0.0, math.log(mu * R ** 2 / (32 * d * eps)) / math.log(4 / 3))


def signgd_bound(mu, beta, delta, eps):
    """The lower bound of theorem signgd_lower_bound."""
    return 0.5 * (math.sqrt(delta / eps) - math.sqrt(2)) * math.sqrt(beta / mu)


def signgd_steps(mu, beta, delta, eps, candidates=200):
    """(T, η): the fewest steps, over learning rates η, after which SignGD has had loss ≤ eps at two steps in a row
    from both starts of the proof, (0, √(2Δ/β)) and (√(2Δ/μ), 0). sign(0) counts as 1: else a step could end there."""
    # Beyond √(8ε/β) two losses in a row cannot be ≤ ε; far below, the flat direction takes longer than it need.
    eta = np.geomspace(0.05, 1.0, candidates) * math.sqrt(8 * eps / beta)
    curvature = np.array([mu, beta])
    theta = np.zeros((2, 2, candidates))  # start, coordinate, learning rate
    theta[0, 1], theta[1, 0] = math.sqrt(2 * delta / beta), math.sqrt(2 * delta / mu)
    below = np.zeros((2, candidates), dtype=bool)
    reached = np.full((2, candidates), np.inf)
    for t in range(int(40 * signgd_bound(mu, beta, delta, eps)) + 100):
        now = (curvature[:, None] / 2 * theta ** 2).sum(1) <= eps
        reached = np.where(np.isinf(reached) & now & below, t, reached)
        best = reached.max(0)
        if np.isfinite(best).any():
            return int(best.min()), float(eta[best.argmin()])
        below, theta = now, theta - eta * np.where(theta >= 0, 1.0, -1.0)
    raise RuntimeError('no learning rate reached the loss')


def convex_rows(max_condition, rng):
    """Steps of clipped Newton on each of FUNCTIONS, by condition number."""
    rows = []
    for name, phi in FUNCTIONS.items():
        for power in range(int(math.log10(max_condition)) + 1):
            problem = Problem(phi, np.logspace(0, power, D), rng)
            theta = problem.start(DELTA, rng)
            steps = clipped_newton(problem.gradient, problem.hessian, problem.loss, theta, phi.R / (2 * math.sqrt(D)),
                                   EPS)
            rows.append({'method': 'clipped Newton', 'function': name, 'condition': 10 ** power, 'steps': steps,
                         'bound': theorem_bound(D, DELTA, 1.0, phi.R, EPS)})
    return rows


def quadratic_rows(max_condition):
    """Steps of SignGD and clipped Newton on the quadratic with d = 2, by condition number; the worse of both starts."""
    rows = []
    for power in range(int(math.log10(max_condition)) + 1):
        beta = 10.0 ** power
        steps, lr = signgd_steps(1.0, beta, DELTA, EPS)
        rows.append({'method': 'SignGD', 'function': 'quadratic', 'condition': 10 ** power, 'steps': steps,
                     'bound': signgd_bound(1.0, beta, DELTA, EPS), 'learning rate': lr})
        curvature = np.array([1.0, beta])
        # A quadratic satisfies the assumption with any R; R = 1 here.
        quadratic = (lambda theta, c=curvature: c * theta, lambda theta, c=curvature: np.diag(c),
                     lambda theta, c=curvature: c @ theta ** 2 / 2)
        starts = np.diag(np.sqrt(2 * DELTA / curvature))
        steps = max(clipped_newton(*quadratic, theta, 1 / (2 * math.sqrt(2)), EPS) for theta in starts)
        rows.append({'method': 'clipped Newton', 'function': 'quadratic', 'condition': 10 ** power, 'steps': steps,
                     'bound': theorem_bound(2, DELTA, 1.0, 1.0, EPS)})
    return rows


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--max_condition', type=float, default=1e6, help='largest condition number (default: 1e6)')
    parser.add_argument('--output', default='clipped_newton.png', help='PNG; .csv beside it')
    args = parser.parse_args(argv)
    png_path(args.output)
    if args.max_condition < 1:
        parser.error('--max_condition: at least 1')
    rows = convex_rows(args.max_condition, np.random.default_rng(0)) + quadratic_rows(args.max_condition)
    print_table(rows)

    def draw(ax, label, bound, color, **where):
        mine = [row for row in rows if where.items() <= row.items()]
        conditions = [row['condition'] for row in mine]
        ax.plot(conditions, [row['steps'] for row in mine], 'o-', color=color, label=label)
        if bound:
            ax.plot(conditions, [row['bound'] for row in mine], '--', color=color, label=bound)

    fig, (left, right) = figure(2, width=5.5, height=4.2)
    for i, name in enumerate(FUNCTIONS):
        draw(left, name, f'{name}: upper bound', f'C{i}', function=name)
    draw(right, 'SignGD, best learning rate', 'SignGD: lower bound', 'C3', function='quadratic', method='SignGD')
    draw(right, 'clipped Newton', '', 'C0', function='quadratic', method='clipped Newton')
    for ax, title in ((left, "Clipped Newton's steps do not depend on\nthe condition number"),
                      (right, "SignGD's steps grow with its square root")):
        ax.set(xscale='log', yscale='log', xlabel='condition number', ylabel=f'steps to loss {EPS:g} μ', title=title)
        ax.legend(fontsize=7, loc='upper center', bbox_to_anchor=(0.5, -0.18), ncols=2, frameon=False)
    save(args.output, fig, rows)


if __name__ == '__main__':
    main()
