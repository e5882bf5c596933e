"""What a sweep ends with: a table of its runs on standard output, the same table as CSV, and a plot."""

from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback

from txl.config import plain


class Report(Callback):
    """Remembers the run of each job, or why it failed; once all are through, reports them.

    A job that ran in another process (a launcher for that) is not heard of. Hydra makes a warning of what is raised here.
    """

    def __init__(self) -> None:
        self.runs: list[Path] = []
        self.failed: dict[str, str] = {}

    def on_job_end(self, config: Any, job_return: Any, **_: Any) -> None:
        """Also called where the job failed; its exception is then what it returned."""
        from txl import runs

        if isinstance(job_return._return_value, Exception):  # the property would raise it
            reason = " ".join(str(job_return._return_value).split()) or type(job_return._return_value).__name__
            self.failed[" ".join(job_return.overrides)] = reason
        elif (resumed := job_return.cfg.get("resume")) is not None:
            self.runs.append(Path(resumed))
        else:
            self.runs.append(runs.folder(plain(job_return.cfg), job_return.overrides))

    def on_multirun_end(self, config: Any, **_: Any) -> None:
        """The table, and its files in Hydra's folder for sweeps, named as the sweep is."""
        from txl import report

        if not self.runs and not self.failed:
            return
        rows = report.leaderboard(self.runs)
        report.show(rows, self.failed)
        if rows:
            path = Path(config.hydra.sweep.dir) / name_of(list(config.hydra.overrides.task))
            for write, file in ((report.plot, f"{path}.png"), (report.write_csv, f"{path}.csv")):
                write(rows, Path(file))
                print(f"sweep: {file}")


def name_of(overrides: list[str]) -> str:
    """What the files of a sweep are called: by the option of `sweep=`, and a slug of what was typed beside it."""
    from txl.runs import key_of, slug

    chosen = [one.partition("=")[2] for one in overrides if key_of(one) == "sweep"]
    rest = slug([one for one in overrides if key_of(one) != "sweep"])
    return "_".join([*chosen, rest]) if rest != "default" or not chosen else chosen[0]
