"""The options of `tracker=`: where a run's rows, and in the end its figures, sample and picture, are kept beside its own files."""

import contextlib
import json
import re
import select
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from txl.runtime import write_whole

INIT_TIMEOUT = 30  # seconds that W&B's server has to answer; training goes on meanwhile
START_TIMEOUT = 30  # seconds that its process has to start, on a busy machine
PATIENCE = 12  # seconds that a run waits at its end for another tracker
CODE = Path(__file__).parents[1]


class Conclusion(NamedTuple):
    """What a finished run has to show: the figures of its best checkpoint, under flat names, and what it writes."""

    step: int
    tokens: int
    figures: dict[str, float | int]
    prompt: str
    continuation: str
    picture: Path
    checkpoint: Path


class NoTracker:
    """`tracker=none`: nothing beside the run's own files."""

    def start(self, *, folder: Path, name: str, config: Mapping[str, Any], step: int, tokens: int) -> None:
        pass

    def log(self, row: Mapping[str, Any]) -> None:
        pass

    def conclude(self, conclusion: Conclusion) -> None:
        pass

    def finish(self) -> None:
        pass

    def abandon(self) -> None:
        pass


class WandbTracker:
    """`tracker=wandb`: Weights & Biases, into the run's folder without an account.

    With `mode=online` a second process sends the same to the server. Once all has arrived the offline copy is removed;
    where it has not, for whatever reason, a warning says how to send the copy, which is whole.
    """

    def __init__(
        self,
        *,
        project: str,
        mode: Literal["offline", "online"] = "offline",
        entity: str | None = None,
        tags: list[str] | None = None,
        log_checkpoint: bool = False,
        upload_seconds: int = 8,
    ):
        if upload_seconds < 1:
            raise ValueError(f"tracker.upload_seconds: must be at least 1, got {upload_seconds}")
        self._how = {"project": project, "entity": entity, "tags": tags}
        self.mode, self.log_checkpoint, self.upload_seconds = mode, log_checkpoint, upload_seconds
        self.patience = upload_seconds + 4  # seconds; the offline copy takes some of them
        self.rescue: str | None = None
        self._online: WandbProcess | None = None

    def start(self, *, folder: Path, name: str, config: Mapping[str, Any], step: int, tokens: int) -> None:
        how = {
            **self._how,
            "id": lasting_id(folder, "wandb_id"),
            "name": name,
            "dir": str(folder.resolve()),
            "config": with_git(config),
            "timeouts": {"init_timeout": INIT_TIMEOUT, "finish_timeout": self.upload_seconds},
        }
        self._offline = WandbProcess({**how, "mode": "offline"})
        if self.mode == "online":
            self._online = WandbProcess({**how, "mode": "online"})
        answer = self._offline.answer(START_TIMEOUT) or {"error": "no answer"}
        if "error" in answer:
            raise RuntimeError(answer["error"])
        self._copy = Path(answer["path"])
        self.rescue = f"wandb sync {self._copy}"

    def log(self, row: Mapping[str, Any]) -> None:
        self._send("log", row=known(row))

    def conclude(self, conclusion: Conclusion) -> None:
        self._send(
            "conclude",
            step=conclusion.step,
            tokens=conclusion.tokens,
            figures=conclusion.figures,
            sample={"prompt": conclusion.prompt, "continuation": conclusion.continuation},
            picture=str(conclusion.picture.resolve()) if conclusion.picture.exists() else None,
            checkpoint=str(conclusion.checkpoint.resolve()) if self.log_checkpoint else None,
        )

    def _send(self, name: str, **arguments: Any) -> None:
        if self._online and "error" in (answer := self._online.answer(0) or {}):
            self._offline_only(answer["error"])
        for process in filter(None, (self._online, self._offline)):
            process.send((name, arguments))

    def _offline_only(self, reason: str) -> None:
        self._online.kill()
        self._online = None
        print(
            f"warning: tracker: W&B is not reached ({reason}); training goes on; later: {self.rescue}", file=sys.stderr
        )

    def finish(self) -> None:
        deadline = time.monotonic() + self.upload_seconds
        for process in filter(None, (self._online, self._offline)):
            process.close()
        answer = self._offline.answer(self.upload_seconds) or {"error": "no answer"}
        if "error" in answer:
            raise RuntimeError(answer["error"])
        while self._online:
            answer = self._online.answer(deadline - time.monotonic()) or {
                "error": f"no answer in {self.upload_seconds} s"
            }
            if "error" in answer:
                self._offline_only(answer["error"])
            if "done" in answer:
                shutil.rmtree(self._copy)
                return


