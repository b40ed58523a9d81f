"""Compute the TFLOPs per step (Table 2) of configs.

  python scripts/paper/compute_table.py config/train_gpt2_large_{adamw,sophiah,sophiag}.py --output table2.csv

They follow Chowdhery et al. (2022), 6 per weight and token plus attention, and include the average share of the Hessian
estimates. dev/bench.py measures the times and the memory of a step.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import train
from analysis.figures import optimizer_label, print_table, write_csv
from model import GPT, GPTConfig
from optimizers import hessian_flops_per_token
from runtime import gpt
from runtime.arguments import argument_parser
from runtime.files import one_line_errors

# TFLOPs per step in the paper's Table 2. Its Sophia-G makes an extra forward pass to estimate.
PAPER = {('adamw', '355M'): 1195, ('sophiah', '355M'): 1249, ('sophiag', '355M'): 1255,
         ('adamw', '770M'): 2550, ('sophiah', '770M'): 2708, ('sophiag', '770M'): 2678}


def row(path):
    """Return the row of the table for a config file, with GPT-2's vocabulary."""
    c = train.resolve([path])
    model = gpt.without_values(GPT, gpt.config_of(GPTConfig, c.values, 50257))
    gradient = gpt.flops_per_token(model)
    hessian = hessian_flops_per_token(c.values, gradient)
    return {'algorithm': optimizer_label(c.optimizer_name), 'model size': c.model_size,
            'parameters': gpt.num_params(model),
            'TFLOPs per step': (gradient + hessian) * c.total_batch_size * c.block_size / 1e12,
            'Table 2': PAPER.get((c.optimizer_name, c.model_size)),
            'of these Hessian': f'{hessian / (gradient + hessian):.1%}', 'sequences': c.total_batch_size,
            'source': path}


@one_line_errors()
def main(argv=None):
    parser = argument_parser(__doc__)
    parser.add_argument('configs', nargs='+', metavar='CONFIG')
    parser.add_argument('--output', metavar='FILE.csv', help='also write the table as CSV')
    args = parser.parse_args(argv)
    rows = [row(path) for path in args.configs]
    print_table(rows)
    if args.output:
        write_csv(args.output, rows)


if __name__ == '__main__':
    main()
