"""The authors' PyTorch model (kimiyoung/transformer-xl, `MemTransformerLM`): its parameter names and arguments.

| theirs                               | ours                                    |
| ------------------------------------ | --------------------------------------- |
| word_emb.emb_layers.0.weight         | softmax.weight                          |
| word_emb.emb_projs.0                 | softmax.emb_proj                        |
| crit.out_layers.0.weight, .bias      | softmax.out_weight (tied: weight), out_bias |
| crit.out_projs.0                     | softmax.out_proj                        |
| with cutoffs: word_emb.emb_layers.c  | softmax.weights.c (div_val 1: theirs is one, ours below each other) |
| word_emb.emb_projs.c                 | softmax.emb_projs.c (div_val 1: only 0) |
| crit.out_layers.c.weight, .bias      | softmax.out_weights.c, out_biases.c (div_val 1: as above) |
| crit.out_projs.c                     | softmax.out_projs.c                     |
| crit.cluster_weight, cluster_bias    | softmax.cluster_weight, cluster_bias    |
| layers.l.dec_attn.qkv_net.weight     | layers.l.attention.q_net and kv_net     |
| layers.l.dec_attn.q_net, kv_net      | the same, in attn_type 2 and 3          |
| layers.l.dec_attn.r_net.weight       | layers.l.attention.position.r_net       |
| r_w_bias, r_r_bias (u, v)            | position.r_w_bias, r_r_bias of all layers |
| r_w_bias, r_emb, r_bias (attn_type 1) | position.r_w_bias, r_emb, r_bias, layer by layer |
| r_emb (attn_type 3)                  | position.r_emb, layer by layer          |
| layers.l.dec_attn.layer_norm         | layers.l.attention_norm                 |
| layers.l.pos_ff.CoreNet.0, .3        | layers.l.feedforward.inner, outer       |
| layers.l.pos_ff.layer_norm           | layers.l.feedforward_norm               |

Models with untied biases, which the authors' PyTorch code lacks and their TensorFlow code has, use Hugging Face's names
for them: layers.l.dec_attn.r_w_bias and r_r_bias, and a flag `untie_r`.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from txl import signature
from txl.checkpoint import construct
from txl.layers.feedforward import ACTIVATIONS
from txl.layers.memory import NoMemory, SegmentMemory
from txl.layers.position import AbsolutePosition, AbsolutePositionPerLayer, RelativePosition, ShawPosition
from txl.layers.softmax import AdaptiveSoftmax, FullSoftmax
from txl.model import TransformerXL

IGNORED = {"pos_emb.inv_freq"}
SCHEMES = {0: RelativePosition, 1: ShawPosition, 2: AbsolutePosition, 3: AbsolutePositionPerLayer}  # by attn_type
WHOLE = ("d_embed", "tgt_len", "mem_len", "ext_len", "clamp_len", "div_val", "attn_type", "sample_softmax")
SWITCHES, RATES = ("same_length", "untie_r", "pre_lnorm", "tie_weight"), ("dropout", "dropatt")
SIZES = ("n_token", "n_layer", "n_head", "d_model", "d_head", "d_inner")


def _softmax(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The authors give `tie_projs` as a list, by cluster, false where it ends; a bare true means every cluster but the first."""
    cutoffs, div_val, tied = flags.get("cutoffs") or [], flags.get("div_val", 1), flags.get("tie_projs") or False
    if isinstance(tied, bool):
        tied = [False] + [tied] * len(cutoffs)
    tied = [*map(bool, tied), *[False] * (1 + len(cutoffs) - len(tied))]
    if cutoffs:
        return _named(AdaptiveSoftmax, partial=True, cutoffs=list(cutoffs), div_val=div_val, tie_projs=tied)
    if div_val != 1:
        raise ValueError(f"flags: div_val={div_val} is not supported without cutoffs; only 1 is")
    return _named(FullSoftmax, partial=True, tie_projs=tied[0])


