"""The plain Transformer against torch's own modules with the same weights, and against plain loops."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from txl import model, ops, transformer
from txl.layers import feedforward, residual, softmax
from txl.transformer import (
    DecoderLayer,
    EncoderLayer,
    MultiHeadAttention,
    ScaledEmbedding,
    SinusoidalPositions,
    causal_mask,
    check_mask,
)

BATCH, N, N_SOURCE, D_MODEL, N_HEAD, D_INNER = 3, 5, 7, 12, 3, 20
SIZES = dict(d_model=D_MODEL, n_head=N_HEAD, d_inner=D_INNER)
MASKS = ["none", "causal", "padding", "random"]


def filled(module):
    """In float64, all weights large enough to count, norms and biases too."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.double().parameters():
            parameter.normal_(0.3, 0.4, generator=generator)
    return module


def drawn(*shape, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)


def masks(kind, i, j, seed=2):
    """A mask of ours, True for what is kept, and torch's arguments for the same, True for what is not."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "none":
        return None, {}
    if kind == "causal":
        keep = torch.ones(i, j).tril().bool()
        return keep, {"attn_mask": ~keep}
    if kind == "padding":
        keep = torch.arange(j) < torch.tensor([[2], [j], [j - 1]])
        return keep[:, None], {"key_padding_mask": ~keep}
    keep = torch.rand(BATCH, i, j, generator=generator) < 0.5
    keep[:, :, 0] = True  # torch makes rows without a key not-a-number
    return keep, {"attn_mask": ~keep.repeat_interleave(N_HEAD, dim=0)}


def renamed(arguments, attention, padding):
    """The same arguments by the names that torch's layers have for them."""
    return {{"attn_mask": attention, "key_padding_mask": padding}[name]: mask for name, mask in arguments.items()}


def attention_weights(theirs, prefix=""):
    """The weights of torch's attention under our names."""
    nets = ("q_net", "k_net", "v_net")
    state = {"o_net.weight": theirs.out_proj.weight, "o_net.bias": theirs.out_proj.bias}
    state |= {f"{net}.weight": part for net, part in zip(nets, theirs.in_proj_weight.chunk(3), strict=True)}
    state |= {f"{net}.bias": part for net, part in zip(nets, theirs.in_proj_bias.chunk(3), strict=True)}
    return {f"{prefix}{name}": weight for name, weight in state.items()}


def layer_weights(theirs, modules):
    """The weights of torch's layer under our names; `modules` maps ours to theirs, attention aside."""
    state = attention_weights(theirs.self_attn, "attention.")
    if hasattr(theirs, "multihead_attn"):
        state |= attention_weights(theirs.multihead_attn, "source_attention.")
    for ours, name in {"feedforward.inner": "linear1", "feedforward.outer": "linear2", **modules}.items():
        module = getattr(theirs, name)
        state |= {f"{ours}.weight": module.weight, f"{ours}.bias": module.bias}
    return state


