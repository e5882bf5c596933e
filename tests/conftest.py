"""What every test needs: one thread, a cache and a working directory of its own, and the entry points as functions."""

import importlib
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # threads that wait without spinning: the machine may be busy
os.environ["WANDB_MODE"] = "offline"
ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import pytest
import torch
from hydra.core.hydra_config import HydraConfig

from txl import config as hydra_config

torch.set_num_threads(1)

TINY_MODEL = ["model.n_layer=2", "model.n_head=2", "model.d_model=16", "model.d_head=8", "model.d_inner=32"]
TINY = [
    *TINY_MODEL,
    "model.memory.mem_len=16",
    "steps=6",
    "tgt_len=16",
    "batch_size=2",
    "log_every=2",
    "eval_every=3",
    "save_every=3",
    "sample.max_new_tokens=8",
    "data.max_bytes=20000",
]


class Outcome(NamedTuple):
    status: int
    stdout: bytes
    stderr: str


def in_process(entry: str, *arguments: str) -> Outcome:
    """Runs an entry point in this process as its command would run, and says how it ended."""
    module = importlib.import_module(entry)
    before = sys.argv, sys.stdout, sys.stderr
    sys.argv = [f"{entry}.py", *arguments]
    sys.stdout, sys.stderr = io.TextIOWrapper(io.BytesIO(), write_through=True), io.StringIO()
    status = 0
    try:
        hydra_config.launch(module.main, literals=entry == "generate")
    except SystemExit as stop:
        status = stop.code
    finally:
        stdout, stderr = sys.stdout.buffer.getvalue(), sys.stderr.getvalue()
        sys.argv, sys.stdout, sys.stderr = before
        HydraConfig.instance().cfg = None
    return Outcome(status, stdout, stderr)


def command(entry: str, *arguments: str, cwd: Path, stdin: bytes = b"", **environment: str) -> Outcome:
    """Runs an entry point as a real command."""
    done = subprocess.run(
        [sys.executable, str(ROOT / f"{entry}.py"), *arguments],
        cwd=cwd,
        input=stdin,
        capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        timeout=600,
    )
    return Outcome(done.returncode, done.stdout, done.stderr.decode(errors="replace"))


def refused(outcome, *keys):
    """Status 1, nothing on standard output, one line on standard error that names the key."""
    assert outcome.status == 1, outcome
    assert outcome.stdout == b""
    (line,) = outcome.stderr.splitlines()
    assert any(line.startswith(f"{key}:") or f"; {key}:" in line for key in keys), line
    return line


def text_data(**files):
    for name, text in files.items():
        if text is not None:
            Path(f"{name}.txt").write_bytes(text)
    return ["data=text", *(f"data.{name}={name}.txt" for name in files)]


def characters_run(tmp_path, name="characters"):
    data = text_data(train=b"abc \n" * 300, valid=b"abc \n" * 20, test=b"cba \n" * 20)
    arguments = [override for override in TINY if "data." not in override]
    outcome = in_process("train", f"name={name}", *data, "data/vocab=characters", *arguments)
    assert outcome.status == 0, outcome.stderr
    return next((tmp_path / "outputs" / name).iterdir())


def compose(*overrides: str, config_name: str = "train"):
    """A configuration, as the command line would make it."""
    return hydra_config.compose(config_name, list(overrides))


def tiny_model(*overrides: str, n_token: int = 50):
    """A small model in float64 and eval mode, with weights large enough to make every term count."""
    memory = [] if "model/memory=none" in overrides else ["model.memory.mem_len=16"]
    cfg = compose(*TINY_MODEL, *memory, *overrides)
    torch.manual_seed(0)
    model = hydra_config.build(cfg.model, n_token=n_token).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@pytest.fixture(autouse=True)
def own_folders(tmp_path, tmp_path_factory, monkeypatch):
    """Each test works in a folder of its own; token files are shared by the whole session, but by nothing else."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory) -> Path:
    """The folder of a small finished run, not to be changed."""
    folder, before = tmp_path_factory.mktemp("trained"), os.getcwd()
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.getbasetemp() / "cache")
    os.chdir(folder)
    try:
        outcome = in_process("train", "name=tiny", *TINY)
    finally:
        os.chdir(before)
    assert outcome.status == 0, outcome.stderr
    return next((folder / "outputs" / "tiny").iterdir())


@pytest.fixture
def tokens():
    return torch.randint(50, (2, 24), generator=torch.Generator().manual_seed(1))
