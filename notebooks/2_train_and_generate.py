# %% [markdown]
# # Train and generate, on a CPU in a minute
#
# This notebook trains a small Transformer-XL on the help texts inside Python itself (no download), looks at what the run has
# left behind, lets the model write and score text, and trains it a little further. It does from Python what
# `python train.py`, `evaluate.py` and `generate.py` do on the command line: the same overrides, the same run folder.

# %%
import json
import shutil
import sys
from math import log
from pathlib import Path

ROOT = Path.cwd() if Path("txl").is_dir() else Path.cwd().parent  # Jupyter starts in notebooks/
sys.path.insert(0, str(ROOT))

import matplotlib.pyplot as plt
import torch
from IPython.display import Image, display

import evaluate
import train
from txl import checkpoint, generation
from txl.config import call

plt.rcParams["figure.dpi"] = 80

# %% [markdown]
# ## Settings
#
# `CHANGES` takes any override of `train.py`, for instance `["model.n_layer=3"]`.

# %% tags=["parameters"]
STEPS = 600
CHANGES = []

# %% [markdown]
# ## Train
#
# The text is cut into `batch_size` lanes, which are read side by side. In each update the model reads the next `tgt_len` bytes
# of every lane, with the hidden states of the `mem_len` bytes before as its memory. `call` runs an entry point as its command
# would run with these overrides. (`python train.py --help` lists everything that can be overridden.)

# %%
RUNS = Path("outputs/notebook")
shutil.rmtree(RUNS, ignore_errors=True)  # a run that is there would be gone on with, or only reported
overrides = [
    "name=notebook",
    "model.n_layer=2",
    "model.memory.mem_len=96",
    "tgt_len=32",
    "batch_size=16",
    "model.pre_norm=true",
    "optimizer.lr=0.003",
    "clip=1.0",
    f"steps={STEPS}",
    "log_every=25",
    "eval_every=150",
    "save_every=300",
    "sample.max_new_tokens=200",
    *CHANGES,
]
valid_nll = call(train.main, overrides)

# %% [markdown]
# The table has the figures of the best checkpoint, of the two parts of the text that it did not learn from. The sample is what
# the model writes after it has read the end of the test text.
#
# ## What a run leaves behind
#
# The folder holds everything: the configuration, a line of figures for each time that something was logged, the weights.

# %%
run = next(RUNS.iterdir())
print(*sorted(file.name for file in run.iterdir() if not file.name.startswith(".")), sep="\n")
display(Image(run / "curves.png", width=900))

# %% [markdown]
# `metrics.jsonl` has a JSON object in each line, easy to draw for oneself. The loss is the negative log-likelihood of a byte:
# in nats, or in bits after division by log 2. A model that knows nothing needs 8 bits for a byte.

# %%
rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
figure, axis = plt.subplots(figsize=(7, 3), layout="constrained")
for name, style in {"train/nll": "-", "valid/nll": "o-"}.items():
    points = [(row["step"], row[name] / log(2)) for row in rows if name in row]
    axis.plot(*zip(*points, strict=True), style, label=name.removesuffix("/nll"))
axis.set(xlabel="update", ylabel="bits per byte")
axis.grid(alpha=0.3)
axis.legend()
plt.show()

result = json.loads((run / "result.json").read_text())
for split in ("valid", "test"):
    figures = result[split]
    print(
        f"{split}: {figures['nll']:.3f} nats = {figures['bits_per_byte']:.3f} bits a byte, perplexity {figures['ppl']:.2f}"
    )

# %% [markdown]
# ## Measure it in another way
#
# `evaluate.py` reads a split with other settings than those of training. Here without memory, each segment
# by itself. What is lost is what the memory was good for. (The third notebook looks at that closely.)

# %%
without = call(evaluate.main, [f"checkpoint={run}", "split=valid", "mem_len=null"])
print(
    f"\nwith memory {result['valid']['bits_per_byte']:.3f}, without {without['bits_per_byte']:.3f} bits per byte of valid"
)

# %% [markdown]
# ## Let it write
#
# A checkpoint holds all that is needed to read it again: configuration, vocabulary, weights. A `Reader` reads a prompt and
# keeps keys and values, so that each further byte costs one byte of work. On the command line it is
# `python generate.py checkpoint=RUN prompt="The "`.

# %%
content = checkpoint.load(run / "best.pt")
model, vocab = checkpoint.load_model(content), checkpoint.vocabulary(content)
reader = generation.Reader(model, context=content["config"]["tgt_len"])


def encode(text):
    return torch.from_numpy(vocab.encode(text.encode()).astype("int64"))


def write(prompt, temperature, seed=1):
    """How the model goes on after the prompt."""
    sampling = generation.Sampling(max_new_tokens=200, temperature=temperature)
    steps = generation.generate(reader.begin([encode(prompt)]), sampling, [generation.sample_seed(seed, 0)])
    return vocab.decode([token for (token,) in steps]).decode(errors="replace")


for temperature in (0.3, 0.8, 1.2):
    print(f"--- temperature {temperature}\nThe {write('The ', temperature)}\n")

# %% [markdown]
# The temperature divides the logits before the softmax. Low, the model keeps to what it takes for most probable, and repeats
# itself; high, it makes up words.
#
# ## Score a text
#
# The other way round: how probable is a text that somebody else wrote? `model(tokens, mems, targets)` returns the nll of each
# target. The taller the bar, the more the byte surprised the model.


# %%
def score(text):
    """The bits that each byte but the first costs."""
    tokens = encode(text)[None]
    with torch.no_grad():
        nll, _ = model(tokens[:, :-1], None, tokens[:, 1:])
    return nll[0] / log(2)


sentences = [
    "If the object is a function, the name is the name of the function.",
    "If a objects are an function, an name has a names by an functions.",
    "noitcnuf eht fo eman eht si eman eht ,noitcnuf a si tcejbo eht fI",
]
figure, axes = plt.subplots(3, 1, figsize=(10, 5.5), sharey=True, layout="constrained")
for axis, sentence in zip(axes, sentences, strict=True):
    bits = score(sentence)
    axis.bar(range(1, len(sentence)), bits, color="tab:orange")
    axis.set_xticks(range(len(sentence)), sentence, family="monospace")
    axis.set(title=f"{bits.mean():.2f} bits per byte", ylabel="bits", xlim=(-0.6, 66.6))
    axis.tick_params(axis="x", length=0)
plt.show()

# %% [markdown]
# What begins a word is hard to guess, what ends it is easy.
#
# ## Train it further
#
# `resume` goes on with a run where it stopped: weights, optimizer, memory, place in the text, random numbers. Other overrides
# may be given as well; here, more updates. The learning rate follows its schedule over the new number of updates, so that it is
# a little higher again than it was at the end. On the command line: `python train.py resume=RUN steps=...`.

# %%
valid_nll = call(train.main, [f"resume={run}", f"steps={STEPS + STEPS // 4}"])

# %%
longer = json.loads((run / "result.json").read_text())
for one in (result, longer):
    print(f"after {one['step']} updates: {one['valid']['bits_per_byte']:.3f} bits per byte of valid")

# %% [markdown]
# To train the project's default model (twice as deep, 1,200 updates, a few minutes) run `python train.py`, and to read your own text
# `python train.py data=text data.train=FILE ...`: README has the list.
