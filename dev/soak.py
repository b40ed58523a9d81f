"""Injects, many times, the faults that runs of days meet into short runs, and counts the runs that survive.

  python dev/soak.py --dataset=pysource                     everything, about half an hour on one CPU core
  python dev/soak.py --only kill=5 settings=40              some faults, so many times
  python dev/soak.py --output records/soak.txt              what is printed goes to a file as well

Every try is the real program as a process, on a model so small that most of its time is spent saving. A try has
survived if the run resumes from a checkpoint no older than the last one it reported as saved (or than the one before
it, where the fault damages the last one) and, for kills and random settings, if after all of them parameters and
optimizer state equal those of an undisturbed run bit for bit; a broken file of another program, if it is rejected in
one line that names it, or works. Lost iterations are those that had to be computed again. cases.py draws the cases, and
the tests try a few of each.
"""

import argparse
import collections
import contextlib
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
from dev import cases
from model import GPT, GPTConfig
from runtime import checkpoint, files, hf, runlog
from runtime.files import write_text
from runtime.signals import STOPPED

SETTINGS = dict(model_size='tiny', n_layer=2, n_head=2, n_embd=256, block_size=64, total_batch_size=4, batch_size=2,
                optimizer_name='sophiag', hessian_interval=4, learning_rate=1e-3, max_iters=10 ** 6, warmup_iters=100,
                lr_decay_iters=10 ** 6, eval_interval=1, eval_iters=1, log_interval=1, init_from='auto')
NUMBERS = itertools.count()  # number the log files
HANG = cases.HANG
Done = collections.namedtuple('Done', 'code out err')


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
            code = self.process.poll()
            if code is not None or time.monotonic() > deadline:
                self.process.kill()
                why = f'hung: killed after {HANG} s' if code is None else f'ended too early, with exit code {code}'
                raise SystemExit(f'{self.log}: the run {why}:\n{self.log.read_text()[-2000:]}')
            time.sleep(0.02)

    def end(self, number=None):
        """Waits for its end, after sending the signal `number` if given. Returns the exit code."""
        if number:
            self.process.send_signal(number)
        return self.process.wait(HANG)


@contextlib.contextmanager
def forks(directory):
    """A function run(out_dir, *flags, faults=): train.py to its end, by `cases.forks`. Returns its exit code and what
    it said."""
    with cases.forks(directory) as run:
        def train(out_dir, *flags, faults=''):
            codes, out, err = run('train.py', *flags, f'--out_dir={out_dir}', faults=faults)
            return Done(codes[0] if codes else 'hung', out, err)
        yield train


def flags_of(settings):
    return [f'--{key}={value}' for key, value in dict(SETTINGS, **settings).items()]


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
    states = [checkpoint.load(checkpoint.path_of(d, last))[1] for d in (out, plain)]
    if cases.unequal(*([state['model'], state['optimizer']['state']] for state in states)):
        print(f'{out}: the state at iteration {last} is not that of an undisturbed run', file=sys.stderr)
        return [(False, lost) for _, lost in results]
    return results


def truncate(directory, tries, settings):
    """The newest checkpoint cut off at a random byte."""
    return damage(directory / 'truncate', tries, settings, cases.truncate)


def flip(directory, tries, settings):
    """One random bit of the newest checkpoint flipped."""
    return damage(directory / 'flip', tries, settings, cases.flip)


def damage(out, tries, settings, change):
    """Resumes `tries` times from a run whose newest checkpoint's bytes have gone through change(random, bytes)."""
    run = Run(out, **settings)
    run.wait_until(lambda: run.done > 20)
    assert run.end(signal.SIGTERM) == STOPPED
    newest, older = checkpoint.checkpoints(out)[:2]
    good, intact = newest.read_bytes(), torch.load(newest, weights_only=True)
    results = []
    with forks(out.parent) as train:
        for _ in range(tries):
            newest.write_bytes(change(random, good))
            done = train(out, *flags_of(dict(settings, eval_only=True, init_from='resume')))
            at = int((re.findall(r'^resuming from .* at iteration (\d+) of', done.out, flags=re.M) or [-1])[0])
            # If the file was accepted, the damage must have hit bytes that mean nothing, such as padding.
            ok = at == checkpoint.number(older) or (at == checkpoint.number(newest)
                                                    and not cases.unequal(intact, checkpoint.load(newest)[1]))
            results.append((done.code == 0 and ok, checkpoint.number(newest) - at))
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


def settings(directory, tries, settings):
    """Random valid settings: stopped, killed and resumed up to three times, the end is that of a straight run."""
    with forks(directory) as train:
        def run(out_dir, *flags, faults=''):
            return train(out_dir, *flags, f'--dataset={settings["dataset"]}', faults=faults)
        return tried(tries, lambda i: cases.try_settings(random, directory / f'settings{i}', run))


def foreign(directory, tries, settings):
    """A checkpoint file or Hugging Face folder with something wrong: it works, or is rejected in one line."""
    out, bad, folder = directory / 'foreign', directory / 'bad' / 'ckpt_00000002.pt', directory / 'folder'
    flags = flags_of(dict(settings, n_embd=16, max_iters=2))
    bad.parent.mkdir()
    folder.mkdir()
    model = GPT(GPTConfig(block_size=12, vocab_size=50, n_layer=2, n_head=2, n_embd=16, bias=True))
    hf.write(folder, vars(model.config), model.state_dict())
    with forks(directory) as train:
        assert train(out, *flags).code == 0

        def resume():
            done = train(bad.parent, *flags, '--init_from=resume', '--max_iters=3')
            for path in bad.parent.glob('*'):
                path.unlink()
            if done.code != 0 and ('Traceback' in done.err or str(bad) not in done.err):
                raise ValueError(f'exit code {done.code}: {done.err}')

        def attempt(i):
            if i % 2:
                return cases.try_folder(random, folder, directory / 'bad folder')
            return cases.try_file(random, checkpoint.newest(out), bad, resume)
        return tried(tries, attempt)


