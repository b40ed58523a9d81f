"""The logs of a run: config.json and metrics.jsonl in its out_dir, its lines on the terminal."""

import contextlib
import json
import math
import os
import platform
import sys
import time
from importlib import metadata
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from runtime.files import code_hash, first_line, git_commit, warn, write_json, write_text


class RunLog:
    """The reports of a run: metrics.jsonl; the terminal, with a progress bar; Weights & Biases if asked for."""

    def __init__(self, out_dir, values, total, initial, enabled):
        """Starts to report.

        Args:
            out_dir: where metrics.jsonl is; None writes no file, and reports to the terminal only.
            values: the settings, key → value.
            total, initial: iterations of the run, and those already done.
            enabled: whether this rank reports; on the others every method does nothing.
        """
        self.path = Path(out_dir) / 'metrics.jsonl' if enabled and out_dir else None
        self.values, self.enabled, self.total, self.initial, self.done = values, enabled, total, initial, initial
        self.bar, self.first_step_ended = None, None
        self.val_loss = None  # of the last evaluation
        self.advised = False
        self.wandb = None
        if self.path and values.get('wandb_log'):
            try:
                self.wandb = start_wandb(self.path, values)
            except Exception as error:  # no login, no network, …
                raise SystemExit(f'--wandb_log=True: {type(error).__name__}: {first_line(error)}') from None

    def write(self, entry, line):
        """Adds the dict `entry`, which has an 'iter', to metrics.jsonl without what is not finite; prints `line`."""
        self.val_loss = entry.get('val/loss', self.val_loss)
        if self.path:
            finite = {key: value for key, value in entry.items()
                      if not isinstance(value, float) or math.isfinite(value)}
            append_line(self.path, json.dumps(finite))
            if self.wandb:
                self.wandb.log(finite)
        self.print(line)
        if 'update_unclipped' in entry:
            self._advise(entry['iter'], entry['update_unclipped'])

    def record(self, state, line, metrics):
        """Writes the dict `metrics` of iteration state.iter with the tokens and seconds so far; prints `line`."""
        self.write(dict(iter=state.iter, tokens=state.tokens, time=round(state.seconds, 3), **metrics), line)

    def print(self, line):
        """Prints `line`, above the progress bar where there is one."""
        if self.enabled:
            tqdm.write(line)
            sys.stdout.flush()

    def update(self, loss):
        """Counts one iteration, whose training loss the bar shows."""
        self.done += 1
        if self.first_step_ended is None:
            self.first_step_ended = time.monotonic()
        if self._ensure_bar():
            self.bar.set_postfix_str(f'loss {loss:.4f}{self.eta()}', refresh=False)
            self.bar.update()

    def evaluating(self, batches):
        """Yields `batches`, which have a length, while the bar says how far they are."""
        for i, batch in enumerate(batches, 1):
            if self._ensure_bar():
                self.bar.set_postfix_str(f'evaluating {i}/{len(batches)}')
            yield batch
        if self.bar is not None:
            self.bar.set_postfix_str('')

    def eta(self):
        """The time that the rest of the run takes at the pace of this process, evaluations included, as ', ETA 1:02' or
        ', ETA 10:02:03'; '' before its second iteration ends. The first one does not count, because it compiles."""
        steps = self.done - self.initial - 1
        if steps < 1:
            return ''
        seconds = round((time.monotonic() - self.first_step_ended) / steps * (self.total - self.done))
        minutes = f'{seconds // 60}' if seconds < 3600 else f'{seconds // 3600}:{seconds // 60 % 60:02}'
        return f', ETA {minutes}:{seconds % 60:02}'

    def progress_line(self, iteration, metrics):
        """The line of an iteration for the terminal, from its `metrics`."""
        return (f'iter {iteration}/{self.total}: loss {metrics["train/loss"]:.4f}, lr {metrics["lr"]:.2e}, '
                f'grad norm {metrics["grad_norm"]:.2f}, {metrics["step_ms"]:.0f} ms, '
                f'{metrics["tokens_per_sec"]:,.0f} tokens/s{self.eta()}')

    def print_what_next(self, iteration, best_val_loss, stopped):
        """Prints the result of a finished run and what to look at, or how a `stopped` one continues."""
        self._end_bar()
        out_dir, last = self.values['out_dir'], self.val_loss
        if not stopped:
            lowest = f'lowest val loss {best_val_loss:.4f}'
            result = lowest if last is None else f'val loss {last:.4f}, ' + (
                'the lowest' if last <= best_val_loss else lowest)
            self.print(f'done: {result}; checkpoints (the newest, the best) and metrics.jsonl are in {out_dir}')
            self.print(f'next: python scripts/sample.py {out_dir}, python scripts/plot.py {out_dir}')
        elif iteration > 0:  # it has saved
            resumes_alone = self.values['init_from'] in ('auto', 'resume')
            self.print('the same command' + ('' if resumes_alone else ' with --init_from=auto') + ' resumes it')

    def close(self):
        """Ends the progress bar, and the run of Weights & Biases."""
        self._end_bar()
        if self.wandb:
            self.wandb.finish()

    def _advise(self, iteration, unclipped):
        """Says once, when the warm-up has ended, that γ is far from where both the clip and the Hessian act."""
        warmup_iters = self.values['warmup_iters'] if self.values['decay_lr'] else 0
        if self.advised or iteration < warmup_iters or 0.01 <= unclipped <= 0.9:
            return
        self.advised = True
        if unclipped < 0.01:
            means, way = ('γ·h is too small against m, and nearly every update is the learning rate times the sign of '
                          'm'), 'raise'
        else:
            means, way = ('γ·h is too large against m, and nearly every update is smaller than the learning rate, '
                          'without the clip'), 'lower'
        self.print(f'note: {unclipped:.1%} of the coordinates are unclipped: {means}; {way} --gamma until '
                   'update_unclipped is between 0.1 and 0.5')

    def _ensure_bar(self):
        """Whether there is a progress bar, after making it on a terminal that has none yet."""
        if self.bar is None and self.enabled and sys.stderr.isatty():
            self.bar = tqdm(total=self.total, initial=self.done, unit='it', file=sys.stderr,
                            bar_format='{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}, {rate_fmt}{postfix}]')
        return self.bar is not None

    def _end_bar(self):
        if self.bar is not None:
            self.bar.close()
            self.bar = None


