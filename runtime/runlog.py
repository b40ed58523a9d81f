"""The logs of a run in its out_dir: config.json, which describes it, and metrics.jsonl, one object a line."""

import json
import math
import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from runtime.files import warn, write_json, write_text


class RunLog:
    """What a run reports: metrics.jsonl, the terminal with a progress bar, and Weights & Biases if asked for."""

    def __init__(self, out_dir, config_values, total, initial, enabled, wandb=None):
        """Starts to report.

        Args:
            out_dir: where metrics.jsonl is; None writes no file (evaluation only).
            config_values: the settings, for wandb.
            total, initial: iterations of the run, and those already done.
            enabled: whether this rank reports; on the others every method does nothing.
            wandb: None, or a dict with project and name. The id of its run is kept in out_dir/wandb_id.txt, so that a
                resumed run continues the same curves.

        SystemExit with one line when wandb is not installed.
        """
        self.path = Path(out_dir) / 'metrics.jsonl' if enabled and out_dir else None
        self.enabled, self.run = enabled, None
        self.bar = tqdm(total=total, initial=initial, unit='it', smoothing=0.05,
                        disable=not (enabled and sys.stderr.isatty()))
        if wandb and self.path:
            self.run = _wandb_run(self.path.with_name('wandb_id.txt'), config_values, **wandb)

    def write(self, entry, line):
        """Adds the dict `entry`, which has an 'iter', to metrics.jsonl without what is not finite; prints `line`."""
        if self.path:
            finite = {key: value for key, value in entry.items()
                      if not isinstance(value, float) or math.isfinite(value)}
            append_line(self.path, json.dumps(finite))
            if self.run:
                self.run.log(finite, step=entry['iter'])
        self.print(line)

    def print(self, line):
        """Prints `line` above the progress bar."""
        if self.enabled:
            print(line, flush=True) if self.bar.disable else self.bar.write(line)

    def update(self):
        """Counts one iteration."""
        self.bar.update()

    def close(self):
        """Ends the progress bar and the run of wandb."""
        self.bar.close()
        if self.run:
            self.run.finish()


def _wandb_run(id_path, config_values, project, name):
    try:
        import wandb
    except ImportError:
        raise SystemExit('--wandb_log=True: needs the package wandb; pip install wandb') from None
    run_id = id_path.read_text(encoding='utf-8').strip() if id_path.is_file() else None
    run = wandb.init(project=project, name=name, config=config_values, id=run_id, resume='allow')
    write_text(id_path, f'{run.id}\n')
    return run


def describe_run(out_dir, values, sources, **more):
    """Writes config.json: every setting and its source, the command, versions, the machine, the commit, and `more`."""
    versions = dict(python=platform.python_version(), torch=torch.__version__, numpy=np.__version__)
    write_json(Path(out_dir) / 'config.json', dict(
        config=values, provenance=sources, command=[Path(sys.executable).name, *sys.argv], **more, versions=versions,
        machine=machine(), git_commit=git_commit()))


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
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return dict(cpu=cpu, gpu=gpu, cores=cores, threads=torch.get_num_threads())


def git_commit():
    """The commit of this repository that is checked out; None without git."""
    try:
        git = subprocess.run(['git', 'rev-parse', 'HEAD'], cwd=Path(__file__).parent, capture_output=True, text=True)
        return git.stdout.strip() or None
    except OSError:
        return None


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
