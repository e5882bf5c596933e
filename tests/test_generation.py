import math

import pytest
import torch
from conftest import tiny_model
from hypothesis import given
from hypothesis import strategies as st

from txl.data.encoding import Encoder, Split
from txl.data.vocab import BPE, Bytes, Characters, Words
from txl.generation import Reader, Sampling, borders_for, encode_prompt, generate, sample_seed, until

MODELS = {
    "memory": ["model.memory.mem_len=40"],
    "same_length": ["model.same_length=true", "model.memory.mem_len=7"],
    "no_memory": ["model/memory=none"],
    "pre_norm": ["model.memory.mem_len=40", "model.pre_norm=true"],
}


@pytest.mark.parametrize("variant", MODELS)
@pytest.mark.parametrize("prompt_len", [1, 5, 12])
def test_generation_with_memory_equals_recomputation_from_scratch(variant, prompt_len):
    """Greedy, far past the memory where same_length fixes what a token sees; the text is read whole again each time."""
    model = tiny_model(*MODELS[variant])
    context = 64 if variant == "no_memory" else 5
    reader = Reader(model, context=context)
    prompt = torch.randint(50, (1, prompt_len), generator=torch.Generator().manual_seed(6))
    made = list(generate(reader, reader.read(prompt), Sampling(max_new_tokens=25, temperature=0.0), sample_seed(0, 0)))
    text = prompt
    for token in made:
        log_probs, _ = model(text)
        assert token == log_probs[0, -1].argmax()
        text = torch.cat([text, torch.tensor([[token]])], dim=1)
    assert len(made) == 25


def test_log_probabilities_with_memory_equal_those_from_scratch():
    model = tiny_model("model.memory.mem_len=40")
    reader, text = Reader(model, context=4), torch.randint(50, (1, 30), generator=torch.Generator().manual_seed(8))
    whole, _ = model(text)
    state = reader.read(text[:, :9])
    for place in range(9, 30):
        torch.testing.assert_close(state.log_probs, whole[0, place - 1], rtol=0, atol=1e-11)
        state = reader.read(text[:, place : place + 1], state)


def test_without_memory_only_the_last_context_tokens_are_read():
    model = tiny_model("model/memory=none")
    reader, text = Reader(model, context=6), torch.randint(50, (1, 20), generator=torch.Generator().manual_seed(8))
    state = reader.read(text[:, :-1])
    state = reader.read(text[:, -1:], state)
    torch.testing.assert_close(state.log_probs, model(text[:, -6:])[0][0, -1])


LOG_PROBS = torch.tensor([0.5, 0.25, 0.15, 0.1], dtype=torch.float64).log()


def frequencies(n=4000, **settings):
    sampling, generator = Sampling(**settings), torch.Generator().manual_seed(0)
    counts = torch.zeros(4)
    for _ in range(n):
        counts[sampling.draw(LOG_PROBS, generator)] += 1
    return (counts / n).tolist()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0.5, 0.25, 0.15, 0.1]),
        ({"temperature": 0.0}, [1, 0, 0, 0]),
        ({"temperature": 0.5}, [0.25 / 0.345, 0.0625 / 0.345, 0.0225 / 0.345, 0.01 / 0.345]),
        ({"top_k": 2}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_k": 1}, [1, 0, 0, 0]),
        ({"top_k": 99}, [0.5, 0.25, 0.15, 0.1]),
        ({"top_p": 0.75}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_p": 0.76}, [0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9, 0]),
        ({"top_p": 0.01}, [1, 0, 0, 0]),
        ({"top_p": 1.0}, [0.5, 0.25, 0.15, 0.1]),
        ({"top_k": 3, "top_p": 0.8}, [2 / 3, 1 / 3, 0, 0]),
    ],
)
def test_sampling_draws_from_the_distribution_it_names(settings, expected):
    found = frequencies(**settings)
    assert found == pytest.approx(expected, abs=0.03)
    assert [one == 0 for one in found] == [one == 0 for one in expected]


@pytest.mark.parametrize("temperature", [-0.1, math.nan, math.inf])
def test_temperature_below_zero_is_refused(temperature):
    with pytest.raises(ValueError, match="temperature: must be at least 0"):
        Sampling(temperature=temperature)


@pytest.mark.parametrize("top_p", [0.0, -1.0, 1.01, math.nan])
def test_top_p_outside_its_range_is_refused(top_p):
    with pytest.raises(ValueError, match=r"top_p: must lie in \(0, 1\]"):
        Sampling(top_p=top_p)


@pytest.mark.parametrize("top_k", [0, -3])
def test_top_k_below_one_is_refused(top_k):
    with pytest.raises(ValueError, match="top_k: must be at least 1"):
        Sampling(top_k=top_k)


def test_a_sample_depends_on_its_seed_and_number_alone():
    reader = Reader(tiny_model(), context=8)
    start = reader.read(torch.tensor([[1]]))

    def sample(seed, number, length=10):
        return list(generate(reader, start, Sampling(max_new_tokens=length), sample_seed(seed, number)))

    assert sample(0, 1) == sample(0, 1, length=20)[:10]
    assert len({tuple(sample(seed, number)) for seed in (0, 1) for number in (0, 1)}) == 4


def test_nothing_is_generated_where_nothing_is_asked_for():
    reader = Reader(tiny_model(), context=8)
    start = reader.read(torch.tensor([[1]]))
    assert list(generate(reader, start, Sampling(max_new_tokens=0), sample_seed(0, 0))) == []


@given(st.lists(st.binary(max_size=4)), st.binary(max_size=4))
def test_until_ends_before_the_stop_text(pieces, stop):
    whole = b"".join(pieces)
    expected = whole.split(stop)[0] if stop and stop in whole else whole
    assert b"".join(until(iter(pieces), stop or None)) == expected


