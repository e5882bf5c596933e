"""`python -m txl.interop`: models become runs that the other programs take, runs become files, mistakes one line."""

import json
import os
import pickle
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, TINY, in_process, run_files
from golden import part, read
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from theirs import (
    WORDS,
    Corpus,
    MemTransformerLM,
    Vocab,
    authors_file,
    golden_model,
    hugging_face_folder,
    nvidia_content,
    save,
)

from txl import checkpoint
from txl.config import load_yaml
from txl.data.vocab import from_state
from txl.interop import convert, from_original
from txl.interop.__main__ import main


def told(capsys, *arguments) -> str:
    """The one line of a refusal."""
    assert main([str(argument) for argument in arguments]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line


def imported(file: Path, out: Path = Path("run"), *arguments: str) -> Path:
    assert main([str(file), str(out), *arguments]) == 0
    return out


def test_a_model_becomes_a_run_folder(tmp_path, capsys):
    content, weights, flags = nvidia_content("xl_adaptive_div2")
    run = imported(save(content, tmp_path / "checkpoint_best.pt"))
    assert sorted(path.name for path in run.iterdir()) == ["best.pt", "config.yaml", "origin.json", "vocab.json"]
    out = capsys.readouterr().out
    assert (
        out
        == f"run: NVIDIA's checkpoint, {json.loads((run / 'origin.json').read_text())['parameters']:,} parameters, {flags['n_token']} tokens\n"
    )
    held = checkpoint.load(run / "best.pt")
    model, expected = checkpoint.load_model(held), from_original(weights, flags)
    assert all(torch.equal(tensor, expected.state_dict()[name]) for name, tensor in model.state_dict().items())
    assert held["config"] == load_yaml(run / "config.yaml") and held["step"] == 400
    assert held["config"]["tgt_len"] == flags["tgt_len"] and held["config"]["data"]["_target_"].endswith("wikitext")
    assert from_state(json.loads((run / "vocab.json").read_text())).words == WORDS[: flags["n_token"]]


def test_evaluate_takes_an_imported_run_as_its_own(tmp_path):
    """And warns of nothing: which text the model was trained on is not known."""
    run = imported(authors_file(tmp_path / "theirs", "xl_adaptive_div2"))
    Path("new.txt").write_text("w1 w2 w3 unheard\nw4 w1\n" * 8)
    outcome = in_process("evaluate", f"checkpoint={run}", "data.test=new.txt", "split=test")
    assert outcome.status == 0 and "warning" not in outcome.stderr, outcome.stderr
    figure = json.loads(outcome.stdout)
    weights, flags = golden_model("xl_adaptive_div2")
    numbers = {word: number for number, word in enumerate(WORDS[: flags["n_token"]])}
    words = Path("new.txt").read_text().replace("\n", " <eos> ").split()
    tokens = torch.tensor([[numbers.get(word, 1) for word in words]])
    model, mems, nll = from_original(weights, flags), None, []
    for first in range(0, tokens.shape[1] - 1, flags["tgt_len"]):
        segment = tokens[:, first : first + flags["tgt_len"] + 1]
        with torch.no_grad():
            each, mems = model(segment[:, :-1], mems, segment[:, 1:])
        nll.append(each)
    assert figure["nll"] == pytest.approx(torch.cat(nll, dim=1).mean().item(), abs=1e-5)


def test_the_text_of_its_data_is_measured_without_a_warning(tmp_path, monkeypatch):
    run = imported(authors_file(tmp_path / "theirs"), Path("run"))
    content = checkpoint.load(run / "best.pt")
    Path("own.txt").write_text("w1 w2 w3\n" * 20)
    content["config"]["data"] |= dict.fromkeys(("train", "valid", "test"), os.path.abspath("own.txt"))
    rewritten = {**content, **{name: json.dumps(content[name]) for name in ("config", "vocab")}}
    checkpoint.save(run / "best.pt", rewritten)
    quiet = in_process("evaluate", f"checkpoint={run}", "split=test")
    assert quiet.status == 0 and "warning" not in quiet.stderr
    checkpoint.save(run / "best.pt", {**rewritten, "texts": {"test": "another"}})
    assert "warning: the text of split=test is not the one" in in_process("evaluate", f"checkpoint={run}").stderr


def test_a_run_without_a_text_asks_for_one(tmp_path):
    run = imported(authors_file(tmp_path / "theirs"))
    outcome = in_process("evaluate", f"checkpoint={run}", "split=test")
    assert outcome.status == 1 and outcome.stderr.startswith("data."), outcome.stderr


def test_generate_continues_with_an_imported_run(tmp_path):
    run = imported(hugging_face_folder(tmp_path / "hf"))
    outcome = in_process("generate", f"checkpoint={run}", "prompt=w1 w2", "max_new_tokens=5", "seed=1", "device=cpu")
    assert outcome.status == 0, outcome.stderr
    assert set(outcome.stdout.decode().replace("\n", " <eos> ").split()) <= set(WORDS)


@pytest.mark.parametrize("symbols", ["letters", "bytes"])
def test_bytes_by_frequency_give_the_same_figures_in_our_order(tmp_path, symbols):
    """The authors' text8 and enwik8: rows change places, and nothing else."""
    weights, flags = golden_model("xl_post_norm")
    values = [32, *(97 + (7 * n) % 26 for n in range(26)), 10, 33][: flags["n_token"]]
    if symbols == "letters":
        values = [value for value in values if value not in (10, 33)]
        weights = {name: tensor[:27] if len(tensor) == 29 else tensor for name, tensor in weights.items()}
        flags["n_token"] = 27
        vocab = Vocab(["_" if value == 32 else chr(value) for value in values])
    else:
        vocab = Vocab([str(value) for value in values])
    save(Corpus(vocab), tmp_path / "cache.pt")
    run = imported(save(MemTransformerLM(weights, flags), tmp_path / "model.pt"))
    content = checkpoint.load(run / "best.pt")
    text = bytes(values[n % len(values)] for n in [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 25, 26, 0, 17])
    theirs, ours = torch.tensor([[values.index(byte) for byte in text]]), checkpoint.vocabulary(content).encode(text)
    ours = torch.tensor(ours.astype("int64"))[None]
    assert not torch.equal(theirs, ours)
    with torch.no_grad():
        expected, _ = from_original(weights, flags)(theirs[:, :-1], None, theirs[:, 1:])
        found, _ = checkpoint.load_model(content)(ours[:, :-1], None, ours[:, 1:])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def exported(run: Path, out: Path) -> Path:
    assert main([str(run), str(out)]) == 0
    return out


@pytest.mark.parametrize(
    ("name", "ending"),
    [("xl_adaptive_div2", "pt"), ("xl_adaptive_div2", "safetensors"), ("xl_d_embed", "pt"), ("shaw", "pt")],
)
def test_an_export_imported_again_is_the_same_run(tmp_path, name, ending):
    run = imported(authors_file(tmp_path / "theirs", name))
    again = imported(exported(run, Path(f"back.{ending}")), Path("again"))
    one, other = (checkpoint.load(folder / "best.pt") for folder in (run, again))
    assert one["model"].keys() == other["model"].keys()
    assert all(torch.equal(tensor, other["model"][key]) for key, tensor in one["model"].items())
    assert one["config"]["model"] == other["config"]["model"] and one["vocab"] == other["vocab"]
    assert one["config"]["tgt_len"] == other["config"]["tgt_len"]


def test_a_run_that_was_trained_here_goes_there_and_back_with_its_figures(trained_run):
    run = imported(exported(trained_run, Path("there.safetensors")), Path("back"))
    one, other = (checkpoint.load(folder / "best.pt") for folder in (trained_run, run))
    assert all(torch.equal(tensor, other["model"][key]) for key, tensor in one["model"].items())
    Path("text.txt").write_bytes(b"def main():\n    return 0\n" * 5)
    figures = [
        json.loads(in_process("evaluate", f"checkpoint={folder}", "data.test=text.txt", "out=figure.json").stdout)
        for folder in (trained_run, run)
    ]
    assert figures[0] == figures[1]


def test_a_new_run_begins_with_imported_weights(trained_run):
    run, results = imported(exported(trained_run, Path("there.pt")), Path("back")), []
    for name, first in {"of_run": trained_run, "of_import": run}.items():
        outcome = in_process("train", f"name={name}", f"init_from={first}", *TINY)
        assert outcome.status == 0, outcome.stderr
        (folder,) = Path("outputs", name).iterdir()
        results.append({**json.loads((folder / "result.json").read_text()), "seconds": None})
    assert results[0] == results[1]


@pytest.mark.parametrize("ending", ["pt", "safetensors"])
def test_an_export_has_the_authors_names_and_loads_without_their_classes(tmp_path, ending):
    weights, flags = golden_model("xl_adaptive_div2")
    file = exported(imported(authors_file(tmp_path / "theirs", "xl_adaptive_div2")), Path(f"back.{ending}"))
    if ending == "pt":
        content = torch.load(file, weights_only=True)
        state, given, vocab = content["state_dict"], content["flags"], content["vocab"]
    else:
        with safe_open(file, "pt") as opened:
            given, vocab = (json.loads(opened.metadata()[name]) for name in ("flags", "vocab"))
        state = load_file(file)
    assert all(torch.equal(state[name], tensor) for name, tensor in weights.items())
    model = MemTransformerLM(weights, flags)
    assert state.keys() == model.state_dict().keys()  # so it loads strictly
    torch.testing.assert_close(state["pos_emb.inv_freq"], model.pos_emb.inv_freq)
    assert given["cutoffs"] == flags["cutoffs"] and given["tgt_len"] == flags["tgt_len"]
    assert from_state(vocab).words == WORDS[: flags["n_token"]]
    Path("plain").touch()
    assert stat.S_IMODE(file.stat().st_mode) == stat.S_IMODE(Path("plain").stat().st_mode)


def test_where_figures_of_two_codes_differ_a_note_says_so(tmp_path, capsys):
    content, _, _ = nvidia_content("absolute_per_layer", mem_len=2, tgt_len=4)
    run = imported(save(content, tmp_path / "x.pt"))
    assert "note: the authors' code adds positions to the memory again" in capsys.readouterr().err
    exported(run, Path("out.pt"))
    assert "note: the authors' code adds positions to the memory again" in capsys.readouterr().err
    run = imported(hugging_face_folder(tmp_path / "hf"), Path("hf_run"))
    assert "note: its first memory is mem_len rows of zeros" in capsys.readouterr().err
    exported(run, Path("hf.safetensors"))
    assert "untie_r" in capsys.readouterr().err
    Path("short.txt").write_text("\n".join(WORDS[:28]))
    imported(save(content, tmp_path / "y.pt"), Path("short"), "--vocab", "short.txt")
    assert "has 28 tokens, the model 29" in capsys.readouterr().err


def test_another_vocabulary_and_another_text_can_be_given(tmp_path):
    file = save(MemTransformerLM(*golden_model("xl_post_norm")), tmp_path / "model.pt")
    words = [f"x{number}" for number in range(27)]
    Path("list.txt").write_text("\n".join(["<eos>", "<unk>", *words]))
    run = imported(file, Path("run"), "--vocab", "list.txt", "--data", "ptb")
    content = checkpoint.load(run / "best.pt")
    assert content["config"]["data"]["_target_"] == "txl.data.published.penn_treebank"
    assert checkpoint.vocabulary(content).words == ["<eos>", "<unk>", *words]


def test_a_given_vocabulary_stands_in_for_one_that_is_not_understood(tmp_path, capsys):
    folder = hugging_face_folder(tmp_path / "hf")
    (folder / "vocab.bin").write_bytes(b"\x80\x02cos\nsystem\n.")
    assert "'os.system'" in told(capsys, folder, "run")
    Path("list.txt").write_text("\n".join(WORDS[:60]))
    imported(folder, Path("run"), "--vocab", "list.txt")


class Touching:
    def __reduce__(self):
        return os.system, ("touch written",)


def bad_files(folder: Path) -> dict[str, tuple[Path, str]]:
    """Files, and the beginning of what is said of each."""
    folder.mkdir()
    whole = authors_file(folder / "whole").read_bytes()
    cut = whole[: len(whole) // 2]
    torch.save(part(read("xl_post_norm")[0], "weight."), folder / "state.pt")
    save_file({"a": torch.zeros(2)}, folder / "alone.safetensors")
    contents = {
        "acts.pt": (pickle.dumps({"model_state": Touching(), "model_config": {}}), r"names 'posix.system'"),
        "cut.pt": (cut, "damaged"),
        "empty.pt": (b"", "neither a file of torch.save nor a pickle"),
        "text.txt": (b"a text\n", "neither a file of torch.save nor a pickle"),
        "cut.safetensors": ((folder / "alone.safetensors").read_bytes()[:-4], "damaged"),
        "state.pt": (None, "holds parameters alone"),
        "alone.safetensors": (None, "has no flags and vocab in its metadata"),
        "none.pt": (None, "there is no file or folder"),
    }
    for name, (content, _) in contents.items():
        if content is not None:
            (folder / name).write_bytes(content)
    return {name: (folder / name, words) for name, (_, words) in contents.items()}


def test_a_file_that_is_not_understood_is_one_line_and_leaves_nothing(tmp_path, capsys):
    for file, words in bad_files(tmp_path / "bad").values():
        line = told(capsys, file, "run")
        assert line.startswith("FILE: ") and words in line
    assert not Path("run").exists() and not Path("written").exists()


def test_the_command_refuses_as_a_program_too(tmp_path):
    file, words = bad_files(tmp_path / "bad")["acts.pt"]
    command = [sys.executable, "-m", "txl.interop", str(file), "run"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 1 and done.stdout == "" and len(done.stderr.splitlines()) == 1 and words in done.stderr
    assert not Path("run").exists() and not Path("written").exists()


def test_help_loads_no_torch():
    program = (
        "import sys\nfrom txl.interop.__main__ import main\ntry:\n    main(['--help'])\n"
        "except SystemExit:\n    assert 'torch' not in sys.modules\nelse:\n    raise AssertionError"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0 and "--vocab FILE" in done.stdout, done.stderr


def test_mistakes_on_the_command_line_are_one_line(tmp_path, capsys, trained_run):
    file = authors_file(tmp_path / "theirs")
    bare = save(MemTransformerLM(*golden_model("xl_post_norm")), tmp_path / "bare" / "model.pt")
    Path("many.txt").write_text("\n".join(WORDS))
    Path("full").mkdir()
    Path("full/notes.txt").touch()
    Path("taken.pt").write_bytes(b"mine")
    lines = {
        "the following arguments are required: FILE, OUT": [],
        "unrecognized arguments: --fast": [file, "run", "--fast"],
        "OUT: full holds files already": [file, "full"],
        "OUT: the run's folder cannot be written: many.txt": [file, "many.txt"],
        "OUT: taken.pt is there already": [trained_run, "taken.pt"],
        "OUT: new.pt is an export, which takes no --vocab": [trained_run, "new.pt", "--vocab", "many.txt"],
        "OUT: none/new.pt cannot be written (No such file": [trained_run, "none/new.pt"],
        "OUT: none/new.safetensors cannot be written (No such file": [trained_run, "none/new.safetensors"],
        "--vocab: cannot read none.txt": [file, "run", "--vocab", "none.txt"],
        "holds no vocabulary; give its file": [bare, "run"],
        "FILE: its model has 29 tokens, its vocabulary 61": [file, "run", "--vocab", "many.txt"],
        "--data: there is no 'moon'; there are enwik8": [file, "run", "--data", "moon"],
        "is a run of this project; an OUT that ends in": [trained_run, "run"],
        "FILE: there is no file or run folder none": ["none", "new.pt"],
        "FILE: full holds no best.pt": ["full", "new.pt"],
        "is damaged or no checkpoint": [file, "new.pt"],
    }
    for words, arguments in lines.items():
        assert words in told(capsys, *arguments)
    assert Path("taken.pt").read_bytes() == b"mine" and [path.name for path in Path("full").iterdir()] == ["notes.txt"]
    assert not [name for name in ("run", "new.pt") if Path(name).exists()]


STRANGE = [None, "x", -3, 0, 2.5, ["x"], {}, 2**70]
ARGUMENTS = "n_layer n_head d_model d_head d_inner d_embed mem_len clamp_len cutoffs div_val tie_projs same_length "
ARGUMENTS += "untie_r pre_lnorm dropout vocab_size tgt_len attn_type layer_norm_epsilon ext_len tie_word_embeddings"


@pytest.mark.parametrize("name", ARGUMENTS.split())
def test_an_argument_of_any_kind_is_understood_or_told(tmp_path, capsys, name):
    folder = hugging_face_folder(tmp_path / "hf")
    config = json.loads((folder / "config.json").read_text())
    for number, value in enumerate(STRANGE):
        (folder / "config.json").write_text(json.dumps({**config, name: value}))
        status = main([str(folder), f"run{number}"])
        captured = capsys.readouterr()
        assert status == 0 or (status == 1 and captured.err.count("\n") == 1 and captured.err.startswith("FILE: "))
        assert Path(f"run{number}").exists() == (status == 0)


def test_numbers_that_are_not_finite_are_told(tmp_path, capsys):
    weights, flags = golden_model("xl_post_norm")
    model = MemTransformerLM(weights, flags)
    with torch.no_grad():
        model.word_emb.emb_layers[0].weight[3, 1] = torch.nan  # which is no equal to its twin in the output layer
    save(Corpus(Vocab(WORDS[: flags["n_token"]])), tmp_path / "cache.pt")
    line = told(capsys, save(model, tmp_path / "model.pt"), "run")
    assert line == "FILE: its word_emb.emb_layers.0.weight holds numbers that are not finite"


def test_names_out_of_a_file_cannot_steer_the_terminal(tmp_path, capsys):
    content, _, _ = nvidia_content("xl_post_norm")
    content["model_state"]["\x1b[2J\nred"] = torch.zeros(2)
    assert "?[2J red not understood" in told(capsys, save(content, tmp_path / "x.pt"), "run")


def test_what_the_authors_code_lacks_is_told(capsys):
    overrides = ["model/position=rotary", "steps=1", "data.max_bytes=20000", "model.n_layer=1", "model.d_model=16"]
    overrides += ["model.n_head=2", "model.d_head=8", "model.d_inner=16", "tgt_len=16", "sample.max_new_tokens=1"]
    assert in_process("train", "name=r", *overrides).status == 0
    (run,) = Path("outputs/r").iterdir()
    assert told(capsys, run, "new.pt") == "model.position: the authors' code has no RotaryPosition"


@pytest.mark.parametrize("fails", ["torch.save", "save_file", "checkpoint"])
def test_a_full_disk_is_told_and_leaves_nothing_behind(tmp_path, capsys, monkeypatch, trained_run, fails):
    def full(*_, **__):
        raise (OSError if fails == "checkpoint" else RuntimeError)("no space left on device")

    before = run_files(tmp_path)
    if fails == "checkpoint":
        file = authors_file(tmp_path / "theirs")
        before = run_files(tmp_path)
        monkeypatch.setattr(convert.checkpoint, "save", full)
        assert "OUT: run cannot be written (no space" in told(capsys, file, "run")
    else:
        target = (convert.torch, "save") if fails == "torch.save" else (convert, "save_file")
        monkeypatch.setattr(*target, full)
        out = "out.pt" if fails == "torch.save" else "out.safetensors"
        assert f"OUT: {out} cannot be written (no space" in told(capsys, trained_run, out)
    assert run_files(tmp_path) == before
