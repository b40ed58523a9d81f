"""Run train.py with faults: CODE plans them by the functions below.

  python tests/faults.py CODE FLAGS…

`fork` does the same with any script in forked processes, which share an import of PyTorch.
"""

import atexit
import collections
import gc  # noqa: F401 - for CODE, as others below
import inspect  # noqa: F401
import itertools
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import time
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402, F401

import model  # noqa: E402
import optimizers  # noqa: E402, F401
from data import loader  # noqa: E402
from runtime import checkpoint  # noqa: E402, F401

Done = collections.namedtuple('Done', 'code out err')
PLANNED = []  # (iteration, rank, action)
FACTORS = []  # for the next losses


def at(iteration, action, rank=0):
    """Make `rank` call `action` before the gradients of `iteration`."""
    PLANNED.append((iteration, rank, action))


def kill(number):
    """Return an action that sends this process a signal."""
    return lambda: os.kill(os.getpid(), number)


def spoil(factor):
    """Return an action that multiplies the next micro-batch's loss by `factor`."""
    return lambda: FACTORS.append(factor)


def inject():
    """Make this process's loader and model carry out the planned faults."""
    advance, forward = loader.TrainLoader.__next__, model.GPT.forward
    factors = FACTORS  # Compiled code does not find this module's globals once the script is `__main__`.

    def faulty(self):
        for iteration, rank, action in PLANNED:
            if (iteration, rank) == (self.iteration, self.rank):
                action()
        return advance(self)

    def spoiled(*args, **kwargs):
        logits, loss, *rest = forward(*args, **kwargs)
        return logits, loss * factors.pop() if factors and loss is not None else loss, *rest

    loader.TrainLoader.__next__, model.GPT.forward = faulty, spoiled


def run(code, script, argv):
    """Run CODE and then the script, as `python SCRIPT ARGV…` would."""
    sys.argv = [str(script), *argv]
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup or the CI's shell may ignore it.
    sys.stdout.reconfigure(line_buffering=True)  # A signal must not lose printed lines.
    inject()
    exec(code, globals())
    runpy.run_path(str(script), run_name='__main__')


LOGS = itertools.count()
PRELOAD = ['faults', 'pytest', 'tqdm', 'torch._dynamo', 'torch.distributed.fsdp', 'torch.distributed.checkpoint']


def begin(script, argv, out, err, faults='', **environment):
    """Start a script of the repository with the CODE `faults` in a forked process, which adds its output to the files
    `out` and `err`. Return the multiprocessing.Process."""
    with mock.patch.dict(os.environ, OMP_NUM_THREADS='1', PYTHONPATH=f'{ROOT}/tests'):
        context = multiprocessing.get_context('forkserver')
        context.set_forkserver_preload(PRELOAD)
        forkserver.ensure_running()
    environment = {**os.environ, 'OMP_NUM_THREADS': '1', **environment}
    process = context.Process(target=forked, args=(faults, ROOT / script, [*map(str, argv)], out, err, environment))
    process.start()
    return process


def fork(script, *argv, logs, seconds, faults='', ranks=1, machines=1):
    """Run a script of the repository with the CODE `faults` in `ranks` forked processes, as if on several `machines`,
    without torchrun, for at most `seconds`, with output to the directory `logs`. Return Done: the first exit code that
    is not 0 (-n after signal n, None if a process hung), and the processes' output in order."""
    paths = [Path(logs) / f'{next(LOGS)}' for _ in range(ranks)]
    processes, environment = [], {}
    if ranks > 1:
        with socket.create_server(('127.0.0.1', 0)) as free:
            environment = dict(WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks // machines),
                               MASTER_ADDR='127.0.0.1', MASTER_PORT=str(free.getsockname()[1]))
    for rank, path in enumerate(paths):
        if ranks > 1:
            environment |= dict(RANK=str(rank), LOCAL_RANK=str(rank % (ranks // machines)))
        processes.append(begin(script, argv, path.with_suffix('.out'), path.with_suffix('.err'), faults, **environment))
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0, deadline - time.monotonic()))
    hang = any(process.exitcode is None for process in processes)
    for process in processes:
        process.kill()
        process.join()
    code = None if hang else next((process.exitcode for process in processes if process.exitcode), 0)
    return Done(code, *(''.join(path.with_suffix(end).read_text() for path in paths) for end in ('.out', '.err')))


def forked(code, script, argv, out, err, environment):
    """Run `run` in a forked process, and end the process as Python would."""
    for descriptor, path in (1, out), (2, err):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    number = 0
    try:
        run(code, script, argv)
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        number = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        number = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(number)


if __name__ == '__main__':
    run(sys.argv[1], ROOT / 'train.py', sys.argv[2:])
