"""generate.py as a user meets it: the continuation, byte for byte, and what it refuses."""

import io
import json
import os
import re
import sys
from pathlib import Path

import pytest
from conftest import characters_run, command, in_process, refused

import generate
from txl import generation
from txl.config import call
from txl.instruments.showing import readable


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("temperature=-0.5", "temperature"),
        ("top_p=0", "top_p"),
        ("top_p=1.5", "top_p"),
        ("top_k=0", "top_k"),
        ("top_k=many", "top_k"),
        ("num_samples=0", "num_samples"),
        ("max_new_tokens=-1", "max_new_tokens"),
        ("seed=-1", "seed"),
        ("format=xml", "format"),
        ("prompt_file=missing.txt", "prompt_file"),
        ("+temprature=1", "temprature"),
        ("stops=.", "stops"),
        ('stops=["a",""]', "stops"),
        ("stops=[1]", "stops"),
        ('stops="."', "stops"),
        ("color=sometimes", "color"),
        ("score=true", "prompt"),
        ("interactive=yes please", "interactive"),
    ],
)
def test_generate_refuses_a_bad_value(override, key, trained_run):
    refused(in_process("generate", f"checkpoint={trained_run}", override), key)


def test_generate_refuses_a_prompt_and_a_prompt_file(trained_run):
    Path("p.txt").write_bytes(b"p")
    refused(in_process("generate", f"checkpoint={trained_run}", "prompt=a", "prompt_file=p.txt"), "prompt_file")


def test_generate_refuses_a_prompt_that_the_vocabulary_lacks(tmp_path):
    run = characters_run(tmp_path)
    line = refused(in_process("generate", f"checkpoint={run}", "prompt=abz"), "prompt")
    assert "'z'" in line


def test_generate_writes_the_continuation_then_one_newline(trained_run):
    arguments = [f"checkpoint={trained_run}", "prompt=It's 42, isn't it?", "max_new_tokens=30"]
    first = in_process("generate", *arguments)
    assert first.status == 0 and first.stderr == ""
    assert len(first.stdout) == 31 and first.stdout.endswith(b"\n")
    assert in_process("generate", *arguments).stdout == first.stdout
    assert in_process("generate", *arguments, "seed=2").stdout != first.stdout


def test_generate_writes_text_where_bytes_cannot_be_written(trained_run, monkeypatch):
    """A notebook's standard output has no `buffer`."""
    written = io.StringIO()
    monkeypatch.setattr(sys, "stdout", written)
    asked = [f"checkpoint={trained_run}", "prompt=é", "max_new_tokens=20"]
    (text,) = call(generate.main, asked)
    assert written.getvalue() == text.decode("utf-8", "replace") + "\n"
    written.truncate(0)
    (figures,) = call(generate.main, [*asked, "score=true"])
    assert f"tokens {figures['tokens']}\n" in written.getvalue()


def test_generate_separates_samples_and_each_can_be_had_alone(trained_run):
    arguments = [f"checkpoint={trained_run}", "prompt=The ", "max_new_tokens=20", "top_k=3"]
    three = in_process("generate", *arguments, "num_samples=3").stdout
    one = in_process("generate", *arguments).stdout
    rows = in_process("generate", *arguments, "num_samples=3", "format=jsonl").stdout.splitlines()
    texts = [json.loads(row)["text"].encode("utf-8", "surrogateescape") for row in rows]
    assert three == b"---\n".join(text + b"\n" for text in texts)
    assert one == texts[0] + b"\n" and len(set(texts)) == 3
    assert json.loads(rows[1]).items() >= {"sample": 1, "seed": 1, "prompt": "The "}.items()


def test_greedy_needs_no_seed(trained_run):
    arguments = [f"checkpoint={trained_run}", "temperature=0", "max_new_tokens=20", "prompt=x"]
    assert in_process("generate", *arguments, "seed=1") == in_process("generate", *arguments, "seed=2")


