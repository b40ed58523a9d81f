"""Early ends of a run (exit codes, signals, the time limit), what its process must undo at the end, and output streams
whose failures do not end it."""

import contextlib
import os
import signal
import sys
import time

# Exit codes, in addition to 0 = finished and 1 = bad input or a crash (sysexits.h: EX_TEMPFAIL, EX_DATAERR)
STOPPED, NOT_FINITE = 75, 65
LISTENED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
UNDO = contextlib.ExitStack()  # the lock and the process group of the run in this process


class SafeStream:
    """A text stream whose failures do not end a run: a full disk, a closed pipe, a character that it cannot encode."""

    def __init__(self, stream):
        self.stream = stream
        if hasattr(stream, 'reconfigure'):  # a notebook's has not
            stream.reconfigure(errors='backslashreplace')

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text):
        with contextlib.suppress(OSError):
            self.stream.write(text)
        return len(text)

    def flush(self):
        with contextlib.suppress(OSError):
            self.stream.flush()


def protect_streams():
    """Wrap stdout and stderr in a `SafeStream` each. Closed standard descriptors (`>&-`) become /dev/null: a checkpoint
    that got one would receive what libraries print."""
    while os.open(os.devnull, os.O_RDWR) <= 2:
        pass
    sys.stdout, sys.stderr = (stream and SafeStream(stream) for stream in (sys.stdout, sys.stderr))


@contextlib.contextmanager
def undo_at_end():
    """Undo, at the end of a context or a decorated function, what a run changes in its process, so that it can train
    again: signal handlers, and what is in UNDO."""
    before = {number: signal.getsignal(number) for number in LISTENED}
    try:
        with UNDO:
            yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: of a library in C
                signal.signal(number, handler)


class StopSignals:
    """Requests to stop (SIGTERM, SIGINT, SIGHUP, max_hours since the start; 0: no limit) or to save (SIGUSR1), which
    the ranks exchange once an iteration, so that all act in the same one. A second signal to stop ends the process.

    Attributes: reason (this rank's first signal, 'max_hours' or the reason of `end`); stopping, whether the ranks have
    agreed to stop; finished, whether the run cannot be resumed; save, whether this rank is yet to save.
    """

    def __init__(self, world, max_hours=0.0):
        self.world, self.deadline = world, world.started + 3600 * (max_hours or float('inf'))
        self.reason, self.received_at = '', 0.0
        self.stopping = self.finished = self.save = False
        for number in LISTENED:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, self._record)

    def _record(self, number, frame):
        now = time.monotonic()
        if number == signal.SIGUSR1:
            self.save = True
        elif not self.received_at:  # the first one, even if the run already stops for another reason
            name, self.received_at = signal.Signals(number).name, now
            self.reason = self.reason or name
            if self.world.is_master:  # by the system call, because the signal may have interrupted a print
                with contextlib.suppress(OSError):
                    os.write(2, f'{name}: stopping after this iteration; Ctrl-C again ends it now\n'.encode())
        # torchrun sends its ranks a signal again that they all had; `timeout` sends it to the process and to its group.
        elif now > self.received_at + (2 if 'TORCHELASTIC_RUN_ID' in os.environ else 0.2):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def end(self, reason):
        """End the run as finished, by early stopping for example. Every rank must call it in the same iteration."""
        self.reason, self.finished, self.stopping = reason, True, True

    def exchange(self):
        """Exchange the ranks' requests, so that all are `stopping` from the same call on. Return whether to save."""
        if not self.reason and time.monotonic() > self.deadline:
            self.reason = 'max_hours'
        self.stopping, save = self.world.any(self.reason != '', self.save)
        return save
