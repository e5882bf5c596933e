"""Faults, injected again and again: a run that was killed, stopped, cut or changed ends with the figures of one that was not.

make soak TRIALS=300                 300 kills, and the other parts in proportion
python tests/soak.py kills 1000      one part

Each trial is a process of its own, forked from this one, which has imported everything and computed nothing.
"""

import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

os.environ.update(OMP_WAIT_POLICY="PASSIVE", WANDB_MODE="offline", HF_HUB_OFFLINE="1")
ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch

torch.set_num_threads(1)

import train
from txl import archive, checkpoint, config, resuming, saver, training

BASE = [
    *("model.n_layer=2", "model.n_head=2", "model.d_model=16", "model.d_head=8", "model.d_inner=32"),
    *("++model.memory.mem_len=12", "model.dropout=0.1", "tgt_len=12", "batch_size=4", "steps=40", "log_every=1"),
    *("eval_every=8", "save_every=3", "sample.max_new_tokens=4", "data=text", "data.train=train.txt"),
    *("data.valid=valid.txt", "data.test=valid.txt", "schedule.warmup=5", "optimizer.lr=0.01"),
]
DOCUMENTS = ["data.document_separator=\\n", "data.reset_at_document=true", "data.shuffle_documents=true"]
VARIANTS = {
    "lanes": [],
    "documents": DOCUMENTS,
    "accumulated": ["accumulate=2", "model.pre_norm=true"],
    "no memory": ["model/memory=none", "schedule=plateau"],
    "bf16": ["precision=bf16", "model.same_length=true"],
    "fp16": ["precision=fp16", "optimizer=sgd"],
    "adaptive": ["data/vocab=words", "model/softmax=adaptive", "model.softmax.cutoffs=[9,20]", "accumulate=2"],
}


def make_texts(folder: Path) -> None:
    draw = random.Random(5)
    words = ["to", "be", "or", "not", *(f"w{number}" for number in range(40))]
    for name, lines in {"train": 160, "valid": 24}.items():
        text = "".join(" ".join(draw.choices(words, k=draw.randint(2, 9))) + "\n" for _ in range(lines))
        (folder / f"{name}.txt").write_text(text)


def start(folder: Path, overrides: list[str], before: Callable[[], None] = lambda: None) -> int:
    """Forks a process that runs `train.py` there; `before` is called in it first. Returns its id."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.chdir(folder)
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        log = os.open("log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.argv = ["train.py", *overrides]
        before()
        config.launch(train.main, stoppable=True)
        status = 0
    except SystemExit as stop:
        status = stop.code
    finally:
        os._exit(status)


def ended(pid: int, seconds: float = 120.0) -> int:
    """The status with which a process ends; minus the number of the signal that killed it."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError(f"it did not end in {seconds:.0f} s")


def run_of(folder: Path) -> Path:
    (path,) = (folder / "outputs" / "python_docs").iterdir()
    return path


def tensors(value, where: str = ""):
    if isinstance(value, torch.Tensor):
        yield where, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    for key, item in items:
        yield from tensors(item, f"{where}.{key}")


def figures(folder: Path) -> dict:
    """All that a finished run leaves which must not depend on what happened to it."""
    path = run_of(folder)
    last, best = checkpoint.load(path / "last.pt"), checkpoint.load(path / "best.pt")
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    result = json.loads((path / "result.json").read_text())

    def digest(content) -> str:
        parts = [f"{where}{tuple(one.shape)}".encode() + one.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
                 for where, one in tensors(content)]  # fmt: skip
        return hashlib.sha256(b"|".join(parts)).hexdigest()

    return {
        "rows": [{key: row[key] for key in row if key != "tokens_per_second"} for row in rows],
        "result": {key: result[key] for key in result if key != "seconds"},
        "sample": (path / "sample.txt").read_bytes(),
        "weights": digest(last["model"]),
        "state": digest(last["run"]),
        "lanes": last["run"]["lanes"],
        "best": (best["step"], digest(best["model"])),
    }


def spin() -> None:
    while True:
        pass


