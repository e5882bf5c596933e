"""Checkpoints: one file of plain tensors and values. What comes out of one is data from a stranger; nothing in it is executed."""

import functools
import inspect
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from txl import archive, signature
from txl.data import bpe, corpus, published, vocab, words
from txl.layers.memory import CompressiveMemory, NoMemory, SegmentMemory
from txl.layers.position import (
    AbsolutePosition,
    AbsolutePositionPerLayer,
    ALiBiPosition,
    RelativePosition,
    RotaryPosition,
    ShawPosition,
)
from txl.layers.softmax import AdaptiveSoftmax, FullSoftmax
from txl.model import TransformerXL
from txl.settings import TRAINED, Evaluation, Train
from txl.sharding import share_of, whole

FORMAT = "txl-2"
PARTS = {"model": dict, "texts": dict, "step": int, "tokens": int, "vocab": dict, "config": dict}
CLASSES = {
    f"{entry.__module__}.{entry.__qualname__}": entry
    for entry in (
        TransformerXL,
        SegmentMemory,
        CompressiveMemory,
        NoMemory,
        RelativePosition,
        ShawPosition,
        AbsolutePosition,
        AbsolutePositionPerLayer,
        RotaryPosition,
        ALiBiPosition,
        FullSoftmax,
        AdaptiveSoftmax,
        corpus.python_docs,
        corpus.python_source,
        corpus.text_files,
        corpus.hub,
        published.enwik8,
        published.text8,
        published.wikitext,
        published.penn_treebank,
        published.billion_words,
        vocab.Bytes,
        vocab.Characters,
        words.Words,
        bpe.BPE,
    )
}


def construct(node: Any, **sizes: Any) -> Any:
    """Makes what a checkpoint's configuration describes; `_target_` must be an exact name in the table of this file."""
    if isinstance(node, list):
        return [construct(item) for item in node]
    if not isinstance(node, Mapping):
        return node
    if "_target_" not in node:
        return {key: construct(value) for key, value in node.items()}
    if not isinstance(node["_target_"], str) or node["_target_"] not in CLASSES:
        raise ValueError(f"checkpoint: its configuration names {node['_target_']!r}, which no model of ours is made of")
    arguments = {key: construct(value) for key, value in node.items() if key not in ("_target_", "_partial_")}
    make = functools.partial if node.get("_partial_") else lambda target, **given: target(**given)
    try:
        return make(CLASSES[node["_target_"]], **{**arguments, **sizes})
    except (TypeError, RuntimeError, MemoryError, OverflowError) as error:
        words = str(error).splitlines()[0]
        raise ValueError(f"checkpoint: what its configuration describes cannot be made ({words})") from error


def model_config(config: Mapping[str, Any], *, mem_len: Any, clamp_len: Any, same_length: Any) -> dict[str, Any]:
    """A model's configuration with other reading settings; the word `trained` leaves one as it is, None turns it off.

    Raises ValueError for a clamp_len where the positions have no distances to clamp.
    """
    memory, position = dict(config["memory"]), dict(config["position"])
    if mem_len is None:
        memory = {"_target_": "txl.layers.memory.NoMemory"}
    elif mem_len != TRAINED:
        none = memory["_target_"] == "txl.layers.memory.NoMemory"
        memory = {**memory, "mem_len": mem_len} | ({"_target_": "txl.layers.memory.SegmentMemory"} if none else {})
    if clamp_len != TRAINED:
        scheme = CLASSES.get(position["_target_"], RelativePosition)
        if "clamp_len" in inspect.signature(scheme).parameters:
            position["clamp_len"] = clamp_len
        elif clamp_len is not None:
            raise ValueError(f"clamp_len: {scheme.__name__} has no distances to clamp; leave it out, or null")
    changed = {**config, "memory": memory, "position": position}
    if same_length != TRAINED:
        changed["same_length"] = bool(same_length)
    return changed


def twin(model: nn.Module, config: Mapping[str, Any]) -> nn.Module:
    """A model of another configuration on the same parameters: what trains the one changes the other."""
    with torch.device("meta"):
        other = construct(config)
    state = _without_unused(model.state_dict(), other)
    other.load_state_dict({name: whole(tensor) for name, tensor in state.items()}, assign=True)
    return other.eval()


def _without_unused(state: Mapping[str, Any], model: nn.Module) -> Mapping[str, Any]:
    """The parameters without those of a memory, where the model reads without."""
    own = model.state_dict()
    return {name: tensor for name, tensor in state.items() if name in own or not str(name).startswith("memory.")}


