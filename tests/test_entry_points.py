"""The three programs as a user meets them: what they print and write, and how they end when something is wrong."""

import json
import os
from pathlib import Path

import pytest
import torch
from conftest import TINY, command, in_process

from txl import checkpoint


def refused(outcome, *keys):
    """Status 1, nothing on standard output, one line on standard error that names the key."""
    assert outcome.status == 1, outcome
    assert outcome.stdout == b""
    (line,) = outcome.stderr.splitlines()
    assert any(line.startswith(f"{key}:") or f"; {key}:" in line for key in keys), line
    return line


# train.py: bad input, in process


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("+model.d_modl=3", "model.d_modl"),
        ("+stesp=3", "stesp"),
        ("+model.memory.lengths=3", "model.memory.lengths"),
        ("model.n_layer=two", "model.n_layer"),
        ("steps=1.5", "steps"),
        ("steps=null", "steps"),
        ("model.pre_norm=maybe", "model.pre_norm"),
        ("optimizer.lr=fast", "optimizer.lr"),
        ("data.fractions=half", "data.fractions"),
        ("model.memory.mem_len=0", "model.memory.mem_len"),
        ("model.memory.mem_len=-1", "model.memory.mem_len"),
        ("model.d_model=33", "model.d_model"),
        ("model.n_token=255", "model.n_token"),
        ("batch_size=0", "batch_size"),
        ("device=cuda:77", "device"),
        ("device=meta", "device"),
        ("schedule.warmup=-1", "schedule.warmup"),
        ("schedule.lr_min=1", "schedule.lr_min"),
        ("optimizer.lr=-1", "optimizer.lr"),
        ("optimizer.eps=-1", "optimizer"),
        ("+schedule.steps=3", "schedule.steps"),
        ("+optimizer.params=[1]", "optimizer.params"),
        ("model.d_model=100000000000", "model.d_model"),
        ("model.memory.mem_len=99999999999", "model.memory.mem_len"),
        ("model.init_std=-1", "model.init_std"),
        ("cache_dir=", "cache_dir"),
        ("~optimizer.lr", "optimizer.lr"),
        ("~model._target_", "model._target_"),
        ("++data.vocab.characters=ba", "data.vocab.characters"),
        ("name=a/b", "name"),
        ("resume=nowhere", "resume"),
        ("init_from=nowhere", "init_from"),
    ],
)
def test_train_refuses_a_bad_value_and_writes_nothing(override, key):
    given = [one for one in TINY if one.split("=")[0] != override.split("=")[0]]
    refused(in_process("train", *given, override), key)
    assert os.listdir() == []


def test_mem_len_zero_points_to_no_memory():
    line = refused(in_process("train", "model.memory.mem_len=0"), "model.memory.mem_len")
    assert "model/memory=none" in line


def test_train_refuses_an_unknown_key_in_yaml(tmp_path):
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    text = "# @package _global_\nsteps: 3\nmodel:\n  d_modle: 4\n"
    (tmp_path / "conf" / "experiment" / "mine.yaml").write_text(text)
    outcome = in_process("train", "--config-dir", "conf", "experiment=mine", *TINY)
    assert "did you mean 'd_model'?" in refused(outcome, "model.d_modle")
    assert os.listdir() == ["conf"]


def test_train_refuses_an_unknown_key_on_the_command_line():
    """Hydra sees this one before we do, and says it in its own words."""
    for override in ("model.d_modl=3", "stesp=3", "modle=small", "model=smal", "experiment=python_sorce", "debug=smok"):
        outcome = in_process("train", override)
        assert outcome.status == 1 and outcome.stdout == b""
        assert override.split("=")[0] in outcome.stderr and "Traceback" not in outcome.stderr
        assert len(outcome.stderr.splitlines()) <= 10


def text_data(**files):
    for name, text in files.items():
        if text is not None:
            Path(f"{name}.txt").write_bytes(text)
    return ["data=text", *(f"data.{name}={name}.txt" for name in files)]


GOOD = b"to be or not to be, that is the question " * 20


