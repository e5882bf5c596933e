"""A model of another code becomes a run folder of ours, and a run of ours a file under the authors' names."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from txl import checkpoint, runs
from txl.config import CONF, compose, plain, to_yaml
from txl.data.vocab import Vocabulary
from txl.interop import sources, vocabularies
from txl.interop.original import configuration, from_original, to_original
from txl.interop.sources import Source
from txl.interop.vocabularies import Known
from txl.model import TransformerXL
from txl.runtime import naming, write_json, write_whole


def import_run(file: Path, out: Path, *, vocab: Path | None = None, data: str | None = None) -> dict[str, Any]:
    """Reads a model of another code and writes it as a run: best.pt, config.yaml, vocab.json, and origin.json, returned.

    Raises ValueError for what is not understood, for a model without a vocabulary, and for a folder that holds anything.
    """
    if out.is_dir() and any(out.iterdir()):
        raise ValueError(f"OUT: {out} holds files already; give a new folder")
    known_data = sorted(option.stem for option in (CONF / "data").glob("*.yaml"))
    if data is not None and data not in known_data:
        raise ValueError(f"--data: there is no {data!r}; there are {', '.join(known_data)}")
    source = sources.read(file)
    known = vocabularies.found(source.vocab if vocab is None else vocab)
    if known is None:
        raise ValueError(
            f"--vocab: {file} holds no vocabulary; give its file: cache.pt, vocab.bin, vocab.json, tokenizer.json or a list"
        )
    model, config, notes = _model_and_config(source, known, out.name, data or source.data)
    origin = {
        "code": source.code,
        "file": str(file),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tokens of the vocabulary": known.vocab.n_token,
        "notes": source.notes + notes,
    }
    runs.make(out, "OUT: the run's folder")
    try:
        with naming(f"OUT: {out}"):
            write_whole(out / "config.yaml", lambda opened: opened.write(to_yaml(config).encode()))
            write_json(out / "vocab.json", known.vocab.state())
            write_json(out / "origin.json", origin)
            checkpoint.save(
                out / "best.pt",
                {
                    "config": json.dumps(config),
                    "vocab": json.dumps(known.vocab.state()),
                    "texts": {},  # not known
                    "step": source.step,
                    "tokens": 0,
                    "model": dict(model.state_dict()),
                },
            )
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)
        raise
    return origin


def _model_and_config(
    source: Source, known: Known, name: str, data: str | None
) -> tuple[TransformerXL, dict[str, Any], list[str]]:
    """The model in our names, a whole configuration, in which what trained it stands at our defaults, and what to note."""
    of_data = ["data=text", f"data/vocab={vocabularies.group_of(known.vocab)}"] if data is None else [f"data={data}"]
    try:
        model_config = configuration(source.flags)
        n_token, tgt_len = model_config["n_token"], source.flags.get("tgt_len")
        if tgt_len is None or tgt_len < 1:
            raise ValueError("its arguments have no tgt_len")
        if known.vocab.n_token > n_token:
            raise ValueError(
                f"its model has {n_token} tokens, its vocabulary {known.vocab.n_token} (--vocab gives another)"
            )
        for key, tensor in source.state.items():
            if isinstance(tensor, Tensor) and not tensor.isfinite().all():
                raise ValueError(f"its {key} holds numbers that are not finite")
        state = source.state if known.order is None else sources.in_our_order(source, known.order)
        model = from_original(state, source.flags)
    except ValueError as error:
        raise ValueError(f"FILE: {error}") from error
    fewer = f"the vocabulary has {known.vocab.n_token} tokens, the model {n_token}: the last ones stand for no text"
    config = {**plain(compose("train", of_data)), "name": name, "tgt_len": tgt_len, "model": model_config}
    notes = _absolute_memory(source.flags)
    return model, config, notes + [fewer] * (known.vocab.n_token < n_token)


def _absolute_memory(flags: Mapping[str, Any]) -> list[str]:
    """Where figures of the two codes differ."""
    if flags.get("attn_type") not in (2, 3) or not flags.get("mem_len"):
        return []
    return ["the authors' code adds positions to the memory again with each segment; here each has one: figures differ"]


def export(run: str, out: Path) -> tuple[int, list[str]]:
    """Writes a checkpoint of ours under the authors' names, with their arguments and its vocabulary.

    Returns the number of its parameters, and what to note. Raises ValueError for a model that the authors' code cannot
    hold, and for a file that is there.
    """
    if out.exists():
        raise ValueError(f"OUT: {out} is there already")
    content = checkpoint.load(checkpoint.locate(run, "FILE"), "FILE")
    vocab = checkpoint.vocabulary(content)
    model = checkpoint.load_model(content)
    del content["model"]  # a large model is held twice, not three times
    state, flags = to_original(model)
    flags = {"tgt_len": content["config"]["tgt_len"], **flags}
    state |= _inverse_frequencies(flags)
    notes = _absolute_memory(flags)
    if "untie_r" in flags:
        notes.append(
            "each layer has its own u and v (untie_r): the authors' PyTorch code lacks that, Hugging Face's has it"
        )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    del model
    with naming(f"OUT: {out}"):
        try:
            _write(out, state, flags, vocab)
        except (RuntimeError, SafetensorError) as error:  # how the two libraries tell that a disk is full
            raise OSError(str(error)) from error
    return parameters, notes


def _write(out: Path, state: Mapping[str, Tensor], flags: Mapping[str, Any], vocab: Vocabulary) -> None:
    if out.suffix == ".pt":
        whole = {"state_dict": state, "flags": flags, "vocab": vocab.state()}
        return write_whole(out, lambda file: torch.save(whole, file))
    beside = out.with_name(f".{out.name}")
    try:
        beside.touch()
        mode = beside.stat().st_mode  # the library would have it read by its owner alone
        save_file(dict(state), beside, {"flags": json.dumps(flags), "vocab": json.dumps(vocab.state()), "format": "pt"})
        beside.chmod(mode)
        beside.replace(out)
    finally:
        beside.unlink(missing_ok=True)


def _inverse_frequencies(flags: Mapping[str, Any]) -> dict[str, Tensor]:
    """The buffer that the authors' sinusoids are made from, which their code wants to find."""
    if flags["attn_type"] not in (0, 2):
        return {}
    return {"pos_emb.inv_freq": 1 / (10000 ** (torch.arange(0.0, flags["d_model"], 2.0) / flags["d_model"]))}
