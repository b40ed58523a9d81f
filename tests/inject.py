"""train.py with faults. `inject.py CODE ARGUMENTS…` runs CODE, which plans them, and then train.py as a script.

`inject.py --serve` imports everything once, and then forks for each rank of a run that a line on stdin asks for: a
process that starts within milliseconds, and whose output goes to files of its own. The answer is a line with the exit
codes, or null where it had to kill one that did not end in the seconds it was given.
"""

import atexit
import contextlib  # noqa: F401 - for CODE, like others below
import gc
import importlib
import inspect
import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path

TRAIN = Path(__file__).resolve().parents[1] / 'train.py'
sys.path.insert(0, str(TRAIN.parent))

import torch  # noqa: E402, F401

import model  # noqa: E402
import optimizers  # noqa: E402, F401
from data import loader  # noqa: E402
from runtime import checkpoint  # noqa: E402, F401

# ----------------------------------------------------------------------------------------------------------------------
# What CODE may use

PLANNED = []  # (iteration, rank, action)
FACTORS = []  # what the next losses are multiplied by


def at(iteration, action, rank=0):
    """Has `rank` call `action` before the gradients of `iteration`."""
    PLANNED.append((iteration, rank, action))


def kill(number):
    """An action: this process gets the signal."""
    return lambda: os.kill(os.getpid(), number)


def kill_torchrun():
    """An action: torchrun gets SIGTERM, and a second to pass it on."""
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(1)


def spoil(factor):
    """An action: the loss of the next micro-batch is multiplied by `factor`."""
    return lambda: FACTORS.append(factor)


def raises(error):
    """An action."""
    def action():
        raise error
    return action


# ----------------------------------------------------------------------------------------------------------------------


def _spoiled(*args, **kwargs):
    logits, loss, *rest = _forward(*args, **kwargs)
    if FACTORS and loss is not None:
        loss = loss * FACTORS.pop()
    return logits, loss, *rest


def _counted(self, *args, **kwargs):
    _init(self, *args, **kwargs)
    given = inspect.signature(_init).bind(self, *args, **kwargs)
    given.apply_defaults()
    self.next_iteration = given.arguments['first_iteration']


def _faulty(self):
    for iteration, rank, action in PLANNED:
        if iteration == self.next_iteration and rank == self.rank:
            action()
    self.next_iteration += 1
    return _next(self)


# Attributes of classes: whichever module trains, and whenever it has imported the classes, it gets these.
_init, _next, _forward = loader.TrainLoader.__init__, loader.TrainLoader.__next__, model.GPT.forward
loader.TrainLoader.__init__, loader.TrainLoader.__next__, model.GPT.forward = _counted, _faulty, _spoiled


def serve():
    """Forks as asked. Returns the script in the children, each with its own sys.argv, output and environment."""
    for name in ('numpy.ma', 'torch._decomp.decompositions_for_jvp', 'torch._dynamo'):
        importlib.import_module(name)  # slow, and most runs need it
    gc.freeze()  # the children's collections spare what they share
    for line in sys.stdin:
        request = json.loads(line)
        pids = []
        for rank, env in enumerate(request['environments']):
            pid = os.fork()
            if pid == 0:
                for number, name in ((1, 'out'), (2, 'err')):
                    os.dup2(os.open(f'{request["log"]}.{name}{rank}', os.O_WRONLY | os.O_CREAT), number)
                os.environ.update(env)
                sys.argv[1:] = request['argv']
                return request['script']
            pids.append(pid)
        deadline = time.monotonic() + request['seconds']
        codes, hangs = {}, False
        while len(codes) < len(pids):
            for pid in set(pids) - codes.keys():
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
                elif time.monotonic() > deadline:
                    os.kill(pid, signal.SIGKILL)
                    hangs = True
            time.sleep(0.01)
        print(json.dumps(None if hangs else [codes[pid] for pid in pids]), flush=True)
    raise SystemExit


def ended(code, script):
    """Runs CODE and the script. Returns its exit code, after what Python does about an exception."""
    try:
        exec(code, globals())
        runpy.run_path(script, run_name='__main__')
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


if __name__ == '__main__':
    forked = sys.argv[1] == '--serve'
    script = serve() if forked else str(TRAIN)
    sys.stdout.reconfigure(line_buffering=True)  # a process that a signal ends leaves what it has printed
    code, sys.argv = sys.argv[1], [script, *sys.argv[2:]]
    if forked:  # Taking the interpreter down would copy all memory that is shared with the server.
        number = ended(code, script)
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(number)
    exec(code)
    runpy.run_path(script, run_name='__main__')
