"""The output layers against loops over clusters and tokens, and the published models' parameter counts."""

from functools import partial

import pytest
import torch

from txl import losses
from txl.layers.memory import NoMemory
from txl.layers.position import RelativePosition
from txl.layers.softmax import AdaptiveSoftmax, FullSoftmax
from txl.model import TransformerXL

N_TOKEN, D_MODEL, CUTOFFS = 17, 12, [5, 9]
CASES = {
    "tied": {},
    "untied": {"tie_weight": False},
    "d_embed": {"d_embed": 6},
    "d_embed, projections tied": {"d_embed": 6, "tie_projs": True},
    "d_embed, projections tied by a list": {"d_embed": 6, "tie_projs": [True, False, True]},
    "div_val": {"div_val": 2},
    "div_val, untied": {"div_val": 2, "tie_weight": False},
    "div_val, projections tied": {"div_val": 2, "tie_projs": True},
    "div_val, projections tied by a list": {"div_val": 2, "tie_projs": [True, False, True], "d_embed": 8},
    "one tail": {"cutoffs": [1], "div_val": 3},
}


def adaptive(**changes):
    """A small layer in float64, with weights large enough to make every term count."""
    sizes = {"n_token": N_TOKEN, "d_model": D_MODEL, "d_embed": D_MODEL, "tie_weight": True, "cutoffs": CUTOFFS}
    softmax = AdaptiveSoftmax(**{**sizes, **changes}).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in softmax.parameters():
            parameter.normal_(0.0, 0.5, generator=generator)
    return softmax


def batch(low=0, high=N_TOKEN):
    generator = torch.Generator().manual_seed(1)
    tokens, targets = (torch.randint(low, high, (2, 20), generator=generator) for _ in range(2))
    hidden = torch.randn(2, 20, D_MODEL, generator=generator, dtype=torch.float64)
    return tokens, targets, hidden.requires_grad_()


def cluster_of(softmax, token):
    """The token's cluster, and its number there."""
    cluster = sum(token >= cutoff for cutoff in softmax.cutoffs)
    return cluster, token - [0, *softmax.cutoffs][cluster]


def slow_embedding(softmax, token):
    cluster, row = cluster_of(softmax, token)
    embedding = softmax.weights[cluster][row]
    if softmax.emb_projs:
        embedding = softmax.emb_projs[cluster if softmax.div_val > 1 else 0] @ embedding
    return embedding * D_MODEL**0.5


def slow_nll(softmax, hidden, token):
    """-log p(token) for one hidden state: the word's or its cluster's share of the head, times the share in the cluster."""
    cluster, row = cluster_of(softmax, token)

    def project(cluster):
        return softmax.out_projs[cluster].T @ hidden if softmax.out_projs else hidden

    scores = [weight @ project(0) for weight in (*softmax.out_weights[0], *softmax.cluster_weight)]
    head = torch.stack(scores) + torch.cat([softmax.out_biases[0], softmax.cluster_bias])
    share = head.exp() / head.exp().sum()
    if cluster == 0:
        return -share[row].log()
    tail = torch.stack([weight @ project(cluster) for weight in softmax.out_weights[cluster]])
    tail = (tail + softmax.out_biases[cluster]).exp()
    return -(share[-cluster] * tail[row] / tail.sum()).log()


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_embedding_loss_and_gradients_are_those_of_loops(case, plain, monkeypatch):
    monkeypatch.setattr(losses, "PLAIN", 2**20 if plain else 0)
    softmax, (tokens, targets, hidden) = adaptive(**CASES[case]), batch()
    embedding, nll = softmax.embed(tokens), softmax.nll(hidden, targets)
    slow_embeddings = torch.stack([slow_embedding(softmax, int(token)) for token in tokens.flatten()])
    pairs = zip(hidden.flatten(0, 1), targets.flatten(), strict=True)
    slow_nlls = torch.stack([slow_nll(softmax, state, int(target)) for state, target in pairs])
    torch.testing.assert_close(embedding.flatten(0, 1), slow_embeddings, rtol=0, atol=1e-12)
    torch.testing.assert_close(nll.flatten(), slow_nlls, rtol=0, atol=1e-12)
    weights = torch.randn(2, 20, 1 + D_MODEL, dtype=torch.float64)
    ours = (torch.cat([nll[..., None], embedding], dim=-1) * weights).sum()
    slow = (torch.cat([slow_nlls[:, None], slow_embeddings], dim=-1) * weights.flatten(0, 1)).sum()
    wanted = [hidden, *softmax.parameters()]
    ours, slow = torch.autograd.grad(ours, wanted), torch.autograd.grad(slow, wanted)
    for gradient, right in zip(ours, slow, strict=True):
        torch.testing.assert_close(gradient, right, rtol=0, atol=1e-10)