def same(ours, theirs, rows):
    """Equal outputs, and equal gradients of the inputs."""
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
    slope = drawn(*ours.shape, seed=9).detach()
    gradients = [torch.autograd.grad(output, rows, slope) for output in (ours, theirs)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", MASKS)
def test_attention_equals_torch(kind):
    theirs = filled(nn.MultiheadAttention(D_MODEL, N_HEAD, batch_first=True))
    ours = MultiHeadAttention(d_model=D_MODEL, n_head=N_HEAD).double()
    ours.load_state_dict(attention_weights(theirs))
    keep, arguments = masks(kind, N, N_SOURCE)
    rows = drawn(BATCH, N, D_MODEL), drawn(BATCH, N_SOURCE, D_MODEL, seed=3), drawn(BATCH, N_SOURCE, D_MODEL, seed=4)
    output, weights = ours(*rows, keep, return_weights=True)
    expected, expected_weights = theirs(*rows, average_attn_weights=False, **arguments)
    torch.testing.assert_close(weights, expected_weights, rtol=0, atol=1e-10)
    assert torch.equal(ours(*rows, keep), output)
    same(output, expected, rows)


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("pre_norm", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_encoder_layer_equals_torch(kind, pre_norm, activation):
    options = dict(dropout=0.0, activation=activation, batch_first=True, norm_first=pre_norm)
    theirs = filled(nn.TransformerEncoderLayer(D_MODEL, N_HEAD, D_INNER, **options))
    ours = EncoderLayer(**SIZES, pre_norm=pre_norm, activation=activation).double()
    ours.load_state_dict(layer_weights(theirs, {"attention_norm": "norm1", "feedforward_norm": "norm2"}))
    keep, arguments = masks(kind, N, N)
    hidden = drawn(BATCH, N, D_MODEL)
    expected = theirs(hidden, **renamed(arguments, "src_mask", "src_key_padding_mask"))
    same(ours(hidden, keep), expected, [hidden])


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("source_kind", ["none", "padding", "random"])
@pytest.mark.parametrize("pre_norm", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_decoder_layer_equals_torch(kind, source_kind, pre_norm, activation):
    options = dict(dropout=0.0, activation=activation, batch_first=True, norm_first=pre_norm)
    theirs = filled(nn.TransformerDecoderLayer(D_MODEL, N_HEAD, D_INNER, **options))
    ours = DecoderLayer(**SIZES, pre_norm=pre_norm, activation=activation).double()
    norms = {"attention_norm": "norm1", "source_norm": "norm2", "feedforward_norm": "norm3"}
    ours.load_state_dict(layer_weights(theirs, norms))
    keep, arguments = masks(kind, N, N)
    if kind == "none":  # ours looks back only, unless it is told otherwise
        arguments = masks("causal", N, N)[1]
    source_keep, source_arguments = masks(source_kind, N, N_SOURCE, seed=5)
    hidden, source = drawn(BATCH, N, D_MODEL), drawn(BATCH, N_SOURCE, D_MODEL, seed=3)
    arguments = renamed(arguments, "tgt_mask", "tgt_key_padding_mask")
    arguments |= renamed(source_arguments, "memory_mask", "memory_key_padding_mask")
    same(ours(hidden, source, keep, source_keep), theirs(hidden, source, **arguments), [hidden, source])


def slow_attention(attention, queries, keys, values, keep):
    """One query and one head at a time."""
    outputs = torch.zeros_like(queries)
    for b in range(len(queries)):
        for i in range(queries.shape[1]):
            heads = []
            for h in range(attention.n_head):
                part = slice(h * attention.d_head, (h + 1) * attention.d_head)
                q = attention.q_net(queries[b, i])[part]
                total, attended = 0.0, torch.zeros_like(q)
                for j in range(keys.shape[1]):
                    if keep[b, i, j]:
                        k, v = attention.k_net(keys[b, j])[part], attention.v_net(values[b, j])[part]
                        weight = math.exp(sum(q * k) / math.sqrt(attention.d_head))
                        total, attended = total + weight, attended + weight * v
                heads.append(attended / total)
            outputs[b, i] = attention.o_net(torch.cat(heads))
    return outputs


@pytest.mark.parametrize("sizes", [{}, {"d_head": 5, "bias": False}])
def test_attention_equals_a_double_loop(sizes):
    attention = filled(MultiHeadAttention(d_model=D_MODEL, n_head=N_HEAD, **sizes))
    assert attention.d_head == sizes.get("d_head", D_MODEL // N_HEAD)
    assert (attention.o_net.bias is None) == (not sizes.get("bias", True))
    rows = drawn(BATCH, N, D_MODEL), drawn(BATCH, N_SOURCE, D_MODEL, seed=3), drawn(BATCH, N_SOURCE, D_MODEL, seed=4)
    keep, _ = masks("random", N, N_SOURCE)
    with torch.no_grad():
        torch.testing.assert_close(attention(*rows, keep), slow_attention(attention, *rows, keep))


def test_the_weights_sum_to_one_and_make_the_output():
    """Also in training, where the output has lost some of them to dropout and they have not."""
    attention = filled(MultiHeadAttention(d_model=D_MODEL, n_head=N_HEAD, dropatt=0.5))
    rows = drawn(BATCH, N, D_MODEL), drawn(BATCH, N_SOURCE, D_MODEL, seed=3), drawn(BATCH, N_SOURCE, D_MODEL, seed=4)
    keep, _ = masks("random", N, N_SOURCE)
    with torch.no_grad():
        dropped, in_training = attention(*rows, keep, return_weights=True)
        output, weights = attention.eval()(*rows, keep, return_weights=True)
        assert torch.equal(weights, in_training)
        assert not torch.allclose(output, dropped)
        torch.testing.assert_close(weights.sum(dim=-1), torch.ones(BATCH, N_HEAD, N, dtype=torch.float64))
        assert not weights.masked_select(~keep[:, None]).any()
        values = attention.v_net(rows[2])
        for b in range(BATCH):
            for i in range(N):
                heads = []
                for h in range(N_HEAD):
                    part = values[b, :, h * attention.d_head : (h + 1) * attention.d_head]
                    heads.append(sum(weights[b, h, i, j] * part[j] for j in range(N_SOURCE)))
                torch.testing.assert_close(output[b, i], attention.o_net(torch.cat(heads)))


@pytest.mark.parametrize("shape", [(N, N), (BATCH, N, N)])
def test_rows_that_see_nothing_give_zeros(shape):
    """And finite gradients, through every parameter."""
    attention = filled(MultiHeadAttention(d_model=D_MODEL, n_head=N_HEAD))
    hidden, keep = drawn(BATCH, N, D_MODEL), torch.ones(shape, dtype=torch.bool)
    keep[..., 1, :] = False
    output, weights = attention(hidden, hidden, hidden, keep, return_weights=True)
    assert not output[:, 1].any() and not weights[:, :, 1].any()
    assert output[:, [0, *range(2, N)]].any(dim=-1).all()
    gradients = torch.autograd.grad(output.square().sum(), [hidden, *attention.parameters()])
    assert all(gradient.isfinite().all() and gradient.any() for gradient in gradients)


@pytest.mark.parametrize("pre_norm", [False, True])
def test_a_layer_survives_rows_that_see_nothing(pre_norm):
    encoder, decoder = (
        filled(EncoderLayer(**SIZES, pre_norm=pre_norm)),
        filled(DecoderLayer(**SIZES, pre_norm=pre_norm)),
    )
    hidden, nothing = drawn(BATCH, N, D_MODEL), torch.zeros(N, N, dtype=torch.bool)
    output = decoder(encoder(hidden, nothing), hidden, nothing, nothing)
    gradients = torch.autograd.grad(output.square().sum(), [hidden, encoder.feedforward.inner.weight])
    assert output.isfinite().all() and all(gradient.isfinite().all() for gradient in gradients)


def test_masked_softmax_by_hand():
    scores = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, math.nan, 7.0]]).requires_grad_()
    keep = torch.tensor([[True, True, False], [False, False, False], [True, False, True]])
    weights = ops.masked_softmax(scores, keep)
    one = 1 / (1 + math.e)
    torch.testing.assert_close(weights, torch.tensor([[one, 1 - one, 0.0], [0.0, 0.0, 0.0], [0.5, 0.0, 0.5]]))
    with torch.autograd.set_detect_anomaly(True):  # not-a-number is not made on the way either
        (gradient,) = torch.autograd.grad(ops.masked_softmax(scores, keep)[:, 0].sum(), scores)
    slope = one * (1 - one)
    torch.testing.assert_close(gradient, torch.tensor([[slope, -slope, 0.0], [0.0, 0.0, 0.0], [0.25, 0.0, -0.25]]))


@pytest.mark.parametrize("masked", [False, True])
def test_masked_softmax_is_never_below_float32(masked):
    scores = torch.tensor([[9.0, 1.0, 2.0]])
    keep = torch.tensor([True, True, False]) if masked else None
    expected = torch.softmax(scores[:, :2] if masked else scores, dim=-1)
    weights = ops.masked_softmax(scores.bfloat16(), keep)
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights[:, : expected.shape[1]], expected)
    assert ops.masked_softmax(scores.double(), keep).dtype == torch.float64


