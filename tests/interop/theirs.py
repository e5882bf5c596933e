"""What other codes save, made here: classes of their names and structure, which are gone when a file is read again."""

import collections
import json
import re
import sys
import types
import warnings
from argparse import Namespace
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
from golden import part, read
from safetensors.torch import save_file
from torch import nn

WORDS = ["<eos>", "<unk>", *(f"w{number}" for number in range(59))]


class AdaptiveEmbedding(nn.Module):
    def __init__(self, flags):
        super().__init__()
        self.cutoffs, self.div_val = [*flags["cutoffs"], flags["n_token"]], flags["div_val"]
        self.emb_layers, self.emb_projs = nn.ModuleList(), nn.ParameterList()


class PositionalEmbedding(nn.Module):
    def __init__(self, d_model):
        super().__init__()
        self.register_buffer("inv_freq", 1 / 10000 ** (torch.arange(0.0, d_model, 2.0) / d_model))


class PositionwiseFF(nn.Module):
    def __init__(self, flags):
        super().__init__()
        self.d_model, self.d_inner, self.pre_lnorm = flags["d_model"], flags["d_inner"], flags["pre_lnorm"]
        inner, outer = nn.Linear(self.d_model, self.d_inner), nn.Linear(self.d_inner, self.d_model)
        self.CoreNet = nn.Sequential(inner, nn.ReLU(inplace=True), nn.Dropout(0.1), outer, nn.Dropout(0.1))
        self.layer_norm = nn.LayerNorm(self.d_model)


class RelPartialLearnableMultiHeadAttn(nn.Module):
    def __init__(self, flags):
        super().__init__()
        d_model, inner = flags["d_model"], flags["n_head"] * flags["d_head"]
        self.qkv_net, self.o_net = nn.Linear(d_model, 3 * inner, bias=False), nn.Linear(inner, d_model, bias=False)
        self.drop, self.dropatt, self.layer_norm = nn.Dropout(0.1), nn.Dropout(0.2), nn.LayerNorm(d_model)
        if flags["attn_type"] == 0:
            self.r_net = nn.Linear(d_model, inner, bias=False)


class RelPartialLearnableDecoderLayer(nn.Module):
    def __init__(self, flags):
        super().__init__()
        self.dec_attn, self.pos_ff = RelPartialLearnableMultiHeadAttn(flags), PositionwiseFF(flags)


class ProjectedAdaptiveLogSoftmax(nn.Module):
    def __init__(self):
        super().__init__()
        self.out_layers, self.out_projs = nn.ModuleList(), nn.ParameterList()


class MemTransformerLM(nn.Module):
    """The attributes and the tree of the authors' model, with their ties, as far as a file of it shows them."""

    def __init__(self, weights, flags):
        super().__init__()
        for name in ("n_token", "n_layer", "n_head", "d_model", "d_head", "d_embed", "tgt_len", "mem_len", "ext_len"):
            setattr(self, name, flags[name])
        for name in ("attn_type", "clamp_len", "same_length", "sample_softmax"):
            setattr(self, name, flags[name])
        self.word_emb, self.drop = AdaptiveEmbedding(flags), nn.Dropout(0.1)
        self.layers = nn.ModuleList(RelPartialLearnableDecoderLayer(flags) for _ in range(self.n_layer))
        self.crit = ProjectedAdaptiveLogSoftmax()
        for name in [name for name in weights if name.count(".") == 0]:
            self.register_parameter(name, nn.Parameter(torch.empty_like(weights[name])))
        if flags["attn_type"] == 0:
            self.pos_emb = PositionalEmbedding(self.d_model)
        for c in range(len(part(weights, "word_emb.emb_layers."))):
            table, out = (weights[f"{layer}.{c}.weight"] for layer in ("word_emb.emb_layers", "crit.out_layers"))
            self.word_emb.emb_layers.append(nn.Embedding(*table.shape))
            self.crit.out_layers.append(nn.Linear(out.shape[1], out.shape[0]))
            if torch.equal(table, out):
                self.crit.out_layers[c].weight = self.word_emb.emb_layers[c].weight
        for c in range(len(part(weights, "word_emb.emb_projs."))):
            self.word_emb.emb_projs.append(nn.Parameter(torch.empty_like(weights[f"word_emb.emb_projs.{c}"])))
        for c in range(len(part(weights, "crit.out_projs."))):
            own = nn.Parameter(torch.empty_like(weights[f"crit.out_projs.{c}"]))
            tied = torch.equal(weights[f"crit.out_projs.{c}"], weights.get(f"word_emb.emb_projs.{c}", torch.empty(0)))
            self.crit.out_projs.append(self.word_emb.emb_projs[c] if tied else own)
        for name in ("cluster_weight", "cluster_bias"):
            if f"crit.{name}" in weights:
                self.crit.register_parameter(name, nn.Parameter(torch.empty_like(weights[f"crit.{name}"])))
        missing, unknown = self.load_state_dict(weights, strict=False)
        assert not unknown and set(missing) <= {"pos_emb.inv_freq"}


