import hashlib
from pathlib import Path

import numpy as np
import pytest
from conftest import TINY, compose, in_process, published_folder, refused
from test_words import authors_lines, authors_vocabulary

from txl.config import build
from txl.data import published
from txl.data.corpus import text_files
from txl.data.store import SPLITS
from txl.data.vocab import BPE, Bytes, Characters, Words

KINDS = ["enwik8", "text8", "wikitext103", "wikitext2", "ptb", "lm1b"]
BOM = b"\xef\xbb\xbf"
ROOT_1B = "1-billion-word-language-modeling-benchmark-r13output"
HELD_OUT = "heldout-monolingual.tokenized.shuffled/news.en.heldout-00000-of-00050"
SHARD = "training-monolingual.tokenized.shuffled/news.en-0000{}-of-00100"
# where the usual files lie; a text is in the first form, or each split in the second
LAYOUTS = {
    "enwik8": ["enwik8", "enwik8/enwik8", "{}.txt.raw", "{}.txt", "enwik8/{}.txt.raw"],
    "text8": ["text8", "text8/text8", "{}.txt.raw", "{}.txt", "text8/{}.txt.raw"],
    "wikitext103": ["wiki.{}.tokens", "{}.txt", "wikitext-103/wiki.{}.tokens", "wikitext-103/{}.txt"],
    "wikitext2": ["wiki.{}.tokens", "{}.txt", "wikitext-2/wiki.{}.tokens", "wikitext-2/{}.txt"],
    "ptb": ["ptb.{}.txt", "{}.txt", "simple-examples/data/ptb.{}.txt"],
    "lm1b": ["{}.txt"],
}
NASTY = BOM + b" = a = \r\n\r\n\n  <unk> b\tb \xff c\rnaive \xe2\x80\x94 \n \n <S> </S> b B\r\nlast"


def corpus_of(kind, *overrides, path=".", verify=False):
    given = [f"data.path={path}"] if path else []
    return build(
        compose(f"data={kind}", *given, f"data.verify={str(verify).lower()}", *overrides).data, cache_dir="cache"
    )


def write(name, text):
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_bytes(text)


