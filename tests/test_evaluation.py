import itertools
import math
from pathlib import Path

import pytest
import torch
from conftest import tiny_model

from txl.data import corpus as corpora
from txl.data.encoding import Split
from txl.data.vocab import BPE, Bytes, Characters, Words
from txl.evaluation import evaluate, figure, total_nll


def split_of(n, n_token=50):
    text = bytes(torch.randint(n_token, (n,), generator=torch.Generator().manual_seed(5)).tolist())
    return Split.of("test", text, Bytes())


def test_one_lane_equals_a_loop_by_hand():
    model, split = tiny_model(), split_of(100)
    tokens = torch.from_numpy(split.tokens.astype("int64"))[None]
    total, mems = 0.0, None
    for start in range(0, 99, 7):
        inputs = tokens[:, start : min(start + 7, 99)]
        targets = tokens[:, start + 1 : start + 8]
        nll, mems = model(inputs, mems, targets)
        total += nll.sum().item()
    assert total_nll(model, split, tgt_len=7, batch_size=1) == (pytest.approx(total, abs=1e-9), 99)


def test_several_lanes_each_begin_with_an_empty_memory():
    model, split = tiny_model(), split_of(100)
    total = 0.0
    for lane in range(4):
        text = split.text.read(lane * 25, min(lane * 25 + 26, 100))
        part = Split.of("test", text, Bytes())
        total += total_nll(model, part, tgt_len=7, batch_size=1)[0]
    assert total_nll(model, split, tgt_len=7, batch_size=4) == (pytest.approx(total, abs=1e-9), 99)


@pytest.mark.parametrize("batch_size", [1, 2, 7, 99, 500])
@pytest.mark.parametrize("tgt_len", [1, 10, 200])
def test_every_token_but_the_first_counts_whatever_the_lanes(batch_size, tgt_len):
    assert total_nll(tiny_model(), split_of(100), tgt_len=tgt_len, batch_size=batch_size)[1] == 99


def test_with_same_length_and_one_lane_tgt_len_changes_nothing():
    model, split = tiny_model("model.same_length=true", "model.memory.mem_len=9"), split_of(80)
    figures = [total_nll(model, split, tgt_len=tgt_len, batch_size=1)[0] for tgt_len in (1, 5, 9, 32, 79)]
    assert all(one == pytest.approx(figures[0], rel=1e-12) for one in figures)
    without = [total_nll(tiny_model("model.memory.mem_len=9"), split, tgt_len=n, batch_size=1)[0] for n in (5, 32)]
    assert without[0] != pytest.approx(without[1], rel=1e-6)


def test_the_model_is_left_as_it_was_and_measured_in_eval_mode():
    model = tiny_model("model.dropout=0.5").train()
    first = total_nll(model, split_of(50), tgt_len=7, batch_size=1)
    assert model.training
    assert total_nll(model, split_of(50), tgt_len=7, batch_size=1) == first
    assert total_nll(model.eval(), split_of(50), tgt_len=7, batch_size=1) == first and not model.training


def test_figures_by_hand():
    """Ten tokens of 30 bytes at 2 nats each."""
    one = figure(20.0, 10, 30)
    assert one == {
        "nll": 2.0,
        "ppl": pytest.approx(math.exp(2)),
        "bits_per_token": pytest.approx(2 / math.log(2)),
        "bits_per_byte": pytest.approx(20 / math.log(2) / 30),
        "tokens": 10,
        "bytes": 30,
    }


def test_bytes_are_those_of_the_scored_tokens():
    text = "äöü€ plain".encode()
    Path("t.txt").write_bytes(text)
    corpus = corpora.text_files(vocab=Characters(), train="t.txt", valid="t.txt", test="t.txt")
    vocab = corpus.vocabulary()
    split = corpus.split("test", vocab)
    one = evaluate(tiny_model(n_token=vocab.n_token), split, tgt_len=4, batch_size=1, precision="fp32")
    assert (one["tokens"], one["bytes"]) == (9, len(text) - 2)
    assert one["bits_per_byte"] == pytest.approx(one["bits_per_token"] * 9 / (len(text) - 2))
    assert {key: one[key] for key in ("split", "mem_len", "tgt_len", "clamp_len", "same_length", "batch_size")} == {
        "split": "test",
        "mem_len": 16,
        "tgt_len": 4,
        "clamp_len": None,
        "same_length": False,
        "batch_size": 1,
    }


def test_max_segments_stops_early():
    model, split = tiny_model(), split_of(100)
    one = evaluate(model, split, tgt_len=8, batch_size=1, precision="fp32", max_segments=3)
    assert one["tokens"] == one["bytes"] == 24
    short = Split.of("test", split.text.read(0, 25), Bytes())
    assert one["nll"] == pytest.approx(total_nll(model, short, tgt_len=8, batch_size=1)[0] / 24)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_where_memory_is_reset_each_document_is_scored_as_if_it_stood_alone(batch_size):
    text = b"one\ntwo and more\n\nthree, the last and the longest of them\nend"
    model = tiny_model("model.memory.mem_len=60", n_token=256)
    split = Split.of("test", text, Bytes(), separator=b"\n", resets=True)
    lane_len, total = -(-(len(text) - 1) // batch_size), 0.0
    for lane in range(0, len(text) - 1, lane_len):
        tokens = torch.tensor(list(text[lane : lane + lane_len + 1]))
        borders = [place - lane for place in split.starts.tolist() if lane < place < lane + lane_len]
        for start, stop in itertools.pairwise([0, *borders, len(tokens) - 1]):
            nll, _ = model(tokens[None, start:stop], None, tokens[None, start + 1 : stop + 1])
            total += nll.sum().item()
    plain = Split.of("test", text, Bytes())
    for tgt_len in (5, 60):
        settings = dict(tgt_len=tgt_len, batch_size=batch_size)
        assert total_nll(model, split, **settings)[0] == pytest.approx(total, rel=1e-12)
        assert total_nll(model, plain, **settings)[0] != pytest.approx(total, rel=1e-4)


def test_figures_per_word_of_bpe():
    """A BPE model and a word model are read side by side: the same words and line ends, the same nats for each."""
    text = b" = Title = \n\n The cat sat , and the cat sat again .\n" * 3
    vocab = BPE(max_size=280).fit([text])
    split = Split.of("test", text, vocab)
    one = evaluate(tiny_model(n_token=vocab.n_token), split, tgt_len=16, batch_size=1, precision="fp32")
    words = len(text.split()) + text.count(b"\n")
    first = vocab.decode(split.tokens[:1])
    assert one["words"] == words - len(first.split()) - first.count(b"\n")
    assert one["ppl_per_word"] == pytest.approx(math.exp(one["nll"] * one["tokens"] / one["words"]))
    assert one["bytes"] == len(text) - len(first)
    by_words = Split.of("test", text, Words().fit([text]))
    assert len(by_words.tokens) == words
