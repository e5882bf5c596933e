"""What a sweep leaves: why a point failed, in its folder; a table of its runs on standard output and as CSV; a picture.

Points may run in other processes (`hydra/launcher=joblib`, `submitit_local`, `submitit_slurm`), so what became of each is
told by files: outputs/.sweep/<name>/<hash of the overrides>.json.
"""

import contextlib
import json
import os
import traceback
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import OmegaConf

from txl.config import CONF, plain, remember

ROOT = CONF.parent


class Report(Callback):
    """Notes what became of each point, wherever it ran; once all are through, reports them.

    What is raised here becomes a warning of Hydra's.
    """

    def on_multirun_start(self, config: Any, **_: Any) -> None:
        """Before any point: travels to each with this object. A point that an earlier call has noted is not this call's."""
        self.path = Path(config.hydra.sweep.dir).absolute() / name_of(list(config.hydra.overrides.task))
        self.call = uuid.uuid4().hex
        self.path.parent.mkdir(parents=True, exist_ok=True)
        paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if str(ROOT) not in paths:  # where a launcher's processes find this project, whatever folder they start in
            os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, paths)])

    def on_job_end(self, config: Any, job_return: Any, **_: Any) -> None:
        """Also called where a point failed, in which case its exception is what it returned, or is raised anew."""
        if not hasattr(self, "path"):  # a run that is alone
            return
        from txl.runs import short_hash
        from txl.runtime import write_json

        try:
            returned = job_return.return_value
        except Exception as error:
            returned = error
        point: dict[str, Any] = {"call": self.call, "number": config.hydra.job.num, "run": None, "error": None}
        point["overrides"] = list(job_return.overrides)
        if isinstance(returned, Exception):
            point["error"] = " ".join(str(returned).split()) or type(returned).__name__
        try:
            point["run"] = str(folder_of(job_return.cfg, job_return.overrides).absolute())
        except ValueError as error:  # what it is called is what was wrong
            point["error"] = point["error"] or str(error)
        if isinstance(returned, Exception) and point["run"] is not None:
            leave_error(Path(point["run"]), point, returned)
        if isinstance(returned, Exception):
            job_return.return_value = None  # all is told; not every exception can travel to another process
        self.path.mkdir(exist_ok=True)
        write_json(self.path / f"{short_hash(point['overrides'])}.json", point)

    def on_multirun_end(self, config: Any, **_: Any) -> None:
        """The table, and its files in Hydra's folder for sweeps, named as the sweep is."""
        from txl import report
        from txl.runs import result
        from txl.runtime import naming

        points = sorted(
            (json.loads(file.read_text()) for file in self.path.glob("*.json")), key=lambda point: point["number"]
        )
        if "study_name" not in config.hydra.sweeper:  # a study goes on, and all of it is told
            points = [point for point in points if point["call"] == self.call]
        common = set.intersection(*(set(point["overrides"]) for point in points)) if len(points) > 1 else set()
        failed = {}
        for point in points:
            if point["error"] is not None:
                if point["call"] == self.call:
                    remember(ValueError(point["error"]))
                failed["failed: " + " ".join(one for one in point["overrides"] if one not in common)] = point["error"]
        runs = [Path(os.path.relpath(point["run"])) for point in points if point["error"] is None]
        rows = report.leaderboard(run for run in runs if result(run) is not None)
        if rows or failed:
            report.show(rows, failed)
        for write, ending in ((report.write_csv, "csv"), (report.plot, "png")) if rows else ():
            file = Path(os.path.relpath(self.path.with_name(f"{self.path.name}.{ending}")))
            try:
                with naming(f"sweep: {file}"):
                    write(rows, file)
            except ValueError as error:
                remember(error)
                print(error)
            else:
                print(f"sweep: {file}")


def leave_error(run: Path, point: Mapping[str, Any], error: Exception) -> None:
    """error.txt in the folder of a point that failed: its overrides, why, and where in the program; gone when it starts again.

    The folder of a run that is finished, or that another process trains, is left alone.
    """
    from txl import runs
    from txl.runtime import locked

    if runs.result(run) is not None:
        return
    lines = [" ".join(point["overrides"]), point["error"], "", *traceback.format_exception(error)]
    try:
        runs.make(run)
        with locked(run):
            (run / runs.ERROR).write_text("\n".join(line.rstrip("\n") for line in lines) + "\n")
    except (ValueError, OSError):
        return


def folder_of(cfg: Any, overrides: list[str]) -> Path:
    """Where a job's run lives."""
    from txl import runs

    return Path(str(cfg.resume)) if cfg.get("resume") is not None else runs.folder(plain(cfg), overrides)


def sampler(*, seed: int, storage: str, study_name: str) -> Any:
    """Optuna's TPE (Bergstra et al., NeurIPS 2011); its draws depend on the seed and the trials that the study has already."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with contextlib.suppress(KeyError):
        seed += len(optuna.load_study(study_name, storage).trials)
    return optuna.samplers.TPESampler(seed=seed)


def name_of(overrides: list[str]) -> str:
    """What the files of a sweep are called: the option of `sweep=`, and a slug of what was typed beside it."""
    from txl.runs import key_of, slug

    chosen = [one.partition("=")[2] for one in overrides if key_of(one) == "sweep"]
    beside = [one for one in overrides if key_of(one) != "sweep"]
    return "_".join(chosen if chosen and slug(beside) == "default" else [*chosen, slug(beside)])


OmegaConf.register_new_resolver("sweep_name", lambda overrides: name_of(list(overrides)), replace=True)
