import io
import json
import math
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from txl.data import text as texts
from txl.data.encoding import Split
from txl.data.text import Text
from txl.data.vocab import BPE, Bytes, Characters, Words, fingerprint, from_state

NASTY = [
    b"",
    b"\x00\xff\xfe",
    "naïve — “x” 𝔘 \u2028\u0085".encode(),
    b"\r\n\r \n\n",
    b"\xef\xbb\xbfbom",
    b"\xf0\x9f\x98",  # a UTF-8 character cut short
    b"\xed\xb2\x80",  # an encoded surrogate, which is no UTF-8
    b"  two  spaces \t and don't 123456 'll<|end|>x<|end|>",
    "日本語のテキスト。\n中文".encode() + b"\xe6\x97",
]
TRAINING = b"the cat sat on the mat, and the dog sat on the cat. don't! 1234 12345\n\n" * 3
# what lines, words and bytes can be made of
SCRAPS = [
    b"a",
    b"b",
    b"B",
    b" ",
    b"  ",
    b"\t",
    b"\n",
    b"\r",
    b"\r\n",
    "é".encode(),
    b"\xff",
    b"\xe2",
    b"<unk>",
    b"<eos>",
]
SCRAPS += ["\ufeff".encode(), "\u2028".encode(), "\u0085".encode(), "İ".encode()]
SCRAPPY = st.lists(st.sampled_from(SCRAPS), max_size=25).map(b"".join)


@pytest.fixture(scope="module")
def bpe():
    return BPE(max_size=280, special_tokens=["<|end|>", "new york"]).fit([TRAINING])


def learned(kind, bpe, text):
    return bpe if kind is BPE else kind().fit([text + b"x"])


@pytest.mark.parametrize("text", NASTY)
@pytest.mark.parametrize("kind", [Bytes, Characters, BPE])
def test_encode_then_decode_gives_the_text_back(kind, text, bpe):
    vocab = learned(kind, bpe, text)
    tokens = vocab.encode(text)
    assert vocab.decode(tokens) == text
    assert vocab.sizes(text).tolist() == [len(vocab.decode([token])) for token in tokens]
    assert vocab.unknown(text) == []


@pytest.mark.parametrize("kind", [Bytes, Characters, BPE])
@given(text=st.binary(max_size=60) | SCRAPPY, size=st.integers(1, 9))
def test_the_text_comes_back_whatever_the_pieces(kind, text, size, bpe):
    vocab = learned(kind, bpe, text)
    split = split_in_pieces(text, vocab, size)
    assert vocab.decode(split.tokens) == text
    if kind is not BPE:  # whose tokens are those of the whole text where a piece ends between two ASCII words
        assert split.tokens.tolist() == vocab.encode(text).tolist()
        pieces = [text[start : start + size] for start in range(0, len(text), size)] if kind is Bytes else [text]
        assert kind().fit([*pieces, b"x"]).state() == vocab.state()


def split_in_pieces(text, vocab, size, **how):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(texts, "PIECE", size)
        return Split.of("test", text, vocab, **how)


@given(
    words=st.lists(st.sampled_from(["the", "cat", "a1", "new york", "12", "Dog"]), min_size=1), size=st.integers(1, 12)
)
def test_bpe_of_ascii_words_is_the_same_whatever_the_pieces(words, size, bpe):
    text = " ".join(words).encode()
    assert split_in_pieces(text, bpe, size).tokens.tolist() == bpe.encode(text).tolist()


def every_vocabulary(bpe):
    yield from (Bytes(), Bytes(newlines=False), Characters().fit(SCRAPS), bpe)
    for options in ({}, {"eos": None}, {"eos_first": True}, {"lower_case": True}):
        yield Words(**options).fit([b"a b B <unk>"])


@given(text=SCRAPPY, separator=st.sampled_from([None, b"\n", b"a", b" B"]), size=st.integers(1, 9), data=st.data())
def test_bytes_of_tokens_add_up(text, separator, size, data, bpe):
    """Also where newlines are no token; a text that has no token at all is nobody's."""
    for vocab in every_vocabulary(bpe):
        split = split_in_pieces(text, vocab, size, separator=separator)
        n = len(split.tokens)
        start = data.draw(st.integers(0, n))
        stop = data.draw(st.integers(start, n))
        dropped = text.count(b"\n") if vocab.state().get("newlines") is False else 0
        assert split.count_bytes(0, n) == (len(text) - dropped if n else 0)
        assert sum(split.count_bytes(*pair) for pair in ((0, start), (start, stop), (stop, n))) == split.count_bytes(
            0, n
        )
        assert split.count_bytes(start, stop) >= 0
        assert len(vocab.sizes(text)) == len(vocab.encode(text))


def test_bytes_are_counted_token_by_token(bpe):
    text = TRAINING + "naïve ".encode()
    for vocab in (Characters().fit([text]), bpe):
        split = split_in_pieces(text, vocab, 50)
        for start in range(0, len(split.tokens) - 3, 7):
            assert split.count_bytes(start, start + 3) == len(vocab.decode(split.tokens[start : start + 3]))


