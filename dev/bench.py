"""Measure the speed and memory of a training step for several configurations in turns.

  python dev/bench.py                                                     AdamW, Sophia-G and Sophia-H at a usual size
  python dev/bench.py '--model_size=125M' '--model_size=125M --optimizer_name=sophiag' --output bench.json
  python dev/bench.py --baseline ~/nanoGPT '--model_size=125M --compile=True'   and nanoGPT's model and AdamW
  python dev/bench.py --profile profile.txt '--model_size=125M'           the operators of a step by time, also of a
                                                                          step with an estimate

Each CONFIG is one quoted string: environment variables NAME=VALUE, if any, and arguments of train.py. Each runs in its
own process, because compiled code would be shared. They take turns, so that other load affects all alike. A baseline is
a checkout whose model.py has nanoGPT's GPT, GPTConfig and configure_optimizers. It gets the weights, batch, dtype and
compile of each CONFIG with AdamW. Tokens are random.

Columns are medians over the rounds. loss: loss of the fourth step, equal for programs that compute the same. step_ms:
time without an estimate. hessian_ms: extra time of an estimate. hessian_share: hessian_ms / (k · step_ms).
tokens_per_sec, mfu: estimates included. optimizer_ms: time of the optimizer's step. over_adamw: its ratio to fused
AdamW's. memory_gb: peak memory of the device, or of the process on a CPU.
"""

import contextlib
import importlib.util
import multiprocessing
import os
import shlex
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, fields
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import train
from analysis.figures import print_table
from data.loader import first_dir, read_meta
from hessian import StepHook
from loss import Losses, cross_entropy
from model import GPT, GPTConfig
from runtime import device as devices
from runtime import gpt, optim
from runtime.arguments import argument_parser, at_least
from runtime.distributed import World
from runtime.files import git_commit, write_json, write_text
from runtime.runlog import machine

CPU_MODEL = '--model_size=30M --block_size=256 --total_batch_size=4 --batch_size=4'
CUDA_MODEL = '--model_size=125M --batch_size=30 --total_batch_size=120'


def our_model(c, device):
    """Build the model of the settings `c` on the device, because initialization on one CPU core takes minutes."""
    torch.manual_seed(c.seed)
    with device:
        return GPT(gpt.config_of(GPTConfig, c.values, read_meta(first_dir(c.dataset))['vocab_size']))


def baseline_run(c, world, folder):
    """Build a `train.Run` with the model and AdamW of `folder`, and our weights, dtype and compile."""
    spec = importlib.util.spec_from_file_location('baseline_model', folder / 'model.py')
    baseline = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = baseline
    spec.loader.exec_module(baseline)
    ours, device = our_model(c, world.device), world.device
    known = {field.name for field in fields(baseline.GPTConfig)}
    shape = {key: value for key, value in asdict(ours.config).items() if key in known}
    model = baseline.GPT(baseline.GPTConfig(**shape)).to(device)
    model.load_state_dict(ours.state_dict())
    optimizer = model.configure_optimizers(c.weight_decay, c.learning_rate, (c.beta1, c.beta2), device.type)
    # nanoGPT compiles only the model, so its compiled code returns logits and writes a gradient of zeros for them.
    losses = Losses(torch.compile(model) if c.compile else model)
    scaler = torch.amp.GradScaler(device.type, enabled=c.dtype == 'float16')
    return train.Run(c, world, model, losses, optimizer, StepHook(model, optimizer), scaler,
                     devices.autocast(device, c.dtype), list(model.parameters()), cross_entropy)


