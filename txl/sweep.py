"""What a sweep ends with: a table of its runs on standard output, the same table as CSV, and a plot."""

from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback

from txl.config import plain, remember


class Report(Callback):
    """Remembers the run of each job, or why it failed; once all are through, reports them.

    A job of another process (a launcher's) is not heard of. What is raised here becomes a warning of Hydra's.
    """

    def __init__(self) -> None:
        self.runs: list[Path] = []
        self.failed: dict[str, str] = {}

    def on_job_end(self, config: Any, job_return: Any, **_: Any) -> None:
        """Also called where a job failed, in which case its exception is what it returned, or is raised anew."""
        try:
            returned = job_return.return_value
        except Exception as error:
            returned = error
        if isinstance(returned, Exception):
            self.failed[" ".join(job_return.overrides)] = " ".join(str(returned).split()) or type(returned).__name__
        else:
            self.runs.append(folder_of(job_return.cfg, job_return.overrides))

    def on_multirun_end(self, config: Any, **_: Any) -> None:
        """The table, and its files in Hydra's folder for sweeps, named as the sweep is."""
        from txl import report
        from txl.runtime import naming

        rows = report.leaderboard(self.runs)
        if rows or self.failed:
            report.show(rows, self.failed)
        path = Path(config.hydra.sweep.dir) / name_of(list(config.hydra.overrides.task))
        for write, ending in ((report.write_csv, "csv"), (report.plot, "png")) if rows else ():
            file = path.with_name(f"{path.name}.{ending}")
            try:
                with naming(f"sweep: {file}"):
                    write(rows, file)
            except ValueError as error:
                remember(error)
                print(error)
            else:
                print(f"sweep: {file}")


def folder_of(cfg: Any, overrides: list[str]) -> Path:
    """Where a job's run lives."""
    from txl import runs

    return Path(str(cfg.resume)) if cfg.get("resume") is not None else runs.folder(plain(cfg), overrides)


def name_of(overrides: list[str]) -> str:
    """What the files of a sweep are called: the option of `sweep=`, and a slug of what was typed beside it."""
    from txl.runs import key_of, slug

    chosen = [one.partition("=")[2] for one in overrides if key_of(one) == "sweep"]
    beside = [one for one in overrides if key_of(one) != "sweep"]
    return "_".join(chosen if chosen and slug(beside) == "default" else [*chosen, slug(beside)])
