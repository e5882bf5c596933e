"""Vocabularies of other codes number every text as they do."""

import json
import pickle

import numpy as np
import pytest
from theirs import Corpus, Vocab, save

from txl.data.bpe import BPE
from txl.data.vocab import Bytes
from txl.data.words import Words
from txl.interop import vocabularies

SYMBOLS = ["<eos>", "the", "<unk>", "Cat", "sat"]
BY_FREQUENCY = [32, 101, 116, 97, 206, 10, 65]  # bytes


def theirs(symbols, text: bytes) -> list[int]:
    """Their way, written out: split into words, <eos> at each line's end, <unk> for what is not known."""
    words = [word for line in text.decode().splitlines() for word in [*line.split(), "<eos>"]]
    return [symbols.index(word) if word in symbols else symbols.index("<unk>") for word in words]


@pytest.mark.parametrize("form", ["Corpus", "Corpus of old", "Vocab", "attributes", "list", "list with counts", "ours"])
def test_words_keep_their_numbers(tmp_path, form):
    path, vocab = tmp_path / "file", Vocab(SYMBOLS)
    if form.startswith("Corpus"):
        save(Corpus(vocab), path, legacy=form.endswith("old"))
    elif form == "Vocab":
        save(vocab, path)
    elif form == "attributes":  # Hugging Face's vocab.pkl
        path.write_bytes(pickle.dumps(vocab.__dict__, protocol=4))
    elif form == "ours":
        path.write_text(json.dumps(Words(words="\n".join(SYMBOLS)).state()))
    else:
        path.write_text("".join(f"{symbol}{' 7' if 'counts' in form else ''}\r\n" for symbol in SYMBOLS))
    known = vocabularies.read(path)
    assert known.order is None and vocabularies.group_of(known.vocab) == "words"
    text = b"the Cat sat\nthe dog sat\n\nthe\n"
    assert known.vocab.encode(text).tolist() == theirs(SYMBOLS, text)


def test_what_their_vocabulary_does_to_a_text_is_done_here():
    """The lower case of Penn Treebank's, <S> on both sides of a sentence of the Billion Word Benchmark's."""
    lower = vocabularies.found(Vocab(["<eos>", "the", "<unk>"], lower_case=True).__dict__).vocab
    assert lower.encode(b"THE The x\n").tolist() == [1, 1, 2, 0]
    sentences = vocabularies.from_symbols(["<S>", "</S>", "<UNK>", "The"]).vocab
    assert sentences.encode(b"The x\nThe\n").tolist() == [0, 3, 2, 0, 3, 0]
    strict = vocabularies.from_symbols(["<eos>", "a"]).vocab
    with pytest.raises(ValueError, match="lacks the word 'b'"):
        strict.encode(b"b\n")


@pytest.mark.parametrize(
    ("symbols", "values", "newlines"),
    [
        ([str(value) for value in BY_FREQUENCY], BY_FREQUENCY, True),
        ([str(value) for value in BY_FREQUENCY if value != 10], [32, 101, 116, 97, 206, 65], False),
        (["_", "e", "t", "a", "z"], [32, 101, 116, 97, 122], False),
    ],
)
def test_bytes_and_letters_by_frequency_are_ours_in_another_order(symbols, values, newlines):
    """Of enwik8 and text8."""
    known = vocabularies.found(Vocab(symbols).__dict__)
    assert known.vocab.newlines is newlines and vocabularies.group_of(known.vocab) == "bytes"
    text = bytes(np.random.default_rng(0).choice(values, 50).tolist())
    assert [known.order[token] for token in known.vocab.encode(text)] == [values.index(byte) for byte in text]


def test_a_tokenizer_json_is_read(tmp_path):
    made = BPE(max_size=270).fit([b"to be or not to be " * 20])
    (tmp_path / "tokenizer.json").write_text(made.json)
    known = vocabularies.read(tmp_path / "tokenizer.json")
    assert vocabularies.group_of(known.vocab) == "bpe"
    assert known.vocab.encode(b"not to be").tolist() == made.encode(b"not to be").tolist()


def test_our_own_state_is_a_vocabulary():
    assert vocabularies.found(Bytes().state()).vocab.n_token == 256
    with pytest.raises(ValueError, match=r"--vocab: .*unknown kind 'runes'"):
        vocabularies.found({"kind": "runes"})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no list of symbols"),
        (b"a\nb\na\n<eos>\n", "a symbol twice"),
        (b"alpha\nbeta\n", "neither words"),
        (b"12\n300\nab\n", "neither words"),
        ("<eos>\nnaïve\n".encode("latin1"), "neither text nor a pickle"),
        (b'{"kind": "words", "words"', "no JSON"),
        (b'{"a":' * 100_000, "no JSON"),
        (b'{"kind": "words"}', "holds no words"),
        (b'{"model": 3}', "tokenizer"),
        (b"\x80\x02K\x01.", "holds no vocabulary"),
        (b"\x80\x02cos\nsystem\n.", r"'os\.system'.*refused"),
        (pickle.dumps({"idx2sym": ["<eos>", "a\nb"]}), "no list of symbols"),
        (pickle.dumps({"idx2sym": ["<eos>", 3]}), "no list of symbols"),
    ],
)
def test_a_file_that_is_no_vocabulary_is_told(tmp_path, content, message):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as told:
        vocabularies.read(path)
    assert str(told.value).startswith(("--vocab:", "data.vocab"))


def test_a_corpus_that_is_its_own_vocabulary_holds_none(tmp_path):
    corpus = Corpus(None)
    corpus.vocab = corpus
    with pytest.raises(ValueError, match="holds no vocabulary"):
        vocabularies.read(save(corpus, tmp_path / "cache.pt"))


def test_a_file_that_is_not_there_is_told(tmp_path):
    with pytest.raises(ValueError, match="--vocab: cannot read"):
        vocabularies.read(tmp_path / "none")
    with pytest.raises(ValueError, match="--vocab: cannot read"):
        vocabularies.read(tmp_path)
