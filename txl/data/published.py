"""The corpora of the papers, prepared as the authors did: from a folder with the usual files, or from the Hugging Face hub.

What is public knowledge about the files is checked (`verify`): their MD5, or the number of their tokens. Where only the
start of a text is asked for (`max_bytes`) there is nothing to check.
"""

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Literal

from txl.data.corpus import check_max_bytes, cut_corpus
from txl.data.hub import Rows
from txl.data.store import SPLITS, Corpus
from txl.data.text import Text, characters, file_part, utf8
from txl.data.vocab import Vocabulary, Words

CUT = [0.9, 0.05, 0.05]  # of 100,000,000 bytes: 90, 5 and 5 MB
MD5 = {
    "enwik8": "a1fa5ffddb56f4953e226637dabbb36a",
    "text8": "3bea1919949baf155f99411df5fada7e",
    "ptb train": "f26c4b92c5fdc7b3f8c7cdcb991d8420",
    "ptb valid": "aa0affc06ff7c36e977d7cd49e3839bf",
    "ptb test": "8b80168b89c18661a38ef683c0dc3721",
    "wikitext-2 valid": "d756d22ab2310e7e60c094bea5c5a8eb",
    "wikitext-2 test": "781c9418ab9414bd09e4aad825aae752",
}
N_TOKEN = {  # words and line ends
    "wikitext-103": {"train": 103_227_021, "valid": 217_646, "test": 245_569},
    "wikitext-2": {"train": 2_088_628, "valid": 217_646, "test": 245_569},
    "ptb": {"train": 929_589, "valid": 73_760, "test": 82_430},
}
PARQUET = "refs/convert/parquet"  # where the hub keeps what the scripts of old data sets made
SHARDS = 99  # of the Billion Word benchmark's training text


def _found(folder: str, names: list[str], within: list[str] = ()) -> Path | None:
    """The first of the names that is there, in the folder or in one of the folders `within` it."""
    if not Path(folder).is_dir():
        raise ValueError(f"data.path: there is no folder {folder}")
    places = [Path(folder), *(Path(folder) / name for name in within)]
    return next((place / name for name in names for place in places if (place / name).is_file()), None)


def _checked(path: Path, published: str, verify: bool) -> Text:
    """The file as a text. Raises ValueError where it is not the one that was published."""
    text = Text([file_part(path, "data.path")])
    if verify and published in MD5:
        digest = hashlib.md5(usedforsecurity=False)
        for block in text.blocks():
            digest.update(block)
        if digest.hexdigest() != MD5[published]:
            raise ValueError(
                f"data.path: {path} ({text.size:,} bytes) is not the published {published}, whose MD5 is "
                f"{MD5[published]}; data.verify=false takes it as it is"
            )
    return text


def _without_network(names: str) -> str:
    return f"; without it give data.path=FOLDER that holds {names}"


def _hundred_megabytes(
    name: str, rows: list[Rows], path: str | None, max_bytes: int | None, verify: bool, cache_dir: str | None
) -> Callable[[], Text]:
    """enwik8 or text8, whole, from either source."""
    verify = verify and max_bytes is None

    def find() -> Text:
        if path is not None:
            if (whole := _found(path, [name], [name])) is not None:
                return _checked(whole, name, verify)
            files = [_found(path, [f"{split}.txt.raw", f"{split}.txt"], [name]) for split in SPLITS]
            if None in files:
                raise ValueError(
                    f"data.path: {path} holds neither {name} nor train.txt.raw, valid.txt.raw, test.txt.raw"
                )
            for file in files:
                if _prepared(file):
                    raise ValueError(f"data.path: {file} holds symbols apart by spaces; put its .raw file beside it")
            whole = Text([file_part(file, "data.path", begins=file is files[0]) for file in files])
        else:
            whole = Text([part for source in rows for part in source.text(cache_dir, max_bytes=max_bytes).parts])
        if verify and whole.size != 100_000_000:
            raise ValueError(
                f"data.path: {path or rows[0].id} gave {whole.size:,} bytes in place of 100,000,000; give data.path=FOLDER "
                f"that holds {name}, or data.verify=false"
            )
        return whole

    return find


def _prepared(path: Path) -> bool:
    """Whether a file has a space between any two symbols, as the authors' scripts wrote it."""
    symbols = file_part(path, "data.path").read(0, 2000).split()
    return len(symbols) > 50 and all(
        len(symbol) == 1 or (symbol.isdigit() and int(symbol) < 256) for symbol in symbols[:-1]
    )


