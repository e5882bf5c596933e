import json
import math
import os
import pickle
from pathlib import Path

import pytest
import torch
from conftest import TINY_MODEL, compose, tiny_model

from txl import archive, checkpoint
from txl.config import plain
from txl.runtime import write_whole
from txl.settings import TRAINED


def model_config(*overrides):
    return {**plain(compose(*TINY_MODEL, *overrides).model), "n_token": 50}


def test_a_checkpoint_is_read_without_hydra_to_the_same_model(tokens, monkeypatch):
    import hydra.utils

    monkeypatch.setattr(hydra.utils, "instantiate", lambda *_, **__: pytest.fail("instantiate saw a checkpoint"))
    torch.manual_seed(0)
    model = checkpoint.construct(model_config()).eval()
    config = {**plain(compose()), "model": model_config()}
    content = {
        "config": json.dumps(config),
        "vocab": json.dumps({"kind": "bytes"}),
        "texts": {},
        "step": 1,
        "tokens": 2,
    }
    checkpoint.save(Path("a.pt"), {**content, "model": dict(model.state_dict())})
    raw = torch.load("a.pt", weights_only=True)
    assert all(isinstance(value, (str, dict, int)) for value in raw.values())
    again = checkpoint.load_model(checkpoint.load(Path("a.pt")))
    assert torch.equal(again(tokens)[0], model(tokens)[0]) and not again.training


@pytest.mark.parametrize("length", [0, 1, 100, 0.5, -1])
def test_a_truncated_checkpoint_is_refused(length):
    checkpoint.save(Path("a.pt"), {"config": "{}", "vocab": "{}", "model": {"x": torch.zeros(5000)}})
    whole = Path("a.pt").read_bytes()
    cut = len(whole) + length if length < 0 else int(length * len(whole)) if isinstance(length, float) else length
    Path("a.pt").write_bytes(whole[:cut])
    with pytest.raises(ValueError, match=r"checkpoint: a\.pt is damaged or no checkpoint"):
        checkpoint.load(Path("a.pt"))


def test_a_file_that_is_not_ours_is_refused():
    for content in (torch.zeros(3), {"model": {}}, {"format": "txl-0"}, [1]):
        archive.write(Path("b.pt"), content)
        with pytest.raises(ValueError, match=r"checkpoint: b\.pt is no checkpoint of this project"):
            checkpoint.load(Path("b.pt"))
    Path("c.pt").write_text("hello")
    with pytest.raises(ValueError, match=r"checkpoint: c\.pt is damaged or no checkpoint"):
        checkpoint.load(Path("c.pt"))
    archive.write(Path("d.pt"), {"format": checkpoint.FORMAT, "config": "{", "vocab": "{}"})
    with pytest.raises(ValueError, match=r"checkpoint: d\.pt holds no readable configuration"):
        checkpoint.load(Path("d.pt"))


@pytest.mark.parametrize("part", checkpoint.PARTS)
def test_a_checkpoint_that_lacks_a_part_is_refused_by_name(part, trained_run):
    """Also one whose part is something else."""
    whole = torch.load(trained_run / "best.pt", weights_only=True)
    for value in (None, [], "1.5", 2.5):
        archive.write(Path("e.pt"), {**whole, part: value})
        with pytest.raises(ValueError, match=f"checkpoint: e.pt holds no readable ({part}|configuration)"):
            checkpoint.load(Path("e.pt"))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        *((path, value) for path in ("model", "data", "eval") for value in (None, [], "x", 3, {})),
        *(("tgt_len", value) for value in (None, "x", 0, True, [1])),
        *((f"eval.{name}", value) for name in ("batch_size", "tgt_len") for value in (0, "1", None)),
        *(("model.n_token", value) for value in (None, "x", 2.5)),
        *(
            (f"{path}._target_", value)
            for path in ("model", "model.memory", "data")
            for value in (None, ["a"], {"a": 1}, 3)
        ),
        *((path, value) for path in ("model.memory", "model.position") for value in (None, 3, [])),
        *(
            ("precision", 5),
            ("precision", "fp64"),
            ("cache_dir", 5),
            ("model.n_layer", "9" * 500),
            ("model.n_heads", 2),
        ),
        *(("data.fractions", "abc"), ("data.vocab", "os.system")),
    ],
)
def test_a_configuration_that_is_none_of_ours_is_refused_by_its_key(path, value, trained_run):
    content = torch.load(trained_run / "best.pt", weights_only=True)
    node = config = json.loads(content["config"])
    *place, name = path.split(".")
    for part in place:
        node = node[part]
    node[name] = value
    archive.write(Path("e.pt"), {**content, "config": json.dumps(config)})
    with pytest.raises(ValueError, match=rf"checkpoint: the configuration in e.pt is none of this version: .*{name}"):
        checkpoint.load(Path("e.pt"))


@pytest.mark.parametrize(
    "state",
    [{}, {"kind": "characters"}, {"kind": "characters", "characters": 5}, {"kind": "characters", "characters": ""}]
    + [{"kind": "characters", "characters": text} for text in ("aab", "ba", "a\ud800")],
)
def test_a_vocabulary_that_is_none_is_refused(state, trained_run):
    content = checkpoint.load(trained_run / "best.pt")
    with pytest.raises(ValueError):
        checkpoint.vocabulary({**content, "vocab": state})


class Bomb:
    def __reduce__(self):
        return os.system, ("touch exploded",)


@pytest.mark.parametrize("force", [False, True])
def test_a_crafted_pickle_runs_nothing(force, monkeypatch):
    if force:
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    torch.save({"format": checkpoint.FORMAT, "config": Bomb()}, "bomb.pt")
    Path("plain.pt").write_bytes(pickle.dumps(Bomb()))
    for name in ("bomb.pt", "plain.pt"):
        with pytest.raises(ValueError, match="damaged or no checkpoint"):
            checkpoint.load(Path(name))
    assert not Path("exploded").exists()


