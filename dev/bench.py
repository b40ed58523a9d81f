"""How fast a training step is, for any list of configurations, measured side by side in one process.

  python dev/bench.py                                                     the default list of this kind of device
  python dev/bench.py '--model_size=125M' '--model_size=125M --optimizer_name=sophiag' --output bench.json
  python dev/bench.py --baseline ~/nanoGPT '--model_size=125M --compile=True'   and nanoGPT's model beside it
  python dev/bench.py --updates '--model_size=30M'                        the update alone, of every optimizer

Each CONFIG is one quoted string with the arguments that train.py would get. Configurations of the same model, compiled
or not, take turns in every round, and the medians over the rounds are compared: other load meets all of them alike. A
baseline is a checkout with nanoGPT's interface in its model.py (GPT, GPTConfig, configure_optimizers); it gets the same
weights, batch, dtype and compile as each configuration of AdamW. Tokens are random, unless --dataset says
otherwise.

Columns: step_ms, T(step) without an estimate; hessian_ms, what an estimate adds to a step; hessian_share, that over k
steps, as a fraction of T(step); optimizer_ms, the optimizer's step alone, and its ratios to fused AdamW's (over_adamw,
the JSON also has it with both clipping) and to the time in which memory can move what it reads and writes (over_floor);
hvp_ratio, a Hessian-vector product over a gradient of the same sequences; wait_share, waiting for data;
memory_gb, the peak of device memory (on CPU: of resident memory).

With --updates nothing but the optimizer's step is timed, of each CONFIG with every optimizer of the table (or with the
one that it names) in turns with fused AdamW's: ten steps a turn, as some do part of their work in every tenth only, and
the median of the turns' ratios. On CPU it is the time of the processor that counts, which other load changes least.
state: numbers that the optimizer keeps for each parameter.
"""

import argparse
import contextlib
import functools
import gc
import importlib.util
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, fields
from pathlib import Path

import numpy as np
import torch
import torch._functorch.config
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import loss
import train
from data.loader import Bin, TrainLoader
from hessian import FirstOrder
from model import GPT, GPTConfig
from optimizers import OPTIMIZERS
from runtime import device as devices
from runtime import optim
from runtime.device import check_device, peak_flops
from runtime.distributed import World
from runtime.rng import keyed_bits
from scripts.runs import estimates_per_iteration, show_progress, writable, write_json
from sophia import parameters

TINY = '--n_layer=1 --n_head=2 --n_embd=32 --block_size=32 --total_batch_size=4 --batch_size=2'
CPU_MODEL = '--model_size=30M --block_size=256 --total_batch_size=4 --batch_size=4'
ATTENTION = dict(flash=SDPBackend.FLASH_ATTENTION, cudnn=SDPBackend.CUDNN_ATTENTION,
                 efficient=SDPBackend.EFFICIENT_ATTENTION, math=SDPBackend.MATH)
# Micro-batches that keep one device of 80 GB or more busy. A whole iteration of 770M would take 5 s.
CUDA_MODELS = [f'--model_size={size} --batch_size={n}' for size, n in (
    ('30M', 32), ('125M', 32), ('355M', 16), ('770M', '12 --total_batch_size=240'))]


def default_configs(device, tiny):
    """The strings that stand for no CONFIG: AdamW, Sophia-G and Sophia-H on the models for this kind of device."""
    models = [TINY] if tiny else CUDA_MODELS if device.type == 'cuda' else [CPU_MODEL, CPU_MODEL + ' --compile=True']
    # To compile Sophia-H's product takes minutes for 36 layers, and 32 of 240 sequences are not its share.
    return [f'{model} --optimizer_name={name}' for model in models for name in ('adamw', 'sophiag', 'sophiah')
            if name != 'sophiah' or '770M' not in model]


# ----------------------------------------------------------------------------------------------------------------------
# What is measured: train.py's step


@functools.lru_cache(maxsize=1)
def alone(device, backend, parallel):
    """The World of this process, made once for models of one kind, which are measured together."""
    if dist.is_initialized():
        dist.destroy_process_group()
    return World(device, backend, parallel)


