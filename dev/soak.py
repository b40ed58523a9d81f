"""Injects, many times, the faults that runs of days meet into short runs, and counts the runs that survive.

  python dev/soak.py --dataset=pysource                    everything, about ten minutes on one CPU core
  python dev/soak.py --only kill truncate --tries 5        some faults, fewer times

Every try is the real train.py as a process, on a model so small that most of its time is spent saving. A try has
survived if the run resumes from a checkpoint no older than the last one it reported as saved (or than the one before
it, where the fault damages the last one) and, for kills, if after all of them parameters and optimizer state equal
those of an undisturbed run bit for bit. Lost iterations are those that had to be computed again.
"""

import argparse
import itertools
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from runtime import checkpoint
from runtime.signals import STOPPED

SETTINGS = dict(model_size='tiny', n_layer=2, n_head=2, n_embd=256, block_size=64, total_batch_size=4, batch_size=2,
                optimizer_name='sophiag', hessian_interval=4, learning_rate=1e-3, max_iters=10 ** 6, warmup_iters=100,
                lr_decay_iters=10 ** 6, eval_interval=1, eval_iters=1, log_interval=1, init_from='auto')
NUMBERS = itertools.count()  # number the log files
HANG = 900  # seconds without progress after which a run is taken to hang, also on a busy machine


class Run:
    """train.py as a process, its output in a file.

    Args:
        ranks: more than 1 run under torchrun, which restarts ranks that died.
        settings: flags that override SETTINGS.
    """

    def __init__(self, out_dir, ranks=1, **settings):
        launcher = [] if ranks == 1 else ['-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={ranks}',
                                          '--max-restarts=1000']
        flags = [f'--{key}={value}' for key, value in dict(SETTINGS, **settings).items()]
        self.log = Path(f'{out_dir}.{next(NUMBERS)}.log')
        with self.log.open('w') as output:
            self.process = subprocess.Popen([sys.executable, *launcher, 'train.py', *flags, f'--out_dir={out_dir}'],
                                            cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)

    def numbers(self, pattern):
        """The numbers that `pattern` captures in the output so far."""
        return [int(n) for n in re.findall(pattern, self.log.read_text(errors='replace'), flags=re.M)]

    @property
    def saved(self):
        """Iterations of the checkpoints that it reported as complete."""
        return self.numbers(r'^saved .*ckpt_(\d+)\.pt$')

    @property
    def resumed(self):
        """Iterations at which it has resumed."""
        return self.numbers(r'^resuming from .* at iteration (\d+) of')

    @property
    def done(self):
        """How many iterations are done."""
        return max([n + 1 for n in self.numbers(r'^iter (\d+)/\d+: loss')], default=0)

    def wait_until(self, condition):
        """Waits for `condition()`; SystemExit with the end of the output if the run ends, or hangs, before it holds."""
        deadline = time.monotonic() + HANG
        while not condition():
            ended = self.process.poll() is not None
            if ended or time.monotonic() > deadline:
                self.process.kill()
                why = 'the run ended too early' if ended else f'the run hung: killed after {HANG} s'
                raise SystemExit(f'{self.log}: {why}:\n{self.log.read_text()[-2000:]}')
            time.sleep(0.02)

    def end(self, number=None):
        """Waits for its end, after sending the signal `number` if given. Returns the exit code."""
        if number:
            self.process.send_signal(number)
        return self.process.wait(HANG)


def kill(directory, tries, settings):
    """kill -9 at random moments of saving."""
    def while_saving(run, out):
        while run.process.poll() is None and not any(out.glob('ckpt_*.partial')):
            pass
        time.sleep(random.uniform(0, 0.03))
    return interrupt(directory / 'kill', tries, settings, signal.SIGKILL, -signal.SIGKILL, while_saving)


def terminate(directory, tries, settings):
    """SIGTERM at random moments of training, evaluation and saving."""
    return interrupt(directory / 'term', tries, settings, signal.SIGTERM, STOPPED,
                     lambda *_: time.sleep(random.uniform(0, 0.5)))


