# %% [markdown]
# # From attention to Transformer-XL
#
# This notebook builds Transformer-XL in small steps. Each equation stands above a few lines of torch that compute it,
# and an `assert_close` holds these lines against the project's own class. Nothing is trained here: the weights are random,
# and all sizes are so small that every matrix can be drawn.
#
# 1. The plain Transformer (Vaswani et al. 2017, *Attention Is All You Need*).
# 2. A long text in segments, and what is lost at their borders.
# 3. Memory: Transformer-XL's segment recurrence (Dai et al. 2019, *Transformer-XL*, section 3.2).
# 4. Relative positions, which memory needs (section 3.3), and how they are computed fast (appendix B).
# 5. All of it together: the whole model by hand.
#
# Letters, as in the code: b batch, i query, j key, h head, d width of a head, m width of the model, v token of the vocabulary.

# %%
import sys
from functools import partial
from pathlib import Path

ROOT = Path.cwd() if Path("txl").is_dir() else Path.cwd().parent  # Jupyter starts in notebooks/
sys.path.insert(0, str(ROOT))

import matplotlib.pyplot as plt
import torch
from einops import einsum, rearrange
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from txl import TransformerXL, ops
from txl.layers.memory import NoMemory, SegmentMemory
from txl.layers.position import AbsolutePosition, RelativePosition
from txl.layers.softmax import FullSoftmax
from txl.transformer import (
    EncoderLayer,
    FeedForward,
    MultiHeadAttention,
    ScaledEmbedding,
    SinusoidalPositions,
    causal_mask,
)

plt.rcParams["figure.dpi"] = 80
torch.manual_seed(0)
torch.set_grad_enabled(False)  # only one cell needs gradients
n_token, d_model, n_head, d_head, d_inner = 30, 16, 2, 8, 32

# %% [markdown]
# # 1. The plain Transformer
#
# ## Scaled dot-product attention
#
# $$\mathrm{Attention}(Q, K, V) = \mathrm{softmax}\!\left(\frac{Q K^\top}{\sqrt{d}}\right) V$$
#
# (Vaswani et al. 2017, section 3.2.1, equation 1.) Each query is compared with each key; the softmax turns the scores of a
# query into weights that add up to 1; what comes out is the mean of the values by these weights. The square root keeps the
# scores from growing with the width, where the softmax would have hardly any gradient.
#
# A *mask* says which keys a query may see. The others get the score $-\infty$, and so the weight 0.


# %%
def attention_weights(q, k, keep=None):
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if keep is not None:
        scores = scores.masked_fill(~keep, float("-inf"))
    return scores.softmax(dim=-1)


queries, keys, values = torch.randn(5, d_model), torch.randn(7, d_model), torch.randn(7, d_model)
mine = attention_weights(queries, keys) @ values

plain = MultiHeadAttention(d_model=d_model, n_head=1, bias=False)  # one head, all projections the identity
for projection in (plain.q_net, plain.k_net, plain.v_net, plain.o_net):
    nn.init.eye_(projection.weight)
assert_close(mine, plain(queries[None], keys[None], values[None])[0])

# %% [markdown]
# ## The causal mask
#
# A language model predicts each token from those before it, so the query at place $i$ may see the key at place $j$ only if
# $j \le i$ (section 3.2.3). Then one pass predicts the next token at every place at once, and no place sees its answer.

# %%
assert_close(causal_mask(7), torch.ones(7, 7).tril().bool())

text = torch.randn(7, d_model)
figure, axes = plt.subplots(1, 3, figsize=(10, 3), layout="constrained")
pictures = {
    "which keys a query may see": causal_mask(7).float(),
    "weights without the mask": attention_weights(text, text),
    "weights with the mask": attention_weights(text, text, causal_mask(7)),
}
for axis, (title, picture) in zip(axes, pictures.items(), strict=True):
    image = axis.imshow(picture, cmap="magma", vmin=0, vmax=1)
    axis.set(title=title, xlabel="key", ylabel="query")
figure.colorbar(image, ax=axes)
plt.show()

