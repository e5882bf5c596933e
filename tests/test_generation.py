import pytest
import torch
from conftest import mostly_slow, tiny_model
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from txl import generation
from txl.data.encoding import Encoder, Split
from txl.data.vocab import BPE, Bytes, Characters, Words
from txl.generation import (
    Borders,
    Reader,
    Sampling,
    borders_for,
    encode_prompt,
    generate,
    rows_at_once,
    sample_seed,
)

MODELS = {
    "memory": ["model.memory.mem_len=7"],
    "same_length": ["model.same_length=true", "model.memory.mem_len=7"],
    "clamp_len": ["model.memory.mem_len=9", "model.position.clamp_len=4"],
    "pre_norm": ["model.memory.mem_len=8", "model.pre_norm=true"],
    "untie_r": ["model.memory.mem_len=5", "model.untie_r=true"],
    "one": ["model.memory.mem_len=1", "model.same_length=true"],
    "adaptive": ["model.memory.mem_len=7", "model/softmax=adaptive", "model.softmax.cutoffs=[10,30]"],
    "no_memory": ["model/memory=none"],
    "shaw": ["model.memory.mem_len=7", "model/position=shaw", "model.position.max_klen=6"],
    "rotary": ["model.memory.mem_len=7", "model/position=rotary"],
    "alibi": ["model.memory.mem_len=7", "model/position=alibi"],
    "rotary_no_memory": ["model/memory=none", "model/position=rotary"],
    "absolute": ["model.memory.mem_len=10", "model/position=absolute"],
    "absolute_no_memory": ["model/memory=none", "model/position=absolute"],
    "per_layer": ["model.memory.mem_len=10", "model/position=absolute_per_layer", "model.position.max_klen=12"],
    "compressive": ["model/memory=compressive", "model.memory.mem_len=5", "model.memory.rate=5"],
}
CONTEXT = 5  # tokens of a segment


def prompt_of(length, seed=6):
    return torch.randint(50, (length,), generator=torch.Generator().manual_seed(seed))


def by_segments(model, text):
    """log p after a text, the last segment of which is the beginning of a whole one."""
    mems = None
    for segment in text.split(CONTEXT):
        filled = segment if model.position.by_distance else F.pad(segment, (0, CONTEXT - len(segment)))
        log_probs, mems = model(filled[None], mems)
    return log_probs[0, len(segment) - 1]


def by_hidden_states(model, prompt, length):
    """The slow twin: the prompt in segments, then token by token, hidden states carried and projected anew each time."""
    if not model.keys_last:  # all of the text again for each token, by segments of which the last is filled up
        return torch.stack(
            [by_segments(model, prompt[: stop + 1]) for stop in range(len(prompt) - length - 1, len(prompt))]
        )
    if model.memory.mem_len is None:
        texts = [prompt[: stop + 1][-CONTEXT:] for stop in range(len(prompt) - length - 1, len(prompt))]
        return torch.stack([model(text[None])[0][0, -1] for text in texts])
    mems, found = None, []
    begin = prompt[: len(prompt) - length]
    for segment in (*begin.split(CONTEXT), *prompt[len(begin) :].unbind()):
        log_probs, mems = model(segment.reshape(1, -1), mems)
        found.append(log_probs[0, -1])
    return torch.stack(found[-length - 1 :])


def one_by_one(texts, tokens):
    """log p after the prompts and after each further token of each text."""
    found = [texts.log_probs]
    for column in tokens.unbind(1):
        texts.extend(column[:, None].tolist())
        found.append(texts.log_probs)
    return torch.stack(found, dim=1)


@pytest.mark.parametrize(
    ("variant", "prompt_len"),
    mostly_slow([*((variant, 12) for variant in MODELS), *((next(iter(MODELS)), n) for n in (1, 33))], fast=2),
)
def test_cached_generation_equals_recomputation_at_every_step(variant, prompt_len):
    """Far past several times the memory, for which the buffers move many times."""
    model, further = tiny_model(*MODELS[variant]), 40
    text = prompt_of(prompt_len + further)
    texts = Reader(model, context=CONTEXT).begin([text[:prompt_len]])
    found = one_by_one(texts, text[None, prompt_len:])
    torch.testing.assert_close(found[0], by_hidden_states(model, text, further), rtol=0, atol=1e-11)


