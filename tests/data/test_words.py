"""Words, against the convention of the authors' vocabulary."""

import io
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scraps import SCRAPPY, split_in_pieces

from txl.data import text as texts
from txl.data.text import Text
from txl.data.vocab import Words, from_state


def authors_lines(text, *, lower_case=False, eos="<eos>"):
    """As the authors read a file: universal newlines, strip, split, <eos>. A byte order mark is no part of a line here."""
    for line in io.TextIOWrapper(io.BytesIO(text), "utf-8", errors="surrogateescape", newline=None):
        line = line.removeprefix("\ufeff").strip()
        yield (line.lower() if lower_case else line).split() + ([eos] if eos else [])


def authors_vocabulary(text, *, min_freq=1, max_size=None, lower_case=False, unknown="<unk>", eos="<eos>"):
    counter = Counter()
    for line in authors_lines(text, lower_case=lower_case, eos=None):
        counter.update(line)
    kept = [word for word, n in counter.most_common(max_size) if n >= min_freq]
    special = ([eos] if eos else []) + ([unknown] if unknown and unknown not in kept else [])
    return special + [word for word in kept if word not in special]


OPTIONS = st.fixed_dictionaries(
    {
        "min_freq": st.integers(1, 3),
        "max_size": st.none() | st.integers(1, 5),
        "lower_case": st.booleans(),
        "eos": st.sampled_from(["<eos>", None]),
    }
)


@given(SCRAPPY, SCRAPPY, OPTIONS, st.integers(1, 12))
def test_words_are_those_of_the_authors(training, text, options, size):
    """The same vocabulary, tokens and order, and both whatever the pieces that a text is read in."""
    training += b" a"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(texts, "PIECE", size)
        vocab = Words(**options).fit([piece.text for piece in Text.of(training).pieces(Words().place, None)])
    assert vocab.words == authors_vocabulary(training, **options)
    lines = authors_lines(text, lower_case=options["lower_case"], eos=options["eos"])
    expected = [word if word in vocab.words else "<unk>" for line in lines for word in line]
    assert [vocab.words[token] for token in vocab.encode(text)] == expected
    assert split_in_pieces(text, vocab, size).tokens.tolist() == vocab.encode(text).tolist()


def test_words_by_hand():
    text = b"\xef\xbb\xbf b a\r\n\r\n a  b\tc <unk> \xff\nlast"
    vocab = Words().fit([text])
    assert vocab.words == ["<eos>", "b", "a", "c", "<unk>", "\udcff", "last"]
    assert vocab.encode(text).tolist() == [1, 2, 0, 0, 2, 1, 3, 4, 5, 0, 6, 0]
    assert vocab.encode(b"d\n").tolist() == [4, 0]
    assert vocab.decode([1, 2, 0, 0, 5]) == b"b a \n\n\xff "
    assert vocab.unknown(b"b d a e") == ["d", "e"]


def test_a_word_that_training_never_showed():
    assert Words().fit([b"a b"]).words == ["<eos>", "<unk>", "a", "b"]
    assert Words(unknown="<UNK>", eos="</s>").fit([b"a"]).words == ["</s>", "<UNK>", "a"]
    strict = Words(unknown=None).fit([b"a b"])
    assert strict.words == ["<eos>", "a", "b"] and not strict.takes_unknown
    with pytest.raises(ValueError, match=r"^data\.vocab\.unknown: the vocabulary lacks the word 'zé', and"):
        strict.encode("a zé b".encode())


def test_words_from_a_file():
    Path("words.txt").write_bytes(b"<S> 12\n</S>\r\n\n<UNK>\nb\nb\n\xff\na")
    vocab = Words(file="words.txt", unknown="<UNK>", eos="<S>", eos_first=True, min_freq=3).fit([b"not read"])
    assert vocab.words == ["<S>", "</S>", "<UNK>", "b", "\udcff", "a"]
    assert vocab.encode(b"a c\n").tolist() == [0, 5, 2, 0]
    assert from_state(vocab.state()).words == vocab.words
    with pytest.raises(ValueError, match=r"^data\.vocab\.eos: words\.txt does not list '<eos>'"):
        Words(file="words.txt", unknown="<UNK>").fit([])
    with pytest.raises(ValueError, match=r"^data\.vocab\.unknown: words\.txt does not list '<unk>'"):
        Words(file="words.txt").fit([])
    with pytest.raises(ValueError, match=r"^data\.vocab\.file: cannot read none\.txt"):
        Words(file="none.txt").fit([])


@pytest.mark.parametrize(
    ("key", "options"),
    [
        ("min_freq", {"min_freq": 0}),
        ("max_size", {"max_size": 0}),
        ("unknown", {"unknown": "a b"}),
        ("unknown", {"unknown": ""}),
        ("eos", {"eos": "\n"}),
        ("eos_first", {"eos": None, "eos_first": True}),
    ],
)
def test_options_of_words_that_cannot_be(key, options):
    with pytest.raises(ValueError, match=rf"^data\.vocab\.{key}: "):
        Words(**options)


def test_a_training_text_without_words_is_refused():
    with pytest.raises(ValueError, match=r"^data\.vocab: the training text holds no word"):
        Words().fit([b" \n\n"])


@given(SCRAPPY.filter(lambda text: "\ufeff".encode() not in text), st.booleans())
def test_each_word_stands_for_its_own_bytes(text, first):
    """The bytes of a token are the word with the whitespace around it, those of <eos> are whitespace alone."""
    vocab = Words(eos_first=first).fit([b"x", text])
    place = 0
    for token, size in zip(vocab.encode(text), vocab.sizes(text), strict=True):
        stands_for = text[place : place + size].decode("utf-8", "surrogateescape").strip()
        assert stands_for == vocab.words[token] or (token == 0 and stands_for == "")
        place += size
    assert place == len(text)