# %% [markdown]
# ## Several heads
#
# $$\mathrm{head}_h = \mathrm{Attention}(x W^Q_h, y W^K_h, y W^V_h), \qquad
#   \mathrm{MultiHead}(x, y) = [\mathrm{head}_1; \ldots; \mathrm{head}_H]\, W^O$$
#
# (Section 3.2.2.) Each head looks at the text in its own way, in a narrow space of its own; the last projection mixes what
# they found. All heads are computed by one matrix product and then told apart by `rearrange`.


# %%
def split_heads(rows):
    return rearrange(rows, "... n (h d) -> ... h n d", h=n_head)


def join_heads(rows):
    return rearrange(rows, "... h n d -> ... n (h d)")


heads = MultiHeadAttention(d_model=d_model, n_head=n_head)
text = torch.randn(1, 7, d_model)
q, k, v = (split_heads(net(text)) for net in (heads.q_net, heads.k_net, heads.v_net))
mine = heads.o_net(join_heads(attention_weights(q, k, causal_mask(7)) @ v))
assert_close(mine, heads(text, text, text, causal_mask(7)))

# %% [markdown]
# ## Embedding
#
# $$h_i = \sqrt{d_{\text{model}}}\; E[x_i]$$
#
# (Section 3.4.) A table has a row for each token; the factor gives its small numbers the size of what is added next.

# %%
embedding = ScaledEmbedding(n_token=n_token, d_model=d_model)
tokens = torch.randint(n_token, (1, 32))
assert_close(embedding.weight[tokens] * d_model**0.5, embedding(tokens))

# %% [markdown]
# ## Positions
#
# Attention does not know the order of the keys. Shuffle the keys together with their values, and the result stays what it was:

# %%
order = torch.randperm(7)
assert_close(heads(text, text, text), heads(text, text[:, order], text[:, order]))

# %% [markdown]
# So the place has to stand in the rows themselves. The Transformer adds to each row a vector of sines and cosines:
#
# $$R_{x} = (\sin x\omega_0, \ldots, \sin x\omega_{n}, \cos x\omega_0, \ldots, \cos x\omega_{n}), \qquad
#   \omega_k = 10000^{-2k/d_{\text{model}}}$$
#
# (Section 3.5. The paper has sine and cosine in turns; Transformer-XL, and so this project, has all sines first. It is the
# same vector in another order.) The first waves are short, they tell neighbours apart; the last are long, they tell near from far.


# %%
def sinusoids(places, d_model):
    frequencies = 10000.0 ** -(torch.arange(0, d_model, 2) / d_model)
    angles = places[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


rows = torch.randn(1, 24, d_model)
assert_close(rows + sinusoids(torch.arange(24.0), d_model), SinusoidalPositions(d_model=d_model)(rows))

# %% [markdown]
# The product of two such vectors depends on nothing but the distance between their places:
# $R_x \cdot R_y = \sum_k \cos((x - y)\,\omega_k)$. Part 4 makes use of that.

# %%
waves = sinusoids(torch.arange(80.0), 32)
products = waves @ waves.T
for x in (20, 50, 69):
    assert_close(products[x, x + 10], products[0, 10], rtol=1e-4, atol=1e-4)

figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3), layout="constrained")
image = left.imshow(waves.T, aspect="auto", cmap="RdBu", vmin=-1, vmax=1)
left.set(title="sinusoids of 80 places, width 32", xlabel="place", ylabel="sines, then cosines")
figure.colorbar(image, ax=left)
for place in (0, 30, 60):
    right.plot(products[place], label=f"place {place}")
right.set(title="product with the vector of every place", xlabel="other place", ylabel="product")
right.legend(loc="upper right")
plt.show()

# %% [markdown]
# ## Feed-forward network
#
# $$\mathrm{FF}(h) = \max(0,\ h W_1 + b_1)\, W_2 + b_2$$
#
# (Section 3.3.) The same small network for every place. Attention moves things between places, this one works on each.

# %%
feedforward = FeedForward(d_model=d_model, d_inner=d_inner, dropout=0.0, activation="relu")
mine = feedforward.outer(feedforward.inner(rows).clamp(min=0))
assert_close(mine, feedforward(rows))