def _position(flags: Mapping[str, Any], mem_len: int) -> dict[str, Any]:
    attn_type, clamp_len = flags.get("attn_type", 0), flags.get("clamp_len", -1)
    clamp_len = clamp_len if clamp_len is not None and clamp_len > 0 else None
    if attn_type not in SCHEMES:
        raise ValueError(f"flags: attn_type={attn_type} is not supported; only 0, 1, 2 and 3 are")
    if attn_type in (2, 3) and flags.get("pre_lnorm"):
        raise ValueError(
            "flags: pre_lnorm with attn_type 2 or 3 is not supported: theirs leaves queries without a norm"
        )
    scheme = SCHEMES[attn_type]
    if attn_type == 0:
        return _named(scheme, partial=True, clamp_len=clamp_len)
    if attn_type == 2:
        if clamp_len is not None:
            raise ValueError("flags: clamp_len with attn_type 2 is not supported; only -1 is")
        return _named(scheme, partial=True)
    if flags.get("tgt_len") is None:
        raise ValueError("flags: tgt_len missing; with attn_type 1 and 3 tgt_len + mem_len rows are learned")
    max_klen = flags["tgt_len"] + mem_len
    if attn_type == 3:
        return _named(scheme, partial=True, max_klen=max_klen)
    # theirs keeps the rows of the clamp_len nearest distances, which end with clamp_len - 1
    return _named(scheme, partial=True, max_klen=max_klen, clamp_len=None if clamp_len is None else clamp_len - 1)


def _named(made_by: type, *, partial: bool = False, **arguments: Any) -> dict[str, Any]:
    """A part of a configuration."""
    marked = {"_partial_": True} if partial else {}
    return {"_target_": f"{made_by.__module__}.{made_by.__qualname__}", **marked, **arguments}


def _check_kinds(flags: Mapping[str, Any]) -> None:
    """Arguments come out of a file of somebody else's: one of another kind than theirs is told by its name."""
    missing = [name for name in SIZES if flags.get(name) is None]
    if missing:
        raise ValueError(f"flags: {', '.join(missing)} missing")
    hints = {
        **dict.fromkeys(SIZES + WHOLE, int | None),
        **dict.fromkeys(SWITCHES, bool | int | None),
        **dict.fromkeys(RATES, float | None),
        "cutoffs": list[int] | None,
        "tie_projs": bool | list[bool | int] | None,
    }
    for name, hint in hints.items():
        if not signature.fits(flags.get(name), hint):
            raise ValueError(f"flags: {name} must be {signature.describe(hint)}, got {flags[name]!r:.40}")


