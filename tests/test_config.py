import json
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, TINY, compose, in_process, mostly_slow
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

import train
from txl import config as hydra_config
from txl.config import build, check

GROUPS = {
    group: sorted(path.stem for path in (ROOT / "conf" / group).glob("*.yaml"))
    for group in [
        "data",
        "data/vocab",
        "model",
        "model/memory",
        "model/position",
        "model/softmax",
        "optimizer",
        "schedule",
        "average",
        "tracker",
    ]
    + ["experiment", "debug"]
}
CHOICES = [f"{group}={option}" for group, options in GROUPS.items() for option in options if option != "hub"]


@pytest.mark.parametrize("choice", mostly_slow(["seed=1", *CHOICES], fast=3))
def test_every_config_composes_passes_check_and_builds_on_meta(choice):
    cfg = compose(choice)
    check(cfg)
    with torch.device("meta"):
        model = build(cfg.model, n_token=800_000)
    assert sum(parameter.numel() for parameter in model.parameters()) > 0
    optimizer = build(cfg.optimizer)(model.parameters())
    assert optimizer.param_groups[0]["lr"] == cfg.optimizer.lr
    assert build(cfg.schedule)(1, lr=cfg.optimizer.lr, steps=cfg.steps, valid_nll=[]) > 0
    if "python" in cfg.data._target_:
        assert build(cfg.data, cache_dir=None).text("train").size
    build(cfg.average)
    build(cfg.tracker)
    build(cfg.sample)


def test_a_data_set_of_the_hub_needs_its_name():
    check(compose("data=hub", "data.id=a/b"))
    with pytest.raises(ValueError, match=r"data\.id: a value must be given"):
        check(compose("data=hub"))


@pytest.mark.parametrize("config_name", ["evaluate", "generate"])
def test_the_other_entry_points_compose_and_pass_check(config_name):
    check(compose("checkpoint=somewhere", config_name=config_name))


@pytest.mark.parametrize("choice", ["experiment=python_docs_no_memory", "experiment=python_source"])
def test_every_experiment_on_pythons_own_text_runs_two_updates(choice):
    cut = [override for override in TINY if not override.startswith(("steps", "model.memory"))]
    outcome = in_process("train", choice, *cut, "steps=2", "eval.max_segments=2")
    assert outcome.status == 0, outcome.stderr
    assert b"bits per byte" in outcome.stdout


def test_importing_txl_or_its_config_loads_no_torch():
    import subprocess

    program = "import sys, txl, txl.config, txl.settings; assert 'torch' not in sys.modules; txl.TransformerXL"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=120)


def changed(**changes):
    cfg = OmegaConf.to_container(compose())
    for key, value in changes.items():
        node, *path, last = cfg, *key.split("__")
        for name in path:
            node = node[name]
        node[last] = value
    return cfg


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model__position__clamp_length": 4},
            "model.position.clamp_length: RelativePosition takes no 'clamp_length'; did you mean 'clamp_len'?",
        ),
        ({"stesp": 4}, "stesp: Train takes no 'stesp'; did you mean 'steps'?"),
        ({"data__fraction": 4}, "data.fraction: python_docs takes no 'fraction'; did you mean 'fractions'?"),
        ({"optimizer__lrate": 4}, "optimizer.lrate: Adam takes no 'lrate'"),
        ({"schedule__warm_up": 4}, "schedule.warm_up: cosine takes no 'warm_up'; did you mean 'warmup'?"),
        ({"model__n_layer": "two"}, "model.n_layer: must be a whole number, got 'two'"),
        ({"model__n_layer": 2.5}, "model.n_layer: must be a whole number, got 2.5"),
        ({"model__n_layer": True}, "model.n_layer: must be a whole number, got True"),
        ({"model__same_length": 1}, "model.same_length: must be true or false, got 1"),
        ({"model__dropout": "much"}, "model.dropout: must be a number, got 'much'"),
        ({"model__memory__mem_len": None}, "model.memory.mem_len: must be a whole number, got None"),
        ({"precision": "fp8"}, "precision: must be 'fp32' or 'bf16' or 'fp16', got 'fp8'"),
        ({"eval__mem_len": "all"}, "eval.mem_len: must be a whole number or "),
        ({"data__fractions": 0.9}, "data.fractions: must be a list, each a number, got 0.9"),
        ({"data__fractions": ["a", 1, 2]}, "data.fractions: must be a list, each a number, got ['a', 1, 2]"),
        ({"optimizer__betas": [0.9]}, "optimizer.betas: must be a list of 2, each "),
        ({"tracker__mode": 3}, "tracker.mode: NoTracker takes no 'mode'"),
        ({"name": "???"}, "name: a value must be given"),
        (
            {"model__memory___target_": "txl.layers.memory.Lots"},
            "model.memory._target_: txl.layers.memory.Lots cannot be had",
        ),
        ({"model__memory": 3}, "model.memory: must be a group of keys, chosen as group=option, got 3"),
        ({"model__position": None}, "model.position: must be a group of keys, chosen as group=option, got None"),
        (
            {"optimizer": {"_target_": "torch.optim.Adam", "_partial_": True}},
            "optimizer.lr: must be a number above 0, got missing",
        ),
        ({"data": {}}, "data._target_: missing; choose data=option"),
        ({"schedule___target_": "foo.bar"}, "schedule._target_: foo.bar cannot be had (ModuleNotFoundError)"),
        ({"seed": 2**31}, "seed: must be below 2^31"),
        ({"name": ".sweep"}, "name: must be a plain folder name, got '.sweep'"),
        ({"steps": 0}, "steps: must be at least 1, got 0"),
        ({"clip": 0.0}, "clip: must be above 0, or null for no clipping; got 0.0"),
        ({"eval__batch_size": 0}, "eval.batch_size: must be at least 1, got 0"),
        ({"sample__top_p": 2.0}, "sample.top_p: must lie in (0, 1]"),
        ({"name": "a/b"}, "name: must be a plain folder name, got 'a/b'"),
    ],
)
def test_check_names_the_key(changes, message):
    with pytest.raises(ValueError) as error:
        check(changed(**changes))
    assert message in str(error.value)


