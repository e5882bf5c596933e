"""Every published row is one command: its file composes, builds the exact model, trains and is measured."""

import json
import re
from pathlib import Path

import pytest
import torch
from conftest import ROOT, TINY, compose, in_process, published_folder

from txl.config import build, check

EXPERIMENTS = sorted(path.stem for path in (ROOT / "conf" / "experiment").glob("*.yaml"))
EVALUATIONS = sorted(path.stem for path in (ROOT / "conf" / "evaluation").glob("*.yaml"))
PUBLISHED = [name for name in EXPERIMENTS if not name.startswith("python_")]
COUNTS = {  # n_token, parameters
    "enwik8_12l": (204, 41_055_436),
    "enwik8_24l": (204, 277_231_820),
    "text8_12l": (27, 40_964_635),
    "text8_24l": (27, 277_050_395),
    "wt103_base": (267_735, 151_107_538),
    "wt103_large": (267_735, 285_170_506),
    "lm1b_base": (793_471, 357_812_082),
    "lm1b_large": (793_471, 841_295_982),
    "wt103_base_nvidia": (267_735, 191_950_298),
    "wt103_large_nvidia": (267_735, 285_167_482),
    "wt2": (33_278, 37_711_678),
    "ptb_word": (10_000, 17_250_448),
    "ptb_char": (50, 10_264_626),
}


def kind(name):
    """Which corpus an experiment reads."""
    return re.search(r"override /data: (\w+)", (ROOT / "conf" / "experiment" / f"{name}.yaml").read_text())[1]


@pytest.mark.parametrize("name", COUNTS)
def test_the_published_models_have_exactly_their_parameters(name):
    n_token, count = COUNTS[name]
    cfg = compose(f"experiment={name}")
    with torch.device("meta"):
        model = build(cfg.model, n_token=n_token)
    assert sum(parameter.numel() for parameter in model.parameters()) == count
    assert f"{count:,}" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("name", PUBLISHED)
def test_each_file_says_what_it_is(name):
    """The paper's row and its figure, or that no recipe was published; what differs; how the figure is measured."""
    text = (ROOT / "conf" / "experiment" / f"{name}.yaml").read_text()
    comment = " ".join(line.removeprefix("# ") for line in text.splitlines() if line.startswith("# "))
    if name in EVALUATIONS:
        assert f"evaluation={name}" in comment and ("Differences" in comment or "no figure" in comment)
        assert re.search(r"paper|NVIDIA", comment)
    else:
        assert "No recipe was ever published" in comment or "declined to publish" in comment
        assert "Nobody has trained this file yet" in comment


@pytest.mark.parametrize(
    ("name", "reading"),
    [
        ("enwik8_12l", (80, 2100, 820)),
        ("enwik8_24l", (128, 3800, 1000)),
        ("text8_24l", (128, 3800, 1000)),
        ("wt103_base", (64, 640, 400)),
        ("wt103_large", (128, 1600, 1000)),
        ("lm1b_base", (32, 128, None)),
        ("lm1b_large", (32, 128, None)),
    ],
)
def test_the_published_settings_of_evaluation(name, reading):
    cfg = compose("checkpoint=RUN", f"evaluation={name}", config_name="evaluate")
    check(cfg)
    assert (cfg.tgt_len, cfg.mem_len, cfg.clamp_len) == reading and cfg.same_length is True and cfg.split == "test"
    assert compose("checkpoint=RUN", f"evaluation={name}", "mem_len=7", config_name="evaluate").mem_len == 7


def cut(name, folder):
    """Overrides that make an experiment small enough to run here: the data's start, and a model to match."""
    sizes = [override for override in TINY if not override.startswith(("steps", "data", "model.memory"))]
    adaptive = "cutoffs" in compose(f"experiment={name}").model.softmax
    clusters = ["model.softmax.cutoffs=[4,8,12]", "model.d_embed=64"] if adaptive else []
    data = [f"data.path={published_folder(kind(name), folder)}", "data.verify=false"]
    return [*sizes, *clusters, *data, "steps=2", "eval.max_segments=2", "model.memory.mem_len=8", "eval.mem_len=12"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_experiment_trains_and_is_measured(name, tmp_path):
    outcome = in_process("train", f"experiment={name}", *cut(name, tmp_path / "data"))
    assert outcome.status == 0, outcome.stderr
    (run,) = Path("outputs", name).iterdir()
    result = json.loads((run / "result.json").read_text())
    assert result["test"]["mem_len"] == 12 and result["test"]["nll"] > 0
    if name in EVALUATIONS:
        outcome = in_process("evaluate", f"checkpoint={run}", f"evaluation={name}", "tgt_len=16")
        assert outcome.status == 0, outcome.stderr
        cfg = compose("checkpoint=RUN", f"evaluation={name}", config_name="evaluate")
        figure = json.loads(outcome.stdout)
        assert (figure["mem_len"], figure["clamp_len"], figure["same_length"]) == (cfg.mem_len, cfg.clamp_len, True)


def test_every_evaluation_belongs_to_an_experiment():
    assert set(EVALUATIONS) <= set(EXPERIMENTS)


@pytest.mark.parametrize("choice", ["model/memory=none", "model/softmax=full"])
def test_an_ablation_of_an_experiment_is_an_override(choice, tmp_path):
    """Sizes that belong to the option which was replaced do no harm; without memory there is none in the figures either."""
    name = "wt103_large"
    overrides = [one for one in cut(name, tmp_path / "data") if choice.partition("=")[0].replace("/", ".") not in one]
    outcome = in_process("train", f"experiment={name}", *overrides, choice)
    assert outcome.status == 0, outcome.stderr
    (run,) = Path("outputs", name).iterdir()
    assert json.loads((run / "result.json").read_text())["test"]["mem_len"] == (None if "none" in choice else 12)


def test_a_cutoff_beyond_the_vocabulary_is_refused_by_name(tmp_path):
    overrides = [one for one in cut("wt103_base", tmp_path / "data") if "cutoffs" not in one]
    outcome = in_process("train", "experiment=wt103_base", *overrides)
    assert outcome.status == 1
    (line,) = outcome.stderr.splitlines()
    assert line.startswith("model.softmax.cutoffs: ") and "20000" in line
    assert not Path("outputs").exists()


def test_lamb_without_its_package_is_told_in_a_line(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    with pytest.raises(ValueError, match=r"optimizer\._target_: pytorch_optimizer.Lamb cannot be had .*installed\?"):
        check(compose("optimizer=lamb"))
