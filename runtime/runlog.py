"""The logs of a run in its out_dir: config.json, which describes it, and metrics.jsonl, one object a line."""

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
    """What a run reports: metrics.jsonl; the terminal, with a progress bar; Weights & Biases and trackio if asked for.

    The bar appears with the first evaluation or iteration. From then on all that this process prints to stdout or
    stderr, line by line, appears above it.
    """

    def __init__(self, out_dir, values, total, initial, enabled):
        """Starts to report.

        Args:
            out_dir: where metrics.jsonl is; None writes no file, and reports to the terminal only.
            values: the settings, key → value; those of wandb and trackio say where else to report.
            total, initial: iterations of the run, and those already done.
            enabled: whether this rank reports; on the others every method does nothing.

        SystemExit with one line when wandb or trackio is asked for and cannot be used.
        """
        self.path = Path(out_dir) / 'metrics.jsonl' if enabled and out_dir else None
        self.values, self.enabled, self.total, self.initial, self.done = values, enabled, total, initial, initial
        self.bar, self.streams = None, ()
        # For the ETA: seconds of this process's iterations, without the first, which compiles; when the last iteration
        # or evaluation ended.
        self.step_seconds, self.mark = 0.0, time.monotonic()
        self.val_loss = None  # of the last evaluation
        self._note_evaluation(initial, 0.0)
        self.trackers = []  # (function that takes an entry, function that ends it)
        for key, track in ('wandb_log', _wandb), ('trackio_log', _trackio):
            if self.path and values.get(key):
                try:
                    self.trackers.append(track(self.path.parent, values, initial))
                except Exception as error:  # no login, no network, …
                    raise SystemExit(f'--{key}=True: {type(error).__name__}: {first_line(error)}') from None

    def write(self, entry, line):
        """Adds the dict `entry`, which has an 'iter', to metrics.jsonl without what is not finite; prints `line`."""
        if 'val/loss' in entry:
            self.val_loss = entry['val/loss']
            self._note_evaluation(entry['iter'], self._lap())
        if self.path:
            finite = {key: value for key, value in entry.items()
                      if not isinstance(value, float) or math.isfinite(value)}
            append_line(self.path, json.dumps(finite))
            for log, _ in self.trackers:
                log(finite)
        self.print(line)

    def record(self, state, line, metrics):
        """Writes the dict `metrics` of iteration state.iter with the tokens and seconds so far; prints `line`."""
        self.write(dict(iter=state.iter, tokens=state.tokens, time=round(state.seconds, 3), **metrics), line)

    def print(self, line):
        """Prints `line`."""
        if self.enabled:
            print(line, flush=True)

    def update(self, loss):
        """Counts one iteration, whose training loss the bar shows."""
        seconds = self._lap()
        if self.done > self.initial:
            self.step_seconds += seconds
        self.done += 1
        if self._ensure_bar():
            self.bar.set_postfix_str(f'loss {loss:.4f}{self.eta()}', refresh=False)
            self.bar.update()

    def evaluating(self, batches):
        """Yields `batches`, which have a length, while the bar says how far they are."""
        shown = 0.0
        for i, batch in enumerate(batches, 1):
            if self._ensure_bar() and time.monotonic() > shown + 0.1:
                shown = time.monotonic()
                self.bar.set_postfix_str(f'evaluating {i}/{len(batches)}')
            yield batch
        if self.bar is not None:
            self.bar.set_postfix_str('')

    def eta(self):
        """The time that the rest of the run takes, evaluations included, as ', ETA 1:02' or ', ETA 10:02:03'; '' before
        the second iteration of this process."""
        steps = self.done - self.initial - 1  # all but the first
        if steps < 1:
            return ''
        seconds = round(self.step_seconds / steps * (self.total - self.done)
                        + self.eval_seconds * self.evaluations_left)
        minutes = f'{seconds // 60}' if seconds < 3600 else f'{seconds // 3600}:{seconds // 60 % 60:02}'
        return f', ETA {minutes}:{seconds % 60:02}'

    def progress_line(self, iteration, metrics):
        """The line of an iteration for the terminal, from its `metrics`."""
        return (f'iter {iteration}/{self.total}: loss {metrics["train/loss"]:.4f}, lr {metrics["lr"]:.2e}, '
                f'grad norm {metrics["grad_norm"]:.2f}, {metrics["step_ms"]:.0f} ms, '
                f'{metrics["tokens_per_sec"]:,.0f} tokens/s{self.eta()}')

    def print_what_next(self, iteration, best_val_loss, stopped):
        """Prints what a finished run has come to and what to look at, or how a `stopped` one continues."""
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
        """Ends the progress bar, and the runs of wandb and trackio."""
        self._end_bar()
        for _, finish in self.trackers:
            finish()

    def _note_evaluation(self, iteration, seconds):
        interval = self.values['eval_interval']
        self.eval_seconds, self.evaluations_left = seconds, math.ceil(self.total / interval) - iteration // interval

    def _lap(self):
        """Seconds since the last call."""
        before, self.mark = self.mark, time.monotonic()
        return self.mark - before

    def _ensure_bar(self):
        """Whether there is a bar, after making it where there is none yet."""
        if self.bar is None and self.enabled and sys.stderr.isatty():
            self.streams = sys.stdout, sys.stderr
            self.bar = tqdm(total=self.total, initial=self.done, unit='it', file=sys.stderr,
                            bar_format='{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}, {rate_fmt}{postfix}]')
            sys.stdout, sys.stderr = (_AboveBar(stream, self.bar) for stream in self.streams)
        return self.bar is not None

    def _end_bar(self):
        if self.bar is not None:
            sys.stdout.end()
            sys.stderr.end()
            sys.stdout, sys.stderr = self.streams
            self.bar.close()
            self.bar = None