@pytest.mark.parametrize(
    ("files", "key", "words"),
    [
        ({"train": None, "valid": GOOD, "test": GOOD}, "data.train", "No such file"),
        ({"train": GOOD, "valid": None, "test": GOOD}, "data.valid", "No such file"),
        ({"train": b"", "valid": GOOD, "test": GOOD}, "data.train", "is empty"),
        ({"train": GOOD, "valid": GOOD, "test": b""}, "data.test", "is empty"),
        ({"train": GOOD[:32], "valid": GOOD, "test": GOOD}, "data.train", "32 tokens are too few"),
        ({"train": GOOD, "valid": b"x", "test": GOOD}, "data.valid", "too short"),
        ({"train": GOOD, "valid": GOOD, "test": b"x"}, "data.test", "too short"),
        ({"train": GOOD, "valid": GOOD}, "data.test", "no file given"),
        ({"valid": GOOD}, "data.train", "no file given"),
        ({"train": GOOD[:10]}, "data.valid", "the text is empty"),
    ],
)
def test_train_refuses_files_that_are_missing_empty_or_too_short(files, key, words):
    arguments = [override for override in TINY if "data." not in override]
    outcome = in_process("train", *text_data(**files), *arguments)
    assert words in refused(outcome, key)
    assert not Path("outputs").exists()


def test_train_refuses_a_file_that_cannot_be_read():
    Path("folder.txt").mkdir()
    outcome = in_process("train", "data=text", "data.train=folder.txt")
    assert "cannot read" in refused(outcome, "data.train")


def test_train_refuses_a_pipe_instead_of_waiting_for_it():
    os.mkfifo("pipe")
    assert "not a regular file" in refused(in_process("train", "data=text", "data.train=pipe"), "data.train")


def test_train_refuses_a_folder_and_files_at_once():
    line = refused(in_process("train", "data=text", "data.path=.", "data.train=a.txt"), "data.path")
    assert "not both" in line


def test_train_refuses_a_folder_that_cannot_be_written():
    Path("outputs").write_text("in the way")
    refused(in_process("train", *TINY), "name")
    assert Path("outputs").read_text() == "in the way"


def test_train_refuses_a_cache_that_cannot_be_written():
    Path("cache").write_text("in the way")
    refused(in_process("train", *TINY, "cache_dir=cache/deep"), "cache_dir")
    assert os.listdir() == ["cache"]


def test_train_refuses_a_folder_with_another_configuration(monkeypatch):
    """The slug says what was typed; where a default has changed since, the folder must not be mixed up."""
    assert in_process("train", "name=mine", *TINY).status == 0
    (path,) = Path("outputs/mine").iterdir()
    stored = (path / "config.yaml").read_text()
    (path / "config.yaml").write_text(stored.replace("dropout: 0.0", "dropout: 0.25"))
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    line = refused(in_process("train", "name=mine", *TINY), "name")
    assert "model.dropout: 0.25, now 0.0" in line and f"resume={path}" in line
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before


def test_a_non_finite_loss_ends_in_one_line_and_keeps_the_last_checkpoint():
    outcome = in_process("train", *TINY, "optimizer=sgd", "optimizer.lr=1e30", "clip=null", "save_every=1")
    assert outcome.status == 1
    assert outcome.stderr.splitlines()[-1].startswith("optimizer.lr: at update ")
    (path,) = Path("outputs/python_docs").iterdir()
    content = checkpoint.load(path / "last.pt")
    assert all(tensor.isfinite().all() for tensor in content["model"].values())


# evaluate.py


