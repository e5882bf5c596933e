"""Signals that ask a run to end: they raise a flag, and the run leaves where nothing is lost. No torch is needed here."""

import contextlib
import signal
from collections.abc import Callable
from typing import Any

CAUGHT = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
THREAD = "checkpoint"  # the name of the thread that writes them
STOPPED, INTERRUPTED = 75, 130  # exit statuses: everything saved, to be started again; Ctrl-C


class Stopped(BaseException):
    """A run that ended early on request, with everything saved; `status` is the exit status that says why.

    No Exception, so that it ends a sweep too instead of counting as one failed job.
    """

    def __init__(self, message: str, status: int = STOPPED):
        super().__init__(message)
        self.status = status

    def __reduce__(self) -> tuple:
        return type(self), (str(self), self.status)

    @classmethod
    def by(cls, received: int, message: str) -> "Stopped":
        """By a signal: 130 for Ctrl-C, else 75, which says that the same command goes on."""
        return cls(message, INTERRUPTED if received == signal.SIGINT else STOPPED)


def leave(received: int) -> None:
    """What a signal does while there is nothing to lose."""
    raise Stopped.by(received, "stopped with nothing to save in this process")


class StopSignals:
    """While active, SIGTERM, SIGUSR1 and Ctrl-C only raise a flag, which the loop reads after each update.

    A second Ctrl-C interrupts at once. After `leave_at_once(leave)`, when there is nothing to save, a signal calls
    `leave(number)` on the spot, also one that came before; `go_on()` ends that. Outside the main thread, where signals
    cannot be caught, the flag stays down.
    """

    def __init__(self):
        self.received: int | None = None
        self._leave: Callable[[int], None] | None = None
        self._before: dict[int, Any] = {}

    def _note(self, number: int, frame: Any) -> None:
        if number == signal.SIGINT and self.received == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number
        if self._leave is not None:
            self._leave(number)

    def leave_at_once(self, leave: Callable[[int], None]) -> None:
        self._leave = leave
        if self.received is not None:
            leave(self.received)

    def go_on(self) -> None:
        self._leave = None

    def __enter__(self) -> "StopSignals":
        with contextlib.suppress(ValueError):
            for number in CAUGHT:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
