"""Measure how good the h of a run is: would more draws, a fresher h or a larger batch help it?

  python scripts/curvature.py out/quickstart                             a run of Sophia-G: minutes on a CPU
  python scripts/curvature.py out/gpt2-small-adamw --sequences 100 --estimator hutchinson        the paper's Figure "lt"

It compares the checkpoint's h and update with those of a low-noise h, the mean of the squared gradients of single
sequences on labels drawn from the model, as training draws them (`loss.Losses` and the hook). Without Sophia-G's h and
update, or with --estimator hutchinson, it only describes the diagonal. The table has a row for each kind of tensor.

  positive          share of the diagonal's entries that are above 0
  agreement         correlation of the logarithms of two low-noise h, from different halves of the sequences
  cv_1, cv_n        standard deviation of one estimate over its mean, with 1 and n parts (--hessian_parts); with
                    --estimator hutchinson of one sequence and one vector
  noise_of_h        the same of the run's h, an average of estimates
  log_corr          correlation of log h of the run and of the low-noise h
  scale             sum of h of the run, which begins at 0, over that of the low-noise h

A second table is of the whole model:

  signal_over_noise of the gradient of one sequence; it grows with their number
  level             share of its level that h, which begins at 0, has reached
  averaged          how many equally weighted estimates would have as much noise as h
  mean_age          of the estimates in h, in iterations
  along_run, _low   curvature along the update with h of the run, and with the low-noise h; along sign momentum it is 1

More parts help where noise_of_h is large, say above 0.3. Where it is small and log_corr is well below agreement, h is
stale, and a lower β2 helps.
"""

import functools
import re
import sys
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from analysis.figures import argparser, figure, png_path, print_table, save
from data.loader import Mixture, TrainLoader
from hessian import GNBHook
from loss import Losses
from optimizers import OPTIMIZERS
from optimizers import sophia as build_sophia
from runtime import checkpoint
from runtime.arguments import at_least
from runtime.files import one_line_errors
from scripts.load import MODEL_HELP, load, open_bins
from sophia import Sophia, clip_, hutchinson, precondition

SEED = 1  # of sequences, labels and vectors


def flat(tensors):
    """Return all entries of `tensors` as one float32 vector."""
    return torch.cat([t.detach().flatten().float() for t in tensors])


def log_correlation(a, b):
    """Return the correlation of log a and log b over the entries where both are positive."""
    both = (a > 0) & (b > 0)
    return torch.corrcoef(torch.stack([a[both].log(), b[both].log()]))[0, 1].item()


def inputs_and_targets(tokens):
    """Return X and Y (1, T) of a sequence (T + 1,); Y is a copy, in which GPT.forward may mask targets."""
    return tokens[None, :-1].contiguous(), tokens[None, 1:].clone()


def draw_gradients(model, params, sequences):
    """Yield for each sequence (T + 1,) the number of its predictions that count, and the gradients of their summed loss
    on sampled labels, as the hook draws them, and of their summed training loss, two vectors."""
    losses = Losses(model)
    hook = GNBHook(model, Sophia(params, 0.0), seed=SEED, interval=1, batch_size=1)
    for i, tokens in enumerate(sequences):
        X, Y = inputs_and_targets(tokens)
        hook.start(i)
        _, loss, loss_hat, predictions = losses(X, Y, **hook.labels(X, Y))
        yield predictions.item(), *(
            flat(torch.autograd.grad(total, params, retain_graph=total is loss_hat, materialize_grads=True))
            for total in (loss_hat, loss * predictions if predictions else loss_hat * 0))


def trained(model):
    """Return (names, parameters) of all parameters that are not frozen."""
    return zip(*((name, p) for name, p in model.named_parameters() if p.requires_grad))


