"""measure=page: a run on one HTML page that needs nothing else and escapes everything."""

import base64
import json
import math
import re
import shutil
import signal
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import compose, finished, in_process, refused, text_data

from txl import archive, checkpoint
from txl import config as hydra_config
from txl.instruments.page import Page
from txl.instruments.subject import Subject
from txl.instruments.taking import take
from txl.signals import Stopped

KNOWN = {
    *("html", "head", "meta", "title", "style", "body", "h1", "h2", "section", "details", "summary"),
    *("table", "tr", "th", "td", "br", "p", "pre", "span", "img"),
}
ALLOWED = {"lang", "charset", "http-equiv", "content", "name", "class", "title", "style", "alt", "src"}


class Read(HTMLParser):
    """What a browser would find: elements, attributes, text, and the coloured tokens."""

    def __init__(self, page):
        super().__init__(convert_charrefs=True)
        self.tags, self.images, self.spans, self.text, self.open = [], [], [], "", []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        assert tag in KNOWN, tag
        assert given.keys() <= ALLOWED, given
        assert "url" not in given.get("style", "")
        assert given.get("src", "data:image/png;base64,").startswith("data:image/png;base64,")
        self.tags.append(tag)
        if tag == "img":
            self.images.append(base64.b64decode(given["src"].partition(",")[2], validate=True))
        if tag == "span" and given.get("class") != "scale":
            self.spans.append([given, ""])
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "style":
            assert "url" not in data and "@import" not in data
        else:
            self.text += data
            if self.open and self.open[-1] == "span" and self.spans:
                self.spans[-1][1] += data


@pytest.fixture
def run(trained_run, tmp_path):
    """A copy of the run, to be written to."""
    return Path(shutil.copytree(trained_run, tmp_path / "run"))


def measured(path, *overrides):
    outcome = in_process("evaluate", f"checkpoint={path}", "measure=page", "out=o.json", *overrides)
    assert outcome.status == 0, outcome.stderr
    (line,) = outcome.stdout.decode().splitlines()
    return json.loads(line), json.loads(Path("o.json").read_text()), Read(Path("o.html").read_text())


def subject_of(run, *overrides):
    return Subject.of(hydra_config.plain(compose(f"checkpoint={run}", *overrides, config_name="evaluate")))


def slow_nll(run, n_token):
    """The nll of the first tokens but the very first, segment by segment."""
    model = checkpoint.load_model(checkpoint.load(run / "best.pt"))
    tokens, mems, values = torch.from_numpy(np.asarray(subject_of(run).split.tokens).astype(np.int64))[None], None, []
    for start in range(0, n_token - 1, 16):
        nll, mems = model(tokens[:, start : start + 16], mems, tokens[:, start + 1 : start + 17])
        values += nll[0].tolist()
    return tokens[0, :n_token].tolist(), values[: n_token - 1]


def test_a_run_is_gathered_on_one_page(run):
    (run / "sample.txt").write_text("a sample: é\n")
    for measure in ("figure", "attention"):
        assert in_process("evaluate", f"checkpoint={run}", f"measure={measure}").status == 0
    outcome = in_process("evaluate", f"checkpoint={run}", "measure=page", "measure.length=300")
    assert outcome.status == 0, outcome.stderr
    (line,) = map(json.loads, outcome.stdout.decode().splitlines())
    stem = str(run / "evaluate" / "test-default_measure.length-300_measure-page")
    found, page = json.loads(Path(f"{stem}.json").read_text()), Read(Path(f"{stem}.html").read_text())
    assert Path(f"{stem}.png").read_bytes().startswith(b"\x89PNG")
    evaluated = ["evaluate/test-default", "evaluate/test-default_measure-attention"]
    assert found["gathered"] == ["result.json", "curves.png", "sample.txt", *evaluated, "test", "config"]
    assert line["gathered"] == found["gathered"] and line["file"] == Path(f"{stem}.html").name
    figure = json.loads((run / "result.json").read_text())
    assert f"{figure['test']['nll']:.6g}" in page.text and f"{figure['valid']['ppl']:.6g}" in page.text
    assert "a sample: é\n" in page.text
    assert "model.memory.mem_len" in page.text and "optimizer.lr" in page.text
    again = in_process("evaluate", f"checkpoint={run}", "measure=page", "measure.length=300")
    assert json.loads(again.stdout)["gathered"] == found["gathered"]  # a page is no part of itself
    pictures = [run / "curves.png", run / "evaluate" / "test-default_measure-attention.png"]
    assert page.images == [picture.read_bytes() for picture in pictures]


def test_the_text_is_coloured_by_its_loss(run):
    tokens, expected = slow_nll(run, 70)
    line, found, page = measured(run, "measure.length=70")
    assert found["losses"] == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert line["nll"] == pytest.approx(np.mean(expected), rel=1e-5) and line["tokens"] == 69
    assert "".join(text for _, text in page.spans) == bytes(tokens).decode().replace("\n", "↵\n")
    assert page.spans[0][0]["class"] == "unread" and page.spans[0][0]["title"] == "position 0"
    for place, (given, _) in enumerate(page.spans[1:]):
        shade = float(re.fullmatch(r"background: rgb\(220 40 30 / (\S+)\)", given["style"])[1])
        assert shade == pytest.approx(min(1, expected[place] / math.log(256)), abs=2e-3)
        nll, position = re.fullmatch(r"nll (\S+), position (\d+)", given["title"]).groups()
        assert int(position) == place + 1 and float(nll) == pytest.approx(expected[place], abs=2e-3)
    assert len(measured(run, "measure.length=20", "batch_size=3")[2].spans) == 20
    whole = measured(run, "measure.length=5000", "split=valid")[1]
    result = json.loads((run / "result.json").read_text())["valid"]
    assert whole["nll"] == pytest.approx(result["nll"]) and whole["tokens"] == result["tokens"]


