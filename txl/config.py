"""From configuration to objects: `build`, `check`, and how an entry point is launched. Only this module knows Hydra and OmegaConf."""

import difflib
import functools
import inspect
import os
import re
import signal
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, Literal, Union

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, InstantiationException
from hydra.types import RunMode
from hydra.utils import get_object, instantiate
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

CONF = Path(__file__).parents[1] / "conf"
DIRECTIVES = {"_target_", "_partial_"}
LITERAL_KEYS = ("prompt", "stop")  # of generate.py: taken as they are typed
STOPPED, INTERRUPTED = 75, 130  # exit statuses: everything saved, to be started again; Ctrl-C

_mistakes: list[Exception | None] = []  # of the one program that this process was launched as; empty in others


class Stopped(BaseException):
    """A run that ended early on request, with everything saved; `status` is the exit status that says why.

    No Exception, so that it ends a sweep too instead of counting as one failed job.
    """

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status

    @classmethod
    def by(cls, received: int, message: str) -> "Stopped":
        """By a signal: 130 for Ctrl-C, else 75, which says that the same command goes on."""
        return cls(message, INTERRUPTED if received == signal.SIGINT else STOPPED)


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
    problems = list(_problems(plain(cfg), ""))
    if problems:
        raise ValueError("; ".join(problems))


def _problems(node: Any, path: str):
    if isinstance(node, list):
        for index, item in enumerate(node):
            yield from _problems(item, f"{path}[{index}]")
    if not isinstance(node, dict):
        return
    at = f"{path}." if path else ""
    problems = list(_call_problems(node, at)) if "_target_" in node else []
    yield from problems
    for key, value in node.items():
        yield from _problems(value, f"{at}{key}")
    if "_target_" in node and not problems:
        yield from _limit_problems(node, at)


def _limit_problems(node: dict, at: str):
    """What a group of settings, a dataclass, says against its values; models and data speak up when they are built."""
    target = get_object(node["_target_"])
    if is_dataclass(target):
        try:
            target(**{key: value for key, value in node.items() if key not in DIRECTIVES})
        except ValueError as error:
            yield f"{at}{error}"


def _call_problems(node: dict, at: str):
    try:
        target = get_object(node["_target_"])
    except Exception as error:
        yield f"{at}_target_: {node['_target_']} cannot be imported ({type(error).__name__})"
        return
    parameters = inspect.signature(target).parameters
    hints = _hints(target)
    for key, value in node.items():
        if key in DIRECTIVES:
            continue
        if key not in parameters:
            near = difflib.get_close_matches(key, parameters, n=1)
            yield f"{at}{key}: {target.__name__} takes no {key!r}" + (f"; did you mean {near[0]!r}?" if near else "")
        elif value == "???" and key not in LITERAL_KEYS:
            yield f"{at}{key}: a value must be given"
        elif key in hints and not _fits(value, hints[key]):
            yield f"{at}{key}: must be {_describe(hints[key])}, got {value!r}"
    if not node.get("_partial_"):
        for name, parameter in parameters.items():
            needed = parameter.default is parameter.empty and parameter.kind is parameter.KEYWORD_ONLY
            if needed and name not in node and name != "cache_dir":
                yield f"{at}{name}: missing"


