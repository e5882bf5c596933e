"""Other people's checkpoints as runs of ours, and ours as theirs.

python -m txl.interop FILE OUT               a model of the authors, NVIDIA or Hugging Face becomes the run folder OUT
python -m txl.interop model.pt OUT --vocab cache.pt --data wikitext103
python -m txl.interop RUN OUT.pt             back: the authors' names and arguments, for torch.load(weights_only=True)
python -m txl.interop RUN OUT.safetensors    the same as safetensors
"""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors.torch import save_file
from torch import Tensor

from txl import checkpoint, runs
from txl.config import compose, plain, to_yaml
from txl.interop import sources, vocabularies
from txl.interop.original import configuration, from_original, to_original
from txl.interop.sources import Source
from txl.interop.vocabularies import Known
from txl.runtime import naming, write_json, write_whole

EXPORTS = (".pt", ".safetensors")


def import_run(file: Path, out: Path, *, vocab: Path | None = None, data: str | None = None) -> dict[str, Any]:
    """Reads a model of another code and writes it as a run: best.pt, config.yaml, vocab.json, and origin.json, returned.

    Raises ValueError for what is not understood, for a model without a vocabulary, and for a folder that holds a run.
    """
    if (out / "best.pt").exists():
        raise ValueError(f"OUT: {out} holds a run already")
    source = sources.read(file)
    known = source.vocab if vocab is None else vocabularies.read(vocab)
    if known is None:
        raise ValueError(
            f"--vocab: {file} holds no vocabulary; give its file: cache.pt, vocab.bin, vocab.json, tokenizer.json or a list"
        )
    config = _configuration(source, known, out.name, data or source.data)
    n_token = config["model"]["n_token"]
    if known.vocab.n_token > n_token:
        raise ValueError(f"--vocab: it has {known.vocab.n_token} tokens, the model {n_token}")
    state = source.state if known.order is None else sources.in_our_order(source, known.order)
    model = from_original(state, source.flags)
    if unfinite := [name for name, tensor in model.state_dict().items() if not tensor.isfinite().all()]:
        raise ValueError(f"FILE: its {unfinite[0]} holds numbers that are not finite")
    origin = {
        "code": source.code,
        "file": str(file),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tokens of the vocabulary": known.vocab.n_token,
        "notes": source.notes,
    }
    runs.make(out, "OUT: the run's folder")
    with naming(f"OUT: {out}"):
        write_whole(out / "config.yaml", lambda opened: opened.write(to_yaml(config).encode()))
        write_json(out / "vocab.json", known.vocab.state())
        write_json(out / "origin.json", origin)
        checkpoint.save(
            out / "best.pt",
            {
                "config": json.dumps(config),
                "vocab": json.dumps(known.vocab.state()),
                "texts": {},
                "step": source.step,
                "tokens": 0,
                "model": dict(model.state_dict()),
            },
        )
    return origin


def _configuration(source: Source, known: Known, name: str, data: str | None) -> dict[str, Any]:
    """A whole configuration with this model; what trained it is not known, and stands at our defaults."""
    kind = vocabularies.group_of(known.vocab)
    overrides = [f"data={data}"] if data is not None else ["data=text", f"data/vocab={kind}"]
    config = plain(compose("train", overrides))
    if not isinstance(source.flags.get("tgt_len"), int) or source.flags["tgt_len"] < 1:
        raise ValueError("FILE: its arguments have no tgt_len")
    return {**config, "name": name, "tgt_len": source.flags["tgt_len"], "model": configuration(source.flags)}


def export(run: str, out: Path) -> int:
    """Writes a checkpoint of ours under the authors' names, with their arguments and its vocabulary; returns the parameters.

    Raises ValueError for a model that the authors' code cannot hold, and for a file that is there.
    """
    if out.exists():
        raise ValueError(f"OUT: {out} is there already")
    content = checkpoint.load(checkpoint.locate(run, "FILE"), "FILE")
    vocab = checkpoint.vocabulary(content)
    model = checkpoint.load_model(content)
    state, flags = to_original(model)
    flags = {"tgt_len": content["config"]["tgt_len"], **flags}
    state |= _inverse_frequencies(flags)
    with naming(f"OUT: {out}"):
        if out.suffix == ".pt":
            whole = {"state_dict": state, "flags": flags, "vocab": vocab.state()}
            write_whole(out, lambda file: torch.save(whole, file))
        else:
            metadata = {"flags": json.dumps(flags), "vocab": json.dumps(vocab.state()), "format": "pt"}
            beside = out.with_name(f".{out.name}")
            try:
                save_file(_apart(state), beside, metadata)
                beside.replace(out)
            finally:
                beside.unlink(missing_ok=True)
    return sum(parameter.numel() for parameter in model.parameters())


def _inverse_frequencies(flags: Mapping[str, Any]) -> dict[str, Tensor]:
    """The buffer that the authors' sinusoids are made from, which their code wants to find."""
    if flags["attn_type"] not in (0, 2):
        return {}
    return {"pos_emb.inv_freq": 1 / (10000 ** (torch.arange(0.0, flags["d_model"], 2.0) / flags["d_model"]))}


def _apart(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that share no memory, as safetensors wants them."""
    return {name: tensor.contiguous() for name, tensor in state.items()}


class _Arguments(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def main(arguments: list[str]) -> int:
    parser = _Arguments(
        prog="python -m txl.interop",
        description="Reads models of other codes as runs of this project, and writes its own under the authors' names.",
    )
    parser.add_argument("file", metavar="FILE", help="model.pt, checkpoint_best.pt, a Hugging Face folder; or a run")
    parser.add_argument("out", metavar="OUT", type=Path, help="a folder for the run; or NAME.pt, NAME.safetensors")
    parser.add_argument(
        "--vocab", type=Path, metavar="FILE", help="the vocabulary, where FILE has none: cache.pt, vocab.bin"
    )
    parser.add_argument(
        "--data", metavar="NAME", help="the text it is measured on, as in data=NAME; else its own, or none"
    )
    try:
        asked = parser.parse_args(arguments)
        if asked.out.suffix in EXPORTS:
            parameters = export(asked.file, asked.out)
            print(f"{asked.out}: {parameters:,} parameters under the authors' names")
            return 0
        origin = import_run(Path(asked.file), asked.out, vocab=asked.vocab, data=asked.data)
        print(
            f"{asked.out}: {origin['code']}, {origin['parameters']:,} parameters, "
            f"{origin['tokens of the vocabulary']:,} tokens"
        )
        for note in origin["notes"]:
            print(f"note: {note}", file=sys.stderr)
    except (ValueError, OSError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
