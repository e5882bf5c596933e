"""Tokens in, losses out: the embedding and the output layer together, since they share weights and projections."""

from itertools import pairwise

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from txl.losses import linear_nll


def scaled_embedding(
    tokens: Int[Tensor, "b i"], table: Float[Tensor, "v e"], projection: Float[Tensor, "m e"] | None = None
) -> Float[Tensor, "b i m"]:
    """sqrt(d_model) W E[x], without W where there is no projection (Vaswani et al. 2017, section 3.4)."""
    embedding = F.embedding(tokens.to(table.device, non_blocking=True), table)
    if projection is not None:
        embedding = F.linear(embedding, projection)
    return embedding * embedding.shape[-1] ** 0.5


class FullSoftmax(nn.Module):
    """One embedding table and one softmax over the whole vocabulary.

        embed(x)   = sqrt(d_model) W_in E[x]
        log p(v|h) = log_softmax_v(E'[v] . (W_out h) + bias_v)

    With `tie_weight` E' is E (Press and Wolf 2017). W_in and W_out exist only where d_embed differs from d_model;
    `tie_projs` makes W_out the transpose of W_in. Losses are in nats and never computed below float32. `cutoffs` and
    `div_val` are not used: they may stand in a preset, from which YAML cannot take them away when this option is chosen.
    """

    def __init__(
        self,
        *,
        n_token: int,
        d_model: int,
        d_embed: int,
        tie_weight: bool,
        tie_projs: bool = False,
        cutoffs: list[int] | None = None,
        div_val: int = 1,
    ):
        super().__init__()
        self.tie_weight, self.tie_projs = tie_weight, tie_projs
        self.weight = nn.Parameter(torch.empty(n_token, d_embed))
        self.out_weight = self.weight if tie_weight else nn.Parameter(torch.empty(n_token, d_embed))
        self.out_bias = nn.Parameter(torch.empty(n_token))
        projected = d_embed != d_model
        self.emb_proj = nn.Parameter(torch.empty(d_model, d_embed)) if projected else None
        self.out_proj = (
            self.emb_proj if tie_projs else nn.Parameter(torch.empty(d_model, d_embed)) if projected else None
        )

    def reset(self, *, init_std: float | int, proj_init_std: float | int) -> None:
        """The authors' initialisation: tables N(0, init_std), projections N(0, proj_init_std), bias 0."""
        for table in (self.weight, self.out_weight):
            nn.init.normal_(table, 0.0, init_std)
        for projection in (self.emb_proj, self.out_proj):
            if projection is not None:
                nn.init.normal_(projection, 0.0, proj_init_std)
        nn.init.zeros_(self.out_bias)

    def embed(self, tokens: Int[Tensor, "b i"]) -> Float[Tensor, "b i m"]:
        return scaled_embedding(tokens, self.weight, self.emb_proj)

    def project(self, hidden: Float[Tensor, "*lead m"]) -> Float[Tensor, "*lead d"]:
        """W_out h, as wide as the table."""
        return hidden if self.out_proj is None else hidden @ self.out_proj

    def nll(self, hidden: Float[Tensor, "b i m"], targets: Int[Tensor, "b i"]) -> Float[Tensor, "b i"]:
        """-log p(target) in nats, token by token."""
        rows = self.project(rearrange(hidden, "b i m -> (b i) m"))
        words = rearrange(targets, "b i -> (b i)").to(rows.device, non_blocking=True)
        nll = linear_nll(rows, self.out_weight, self.out_bias, words)
        return rearrange(nll, "(b i) -> b i", b=len(targets))

    def log_prob(self, hidden: Float[Tensor, "b i m"]) -> Float[Tensor, "b i v"]:
        """log p of every token, in nats."""
        return _log_softmax(F.linear(self.project(hidden), self.out_weight, self.out_bias))


