"""Going on with a run: what may change, which file is gone on from, and that nothing but a whole state is."""

import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from txl import archive, checkpoint
from txl.config import load_yaml, to_yaml
from txl.data.vocab import fingerprint
from txl.ranks import Ranks, seed_of
from txl.runs import FILES, FREE, Parts, full_key, key_of, result
from txl.runtime import sync_folder, write_json, write_whole
from txl.saver import take_name
from txl.settings import NO_AVERAGE
from txl.sharding import for_saving

SIZES = "the weights would not fit"
REFUSED = {
    "seed": "the random generators go on where they were",
    "batch_size": "each lane would stand elsewhere in the text",
    "init_from": "the weights are the run's own",
    "optimizer._target_": "what it kept of the weights would be of another kind",
    "data.shuffle_documents": "the place in the text would be another",
    "model._target_": SIZES,
    "model.position._target_": SIZES,
    "model.position.max_klen": SIZES,
    "model.memory.compression": SIZES,
    "model.memory.rate": SIZES,
    "model.softmax": SIZES,
    **{f"model.{size}": SIZES for size in ("n_token", "n_layer", "n_head", "d_model", "d_head", "d_inner", "d_embed")},
    "model.untie_r": SIZES,
    "model.tie_weight": SIZES,
    "model.init_std": "the weights are the run's own",
    "model.proj_init_std": "the weights are the run's own",
}  # on resume; FREE changes at any start, and all else with resume=RUN KEY=VALUE, which lists it
WITH_WEIGHTS = {
    "txl.layers.memory.CompressiveMemory",
    "swiglu",
}  # choices with weights that the others of their key lack
ADDED = {  # what the runs did whose folders lack a key that came later
    "average": NO_AVERAGE,
    "loss": "full",
    "model": {"dropoute": 0.0, "dropouti": None, "dropouto": None, "wdrop": 0.0},
}
ASKED_CODE = re.compile(r"(^|[.{,\s])(_target_|_partial_|hydra)\b|\$\{[^}]*:")
FIGURES_ONLY = ("eval.", "sample.", "steps:", "keep_last:", "requeue:")  # what a run without updates left may change


@dataclass(frozen=True)
class Job:
    """A run to begin or to go on with, in plain values: its folder, its configuration, what that changes about the folder's."""

    path: Path
    config: dict[str, Any]
    overrides: list[str] | None  # None: called from Python with a configuration alone
    changed: list[str]
    resumed: bool  # asked for by resume=

    def finished(self) -> dict[str, Any] | None:
        """The result of a run that is through and is asked for nothing else."""
        return None if self.changed else result(self.path)


