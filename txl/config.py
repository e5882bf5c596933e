"""From configuration to objects: `build`, `check`, and how an entry point is launched. Only this module knows Hydra and OmegaConf."""

import contextlib
import functools
import json
import os
import pkgutil
import re
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, InstantiationException
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from txl.signals import INTERRUPTED, THREAD, Stopped, StopSignals, leave
from txl.signature import LITERAL_KEYS, problems

CONF = Path(__file__).parents[1] / "conf"

_mistakes: list[Exception | None] = []  # of the one program that this process was launched as; empty in others


def plain(cfg: Any) -> Any:
    """The configuration as dicts, lists and scalars, with every interpolation resolved."""
    return OmegaConf.to_container(cfg, resolve=True) if OmegaConf.is_config(cfg) else cfg


def build(node: Any, **sizes: Any) -> Any:
    """Makes the object that `_target_` names, its parts first; `sizes` are arguments that only the program knows.

    Raises ValueError, with the full key, where the object refuses its arguments.
    """
    try:
        return instantiate(node, **sizes, _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, ValueError):
            raise cause from None
        raise ValueError(str(error).replace("\n", " ")) from error


def check(cfg: Any) -> None:
    """Holds a configuration against the signatures of what its `_target_`s name, before anything is read or written.

    Raises one ValueError that lists every unknown key (with the nearest known one), missing value and wrong type.
    """
    if found := list(problems(plain(cfg), "", pkgutil.resolve_name)):
        raise ValueError("; ".join(found))


# How an entry point is launched


def task_overrides() -> list[str] | None:
    """What was typed after the program's name, one override each (this job's, in a sweep); None outside Hydra."""
    return list(HydraConfig.get().overrides.task) if HydraConfig.initialized() else None


