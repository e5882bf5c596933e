"""Continues a prompt with a checkpoint, the memory carried from token to token.

python generate.py checkpoint=outputs/python_docs/default prompt="It's 42, isn't it?"
python generate.py checkpoint=RUN prompt_file=start.txt temperature=0.8 top_p=0.95 num_samples=3 seed=1
python generate.py checkpoint=RUN prompt_file=starts.txt each_line=true num_samples=4      many prompts side by side
echo -n "The " | python generate.py checkpoint=RUN prompt=- stop="." format=jsonl
"""

import json
import os
import sys
from collections import Counter
from pathlib import Path

from txl import config as hydra_config
from txl.settings import TRAINED, Generate
from txl.signature import arguments


@hydra_config.entry_point("generate")
def main(cfg) -> list[bytes]:
    """Writes the continuation only, as raw bytes, flushed as they are made; returns the texts."""
    from txl import checkpoint, generation
    from txl.runtime import choose_device

    hydra_config.check(cfg)
    asked = Generate(**arguments(hydra_config.plain(cfg)))
    sampling = generation.Sampling(
        max_new_tokens=asked.max_new_tokens, temperature=asked.temperature, top_k=asked.top_k, top_p=asked.top_p
    )
    prompt = read_prompt(asked.prompt, asked.prompt_file)
    content = checkpoint.load(checkpoint.locate(asked.checkpoint))
    trained = content["config"]
    vocab = checkpoint.vocabulary(content)
    model = checkpoint.load_model(content).to(choose_device(asked.device))
    precision = trained["precision"] if asked.precision == TRAINED else asked.precision
    corpus = checkpoint.construct(trained["data"], cache_dir=None)
    encoder = corpus.encoder(vocab)
    reader = generation.Reader(
        model,
        context=trained["tgt_len"],
        n_token=vocab.n_token,
        precision=precision,
        documents=generation.borders_for(encoder, corpus.reset_at_document),
    )
    prompts = prompt.splitlines() or [b""] if asked.each_line else [prompt]
    encoded = [generation.encode_prompt(encoder, one)[0] for one in prompts]
    rows = [(index, sample) for index in range(len(prompts)) for sample in range(asked.num_samples)]
    output = Output(asked, [(prompts[index], sample) for index, sample in rows])
    at_once = generation.rows_at_once(model, reader.context)
    for first in range(0, len(rows), at_once):
        chosen = rows[first : first + at_once]
        copies = Counter(index for index, _ in chosen)
        pieces = generation.pieces(
            reader.begin([encoded[index] for index in copies], list(copies.values())),
            sampling,
            [generation.sample_seed(asked.seed, sample) for _, sample in chosen],
            decode=vocab.decode,
            stop=os.fsencode(asked.stop) if asked.stop else None,
        )
        for row, piece in pieces:
            output.add(first + row, piece)
    return output.texts


class Output:
    """Writes texts in their order: the first that has not ended as it grows, those behind it when their turn comes."""

    def __init__(self, asked: Generate, rows: list[tuple[bytes, int]]):
        self.asked, self.rows, self.stream = asked, rows, sys.stdout.buffer
        self.texts, self.ended = [b""] * len(rows), [False] * len(rows)
        self.current = self.written = 0

    def add(self, row: int, piece: bytes | None) -> None:
        """One more piece of a text; None ends it."""
        self.ended[row] |= piece is None
        self.texts[row] += piece or b""
        while self.current < len(self.rows):
            text = self.texts[self.current]
            if self.asked.format == "text":
                self.stream.write(text[self.written :])
                self.written = len(text)
            if not self.ended[self.current]:
                break
            self.stream.write(self._end(text, *self.rows[self.current]))
            self.current, self.written = self.current + 1, 0
        self.stream.flush()

    def _end(self, text: bytes, prompt: bytes, sample: int) -> bytes:
        if self.asked.format == "text":
            return b"\n---\n" if self.current + 1 < len(self.rows) else b"\n"
        row = {"sample": sample, "seed": self.asked.seed, "prompt": readable(prompt), "text": readable(text)}
        return (json.dumps(row) + "\n").encode()


def read_prompt(prompt: str | None, prompt_file: str | None) -> bytes:
    """The prompt's bytes: as typed, from standard input (`-`), or from a file."""
    if prompt_file is not None:
        try:
            return Path(prompt_file).read_bytes()
        except OSError as error:
            raise ValueError(f"prompt_file: cannot read {prompt_file} ({error.strerror})") from error
    return sys.stdin.buffer.read() if prompt == "-" else os.fsencode(prompt or "")


def readable(text: bytes) -> str:
    """Text for JSON; bytes that are no UTF-8 become lone surrogates, from which Python's surrogateescape makes them again."""
    return text.decode("utf-8", "surrogateescape")


if __name__ == "__main__":
    hydra_config.launch(main, literals=True)