def flat(config: Any, path: str = "") -> dict[str, Any]:
    """Every value under its full key."""
    if not isinstance(config, Mapping):
        return {path: config}
    pairs = [flat(value, f"{path}.{key}" if path else key) for key, value in config.items()]
    return {key: value for pair in pairs for key, value in pair.items()} or {path: {}}


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The old and the new value of each key that differs, leaving out the keys that change no figure."""
    old, new = {**flat(ADDED), **flat(before)}, flat(after)
    keys = sorted(key for key in old.keys() | new.keys() if key_of(key) not in FREE)
    return {key: (old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)}


def why_refused(key: str, *values: Any) -> str | None:
    """Why a key cannot change when a run goes on, from and to these values; None if it can."""
    if any(isinstance(value, str) and value in WITH_WEIGHTS for value in values):
        return SIZES
    return next((why for refused, why in REFUSED.items() if key == refused or key.startswith(refused + ".")), None)


def differences(path: Path, config: Mapping[str, Any]) -> list[str]:
    """`key: old, now new` for what a configuration changes about the one that the folder holds; nothing where it holds none."""
    try:
        changed = changes(load_yaml(path / "config.yaml"), config)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [f"{key}: {shown(old)}, now {shown(new)}" for key, (old, new) in changed.items()]


def shown(value: Any) -> str:
    """A value as one writes it on the command line."""
    return value if isinstance(value, str) else json.dumps(value)


def refuse_another(path: Path, config: Mapping[str, Any]) -> None:
    """Raises ValueError if the folder holds a run of another configuration, naming the keys that differ."""
    if changed := differences(path, config):
        raise ValueError(
            f"name: {path} holds a run of another configuration ({'; '.join(changed)}); "
            f"choose another name=, or change that run with resume={path}"
        )


def refuse_what_cannot_change(path: Path, config: Mapping[str, Any]) -> None:
    """Raises ValueError, with the key and both values, for a change after which the run could not go on."""
    found = []
    for key, (old, new) in changes(load_yaml(path / "config.yaml"), config).items():
        if why := why_refused(key, old, new):
            found.append(f"{key} cannot change, {shown(old)} to {shown(new)} ({why})")
    if found:
        raise ValueError(f"resume: {'; '.join(found)}; init_from={path} begins a new run with these weights")


def resumed_overrides(path: Path, overrides: list[str]) -> list[str]:
    """The overrides of the run in a folder and, in place of those of the same key, the new ones.

    A new choice for a group (`model/memory=none`) also takes the place of old values in it (`model.memory.mem_len=16`).
    A folder may come from a stranger: raises ValueError where its overrides name code or ask the environment, and where
    the run has none, because `main(cfg)` began it.
    """
    try:
        old = json.loads((path / "overrides.json").read_text())
        assert old is None or (isinstance(old, list) and all(isinstance(override, str) for override in old))
        assert (path / "config.yaml").is_file()
    except (OSError, ValueError, AssertionError, RecursionError):
        raise ValueError(
            f"resume: {path} is not the folder of a run (no readable overrides.json and config.yaml)"
        ) from None
    if old is None:
        raise ValueError(
            f"resume: {path} was begun from Python with a configuration, and its overrides are not known; call "
            "train.main with the same one to go on, or txl.config.call with overrides"
        )
    new = {full_key(override): override for override in overrides if key_of(override) != "resume"}

    def replaced(key: str) -> bool:
        return key in new or any(key.startswith(group.replace("/", ".") + ".") for group in new)

    kept = [override for override in old if not replaced(full_key(override))]
    if asking := [override for override in kept if ASKED_CODE.search(override)]:
        raise ValueError(
            f"resume: the override {asking[0]!r} in {path / 'overrides.json'} names code, or asks for a value from "
            "outside; only what is typed may: repeat it on the command line"
        )
    return kept + list(new.values())


def resumed_paths(path: Path, config: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    """The configuration with the run's own files where no new override names others: the old ones may be relative to another folder."""
    before, new = load_yaml(path / "config.yaml"), {full_key(override) for override in overrides}
    old = before["data"]
    data = {key: old.get(key) for key in (*FILES, "id") if key in config["data"] and f"data.{key}" not in new}
    if "file" in config["data"].get("vocab", {}) and "data.vocab.file" not in new:
        data["vocab"] = {**config["data"]["vocab"], "file": old["vocab"].get("file")}
    paths = {key: before[key] for key in ("cache_dir", "init_from") if key not in new}
    return {**config, **paths, "data": {**config["data"], **data}}


def saved(path: Path) -> list[Path]:
    """The states that a folder holds, newest first; last.next.pt is one that is whole, but whose process died before naming it."""
    aged = [file for file in path.glob("last.*.pt") if file.name.split(".")[1].isdecimal()]
    aged.sort(key=lambda file: int(file.name.split(".")[1]))
    named = [file for file in (path / "last.pt", *aged) if file.exists()]
    upcoming = path / "last.next.pt"
    return [upcoming, *named] if upcoming.exists() else named


def newest(path: Path) -> tuple[str, dict[str, Any]] | None:
    """The name and content of the newest state that is whole; None where there is none at all.

    Broken ones before it are set aside, with a warning each, so that the next save pushes none of them in the place of a good
    one. Raises ValueError if all are broken, and leaves them as they are: a run is never begun anew over what it had.
    """
    broken = []
    for candidate in saved(path):
        try:
            content = checkpoint.load(candidate, key="resume")
            if not isinstance(content.get("run"), dict):
                raise ValueError(f"resume: {candidate} holds no state of a training run")
        except ValueError as error:
            broken.append((candidate, str(error)))
            continue
        for other, words in broken:
            aside = other.with_name(f"{other.name}.broken")
            os.replace(other, aside)
            print(f"warning: {words}; set aside as {aside.name}", file=sys.stderr)
        return candidate.name, content
    if broken:
        raise ValueError(
            f"resume: none of the checkpoints in {path} can be read "
            f"({'; '.join(words.removeprefix('resume: ') for _, words in broken)}); move the folder away to begin anew"
            + (f", or begin with the weights of init_from={path / 'best.pt'}" if (path / "best.pt").exists() else "")
        )
    return None


