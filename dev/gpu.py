"""Measure speed next to nanoGPT, try what may gain speed, and run the tests that need a GPU, in stretches of minutes.

  python dev/gpu.py --pack data/books --nanogpt ../nanoGPT    out/gpu/data.tar.xz: data, nanoGPT's model.py
  python dev/gpu.py                on the machine with the GPU: whatever is missing, for nine minutes
  python dev/gpu.py speed          these steps only
  SMOKE=1 python dev/gpu.py        a trial of all steps on CPU, with a tiny model

Run it in the repository's root. Steps: candidates (changes that may gain speed, at 30M), speed (30M and 125M, next to
nanoGPT), tests (those marked gpu, and runs in float16), large (speed of 355M and 770M). Finished steps are skipped;
everything finished is in out/gpu/records and in OUT/gpu.tar.gz, where OUT is out/gpu or from the environment.
"""

import json
import lzma
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from data.writer import sha256
from runtime.arguments import argument_parser
from runtime.files import atomic_write, git_commit, write_json

SMOKE = bool(os.environ.get('SMOKE'))
WORK = Path('out', 'gpu_smoke' if SMOKE else 'gpu')
PIECE, EVERY = 10240, 45  # every 45th piece of 10,240 tokens of the training text is held out
DEVICE = '--device=cpu' if SMOKE else '--device=cuda'
TINY = ['--n_layer=1', '--n_head=2', '--n_embd=32', '--block_size=32', '--total_batch_size=4', '--batch_size=2',
        '--eval_iters=2', DEVICE]
# Model size → (micro-batches to try, largest first; whether all four programs fit into 80 GB of memory together).
SIZES = {'30M': ((30,), True), '125M': ((30,), True)}
LARGE = {'355M': ((30, 15), False), '770M': ((15, 6), False)}
# Name → variables of the environment and flags of dev/bench.py. The first and the last are alike, to show the noise.
CANDIDATES = {
    'base': '--batch_size=30',
    'coordinate_descent': 'TORCHINDUCTOR_COORDINATE_DESCENT_TUNING=1 --batch_size=30',
    'micro_120': '--batch_size=120',
    'base_again': '--batch_size=30',
}


class TimeIsUp(BaseException):
    """Raised by the alarm; an Exception could be taken for the failure of one step."""


# ----------------------------------------------------------------------------------------------------------------------
# Data


def pack(bins, nanogpt=None):
    """Compress a data set, split into `books` and the pieces `heldout`, and a checkout's model.py."""
    meta = json.loads((bins / 'meta.json').read_text())
    train, val = (np.fromfile(bins / f'{split}.bin', '<u2') for split in ('train', 'val'))
    held = np.arange(len(train)) // PIECE % EVERY == EVERY - 1
    # A literal's context is the byte at the same place in the token before.
    filters = [dict(id=lzma.FILTER_LZMA2, preset=9 | lzma.PRESET_EXTREME, lc=3, lp=1, pb=1, dict_size=2 ** 24)]
    WORK.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, 'data')
        write_bins(data / 'books', meta, train=train[~held], val=val)
        write_bins(data / 'heldout', meta, train=train[held], val=train[held])  # a data set has both
        if nanogpt:
            (data / 'nanoGPT').mkdir()
            shutil.copy(nanogpt / 'model.py', data / 'nanoGPT')
        with atomic_write(WORK / 'data.tar.xz') as file, lzma.open(file, 'w', filters=filters) as compressed, \
                tarfile.open(fileobj=compressed, mode='w') as archive:
            archive.add(data, 'data')


def unpack():
    """Unpack the data, complete or not at all."""
    if (WORK / 'data').exists():
        return
    if not (WORK / 'data.tar.xz').exists():
        raise SystemExit(f'{WORK}/data.tar.xz: not found; make it with --pack')
    with tempfile.TemporaryDirectory(dir=WORK) as folder, tarfile.open(WORK / 'data.tar.xz') as archive:
        archive.extractall(folder, filter='data')
        Path(folder, 'data').rename(WORK / 'data')