class Case:
    """One configuration on one device, set up as train.py does."""

    def __init__(self, config, dataset):
        self.config = config
        given = config.given - {'device', 'show_config'}
        self.name = ' '.join(f'{key}={value}' for key, value in config.values.items() if key in given)
        self.world = alone(config.device, config.backend, config.parallel)
        self.device = self.world.device
        gc.collect()  # what is garbage already must not be freed, and counted, in the course of this one
        memory = in_use(self.device)
        data = Bin(dataset, 'train')
        self.model_args = asdict(GPTConfig.from_settings(config.values, data.vocab_size))
        torch._functorch.config.donated_buffer = True  # PyTorch's default; the hook of Sophia-G sets it to False
        self.run = self.set_up()
        self.run.hessian.is_due = lambda iter_num, interval: iter_num % 2 == 0
        self.loader = TrainLoader(data, config.seed, config.total_batch_size, config.block_size, 0, 1, self.device,
                                  fresh_sequences=self.run.hessian.fresh_sequences)
        self.seconds = {True: [], False: []}  # of steps with and without an estimate
        self.waits, self.peaks, self.losses = [], [], []
        for round_ in range(4):  # compiles, allocates the optimizer's state and the gradients
            self.measure(round_)
        self.resting = in_use(self.device) - memory
        for measured in (*self.seconds.values(), self.waits, self.peaks):
            measured.clear()

    def make_model(self):
        """Our model with the seed's weights, made on the device: the largest take minutes on one CPU core."""
        torch.manual_seed(self.config.seed)
        with self.device:
            return GPT(GPTConfig(**self.model_args))

    def set_up(self):
        """The `train.Run` that is measured."""
        return train.set_up(self.config, self.world, self.make_model())

    def measure(self, round_):
        """Measures one iteration."""
        loss.set_compile(self.config.compile)  # which is one for all models of the process
        reset_peak(self.device)
        held = in_use(self.device)
        wait_for(self.device)
        started = time.perf_counter()
        sequences = next(self.loader)
        waited = time.perf_counter() - started
        step = train.train_step(self.run, sequences, round_)
        wait_for(self.device)
        self.seconds[step.estimated].append(time.perf_counter() - started)
        self.waits.append(waited)
        self.peaks.append(peak(self.device) - held)
        self.losses.append(step.loss)

    def results(self, repeats):
        """What the table says of this configuration, a dict; with repeats = 0 of its steps only."""
        c = self.config
        plain = statistics.median(self.seconds[False] or self.seconds[True])
        row = dict(config=self.name, compile=c.compile, dtype=c.dtype, step_ms=1e3 * plain)
        average = plain
        if self.seconds[True] and self.seconds[False]:
            extra = statistics.median(self.seconds[True]) - plain
            extra_on_average = extra * estimates_per_iteration(c.optimizer_name, c.hessian_interval, c.max_iters)
            average += extra_on_average
            row.update(hessian_ms=1e3 * extra, hessian_share=extra_on_average / plain)
        tokens = c.total_batch_size * c.block_size
        row['tokens_per_sec'] = tokens / average
        if limit := peak_flops(self.device):
            with torch.device('meta'):  # a baseline's model may not know
                row['mfu'] = GPT(GPTConfig(**self.model_args)).flops_per_token() * tokens / plain / limit
        if repeats:
            row.update(self.optimizer_step(repeats))
        if repeats and self.run.hessian.hessian_products:
            row['hvp_ratio'] = self.hvp_ratio(repeats)
        row['wait_share'] = statistics.median(self.waits) / plain
        row['memory_gb'] = (self.resting + max(self.peaks)) / 1e9
        return row

    def optimizer_step(self, repeats):
        """Times the optimizer's step at learning rate 0 beside fused AdamW's on the same parameters and gradients, and
        beside an addition of two tensors of that size into a third, which shows what the memory can move."""
        optimizer, params = self.run.optimizer, self.run.params
        adamw = prepare_updates(optimizer, params)

        def clip_and_step():
            optim.clip_gradients(params, 1.0)
            optimizer.step()

        def adamw_clip_and_step():
            torch.nn.utils.clip_grad_norm_(params, 1.0)
            adamw.step()

        size = sum(p.numel() for p in params)
        a, b, c = (torch.zeros(size, device=self.device) for _ in range(3))
        own, reference, own_clipping, reference_clipping, adding = interleave(
            [optimizer.step, adamw.step, clip_and_step, adamw_clip_and_step, lambda: torch.add(a, b, out=c)], repeats,
            self.device)
        bandwidth = 4 * 3 * size / adding
        # Words of memory: the gradient and h are read; parameters and the other states are read and written.
        words = sum(3 * p.numel() + sum((1 if key == 'hessian' else 2) * s.numel()
                                        for key, s in optimizer.state[p].items()
                                        if isinstance(s, torch.Tensor) and s.shape == p.shape) for p in params)
        optimizer.zero_grad(set_to_none=True)
        return dict(optimizer_ms=1e3 * own, over_adamw=own / reference, over_floor=own / (4 * words / bandwidth),
                    over_adamw_clipping=own_clipping / reference_clipping, bandwidth_gb_s=bandwidth / 1e9)

    def hvp_ratio(self, repeats):
        """Time of a Hessian-vector product over that of a gradient, of the same sequences."""
        run = self.run
        sequences = next(self.loader)[:min(self.config.batch_size, self.config.hessian_batch_size)]
        X, Y = sequences[:, :-1], sequences[:, 1:]
        u = [torch.randn_like(p) for p in run.hessian.params]

        def gradient():
            with run.autocast:
                mean_loss = run.hessian.forward(run.model, X, Y)
            torch.autograd.grad(mean_loss, run.params)

        def product():
            with run.hessian.autocast:
                run.hessian.product(X, Y, u)

        run.hessian.start(1)
        hvp, reference = interleave([product, gradient], repeats, self.device)
        return hvp / reference

    def close(self):
        self.loader.close()


