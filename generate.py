"""Continues a prompt with a checkpoint, the memory carried from token to token.

python generate.py checkpoint=outputs/python_docs/default prompt="It's 42, isn't it?"
python generate.py checkpoint=RUN prompt_file=start.txt temperature=0.8 top_p=0.95 num_samples=3 seed=1
echo -n "The " | python generate.py checkpoint=RUN prompt=- stop="." format=jsonl
"""

import json
import os
import sys
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
    start = reader.read(generation.encode_prompt(encoder, prompt))

    output, texts = sys.stdout.buffer, []
    for sample in range(asked.num_samples):
        if sample and asked.format == "text":
            output.write(b"---\n")
        tokens = generation.generate(reader, start, sampling, generation.sample_seed(asked.seed, sample))
        pieces = generation.until(
            (vocab.decode([token]) for token in tokens), os.fsencode(asked.stop) if asked.stop else None
        )
        text = b""
        for piece in pieces:
            text += piece
            if asked.format == "text":
                output.write(piece)
                output.flush()
        texts.append(text)
        row = {"sample": sample, "seed": asked.seed, "prompt": readable(prompt), "text": readable(text)}
        output.write(b"\n" if asked.format == "text" else (json.dumps(row) + "\n").encode())
        output.flush()
    return texts


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
