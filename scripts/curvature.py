"""Measure how good the h of a run is: would more draws, a fresher h or a larger batch improve it?

  python scripts/curvature.py out/quickstart                             a run of Sophia-G: minutes on a CPU
  python scripts/curvature.py out/gpt2-small-adamw --sequences 100 --estimator hutchinson        the paper's Figure "lt"

Compares the checkpoint's h with a low-noise h, the mean squared gradient of single sequences on labels that are sampled
as in training. Every checkpoint gets the same sequences. Without Sophia-G's h, or with --estimator hutchinson, only
describes the diagonal. The table has a row for each KIND of hessian_norm/KIND:

  positive          share of the diagonal's entries above 0
  agreement         correlation of the logarithms of two low-noise h, from different halves of the sequences
  cv_1, cv_n        standard deviation of one estimate over its mean, with 1 and n parts (--hessian_parts); for
                    --estimator hutchinson, with one sequence and one vector
  noise_of_h        the same for the run's h, an average of estimates
  log_corr          correlation of log h of the run and of the low-noise h
  scale             sum of the run's h, which begins at 0, over the sum of the low-noise h

A second table is about the whole h: level, the sum of the weights of its estimates; averaged, the number of equally
weighted estimates with as much noise; mean_age of the estimates in iterations.

More parts help if noise_of_h is large, say above 0.3. If it is small and log_corr is well below agreement, h is stale,
and a lower β2 helps.
"""

import sys
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from analysis.figures import argparser, figure, print_table, save
from data.loader import Mixture, TrainLoader
from hessian import GNBHook
from loss import Losses
from optimizers import OPTIMIZERS, kind_of
from optimizers import sophia as build_sophia
from runtime.arguments import at_least
from runtime.files import one_line_errors
from scripts.load import load, open_bins
from sophia import Sophia, hutchinson

SEED = 1  # seeds sequences, labels and vectors


def flat(tensors):
    """Concatenate all entries of `tensors` in float32."""
    return torch.cat([t.detach().flatten().float() for t in tensors])


def log_correlation(a, b):
    """Return the correlation of log a and log b over the entries where both are positive."""
    both = (a > 0) & (b > 0)
    return torch.corrcoef(torch.stack([a[both].log(), b[both].log()]))[0, 1].item()


def draw_gradients(model, params, sequences):
    """Yield for each sequence (T + 1,) its prediction count, and the gradient of its summed loss on sampled labels."""
    losses = Losses(model)
    hook = GNBHook(model, Sophia(params, 0.0), seed=SEED, interval=1, batch_size=1)
    for i, tokens in enumerate(sequences):
        X, Y = tokens[None, :-1].contiguous(), tokens[None, 1:].clone()  # GPT.forward may mask targets in place
        hook.start(i)
        *_, loss_hat, predictions = losses(X, Y, **hook.labels(X, Y, slice(0, 1)))
        yield predictions.item(), flat(torch.autograd.grad(loss_hat, params, materialize_grads=True))


class Diagonal:
    """Moments of estimates of the Hessian's diagonal, each from one sequence and multiplied by a weight."""

    def __init__(self):
        self.N, self.weights, self.sums, self.squares = 0, 0, [0, 0], 0

    def add(self, estimate, weight=1):
        self.sums[self.N % 2] = self.sums[self.N % 2] + estimate
        self.squares = self.squares + estimate ** 2
        self.N, self.weights = self.N + 1, self.weights + weight

    @property
    def halves(self):
        """Two vectors, each from half of the sequences. Their sum is the low-noise h."""
        return [half / self.weights for half in self.sums]

    def cv(self, at, size, parts):
        """Return the standard deviation over the mean of an estimate by Algorithm 2 from `size` sequences in `parts`
        parts. Both are root mean squares over the coordinates `at`.

        The square of a sum of n independent variables with mean 0 has the variance 2 + κ/n, in units of its squared
        mean, where κ is the excess kurtosis of one variable.
        """
        squared_mean = (sum(self.sums)[at] / self.N).square().mean()
        variance = (self.squares[at].mean() / self.N - squared_mean) * self.N / (self.N - 1)
        kurtosis = variance / (squared_mean - variance / self.N).clamp(min=squared_mean / self.N) - 2
        return (2 / parts + kurtosis / size).clamp(min=0).sqrt().item()  # rounding may end below 0


def gnb_diagonal(model, params, sequences):
    """Return the `Diagonal` by Algorithm 2."""
    found = Diagonal()
    for predictions, g in draw_gradients(model, params, sequences):
        found.add(g ** 2, predictions)
    return found


def hutchinson_diagonal(model, params, sequences):
    """Return the `Diagonal` by Algorithm 1."""
    found = Diagonal()
    for tokens in sequences:
        with sdpa_kernel(SDPBackend.MATH):  # flash attention has no second derivative
            found.add(flat(hutchinson(model(tokens[None, :-1].contiguous(), tokens[None, 1:].clone())[1], params)))
    return found