class BaselineHook(FirstOrder):
    """For models with nanoGPT's forward, which returns the logits in any case."""

    def forward(self, model, X, Y):
        return model(X.contiguous(), Y.contiguous())[1]


class Baseline(Case):
    """A baseline's model and optimizer instead of ours; weights, data, dtype and compile are the configuration's."""

    def __init__(self, config, dataset, folder):
        self.folder = Path(folder)
        super().__init__(config, dataset)
        self.name = f'{self.folder.name}: {self.name}'

    def set_up(self):
        path, c = self.folder / 'model.py', self.config
        name = f'baseline_{re.sub(r"[^a-zA-Z0-9]", "_", self.folder.name)}'
        spec = importlib.util.spec_from_file_location(name, path)
        baseline = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = baseline
        spec.loader.exec_module(baseline)
        known = {field.name for field in fields(baseline.GPTConfig)}
        with contextlib.redirect_stdout(sys.stderr):
            model = baseline.GPT(baseline.GPTConfig(**{
                key: value for key, value in self.model_args.items() if key in known})).to(self.device)
            model.load_state_dict(self.make_model().state_dict())
            optimizer = model.configure_optimizers(c.weight_decay, c.learning_rate, (c.beta1, c.beta2),
                                                   self.device.type)
        return train.Run(c, self.world, model, torch.compile(model) if c.compile else model, optimizer,
                         BaselineHook(model, optimizer), torch.amp.GradScaler(self.device.type, c.dtype == 'float16'),
                         devices.autocast(self.device, c.dtype), list(model.parameters()))


# ----------------------------------------------------------------------------------------------------------------------
# The update alone

STEPS = 10  # a turn


def prepare_updates(optimizer, params):
    """Gives `params` gradients and their optimizer the learning rate 0. Returns a fused AdamW for the same."""
    optim.set_learning_rate(optimizer, 0.0)
    for p in params:
        p.grad = torch.randn_like(p) * 1e-3
    return torch.optim.AdamW(params, lr=0.0, fused=True)


def numbers(value):
    """How many numbers a state holds, a tensor or (nested) lists and dicts of such; single ones are counters."""
    if isinstance(value, torch.Tensor):
        return value.numel() if value.dim() else 0
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return sum(map(numbers, parts))


def update_row(config, vocab_size, repeats, deadline):
    """The optimizer's update of a configuration, a row of the table."""
    world = alone(config.device, config.backend, config.parallel)
    torch.manual_seed(config.seed)
    with world.device:
        model = GPT(GPTConfig.from_settings(config.values, vocab_size))
    run = train.set_up(config, world, model)
    adamw = prepare_updates(run.optimizer, run.params)
    if config.hessian_interval:
        run.optimizer.update_hessian([torch.rand_like(p) for p in parameters(run.optimizer)])

    clock = time.process_time if world.device.type == 'cpu' else time.perf_counter
    seconds = [], []
    for optimizer in (run.optimizer, adamw):  # compiles, allocates the state
        optimizer.step()
    while len(seconds[0]) < repeats and (not seconds[0] or time.monotonic() < deadline):
        for optimizer, measured in zip((run.optimizer, adamw), seconds):
            wait_for(world.device)
            started = clock()
            for _ in range(STEPS):
                optimizer.step()
            wait_for(world.device)
            measured.append((clock() - started) / STEPS)
    size = sum(p.numel() for p in run.params)
    return dict(config=f'model_size={config.model_size} optimizer_name={config.optimizer_name}',
                optimizer_name=config.optimizer_name, model_size=config.model_size, parameters=size,
                turns=len(seconds[0]), optimizer_ms=1e3 * statistics.median(seconds[0]),
                adamw_ms=1e3 * statistics.median(seconds[1]),
                over_adamw=statistics.median(own / reference for own, reference in zip(*seconds)),
                state=numbers(dict(run.optimizer.state)) / size)


