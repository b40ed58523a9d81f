"""Everything that needs a GPU, the most important first, in stretches of minutes.

  python data/text/prepare.py BOOKS.txt --val_file OTHER_AUTHORS.txt --out_dir=data/books
  python dev/gpu.py --pack data/books --nanogpt ../nanoGPT      out/gpu/pack: compressed data and nanoGPT's model.py
  python dev/gpu.py                                             on the GPU: whatever is missing, for nine minutes
  python dev/gpu.py study speed                                 these steps only
  SMOKE=1 python dev/gpu.py                                     a trial of all steps on CPU, with a tiny model

Steps: study (records/gpu_30m, parts A to C), speed (next to nanoGPT), candidates (changes that may gain speed), tests
(those marked gpu, and a run in float16), over (part D of the study, for time left over).

Call it again and it continues: finished work is skipped, interrupted runs resume from their checkpoints. Everything
finished is in out/gpu/records and, after each piece, in OUT/gpu.tar.gz, where OUT is out/gpu or from the environment.
Unpacked into out/gpu on a machine without a history, that archive makes it skip the same work.
"""

import argparse
import json
import lzma
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from dev import studies
from records.gpu_30m import study
from runtime.files import atomic_write, checksum, git_commit, write_json, write_text

SMOKE = bool(os.environ.get('SMOKE'))
WORK = ROOT / 'out' / ('gpu_smoke' if SMOKE else 'gpu')
PACK, RECORDS, LOGS, RUNS = WORK / 'pack', WORK / 'records', WORK / 'logs', WORK / 'runs'
PART = 2 ** 23  # tokens in a compressed file: one core each
PIECE, EVERY = 10240, 45  # every 45th piece of 10,240 tokens of the training text is held out
DEVICE = '--device=cpu' if SMOKE else '--device=cuda'
TINY = ['--n_layer=1', '--n_head=2', '--n_embd=32', '--block_size=32', '--total_batch_size=4', '--batch_size=2',
        '--eval_iters=2', DEVICE]
# Model size → (micro-batches to try, largest first; whether all four programs fit into 80 GB of memory together).
SIZES = {'30M': ((30,), True), '125M': ((30,), True), '355M': ((30, 15), False), '770M': ((15, 6), False)}
# Name → (environment, flags, edits as (file, old, new)). The first and the last are the same, to show the noise.
CANDIDATES = {
    'base': ({}, '', []),
    'bf16_residual': ({}, '', [('model.py', 'x = F.dropout(x, self.config.dropout, self.training)\n        divisors',
                                'x = F.dropout(x.bfloat16(), self.config.dropout, self.training)\n        divisors')]),
    'separate_qkv': ({}, '', [('model.py', 'self.c_attn(x).split(C, dim=2))',
                               '(F.linear(x, w) for w in self.c_attn.weight.split(C)))')]),
    'micro_15': ({}, '--batch_size=15', []),
    'micro_60': ({}, '--batch_size=60', []),
    'coordinate_descent': ({'TORCHINDUCTOR_COORDINATE_DESCENT_TUNING': '1'}, '', []),
    'base_again': ({}, '', []),
}


class TimeIsUp(BaseException):
    """Raised by the alarm; an Exception could be taken for the failure of one step."""


# ----------------------------------------------------------------------------------------------------------------------
# Data: compressed where it is prepared, and made on the machine with the GPU