def in_sweep() -> bool:
    """Whether this job is one of a sweep (`-m`)."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def to_yaml(config: Mapping[str, Any]) -> str:
    """A plain configuration as YAML."""
    return OmegaConf.to_yaml(OmegaConf.create(dict(config)))


def load_yaml(path: Path) -> dict[str, Any]:
    """Reads a configuration as plain values. Raises ValueError for a file that holds none.

    It may come from a stranger: what asks for a value from elsewhere (an interpolation, which may name an environment
    variable, or an alias, which may stand for millions of values) is refused.
    """
    try:
        text = path.read_text()
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)):
            raise ValueError(f"name: {path} is damaged (it holds an alias)")
        config = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except (OmegaConfBaseException, yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        if str(error).startswith("name:"):
            raise
        raise ValueError(f"name: {path} is damaged ({type(error).__name__})") from error
    if re.search(r"(?<!\\)\$\{", json.dumps(config)):
        raise ValueError(f"name: {path} is damaged (it holds an interpolation)")
    if not isinstance(config, dict) or not config:
        raise ValueError(f"name: {path} is damaged (it holds no configuration)")
    return config


def compose(config_name: str, overrides: list[str]) -> Any:
    """A configuration by its overrides, inside a `hydra.main` program or outside."""
    if GlobalHydra.instance().is_initialized():
        return hydra.compose(config_name, overrides=overrides)
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        return hydra.compose(config_name, overrides=overrides)


def literal(key: str, text: str) -> str:
    """An override that gives Hydra this very text, whatever it holds."""
    # for OmegaConf: no interpolation; for Hydra's grammar: backslashes before a quote
    text = re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + r"\${", text)
    text = re.sub(r"(\\+)('|\Z)", lambda match: match[1] * 2 + match[2], text)
    return f"{key}='" + text.replace("'", r"\'") + "'"


def quoted(arguments: list[str]) -> list[str]:
    """The command line with the values of `prompt=`, `stop=` and `stops=` quoted for Hydra, so that they are taken literally."""
    split = [argument.partition("=") for argument in arguments]
    return [
        literal(key, value) if equals and key in LITERAL_KEYS else argument
        for argument, (key, equals, value) in zip(arguments, split, strict=True)
    ]


def launch(main: Callable[[], Any], *, literals: bool = False, stoppable: bool = False) -> None:
    """Runs a `hydra.main` function as a program: a user's mistake ends with status 1 and one line on standard error.

    Hydra's own complaints keep their text. HYDRA_FULL_ERROR=1 shows the traceback instead. A run that was stopped with
    everything saved exits with the status that it carries; a `stoppable` program does so from its first moment on.
    """
    # threads that spin while they wait make a run on a busy machine 10 times slower
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    before = os.environ.get("HYDRA_FULL_ERROR", "0")
    full = before not in ("", "0")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # else Hydra prints its own form and exits, before we see the error
    _mistakes[:] = [None]
    for name, mode in {"stdin": "r", "stdout": "w", "stderr": "w"}.items():
        if getattr(sys, name) is None:  # closed by whoever started us
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    if literals:
        sys.argv[1:] = quoted(sys.argv[1:])
    try:
        with StopSignals() if stoppable else contextlib.nullcontext() as stop:
            if stoppable:
                stop.leave_at_once(leave)
            main()
        if _mistakes[0] is not None:
            raise _mistakes[0]
        sys.stdout.flush()
    except Stopped as stop:
        print(stop, file=sys.stderr)
        sys.exit(stop.status)
    except KeyboardInterrupt:
        if any(thread.name == THREAD for thread in threading.enumerate()):
            os._exit(INTERRUPTED)  # a checkpoint that is being written is not waited for: the one before is whole
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # the reader of our standard output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (HydraException, OmegaConfBaseException) as error:
        if full:
            raise
        lines = [line for line in str(error).splitlines() if line.strip()]
        print("\n".join(lines[:10]), file=sys.stderr)
        sys.exit(1)
    except Exception as error:
        if full or not (isinstance(error, (ValueError, OSError, yaml.YAMLError)) or _is_of_a_launcher(error)):
            raise
        error = _mistakes[0] or error  # a sweep that ends without a figure says so, but not why
        words = " ".join(str(error).split())
        if _is_of_a_launcher(error):
            words = f"hydra/launcher: a process of the sweep ended ({words[:200]}); the same command goes on"
        if words:  # none where another process says it
            print(words, file=sys.stderr)
        sys.exit(1)
    finally:
        _mistakes.clear()
        os.environ["HYDRA_FULL_ERROR"] = before


def _is_of_a_launcher(error: Exception) -> bool:
    """Whether a process of a sweep died without a word, in the eyes of the one that waits for it."""
    return type(error).__module__.partition(".")[0] in ("joblib", "submitit")


def _launched() -> bool:
    """Whether this process is a launched program; a function, since a launcher's processes get a copy of what calls it."""
    return bool(_mistakes)


def remember(error: Exception) -> None:
    """Makes a mistake the reason why a launched program fails, at its end, if it is the first one; elsewhere raises it."""
    if not _launched():
        raise error
    _mistakes[0] = _mistakes[0] or error


def entry_point(config_name: str) -> Callable:
    """`hydra.main` on this project's configuration.

    Hydra writes a line of its own about an exception that leaves a job, and a sweep with one has no end that its
    callbacks would hear of. In a launched program the first exception is therefore handed to `launch` past Hydra, and
    each is the job's return value, as it is in a sweep's other processes. Everywhere else it is raised as it is.
    """

    def decorate(task: Callable[[Any], Any]) -> Callable:
        @functools.wraps(task)
        def job(cfg: Any) -> Any:
            try:
                return task(cfg)
            except Exception as error:
                if _launched() or not in_sweep():
                    remember(error)
                return error

        job.config_name = config_name
        return hydra.main(version_base="1.3", config_path=str(CONF), config_name=config_name)(job)

    return decorate


def call(main: Callable, overrides: list[str]) -> Any:
    """Runs an entry point from Python, a notebook say, as its command would run with these overrides; returns what it returns.

    A run that is begun so lives in the same folder, and `resume=` goes on with it from either side.
    """
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = hydra.compose(main.config_name, overrides=quoted(overrides), return_hydra_config=True)
        HydraConfig.instance().set_config(cfg)
        with open_dict(cfg):
            del cfg["hydra"]
        try:
            return main(cfg)
        finally:
            HydraConfig.instance().cfg = None