# ----------------------------------------------------------------------------------------------------------------------
# Clocks and counters


def wait_for(device):
    """Until the device has done what was asked of it."""
    if device.type == 'cuda':
        torch.cuda.synchronize(device)


def interleave(functions, repeats, device):
    """Median seconds of each of `functions`, called in turns; the first call of each does not count."""
    seconds = [[] for _ in functions]
    for _ in range(repeats + 1):
        for function, measured in zip(functions, seconds):
            wait_for(device)
            started = time.perf_counter()
            function()
            wait_for(device)
            measured.append(time.perf_counter() - started)
    return [statistics.median(measured[1:]) for measured in seconds]


def _status(key):
    try:
        return int(re.search(rf'{key}:\s+(\d+)', Path('/proc/self/status').read_text())[1]) * 1024
    except (OSError, TypeError):
        return 0


def in_use(device):
    """Bytes of device memory that tensors hold; on CPU what the process holds (0 where Linux does not say it)."""
    return torch.cuda.memory_allocated(device) if device.type == 'cuda' else _status('VmRSS')


def reset_peak(device):
    if device.type == 'cuda':
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(OSError):
            Path('/proc/self/clear_refs').write_text('5')


def peak(device):
    """The highest `in_use` since `reset_peak`."""
    return torch.cuda.max_memory_allocated(device) if device.type == 'cuda' else _status('VmHWM')


def processor():
    """The CPU's name and the number of its cores here."""
    try:
        name = re.search(r'model name\s*: (.*)', Path('/proc/cpuinfo').read_text())[1]
    except (OSError, TypeError):
        name = platform.processor() or platform.machine()
    return f'{name}, {os.cpu_count()} cores'


def commit():
    """The commit measured, with a + where files differ from it; None outside of git."""
    root = Path(__file__).resolve().parents[1]
    try:
        run = subprocess.run(['git', '-C', root, 'describe', '--always', '--dirty=+'], capture_output=True, text=True)
    except OSError:
        return None
    return run.stdout.strip() or None


# ----------------------------------------------------------------------------------------------------------------------


def random_bins(folder, seed=0):
    """A data set of random ids of GPT-2's vocabulary in `folder`."""
    for split in ('train', 'val'):
        (keyed_bits(seed, 0, 0, 2 ** 20) % np.uint64(50257)).astype('<u2').tofile(Path(folder) / f'{split}.bin')
    return Path(folder)


def measure(configs, baselines, dataset, rounds, deadline, steps_only=False, where=''):
    """Rows of the table for `configs` (of one model), in turns over at least 4 and at most `rounds` rounds.

    `where` precedes what a terminal shows of the progress.
    """
    cases, adamw = [], [config for config in configs if config.optimizer_name == 'adamw']
    wanted = [(Case, config) for config in configs] + [
        (functools.partial(Baseline, folder=folder), config) for folder in baselines for config in adamw]
    for i, (kind, config) in enumerate(wanted, 1):
        show_progress(f'{where}set-up {i}/{len(wanted)}')
        cases.append(kind(config, dataset))
    gc.collect()
    started = time.monotonic()
    for round_ in range(2, 2 + rounds):
        now = time.monotonic()
        if round_ >= 6 and now > deadline:
            break
        done = round_ - 2
        left = f', ETA {min((now - started) / done * (rounds - done), max(0, deadline - now)):.0f} s' if done else ''
        show_progress(f'{where}round {round_ - 1}/{rounds}{left}')
        for case in cases:
            case.measure(2 * round_)
            case.measure(2 * round_ + 1)
    show_progress(f'{where}optimizer steps and products alone' * (not steps_only))
    repeats = 0 if steps_only else min(rounds, 20)
    rows = [case.results(repeats) for case in cases]
    for case in cases:
        case.close()
    show_progress('')
    return rows


COLUMNS = {'config': '{}', 'step_ms': '{:.1f}', 'tokens_per_sec': '{:,.0f}', 'mfu': '{:.1%}', 'hessian_ms': '{:.1f}',
           'hessian_share': '{:.1%}', 'optimizer_ms': '{:.2f}', 'over_adamw': '{:.2f}', 'over_floor': '{:.2f}',
           'state': '{:.2f}',
           'hvp_ratio': '{:.2f}', 'wait_share': '{:.2%}', 'memory_gb': '{:.2f}'}