def pack(bins, nanogpt):
    """Compress the bins of a data set into PACK, and add nanoGPT's model."""
    PACK.mkdir(parents=True, exist_ok=True)
    tokens = {split: np.fromfile(bins / f'{split}.bin', '<u2') for split in ('train', 'val')}
    parts = {f'{split}.{i:02}.xz': ids[start:start + PART] for split, ids in tokens.items()
             for i, start in enumerate(range(0, len(ids), PART))}
    # A literal's context is the byte at the same place in the token before.
    filters = [dict(id=lzma.FILTER_LZMA2, preset=9 | lzma.PRESET_EXTREME, lc=3, lp=1, pb=1, dict_size=2 ** 24)]

    def compress(name):
        if not (PACK / name).exists():
            with atomic_write(PACK / name) as file:
                file.write(lzma.compress(parts[name].tobytes(), filters=filters))

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(compress, parts))
    shutil.copy(bins / 'meta.json', PACK)
    if nanogpt:
        (PACK / 'nanoGPT').mkdir(exist_ok=True)
        shutil.copy(nanogpt / 'model.py', PACK / 'nanoGPT')
    size = sum(path.stat().st_size for path in PACK.rglob('*') if path.is_file())
    print(f'{PACK}: {size / 2 ** 20:.1f} MiB; commit {git_commit()}')


def unpack():
    """Make the data sets `books`, whose training text lacks the pieces held out, and `heldout`, these pieces."""
    if (WORK / 'heldout/meta.json').exists():
        return
    if not (PACK / 'meta.json').exists():
        raise SystemExit(f'{PACK}: no data there; make it with --pack')
    meta = json.loads((PACK / 'meta.json').read_text())

    def read(split):
        with ThreadPoolExecutor() as threads:
            parts = threads.map(lambda path: lzma.decompress(path.read_bytes()), sorted(PACK.glob(f'{split}.*.xz')))
            return np.frombuffer(b''.join(parts), '<u2')

    train, val = read('train'), read('val')
    held = np.arange(len(train)) // PIECE % EVERY == EVERY - 1
    write_bins(WORK / 'books', meta, train=train[~held], val=val)
    write_bins(WORK / 'heldout', meta, train=train[held], val=train[held])  # a data set has both


def write_bins(folder, meta, **splits):
    """Write a data set with the tokenizer of `meta`, split → tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, tokens in splits.items():
        tokens.tofile(folder / f'{split}.bin')
    about = {split: dict(tokens=len(tokens), documents=int((tokens == meta['eot_id']).sum()),
                         sha256=checksum(folder / f'{split}.bin')) for split, tokens in splits.items()}
    write_json(folder / 'meta.json', {**{key: meta[key] for key in meta.keys() - {'train', 'val'}}, **about})


# ----------------------------------------------------------------------------------------------------------------------
# Carrying out


def save():
    """Write the finished work into OUT/gpu.tar.gz."""
    runs = RECORDS / 'gpu_30m/runs.jsonl'
    runs.parent.mkdir(parents=True, exist_ok=True)
    studies.collect([RUNS], runs)
    out = Path(os.environ.get('OUT', WORK))
    with atomic_write(out / 'gpu.tar.gz') as file, tarfile.open(fileobj=file, mode='w:gz') as archive:
        for path in (RECORDS, *LOGS.glob('*'), *WORK.glob('float16_*/metrics.jsonl'), *RUNS.rglob('log.txt')):
            archive.add(path, path.relative_to(WORK))


def call(name, words, output=None, **environment):
    """Run Python with `words` unless it has succeeded before; return whether it has.

    output: the file, below RECORDS, that tells so; by default the program's log.
    """
    done, log = RECORDS / (output or f'gpu/{name}.txt'), LOGS / f'{name}.txt'
    if done.exists():
        return True
    done.parent.mkdir(parents=True, exist_ok=True)
    LOGS.mkdir(parents=True, exist_ok=True)
    print(time.strftime('%H:%M:%S'), name, flush=True)
    with log.open('w') as file:
        process = subprocess.Popen([sys.executable, *words], cwd=ROOT, env=os.environ | environment, stdout=file,
                                   stderr=file, preexec_fn=os.setpgrp)
        try:
            code = process.wait()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # with the processes of a benchmark
                process.wait()
    if code:
        print_end(log)
        return False
    if not output:
        shutil.copy(log, done)
    save()
    return True


def print_end(log):
    """Print the last lines of the log of a program that has failed."""
    lines = log.read_text(encoding='utf-8', errors='replace').splitlines()[-5:]
    print(f'{log.relative_to(ROOT)}: failed', *lines, sep='\n  ', flush=True)


def bench(name, configs, rounds, script='dev/bench.py', baseline=False, profile=False, **environment):
    """Benchmark `configs`, texts of flags; return whether it succeeded."""
    more = [f'--baseline={(PACK / "nanoGPT").relative_to(ROOT)}'] * (baseline and (PACK / 'nanoGPT').is_dir())
    more += [f'--profile={(RECORDS / f"gpu/profile_{name}.txt").relative_to(ROOT)}'] * profile
    output = f'gpu/{name}.json'
    return call(name, [str(script), DEVICE, f'--rounds={1 if SMOKE else rounds}', *more,
                       f'--output={(RECORDS / output).relative_to(ROOT)}',
                       *(f'{" ".join(TINY)} --dtype=bfloat16' if SMOKE else config for config in configs)],
                output, **environment)


# ----------------------------------------------------------------------------------------------------------------------
# Steps


def find(trial, known):
    """Return the `Result` of a trial, None if it is not finished. known: results by the trials' names."""
    name = str(trial.path)
    if name not in known and (found := studies.finished(RUNS / trial.path)):
        known[name] = found
    return known.get(name)