class WandbProcess:
    """txl/wandb_process.py at work, told how to start."""

    def __init__(self, how: Mapping[str, Any]):
        program = [sys.executable, "-P", str(Path(__file__).with_name("wandb_process.py"))]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(program, **pipes, bufsize=0, start_new_session=True)  # Ctrl-C is not for it
        self.send(how)

    def send(self, message: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has died, and said why
            self._process.stdin.write(json.dumps(message).encode() + b"\n")

    def answer(self, seconds: float | int) -> dict[str, Any] | None:
        """Its next answer, None where none comes in time."""
        ready, _, _ = select.select([self._process.stdout], [], [], max(seconds, 0))
        if not ready:
            return None
        line = self._process.stdout.readline()
        return json.loads(line) if line else {"error": "its process has died"}

    def close(self) -> None:
        self._process.stdin.close()

    def kill(self) -> None:
        self._process.kill()


class TensorboardTracker:
    """`tracker=tensorboard`: into RUN/tensorboard, scalars by update in `steps`, by tokens seen in `tokens`.

    A run that goes on takes back what was logged after the update from which it goes on.
    """

    rescue, patience = None, PATIENCE

    def start(self, *, folder: Path, name: str, config: Mapping[str, Any], step: int, tokens: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        began = {"steps": step, "tokens": tokens}
        self._writers = {
            axis: SummaryWriter(str(folder / "tensorboard" / axis), purge_step=at + 1 if at else None)
            for axis, at in began.items()
        }
        text = json.dumps(with_git(config), indent=2)
        self._writers["steps"].add_text("config", "\n".join(f"    {line}" for line in text.splitlines()), step + 1)

    def log(self, row: Mapping[str, Any]) -> None:
        for axis, writer in self._writers.items():
            for name, value in known(row).items():
                if name not in ("step", "tokens"):
                    tag = name if axis == "steps" else f"by_tokens/{name}"
                    writer.add_scalar(tag, value, row["step" if axis == "steps" else "tokens"])
            writer.flush()  # on disk, whatever happens to this process

    def conclude(self, conclusion: Conclusion) -> None:
        writer, step = self._writers["steps"], conclusion.step
        for name, value in conclusion.figures.items():
            writer.add_scalar(name, value, step)
        writer.add_text("prompt", conclusion.prompt, step)
        writer.add_text("continuation", conclusion.continuation, step)
        if conclusion.picture.exists():
            from matplotlib.image import imread

            writer.add_image("curves", imread(conclusion.picture)[:, :, :3], step, dataformats="HWC")

    def finish(self) -> None:
        for writer in self._writers.values():
            writer.close()


class TrackioTracker:
    """`tracker=trackio`: into trackio's own folder on this machine (TRACKIO_DIR), all runs of a project side by side.

    Its database is written directly: `trackio.init` would ask Hugging Face for the name of who is logged in there. A row has
    one name for good, so that a run that goes on writes none twice.
    """

    rescue, patience = None, PATIENCE

    def __init__(self, *, project: str):
        self.project = project

    def start(self, *, folder: Path, name: str, config: Mapping[str, Any], step: int, tokens: int) -> None:
        from trackio.sqlite_storage import SQLiteStorage

        SQLiteStorage.validate_project_name(self.project)
        self._storage, self._name = SQLiteStorage, name
        self._id, self._config = lasting_id(folder, "trackio_id"), with_git(config)

    def log(self, row: Mapping[str, Any]) -> None:
        self._write(row, row["step"])

    def _write(self, row: Mapping[str, Any], step: int) -> None:
        kind = min(name for name in row if name not in ("step", "tokens"))
        self._storage.bulk_log(
            project=self.project,
            run=self._name,
            run_id=self._id,
            metrics_list=[{name: value for name, value in known(row).items() if name != "step"}],
            steps=[step],
            config=self._config,
            log_ids=[f"{self._id}/{step}/{kind}"],
        )

    def conclude(self, conclusion: Conclusion) -> None:
        import trackio

        at = (self.project, self._name, conclusion.step)
        row = {"prompt": conclusion.prompt, "continuation": conclusion.continuation}
        shown = {"sample": trackio.Table(dataframe=None, data=[row])._to_dict(*at)}
        if conclusion.picture.exists():
            picture = trackio.Image(conclusion.picture)
            picture._save(*at)
            shown["curves"] = picture._to_dict()
        self._write({**conclusion.figures, **shown, "tokens": conclusion.tokens}, conclusion.step)

    def finish(self) -> None:
        pass


def known(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a row says: a figure that could not be had is left out."""
    return {name: value for name, value in row.items() if value is not None}


def with_git(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration, and under `git` the commit and branch of this code and whether files differ from it; nothing where there is no git."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=CODE, capture_output=True, text=True, timeout=5, check=True)
        return done.stdout.strip()

    try:
        commit, branch = git("rev-parse", "HEAD"), git("rev-parse", "--abbrev-ref", "HEAD")
        dirty = bool(git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        return dict(config)
    return {**config, "git": {"commit": commit, "branch": branch, "dirty": dirty}}


def lasting_id(folder: Path, name: str) -> str:
    """The id under which a tracker knows the run of this folder: made once, kept in the file of this name."""
    file = folder / name
    with contextlib.suppress(OSError):
        if found := re.fullmatch(r"[0-9a-z]{8,64}", file.read_text().strip()):
            return found[0]
    write_whole(file, lambda opened: opened.write(uuid.uuid4().hex.encode()))
    return file.read_text()
