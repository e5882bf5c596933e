# %% [markdown]
# # What the memory is used for
#
# Two small models are trained on the same text for the same number of updates: one with memory, one without. Then we ask the
# first one what it makes of its memory, with the instruments that `evaluate.py measure=` offers and with a few lines of our own:
#
# 1. What does the memory gain, and where in a segment?
# 2. How long should it be?
# 3. How much of the attention falls on it, and how far back?
# 4. Does the model remember a word that it has seen once?
#
# All numbers are computed here; another number of updates gives others. These models are small and trained for half a minute each:
# what they show is how one asks, more than how large models answer.

# %%
import shutil
import sys
from math import log
from pathlib import Path

ROOT = Path.cwd() if Path("txl").is_dir() else Path.cwd().parent  # Jupyter starts in notebooks/
sys.path.insert(0, str(ROOT))

import matplotlib.pyplot as plt
import numpy as np
import torch
from IPython.display import Image, display

import evaluate
import train
from txl import checkpoint
from txl.config import call

plt.rcParams["figure.dpi"] = 80

# %% tags=["parameters"]
STEPS = 600
CHANGES = []  # other overrides of train.py
TEXTS = 128  # of the last experiment

# %%
TGT_LEN, MEM_LEN = 32, 96
settings = [
    "model.n_layer=2",
    f"tgt_len={TGT_LEN}",
    "batch_size=16",
    "model.pre_norm=true",
    "optimizer.lr=0.003",
    "clip=1.0",
    f"steps={STEPS}",
    "log_every=100",
    f"eval_every={STEPS}",
    f"save_every={STEPS}",
    "sample.max_new_tokens=60",
    *CHANGES,
]
choices = {"with_memory": f"model.memory.mem_len={MEM_LEN}", "without_memory": "model/memory=none"}
runs, nll = {}, {}
for name, choice in choices.items():
    folder = Path("outputs", f"notebook_{name}")
    shutil.rmtree(folder, ignore_errors=True)  # a run that is there would be gone on with, or only reported
    nll[name] = call(train.main, [f"name={folder.name}", choice, *settings])
    runs[name] = next(folder.iterdir())

# %%
print(
    f"valid, bits per byte: with memory {nll['with_memory'] / log(2):.3f}, trained without {nll['without_memory'] / log(2):.3f}"
)

# %% [markdown]
# # 1. What does the memory gain, and where in a segment?
#
# We read the valid split in segments of `tgt_len` tokens: the first model with its memory; the same model, but with an empty
# memory for each segment; and the model that was trained without. The memory is an argument and a result of the model, so
# leaving it out is passing `None`.


# %%
def load(name):
    content = checkpoint.load(runs[name] / "best.pt")
    return checkpoint.load_model(content), checkpoint.vocabulary(content), content