# %% [markdown]
# ## A layer
#
# $$h \leftarrow \mathrm{LN}(h + A(h)), \qquad h \leftarrow \mathrm{LN}(h + \mathrm{FF}(h))$$
#
# (Section 3.1.) Each part adds something to what is there (the residual), and layer normalisation keeps its size in bounds.

# %%
layer = EncoderLayer(d_model=d_model, n_head=n_head, d_inner=d_inner)
keep = causal_mask(24)
hidden = layer.attention_norm(rows + layer.attention(rows, rows, rows, keep))
hidden = layer.feedforward_norm(hidden + layer.feedforward(hidden))
assert_close(hidden, layer(rows, keep))

# %% [markdown]
# A few such layers on top of each other, and a product with the embedding table at the end, which gives a score for each token
# of the vocabulary: that is the plain Transformer as a language model.
#
# # 2. A long text in segments
#
# Attention compares each query with each key, so a text of 100,000 tokens cannot be read at once. One cuts it into segments
# and reads these one after the other. The simplest way treats each segment as a text of its own. Let us see what that does.
#
# `TransformerXL` is the project's model. What it attends to beside its segment, and how it knows where a key lies, are
# choices: first without memory.


# %%
def make_model(memory, position=RelativePosition):
    torch.manual_seed(1)
    return TransformerXL(
        n_token=n_token,
        n_layer=2,
        n_head=n_head,
        d_model=d_model,
        d_head=d_head,
        d_inner=d_inner,
        memory=memory,
        position=position,
        softmax=partial(FullSoftmax),
        init_std=0.3,  # larger than for training, so that untrained weights make a difference that one can see
    ).eval()


def read(model, tokens, segment_len):
    """Log-probabilities of the next token at each place, segment by segment."""
    mems, parts = None, []
    for segment in tokens.split(segment_len, dim=1):
        log_probs, mems = model(segment, mems)
        parts.append(log_probs)
    return torch.cat(parts, dim=1)


def influence(model, tokens, segment_len):
    """[i, j]: how much the prediction at place i changes when token j is another one."""
    n = tokens.shape[1]
    changed = tokens.repeat(n, 1)  # one copy of the text for each place, in which that token is another
    changed[range(n), range(n)] = (tokens[0] + 1) % n_token
    return (read(model, changed, segment_len) - read(model, tokens, segment_len)).abs().amax(dim=-1).T


without_memory = make_model(NoMemory())
whole = influence(without_memory, tokens, 32)
fragments = influence(without_memory, tokens, 8)


def draw_influence(axis, changes, title):
    axis.imshow((changes > 1e-5).float(), cmap="Blues", vmin=0, vmax=1.5)
    for border in (7.5, 15.5, 23.5):
        axis.axhline(border, color="gray", linewidth=0.7)
        axis.axvline(border, color="gray", linewidth=0.7)
    axis.set(title=title, xlabel="token that is changed", ylabel="prediction that changes")


figure, axes = plt.subplots(1, 2, figsize=(8, 4), layout="constrained")
draw_influence(axes[0], whole, "the text read whole")
draw_influence(axes[1], fragments, "four segments, no memory")
plt.show()

# %% [markdown]
# Read whole, each prediction depends on all tokens before it. In segments, nothing passes the borders: the first token of each
# segment is predicted from itself alone, whatever came before. The paper calls this **context fragmentation** (section 3.1):
#
# - no dependency can be longer than a segment;
# - the first tokens of each segment have next to no context, in training as well as in use.
#
# A sliding window avoids it when one only measures: for each token, read all that comes before it again. That costs a whole
# segment of work for each token.
#
# # 3. Memory
#
# Transformer-XL keeps, for each layer, the inputs that it had in the segment before, and attends to them as well. For segment
# $\tau + 1$ and layer $n$ (Dai et al. 2019, section 3.2):
#
# $$\tilde h^{n-1}_{\tau+1} = [\mathrm{SG}(h^{n-1}_{\tau});\ h^{n-1}_{\tau+1}]$$
# $$q = h^{n-1}_{\tau+1} W_q^\top, \qquad k = \tilde h^{n-1}_{\tau+1} W_k^\top, \qquad v = \tilde h^{n-1}_{\tau+1} W_v^\top$$
#
# Queries come from the segment, keys and values from the memory and the segment. SG, *stop gradient*, says that the memory is a
# constant: training follows the gradient within one segment, though each prediction is made with more.
#
# The model takes the memory as an argument and returns the new one:

# %%
mem_len = 8
with_memory = make_model(SegmentMemory(mem_len=mem_len))
first, second = tokens[:, :8], tokens[:, 8:16]
with torch.enable_grad():
    log_probs, mems = with_memory(first, None)
    nll, mems_after = with_memory(second, mems, tokens[:, 9:17])

print(f"memory: {len(mems)} tensors, one for each layer, of shape {list(mems[0].shape)}: batch, mem_len, d_model")
assert_close(mems[0], with_memory.embed(first))  # the first layer's input is the embedding
assert nll.requires_grad and not any(memory.requires_grad for memory in mems + mems_after)

# %% [markdown]
# What is kept are *inputs* of layers, not keys and values: while one trains, the weights that make keys and values change with
# each update. (With the weights fixed, `evaluate.py` and `generate.py` keep the keys and values themselves. The numbers are the same.)
#
# The memory holds the last `mem_len` rows: those of the segment and, if there is room, older ones.

# %%
longer = make_model(SegmentMemory(mem_len=12))
_, mems = longer(first, None)
_, mems_after = longer(second, mems)
context = torch.cat([mems[0], longer.embed(second)], dim=1)
assert_close(mems_after[0], context[:, -12:])

# %% [markdown]
# The mask is now wider than high. A query sees the whole memory, and its own segment up to itself. Then a segment's last
# query sees more than its first; with `same_length` each sees exactly `mem_len` keys, itself among them.

# %%
n_query, memory_len = 4, 6
n_key = memory_len + n_query
place = torch.arange(n_query)[:, None]
key = torch.arange(n_key)[None] - memory_len  # below 0: memory
seen = key <= place
same_length = seen & (key > place - memory_len)
window = dict(queries=range(n_query), keys=range(n_key), memory=memory_len)
assert_close(~seen, ops.hidden_keys(**window, reach=None))
assert_close(~same_length, ops.hidden_keys(**window, reach=memory_len - 1))

figure, axes = plt.subplots(1, 2, figsize=(9, 2.3), layout="constrained")
for axis, keep, title in zip(axes, (seen, same_length), ("all before", "same_length"), strict=True):
    axis.imshow(keep.float(), cmap="Blues", vmin=0, vmax=1.5, extent=(-6.5, 3.5, 3.5, -0.5))
    axis.axvline(-0.5, color="tab:red")
    axis.set(title=f"keys that a query sees: {title}", xlabel="key (below 0: memory)", ylabel="query", yticks=range(4))
plt.show()

# %% [markdown]
# Now the segments again, with memory. Each layer reaches one memory further back, since what it attends to was itself made
# with a memory: up to `n_layer * mem_len` tokens (the paper's figure 2).

# %%
carried = influence(with_memory, tokens, 8)
figure, axes = plt.subplots(1, 2, figsize=(8, 4), layout="constrained")
draw_influence(axes[0], fragments, "four segments, no memory")
draw_influence(axes[1], carried, f"the same with mem_len={mem_len}, 2 layers")
plt.show()

reach = 24 - min((carried[24] > 1e-5).nonzero())  # of the last segment's first token
print(f"the first token of the last segment is predicted with what stands up to {int(reach)} tokens before it")
assert reach == len(with_memory.layers) * mem_len

# %% [markdown]
# With a memory as long as the text, nothing at all is lost: reading in segments gives the same numbers as reading whole.

# %%
long_memory = make_model(SegmentMemory(mem_len=32))
assert_close(read(long_memory, tokens, 8), read(long_memory, tokens, 32))
assert_close(read(long_memory, tokens, 5), read(long_memory, tokens, 32))
difference = (read(without_memory, tokens, 8) - read(without_memory, tokens, 32)).abs().max()
print(f"without memory the log-probabilities differ by up to {difference:.2f} nats")

