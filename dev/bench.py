"""How fast a training step is, for any list of configurations, measured side by side in one process.

  python dev/bench.py                                                     the default list of this kind of device
  python dev/bench.py '--model_size=125M' '--model_size=125M --optimizer_name=sophiag' --output bench.json
  python dev/bench.py --peer ~/nanoGPT '--model_size=125M --compile=True'       and nanoGPT's model beside it

Each CONFIG is one quoted string with the arguments that train.py would get. Configurations of the same model, compiled
or not, take turns in every round, and the medians over the rounds are compared: what else the machine does meets all of
them alike. A peer is a checkout with nanoGPT's interface in its model.py (GPT, GPTConfig, configure_optimizers); it
gets the same weights, batch, dtype and compile as each configuration of AdamW. Tokens are random, unless --dataset says
otherwise.

Columns: step_ms, T(step) without an estimate; hessian_ms, what an estimate adds to a step; hessian_share, that over k
steps, as a fraction of T(step); optimizer_ms, the optimizer's step alone, and its ratios to fused AdamW's (over_adamw,
the JSON also has it with both clipping) and to the time in which memory can move what it reads and writes (over_floor);
hvp_ratio, a Hessian-vector product over a gradient of the same sequences; wait_share, waiting for data;
memory_gb, the peak of device memory (on CPU: of resident memory).
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
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import configurator
import optimizers
from data.loader import Bin, TrainLoader
from model import GPT, GPTConfig, padded_vocab_size
from runtime.device import check_device, peak_flops
from runtime.distributed import World
from runtime.rng import keyed_bits
from scripts.runs import writable, write_json

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
# What is measured: train.py's parts, put together as it does


@functools.lru_cache(maxsize=1)
def alone(device, backend, parallel):
    """The World of this process, made once for models of one kind, which are measured together."""
    if dist.is_initialized():
        dist.destroy_process_group()
    return World(device, backend, parallel)


class Case:
    """One configuration on one device: model, optimizer, Hessian hook and loader, built from train.py's settings."""

    def __init__(self, config, dataset):
        self.values = values = config.values
        given = config.given - {'device', 'show_config'}
        self.name = ' '.join(f'{key}={value}' for key, value in values.items() if key in given)
        self.device = torch.device(values['device'])
        self.interval = values['hessian_interval']
        memory = in_use(self.device)
        self.data = Bin(dataset, 'train')
        self.model_args = dict(vocab_size=padded_vocab_size(self.data.vocab_size), **{key: values[key] for key in (
            'block_size', 'n_layer', 'n_head', 'n_embd', 'dropout', 'bias', 'scale_attn_by_inverse_layer_idx')})
        self.low = {'float32': None, 'bfloat16': torch.bfloat16, 'float16': torch.float16}[values['dtype']]
        self.autocast = torch.autocast(self.device.type, self.low) if self.low else contextlib.nullcontext()
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=values['dtype'] == 'float16')
        self.build()
        self.params = [p for p in self.model.parameters() if p.requires_grad]
        self.loader = TrainLoader(self.data, values['seed'], values['total_batch_size'], values['block_size'], 0, 1,
                                  self.device)
        self.seconds = {True: [], False: []}  # of steps with and without an estimate
        self.waits, self.peaks, self.losses = [], [], []
        for round_ in range(4):  # compiles, allocates the optimizer's state and the gradients
            self.run(round_)
        self.resting = in_use(self.device) - memory
        for measured in (*self.seconds.values(), self.waits, self.peaks):
            measured.clear()

    def initialized(self):
        """Our model with the seed's weights, made on the device: the largest take minutes on one CPU core."""
        torch.manual_seed(self.values['seed'])
        with torch.device(self.device):
            return GPT(GPTConfig(**self.model_args))

    def build(self):
        """Model, optimizer and hook."""
        values = self.values
        self.model = self.initialized()
        world = alone(values['device'], values['backend'], values['parallel'])
        self.forward = world.wrap(self.model, self.model.transformer.h, values['compile'],
                                  values['activation_checkpointing'], self.low)
        self.optimizer = optimizers.build_optimizer(
            values['optimizer_name'], self.model.parameter_groups(values['weight_decay']), lr=values['learning_rate'],
            **{key: values[key] for key in ('beta1', 'beta2', 'weight_decay', 'eps', 'gamma', 'compile')})
        self.hook = optimizers.build_hessian_hook(
            values['optimizer_name'], self.model, self.optimizer, interval=self.interval,
            batch_size=values['hessian_batch_size'], seed=values['seed'], rank=0, world_size=1,
            accumulation_steps=values['gradient_accumulation_steps'], autocast=self.autocast, compile=values['compile'])

    def clip(self, max_norm):
        """Clips the gradients."""
        optimizers.clip_gradients(self.optimizer, self.params, max_norm)

    def iterate(self, iter_num):
        """One iteration of train.py's loop, without its logs; returns (mean loss, seconds waited for data)."""
        self.hook.start(iter_num)
        before = time.perf_counter()
        windows = next(self.loader)
        waited = time.perf_counter() - before
        micro_batches, losses = windows.split(self.values['batch_size']), []
        loss_scale = self.scaler.get_scale()
        for micro_batch in micro_batches:
            with self.autocast:
                loss = self.hook.loss(self.forward, micro_batch[:, :-1], micro_batch[:, 1:]) / len(micro_batches)
            self.hook.backward(loss_scale)
            self.scaler.scale(loss).backward()
            losses.append(loss.detach())
        self.scaler.unscale_(self.optimizer)
        self.clip(self.values['grad_clip'])
        loss = torch.stack(losses).sum().item()
        self.hook.finish(self.optimizer, loss_scale)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return loss, waited

    def run(self, round_):
        """Measures one iteration: with an estimate in even rounds, where there is one, and without in odd ones."""
        iter_num = (round_ // 2) * self.interval + round_ % 2 if self.interval else round_
        due = bool(self.interval) and iter_num % self.interval == 0
        reset_peak(self.device)
        held = in_use(self.device)
        wait_for(self.device)
        started = time.perf_counter()
        loss, waited = self.iterate(iter_num)
        wait_for(self.device)
        self.seconds[due].append(time.perf_counter() - started)
        self.waits.append(waited)
        self.peaks.append(peak(self.device) - held)
        self.losses.append(loss)

    def results(self, repeats):
        """What the table says of this configuration, a dict; with repeats = 0 of its steps only."""
        plain = statistics.median(self.seconds[False] or self.seconds[True])
        row = dict(config=self.name, compile=self.values['compile'], dtype=self.values['dtype'], step_ms=1e3 * plain)
        average = plain
        if self.seconds[True] and self.seconds[False]:
            extra = statistics.median(self.seconds[True]) - plain
            average += extra / self.interval
            row.update(hessian_ms=1e3 * extra, hessian_share=extra / self.interval / plain)
        tokens = self.values['total_batch_size'] * self.values['block_size']
        row['tokens_per_sec'] = tokens / average
        if limit := peak_flops(self.device):
            with torch.device('meta'):  # a peer's model may not know
                row['mfu'] = GPT(GPTConfig(**self.model_args)).flops_per_token() * tokens / plain / limit
        if repeats:
            row.update(self.optimizer_step(repeats))
        if repeats and isinstance(self.hook, optimizers.HutchinsonHook):
            row['hvp_ratio'] = self.hvp_ratio(repeats)
        row['wait_share'] = statistics.median(self.waits) / plain
        row['memory_gb'] = (self.resting + max(self.peaks)) / 1e9
        return row

    def optimizer_step(self, repeats):
        """Times the optimizer's step at rate 0 beside fused AdamW's on the same parameters and gradients, and beside an
        addition of two tensors of that size into a third, which shows what the memory can move."""
        for group in self.optimizer.param_groups:
            group['lr'] = 0.0
        for p in self.params:
            p.grad = torch.full_like(p, 1e-3)
        adamw = torch.optim.AdamW(self.params, lr=0.0, fused=True)

        def step():
            self.optimizer.clip_coef = None
            self.optimizer.step()

        def clip_and_step():
            self.clip(1.0)
            self.optimizer.step()

        def adamw_clip_and_step():
            torch.nn.utils.clip_grad_norm_(self.params, 1.0)
            adamw.step()

        size = sum(p.numel() for p in self.params)
        a, b, c = (torch.zeros(size, device=self.device) for _ in range(3))
        own, reference, own_clipping, reference_clipping, adding = interleave(
            [step, adamw.step, clip_and_step, adamw_clip_and_step, lambda: torch.add(a, b, out=c)], repeats,
            self.device)
        bandwidth = 4 * 3 * size / adding
        # Words of memory: the gradient and h are read; parameters and the other states are read and written.
        words = sum(3 * p.numel() + sum((1 if key == 'hessian' else 2) * s.numel()
                                        for key, s in self.optimizer.state[p].items()
                                        if isinstance(s, torch.Tensor) and s.shape == p.shape) for p in self.params)
        self.optimizer.zero_grad(set_to_none=True)
        return dict(optimizer_ms=1e3 * own, over_adamw=own / reference, over_floor=own / (4 * words / bandwidth),
                    over_adamw_clipping=own_clipping / reference_clipping, bandwidth_gb_s=bandwidth / 1e9)

    def hvp_ratio(self, repeats):
        """Time of a Hessian-vector product over that of a gradient, of the same sequences."""
        n = min(self.values['batch_size'], self.values['hessian_batch_size'])
        windows = next(self.loader)[:n]
        X, Y = windows[:, :-1], windows[:, 1:]

        def gradient():
            with self.autocast:
                loss = self.forward(X, Y, return_logits=False)[1]
            torch.autograd.grad(loss, self.params)

        u = {name: torch.randn_like(p) for name, p in self.model.named_parameters()}

        def product():
            with self.autocast:
                self.hook.product(X, Y, u)

        hvp, reference = interleave([product, gradient], repeats, self.device)
        return hvp / reference

    def close(self):
        self.loader.close()


class PeerHook(optimizers.NoHessian):
    """For models with nanoGPT's forward, which returns the logits in any case."""

    def loss(self, model, X, Y):
        return model(X.contiguous(), Y.contiguous())[1]


class Peer(Case):
    """A peer's model and optimizer in the place of ours; weights, data, dtype and compile are the configuration's."""

    def __init__(self, config, dataset, folder):
        self.folder = Path(folder)
        # Ours compiles without, as Gauss-Newton-Bartlett goes back twice.
        with torch._functorch.config.patch(donated_buffer=True):
            super().__init__(config, dataset)
        self.name = f'{self.folder.name}: {self.name}'

    def build(self):
        path = self.folder / 'model.py'
        spec = importlib.util.spec_from_file_location(f'peer_{re.sub(r"[^a-zA-Z0-9]", "_", self.folder.name)}', path)
        peer = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = peer
        spec.loader.exec_module(peer)
        values, args = self.values, dict(self.model_args)
        args.pop('scale_attn_by_inverse_layer_idx')
        with contextlib.redirect_stdout(sys.stderr):
            self.model = peer.GPT(peer.GPTConfig(**args)).to(self.device)
            self.model.load_state_dict(self.initialized().state_dict())
            self.optimizer = self.model.configure_optimizers(
                values['weight_decay'], values['learning_rate'], (values['beta1'], values['beta2']), self.device.type)
        self.forward = torch.compile(self.model) if values['compile'] else self.model
        self.hook = PeerHook()

    def clip(self, max_norm):
        torch.nn.utils.clip_grad_norm_(self.params, max_norm or float('inf'))


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


def measure(configs, peers, dataset, rounds, deadline, steps_only=False):
    """Rows of the table for `configs` (of one model), in turns over at least 4 and at most `rounds` rounds."""
    cases = [Case(config, dataset) for config in configs]
    adamw = [config for config in configs if config.values['optimizer_name'] == 'adamw']
    cases += [Peer(config, dataset, folder) for folder in peers for config in adamw]
    gc.collect()
    for round_ in range(2, 2 + rounds):
        if round_ >= 6 and time.monotonic() > deadline:
            break
        for case in cases:
            case.run(2 * round_)
            case.run(2 * round_ + 1)
    repeats = 0 if steps_only else min(rounds, 20)
    rows = [case.results(repeats) for case in cases]
    for case in cases:
        case.close()
    return rows


COLUMNS = {'config': '{}', 'step_ms': '{:.1f}', 'tokens_per_sec': '{:,.0f}', 'mfu': '{:.1%}', 'hessian_ms': '{:.1f}',
           'hessian_share': '{:.1%}', 'optimizer_ms': '{:.2f}', 'over_adamw': '{:.2f}', 'over_floor': '{:.2f}',
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
    parser.add_argument('--peer', action='append', default=[], metavar='PATH', help='a checkout to measure beside ours')
    parser.add_argument('--dataset', help='directory of bins (default: random tokens)')
    parser.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu')
    parser.add_argument('--rounds', type=int, default=15, help='steps of each kind and configuration (default: 15)')
    parser.add_argument('--minutes', type=float, default=8.0, help='then rounds end, after at least 4 (default: 8)')
    parser.add_argument('--attention', choices=ATTENTION, help="of PyTorch's ways to attention only this one")
    parser.add_argument('--steps_only', action='store_true',
                        help='measure no parts by themselves: for models that leave no memory for it')
    parser.add_argument('--output', type=Path, metavar='FILE.json', help='also write everything measured as JSON')
    parser.add_argument('--tiny', action='store_true', help='a tiny model in the place of the default list')
    # A CONFIG may begin with --, which argparse takes for a flag: what it leaves over, in its order, are the CONFIGs.
    args, args.configs = parser.parse_known_args(argv)
    for text in args.configs:
        if text.startswith('-') and '=' not in text:
            parser.error(f'{text}: no such flag; a CONFIG is written --key=value')
    if args.rounds < 1:
        parser.error('--rounds must be at least 1')
    for folder in args.peer:
        if not (Path(folder) / 'model.py').is_file():
            raise SystemExit(f'--peer={folder}: no model.py in it; give the checkout of a repository like nanoGPT')
    if args.output:
        writable(args.output)
    return args


def main(argv=None):
    args = parse(argv)
    torch.set_float32_matmul_precision('high')  # as train.py
    device = check_device(args.device)
    texts = args.configs or default_configs(device, args.tiny)
    groups = {}  # configurations of one model take turns
    for text in texts:
        config = configurator.resolve([*shlex.split(text), f'--device={args.device}'])
        shape = tuple(config.values[key] for key in (
            'n_layer', 'n_head', 'n_embd', 'block_size', 'dtype', 'parallel', 'activation_checkpointing'))
        groups.setdefault(shape, []).append(config)
    started, rows = time.monotonic(), []
    with tempfile.TemporaryDirectory() as folder:
        dataset = Path(args.dataset) if args.dataset else random_bins(folder)
        for i, configs in enumerate(groups.values(), start=1):
            deadline = started + 60 * args.minutes * i / len(groups)
            with sdpa_kernel(ATTENTION[args.attention]) if args.attention else contextlib.nullcontext():
                rows += measure(configs, args.peer, dataset, args.rounds, deadline, args.steps_only)
            gc.collect()
            torch.compiler.reset()
            if device.type == 'cuda':
                torch.cuda.empty_cache()
    given = [Path(part).name if part in args.peer else part for part in (sys.argv[1:] if argv is None else argv)]
    about = dict(command=shlex.join(['dev/bench.py', *given]), commit=commit(),
                 device=torch.cuda.get_device_name(device) if device.type == 'cuda' else processor(),
                 threads=torch.get_num_threads(), torch=torch.__version__, python=platform.python_version())
    print(table(rows))
    if args.output:
        write_json(args.output, dict(about=about, results=rows))


if __name__ == '__main__':
    main()
