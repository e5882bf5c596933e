"""How the benchmarks measure: calls that take turns, the memory that one holds, and the authors' code beside ours."""

import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

Call = Callable[[], object]


def find_authors(folder: str) -> None:
    """Lets `import mem_transformer` find the authors' code, with what torch of today needs changed in it."""
    sys.path += [folder, f"{folder}/utils"]
    torch.version.cuda = torch.version.cuda or "12.0"  # their import reads it, and a CPU build has none
    torch.Tensor.byte = torch.Tensor.bool  # their mask, which masked_fill takes as booleans only


def medians(calls: dict[str, Call], rounds: int, in_a_row: int = 1) -> dict[str, tuple[float, float]]:
    """CPU and wall seconds of each call, all taking turns; ours is called so often `in_a_row`, as in use, and the mean taken."""
    taken = {name: [] for name in calls}
    for count in range(rounds + 1):
        for name, call in calls.items():
            times = in_a_row if name == "ours" else 1
            cpu, wall = time.process_time(), time.perf_counter()
            for _ in range(times):
                call()
            if count:  # the first round warms up
                taken[name].append(((time.process_time() - cpu) / times, (time.perf_counter() - wall) / times))
    return {
        name: tuple(statistics.median(column) for column in zip(*rows, strict=True)) for name, rows in taken.items()
    }


def peak(call: Call) -> float:
    """The MiB that torch holds at a time, at the most, of what a call allocates."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        call()
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most / 2**20