def enwik8(
    *,
    vocab: Vocabulary,
    path: str | None = None,
    id: str = "LTCB/enwik8",
    max_bytes: int | None = None,
    verify: bool = True,
    document_separator: str | None = None,
    reset_at_document: bool = False,
    cache_dir: str | None = None,
) -> Corpus:
    """The first 100,000,000 bytes of a Wikipedia dump: 90 MB train, 5 MB valid, 5 MB test.

    `path`: a folder with enwik8, or with train.txt.raw, valid.txt.raw and test.txt.raw.
    """
    rows = Rows(
        id=id,
        split="train",
        column="text",
        revision=PARQUET,
        files="enwik8-raw/train/*.parquet",
        otherwise=_without_network("enwik8"),
    )
    return cut_corpus(
        _hundred_megabytes("enwik8", [rows], path, max_bytes, verify, cache_dir),
        fractions=CUT,
        max_bytes=max_bytes,
        vocab=vocab,
        vocab_splits=SPLITS,
        document_separator=document_separator,
        reset_at_document=reset_at_document,
        cache_dir=cache_dir,
    )


def text8(
    *,
    vocab: Vocabulary,
    path: str | None = None,
    id: str = "afmck/text8",
    max_bytes: int | None = None,
    verify: bool = True,
    cache_dir: str | None = None,
) -> Corpus:
    """100,000,000 letters a to z and spaces of Wikipedia's text: 90 MB train, 5 MB valid, 5 MB test.

    `path`: a folder with text8, or with train.txt.raw, valid.txt.raw and test.txt.raw.
    """
    rows = [
        Rows(id=id, split=split, column="text", otherwise=_without_network("text8"))
        for split in ("train", "validation", "test")
    ]
    return cut_corpus(
        _hundred_megabytes("text8", rows, path, max_bytes, verify, cache_dir),
        fractions=CUT,
        max_bytes=max_bytes,
        vocab=vocab,
        vocab_splits=SPLITS,
        cache_dir=cache_dir,
    )


def _blank_restored(row: str) -> str:
    """The hub leaves out what a blank line of WikiText holds: a space and its end."""
    return row or " \n"


def wikitext(
    *,
    vocab: Vocabulary,
    size: Literal[2, 103],
    path: str | None = None,
    id: str = "Salesforce/wikitext",
    max_bytes: int | None = None,
    verify: bool = True,
    cache_dir: str | None = None,
) -> Corpus:
    """WikiText-103 or WikiText-2 (Merity et al. 2016), the tokenised files, where rare words are <unk>.

    The vocabulary of WikiText-103 counts the training text, that of WikiText-2 all three. `path`: a folder with
    wiki.train.tokens, wiki.valid.tokens and wiki.test.tokens, or train.txt, valid.txt and test.txt.
    """
    name = f"wikitext-{size}"

    def find(split: str) -> Text:
        if path is None:
            rows = Rows(
                id=id,
                split="validation" if split == "valid" else split,
                column="text",
                config=f"{name}-v1",
                otherwise=_without_network("wiki.train.tokens, wiki.valid.tokens, wiki.test.tokens"),
            )
            return rows.text(cache_dir, written=_blank_restored, max_bytes=max_bytes)
        file = _found(path, [f"wiki.{split}.tokens", f"{split}.txt"], [name])
        if file is None:
            raise ValueError(f"data.path: {path} holds neither wiki.{split}.tokens nor {split}.txt")
        return _checked(file, f"{name} {split}", verify and max_bytes is None)

    return _three_texts(
        find,
        max_bytes=max_bytes,
        vocab=vocab,
        vocab_splits=("train",) if size == 103 else SPLITS,
        n_token=N_TOKEN[name] if verify else {},
        cache_dir=cache_dir,
    )


def _three_texts(
    find: Callable[[str], Text], *, max_bytes: int | None, vocab: Vocabulary, n_token: dict, **how: Any
) -> Corpus:
    """A corpus of three texts, or the start of each; the number of their words is checked, where it is known."""
    check_max_bytes(max_bytes)
    whole = isinstance(vocab, Words) and vocab.eos is not None and max_bytes is None
    texts = {
        split: (lambda split=split: find(split) if max_bytes is None else find(split).cut(0, max_bytes))
        for split in SPLITS
    }
    return Corpus(texts=texts, vocab=vocab, n_token=n_token if whole else {}, **how)


def _letters(text: Text) -> Text:
    """Penn Treebank by characters, from its words or from the file that has them apart: a line of plain text a sentence."""
    lines = characters(text.read()).removeprefix("\ufeff").removesuffix("\n").split("\n")
    apart = all(len(symbol) == 1 for symbol in " ".join(lines[:20]).split())
    plain = ("".join(line.split()).replace("_", " ") if apart else " ".join(line.split()) for line in lines)
    return Text.of(utf8("".join(f"{line}\n" for line in plain)))


def _sentence(row: str) -> str:
    return f" {row.strip()} \n"