def test_an_empty_prompt_starts_from_a_newline(trained_run):
    outputs = {
        in_process("generate", f"checkpoint={trained_run}", "max_new_tokens=20", "temperature=0.05", *prompt).stdout
        for prompt in ([], ["prompt="], ["prompt=\n"], ["prompt=null"])
    }
    assert len(outputs) == 2  # `null`, taken literally, is a prompt of four letters


def test_generate_reads_a_prompt_from_a_file_byte_for_byte(trained_run):
    Path("p.txt").write_bytes(b"The \xff\r\n")
    row = in_process("generate", f"checkpoint={trained_run}", "prompt_file=p.txt", "format=jsonl").stdout
    assert json.loads(row)["prompt"] == "The \udcff\r\n"


def test_generate_stops_before_the_stop_text(trained_run):
    arguments = [f"checkpoint={trained_run}", "prompt=x", "max_new_tokens=300"]
    whole = in_process("generate", *arguments).stdout[:-1]
    stop = next(letter for letter in map(chr, range(33, 127)) if letter.encode() in whole)
    stopped = in_process("generate", *arguments, f"stop={stop}").stdout[:-1]
    assert stopped == whole.split(stop.encode())[0]


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["interactive=true", "score=true"], "score"),
        (["interactive=true", "prompt=-"], "prompt"),
        (["interactive=true", "each_line=true"], "each_line"),
        (["interactive=true", "num_samples=2"], "num_samples"),
        (["interactive=true", "format=jsonl"], "format"),
        (["score=true", "prompt=a", "num_samples=2"], "num_samples"),
        (["score=true", "prompt=a", "format=columns"], "format"),
        (["format=jsonl", "color=true"], "color"),
    ],
)
def test_generate_refuses_what_does_not_go_together(overrides, key, trained_run):
    refused(in_process("generate", f"checkpoint={trained_run}", *overrides), key)


def test_generate_stops_before_the_first_of_several_texts(trained_run):
    """Each of several tokens, one of them within another; given as JSON, in which a line end can be written."""
    arguments = [f"checkpoint={trained_run}", "prompt=x", "max_new_tokens=200", "top_k=3"]
    whole = in_process("generate", *arguments).stdout[:-1]
    long, short, later = whole[60:66], whole[62:64], whole[120:124]
    places = [whole.index(stop) for stop in (long, short, later)]
    for stops in ([long, short, later], [later, short], [later], [b"\n\nnowhere", short]):
        typed = f"stops={json.dumps([*map(os.fsdecode, stops)])}"
        stopped = in_process("generate", *arguments, typed).stdout[:-1]
        first = min(place for stop, place in zip((long, short, later), places, strict=True) if stop in stops)
        assert stopped == whole[:first]
    both = in_process("generate", *arguments, f"stop={os.fsdecode(short)}", f"stops={json.dumps([os.fsdecode(later)])}")
    assert both.stdout[:-1] == whole[: min(places[1:])]
    assert in_process("generate", *arguments, "stop=[]", "stops=[]").stdout[:-1] == whole.split(b"[]")[0]


def test_samples_side_by_side_are_those_that_stand_below_each_other(trained_run, monkeypatch):
    """As wide as the terminal, wrapped, and as many abreast as there is room for."""
    arguments = [f"checkpoint={trained_run}", "max_new_tokens=150", "top_k=3", "num_samples=4", "seed=5"]
    Path("p.txt").write_text("one\ntwo\n")
    prompts = ["prompt_file=p.txt", "each_line=true"]
    texts = in_process("generate", *arguments, *prompts).stdout[:-1].split(b"\n---\n")
    for width, abreast in ((79, 3), (200, 4), (20, 1)):
        monkeypatch.setenv("COLUMNS", str(width))
        shown = in_process("generate", *arguments, *prompts, "format=columns").stdout.decode()
        cells, columns = [], []
        for line in shown.splitlines():
            assert len(line) <= width
            if line.startswith("┃"):
                columns = [len(cells) + number for number in range(line.count("┃") - 1)]
                assert len(columns) <= abreast
                cells += [""] * len(columns)
                heads = line.strip("┃").split("┃")
                if width > 60:
                    assert [head.strip() for head in heads] == [f"sample {n % 4}, seed 5" for n in columns]
            elif line.startswith("│"):
                for column, part in zip(columns, line[1:-1].split("│"), strict=True):
                    cells[column] += part
        assert max(map(len, columns and [columns])) <= abreast and len(cells) == 8
        assert [cell.replace(" ", "") for cell in cells] == ["".join(readable(text).split()) for text in texts]
        assert shown.index("one") < shown.index("two")


