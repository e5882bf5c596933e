"""measure=hidden: the states of each layer, against a whole text read in one pass with hooks."""

import json
import os
import shutil
import signal
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TINY_MODEL, finished, in_process, refused, text_data, tiny_model
from loud import loud, measured, subject_of
from safetensors import safe_open

from txl import archive, checkpoint
from txl.instruments.hidden import Hidden, Means
from txl.instruments.taking import take
from txl.reading import Segments
from txl.signals import Stopped

KNOBS = dict(text=None, max_tokens=100, layers="all", format="safetensors", dtype="float32")


@pytest.fixture(autouse=True)
def drawn_in_one_test(request, monkeypatch):
    """A picture takes longer than all else."""
    if "file_holds" not in request.node.name:
        monkeypatch.setattr(Hidden, "draw", lambda *_: None)


def hooked(model, tokens, mems=None):
    """What enters the first layer and what leaves each, by hooks, in one pass; and the memory after it."""
    states = []
    hooks = [model.layers[0].register_forward_pre_hook(lambda _, given: states.append(given[0]))]
    hooks += [layer.register_forward_hook(lambda _, given, made: states.append(made)) for layer in model.layers]
    with torch.no_grad():
        _, mems = model(tokens, mems)
    for hook in hooks:
        hook.remove()
    return [state[0] for state in states], mems


def slow_states(path, tokens, tgt_len=16):
    """In float64, segment by segment."""
    model, mems, parts = checkpoint.load_model(checkpoint.load(Path(path))).double(), None, []
    for segment in tokens.split(tgt_len):
        states, mems = hooked(model, segment[None], mems)
        parts.append(torch.stack(states))
    return torch.cat(parts, dim=1)


def arrays_of(path):
    """What a file holds, as tensors, and what it says of itself."""
    if Path(path).suffix == ".npz":
        with np.load(path) as file:
            arrays = {name: torch.from_numpy(file[name]) for name in file.files if name != "measured"}
            return arrays, json.loads(str(file["measured"]))
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, json.loads(file.metadata()["measured"])


def asked(run, *overrides):
    outcome = in_process("evaluate", f"checkpoint={run}", "measure=hidden", "out=o.json", *overrides)
    assert outcome.status == 0, outcome.stderr
    return json.loads(outcome.stdout), json.loads(Path("o.json").read_text())


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.memory.mem_len=64"],
        ["model.memory.mem_len=64", "model.pre_norm=true"],
        ["model.memory.mem_len=64", "model/position=alibi"],
        ["model.memory.mem_len=64", "model/position=rotary", "model.same_length=true"],
    ],
)
def test_with_memory_enough_the_states_are_those_of_the_text_read_whole(overrides):
    model, tokens = tiny_model(*overrides), torch.randint(50, (1, 37), generator=torch.Generator().manual_seed(1))
    whole, _ = hooked(model, tokens)
    reader = Segments(model, tgt_len=5)
    with torch.no_grad():
        parts = [reader.states(segment) for segment in tokens.split(5, dim=1)]
    assert len(parts[0]) == 3
    for n, expected in enumerate(whole):
        found = torch.cat([states[n][0] for states in parts])
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("kind", ["safetensors", "npz"])
def test_the_file_holds_the_states_and_what_they_are_of(kind, trained_run):
    loud(trained_run, "l.pt")
    line, found = asked("l.pt", f"measure.format={kind}", "measure.max_tokens=100")
    arrays, about = arrays_of(f"o.{kind}")
    split = subject_of("checkpoint=l.pt").split
    tokens = torch.from_numpy(np.asarray(split.tokens[:100]).astype(np.int64))
    expected = slow_states("l.pt", tokens)
    assert arrays.keys() == {"tokens", "text", "offsets", "layer.0", "layer.1", "layer.2"}
    assert torch.equal(arrays["tokens"], tokens) and bytes(arrays["text"].tolist()) == bytes(tokens.tolist())
    assert arrays["offsets"].tolist() == list(range(101))
    for n in range(3):
        assert arrays[f"layer.{n}"].shape == (100, 16) and arrays[f"layer.{n}"].dtype == torch.float32
        torch.testing.assert_close(arrays[f"layer.{n}"].double(), expected[n], rtol=1e-4, atol=1e-4)
    assert found["norm"] == pytest.approx(expected.norm(dim=-1).mean(dim=-1).tolist(), rel=1e-4)
    cosine = torch.nn.functional.cosine_similarity(expected[1:], expected[:-1], dim=-1)
    assert found["cosine"] == pytest.approx(cosine.mean(dim=-1).tolist(), rel=1e-4)
    assert found["along"]["position"] == list(range(0, 100, 16))
    for n in range(2):
        along = [float(part.mean()) for part in cosine[n].split(16)]
        assert found["along"]["cosine"][n] == pytest.approx(along, rel=1e-4)
    assert line["norm"] == found["norm"] and line["tokens"] == found["tokens"] == 100 and found["complete"]
    settings = {name: found[name] for name in ("split", "step", "tgt_len", "mem_len", "layers", "file", "complete")}
    assert about.items() >= settings.items() and "run" in about and found["batch_size"] == 1
    assert Path("o.png").read_bytes().startswith(b"\x89PNG")
    assert {*os.listdir()} == {"l.pt", "o.json", "o.png", f"o.{kind}"}
    assert Path(f"o.{kind}").stat().st_mode == Path("o.json").stat().st_mode