def launch(trial):
    """Start a run of the study; return its process."""
    there, words = RUNS / trial.path, study.command(trial)
    there.mkdir(parents=True, exist_ok=True)
    words.append(DEVICE)
    if SMOKE:
        steps = dict(trial.settings)['max_iters'] // 150
        words += [*TINY, f'--max_iters={steps}', f'--warmup_iters={steps // 3}', '--log_interval=1',
                  f'--dataset={study.DATASET.replace("out/gpu/", "out/gpu_smoke/")}']
    print(time.strftime('%H:%M:%S'), trial.path, flush=True)
    with (there / 'log.txt').open('a') as log:
        return subprocess.Popen([sys.executable, *words, f'--out_dir={there.relative_to(ROOT)}'], cwd=ROOT, stdout=log,
                                stderr=log)


def train_study(arms, jobs, over):
    """Train the runs of the study that are due: parts A to C, or all parts if `over`."""
    known = {name: studies.recorded(record)
             for name, record in studies.read_records(RECORDS / 'gpu_30m/runs.jsonl').items()}
    try:
        studies.train_due(partial(study.protocol, arms=arms, over=over), partial(find, known=known), launch, jobs, save)
    except SystemExit:
        print_end(max(RUNS.rglob('log.txt'), key=lambda log: log.stat().st_mtime))
        raise


def speed():
    """Measure speed and memory next to nanoGPT; each size with the first micro-batch that fits."""
    for size in ('30M',) if SMOKE else SIZES:
        micro_batches, together = SIZES[size]
        for n in [n for n in micro_batches if (RECORDS / f'gpu/speed_{size}_micro{n}.json').exists()] or micro_batches:
            adamw = f'--model_size={size} --total_batch_size=120 --batch_size={n}'
            sophia = [f'{adamw} --optimizer_name={name}' for name in ('sophiag', 'sophiah')]
            measure = partial(bench, rounds=6 if together else 4)
            name = f'speed_{size}_micro{n}'
            if measure(name, [adamw, *sophia * together], baseline=True, profile=True):
                if not together:
                    measure(f'{name}_sophia', sophia)
                break


def candidates():
    """Measure the candidates at 125M, and compare them with the unchanged program."""
    for name, (environment, flags, edits) in CANDIDATES.items():
        tree = edited_copy(WORK / 'candidates' / name, edits) if edits else ROOT
        bench(f'candidate_{name}', [f'--model_size=125M --total_batch_size=120 --batch_size=30 {flags}'], 6,
              tree / 'dev/bench.py', **environment)
    rows = {name: json.loads(path.read_text())['results'][0] for name in CANDIDATES
            if (path := RECORDS / f'gpu/candidate_{name}.json').exists()}
    if base := rows.get('base'):
        lines = [f'{name}: tokens/s {row["tokens_per_sec"] / base["tokens_per_sec"]:.3f} of base, loss '
                 f'{row["loss"] - base["loss"]:+.5f}, memory {row["memory_gb"]:.1f} GB' for name, row in rows.items()]
        write_text(RECORDS / 'gpu/candidates.txt', '\n'.join(lines) + '\n')
        print('\n'.join(lines))