def test_check_reports_everything_at_once():
    with pytest.raises(ValueError) as error:
        check(changed(stesp=1, model__d_modl=3, model__n_head="x"))
    for key in ("stesp", "model.d_modl", "model.n_head"):
        assert f"{key}: " in str(error.value)
    cfg = changed()
    del cfg["model"]["n_head"], cfg["seed"]
    with pytest.raises(ValueError, match=r"seed: missing; model\.n_head: missing"):
        check(cfg)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["model.memory.mem_len=0"],
            "model.memory.mem_len: must be at least 1 and below 2.31, got 0; for no memory choose model/memory",
        ),
        (["model.memory.mem_len=-5"], "model.memory.mem_len: must be at least 1 and below 2.31, got -5"),
        (["model.d_model=33"], "model.d_model: must be even"),
        (["model.n_layer=0"], "model.n_layer: must be at least 1 and below 2.31, got 0"),
        (["model.dropout=1.0"], r"model.dropout: must lie in \[0, 1\), got 1.0"),
        (["model.position.clamp_len=0"], "model.position.clamp_len: must be at least 1 and below 2.31, or null"),
        (["model.activation=swish"], "model.activation: must be one of relu, gelu, gelu_tanh, swiglu; got 'swish'"),
        (["model.d_embed=0"], "model.d_embed: must be at least 1 and below 2.31, got 0"),
    ],
)
def test_build_names_the_key_that_the_model_refuses(overrides, message):
    with pytest.raises(ValueError, match=message):
        build(compose(*overrides).model, n_token=50)


def test_build_makes_plain_containers():
    optimizer = build(compose().optimizer)([torch.zeros(1)])
    assert type(optimizer.param_groups[0]["betas"]) in (list, tuple)


LITERALS = [
    "a, b",
    "'",
    '"',
    "it's",
    "{x}",
    "[1,2]",
    "a=b",
    "42",
    "null",
    "true",
    "${x}",
    "${",
    " leading",
    "trailing ",
]
LITERALS += [
    "",
    "\\",
    "\\'",
    "a\\",
    "\\${x}",
    "\\\\${x}\\",
    "${a:${b}}",
    "#",
    "a\nb",
    "é𝔘",
    "!@$%^&*()",
    "???",
    "~",
    "\udcff",
]


def through_hydra(text):
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = hydra_compose(
            "generate", overrides=["checkpoint=c", *hydra_config.quoted([f"prompt={text}", f"stop={text}"])]
        )
    check(cfg)
    asked = hydra_config.plain(cfg)
    return asked["prompt"], asked["stop"]


@pytest.mark.parametrize("text", LITERALS)
def test_prompt_and_stop_are_taken_literally(text):
    assert through_hydra(text) == (text, text)


@settings(deadline=None)
@given(st.text("ab '\"\\${}[](),=:~!#?\n-0.é", max_size=12))
def test_any_prompt_is_taken_literally(text):
    assert through_hydra(text) == (text, text)


def test_only_prompt_and_stop_are_quoted():
    assert hydra_config.quoted(["seed=1", "-m", "prompt=1", "--cfg"]) == ["seed=1", "-m", "prompt='1'", "--cfg"]


def test_an_entry_point_that_python_calls_is_what_its_command_would_be():
    """The same folder; `resume=` knows the overrides it was begun with, where a bare `main(cfg)` has none to tell."""
    nll = hydra_config.call(train.main, ["name=called", *TINY])
    (run,) = Path("outputs/called").iterdir()
    assert json.loads((run / "overrides.json").read_text()) == ["name=called", *TINY]
    assert json.loads((run / "result.json").read_text())["valid"]["nll"] == nll
    told = in_process("train", "name=called", *TINY)  # finds it finished
    assert told.status == 0 and str(run) in told.stdout.decode() and "step" not in told.stderr
    hydra_config.call(train.main, [f"resume={run}", "steps=8"])
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 8
    assert hydra_config.task_overrides() is None
    with pytest.raises(ValueError, match="steps"):
        hydra_config.call(train.main, [f"resume={run}", "steps=1"])
    assert hydra_config.task_overrides() is None
