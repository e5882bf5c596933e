"""Other people's checkpoints as runs of ours, and ours as theirs.

python -m txl.interop FILE OUT               a model of the authors, NVIDIA or Hugging Face becomes the run folder OUT
python -m txl.interop model.pt OUT --vocab cache.pt --data wikitext103
python -m txl.interop RUN OUT.pt             back: the authors' names and arguments, as torch.load takes them with weights_only=True
python -m txl.interop RUN OUT.safetensors    the same as safetensors
"""

import argparse
import sys
from pathlib import Path
from typing import NoReturn

EXPORTS = (".pt", ".safetensors")


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
        "--vocab", type=Path, metavar="FILE", help="the vocabulary: cache.pt, vocab.bin, ...; else FILE's"
    )
    parser.add_argument(
        "--data", metavar="NAME", help="the text it is measured on, as in data=NAME; else its own, or none"
    )
    try:
        asked = parser.parse_args(arguments)
        from txl.interop import convert  # which loads torch

        if asked.out.suffix in EXPORTS:
            if asked.vocab or asked.data:
                raise ValueError(f"OUT: {asked.out} is an export, which takes no --vocab and no --data")
            parameters, notes = convert.export(asked.file, asked.out)
            print(f"{asked.out}: {parameters:,} parameters under the authors' names")
        else:
            origin = convert.import_run(Path(asked.file), asked.out, vocab=asked.vocab, data=asked.data)
            notes = origin["notes"]
            print(
                f"{asked.out}: {origin['code']}, {origin['parameters']:,} parameters, "
                f"{origin['tokens of the vocabulary']:,} tokens"
            )
        for note in notes:
            print(f"note: {note}", file=sys.stderr)
    except (ValueError, OSError) as error:
        words = " ".join(str(error).split())  # parts of it may be a stranger's
        print("".join(letter if letter.isprintable() else "?" for letter in words), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