def test_attention_in_bfloat16_returns_bfloat16():
    attention = MultiHeadAttention(d_model=D_MODEL, n_head=N_HEAD).bfloat16()
    hidden = drawn(BATCH, N, D_MODEL).bfloat16()
    output, weights = attention(hidden, hidden, hidden, causal_mask(N), return_weights=True)
    assert output.dtype == torch.bfloat16 and weights.dtype == torch.float32


def test_a_causal_mask_looks_back_only():
    for n in (1, 2, 6):
        assert torch.equal(causal_mask(n), torch.ones(n, n).tril().bool())


@pytest.mark.parametrize("mask", [torch.ones(N, N), torch.ones(BATCH, N, N, dtype=torch.uint8)])
def test_a_mask_that_is_not_boolean_is_refused(mask):
    hidden = drawn(BATCH, N, D_MODEL)
    with pytest.raises(ValueError, match=r"^mask: must be boolean"):
        MultiHeadAttention(d_model=D_MODEL, n_head=N_HEAD).double()(hidden, hidden, hidden, mask)


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"n_head: must divide d_model, 12, .*got 5"):
        MultiHeadAttention(d_model=12, n_head=5)
    assert MultiHeadAttention(d_model=12, n_head=5, d_head=4).d_head == 4
    with pytest.raises(ValueError, match=r"d_model: must be even"):
        SinusoidalPositions(d_model=7)
    for layer in (EncoderLayer, DecoderLayer):
        with pytest.raises(ValueError, match=r"activation"):
            layer(**SIZES, activation="tanh")
        assert layer(**SIZES, d_head=5).attention.d_head == 5