def start_wandb(path, values):
    """A run in Weights & Biases, which continues the one that wandb_id.txt in the directory of metrics.jsonl, `path`,
    names.

    A killed process loses lines that it had not sent yet: they are sent again. The iteration is the x-axis, and not
    wandb's own step. That must never fall, and a run that resumes from an earlier checkpoint repeats some iterations.
    """
    import wandb
    id_path = path.with_name('wandb_id.txt')
    run_id = id_path.read_text(encoding='utf-8').strip() if id_path.is_file() else None
    run = wandb.init(project=values['wandb_project'], name=values['wandb_run_name'] or values['out_dir'],
                     config=values, id=run_id, resume='allow')
    write_text(id_path, f'{run.id}\n')
    run.define_metric('iter')
    run.define_metric('*', step_metric='iter')
    if run.resumed and path.is_file():
        received = run.summary.get('iter', -1)
        for entry in map(json.loads, path.read_text(encoding='utf-8').splitlines()):
            if entry['iter'] > received:
                run.log(entry)
    return run


def loss_spike(latest, loss):
    """The mean of the `latest` 100 losses (a list, changed in place) if `loss` is 5 standard deviations above it, else
    None; adds `loss`."""
    mean = None
    if len(latest) == 100 and loss > np.mean(latest) + 5 * np.std(latest):
        mean = float(np.mean(latest))
    latest[:] = [*latest[-99:], loss]
    return mean


def describe_run(out_dir, values, sources, **more):
    """Writes config.json: every setting and its source, the command, versions, the machine, the code, and `more`."""
    versions = dict(python=platform.python_version(), torch=torch.__version__, numpy=np.__version__)
    for name in {'pytorch_optimizer', 'schedulefree'} & sys.modules.keys():  # their defaults are part of a run
        with contextlib.suppress(metadata.PackageNotFoundError):  # a copy that is not installed
            versions[name] = metadata.version(name)
    write_json(Path(out_dir) / 'config.json', dict(
        config=values, provenance=sources, command=[Path(sys.executable).name, *sys.argv], **more, versions=versions,
        machine=machine(), git_commit=git_commit(), code=code_hash()))


def machine():
    """This machine as a dict: cpu and gpu (model names; gpu None without CUDA), cores (that this process may use),
    threads (of torch)."""
    cpu = platform.processor() or platform.machine()
    try:
        lines = Path('/proc/cpuinfo').read_text(encoding='utf-8', errors='replace').splitlines()
        cpu = next((line.partition(':')[2].strip() for line in lines if line.startswith('model name')), cpu)
    except OSError:  # not Linux
        pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()
    try:
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    except RuntimeError:  # a forked process, which cannot use CUDA
        gpu = None
    return dict(cpu=cpu, gpu=gpu, cores=cores, threads=torch.get_num_threads())


def append_line(path, line):
    """Adds `line` to the file `path`, whole or not at all; warns when the file system fails."""
    data = line.encode() + b'\n'
    problem = 'No space left on device'
    try:
        with path.open('ab', buffering=0) as f:
            size = f.tell()
            if f.write(data) == len(data):
                return
            f.truncate(size)
    except OSError as error:
        problem = error.strerror
    warn(f'{path}: a line could not be written ({problem}); training continues')


def rewind_log(path, iteration, last_eval_iter):
    """Drops from a metrics.jsonl the lines that a run that resumes at `iteration` will write again, and torn lines.

    `last_eval_iter` is the iteration of its last evaluation, which precedes the update of that iteration.
    """
    kept = []
    for line in path.read_text(encoding='utf-8', errors='replace').split('\n') if path.is_file() else ():
        try:
            entry = json.loads(line)
            if entry['iter'] < iteration or ('val/loss' in entry and entry['iter'] == iteration == last_eval_iter):
                kept.append(line + '\n')
        except (ValueError, KeyError, TypeError):
            pass
    write_text(path, ''.join(kept))