def write_bins(folder, meta, **splits):
    """Write a data set with the tokenizer of `meta`, split → tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, tokens in splits.items():
        tokens.tofile(folder / f'{split}.bin')
    about = {split: dict(tokens=len(tokens), documents=int((tokens == meta['eot_id']).sum()),
                         sha256=sha256(folder / f'{split}.bin')) for split, tokens in splits.items()}
    write_json(folder / 'meta.json', meta | about)


# ----------------------------------------------------------------------------------------------------------------------
# Carrying out


def save():
    """Write the finished work into OUT/gpu.tar.gz."""
    WORK.mkdir(parents=True, exist_ok=True)
    with atomic_write(Path(os.environ.get('OUT', WORK)) / 'gpu.tar.gz') as file, \
            tarfile.open(fileobj=file, mode='w:gz') as archive:
        for pattern in ('records', 'logs/*', 'float16_*/metrics.jsonl'):
            for path in WORK.glob(pattern):
                archive.add(path, path.relative_to(WORK))


def call(name, words, output=None):
    """Run Python with `words` unless it has succeeded before; return whether it has.

    output: the name of the file in records/gpu that tells so; by default the program's log.
    """
    done, log = WORK / 'records/gpu' / (output or f'{name}.txt'), WORK / f'logs/{name}.txt'
    if done.exists():
        return True
    for path in (done, log):
        path.parent.mkdir(parents=True, exist_ok=True)
    print(time.strftime('%H:%M:%S'), name, flush=True)
    with log.open('w') as file:
        process = subprocess.Popen([sys.executable, *words], stdout=file, stderr=file, start_new_session=True)
        try:
            code = process.wait()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # with the processes of a benchmark
                process.wait()
    if code:
        print(f'{log}: failed', *log.read_text(encoding='utf-8', errors='replace').splitlines()[-5:], sep='\n  ')
        return False
    if not output:
        shutil.copy(log, done)
    save()
    return True


def bench(name, configs, rounds, more=()):
    """Benchmark `configs`, texts of flags, set up side by side where the memory allows; return whether it succeeded."""
    words = [f'--rounds={1 if SMOKE else rounds}', *more, f'--output={WORK}/records/gpu/{name}.json',
             *(f'{" ".join(TINY)} --dtype=bfloat16' if SMOKE else config for config in configs)]
    return any(call(name, ['dev/bench.py', f'--jobs={jobs}', *words], f'{name}.json') for jobs in (4, 1))


# ----------------------------------------------------------------------------------------------------------------------
# Steps


def speed(sizes):
    """Measure speed and memory next to nanoGPT; each size with the first micro-batch that fits."""
    for size, (micro_batches, together) in sizes.items():
        measured = [n for n in micro_batches if (WORK / f'records/gpu/speed_{size}_micro{n}.json').exists()]
        for n in measured or micro_batches:
            adamw = f'--model_size={size} --total_batch_size=120 --batch_size={n}'
            # 60 and 8 sequences, the paper's shares of a mini-batch
            sophia = [f'{adamw} --optimizer_name=sophiag', f'{adamw} --optimizer_name=sophiah --hessian_batch_size=8']
            name, rounds = f'speed_{size}_micro{n}', 6 if together else 4
            more = [f'--profile={WORK}/records/gpu/profile_{name}.txt']
            if (WORK / 'data/nanoGPT').is_dir():
                more.append(f'--baseline={WORK}/data/nanoGPT')
            if bench(name, [adamw, *sophia * together], rounds, more=more):
                if not together:
                    bench(f'{name}_sophia', sophia, rounds)
                break


def candidates():
    """Measure the candidates at 30M in turns, with AdamW and then with Sophia-G."""
    for name in ('adamw', 'sophiag'):
        bench(f'candidates_30M_{name}', [f'{words} --model_size=30M --total_batch_size=120 --optimizer_name={name}'
                                         for words in CANDIDATES.values()], 6)


def tests():
    """Run the tests marked gpu, and train in float16, where estimates need a loss scale that fits them."""
    call('tests', ['-m', 'pytest', 'tests/test_hessian.py' if SMOKE else 'tests', '-m', 'gpu', '-q', '-p', 'no:xdist'])
    tiny = [*TINY, '--max_iters=20', '--dtype=float32'] if SMOKE else ['--max_iters=300', '--dtype=float16']
    for name in ('sophiag', 'sophiah'):
        call(f'float16_{name}', ['train.py', '--model_size=30M', f'--dataset={WORK}/data/books',
                                 '--total_batch_size=32', '--batch_size=32', '--warmup_iters=10', '--log_interval=10',
                                 f'--optimizer_name={name}', *tiny, '--auto_resume=True',
                                 f'--out_dir={WORK}/float16_{name}'])


def main(argv=None):
    parser = argument_parser(__doc__)
    parser.add_argument('steps', nargs='*', metavar='STEP', help='by default all, in the order above')
    parser.add_argument('--minutes', type=float, default=9, help='stop after so long (default: 9)')
    parser.add_argument('--pack', type=Path, metavar='BINS', help='compress a data set, and exit')
    parser.add_argument('--nanogpt', type=Path, metavar='PATH', help='for --pack: a checkout of nanoGPT')
    args = parser.parse_args(argv)
    steps = {'candidates': candidates, 'speed': lambda: speed(SIZES), 'tests': tests, 'large': lambda: speed(LARGE)}
    if unknown := set(args.steps) - steps.keys():
        parser.error(f'{min(unknown)}: unknown step; choose from {", ".join(steps)}')
    if args.pack:
        pack(args.pack, args.nanogpt)
    else:
        carry_out([steps[name] for name in args.steps or steps], args.minutes)


def carry_out(steps, minutes):
    """Take the steps, functions, and stop after `minutes`; what is running then can be continued."""
    os.environ['TORCHINDUCTOR_CACHE_DIR'] = str((WORK / 'cache').resolve())  # one for all that is compiled

    def stop(*_):
        raise TimeIsUp

    signal.signal(signal.SIGALRM, stop)
    signal.signal(signal.SIGTERM, stop)
    signal.setitimer(signal.ITIMER_REAL, 60 * minutes)
    print('commit', git_commit(), flush=True)
    try:
        if SMOKE and not (WORK / 'data.tar.xz').exists():
            rng, bins = np.random.default_rng(0), WORK / 'random'
            write_bins(bins, dict(tokenizer='gpt2', vocab_size=50257, dtype='uint16', eot_id=50256),
                       train=rng.integers(50257, size=2 * PIECE * EVERY).astype('<u2'),
                       val=rng.integers(50257, size=PIECE).astype('<u2'))
            pack(bins)
        unpack()
        for step in steps:
            try:
                step()
            except SystemExit as error:  # the other steps may work
                print(error, flush=True)
    except TimeIsUp:
        print('stopped; call it again to continue', flush=True)
    signal.setitimer(signal.ITIMER_REAL, 0)
    save()


if __name__ == '__main__':
    main()