def table(rows):
    """`rows` as a Markdown table."""
    columns = {key: form for key, form in COLUMNS.items() if any(key in row for row in rows)}
    cells = [[form.format(row[key]) if key in row else '–' for key, form in columns.items()] for row in rows]
    lines = [columns, ['---', *['---:'] * (len(columns) - 1)], *cells]
    return '\n'.join('| ' + ' | '.join(line) + ' |' for line in lines)


def parse(argv):
    parser = argparse.ArgumentParser(usage='%(prog)s [options] [CONFIG ...]', description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--baseline', action='append', default=[], metavar='PATH',
                        help='a checkout to measure beside ours')
    parser.add_argument('--dataset', help='directory of bins (default: random tokens)')
    parser.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu')
    parser.add_argument('--rounds', type=int, default=15, help='steps of each kind and configuration (default: 15)')
    parser.add_argument('--minutes', type=float, default=8.0, help='then rounds end, after at least 4 (default: 8)')
    parser.add_argument('--attention', choices=ATTENTION, help="only this one of PyTorch's attention kernels")
    parser.add_argument('--steps_only', action='store_true',
                        help='measure no parts by themselves: for models that leave no memory for it')
    parser.add_argument('--updates', action='store_true',
                        help="measure the optimizers' updates alone, of every optimizer of the table")
    parser.add_argument('--output', type=Path, metavar='FILE.json', help='also write everything measured as JSON')
    parser.add_argument('--tiny', action='store_true', help='a tiny model instead of the default list')
    # A CONFIG may begin with --, which argparse takes for a flag: what it leaves over, in its order, are the CONFIGs.
    args, args.configs = parser.parse_known_args(argv)
    for text in args.configs:
        if text.startswith('-') and '=' not in text:
            parser.error(f'{text}: no such flag; a CONFIG is written --key=value')
    if args.rounds < 1:
        parser.error('--rounds must be at least 1')
    for folder in args.baseline:
        if not (Path(folder) / 'model.py').is_file():
            raise SystemExit(f'--baseline={folder}: no model.py in it; give the checkout of a repository like nanoGPT')
    if args.output:
        writable(args.output)
    return args


def main(argv=None):
    args = parse(argv)
    torch.set_float32_matmul_precision('high')  # as train.py
    device = check_device(args.device)
    texts = args.configs or default_configs(device, args.tiny)
    if args.updates:
        texts = [f'--learning_rate=1e-3 {text} --optimizer_name={name}' for text in args.configs or ['--model_size=30M']
                 for name in re.findall(r'--optimizer_name=(\S+)', text) or OPTIMIZERS]
    groups = {}  # configurations of one model take turns
    for text in texts:
        config = train.resolve([*shlex.split(text), f'--device={args.device}'])
        shape = tuple(config.values[key] for key in (
            'n_layer', 'n_head', 'n_embd', 'block_size', 'dtype', 'parallel', 'activation_checkpointing'))
        groups.setdefault(shape, []).append(config)
    started, rows = time.monotonic(), []
    with tempfile.TemporaryDirectory() as folder:
        dataset = Path(args.dataset) if args.dataset else random_bins(folder)
        for i, configs in enumerate(groups.values(), start=1):
            deadline = started + 60 * args.minutes * i / len(groups)
            if args.updates:
                for j, config in enumerate(configs, start=1):
                    show_progress(f'{config.optimizer_name}, {j}/{len(configs)}')
                    part = (i - 1 + j / len(configs)) / len(groups)
                    rows.append(update_row(config, Bin(dataset, 'train').vocab_size, args.rounds,
                                           started + 60 * args.minutes * part))
                    gc.collect()
                    torch.compiler.reset()
                show_progress('')
                continue
            with sdpa_kernel(ATTENTION[args.attention]) if args.attention else contextlib.nullcontext():
                rows += measure(configs, args.baseline, dataset, args.rounds, deadline, args.steps_only,
                                f'model {i}/{len(groups)}: ')
            gc.collect()
            torch.compiler.reset()
            if device.type == 'cuda':
                torch.cuda.empty_cache()
    given = [Path(part).name if part in args.baseline else part for part in (sys.argv[1:] if argv is None else argv)]
    about = dict(command=shlex.join(['dev/bench.py', *given]), commit=commit(),
                 device=torch.cuda.get_device_name(device) if device.type == 'cuda' else processor(),
                 threads=torch.get_num_threads(), torch=torch.__version__, python=platform.python_version())
    print(table(rows))
    if args.output:
        write_json(args.output, dict(about=about, results=rows))


if __name__ == '__main__':
    main()