def streams(directory, tries, settings):
    """Standard streams closed, full or without a reader, in encodings that lack characters."""
    flags = flags_of(dict(settings, n_embd=16, max_iters=3, eval_interval=3))
    return tried(tries, lambda i: cases.try_streams(random, directory / f'streams{i}', flags))


def prepare(directory, tries, settings):
    """kill -9 of data/text/prepare.py or of a worker, up to three times: the bins are those without a kill."""
    text, whole = cases.text_file(directory / 'text.txt'), directory / 'whole'
    subprocess.run([sys.executable, 'data/text/prepare.py', text, '--out_dir', whole, '--tokenizer=byte',
                    '--val_fraction=0.1'], cwd=ROOT, check=True, capture_output=True)
    return tried(tries, lambda i: cases.try_prepare(random, directory / f'prepare{i}', text, whole))


def tried(tries, attempt):
    """The results of `attempt(i)`, '' or what went wrong, which is printed."""
    results = []
    for i in range(tries):
        what = attempt(i)
        if what:
            print(f'try {i}: {what}', file=sys.stderr, flush=True)
        results.append((not what, None))
    return results


# Name: (function, tries). A function takes (directory, tries, settings); returns for each try whether it survived, and
# the lost iterations or None.
FAULTS = dict(kill=(kill, 50), terminate=(terminate, 10), truncate=(truncate, 50), flip=(flip, 300), full=(full, 10),
              rank=(rank, 5), memory=(memory, 1), settings=(settings, 40), foreign=(foreign, 300),
              streams=(streams, 10), prepare=(prepare, 10))


def counted(text):
    """(name, tries) of 'NAME' or 'NAME=TRIES'."""
    name, _, tries = text.partition('=')
    if name not in FAULTS:
        raise argparse.ArgumentTypeError(f'{name}: choose from {", ".join(FAULTS)}')
    if not (tries.isdecimal() and int(tries) > 0 if '=' in text else True):
        raise argparse.ArgumentTypeError(f'{text}: the number of tries must be at least 1')
    return name, int(tries or FAULTS[name][1])


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--dataset', default='pysource', help='as for train.py (default: pysource)')
    parser.add_argument('--device', default='cpu', help='as for train.py, where a fault does not need a CPU (default: '
                        'cpu)')
    parser.add_argument('--only', nargs='+', type=counted, metavar='NAME[=TRIES]', default=[*map(counted, FAULTS)],
                        help=f'of {", ".join(f"{name}={tries}" for name, (_, tries) in FAULTS.items())}')
    parser.add_argument('--seed', type=int, default=0, help='seed of the random moments and cases')
    parser.add_argument('--output', type=Path, help='a file for what is printed at the end')
    args = parser.parse_args(argv)
    if not (ROOT / 'data' / args.dataset / 'train.bin').is_file():
        raise SystemExit(f'data/{args.dataset}/train.bin: no such file; run python data/pysource/prepare.py, or set '
                         '--dataset')
    os.environ.setdefault('OMP_NUM_THREADS', '1')
    directory = Path(tempfile.mkdtemp(prefix='soak'))
    settings, lines, rows, total = dict(dataset=args.dataset, device=args.device), [], [], collections.Counter()
    here, counts = runlog.machine(), ' '.join(f'{name}={tries}' for name, tries in args.only)
    head = (f'python dev/soak.py --dataset={args.dataset} --device={args.device} --seed={args.seed} --only {counts}',
            f'commit {files.git_commit()}; {here["cores"]} cores of {here["gpu"] or here["cpu"]}; PyTorch '
            f'{torch.__version__}', '')
    for name, tries in args.only:
        random.seed(f'{args.seed} {name}')  # so that a fault alone draws the same cases
        fault, started = FAULTS[name][0], time.monotonic()
        try:
            results = fault(directory, tries, settings)
        except (Exception, SystemExit) as error:  # the other faults are tried nevertheless
            print(f'{name}: {type(error).__name__}: {error}', file=sys.stderr)
            results = [(False, None)] * tries
        survived, lost = sum(ok for ok, _ in results), [lost for _, lost in results if lost is not None]
        total.update(tries=len(results), survived=survived)
        description = ' '.join(fault.__doc__.split()).rstrip('.')
        rows.append(f'| {description} | {len(results)} | {survived} | {max(lost) if lost else "–"} |')
        lines.append(f'{name}: {survived} of {len(results)} survived ({time.monotonic() - started:.0f} s)')
        print(lines[-1], flush=True)
        text = '\n'.join((*head, *lines, '', '| fault | tries | survived | lost iterations, at most |',
                          '|---|---|---|---|', *rows, '', f'{total["survived"]} of {total["tries"]} survived', ''))
        if args.output:
            write_text(args.output, text)
    print(f'\n{text}')
    if total['survived'] < total['tries']:
        raise SystemExit(f'{directory}: what is left of the runs')
    shutil.rmtree(directory)


if __name__ == '__main__':
    main()
