"""The logs of a run: config.json and metrics.jsonl in its out_dir, its lines on the terminal."""

import contextlib
import errno
import json
import math
import os
import platform
import shlex
import sys
from datetime import timedelta
from importlib import metadata
from pathlib import Path

import numpy as np
import torch

from runtime.distributed import run_id
from runtime.files import first_line, git_commit, warn, write_json, write_text


class RunLog:
    """The reports of a run: metrics.jsonl; its lines on the terminal; Weights & Biases if asked for."""

    def __init__(self, out_dir, values, enabled):
        """Starts to report.

        Args:
            out_dir: where metrics.jsonl is; None writes no file, and reports to the terminal only.
            values: the settings, key → value.
            enabled: whether this rank reports; on the others every method does nothing.
        """
        self.path = Path(out_dir) / 'metrics.jsonl' if enabled and out_dir else None
        self.values, self.enabled, self.wandb = values, enabled, None
        self.advised = False  # whether `_advise` has said something
        if self.path and values.get('wandb_log'):
            try:
                self.wandb = start_wandb(self.path, values)
            except ImportError:  # or a directory called wandb, which wandb itself makes
                raise SystemExit('--wandb_log=True: the package wandb is not installed; pip install wandb, or set '
                                 '--wandb_log=False') from None
            except Exception as error:  # no login, no network, …
                raise SystemExit(f'--wandb_log=True: {type(error).__name__}: {first_line(error)}') from None

    def record(self, state, line, metrics):
        """Adds a line to metrics.jsonl: the dict `metrics` of iteration state.iter, without what is not finite, and the
        tokens and seconds so far. Prints `line`."""
        if self.path:
            entry = dict(iter=state.iter, tokens=state.tokens, time=round(state.seconds, 3), **{
                key: value for key, value in metrics.items() if math.isfinite(value)})
            append_line(self.path, json.dumps(entry))
            if self.wandb:
                self.wandb.log(entry)
        self.print(line)
        self._advise(state.iter, metrics.get('update_unclipped', 0.5))

    def print(self, line):
        """Prints `line`."""
        if self.enabled:
            print(line, flush=True)

    def progress_line(self, iteration, metrics):
        """The line of an iteration for the terminal, from its `metrics`. Its ETA leaves out evaluations."""
        total = self.values['max_iters']
        left = timedelta(seconds=round(metrics['step_ms'] / 1e3 * (total - iteration - 1)))
        return (f'iter {iteration}/{total}: loss {metrics["train/loss"]:.4f}, lr {metrics["lr"]:.2e}, '
                f'grad norm {metrics["grad_norm"]:.2f}, {metrics["step_ms"]:.0f} ms, '
                f'{metrics["tokens_per_sec"]:,.0f} tokens/s, ETA {left}')

    def print_what_next(self, iteration, best_val_loss, stopped):
        """Prints the result of a finished run and what to look at, or how a `stopped` one continues."""
        out_dir = self.values['out_dir']
        if not stopped:
            self.print(f'done: lowest val loss {best_val_loss:.4f}; checkpoints and metrics.jsonl are in {out_dir}')
            quoted = shlex.quote(out_dir)
            self.print(f'next: python scripts/sample.py {quoted}, python scripts/plot.py {quoted}')
        elif iteration > 0:  # it has saved
            flag = '' if self.values['auto_resume'] else ' with --auto_resume=True'
            self.print(f'the same command{flag} resumes it')

    def note_end(self, iteration, reason):
        """Add to config.json that the run is finished, although it has not reached its last iteration."""
        if self.path:
            path = self.path.with_name('config.json')
            about = json.loads(path.read_text(encoding='utf-8'))
            write_json(path, dict(about, ended=dict(iter=iteration, reason=reason)))

    def close(self):
        """Ends the run of Weights & Biases."""
        if self.wandb:
            self.wandb.finish()

    def _advise(self, iteration, unclipped):
        """Says once, when the warm-up has ended, that γ is far from where both the clip and the Hessian act."""
        if self.advised or iteration < self.values['warmup_iters'] or 0.01 <= unclipped <= 0.9:
            return
        self.advised = True
        self.print(f'note: {unclipped:.1%} of the coordinates are unclipped; {"raise" if unclipped < 0.5 else "lower"} '
                   '--gamma until update_unclipped is between 0.1 and 0.5')


