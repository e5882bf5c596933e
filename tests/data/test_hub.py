import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, TINY, compose, in_process, refused

from txl.config import build
from txl.data.store import SPLITS

HUB_SPLITS = dict(zip(SPLITS, ("train", "validation", "test"), strict=True))


def table(path, rows, column="text"):
    import pyarrow
    from pyarrow import parquet

    Path(path).parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.table({"number": list(range(len(rows))), column: rows}), path)


def configurations(folder, *names):
    """The README of a data set on the hub, whose header says which files are which."""
    lines = ["---", "configs:"]
    for name in names:
        lines += [f"- config_name: {name}", "  data_files:"]
        for split in HUB_SPLITS.values():
            lines += [f"  - split: {split}", f"    path: {name}/{split}-*"]
    Path(folder, "README.md").write_text("\n".join([*lines, "---", "# A data set", ""]))


def corpus_of(kind, *overrides, id="set"):
    return build(compose(f"data={kind}", f"data.id={id}", *overrides).data, cache_dir="cache")


def texts(corpus):
    return [corpus.text(name).read() for name in SPLITS]


@pytest.mark.parametrize("size", ["2", "103"])
def test_wikitext_with_its_blank_lines(size):
    """The hub keeps a blank line as nothing at all; the file holds a space and its end."""
    for other in ("2", "103"):
        for split in HUB_SPLITS.values():
            rows = ["", " = Title = \n", "", f" the {split} text of {other} — @-@ <unk> . \n", ""]
            table(f"set/wikitext-{other}-v1/{split}-00000-of-00001.parquet", rows)
    configurations("set", "wikitext-2-v1", "wikitext-103-v1", "wikitext-2-raw-v1", "wikitext-103-raw-v1")
    corpus = corpus_of(f"wikitext{size}", "data.verify=false")
    assert texts(corpus) == [
        f" \n = Title = \n \n the {split} text of {size} — @-@ <unk> . \n \n".encode() for split in HUB_SPLITS.values()
    ]
    split = corpus.split("train", corpus.vocabulary())
    assert len(split.tokens) == 17
    assert texts(corpus_of(f"wikitext{size}", "data.max_bytes=7")) == [b" \n = Ti"] * 3
    with pytest.raises(ValueError, match=r"^data\.verify: the train text has 17 tokens"):
        corpus_of(f"wikitext{size}").split("train", corpus.vocabulary())


def test_enwik8_as_one_text_of_its_raw_form():
    table("set/enwik8/train/0000.parquet", ["not", "this"])
    table("set/enwik8-raw/train/0000.parquet", ["<a>\nnaïve\n\n" * 20, "b\r\n" * 20])
    corpus = corpus_of("enwik8", "data.verify=false")
    whole = ("<a>\nnaïve\n\n" * 20 + "b\r\n" * 20).encode()
    assert b"".join(texts(corpus)) == whole and corpus.text("train").size == int(0.9 * len(whole))
    with pytest.raises(
        ValueError, match=r"^data\.path: set gave 300 bytes in place of 100,000,000; give data\.path=FOLDER"
    ):
        corpus_of("enwik8").text("train")


def test_text8_from_its_three_splits():
    parts = {"train": "a b c d" * 90, "validation": " e f" * 8, "test": " g h" * 8}
    for split, part in parts.items():
        table(f"set/data/{split}-00000-of-00001.parquet", [part[:5], part[5:]])
    corpus = corpus_of("text8", "data.verify=false")
    assert b"".join(texts(corpus)) == "".join(parts.values()).encode()
    assert corpus.vocabulary().n_token == 9


@pytest.mark.parametrize("level", ["words", "characters"])
def test_penn_treebank_a_sentence_a_row(level):
    for split in HUB_SPLITS.values():
        table(f"set/penn_treebank/{split}/0000.parquet", [f"the {split} <unk>", " N million "], "sentence")
    corpus = corpus_of("ptb", "data.verify=false", f"data.level={level}")
    form = " the {} <unk> \n N million \n" if level == "words" else "the {} <unk>\nN million\n"
    assert texts(corpus) == [form.format(split).encode() for split in HUB_SPLITS.values()]


def test_billion_words_of_which_a_fiftieth_is_held_out():
    table("set/plain_text/train/0000.parquet", ["A b .", "C ."])
    table("set/plain_text/train/0001.parquet", ["D . \n"])
    table("set/plain_text/test/0000.parquet", [f"held out {n} ." for n in range(100)])
    corpus = corpus_of("lm1b", "data.vocab.min_freq=1")
    assert texts(corpus) == [b"A b .\nC .\nD . \n", *[b"held out 0 .\nheld out 1 .\n"] * 2]
    vocab = corpus.vocabulary()
    words = [vocab.words[token] for token in corpus.split("train", vocab).tokens]
    assert words == ["<S>", "A", "b", ".", "<S>", "C", ".", "<S>", "D", ".", "<S>"]


