"""Several processes as one: who I am among them, what all of them know, how they are started and how they end."""

import contextlib
import ctypes
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from txl.signals import CAUGHT, Stopped, StopSignals, leave

PREPARING = timedelta(hours=2)  # that processes may wait for another while data are prepared and layers compiled
HUNG = timedelta(seconds=25)  # and after that
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"  # the way between processes of one machine
KILLED = 3.0  # seconds that the processes left have when one is gone


class Ranks:
    """This process among `size`; with one process nothing is exchanged. Every method is to be called by all of them."""

    def __init__(self, rank: int = 0, size: int = 1, local: int = 0, n_local: int = 1):
        self.rank, self.size, self.local, self.n_local = rank, size, local, n_local
        self._settled = size == 1

    @property
    def main(self) -> bool:
        """True for the one that writes and talks."""
        return self.rank == 0

    def say(self, line: str) -> None:
        """A line on standard error, once."""
        if self.main:
            print(line, file=sys.stderr, flush=True)

    def agree(self, *numbers: float | int) -> list[float | int]:
        """The largest of each number over all processes."""
        if self.size == 1:
            return list(numbers)
        shared = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(shared, dist.ReduceOp.MAX)
        return shared.tolist()

    def total(self, *numbers: float | int) -> list[float | int]:
        """The sum of each number over all processes, in float64."""
        if self.size == 1:
            return list(numbers)
        shared = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(shared)
        return shared.tolist()

    def mean_(self, tensor: Tensor) -> Tensor:
        """The mean over all processes, in place, on the tensor's device."""
        if self.size > 1:
            dist.all_reduce(tensor)
            tensor /= self.size
        return tensor

    def from_main(self, make: Callable[[], Any]) -> Any:
        """A plain value that the first process makes. Where that raises ValueError, the others leave in silence."""
        if self.size == 1:
            return make()
        box = [None]
        try:
            if self.main:
                box = [{"value": make()}]
        finally:  # an error too is news to the others
            dist.broadcast_object_list(box, src=0)
        if box[0] is None:
            raise Silent
        return box[0]["value"]

    def gather(self, value: Any) -> list[Any]:
        """The plain value of each process, in order."""
        if self.size == 1:
            return [value]
        values = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def whole_batch(self, rows: Tensor) -> Tensor:
        """The rows of all lanes on the host, in order, given this process's; for the first process, others get their own."""
        if self.size == 1:
            return rows
        rows = rows.cpu().contiguous()
        parts = [torch.empty_like(rows) for _ in range(self.size)] if self.main else None
        dist.gather(rows, parts)
        return torch.cat(parts) if parts else rows

    def share(self, n: int) -> slice:
        """Which of n lanes are this process's."""
        each = n // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    @contextlib.contextmanager
    def main_first(self) -> Iterator[None]:
        """The first process does what stands inside before the others do: what it leaves in files, they find.

        Where it raises, the others leave in silence.
        """
        failed = True
        if not self.main and self.agree(0)[0]:
            raise Silent
        try:
            yield
            failed = False
        finally:
            if self.main:
                self.agree(int(failed))

    def wait_until(self, done: Callable[[], bool]) -> None:
        """Waits for something that only the first process knows; however long it takes, nobody is taken for hung."""
        while self.agree(float(self.main and not done()))[0]:
            time.sleep(0.02)

    def settled(self) -> None:
        """From now on a process that others wait for is taken for hung after 25 seconds."""
        if not self._settled:
            dist.distributed_c10d._set_pg_timeout(HUNG)
            self._settled = True


ALONE = Ranks()


def seed_of(seed: int, rank: int, step: int) -> int:
    """The seed of a process's dropout: `seed` for the first at the start, another for each process and step."""
    return seed + 1_000_003 * rank + 7_919 * step


class Silent(ValueError):
    """A mistake that another process reports."""


def started_by_torchrun() -> bool:
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()


@contextlib.contextmanager
def joined(device: str, **how: Any) -> Iterator[Ranks]:
    """Joins the others, and leaves them; the environment says who they are where `how` does not."""
    rank, size = how.pop("rank", int(os.environ.get("RANK", 0))), how.pop("size", int(os.environ.get("WORLD_SIZE", 1)))
    local, n_local = int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", size))
    if size == 1:
        yield ALONE
        return
    on_cuda = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    if on_cuda and n_local > torch.cuda.device_count():
        raise ValueError(f"processes: {n_local} of them, but {torch.cuda.device_count()} CUDA devices are here")
    if on_cuda:
        torch.cuda.set_device(local)
    backend = "cpu:gloo,cuda:nccl" if on_cuda else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=size, timeout=PREPARING, **how)
    try:
        yield Ranks(rank, size, local, n_local)
    except BaseException as error:
        # Its frames hold what exchanges gradients. To free that while an exchange is under way can deadlock: it waits
        # for gloo's thread, which waits for the interpreter. So it is never freed.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(error))
        raise
    finally:
        dist.destroy_process_group()


