"""What converting costs: a model of Hugging Face's layout becomes a run, and the run a file under the authors' names.

    python -m benchmarks.interop [--layers 18] [--words 267735]

The model is random; with the defaults it has the sizes of transfo-xl-wt103, 285 million parameters. Each row is a command of
its own: wall and CPU seconds, and the most memory that it held, the pages of the file that it read among them.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from txl.checkpoint import construct
from txl.interop.original import configuration, to_original


def hugging_face_folder(folder: Path, layers: int, words: int) -> Path:
    """A random model as config.json and pytorch_model.bin, and its vocabulary as a list of words."""
    flags = dict(n_layer=layers, n_head=16, d_model=1024, d_head=64, d_inner=4096, d_embed=1024, n_token=words)
    flags |= dict(
        cutoffs=[words * share // 1000 for share in (75, 150, 750)], div_val=4, tie_projs=[False, True, True, True]
    )
    flags |= dict(untie_r=True, mem_len=1600, clamp_len=1000, same_length=True, tgt_len=128)
    state, _ = to_original(construct(configuration(flags)))
    ours = {name: tensor.flip(0) if "cluster" in name else tensor for name, tensor in state.items()}
    folder.mkdir()
    named = {(name if name.startswith("crit") else f"transformer.{name}"): tensor for name, tensor in ours.items()}
    torch.save(named, folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps({**flags, "model_type": "transfo-xl"}))
    (folder / "vocab.txt").write_text("\n".join(["<eos>", "<unk>", *(f"w{number}" for number in range(words - 2))]))
    return folder


def measured(*arguments: str) -> tuple[float, float, float]:
    """Wall seconds, CPU seconds and GiB of a command."""
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "txl.interop", *arguments], stdout=sys.stderr)
    _, process.returncode, usage = os.wait4(process.pid, 0)
    assert process.returncode == 0, arguments
    return time.perf_counter() - began, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=18)
    parser.add_argument("--words", type=int, default=267735)
    asked = parser.parse_args()
    print("| | wall seconds | CPU seconds | GiB |\n| --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory(dir=".") as folder:
        theirs, run = str(hugging_face_folder(Path(folder) / "hf", asked.layers, asked.words)), f"{folder}/run"
        for given, out in ((theirs, run), (run, f"{folder}/out.pt"), (run, f"{folder}/out.safetensors")):
            what = f"export {Path(out).suffix}" if given == run else "import"
            print(f"| {what} | " + " | ".join(f"{figure:.1f}" for figure in measured(given, out)) + " |", flush=True)


if __name__ == "__main__":
    main()
