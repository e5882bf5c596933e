"""What other codes save, told apart by what is in the file, each under the authors' names and arguments.

| code | file | holds |
| --- | --- | --- |
| the authors' PyTorch (kimiyoung/transformer-xl) | model.pt | the whole model as objects; its vocabulary lies in the data's cache.pt |
| NVIDIA (DeepLearningExamples) | checkpoint_best.pt | parameters, arguments and vocabulary |
| Hugging Face transformers (transfo-xl-wt103) | a folder: config.json, pytorch_model.bin or model.safetensors | and vocab.bin or vocab.pkl |
| this project's own export | NAME.pt, NAME.safetensors | parameters under the authors' names, arguments and vocabulary |

| theirs | the authors' |
| --- | --- |
| NVIDIA: crit.out_layers_weights.c, out_layers_biases.c | crit.out_layers.c.weight, .bias |
| NVIDIA: crit.shared_out_projs.c | word_emb.emb_projs.c, once more |
| NVIDIA: same_length sees mem_len keys and the token itself | mem_len + 1 |
| Hugging Face: transformer.NAME | NAME |
| Hugging Face: crit.cluster_weight, cluster_bias, the last cluster first | the first cluster first |
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from txl.interop import pickles
from txl.interop.pickles import Inert, Unreadable

DATA = {"wt103": "wikitext103", "wt2": "wikitext2", "ptb": "ptb", "lm1b": "lm1b", "enwik8": "enwik8", "text8": "text8"}
WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # of a Hugging Face folder
VOCABULARIES = ("vocab.bin", "vocab.pkl", "vocab.txt")
UNTIED = ("dec_attn.r_w_bias", "dec_attn.r_r_bias")


@dataclass(frozen=True, kw_only=True)
class Source:
    """A model of another code: parameters under the authors' names, the arguments of their `MemTransformerLM`."""

    code: str  # whose it is, in words
    state: dict[str, Tensor]
    flags: dict[str, Any]
    vocab: Any = None  # its file, or what stands for it in this one: see `vocabularies.found`
    data: str | None = None  # the option of `data=` with its text
    step: int = 0
    notes: list[str] = field(default_factory=list)


def read(path: Path) -> Source:
    """The model in a file or a folder. Raises ValueError for one that is not understood, and says what of it is not."""
    try:
        if path.is_dir():
            return _folder(path)
        if not path.is_file():
            raise ValueError(f"FILE: there is no file or folder {path}")
        if (path.parent / "config.json").is_file() and path.name in WEIGHTS:
            return _hugging_face(path.parent, path)
        with path.open("rb") as file:
            start = file.read(9)
        if start[8:] == b"{":
            return _exported_safetensors(path)
        return _pickled(path, pickles.read(path))
    except Unreadable as error:
        raise ValueError(f"FILE: {path}: {error}") from error
    except (
        AttributeError,
        KeyError,
        IndexError,
        TypeError,
        RuntimeError,
    ) as error:  # values of other kinds than theirs
        raise ValueError(f"FILE: {path} is built otherwise than such models are ({error})") from error
    except OSError as error:
        raise ValueError(f"FILE: cannot read {path} ({error.strerror or error})") from error


def _folder(path: Path) -> Source:
    if (path / "config.json").is_file():
        for name in WEIGHTS:
            if (path / name).is_file():
                return _hugging_face(path, path / name)
        raise ValueError(f"FILE: {path} holds a config.json, but neither of {', '.join(WEIGHTS)}")
    for name in ("model.pt", "checkpoint_best.pt", "checkpoint_last.pt", "best.pt"):
        if (path / name).is_file():
            return read(path / name)
    raise ValueError(f"FILE: {path} holds neither model.pt, nor checkpoint_best.pt, nor config.json")


