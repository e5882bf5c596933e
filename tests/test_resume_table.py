"""What may change when a run goes on: every key of train.yaml has its line in the table, and does what the table says."""

import re
import shutil

import pytest
from conftest import ROOT, TINY, compose, in_process, mostly_slow, refused, state_of

from txl.config import load_yaml, plain
from txl.resuming import REFUSED, flat, why_refused
from txl.runs import FREE, key_of

# What is tried: another value for each key, and the words that refuse it, if it is refused by more than the table.
TRIED = {
    # free: the same command may change them, and `resume=` too; no figure depends on them
    "log_every": "1",
    "save_every": "5min",
    "max_minutes": "100",
    "requeue": "true",
    "cache_dir": "elsewhere",
    "tracker.mode": None,  # of another option of the group
    # with resume=RUN KEY=VALUE, which lists it
    "steps": "10",
    "tgt_len": "12",
    "accumulate": "2",
    "clip": "0.1",
    "precision": "bf16",
    "compile": None,  # a minute: test_compile
    "deterministic": "true",
    "on_nonfinite": "skip",
    "max_bad_updates": "3",
    "eval_every": "4",
    "keep_last": "3",
    "sharding": "full",
    "profile": "1",
    "eval.tgt_len": "8",
    "eval.mem_len": "8",
    "eval.batch_size": "2",
    "eval.max_segments": "3",
    "sample.temperature": "0.5",
    "optimizer.lr": "0.001",
    "optimizer.weight_decay": "0.1",
    "optimizer.betas": "[0.8,0.9]",
    "schedule.warmup": "3",
    "schedule": "constant",
    "average": "ema",
    "model.dropout": "0.2",
    "model.dropatt": "0.2",
    "loss": "half",
    "model.dropoute": "0.1",
    "model.dropouti": "0.1",
    "model.dropouto": "0.1",
    "model.wdrop": "0.1",
    "model.same_length": "true",
    "model.pre_norm": "true",
    "model.activation": "gelu",
    "model.activation_checkpointing": "true",
    "model.memory.mem_len": "8",
    "model/memory": "none",
    "model.position.clamp_len": "5",
    # refused
    "seed": "2",
    "batch_size": "4",
    "init_from": "other.pt",
    "optimizer": "sgd",
    "model.n_layer": "3",
    "model.n_head": "4",
    "model.d_model": "32",
    "model.d_head": "4",
    "model.d_inner": "16",
    "model.d_embed": "8",
    "model.n_token": "300",
    "model.untie_r": "true",
    "model/position": "rotary",
    "model.tie_weight": "false",
    "model.softmax.tie_projs": "true",
    "model.init_std": "0.1",
    "model.proj_init_std": "0.1",
}
HASHED = {"data.max_bytes": ("10000", "the text of data"), "data/vocab": ("characters", "another vocabulary")}


@pytest.mark.parametrize("key", mostly_slow((key for key, value in TRIED.items() if value is not None), fast=4))
def test_a_key_changes_on_resume_as_the_table_says(key, trained_run, tmp_path):
    path = shutil.copytree(trained_run, tmp_path / "copy")
    steps = [] if key == "steps" else ["steps=8"]
    outcome = in_process("train", f"resume={path}", f"{key}={TRIED[key]}", *steps)
    groups = {
        "optimizer": "optimizer",
        "average": "average",
        "model/memory": "model.memory",
        "model/position": "model.position",
    }
    dotted = f"{groups[key]}._target_" if key in groups else key
    if why_refused(dotted):
        line = refused(outcome, "resume")
        assert f"{dotted} cannot change, " in line and TRIED[key] in line.lower()
        return
    assert outcome.status == 0, outcome.stderr
    listed = [line for line in outcome.stderr.splitlines() if line.startswith("resume: ")]
    assert any(line.startswith(f"resume: {dotted}") for line in listed) == (key_of(key) not in FREE)
    state = state_of(path)
    assert state["step"] == (10 if key == "steps" else 8)
    stored = flat(load_yaml(path / "config.yaml"))
    if "." not in TRIED[key] and key in stored and key != "cache_dir":
        assert str(stored[key]).lower() == TRIED[key]
    group = state["run"]["optimizer"]["param_groups"][0]
    if key == "optimizer.weight_decay":
        assert group["weight_decay"] == 0.1
    if key == "optimizer.betas":
        assert list(group["betas"]) == [0.8, 0.9]
    if key == "optimizer.lr":
        assert group["lr"] <= 0.001
    if key == "average":
        assert state["run"]["average"]["count"] == 2
    if key == "tgt_len":
        assert state["tokens"] == 6 * 32 + 2 * 24
    if key == "keep_last":
        assert (path / "last.2.pt").exists()