@pytest.mark.parametrize("variant", MODELS)
def test_further_tokens_read_at_once_are_read_as_one_by_one(variant):
    """Once and again, more than there is room for at a time and more than the window."""
    reader = Reader(tiny_model(*MODELS[variant]), context=CONTEXT)
    text = prompt_of(3 + 2 + 13 + 1 + 9)
    texts = reader.begin([text[:3]], room=4)
    one = one_by_one(reader.begin([text[:3]]), text[None, 3:])[0]
    place = 0
    for length in (2, 13, 1, 9):
        texts.extend([text[3 + place : 3 + place + length].tolist()])
        place += length
        torch.testing.assert_close(texts.log_probs[0], one[place], rtol=0, atol=1e-11)


@pytest.mark.parametrize("length", mostly_slow([5, 10, 1000], fast=3))
def test_a_prompt_read_in_long_segments_is_read_as_in_segments_of_the_context(length, monkeypatch):
    monkeypatch.setattr(generation, "PROMPT_AT_ONCE", length)
    for variant in MODELS:
        model, prompt = tiny_model(*MODELS[variant]), prompt_of(43)
        texts = Reader(model, context=CONTEXT).begin([prompt])
        torch.testing.assert_close(texts.log_probs, by_hidden_states(model, prompt, 0), rtol=0, atol=1e-11)


@pytest.mark.parametrize("variant", mostly_slow(MODELS, fast=3))
def test_prompts_of_unequal_length_are_continued_as_if_each_were_alone(variant):
    """Past the point where the last filling has left the window; with copies, each of which goes its own way."""
    model, lengths, copies = tiny_model(*MODELS[variant]), [3, 17, 1, 6], [2, 1, 3, 1]
    reader = Reader(model, context=CONTEXT)
    prompts = [prompt_of(length, seed=length) for length in lengths]
    further = torch.randint(50, (sum(copies), 25), generator=torch.Generator().manual_seed(7))
    found = one_by_one(reader.begin(prompts, copies), further)
    row = 0
    for prompt, times in zip(prompts, copies, strict=True):
        for _ in range(times):
            alone = one_by_one(reader.begin([prompt]), further[row : row + 1])
            torch.testing.assert_close(found[row], alone[0], rtol=0, atol=1e-11)
            row += 1


def test_nothing_of_the_filling_reaches_a_result():
    """Not even what is not-a-number: the rows that a shorter text lacks are hidden, and so is all that was there before."""
    model = tiny_model("model.memory.mem_len=7")
    texts = Reader(model, context=CONTEXT).begin([prompt_of(2), prompt_of(7)])
    before = one_by_one(texts, prompt_of(6)[None].expand(2, 6))
    texts = Reader(model, context=CONTEXT).begin([prompt_of(2), prompt_of(7)])
    for kept in texts.cache.keys_values:
        kept[:, :, 0, :5] = 1e9
    torch.testing.assert_close(one_by_one(texts, prompt_of(6)[None].expand(2, 6)), before, rtol=0, atol=0)


def test_the_document_numbers_are_dropped_when_the_filling_has_left_the_window():
    model = tiny_model("model.memory.mem_len=7")
    texts = Reader(model, context=CONTEXT).begin([prompt_of(4), prompt_of(7)])
    assert texts.cache.documents is not None
    one_by_one(texts, prompt_of(3)[None].expand(2, 3))
    assert texts.cache.documents is not None
    one_by_one(texts, prompt_of(2)[None].expand(2, 2))
    assert texts.cache.documents is None