class Soak:
    """Folders for the trials, and what a run that nothing happened to leaves, of each variant."""

    def __init__(self, seed: int):
        self.draw, self._known, self.folder = random.Random(seed), {}, Path(tempfile.mkdtemp(prefix="soak-"))

    def new(self) -> Path:
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        make_texts(folder)
        return folder

    def expected(self, variant: str, *more: str) -> tuple[dict, float]:
        """The figures of an undisturbed run, and its seconds."""
        if (variant, *more) not in self._known:
            folder, began = self.new(), time.monotonic()
            assert ended(start(folder, [*BASE, *VARIANTS[variant], *more])) == 0, (folder / "log.txt").read_text()
            self._known[(variant, *more)] = figures(folder), time.monotonic() - began
            shutil.rmtree(folder)
        return self._known[(variant, *more)]

    def finish(self, folder: Path, variant: str, *more: str) -> None:
        """Starts the same command until it is through, and compares all figures."""
        for _ in range(3):
            status = ended(start(folder, [*BASE, *VARIANTS[variant], *more]))
            if status == 0:
                break
        log = (folder / "log.txt").read_text()
        assert status == 0 and "Traceback" not in log, log
        expected, found = self.expected(variant, *more)[0], figures(folder)
        for key in expected:
            assert found[key] == expected[key], f"{variant}: {key} differs in {folder}\n{log}"
        left = [file.name for file in run_of(folder).iterdir() if file.name.startswith(".") and file.name != ".lock"]
        assert not left and not (run_of(folder) / "last.next.pt").exists(), left
        shutil.rmtree(folder, ignore_errors=True)  # a part of it may be mounted

    # The parts: each does so many trials, and returns what it did in words

    def kills(self, trials: int) -> str:
        """SIGKILL at random moments of the start or of the updates, again and again, until a run comes through between two."""
        done = runs = 0
        steps: set[int] = set()
        while done < trials:
            variant = self.draw.choice(list(VARIANTS))
            seconds, folder = self.expected(variant)[1], self.new()
            while done < trials:
                before = self._logged(folder)
                pid = start(folder, [*BASE, *VARIANTS[variant]])
                if (
                    self.draw.random() < 0.75
                ):  # most of the time goes into the start: else few kills would meet an update
                    until = time.monotonic() + 60
                    while self._logged(folder) == before and time.monotonic() < until and not self._is_over(pid):
                        time.sleep(0.002)
                    time.sleep(self.draw.uniform(0, 0.3 * seconds))
                else:
                    time.sleep(self.draw.uniform(0, seconds))
                if self._is_over(pid):
                    break
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                done += 1
                steps.add(self._logged(folder)[1])
            self.finish(folder, variant)
            runs += 1
        return f"{done} kills in {runs} runs, at {len(steps)} different updates of 40, all figures equal"

    def _logged(self, folder: Path) -> tuple[int, int]:
        """How many lines a run has logged, and the update of the last one."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            lines = (run_of(folder) / "metrics.jsonl").read_text().splitlines()
            return len(lines), json.loads(lines[-1])["step"]
        return 0, 0

    def _is_over(self, pid: int) -> bool:
        """Whether the process has ended, which is then known to have ended well."""
        try:
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return False
        except ChildProcessError:  # asked before
            return True
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        return True

    def stops(self, trials: int) -> str:
        """SIGTERM, SIGUSR1, Ctrl-C at random moments, every third followed by SIGKILL a moment later."""
        statuses: dict[int, int] = {}
        for trial in range(trials):
            variant = self.draw.choice(list(VARIANTS))
            seconds, folder = self.expected(variant)[1], self.new()
            pid, number = start(folder, [*BASE, *VARIANTS[variant]]), (15, 10, 2)[trial % 3]
            time.sleep(self.draw.uniform(0.05, 0.9 * seconds))
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
                if trial % 3 == 2:
                    time.sleep(self.draw.uniform(0, 0.3))
                    os.kill(pid, signal.SIGKILL)
            status = ended(pid, 30)
            assert status in (0, 75, 130, -9), (status, (folder / "log.txt").read_text())
            statuses[status] = statuses.get(status, 0) + 1
            self.finish(folder, variant)
        return f"{trials} signals, statuses {statuses}, all figures equal"

    def steps(self, trials: int) -> str:
        """A stop after update k, for every k of a short run, in every variant: the first, the last, where a figure is due."""
        steps = list(range(1, 13)) if trials > 7 else [1, 4, 5, 12]
        cases = [(variant, step) for step in steps for variant in VARIANTS]
        if trials < len(cases):
            cases = [(list(VARIANTS)[(2 * step) % len(VARIANTS)], step) for step in steps]
        for variant, step in cases:
            folder, short = self.new(), ("steps=12", "eval_every=4")

            def stop_there(step=step) -> None:
                real = training.updates

                def stopping(run, **how):
                    for update in real(run, **how):
                        if update.step == step:
                            os.kill(os.getpid(), signal.SIGTERM)
                        yield update

                training.updates = stopping

            status = ended(start(folder, [*BASE, *VARIANTS[variant], *short], stop_there))
            assert status == 75, (folder / "log.txt").read_text()
            assert checkpoint.load(run_of(folder) / "last.pt")["step"] == step
            self.finish(folder, variant, *short)
        return f"{len(cases)} stops after a chosen update, all figures equal"

    def chain(self, trials: int) -> str:
        """A run stopped after every second update, five times and more."""
        for _ in range(trials):
            variant, folder, n = self.draw.choice(list(VARIANTS)), self.new(), 0

            def stop_after_two() -> None:
                real = training.updates

                def stopping(run, **how):
                    for count, update in enumerate(real(run, **how), 1):
                        if count == 2:
                            os.kill(os.getpid(), signal.SIGUSR1)
                        yield update

                training.updates = stopping

            while ended(start(folder, [*BASE, *VARIANTS[variant], "steps=12"], stop_after_two)) == 75:
                n += 1
            assert n >= 5
            self.finish(folder, variant, "steps=12")
        return f"{trials} runs in six starts each, all figures equal"

    def points(self, trials: int) -> str:
        """SIGKILL before and after every write, sync, rename of a save: a whole state is left, and best.pt belongs to it."""
        total = self._die_at(10**9)
        assert total > 20
        chosen = range(1, total + 1) if trials >= total else sorted(self.draw.sample(range(1, total + 1), trials))
        for point in chosen:
            self._die_at(point)
        return f"{len(chosen)} of {total} points of a save, each left a whole state"

    def _state(self, step: int) -> dict:
        """What a run would save after so many updates; the numbers follow from the step."""
        draw = torch.Generator().manual_seed(step)
        model = {"weight": torch.randn(40, 16, generator=draw)}
        run = {"optimizer": {"state": {"weight": {"m": torch.randn(40, 16, generator=draw)}}}, "step": step}
        return {**self._described(), "step": step, "tokens": step, "model": model, "run": run}

    def _described(self) -> dict:
        if not hasattr(self, "_stored"):
            cfg = config.plain(config.compose("train", BASE))
            cfg["model"]["n_token"] = 256
            self._stored = {
                "format": checkpoint.FORMAT,
                "config": json.dumps(cfg),
                "vocab": json.dumps({"kind": "bytes"}),
                "texts": {},
            }
        return self._stored

    def _die_at(self, point: int) -> int:
        """Saves twice, the second time dying at that point; looks at what is left. Returns how many points there are."""
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        (folder / "count").write_text("0")
        writer = saver.Saver(folder, keep=2)
        for step in (1, 2):
            writer.save(self._state(step), best=step == 1)
            writer.wait()
        status = ended(self._fork(lambda: self._save_until(folder, 3, point)))
        passed = int((folder / "count").read_text())
        assert status == (-9 if point <= passed else 0), status
        found = resuming.newest(folder)
        assert found is not None
        step = found[1]["step"]
        assert step in (2, 3) and (status == -9 or step == 3)
        assert all(torch.equal(one, other) for (_, one), (_, other) in
                   zip(tensors(found[1]["run"]), tensors(self._state(step)["run"]), strict=True))  # fmt: skip
        resuming.clear_up(folder, found[0], step, 2)
        assert not (folder / "last.next.pt").exists()
        assert checkpoint.load(folder / "best.pt")["step"] == (3 if step == 3 else 1), point
        writer.save(self._state(4), best=True)
        writer.wait()
        assert sorted(file.name for file in folder.iterdir()) == ["best.pt", "count", "last.1.pt", "last.pt"]
        shutil.rmtree(folder)
        return passed

    def _fork(self, act: Callable[[], None]) -> int:
        sys.stdout.flush()
        pid = os.fork()
        if pid:
            return pid
        try:
            act()
            os._exit(0)
        finally:
            os._exit(1)

    def _save_until(self, folder: Path, step: int, point: int) -> None:
        """Saves, dying at the point: each call of these is one before it and one after."""
        passed = 0

        def pass_by() -> None:
            nonlocal passed
            passed += 1
            if passed == point:
                os.pwrite(file, str(passed).encode(), 0)
                os.kill(os.getpid(), signal.SIGKILL)

        def marked(real: Callable) -> Callable:
            def call(*arguments, **named):
                pass_by()
                result = real(*arguments, **named)
                pass_by()
                return result

            return call

        file = os.open(folder / "count", os.O_WRONLY)
        for name in ("replace", "fsync", "fchmod"):
            setattr(os, name, marked(getattr(os, name)))
        tempfile.mkstemp = marked(tempfile.mkstemp)
        archive._Hashing.write = marked(archive._Hashing.write)
        writer = saver.Saver(folder, keep=2)
        writer.save(self._state(step), best=True)
        writer.wait()
        os.pwrite(file, str(passed).encode(), 0)

    def disk(self, trials: int) -> str:
        """A file system of a few megabytes, filled up at a random moment and freed later: what was saved stays (needs root)."""
        full = 0
        for trial in range(trials):
            variant, folder = self.draw.choice(list(VARIANTS)), self.new()
            (folder / "outputs").mkdir()
            mounted = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder / "outputs")]
            if subprocess.run(mounted, capture_output=True).returncode:
                return f"left out after {trial}: no file system can be mounted here"
            try:
                seconds = self.expected(variant)[1]
                pid = start(folder, [*BASE, *VARIANTS[variant]])
                time.sleep(self.draw.uniform(0.2, 0.9 * seconds))
                with contextlib.suppress(OSError), open(folder / "outputs" / "ballast", "wb") as ballast:
                    while True:
                        ballast.write(bytes(1 << self.draw.randrange(8, 16)))
                status = ended(pid)
                log = (folder / "log.txt").read_text()
                assert status in (0, 1) and "Traceback" not in log, log
                assert status == 0 or any(key in log for key in ("name: ", "No space left")), log
                full += status
                (folder / "outputs" / "ballast").unlink()
                self.finish(folder, variant)
            finally:
                subprocess.run(["umount", str(folder / "outputs")], check=True)
        return f"{trials} disks that filled up, {full} of them stopped the run, all figures equal afterwards"

    def calls(self, trials: int) -> str:
        """SIGKILL, or an error, at the k-th rename, sync, unlink or write of a real process, by strace where there is one."""
        if shutil.which("strace") is None:
            return "left out: there is no strace"
        kinds = ("signal=SIGKILL", "error=EIO", "error=ENOSPC")
        cases = [
            (call, when, kind) for kind in kinds for call in ("rename", "fsync", "unlink") for when in (1, 2, 4, 7, 11)
        ]
        for call, when, kind in self.draw.sample(cases, min(trials, len(cases))):
            variant, folder = self.draw.choice(list(VARIANTS)), self.new()
            command = [sys.executable, str(ROOT / "train.py"), *BASE, *VARIANTS[variant]]
            traced = [
                "strace",
                "-f",
                "-qq",
                "-o",
                os.devnull,
                "-e",
                f"trace={call}",
                "-e",
                f"inject={call}:{kind}:when={when}",
            ]
            environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
            done = subprocess.run([*traced, *command], cwd=folder, env=environment, capture_output=True, text=True)
            assert "Traceback" not in done.stderr, (call, when, kind, done.stderr)
            self.finish(folder, variant)
        return f"{min(trials, len(cases))} system calls failed or killed the process, all figures equal afterwards"

    def damage(self, trials: int) -> str:
        """A file cut at any length, with bits flipped, or with something behind it: seen, every time."""
        path = self.folder / "one.pt"
        archive.write(path, self._state(1))
        whole = path.read_bytes()
        for trial in range(trials):
            changed = bytearray(whole)
            if trial % 3 == 0:
                changed = changed[
                    : self.draw.choice([0, 1, len(whole) // 2, len(whole) - 1, self.draw.randrange(len(whole))])
                ]
            elif trial % 3 == 1:
                place = self.draw.randrange(len(whole))
                changed[place] ^= 1 << self.draw.randrange(8)
            else:
                changed += bytes(self.draw.randrange(1, 4096))
            path.write_bytes(changed)
            try:
                archive.read(path)
            except archive.Damaged:
                continue
            raise AssertionError(f"trial {trial}: the damage was not seen")
        path.write_bytes(whole)
        archive.read(path)
        return f"{trials} damaged files, all refused"

    def retention(self, trials: int) -> str:
        """Random sequences of saves, kills and damage: a whole state is never lost, and nothing of others' is touched."""
        for _ in range(trials):
            folder = Path(tempfile.mkdtemp(dir=self.folder))
            (folder / "last-mine.pt").write_text("mine")
            (folder / "last.10-mine.pt").mkdir()
            (folder / "last.9x.pt").symlink_to("nowhere")
            (folder / "count").write_text("0")
            keep, best_known = self.draw.choice([1, 2, 3]), None
            whole: set[int] = set()
            for step in range(1, 9):
                act = self.draw.choice(["save", "save", "kill", "cut", "flip"])
                files = [file for file in resuming.saved(folder) if file.is_file()]
                if act in ("cut", "flip") and len(files) > 1:
                    content = bytearray(files[0].read_bytes())
                    content[len(content) // 2] ^= 4
                    files[0].write_bytes(content if act == "flip" else content[: len(content) // 3])
                elif act == "kill":
                    point = self.draw.randrange(1, 60)
                    ended(self._fork(partial(self._save_until, folder, step, point)))
                else:
                    writer = saver.Saver(folder, keep=keep)
                    writer.save(self._state(step), best=False)
                    writer.wait()
                    whole.add(step)
                found = resuming.newest(folder)
                if whole:
                    assert found is not None, (act, sorted(file.name for file in folder.iterdir()))
                    best_known = found[1]["step"]
                    assert torch.equal(found[1]["model"]["weight"], self._state(best_known)["model"]["weight"])
                if found is not None:
                    whole.add(found[1]["step"])
                    resuming.clear_up(folder, found[0], found[1]["step"], keep)
            assert (folder / "last-mine.pt").read_text() == "mine" and (folder / "last.9x.pt").is_symlink()
            assert (folder / "last.10-mine.pt").is_dir()
            shutil.rmtree(folder)
        return f"{trials} sequences of eight saves, kills and damages, a whole state after each"

    def repeats(self, trials: int) -> str:
        """The same run again and again, idle and beside busy loops: one result. And without a part of the state: another."""
        variant = "documents"
        for trial in range(trials):
            busy = [self._fork(spin) for _ in range(3 * (trial % 2))]
            folder = self.new()
            self.finish(folder, variant)
            for pid in busy:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        for part in ("rng", "mems"):
            folder = self.new()

            def forget(part=part) -> None:
                real = training.Run.load_state_dict

                def load(run, state):
                    real(run, {**state, part: [] if part == "rng" else None})

                training.Run.load_state_dict = load

            def stop_there() -> None:
                real = training.updates

                def stopping(run, **how):
                    for update in real(run, **how):
                        if update.step == 10:
                            os.kill(os.getpid(), signal.SIGTERM)
                        yield update

                training.updates = stopping

            command = [*BASE, *VARIANTS["lanes"]]
            assert ended(start(folder, command, stop_there)) == 75
            assert ended(start(folder, command, forget)) == 0, (folder / "log.txt").read_text()
            assert figures(folder)["weights"] != self.expected("lanes")[0]["weights"], f"{part} makes no difference"
        return f"{trials} repeats gave one result; without generators or memory it is another"


PARTS = {  # how many trials beside 100 kills
    "kills": 1.0,
    "stops": 0.6,
    "steps": 1.0,
    "chain": 0.1,
    "points": 10.0,
    "disk": 0.1,
    "calls": 0.15,
    "damage": 5.0,
    "retention": 5.0,
    "repeats": 0.1,
}


def main(arguments: list[str]) -> None:
    if arguments and arguments[0] in PARTS:
        chosen = {arguments[0]: int(arguments[1])}
    else:
        kills = int(arguments[0]) if arguments else 100
        chosen = {part: max(1, round(kills * share)) for part, share in PARTS.items()}
    seed = int(os.environ.get("SOAK_SEED", time.time()))
    soak = Soak(seed)
    print(f"seed {seed} (SOAK_SEED={seed} draws the same again)", flush=True)
    for part, trials in chosen.items():
        began = time.monotonic()
        print(f"{part}: {getattr(soak, part)(trials)} ({time.monotonic() - began:.0f} s)", flush=True)
    shutil.rmtree(soak.folder)


if __name__ == "__main__":
    main(sys.argv[1:])