def test_only_what_is_coloured_is_read(run, monkeypatch):
    monkeypatch.setattr("txl.evaluation.AT_ONCE", 16)
    shares, found = [], {}
    shares = list(Page(length=40).run(subject_of(run), found, Path("o.json")))
    assert len(shares) == 3 and shares[-1] == 1.0 and found["tokens"] == 39


def test_a_checkpoint_alone_shows_what_it_has(run):
    Path("alone").mkdir()
    shutil.copy(run / "last.pt", "alone/saved.pt")
    Path("alone/curves.png").write_bytes(b"no picture")
    Path("alone/result.json").write_text("{")
    Path("alone/evaluate").mkdir()
    Path("alone/evaluate/broken.json").write_text("[1")
    _, found, page = measured("alone/saved.pt", "measure.length=30")
    assert found["gathered"] == ["test", "config"] and page.images == []
    assert "model.memory.mem_len" in page.text


HOSTILE = "<script>alert(1)</script><img src=http://a.b/x onerror=alert(2)>\"'>&amp;</pre></table></style>"


def test_whatever_comes_from_a_run_is_escaped(run):
    """Text, sample, settings, figures and the names of files and keys: no element and no attribute comes from them."""
    text = (HOSTILE + "\nplain é日 \x00\x1b[0m \n").encode() + b"\xff\xc3 "
    data = text_data(train=text * 20, valid=text, test=text)
    small = ["tgt_len=16", "batch_size=2", "steps=2", "model.d_model=16", "model.n_layer=1", "sample.max_new_tokens=4"]
    made = finished("hostile", *data, *small)
    state = torch.load(made / "best.pt", weights_only=True)
    config = json.loads(state["config"])
    config["name"], config["device"] = HOSTILE, HOSTILE
    archive.write(made / "best.pt", {**state, "config": json.dumps(config)})
    (made / "sample.txt").write_bytes(text)
    values = {"measure": HOSTILE, HOSTILE: 1, "nll": 2.0, "complete": True, "gone": None, "list": [HOSTILE]}
    (made / "result.json").write_text(json.dumps({**values, "test": values}))
    (made / "evaluate").mkdir()
    name = HOSTILE.replace("/", "_")
    (made / "evaluate" / f"{name}.json").write_text(json.dumps(values))
    shutil.copy(run / "curves.png", made / "evaluate" / f"{name}.png")
    _, found, page = measured(made)
    assert len(page.images) == 2 and f"evaluate/{name}" in found["gathered"]
    assert page.text.count("<script>alert(1)</script>") >= 7  # all of them, as text
    shown = "".join(text for _, text in page.spans)
    assert shown == HOSTILE + "↵\nplain é日 \\x00\\x1b[0m ↵\n\\xff\\xc3 "
    assert "\0" not in page.text and "\x1b" not in page.text
    assert any(re.fullmatch(r"nll \S+ \+ \S+ \+ \S+, position \d+", given["title"]) for given, _ in page.spans)


def test_a_token_that_is_markup_is_escaped():
    """A word may hold a whole element; the letters of one, each in a span of its own, are harmless anyway."""
    text = (HOSTILE + "\none two \n").encode()
    data = text_data(train=text * 40, valid=text * 10, test=text * 10)
    small = ["tgt_len=16", "batch_size=2", "steps=2", "model.d_model=16", "model.n_layer=1", "sample.max_new_tokens=4"]
    _, _, page = measured(finished("words", *data, "data/vocab=words", *small), "measure.length=7")
    words = [*HOSTILE.split(), "\n", "one", "two", "\n"]
    assert [text for _, text in page.spans] == ["↵\n" if word == "\n" else f"{word} " for word in words]


def test_interrupted_it_shows_what_was_read(run, monkeypatch):
    monkeypatch.setattr("txl.evaluation.AT_ONCE", 16)
    answers = iter([None, signal.SIGINT, signal.SIGINT])
    with pytest.raises(Stopped, match="interrupted") as stopped:
        take(Page(length=100), subject_of(run), Path("i.json"), received=lambda: next(answers))
    assert stopped.value.status == 130
    found, page = json.loads(Path("i.json").read_text()), Read(Path("i.html").read_text())
    assert not found["complete"] and found["tokens"] == 32 and Path("i.png").exists()
    assert found["losses"][:32] == pytest.approx(slow_nll(run, 33)[1], rel=1e-4, abs=1e-5)
    assert found["losses"][32:] == [None] * 67
    assert [given.get("class") for given, _ in page.spans] == ["unread", *[None] * 32, *["unread"] * 67]


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("measure.length=1", "measure.length"),
        ("measure.length=null", "measure.length"),
        ("+measure.lenght=9", "measure.lenght"),
        ("out=o.html", "out"),
    ],
)
def test_a_bad_value_is_refused(override, key, run):
    refused(in_process("evaluate", f"checkpoint={run}", "measure=page", override), key)
    assert not list(run.glob("evaluate/*"))
