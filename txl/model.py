"""The whole model, minus its choices: embed, attend with memory, predict."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from txl.layers.attention import Attention
from txl.layers.feedforward import FeedForward


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
        return self.attention_norm(rows) if self.pre_norm else rows

    def forward(
        self,
        hidden: Float[Tensor, "b i m"],
        memory: Float[Tensor, "b k m"],
        encoding: Float[Tensor, "r m"],
        documents: Int[Tensor, "b j"] | None = None,
        reach: int | None = None,
    ) -> Float[Tensor, "b i m"]:
        """Reads a segment after a memory of hidden states, which it projects anew: their weights change in training."""
        segment, project = self.normed(hidden), self.attention.keys_values
        keys_values = torch.cat([project(self.normed(memory)), project(segment)], dim=3)
        r = self.attention.position.project(encoding)
        return self.attend(hidden, segment, keys_values, r, documents, reach=reach)

    def attend(
        self,
        hidden: Float[Tensor, "b i m"],
        segment: Float[Tensor, "b i m"],
        keys_values: Float[Tensor, "two h b j d"],
        r: Float[Tensor, "h r d"],
        documents: Int[Tensor, "b j"] | None = None,
        *,
        reach: int | None = None,
        stair: int = 1,
    ) -> Float[Tensor, "b i m"]:
        """The layer itself, given the keys and values of memory and segment; `segment` is `hidden` as `normed` returns it."""
        hidden = hidden + self.dropped(self.attention(segment, keys_values, r, documents, reach=reach, stair=stair))
        if self.pre_norm:
            return hidden + self.dropped(self.feedforward(self.feedforward_norm(hidden)))
        hidden = self.attention_norm(hidden)
        return self.feedforward_norm(hidden + self.dropped(self.feedforward(hidden)))

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
        for name, rate in {"dropout": dropout, "dropatt": dropatt}.items():
            if not 0 <= rate < 1:
                raise ValueError(f"model.{name}: must lie in [0, 1), got {rate}")
        self.memory, self.same_length = memory, same_length
        self.reach = memory.mem_len - 1 if same_length and memory.mem_len is not None else None
        self.activation_checkpointing, self.compiled = activation_checkpointing, False
        self.softmax = softmax(n_token=n_token, d_model=d_model, d_embed=d_embed, tie_weight=tie_weight)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(
            DecoderLayer(
                d_model=d_model,
                dropout=dropout,
                pre_norm=pre_norm,
                attention=Attention(d_model=d_model, n_head=n_head, d_head=d_head, dropatt=dropatt, position=position),
                feedforward=FeedForward(d_model=d_model, d_inner=d_inner, dropout=dropout, activation=activation),
            )
            for _ in range(n_layer)
        )
        if not untie_r:
            for layer in self.layers[1:]:
                layer.attention.position.share_biases(self.layers[0].attention.position)
        self.reset(init_std=init_std, proj_init_std=proj_init_std)

    def reset(self, *, init_std: float | int, proj_init_std: float | int) -> None:
        """The authors' initialisation: matrices, u and v N(0, init_std); norms N(1, init_std); biases 0; projections N(0, proj_init_std)."""
        for module in self.layers.modules():
            if isinstance(module, nn.LayerNorm):
                nn.init.normal_(module.weight, 1.0, init_std)
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, 0.0, init_std)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for name, parameter in self.layers.named_parameters():
            if name.endswith(("r_w_bias", "r_r_bias")):
                nn.init.normal_(parameter, 0.0, init_std)
        self.softmax.reset(init_std=init_std, proj_init_std=proj_init_std)

    def compile_layers(self) -> None:
        """Compiles what a layer does with a segment, once for all layers and all lengths of the memory.

        Embedding and output layer stay as they are: they are a few large products. The first segment of a text, which has no
        memory, is read by the uncompiled layers: torch would make a program of its own for a size of zero.
        """
        self.compiled = True
        for layer in self.layers:
            layer.compile(fullgraph=True)
            layer.compiled_attend = torch.compile(layer.attend, fullgraph=True)  # for `txl.reading`

    def forward(
        self,
        tokens: Int[Tensor, "b i"],
        mems: Sequence[Float[Tensor, "b _ m"]] | None = None,
        targets: Int[Tensor, "b i"] | None = None,
        *,
        starts: Bool[Tensor, "b i"] | None = None,
    ) -> tuple[Float[Tensor, "b i"] | Float[Tensor, "b i v"], list[Float[Tensor, "b _ m"]]]:
        """The nll of each target in nats or, without targets, the log-probabilities of the next token; and the new memory.

        Tokens and targets may lie on the host while the model is elsewhere: then nothing is waited for, whatever the softmax.
        The memory is an argument and a result, never kept: pass what one segment returned to the next, None at the start.
        `starts` is true where a document begins: a token then attends to its own document only, in the segment and in the
        memory. Once given, it must be given for every segment: rows of the memory that belong to a document that has ended
        are not-a-number.
        """
        hidden = self.dropout(self.softmax.embed(tokens))
        memories = self.memory.start(mems, hidden, len(self.layers))
        documents = None
        if starts is not None:
            documents = document_numbers(memories[0], starts)
            memories = [memory.masked_fill(memory.isnan(), 0.0) for memory in memories]
        n_key = memories[0].shape[1] + hidden.shape[1]
        encoding = self.layers[0].attention.position.encode(n_key, hidden)
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
        hidden = self.dropout(hidden)
        output = self.softmax.log_prob(hidden) if targets is None else self.softmax.nll(hidden, targets)
        return output, self.memory.keep(memories, inputs, documents)


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
