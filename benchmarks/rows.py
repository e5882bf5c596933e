"""What the rows of the benchmark of speed do: the same work by this project, by its plain twin, and by the authors' code."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from benchmarks.measure import Call
from txl import ops
from txl.interop import from_original

N_TOKEN, N_HEAD = 204, 8


def plain_attention(query, key, value, by_distance, r, *, reach, stair, documents, dropatt):
    """All scores at once; the shift by a padded copy (Dai et al. 2019, appendix B)."""
    n_query, n_key = query.shape[2], key.shape[2]
    scores = torch.einsum("hbie,hre->hbir", by_distance, r[:, :-1])
    padded = torch.cat([scores.new_zeros(*scores.shape[:3], 1), scores], dim=3)
    shifted = padded.view(*scores.shape[:2], n_key + 1, n_query)[:, :, 1:].reshape(scores.shape)
    scores = torch.einsum("hbid,hbjd->hbij", query, key) + shifted
    hidden = ops.hidden_keys(range(n_query), range(n_key), memory=n_key - n_query, reach=reach, stair=stair)
    return scores.masked_fill(hidden, -torch.inf).softmax(dim=-1) @ value


@contextlib.contextmanager
def plain() -> Iterator[None]:
    """Lets the model use the plain form meanwhile."""
    before, ops.attention = ops.attention, plain_attention
    try:
        yield
    finally:
        ops.attention = before


def models(peer: str | None, *, n_layer: int, d_model: int, tgt_len: int, mem_len: int, same_length: bool = False):
    """Ours and, if there is a folder, the authors', with the same weights."""
    sizes = dict(n_layer=n_layer, n_head=N_HEAD, d_model=d_model, d_head=d_model // N_HEAD, d_inner=4 * d_model)
    flags = dict(
        n_token=N_TOKEN, dropout=0.0, dropatt=0.0, tie_weight=True, d_embed=d_model, div_val=1, tie_projs=[False],
        pre_lnorm=False, tgt_len=tgt_len, ext_len=0, mem_len=mem_len, cutoffs=[], same_length=same_length, attn_type=0,
        clamp_len=-1, sample_softmax=-1,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = None
    if peer is not None:
        from mem_transformer import MemTransformerLM  # found in their folder, once `main` has looked there

        theirs = MemTransformerLM(**sizes, **flags)
        for parameter in theirs.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, 0.0, 0.02)
        return from_original(theirs.state_dict(), {**sizes, **flags}), theirs
    from txl.layers.memory import SegmentMemory
    from txl.layers.position import RelativePosition
    from txl.layers.softmax import FullSoftmax
    from txl.model import TransformerXL

    memory, parts = SegmentMemory(mem_len=mem_len), dict(position=RelativePosition, softmax=FullSoftmax)
    return TransformerXL(n_token=N_TOKEN, **sizes, memory=memory, **parts, same_length=same_length), theirs


def step(peer: str | None, *, length: int, memory: int, batch: int, **sizes) -> dict[str, Call]:
    """Forward and backward of a whole model whose memory is full."""
    ours, theirs = models(peer, tgt_len=length, mem_len=memory, **sizes)
    ours.train()
    tokens = torch.randint(N_TOKEN, (batch, length + 1))
    mems = [torch.randn(batch, memory, sizes["d_model"]) for _ in range(sizes["n_layer"])]

    def our_step() -> Tensor:
        ours.zero_grad()
        loss = ours(tokens[:, :-1], mems, tokens[:, 1:])[0].mean()
        loss.backward()
        return loss

    def plain_step() -> Tensor:
        with plain():
            return our_step()

    calls = {"plain twin": plain_step, "ours": our_step}
    if theirs is not None:
        their_mems = [memory.transpose(0, 1).contiguous() for memory in [*mems, mems[0]]]
        data, target = tokens[:, :-1].t().contiguous(), tokens[:, 1:].t().contiguous()

        def their_step() -> Tensor:
            theirs.zero_grad()
            loss = theirs(data, target, *their_mems)[0].mean()
            loss.backward()
            return loss

        calls = {"authors": their_step, **calls}
    losses = [call().item() for call in calls.values()]
    assert max(losses) - min(losses) < 1e-4, losses
    return calls


def block(peer: str | None, *, length: int, batch: int, d_model: int, same_length: bool) -> dict[str, Call]:
    """Attention with its projections, residual and norm, forward and backward, memory and segment alike."""
    ours, theirs = models(peer, n_layer=1, d_model=d_model, tgt_len=length, mem_len=length, same_length=same_length)
    layer = ours.layers[0]
    hidden, memory = (torch.randn(batch, length, d_model) for _ in range(2))
    weight = torch.randn(batch, length, d_model)
    encoding = layer.attention.position.encode(2 * length, hidden)

    def our_block() -> Tensor:
        ours.zero_grad()
        given, attention = hidden.clone().requires_grad_(), layer.attention
        keys_values = torch.cat([attention.keys_values(memory), attention.keys_values(given)], dim=3)
        attended = attention(given, keys_values, attention.position.project(encoding), reach=ours.reach)
        out = layer.attention_norm(given + attended)
        (out * weight).sum().backward()
        return out

    def plain_block() -> Tensor:
        with plain():
            return our_block()

    calls = {"plain twin": plain_block, "ours": our_block}
    if theirs is not None:
        attention = theirs.layers[0].dec_attn
        their_hidden, their_memory, their_weight = (x.transpose(0, 1).contiguous() for x in (hidden, memory, weight))
        ones = torch.ones(length, 2 * length)
        mask = ones.triu(1 + length) + (ones.tril(0) if same_length else 0)
        r = theirs.pos_emb(torch.arange(2 * length - 1, -1, -1.0))

        def their_block() -> Tensor:
            theirs.zero_grad()
            given = their_hidden.clone().requires_grad_()
            out = attention(
                given, r, theirs.r_w_bias, theirs.r_r_bias, attn_mask=mask.bool()[:, :, None], mems=their_memory
            )
            (out * their_weight).sum().backward()
            return out.transpose(0, 1)

        calls = {"authors": their_block, **calls}
    results = [call() for call in calls.values()]
    assert all((result - results[-1]).abs().max() < 1e-3 for result in results)
    return calls


def products(*, n_layer: int, d_model: int, length: int, memory: int, batch: int) -> Call:
    """The matrix products that no implementation can leave out: linears, and the scores that the mask leaves, by tiles of 64."""
    rows, past, inner, tile = batch * length, batch * memory, 4 * d_model, min(64, length)
    linears = []  # rows, inputs, outputs; and how often: forward, gradient of the weight, and of the input
    linears += [(rows, d_model, d_model, 3)] * 2 + [(rows, d_model, 2 * d_model, 3), (past, d_model, 2 * d_model, 2)]
    linears += [(length + memory, d_model, d_model, 2), (rows, d_model, inner, 3), (rows, inner, d_model, 3)]
    work = [
        (torch.randn(n, i), torch.randn(i, o), torch.empty(n, o), torch.empty(i, o), times)
        for n, i, o, times in linears
    ]
    head, heads = d_model // N_HEAD, N_HEAD * batch
    query, key = torch.randn(heads, length, head), torch.randn(heads, length + memory, head)
    r, room = torch.randn(N_HEAD, length + memory, head), torch.randn(heads * tile * (length + memory))
    small, large, large_r = torch.empty(heads, tile, head), torch.empty_like(key), torch.empty_like(r)
    table, table_grad, states = torch.randn(N_TOKEN, d_model), torch.empty(N_TOKEN, d_model), torch.randn(rows, d_model)

    def scores() -> None:
        for start in range(0, length, tile):
            seen = memory + start + tile // 2  # on average
            q, k = query[:, start : start + tile], key[:, :seen]
            s = room[: heads * tile * seen].view(heads, tile, seen)
            by_distance = room[: heads * tile * seen].view(N_HEAD, batch * tile, seen)
            q_r = q.reshape(N_HEAD, batch * tile, head)
            for _ in range(2):  # scores by content; the gradient of the weights
                torch.bmm(q, k.mT, out=s)
            for _ in range(2):  # the result; the gradient of the query
                torch.bmm(s, k, out=small)
            for _ in range(2):  # the gradients of value and key
                torch.bmm(s.mT, q, out=large[:, :seen])
            torch.bmm(q_r, r[:, :seen].mT, out=by_distance)
            torch.bmm(by_distance, r[:, :seen], out=small.view(N_HEAD, batch * tile, head))
            torch.bmm(by_distance.mT, q_r, out=large_r[:, :seen])

    def run() -> None:
        for _ in range(n_layer):
            for given, weight, out, weight_grad, times in work:
                torch.mm(given, weight, out=out)
                torch.mm(given.t(), out, out=weight_grad)
                if times == 3:
                    torch.mm(out, weight.t(), out=given)
            scores()
        logits = states @ table.t()
        torch.mm(logits.t(), states, out=table_grad)
        torch.mm(logits, table, out=states)
        for given, *_ in work:
            given.normal_()  # numbers that stay finite
        states.normal_()

    return run


def evaluation(peer: str | None, *, mem_len: int, tgt_len: int, n_token: int, **sizes) -> dict[str, Call]:
    """One lane of text, the memory full for half of it."""
    from txl.data.encoding import Split
    from txl.data.vocab import Bytes
    from txl.evaluation import plan, total_nll
    from txl.reading import stair_of

    ours, theirs = models(peer, tgt_len=tgt_len, mem_len=mem_len, same_length=True, **sizes)
    ours.eval()
    tokens = torch.randint(N_TOKEN, (n_token + 1,))
    split = Split.of("test", bytes(tokens.tolist()), Bytes())
    read = plan(ours, n_token, tgt_len=tgt_len, batch_size=1)

    def plain_evaluation() -> float:
        total, mems = 0.0, None
        with plain(), torch.inference_mode():
            for start in range(0, n_token, tgt_len):
                stop = min(start + tgt_len, n_token)
                nll, mems = ours(tokens[None, start:stop], mems, tokens[None, start + 1 : stop + 1])
                total += nll.sum().item()
        return total

    def their_evaluation() -> float:
        total, mems = 0.0, ()
        with torch.no_grad():
            for start in range(0, n_token, tgt_len):
                stop = min(start + tgt_len, n_token)
                nll, *mems = theirs(tokens[start:stop, None], tokens[start + 1 : stop + 1, None], *mems)
                total += nll.sum().item()
        return total

    calls = {"authors": their_evaluation} if theirs is not None else {}
    calls |= {
        "plain twin": plain_evaluation,
        "ours": lambda: total_nll(ours, split, read, stair=stair_of(ours, tgt_len))[0],
    }
    totals = [call() for call in calls.values()]
    assert max(totals) - min(totals) < 1e-5 * totals[0], totals
    return calls


def generation(peer: str | None, *, mem_len: int, batch: int, tokens: int, **sizes) -> dict[str, Call]:
    """So many tokens of each text, the memory full."""
    from txl.generation import Reader

    ours, theirs = models(peer, tgt_len=1, mem_len=mem_len, **sizes)
    texts = Reader(ours.eval(), context=64).begin([torch.randint(N_TOKEN, (mem_len,))], [batch])
    token = torch.zeros(batch, 1, dtype=torch.int64)
    mems = [torch.randn(batch, mem_len, sizes["d_model"]) for _ in range(sizes["n_layer"])]
    their_mems = [memory.transpose(0, 1).contiguous() for memory in [*mems, mems[0]]]

    def their_tokens() -> None:
        with torch.no_grad():
            for _ in range(tokens):
                hidden, _ = theirs._forward(token.t(), mems=their_mems)
                (hidden[-1] @ theirs.word_emb.emb_layers[0].weight.t() + theirs.crit.out_layers[0].bias).log_softmax(-1)

    def plain_tokens() -> None:
        with plain(), torch.inference_mode():
            for _ in range(tokens):
                ours(token, mems)

    def our_tokens() -> None:
        for _ in range(tokens):
            texts.extend([[0]] * batch)

    calls = {"authors": their_tokens} if theirs is not None else {}
    return calls | {"plain twin": plain_tokens, "ours": our_tokens}
