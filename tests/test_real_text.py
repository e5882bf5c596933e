"""Real text, end to end on the CPU: a corpus of words, one of characters and one of BPE train, evaluate and generate."""

import json
import re
from pathlib import Path
from pydoc_data.topics import topics

import pytest
from conftest import TINY, in_process, published_folder

RUN = [override for override in TINY if not override.startswith("data.")]


def topic_files(form):
    """Thirty of Python's help topics in three files: short ones for valid and test."""
    names = sorted(topics, key=lambda name: (len(topics[name]), name))
    parts = {"valid": names[10:13], "test": names[13:16], "train": names[16:40]}
    for split, chosen in parts.items():
        Path(f"{split}.txt").write_text("".join(form(topics[name]) for name in chosen), "utf-8", newline="")


def tokenised(topic):
    """As WikiText is written: a heading, a line a paragraph between spaces, punctuation apart, numbers joined by @,@."""
    title, *paragraphs = [" ".join(re.findall(r"\w+|[^\w\s]", part)) for part in topic.split("\n\n") if part.strip()]
    return f" \n = {title} = \n \n" + "".join(f" {paragraph} \n" for paragraph in paragraphs)


def trained(*overrides):
    outcome = in_process("train", "name=real", "data=text", "data.path=.", *RUN, *overrides)
    assert outcome.status == 0, outcome.stderr
    (run,) = Path("outputs/real").iterdir()
    return run


def evaluated(run, *overrides):
    outcome = in_process("evaluate", f"checkpoint={run}", *overrides)
    assert outcome.status == 0, outcome.stderr
    return json.loads(outcome.stdout)


def generated(run, prompt):
    outcome = in_process("generate", f"checkpoint={run}", f"prompt={prompt}", "max_new_tokens=20", "seed=3")
    assert outcome.status == 0, outcome.stderr
    return outcome.stdout


def words_and_lines(text):
    return len(text.split()) + text.count(b"\n")


def test_words_train_evaluate_and_generate():
    """The perplexity is one per word and line end: as many tokens as the file has of both."""
    topic_files(tokenised)
    run = trained("data/vocab=words", "data.vocab.min_freq=3", "steps=40")
    text = Path("test.txt").read_bytes()
    one = evaluated(run)
    assert one["tokens"] == words_and_lines(text) - 1  # the first is not scored
    assert one["bytes"] == len(text) - text.index(b"\n") - 1
    assert one["nll"] < json.loads(Path(run, "metrics.jsonl").read_text().splitlines()[0])["train/nll"]
    assert evaluated(run, "split=valid")["tokens"] == words_and_lines(Path("valid.txt").read_bytes()) - 1
    listed = {"<unk>", *Path("train.txt").read_text("utf-8").split()}
    assert set(generated(run, "The value of").decode().split()) <= listed


def test_characters_train_evaluate_and_generate():
    topic_files(str)
    run = trained("data/vocab=characters")
    text = Path("test.txt").read_bytes().decode()
    one = evaluated(run)
    assert one["tokens"] == len(text) - 1 and one["bytes"] == len(text.encode()) - len(text[0].encode())
    assert len(generated(run, "def ").decode()) == 20 + 1


def test_bpe_trains_evaluates_and_generates():
    """Its perplexity per word counts the words and line ends that a word-level model of the same text predicts."""
    topic_files(str)
    run = trained("data/vocab=bpe", "data.vocab.max_size=400")
    text = Path("test.txt").read_bytes()
    one = evaluated(run)
    assert words_and_lines(text) - 2 <= one["words"] <= words_and_lines(text)
    assert one["tokens"] > one["words"] and one["ppl_per_word"] > one["ppl"]
    assert one["bytes"] > 0.99 * len(text) - 10
    assert generated(run, "naïve 日本 prompt").endswith(b"\n")
    assert evaluated(run, "split=valid")["words"] >= words_and_lines(Path("valid.txt").read_bytes()) - 2


@pytest.mark.parametrize("kind", ["lm1b", "wikitext103", "enwik8"])
def test_a_published_corpus_trains_evaluates_and_generates(kind):
    folder = published_folder(kind, Path("folder"))
    arguments = [f"data={kind}", f"data.path={folder}", "data.verify=false", *RUN]
    outcome = in_process("train", "name=real", *arguments)
    assert outcome.status == 0, outcome.stderr
    (run,) = Path("outputs/real").iterdir()
    assert evaluated(run)["tokens"] > 200
    assert generated(run, "akp")
