"""A run's logs: config.json and metrics.jsonl in its out_dir, lines on the terminal, Weights & Biases."""

import contextlib
import json
import os
import platform
import re
import shlex
import sys
from datetime import timedelta
from importlib import metadata
from pathlib import Path

import numpy as np
import torch

from runtime.files import git_commit, one_line, warn, write_json, write_text


class RunLog:
    """A writer to metrics.jsonl, the terminal and, with wandb_log, Weights & Biases."""

    def __init__(self, out_dir, values, enabled):
        """Start logs: on the terminal only if `out_dir` is None, and none unless `enabled`. `values`: the settings."""
        self.path = Path(out_dir) / 'metrics.jsonl' if enabled and out_dir else None
        self.values, self.enabled, self.wandb, self.advised = values, enabled, None, False
        if self.path and values.get('wandb_log'):
            self.wandb = self.unless_it_fails(start_wandb, self.path, values)

    def record(self, state, line, metrics):
        """Add the finite `metrics` of iteration state.iter to metrics.jsonl, and print `line`."""
        if self.path:
            entry = dict(iter=state.iter, tokens=state.tokens, time=round(state.seconds, 3), **{
                key: value for key, value in metrics.items() if np.isfinite(value).all()})
            append_line(self.path, json.dumps(entry))
            if self.wandb:
                self.unless_it_fails(self.wandb.log, entry)
        self.print(line)

    def print(self, line):
        if self.enabled:
            print(line, flush=True)

    def progress_line(self, iteration, metrics):
        """Return an iteration's line for the terminal. The ETA does not count evaluations."""
        total = self.values['max_iters']
        left = timedelta(seconds=round(metrics['step_ms'] / 1e3 * (total - iteration - 1)))
        return (f'iter {iteration}/{total}: loss {metrics["train/loss"]:.4f}, lr {metrics["lr"]:.2e}, '
                f'grad norm {metrics["grad_norm"]:.2f}, {metrics["step_ms"]:.0f} ms, '
                f'{metrics["tokens_per_sec"]:,.0f} tokens/s, ETA {left}')

    def print_what_next(self, iteration, best_val_loss, stopped):
        """Print a finished run's result and the next commands, or how to resume a `stopped` one."""
        out_dir, quoted = self.values['out_dir'], shlex.quote(self.values['out_dir'])
        if not stopped:
            self.print(f'done: lowest val loss {best_val_loss:.4f}; checkpoints and metrics.jsonl are in {out_dir}')
            self.print(f'next: python scripts/sample.py {quoted}, python scripts/plot.py {quoted}')
        elif iteration > 0:  # It has saved.
            flag = '' if self.values['auto_resume'] else ' with --auto_resume=True'
            self.print(f'the same command{flag} resumes it')

    def note_end(self, iteration, reason):
        """Record in config.json that the run has ended before its last iteration."""
        if self.path:
            path = self.path.with_name('config.json')
            about = json.loads(path.read_text(encoding='utf-8'))
            write_json(path, dict(about, ended=dict(iter=iteration, reason=reason)))

    def close(self):
        """End the run in Weights & Biases."""
        if self.wandb:
            self.unless_it_fails(self.wandb.finish)

    def unless_it_fails(self, call, *args):
        """Call Weights & Biases. If it fails, without a key or a network, warn and continue without it."""
        try:
            return call(*args)
        except Exception as error:
            self.wandb = None
            warn(f'--wandb_log=True: {one_line(error)}; training continues, and metrics.jsonl has everything. Offline, '
                 'set WANDB_MODE=offline, and `wandb sync` later')


def start_wandb(path, values):
    """Start a run in Weights & Biases, or continue the one in wandb_id.txt next to metrics.jsonl, `path`. Send lines
    that a killed process has not sent, or all of them offline, because `wandb sync` replaces the run. The x-axis is the
    iteration, because wandb's own step must not fall and resumed runs repeat iterations."""
    try:
        from wandb import init
    except ImportError:
        raise SystemExit('--wandb_log=True: wandb is not installed; run pip install wandb') from None
    id_path = path.with_name('wandb_id.txt')
    run_id = id_path.read_text(encoding='utf-8').strip() if id_path.is_file() else ''
    run = init(project=values['wandb_project'], name=values['wandb_run_name'] or values['out_dir'], config=values,
               id=run_id or None, resume='allow')
    write_text(id_path, f'{run.id}\n')
    run.define_metric('iter')
    run.define_metric('*', step_metric='iter')
    if run_id and path.is_file():
        received = run.summary.get('iter', 0)  # `log` changes it.
        for entry in map(json.loads, path.read_text(encoding='utf-8').splitlines()):
            if entry['iter'] >= received:  # An iteration has up to two lines, of which one may have arrived.
                run.log(entry)
    return run


def describe_run(out_dir, values, sources, **more):
    """Write config.json: settings, their sources, command, versions, machine, commit and `more`."""
    versions = dict(python=platform.python_version(), torch=torch.__version__, numpy=np.__version__)
    for name in {'pytorch_optimizer', 'schedulefree'} & sys.modules.keys():  # Their defaults matter to a run.
        versions[name] = metadata.version(name)
    write_json(Path(out_dir) / 'config.json', dict(
        config=values, provenance=sources, command=[Path(sys.executable).name, *sys.argv], **more, versions=versions,
        machine=machine(), git_commit=git_commit()))


def machine():
    """Describe this machine in a dict: cpu and gpu (model names, gpu None without CUDA), usable cores, threads."""
    info = Path('/proc/cpuinfo')
    model = re.search(r'model name\s*: (.*)', info.read_text(encoding='utf-8')) if info.is_file() else None
    return dict(cpu=model[1] if model else platform.processor() or platform.machine(),
                gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
                cores=len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count(),
                threads=torch.get_num_threads())


def append_line(path, line):
    """Append `line` to the file `path`, whole or not at all. Warn if that fails."""
    size = None
    try:
        with path.open('ab') as f:
            size = f.tell()
            f.write(f'{line}\n'.encode())
    except OSError as error:
        if size is not None:
            with contextlib.suppress(OSError):
                os.truncate(path, size)
        warn(f'{path}: a line could not be written ({error.strerror}); training continues')


def rewind_log(path, iteration, last_eval_iter):
    """Remove from a metrics.jsonl torn lines, and lines that a run resumed at `iteration` will write again. It does not
    repeat that iteration's evaluation if it was the latest, at `last_eval_iter`."""
    kept = []
    for line in path.read_bytes().split(b'\n') if path.is_file() else ():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            entry = json.loads(text := line.decode())
            evaluation = any(key.startswith('val/') for key in entry)
            if entry['iter'] < iteration or (evaluation and entry['iter'] == iteration == last_eval_iter):
                kept.append(f'{text}\n')
    write_text(path, ''.join(kept))