def nll_by_place(model, tokens, carry):
    """The nll of the tokens (nats), [segment, place in the segment]."""
    inputs, targets = tokens[:-1].split(TGT_LEN), tokens[1:].split(TGT_LEN)
    mems, found = None, []
    with torch.no_grad():
        for segment, wanted in zip(inputs, targets, strict=True):
            nll, mems = model(segment[None], mems if carry else None, wanted[None])
            found.append(nll[0])
    return torch.stack(found[MEM_LEN // TGT_LEN : -1])  # where the memory is full, and the segment whole


model, vocab, content = load("with_memory")
corpus = checkpoint.construct(content["config"]["data"], cache_dir=None)
tokens = torch.from_numpy(np.asarray(corpus.split("valid", vocab).tokens).astype("int64"))

by_place = {
    "with its memory": nll_by_place(model, tokens, carry=True),
    "the same model, memory emptied": nll_by_place(model, tokens, carry=False),
    "trained without memory": nll_by_place(load("without_memory")[0], tokens, carry=False),
}
figure, axis = plt.subplots(figsize=(8, 3.5), layout="constrained")
for name, nll in by_place.items():
    bits = nll.mean(dim=0) / log(2)
    axis.plot(range(TGT_LEN), bits, ".-", label=f"{name}: {bits.mean():.3f} on average")
axis.set(xlabel="place in the segment", ylabel="bits per byte")
axis.grid(alpha=0.3)
axis.legend()
plt.show()

gain = (by_place["trained without memory"] - by_place["with its memory"]).mean(dim=0) / log(2)
print(f"gain over the model without memory, first 4 places of a segment: {gain[:4].mean():.3f} bits per byte")
print(f"gain at its last 16 places: {gain[-16:].mean():.3f} bits per byte")

# %% [markdown]
# This is context fragmentation, and its cure. Without memory the first bytes of each segment are predicted from next to nothing,
# and cost the most; with memory the curve has no reason to know where segments begin. Most of what the memory gains for a small model
# is this: it has always *some* context. At the last places both have a good part of a segment to go by, and there the difference
# says what the memory adds to that: little, or nothing. Whether the model makes use of what lies far back is the next question.
#
# (Compare with the model that was *trained* without memory. The same model with its memory taken away reads in a way that training
# never showed it, and is a comparison that flatters memory.)
#
# # 2. How long should the memory be?
#
# `measure=context` reads the split once with each length of memory, and also sorts the loss by the number of tokens that a
# prediction could see. On the command line: `python evaluate.py checkpoint=RUN split=valid measure=context`.

# %%
lengths = [1, 2, 4, 8, 16, 32, 64, 96, 192]
context = call(
    evaluate.main,
    [
        f"checkpoint={runs['with_memory']}",
        "split=valid",
        "measure=context",
        f"measure.mem_lens=[null,{','.join(map(str, lengths))}]",
    ],
)
bits = [one["bits_per_byte"] for one in context["settings"]]
figure, axis = plt.subplots(figsize=(8, 3.2), layout="constrained")
axis.plot(range(len(bits)), bits, "o-")
axis.set_xticks(range(len(bits)), ["none", *lengths])
axis.axvline(1 + lengths.index(MEM_LEN), color="gray", linestyle=":", label="as trained")
axis.set(xlabel="mem_len (tokens)", ylabel="bits per byte of valid")
axis.grid(alpha=0.3)
axis.legend()
plt.show()

whole = bits[0] - bits[1 + lengths.index(MEM_LEN)]
for length in (8, 32, 96):
    share = (bits[0] - bits[1 + lengths.index(length)]) / whole
    print(f"{length} tokens of memory give {share:.0%} of what {MEM_LEN} give")

# %% [markdown]
# The gain of one more token gets smaller and smaller, though not the cost. (The weights stay the same: this is one model read in ten ways.
# That it can be read with a longer memory than it was trained with is owed to relative positions.)
#
# The same reading, by the number of tokens before its own that the first layer sees. Without memory that is the place in
# the segment; with memory it is never less than `mem_len`, but at the text's very beginning:

# %%
figure, axis = plt.subplots(figsize=(8, 3.2), layout="constrained")
edges = np.array(context["seen"])
for one in context["settings"]:
    if one["mem_len"] not in (None, 8, 32, 96):
        continue
    often = np.array(one["tokens_by_seen"]) >= 300
    nll, error = (np.array(one[f"{kind}_by_seen"], dtype=float)[often] / log(2) for kind in ("nll", "error"))
    middle = ((edges[:-1] + edges[1:] - 1) / 2)[often]
    axis.errorbar(1 + middle, nll, error, fmt=".-", capsize=2, label=f"mem_len {one['mem_len'] or 'none'}")
axis.set(xlabel="1 + tokens that the first layer sees before its own", ylabel="bits per byte", xscale="log")
axis.grid(alpha=0.3)
axis.legend()
plt.show()

# %% [markdown]
# # 3. Where does the attention go?
#
# `measure=attention` reads a stretch of text and looks at its last segment, after a full memory. A share of attention is no proof of
# use, so it wants something to compare with: a head that looks at all keys alike would have most of its attention on the memory,
# for there are more keys. That share is drawn as a line.

# %%
attention = call(
    evaluate.main, [f"checkpoint={runs['with_memory']}", "split=valid", "measure=attention", "measure.length=1024"]
)
layers = attention["layers"]
place = np.arange(TGT_LEN)
uniform = (MEM_LEN / (MEM_LEN + place + 1)).mean()

figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.5), layout="constrained")
for layer in layers:
    shares = layer["share"]["memory"]
    left.bar(str(layer["layer"]), np.mean(shares), color="tab:blue", alpha=0.5)
    left.plot([str(layer["layer"])] * len(shares), shares, "ko", markersize=4)
    mass = np.cumsum(np.mean(layer["mass_by_distance"], axis=0))
    right.plot(1 + np.arange(len(mass)), mass, label=f"layer {layer['layer']}")
    half = int(np.argmax(mass >= 0.5))
    print(
        f"layer {layer['layer']}: {np.mean(shares):.0%} of the attention on the memory (all keys alike: {uniform:.0%}); "
        f"half of it within {half} tokens"
    )