# %% [markdown]
# # 4. Relative positions
#
# ## Why absolute positions fail with a memory
#
# If places are counted within each segment, a row of the memory and a row of the segment have the same vector (section 3.3):
#
# $$h_{\tau} = f(h_{\tau-1},\ E_{x_\tau} + R_{1:L}), \qquad h_{\tau+1} = f(h_{\tau},\ E_{x_{\tau+1}} + R_{1:L})$$
#
# Which of two keys is nearer can then not be told from their vectors. What a query needs is how far away a key lies.

# %%
figure, axis = plt.subplots(figsize=(7, 2.6), layout="constrained")
place = torch.arange(32)
axis.plot(place, place % 8, "o-", label="absolute: place in the segment, four keys share each")
axis.plot(place, 31 - place, "o-", label="relative: distance to the last query, no two alike")
axis.set(xlabel="key, in four segments of 8", ylabel="what its vector stands for")
axis.legend(fontsize="small")
plt.show()

absolute = make_model(SegmentMemory(mem_len=32), AbsolutePosition)
for name, model in {"absolute": absolute, "relative": long_memory}.items():
    difference = (read(model, tokens, 8) - read(model, tokens, 32)).abs().max()
    print(f"{name} positions: reading in segments and reading whole differ by up to {difference:.6f} nats")

# %% [markdown]
# (Rows that were rounded in another order differ in the last digits, here as above.)
#
# ## The four terms
#
# With sinusoids $U$ of absolute places the score of a key is a product of two sums:
#
# $$A^{\text{abs}}_{i,j} = (E_{x_i} + U_i)^\top W_q^\top W_k (E_{x_j} + U_j)
#   = \underbrace{E_{x_i}^\top W_q^\top W_k E_{x_j}}_{(a)} + \underbrace{E_{x_i}^\top W_q^\top W_k U_j}_{(b)}
#   + \underbrace{U_i^\top W_q^\top W_k E_{x_j}}_{(c)} + \underbrace{U_i^\top W_q^\top W_k U_j}_{(d)}$$
#
# Transformer-XL writes the four terms anew (section 3.3). Where the key's place $U_j$ stood, there is now the sinusoid
# $R_{i-j}$ of the distance, with a projection $W_{k,R}$ of its own (the code's `r_net`). Where the query's place $U_i$ stood, there are
# two learned vectors, $u$ and $v$, since a distance is the same from wherever one looks:
#
# $$A^{\text{rel}}_{i,j} = \underbrace{E_{x_i}^\top W_q^\top W_{k,E} E_{x_j}}_{(a)\ \text{content}}
#   + \underbrace{E_{x_i}^\top W_q^\top W_{k,R} R_{i-j}}_{(b)\ \text{content, distance}}
#   + \underbrace{u^\top W_{k,E} E_{x_j}}_{(c)\ \text{the key alone}}
#   + \underbrace{v^\top W_{k,R} R_{i-j}}_{(d)\ \text{the distance alone}}$$
#
# With $q_i$, $k_j$ and $r_x = W_{k,R} R_x$ these are four dot products. With $m$ rows of memory before the segment, the
# distance from query $i$ to key $j$ is $m + i - j$. Straight from the equation, one number at a time:

# %%
model = make_model(SegmentMemory(mem_len=6))
attention, position = model.layers[0].attention, model.layers[0].attention.position
memory, segment = torch.randn(1, 6, d_model), torch.randn(1, 4, d_model)
n_memory, n_query, n_key = 6, 4, 10

context = torch.cat([memory, segment], dim=1)
q = split_heads(attention.q_net(segment))[0]  # [h i d]
k, v = (split_heads(rows)[0] for rows in attention.kv_net(context).chunk(2, dim=-1))  # [h j d]
u_bias, v_bias = position.r_w_bias, position.r_r_bias  # u and v of the paper, [h d]
R = sinusoids(torch.arange(n_key, dtype=torch.float32), d_model)  # row x: distance x
r = split_heads(position.r_net(R))  # [h x d]