def h_of_run(loaded, names):
    """Return a checkpoint's h for the parameters `names` as a vector, or None if its optimizer is not Sophia-G."""
    row = OPTIMIZERS.get(loaded.state['config'].get('optimizer_name'))
    saved = loaded.state.get('optimizer')  # an average of checkpoints has none
    if not saved or not row or (row.build, row.hook) != (build_sophia, GNBHook):
        return None
    if loaded.path.is_dir():
        from runtime.sharded import read_optimizer
        saved = read_optimizer(loaded.path, saved, {})
    return flat(saved['state'][name]['hessian'] for name in names).to(next(loaded.model.parameters()).device)


def weights_of(iterations, interval, beta2):
    """Return `level`, `averaged` and `mean_age` (see the top) of the estimates of iterations 0, `interval`, …"""
    made = torch.arange(0, iterations, interval, dtype=torch.float64)
    weights = (1 - beta2) * beta2 ** ((made[-1] - made) / interval)
    level = weights.sum()
    return dict(level=level.item(), averaged=(level ** 2 / weights.square().sum()).item(),
                mean_age=((weights * (iterations - made)).sum() / level).item())


def describe(kind, at, diagonal, size, parts, run=None):
    """Return the table's row for a `kind` of tensor, at the coordinates `at`, with the noise of estimates from `size`
    sequences for each number of `parts`. run: h, its parts and number of estimates."""
    one, two = (half[at] for half in diagonal.halves)
    low = one + two
    row = dict(tensor=kind, parameters=len(low), positive=(low > 0).float().mean().item(),
               agreement=log_correlation(one, two), **{f'cv_{n}': diagonal.cv(at, size, n) for n in parts})
    if run:
        h, parts_of_run, averaged = run
        row |= dict(noise_of_h=row[f'cv_{parts_of_run}'] / averaged ** 0.5, log_corr=log_correlation(h[at], low),
                    scale=(h[at].sum() / low.sum()).item())
    return row


def draw(low, h, title, correlation):
    """Draw the histogram of the diagonal (Figure "lt") and, if given, a run's h against the low-noise h."""
    positive = low[low > 0].sort().values
    edges = torch.logspace(positive[len(positive) // 100].log10() - 1, positive[-1].log10(), 101).numpy()
    fig, axes = figure(1 if h is None else 2)
    axes[0].hist(positive.numpy(), edges)
    axes[0].set(xscale='log', xlabel="positive entries of the Hessian's diagonal", ylabel='parameters', title=title)
    if h is not None:
        both = (h > 0) & (low > 0)
        axes[1].hexbin(low[both].numpy(), h[both].numpy(), xscale='log', yscale='log', bins='log', cmap='Blues')
        axes[1].set(xlabel='low-noise h', ylabel='h of the run', title=f'log correlation {correlation:.2f}')
    return fig


@one_line_errors()
def main(argv=None):
    parser = argparser(__doc__, 'curvature.png', '.csv and .json')
    parser.add_argument('checkpoint', help='out_dir (its newest checkpoint) or .pt file')
    parser.add_argument('--estimator', choices=['gnb', 'hutchinson'], default='gnb', help='default: %(default)s')
    parser.add_argument('--sequences', type=at_least(32), default=512, help='training sequences (default: %(default)s)')
    parser.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu')
    args = parser.parse_args(argv)
    loaded = load(args.checkpoint, args.device, training=True)
    model, config = loaded.model, loaded.state.get('config', {})
    torch.manual_seed(SEED)
    data = Mixture(open_bins(loaded, None, 'train'))
    loader = TrainLoader(data, SEED, args.sequences, model.config.block_size, 0, 1, args.device)
    sequences = next(loader)
    loader.close()

    names, params = zip(*((name, p) for name, p in model.named_parameters() if p.requires_grad))
    whole = dict(iteration=loaded.state['iter_num'], sequences=args.sequences)
    size, parts, h, run = 1, 1, None, None
    if args.estimator == 'gnb':
        diagonal = gnb_diagonal(model, params, sequences)
        size, parts = config.get('hessian_batch_size') or 16, config.get('hessian_parts') or 1
        h = h_of_run(loaded, names)
    else:
        diagonal = hutchinson_diagonal(model, params, sequences)
    low = sum(diagonal.halves)
    if h is not None:
        whole |= weights_of(loaded.state['iter_num'], config['hessian_interval'], config['beta2'])
        run = h, parts, whole['averaged']

    kinds = [kind_of(name, p) for name, p in zip(names, params)]
    places = torch.arange(len(low), device=low.device).split([p.numel() for p in params])
    places = {kind: torch.cat([at for at, other in zip(places, kinds) if other == kind]) for kind in kinds}
    table = [describe(kind, at, diagonal, size, sorted({1, parts, size}), run)
             for kind, at in {**places, 'all': slice(None)}.items()]
    print_table(table)
    print_table([whole])
    title = f'{args.checkpoint}, {args.estimator}, {args.sequences} sequences'
    fig = draw(low.cpu(), h if h is None else h.cpu(), title, table[-1].get('log_corr'))
    save(args.output, fig, table, **whole)


if __name__ == '__main__':
    main()