def test_layers_types_and_settings_can_be_chosen(trained_run):
    loud(trained_run, "l.pt")
    asked("l.pt", "measure.max_tokens=50")
    whole, _ = arrays_of("o.safetensors")
    for kind in ("float16", "bfloat16"):
        line, _ = asked("l.pt", "measure.max_tokens=50", "measure.layers=[0,2]", f"measure.dtype={kind}")
        arrays, about = arrays_of("o.safetensors")
        assert line["layers"] == about["layers"] == [0, 2] and "layer.1" not in arrays
        assert torch.equal(arrays["layer.2"], whole["layer.2"].to(getattr(torch, kind)))
    asked("l.pt", "measure.max_tokens=50", "mem_len=null", "tgt_len=7")
    tokens = arrays_of("o.safetensors")[0]["tokens"]
    alone, _ = hooked(checkpoint.load_model(checkpoint.load(Path("l.pt"))), tokens[None, 42:49])
    torch.testing.assert_close(arrays_of("o.safetensors")[0]["layer.2"][42:49], alone[2])
    (n_token,) = {len(values) for name, values in whole.items() if name not in ("text", "offsets")}
    assert n_token == 50
    asked("l.pt", "measure.max_tokens=null", "measure.layers=[1]")
    assert len(arrays_of("o.safetensors")[0]["layer.1"]) == 1000


def test_a_text_of_ones_own(trained_run):
    """On the command line, or in a file that is read as a split."""
    text = "naïve text, longer than a segment"
    asked(trained_run, f"measure.text='{text}'")
    typed, about = arrays_of("o.safetensors")
    assert bytes(typed["text"].tolist()).decode() == text == about["text"]
    Path("t.txt").write_text(text)
    asked(trained_run, "data.test=t.txt")
    from_file, _ = arrays_of("o.safetensors")
    for name, values in typed.items():
        assert torch.equal(values, from_file[name]), name


def test_tokens_of_several_bytes_and_documents():
    """The offsets part the text; memory ends where the run's did."""
    text = b"the cat\n\non the mat\n\nthe end\n" * 4
    given = text_data(train=text * 40, valid=text, test=text)
    more = ["data/vocab=words", "data.document_separator='\n\n'", "data.reset_at_document=true", *TINY_MODEL]
    run = finished("run", *given, *more)
    asked(run)
    arrays, _ = arrays_of("o.safetensors")
    vocab, words = subject_of(f"checkpoint={run}").vocab, bytes(arrays["text"].tolist())
    places = arrays["offsets"].tolist()
    pieces = [words[start:stop] for start, stop in pairwise(places)]
    assert pieces == [vocab.decode([token]) for token in arrays["tokens"].tolist()]
    starts = subject_of(f"checkpoint={run}").split.starts.tolist()
    asked(run, f"measure.text='{text.decode().split(chr(10) * 2)[1]}'")
    alone = arrays_of("o.safetensors")[0]
    n = min(len(alone["tokens"]), starts[2] - starts[1])
    torch.testing.assert_close(arrays["layer.2"][starts[1] : starts[1] + n], alone["layer.2"][:n], rtol=1e-4, atol=1e-5)


