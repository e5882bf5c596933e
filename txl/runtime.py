"""The machine under a run: device, seed, precision, signals, files that are whole or absent."""

import contextlib
import fcntl
import json
import os
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def choose_device(name: str, index: int | None = None) -> torch.device:
    """`auto`: the first of CUDA, MPS and CPU that is there; `index` picks a CUDA device where the name does not.

    Raises ValueError for a device that is not there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if name == "cuda" and index is not None:
        name = f"cuda:{index}"
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda", "mps"):
            raise RuntimeError("cpu, cuda and mps are known")
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device: {name!r} is not to be had here ({str(error).splitlines()[0]})") from error
    return device


def set_seed(seed: int, *, deterministic: bool) -> None:
    """Seeds torch's generators on every device; `deterministic` refuses operations whose result depends on timing."""
    torch.manual_seed(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)


def autocast(device: torch.device, precision: str) -> contextlib.AbstractContextManager:
    """Matrix products in bf16 or fp16, weights in fp32; nothing at all for fp32."""
    if precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=DTYPES[precision])


@contextlib.contextmanager
def threads(number: int) -> Iterator[None]:
    """Lets torch use so many threads meanwhile."""
    before = torch.get_num_threads()
    if before == number:
        yield
        return
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies to the device; on CUDA from page-locked memory, so that the host does not wait for it."""
    if device.type == "cuda" and tensor.device.type == "cpu" and not tensor.is_pinned():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def requeue(say: Callable[[str], None]) -> None:
    """Asks Slurm to start this job again; a line says so where there is no such job or Slurm refuses."""
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        say("requeue: this is no Slurm job (SLURM_JOB_ID is not set); start the same command again")
        return
    try:
        subprocess.run(["scontrol", "requeue", job], check=True, capture_output=True, text=True, timeout=30)
        say(f"requeue: Slurm starts job {job} again")
    except (OSError, subprocess.SubprocessError) as error:
        say(f"requeue: scontrol requeue {job} failed ({getattr(error, 'stderr', '') or error})")


OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "std::bad_alloc")


@contextlib.contextmanager
def memory_named(*keys: str) -> Iterator[None]:
    """Raises ValueError, with the keys whose smaller values take less, where memory has run out."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, (MemoryError, torch.OutOfMemoryError)) and not any(
            words in str(error) for words in OUT_OF_MEMORY
        ):
            raise
        first = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise ValueError(f"{keys[0]}: out of memory ({first}); less is taken by smaller {', '.join(keys)}") from error


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the folder for this process. Raises ValueError, naming the holder, if another process has it.

    The lock dies with the process, however that ends.
    """
    with open(folder / ".lock", "a+") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            raise ValueError(f"name: {folder} is in use by {file.read().strip() or 'another process'}") from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


def write_whole(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Writes a file so that its name always stands for all of the old content or all of the new: beside, synced, renamed."""
    descriptor, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), 0o666 & ~_umask())
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def put(written: Path, path: Path) -> None:
    """Gives a file on the same disk the name that it was written for: with the rights of any new file, synced, renamed."""
    with open(written, "rb+") as file:
        os.fchmod(file.fileno(), 0o666 & ~_umask())
        os.fsync(file.fileno())
    os.replace(written, path)
    sync_folder(path.parent)


@contextlib.contextmanager
def naming(what: str) -> Iterator[None]:
    """Inside, a file that cannot be written is a ValueError that begins with `what`: the key, and the file."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{what} cannot be written ({error.strerror or error})") from error


def sync_folder(folder: Path) -> None:
    """Brings the names in a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_json(path: Path, value: Any) -> None:
    """Writes a value as JSON, whole or not at all."""
    write_whole(path, lambda file: file.write((json.dumps(value, indent=2) + "\n").encode()))


def profiled(steps: Iterator, updates: int, folder: Path) -> Iterator:
    """Passes the steps through, profiling the first `updates` after two for warming up.

    Writes profile.txt (operators by their own CPU time) and profile.json (a trace for chrome://tracing) to the folder.
    """
    from torch.profiler import ProfilerActivity, profile, schedule

    def write(profiler: Any) -> None:
        table = profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=30)
        (folder / "profile.txt").write_text(table)
        profiler.export_chrome_trace(str(folder / "profile.json"))

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    with profile(
        activities=activities, schedule=schedule(wait=0, warmup=2, active=updates, repeat=1), on_trace_ready=write
    ) as profiler:
        for step in steps:
            yield step
            profiler.step()
