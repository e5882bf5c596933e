"""Every published row is one command: its file composes, builds the exact model, trains and is measured."""

import json
import re
from pathlib import Path

import pytest
import torch
from conftest import ROOT, TINY, compose, in_process, published_folder

from txl import config as hydra_config
from txl.config import build, check
from txl.resuming import flat

EXPERIMENTS = sorted(path.stem for path in (ROOT / "conf" / "experiment").glob("*.yaml"))
EVALUATIONS = sorted(path.stem for path in (ROOT / "conf" / "evaluation").glob("*.yaml"))
PUBLISHED = [name for name in EXPERIMENTS if not name.startswith(("python_", "encoding_", "ablation_"))]
ABLATIONS = {  # of the paper's tables 6 and 7: recurrence, encoding, loss, and the figures that each file tells
    "wt103_recurrence_relative_full": (True, "relative", "full", "27.02", "26.77", "500"),
    "wt103_recurrence_shaw_full": (True, "shaw", "full", "27.94", "256"),
    "wt103_recurrence_relative_half": (True, "relative", "half", "28.69", "28.33", "460"),
    "wt103_no_recurrence_relative_full": (False, "relative", "full", "29.59", "29.02", "260"),
    "wt103_no_recurrence_relative_half": (False, "relative", "half", "30.10", "120"),
    "wt103_no_recurrence_shaw_full": (False, "shaw", "full", "29.75", "120"),
    "wt103_no_recurrence_shaw_half": (False, "shaw", "half", "30.50", "120"),
    "wt103_no_recurrence_absolute_half": (False, "absolute", "half", "30.97", "120"),
    "wt103_no_recurrence_absolute_per_layer_half": (False, "absolute_per_layer", "half", "31.16", "120"),
    "wt103_151m_recurrence_relative_full": (True, "relative", "full", "23.43", "23.09", "640", "23.16", "23.35"),
    "lm1b_recurrence_relative": (True, "relative", "full", "25.2"),
    "lm1b_recurrence_shaw": (True, "shaw", "full", "25.7"),
    "lm1b_no_recurrence_relative": (False, "relative", "full", "27.1"),
}
ENCODINGS = [name for name in EXPERIMENTS if name.startswith("encoding_")]
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
    "ablation_wt103_recurrence_relative_full": (267_735, 128_007_688),
    "ablation_wt103_recurrence_shaw_full": (267_735, 127_585_678),
    "ablation_wt103_recurrence_relative_half": (267_735, 128_007_688),
    "ablation_wt103_no_recurrence_relative_full": (267_735, 128_007_688),
    "ablation_wt103_no_recurrence_relative_half": (267_735, 128_007_688),
    "ablation_wt103_no_recurrence_shaw_full": (267_735, 127_209_358),
    "ablation_wt103_no_recurrence_shaw_half": (267_735, 127_209_358),
    "ablation_wt103_no_recurrence_absolute_half": (267_735, 126_830_168),
    "ablation_wt103_no_recurrence_absolute_per_layer_half": (267_735, 127_197_528),
    "ablation_wt103_151m_recurrence_relative_full": (267_735, 151_107_538),
    "ablation_lm1b_recurrence_relative": (793_471, 301_166_450),
    "ablation_lm1b_recurrence_shaw": (793_471, 301_204_722),
    "ablation_lm1b_no_recurrence_relative": (793_471, 301_166_450),
}


def kind(name):
    """Which corpus an experiment reads: the folder that `published_folder` makes."""
    data = compose(f"experiment={name}").data
    words = {"wikitext": f"wikitext{data.get('size')}", "penn_treebank": "ptb", "billion_words": "lm1b"}
    target = data._target_.rpartition(".")[2]
    return words.get(target, target)


def comment(name):
    """What an experiment's file says of itself."""
    text = (ROOT / "conf" / "experiment" / f"{name}.yaml").read_text()
    return " ".join(line.removeprefix("# ") for line in text.splitlines() if line.startswith("# "))


def parameters(experiment, n_token, *overrides):
    with torch.device("meta"):
        model = build(compose(f"experiment={experiment}", *overrides).model, n_token=n_token)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", COUNTS)
def test_the_published_models_have_exactly_their_parameters(name):
    n_token, count = COUNTS[name]
    assert parameters(name, n_token) == count
    assert f"{count:,}" in (comment(name) if name.startswith("ablation_") else (ROOT / "README.md").read_text())


