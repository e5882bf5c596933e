"""The keys of the configurations that stand for no object: names, types and limits. `config.check` makes one of each to see
whether the values are allowed. No torch is needed here."""

import json
import os
import re
from dataclasses import dataclass, field
from typing import Any, Literal

TRAINED = "trained"  # in place of a value: what the run was trained with
Trained = Literal["trained"]
Precision = Literal["fp32", "bf16", "fp16"]
NO_AVERAGE = {"_target_": "txl.averaging.NoAverage"}


def _at_least(settings: Any, smallest: int, *names: str) -> None:
    """Raises ValueError for a number below `smallest` or beyond 2^31; null and the word `trained` pass."""
    for name in names:
        value = getattr(settings, name)
        if isinstance(value, (int, float)) and value < smallest:
            off = {"mem_len": "; null is no memory", "clamp_len": "; null is no limit"}.get(name, "")
            raise ValueError(f"{name}: must be at least {smallest}, got {value}{off}")
        if isinstance(value, (int, float)) and value >= 2**31:
            raise ValueError(f"{name}: must be below 2^31, got {value}")


@dataclass(kw_only=True, frozen=True)
class Evaluation:
    """`eval.` in train.yaml: how the valid figure is measured while training, and the final figures."""

    tgt_len: int | Trained
    mem_len: int | None | Trained
    batch_size: int
    max_segments: int | None

    def __post_init__(self):
        _at_least(self, 1, "tgt_len", "mem_len", "batch_size", "max_segments")


@dataclass(kw_only=True, frozen=True)
class Train:
    """The root of train.yaml."""

    name: str
    seed: int
    device: str
    precision: Precision
    compile: bool
    deterministic: bool
    steps: int
    tgt_len: int
    batch_size: int
    accumulate: int
    clip: float | int | None
    loss: Literal["full", "half"] = "full"  # a checkpoint of before there was the key lacks it
    on_nonfinite: Literal["stop", "skip"]
    max_bad_updates: int
    log_every: int
    eval_every: int
    save_every: int | str
    keep_last: int
    max_minutes: float | int | None
    requeue: bool
    processes: int
    sharding: Literal["none", "full"]
    profile: int | None
    resume: str | None
    init_from: str | None
    cache_dir: str | None
    data: dict
    model: dict
    optimizer: dict
    schedule: dict
    average: dict = field(default_factory=NO_AVERAGE.copy)  # a checkpoint of before there was the key lacks it
    tracker: dict
    eval: dict
    sample: dict

    def __post_init__(self):
        counted = ("log_every", "eval_every", "save_every", "keep_last", "profile", "accumulate", "processes")
        _at_least(self, 1, "steps", "tgt_len", "batch_size", *counted)
        _at_least(self, 0, "seed", "max_bad_updates")
        if self.keep_last > 1000:
            raise ValueError(f"keep_last: must be at most 1000, got {self.keep_last}")
        if self.max_minutes is not None and not 0 < self.max_minutes < float("inf"):
            raise ValueError(f"max_minutes: must be above 0, or null for no limit; got {self.max_minutes}")
        if isinstance(self.save_every, str) and not self.save_minutes:
            raise ValueError(f"save_every: a number of updates, or of minutes as in 10min; got {self.save_every!r}")
        self.check_division(self.processes)
        if self.sharding == "full" and (self.compile or self.precision == "fp16"):
            raise ValueError("sharding: full takes neither compile=true nor precision=fp16; bf16 needs no scaler")
        if self.sharding == "full" and self.average != NO_AVERAGE:
            raise ValueError("average: must be none with sharding=full, where no process holds the whole weights")
        start = self.average.get("start")
        if isinstance(start, int) and start > self.steps:
            raise ValueError(f"average.start: must be at most steps, {self.steps}; got {start}")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip: must be above 0, or null for no clipping; got {self.clip}")
        if not self.name or self.name[0] == "." or any(character in self.name for character in "/\\=\0\n"):
            raise ValueError(f"name: must be a plain folder name, got {self.name!r}")
        for group in ("data", "model", "optimizer", "schedule", "average", "tracker", "eval", "sample"):
            if "_target_" not in getattr(self, group):
                raise ValueError(f"{group}._target_: missing; choose {group}=option")
        lr = self.optimizer.get("lr", "missing")
        if isinstance(lr, bool) or not isinstance(lr, (int, float)) or not 0 < lr < float("inf"):
            raise ValueError(f"optimizer.lr: must be a number above 0, got {lr}")
        if self.cache_dir == "":
            raise ValueError("cache_dir: must not be empty; null is the default place")

    @property
    def save_minutes(self) -> float | None:
        """The minutes between two checkpoints; None where updates are counted."""
        found = re.fullmatch(r"(\d+(?:\.\d+)?) ?min(?:utes)?", str(self.save_every))
        return float(found[1]) if found else None

    def check_division(self, processes: int) -> None:
        """Raises ValueError unless each process has as many lanes, and each of its chunks."""
        if self.batch_size % (processes * self.accumulate):
            raise ValueError(
                f"batch_size: {self.batch_size} lanes cannot be divided among processes={processes} times "
                f"accumulate={self.accumulate}; take a multiple of {processes * self.accumulate}"
            )