def test_one_token_costs_one_token():
    """Per token and layer one row goes through each linear layer, the buffers stay where they are, and none is made."""
    model = tiny_model("model.memory.mem_len=30")
    texts = Reader(model, context=CONTEXT).begin([prompt_of(40)])
    buffers = [kept.data_ptr() for kept in texts.cache.keys_values]
    rows = []
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda _, given: rows.append(given[0].shape[:-1].numel()))
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        for token in range(4):
            texts.extend([[token]])
    assert rows == [1] * (4 * 2 * 5)  # q, k and v, output, two of the feed-forward network: nothing for the distances
    assert [kept.data_ptr() for kept in texts.cache.keys_values] == buffers
    assert not [event for event in recorded.events() if event.name in ("aten::cat", "aten::roll")]


def test_generated_tokens_are_those_that_are_read_next():
    """Greedy, against the most probable token of a text read whole, memory as long as it."""
    model = tiny_model("model.memory.mem_len=40")
    reader, text = Reader(model, context=CONTEXT), prompt_of(7)[None]
    sampling = Sampling(max_new_tokens=25, temperature=0.0)
    made = [token for (token,) in generate(reader.begin(list(text)), sampling, [sample_seed(0, 0)])]
    assert len(made) == 25
    for token in made:
        assert token == model(text)[0][0, -1].argmax()
        text = torch.cat([text, torch.tensor([[token]])], dim=1)


def test_a_sample_depends_on_its_seed_and_number_alone():
    reader = Reader(tiny_model(), context=8)

    def samples(seed, numbers, length=10):
        texts = reader.begin([torch.tensor([1])], [len(numbers)])
        rows = generate(texts, Sampling(max_new_tokens=length), [sample_seed(seed, number) for number in numbers])
        return list(zip(*rows, strict=True))

    assert samples(0, [1])[0] == samples(0, [1], length=20)[0][:10]
    assert samples(0, [0, 1, 2])[1] == samples(0, [1])[0]
    assert len({*samples(0, [0, 1]), *samples(1, [0, 1])}) == 4


def test_nothing_is_generated_where_nothing_is_asked_for():
    reader = Reader(tiny_model(), context=8)
    texts = reader.begin([torch.tensor([1])])
    assert list(generate(texts, Sampling(max_new_tokens=0), [sample_seed(0, 0)])) == []


def test_as_many_texts_side_by_side_as_there_is_room_for(monkeypatch):
    model = tiny_model()  # two layers, 16 tokens, keys and values of 16 doubles
    assert rows_at_once(model, 64) == 64
    monkeypatch.setattr(generation, "CACHE_BYTES", 10 * 2 * 21 * 2 * 16 * 8)
    assert rows_at_once(model, 64) == 10
    monkeypatch.setattr(generation, "CACHE_BYTES", 1)
    assert rows_at_once(model, 64) == 1


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
    text = torch.tensor(list(b"one\n\ntwo\n\nth"))
    whole = reader.begin([text])
    alone = Reader(model, context=context).begin([text[-2:]])
    torch.testing.assert_close(whole.log_probs, alone.log_probs)
    token_by_token = one_by_one(reader.begin([text[:3]]), text[None, 3:])
    torch.testing.assert_close(token_by_token[:, -1], alone.log_probs)
    several = reader.begin([text[:-5], text, text[-2:]])
    torch.testing.assert_close(several.log_probs[1:], alone.log_probs.expand(2, -1))
    for token in b"e end":
        for texts in (several, alone):
            texts.extend([[token]] * len(texts.log_probs))
        torch.testing.assert_close(several.log_probs[1:], alone.log_probs.expand(2, -1))
    plain = Reader(model, context=context).begin([text])
    if not overrides or context > 3:
        assert (plain.log_probs - whole.log_probs).abs().max() > 1e-3


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
    one, whole = Borders(encoder, 1), Borders(encoder, 1)
    marks = [mark for token in prompt[0].tolist() for mark in one.mark(0, [token])]
    begins = [place for place, mark in enumerate(marks) if mark]
    assert [place for place in begins if place] == [place for place in split.starts[1:] if place < prompt.shape[1]]
    assert whole.mark(0, prompt[0].tolist()) == marks and whole.ends == one.ends


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