def test_any_data_set_with_a_row_a_document():
    for split in HUB_SPLITS.values():
        table(f"set/data/{split}-00000-of-00001.parquet", [f"one {split}\n", "", "two", "日本\r\n", "end"], "story")
    corpus = corpus_of("hub", "data.column=story", "data.reset_at_document=true", r"data.document_separator='<|>\n'")
    assert texts(corpus)[1] == "one validation\n<|>\n<|>\ntwo<|>\n日本\r\n<|>\nend".encode()
    split = corpus.split("train", corpus.vocabulary())
    documents = [split.text.read()[start:][:3] for start in split.starts]
    assert split.resets and documents == [b"one", b"<|>", b"two", "日".encode(), b"end"]
    assert texts(corpus_of("hub", "data.column=story"))[0] == "one train\n\n\ntwo\n日本\r\n\nend".encode()


def test_one_split_is_cut_where_there_is_no_other():
    table("set/data/train-00000-of-00001.parquet", ["abcdefghi"] * 10)
    cut = ["data.valid_split=null", "data.test_split=null", "data.fractions=[0.5,0.3,0.2]"]
    corpus = corpus_of("hub", *cut)
    assert b"".join(texts(corpus)) == b"\n".join([b"abcdefghi"] * 10)
    assert [corpus.text(name).size for name in SPLITS] == [49, 30, 20]
    with pytest.raises(ValueError, match=r"^data\.test_split: names no split of set; make both"):
        corpus_of("hub", "data.test_split=null").text("test")


def test_a_separator_inside_rows_is_told_where_documents_count(capsys):
    table("set/data/train-00000-of-00001.parquet", ["a\nb", "c\n", "d"])
    assert corpus_of("hub").text("train").read() == b"a\nb\nc\n\nd"
    assert capsys.readouterr().err == ""
    corpus_of("hub", "data.shuffle_documents=true").text("train")
    assert capsys.readouterr().err == "warning: data.document_separator also stands inside 1 of the rows\n"


def test_changed_rows_are_read_again():
    for rows in (["one text"], ["two text"], ["two", "texts"], ["one text"]):
        table("set/data/train-00000-of-00001.parquet", rows)
        assert corpus_of("hub").text("train").read() == "\n".join(rows).encode()


MISTAKES = {
    "column": (["data.column=story"], "data.column: set has no 'story'; it has number, text"),
    "numbers": (["data.column=number"], "data.column: 'number' of set holds int, not text"),
    "split": (["data.train_split=training"], "data.id: set cannot be had from the hub"),
    "config": (["data.config=other"], "data.id: set cannot be had from the hub"),
    "folder": (["data.id=./none"], "data.id: ./none cannot be had from the hub"),
    "name": (["data.id=nobody/none"], "data.id: nobody/none cannot be had from the hub"),
    "script": (["data.id=script"], "data.id: script cannot be had from the hub"),
    "broken": (["data.id=broken"], "data.id: broken cannot be had from the hub"),
    "max_bytes": (["data.max_bytes=0"], "data.max_bytes: must be at least 1"),
    "cache": (["data.max_bytes=2"], "cache_dir: cannot write file/cache"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_that_begins_with_its_key(mistake):
    table("set/data/train-00000-of-00001.parquet", ["a", "b"])
    for name, text in {
        "script/script.py": "raise SystemExit",
        "broken/train-00000.parquet": "PAR1",
        "file": "",
    }.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
    overrides, line = MISTAKES[mistake]
    cache_dir = "file/cache" if mistake == "cache" else "cache"
    with pytest.raises(ValueError) as caught:
        build(compose("data=hub", "data.id=set", *overrides).data, cache_dir=cache_dir).text("train")
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)


def test_the_command_names_the_key():
    table("set/data/train-00000-of-00001.parquet", ["a", "b"])
    arguments = [override for override in TINY if "data." not in override]
    refused(in_process("train", "data=hub", *arguments), "data.id")
    assert "it has number, text" in refused(
        in_process("train", "data=hub", "data.id=set", "data.column=story", *arguments), "data.column"
    )


def test_a_row_that_is_nothing_is_refused():
    table("set/data/train-00000-of-00001.parquet", ["a", None])
    with pytest.raises(ValueError, match=r"^data\.column: 'text' of set holds NoneType, not text"):
        corpus_of("hub").text("train")


def test_nothing_of_the_hub_is_imported_for_other_corpora():
    program = "import sys, txl.data.corpus, txl.data.published; print({'datasets', 'tokenizers'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, timeout=60)
    assert done.stdout == b"set()\n"
