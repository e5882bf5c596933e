"""What every test needs: one thread, a cache and a working directory of its own, and the entry points as functions."""

import contextlib
import importlib
import io
import os
import random
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # threads that wait without spinning: the machine may be busy
os.environ["WANDB_MODE"] = "offline"
os.environ["HF_HUB_OFFLINE"] = "1"  # read by `datasets` when it is imported, as are the folders below
ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import pytest
import torch
from hydra._internal.hydra import Hydra
from hydra.core.hydra_config import HydraConfig
from torch.profiler import ProfilerActivity, profile

from txl import config as hydra_config
from txl import tracking

torch.set_num_threads(1)

BLANK_PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108000000003a7e9b55"
    "0000000a49444154789c63f80f0001010100b138f6140000000049454e44ae426082"
)
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


@contextlib.contextmanager
def composed_once() -> Iterator[None]:
    """Hydra composes a whole configuration a first time only to read `hydra.mode`, which nothing here sets: half of a test's time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Hydra, "get_mode", lambda *_, **__: None)
        yield


def mostly_slow(cases: Iterable[Any], *, fast: int) -> list[Any]:
    """Parameters of a test of which one in `fast` is among the fast tests; `make test-slow` has the others."""
    cases = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case, marks=[pytest.mark.slow] * bool(number % fast)) for number, case in enumerate(cases)]


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
        with composed_once():
            hydra_config.launch(module.main, literals=entry == "generate")
    except SystemExit as stop:
        status = stop.code
    finally:
        stdout, stderr = sys.stdout.buffer.getvalue(), sys.stderr.getvalue()
        sys.argv, sys.stdout, sys.stderr = before
        HydraConfig.instance().cfg = None
    return Outcome(status, stdout, stderr)


def command(
    entry: str, *arguments: str, cwd: Path, stdin: bytes = b"", seconds: float = 600, **environment: str
) -> Outcome:
    """Runs an entry point as a real command."""
    done = subprocess.run(
        [sys.executable, str(ROOT / f"{entry}.py"), *arguments],
        cwd=cwd,
        input=stdin,
        capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        timeout=seconds,
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


def published_folder(kind: str, folder: Path) -> Path:
    """Small files in the layout of a published corpus, to be read with data.path=FOLDER data.verify=false.

    `kind`: enwik8, text8, wikitext103, wikitext2, ptb or lm1b. 300 different words, 1,200 lines of training text.
    """
    draw = random.Random(kind)
    words = [f"{'abcdefghij'[n % 10]}{'klmno'[n // 10 % 5]}{'pqrstu'[n // 50]}" for n in range(300)]

    def lines(n: int, form: str) -> bytes:
        picked = (" ".join(words[int(300 * draw.random() ** 2)] for _ in range(draw.randint(3, 12))) for _ in range(n))
        return "".join(form.replace("{}", line) for line in picked).encode()

    def write(name: str, text: bytes) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text)

    sizes = {"train": 1200, "valid": 100, "test": 100}
    if kind == "enwik8":
        write("enwik8", lines(700, "  <text>{}, naïve [[日本]]</text>\n"))
    elif kind == "text8":
        write("text8", lines(1400, " {}"))
    elif kind in ("wikitext103", "wikitext2"):
        for split, n in sizes.items():
            write(
                f"wiki.{split}.tokens", lines(n // 4, " \n = {} = \n \n {} @-@ <unk> . \n") + lines(n // 4, " {} . \n")
            )
    elif kind == "ptb":
        for split, n in sizes.items():
            write(f"ptb.{split}.txt", lines(n, " {} <unk> N \n"))
    elif kind == "lm1b":
        for shard in range(1, 100):
            write(f"training-monolingual.tokenized.shuffled/news.en-{shard:05}-of-00100", lines(12, "The {} .\n"))
        write("heldout-monolingual.tokenized.shuffled/news.en.heldout-00000-of-00050", lines(100, "The {} ?\n"))
        write("1b_word_vocab.txt", "\n".join(["<S>", "</S>", "<UNK>", "The", ".", *words]).encode())
    else:
        raise ValueError(kind)
    return folder


def finished(name: str = "run", *overrides: str) -> Path:
    """The folder of a tiny run that is through."""
    outcome = in_process("train", f"name={name}", *TINY, *overrides)
    assert outcome.status == 0, outcome.stderr
    return next(Path("outputs", name).iterdir())


def small_state(step: int = 1) -> dict:
    """What a run would save, as far as a file and its writer look at it."""
    return {"model": {"weight": torch.full((100, 10), float(step))}, "run": {}, "step": step}


def state_of(path: Path) -> dict:
    """What the last checkpoint of a run holds, as torch alone reads it."""
    return torch.load(path / "last.pt", weights_only=True)


def run_files(path):
    """What a run's folder holds, and the folders in it."""
    files = (file for file in path.rglob("*") if file.name != ".lock")
    return {str(file.relative_to(path)): file.read_bytes() if file.is_file() else None for file in files}


def compose(*overrides: str, config_name: str = "train"):
    """A configuration, as the command line would make it."""
    return hydra_config.compose(config_name, list(overrides))


def held_at_most(call):
    """The bytes that a call has allocated at a time, at the most."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        call()
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = [0]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held.append(held[-1] + event.nbytes())
    return max(held)


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
    # curves take half the time of a tiny run; the session's runs, and commands, have theirs drawn
    monkeypatch.setattr(tracking, "draw_curves", lambda path, rows: path.write_bytes(BLANK_PNG))


@pytest.fixture(scope="session", autouse=True)
def hub_folders(tmp_path_factory):
    """`datasets` keeps what it makes in the session's folder, wherever it is imported first."""
    for name in ("HF_HOME", "HF_DATASETS_CACHE"):
        os.environ[name] = str(tmp_path_factory.getbasetemp() / "hub" / name.lower())


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory) -> Iterator[Path]:
    """The folder of a small finished run, not to be changed."""
    folder, before = tmp_path_factory.mktemp("trained"), os.getcwd()
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.getbasetemp() / "cache")
    os.chdir(folder)
    try:
        outcome = in_process("train", "name=tiny", *TINY)
    finally:
        os.chdir(before)
    assert outcome.status == 0, outcome.stderr
    run = next((folder / "outputs" / "tiny").iterdir())
    files = run_files(run)
    yield run
    assert run_files(run) == files, "a test has changed the run that all share"


@pytest.fixture
def tokens():
    return torch.randint(50, (2, 24), generator=torch.Generator().manual_seed(1))