def penn_treebank(
    *,
    vocab: Vocabulary,
    level: Literal["words", "characters"],
    path: str | None = None,
    id: str = "ptb-text-only/ptb_text_only",
    max_bytes: int | None = None,
    verify: bool = True,
    cache_dir: str | None = None,
) -> Corpus:
    """The Penn Treebank as Mikolov prepared it: 10,000 words in lower case, numbers N, a sentence a line.

    The vocabulary counts all three texts. `path`: a folder with ptb.train.txt, ptb.valid.txt and ptb.test.txt, or train.txt,
    valid.txt and test.txt; for characters also ptb.char.train.txt and so on, or the words, whose letters they are.
    """

    def find(split: str) -> Text:
        if path is None:
            rows = Rows(
                id=id,
                split="validation" if split == "valid" else split,
                column="sentence",
                revision=PARQUET,
                files=f"penn_treebank/{'validation' if split == 'valid' else split}/*.parquet",
                otherwise=_without_network("ptb.train.txt, ptb.valid.txt, ptb.test.txt"),
            )
            text = rows.text(cache_dir, written=_sentence, max_bytes=max_bytes)
            return _letters(text) if level == "characters" else text
        by_character = [f"ptb.char.{split}.txt"] if level == "characters" else []
        file = _found(path, [*by_character, f"ptb.{split}.txt", f"{split}.txt"], ["simple-examples/data"])
        if file is None:
            raise ValueError(f"data.path: {path} holds neither ptb.{split}.txt nor {split}.txt")
        apart = level == "characters" and _prepared(file)
        text = _checked(file, f"ptb {split}", verify and max_bytes is None and not apart)
        return _letters(text) if level == "characters" else text

    return _three_texts(
        find,
        max_bytes=max_bytes,
        vocab=vocab,
        vocab_splits=SPLITS,
        n_token=N_TOKEN["ptb"] if verify and level == "words" else {},
        cache_dir=cache_dir,
    )


def billion_words(
    *,
    vocab: Vocabulary,
    path: str | None = None,
    id: str = "billion-word-benchmark/lm1b",
    max_bytes: int | None = None,
    verify: bool = True,
    document_separator: str = "\n",
    reset_at_document: bool = False,
    shuffle_documents: bool = True,
    cache_dir: str | None = None,
) -> Corpus:
    """The One Billion Word benchmark (Chelba et al. 2013): single sentences, a document each, in a new order in each pass.

    As in the authors' code valid and test are both the shard heldout-00000. `path`: the benchmark's folder, with
    training-monolingual.tokenized.shuffled and heldout-monolingual.tokenized.shuffled, and with 1b_word_vocab.txt where the
    vocabulary is to be the published list; or train.txt, valid.txt and test.txt. The hub does not part the held-out shards:
    of its test split the first fiftieth is valid and test.
    """
    root = "1-billion-word-language-modeling-benchmark-r13output"
    held_out = "heldout-monolingual.tokenized.shuffled"

    def find(split: str) -> Text:
        if path is None:
            otherwise = _without_network(f"{root}, or train.txt, valid.txt and test.txt")
            source, part = ("train", "train") if split == "train" else ("test", "test[:2%]")
            files = f"plain_text/{source}/*.parquet"
            rows = Rows(id=id, split=part, column="text", revision=PARQUET, files=files, otherwise=otherwise)
            return rows.text(cache_dir, written=_line, max_bytes=max_bytes)
        if (plain := _found(path, [f"{split}.txt"])) is not None:
            return Text([file_part(plain, "data.path")])
        if split == "train":
            places = [Path(path), Path(path) / root]
            shards = sorted(shard for place in places for shard in place.glob("training-monolingual.*/news.en-*-of-*"))
            if not shards or (verify and max_bytes is None and len(shards) != SHARDS):
                raise ValueError(
                    f"data.path: {path} holds {len(shards)} shards training-monolingual.tokenized.shuffled/news.en-*, of "
                    f"{SHARDS}" + ("; data.verify=false takes them as they are" if shards else ", and no train.txt")
                )
            return Text([file_part(shard, "data.path", begins=shard is shards[0]) for shard in shards])
        name = "news.en.heldout-00000-of-00050"
        if (shard := _found(path, [name], [held_out, f"{root}/{held_out}"])) is None:
            raise ValueError(f"data.path: {path} holds no {held_out}/{name}, and no {split}.txt")
        return Text([file_part(shard, "data.path")])

    if path is not None and isinstance(vocab, Words) and not vocab.fitted and Path(path).is_dir():
        listed = _found(path, ["1b_word_vocab.txt"], [root])
        vocab = vocab if listed is None else Words(**vocab.options, file=str(listed))
    return _three_texts(
        cache(find),
        max_bytes=max_bytes,
        vocab=vocab,
        n_token={},
        document_separator=document_separator,
        reset_at_document=reset_at_document,
        shuffle_documents=shuffle_documents,
        cache_dir=cache_dir,
    )


def _line(row: str) -> str:
    return row.rstrip("\n") + "\n"