def save(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a checkpoint, whole or not at all. Raises OSError, with the free space, if it cannot."""
    archive.write(path, {"format": FORMAT, **content})


def locate(checkpoint: str, key: str = "checkpoint") -> Path:
    """The file that `checkpoint=` means: itself, or best.pt of a run folder. Raises ValueError where there is none."""
    path = Path(checkpoint)
    if path.is_dir():
        if not (path / "best.pt").exists():
            raise ValueError(f"{key}: {checkpoint} holds no best.pt; is it the folder of a run?")
        path = path / "best.pt"
    if not path.is_file():
        raise ValueError(f"{key}: there is no file or run folder {checkpoint}")
    return path


def load(path: Path, key: str = "checkpoint") -> dict[str, Any]:
    """Reads a checkpoint of ours to the CPU. Raises ValueError for a file that is cut short, changed, or something else."""
    try:
        content = archive.read(path)
    except archive.Damaged as error:
        raise ValueError(f"{key}: {path} is damaged or no checkpoint ({error})") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{key}: {path} is no checkpoint of this project")
    try:
        content["config"], content["vocab"] = json.loads(content["config"]), json.loads(content["vocab"])
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{key}: {path} holds no readable configuration ({type(error).__name__})") from error
    for name, kind in PARTS.items():
        if not isinstance(content.get(name), kind):
            raise ValueError(f"{key}: {path} holds no readable {name}")
    if found := next(_config_problems(content["config"]), None):
        raise ValueError(f"{key}: the configuration in {path} is none of this version: {found}")
    return content


def _config_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with the parts of a stored configuration that are used: names are looked up in our table alone."""
    yield from signature.call_problems(Train, {**config, "_target_": "Train"}, "")
    for group, classes in {"eval": {"txl.settings.Evaluation": Evaluation}, "model": CLASSES, "data": CLASSES}.items():
        made_by = classes.get(str(config[group].get("_target_")))
        if (
            made_by is None
            or (group == "model") != (made_by is TransformerXL)
            or (group == "data") != inspect.isfunction(made_by)
        ):
            yield f"{group}._target_: missing, or no {group}"
        yield from signature.problems(config[group], group, classes.__getitem__)
    if not isinstance(config["model"]["n_token"], int) or config["tgt_len"] < 1:
        yield "model.n_token or tgt_len: not filled in"


def vocabulary(content: Mapping[str, Any]) -> vocab.Vocabulary:
    """The checkpoint's vocabulary. Raises ValueError if its model was made for a larger one."""
    own = vocab.from_state(content["vocab"])
    if own.n_token > content["config"]["model"]["n_token"]:
        raise ValueError(f"checkpoint: its vocabulary of {own.n_token} is larger than its model's n_token")
    return own


def load_weights(model: nn.Module, state: Mapping[str, Any], key: str = "checkpoint") -> None:
    """Copies saved parameters into the model after a look at every name, shape, type and value.

    Raises ValueError at a difference, and for values that are not finite.
    """
    own, state = model.state_dict(), _without_unused(state, model)
    if state.keys() != own.keys():
        name = min(state.keys() ^ own.keys(), key=str)
        raise ValueError(f"{key}: its weights do not fit the model: {name} is only in one of them")
    for name, tensor in own.items():
        given = state[name]
        same = isinstance(given, torch.Tensor) and (given.shape, given.dtype, given.layout) == (
            tensor.shape,
            tensor.dtype,
            tensor.layout,
        )
        if not same:
            found = f"{tuple(given.shape)}, {given.dtype}" if isinstance(given, torch.Tensor) else type(given).__name__
            raise ValueError(f"{key}: {name} is {found}; the model has {tuple(tensor.shape)}, {tensor.dtype}")
        if given.is_meta or not given.isfinite().all():
            raise ValueError(f"{key}: {name} holds numbers that are not finite")
    model.load_state_dict({name: share_of(state[name], own[name]) for name in own})


def load_model(content: Mapping[str, Any], config: Mapping[str, Any] | None = None) -> nn.Module:
    """The checkpoint's model in eval mode, or one of another configuration with its weights."""
    config = config or content["config"]["model"]
    held = sum(tensor.numel() for tensor in content["model"].values() if isinstance(tensor, torch.Tensor))
    for name in ("n_token", "n_layer", "n_head", "d_model", "d_head", "d_inner"):
        if config[name] > held:  # told before anything of that size is made
            raise ValueError(f"checkpoint: its configuration says model.{name}={config[name]}, its weights are fewer")
    model = construct(config)
    load_weights(model, content["model"])
    return model.eval()