class Vocab:
    """The authors' vocabulary."""

    def __init__(self, symbols, lower_case=False):
        self.counter, self.special, self.lower_case = collections.Counter(symbols), ["<eos>"], lower_case
        self.min_freq, self.max_size, self.delimiter, self.vocab_file = 0, None, None, None
        self.idx2sym = list(symbols)
        self.sym2idx = collections.OrderedDict((symbol, number) for number, symbol in enumerate(symbols))


class Corpus:
    def __init__(self, vocab):
        self.dataset, self.vocab, self.train = "wt103", vocab, torch.arange(1000)


class OpenAIVocab:
    """NVIDIA's, around a tokenizer."""


class Unheard:
    """Of a class that no table has."""


HOMES = {
    "mem_transformer": (
        AdaptiveEmbedding,
        PositionalEmbedding,
        PositionwiseFF,
        RelPartialLearnableMultiHeadAttn,
        RelPartialLearnableDecoderLayer,
        MemTransformerLM,
    ),
    "utils.proj_adaptive_softmax": (ProjectedAdaptiveLogSoftmax,),
    "utils.vocabulary": (Vocab, OpenAIVocab),
    "data_utils": (Corpus,),
    "surprise": (Unheard,),
}
for home, classes in HOMES.items():
    for one in classes:
        one.__module__ = home


@contextmanager
def importable():
    """Their modules, where `import` would find them."""
    modules = {"utils": types.ModuleType("utils")}
    for home, classes in HOMES.items():
        modules[home] = types.ModuleType(home)
        modules[home].__file__ = __file__  # torch of old saved the source too
        for one in classes:
            setattr(modules[home], one.__name__, one)
    with patch.dict(sys.modules, modules):
        yield


def save(value, path: Path, legacy: bool = False) -> Path:
    """Writes a value with all its objects, as torch.save does now or did before 1.6."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with importable(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(value, path, _use_new_zipfile_serialization=not legacy)
    return path


def golden_model(name: str):
    """A golden model's parameters, and all of its arguments."""
    tensors, meta = read(name)
    flags = dict(cutoffs=[], div_val=1, pre_lnorm=False, ext_len=0, attn_type=0, clamp_len=-1, same_length=False)
    flags |= {"sample_softmax": -1, **meta["config"]}
    flags["d_embed"] = flags.get("d_embed", flags["d_model"])
    return part(tensors, "weight."), flags


def golden_words(flags) -> list[str]:
    return WORDS[: flags["n_token"]]


def authors_file(folder: Path, name: str = "xl_post_norm", legacy: bool = False) -> Path:
    """model.pt, and cache.pt beside it."""
    weights, flags = golden_model(name)
    save(Corpus(Vocab(golden_words(flags))), folder / "cache.pt", legacy)
    return save(MemTransformerLM(weights, flags), folder / "model.pt", legacy)


def nvidia_content(name: str = "xl_adaptive_div2", **changes):
    """What NVIDIA's checkpoint_best.pt holds."""
    weights, flags = golden_model(name)
    state = {}
    for key, tensor in weights.items():
        key = re.sub(r"crit\.out_layers\.(\d+)\.weight", r"crit.out_layers_weights.\1", key)
        key = re.sub(r"crit\.out_layers\.(\d+)\.bias", r"crit.out_layers_biases.\1", key)
        state[f"module.{key}"] = tensor.flatten(2) if key == "r_emb" else tensor
        if key.startswith("word_emb.emb_projs."):
            state[f"module.{key.replace('word_emb.emb_projs', 'crit.shared_out_projs')}"] = tensor
    content = {
        "args": Namespace(dataset="wt103", lr=0.01, cuda=True),
        "model_config": {**{key: value for key, value in flags.items() if key not in ("batch", "segments")}, **changes},
        "model_state": state,
        "optimizer_state": {"state": {}, "param_groups": [{"lr": 0.01, "params": [0]}]},
        "scheduler_state": {"base_lrs": [0.01], "last_epoch": 3},
        "vocab": Vocab(golden_words(flags)),
        "train_step": 400,
    }
    return content, weights, flags


def hugging_face_folder(folder: Path, kind: str = "bin", vocab: bool = True, **changes) -> Path:
    """Hugging Face's golden model as a folder; `changes` to its config.json."""
    tensors, meta = read("hf_transfo_xl")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(meta["config"] | changes))
    if kind == "bin":
        save(part(tensors, "weight."), folder / "pytorch_model.bin")
    else:
        save_file(part(tensors, "weight."), folder / "model.safetensors")
    if vocab:
        save(Vocab(WORDS[:60]).__dict__, folder / "vocab.bin", legacy=True)
    return folder