def test_the_rows_of_a_table_have_as_many_parameters():
    """To within 2 percent of the first, where the table says one model; so have the encodings compared on a CPU."""
    counts = {name: count for name, (_, count) in COUNTS.items() if name.startswith("ablation_")}
    counts |= {name: parameters(name, 256) for name in ENCODINGS}
    blocks = {
        "ablation_wt103_recurrence_relative_full": [name for name in counts if "wt103" in name and "151m" not in name],
        "ablation_lm1b_recurrence_relative": [name for name in counts if "lm1b" in name],
        "encoding_relative": ENCODINGS,
    }
    assert [len(names) for names in blocks.values()] == [9, 3, 6]
    for first, names in blocks.items():
        assert all(abs(counts[name] / counts[first] - 1) < 0.02 for name in names), counts
    for name in ENCODINGS:
        assert f"{counts[name]:,}" in comment(name)


@pytest.mark.parametrize("row", ABLATIONS)
def test_each_row_of_the_ablations_is_the_papers(row):
    """Its memory, encoding and loss, and the length of training; its file tells the figures and how to measure."""
    recurrence, encoding, loss, *figures = ABLATIONS[row]
    cfg = compose(f"experiment=ablation_{row}")
    check(cfg)
    assert cfg.name == f"ablation_{row}" and cfg.loss == loss
    for group, option in {"memory": "segment" if recurrence else "none", "position": encoding}.items():
        assert cfg.model[group]._target_ == compose(f"model/{group}={option}").model[group]._target_
    tgt_len = 32 if "lm1b" in row else 150 if "151m" in row else 128
    assert cfg.tgt_len == cfg.eval.tgt_len == tgt_len and cfg.model.memory.mem_len == cfg.eval.mem_len == tgt_len
    if "max_klen" in cfg.model.position:
        assert cfg.model.position.max_klen == tgt_len * (2 if recurrence else 1)
    words = comment(f"ablation_{row}")
    assert all(figure in words for figure in figures) and "evaluate.py checkpoint=RUN" in words
    assert f"Table {7 if 'lm1b' in row else 6}" in words and "Nobody has trained this file yet" in words


def test_every_row_has_a_file():
    assert [name for name in EXPERIMENTS if name.startswith("ablation_")] == sorted(
        f"ablation_{row}" for row in ABLATIONS
    )


def test_the_encodings_differ_in_nothing_else():
    first = flat(hydra_config.plain(compose("experiment=encoding_relative")))
    for name in ENCODINGS:
        other = flat(hydra_config.plain(compose(f"experiment={name}")))
        differing = {key for key in first.keys() | other.keys() if first.get(key) != other.get(key)} - {"name"}
        seam = "model.memory." if name == "encoding_no_memory" else "model.position."
        assert all(key == "model.d_inner" or key.startswith(seam) for key in differing), differing
        assert other["name"] == name and (differing or name == "encoding_relative")
    assert compose("experiment=encoding_shaw").model.position.max_klen == 64 + 128


@pytest.mark.parametrize("name", ["ablation_wt103_no_recurrence_shaw_half", "encoding_shaw"])
def test_an_override_wins_over_an_experiment_and_what_it_is_built_on(name):
    given = ["steps=7", "loss=full", "model.d_inner=9", "model.position.max_klen=5", "model/memory=none", "data=enwik8"]
    cfg = compose(f"experiment={name}", *given)
    check(cfg)
    assert (cfg.steps, cfg.loss, cfg.model.d_inner, cfg.model.position.max_klen) == (7, "full", 9, 5)
    assert cfg.model.memory._target_.endswith("NoMemory") and cfg.data._target_.endswith("enwik8")


@pytest.mark.parametrize("name", PUBLISHED)
def test_each_file_says_what_it_is(name):
    """The paper's row and its figure, or that no recipe was published; what differs; how the figure is measured."""
    words = comment(name)
    if name in EVALUATIONS:
        assert f"evaluation={name}" in words and ("Differences" in words or "no figure" in words)
        assert re.search(r"paper|NVIDIA", words)
    else:
        assert "No recipe was ever published" in words or "declined to publish" in words
        assert "Nobody has trained this file yet" in words


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


@pytest.mark.parametrize(
    "name", [*PUBLISHED, *(f"ablation_{row}" for row in list(ABLATIONS)[::4])]
)  # all: tests/test_sweep.py
@pytest.mark.slow
def test_every_published_experiment_trains_and_is_measured(name, tmp_path):
    outcome = in_process("train", f"experiment={name}", *cut(name, tmp_path / "data"))
    assert outcome.status == 0, outcome.stderr
    (run,) = Path("outputs", name).iterdir()
    result = json.loads((run / "result.json").read_text())
    assert result["test"]["mem_len"] == (None if "no_recurrence" in name else 12) and result["test"]["nll"] > 0
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