class Gradients:
    """Means over the gradients g of the summed loss of single sequences at a checkpoint.

    halves: low-noise h from half of the sequences each; their sum is the low-noise h. squares: the mean square of an
    estimate from one sequence. signal, noise: ‖E g‖² and E‖g − E g‖², of the training loss.
    """

    def __init__(self, model, params, sequences):
        self.N, predictions = len(sequences), 0
        self.halves, self.squares, gradient, square = [0, 0], 0, 0, 0.0
        for i, (count, g, true) in enumerate(draw_gradients(model, params, sequences)):
            predictions += count
            self.halves[i % 2] = self.halves[i % 2] + g ** 2
            self.squares = self.squares + g ** 4 / self.N
            gradient, square = gradient + true, square + true.square().sum().item() / self.N
        self.halves = [half / predictions for half in self.halves]
        self.squares = self.squares / (predictions / self.N) ** 2
        self.signal = max(1e-30, (gradient.square().sum().item() / self.N - square) / (self.N - 1))  # without bias
        self.noise = square - self.signal

    def cv(self, size, parts, at=slice(None)):
        """Return the standard deviation over the mean of Algorithm 2's estimate on `size` sequences in `parts` parts.

        Both are root mean squares over the coordinates `at`. The square of a sum of n independent variables with mean 0
        has the variance 2 + κ/n, in units of its squared mean, where κ is the excess kurtosis of one.
        """
        squared_mean = (self.halves[0] + self.halves[1])[at].square().mean()
        variance = (self.squares[at].mean() - squared_mean) * self.N / (self.N - 1)
        kurtosis = variance / (squared_mean - variance / self.N).clamp(min=squared_mean / self.N) - 2
        return (2 / parts + kurtosis / size).clamp(min=0).sqrt().item()  # rounding may end below 0


def diagonal_halves(model, params, sequences):
    """Return two vectors whose sum is the mean of Algorithm 1's estimates, from half of the sequences each; and a
    function of coordinates: the standard deviation over the mean of one estimate, both root mean squares."""
    halves, squares, N = [0, 0], 0, len(sequences)
    for i, tokens in enumerate(sequences):
        with sdpa_kernel(SDPBackend.MATH):  # flash attention has no derivative of its derivative
            estimate = flat(hutchinson(model(*inputs_and_targets(tokens))[1], params))
        halves[i % 2] = halves[i % 2] + estimate / N
        squares = squares + estimate ** 2 / N

    def cv(at):
        mean = (halves[0] + halves[1])[at].square().mean()
        variance = (squares[at].mean() - mean) * N / (N - 1)
        return (variance / (mean - variance / N).clamp(min=mean / N)).sqrt().item()
    return halves, cv


def state_of_run(loaded, names):
    """Return (h, m) of a checkpoint as vectors in the order of the parameters' `names`; (None, None) unless its
    optimizer uses Sophia-G's estimates and update."""
    path, state = checkpoint.load_checkpoint(loaded.path, weights=False)
    saved = state.get('optimizer')
    if not saved or not any('hessian' in own for own in saved['state'].values()):
        return None, None
    name = loaded.state['config'].get('optimizer_name', 'sophiag')
    row = OPTIMIZERS.get(name)  # not a library's, which would be imported by the name in a file
    if not row or (row.build, row.hook) != (build_sophia, GNBHook):
        print(f'note: the h of {name} is not described; its estimates or its update are others', file=sys.stderr)
        return None, None
    if path.is_dir():
        from runtime.sharded import read_optimizer
        saved = read_optimizer(path, saved, {})
    device = next(loaded.model.parameters()).device
    return [flat(saved['state'][name][key] for name in names).to(device) for key in ('hessian', 'exp_avg')]


def update_of(m, h, config):
    """Return clip(m / max(γ·h, ε), 1)."""
    update, = precondition([m], [h], config['gamma'], config['eps'])
    clip_([update], 1.0)
    return update


def weights_of(iterations, interval, beta2):
    """Return facts about the estimates in h, made at iterations 0, `interval`, …: the share of its level that h, from
    0 on, has reached; how many, equally weighted, would have as much noise; their mean age in iterations."""
    made = torch.arange(0, iterations, interval, dtype=torch.float64)
    weights = (1 - beta2) * beta2 ** ((made[-1] - made) / interval)
    level = weights.sum()
    return dict(level=level.item(), averaged=(level ** 2 / weights.square().sum()).item(),
                mean_age=((weights * (iterations - made)).sum() / level).item())


