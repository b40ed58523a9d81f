"""Everything that needs a GPU, in order, in pieces: tests, benchmark, runs that compare the optimizers, large models.

  python dev/gpu_suite.py --dataset data/books --text train.txt.bz2 --val_text val.txt.bz2 --minutes 8.5
  python dev/gpu_suite.py --dry_run                        the plan, and what of it is done
  python dev/gpu_suite.py --device cpu --tiny              try it on a CPU, in minutes

Each call resumes with the next item that --records lacks, stops after --minutes, and can be repeated until all is done.
What cannot be resumed waits for a call with enough time left: once it was cut off, with more than it had then. Training
that was cut off resumes from its checkpoint in --work. What has ended is in --records at once, small files only, and in
the archive --out if one is given. Needs Python and torch, neither matplotlib nor a network.

The runs: GPT-2 on the text given, AdamW, Lion, Muon (at AdamW's learning rate), Sophia-G and Sophia-H at Table 3's
learning rate times --multipliers, AdamW's swept as finely as Sophia's, each on the whole schedule of T = --max_iters or
of T/2; then a second seed of the best runs of AdamW at T and Sophia-G at T/2; then both with a short warm-up, and
Sophia-G with other β1, γ, ε and Hessian averages; then AdamW and Sophia-G over mini-batch and horizon.
scripts/speedup.py judges the first (RECORDS/main), scripts/paper/loss_grid.py draws the last (RECORDS/map). Remove a
record to have it made again.
"""

import argparse
import contextlib
import importlib.util
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from analysis.runs import ROOT, below, print_table, read_json, read_run, write_json
from data.loader import read_meta
from dev.bench import default_configs
from optimizers import LION_LR, peak_learning_rate
from runtime.checkpoint import FAILED
from runtime.device import check_device
from runtime.files import atomic_write
from scripts.sweep import expand, interrupt, progress, train_all

GROUPS = ('tests', 'bench', 'runs', 'seeds', 'large', 'variants', 'map')
# One GPU of 141 GB holds the states of the 6.6B model (107 GB) and the estimate's gradient (27 GB) under FSDP only:
# no 16-bit copies of all weights, no second gradient.
LARGE = [('1.5B', ['--block_size=2048', '--batch_size=4', '--total_batch_size=16']),
         ('6.6B', ['--block_size=2048', '--batch_size=1', '--total_batch_size=4', '--parallel=fsdp',
                   '--activation_checkpointing=True'])]
CUT_OFF = 124  # the exit code of what is killed at the end of a call's time, as with timeout(1)
# Minutes after which the benchmark of a size begins no more rounds; compilation takes most of the first ones.
BENCH_MINUTES = {'30M': 2.0, '125M': 2.5, '355M': 3.5, '770M': 5.5}
TINY = ['--n_layer=1', '--n_head=2', '--n_embd=32', '--block_size=32', '--log_interval=2']


class Command:
    """An item that is one command with a result of a few lines: recorded as NAME.json with exit code and output.

    Args: expected: minutes it is expected to take, at most.
    """

    def __init__(self, name, argv, records, expected, missing=''):
        self.name, self.argv, self.record, self.expected = name, argv, records / f'{name}.json', expected
        self.missing = missing

    @property
    def result(self):
        """(exit code, minutes) of its record; None where there is none. SystemExit when that is damaged."""
        if not self.record.is_file():
            return None
        found = read_json(self.record)
        try:
            return int(found['exit_code']), float(found['seconds']) / 60
        except (KeyError, TypeError, ValueError):
            raise SystemExit(f'{self.record}: not a record with "exit_code" and "seconds"; remove it, to run '
                             f'{self.name} again') from None

    @property
    def cut_off(self):
        """The minutes after which it was cut off; 0 where it was not."""
        code, minutes = self.result or (0, 0.0)
        return minutes if code == CUT_OFF else 0.0

    @property
    def needs(self):
        """Minutes without which it is not begun: more than it had when it was cut off, as it would be again."""
        return max(self.expected, round(1.1 * self.cut_off, 2))

    @property
    def state(self):
        if self.cut_off:
            return f'cut off after {self.cut_off:.1f} minutes'
        if self.result:
            return f'done (exit code {self.result[0]})'
        return f'left out: there is no {self.missing}' if self.missing else 'missing'

    def run(self, deadline):
        """Runs the command until it ends or `deadline`, which is recorded as exit code CUT_OFF. True when it ended."""
        started = time.monotonic()
        process = subprocess.Popen(self.argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                   start_new_session=True)
        try:
            output, _ = process.communicate(timeout=max(1.0, deadline - started))
            code = process.returncode
        except subprocess.TimeoutExpired as stopped:
            code, output = CUT_OFF, stopped.stdout or b''
        finally:  # with all that it has started, which would keep the GPU busy
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output = output.decode(errors='replace')
        print(output[-3000:])
        write_json(self.record, dict(command=['python', *self.argv[1:]], exit_code=code,
                                     seconds=round(time.monotonic() - started, 1), output=output[-20000:]))
        return code != CUT_OFF


