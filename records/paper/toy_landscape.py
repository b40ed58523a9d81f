"""The motivating toy example (Figure "toy"): GD, SignGD, Adam, Newton and Sophia on a two-dimensional loss.

  python records/paper/toy_landscape.py --output out/toy.png

L(θ1, θ2) = L1(θ1) + L2(θ2) with the functions of the paper's footnote: L1(x) = 8 (x − 1)² (1.3 x² + 2 x + 1), sharp
and not convex, and L2(y) = ½ (y − 4)², flat. The paper names no start and no learning rates; these are ours.
"""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from analysis.figures import argparser, figure, legend, print_table, save, set_title

MINIMUM = np.array([1.0, 4.0])

# GD's learning rate is bounded by the sharp direction: it is stable at the minimum below 2 / L1''(1) = 0.029.
LEARNING_RATES = {'GD': 0.01, 'SignGD': 0.3, 'Adam': 0.3, 'Newton': 1.0, 'Sophia': 1.0}
RHO = 0.6  # Sophia's clipping threshold
START, STEPS = (0.2, 0.0), 50  # at 0.2 L1 curves downwards


def loss(theta):
    """Return L at `theta` (…, 2)."""
    x, y = theta[..., 0], theta[..., 1]
    return 8 * (x - 1) ** 2 * (1.3 * x ** 2 + 2 * x + 1) + 0.5 * (y - 4) ** 2


def gradient(theta):
    """Return ∇L at `theta` (2,)."""
    x, y = theta
    return np.array([8 * (x - 1) * x * (5.2 * x + 3.4), y - 4])


def hessian_diagonal(theta):
    """Return the diagonal of ∇²L at `theta` (2,); the rest is 0."""
    x, _ = theta
    return np.array([8 * (15.6 * x ** 2 - 3.6 * x - 3.4), 1.0])


def update(name, t, theta, state, eps=1e-12, beta1=0.9, beta2=0.999):
    """Return a method's step at θ, for a learning rate of 1, in iteration t, from 1. `state`: Adam's."""
    g, h = gradient(theta), hessian_diagonal(theta)
    if name == 'GD':
        return g
    if name == 'SignGD':
        return np.sign(g)
    if name == 'Newton':
        return g / h
    if name == 'Sophia':
        return np.clip(g / np.maximum(h, eps), -RHO, RHO)
    state['m'] = beta1 * state.get('m', 0) + (1 - beta1) * g
    state['v'] = beta2 * state.get('v', 0) + (1 - beta2) * g ** 2
    return state['m'] / (1 - beta1 ** t) / (np.sqrt(state['v'] / (1 - beta2 ** t)) + 1e-8)


def trajectory(name):
    """Return θ_0 … θ_STEPS, an array (STEPS + 1, 2)."""
    path, state = [np.array(START)], {}
    for t in range(1, STEPS + 1):
        path.append(path[-1] - LEARNING_RATES[name] * update(name, t, path[-1], state))
    return np.array(path)


def main(argv=None):
    parser = argparser(__doc__, 'toy_landscape.png', '.csv and .json')
    args = parser.parse_args(argv)
    paths = {name: trajectory(name) for name in LEARNING_RATES}

    rows, summary, arrival = [], [], {}
    for name, path in paths.items():
        distance = np.linalg.norm(path - MINIMUM, axis=1)
        last_far = int(np.flatnonzero(distance >= 0.05)[-1])
        arrival[name] = last_far + 1 if last_far < STEPS else None
        summary.append({'method': name, 'theta1': float(path[-1, 0]), 'theta2': float(path[-1, 1]),
                        'loss': float(loss(path[-1])), 'steps to stay within 0.05 of the minimum': arrival[name]})
        rows += [dict(method=name, step=t, theta1=x, theta2=y, loss=float(loss(path[t])))
                 for t, (x, y) in enumerate(path.tolist())]
    print_table(summary)

    fig, (ax,) = figure(width=6.2, height=4.8)
    top = max(4.8, max(path[:, 1].max() for path in paths.values()) + 0.3)
    x, y = np.meshgrid(np.linspace(-1.1, 1.5, 300), np.linspace(-0.6, top, 300))
    z = loss(np.stack((x, y), axis=-1))
    ax.contour(x, y, z, levels=[0.1, 0.5, 1, 2, 4, 6, 8, 10, 13, 16, 20, 30, 50, 90], colors='0.8', linewidths=0.7)
    for (name, path), color in zip(paths.items(), ('tab:brown', 'gold', 'tab:red', 'tab:blue', 'black')):
        said = f'there after {arrival[name]} steps' if arrival[name] else (
            'at the saddle' if name == 'Newton' else f'not there after {STEPS}')
        look = dict(ms=5, lw=2.4, zorder=3) if name == 'Sophia' else dict(ms=2.5, lw=1, alpha=0.7)
        ax.plot(path[:, 0], path[:, 1], 'o-', color=color, label=f'{name}: {said}', **look)
    for t, (x, y) in enumerate(paths['Sophia'][:(arrival['Sophia'] or 0) + 1]):
        ax.annotate(str(t), (x, y), (6, -3), textcoords='offset points', fontsize=9)
    ax.plot(*MINIMUM, '*', color='tab:green', markersize=14, label='minimum')
    ax.set(xlabel='θ₁ (sharp)', ylabel='θ₂ (flat)', xlim=(-1.1, 1.5), ylim=(-0.6, top))
    set_title(fig, f'Sophia is at the minimum after {arrival["Sophia"]} steps, Newton ends at the saddle')
    legend(fig, ax)
    save(args.output, fig, rows, summary=summary, start=START, rho=RHO)


if __name__ == '__main__':
    main()
