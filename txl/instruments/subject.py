"""What is measured: a checkpoint, and the text that it reads."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from txl import checkpoint, runs
from txl.data.encoding import Split
from txl.data.store import Corpus
from txl.data.vocab import Vocabulary
from txl.model import TransformerXL
from txl.ranks import ALONE, Ranks
from txl.runtime import choose_device
from txl.settings import TRAINED


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A checkpoint with the text and the settings that it is to be read with."""

    path: Path  # of the checkpoint's file
    content: dict[str, Any]
    vocab: Vocabulary
    corpus: Corpus
    split: Split
    device: torch.device
    tgt_len: int
    batch_size: int
    precision: str
    asked: Mapping[str, Any]  # the root of evaluate.yaml

    @classmethod
    def of(cls, asked: Mapping[str, Any], ranks: Ranks = ALONE) -> "Subject":
        """Reads what `checkpoint=` names, and the text: the run's own or what `data.` asks for."""
        path = checkpoint.locate(asked["checkpoint"])
        content = checkpoint.load(path)
        trained, name = content["config"], asked["split"]
        other = other_text(asked)
        data = runs.other_text(trained["data"], other, name)
        vocab = checkpoint.vocabulary(content)
        corpus = checkpoint.construct(data, cache_dir=asked["cache_dir"])  # never a folder that a checkpoint names
        with ranks.main_first():
            split = corpus.split(name, vocab)
        read = content["texts"]  # none are known of a model that came from another code
        if not other and read and corpus.text_hash(name) != read.get(name):
            ranks.say(f"warning: the text of split={name} is not the one of the run's time")

        def setting(key: str, of_run: Any) -> Any:
            return of_run if asked[key] == TRAINED else asked[key]

        return cls(
            path=path,
            content=content,
            vocab=vocab,
            corpus=corpus,
            split=split,
            device=choose_device(asked["device"], ranks.local if ranks.size > 1 else None),
            tgt_len=setting("tgt_len", evaluated_tgt_len(trained)),
            batch_size=setting("batch_size", trained["eval"]["batch_size"]),
            precision=setting("precision", trained["precision"]),
            asked=asked,
        )

    def other(self, name: str) -> "Subject":
        """Another checkpoint, read with the same settings and, where none is given, its own run's text."""
        return Subject.of({**self.asked, "checkpoint": name})

    def model(self, **reading: Any) -> TransformerXL:
        """The checkpoint's model in eval mode, read as asked, but for the `mem_len`, `clamp_len`, `same_length` given here."""
        settings = {key: self.asked[key] for key in ("mem_len", "clamp_len", "same_length")} | reading
        config = checkpoint.model_config(self.content["config"]["model"], **settings)
        model = checkpoint.load_model(self.content, config).to(self.device)
        if self.asked["compile"]:
            model.compile_layers()
        return model

    @property
    def settings(self) -> dict[str, Any]:
        """What a result is of, to stand beside it."""
        reading = {key: self.asked[key] for key in ("mem_len", "clamp_len", "same_length")}
        config = checkpoint.model_config(self.content["config"]["model"], **reading)
        none = config["memory"]["_target_"] == "txl.layers.memory.NoMemory"
        return {
            "checkpoint": str(self.path),
            "step": self.content["step"],
            "split": self.split.name,
            "tgt_len": self.tgt_len,
            "batch_size": self.batch_size,
            "precision": self.precision,
            "mem_len": None if none else config["memory"]["mem_len"],
            "clamp_len": config["position"].get("clamp_len"),
            "same_length": config["same_length"],
        }


def evaluated_tgt_len(trained: Mapping[str, Any]) -> int:
    """The length of a segment that a run's figures were measured with, in tokens."""
    return trained["tgt_len"] if trained["eval"]["tgt_len"] == TRAINED else trained["eval"]["tgt_len"]


def other_text(asked: Mapping[str, Any]) -> dict[str, Any]:
    """What `data.` asks for beside the run's own text."""
    return {key: value for key, value in asked["data"].items() if key != "_target_" and value != TRAINED}
