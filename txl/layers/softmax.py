"""Tokens in, losses out: the embedding and the output layer together, since they share weights and projections."""

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F


class FullSoftmax(nn.Module):
    """One embedding table and one softmax over the whole vocabulary.

        embed(x)   = sqrt(d_model) W_in E[x]
        log p(v|h) = log_softmax_v(E'[v] . (W_out h) + bias_v)

    With `tie_weight` E' is E (Press and Wolf 2017). W_in and W_out exist only where d_embed differs from d_model;
    `tie_projs` makes W_out the transpose of W_in. Losses are in nats and never computed below float32.
    """

    def __init__(self, *, n_token: int, d_model: int, d_embed: int, tie_weight: bool, tie_projs: bool = False):
        super().__init__()
        self.scale = d_model**0.5
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
        embedding = F.embedding(tokens, self.weight)
        if self.emb_proj is not None:
            embedding = F.linear(embedding, self.emb_proj)
        return embedding * self.scale

    def logits(self, hidden: Float[Tensor, "b i m"]) -> Float[Tensor, "b i v"]:
        if self.out_proj is not None:
            hidden = hidden @ self.out_proj
        logits = F.linear(hidden, self.out_weight, self.out_bias)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def nll(self, hidden: Float[Tensor, "b i m"], targets: Int[Tensor, "b i"]) -> Float[Tensor, "b i"]:
        """-log p(target) in nats, token by token."""
        logits = rearrange(self.logits(hidden), "b i v -> b v i")
        return F.cross_entropy(logits, targets, reduction="none")

    def log_prob(self, hidden: Float[Tensor, "b i m"]) -> Float[Tensor, "b i v"]:
        """log p of every token, in nats."""
        return self.logits(hidden).log_softmax(dim=-1)