class AdaptiveSoftmax(nn.Module):
    """A table for each cluster of words, the frequent ones first, and a softmax in two steps.

        embed(x)   = sqrt(d_model) W_in^c E^c[x]                            (Baevski and Auli 2019, section 3)
        log p(v|h) = head(v),                                               for v in cluster 0
                     head(c) + log_softmax_v(E'^c[v] . (W_out^c h) + bias_v)   in cluster c > 0
        head       = log_softmax([E'^0 ; K] (W_out^0 h) + bias)             (Grave et al. 2017, section 4)

    Ids go by falling frequency; the clusters after the first begin at `cutoffs` and are d_embed // div_val^c wide. K has a
    row for each of them, the last cluster's first, as in the authors' code. If div_val is 1, W_in is one for all clusters, and
    projections exist only where d_embed differs from d_model; otherwise each cluster has its own. With `tie_weight` E' is
    E; with `tie_projs` W_out^c is the transpose of W_in^c in every cluster but the first, or in those for which a list says
    so. Losses are in nats and never computed below float32. All clusters take part in every batch, so that every parameter
    has a gradient. Raises ValueError, with the key to change, for cutoffs, widths and lists that do not fit.
    """

    def __init__(
        self,
        *,
        n_token: int,
        d_model: int,
        d_embed: int,
        tie_weight: bool,
        cutoffs: list[int] = (),  # a default, so that the check of a configuration knows it for a choice
        div_val: int = 1,
        tie_projs: bool | list[bool] = False,
    ):
        super().__init__()
        _check_clusters(n_token, d_embed, cutoffs, div_val)
        self.cutoffs, self.div_val, self.scale = list(cutoffs), div_val, d_model**0.5
        self.tie_weight = tie_weight
        self.tie_projs = [False] + [tie_projs] * len(cutoffs) if isinstance(tie_projs, bool) else list(tie_projs)
        if len(self.tie_projs) != 1 + len(cutoffs):
            words = f"must be true, false or a list of {1 + len(cutoffs)}, one for each cluster, got {tie_projs}"
            raise ValueError(f"model.softmax.tie_projs: {words}")
        self.starts = [0, *cutoffs]
        sizes = [end - start for start, end in zip(self.starts, [*cutoffs, n_token], strict=True)]
        widths = [d_embed // div_val**cluster for cluster in range(len(sizes))]
        # one Parameter a cluster: slices of one table would each have a gradient as large as the whole table
        self.weights = nn.ParameterList(map(torch.empty, sizes, widths))
        self.out_weights = self.weights if tie_weight else nn.ParameterList(map(torch.empty, sizes, widths))
        self.out_biases = nn.ParameterList(map(torch.empty, sizes))
        self.cluster_weight = nn.Parameter(torch.empty(len(cutoffs), d_embed))
        self.cluster_bias = nn.Parameter(torch.empty(len(cutoffs)))
        self.projected = div_val > 1 or d_embed != d_model
        projected = widths if self.projected else []
        self.emb_projs = nn.ParameterList(
            torch.empty(d_model, width) for width in (projected if div_val > 1 else projected[:1])
        )
        self.out_projs = nn.ParameterList(torch.empty(d_model, width) for width in projected)
        for cluster, tied in enumerate(self.tie_projs):
            if tied and self.projected:
                self.out_projs[cluster] = self.emb_projs[cluster if div_val > 1 else 0]

    def reset(self, *, init_std: float | int, proj_init_std: float | int) -> None:
        """The authors' initialisation: tables and K N(0, init_std), projections N(0, proj_init_std), biases 0."""
        for table in (*self.weights, *self.out_weights, self.cluster_weight):
            nn.init.normal_(table, 0.0, init_std)
        for projection in (*self.emb_projs, *self.out_projs):
            nn.init.normal_(projection, 0.0, proj_init_std)
        for bias in (*self.out_biases, self.cluster_bias):
            nn.init.zeros_(bias)

    def members(self, tokens: Int[Tensor, "n"]) -> list[Int[Tensor, "_"]]:
        """The places of each cluster's tokens, in order.

        Tokens on the host are sorted there, and no device is waited for; those on a device cost a wait for the sizes.
        """
        cluster = torch.stack([tokens >= cutoff for cutoff in self.cutoffs]).sum(dim=0)
        sizes = cluster.bincount(minlength=len(self.starts)).tolist()
        return list(cluster.argsort(stable=True).split(sizes))

    def _move(self, ids: Int[Tensor, "n"]) -> Int[Tensor, "n"]:
        return ids.to(self.cluster_weight.device, non_blocking=True)

    @torch.compiler.disable  # sizes that the data decide would be compiled anew in each batch
    def embed(self, tokens: Int[Tensor, "b i"]) -> Float[Tensor, "b i m"]:
        flat, move = rearrange(tokens, "b i -> (b i)"), self._move
        members, parts = self.members(flat), []
        for cluster, places in enumerate(members):
            # a tied table has a dense gradient from the output layer: autograd adds these few rows to it
            words = move(flat[places] - self.starts[cluster])
            part = F.embedding(words, self.weights[cluster], sparse=self.tie_weight)
            parts.append(F.linear(part, self.emb_projs[cluster]) if self.div_val > 1 else part)
        embedding = torch.cat(parts)[move(torch.cat(members).argsort())]
        if self.div_val == 1 and self.projected:
            embedding = F.linear(embedding, self.emb_projs[0])
        return rearrange(embedding, "(b i) m -> b i m", b=len(tokens)) * self.scale

    def project(self, hidden: Float[Tensor, "*lead m"], cluster: int) -> Float[Tensor, "*lead d"]:
        """W_out h, as wide as the cluster's table."""
        return hidden @ self.out_projs[cluster] if self.projected else hidden

    def head(self) -> tuple[Float[Tensor, "k d"], Float[Tensor, "k"]]:
        """The table and the biases of the first step: the words of cluster 0, then a row for each other cluster."""
        weight = torch.cat([self.out_weights[0], self.cluster_weight])
        return weight, torch.cat([self.out_biases[0], self.cluster_bias])

    @torch.compiler.disable
    def nll(self, hidden: Float[Tensor, "b i m"], targets: Int[Tensor, "b i"]) -> Float[Tensor, "b i"]:
        """-log p(target) in nats, token by token."""
        rows, words = rearrange(hidden, "b i m -> (b i) m"), rearrange(targets, "b i -> (b i)")
        members, (weight, bias) = self.members(words), self.head()
        first = words
        for cluster, places in enumerate(members[1:], 1):
            first = first.index_fill(0, places, len(bias) - cluster)
        nll = linear_nll(self.project(rows, 0), weight, bias, self._move(first))
        for cluster, places in enumerate(members[1:], 1):
            second, places = self._move(words[places] - self.starts[cluster]), self._move(places)
            part = self.project(rows[places], cluster)
            within = linear_nll(part, self.out_weights[cluster], self.out_biases[cluster], second)
            nll = nll.index_add(0, places, within)
        return rearrange(nll, "(b i) -> b i", b=len(targets))

    def log_prob(self, hidden: Float[Tensor, "b i m"]) -> Float[Tensor, "b i v"]:
        """log p of every token, in nats."""
        head = _log_softmax(F.linear(self.project(hidden, 0), *self.head()))
        parts = [head[..., : self.cutoffs[0]]]
        for cluster in range(1, len(self.starts)):
            logits = F.linear(self.project(hidden, cluster), self.out_weights[cluster], self.out_biases[cluster])
            parts.append(head[..., -cluster, None] + _log_softmax(logits))
        return torch.cat(parts, dim=-1)


def _check_clusters(n_token: int, d_embed: int, cutoffs: list[int], div_val: int) -> None:
    if not cutoffs:
        words = "must name at least one id; for one softmax over the whole vocabulary choose model/softmax=full"
        raise ValueError(f"model.softmax.cutoffs: {words}")
    if cutoffs[0] < 1 or any(after <= before for before, after in pairwise(cutoffs)):
        raise ValueError(f"model.softmax.cutoffs: must increase, from 1 at the least, got {cutoffs}")
    if beyond := [cutoff for cutoff in cutoffs if cutoff >= n_token]:
        words = f"{beyond[0]} does not lie inside the vocabulary, n_token is {n_token}"
        raise ValueError(f"model.softmax.cutoffs: {words}; for small vocabularies choose model/softmax=full")
    if div_val < 1:
        raise ValueError(f"model.softmax.div_val: must be at least 1, got {div_val}")
    if d_embed < div_val ** len(cutoffs):
        words = f"{div_val} leaves cluster {len(cutoffs)} a width of {d_embed} // {div_val}^{len(cutoffs)} = 0"
        raise ValueError(f"model.softmax.div_val: {words}")


def _log_softmax(logits: Float[Tensor, "b i v"]) -> Float[Tensor, "b i v"]:
    return logits.log_softmax(dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
