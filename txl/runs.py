"""Run folders: where a run lives, whether it is new, unfinished or finished, and what it holds."""

import hashlib
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from txl import checkpoint
from txl.data.encoding import Split
from txl.data.store import Corpus
from txl.data.vocab import Vocabulary
from txl.runtime import write_json
from txl.settings import TRAINED
from txl.training import Run

OUTPUTS = Path("outputs")
FREE = {
    "name",
    "device",
    "processes",
    "resume",
    "log_every",
    "save_every",
    "max_minutes",
    "requeue",
    "cache_dir",
    "tracker",
}  # change no figure
LONGEST = 100
ERROR = "error.txt"  # why a point of a sweep failed
FILES = ("train", "valid", "test", "path")  # of `data.`
OWN = (
    "config.yaml",
    "overrides.json",
    "metrics.jsonl",
    "curves.png",
    "sample.txt",
    "result.json",
    "vocab.json",
)  # a run's
PLAIN = (
    "vocab",
    "fractions",
    "max_bytes",
    "document_separator",
    "reset_at_document",
)  # what any text of one's own takes


@dataclass
class Parts:
    """What a configuration describes, made."""

    corpus: Corpus
    vocab: Vocabulary
    splits: dict[str, Split]
    model_config: dict[str, Any]  # with n_token filled in
    run: Run

    def texts(self) -> dict[str, str]:
        """The sha256 of each split's text."""
        return {name: self.corpus.text_hash(name) for name in self.splits}


def key_of(override: str) -> str:
    """The root key that an override sets: `tracker` for `+tracker.mode=online`."""
    return re.split(r"[=.@/]", override.lstrip("+~"), maxsplit=1)[0]


def full_key(override: str) -> str:
    """The key that an override sets: `tracker.mode` for `+tracker.mode=online`."""
    return override.lstrip("+~").partition("=")[0]


def slug(overrides: list[str]) -> str:
    """A folder name for these overrides: the same for the same ones in any order, `default` for none that matters.

    Characters outside [A-Za-z0-9._+-] become `-`; where more than an override's first `=` is lost by that, or the name
    grows long, eight digits of a hash follow.
    """
    chosen = sorted(_as_in_a_sweep(override) for override in overrides if key_of(override) not in FREE)
    if not chosen:
        return "default"
    exact = "_".join(override.replace("=", "-", 1) for override in chosen)
    safe = re.sub(r"[^A-Za-z0-9._+-]", "-", exact)
    if safe == exact and len(safe) <= LONGEST:
        return safe
    return f"{safe[:LONGEST]}-{short_hash(chosen)}"


def _as_in_a_sweep(override: str) -> str:
    """One way to write a value, so that a point of a sweep and the same run alone are one: `0.001` for 1e-3, `true` for True."""
    key, equals, value = override.partition("=")
    if value.lower() in ("true", "false", "null"):
        value = value.lower()
    elif re.fullmatch(r"[+-]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][+-]?\d+)?", value):
        value = repr(float(value))
    return key + equals + value