class Training:
    """An item that is one run of train.py: recorded as its metrics.jsonl and config.json."""

    needs = 0.0  # it is resumed

    def __init__(self, item, records):
        self.item, self.name, self.record = item, f'{item.out_dir.parent.name}/{item.out_dir.name}', records
        self.record = records / self.name

    @property
    def state(self):
        if (self.record / FAILED).is_file():
            return 'done (diverged)'
        return 'done' if (self.record / 'metrics.jsonl').is_file() else {
            'not begun': 'missing'}.get(progress(self.item), progress(self.item))

    def run(self, deadline):
        """Trains until the run ends or `deadline`; True when it ended. One that failed is not recorded."""
        self.item.check()
        ended = list(train_all([self.item], deadline=deadline))
        if not self.item.finished and not self.item.failure:
            if ended:
                print(f'{self.name}: failed; see {self.item.out_dir}/log.txt')
            return bool(ended)
        self.record.mkdir(parents=True, exist_ok=True)
        # metrics.jsonl comes last: it is what says that the record is complete.
        for name in (FAILED, 'config.json', 'metrics.jsonl'):
            if (self.item.out_dir / name).is_file():
                shutil.copy(self.item.out_dir / name, self.record / name)
        return True


def base_arguments(args):
    """Arguments of train.py that all runs share."""
    base = [f'--model_size={args.model_size}', f'--device={args.device}',
            f'--dataset={below(ROOT / "data", args.dataset)}', '--always_save_checkpoint=False', '--eval_iters=0']
    return base + (TINY + ['--eval_iters=4'] if args.tiny else [])


def entry(args, optimizer, T, multipliers, **settings):
    """One object of a sweep's spec: an optimizer at T steps, over multiples of its learning rate in the table."""
    peak, _ = peak_learning_rate(optimizer, args.model_size)
    learning_rates = [float(f'{factor * peak:.6g}') for factor in multipliers]
    batch = settings.setdefault('total_batch_size', args.total_batch_size)
    return dict(optimizer_name=optimizer, max_iters=T, learning_rate=learning_rates, **settings, base=[
        f'--batch_size={min(args.batch_size, batch)}', f'--warmup_iters={args.warmup_iters or max(1, T // 2)}',
        f'--eval_interval={max(1, T // 10)}'])