def interrupt(out, tries, settings, number, code, moment):
    """Ends a run `tries` times by the signal `number` once moment(run, out) returns, and resumes it. It must exit with
    `code`, and end in the state of an undisturbed run. Returns (survived, lost iterations) for each."""
    results, before, partial = [], None, 0
    for _ in range(tries + 1):
        run = Run(out, **settings)
        run.wait_until(lambda run=run: len(run.saved) > 1)
        if before:
            results.append((run.resumed[0] >= before.saved[-1], before.done - run.resumed[0]))
        moment(run, out)
        # The last one stops by SIGTERM, which saves the state that is compared.
        ended = run.end(signal.SIGTERM if len(results) == tries else number)
        assert ended == (STOPPED if len(results) == tries else code), ended
        before = run
        partial += any(out.glob('ckpt_*.partial'))
    print(f'{out.name}: {partial} of {tries} left a partial checkpoint')
    last = before.saved[-1]
    plain = Path(f'{out}_undisturbed')
    undisturbed = dict(settings, max_iters=last, eval_interval=10 ** 9, log_interval=10 ** 9)
    assert Run(plain, **undisturbed).end() == 0
    if not same(*(checkpoint.load(checkpoint.path_of(d, last))[1] for d in (out, plain))):
        print(f'{out}: the state at iteration {last} is not that of an undisturbed run', file=sys.stderr)
        return [(False, lost) for _, lost in results]
    return results


def same(a, b):
    """Whether two checkpoints hold the same model and optimizer state, bit for bit."""
    states = [dict(c['model'], **{f'{i}.{key}': value for i, entries in c['optimizer']['state'].items()
                                  for key, value in entries.items()}) for c in (a, b)]
    return states[0].keys() == states[1].keys() and all(torch.equal(states[0][k], states[1][k]) for k in states[0])


def truncate(directory, tries, settings):
    """The newest checkpoint cut off at a random byte."""
    return damage(directory / 'truncate', tries, settings, lambda data: data[:random.randrange(len(data))])


def flip(directory, tries, settings):
    """One random bit of the newest checkpoint flipped."""
    def flipped(data):
        at = random.randrange(len(data))
        return data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1:]
    return damage(directory / 'flip', tries, settings, flipped)


def damage(out, tries, settings, change):
    """Resumes `tries` times from a run whose newest checkpoint's bytes have gone through `change`."""
    run = Run(out, **settings)
    run.wait_until(lambda: run.done > 20)
    assert run.end(signal.SIGTERM) == STOPPED
    newest, older = checkpoint.checkpoints(out)[:2]
    good, intact = newest.read_bytes(), checkpoint.load(newest)[1]
    results = []
    for _ in range(tries):
        newest.write_bytes(change(good))
        run = Run(out, **dict(settings, eval_only=True, init_from='resume'))
        code = run.end()
        at = (run.resumed or [-1])[0]
        # If the file was accepted, the damage must have hit bytes that mean nothing, such as padding.
        ok = at == checkpoint.number(older) or (at == checkpoint.number(newest)
                                                and same(intact, checkpoint.load(newest)[1]))
        results.append((code == 0 and ok, checkpoint.number(newest) - at))
    return results