def cut_by_hand(text):
    first, second = int(len(text) * 0.9), int(len(text) * 0.95)
    return dict(zip(SPLITS, (text[:first], text[first:second], text[second:]), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_each_published_corpus_reads_small_files_of_its_layout(kind):
    """Every split, with the vocabulary and the marks that its YAML asks for."""
    corpus = corpus_of(kind, path=published_folder(kind, Path("folder")))
    vocab = corpus.vocabulary()
    for name in SPLITS:
        split = corpus.split(name, vocab)
        assert len(split.tokens) > 200 and int(np.max(split.tokens)) < vocab.n_token
        dropped = corpus.text(name).read().count(b"\n") if kind == "enwik8" else 0
        assert split.count_bytes(0, len(split.tokens)) == corpus.text(name).size - dropped
    expected = {"enwik8": Bytes, "text8": Bytes}.get(kind, Words)
    assert type(vocab) is expected
    assert corpus.shuffle_documents == (kind == "lm1b")


@pytest.mark.parametrize(
    ("kind", "layout"), [(kind, layout) for kind in ("enwik8", "text8") for layout in LAYOUTS[kind]]
)
def test_a_hundred_megabytes_in_every_layout(kind, layout):
    """One file or three are the same text, cut at nine tenths and nineteen twentieths of its bytes."""
    text = NASTY * 7
    thirds = {"train": text[:200], "valid": text[200:400], "test": text[400:]}
    for split, part in ({"": text} if "{}" not in layout else thirds).items():
        write(layout.format(split), part)
    corpus = corpus_of(kind)
    vocab = corpus.vocabulary()
    assert (b"\n" in vocab.decode(range(vocab.n_token))) == (kind == "text8")
    assert vocab.n_token == len(set(text)) - (kind == "enwik8")  # of all three parts
    for split, part in cut_by_hand(text).items():
        assert corpus.text(split).read() == part
        found = corpus.split(split, vocab)
        assert vocab.decode(found.tokens) == (part.replace(b"\n", b"") if kind == "enwik8" else part)
        assert found.starts.tolist() == [0]


def test_the_newline_of_enwik8_and_what_is_seen_of_text8():
    write("enwik8", bytes(byte for byte in range(256) if byte % 5) * 3)
    assert corpus_of("enwik8").vocabulary().n_token == 204
    assert corpus_of("enwik8", "data.vocab.newlines=true").vocabulary().n_token == 204  # byte 10 is not in this one
    assert corpus_of("enwik8", "data/vocab=bytes").vocabulary().n_token == 256
    write("text8", b" abcdefghijklmnopqrstuvwxyz" * 10)
    assert corpus_of("text8").vocabulary().n_token == 27


def test_files_with_symbols_apart_are_refused():
    for name in SPLITS:
        write(f"{name}.txt", b"60 109 101 100 " * 30)
    with pytest.raises(ValueError, match=r"^data\.path: train\.txt holds symbols apart by spaces; put its \.raw file"):
        corpus_of("enwik8").text("train")


@pytest.mark.parametrize(
    ("kind", "layout"),
    [(kind, layout) for kind in ("wikitext103", "wikitext2", "ptb", "lm1b") for layout in LAYOUTS[kind]],
)
def test_words_in_every_layout(kind, layout):
    texts = {"train": NASTY * 3, "valid": NASTY + b" b valid", "test": NASTY[:60] + b"\xc3 test\n"}
    for split, text in texts.items():
        write(layout.format(split), text)
    corpus = corpus_of(kind, *(["data.vocab.min_freq=1", "data.vocab.eos_first=false"] if kind == "lm1b" else []))
    vocab = corpus.vocabulary()
    special = {"unknown": "<UNK>", "eos": "<S>"} if kind == "lm1b" else {}
    counted = texts["train"] if kind in ("wikitext103", "lm1b") else b"\n".join(texts.values())
    assert vocab.words == authors_vocabulary(counted, **special)
    assert ("valid" in vocab.words) == (kind in ("wikitext2", "ptb"))
    for split, text in texts.items():
        assert corpus.text(split).read() == text
        lines = authors_lines(text, eos=special.get("eos", "<eos>"))
        expected = [word if word in vocab.words else special.get("unknown", "<unk>") for line in lines for word in line]
        assert [vocab.words[token] for token in corpus.split(split, vocab).tokens] == expected


@pytest.mark.parametrize("root", [".", ROOT_1B])
@pytest.mark.parametrize("listed", [True, False])
def test_the_shards_of_the_billion_words(root, listed):
    """Sentences <S> words <S>, a document each; valid and test are both the first held-out shard; a list of words serves."""
    shards = [b"b a\na\n", b"a b\nb z\n", b"a\n"]
    for index, shard in enumerate(shards):
        write(f"{root}/{SHARD.format(index + 1)}", shard)
    write(f"{root}/{HELD_OUT}", b"held out a")
    if listed:
        write(f"{root}/1b_word_vocab.txt", b"<S>\n</S>\n<UNK>\nb\na")
    corpus = corpus_of("lm1b")
    vocab = corpus.vocabulary()
    assert vocab.words == (["<S>", "</S>", "<UNK>", "b", "a"] if listed else ["<S>", "<UNK>", "a", "b"])
    train, valid, test = (corpus.split(name, vocab) for name in SPLITS)
    words = ["<S>", "b", "a", "<S>", "a", "<S>", "a", "b", "<S>", "b", "<UNK>", "<S>", "a", "<S>"]
    assert [vocab.words[token] for token in train.tokens] == words
    assert train.starts.tolist() == [0, 3, 5, 8, 11]
    assert vocab.decode(valid.tokens) == vocab.decode(test.tokens) == b"\n<UNK> <UNK> a \n"
    assert not train.resets and corpus_of("lm1b", "data.reset_at_document=true").split("train", vocab).resets


@pytest.mark.parametrize("name", ["ptb.char.{}.txt", "ptb.{}.txt", "{}.txt"])
def test_penn_treebank_by_characters(name):
    """From its words, or from the file that has their letters apart: a plain line a sentence."""
    for split in SPLITS:
        lines = ["a e r _ b a n", "c <" if "char" not in name else "c _ <", "", "n n"]
        plain = ["aer ban", "c <", "", "nn"]
        written = lines if "char" in name else [f" {line} " for line in plain]
        write(name.format(split), "\r\n".join(written).encode())
    corpus = corpus_of("ptb", "data.level=characters", "data/vocab=text8")
    assert corpus.text("valid").read() == b"aer ban\nc <\n\nnn\n"
    assert corpus.vocabulary().n_token == len(set(b"aer ban\nc <\n\nnn\n"))


@pytest.mark.parametrize(
    "vocab",
    [Bytes(), Characters(), Words(), BPE(max_size=300)],
    ids=["bytes", "characters", "words", "bpe"],
)
@pytest.mark.slow
def test_one_line_of_ten_megabytes(vocab):
    """Also without a space in it, beside which nothing may be cut."""
    for line in (b"some words in a line " * 500_000, "日本語".encode() * 1_100_000):
        write("train.txt", line)
        write("valid.txt", b"some words\n")
        corpus = text_files(vocab=vocab, train="train.txt", valid="valid.txt", test="valid.txt", cache_dir="cache")
        fitted = corpus.vocabulary()
        split = corpus.split("train", fitted)
        assert split.count_bytes(0, len(split.tokens)) == len(line)
        if b" " in line:
            assert split.count_words(0, len(split.tokens)) == len(line.split()) + 1
        if not isinstance(vocab, Words):
            assert hashlib.sha256(fitted.decode(split.tokens)).digest() == hashlib.sha256(line).digest()


# What is public knowledge about the files.


@pytest.mark.parametrize("kind", ["enwik8", "text8", "wikitext2", "ptb"])
def test_files_of_another_md5_are_refused(kind, monkeypatch):
    corpus = corpus_of(kind, path=published_folder(kind, Path("folder")), verify=True)
    split = "valid" if kind == "wikitext2" else "train"
    with pytest.raises(
        ValueError, match=r"^data\.path: folder/.* is not the published .*; data\.verify=false takes"
    ) as caught:
        corpus.text(split)
    assert "\n" not in str(caught.value)
    assert corpus_of(kind, "data.max_bytes=500", path="folder", verify=True).text(split).size <= 500
    for name in [kind, *(f"{kind.replace('wikitext2', 'wikitext-2')} {split}" for split in SPLITS)]:
        files = {"enwik8": "enwik8", "text8": "text8", "ptb": f"ptb.{split}.txt", "wikitext2": f"wiki.{split}.tokens"}
        monkeypatch.setitem(published.MD5, name, hashlib.md5((Path("folder") / files[kind]).read_bytes()).hexdigest())
    assert corpus_of(kind, path="folder", verify=True).text(split).size > 0


@pytest.mark.parametrize("kind", ["enwik8", "text8"])
def test_three_files_that_are_no_hundred_megabytes_are_refused(kind):
    for split in SPLITS:
        write(f"{split}.txt.raw", b"abc")
    with pytest.raises(
        ValueError, match=r"^data\.path: \. gave 9 bytes in place of 100,000,000; .*data\.verify=false$"
    ):
        corpus_of(kind, verify=True).text("train")


@pytest.mark.parametrize("kind", ["wikitext103", "wikitext2", "ptb"])
def test_another_number_of_words_is_refused(kind, monkeypatch):
    name = {"wikitext103": "wikitext-103", "wikitext2": "wikitext-2", "ptb": "ptb"}[kind]
    monkeypatch.setattr(published, "MD5", {})
    folder = published_folder(kind, Path("folder"))
    corpus = corpus_of(kind, path=folder, verify=True)
    n_token = published.N_TOKEN[name]["train"]
    with pytest.raises(
        ValueError, match=rf"^data\.verify: the train text has .* the published one {n_token:,}; false takes it"
    ):
        corpus.split("train", corpus.vocabulary())
    vocab = corpus.vocabulary()
    others = [corpus_of(kind, path=folder), corpus_of(kind, "data.max_bytes=1000", path=folder, verify=True)]
    whole, start = (len(other.split("train", vocab).tokens) for other in others)
    monkeypatch.setitem(published.N_TOKEN, name, {"train": whole})
    assert len(corpus_of(kind, path=folder, verify=True).split("train", vocab).tokens) == whole > start
    characters = corpus_of(kind, "data/vocab=characters", path=folder, verify=True)
    assert len(characters.split("train", characters.vocabulary()).tokens) > whole  # of these none is known


def test_another_number_of_shards_is_refused():
    folder = published_folder("lm1b", Path("folder"))
    assert corpus_of("lm1b", path=folder, verify=True).text("train").size
    next(folder.glob("training*/*00007*")).unlink()
    with pytest.raises(ValueError, match=r"^data\.path: folder holds 98 shards .*, of 99; data\.verify=false takes"):
        corpus_of("lm1b", path=folder, verify=True).text("train")
    assert corpus_of("lm1b", path=folder).text("train").size


@pytest.mark.parametrize("kind", KINDS)
def test_missing_folders_and_files_are_one_line(kind):
    Path("empty").mkdir()
    for path, words in {"none": "there is no folder none", "empty": "empty holds"}.items():
        with pytest.raises(ValueError, match=rf"^data\.path: {words}") as caught:
            corpus_of(kind, path=path).text("train")
        assert "\n" not in str(caught.value)
    folder = published_folder(kind, Path("folder"))
    for path in folder.rglob("*valid*" if kind != "lm1b" else "*heldout-0*"):
        path.unlink()
    if kind not in ("enwik8", "text8"):
        with pytest.raises(ValueError, match=r"^data\.path: folder holds .*valid"):
            corpus_of(kind, path=folder).text("valid")


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_file_is_one_line(kind):
    folder = published_folder(kind, Path("folder"))
    for path in folder.rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"^data\.path: folder/.* is empty$"):
        corpus_of(kind, path=folder).text("train")


@pytest.mark.parametrize("kind", KINDS)
def test_without_network_and_path_one_line_says_what_to_give(kind):
    files = {
        "wikitext103": "wiki.train.tokens",
        "wikitext2": "wiki.train.tokens",
        "ptb": "ptb.train.txt",
        "lm1b": ROOT_1B,
    }
    with pytest.raises(
        ValueError, match=rf"^data\.path: .*; without it give data\.path=FOLDER .*{files.get(kind, kind)}"
    ) as caught:
        corpus_of(kind, path=None).text("train")
    assert "\n" not in str(caught.value)


def test_without_network_the_command_ends_with_that_line():
    line = refused(in_process("train", "data=wikitext2", *TINY), "data.path")
    assert "Salesforce/wikitext cannot be had from the hub" in line and "data.path=FOLDER" in line
