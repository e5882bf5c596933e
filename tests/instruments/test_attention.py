"""measure=attention: the weights of the heads, by loops over queries and keys, and what is said of them."""

import json
import math
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TINY, compose, in_process, refused, text_data, tiny_model

from txl import config as hydra_config
from txl.instruments.attention import Attention
from txl.instruments.looking import described, look, rows_of_memory
from txl.instruments.subject import Subject
from txl.instruments.taking import take
from txl.signals import Stopped

KNOBS = dict(text=None, start=0, length=1024, layers=None)
POSITIONS = ["relative", "shaw", "absolute", "absolute_per_layer", "rotary", "alibi"]
COMPRESSIVE = [
    "model/memory=compressive",
    "model.memory.mem_len=6",
    "model.memory.compressed_len=4",
    "model.memory.rate=2",
]


def memory_after(model, tokens, length=8, **others):
    """What is carried after segments of so many tokens."""
    mems = None
    for segment in tokens.split(length, dim=1):
        _, mems = model(segment, mems, **others)
    return mems


def slow_weights(layer, segment, memory, same_length=None):
    """Terms and weights of the relative scheme (Dai et al. 2019, section 3.3), a query and a key at a time."""
    attention, position = layer.attention, layer.attention.position
    n_head, d_head, d_model = position.n_head, attention.q_net.weight.shape[0] // position.n_head, segment.shape[1]
    context = torch.cat([memory, segment])
    n_memory, n_key = len(memory), len(context)
    u, v = position.r_w_bias, position.r_r_bias
    terms = {name: torch.full((n_head, len(segment), n_key), math.nan).double() for name in "abcd"}
    weights = torch.zeros(n_head, len(segment), n_key).double()
    w_q, w_r = (net.weight.unflatten(0, (n_head, d_head)) for net in (attention.q_net, position.r_net))
    w_k = attention.kv_net.weight.unflatten(0, (2, n_head, d_head))[0]
    for h in range(n_head):
        for i in range(len(segment)):
            q = w_q[h] @ segment[i]
            first = 0 if same_length is None else max(0, n_memory + i - same_length + 1)
            for j in range(first, n_memory + i + 1):
                k, x = w_k[h] @ context[j], n_memory + i - j
                angles = [x * 10000.0 ** (-2 * c / d_model) for c in range(d_model // 2)]
                sines = torch.tensor([*map(math.sin, angles), *map(math.cos, angles)]).double()
                r = w_r[h] @ sines
                for name, value in {"a": q @ k, "b": q @ r, "c": u[h] @ k, "d": v[h] @ r}.items():
                    terms[name][h, i, j] = value / math.sqrt(d_head)
            logits = sum(terms.values())[h, i]
            seen = ~logits.isnan()
            weights[h, i, seen] = logits[seen].softmax(dim=0)
    return terms, weights


@pytest.mark.parametrize("same_length", [False, True])
def test_weights_and_terms_by_a_loop_over_queries_and_keys(same_length):
    """Over memory and segment, in every layer; and they are what the attention is made from."""
    overrides = ["model.same_length=true"] if same_length else []
    model = tiny_model("model.memory.mem_len=5", *overrides)
    tokens = torch.randint(50, (1, 14), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        mems = memory_after(model, tokens[:, :8])
        wanted, memories, inputs, _ = model.states(tokens[:, 8:], mems)
        looks = list(look(model, tokens[:, 8:], mems))
        torch.testing.assert_close(looks[-1].hidden, wanted)
        for layer, memory, hidden, one in zip(model.layers, memories, inputs, looks, strict=True):
            rows = torch.cat([memory, hidden], dim=1)
            terms, weights = slow_weights(layer, hidden[0], memory[0], same_length=5 if same_length else None)
            torch.testing.assert_close(one.weights[:, 0], weights)
            hidden_pairs = ~one.keep[0]
            for name, values in terms.items():
                shown = one.terms[name][:, 0].masked_fill(hidden_pairs, torch.nan)
                torch.testing.assert_close(shown, values, equal_nan=True)
            _, value = layer.attention.keys_values(rows)
            made = (one.weights @ value).permute(1, 2, 0, 3).flatten(2)
            update = layer.attention.o_net(made)
            window = dict(reach=model.reach)
            r = layer.attention.position.project(layer.attention.position.encode(rows.shape[1], hidden))
            keys_values = layer.attention.keys_values(rows)
            torch.testing.assert_close(update, layer.attention(hidden, keys_values, r, **window))


@pytest.mark.parametrize("memory", ["segment", "none", "compressive"])
@pytest.mark.parametrize("position", POSITIONS)
def test_every_scheme_with_every_memory_reproduces_the_models_states(position, memory):
    more = {"segment": [], "none": ["model/memory=none"], "compressive": COMPRESSIVE}[memory]
    rows = ["model.position.max_klen=20"] if position in ("shaw", "absolute_per_layer") else []
    model = tiny_model(f"model/position={position}", *rows, *more)
    tokens = torch.randint(50, (1, 40), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        mems = memory_after(model, tokens[:, :32])
        wanted, memories, inputs, _ = model.states(tokens[:, 32:], mems)
        looks = list(look(model, tokens[:, 32:], mems))
        torch.testing.assert_close(looks[-1].hidden, wanted)
    for layer, kept, hidden, one in zip(model.layers, memories, inputs, looks, strict=True):
        with torch.no_grad():  # what the weights make of the values is what the layer does
            place = layer.attention.position
            rows = torch.cat([place.at_layer(kept, hidden.shape[1]), place.at_layer(hidden, 0)], dim=1)
            _, value = layer.attention.keys_values(rows)
            update = layer.attention.o_net((one.weights @ value).permute(1, 2, 0, 3).flatten(2))
            after = layer.attention_norm(place.at_layer(hidden, 0) + update)
            torch.testing.assert_close(layer.feedforward_norm(after + layer.feedforward(after)), one.hidden)
        assert set(one.terms) == {"relative": set("abcd"), "shaw": set("abcd"), "alibi": set("ad")}.get(position, {"a"})
        found = described(one, rows_of_memory(model, one))
        assert ("compressed" in found["share"]) == (memory == "compressive")
        torch.testing.assert_close(torch.tensor([*found["share"].values()]).sum(dim=0), torch.ones(2))
        if memory == "none":
            assert found["share"]["memory"] == [0.0, 0.0]


def test_the_figures_of_a_layer_by_a_loop():
    """Mass by distance, shares, entropy, and the size of the terms; compressed rows come first, and count as one place."""
    model = tiny_model(*COMPRESSIVE)
    tokens = torch.randint(50, (1, 37), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        one = next(look(model, tokens[:, 32:], memory_after(model, tokens[:, :32])))
    parts = rows_of_memory(model, one)
    assert parts == {"compressed": slice(0, 4), "memory": slice(4, 10), "segment": slice(10, 15)}
    found, weights, n_query = described(one, parts), one.weights[:, 0], 5
    for h in range(2):
        mass, shares, entropy = [0.0] * 15, dict.fromkeys(parts, 0.0), 0.0
        for i in range(n_query):
            for j in range(10 + i + 1):
                w = float(weights[h, i, j]) / n_query
                mass[10 + i - j] += w
                shares["compressed" if j < 4 else "memory" if j < 10 else "segment"] += w
                entropy -= w * math.log(float(weights[h, i, j]))
        assert found["mass_by_distance"][h] == pytest.approx(mass)
        assert {name: values[h] for name, values in found["share"].items()} == pytest.approx(shares)
        assert found["entropy"][h] == pytest.approx(entropy)
        for name in "abcd":
            rows = [one.terms[name][h, 0, i, : 10 + i + 1] for i in range(n_query)]
            size = float(torch.cat(rows).abs().mean())
            variance = sum(float(row.var(correction=0)) for row in rows) / n_query
            assert found["terms"][name]["mean_absolute"][h] == pytest.approx(size)
            assert found["terms"][name]["variance"][h] == pytest.approx(variance)


def test_a_token_looks_at_its_own_document_only():
    model = tiny_model("model.memory.mem_len=8")
    tokens = torch.randint(50, (1, 24), generator=torch.Generator().manual_seed(5))
    starts = torch.zeros(1, 24, dtype=torch.bool)
    starts[0, [5, 13, 19]] = True
    with torch.no_grad():
        mems = None
        for part in (slice(0, 8), slice(8, 16)):
            _, mems = model(tokens[:, part], mems, starts=starts[:, part])
        wanted, *_ = model.states(tokens[:, 16:], mems, starts=starts[:, 16:])
        looks = list(look(model, tokens[:, 16:], mems, starts[:, 16:]))
    torch.testing.assert_close(looks[-1].hidden, wanted)
    for i in range(8):  # key j is token 8 + j
        seen = looks[0].keep[0, i].nonzero()[:, 0] + 8
        assert seen.tolist() == list(range(13 if i < 3 else 19, 16 + i + 1))
        assert (looks[0].weights[:, 0, i] > 0).sum(dim=1).tolist() == [len(seen)] * 2


@pytest.fixture
def run(trained_run, tmp_path):
    """A copy of the run, to be written to."""
    return Path(shutil.copytree(trained_run, tmp_path / "run"))


def measured(run, *overrides):
    outcome = in_process("evaluate", f"checkpoint={run}", "measure=attention", "out=o.json", *overrides)
    assert outcome.status == 0, outcome.stderr
    (line,) = outcome.stdout.decode().splitlines()
    return json.loads(line), json.loads(Path("o.json").read_text()), dict(np.load("o.npz"))


def subject_of(run, *overrides):
    return Subject.of(hydra_config.plain(compose(f"checkpoint={run}", *overrides, config_name="evaluate")))


def test_the_command_writes_figures_maps_and_a_picture(run):
    outcome = in_process("evaluate", f"checkpoint={run}", "measure=attention")
    assert outcome.status == 0, outcome.stderr
    stem = run / "evaluate" / "test-default_measure-attention"
    (line,) = map(json.loads, outcome.stdout.decode().splitlines())
    found, arrays = json.loads(stem.with_suffix(".json").read_text()), np.load(stem.with_suffix(".npz"))
    assert stem.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert found["complete"] and found["keys"] == {"memory": 16, "segment": 16} and found["tokens_read"] == 1000
    assert [layer["layer"] for layer in found["layers"]] == [0, 1] and line["file"] == stem.name + ".npz"
    assert line["share_of_memory"] == [pytest.approx(np.mean(layer["share"]["memory"])) for layer in found["layers"]]
    subject = subject_of(run)
    model, tokens = subject.model(), torch.from_numpy(np.asarray(subject.split.tokens).astype(np.int64))[None]
    with torch.no_grad():
        mems = None
        for first, stop in zip([0, *range(8, 984, 16)], range(8, 1000, 16), strict=True):  # 1000 = 8 + 62 * 16
            _, mems = model(tokens[:, first:stop], mems)
        looks = list(look(model, tokens[:, 984:], mems))
    assert found["text"] == [chr(token) for token in tokens[0, 984:].tolist()]
    assert set(arrays) == {"layers", "weights", "term_a", "term_b", "term_c", "term_d"}
    for index, one in enumerate(looks):
        np.testing.assert_allclose(arrays["weights"][index], one.weights[:, 0], atol=1e-3)
        expected = one.terms["b"][:, 0].masked_fill(~one.keep[0], torch.nan)
        np.testing.assert_allclose(arrays["term_b"][index], expected, atol=1e-3)
        assert found["layers"][index]["entropy"] == described(one, rows_of_memory(model, one))["entropy"]


def test_where_it_looks_is_the_users_choice(run):
    tokens = subject_of(run).split.tokens.tolist()
    _, found, arrays = measured(run, "measure.start=100", "measure.length=40", "measure.layers=[1]")
    assert found["text"] == [chr(token) for token in tokens[124:140]] and found["tokens_read"] == 40
    assert arrays["layers"].tolist() == [1] and arrays["weights"].shape == (1, 2, 16, 32)
    assert [layer["layer"] for layer in found["layers"]] == [1]
    _, found, _ = measured(run, "measure.length=20", "tgt_len=5", "mem_len=null")
    assert found["text"] == [chr(token) for token in tokens[15:20]] and found["keys"] == {"memory": 0, "segment": 5}
    _, found, arrays = measured(run, "measure.length=1")
    assert arrays["weights"].tolist() == [[[[1.0]], [[1.0]]]] * 2
    _, found, _ = measured(run, "measure.text='hé, {x} = 1'")
    assert "".join(found["text"]) == "h\\xc3\\xa9, {x} = 1" and found["tokens_read"] == 12


def test_what_is_read_before_fills_the_memory(run):
    """The same 16 tokens after others: another share, and a memory that is not yet full has fewer keys."""
    few = measured(run, "measure.start=92", "measure.length=24")[1]
    many = measured(run, "measure.start=50", "measure.length=66")[1]
    assert few["text"] == many["text"]
    assert (few["keys"]["memory"], many["keys"]["memory"]) == (8, 16)
    assert few["layers"][0]["share"] != many["layers"][0]["share"]


def test_interrupted_it_keeps_the_layers_that_were_looked_at(run):
    subject, whole = subject_of(run), measured(run, "measure.length=64")[1]
    for n_yield, n_layer in ((2, 0), (4, 1)):  # three segments, then the layers
        answers = iter([*[None] * (n_yield - 1), signal.SIGINT, signal.SIGINT])
        with pytest.raises(Stopped, match="interrupted") as stopped:
            take(Attention(**{**KNOBS, "length": 64}), subject, Path("i.json"), received=lambda: next(answers))  # noqa: B023
        assert stopped.value.status == 130
        found, arrays = json.loads(Path("i.json").read_text()), np.load("i.npz")
        assert not found["complete"] and found["layers"] == whole["layers"][:n_layer]
        assert len(arrays["layers"]) == n_layer and ("weights" in arrays) == (n_layer > 0)
        assert Path("i.png").exists()


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("measure.text=''", "measure.text"),
        ("measure.start=-1", "measure.start"),
        ("measure.start=1000", "measure.start"),
        ("measure.length=0", "measure.length"),
        ("measure.layers=[2]", "measure.layers"),
        ("measure.layers=[-1]", "measure.layers"),
        ("measure.layers=[]", "measure.layers"),
        ("measure.layers=[1,0]", "measure.layers"),
        ("measure.layers=all", "measure.layers"),
        ("+measure.lenght=3", "measure.lenght"),
        ("out=o.npz", "out"),
    ],
)
def test_a_bad_value_is_refused(override, key, run):
    refused(in_process("evaluate", f"checkpoint={run}", "measure=attention", override), key)
    assert not list(run.glob("evaluate/*"))


def test_a_text_that_the_vocabulary_does_not_know_is_refused(tmp_path):
    data = text_data(train=b"one two \n" * 300, valid=b"two one \n" * 20, test=b"one \n" * 40)
    words = [override for override in TINY if "data." not in override]
    outcome = in_process("train", "name=words", *data, "data/vocab=words", "data.vocab.unknown=null", *words)
    assert outcome.status == 0, outcome.stderr
    (run,) = (tmp_path / "outputs" / "words").iterdir()
    line = refused(
        in_process("evaluate", f"checkpoint={run}", "measure=attention", "measure.text='one three'"), "measure.text"
    )
    assert "three" in line
    assert measured(run, "measure.text='one two'")[1]["text"] == ["one ", "two "]