def test_until_holds_back_no_more_than_it_must():
    pieces = iter([b"a", b"b", b"c", b"d"])
    made = until(pieces, b"bx")
    assert next(made) == b"a"
    assert next(made) == b""  # b could begin the stop text
    assert next(made) == b"bc"


def test_an_empty_prompt_is_a_newline():
    assert encode_prompt(Encoder(Bytes()), b"").tolist() == [[10]]


def test_an_empty_prompt_needs_a_newline_in_the_vocabulary():
    with pytest.raises(ValueError, match=r"prompt: .* lacks '.n'"):
        encode_prompt(Encoder(Characters().fit([b"abc"])), b"")


def test_a_prompt_with_characters_that_the_vocabulary_lacks_is_refused():
    vocab = Characters().fit([b"abc\n"])
    assert encode_prompt(Encoder(vocab), b"cab").tolist() == [[4, 2, 3]]
    with pytest.raises(ValueError, match=r"prompt: the checkpoint's vocabulary lacks 'z', 'é'"):
        encode_prompt(Encoder(vocab), "azé".encode())


@pytest.mark.parametrize("overrides", [[], ["model/memory=none"]])
@pytest.mark.parametrize("context", [3, 64])
def test_where_memory_is_reset_a_new_document_forgets_the_old_one(overrides, context):
    """In the prompt and in what is generated: after the separator the model reads as if nothing had been before."""
    documents = Encoder(Bytes(), b"\n\n")
    memory = [] if overrides else ["model.memory.mem_len=64"]
    model = tiny_model(*overrides, *memory, n_token=256)
    reader = Reader(model, context=context, documents=documents)
    text = torch.tensor([list(b"one\n\ntwo\n\nth")])
    whole = reader.read(text)
    alone = Reader(model, context=context).read(text[:, -2:])
    torch.testing.assert_close(whole.log_probs, alone.log_probs)
    state = reader.read(text[:, :3])
    for place in range(3, text.shape[1]):
        state = reader.read(text[:, place : place + 1], state)
    torch.testing.assert_close(state.log_probs, alone.log_probs)
    plain = Reader(model, context=context).read(text)
    if not overrides or context > 3:
        assert (plain.log_probs - alone.log_probs).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("vocab", "separator", "text"),
    [
        (Bytes(), b"\n\n", b"ab\n\n\ncd\n\nef"),
        (Bytes(), b"aa", b"xaaay aaaa z"),
        (Characters(), b"b\n", b"a b\nc d\ne b\n"),
        (Words(), b"\n", b"a b\nc d\ne b\n"),
        (Words(), b"\n\n", b"a\n\n\nb c\n\nd\n"),
        (Words(), b"SEP\n", b"a SEP\nb\nc SEP\nd\n"),
        (Words(eos="<S>", eos_first=True), b"\n", b"a b\nc d\ne b\n"),
        (BPE(max_size=270), b"\n\n", b"the cat\n\nthe dog\n\n\nthe cat\n\nthe end"),
        (BPE(max_size=270), b". ", b"the cat. the dog. the cat"),
    ],
)
def test_documents_begin_where_training_marked_them(vocab, separator, text):
    """In a text that is read token by token, and in a prompt, which has the tokens that training had."""
    fitted = vocab.fit([text])
    encoder, split = Encoder(fitted, separator), Split.of("train", text, fitted, separator=separator)
    assert encoder.sees_borders
    prompt = encode_prompt(encoder, text)
    assert prompt[0].tolist() == split.tokens[: prompt.shape[1]].tolist()
    reader = Reader(tiny_model(n_token=fitted.n_token), context=8, documents=encoder)
    marks, document = [], ()
    for token in prompt.split(1, dim=1):
        mark, document = reader._starts(token, document)
        marks.append(mark)
    begins = torch.cat(marks, dim=1)[0].nonzero()[:, 0].tolist()
    assert [place for place in begins if place] == [place for place in split.starts[1:] if place < prompt.shape[1]]
    assert torch.equal(reader._starts(prompt, ())[0], torch.cat(marks, dim=1))


@pytest.mark.parametrize(
    ("vocab", "separator"),
    [
        (Bytes(newlines=False), b".\n"),
        (Words(eos=None), b"\n"),
        (Words(eos_first=True), b"\n\n"),
        (Words(), b"NEVER\n"),
    ],
)
def test_a_separator_that_the_vocabulary_cannot_show_is_warned_of(vocab, separator, capsys):
    encoder = Encoder(vocab.fit([b"a b\nc"]), separator)
    assert borders_for(encoder, resets=True) is None
    assert capsys.readouterr().err.startswith("warning: the vocabulary has no token for data.document_separator")
    assert borders_for(encoder, resets=False) is None and capsys.readouterr().err == ""


def test_a_prompt_of_unknown_words_warns_or_is_refused(capsys):
    lenient = Words().fit([b"a b"])
    assert encode_prompt(Encoder(lenient), b"a z").tolist() == [lenient.encode(b"a z", False).tolist()]
    assert capsys.readouterr().err == "warning: prompt: the checkpoint's vocabulary lacks 'z'\n"
    with pytest.raises(ValueError, match="prompt: the checkpoint's vocabulary lacks 'z'"):
        encode_prompt(Encoder(Words(unknown=None).fit([b"a b"])), b"a z")
    assert encode_prompt(Encoder(lenient), b"a b").shape == (1, 2)  # a prompt does not end its line
    with pytest.raises(ValueError, match="prompt: holds nothing"):
        encode_prompt(Encoder(lenient), b"  ")