@given(st.binary(max_size=60), st.binary(max_size=60))
def test_characters_lose_nothing_but_the_unknown(training, text):
    vocab = Characters().fit([training + b"x"])
    tokens = vocab.encode(text)
    assert ((tokens >= 0) & (tokens < vocab.n_token)).all()
    unknown = vocab.unknown(text)
    assert (0 in tokens) == bool(unknown)
    if not unknown:
        assert vocab.decode(tokens) == text


def test_unknown_characters_are_one_token():
    vocab = Characters().fit([b"abc"])
    assert vocab.n_token == 4
    assert vocab.encode(b"abzc").tolist() == [1, 2, 0, 3]
    assert vocab.decode([1, 0]) == "a\ufffd".encode()
    assert vocab.unknown("zéa".encode()) == ["z", "é"]


def test_every_byte_is_a_token():
    everything = bytes(range(256))
    assert Bytes().encode(everything).tolist() == list(range(256))
    assert Bytes().n_token == 256
    assert Bytes().decode(np.arange(256)) == everything


def test_only_the_bytes_seen():
    vocab = Bytes(only_seen=True).fit([b"ca\n", b"ab"])
    assert (vocab.n_token, vocab.encode(b"abc\n").tolist(), vocab.decode([1, 0])) == (4, [1, 2, 3, 0], b"a\n")
    with pytest.raises(ValueError, match=r"^data\.vocab\.only_seen: training showed no byte 'z'; false takes all"):
        vocab.encode(b"abz")
    assert vocab.unknown(b"zab!") == ["!", "z"]
    without = Bytes(only_seen=True, newlines=False).fit([b"ca\n", b"ab"])
    assert (without.n_token, without.encode(b"a\nb\n").tolist()) == (3, [0, 1])


# Words, against the convention of the authors' vocabulary.


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


# Byte-pair encoding.


def test_special_tokens_are_one_token(bpe):
    assert [bpe.decode([token]) for token in bpe.encode(b"a<|end|>new york")] == [b"a", b"<|end|>", b"new york"]
    for size in range(1, 30):  # nor does a border of pieces fall into one
        split = split_in_pieces(b"in new york new york and new yorks new york", bpe, size)
        assert [bpe.decode([token]) for token in split.tokens].count(b"new york") == 4


def test_bpe_learns_what_it_is_asked_to(bpe):
    assert bpe.n_token == 280
    assert len(bpe.encode(TRAINING)) < len(TRAINING) / 2
    assert BPE(max_size=280, min_freq=1000).fit([TRAINING]).n_token == 256
    assert BPE(max_size=280, special_tokens=["<|end|>", "new york"]).fit([TRAINING]).state() == bpe.state()
    for key, options in {
        "max_size": {"max_size": 255},
        "min_freq": {"min_freq": 0},
        "special_tokens": {"special_tokens": [""]},
    }.items():
        with pytest.raises(ValueError, match=rf"^data\.vocab\.{key}: "):
            BPE(**options)


@pytest.mark.parametrize("text", ["ACGT" * 2000 + " a b", "日本" * 2000, " " * 3000 + "\n", "x" * 1000 + " y"])
def test_bpe_learns_from_long_words_in_parts(text):
    """Learning takes the square of a word's length: ten megabytes without a space took hours."""
    parts = BPE._sentences(text.encode() + b"\xff")
    assert "".join(parts) == text
    assert all(len(word) <= 1000 for part in parts for word in [*part.split(), *re.findall(r"\s+", part)])
    assert len(parts) == 1 + sum(-(-len(word) // 1000) - 1 for word in [*text.split(), *re.findall(r"\s+", text)])


def tokenizer_json(kind):
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    if kind == "broken":
        return '{"version": "1.0", '
    if kind == "other":
        return '{"no": "tokenizer"}'
    if kind == "word level":
        tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        return tokenizer.to_str()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=kind == "prefix")
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = [] if kind == "few bytes" else pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=280, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TRAINING.decode()], trainer)
    if kind == "normalizer":
        tokenizer.normalizer = normalizers.Lowercase()
    if kind == "template":
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
        tokenizer.enable_truncation(4)
        tokenizer.enable_padding(length=99)
    if kind == "stripping":
        from tokenizers import AddedToken

        tokenizer.add_special_tokens([AddedToken("<cut>", lstrip=True)])
    if kind == "holes":
        described = json.loads(tokenizer.to_str())
        described["model"]["vocab"]["zz"] = 4_000_000_000
        return json.dumps(described)
    return tokenizer.to_str()


@pytest.mark.parametrize("kind", ["plain", "template"])
def test_a_tokenizer_file_that_gives_every_text_back(kind):
    Path("tokenizer.json").write_text(tokenizer_json(kind))
    vocab = BPE(file="tokenizer.json").fit([])
    for text in [*NASTY, TRAINING]:
        assert vocab.decode(vocab.encode(text)) == text
    assert from_state(vocab.state()).encode(TRAINING).tolist() == vocab.encode(TRAINING).tolist()