terms = {name: torch.zeros(n_head, n_query, n_key) for name in "abcd"}
for head in range(n_head):
    for i in range(n_query):
        for j in range(n_memory + i + 1):
            x = n_memory + i - j
            terms["a"][head, i, j] = q[head, i] @ k[head, j]
            terms["b"][head, i, j] = q[head, i] @ r[head, x]
            terms["c"][head, i, j] = u_bias[head] @ k[head, j]
            terms["d"][head, i, j] = v_bias[head] @ r[head, x]

# %% [markdown]
# The project's class has them too, divided by $\sqrt{d}$. (Keys ahead of a query are hidden later; what stands there has no meaning.)

# %%
keep = causal_mask(n_key)[n_memory:]
encoding = position.encode(n_key, segment)
theirs = position.terms(q[:, None], k[:, None], position.project(encoding))
for name, term in terms.items():
    assert_close(term, (theirs[name][:, 0] * d_head**0.5).masked_fill(~keep, 0.0), rtol=1e-4, atol=1e-5)

figure, axes = plt.subplots(1, 4, figsize=(11, 1.9), sharey=True, layout="constrained")
titles = ("(a) content", "(b) content, distance", "(c) the key alone", "(d) the distance alone")
for axis, term, title in zip(axes, terms.values(), titles, strict=True):
    shown = term[0].masked_fill(~keep, float("nan"))
    axis.imshow(shown, cmap="RdBu", vmin=-4, vmax=4, extent=(-6.5, 3.5, 3.5, -0.5))
    axis.axvline(-0.5, color="black", linewidth=0.7)
    axis.set(title=title, xlabel="key (below 0: memory)", yticks=range(4))
axes[0].set_ylabel("query")
plt.show()

# %% [markdown]
# (c) is the same in every row: a key that all queries like. (d) is the same along every diagonal: a distance that all
# queries like. (a) and (b) depend on the query.
#
# ## The shift
#
# Done as above, (b) and (d) would need $R_{m+i-j}$ for each pair of query and key. But there are only as many distances as keys.
# So one multiplies every query with every *distance* once, in one matrix product, and then moves each row to where it belongs (appendix B):
#
# $$B_{i,c} = (q_i + v)\cdot r_{J-1-c}, \qquad (b + d)_{i,j} = B_{i,\ j + (I - 1 - i)}$$
#
# The last query's row is in place; each one above has to move one step further to the left. Here the numbers in the cells are the distances:

# %%
n_query, n_key = 4, 7
by_distance = torch.arange(n_key - 1.0, -2, -1).expand(n_query, -1)  # 6, 5, ..., 0, and -1: a key ahead of the query


def shift(scores):
    """out[i, j] = scores[i, j + I - 1 - i], without moving a number: row by row in memory, it begins at number I - 1."""
    n_query, n_column = scores.shape
    return scores.flatten()[n_query - 1 :][: n_query * (n_column - 1)].view(n_query, n_column - 1)


by_key = shift(by_distance.contiguous())
assert_close(by_key, ops.relative_shift(by_distance.contiguous()))
for i in range(n_query):
    for j in range(n_key - n_query + i + 1):  # keys that query i may see
        assert by_key[i, j] == (n_key - n_query) + i - j

figure, axes = plt.subplots(1, 2, figsize=(9, 2.7), layout="constrained")
hidden = ~causal_mask(n_key)[n_key - n_query :]
for axis, cells, title in zip(axes, (by_distance, by_key), ("by distance", "shifted: by key"), strict=True):
    axis.imshow(cells, cmap="viridis", vmin=-1, vmax=8)
    for i in range(cells.shape[0]):
        for c in range(cells.shape[1]):
            masked = cells is by_key and hidden[i, c]
            axis.text(c, i, "×" if masked else int(cells[i, c]), ha="center", va="center", color="white")
    axis.set(title=title, ylabel="query", yticks=range(n_query), xticks=range(cells.shape[1]))
axes[0].set_xlabel("column: distances 6 to 0, and -1")
axes[1].set_xlabel("key (× : hidden by the mask)")
plt.show()