def launch(
    work: Callable[..., Any], arguments: Sequence[Any], *, processes: int, device: str, stop: StopSignals
) -> Any:
    """Runs `work(*arguments, ranks, stop)` in so many processes of this machine; returns what the first one does.

    Signals are passed on to all. When one dies, raises or hangs, the others end within seconds, its traceback stands on
    standard error, and ValueError says which it was. A ValueError or a `Stopped` of `work` is raised as it was.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="txl-") as folder:
        threads = max(1, torch.get_num_threads() // processes)
        make = (work, list(arguments), folder, processes, device, threads)
        workers = [
            context.Process(target=_worker, args=(rank, *make), name=f"rank {rank}") for rank in range(processes)
        ]
        try:
            resource_tracker.ensure_running()  # which would let signals through to the first that starts
            signal.pthread_sigmask(signal.SIG_BLOCK, CAUGHT)  # they wait for the process that starts, until it listens
            for worker in workers:
                worker.start()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, CAUGHT)
            _watch(workers, stop)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, CAUGHT)
            ended_here = _end(workers)
        ends = [json.loads(file.read_text()) for file in sorted(Path(folder).glob("end-*.json"))]
    failed = [end for end in ends if "error" in end]
    told = {end["rank"] for end in ends}
    killed = [worker for rank, worker in enumerate(workers) if rank not in told and worker not in ended_here]
    stopped = [end["stopped"] for end in ends if "stopped" in end]
    if killed or any(not (end["echo"] and stopped) for end in failed):  # one that leaves first cuts the others off
        raise ValueError(_blame(failed, killed))
    if stopped:
        raise Stopped(*stopped[0])
    return ends[0]["value"]


def _watch(workers: list[Any], stop: StopSignals) -> None:
    """Until all have ended well, or one has not; passes signals on meanwhile."""
    passed, running = None, list(workers)
    while running:
        ended = wait([worker.sentinel for worker in running], timeout=0.2)
        if stop.received is not None and passed != stop.received:
            passed = stop.received
            for worker in running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.pid, passed)
        for worker in [worker for worker in running if worker.sentinel in ended]:
            worker.join()
            running.remove(worker)
            if worker.exitcode != 0:
                return


def _end(workers: list[Any]) -> list[Any]:
    """Nobody is left behind: those that run on have a moment, to tell what they saw, then they are killed and returned."""
    until, killed = time.monotonic() + KILLED, []
    for worker in workers:
        if worker.pid is not None:
            worker.join(max(0.0, until - time.monotonic()))
            if worker.is_alive():
                killed.append(worker)
                worker.kill()
                worker.join()
    return killed


def _blame(failed: list[dict[str, Any]], killed: list[Any]) -> str:
    """One line about the cause: a death without a word makes others fail, and so does a first error."""
    if killed:
        names = ", ".join(f"{worker.name} ended with status {worker.exitcode}" for worker in killed)
        return f"processes: {names}; the same command goes on from the last checkpoint"
    first = min(failed, key=lambda end: (end["echo"], end["time"]))
    if first["mistake"]:
        return first["error"]
    return (
        f"processes: rank {first['rank']} failed ({first['error']}); the same command goes on from the last checkpoint"
    )


def _worker(rank: int, work: Callable, arguments: list, folder: str, size: int, device: str, threads: int) -> None:
    """The life of one process: joins, works, leaves a note of how it ended."""
    end: dict[str, Any] = {"rank": rank}
    with StopSignals() as stop:
        os.setsid()  # Ctrl-C reaches the parent alone, which passes it on
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
        threading.Thread(target=_end_with_parent, daemon=True).start()
        torch.set_num_threads(threads)
        if rank:
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        try:
            stop.leave_at_once(leave)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, CAUGHT)
            with joined(device, rank=rank, size=size, init_method=f"file://{folder}/meeting") as ranks:
                end["value"] = work(*arguments, ranks, stop)
        except Stopped as stopped:
            end["stopped"] = [str(stopped), stopped.status]
        except BaseException as error:
            words = " ".join(str(error).split()) or type(error).__name__
            exchange = isinstance(error, dist.DistError) or "gloo" in words or "NCCL" in words
            mistake = isinstance(error, (ValueError, OSError)) and not exchange
            end |= {
                "error": words,
                "mistake": mistake,
                "echo": exchange or isinstance(error, Silent),
                "time": time.time(),
            }
            if not mistake and (not exchange or "imed out" in words):  # one whose other end is gone has nothing to tell
                lines = "".join(traceback.format_exception(error)).splitlines()
                sys.stderr.write("".join(f"rank {rank}: {line}\n" for line in lines))
    note = Path(folder) / f"end-{rank:05}.json"
    with contextlib.suppress(OSError):  # the folder is gone with the parent
        note.write_text(json.dumps(end))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit("error" in end)


def _end_with_parent() -> None:
    wait([multiprocessing.parent_process().sentinel])
    os.kill(os.getpid(), signal.SIGTERM)
