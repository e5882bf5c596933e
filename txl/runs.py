"""Run folders: where a run lives, whether it is new, unfinished or finished, and what it holds."""

import hashlib
import itertools
import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from txl import checkpoint
from txl.config import load_yaml, to_yaml
from txl.data.encoding import Split
from txl.data.store import Corpus
from txl.data.vocab import Vocabulary, fingerprint
from txl.runtime import write_json, write_whole
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
    "cache_dir",
    "tracker",
}  # change no figure
LONGEST = 100
FILES = ("train", "valid", "test", "path")  # of `data.`
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
    chosen = sorted(override for override in overrides if key_of(override) not in FREE)
    if not chosen:
        return "default"
    exact = "_".join(override.replace("=", "-", 1) for override in chosen)
    safe = re.sub(r"[^A-Za-z0-9._+-]", "-", exact)
    if safe == exact and len(safe) <= LONGEST:
        return safe
    return f"{safe[:LONGEST]}-{short_hash(chosen)}"


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


def flat(config: Any, path: str = "") -> dict[str, Any]:
    """Every value under its full key."""
    if not isinstance(config, Mapping):
        return {path: config}
    pairs = [flat(value, f"{path}.{key}" if path else key) for key, value in config.items()]
    return {key: value for pair in pairs for key, value in pair.items()} or {path: {}}


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """`key: old, now new` for each value that differs, leaving out the keys that change no figure."""
    old, new = flat(before), flat(after)
    keys = sorted(key for key in old.keys() | new.keys() if key_of(key) not in FREE)
    return [f"{key}: {old.get(key)}, now {new.get(key)}" for key in keys if old.get(key) != new.get(key)]


def differences(path: Path, config: Mapping[str, Any]) -> list[str]:
    """What a configuration changes about the one that the folder holds; nothing where it holds none."""
    try:
        return changes(load_yaml(path / "config.yaml"), config)
    except (FileNotFoundError, NotADirectoryError):
        return []


def refuse_another(path: Path, config: Mapping[str, Any]) -> None:
    """Raises ValueError if the folder holds a run of another configuration, naming the keys that differ."""
    if changed := differences(path, config):
        raise ValueError(
            f"name: {path} holds a run of another configuration ({'; '.join(changed)}); "
            f"choose another name=, or change that run with resume={path}"
        )


def resumed_overrides(path: Path, overrides: list[str]) -> list[str]:
    """The overrides of the run in a folder and, in place of those of the same key, the new ones.

    A new choice for a group (`model/memory=none`) also takes the place of old values in it (`model.memory.mem_len=16`).
    """
    try:
        old = json.loads((path / "overrides.json").read_text())
        assert isinstance(old, list) and all(isinstance(override, str) for override in old)
        assert (path / "config.yaml").is_file()
    except (OSError, ValueError, AssertionError):
        raise ValueError(
            f"resume: {path} is not the folder of a run (no readable overrides.json and config.yaml)"
        ) from None
    new = {full_key(override): override for override in overrides if key_of(override) != "resume"}

    def replaced(key: str) -> bool:
        return key in new or any(key.startswith(group.replace("/", ".") + ".") for group in new)

    return [override for override in old if not replaced(full_key(override))] + list(new.values())


