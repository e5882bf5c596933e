"""generate.py interactive=true: what is said stays in memory, each token read once; commands, and how it ends."""

import fcntl
import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT, characters_run, in_process, refused, tiny_model

from txl import archive, generation
from txl.conversation import Conversation
from txl.data.encoding import Encoder
from txl.data.vocab import Bytes
from txl.generation import Reader, Sampling, generate, sample_seed
from txl.printing import Shades

LONG = "model.memory.mem_len=64"
MODELS = {
    "memory": [LONG],
    "same_length": [LONG, "model.same_length=true"],
    "no_memory": ["model/memory=none"],
    "absolute": ["model.memory.mem_len=10", "model/position=absolute"],
    "compressive": ["model/memory=compressive", "model.memory.mem_len=5", "model.memory.rate=5"],
}


@pytest.fixture(scope="module")
def run(trained_run, tmp_path_factory):
    """A checkpoint whose weights are far from zero, so that what it was told changes what it says."""
    content, path = torch.load(trained_run / "best.pt", weights_only=True), tmp_path_factory.mktemp("loud") / "loud.pt"
    generator = torch.Generator().manual_seed(0)
    for tensor in content["model"].values():
        tensor += 0.3 * torch.randn(tensor.shape, generator=generator)
    archive.write(path, content)
    return path


def talk(run, *lines, overrides=(), monkeypatch):
    """What becomes of these lines on standard input."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\n".join(lines) + b"\n")))
    return in_process("generate", f"checkpoint={run}", "interactive=true", "max_new_tokens=12", *overrides)


def conversation_with(model, context=64, **sampling):
    sampling = Sampling(**{"max_new_tokens": 7, "temperature": 0.0, **sampling})
    reader = Reader(model, context=context)
    return Conversation(reader, Encoder(Bytes()), sampling, seed=1, stops=[], shades=Shades(256, False))


@pytest.mark.parametrize("variant", MODELS)
def test_two_turns_are_one_generation_from_what_was_said(variant):
    """The same greedy tokens, and the same distribution after the last of them."""
    model = tiny_model(*MODELS[variant], n_token=256)
    talked = conversation_with(model)
    talked.say(b"to be or ")
    first = bytes(talked.said[-1])
    talked.say(b"not")
    talked.say(b"")
    (said,) = talked.said
    assert len(first) == 9 + 7 and said[:19] == first + b"not" and len(said) == 9 + 7 + 3 + 7 + 7
    texts = Reader(model, context=64).begin([torch.tensor(list(said[:19]))])
    made = [token for (token,) in generate(texts, Sampling(max_new_tokens=14, temperature=0.0), [sample_seed(1, 0)])]
    assert bytes(made) == said[19:]
    torch.testing.assert_close(talked.texts.log_probs, texts.log_probs, rtol=0, atol=1e-10)


def test_each_token_is_read_once(monkeypatch):
    """However many turns there are, and far past the memory."""
    model, seen = tiny_model("model.memory.mem_len=8", n_token=256), []
    monkeypatch.setattr(
        model.softmax, "embed", lambda tokens, embed=model.softmax.embed: seen.append(tokens) or embed(tokens)
    )
    talked = conversation_with(model, context=4, temperature=1.0)
    for line, length in ((b"one", 7), (b"two words", 7), (b"", 0), (b"three", 7)):
        talked.set("max_new_tokens", str(length))
        talked.say(line)
    read = torch.cat(seen, dim=1)[0].tolist()
    assert bytes(read) == talked.said[0][:-1]


def test_the_memory_of_a_long_talk_is_that_of_its_text_read_token_by_token():
    model = tiny_model("model.memory.mem_len=8", n_token=256)
    talked = conversation_with(model, context=4, temperature=1.0)
    for line in (b"one", b"two words and more than the memory holds", b"", b"three"):
        talked.say(line)
    texts = Reader(model, context=4).begin([torch.tensor(list(b"one"))])
    for token in talked.said[0][3:-1]:
        texts.extend([[token]])
    torch.testing.assert_close(talked.texts.log_probs, texts.log_probs, rtol=0, atol=1e-10)


def test_after_a_reset_all_is_as_at_the_start(run, monkeypatch):
    """Drawn at random too. The first turn is what generate.py writes after the same prompt; the lines' ends belong to nothing."""
    fresh = in_process("generate", f"checkpoint={run}", "prompt=Hello", "max_new_tokens=12").stdout
    outcome = talk(run, b"Hello", b"more", b"/reset", b"Hello", monkeypatch=monkeypatch)
    assert outcome.status == 0 and outcome.stderr == "the memory is empty\n"
    assert outcome.stdout.startswith(fresh) and outcome.stdout.endswith(fresh)
    assert len(outcome.stdout) == 3 * 13
    assert talk(run, b"Hello", monkeypatch=monkeypatch).stdout == fresh


