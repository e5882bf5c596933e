r"""Continues a prompt with a checkpoint, the memory carried from token to token; or scores the prompt itself.

python generate.py checkpoint=outputs/python_docs/default prompt="It's 42, isn't it?"
python generate.py checkpoint=RUN prompt_file=start.txt temperature=0.8 top_p=0.95 num_samples=3 seed=1 format=columns
python generate.py checkpoint=RUN prompt_file=starts.txt each_line=true num_samples=4      many prompts side by side
echo -n "The " | python generate.py checkpoint=RUN prompt=- stops='[".", "\n\n"]' format=jsonl
python generate.py checkpoint=RUN interactive=true color=true    a prompt loop that keeps the memory; /help
python generate.py checkpoint=RUN prompt_file=text.txt score=true color=true               what each token costs
"""

import os
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from txl import config as hydra_config
from txl.settings import TRAINED, Generate
from txl.signature import arguments

if TYPE_CHECKING:
    from txl.data.encoding import Encoder
    from txl.generation import Reader, Sampling
    from txl.printing import Shades


@hydra_config.entry_point("generate")
def main(cfg) -> list:
    """Writes the continuation only, as raw bytes, flushed as they are made; returns the texts, or with score=true the figures."""
    from txl import checkpoint, generation
    from txl.conversation import Conversation, converse
    from txl.instruments.subject import evaluated_tgt_len
    from txl.printing import Shades
    from txl.runtime import choose_device
    from txl.scoring import score_all

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
    shades = Shades(vocab.n_token, asked.color)
    prompts = prompt.splitlines() or [b""] if asked.each_line else [prompt]
    if asked.score:
        reading = dict(resets=corpus.reset_at_document, tgt_len=evaluated_tgt_len(trained), precision=precision)
        return score_all(model, prompts, encoder, **reading, format=asked.format, shades=shades, named=asked.each_line)
    reader = generation.Reader(
        model,
        context=trained["tgt_len"],
        n_token=vocab.n_token,
        precision=precision,
        documents=generation.borders_for(encoder, corpus.reset_at_document),
    )
    if asked.interactive:
        conversation = Conversation(reader, encoder, sampling, seed=asked.seed, stops=asked.stop_texts(), shades=shades)
        converse(conversation, prompt if asked.prompt is not None or asked.prompt_file is not None else None)
        return conversation.said
    return go_on(asked, prompts, sampling, reader, encoder, shades)


def go_on(
    asked: Generate,
    prompts: list[bytes],
    sampling: "Sampling",
    reader: "Reader",
    encoder: "Encoder",
    shades: "Shades",
) -> list[bytes]:
    """Continues prompts, as many side by side as there is room for."""
    from txl import generation
    from txl.printing import Output

    encoded = [generation.encode_prompt(encoder, one)[0] for one in prompts]
    rows = [(index, sample) for index in range(len(prompts)) for sample in range(asked.num_samples)]
    named = [(prompts[index], sample) for index, sample in rows]
    output = Output(named, format=asked.format, seed=asked.seed, shades=shades)
    at_once = generation.rows_at_once(reader.model, reader.context)
    for first in range(0, len(rows), at_once):
        chosen = rows[first : first + at_once]
        copies = Counter(index for index, _ in chosen)
        pieces = generation.pieces(
            reader.begin([encoded[index] for index in copies], list(copies.values())),
            sampling,
            [generation.sample_seed(asked.seed, sample) for _, sample in chosen],
            decode=encoder.vocab.decode,
            stops=asked.stop_texts(),
        )
        for row, piece, nll in pieces:
            output.add(first + row, piece, nll)
    return output.texts


def read_prompt(prompt: str | None, prompt_file: str | None) -> bytes:
    """The prompt's bytes: as typed, from standard input (`-`), or from a file."""
    if prompt_file is not None:
        try:
            return Path(prompt_file).read_bytes()
        except OSError as error:
            raise ValueError(f"prompt_file: cannot read {prompt_file} ({error.strerror})") from error
    return sys.stdin.buffer.read() if prompt == "-" else os.fsencode(prompt or "")


if __name__ == "__main__":
    hydra_config.launch(main, literals=True)
