"""generate.py score=true: what a given text costs, token by token, as evaluate.py has it."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import characters_run, finished, in_process, refused, text_data, tiny_model

from txl import checkpoint
from txl.data.encoding import Encoder
from txl.data.vocab import Bytes
from txl.scoring import score

TEXT = "to be or ñot to be,\n\nthat is the question \udcff of the day".encode("utf-8", "surrogateescape")


def scored(run, *overrides):
    outcome = in_process("generate", f"checkpoint={run}", "score=true", "format=jsonl", *overrides)
    assert outcome.status == 0, outcome.stderr
    return [json.loads(line) for line in outcome.stdout.splitlines()]


def slow_nll(run, text):
    """The nll of each byte but the first, in float64, segment by segment, by the log-probabilities of all tokens."""
    model, tokens, mems, found = checkpoint.load_model(checkpoint.load(run / "best.pt")).double(), [*text], None, []
    for start in range(0, len(tokens) - 1, 16):
        with torch.no_grad():
            log_probs, mems = model(torch.tensor([tokens[start : start + 16]]), mems)
        found += [-float(row[token]) for row, token in zip(log_probs[0], tokens[start + 1 : start + 17], strict=False)]
    return found


def test_each_token_has_its_nll_and_their_sum_is_what_evaluate_finds(trained_run):
    Path("t.txt").write_bytes(TEXT)
    (row,) = scored(trained_run, "prompt_file=t.txt")
    expected = slow_nll(trained_run, TEXT)
    assert row["each"][0]["nll"] is None
    np.testing.assert_allclose([token["nll"] for token in row["each"][1:]], expected, rtol=1e-5, atol=1e-6)
    assert [token["id"] for token in row["each"]] == [*TEXT]
    assert b"".join(token["text"].encode("utf-8", "surrogateescape") for token in row["each"]) == TEXT
    assert row["total_nll"] == pytest.approx(sum(expected), rel=1e-6)
    evaluated = in_process("evaluate", f"checkpoint={trained_run}", "data.test=t.txt", "out=o.json")
    figure = json.loads(evaluated.stdout)
    for name in ("nll", "ppl", "bits_per_token", "bits_per_byte", "tokens", "bytes"):
        assert row[name] == pytest.approx(figure[name], rel=1e-6), name
    assert row["tokens"] == len(TEXT) - 1


@pytest.mark.parametrize(
    "kind", [["data/vocab=words"], ["data/vocab=bpe", "data.vocab.max_size=280"], ["data.document_separator=\\n\\n"]]
)
def test_any_vocabulary_gives_the_figure_of_evaluate(kind):
    """Words and byte pairs, and a memory that is reset where documents begin; segments of the length that the run's figures had."""
    text = b"the cat sat\n\non the mat with the cat\n\nthe end\n" * 3
    given = text_data(train=text * 40, valid=text, test=text)
    resets = ["data.reset_at_document=true"] if "separator" in kind[0] else []
    run = finished("run", *given, *kind, *resets, "eval.tgt_len=8")
    (row,) = scored(run, "prompt_file=test.txt")
    figure = json.loads(in_process("evaluate", f"checkpoint={run}", "split=test").stdout)
    assert figure["tgt_len"] == 8
    for name in figure.keys() & row.keys():
        assert row[name] == pytest.approx(figure[name], rel=1e-6), name
    assert ("ppl_per_word" in row) == ("bpe" in kind[0])


def test_lines_are_ranked_by_what_stands_first(trained_run):
    """A line each, as if alone; one without two tokens has no figures and keeps its place."""
    Path("t.txt").write_bytes(b"to be\nnot\n\nx\nto be or\n")
    arguments = [f"checkpoint={trained_run}", "score=true", "prompt_file=t.txt", "each_line=true"]
    lines = in_process("generate", *arguments).stdout.decode().splitlines()
    rows = scored(trained_run, "prompt_file=t.txt", "each_line=true")
    assert [row["text"] for row in rows] == ["to be", "not", "", "x", "to be or"]
    for line, row in zip(lines, rows, strict=True):
        found = re.fullmatch(r"total_nll (\S+) +nll (\S+) +ppl (\S+) +bits_per_byte (\S+) +tokens (\d+)  (.*)", line)
        assert found[6] == row["text"] and int(found[5]) == row["tokens"] == max(0, len(row["text"]) - 1)
        if row["tokens"]:
            (alone,) = scored(trained_run, f"prompt={row['text']}")
            assert alone == row
            values = [row[name] for name in ("total_nll", "nll", "ppl", "bits_per_byte")]
            assert [float(found[place]) for place in range(1, 5)] == pytest.approx(values, abs=1e-4)
        else:
            assert row["nll"] is None and found.groups()[:4] == ("-", "-", "-", "-")


def test_one_text_is_one_line_and_its_colours_change_nothing(trained_run):
    arguments = [f"checkpoint={trained_run}", "score=true", "prompt=to be\nor not"]
    (line,) = in_process("generate", *arguments).stdout.splitlines()
    assert line.startswith(b"total_nll ") and line.endswith(b"tokens 11")
    assert in_process("generate", *arguments, "color=true").stdout == line + b"\n"
    coloured = in_process("generate", *arguments, "color=always").stdout
    assert re.sub(rb"\x1b\[[0-9;]*m", b"", coloured) == line + b"\nto be\nor not\n"
    assert coloured.startswith(line + b"\nt\x1b[30;48;5;") and coloured.count(b"\x1b[0m") == 10


def test_the_nll_is_that_of_a_loop_over_prefixes():
    """In float64, with memory for all of the text: of each token after all before it."""
    model, text = tiny_model("model.memory.mem_len=64", n_token=256), b"a text, any text"
    found = score(model, text, Encoder(Bytes()), resets=False, tgt_len=5, precision="fp32")
    with torch.no_grad():
        expected = [-float(model(torch.tensor([[*text[:stop]]]))[0][0, -1, text[stop]]) for stop in range(1, len(text))]
    np.testing.assert_allclose(found.nll[1:], expected, rtol=0, atol=1e-11)
    assert math.isnan(found.nll[0]) and found.figures["total_nll"] == pytest.approx(sum(expected), rel=1e-13)


def test_what_cannot_be_scored_is_refused(tmp_path):
    run = characters_run(tmp_path)
    line = refused(in_process("generate", f"checkpoint={run}", "score=true", "prompt=abz"), "prompt")
    assert "'z'" in line