def start_wandb(path, values):
    """A run in Weights & Biases, which continues the one that wandb_id.txt in the directory of metrics.jsonl, `path`,
    names.

    A killed process loses lines that it had not sent yet: they are sent again. Offline nothing is known to be received,
    and every line is written again, because `wandb sync` of a folder replaces the run of the same id. The iteration is
    the x-axis, and not wandb's own step. That must never fall, and a run that resumes from an earlier checkpoint
    repeats some iterations.
    """
    from wandb import init
    id_path = path.with_name('wandb_id.txt')
    run_id = id_path.read_text(encoding='utf-8').strip() if id_path.is_file() else None
    run = init(project=values['wandb_project'], name=values['wandb_run_name'] or values['out_dir'],
                     config=values, id=run_id, resume='allow')
    write_text(id_path, f'{run.id}\n')
    run.define_metric('iter')
    run.define_metric('*', step_metric='iter')
    if run_id and path.is_file():
        received = run.summary.get('iter', -1)
        for entry in map(json.loads, path.read_text(encoding='utf-8').splitlines()):
            if entry['iter'] >= received:  # an iteration may have two lines, of which one was received
                run.log(entry)
    return run


def describe_run(out_dir, values, sources, **more):
    """Write config.json: every setting and its source, the command, versions, the machine, the commit, torchrun's id of
    the run, and `more`."""
    versions = dict(python=platform.python_version(), torch=torch.__version__, numpy=np.__version__)
    for name in {'pytorch_optimizer', 'schedulefree'} & sys.modules.keys():  # their defaults are part of a run
        with contextlib.suppress(metadata.PackageNotFoundError):  # a copy that is not installed
            versions[name] = metadata.version(name)
    write_json(Path(out_dir) / 'config.json', dict(
        config=values, provenance=sources, command=[Path(sys.executable).name, *sys.argv], **more, versions=versions,
        machine=machine(), git_commit=git_commit(), run_id=run_id()))


def machine():
    """This machine as a dict: cpu and gpu (model names; gpu None without CUDA), cores (that this process may use),
    threads (of torch)."""
    info = Path('/proc/cpuinfo')
    lines = info.read_text(encoding='utf-8').splitlines() if info.is_file() else []
    models = [line.partition(':')[2].strip() for line in lines if line.startswith('model name')]
    return dict(cpu=models[0] if models else platform.processor() or platform.machine(),
                gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
                cores=len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count(),
                threads=torch.get_num_threads())


def append_line(path, line):
    """Adds `line` to the file `path`, whole or not at all; warns when the file system fails."""
    data = f'{line}\n'.encode()
    try:
        with path.open('ab', buffering=0) as f:
            size = f.tell()
            if f.write(data) < len(data):
                f.truncate(size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        warn(f'{path}: a line could not be written ({error.strerror}); training continues')


def rewind_log(path, iteration, last_eval_iter):
    """Drops from a metrics.jsonl the lines that a run that resumes at `iteration` will write again, and torn lines.

    `last_eval_iter` is the iteration of its last evaluation, which precedes the update of that iteration.
    """
    kept = []
    text = path.read_text(encoding='utf-8', errors='replace') if path.is_file() else ''
    for line in text.split('\n'):
        try:
            entry = json.loads(line)
            if entry['iter'] < iteration or ('val/loss' in entry and entry['iter'] == iteration == last_eval_iter):
                kept.append(line + '\n')
        except (ValueError, KeyError, TypeError):
            pass
    write_text(path, ''.join(kept))