def test_evaluate_gives_the_figure_of_the_run_from_anywhere(trained_run):
    expected = json.loads((trained_run / "result.json").read_text())
    for split in ("valid", "test"):
        outcome = in_process("evaluate", f"checkpoint={trained_run}", f"split={split}", f"out={split}.json")
        assert outcome.status == 0, outcome.stderr
        (line,) = outcome.stdout.decode().splitlines()
        assert json.loads(line) == expected[split] == json.loads(Path(f"{split}.json").read_text())
        assert "bits per byte" in outcome.stderr and "warning" not in outcome.stderr
    assert sorted(os.listdir()) == ["test.json", "valid.json"]


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ([], "test-default.json"),
        (["mem_len=null"], "test-mem_len-null.json"),
        (["mem_len=64", "clamp_len=20", "same_length=true"], "test-clamp_len-20_mem_len-64_same_length-true.json"),
        (["tgt_len=5", "batch_size=3", "split=valid"], "valid-batch_size-3_tgt_len-5.json"),
    ],
)
def test_evaluate_reads_with_other_settings_and_writes_beside_the_run(settings, name, trained_run, tmp_path):
    run = tmp_path / "moved"
    run.mkdir()
    (run / "best.pt").write_bytes((trained_run / "best.pt").read_bytes())
    outcome = in_process("evaluate", f"checkpoint={run}", *settings)
    assert outcome.status == 0, outcome.stderr
    figure = json.loads((run / "evaluate" / name).read_text())
    assert figure == json.loads(outcome.stdout)
    given = dict(setting.split("=") for setting in settings)
    for key, value in given.items():
        assert figure[key] == (value if key == "split" else json.loads(value))
    assert figure["tokens"] == 999


def test_evaluate_scores_another_text(trained_run):
    text = bytes(range(256))
    Path("other.txt").write_bytes(text)
    outcome = in_process("evaluate", f"checkpoint={trained_run}", "data.test=other.txt", "out=o.json")
    figure = json.loads(outcome.stdout)
    assert (figure["tokens"], figure["bytes"]) == (255, 255)
    content = checkpoint.load(trained_run / "best.pt")
    model, tokens = checkpoint.load_model(content), torch.arange(256)[None]
    total, mems = 0.0, None
    for start in range(0, 255, 16):
        stop = min(start + 16, 255)
        nll, mems = model(tokens[:, start:stop], mems, tokens[:, start + 1 : stop + 1])
        total += nll.double().sum().item()
    assert figure["nll"] == pytest.approx(total / 255, rel=1e-6)
    whole = in_process("evaluate", f"checkpoint={trained_run}", "split=train", "data.train=other.txt", "out=o.json")
    assert json.loads(whole.stdout)["nll"] == figure["nll"]
    line = refused(in_process("evaluate", f"checkpoint={trained_run}", "data.train=other.txt"), "data.test")
    assert "split=train" in line
    cut = ["data.train=other.txt", "data.fractions=[0.5,0.3,0.2]"]
    assert json.loads(in_process("evaluate", f"checkpoint={trained_run}", "out=o.json", *cut).stdout)["tokens"] == 51
    short = in_process("evaluate", f"checkpoint={trained_run}", "data.max_bytes=2000", "out=o.json")
    assert json.loads(short.stdout)["tokens"] == 99


def test_evaluate_says_when_the_text_is_no_longer_the_runs(trained_run, monkeypatch):
    import pydoc_data.topics

    topics = dict(pydoc_data.topics.topics)
    topics["a"] = "something new"
    monkeypatch.setattr(pydoc_data.topics, "topics", topics)
    outcome = in_process("evaluate", f"checkpoint={trained_run}", "out=o.json")
    assert outcome.status == 0 and "warning: the text of split=test" in outcome.stderr


def characters_run(tmp_path, name="characters"):
    data = text_data(train=b"abc \n" * 300, valid=b"abc \n" * 20, test=b"cba \n" * 20)
    arguments = [override for override in TINY if "data." not in override]
    outcome = in_process("train", f"name={name}", *data, "data/vocab=characters", *arguments)
    assert outcome.status == 0, outcome.stderr
    return next((tmp_path / "outputs" / name).iterdir())