@dataclass(kw_only=True, frozen=True)
class OtherText:
    """`data.` in evaluate.yaml: another text to score; `trained` is the run's own."""

    train: str | list[str] | None | Trained
    valid: str | list[str] | None | Trained
    test: str | list[str] | None | Trained
    path: str | None | Trained
    fractions: list[float | int] | Trained
    max_bytes: int | None | Trained
    document_separator: str | None | Trained
    reset_at_document: bool | Trained


@dataclass(kw_only=True, frozen=True)
class Figure:
    """`measure=figure`: the plain figure of the split. All other measures are in `txl.instruments`."""


@dataclass(kw_only=True, frozen=True)
class Evaluate:
    """The root of evaluate.yaml."""

    checkpoint: str
    split: Literal["train", "valid", "test"]
    tgt_len: int | Trained
    mem_len: int | None | Trained
    clamp_len: int | None | Trained
    same_length: bool | None | Trained
    batch_size: int | Trained
    out: str | None
    device: str
    precision: Precision | Trained
    compile: bool
    processes: int
    cache_dir: str | None
    measure: dict
    data: dict

    def __post_init__(self):
        _at_least(self, 1, "tgt_len", "mem_len", "clamp_len", "batch_size", "processes")
        if self.measure.get("_target_") != "txl.settings.Figure" and self.processes > 1:
            raise ValueError("processes: must be 1, since this measure is taken by one process")


@dataclass(kw_only=True, frozen=True)
class Generate:
    """The root of generate.yaml. The sampling keys have their limits where they are used, in `txl.generation.Sampling`."""

    checkpoint: str
    prompt: str | None
    prompt_file: str | None
    each_line: bool
    max_new_tokens: int
    temperature: float | int
    top_k: int | None
    top_p: float | int | None
    stop: str | None
    stops: str | list[str] | None
    num_samples: int
    seed: int
    format: Literal["text", "columns", "jsonl"]
    color: bool | Literal["always"]
    interactive: bool
    score: bool
    device: str
    precision: Precision | Trained

    def __post_init__(self):
        _at_least(self, 1, "num_samples")
        _at_least(self, 0, "seed", "max_new_tokens")
        if self.prompt is not None and self.prompt_file is not None:
            raise ValueError("prompt_file: give prompt or prompt_file, not both")
        if self.interactive and self.score:
            raise ValueError("score: must be false with interactive=true")
        if self.interactive and self.prompt == "-":
            raise ValueError("prompt: interactive=true reads standard input by itself; leave `-` out")
        if self.score and self.prompt is None and self.prompt_file is None:
            raise ValueError("prompt: score=true needs a text; give prompt or prompt_file")
        for mode in ("interactive", "score"):
            alone = {"num_samples": 1, **({"each_line": False} if self.interactive else {})}
            for key, value in alone.items():
                if getattr(self, mode) and getattr(self, key) != value:
                    raise ValueError(f"{key}: must be {str(value).lower()} with {mode}=true")
        if (self.interactive and self.format != "text") or (self.score and self.format == "columns"):
            words = "text with interactive=true" if self.interactive else "text or jsonl with score=true"
            raise ValueError(f"format: must be {words}, got {self.format}")
        if self.format == "jsonl" and self.color:
            raise ValueError("color: must be false with format=jsonl, which is for programs")
        self.stop_texts()

    def stop_texts(self) -> list[bytes]:
        """The texts of `stop` and `stops`. Raises ValueError for `stops` that are no list of texts."""
        stops = self.stops or []
        try:
            stops = json.loads(stops) if isinstance(stops, str) else stops
            if not isinstance(stops, list) or not all(isinstance(text, str) and text for text in stops):
                raise ValueError
            return [os.fsencode(text) for text in ([self.stop] if self.stop else []) + stops]
        except (ValueError, RecursionError):
            words = """a JSON list of texts, for a shell in single quotes: stops='[".", "\\n\\n"]'"""
            raise ValueError(f"stops: must be {words}; got {self.stops}") from None