@pytest.mark.parametrize("case", CASES)
def test_log_probabilities_sum_to_one_and_are_the_losses(case):
    softmax, (_, targets, hidden) = adaptive(**CASES[case]), batch()
    log_probs = softmax.log_prob(hidden)
    assert log_probs.shape == (2, 20, N_TOKEN)
    torch.testing.assert_close(log_probs.exp().sum(dim=-1), torch.ones(2, 20, dtype=torch.float64), rtol=0, atol=1e-12)
    for token in range(N_TOKEN):
        nll = softmax.nll(hidden, torch.full_like(targets, token))
        torch.testing.assert_close(log_probs[..., token], -nll, rtol=0, atol=1e-12)


@pytest.mark.parametrize("plain", [True, False])
def test_the_full_softmax_by_chunks_is_its_log_probability(plain, monkeypatch):
    monkeypatch.setattr(losses, "PLAIN", 2**20 if plain else 0)
    softmax = FullSoftmax(n_token=N_TOKEN, d_model=D_MODEL, d_embed=6, tie_weight=True).double()
    softmax.reset(init_std=0.5, proj_init_std=0.5)
    _, targets, hidden = batch()
    log_probs, nll = softmax.log_prob(hidden), softmax.nll(hidden, targets)
    expected = -log_probs.gather(-1, targets[..., None])[..., 0]
    torch.testing.assert_close(nll, expected, rtol=0, atol=1e-12)
    parameters = [softmax.out_weight, softmax.out_bias, softmax.out_proj, hidden]
    for gradient, right in zip(*(torch.autograd.grad(x.sum(), parameters) for x in (nll, expected)), strict=True):
        torch.testing.assert_close(gradient, right, rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("low", "high"), [(0, 1), (5, 9), (9, N_TOKEN)])
def test_every_parameter_has_a_gradient_whatever_the_batch_holds(case, low, high):
    """Dense, and zeros where no token of the batch is: optimizers and several processes need it."""
    softmax, (tokens, targets, _) = adaptive(**CASES[case]), batch(low, high)
    softmax.nll(softmax.embed(tokens), targets).mean().backward()
    for name, parameter in softmax.named_parameters():
        assert parameter.grad is not None and parameter.grad.layout == torch.strided, name
    unused = {0: [1, 2], 5: [2], 9: [1]}[low] if case != "one tail" else []
    for cluster in unused:
        assert softmax.out_biases[cluster].grad.abs().sum() == 0
        assert softmax.weights[cluster].grad.abs().sum() == 0


def test_tables_are_a_parameter_for_each_cluster_and_shared_where_tied():
    softmax = adaptive(div_val=2, tie_projs=True)
    assert [tuple(weight.shape) for weight in softmax.weights] == [(5, 12), (4, 6), (8, 3)]
    assert all(ours is theirs for ours, theirs in zip(softmax.weights, softmax.out_weights, strict=True))
    tied = [ours is theirs for ours, theirs in zip(softmax.emb_projs, softmax.out_projs, strict=True)]
    assert tied == softmax.tie_projs == [False, True, True]
    one_width = adaptive(d_embed=6, tie_projs=[True, False, True])
    assert [out is one_width.emb_projs[0] for out in one_width.out_projs] == [True, False, True]
    assert len(one_width.emb_projs) == 1
    assert len(adaptive().emb_projs) == len(adaptive().out_projs) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["tied", "d_embed, projections tied", "div_val"])