def test_characters_train_evaluate_and_generate(tmp_path, monkeypatch):
    run = characters_run(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    figure = json.loads(in_process("evaluate", f"checkpoint={run}").stdout)
    assert figure == json.loads((run / "result.json").read_text())["test"]
    Path("new.txt").write_bytes("abcé\n".encode())
    other = in_process("evaluate", f"checkpoint={run}", "data.test=new.txt", "out=o.json")
    assert (json.loads(other.stdout)["tokens"], json.loads(other.stdout)["bytes"]) == (4, 5)
    text = in_process("generate", f"checkpoint={run}", "prompt=ab", "max_new_tokens=20").stdout
    assert set(text.decode()) <= set("abc \n\ufffd") and len(text.decode()) == 21


def test_evaluate_refuses_a_file_that_is_not_given(tmp_path):
    run = characters_run(tmp_path)
    Path("test.txt").unlink()
    assert "No such file" in refused(in_process("evaluate", f"checkpoint={run}"), "data.test")
    assert in_process("evaluate", f"checkpoint={run}", "split=valid").status == 0


# evaluate.py and generate.py: bad input


@pytest.mark.parametrize("entry", ["evaluate", "generate"])
def test_a_checkpoint_that_is_missing_truncated_or_not_ours_is_refused(entry, trained_run):
    whole = (trained_run / "best.pt").read_bytes()
    Path("cut.pt").write_bytes(whole[: len(whole) // 2])
    Path("text.pt").write_text("not a checkpoint")
    torch.save({"model": torch.zeros(2)}, "other.pt")
    Path("folder").mkdir()
    for name in ("cut.pt", "text.pt", "other.pt", "folder", "missing.pt"):
        assert name in refused(in_process(entry, f"checkpoint={name}"), "checkpoint")


@pytest.mark.parametrize("entry", ["evaluate", "generate"])
def test_a_checkpoint_must_be_given(entry):
    assert "a value must be given" in refused(in_process(entry), "checkpoint")


@pytest.mark.parametrize("entry", ["evaluate", "generate"])
def test_a_checkpoint_whose_vocabulary_is_another_is_refused(entry, trained_run):
    content = torch.load(trained_run / "best.pt", weights_only=True)
    many = "".join(map(chr, range(300)))
    torch.save({**content, "vocab": json.dumps({"kind": "characters", "characters": many})}, "swapped.pt")
    refused(in_process(entry, "checkpoint=swapped.pt"), "checkpoint")
    torch.save({**content, "vocab": json.dumps({"kind": "words"})}, "unknown.pt")
    refused(in_process(entry, "checkpoint=unknown.pt"), "checkpoint")


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("mem_len=0", "mem_len"),
        ("tgt_len=0", "tgt_len"),
        ("clamp_len=-1", "clamp_len"),
        ("batch_size=0", "batch_size"),
        ("same_length=2", "same_length"),
        ("split=dev", "split"),
        ("data.test=missing.txt", "data.test"),
        ("+data.tset=missing.txt", "data.tset"),
        ("out=file/below.json", "out"),
    ],
)
def test_evaluate_refuses_a_bad_value(override, key, trained_run):
    Path("file").touch()
    outcome = in_process("evaluate", f"checkpoint={trained_run}", override)
    refused(outcome, key)


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


# generate.py


def test_generate_writes_the_continuation_then_one_newline(trained_run):
    arguments = [f"checkpoint={trained_run}", "prompt=It's 42, isn't it?", "max_new_tokens=30"]
    first = in_process("generate", *arguments)
    assert first.status == 0 and first.stderr == ""
    assert len(first.stdout) == 31 and first.stdout.endswith(b"\n")
    assert in_process("generate", *arguments).stdout == first.stdout
    assert in_process("generate", *arguments, "seed=2").stdout != first.stdout


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
        in_process("generate", f"checkpoint={trained_run}", "max_new_tokens=20", *prompt).stdout
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


def test_evaluate_and_generate_write_into_no_other_place(trained_run):
    in_process("generate", f"checkpoint={trained_run}", "max_new_tokens=2")
    in_process("evaluate", f"checkpoint={trained_run}", "out=o.json")
    assert os.listdir() == ["o.json"]


# As real commands, once each


def test_train_as_a_command(tmp_path):
    """One real run, cut short, and one mistake."""
    outcome = command("train", *TINY, cwd=tmp_path)
    assert outcome.status == 0, outcome.stderr
    (run,) = (tmp_path / "outputs" / "python_docs").iterdir()
    text = outcome.stdout.decode()
    assert "bits per byte" in text and "valid" in text and "test" in text
    assert f"run: {run.relative_to(tmp_path)}" in text and "sample, going on" in text
    assert "step 6/6  train nll" in outcome.stderr and "Traceback" not in outcome.stderr
    refused(command("train", "+stesp=3", cwd=tmp_path), "stesp")
    hydra = command("train", "stesp=3", cwd=tmp_path)
    assert hydra.status == 1 and "stesp" in hydra.stderr and len(hydra.stderr.splitlines()) <= 10
    assert os.listdir(tmp_path) == ["outputs"]
    full = command("train", "+stesp=3", cwd=tmp_path, HYDRA_FULL_ERROR="1")
    assert full.status == 1 and "Traceback" in full.stderr


def test_evaluate_as_a_command(trained_run, tmp_path):
    outcome = command("evaluate", f"checkpoint={trained_run}", "out=o.json", cwd=tmp_path)
    assert outcome.status == 0, outcome.stderr
    expected = json.loads((trained_run / "result.json").read_text())["test"]["nll"]
    assert json.loads(outcome.stdout)["nll"] == pytest.approx(expected)
    refused(command("evaluate", "checkpoint=nowhere", cwd=tmp_path), "checkpoint")


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


def test_help_and_cfg_are_readable(tmp_path):
    for entry, key in {"train": "eval_every: 200", "evaluate": "clamp_len: trained", "generate": "top_p: null"}.items():
        shown = command(entry, "--help", cwd=tmp_path)
        assert shown.status == 0 and shown.stderr == ""
        assert "Transformer-XL" in shown.stdout.decode() and key in shown.stdout.decode()
    config = command("train", "--cfg", "job", "model.n_layer=7", cwd=tmp_path).stdout.decode()
    assert "  n_layer: 7\n" in config
    assert os.listdir(tmp_path) == []


def test_a_sweep_runs_every_point_and_survives_a_bad_one(tmp_path):
    cut = [override for override in TINY if not override.startswith(("model.n_layer", "steps"))]
    outcome = command("train", "-m", "model.n_layer=1,0,2", "seed=1,2", "steps=2", *cut, cwd=tmp_path)
    runs = list((tmp_path / "outputs" / "python_docs").iterdir())
    assert len(runs) == 4 and all((run / "result.json").exists() for run in runs)
    assert outcome.status == 1 and "model.n_layer: must be at least 1 and below 2^31, got 0" in outcome.stderr
    assert sorted(path.name for path in (tmp_path / "outputs").iterdir()) == [".sweep", "python_docs"]
    figures = {json.loads((run / "result.json").read_text())["valid"]["nll"] for run in runs}
    assert len(figures) == 4


def test_smoke_runs_in_seconds():
    outcome = in_process("train", "debug=smoke")
    assert outcome.status == 0, outcome.stderr


def test_overfit_learns_its_few_bytes_by_heart():
    assert in_process("train", "debug=overfit").status == 0
    (run,) = Path("outputs/overfit").iterdir()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["train/nll"] for row in rows if "train/nll" in row][-1] < 0.1


