"""Byte-pair encoding: what it learns, and which tokenizer files are taken."""

import json
import re
from pathlib import Path

import pytest
from scraps import NASTY, TRAINING, learned_bpe, split_in_pieces

from txl.data.vocab import BPE, from_state


@pytest.fixture(scope="module")
def bpe():
    return learned_bpe()


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


def test_a_tokenizer_numbered_without_end_is_refused_before_room_is_made_for_it():
    with pytest.raises(ValueError, match=r"numbered up to 4,000,000,000"):
        from_state({"kind": "bpe", "tokenizer": tokenizer_json("holes")})


def test_a_tokenizer_with_dropout_is_refused():
    tokenizer = json.loads(BPE(max_size=300).fit([b"the cat sat on the mat " * 20]).json)
    tokenizer["model"]["dropout"] = 0.5
    with pytest.raises(ValueError, match=r"^data\.vocab\.file: a tokenizer with dropout"):
        BPE(tokenizer=json.dumps(tokenizer))
