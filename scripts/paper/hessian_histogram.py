"""How dispersed the curvatures are: histogram of the positive entries of the Hessian's diagonal (Figure "lt").

  python scripts/paper/hessian_histogram.py out/quickstart --estimator gnb --samples 10

The diagonal at a checkpoint is estimated as the mean of several samples of the paper's Algorithm 1 (hutchinson) or 2
(gnb), each on a mini-batch of its own from the training data. The more samples, the less of the spread is noise.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from analysis.arguments import at_least
from analysis.figures import argparser, figure, print_table, save
from analysis.load import MODEL_HELP, load, open_bins
from data.loader import Mixture, TrainLoader
from sophia import gauss_newton_bartlett, hutchinson

SEED = 1337


def mean_diagonal(model, batches, estimator):
    """The estimated diagonal, averaged over `batches` of sequences (B, T + 1): float32, one entry a parameter."""
    params, total = list(model.parameters()), 0
    for sequences in batches:
        X, Y = sequences[:, :-1], sequences[:, 1:]
        if estimator == 'gnb':
            sample = gauss_newton_bartlett(model(X)[0], params)
        else:
            with sdpa_kernel(SDPBackend.MATH):  # flash attention has no derivative of its derivative
                sample = hutchinson(model(X, Y)[1], params)
        total = total + torch.cat([h.flatten().float() for h in sample]) / len(batches)
    return total


def main(argv=None):
    parser = argparser(__doc__, 'hessian_histogram.png', '.csv and .json')
    parser.add_argument('checkpoint', help=MODEL_HELP)
    parser.add_argument('--estimator', choices=['gnb', 'hutchinson'], default='gnb', help='default: gnb')
    parser.add_argument('--samples', type=at_least(1), default=10, help='how many are averaged (default: 10)')
    parser.add_argument('--batch_size', type=at_least(1), default=8, help='sequences per sample (default: 8)')
    parser.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu')
    args = parser.parse_args(argv)
    loaded = load(args.checkpoint, args.device)
    data = Mixture(open_bins(loaded, None, 'train'))
    torch.manual_seed(SEED)
    loader = TrainLoader(data, SEED, args.batch_size, loaded.model.config.block_size, 0, 1, args.device)
    batches = [next(loader) for _ in range(args.samples)]
    loader.close()
    diagonal = mean_diagonal(loaded.model, batches, args.estimator).cpu().numpy()

    positive = diagonal[diagonal > 0]
    low, median, high = np.quantile(positive, (0.01, 0.5, 0.99)).tolist()
    summary = dict(checkpoint=loaded.name, iteration=loaded.state.get('iter_num'), estimator=args.estimator,
                   samples=args.samples, sequences=args.samples * args.batch_size, parameters=len(diagonal),
                   positive=len(positive) / len(diagonal), negative=float((diagonal < 0).mean()),
                   quantile_1=low, median=median, quantile_99=high)
    print_table([summary])

    edges = np.logspace(np.log10(low) - 1, np.log10(positive.max()), 101)
    counts, _ = np.histogram(positive, edges)
    fig, (ax,) = figure()
    ax.stairs(counts, edges, fill=True)
    ax.set(xscale='log', xlabel="positive entries of the Hessian's diagonal", ylabel='parameters',
           title=f'{loaded.name}, {args.estimator}, mean of {args.samples}')
    save(args.output, fig, [dict(low=low, high=high, parameters=int(n))
                            for low, high, n in zip(edges, edges[1:], counts)], **summary)


if __name__ == '__main__':
    main()