def short_hash(value: Any) -> str:
    """Eight digits that stand for a plain value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]


def folder(config: Mapping[str, Any], overrides: list[str] | None) -> Path:
    """outputs/<name>/<slug>; without overrides to go by (a call from Python), a hash of the configuration is the slug."""
    if overrides is None:
        chosen = {key: value for key, value in config.items() if key not in FREE}
        return OUTPUTS / config["name"] / f"config-{short_hash(chosen)}"
    return OUTPUTS / config["name"] / slug(overrides)


def absolute_paths(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with the files it names as absolute paths, so that the run can be read from any folder."""

    def absolute(values: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
        return {**values, **{key: _absolute(values[key]) for key in keys if key in values}}

    data = absolute(config["data"], FILES)
    if isinstance(data.get("vocab"), Mapping):
        data["vocab"] = absolute(data["vocab"], ("file",))
    if isinstance(data.get("id"), str) and os.path.isdir(data["id"]):  # a data set in a local folder
        data["id"] = os.path.abspath(data["id"])
    return {**absolute(config, ("cache_dir", "init_from")), "data": data}


def _absolute(files: Any) -> Any:
    """A file, a pattern, or a list of them as absolute paths; null stays."""
    if isinstance(files, (list, tuple)):
        return [_absolute(file) for file in files]
    return os.path.abspath(files) if isinstance(files, str) else files


def result(path: Path) -> dict[str, Any] | None:
    """result.json of a finished run, else None."""
    try:
        content = json.loads((path / "result.json").read_text())
        return content if {"valid", "test", "step", "seconds", "parameters"} <= content.keys() else None
    except (FileNotFoundError, NotADirectoryError, ValueError, AttributeError):
        return None


def warn_of_another_text(config: Mapping[str, Any], result: Mapping[str, Any]) -> None:
    """Says so where the text is no longer the one that a finished run's figures are of; the hub is not asked."""
    if config["data"].get("id") is not None and config["data"].get("path") is None:
        return
    try:
        same = checkpoint.construct(config["data"], cache_dir=config["cache_dir"]).fingerprint() == result.get("corpus")
        words = "is not the one of the run's time; these are its old figures"
    except ValueError as error:
        same, words = False, f"cannot be read any more ({error})"
    if not same:
        print(f"warning: the text of data {words}", file=sys.stderr)


def make(path: Path, what: str = "name: the run's folder") -> None:
    """Makes the folder, without the error of an earlier try. Raises ValueError, beginning with `what`, if it cannot be made or written."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        write_json(path / ".writable", None)
        (path / ".writable").unlink(missing_ok=True)
        (path / ERROR).unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(f"{what} cannot be written: {path} ({error.strerror})") from error


def check_out(out: Path, checkpoint: Path, endings: Iterable[str] = ()) -> None:
    """Raises ValueError where a figure's JSON, or a file of another ending beside it, would take the place of a run's file."""
    if out.is_dir():
        raise ValueError(f"out: {out} is a folder")
    if out.suffix in (".pt", *endings):
        raise ValueError(f"out: {out} is to be JSON; give it a name that does not end in {out.suffix}")
    taken = [out, *(out.with_suffix(ending) for ending in endings)]
    of_a_run = {*OWN} if (out.parent / "overrides.json").exists() else set()
    for file in taken:
        if file.name in of_a_run or (file.exists() and file.samefile(checkpoint)):
            raise ValueError(f"out: {file} is a run's own; give the figure another name")


def other_text(data: Mapping[str, Any], asked: Mapping[str, Any], split: str) -> dict[str, Any]:
    """A run's data with other files or fractions (`data.*` of evaluate.py); files take the place of a built-in corpus.

    A file is scored whole, unless fractions are given with it. Raises ValueError if files are given, but none for the
    split that is scored.
    """
    files = {key: _absolute(value) for key, value in asked.items() if key in FILES and value is not None}
    if not files:
        return {**data, **{key: value for key, value in asked.items() if key in data}}
    if files.keys() == {"path"} and "path" in data:  # the same corpus, moved
        return {**data, **{key: value for key, value in asked.items() if key in data}, **files}
    if "path" not in files and "fractions" not in asked:
        if split not in files:
            given = next(iter(files))
            raise ValueError(f"data.{split}: not given; score data.{given} by split={given}, or give data.{split}=FILE")
        files = dict.fromkeys(("train", "valid", "test"), files[split])
    base = {key: data[key] for key in PLAIN if key in data}
    return {**base, **asked, **files, "_target_": "txl.data.corpus.text_files"}


def evaluation_name(
    path: Path, asked: Mapping[str, Any], other: Mapping[str, Any], measure: list[str] | None = None
) -> str:
    """<split>-<slug of the settings>.json: `default` for a run's best.pt read as it was trained.

    `measure` are the overrides that chose another measure than the figure; a slug of them follows.
    """
    names = ("tgt_len", "mem_len", "clamp_len", "same_length", "batch_size", "precision")
    settings = {name: asked[name] for name in names if asked[name] != TRAINED}
    settings |= {f"data.{key}": value for key, value in other.items()}
    if path.name != "best.pt":
        settings["checkpoint"] = path.stem
    words = (value if isinstance(value, str) else json.dumps(value) for value in settings.values())
    name = f"{asked['split']}-{slug([f'{key}={word}' for key, word in zip(settings, words, strict=True)])}"
    return f"{name}_{slug(measure)}.json" if measure else f"{name}.json"
