import math
from pathlib import Path

import pytest
import torch
from conftest import tiny_model

from txl.data import corpus as corpora
from txl.data.corpus import Split
from txl.data.vocab import Bytes, Characters
from txl.evaluation import evaluate, figure, total_nll


def split_of(n, n_token=50):
    text = bytes(torch.randint(n_token, (n,), generator=torch.Generator().manual_seed(5)).tolist())
    return Split(name="test", text=text, tokens=Bytes().encode(text), vocab=Bytes())


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
        text = split.text[lane * 25 : min(lane * 25 + 26, 100)]
        part = Split(name="test", text=text, tokens=Bytes().encode(text), vocab=Bytes())
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
    short = Split(name="test", text=split.text[:25], tokens=split.tokens[:25], vocab=Bytes())
    assert one["nll"] == pytest.approx(total_nll(model, short, tgt_len=8, batch_size=1)[0] / 24)
