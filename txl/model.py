"""The whole model, minus its choices: embed, attend with memory, predict."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from txl.layers.attention import Attention
from txl.layers.dropout import variational_dropout, word_dropout
from txl.layers.feedforward import FeedForward
from txl.layers.residual import added, normed


class DecoderLayer(nn.Module):
    """Attention over memory and segment, then the feed-forward network, each with its residual and its norm.

    post-norm:  h <- LN(h + drop(A(h, [memory ; h]))),      h <- LN(h + drop(FF(h)))        (the paper's form)
    pre-norm:   h <- h + drop(A(LN(h), LN([memory ; h]))),  h <- h + drop(FF(LN(h)))
    """

    def __init__(
        self, *, d_model: int, dropout: float | int, pre_norm: bool, attention: Attention, feedforward: FeedForward
    ):
        super().__init__()
        self.pre_norm = pre_norm
        self.attention, self.feedforward = attention, feedforward
        self.attention_norm, self.feedforward_norm = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.dropout = nn.Dropout(dropout)

    def normed(self, rows: Float[Tensor, "b j m"]) -> Float[Tensor, "b j m"]:
        """Rows of the segment or the memory as attention takes them."""
        return normed(rows, self.attention_norm, self.pre_norm)

    def forward(
        self,
        hidden: Float[Tensor, "b i m"],
        memory: Float[Tensor, "b k m"],
        encoding: Tensor,
        documents: Int[Tensor, "b j"] | None = None,
        reach: int | None = None,
    ) -> Float[Tensor, "b i m"]:
        """Reads a segment after a memory of hidden states, which it projects anew: their weights change in training."""
        position, project = self.attention.position, self.attention.keys_values
        memory, hidden = position.at_layer(memory, hidden.shape[1]), position.at_layer(hidden, 0)
        segment, memory = self.normed(hidden), self.normed(memory)
        if self.attention.wdrop and self.training:  # the same weights for both
            keys_values = project(torch.cat([memory, segment], dim=1))
        else:
            keys_values = torch.cat([project(memory), project(segment)], dim=3)
        return self.attend(hidden, segment, keys_values, position.project(encoding), documents, reach=reach)

    def attend(
        self,
        hidden: Float[Tensor, "b i m"],
        segment: Float[Tensor, "b i m"],
        keys_values: Float[Tensor, "two h b j d"],
        r: Tensor,
        documents: Int[Tensor, "b j"] | None = None,
        *,
        reach: int | None = None,
        stair: int = 1,
    ) -> Float[Tensor, "b i m"]:
        """The layer itself, given the keys and values of memory and segment; `segment` is `hidden` as `normed` returns it."""
        update = self.attention(segment, keys_values, r, documents, reach=reach, stair=stair)
        hidden = added(hidden, self.dropped(update), self.attention_norm, self.pre_norm)
        update = self.feedforward(normed(hidden, self.feedforward_norm, self.pre_norm))
        return added(hidden, self.dropped(update), self.feedforward_norm, self.pre_norm)

    def dropped(self, rows: Float[Tensor, "b i m"]) -> Float[Tensor, "b i m"]:
        """What dropout leaves; where one token is read at a time, even asking a module for nothing costs."""
        return self.dropout(rows) if self.training else rows


class TransformerXL(nn.Module):
    """A Transformer-XL language model (Dai et al. 2019, sections 3.2 and 3.3).

    `memory` is a part of the model; `position` and `softmax` are factories, which the model calls with its sizes
    (`position` once for each layer). `d_embed=None` means `d_model`. With `same_length` each query sees exactly mem_len
    keys, itself included; without it, the whole memory and all of its segment up to itself. `untie_r` gives each layer
    its own u and v. `activation_checkpointing` keeps only the inputs of the layers for the backward pass and computes the
    rest again: less memory, more time, the same numbers. Raises ValueError, with the key to change, for a size below 1, a
    dropout outside [0, 1), an odd d_model or an unknown activation.
    """

    def __init__(
        self,
        *,
        n_token: int | None,
        n_layer: int,
        n_head: int,
        d_model: int,
        d_head: int,
        d_inner: int,
        memory: nn.Module,
        position: Callable[..., nn.Module],
        softmax: Callable[..., nn.Module],
        d_embed: int | None = None,
        dropout: float | int = 0.0,
        dropatt: float | int = 0.0,
        dropoute: float | int = 0.0,
        dropouti: float | int | None = None,
        dropouto: float | int | None = None,
        wdrop: float | int = 0.0,
        same_length: bool = False,
        untie_r: bool = False,
        pre_norm: bool = False,
        activation: str = "relu",
        tie_weight: bool = True,
        activation_checkpointing: bool = False,
        init_std: float | int = 0.02,
        proj_init_std: float | int = 0.01,
    ):
        super().__init__()
        d_embed = d_model if d_embed is None else d_embed
        sizes = dict(
            n_token=n_token,
            n_layer=n_layer,
            n_head=n_head,
            d_model=d_model,
            d_head=d_head,
            d_inner=d_inner,
            d_embed=d_embed,
        )
        for name, size in sizes.items():
            if size is None or not 1 <= size < 2**31:
                raise ValueError(f"model.{name}: must be at least 1 and below 2^31, got {size}")
        for name, std in {"init_std": init_std, "proj_init_std": proj_init_std}.items():
            if not 0 <= std < float("inf"):
                raise ValueError(f"model.{name}: must be at least 0, got {std}")
        rates = dict(
            dropout=dropout, dropatt=dropatt, dropoute=dropoute, dropouti=dropouti, dropouto=dropouto, wdrop=wdrop
        )
        for name, rate in rates.items():
            if rate is not None and not 0 <= rate < 1:
                raise ValueError(f"model.{name}: must lie in [0, 1), got {rate}")
        if same_length and not memory.keeps_inputs:
            raise ValueError("model.same_length: a compressive memory reaches further than mem_len keys; take false")
        self.memory, self.same_length, self.n_token = memory, same_length, n_token
        memory.size(n_layer=n_layer, d_model=d_model, init_std=init_std)
        self.reach = memory.mem_len - 1 if same_length and memory.mem_len is not None else None
        self.dropoute, self.dropouti, self.dropouto = dropoute, dropouti, dropouto
        self.activation_checkpointing, self.compiled = activation_checkpointing, False
        self.softmax = softmax(n_token=n_token, d_model=d_model, d_embed=d_embed, tie_weight=tie_weight)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(
            DecoderLayer(
                d_model=d_model,
                dropout=dropout,
                pre_norm=pre_norm,
                attention=Attention(
                    d_model=d_model, n_head=n_head, d_head=d_head, dropatt=dropatt, position=position, wdrop=wdrop
                ),
                feedforward=FeedForward(
                    d_model=d_model, d_inner=d_inner, dropout=dropout, activation=activation, wdrop=wdrop
                ),
            )
            for _ in range(n_layer)
        )
        shares = self.layers[0].attention.position.shares_biases
        if untie_r and not shares:
            words = "this model.position has no u and v that layers could share; take false"
            raise ValueError(f"model.untie_r: {words}")
        if not untie_r and shares:
            for layer in self.layers[1:]:
                layer.attention.position.share_biases(self.layers[0].attention.position)
        self.reset(init_std=init_std, proj_init_std=proj_init_std)

    def reset(self, *, init_std: float | int, proj_init_std: float | int) -> None:
        """The authors' initialisation: matrices, u, v and tables N(0, init_std); norms N(1, init_std); biases 0; projections N(0, proj_init_std)."""
        for module in self.layers.modules():
            if isinstance(module, nn.LayerNorm):
                nn.init.normal_(module.weight, 1.0, init_std)
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, 0.0, init_std)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for name, parameter in self.layers.named_parameters():
            if name.endswith(("r_w_bias", "r_r_bias", "r_emb")):
                nn.init.normal_(parameter, 0.0, init_std)
            elif name.endswith("r_bias"):
                nn.init.zeros_(parameter)
        self.softmax.reset(init_std=init_std, proj_init_std=proj_init_std)

    def compile_layers(self) -> None:
        """Compiles what a layer does with a segment, once for all layers and all lengths of the memory.

        Embedding and output layer stay as they are: they are a few large products. The first segment of a text, which has no
        memory, is read by the uncompiled layers: torch would make a program of its own for a size of zero. Programs of
        earlier models are forgotten: torch keeps a few for each line of code, and a sweep has many models.
        """
        torch._dynamo.reset()
        self.compiled = True
        for layer in self.layers:
            layer.compile(fullgraph=True)
            layer.compiled_attend = torch.compile(layer.attend, fullgraph=True)  # for `txl.reading`

    @property
    def position(self) -> nn.Module:
        """The first layer's position scheme, for what is the same in all layers."""
        return self.layers[0].attention.position

    @property
    def keys_last(self) -> bool:
        """Whether keys and values stay what they are while the weights do, so that they may be kept (`txl.reading`)."""
        return self.position.by_distance and self.memory.keeps_inputs

    def forward(
        self,
        tokens: Int[Tensor, "b i"],
        mems: Sequence[Float[Tensor, "b _ m"]] | None = None,
        targets: Int[Tensor, "b i"] | None = None,
        *,
        starts: Bool[Tensor, "b i"] | None = None,
        with_auxiliary: bool = False,
    ) -> tuple:
        """The nll of each target in nats or, without targets, the log-probabilities of the next token; and the new memory.

        Tokens and targets may lie on the host while the model is elsewhere: then nothing is waited for, whatever the softmax.
        The memory is an argument and a result, never kept: pass what one segment returned to the next, None at the start.
        `starts` is true where a document begins: a token then attends to its own document only, in the segment and in the
        memory. Once given, it must be given for every segment: rows of the memory that belong to a document that has ended
        are not-a-number. `with_auxiliary` adds a third result: what a memory that learns is trained by, beside the nll.
        """
        hidden, memories, inputs, documents = self.states(tokens, mems, starts=starts)
        output = self.softmax.log_prob(hidden) if targets is None else self.softmax.nll(hidden, targets)
        kept = self.memory.keep(memories, inputs, documents)
        if not with_auxiliary:
            return output, kept
        return output, kept, self.memory.reconstruction(self.layers, memories, inputs)

    def states(
        self,
        tokens: Int[Tensor, "b i"],
        mems: Sequence[Float[Tensor, "b _ m"]] | None = None,
        *,
        starts: Bool[Tensor, "b i"] | None = None,
    ) -> tuple[
        Float[Tensor, "b i m"], list[Float[Tensor, "b _ m"]], list[Float[Tensor, "b i m"]], Int[Tensor, "b j"] | None
    ]:
        """The states that the next tokens are predicted from; each layer's memory and input; the document of each row."""
        hidden = self._dropped(self.embed(tokens), self.dropouti)
        memories = self.memory.start(mems, hidden, len(self.layers))
        documents = None
        if starts is not None:
            documents = document_numbers(memories[0], starts)
            memories = [memory.masked_fill(memory.isnan(), 0.0) for memory in memories]
        n_key = memories[0].shape[1] + hidden.shape[1]
        encoding = self.position.encode(n_key, hidden)
        if self.position.drops_encoding:
            encoding = self.dropout(encoding)  # one mask for all layers and the whole batch
        if self.compiled:
            growing(0, encoding)
            growing(1, documents, *memories)
        inputs = []
        for layer, memory in zip(self.layers, memories, strict=True):
            inputs.append(hidden)
            empty = memory.shape[1] == 0 and self.memory.mem_len is not None
            run = layer.forward if self.compiled and empty else layer  # see `compile_layers`
            if self.activation_checkpointing and self.training:
                hidden = checkpoint(run, hidden, memory, encoding, documents, self.reach, use_reentrant=False)
            else:
                hidden = run(hidden, memory, encoding, documents, self.reach)
        return self._dropped(hidden, self.dropouto), memories, inputs, documents

    def embed(self, tokens: Int[Tensor, "b i"]) -> Float[Tensor, "b i m"]:
        """What the first layer reads of the tokens, before dropout."""
        embedding = self.softmax.embed(tokens)
        if self.dropoute and self.training:
            embedding = word_dropout(embedding, tokens, self.n_token, self.dropoute)
        return self.position.enter(embedding)

    def _dropped(self, hidden: Float[Tensor, "b i m"], rate: float | int | None) -> Float[Tensor, "b i m"]:
        """Ordinary dropout or, where a rate is given, the variational one."""
        if rate is None:
            return self.dropout(hidden)
        return variational_dropout(hidden, rate) if rate and self.training else hidden


def growing(dim: int, *tensors: Tensor | None) -> None:
    """Tells torch.compile that this dimension has another size in the next segment: one program serves all sizes."""
    if torch.compiler.is_compiling():
        return
    for tensor in tensors:
        if tensor is not None:
            torch._dynamo.maybe_mark_dynamic(tensor, dim)


def document_numbers(memory: Float[Tensor, "b k m"], starts: Bool[Tensor, "b i"]) -> Int[Tensor, "b j"]:
    """The document of each row of memory and segment: 0 is the one that the segment goes on with, -1 an earlier one."""
    carried = -memory[:, :, 0].isnan().long()
    return torch.cat([carried, starts.long().cumsum(dim=1)], dim=1)
