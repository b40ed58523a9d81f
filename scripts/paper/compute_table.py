"""Compare compute and wall-clock time per step (Table 2) of configs and runs.

  python scripts/paper/compute_table.py config/train_gpt2_large_{adamw,sophiah,sophiag}.py
  python scripts/paper/compute_table.py out/large-adamw out/large-sophiag --output table2.csv

TFLOPs per step follow Chowdhery et al. (2022), 6 per weight and token plus attention, and include the average share of
the Hessian estimates (analysis/runs.py). TFLOPs need no run. Times and memory do, of 60 iterations or more: train.py
CONFIG --max_iters=60 --eval_iters=1 --log_interval=5. T(step) is the mean over all steps after the first lines of
metrics, in which kernels are compiled; T(Hessian) is the part of it that the estimates take.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import train
from analysis.figures import optimizer_label, print_table, write_csv
from analysis.runs import read_run, training_and_hessian_flops
from model import GPT, GPTConfig
from optimizers import estimates_per_iteration, hessian_flops_per_token
from runtime import gpt
from runtime.arguments import argument_parser
from runtime.files import one_line_errors

# TFLOPs per step in the paper's Table 2. Its Sophia-G makes an extra forward pass to estimate.
PAPER = {('adamw', '355M'): 1195, ('sophiah', '355M'): 1249, ('sophiag', '355M'): 1255,
         ('adamw', '770M'): 2550, ('sophiah', '770M'): 2708, ('sophiag', '770M'): 2678}


def planned(path):
    """Return (settings, config.json's facts of the model) for a config file and GPT-2's vocabulary."""
    config = train.resolve([path]).values
    model = gpt.without_values(GPT, gpt.config_of(GPTConfig, config, 50257))
    flops = gpt.flops_per_token(model)
    return config, dict(parameters=gpt.num_params(model), flops_per_token=flops,
                        hessian_flops_per_token=hessian_flops_per_token(config, flops))


def measured(run):
    """Return the columns of the table that a `RunRecord` has measured, none if it is too short."""
    timed = [line for line in run.lines if 'step_ms' in line][1:]
    if len(timed) < 2:
        return {}
    first, last = timed[0], timed[-1]
    seconds = last['time'] - first['time']
    row = {'T(step) s': seconds / (last['iter'] - first['iter'])}
    if 'hessian_ms' in last:
        row['T(Hessian) s'] = last['hessian_ms'] / 1e3 * estimates_per_iteration(
            run.optimizer_name, run.hessian_interval, run.max_iters)
    return {**row, 'tokens/s': (last['tokens'] - first['tokens']) / seconds, 'memory GB': last['memory_gb']}


@one_line_errors()
def main(argv=None):
    parser = argument_parser(__doc__)
    parser.add_argument('sources', nargs='+', metavar='OUT_DIR_OR_CONFIG')
    parser.add_argument('--output', metavar='FILE.csv', help='also write the table as CSV')
    args = parser.parse_args(argv)
    rows = []
    for source in args.sources:
        run = read_run(source) if Path(source).is_dir() else None
        config, about = (run.config, run.about) if run else planned(source)
        gradient, hessian = training_and_hessian_flops(config, about)
        rows.append({
            'algorithm': optimizer_label(config['optimizer_name']), 'model size': config['model_size'],
            'parameters': about['parameters'], 'TFLOPs per step': (gradient + hessian) / 1e12,
            'Table 2': PAPER.get((config['optimizer_name'], config['model_size'])),
            'of these Hessian': f'{hessian / (gradient + hessian):.1%}', **(measured(run) if run else {}),
            'sequences': config['total_batch_size'], 'source': source})
    print_table(rows)
    if args.output:
        write_csv(args.output, rows)


if __name__ == '__main__':
    main()