class Case:
    """One configuration on one device, set up as in train.py, or with the baseline in `folder`."""

    def __init__(self, config, world, folder=None):
        self.config, self.device = config, world.device
        self.run = baseline_run(config, world, folder) if folder else train.set_up(
            config, world, our_model(config, world.device))
        torch.manual_seed(config.seed)  # gives a baseline the same batches
        self.vocab_size = read_meta(first_dir(config.dataset))['vocab_size']
        self.seconds = {True: [], False: []}  # times of steps with and without an estimate
        self.losses = []
        for iteration in (0, 1, 0, 1):  # compiles, and allocates optimizer state and gradients
            self.measure(iteration)
        for measured in self.seconds.values():
            measured.clear()
        if self.device.type == 'cuda':
            torch.cuda.empty_cache()  # leaves the memory to the next process
            torch.cuda.reset_peak_memory_stats(self.device)

    def batch(self):
        """Return a mini-batch of random tokens."""
        c = self.config
        return torch.randint(self.vocab_size, (c.total_batch_size, c.block_size + 1), device=self.device)

    def timed(self, function, *arguments):
        """Call a function; return (seconds, result)."""
        devices.synchronize(self.device)
        started = time.perf_counter()
        result = function(*arguments)
        devices.synchronize(self.device)
        return time.perf_counter() - started, result

    def measure(self, iteration):
        """Measure a step of iteration 0, with a Hessian estimate if the optimizer makes any, or 1, without."""
        seconds, step = self.timed(train.train_step, self.run, self.batch(), iteration)
        self.seconds[step.estimated].append(seconds)
        self.losses.append(step.loss)

    def results(self):
        """Return the table's row."""
        c = self.config
        plain = statistics.median(self.seconds[False] or self.seconds[True])
        row = dict(compile=c.compile, dtype=c.dtype, loss=self.losses[3], step_ms=1e3 * plain)
        average = plain
        if self.seconds[True] and self.seconds[False]:
            extra = statistics.median(self.seconds[True]) - plain
            average += extra / c.hessian_interval
            row.update(hessian_ms=1e3 * extra, hessian_share=extra / c.hessian_interval / plain)
        row['tokens_per_sec'] = c.total_batch_size * c.block_size / average
        if peak := devices.peak_flops(self.device):
            row['mfu'] = gpt.flops_per_token(self.run.raw_model) * row['tokens_per_sec'] / peak
        row['memory_gb'] = devices.peak_memory(self.device) / 1e9
        return {**row, **self.optimizer_step()}

    def optimizer_step(self):
        """Time the optimizer's step in turns with fused AdamW's on the same parameters, at learning rate 0."""
        optimizer, params = self.run.optimizer, self.run.params
        optim.set_learning_rate(optimizer, 0.0)
        for p in params:
            p.grad = torch.randn_like(p) * 1e-3
        fused = torch.optim.AdamW(params, lr=0.0, fused=True)
        turns = [(self.timed(optimizer.step)[0], self.timed(fused.step)[0]) for _ in range(11)]
        own, adamw = map(statistics.median, zip(*turns[1:]))  # the first turn allocates the state
        optimizer.zero_grad(set_to_none=True)
        return dict(optimizer_ms=1e3 * own, over_adamw=own / adamw)

    def take_turn(self):
        """Measure a step with a Hessian estimate, if the optimizer makes any, and one without."""
        if self.device.type == 'cuda':
            train.train_step(self.run, self.batch(), 0)  # allocates memory before anything is timed
        self.measure(0)
        self.measure(1)
        if self.device.type == 'cuda':
            torch.cuda.empty_cache()

    def profile(self):
        """Return a step's operators by their own time on the device, also for a step with an estimate."""
        device, tables = 'cuda' if self.device.type == 'cuda' else 'cpu', []
        for iteration in (1, 0) if all(self.seconds.values()) else (1,):  # all steps may be alike
            with torch.profiler.profile() as found:
                train.train_step(self.run, self.batch(), iteration)
            tables.append(found.key_averages().table(
                sort_by=f'self_{device}_time_total', row_limit=40, max_name_column_width=90))
        return '\nand of a step with an estimate\n'.join(tables)


def set_up(text, folder):
    """Set up this process's `case` from the CONFIG `text`, with the baseline in `folder`, if any."""
    global case
    variables, words = environment_of(text)
    os.environ.update(variables)
    config = train.resolve(words)
    devices.set_matmul_precision(config.dtype)
    case = Case(config, World(config.device, config.backend, 'ddp'), folder)


def environment_of(text):
    """Split a CONFIG into environment variables and arguments of train.py."""
    words = shlex.split(text)
    split = next((i for i, word in enumerate(words) if word.startswith('-') or '=' not in word), len(words))
    return dict(word.split('=', 1) for word in words[:split]), words[split:]


def call(method):
    """Call a method of this process's `case`."""
    return getattr(case, method)()


def main(argv=None):
    parser = argument_parser(__doc__, usage='%(prog)s [options] [CONFIG ...]', allow_abbrev=False)
    parser.add_argument('--baseline', type=Path, metavar='PATH', help='a checkout to compare with')
    parser.add_argument('--rounds', type=at_least(1), default=15,
                        help='steps of each kind and configuration (default: %(default)s)')
    parser.add_argument('--jobs', type=at_least(1), default=1,
                        help='CONFIGs set up at a time; more compile sooner but use more memory (default: %(default)s)')
    parser.add_argument('--profile', type=Path, metavar='FILE', help='also write a profile of each CONFIG')
    parser.add_argument('--output', type=Path, metavar='FILE.json', help='also write all measurements as JSON')
    # argparse leaves the CONFIGs over, because they may begin with --, like flags.
    args, texts = parser.parse_known_args(argv)
    if args.baseline and not (args.baseline / 'model.py').is_file():
        raise SystemExit(f'--baseline={args.baseline}: no model.py in it; pass a checkout of nanoGPT or a similar one')
    model = CUDA_MODEL if torch.cuda.is_available() else CPU_MODEL
    texts = texts or [f'{model} --optimizer_name={name}' for name in ('adamw', 'sophiag', 'sophiah')]
    adamw = [text for text in texts if train.resolve(environment_of(text)[1]).optimizer_name == 'adamw']
    cases = [(text, None) for text in texts] + [(text, args.baseline) for text in adamw if args.baseline]
    with contextlib.ExitStack() as stack:
        context = multiprocessing.get_context('spawn')
        processes = [stack.enter_context(ProcessPoolExecutor(1, context)) for _ in cases]
        with ThreadPoolExecutor(args.jobs) as waiting:
            list(waiting.map(lambda process, case: process.submit(set_up, *case).result(), processes, cases))
        for round_ in range(args.rounds):
            print(f'round {round_ + 1} of {args.rounds}', file=sys.stderr)
            for process in processes:
                process.submit(call, 'take_turn').result()
        names = [f'{folder.name}: {text}' if folder else text for text, folder in cases]
        rows = [dict(config=name, **process.submit(call, 'results').result())
                for name, process in zip(names, processes)]
        print_table(rows)
        if args.output:
            about = dict(commit=git_commit(), **machine(), torch=torch.__version__, rounds=args.rounds)
            write_json(args.output, dict(about=about, results=rows))
        if args.profile:  # comes last, because it takes memory
            write_text(args.profile, '\n'.join(f'{name}\n{process.submit(call, "profile").result()}'
                                               for name, process in zip(names, processes)))


if __name__ == '__main__':
    main()