def edited_copy(folder, edits):
    """Return a copy of the repository's code with `edits`, (file, old, new)."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns('out', '.git', '.venv', '.*cache*', '*.jsonl', '*.bin'))
    for file, old, new in edits:
        text = (folder / file).read_text(encoding='utf-8')
        if text.count(old) != 1:
            raise SystemExit(f'{file}: {old!r} is there {text.count(old)} times; correct CANDIDATES in dev/gpu.py')
        write_text(folder / file, text.replace(old, new))
    return folder


def tests():
    """Run the tests marked gpu, and train in float16, where estimates need a loss scale that fits them."""
    call('tests', ['-m', 'pytest', 'tests/test_hessian.py' if SMOKE else 'tests', '-m', 'gpu', '-q', '-p', 'no:xdist'])
    tiny = [*TINY, '--max_iters=20', '--dtype=float32'] if SMOKE else ['--max_iters=300', '--dtype=float16']
    for name in ('sophiag', 'sophiah'):
        call(f'float16_{name}', ['train.py', '--model_size=30M', f'--dataset={(WORK / "books").relative_to(ROOT)}',
                                 '--total_batch_size=32', '--batch_size=32', '--warmup_iters=10', '--log_interval=10',
                                 f'--optimizer_name={name}', *tiny, '--auto_resume=True',
                                 f'--out_dir={(WORK / f"float16_{name}").relative_to(ROOT)}'])


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('steps', nargs='*', metavar='STEP', help='by default all, in the order above')
    parser.add_argument('--minutes', type=float, default=9, help='stop after so long (default: 9)')
    parser.add_argument('--jobs', type=int, default=2, help='runs of the study at a time (default: 2), so that one '
                        'computes while another starts')
    parser.add_argument('--fresh', action='store_true', help='Sophia-G with a fresh h as a fourth arm')
    parser.add_argument('--pack', type=Path, metavar='BINS', help='compress a data set, and exit')
    parser.add_argument('--nanogpt', type=Path, metavar='PATH', help='for --pack: a checkout of nanoGPT')
    args = parser.parse_args(argv)
    arms = (*study.THREE, 'fresh') if args.fresh else study.THREE
    steps = {'study': lambda: train_study(arms, args.jobs, over=False), 'speed': speed, 'candidates': candidates,
             'tests': tests, 'over': lambda: train_study(arms, args.jobs, over=True)}
    if unknown := set(args.steps) - steps.keys():
        parser.error(f'{min(unknown)}: unknown step; choose from {", ".join(steps)}')
    if args.pack:
        pack(args.pack, args.nanogpt)
    else:
        carry_out([steps[name] for name in args.steps or steps], args.minutes)


def carry_out(steps, minutes):
    """Take the steps, functions, and stop after `minutes`; what is running then can be continued."""
    os.environ['TORCHINDUCTOR_CACHE_DIR'] = str(WORK / 'cache')  # one for all that is compiled

    def stop(*_):
        raise TimeIsUp

    signal.signal(signal.SIGALRM, stop)
    signal.signal(signal.SIGTERM, stop)
    signal.setitimer(signal.ITIMER_REAL, 60 * minutes)
    print('commit', git_commit(), flush=True)
    if SMOKE and not PACK.exists():
        write_bins(WORK / 'random', dict(tokenizer='gpt2', vocab_size=50257, dtype='uint16', eot_id=50256), **{
            split: np.random.default_rng(0).integers(50257, size=n).astype('<u2')
            for split, n in (('train', 2 * PIECE * EVERY), ('val', PIECE))})
        pack(WORK / 'random', None)
    try:
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
