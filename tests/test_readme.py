"""README is held to its word: its commands run, its paths and keys exist."""

import io
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, TINY, compose, in_process
from interop import theirs
from test_experiments import cut

from txl import config as hydra_config
from txl.interop import __main__ as interop

README = (ROOT / "README.md").read_text()
COMMANDS = [
    line.split("   #")[0].strip()
    for block in re.findall(r"```(?:bash|console|sh)\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
    if line.strip() and not line.startswith("#")
]
# a launcher's processes take half a minute: tests/test_launchers.py has them
PROGRAMS = [
    command
    for command in COMMANDS
    if re.match(r"python (train|evaluate|generate)\.py", command) and "hydra/launcher" not in command
]


def test_the_readme_has_commands_and_each_is_of_a_known_kind():
    assert len(PROGRAMS) >= 15
    known = r"make (train|test|test-slow|lint|bench|notebooks)\b|python (train|evaluate|generate)\.py|git clone |cd |pip install |python -m txl.report outputs|wandb sweep conf/|python -m txl.interop |torchrun .* train\.py"
    for command in COMMANDS:
        assert re.match(known, command), command


@pytest.mark.parametrize("command", PROGRAMS)
@pytest.mark.slow
def test_readme_commands_run(command, trained_run, tmp_path, monkeypatch):
    """Each as it stands, on a small model: sizes are cut by overrides, RUN is a run's folder."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"To be\n/quit\n")))
    run = tmp_path / "RUN"
    shutil.copytree(trained_run, run)
    Path("more").mkdir()
    shutil.copytree(trained_run, tmp_path / "OTHER")
    for name in ("a.txt", "b.txt", "c.txt", "other.txt", "start.txt", "more/d.txt"):
        Path(name).write_bytes(b"to be or not to be,\n\nthat is the question\n" * 50)
    program, *arguments = shlex.split(command.replace("outputs/python_docs/default", "RUN"))[1:]
    entry = program.removesuffix(".py")
    if any(one.startswith("sweep=") for one in arguments):  # one run of it: tests/test_sweep.py has them all
        arguments += ["hydra.sweeper.params={experiment:encoding_alibi}"] if "sweep=lr_optuna" not in arguments else []
    for measure, cut_to in {"recl": "measure.longest=64", "sliding": "measure.tokens=5"}.items():
        arguments += [cut_to] if f"measure={measure}" in arguments else []
    if entry == "generate":
        arguments.append("max_new_tokens=5")
    if entry == "train" and not {"--help", "--cfg"} & set(arguments):
        given = {argument.lstrip("+").split("=")[0] for argument in arguments}
        no_memory = [] if any("no_memory" in one or "memory=none" in one for one in arguments) else TINY[5:6]
        published = [one.removeprefix("experiment=") for one in arguments if "=wt103" in one or "=enwik8" in one]
        if published:
            arguments = [one for one in arguments if "data.path" not in one] + cut(published[0], tmp_path / "FOLDER")
        elif "resume" not in given:
            small = [
                *TINY[:5],
                *no_memory,
                *(one for one in TINY[6:] if "max_bytes" not in one or "data=text" not in arguments),
            ]
            small = ["batch_size=8" if "accumulate" in given and one.startswith("batch_size") else one for one in small]
            arguments += [one for one in small if one.split("=")[0] not in given]
        cut_down = {"steps": 8, "hydra.sweeper.n_trials": 2}
        for place, one in enumerate(arguments):
            key, _, value = one.partition("=")
            if key in cut_down:
                arguments[place] = f"{key}={min(cut_down[key], int(value))}"
    outcome = in_process(entry, *arguments)
    assert outcome.status == 0, outcome.stderr


@pytest.mark.parametrize("command", [command for command in COMMANDS if "-m txl.interop" in command])
def test_readme_conversions_run(command, trained_run):
    """Each as it stands, on small models of the other codes."""
    shutil.copytree(trained_run, "RUN")
    theirs.authors_file(Path())
    theirs.save(theirs.nvidia_content()[0], Path("checkpoint_best.pt"))
    theirs.hugging_face_folder(Path("transfo-xl-wt103"))
    assert interop.main(shlex.split(command)[3:]) == 0


def test_readme_names_what_exists():
    for path in re.findall(r"`((?:txl|conf|tests|notebooks|benchmarks)/[\w/.]*)`", README):
        assert (ROOT / path).exists(), path
    for link in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / link).exists(), link


def test_readme_tables_list_the_keys_of_the_program():
    """Every key at the root of train.yaml is explained there."""
    for key in compose().keys() - {"_target_", "data", "model", "optimizer", "schedule", "tracker"}:
        assert f"`{key}`" in README or f"`{key}." in README, key
    assert hydra_config.CONF == ROOT / "conf"


def test_readme_python_runs(tokens, trained_run):
    import torch

    from txl.interop import to_original

    block, called = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    with torch.device("meta"):
        state_dict, flags = to_original(hydra_config.build(compose(*TINY[:5]).model, n_token=50))
    state_dict = {name: torch.zeros(tensor.shape) for name, tensor in state_dict.items()}
    names = {"tokens": tokens, "targets": tokens, "mems": None, "state_dict": state_dict, "flags": flags}
    exec(block, names)
    shutil.copytree(trained_run, "RUN")
    called = called.replace('"steps=300"', ", ".join(f'"{one}"' for one in TINY[1:]))
    called = re.sub(r"checkpoint=[\w./-]+", "checkpoint=RUN", called)
    exec(called, names)
    assert names["nll"] > 0 and names["figure"]["split"] == "valid"
    assert names["output"].shape == tokens.shape and names["model"].softmax.weight.shape == (50, 16)


def test_the_position_scheme_that_readme_adds_works(tmp_path):
    """The diff as it stands, on a copy: trained, then gone on with, its logits those of the equation."""
    (diff,) = re.findall(r"```diff\n(.*?)```", README, re.DOTALL)
    for part in ("txl", "conf", "train.py"):
        copied = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        copied(ROOT / part, tmp_path / part)
    subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=diff, text=True, check=True)
    check = """
import math, sys, torch
from txl.layers.position import KerplePosition
scheme = KerplePosition(n_head=2, d_head=4, d_model=8)
torch.nn.init.normal_(scheme.log_a), torch.nn.init.normal_(scheme.log_b)
q, k = torch.randn(2, 1, 3, 4), torch.randn(2, 1, 5, 4)
terms = scheme.terms(q, k, scheme.project(scheme.encode(5, q)))
for h, i, j in torch.cartesian_prod(*map(torch.arange, (2, 3, 5))).tolist():
    if j <= i + 2:
        a, b = scheme.log_a[h].exp(), scheme.log_b[h].exp()
        torch.testing.assert_close(terms["d"][h, 0, i, j], (-a * torch.log1p(b * (2 + i - j))).squeeze())
import train
sys.argv[1:] = ["model/position=kerple"] + sys.argv[1:]
from txl import config
config.launch(train.main)
"""
    for more in ([], ["steps=8"]):
        given = (
            [*TINY, "name=kerple", *more]
            if not more
            else [f"resume={next((tmp_path / 'outputs/kerple').iterdir())}", *more]
        )
        program = [sys.executable, "-c", check, *given]
        done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