def _pickled(path: Path, value: Any) -> Source:
    if pickles.is_a(value, "MemTransformerLM"):
        return _authors(path, value)
    if isinstance(value, Mapping) and {"model_state", "model_config"} <= value.keys():
        return _nvidia(value)
    if isinstance(value, Mapping) and {"state_dict", "flags"} <= value.keys():
        return _exported(value["state_dict"], value["flags"], value.get("vocab"))
    if isinstance(value, Mapping) and "format" in value:
        raise ValueError(f"FILE: {path} is a run of this project; an OUT that ends in .pt or .safetensors exports it")
    if isinstance(value, Mapping) and value and all(isinstance(item, Tensor) for item in value.values()):
        raise ValueError(
            f"FILE: {path} holds parameters alone, not the model's arguments; a Hugging Face folder has them in its "
            "config.json, and txl.interop.from_original takes them as flags"
        )
    kind = type(value).__name__
    raise ValueError(
        f"FILE: {path} holds a {kind}; only the authors', NVIDIA's and Hugging Face's models are understood"
    )


# The authors' model.pt: a MemTransformerLM as a whole


def _parameters(module: Inert, prefix: str = "") -> dict[str, Tensor]:
    """The parameters and buffers of a module and all that is in it, by their names."""
    found = {}
    for table in ("_parameters", "_buffers"):
        for name, tensor in (module.get(table) or {}).items():
            if tensor is not None:
                found[f"{prefix}{name}"] = tensor
    for name, inner in (module.get("_modules") or {}).items():
        if isinstance(inner, Inert):
            found |= _parameters(inner, f"{prefix}{name}.")
    return found


def _inside(module: Any, *names: str) -> Inert:
    """A module inside a module."""
    for name in names:
        module = (module.get("_modules") or {}).get(name) if isinstance(module, Inert) else None
    if not isinstance(module, Inert):
        raise ValueError(f"FILE: its model has no {'.'.join(names)}")
    return module


def _one(first: Tensor | None, second: Tensor | None) -> bool:
    """Whether two names stand for one tensor."""
    return first is not None and second is not None and first.data_ptr() == second.data_ptr()


def _authors(path: Path, model: Inert) -> Source:
    state, layer, embedding = _parameters(model), _inside(model, "layers", "0"), _inside(model, "word_emb")
    own = ("n_token", "n_layer", "n_head", "d_model", "d_head", "d_embed", "tgt_len", "mem_len", "ext_len", "attn_type")
    flags = {name: model.get(name) for name in (*own, "clamp_len", "same_length", "sample_softmax")}
    cutoffs, div_val = embedding.get("cutoffs", [])[:-1], embedding.get("div_val", 1)
    tables = range(1 if div_val == 1 else 1 + len(cutoffs))
    tied = [
        _one(state.get(f"crit.out_layers.{table}.weight"), state.get(f"word_emb.emb_layers.{table}.weight"))
        for table in tables
    ]
    if any(tied) != all(tied):
        raise ValueError("FILE: some clusters share the weights of input and output, some do not")
    flags |= {
        "cutoffs": cutoffs,
        "div_val": div_val,
        "d_inner": _inside(layer, "pos_ff").get("d_inner"),
        "pre_lnorm": bool(_inside(layer, "pos_ff").get("pre_lnorm")),
        "dropout": _inside(model, "drop").get("p", 0.0),
        "dropatt": _inside(layer, "dec_attn", "dropatt").get("p", 0.0),
        "tie_weight": all(tied),
        "tie_projs": [
            _one(state.get(f"crit.out_projs.{c}"), state.get(f"word_emb.emb_projs.{0 if div_val == 1 else c}"))
            for c in range(1 + len(cutoffs))
        ],
    }
    cache = path.with_name("cache.pt")
    vocab = cache if cache.is_file() else None
    return Source(code="the authors' PyTorch model", state=state, flags=flags, vocab=vocab)


# NVIDIA's checkpoint: a dict, in which only the vocabulary and the arguments of the program are objects