@pytest.mark.parametrize("start", [0, 1000])
def test_positions_equal_the_formula(start):
    d_model, n = 8, 40
    hidden = drawn(2, n, d_model)
    expected = hidden.detach().clone()
    for i in range(n):
        for k in range(d_model // 2):
            angle = (start + i) / 10000 ** (2 * k / d_model)
            expected[:, i, k] += math.sin(angle)  # sines first, then cosines: the paper's components in another order
            expected[:, i, d_model // 2 + k] += math.cos(angle)
    positions = SinusoidalPositions(d_model=d_model)
    torch.testing.assert_close(positions(hidden, start), expected, rtol=0, atol=1e-12)
    rounded = positions(torch.zeros(2, n, d_model, dtype=torch.bfloat16), start)
    assert torch.equal(rounded, positions(torch.zeros_like(hidden), start).bfloat16())


def test_the_embedding_is_scaled_as_the_model_scales_its_own():
    embedding = ScaledEmbedding(n_token=50, d_model=16)
    tokens = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(1))
    full = softmax.FullSoftmax(n_token=50, d_model=16, d_embed=16, tie_weight=True)
    with torch.no_grad():
        full.weight.copy_(embedding.weight)
        assert torch.equal(embedding(tokens), 4.0 * embedding.weight[tokens])
        assert torch.equal(embedding(tokens), full.embed(tokens))
        assert 0.9 < ScaledEmbedding(n_token=200, d_model=64)(torch.arange(200)[None]).std() < 1.1


def test_nothing_exists_twice(monkeypatch):
    """Both Transformers are made of the same pieces: a change of one is a change of both."""
    assert transformer.FeedForward is feedforward.FeedForward is model.FeedForward
    assert transformer.scaled_embedding is softmax.scaled_embedding
    for name in ("normed", "added"):
        assert getattr(transformer, name) is getattr(residual, name) is getattr(model, name)
    for layer in (EncoderLayer(**SIZES), DecoderLayer(**SIZES)):
        assert type(layer.feedforward) is feedforward.FeedForward
    monkeypatch.setattr(ops, "sinusoids", lambda places, d_model: torch.full((len(places), d_model), 7.0))
    assert torch.equal(SinusoidalPositions(d_model=4)(torch.zeros(1, 3, 4)), torch.full((1, 3, 4), 7.0))


@pytest.mark.parametrize("layer", [EncoderLayer, DecoderLayer])
def test_dropout_falls_where_the_paper_has_it(layer):
    """On what each part adds, on the attention weights and inside the feed-forward network (sections 5.4 and 3.3)."""
    hidden = drawn(BATCH, N, D_MODEL)
    source = [hidden] if layer is DecoderLayer else []
    residuals = filled(layer(**SIZES, dropout=1.0, pre_norm=True))
    assert torch.equal(residuals(hidden, *source), hidden)
    inner = filled(layer(**SIZES, dropout=1.0, pre_norm=True))
    inner.dropout.p = 0.0
    for name, module in inner.named_children():
        if "attention" in name and isinstance(module, MultiHeadAttention):
            module.o_net.weight.data.zero_()
            module.o_net.bias.data.zero_()
    torch.testing.assert_close(inner(hidden, *source), hidden + inner.feedforward.outer.bias)
    weights = filled(layer(**SIZES, dropatt=1.0, pre_norm=True))
    weights.feedforward.outer.weight.data.zero_()
    biases = weights.feedforward.outer.bias + sum(
        module.o_net.bias for module in weights.children() if isinstance(module, MultiHeadAttention)
    )
    torch.testing.assert_close(weights(hidden, *source), hidden + biases)
    for module in (residuals, inner, weights):
        assert not torch.allclose(module(hidden, *source), module.eval()(hidden, *source))
    positions = SinusoidalPositions(d_model=D_MODEL, dropout=1.0)
    assert not positions(hidden).any() and positions.eval()(hidden).any()


class Copier(nn.Module):
    """An encoder and a decoder of one layer each; the output layer has the embedding's table (section 3.4)."""

    def __init__(self, *, n_token: int, pre_norm: bool):
        super().__init__()
        sizes = dict(d_model=64, n_head=4, d_inner=128, pre_norm=pre_norm)
        self.embedding, self.positions = ScaledEmbedding(n_token=n_token, d_model=64), SinusoidalPositions(d_model=64)
        self.encoder, self.decoder, self.norm = EncoderLayer(**sizes), DecoderLayer(**sizes), nn.LayerNorm(64)

    def forward(self, source, target):
        source, target = (self.positions(self.embedding(tokens)) for tokens in (source, target))
        return self.norm(self.decoder(target, self.encoder(source))) @ self.embedding.weight.T


@pytest.mark.parametrize("pre_norm", [False, True])
def test_a_tiny_encoder_decoder_learns_to_copy(pre_norm):
    torch.manual_seed(1)
    text = torch.randint(1, 9, (8, 4))
    shifted = F.pad(text, (1, 0))[:, :-1]  # 0 begins the text: what follows it is known from the source alone
    copier = Copier(n_token=9, pre_norm=pre_norm)
    optimizer = torch.optim.Adam(copier.parameters(), lr=3e-3)
    for _ in range(100):
        loss = F.cross_entropy(copier(text, shifted).flatten(0, 1), text.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert all(parameter.grad.any() for parameter in copier.parameters())
    assert loss < 0.1  # 0.5 without the source
    assert torch.equal(copier(text, shifted).argmax(dim=-1), text)


def test_attention_over_nothing_gives_zeros():
    attention = MultiHeadAttention(d_model=6, n_head=2)
    torch.nn.init.normal_(attention.o_net.bias)
    queries, nothing = torch.randn(2, 3, 6), torch.randn(2, 0, 6)
    for mask in (None, torch.ones(3, 0, dtype=torch.bool)):
        output, weights = attention(queries, nothing, nothing, mask, return_weights=True)
        assert torch.equal(output, torch.zeros(2, 3, 6)) and weights.shape == (2, 2, 3, 0)


@pytest.mark.parametrize("shape", [(5, 2, 4), (1, 3, 2, 4), (4,), (3, 4), (2, 5), ()])
def test_a_mask_of_another_shape_is_refused(shape):
    with pytest.raises(ValueError, match="mask: must have the shape"):
        check_mask(torch.ones(shape, dtype=torch.bool), 3, 2, 4)
    for good in ((2, 4), (1, 4), (2, 1), (3, 2, 4), (3, 1, 4), (1, 1, 1)):
        check_mask(torch.ones(good, dtype=torch.bool), 3, 2, 4)


def test_no_head_is_refused():
    with pytest.raises(ValueError, match=r"model.n_head: must be at least 1, got 0"):
        MultiHeadAttention(d_model=6, n_head=0)