# %% [markdown]
# Each row of the right picture ends at distance 0, under the mask's edge. In memory the two pictures are the same numbers in
# the same order: reading the left one from its fourth number on, seven to a row, gives the right one. So the shift costs nothing.
#
# With it, the scores are two matrix products. The terms pair up, (a) with (c) and (b) with (d):
#
# $$A^{\text{rel}} = (q + u)\, k^\top + \mathrm{shift}\big((q + v)\, r^\top\big)$$

# %%
n_query, n_key = 4, 10
distances = torch.arange(n_key - 1, -2, -1, dtype=torch.float32)  # 9, ..., 0, -1
r = split_heads(position.r_net(sinusoids(distances, d_model)))
by_content = (q + u_bias[:, None]) @ k.mT
by_distance = (q + v_bias[:, None]) @ r.mT
scores = by_content + torch.stack([shift(head) for head in by_distance])
assert_close(scores.masked_fill(~keep, 0.0), sum(terms.values()), rtol=1e-4, atol=1e-4)

weights = (scores / d_head**0.5).masked_fill(~keep, float("-inf")).softmax(dim=-1)
mine = attention.o_net(join_heads(weights @ v))
theirs = attention(segment, attention.keys_values(context), position.project(encoding))
assert_close(mine, theirs[0], rtol=1e-4, atol=1e-5)

# %% [markdown]
# # 5. The whole model by hand
#
# Now everything is there. Embed; in each layer attend to memory and segment by content and distance, add, normalise, apply the
# feed-forward network, add, normalise; multiply with the embedding table. Keep each layer's inputs for the next segment.


# %%
def attend(attention, memory, hidden):
    """What a layer's attention makes of a segment after its memory."""
    position, context = attention.position, torch.cat([memory, hidden], dim=1)
    n_query, n_key = hidden.shape[1], context.shape[1]
    q = split_heads(attention.q_net(hidden))
    k, v = (split_heads(rows) for rows in attention.kv_net(context).chunk(2, dim=-1))
    r = split_heads(position.r_net(sinusoids(torch.arange(n_key - 1, -2, -1, dtype=torch.float32), d_model)))
    by_content = einsum(q + position.r_w_bias[:, None], k, "b h i d, b h j d -> b h i j")
    by_distance = einsum(q + position.r_r_bias[:, None], r, "b h i d, h x d -> b h i x")
    scores = (by_content + ops.relative_shift(by_distance)) / d_head**0.5
    scores = scores.masked_fill(~causal_mask(n_key)[n_key - n_query :], float("-inf"))
    return attention.o_net(join_heads(scores.softmax(dim=-1) @ v))


def transformer_xl(model, tokens, mems, mem_len):
    """Log-probabilities of the next tokens, and the new memory."""
    hidden = model.softmax.weight[tokens] * d_model**0.5
    mems = mems or [hidden[:, :0]] * len(model.layers)
    new_mems = []
    for layer, memory in zip(model.layers, mems, strict=True):
        new_mems.append(torch.cat([memory, hidden], dim=1)[:, -mem_len:].detach())
        hidden = layer.attention_norm(hidden + attend(layer.attention, memory, hidden))
        feedforward = layer.feedforward
        hidden = layer.feedforward_norm(hidden + feedforward.outer(F.relu(feedforward.inner(hidden))))
    return F.log_softmax(hidden @ model.softmax.weight.T + model.softmax.out_bias, dim=-1), new_mems


my_mems, their_mems = None, None
for segment in tokens.split(8, dim=1):
    mine, my_mems = transformer_xl(with_memory, segment, my_mems, mem_len)
    theirs, their_mems = with_memory(segment, their_mems)
    assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    for my_memory, their_memory in zip(my_mems, their_mems, strict=True):
        assert_close(my_memory, their_memory, rtol=1e-4, atol=1e-4)
print("four segments, with memory: the same numbers as txl.TransformerXL")

# %% [markdown]
# What the project adds to these lines: attention by tiles, so that no matrix of all queries and keys is ever held
# (`txl/tiles.py`); other memories and positions (`txl/layers/`); dropout, adaptive softmax, and the rest of a training program.
# The second notebook trains such a model and lets it write; the third asks what it uses its memory for.
