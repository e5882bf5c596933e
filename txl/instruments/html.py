"""A run as one HTML page. Nothing is loaded, nothing runs, and what comes from the run's folder is text, never markup."""

import base64
import json
import math
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from txl.instruments.showing import readable, whole_characters
from txl.instruments.subject import Subject

PNG = b"\x89PNG\r\n\x1a\n"
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"  # for the browser: nothing from elsewhere
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
h2 { margin-top: 2.5rem; border-bottom: 1px solid #ccc; }
table { border-collapse: collapse; font-size: 14px; }
td, th { border: 1px solid #ddd; padding: .15rem .6rem; text-align: left; overflow-wrap: anywhere; }
img { max-width: 100%; }
pre { font: 14px/1.5 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
pre, table { background: #fff; } .unread { color: #999; }
.scale { background: linear-gradient(to right, rgb(220 40 30 / 0), rgb(220 40 30 / 1)); padding: 0 3rem; }
"""


def page(subject: Subject, losses: np.ndarray, out: Path) -> tuple[str, list[str]]:
    """The page, and the names of what it was gathered from; `losses` are those of the tokens from the second on.

    What cannot be read as what its name says, a picture that is none, is left out.
    """
    folder, config = subject.path.parent, subject.content["config"]
    name, gathered = str(config["name"]), []
    facts = {"checkpoint": subject.path, "step": subject.content["step"], "tokens seen": subject.content["tokens"]}
    parts = [f"<h1>{shown(name)}</h1>", table(facts)]

    def section(title: str, source: str, body: str | None) -> None:
        if body is not None:
            gathered.append(source)
            parts.append(f"<section><h2>{shown(title)}</h2>{body}</section>")

    section("Result", "result.json", results(read_json(folder / "result.json")))
    section("Curves", "curves.png", image(folder / "curves.png", "curves"))
    section("Sample", "sample.txt", sample(folder / "sample.txt"))
    files = [file for suffix in ("json", "png") for file in (folder / "evaluate").glob(f"*.{suffix}")]
    for stem in sorted({file.with_suffix("") for file in files}):
        if stem.resolve() != out.with_suffix("").resolve():
            section(stem.name, f"evaluate/{stem.name}", measured(stem))
    text = coloured(subject, losses, math.log(max(config["model"]["n_token"], 2)))
    section(f"The text of split={subject.split.name} by its loss", subject.split.name, text)
    section("Settings", "config", f"<details><summary>all keys</summary>{table(dict(flat(config)))}</details>")
    head = f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{POLICY}">'
    view = '<meta name="viewport" content="width=device-width">'
    head = f"{head}{view}<title>{shown(name)}</title><style>{STYLE}</style>"
    body = "\n".join(parts)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n', gathered


def shown(value: Any) -> str:
    """A value of the run's as text of the page."""
    if value is None or isinstance(value, (bool, float)):
        value = f"{value:.6g}" if isinstance(value, float) else json.dumps(value)
    return escape(readable(str(value).encode("utf-8", "backslashreplace")))


def flat(config: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Nested settings as full keys."""
    if isinstance(config, Mapping) and config:
        for key, value in config.items():
            yield from flat(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, config if isinstance(config, (str, float)) else json.dumps(config)


def table(values: Mapping[str, Any]) -> str:
    """Names and values."""
    rows = (f"<tr><th>{shown(name)}</th><td>{shown(value)}</td></tr>" for name, value in values.items())
    return f"<table>{''.join(rows)}</table>"


def plain_values(found: Mapping[str, Any]) -> dict[str, Any]:
    """What is a single value: the figures of a measurement without its lists."""
    return {key: value for key, value in found.items() if isinstance(value, (str, int, float)) or value is None}


def results(found: Any) -> str | None:
    """The figures of each split, and the run's own."""
    if not isinstance(found, Mapping):
        return None
    figures = {name: plain_values(value) for name, value in found.items() if isinstance(value, Mapping)}
    keys = list(dict.fromkeys(key for figure in figures.values() for key in figure))
    head = "".join(f"<th>{shown(key)}</th>" for key in ["", *figures])
    rows = [[key, *(figure.get(key, "") for figure in figures.values())] for key in keys]
    body = "".join("<tr>" + "".join(f"<td>{shown(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table><br>{table(plain_values(found))}"


def measured(stem: Path) -> str | None:
    """What `evaluate.py` left under a name: its figures and its picture."""
    found, picture = read_json(Path(f"{stem}.json")), image(Path(f"{stem}.png"), stem.name)
    figures = table(plain_values(found)) if isinstance(found, Mapping) else None
    return None if figures is None and picture is None else f"{figures or ''}{picture or ''}"


def read_json(path: Path) -> Any:
    """What the file holds; None where that cannot be read."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return None


def image(path: Path, name: str) -> str | None:
    """A PNG, inside the page."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    if not content.startswith(PNG):
        return None
    return f'<p><img alt="{shown(name)}" src="data:image/png;base64,{base64.b64encode(content).decode()}"></p>'


def sample(path: Path) -> str | None:
    """The text that the run wrote."""
    try:
        return f"<pre>{escape(readable(path.read_bytes()))}</pre>"
    except OSError:
        return None


def coloured(subject: Subject, losses: np.ndarray, full: float) -> str:
    """The tokens by their loss, `full` being full colour: those that make up one character together, by their mean."""
    nll = [math.nan, *losses.tolist()]  # nothing predicts the first
    spans = []
    for first, stop, text in whole_characters(subject.vocab, subject.split.tokens[: len(nll)].tolist()):
        text, own = escape(text.replace("\n", "↵\n")), nll[first:stop]
        mean = sum(own) / len(own)
        if math.isnan(mean):
            spans.append(f'<span class="unread" title="position {first}">{text}</span>')
        else:
            words = f"nll {' + '.join(f'{loss:.3f}' for loss in own)}, position {first}"
            shade = min(1.0, max(0.0, mean / full))
            spans.append(f'<span style="background: rgb(220 40 30 / {shade:.3f})" title="{words}">{text}</span>')
    scale = f'<p>nll from 0 <span class="scale"></span> to {full:.2f} nats, a guess among all tokens alike</p>'
    return f"{scale}<pre>{''.join(spans)}</pre>"