def test_a_low_temperature_is_as_good_as_greedy(trained_run):
    arguments = [f"checkpoint={trained_run}", "max_new_tokens=20", "prompt=x"]
    greedy = in_process("generate", *arguments, "temperature=0").stdout
    assert in_process("generate", *arguments, "temperature=1e-320").stdout == greedy


def test_closed_streams_are_no_reason_to_fail(trained_run, tmp_path):
    import subprocess
    import sys

    from conftest import ROOT

    for entry in ("evaluate", "generate"):
        line = f'"{sys.executable}" "{ROOT / entry}.py" checkpoint="{trained_run}" '
        line += "out=o.json" if entry == "evaluate" else "max_new_tokens=3"
        done = subprocess.run(f"{line} >&- <&-", shell=True, cwd=tmp_path, capture_output=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert b"Traceback" not in done.stderr


def test_yaml_that_cannot_be_read_is_told_in_a_line(tmp_path):
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    for text in ("a: [1, 2\n", "a: 1\na: 2\n", "\t- x: y: z\n"):
        (tmp_path / "conf" / "experiment" / "mine.yaml").write_text(text)
        outcome = in_process("train", "--config-dir", "conf", "experiment=mine")
        assert outcome.status == 1 and "mine.yaml" in outcome.stderr and "Traceback" not in outcome.stderr
        assert len(outcome.stderr.splitlines()) <= 10