def test_a_reset_empties_the_memory():
    talked, fresh = (conversation_with(tiny_model("model.memory.mem_len=64", n_token=256)) for _ in range(2))
    talked.say(b"something else")
    talked.reset()
    for one in (talked, fresh):
        one.say(b"Hello")
    assert talked.said[-1] == fresh.said[-1] and torch.equal(talked.texts.log_probs, fresh.texts.log_probs)


def test_a_prompt_on_the_command_line_is_the_first_turn(run, monkeypatch):
    typed = talk(run, b"//x", b"more", monkeypatch=monkeypatch).stdout
    assert talk(run, b"more", overrides=["prompt=/x"], monkeypatch=monkeypatch).stdout == typed
    Path("p.txt").write_text("/x")
    assert talk(run, b"more", overrides=["prompt_file=p.txt"], monkeypatch=monkeypatch).stdout == typed


def test_the_talk_is_saved_byte_for_byte_and_nothing_is_written_over(run, monkeypatch):
    lines = [b"/save out.txt", b"Hi \xff", b"/save out.txt", b"/reset", b"", b"//a", b"/save out.txt", b"/save o 2.txt"]
    outcome = talk(run, *lines, b"/save no/such/folder", b"/save", monkeypatch=monkeypatch)
    early, first, _, taken, second, nowhere, nameless = outcome.stderr.splitlines()
    assert early == "/save: nothing was said yet" and taken.startswith("/save: out.txt is there already")
    assert nowhere.startswith("/save: cannot write no/such/folder (No such file") and nameless.startswith("/save: name")
    one, two, three = (outcome.stdout[13 * turn : 13 * turn + 12] for turn in range(3))
    assert Path("out.txt").read_bytes() == b"Hi \xff" + one and first == "16 bytes written to out.txt"
    assert Path("o 2.txt").read_bytes() == b"Hi \xff" + one + b"\n---\n\n" + two + b"/a" + three
    assert second.endswith("o 2.txt") and sorted(os.listdir()) == ["o 2.txt", "out.txt"]


