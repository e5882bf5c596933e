import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import mostly_slow, tiny_model
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from txl.data import corpus as corpora
from txl.data.encoding import Split
from txl.data.streams import ScoredLane, scoring_segments
from txl.data.vocab import BPE, Bytes, Characters, Words
from txl.evaluation import Plan, evaluate, figure, plan, total_nll
from txl.reading import stair_of


def split_of(n, n_token=50):
    text = bytes(torch.randint(n_token, (n,), generator=torch.Generator().manual_seed(5)).tolist())
    return Split.of("test", text, Bytes())


def nll_of(model, split, *, tgt_len, batch_size, **choice):
    """The sum of the nll and the number of tokens, read as the program chooses or as `length` and `warmed` say."""
    read = plan(model, len(split.tokens) - 1, tgt_len=tgt_len, batch_size=batch_size, **choice)
    return total_nll(model, split, read, stair=stair_of(model, tgt_len))


def by_hidden_states(model, split, *, tgt_len, batch_size):
    """The slow twin: lane by lane, in segments of tgt_len, with the hidden states carried and projected anew each time."""
    tokens, total = torch.from_numpy(split.tokens.astype("int64")), 0.0
    lane_len = -(-(len(tokens) - 1) // batch_size)
    for lane in range(0, len(tokens) - 1, lane_len):
        mems = None
        for start in range(lane, min(lane + lane_len, len(tokens) - 1), tgt_len):
            stop = min(start + tgt_len, lane + lane_len, len(tokens) - 1)
            segment, targets = tokens[None, start:stop], tokens[None, start + 1 : stop + 1]
            if not model.position.by_distance:  # the beginning of a whole segment, whose places count from its end
                segment, targets = (F.pad(row, (0, tgt_len - (stop - start))) for row in (segment, targets))
            nll, mems = model(segment, mems, targets)
            total += nll[:, : stop - start].sum().item()
    return total


MODEL = tiny_model()
COMPRESSIVE = [
    "model/memory=compressive",
    "model.memory.mem_len=8",
    "model.memory.compressed_len=3",
    "model.memory.rate=4",
]
MODELS = {
    "memory": ["model.memory.mem_len=9"],
    "short_memory": ["model.memory.mem_len=3"],
    "same_length": ["model.memory.mem_len=9", "model.same_length=true"],
    "one": ["model.memory.mem_len=1", "model.same_length=true"],
    "clamp_len": ["model.memory.mem_len=12", "model.position.clamp_len=5", "model.pre_norm=true"],
    "no_memory": ["model/memory=none"],
    "no_memory_same_length": ["model/memory=none", "model.same_length=true"],
    "adaptive": ["model.memory.mem_len=9", "model/softmax=adaptive", "model.softmax.cutoffs=[10,30]"],
    "shaw": ["model.memory.mem_len=9", "model/position=shaw", "model.position.max_klen=11"],
    "rotary": ["model.memory.mem_len=9", "model/position=rotary"],
    "alibi": ["model.memory.mem_len=9", "model/position=alibi", "model.same_length=true"],
    "absolute": ["model.memory.mem_len=9", "model/position=absolute"],
    "absolute_same_length": ["model.memory.mem_len=9", "model/position=absolute", "model.same_length=true"],
    "absolute_no_memory": ["model/memory=none", "model/position=absolute"],
    "per_layer": ["model.memory.mem_len=9", "model/position=absolute_per_layer", "model.position.max_klen=11"],
    "per_layer_no_memory": ["model/memory=none", "model/position=absolute_per_layer", "model.position.max_klen=5"],
    "compressive": [*COMPRESSIVE, "model.memory.compression=convolution"],
    "compressive_absolute": [*COMPRESSIVE, "model.memory.compression=max", "model/position=absolute"],
}


@pytest.mark.parametrize(
    ("model", "tgt_len", "batch_size"),
    mostly_slow(
        [
            *((model, 7, 3) for model in MODELS),
            ("memory", 1, 3),
            ("memory", 4, 1),
            ("compressive", 4, 1),
            ("absolute", 1, 3),
        ],
        fast=2,
    ),
)
def test_segments_of_any_length_and_warmed_lanes_give_the_figure_of_tgt_len(model, batch_size, tgt_len):
    """Three layers, so that a lane must be warmed by more than the memory; the text ends inside a segment."""
    model, split = tiny_model(*MODELS[model], "model.n_layer=3"), split_of(151)
    expected = by_hidden_states(model, split, tgt_len=tgt_len, batch_size=batch_size)
    for choice in ({}, {"length": 1}, {"length": 150}, {"warmed": 4}, {"warmed": 7, "length": 13}):
        found, n_token = nll_of(model, split, tgt_len=tgt_len, batch_size=batch_size, **choice)
        assert n_token == 150
        assert found == pytest.approx(expected, rel=1e-12, abs=1e-9), choice


@given(st.integers(1, 70), st.integers(1, 12), st.integers(1, 20), st.integers(1, 9), st.integers(1, 30))
def test_every_token_but_the_first_is_scored_exactly_once(n_target, batch_size, tgt_len, warmed, length):
    tokens, scored = np.arange(n_target + 1, dtype=np.uint8), []
    read = plan(MODEL, n_target, tgt_len=tgt_len, batch_size=batch_size, warmed=warmed, length=length)
    for segment in scoring_segments(tokens, read.lanes, length=read.length):
        pairs = zip(segment.tokens[segment.scored].tolist(), segment.targets[segment.scored].tolist(), strict=True)
        for before, target in pairs:
            assert target == before + 1
            scored.append(target)
    assert sorted(scored) == list(range(1, n_target + 1))


@pytest.mark.parametrize("model", ["memory", "same_length"])
def test_a_lane_that_is_warmed_a_little_less_gives_another_figure(model):
    """The warming is what it must be: one stair less, and the figure moves."""
    model, split = tiny_model(*MODELS[model], "model.n_layer=3"), split_of(301)
    read = plan(model, 300, tgt_len=4, batch_size=1, warmed=4)
    stair = stair_of(model, 4)
    expected = by_hidden_states(model, split, tgt_len=4, batch_size=1)
    warming = [lane.first - lane.begin for lane in read.lanes]
    needed = 3 * 8 if model.same_length else 36  # 3 layers of 9 tokens, and twice up to 3 more before a stair
    assert warming == [0, *[needed] * 3]
    less = [ScoredLane(lane.begin + stair * bool(lane.begin), lane.first, lane.end) for lane in read.lanes]
    assert total_nll(model, split, Plan(less, read.length), stair=stair)[0] != pytest.approx(expected, rel=1e-9)


def test_the_plan_on_this_machine():
    """A CPU reads its lanes whole, about a thousand tokens at a time, in whole segments."""
    model = tiny_model()
    assert plan(model, 5000, tgt_len=100, batch_size=1) == Plan([ScoredLane(0, 0, 5000)], 1100)
    two = [ScoredLane(0, 0, 2500), ScoredLane(2500, 2500, 5000)]
    assert plan(model, 5000, tgt_len=100, batch_size=2) == Plan(two, 600)
    assert plan(model, 5000, tgt_len=3000, batch_size=1).length == 3000
    stopped = [ScoredLane(0, 0, 300), ScoredLane(2500, 2500, 2800)]
    assert plan(model, 5000, tgt_len=100, batch_size=2, max_segments=3).lanes == stopped


def test_the_plan_on_an_accelerator():
    """Warmed lanes, so many that warming stays cheap and their keys and values have room."""
    model = tiny_model("model.memory.mem_len=50").to("meta")
    read = plan(model, 10**6, tgt_len=100, batch_size=1)
    assert 300 < len(read.lanes) <= 10**6 // (16 * 200) and read.length == 200
    assert {lane.first - lane.begin for lane in read.lanes[1:]} == {200}
    assert len(plan(model, 10**8, tgt_len=100, batch_size=1).lanes) == 2**15 // 100
    assert len(plan(model, 3000, tgt_len=100, batch_size=1).lanes) == 1
    model.layers[0].attention.kv_net.weight = torch.nn.Parameter(torch.empty(2**22, 16, device="meta"))
    assert len(plan(model, 10**6, tgt_len=100, batch_size=1).lanes) == 2**33 // (2 * 150 * 2**22 * 4)


def test_one_lane_equals_a_loop_by_hand():
    model, split = tiny_model(), split_of(100)
    tokens = torch.from_numpy(split.tokens.astype("int64"))[None]
    total, mems = 0.0, None
    for start in range(0, 99, 7):
        inputs = tokens[:, start : min(start + 7, 99)]
        targets = tokens[:, start + 1 : start + 8]
        nll, mems = model(inputs, mems, targets)
        total += nll.sum().item()
    assert nll_of(model, split, tgt_len=7, batch_size=1) == (pytest.approx(total, abs=1e-9), 99)


def test_several_lanes_each_begin_with_an_empty_memory():
    model, split = tiny_model(), split_of(100)
    total = 0.0
    for lane in range(4):
        text = split.text.read(lane * 25, min(lane * 25 + 26, 100))
        part = Split.of("test", text, Bytes())
        total += nll_of(model, part, tgt_len=7, batch_size=1)[0]
    assert nll_of(model, split, tgt_len=7, batch_size=4) == (pytest.approx(total, abs=1e-9), 99)


@pytest.mark.parametrize("batch_size", [1, 2, 7, 99, 500])
@pytest.mark.parametrize("tgt_len", [1, 10, 200])
def test_every_token_but_the_first_counts_whatever_the_lanes(batch_size, tgt_len):
    assert nll_of(tiny_model(), split_of(100), tgt_len=tgt_len, batch_size=batch_size)[1] == 99


def test_with_same_length_and_one_lane_tgt_len_changes_nothing():
    model, split = tiny_model("model.same_length=true", "model.memory.mem_len=9"), split_of(80)
    figures = [nll_of(model, split, tgt_len=tgt_len, batch_size=1)[0] for tgt_len in (1, 5, 9, 32, 79)]
    assert all(one == pytest.approx(figures[0], rel=1e-12) for one in figures)
    without = [nll_of(tiny_model("model.memory.mem_len=9"), split, tgt_len=n, batch_size=1)[0] for n in (5, 32)]
    assert without[0] != pytest.approx(without[1], rel=1e-6)


def test_the_model_is_left_as_it_was_and_measured_in_eval_mode():
    model = tiny_model("model.dropout=0.5").train()
    first = nll_of(model, split_of(50), tgt_len=7, batch_size=1)
    assert model.training
    assert nll_of(model, split_of(50), tgt_len=7, batch_size=1) == first
    assert nll_of(model.eval(), split_of(50), tgt_len=7, batch_size=1) == first and not model.training


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
    assert one["nll"] == pytest.approx(nll_of(model, short, tgt_len=8, batch_size=1)[0] / 24)


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
        assert nll_of(model, split, **settings)[0] == pytest.approx(total, rel=1e-12)
        assert nll_of(model, plain, **settings)[0] != pytest.approx(total, rel=1e-4)


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
