"""Saving a run while it trains on: a copy on the host, then a thread that writes, so that some whole state is always on disk."""

import os
import threading
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from txl import archive
from txl.runtime import sync_folder
from txl.signals import THREAD


class Saver:
    """Writes last.pt, last.1.pt, ... (`keep` of them) and best.pt, in a thread, one state at a time, in the order given.

    best.pt gets its name after the last.pt of its own moment, so that it is never from a future which a killed run did not
    keep. `settle` is called once a state is on disk, before it takes its name. An error of the thread is raised by the
    next call here: OSError for a disk that is full or gone, ValueError for numbers that are not finite, which are never saved.
    """

    def __init__(self, folder: Path, *, keep: int, settle: Callable[[], None] = lambda: None):
        self.folder, self.keep, self._settle = folder, keep, settle
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, content: Mapping[str, Any], *, best: bool) -> None:
        """Takes a copy and returns; waits before it only for the state given last, if that is still being written."""
        self.wait()
        self._thread = threading.Thread(target=self._write, args=(on_host(content), best), name=THREAD, daemon=True)
        self._thread.start()

    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Until all is on disk. Raises the thread's error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def give_up(self) -> None:
        """Until what was given is on disk or not; its error is not raised, since another ends the run."""
        if self._thread is not None:
            self._thread.join()

    def _write(self, content: dict[str, Any], best: bool) -> None:
        try:
            refuse_what_is_not_finite(content)
            if best:
                archive.write(self.folder / "best.next.pt", of_best(content))
            archive.write(self.folder / "last.next.pt", content)
            self._settle()
            take_name(self.folder, self.keep)
            if best:
                os.replace(self.folder / "best.next.pt", self.folder / "best.pt")
            sync_folder(self.folder)
        except BaseException as error:
            self._error = error


def take_name(folder: Path, keep: int) -> None:
    """Makes last.next.pt last.pt; those before it grow older, as far as one is missing among the `keep` that stay."""
    names = [folder / "last.pt"] + [folder / f"last.{age}.pt" for age in range(1, keep)]
    missing = next((age for age, name in enumerate(names) if not name.exists()), keep - 1)
    for younger, older in reversed(list(pairwise(names[: missing + 1]))):
        os.replace(younger, older)
    os.replace(folder / "last.next.pt", names[0])


def of_best(content: Mapping[str, Any]) -> dict[str, Any]:
    """What best.pt holds of a state: nothing that only the run needs; the weights that its figure is of, averaged or not."""
    averaged = content["run"].get("average", {}).get("weights", {})
    return {key: content[key] for key in content if key != "run"} | {"model": {**content["model"], **averaged}}


def on_host(value: Any, copies: dict[tuple, Tensor] | None = None) -> Any:
    """A copy on the host of what plain dicts and lists hold, weights that stand there twice once; to be saved while they change."""
    copies = {} if copies is None else copies
    if isinstance(value, Tensor):
        view = (value.data_ptr(), value.storage_offset(), value.shape, value.stride(), value.dtype, value.device)
        if view not in copies or value.numel() == 0:
            copies[view] = value.detach().clone() if value.device.type == "cpu" else value.detach().cpu()
        return copies[view]
    if isinstance(value, Mapping):
        return {key: on_host(item, copies) for key, item in value.items()}
    return [on_host(item, copies) for item in value] if isinstance(value, (list, tuple)) else value


def refuse_what_is_not_finite(content: Mapping[str, Any]) -> None:
    """Raises ValueError for weights, or what the optimizer keeps of them, that a run could not go on with."""
    optimizer = content.get("run", {}).get("optimizer", {}).get("state", {})
    kept = {f"{key} of {name}": value for name, state in optimizer.items() for key, value in state.items()}
    average = content.get("run", {}).get("average", {}).get("weights", {})
    kept |= {f"average of {name}": value for name, value in average.items()}
    for name, value in {**content["model"], **kept}.items():
        if isinstance(value, Tensor) and value.is_floating_point() and not torch.isfinite(value).all():
            raise ValueError(
                f"optimizer.lr: after update {content['step']} {name} is not finite, so that nothing was saved; the files "
                "hold the last state that is; try a lower rate, a longer schedule.warmup or clip"
            )