def curvature_along(model, sequences, u):
    """Return uᵀGu / ‖u‖² for the vector u, or a list of it for the columns of u, with the Gauss-Newton matrix G: the
    mean square of the slope along u on labels drawn from the model, which are independent. Its standard deviation is
    about √(2 / len(sequences))."""
    _, params = trained(model)
    total, predictions = 0, 0
    for count, g, _ in draw_gradients(model, params, sequences):
        total, predictions = total + (g @ u.float()).square(), predictions + count
    return (total / predictions / u.square().sum(0)).tolist()


def describe(kind, at, halves, noises, run=None):
    """Return the row of the table for the coordinates `at` of a kind of tensor.

    noises: number of parts → function of coordinates. run: h, the parts and the number of its estimates.
    """
    low = (halves[0] + halves[1])[at]
    row = dict(tensor=kind, parameters=len(low), positive=(low > 0).float().mean().item(),
               agreement=log_correlation(halves[0][at], halves[1][at]),
               **{f'cv_{n}': noise(at) for n, noise in noises.items()})
    if run:
        h, parts, averaged = run
        row |= dict(noise_of_h=row[f'cv_{parts}'] / averaged ** 0.5, log_corr=log_correlation(h[at], low),
                    scale=(h[at].sum() / low.sum()).item())
    return row


def draw(low, h, title, correlation):
    """Return a figure: the histogram of the diagonal (Figure "lt"), and a run's h against the low-noise one."""
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
    parser.set_defaults(output=None)  # beside the checkpoint
    parser.add_argument('checkpoint', help=MODEL_HELP)
    parser.add_argument('--estimator', choices=['gnb', 'hutchinson'], default='gnb', help='default: gnb')
    parser.add_argument('--sequences', type=at_least(32), default=512, help='training sequences (default: 512)')
    parser.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu')
    args = parser.parse_args(argv)
    loaded = load(args.checkpoint, args.device)
    model, config = loaded.model, loaded.state.get('config', {})
    torch.manual_seed(SEED)
    loader = TrainLoader(Mixture(open_bins(loaded, None, 'train')), SEED, args.sequences, model.config.block_size, 0, 1,
                         args.device)
    sequences = next(loader)
    loader.close()

    names, params = trained(model)
    sizes = [p.numel() for p in params]
    whole = dict(iteration=loaded.state.get('iter_num'), sequences=args.sequences)
    h = run = None
    if args.estimator == 'gnb':
        gradients = Gradients(model, params, sequences)
        halves, whole['signal_over_noise'] = gradients.halves, gradients.signal / gradients.noise
        size, parts = config.get('hessian_batch_size') or 16, config.get('hessian_parts') or 1
        noises = {n: functools.partial(gradients.cv, size, n) for n in sorted({1, parts, size})}
        h, m = state_of_run(loaded, names)
    else:
        halves, cv = diagonal_halves(model, params, sequences)
        noises = {1: cv}
    low = halves[0] + halves[1]
    if h is not None:
        whole |= weights_of(loaded.state['iter_num'], config['hessian_interval'], config['beta2'])
        sign, along, along_low = curvature_along(model, sequences, torch.stack(
            [m.sign(), update_of(m, h, config), update_of(m, low, config)], 1))
        whole |= dict(along_run=along / sign, along_low=along_low / sign)
        run = h, parts, whole['averaged']

    kinds = {}
    for name, place in zip(names, torch.arange(sum(sizes), device=low.device).split(sizes)):
        kinds.setdefault(re.sub(r'\.\d+\.', '.*.', name).removesuffix('.weight'), []).append(place)
    kinds = {kind: torch.cat(places) for kind, places in kinds.items()} | {'all': slice(None)}
    table = [describe(kind, at, halves, noises, run) for kind, at in kinds.items()]
    print_table(table)
    print_table([whole])
    fig = draw(low.cpu(), h if h is None else h.cpu(), f'{loaded.name}, {args.estimator}, {args.sequences} sequences',
               table[-1].get('log_corr'))
    output = args.output or png_path((loaded.path.parent if loaded.state else Path('out')) / 'curvature.png')
    save(output, fig, table, **whole)


if __name__ == '__main__':
    main()