class _AboveBar:
    """The text stream `stream`, whose lines appear above the progress bar `bar`; a line waits until it is whole."""

    def __init__(self, stream, bar):
        self.stream, self.bar, self.rest = stream, bar, ''

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text):
        lines, newline, self.rest = (self.rest + text).rpartition('\n')
        if newline:
            with tqdm.external_write_mode(file=self.bar.fp):
                self.stream.write(lines + newline)
                self.stream.flush()
        return len(text)

    def end(self):
        """Writes what has waited for the end of its line."""
        if self.rest:
            self.write('\n')


def _wandb(out_dir, values, initial):
    """(function that logs an entry, function that ends it) of a run in Weights & Biases, which is continued where
    out_dir/wandb_id.txt names one.

    The iteration is the x-axis, and not wandb's own step: that must never fall, and a run that resumes from the
    checkpoint before its end logs some iterations again.
    """
    import wandb
    id_path = out_dir / 'wandb_id.txt'
    run_id = id_path.read_text(encoding='utf-8').strip() if id_path.is_file() else None
    run = wandb.init(project=values['wandb_project'], name=values['wandb_run_name'] or values['out_dir'],
                     config=values, id=run_id, resume='allow')
    write_text(id_path, f'{run.id}\n')
    run.define_metric('iter')
    run.define_metric('*', step_metric='iter')
    return run.log, run.finish


def _trackio(out_dir, values, initial):
    """As `_wandb`, in trackio's local files, where the name of a run is what a resumed one finds."""
    import trackio
    run = trackio.init(project=values['wandb_project'], name=values['wandb_run_name'] or values['out_dir'],
                       config=values, resume='allow' if initial else 'never', embed=False)

    def log(entry):  # 'time' is a name of its own
        run.log({key: value for key, value in entry.items() if key != 'time'}, step=entry['iter'])
    return log, run.finish


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
    for name in {'pytorch_optimizer', 'schedulefree'} & sys.modules.keys():  # whose defaults are part of a run
        with contextlib.suppress(metadata.PackageNotFoundError):  # of a copy that is not installed
            versions[name] = metadata.version(name)
    write_json(Path(out_dir) / 'config.json', dict(
        config=values, provenance=sources, command=[Path(sys.executable).name, *sys.argv], **more, versions=versions,
        machine=machine(), git_commit=git_commit(), code=code_hash()))


def machine():
    """This machine as a dict: cpu and gpu (model names; gpu None without CUDA), cores (those that this process may
    use), threads (of torch)."""
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
    """Drops from a metrics.jsonl what a run that resumes at `iteration` will write again, and torn lines.

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