left.axhline(uniform, color="tab:red", linestyle=":", label="all keys alike")
left.set(xlabel="layer (a dot for each head)", ylabel="share on the memory", ylim=(0, 1.05))
left.legend()

even = np.zeros(MEM_LEN + TGT_LEN)
for query in range(TGT_LEN):
    even[: MEM_LEN + query + 1] += 1 / (MEM_LEN + query + 1) / TGT_LEN
right.plot(1 + np.arange(len(even)), np.cumsum(even), ":", color="tab:red", label="all keys alike")
right.set(xlabel="1 + distance (tokens)", ylabel="attention up to there", xscale="log", ylim=(0, 1.03))
right.grid(alpha=0.3)
right.legend()
plt.show()

# %% [markdown]
# A curve that lies above the dotted one belongs to a layer that prefers what is near. One that lies on it looks at everything alike:
# after so little training that may well mean that a head has not found anything to look for.
#
# The instrument draws a picture of its own: a map for each head (key 0 is the segment's first, keys below 0 are memory), and how much
# each of the four terms of the first notebook tells the keys apart.

# %%
picture = next(runs["with_memory"].glob("evaluate/*attention*.png"))
display(Image(picture, width=800))

# %% [markdown]
# A bright diagonal is a head that looks at a fixed distance, over the segment's border as if there were none. Bright columns are keys
# that all queries like.
#
# # 4. Does it remember a word?
#
# The use of memory that one thinks of first: a name that was introduced some time ago comes again. A test with made-up words: each text
# has a random word of 8 letters, a stretch of ordinary text, and then the same word again. We look at the nll of the word when it comes
# again, and at that in a text whose first word was another one. The difference is what was remembered. The memory is always full of text that
# stands before, and the two words are `gap` tokens apart: within a segment or in the memory.


# %%
def gained_by_repeating(model, gap, n_text=TEXTS, seed=0):
    """Mean and standard error of the nats a letter that a word costs less, if it has been seen `gap` tokens before."""
    draw = np.random.default_rng(seed)
    words = draw.integers(ord("a"), ord("z") + 1, (n_text, 8))
    others = np.roll(words, 1, axis=0)
    places = draw.integers(0, len(tokens) - 500, n_text)
    ordinary = np.stack([tokens[place : place + MEM_LEN + gap].numpy() for place in places])

    def nll_of_second(first):
        text = np.concatenate([ordinary[:, :MEM_LEN], first, ordinary[:, MEM_LEN:], words], axis=1)
        text = torch.from_numpy(vocab_numbers[text])
        mems, found = None, []
        with torch.no_grad():
            for inputs, targets in zip(text[:, :-1].split(TGT_LEN, 1), text[:, 1:].split(TGT_LEN, 1), strict=True):
                nll, mems = model(inputs, mems, targets)
                found.append(nll)
        return torch.cat(found, dim=1)[:, -7:].mean(dim=1)  # the first letter cannot be known

    less = nll_of_second(others) - nll_of_second(words)
    return float(less.mean()), float(less.std() / n_text**0.5)


vocab_numbers = vocab.encode(bytes(range(256))).astype("int64")  # the token of each byte
gaps = [2, 8, 16, 32, 64]
found = [gained_by_repeating(model, gap) for gap in gaps]
figure, axis = plt.subplots(figsize=(7, 3), layout="constrained")
axis.errorbar(range(len(gaps)), *zip(*found, strict=True), fmt="o", capsize=3)
axis.axhline(0, color="gray", linewidth=0.7)
axis.set_xticks(range(len(gaps)), gaps)
axis.set(xlabel="tokens between the word and its repetition", ylabel="nats per letter gained")
plt.show()
for gap, (mean, error) in zip(gaps, found, strict=True):
    verdict = "not noise alone" if abs(mean) > 3 * error else "within the noise"
    print(f"gap {gap}: {mean:+.3f} ± {error:.3f} nats per letter, {mean / log(26):+.1%} of log 26; {verdict}")

# %% [markdown]
# A random letter costs log 26 = 3.3 nats for whoever cannot remember it. To copy a word, a model has to find the place where its
# first letters stood before and look one further: two layers that work together, which takes longer to learn than this
# notebook takes. Train longer (`STEPS`, or `python train.py` and then `runs["with_memory"] = Path("outputs/python_docs/default")` with its `tgt_len` and `mem_len`)
# and ask again.
#
# More questions, each a command: `measure=recl` (how far back several models make use of context), `measure=tokens` (the
# tokens on which two models differ most), `measure=dynamic` (a model that goes on learning while it reads). README shows them.
