"""Runs without training, for tests of scripts that read runs: a metrics.jsonl and a config.json."""

import csv
import json
from pathlib import Path

import train
from optimizers import hessian_flops_per_token

# A run's arguments, and the parameter count of its GPT: embeddings of 256 ids and 16 positions, 12 d² and two norms per
# layer, the last norm.
SHAPE = ['--n_layer=2', '--n_head=2', '--n_embd=32', '--model_size=tiny', '--block_size=16', '--total_batch_size=4',
         '--batch_size=2', '--warmup_iters=2', '--device=cpu', '--dataset=somewhere']
PARAMETERS = 256 * 32 + 16 * 32 + 2 * (12 * 32 ** 2 + 2 * 32) + 32

# FLOPs for a token, 6 × (12·L·d² + d·V) + 12·L·d·T, and for an iteration's 64 tokens, without a Hessian
FLOPS_PER_TOKEN = 6 * (12 * 2 * 32 ** 2 + 32 * 256) + 12 * 2 * 32 * 16
GRADIENT_FLOPS = 64 * FLOPS_PER_TOKEN


def fake_run(out_dir, val_loss, argv=(), end=None, data='a fingerprint', changes=None, machine=None, code=None,
             **metrics):
    """Write the files of a run of train.py with the arguments SHAPE + argv. Return its directory.

    The validation loss falls from 5.0 on a straight line to `val_loss`. The run has reached the iteration `end`, by
    default max_iters. data, changes, machine, code: entries of config.json. metrics: further keys of training lines, a
    value or a function of the iteration.
    """
    out_dir = Path(out_dir)
    c = train.resolve([*SHAPE, *argv, f'--out_dir={out_dir}'])
    config, T = c.values, c.max_iters
    end = T if end is None else end
    lines = []
    for i in range(0, end + 1, max(1, T // 10)):
        entry = dict(iter=i, tokens=i * 4 * 16, time=i * 0.5)
        loss = 5.0 + (val_loss - 5.0) * i / T
        lines.append({**entry, 'val/loss': loss})
        extra = {key: value(i) if callable(value) else value for key, value in metrics.items()}
        lines.append({**entry, 'train/loss': loss - 0.1, 'step_ms': 500.0, 'memory_gb': 1.5, **extra})
    out_dir.mkdir(parents=True, exist_ok=True)
    (out_dir / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
    more = dict(data=data, changes=changes, machine=machine, code=code)
    about = dict(config=config, roles=c.roles, provenance=c.sources, parameters=PARAMETERS,
                 flops_per_token=FLOPS_PER_TOKEN,
                 hessian_flops_per_token=hessian_flops_per_token(config, FLOPS_PER_TOKEN))
    about.update({key: value for key, value in more.items() if value})
    (out_dir / 'config.json').write_text(json.dumps(about))
    return out_dir


def make(directory, optimizer, T, loss, lr=1e-3, seed=1, **options):
    """Write a `fake_run` of T iterations in a new directory below `directory`."""
    argv = [f'--optimizer_name={optimizer}', f'--max_iters={T}', f'--learning_rate={lr}', f'--seed={seed}',
            *options.pop('argv', [])]
    return fake_run(directory / f'{optimizer}-{T}-{lr}-{seed}-{len(list(directory.glob("*")))}', loss, argv, **options)


def edit(run, change):
    """Let `change` edit the contents of a run's config.json, a dict."""
    about = json.loads((run / 'config.json').read_text())
    change(about)
    (run / 'config.json').write_text(json.dumps(about))


def rows_of(path):
    """Return the rows of a CSV file as dicts."""
    with Path(path).open() as f:
        return list(csv.DictReader(f))