def training_items(args, group):
    """The `Training` items of a group, in order."""
    T, half, first, others = args.max_iters, args.max_iters // 2, args.multipliers[:1], args.multipliers[1:]
    where = 'map' if group == 'map' else 'main'
    if group == 'runs':
        headline = [('adamw', T), ('sophiag', half), ('adamw', half), ('sophiag', T), ('muon', T), ('muon', half),
                    ('sophiah', half), ('sophiah', T), ('lion', T)]
        swept = [('adamw', T), ('sophiag', half), ('adamw', half), ('muon', T), ('sophiah', half), ('lion', T)]
        runs = [entry(args, *pair, first) for pair in headline] + [entry(args, *pair, others) for pair in swept]
    elif group == 'seeds':
        # The headline pair at the learning rate that turned out best; known once all are recorded.
        runs = [dict(found, seed=args.seed2) for found in (best_entry(args, 'adamw', T),
                                                           best_entry(args, 'sophiag', half)) if found]
    elif group == 'variants':
        # First what small models gain or lose most by: a shorter momentum, and a warm-up as short as the paper's. Among
        # the others a β2 with which h averages over the tenth part of the steps.
        short = dict(warmup_iters=max(1, half // 20))
        runs = [entry(args, 'sophiag', half, args.multipliers[:2], beta1=0.9)]
        runs += [entry(args, 'adamw', half, first, **short)]
        runs += [entry(args, 'sophiag', half, first, **variant) for variant in (
            short, dict(gamma=0.02), dict(gamma=0.1), dict(gamma=0.5), dict(eps=1e-7), dict(beta2=0.9),
            dict(hessian_interval=1))]
    else:
        runs = [entry(args, optimizer, horizon, args.multipliers[:2], total_batch_size=batch)
                for batch in args.map_batches for horizon in (half // 2, half) for optimizer in ('adamw', 'sophiag')]
    if not runs:
        return []
    return [Training(item, args.records)
            for item in expand(dict(base=base_arguments(args), runs=runs), args.work / where)]


def best_entry(args, optimizer, T):
    """The `entry` of an optimizer at T with the learning rate whose recorded run is best; None while one is missing."""
    losses = {}
    for factor in args.multipliers:
        (item,) = [Training(item, args.records) for item in expand(
            dict(base=[], runs=[entry(args, optimizer, T, [factor])]), args.work / 'main')]
        if not item.state.startswith('done'):
            return None
        if 'diverged' not in item.state:
            losses[factor] = read_run(item.record).last('val/loss')
    return entry(args, optimizer, T, [min(losses, key=losses.get)]) if losses else None


def items_of(args, group):
    """The items of a group, in order."""
    if group == 'tests':
        missing = '' if importlib.util.find_spec('pytest') else 'pytest'
        argv = [sys.executable, '-m', 'pytest', '-q', '-m', 'gpu', 'tests']
        return [Command('tests', argv, args.records, 7, missing)]
    if group == 'bench':
        return bench_items(args)
    if group == 'large':
        return large_items(args)
    return training_items(args, group)


def bench_items(args):
    """The benchmark of each size by itself, and Sophia-H after the others, as its product takes long to compile; then
    which of two kernels for attention is faster at d = 64, T = 1024."""
    configs, hutchinson = {}, {}
    for config in default_configs(torch.device(args.device), args.tiny):
        size = re.search(r'--model_size=(\S+)', config)
        of_sizes = hutchinson if config.endswith('sophiah') else configs
        of_sizes.setdefault(size[1] if size else 'tiny', []).append(config)
    attention = configs['tiny'][:1] if args.tiny else [
        '--model_size=125M --batch_size=32', '--model_size=355M --batch_size=16']
    baselines = [f'--baseline={folder}' for folder in args.baseline]
    wanted = [(f'bench_{size}{suffix}', [*of_size, *more], BENCH_MINUTES.get(size, 2.0))
              for of_sizes, suffix, more in ((configs, '', baselines), (hutchinson, '_sophiah', []))
              for size, of_size in of_sizes.items()]
    wanted += [(f'bench_{kernel}', [*attention, '--steps_only', f'--attention={kernel}'], 2.0)
               for kernel in ('flash', 'math' if args.device == 'cpu' else 'cudnn')]
    return [Command(name, [sys.executable, 'dev/bench.py', *flags, f'--device={args.device}',
                           f'--minutes={minutes}', '--output', below(ROOT, args.records / f'{name}_results.json')],
                    args.records, minutes + (3.5 if name.endswith('sophiah') else 1.5))
            for name, flags, minutes in wanted]


def large_items(args):
    """The 1.5B and 6.6B models, AdamW and Sophia-G, each alone on the GPU; and memory beside the plan's."""
    items, models = [], [('tiny', [*TINY, '--total_batch_size=4', '--batch_size=2'])] if args.tiny else LARGE
    room = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else math.inf
    for size, flags in models:
        missing = 'GPU of 141 GB' if size == '6.6B' and room < 140e9 else ''
        flags = [f'--model_size={size}', *flags]
        for name in ('adamw', 'sophiag'):
            output = below(ROOT, args.records / f'large_{size}_{name}_results.json')
            items.append(Command(f'large_{size}_{name}', [
                sys.executable, 'dev/bench.py', shlex.join([*flags, f'--optimizer_name={name}']), '--steps_only',
                '--rounds', '4', f'--device={args.device}', '--output', output], args.records, 4, missing))
            items.append(Command(f'plan_{size}_{name}', [
                sys.executable, 'scripts/plan.py', '--measure', f'--device={args.device}', '--compile=False', *flags,
                f'--optimizer_name={name}'], args.records, 2, missing))
    return items


def prepare_data(args):
    """Makes the bins where they are missing."""
    if (Path(args.dataset) / 'meta.json').is_file():
        return
    if args.tiny:
        command = ['data/pysource/prepare.py']
    elif args.text and args.val_text:
        command = ['data/text/prepare.py', '--tokenizer=gpt2', *(str(Path(p).resolve()) for p in args.text),
                   '--val_file', *(str(Path(p).resolve()) for p in args.val_text)]
    else:
        raise SystemExit(f'{args.dataset}: no bins in it; give --text and --val_text to make them')
    done = subprocess.run([sys.executable, *command, f'--out_dir={Path(args.dataset).resolve()}'], cwd=ROOT)
    if done.returncode:
        raise SystemExit('the data could not be prepared')


def pack(records, out):
    """Writes everything in `records` as the archive `out`."""
    if out and records.is_dir():
        with atomic_write(out) as f, tarfile.open(fileobj=f, mode='w:gz') as archive:
            archive.add(records, arcname=records.name)


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--minutes', type=float, default=9.0, help='stop after so many (default: 9)')
    parser.add_argument('--dry_run', action='store_true', help='list the plan')
    parser.add_argument('--groups', nargs='+', choices=GROUPS, default=GROUPS, help=f'default: {" ".join(GROUPS)}')
    parser.add_argument('--records', type=Path, default=Path('records/gpu'), help='results, read and written')
    parser.add_argument('--out', type=Path, help='also pack all of --records into this .tar.gz, after every item')
    parser.add_argument('--work', type=Path, default=Path('out/gpu_suite'), help='runs with their checkpoints')
    parser.add_argument('--device', default='cuda')
    parser.add_argument('--dataset', default='data/books', help='directory of the bins (default: data/books)')
    parser.add_argument('--text', nargs='+', default=[], metavar='FILE',
                        help='to make the bins of, where missing (needs tiktoken with its GPT-2 vocabulary)')
    parser.add_argument('--val_text', nargs='+', default=[], metavar='FILE')
    parser.add_argument('--model_size', default='30M', choices=LION_LR)
    parser.add_argument('--max_iters', type=int, default=2000, help='T (default: 2000)')
    parser.add_argument('--total_batch_size', type=int, default=128, help='sequences (default: 128)')
    parser.add_argument('--batch_size', type=int, default=32, help='micro-batch (default: 32)')
    parser.add_argument('--warmup_iters', type=int, help='default: half of each run, which suits all of them when '
                        'runs are short (README, "What small runs say")')
    parser.add_argument('--multipliers', nargs='+', type=float, default=[1, 2, 0.5],
                        help="of Table 3's learning rate, the first one first (default: 1 2 0.5)")
    parser.add_argument('--map_batches', nargs='+', type=int, default=[8, 32, 480], metavar='N',
                        help='mini-batches of the map (default: 8 32 480)')
    parser.add_argument('--seed2', type=int, default=1338, help='the second seed (default: 1338)')
    parser.add_argument('--baseline', action='append', default=[], metavar='PATH',
                        help='a checkout of nanoGPT for the benchmark to measure beside ours')
    parser.add_argument('--tiny', action='store_true', help='a tiny model, bytes as tokens, a few steps')
    args = parser.parse_args(argv)
    if args.out and not args.out.name.endswith('.tar.gz'):
        parser.error(f'--out={args.out}: must end in .tar.gz')
    if args.tiny:
        args.model_size, args.max_iters, args.total_batch_size, args.batch_size = 'tiny', 20, 4, 2
        args.dataset, args.map_batches, args.multipliers = args.work / 'pysource', [2], [1, 2]
    if args.max_iters % 2:
        parser.error('--max_iters must be even: half of it is compared with all of it')
    args.records, args.work = args.records.resolve(), args.work.resolve()
    return args


def main(argv=None):
    args = parse(argv)
    deadline = time.monotonic() + 60 * args.minutes
    if args.dry_run:
        rows = [dict(group=group, item=item.name, state=item.state)
                for group in args.groups for item in items_of(args, group)]
        print_table(rows)
        if 'seeds' in args.groups and not any(row['group'] == 'seeds' for row in rows):
            print('and a second seed of the best runs, once those are known')
        return
    check_device(args.device)
    signal.signal(signal.SIGTERM, interrupt)
    prepare_data(args)
    tokens = read_meta(args.dataset)['train']['tokens']
    block_size = 32 if args.tiny else 1024
    epochs = args.max_iters * args.total_batch_size * block_size / tokens
    print(f'T = {args.max_iters} steps of {args.total_batch_size} × {block_size} tokens: {epochs:.1f} epochs of '
          f'{tokens:,} tokens' + (' (more than 8: lower --max_iters)' if epochs > 8 else ''), flush=True)
    try:
        for group in args.groups:
            for item in items_of(args, group):
                if item.state.startswith(('done', 'left out')):
                    continue
                left = (deadline - time.monotonic()) / 60
                if left < item.needs:
                    print(f'{group}: {item.name}: needs {item.needs:g} minutes, {left:.1f} are left', flush=True)
                    continue
                print(f'{group}: {item.name}: {item.state}', flush=True)
                ended = left > 0 and item.run(deadline)
                pack(args.records, args.out)
                if not ended:
                    print(f'time is up at {item.name}: {item.state}')
                    return
    except KeyboardInterrupt:
        raise SystemExit('interrupted; the same command resumes where it stopped') from None
    missing = [item.name for group in args.groups for item in items_of(args, group)
               if not item.state.startswith(('done', 'left out'))]
    print(f'{len(missing)} failed or left for another call: {", ".join(missing)}' if missing else 'all done')


if __name__ == '__main__':
    main()