def test_interrupted_it_keeps_what_was_read(trained_run):
    loud(trained_run, "l.pt")
    asked("l.pt", "measure.max_tokens=100")
    whole, _ = arrays_of("o.safetensors")
    for kind in ("safetensors", "npz"):
        answers = iter([None, None, signal.SIGINT, signal.SIGINT])
        with pytest.raises(Stopped, match="48% done"):
            instrument = Hidden(**{**KNOBS, "format": kind})
            take(instrument, subject_of("checkpoint=l.pt"), Path("i.json"), received=lambda: next(answers))  # noqa: B023
        arrays, about = arrays_of(f"i.{kind}")
        found = json.loads(Path("i.json").read_text())
        assert found["tokens"] == about["tokens"] == 48 and not found["complete"] and not about["complete"]
        for n in range(3):
            assert torch.equal(arrays[f"layer.{n}"], whole[f"layer.{n}"][:48])
        assert not [name for name in os.listdir() if name.startswith(".")]


def test_the_states_lie_on_disk_and_not_in_memory(trained_run, monkeypatch):
    """Each layer's in a file of its own, for which there must be room before anything is read."""
    subject, made = subject_of(f"checkpoint={trained_run}"), []
    monkeypatch.setattr(
        torch, "from_file", lambda *given, whole=torch.from_file, **more: made.append(more) or whole(*given, **more)
    )
    found = measured(Hidden(**{**KNOBS, "max_tokens": None}), subject)
    assert [more["size"] for more in made] == [found["tokens"] * 16] * 3 and all(more["shared"] for more in made)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    line = refused(in_process("evaluate", f"checkpoint={trained_run}", "measure=hidden", "out=f.json"), "out")
    assert "No space left" in line and not [name for name in os.listdir() if name.startswith((".", "f."))]


def test_stretches_of_a_long_text(monkeypatch):
    """No more means along the text than can be drawn, of whole segments each."""
    monkeypatch.setattr("txl.instruments.hidden.STRETCHES", 3)
    means, states = Means(2, 31, 4), torch.randn(2, 31, 5)
    for first in range(0, 31, 4):
        means.add(list(states[:, first : first + 4]), first)
    found = means.found()
    assert found["along"]["position"] == [0, 12, 24]
    expected = [states[0, part].norm(dim=-1).mean() for part in (slice(0, 12), slice(12, 24), slice(24, 31))]
    assert found["along"]["norm"][0] == pytest.approx([float(value) for value in expected], rel=1e-5)


def test_a_state_that_half_precision_cannot_hold_is_no_infinity(trained_run):
    content = torch.load(trained_run / "best.pt", weights_only=True)
    content["model"]["layers.1.feedforward_norm.weight"] *= 1e5
    archive.write(Path("big.pt"), content)
    line = refused(
        in_process("evaluate", "checkpoint=big.pt", "measure=hidden", "measure.dtype=float16"), "measure.dtype"
    )
    assert "layer 2" in line and "bfloat16" in line
    asked("big.pt", "measure.dtype=bfloat16")
    assert arrays_of("o.safetensors")[0]["layer.2"].isfinite().all()


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("measure.max_tokens=0", "measure.max_tokens"),
        ("measure.layers=[]", "measure.layers"),
        ("measure.layers=[2,1]", "measure.layers"),
        ("measure.layers=[3]", "measure.layers"),
        ("measure.layers=[-1]", "measure.layers"),
        ("measure.layers=some", "measure.layers"),
        ("measure.format=csv", "measure.format"),
        ("measure.dtype=int8", "measure.dtype"),
        ("measure.text=''", "measure.text"),
        ("+measure.layer=1", "measure.layer"),
        ("out=o.safetensors", "out"),
        ("processes=2", "processes"),
    ],
)
def test_a_bad_value_is_refused(override, key, trained_run, tmp_path):
    run = Path(shutil.copytree(trained_run, tmp_path / "run"))
    refused(in_process("evaluate", f"checkpoint={run}", "measure=hidden", override), key)
    assert not list(run.glob("evaluate/*"))


def test_npz_has_no_bfloat16(trained_run):
    arguments = [
        f"checkpoint={trained_run}",
        "measure=hidden",
        "measure.format=npz",
        "measure.dtype=bfloat16",
        "out=o.json",
    ]
    refused(in_process("evaluate", *arguments), "measure.dtype", "dtype")
    assert os.listdir() == []