def _nvidia(content: Mapping[str, Any]) -> Source:
    flags, state, notes = dict(content["model_config"]), {}, []
    for name, tensor in content["model_state"].items():
        name = name.removeprefix("module.")
        for theirs, kind in {"crit.out_layers_weights.": "weight", "crit.out_layers_biases.": "bias"}.items():
            if name.startswith(theirs):
                name = f"crit.out_layers.{name.removeprefix(theirs)}.{kind}"
        if not name.startswith("crit.shared_out_projs."):  # another name of the embedding's
            state[name] = tensor
    if flags.get("attn_type") == 3 and "r_emb" in state:
        state["r_emb"] = state["r_emb"].unflatten(2, (flags["n_head"], -1))
    if flags.get("same_length") and flags.get("mem_len"):
        flags["mem_len"] += 1
        notes.append("same_length sees a token and mem_len more there: mem_len is one more here")
    arguments, step = content.get("args"), content.get("train_step")
    dataset = arguments.get("dataset") if isinstance(arguments, Inert) else None
    return Source(
        code="NVIDIA's checkpoint",
        state=state,
        flags=flags,
        vocab=content.get("vocab"),
        data=DATA.get(str(dataset)),
        step=step if type(step) is int else 0,
        notes=notes,
    )


# A Hugging Face folder


def _hugging_face(folder: Path, weights: Path) -> Source:
    try:
        config = json.loads((folder / "config.json").read_text())
        kind = config.get("model_type", "transfo-xl")
    except (ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"FILE: {folder / 'config.json'} is no JSON object") from error
    if kind != "transfo-xl" or "div_val" not in config:
        raise ValueError(f"FILE: {folder} holds a model of the kind {kind!r}; only 'transfo-xl' is understood")
    if config.get("layer_norm_epsilon", 1e-5) != 1e-5:
        raise ValueError(f"FILE: layer_norm_epsilon={config['layer_norm_epsilon']} is not supported; only 1e-05 is")
    flags = {**config, "n_token": config.get("vocab_size", config.get("n_token"))}
    flags["tie_weight"] = config.get("tie_word_embeddings", config.get("tie_weight", True))
    notes = ["its first memory is mem_len rows of zeros there, empty here: the first mem_len tokens are read otherwise"]
    if flags.get("tgt_len") is None:
        flags["tgt_len"] = 128
        notes.append("it names no tgt_len: 128 (evaluate.py takes another)")
    if "tie_projs" not in config:
        flags["tie_projs"] = bool(config.get("proj_share_all_but_first", True))
    named = _safetensors(weights)[0] if weights.suffix == ".safetensors" else pickles.read(weights)
    state = {name.removeprefix("transformer."): tensor for name, tensor in named.items()}
    if not config.get("untie_r", True):  # each layer names them once more
        state = {name: tensor for name, tensor in state.items() if not name.endswith(UNTIED)}
    for name in ("crit.cluster_weight", "crit.cluster_bias"):
        if name in state:
            state[name] = state[name].flip(0)
    found = [folder / name for name in VOCABULARIES if (folder / name).is_file()]
    code = "Hugging Face's model"
    return Source(code=code, state=state, flags=flags, vocab=found[0] if found else None, notes=notes)


def _safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}
    except SafetensorError as error:
        raise Unreadable(f"it is damaged ({error})") from error


# Our own way back


def _exported_safetensors(path: Path) -> Source:
    state, metadata = _safetensors(path)
    if not {"flags", "vocab"} <= metadata.keys():
        raise ValueError(f"FILE: {path} has no flags and vocab in its metadata; was it exported by this project?")
    try:
        flags, vocab = json.loads(metadata["flags"]), json.loads(metadata["vocab"])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"FILE: {path}: its metadata is no JSON") from error
    return _exported(state, flags, vocab)


def _exported(state: Any, flags: Any, vocab: Any) -> Source:
    if not isinstance(flags, dict) or not isinstance(state, dict):
        raise ValueError("FILE: its flags or parameters are not understood")
    return Source(code="an export of this project", state=state, flags=flags, vocab=vocab)


def in_our_order(source: Source, order: list[int]) -> dict[str, Tensor]:
    """The parameters with the rows of all tokens in the order of our vocabulary, where it is another (`Known.order`)."""
    if source.flags.get("cutoffs"):
        raise ValueError("its tokens are bytes, numbered by frequency, and in clusters: their order cannot be changed")
    rows = torch.tensor([*order, *range(len(order), source.flags["n_token"])])
    by_token = ("word_emb.emb_layers.0.weight", "crit.out_layers.0.weight", "crit.out_layers.0.bias")
    return {name: tensor[rows] if name in by_token else tensor for name, tensor in source.state.items()}