def full(directory, tries, settings):
    """Disk full at a random moment, and free again after three failed checkpoints."""
    run = Run(directory / 'full', **settings)
    results = []
    for _ in range(tries):
        saves = len(run.saved)
        run.wait_until(lambda saves=saves: len(run.saved) > saves + random.randrange(10))
        failures = run.log.read_text().count('could not be saved')
        resource.prlimit(run.process.pid, resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
        run.wait_until(lambda failures=failures: run.log.read_text().count('could not be saved') >= failures + 3)
        resumable = checkpoint.newest(directory / 'full') is not None
        resource.prlimit(run.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        saves = len(run.saved)
        run.wait_until(lambda saves=saves: len(run.saved) > saves)
        results.append((resumable, 0))
    assert run.end(signal.SIGTERM) == STOPPED
    return results


def rank(directory, tries, settings):
    """kill -9 of one of two ranks; torchrun restarts both."""
    out = directory / 'rank'
    run = Run(out, ranks=2, **settings)
    results = []
    for i in range(tries):
        run.wait_until(lambda i=i: len(run.resumed) == i and len(run.saved) > 1)
        mark = run.log.stat().st_size
        run.wait_until(lambda mark=mark: 'saved' in run.log.read_text(errors='replace')[mark:])
        time.sleep(random.uniform(0, 0.5))
        ranks = Path(f'/proc/{run.process.pid}/task/{run.process.pid}/children').read_text().split()
        os.kill(int(random.choice(ranks)), signal.SIGKILL)
        run.wait_until(lambda i=i: len(run.resumed) > i)
        text = run.log.read_text(errors='replace')
        text = text[:[m.start() for m in re.finditer('^resuming from', text, flags=re.M)][i]]
        saved = int(re.findall(r'^saved .*ckpt_(\d+)\.pt$', text, flags=re.M)[-1])
        done = int(re.findall(r'^iter (\d+)/\d+: loss', text, flags=re.M)[-1]) + 1
        results.append((run.resumed[i] >= saved, done - run.resumed[i]))
    run.end(signal.SIGTERM)
    return results


def memory(directory, tries, settings):
    """2,000 iterations, evaluation and checkpoint every 20: less than 8 MB more memory than after 500."""
    results = []
    for i in range(tries):
        out = directory / f'memory{i}'
        code = Run(out, **dict(settings, max_iters=2000, n_embd=64, eval_interval=20, log_interval=100)).end()
        peaks = [float(mb) for mb in re.findall(r'"memory_gb": ([\d.]+)', (out / 'metrics.jsonl').read_text())]
        print(f'memory: {1e3 * peaks[5]:.1f} MB after 500 iterations, {1e3 * peaks[-1]:.1f} MB after 2,000')
        results.append((code == 0 and peaks[-1] - peaks[5] < 0.008, 0))
    return results


# Name: (function, tries). A function takes (directory, tries, settings); returns (survived, lost iterations) per try.
FAULTS = dict(kill=(kill, 50), terminate=(terminate, 10), truncate=(truncate, 10), flip=(flip, 10), full=(full, 10),
              rank=(rank, 5), memory=(memory, 1))


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--dataset', default='pysource', help='as for train.py (default: pysource)')
    parser.add_argument('--device', default='cpu', help='as for train.py (default: cpu)')
    parser.add_argument('--only', nargs='+', choices=FAULTS, default=list(FAULTS), help='these faults')
    parser.add_argument('--tries', type=int, help='tries of each fault (default: as listed in FAULTS)')
    parser.add_argument('--seed', type=int, default=0, help='seed of the random moments')
    args = parser.parse_args(argv)
    if args.tries is not None and args.tries < 1:
        parser.error(f'--tries={args.tries}: must be at least 1')
    if not (ROOT / 'data' / args.dataset / 'train.bin').is_file():
        raise SystemExit(f'data/{args.dataset}/train.bin: no such file; run python data/pysource/prepare.py, or set '
                         '--dataset')
    random.seed(args.seed)
    os.environ.setdefault('OMP_NUM_THREADS', '1')
    directory = Path(tempfile.mkdtemp(prefix='soak'))
    settings = dict(dataset=args.dataset, device=args.device)
    rows, failed = [], False
    for name in args.only:
        fault, tries = FAULTS[name]
        started = time.monotonic()
        results = fault(directory, args.tries or tries, settings)
        survived = sum(ok for ok, _ in results)
        failed |= survived < len(results)
        description = ' '.join(fault.__doc__.split()).rstrip('.')
        lost = max(lost for _, lost in results)
        rows.append(f'| {description} | {len(results)} | {survived} | {lost} |')
        print(f'{name}: {survived} of {len(results)} survived, at most {lost} iterations lost '
              f'({time.monotonic() - started:.0f} s)', flush=True)
    shutil.rmtree(directory)
    print('\n| fault | tries | survived | lost iterations, at most |\n|---|---|---|---|', *rows, sep='\n')
    raise SystemExit(failed)


if __name__ == '__main__':
    main()