def configuration(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration, as a checkpoint of ours holds it, of the model that the authors' arguments describe.

    Raises ValueError for a missing size and for what we cannot represent.
    """
    _check_kinds(flags)
    for name, only in {"ext_len": 0, "sample_softmax": -1}.items():
        if flags.get(name, only) != only:
            raise ValueError(f"flags: {name}={flags[name]} is not supported; only {only} is")
    mem_len = flags.get("mem_len") or 0
    return _named(
        TransformerXL,
        **{name: flags[name] for name in SIZES},
        d_embed=flags.get("d_embed"),
        memory=_named(SegmentMemory, mem_len=mem_len) if mem_len > 0 else _named(NoMemory),
        position=_position(flags, mem_len),
        softmax=_softmax(flags),
        dropout=flags.get("dropout", 0.0),
        dropatt=flags.get("dropatt", 0.0),
        same_length=bool(flags.get("same_length", False)),
        untie_r=bool(flags.get("untie_r", False)),
        pre_norm=bool(flags.get("pre_lnorm", False)),
        tie_weight=bool(flags.get("tie_weight", True)),
    )


def _softmax_correspondence(softmax: nn.Module) -> dict[str, list[Tensor]]:
    if isinstance(softmax, FullSoftmax):
        names = {
            "word_emb.emb_layers.0.weight": [softmax.weight],
            "crit.out_layers.0.weight": [softmax.out_weight],
            "crit.out_layers.0.bias": [softmax.out_bias],
        }
        if softmax.emb_proj is not None:
            names |= {"word_emb.emb_projs.0": [softmax.emb_proj], "crit.out_projs.0": [softmax.out_proj]}
        return names
    names = {"crit.cluster_weight": [softmax.cluster_weight], "crit.cluster_bias": [softmax.cluster_bias]}
    tables = {
        "word_emb.emb_layers.{}.weight": softmax.weights,
        "crit.out_layers.{}.weight": softmax.out_weights,
        "crit.out_layers.{}.bias": softmax.out_biases,
    }
    for name, parts in tables.items():
        split = [list(parts)] if softmax.div_val == 1 else [[part] for part in parts]
        names |= {name.format(index): whole for index, whole in enumerate(split)}
    for name, projections in {"word_emb.emb_projs": softmax.emb_projs, "crit.out_projs": softmax.out_projs}.items():
        names |= {f"{name}.{index}": [projection] for index, projection in enumerate(projections)}
    return names


def _correspondence(model: TransformerXL) -> dict[str, list[Tensor]]:
    """For each of the authors' names, our parameters that, one below the other, make it."""
    names, first = _softmax_correspondence(model.softmax), model.position
    positions = [layer.attention.position for layer in model.layers]
    relative, n_head = isinstance(first, RelativePosition), model.layers[0].attention.n_head
    untie_r = relative and any(position.r_w_bias is not first.r_w_bias for position in positions)
    if relative and not untie_r:
        names["r_w_bias"], names["r_r_bias"] = [first.r_w_bias], [first.r_r_bias]
    if isinstance(first, ShawPosition):  # one tensor of theirs holds all layers
        names |= {
            name: [getattr(position, name)[None] for position in positions] for name in ("r_w_bias", "r_emb", "r_bias")
        }
    if isinstance(first, AbsolutePositionPerLayer):
        names["r_emb"] = [position.r_emb.unflatten(1, (n_head, -1))[None] for position in positions]
    for index, layer in enumerate(model.layers):
        attention, feedforward = layer.attention, layer.feedforward
        ours = {
            "dec_attn.o_net.weight": [attention.o_net.weight],
            "dec_attn.layer_norm.weight": [layer.attention_norm.weight],
            "dec_attn.layer_norm.bias": [layer.attention_norm.bias],
            "pos_ff.CoreNet.0.weight": [feedforward.inner.weight],
            "pos_ff.CoreNet.0.bias": [feedforward.inner.bias],
            "pos_ff.CoreNet.3.weight": [feedforward.outer.weight],
            "pos_ff.CoreNet.3.bias": [feedforward.outer.bias],
            "pos_ff.layer_norm.weight": [layer.feedforward_norm.weight],
            "pos_ff.layer_norm.bias": [layer.feedforward_norm.bias],
        }
        if isinstance(first, (RelativePosition, ShawPosition)):
            ours["dec_attn.qkv_net.weight"] = [attention.q_net.weight, attention.kv_net.weight]
        else:
            ours["dec_attn.q_net.weight"] = [attention.q_net.weight]
            ours["dec_attn.kv_net.weight"] = [attention.kv_net.weight]
        if relative:
            ours["dec_attn.r_net.weight"] = [attention.position.r_net.weight]
        if untie_r:
            ours["dec_attn.r_w_bias"] = [attention.position.r_w_bias]
            ours["dec_attn.r_r_bias"] = [attention.position.r_r_bias]
        names.update({f"layers.{index}.{name}": parts for name, parts in ours.items()})
    return names


@torch.no_grad()
def from_original(state_dict: Mapping[str, Tensor], flags: Mapping[str, Any]) -> TransformerXL:
    """Builds our model from the authors' parameters and the arguments of their `MemTransformerLM`.

    `flags` holds those arguments by their names; those absent have the authors' defaults (dropout 0, no memory,
    clamp_len -1, tied weights, post-norm), others are ignored. mem_len 0 means no memory, clamp_len -1 none. Tied
    weights may stand under one name or both. The model is float32, in eval mode. Raises ValueError for a missing size,
    for what we cannot represent, and for parameters that are missing, unknown, of another shape, or tied and different.
    """
    config = configuration(flags)
    if flags["n_layer"] > len(state_dict):  # told before so many layers are made
        raise ValueError(f"state_dict: holds {len(state_dict)} parameters, and not those of {flags['n_layer']} layers")
    with torch.device("meta"):  # what does not fit is told before anything of its size is made
        state = _fitting(construct(config), state_dict)
    model = construct(config)
    for name, parts in _correspondence(model).items():
        for part, values in zip(parts, state[name].split([len(part) for part in parts]), strict=True):
            part.copy_(values)
    return model.eval()


def _few(names: list[Any]) -> str:
    """The first of some names, and how many more there are."""
    return ", ".join(map(str, names[:4])) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _fitting(model: TransformerXL, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The authors' parameters, tied ones under each of their names, if they are those of this model."""
    names = _correspondence(model)
    state = {name: tensor for name, tensor in state_dict.items() if name not in IGNORED}
    if strange := [name for name, tensor in state.items() if not isinstance(tensor, Tensor)]:
        raise ValueError(f"state_dict: {_few(strange)} hold no numbers")
    ties = defaultdict(list)
    for name, parts in names.items():
        ties[tuple(map(id, parts))].append(name)
    for tied in ties.values():
        given = [name for name in tied if name in state]
        for name in given[1:]:
            if not torch.equal(state[given[0]], state[name]):
                raise ValueError(f"state_dict: {given[0]} and {name} are tied by the flags, but differ")
        state.update({name: state[given[0]] for name in tied if given})
    if missing := sorted(names.keys() - state.keys()):
        raise ValueError(f"state_dict: {_few(missing)} missing")
    if unknown := sorted(state.keys() - names.keys()):
        raise ValueError(f"state_dict: {_few(unknown)} not understood")
    for name, parts in names.items():
        whole = (sum(len(part) for part in parts), *parts[0].shape[1:])
        if tuple(state[name].shape) != whole:
            raise ValueError(f"state_dict: {name} has shape {tuple(state[name].shape)}, the flags ask for {whole}")
    return state


@torch.no_grad()
def to_original(model: TransformerXL) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The model's parameters under the authors' names, and the arguments of their `MemTransformerLM`: undoes `from_original`.

    The tensors are copies. What the model does not hold (`tgt_len`) is not among the flags, but where rows of a table are
    tgt_len + mem_len. Raises ValueError for what the authors' code lacks.
    """
    _refuse_what_they_lack(model)
    state = {name: torch.cat(list(parts)) for name, parts in _correspondence(model).items()}
    layer, softmax, position = model.layers[0], model.softmax, model.position
    adaptive = isinstance(softmax, AdaptiveSoftmax)
    tables = list(softmax.weights) if adaptive else [softmax.weight]
    clamp_len, mem_len = position.clamp_len, model.memory.mem_len
    if isinstance(position, ShawPosition) and clamp_len is not None:
        clamp_len += 1  # theirs counts the rows that are left
    flags = {
        "n_token": sum(map(len, tables)),
        "n_layer": len(model.layers),
        "n_head": layer.attention.n_head,
        "d_model": layer.attention.q_net.in_features,
        "d_head": layer.attention.q_net.out_features // layer.attention.n_head,
        "d_inner": layer.feedforward.inner.out_features,
        "d_embed": tables[0].shape[1],
        "dropout": model.dropout.p,
        "dropatt": layer.attention.dropatt,
        "tie_weight": softmax.tie_weight,
        "tie_projs": list(softmax.tie_projs) if adaptive else [softmax.tie_projs],
        "cutoffs": list(softmax.cutoffs) if adaptive else [],
        "div_val": softmax.div_val if adaptive else 1,
        "attn_type": next(number for number, scheme in SCHEMES.items() if type(position) is scheme),
        "ext_len": 0,
        "pre_lnorm": layer.pre_norm,
        "same_length": model.same_length,
        "mem_len": 0 if mem_len is None else mem_len,
        "clamp_len": -1 if clamp_len is None else clamp_len,
    }
    if isinstance(position, RelativePosition) and "r_w_bias" not in state:
        flags["untie_r"] = True
    if isinstance(position, (ShawPosition, AbsolutePositionPerLayer)):
        flags["tgt_len"] = len(position.r_emb) - (mem_len or 0)
    return state, flags


def _refuse_what_they_lack(model: TransformerXL) -> None:
    position, layer = model.position, model.layers[0]
    if type(position) not in SCHEMES.values():
        raise ValueError(f"model.position: the authors' code has no {type(position).__name__}")
    if not model.memory.keeps_inputs:
        raise ValueError("model.memory: the authors' code has no compressive memory")
    if layer.feedforward.activation is not ACTIVATIONS["relu"]:
        raise ValueError("model.activation: the authors' code has relu alone")
    if layer.pre_norm and isinstance(position, (AbsolutePosition, AbsolutePositionPerLayer)):
        raise ValueError("model.pre_norm: with absolute positions the authors' code leaves queries without a norm")