def test_colours_change_no_text(trained_run, monkeypatch):
    """And where standard output is no terminal there are none, but on demand, whatever the environment says."""
    monkeypatch.setenv("NO_COLOR", "1")
    arguments = [f"checkpoint={trained_run}", "prompt=The ", "max_new_tokens=60", "num_samples=2", "stop=q"]
    plain = in_process("generate", *arguments).stdout
    assert in_process("generate", *arguments, "color=true").stdout == plain
    coloured = in_process("generate", *arguments, "color=always").stdout
    assert coloured.count(b"\x1b[") > 60 and re.sub(rb"\x1b\[[0-9;]*m", b"", coloured) == plain
    table = in_process("generate", *arguments, "color=always", "format=columns").stdout
    assert table.count(b"\x1b[30;48;5;") > 60
    plain = in_process("generate", *arguments, "format=columns").stdout
    assert re.sub(rb"\x1b\[[0-9;]*m", b"", table) == plain


def test_evaluate_and_generate_write_into_no_other_place(trained_run):
    in_process("generate", f"checkpoint={trained_run}", "max_new_tokens=2")
    in_process("evaluate", f"checkpoint={trained_run}", "out=o.json")
    assert os.listdir() == ["o.json"]


def test_generate_as_a_command(trained_run, tmp_path):
    """With a prompt that no shell or parser must touch, and with one from standard input that is no text at all."""
    arguments = [f"checkpoint={trained_run}", "max_new_tokens=9", "format=jsonl"]
    prompt = " It's {42}, isn't it? a=b ${x} \"null\" \\"
    outcome = command("generate", *arguments, f"prompt={prompt}", cwd=tmp_path)
    assert outcome.status == 0, outcome.stderr
    assert json.loads(outcome.stdout)["prompt"] == prompt
    piped = command("generate", *arguments, "prompt=-", cwd=tmp_path, stdin=b"\xfe\n")
    assert json.loads(piped.stdout)["prompt"].encode("utf-8", "surrogateescape") == b"\xfe\n"
    refused(command("generate", *arguments, "temperature=-1", cwd=tmp_path), "temperature")
    assert os.listdir(tmp_path) == []


def test_a_low_temperature_is_as_good_as_greedy(trained_run):
    arguments = [f"checkpoint={trained_run}", "max_new_tokens=20", "prompt=x"]
    greedy = in_process("generate", *arguments, "temperature=0").stdout
    assert in_process("generate", *arguments, "temperature=1e-320").stdout == greedy


def test_lines_are_continued_side_by_side_as_if_each_were_alone(trained_run, monkeypatch):
    """Prompts of unequal lengths, several samples of each, in groups that do not divide them: the same texts, in order."""
    arguments = [f"checkpoint={trained_run}", "max_new_tokens=30", "temperature=0.1", "num_samples=2"]
    prompts = ["The", "a prompt that is longer than the memory is", "x"]
    alone = [in_process("generate", *arguments, f"prompt={prompt}", "format=jsonl").stdout for prompt in prompts]
    texts = [in_process("generate", *arguments, f"prompt={prompt}").stdout for prompt in prompts]
    Path("p.txt").write_text("\n".join(prompts) + "\n")
    for at_once in (64, 4, 1):
        monkeypatch.setattr(generation, "ROWS_AT_ONCE", at_once)
        together = [*arguments, "prompt_file=p.txt", "each_line=true"]
        assert in_process("generate", *together, "format=jsonl").stdout == b"".join(alone)
        assert in_process("generate", *together).stdout == b"---\n".join(texts)
    Path("p.txt").write_text("")
    assert in_process("generate", *together).stdout == in_process("generate", *arguments).stdout