@pytest.mark.parametrize(
    "kind", ["broken", "other", "word level", "normalizer", "few bytes", "prefix", "stripping", "holes"]
)
def test_a_tokenizer_file_that_does_not_is_refused(kind):
    Path("tokenizer.json").write_text(tokenizer_json(kind))
    with pytest.raises(ValueError, match=r"^data\.vocab\.file: ") as caught:
        BPE(file="tokenizer.json").fit([]).encode(b"the Cat <cut> sat")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_a_tokenizer_file_that_cannot_be_read_is_refused(content):
    if content is not None:
        Path("tokenizer.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"^data\.vocab\.file: cannot read tokenizer\.json"):
        BPE(file="tokenizer.json").fit([])


# States.


def fitted(bpe):
    yield from (Bytes(), Bytes(only_seen=True).fit([b"abc"]), Bytes(newlines=False), Characters().fit(NASTY), bpe)
    yield Words(min_freq=2, lower_case=True, unknown=None, eos_first=True).fit([b"a B a b \xff\xff"])


def test_a_state_is_json_and_makes_the_same_vocabulary_again(bpe):
    for vocab in fitted(bpe):
        again = from_state(json.loads(json.dumps(vocab.state())))
        text = b"cab" if vocab.n_token < 256 else b"".join(NASTY)
        text = text if not isinstance(vocab, Words) else b"A b\n"
        assert type(again) is type(vocab) and again.n_token == vocab.n_token
        assert again.encode(text).tolist() == vocab.encode(text).tolist()
        assert again.decode(range(vocab.n_token)) == vocab.decode(range(vocab.n_token))
        assert fingerprint(again) == fingerprint(vocab)
    assert len({fingerprint(vocab) for vocab in fitted(bpe)}) == len(list(fitted(bpe)))


WRONG = [
    None,
    True,
    -1,
    0,
    1.5,
    10**30,
    math.nan,
    "",
    "aa",
    "\ud800",
    "\udcff\n\n",
    [],
    [1, 1],
    [300],
    [[1]],
    [1.5],
    {},
    {"a": {}},
]


def test_a_crafted_state_is_refused_or_works(bpe):
    """Whatever a stranger puts into a checkpoint: a ValueError that names the checkpoint, or a vocabulary."""
    refused = 0
    for vocab in fitted(bpe):
        state = vocab.state() | ({} if vocab.state()["kind"] != "bpe" else {"max_size": 300, "special_tokens": []})
        crafted = [{**state, key: wrong} for key in state for wrong in WRONG]
        crafted += [{other: state[other] for other in state if other != key} for key in state]
        crafted += [{**state, "more": 1}, {**state, "_target_": "os.system"}, {"kind": state["kind"]}]
        for one in crafted:
            try:
                made = from_state(one)
                made.decode(range(min(made.n_token, 300)))
                made.state()
            except ValueError as error:
                assert str(error).startswith(("checkpoint: its vocabulary", "data.vocab.")) and len(str(error)) < 400
                refused += 1
    assert refused > 200
    for state in (None, [], "bytes", 5, {}, {"kind": "syllables"}, {"kind": ["bytes"]}, {"kind": None}):
        with pytest.raises(ValueError, match=r"^checkpoint: its vocabulary is of the unknown kind"):
            from_state(state)


@pytest.mark.parametrize(
    "state",
    [
        {"kind": "words"},
        {"kind": "words", "words": ""},
        {"kind": "words", "words": "a\nb\na"},
        {"kind": "characters"},
        {"kind": "characters", "characters": "ba"},
        {"kind": "bytes", "only_seen": True},
        {"kind": "bytes", "only_seen": True, "symbols": []},
        {"kind": "bytes", "only_seen": True, "symbols": [98, 97]},
        {"kind": "bpe", "max_size": 300},
        {"kind": "bpe", "tokenizer": "{}"},
        {"kind": "bpe", "file": "/etc/hostname"},
        {"kind": "words", "file": "/etc/hostname"},
    ],
)
def test_a_state_that_is_no_vocabulary_is_refused(state):
    with pytest.raises(ValueError, match=r"^checkpoint: its vocabulary (is damaged|holds no)"):
        from_state(state)


def test_a_tokenizer_numbered_without_end_is_refused_before_room_is_made_for_it():
    with pytest.raises(ValueError, match=r"numbered up to 4,000,000,000"):
        from_state({"kind": "bpe", "tokenizer": tokenizer_json("holes")})


def test_a_tokenizer_with_dropout_is_refused():
    import json

    tokenizer = json.loads(BPE(max_size=300).fit([b"the cat sat on the mat " * 20]).json)
    tokenizer["model"]["dropout"] = 0.5
    with pytest.raises(ValueError, match=r"^data\.vocab\.file: a tokenizer with dropout"):
        BPE(tokenizer=json.dumps(tokenizer))
