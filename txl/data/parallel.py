"""Work on the pieces of a text by all cores, in order, with a progress bar."""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

WORTHWHILE = 32 << 20  # bytes of text from which on starting processes pays

_work: Callable | None = None  # what this worker process does with each piece


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _begin(work: Callable) -> None:
    """In a new worker: remember the work, leave Ctrl-C to the parent, and end when it does, however it ends."""
    global _work
    _work = work
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def follow() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _do(piece: Any) -> Any:
    return _work(piece)


def in_order(work: Callable, pieces: Iterable, *, size: int) -> Iterator:
    """work(piece) for each piece, in order; by several processes where the `size` in bytes makes it worthwhile.

    A few pieces are in the making at a time, so that memory does not grow with the text.
    """
    workers = min(cores(), 16)
    if size < WORTHWHILE or workers < 2:
        yield from map(work, pieces)
        return
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
    with ProcessPoolExecutor(workers, context, _begin, (work,)) as pool:
        waiting: deque = deque()
        try:
            for piece in pieces:
                waiting.append(pool.submit(_do, piece))
                if len(waiting) > 2 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as error:
            raise ValueError("data: a process that encoded the text was killed; is there enough memory?") from error
        finally:
            for future in waiting:
                future.cancel()


@contextlib.contextmanager
def progress(what: str, size: int) -> Iterator[Callable[[int], None]]:
    """For a text that takes its time, a bar on standard error (one line where it is no terminal); yields what advances it."""
    if size < WORTHWHILE:
        yield lambda n_bytes: None
        return
    if not sys.stderr.isatty():
        print(f"{what}: {size:,} bytes, once", file=sys.stderr, flush=True)
        yield lambda n_bytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=size)
        yield lambda n_bytes: bar.advance(task, n_bytes)