@pytest.mark.parametrize(
    ("key", "value", "dotted"),
    [("model.activation", "swiglu", "model.activation"), ("model/memory", "compressive", "model.memory._target_")],
)
def test_a_choice_with_weights_of_its_own_is_refused(key, value, dotted, trained_run, tmp_path):
    path = shutil.copytree(trained_run, tmp_path / "copy")
    line = refused(in_process("train", f"resume={path}", f"{key}={value}", "steps=8"), "resume")
    assert f"{dotted} cannot change, " in line and value in line.lower()


def test_what_torch_would_bring_back_in_silence_follows_the_command(trained_run, tmp_path):
    """`fused`, which was off; an option that no file of ours sets."""
    path = shutil.copytree(trained_run, tmp_path / "copy")
    assert state_of(path)["run"]["optimizer"]["param_groups"][0]["fused"] is None
    outcome = in_process("train", f"resume={path}", "+optimizer.fused=true", "steps=8")
    assert outcome.status == 0 and "resume: optimizer.fused: null, now true" in outcome.stderr
    assert state_of(path)["run"]["optimizer"]["param_groups"][0]["fused"] is True


@pytest.mark.parametrize("key", HASHED)
def test_a_text_or_vocabulary_of_other_content_is_refused(key, trained_run, tmp_path):
    path = shutil.copytree(trained_run, tmp_path / "copy")
    value, words = HASHED[key]
    assert words in refused(in_process("train", f"resume={path}", f"{key}={value}", "steps=8"), "resume")


def test_every_key_is_in_the_table():
    """Those of the data are held by the content of text and vocabulary; tracker and `resume` itself decide no figure."""
    known = {key.replace("/", ".") for key in (*TRIED, *REFUSED, *FREE)}
    for key in flat(plain(compose())):
        if key.endswith(("_partial_", "_target_")) or key.startswith(("data.", "sample.")) or key == "_target_":
            continue
        assert any(key == one or key.startswith(one + ".") or one.startswith(key + ".") for one in known), key


def test_the_readme_has_the_table():
    readme = (ROOT / "README.md").read_text()
    for key in REFUSED:
        name = key.split(".")[-1] if key.startswith("model.") and "_target_" not in key and key.count(".") == 1 else key
        assert re.search(rf"`[^`]*\b{re.escape(name)}\b[^`]*`", readme), key


def test_another_machine_or_number_of_threads_is_told(trained_run, tmp_path):
    from txl import archive

    path = shutil.copytree(trained_run, tmp_path / "copy")
    raw = state_of(path)
    raw["environment"] |= {"threads": 64, "torch": "2.11.0"}
    archive.write(path / "last.pt", raw)
    outcome = in_process("train", f"resume={path}", "steps=8")
    assert outcome.status == 0
    assert "resume: threads: 64, now 1: the figures go on to rounding, not bit for bit" in outcome.stderr
    assert "resume: torch: 2.11.0, now " in outcome.stderr


def test_the_same_command_with_a_free_key_goes_on_with_the_same_run():
    assert in_process("train", "name=a", *TINY, "max_minutes=1e-9").status == 75
    outcome = in_process("train", "name=a", *TINY, "log_every=1", "max_minutes=50")
    assert outcome.status == 0 and "step 1/6" not in outcome.stderr and "step 3/6" in outcome.stderr