def resumed_paths(path: Path, config: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    """The configuration with the run's own files where no new override names others: the old ones may be relative to another folder."""
    before, new = load_yaml(path / "config.yaml"), {full_key(override) for override in overrides}
    old = before["data"]
    data = {key: old.get(key) for key in (*FILES, "id") if key in config["data"] and f"data.{key}" not in new}
    if "file" in config["data"].get("vocab", {}) and "data.vocab.file" not in new:
        data["vocab"] = {**config["data"]["vocab"], "file": old["vocab"].get("file")}
    paths = {key: before[key] for key in ("cache_dir", "init_from") if key not in new}
    return {**config, **paths, "data": {**config["data"], **data}}


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
    """Makes the folder. Raises ValueError, beginning with `what`, if it cannot be made or written."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        write_json(path / ".writable", None)
        (path / ".writable").unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(f"{what} cannot be written: {path} ({error.strerror})") from error


def save_last(path: Path, content: Mapping[str, Any], *, keep: int) -> None:
    """last.pt, the one before it as last.1.pt, and so on, `keep` of them; written before any is moved."""
    upcoming = path / "last.next.pt"
    checkpoint.save(upcoming, content)
    names = [path / "last.pt"] + [path / f"last.{age}.pt" for age in range(1, keep)]
    for younger, older in reversed(list(itertools.pairwise(names))):
        if younger.exists():
            os.replace(younger, older)
    os.replace(upcoming, names[0])


def saved(path: Path) -> list[Path]:
    """The files last.pt, last.1.pt, ... that a folder holds, newest first."""
    aged = [file for file in path.glob("last.*.pt") if file.name.split(".")[1].isdecimal()]
    aged.sort(key=lambda file: int(file.name.split(".")[1]))
    return [file for file in (path / "last.pt", *aged) if file.exists()]


def load_last(path: Path) -> dict[str, Any] | None:
    """The newest last*.pt that can be read, with a warning for each that cannot; None where there is none.

    Raises ValueError if there are some and all are damaged: a run is never begun anew over what it had.
    """
    damage = []
    for candidate in saved(path):
        try:
            content = checkpoint.load(candidate, key="resume")
        except ValueError as error:
            damage.append(str(error))
            continue
        for words in damage:
            print(f"warning: {words}", file=sys.stderr)
        return content
    if damage:
        raise ValueError(f"resume: none of the checkpoints in {path} can be read; move the folder away to begin anew")
    return None


def begin_from(parts: Parts, init_from: str) -> None:
    """Gives a new run the weights of a checkpoint. Raises ValueError where there is none, or one of another vocabulary."""
    content = checkpoint.load(checkpoint.locate(init_from, "init_from"), "init_from")
    _take_weights(parts, content, "init_from")


def go_on(path: Path, parts: Parts, steps: int, changed: list[str]) -> None:
    """Sets a run to where its folder left it; a new one stays as it is. Clears away what a killed process left half-written.

    Raises ValueError where the vocabulary or the text is another than the checkpoint's, and where no update is left for
    what was changed to have an effect.
    """
    for half in path.glob(".*.pt-*"):
        half.unlink()
    content = load_last(path)
    if content is None:
        return
    _take_weights(parts, content, "resume")
    if content["texts"] != parts.texts():
        raise ValueError("resume: the text of data has changed since the run began")
    if not isinstance(content.get("run"), dict):
        raise ValueError(f"resume: {path / 'last.pt'} holds no state of a training run")
    parts.run.load_state_dict(content["run"])
    idle = [line for line in changed if not line.startswith(("eval.", "sample.", "steps:"))]
    if parts.run.step > steps or (parts.run.step == steps and idle):
        raise ValueError(f"steps: the run has done {parts.run.step} updates; give more than that, not {steps}")


def settle(path: Path, config: Mapping[str, Any], overrides: list[str]) -> None:
    """Makes a configuration that of the folder, once there is something to save; the figures of another one are void."""
    if (path / "config.yaml").exists() and load_yaml(path / "config.yaml") == config:
        return
    (path / "result.json").unlink(missing_ok=True)
    write_json(path / "overrides.json", overrides)
    write_whole(path / "config.yaml", lambda file: file.write(to_yaml(config).encode()))


def _take_weights(parts: Parts, content: Mapping[str, Any], key: str) -> None:
    if fingerprint(checkpoint.vocabulary(content)) != fingerprint(parts.vocab):
        raise ValueError(f"{key}: the checkpoint was made with another vocabulary than that of data")
    checkpoint.load_weights(parts.run.model, content["model"], key)


def content_of(parts: Parts, config: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint needs to be read without anything beside it."""
    return {
        "config": json.dumps({**config, "model": parts.model_config}),
        "vocab": json.dumps(parts.vocab.state()),
        "texts": parts.texts(),
        "step": parts.run.step,
        "tokens": parts.run.tokens,
        "model": parts.run.model.state_dict(),
    }


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


def evaluation_name(path: Path, asked: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """<split>-<slug of the settings>.json: `default` for a run's best.pt read as it was trained."""
    names = ("tgt_len", "mem_len", "clamp_len", "same_length", "batch_size", "precision")
    settings = {name: asked[name] for name in names if asked[name] != TRAINED}
    settings |= {f"data.{key}": value for key, value in other.items()}
    if path.name != "best.pt":
        settings["checkpoint"] = path.stem
    words = (value if isinstance(value, str) else json.dumps(value) for value in settings.values())
    return f"{asked['split']}-{slug([f'{key}={word}' for key, word in zip(settings, words, strict=True)])}.json"