@pytest.mark.parametrize(
    "target", ["os.system", "torch.load", "numpy.load", "txl.model.os", "torch.nn.Linear", "txl.checkpoint.load"]
)
def test_a_configuration_makes_nothing_but_what_models_are_made_of(target):
    for config in ({"_target_": target}, {**model_config(), "memory": {"_target_": target, "_partial_": True}}):
        with pytest.raises(ValueError, match=f"names '{target}', which no model of ours is made of"):
            checkpoint.construct(config)


def test_a_configuration_of_another_version_is_refused_in_a_line():
    with pytest.raises(ValueError, match=r"cannot be made .*n_heads"):
        checkpoint.construct({**model_config(), "n_heads": 4})


def test_weights_are_compared_before_any_is_copied():
    model = tiny_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    good = {name: torch.zeros_like(tensor) for name, tensor in before.items()}
    first, *_, last = good
    wrong = [
        ({**good, "more": torch.zeros(1)}, "more is only in one of them"),
        ({name: tensor for name, tensor in good.items() if name != last}, "is only in one of them"),
        ({**good, last: torch.zeros(3)}, r"is \(3,\), torch.float32; the model has"),
        ({**good, last: good[last].float()}, "torch.float32; the model has"),
        ({**good, last: "text"}, "is str; the model has"),
        ({**good, first: good[first].to_sparse()}, "the model has"),
        ({**good, last: good[last] * math.nan}, f"{last} holds numbers that are not finite"),
        ({**good, first: good[first].to("meta")}, f"{first} holds numbers that are not finite"),
    ]
    for state, message in wrong:
        with pytest.raises(ValueError, match=message):
            checkpoint.load_weights(model, state)
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("name", ["n_token", "n_layer", "d_model", "d_inner"])
def test_a_size_beyond_the_weights_is_refused_before_it_is_made(name, trained_run):
    """A thousand million layers would take more than a lifetime to build."""
    content = checkpoint.load(trained_run / "best.pt")
    with pytest.raises(
        ValueError, match=f"checkpoint: its configuration says model.{name}=1000000000, its weights are fewer"
    ):
        checkpoint.load_model(content, {**content["config"]["model"], name: 10**9})
    with pytest.raises(ValueError, match="only in one of them"):
        checkpoint.load_model({**content, "model": {**content["model"], 5: "text", "x": None}})


def test_where_a_checkpoint_lies(tmp_path):
    (tmp_path / "run").mkdir()
    with pytest.raises(ValueError, match=r"checkpoint: run holds no best\.pt"):
        checkpoint.locate("run")
    with pytest.raises(ValueError, match="checkpoint: there is no file or run folder nowhere"):
        checkpoint.locate("nowhere")
    (tmp_path / "run" / "best.pt").touch()
    (tmp_path / "run" / "last.pt").touch()
    assert checkpoint.locate("run") == Path("run/best.pt")
    assert checkpoint.locate("run/last.pt") == Path("run/last.pt")


def test_reading_settings_change_the_configuration_they_should():
    config = model_config("model.position.clamp_len=7", "model.same_length=true")
    same = dict(mem_len=TRAINED, clamp_len=TRAINED, same_length=TRAINED)
    assert checkpoint.model_config(config, **same) == config
    none = checkpoint.construct(checkpoint.model_config(config, **{**same, "mem_len": None}))
    assert none.memory.mem_len is None
    more = checkpoint.construct(checkpoint.model_config(config, **{**same, "mem_len": 99}))
    assert more.memory.mem_len == 99 and more.reach == 98
    bare = {**config, "memory": {"_target_": "txl.layers.memory.NoMemory", "mem_len": 9}}
    assert checkpoint.construct(checkpoint.model_config(bare, **{**same, "mem_len": 5})).memory.mem_len == 5
    back = checkpoint.model_config(
        checkpoint.model_config(config, **{**same, "mem_len": None}), **{**same, "mem_len": 5}
    )
    assert checkpoint.construct(back).memory.mem_len == 5
    free = checkpoint.construct(checkpoint.model_config(config, **{**same, "clamp_len": None, "same_length": None}))
    assert free.layers[0].attention.position.clamp_len is None and free.reach is None


def test_a_twin_shares_its_parameters(tokens):
    config = model_config()
    model = checkpoint.construct(config).eval()
    twin = checkpoint.twin(model, checkpoint.model_config(config, mem_len=None, clamp_len=TRAINED, same_length=TRAINED))
    with torch.no_grad():
        model.layers[0].attention.position.r_w_bias.add_(1)
    assert torch.equal(twin(tokens)[0], model(tokens)[0]) and twin(tokens)[1] == []


def test_a_failed_write_leaves_the_old_file_and_nothing_beside_it():
    Path("file").write_bytes(b"old")

    def fail(file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_whole(Path("file"), fail)
    assert Path("file").read_bytes() == b"old" and os.listdir() == ["file"]
    write_whole(Path("file"), lambda file: file.write(b"new"))
    assert Path("file").read_bytes() == b"new" and os.listdir() == ["file"]


def test_a_full_disk_is_named_with_the_free_space(monkeypatch):
    """In our words, also where torch tells it in words about positions; nothing is left beside."""
    monkeypatch.setattr(archive, "PAUSE", 0)

    def full(*_):
        raise RuntimeError("[enforce fail at inline_container.cc] . unexpected pos 64 vs 0")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match=r"name: a\.pt cannot be written: it takes about 12 bytes, [\d,]+ are free there"):
        checkpoint.save(Path("a.pt"), {"x": torch.zeros(3)})
    assert os.listdir() == []