def begin_from(parts: Parts, init_from: str) -> None:
    """Gives a new run the weights of a checkpoint. Raises ValueError where there is none, or one of another vocabulary."""
    content = checkpoint.load(checkpoint.locate(init_from, "init_from"), "init_from")
    _take_weights(parts, content, "init_from")


def go_on(job: Job, parts: Parts, ranks: Ranks, steps: int, environment: Mapping[str, Any]) -> None:
    """Sets a run to where its folder left it, if it left something. Clears away what a killed process left half-written.

    All processes go on from the file that the first one chose. Raises ValueError where the vocabulary or the text is another
    than the checkpoint's, where no update is left for what was changed to have an effect, and where `resume=` names a folder
    without a state: a run is not begun anew in silence.
    """
    path, content = job.path, None

    def choose() -> tuple[str, str] | None:
        nonlocal content
        found = newest(path)
        if found is None and (job.resumed or (path / "result.json").exists()):
            raise ValueError(f"resume: {path} holds no checkpoint to go on from; the run's own command begins it anew")
        if found is None:
            return None
        content = found[1]
        name = clear_up(path, found[0], content["step"], job.config["keep_last"])
        return name, archive.digest(path / name)

    chosen = ranks.from_main(choose)
    if chosen is None:
        return
    if content is None:
        content = checkpoint.load(path / chosen[0], key="resume")
        if archive.digest(path / chosen[0]) != chosen[1]:
            raise ValueError(f"resume: {path / chosen[0]} is another file here than for the first process")
    if content["texts"] != parts.texts():
        data = [line for line in job.changed if line.startswith("data.")]
        words = f" ({'; '.join(data)})" if data else ""
        raise ValueError(
            f"resume: the text of data has changed since the run began{words}; init_from={path} begins a new run"
        )
    _take_weights(parts, content, "resume")
    parts.run.load_state_dict(content["run"])
    if ranks.rank >= len(content["run"]["rng"]):  # a process that the run did not have
        torch.manual_seed(seed_of(job.config["seed"], ranks.rank, parts.run.step))
    idle = [line for line in job.changed if not line.startswith(FIGURES_ONLY)]
    if parts.run.step > steps or (parts.run.step == steps and idle):
        raise ValueError(f"steps: the run has done {parts.run.step} updates; give more than that, not {steps}")
    ranks.say(f"resume: goes on after update {parts.run.step} of {steps}, from {path / chosen[0]}")
    for key, now in environment.items():
        before = content.get("environment", {}).get(key)
        if before != now:
            ranks.say(f"resume: {key}: {before}, now {now}: the figures go on to rounding, not bit for bit")


def clear_up(path: Path, name: str, step: int, keep: int) -> str:
    """Removes what was half-written, and names what was written but not yet named; the new name of that state, after `step`."""
    for half in (*path.glob(".*.pt-*"), *path.glob(".*.json-*"), *path.glob(".*.yaml-*")):
        half.unlink(missing_ok=True)
    if name == "last.next.pt":
        take_name(path, keep)
        name = "last.pt"
    best = path / "best.next.pt"
    if best.exists():
        try:
            same = checkpoint.load(best)["step"] == step
        except ValueError:
            same = False
        if same:
            os.replace(best, path / "best.pt")
        else:
            best.unlink()
    sync_folder(path)
    return name


def settle(path: Path, config: Mapping[str, Any], overrides: list[str] | None) -> None:
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


def content_of(parts: Parts, config: Mapping[str, Any], environment: Mapping[str, Any]) -> dict[str, Any]:
    """A whole state: what a checkpoint needs to be read without anything beside it, and what the run needs to go on."""
    return {
        "format": checkpoint.FORMAT,
        "config": json.dumps({**config, "model": parts.model_config}),
        "vocab": json.dumps(parts.vocab.state()),
        "texts": parts.texts(),
        "step": parts.run.step,
        "tokens": parts.run.tokens,
        "model": {name: for_saving(one, parts.run.ranks) for name, one in parts.run.model.state_dict().items()},
        "environment": dict(environment),
        "run": parts.run.state_dict(),
    }


def environment(ranks: Ranks, device: torch.device, compiled: bool) -> dict[str, Any]:
    """What decides, beside the configuration, in which order numbers are added up."""
    return {
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "processor": torch.backends.cpu.get_cpu_capability(),
        "device": device.type,
        "processes": ranks.size,
        "compile": compiled,
    }