def test_under_autocast_losses_are_float32_and_close(case, dtype):
    softmax, (tokens, targets, hidden) = adaptive(**CASES[case]).float(), batch()
    hidden = hidden.float()
    exact = softmax.nll(hidden, targets)
    with torch.autocast("cpu", dtype):
        nll, log_probs = softmax.nll(hidden, targets), softmax.log_prob(hidden)
        assert softmax.embed(tokens).shape == (2, 20, D_MODEL)
    assert nll.dtype == log_probs.dtype == torch.float32
    torch.testing.assert_close(nll, exact, rtol=0.02, atol=0.1)
    torch.testing.assert_close(-log_probs.gather(-1, targets[..., None])[..., 0], nll, rtol=1e-3, atol=1e-2)


def test_initialisation_is_the_authors():
    sizes = {"n_token": 4000, "d_model": 64, "d_embed": 32, "tie_weight": False, "cutoffs": [1000, 2000]}
    softmax = AdaptiveSoftmax(**sizes, div_val=2)
    with torch.no_grad():
        for parameter in softmax.parameters():
            parameter.fill_(torch.nan)
    softmax.reset(init_std=0.1, proj_init_std=0.05)
    for table in (*softmax.weights, *softmax.out_weights):
        assert abs(table.std() - 0.1) < 0.002
    assert abs(softmax.cluster_weight.std() - 0.1) < 0.04
    for projection in (*softmax.emb_projs, *softmax.out_projs):
        assert abs(projection.std() - 0.05) < 0.005
    assert not any(bias.any() for bias in (*softmax.out_biases, softmax.cluster_bias))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cutoffs": []}, r"model\.softmax\.cutoffs: must name at least one id; .* model/softmax=full"),
        ({"cutoffs": [0, 5]}, r"model\.softmax\.cutoffs: must increase, from 1 at the least, got \[0, 5\]"),
        ({"cutoffs": [5, 5]}, r"model\.softmax\.cutoffs: must increase"),
        ({"cutoffs": [9, 5]}, r"model\.softmax\.cutoffs: must increase"),
        ({"cutoffs": [5, 17]}, r"model\.softmax\.cutoffs: 17 does not lie inside the vocabulary, n_token is 17"),
        ({"cutoffs": [5, 20, 30]}, r"model\.softmax\.cutoffs: 20 "),
        ({"div_val": 0}, r"model\.softmax\.div_val: must be at least 1, got 0"),
        ({"div_val": 4}, r"model\.softmax\.div_val: 4 leaves cluster 2 a width of 12 // 4\^2 = 0"),
        ({"tie_projs": [True]}, r"model\.softmax\.tie_projs: must be true, false or a list of 3"),
        ({"tie_projs": [True] * 4}, r"model\.softmax\.tie_projs: "),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        adaptive(**changes)


def test_the_full_softmax_takes_what_a_preset_leaves_behind():
    sizes = {"n_token": N_TOKEN, "d_model": D_MODEL, "d_embed": D_MODEL, "tie_weight": True}
    with_them, without = FullSoftmax(**sizes, cutoffs=[5], div_val=4), FullSoftmax(**sizes)
    assert with_them.state_dict().keys() == without.state_dict().keys() == {"weight", "out_weight", "out_bias"}


WORDS, BILLION = [20000, 40000, 200000], [60000, 100000, 640000]


@pytest.mark.parametrize(
    ("n_token", "sizes", "softmax", "parameters"),
    [  # sizes: layers, d_model, heads, d_head, d_inner
        (267_735, (16, 410, 10, 41, 2100), {"cutoffs": WORDS, "tie_projs": True}, 151_107_538),
        (267_735, (18, 1024, 16, 64, 4096), {"cutoffs": WORDS, "div_val": 4, "tie_projs": True}, 285_170_506),
        (793_471, (18, 1024, 8, 128, 4096), {"cutoffs": BILLION, "div_val": 4}, 357_812_082),
        (793_471, (24, 1280, 16, 80, 8192), {"cutoffs": BILLION, "div_val": 4}, 841_295_982),
    ],
)
def test_the_published_models_have_exactly_their_parameters(n_token, sizes, softmax, parameters):
    """WikiText-103 base and large, One Billion Word base and large: the authors' counts."""
    with torch.device("meta"):
        model = TransformerXL(
            n_token=n_token,
            **dict(zip(["n_layer", "d_model", "n_head", "d_head", "d_inner"], sizes, strict=True)),
            memory=NoMemory(),
            position=partial(RelativePosition, clamp_len=None),
            softmax=partial(AdaptiveSoftmax, **softmax),
        )
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