def test_how_tokens_are_drawn_can_be_changed(run, monkeypatch):
    """As the keys of the same names would from the start."""
    keys = {"temperature": "0.3", "top_k": "4", "top_p": "0.9", "max_new_tokens": "5", "seed": "9"}
    commands = [f"/{name} {value}".encode() for name, value in keys.items()]
    outcome = talk(run, *commands, b"Hi", b"/top_p null", b"/top_p", monkeypatch=monkeypatch)
    overrides = [f"{name}={value}" for name, value in keys.items()]
    expected = in_process("generate", f"checkpoint={run}", "prompt=Hi", *overrides).stdout
    assert outcome.stdout == expected and len(expected) == 6
    said = [f"{name}: {value}" for name, value in keys.items()]
    assert outcome.stderr.splitlines() == [*said, "top_p: null", "top_p: null"]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b"/temprature 1", "/help"),
        (b"/", "/help"),
        (b"/temperature hot", "/temperature 0.7"),
        (b"/temperature -1", "/temperature 0.7"),
        (b"/temperature nan", "/temperature 0.7"),
        (b"/temperature null", "/temperature 0.7"),
        (b"/top_p 2", "/top_p 0.9"),
        (b"/top_k 0.5", "/top_k 40"),
        (b"/max_new_tokens -1", "/max_new_tokens 200"),
        (b"/seed -1", "/seed 1"),
        (b"/seed one", "/seed 1"),
        (b"/reset now", "type /reset alone"),
        (b"/quit now", "type /quit alone"),
        (b"/help me", "type /help alone"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_to_type_and_the_loop_goes_on(line, told, run, monkeypatch):
    outcome = talk(run, line, b"Hi", monkeypatch=monkeypatch)
    assert outcome.status == 0 and outcome.stderr.count("\n") == 1 and told in outcome.stderr
    assert len(outcome.stdout) == 13


def test_help_names_every_command_and_quit_ends(run, monkeypatch):
    outcome = talk(run, b"/help", b"/quit", b"Hi", monkeypatch=monkeypatch)
    assert (outcome.status, outcome.stdout) == (0, b"")
    for name in ("reset", "save", "temperature", "top_p", "top_k", "max_new_tokens", "seed", "help", "quit", "/"):
        assert f"/{name}" in outcome.stderr


def test_what_the_vocabulary_lacks_is_refused_and_nothing_of_it_is_read(tmp_path, monkeypatch):
    run = characters_run(tmp_path)
    outcome = talk(run, b"az", b"ab", b"xc", b"c", monkeypatch=monkeypatch)
    assert outcome.status == 0 and [line[:7] for line in outcome.stderr.splitlines()] == ["prompt:"] * 2
    assert outcome.stdout == talk(run, b"ab", b"c", monkeypatch=monkeypatch).stdout
    refused(talk(run, b"a", overrides=["prompt=az"], monkeypatch=monkeypatch), "prompt")


def test_the_text_that_ends_a_turn_is_not_shown_but_stays_in_memory(run, monkeypatch):
    whole = talk(run, b"Hi", b"/save whole", monkeypatch=monkeypatch).stdout[:-1]
    stop = f"stop={os.fsdecode(whole[5:7])}"
    place = whole.index(whole[5:7])
    outcome = talk(run, b"Hi", b"/save stopped", b"", b"/save on", overrides=[stop], monkeypatch=monkeypatch)
    assert outcome.stdout[: place + 1] == whole[:place] + b"\n"
    assert Path("stopped").read_bytes() == b"Hi" + whole[: place + 2]
    assert Path("on").read_bytes().startswith(Path("whole").read_bytes()[: 2 + place + 2])


def drawing(monkeypatch, number, at):
    """Sends this process a signal while it draws the token of that number."""
    draw, count = Sampling.draw, iter(range(1000))

    def interrupted(*arguments):
        if next(count) == at:
            signal.raise_signal(number)
        return draw(*arguments)

    monkeypatch.setattr(generation.Sampling, "draw", interrupted)


def test_ctrl_c_ends_a_text_and_the_loop_goes_on(run, monkeypatch):
    """The token that was on its way is shown; the memory is that of what was said."""
    whole = talk(run, b"Hi", monkeypatch=monkeypatch).stdout
    with monkeypatch.context() as patch:
        drawing(patch, signal.SIGINT, at=4)
        outcome = talk(run, b"Hi", b"/max_new_tokens 7", b"", monkeypatch=patch)
    assert outcome.status == 0
    assert outcome.stdout == whole[:5] + b"\n" + whole[5:12] + b"\n"


def test_ctrl_c_at_other_times_and_sigterm_end_the_program(run, monkeypatch):
    class Interrupted(io.BytesIO):
        def __iter__(self):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdin", io.TextIOWrapper(Interrupted()))
        assert in_process("generate", f"checkpoint={run}", "interactive=true").status == 130
    drawing(monkeypatch, signal.SIGTERM, at=4)
    assert talk(run, b"Hi", b"Hi", monkeypatch=monkeypatch).status == 75


def test_at_a_terminal(run, tmp_path):
    """A sign asks for lines, which can be edited; colours show; Ctrl-C leaves a text; Ctrl-D ends with 0."""
    parent, child = pty.openpty()
    program = [sys.executable, str(ROOT / "generate.py"), f"checkpoint={run}", "interactive=true", "color=true"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm-256color"}
    streams = dict(stdin=child, stdout=child, stderr=child, cwd=tmp_path, env=environment, start_new_session=True)
    process = subprocess.Popen(
        [*program, "max_new_tokens=100000"],
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C becomes a signal
        **streams,
    )
    os.close(child)
    seen = b""

    def until(pattern, seconds=60):
        nonlocal seen
        end = time.monotonic() + seconds
        while not (found := re.search(pattern, seen, re.DOTALL)):
            assert time.monotonic() < end and process.poll() is None, seen
            if select.select([parent], [], [], 1)[0]:
                seen += os.read(parent, 4096)
        seen = seen[found.end() :]

    try:
        until(rb"> ")
        os.write(parent, b"Hx\x7fi\n")  # with the last letter taken back
        until(rb"\x1b\[30;48;5;\d+m.*\x1b\[30;48;5;\d+m")
        os.write(parent, b"\x03")
        until(rb"\n> ")
        os.write(parent, b"/save out.txt\n")
        until(rb"written to out.txt.*> ")
        os.write(parent, b"\x04")
        while process.poll() is None and select.select([parent], [], [], 20)[0]:
            try:
                os.read(parent, 4096)
            except OSError:  # nobody is at the other end any more
                break
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        os.close(parent)
    assert (tmp_path / "out.txt").read_bytes().startswith(b"Hi")
