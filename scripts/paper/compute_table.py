"""Wall-clock time and compute per step (Table 2) of any set of runs or configs.

  python scripts/paper/compute_table.py config/train_gpt2_large_{adamw,sophiah,sophiag}.py
  python scripts/paper/compute_table.py config/train_gpt2_30m_*.py --steps 60 -- --batch_size=48
  python scripts/paper/compute_table.py config/train_gpt2_large_*.py --steps 60 \\
      --launcher "torchrun --standalone --nproc_per_node=8"
  python scripts/paper/compute_table.py out/gpt2-30m-adamw out/gpt2-30m-sophiag

TFLOPs per step follow Chowdhery et al. (2022) and need no run: 6 per weight and token plus attention, and the share of
the Hessian estimates (analysis/runs.py). The times and the memory are those of a run: of an out_dir, or of --steps
iterations that the script trains. T(step) is the mean over all steps, T(Hessian) the part of it that the estimates
take, hessian_ms / k. An out_dir's first lines, where kernels are compiled and caches are cold, do not count.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from analysis.figures import figure, optimizer_label, png_path, print_table, save
from analysis.runs import ROOT, estimates_per_iteration, flops_per_iteration, read_run
from analysis.trials import add_launcher
from train import resolve


def planned(path, flags, vocab_size):
    """(settings, what config.json would say of the model) of a config file, without a run."""
    import torch

    from model import GPT, GPTConfig
    config = resolve([path, *flags]).values
    with torch.device('meta'):
        model = GPT(GPTConfig.from_settings(config, vocab_size))
    return config, dict(parameters=model.num_params(), flops_per_token=model.flops_per_token())


def measured(run):
    """T(step) and T(Hessian) in seconds, memory in GB, tokens/s of a `Run`; {} where it is too short to say."""
    timed = [record for record in run.records if 'step_ms' in record][1:]
    if len(timed) < 2:
        return {}
    first, last = timed[0], timed[-1]
    steps = last['iter'] - first['iter']
    row = {'T(step) s': (last['time'] - first['time']) / steps}
    if 'hessian_ms' in last:
        row['T(Hessian) s'] = last['hessian_ms'] / 1e3 * estimates_per_iteration(
            run.optimizer_name, run.hessian_interval, run.max_iters)
    row['tokens/s'] = (last['tokens'] - first['tokens']) / (last['time'] - first['time'])
    row['memory GB'] = last['memory_gb']
    return row


def trial(path, steps, flags, directory, launcher):
    """Trains `steps` iterations of a config file in `directory` and returns the `Run`; SystemExit when it fails."""
    command = [*launcher, 'train.py', path, *flags, f'--out_dir={directory}',
               f'--max_iters={steps}', f'--eval_interval={steps}', '--eval_iters=1', '--log_interval=5']
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip() or done.stdout.strip() or f'train.py ended with exit code {done.returncode}'
        raise SystemExit(f'{path}: {said.splitlines()[-1]}')
    return read_run(directory)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('sources', nargs='+', metavar='OUT_DIR_OR_CONFIG')
    parser.add_argument('--steps', type=int, default=0, help='train each config for so many steps (at least 30)')
    parser.add_argument('--vocab_size', type=int, default=50257, help='where nothing is trained (default: 50257)')
    add_launcher(parser)
    parser.add_argument('--output', default='compute_table.png', help='PNG; .csv beside it')
    argv = sys.argv[1:] if argv is None else argv
    split = argv.index('--') if '--' in argv else len(argv)
    args, flags = parser.parse_args(argv[:split]), argv[split + 1:]
    png_path(args.output)
    if args.steps and args.steps < 30:
        parser.error('--steps must be at least 30: there is one estimate in ten steps')

    rows, baselines = [], {}
    for source in args.sources:
        if Path(source).is_dir():
            run = read_run(source)
        elif args.steps:
            with tempfile.TemporaryDirectory() as directory:
                run = trial(source, args.steps, flags, directory, args.launcher)
        else:
            run = None
        config, about = (run.config, run.about) if run else planned(source, flags, args.vocab_size)
        gradient, hessian = flops_per_iteration(config, about)
        parameters = about['parameters']
        row = {'algorithm': optimizer_label(config['optimizer_name']),
               'model size': config['model_size'], 'parameters': parameters,
               'TFLOPs per step': (gradient + hessian) / 1e12,
               'of these Hessian': f'{hessian / (gradient + hessian):.1%}', **(measured(run) if run else {}),
               'sequences': config['total_batch_size'], 'source': str(source)}
        if config['optimizer_name'] == 'adamw':
            baselines[parameters] = row
        rows.append(row)
    for row in rows:
        base = baselines.get(row['parameters'], {})
        if 'T(step) s' in row and 'T(step) s' in base:
            row['over AdamW'] = f'{row["T(step) s"] / base["T(step) s"] - 1:+.1%}'
    print_table(rows)

    panels = {key: what for key, what in {'TFLOPs per step': ('TFLOPs', 'Compute per step'), 'T(step) s': (
        'seconds', 'Time per step'), 'memory GB': ('GB', 'Peak memory')}.items() if any(key in row for row in rows)}
    fig, axes = figure(len(panels), width=4.0)
    for ax, (key, (unit, title)) in zip(axes, panels.items()):
        shown = [row for row in rows if key in row]
        bars = ax.barh([f'{row["algorithm"]} {row["model size"]}' for row in shown], [row[key] for row in shown])
        ax.bar_label(bars, fmt='{:,.4g}', padding=3, fontsize=8)
        ax.set(xlabel=unit, title=title)
        ax.margins(x=0.18)
        ax.invert_yaxis()
    save(args.output, fig, rows)


if __name__ == '__main__':
    main()
