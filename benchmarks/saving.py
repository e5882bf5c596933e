"""What safety costs: the stall of a checkpoint, and the checks of each update.

    python -m benchmarks.saving [--million 50] [--rounds 5]

The stall is the time for which training stands still, of a run of so many million parameters with what Adam keeps of them;
plain is torch.save to the same disk, synced and renamed. The checks are an update's time beside the same forward pass,
backward pass, clipping and optimizer in a bare loop, in process CPU time, both taking turns.
"""

import argparse
import math
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from benchmarks.measure import medians
from txl import archive, optim
from txl.config import build, compose
from txl.data.streams import Lanes, Prefetched
from txl.ranks import ALONE
from txl.saver import Saver
from txl.signals import StopSignals
from txl.training import Run, updates


def made(overrides: list[str], n_token: int) -> Run:
    """A run on random tokens."""
    cfg = compose("train", overrides)
    torch.manual_seed(0)
    model = build(cfg.model, n_token=n_token)
    optimizer = build(cfg.optimizer)(optim.parameter_groups(model))
    tokens = torch.randint(n_token, (1 << 16,)).numpy()
    lanes = Prefetched(Lanes(tokens, batch_size=cfg.batch_size, tgt_len=cfg.tgt_len), pin=False)
    return Run(model=model, optimizer=optimizer, lanes=lanes, scaler=torch.amp.GradScaler("cpu", enabled=False))


def constant(step: int, *, lr: float, steps: int, valid_nll: list[float]) -> float:
    return lr


def stalls(million: int, rounds: int) -> list[tuple[str, float]]:
    """Seconds of standing still a checkpoint."""
    run = made(["model.d_model=512", "model.d_inner=2048", "model.n_layer=4", "batch_size=2", "tgt_len=16"], 2000)
    width, have = 512, sum(parameter.numel() for parameter in run.model.parameters())
    run.model.more = nn.ParameterList(
        nn.Parameter(torch.randn(1000, width)) for _ in range((million * 10**6 - have) // (1000 * width))
    )
    run.optimizer = build(compose("train", []).optimizer)(optim.parameter_groups(run.model))
    for parameter in run.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    run.optimizer.step()

    def content() -> dict:
        return {"model": dict(run.model.state_dict()), "step": 1, "run": run.state_dict()}

    def plain(path: Path) -> None:
        with path.open("wb") as file:
            torch.save(content(), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(path, path.with_suffix(".pt"))

    taken: dict[str, list[float]] = {
        "plain": [],
        "ours": [],
        "ours until on disk": [],
        "read and checked": [],
        "plain read": [],
    }
    with tempfile.TemporaryDirectory(dir=".") as folder:
        saver = Saver(Path(folder), keep=2)
        for _ in range(rounds + 1):
            began = time.perf_counter()
            plain(Path(folder) / "plain.new")
            taken["plain"].append(time.perf_counter() - began)
            began = time.perf_counter()
            saver.save(content(), best=False)
            taken["ours"].append(time.perf_counter() - began)
            saver.wait()
            taken["ours until on disk"].append(time.perf_counter() - began)
            began = time.perf_counter()
            archive.read(Path(folder) / "last.pt")
            taken["read and checked"].append(time.perf_counter() - began)
            began = time.perf_counter()
            torch.load(Path(folder) / "plain.pt", weights_only=True)
            taken["plain read"].append(time.perf_counter() - began)
    return [(name, statistics.median(times[1:])) for name, times in taken.items()]


def checks(rounds: int) -> tuple[float, float]:
    """Process CPU seconds of an update, and of the same in a bare loop, of the default model and batch."""
    safe, bare = made([], 256), made([], 256)
    steps = updates(safe, steps=10**9, lr=1e-3, schedule=constant, clip=0.25)
    parameters, stop = list(bare.model.parameters()), StopSignals()
    bare.model.train()

    def guarded() -> None:
        next(steps)
        ALONE.agree(stop.received or 0, False, False)
        safe.ranks.settled()

    def unguarded() -> None:
        segment = next(bare.lanes)
        bare.optimizer.zero_grad(set_to_none=True)
        nll, bare.mems = bare.model(segment.tokens, None if segment.begins else bare.mems, segment.targets)
        nll.mean().backward()
        nn.utils.clip_grad_norm_(parameters, 0.25)
        bare.optimizer.step()

    found = medians({"guarded": guarded, "bare": unguarded}, rounds)
    return found["guarded"][0], found["bare"][0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--million", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    rows = dict(stalls(asked.million, asked.rounds))
    print(f"| {asked.million} million parameters and their Adam | seconds | of plain |\n| --- | --- | --- |")
    for name, seconds in rows.items():
        against = rows["plain read"] if "read" in name else rows["plain"]
        print(f"| {name} | {seconds:.2f} | {seconds / against:.2f} |")
    safe, bare = checks(max(20, 20 * asked.rounds))
    ratio = safe / bare
    assert math.isfinite(ratio)
    print(
        f"\nan update with all checks takes {ratio:.3f} times the bare one ({1000 * safe:.1f} and {1000 * bare:.1f} ms)"
    )


if __name__ == "__main__":
    main()