def _hints(target: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(target.__init__ if inspect.isclass(target) else target)
    except Exception:  # a library's annotation that Python cannot resolve is no ground to refuse a value
        return {}


def _fits(value: Any, hint: Any) -> bool:
    """Whether a plain value can stand for an annotation; what plain values cannot express (tensors, modules) always fits."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(value, Mapping) and "_target_" in value:
        return True
    if hint is Any or isinstance(hint, typing.TypeVar):
        return True
    if origin in (Union, types.UnionType):
        return any(_fits(value, argument) for argument in arguments)
    if origin is Literal:
        return value in arguments and not (isinstance(value, bool) and not any(a is value for a in arguments))
    if hint is type(None):
        return value is None
    if hint is bool:
        return isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is str:
        return isinstance(value, str)
    if hint is dict or origin is dict:
        return isinstance(value, Mapping)
    if (origin is not None and inspect.isclass(origin) and issubclass(origin, Sequence)) or hint in (list, tuple):
        if not isinstance(value, (list, tuple)):
            return False
        items = [argument for argument in arguments if argument is not ...]
        if origin is tuple and ... not in arguments and items:
            return len(items) == len(value) and all(map(_fits, value, items))
        return not items or all(_fits(item, items[0]) for item in value)
    return value is not None and not isinstance(value, str)


def _describe(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        both = {int, float} <= set(arguments)  # a number is a number
        return " or ".join(_describe(argument) for argument in arguments if not (both and argument is int))
    if origin is Literal:
        return " or ".join(map(repr, arguments))
    if hint is type(None):
        return "null"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", dict: "a group of keys"}
    return words.get(hint) or ("a list" if origin is not None else getattr(hint, "__name__", str(hint)))


# How an entry point is launched


def task_overrides() -> list[str] | None:
    """What was typed after the program's name, one override each (this job's, in a sweep); None outside Hydra."""
    return list(HydraConfig.get().overrides.task) if HydraConfig.initialized() else None


def save_yaml(config: Mapping[str, Any], path: Path) -> None:
    """Writes a plain configuration as YAML."""
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(dict(config))))


def load_yaml(path: Path) -> dict[str, Any]:
    """Reads a configuration as plain values."""
    return plain(OmegaConf.load(path))


def compose(config_name: str, overrides: list[str]) -> Any:
    """A configuration by its overrides, inside a `hydra.main` program or outside."""
    if GlobalHydra.instance().is_initialized():
        return hydra.compose(config_name, overrides=overrides)
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        return hydra.compose(config_name, overrides=overrides)


def literal(key: str, text: str) -> str:
    """An override that gives Hydra this very text, whatever it holds."""
    text = re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + r"\${", text)  # OmegaConf: no interpolation
    text = re.sub(
        r"(\\+)('|$)", lambda match: match[1] * 2 + match[2], text
    )  # Hydra's grammar: backslashes before a quote
    return f"{key}='" + text.replace("'", r"\'") + "'"


def quoted(arguments: list[str]) -> list[str]:
    """The command line with the values of `prompt=` and `stop=` quoted for Hydra, so that they are taken literally."""
    split = [argument.partition("=") for argument in arguments]
    return [
        literal(key, value) if equals and key in LITERAL_KEYS else argument
        for argument, (key, equals, value) in zip(arguments, split, strict=True)
    ]


def launch(main: Callable[[], Any], *, literals: bool = False) -> None:
    """Runs a `hydra.main` function as a program: a user's mistake ends with status 1 and one line on standard error.

    Hydra's own complaints keep their text. HYDRA_FULL_ERROR=1 shows the traceback instead. A run that was stopped with
    everything saved exits with the status that it carries.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin make a run on a busy machine 10 times slower
    before = os.environ.get("HYDRA_FULL_ERROR", "0")
    full = before not in ("", "0")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # else Hydra prints its own form and exits, before we see the error
    _mistakes[:] = [None]
    if literals:
        sys.argv[1:] = quoted(sys.argv[1:])
    try:
        main()
        if _mistakes[0] is not None:
            raise _mistakes[0]
        sys.stdout.flush()
    except Stopped as stop:
        print(stop, file=sys.stderr)
        sys.exit(stop.status)
    except KeyboardInterrupt:
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
    except (ValueError, OSError) as error:
        if full:
            raise
        print(" ".join(str(error).split()), file=sys.stderr)
        sys.exit(1)
    finally:
        _mistakes.clear()
        os.environ["HYDRA_FULL_ERROR"] = before


def entry_point(config_name: str) -> Callable:
    """`hydra.main` on this project's configuration.

    Hydra writes a line of its own about an exception that leaves a job; in a launched program that is no sweep the
    exception is therefore handed to `launch` past Hydra. Everywhere else it is raised as it is.
    """

    def decorate(task: Callable[[Any], Any]) -> Callable:
        @functools.wraps(task)
        def job(cfg: Any) -> Any:
            if not _mistakes or HydraConfig.get().mode == RunMode.MULTIRUN:
                return task(cfg)
            try:
                return task(cfg)
            except Exception as error:
                _mistakes[0] = error

        return hydra.main(version_base="1.3", config_path=str(CONF), config_name=config_name)(job)

    return decorate
