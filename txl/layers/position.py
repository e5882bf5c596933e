"""How a layer knows where a key lies. All schemes stand here, one below the other, so that an ablation is read in one place.

Whatever a scheme does, it answers the same few questions (`Position`); attention, masks and tiles are the same for all.
"""

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from txl import ops

NO_CLAMP = "model.position.clamp_len: must be at least 1 and below 2^31, or null for no limit; got {}"


class Position(nn.Module):
    """The questions that every scheme answers; this one knows nothing of places, and each scheme overrides what it needs.

    `by_distance`: whether a score depends on how far away a key lies and not on where its segment began. Then reading in
    segments is reading whole, and keys and values may be kept for as long as the weights stay. `drops_encoding`: whether
    the model's dropout falls on what `encode` returns. `clamp_len` (tokens): every distance beyond it counts as it.
    """

    by_distance = True
    drops_encoding = False
    shares_biases = False
    clamp_len: int | None = None

    def __init__(self, *, d_head: int):
        super().__init__()
        self.scale = d_head**-0.5

    def enter(self, embedding: Float[Tensor, "b i m"]) -> Float[Tensor, "b i m"]:
        """What the first layer gets of a segment's embedding."""
        return embedding

    def at_layer(self, rows: Float[Tensor, "b k m"], behind: int) -> Float[Tensor, "b k m"]:
        """What this layer makes of input rows, of memory or segment, the last of which lies `behind` the segment's end."""
        return rows

    def encode(self, n_key: int, like: Tensor) -> Float[Tensor, "r e"] | Int[Tensor, "r e"]:
        """What stands for the distances n_key - 1, ..., 0 and -1 (which the mask hides), the same for every layer."""
        return like.new_zeros(n_key + 1, 0)

    def project(self, encoding: Float[Tensor, "r e"] | Int[Tensor, "r e"]) -> Float[Tensor, "n r e2"]:
        """What this layer makes of the encoding, for all heads (n is one) or each."""
        return encoding[None]

    def forward(
        self, q: Float[Tensor, "h b i d"], k: Float[Tensor, "h b j d"], r: Float[Tensor, "n r e2"]
    ) -> tuple[
        Float[Tensor, "h b i d"],
        Float[Tensor, "h b j d"],
        Float[Tensor, "h b i e"] | None,
        Float[Tensor, "h r e"] | None,
    ]:
        """Query and key of the first product of `txl.ops.attention`, and by_distance and r of the second; scaled."""
        return q * self.scale, k, None, None

    def terms(
        self, q: Float[Tensor, "h b i d"], k: Float[Tensor, "h b j d"], r: Float[Tensor, "n r e2"]
    ) -> dict[str, Float[Tensor, "h b i j"]]:
        """The logits, unmasked, as the sum of what they are made of, by the names of Dai et al. 2019, section 3.3."""
        query, key, by_distance, r = self(q, k, r)
        terms = {"a": query @ key.mT}
        return terms if r is None else {**terms, "d": ops.relative_shift(by_distance @ r.mT[:, None])}


class RelativePosition(Position):
    """Scores each key by its content and by its distance (Dai et al. 2019, section 3.3).

        logits[i, j] = ((q_i + u) . k_j  +  (q_i + v) . r_{m+i-j}) / sqrt(d_head),    r_x = W_r R_x
                          terms a and c       terms b and d

    The distance m + i - j runs over the m memories too, so r is as long as the keys. R holds fixed sinusoids; W_r, u and
    v are learned. `clamp_len` (tokens): every distance beyond it counts as it. Raises ValueError for a clamp_len below 1
    or an odd d_model.
    """

    drops_encoding = True
    shares_biases = True

    def __init__(self, *, n_head: int, d_head: int, d_model: int, clamp_len: int | None = None):
        super().__init__(d_head=d_head)
        self.clamp_len = checked_clamp(clamp_len)
        check_even("d_model", d_model)
        self.n_head, self.d_model = n_head, d_model
        self.r_net = nn.Linear(d_model, n_head * d_head, bias=False)
        self.r_w_bias = nn.Parameter(torch.empty(n_head, d_head))  # u in the paper
        self.r_r_bias = nn.Parameter(torch.empty(n_head, d_head))  # v in the paper

    def share_biases(self, other: "RelativePosition") -> None:
        """Uses the u and v of another layer, as the authors' PyTorch code does for all layers (`untie_r` off)."""
        self.r_w_bias, self.r_r_bias = other.r_w_bias, other.r_r_bias

    def encode(self, n_key: int, like: Tensor) -> Float[Tensor, "r m"]:
        """R, the same for every layer: the sinusoids of the distances n_key - 1, ..., 0, -1."""
        return ops.distance_encoding(n_key, self.d_model, self.clamp_len, like.dtype, like.device)

    def project(self, encoding: Float[Tensor, "r m"]) -> Float[Tensor, "h r d"]:
        """r = W_r R, the keys that stand for distances."""
        return rearrange(self.r_net(encoding), "r (h d) -> h r d", h=self.n_head).contiguous()

    def forward(
        self, q: Float[Tensor, "h b i d"], k: Float[Tensor, "h b j d"], r: Float[Tensor, "h r d"]
    ) -> tuple[Float[Tensor, "h b i d"], Float[Tensor, "h b j d"], Float[Tensor, "h b i d"], Float[Tensor, "h r d"]]:
        """What enters the dot product with the keys (terms a and c), and with the r of their distances (b and d)."""
        by_content = (q + self.r_w_bias[:, None, None]) * self.scale
        by_distance = (q + self.r_r_bias[:, None, None]) * self.scale
        return by_content, k, by_distance, r

    def terms(
        self, q: Float[Tensor, "h b i d"], k: Float[Tensor, "h b j d"], r: Float[Tensor, "h r d"]
    ) -> dict[str, Float[Tensor, "h b i j"]]:
        """a: q . k, b: q . r, c: u . k, d: v . r, each over sqrt(d_head)."""
        u, v = (bias[:, None, None].expand_as(q) * self.scale for bias in (self.r_w_bias, self.r_r_bias))
        keys, distances = k.mT, r.mT[:, None]
        return {
            "a": q * self.scale @ keys,
            "b": ops.relative_shift(q * self.scale @ distances),
            "c": u @ keys,
            "d": ops.relative_shift(v @ distances),
        }


class ShawPosition(Position):
    """A learned vector and a learned bias for each distance, in each layer (Shaw et al. 2018, as in Dai et al. 2019, table 6).

        logits[i, j] = ((q_i + u) . k_j  +  q_i . a_x + b_x) / sqrt(d_head),    x = m + i - j

    The authors' form (attn_type 1): u, a and b belong to a layer. There are `max_klen` of them, for the distances 0 to
    max_klen - 1; greater ones count as the last, or as `clamp_len` (tokens). Raises ValueError for either below 1: max_klen
    has a default only so that the check of a configuration knows it for a choice.
    """

    def __init__(self, *, n_head: int, d_head: int, d_model: int, max_klen: int = 0, clamp_len: int | None = None):
        super().__init__(d_head=d_head)
        self.clamp_len = checked_clamp(clamp_len)
        self.r_w_bias = nn.Parameter(torch.empty(n_head, d_head))  # u
        self.r_emb = nn.Parameter(torch.empty(checked_rows(max_klen), n_head, d_head))  # a, the greatest distance first
        self.r_bias = nn.Parameter(torch.empty(max_klen, n_head))  # b

    def encode(self, n_key: int, like: Tensor) -> Int[Tensor, "r one"]:
        """The row of the table for each distance."""
        last = len(self.r_emb) - 1
        distance = torch.arange(n_key - 1, -2, -1, device=like.device)[:, None]
        return last - distance.clamp(0, min(last, self.clamp_len or last))

    def project(self, encoding: Int[Tensor, "r one"]) -> Float[Tensor, "h r e"]:
        """The vector of each distance and, as one more component, its bias."""
        table = torch.cat([self.r_emb, self.r_bias[:, :, None]], dim=2)
        return rearrange(table[encoding[:, 0]], "r h e -> h r e").contiguous()

    def forward(
        self, q: Float[Tensor, "h b i d"], k: Float[Tensor, "h b j d"], r: Float[Tensor, "h r e"]
    ) -> tuple[Float[Tensor, "h b i d"], Float[Tensor, "h b j d"], Float[Tensor, "h b i e"], Float[Tensor, "h r e"]]:
        """A one beside the query meets the bias."""
        by_content = (q + self.r_w_bias[:, None, None]) * self.scale
        return by_content, k, torch.cat([q, torch.ones_like(q[..., :1])], dim=3) * self.scale, r

    def terms(
        self, q: Float[Tensor, "h b i d"], k: Float[Tensor, "h b j d"], r: Float[Tensor, "h r e"]
    ) -> dict[str, Float[Tensor, "h b i j"]]:
        """a: q . k, b: q . a, c: u . k, d: the bias, each over sqrt(d_head)."""
        u, q, one = self.r_w_bias[:, None, None].expand_as(q), q * self.scale, torch.full_like(q[..., :1], self.scale)
        vectors, biases = r[:, None, :, :-1].mT, r[:, None, :, -1:].mT
        return {
            "a": q @ k.mT,
            "b": ops.relative_shift(q @ vectors),
            "c": u * self.scale @ k.mT,
            "d": ops.relative_shift(one @ biases),
        }


class AbsolutePosition(Position):
    """Sinusoids of the place in the segment, added once to the embedding (Vaswani et al. 2017, section 3.5; attn_type 2).

        h_0 = E + R_{I-1-i},    logits[i, j] = q_i . k_j / sqrt(d_head)

    Places are counted back from the segment's end, as the authors do: the last of I tokens has place 0. With a memory they
    are not added again: what is kept already holds the place that it had in its own segment, so that a memory's row and a
    segment's may have the same one, which is why the paper wants distances (section 3.3). So this scheme depends on where
    segments begin. In evaluation and generation a segment of fewer than tgt_len tokens is read as the beginning of a whole
    one, where training has seen such places. Raises ValueError for an odd d_model.
    """

    by_distance = False

    def __init__(self, *, n_head: int, d_head: int, d_model: int):
        super().__init__(d_head=d_head)
        check_even("d_model", d_model)

    def enter(self, embedding: Float[Tensor, "b i m"]) -> Float[Tensor, "b i m"]:
        """The embedding and the sinusoids of its places."""
        n_query, d_model = embedding.shape[1:]
        return embedding + ops.distance_encoding(n_query, d_model, None, embedding.dtype, embedding.device)[:-1]


class AbsolutePositionPerLayer(Position):
    """A learned vector for each place, added to the input of every layer (Al-Rfou et al. 2019, section 3; attn_type 3).

        h_l <- h_l + P_l[I-1-i],   c_l <- [memory_l[j] + P_l[J-1-j] ; h_l],    logits[i, j] = q_i . k_j / sqrt(d_head)

    Places are counted back from the segment's end, over the memory too: `max_klen` of them have a vector, those further back
    share the last. The memory keeps a layer's input as it was *before* its vector was added, and gets the vector of the
    place that it has by now: never two of one layer. (The authors' code adds another with each segment, in place.) So what a
    key is changes from segment to segment. Raises ValueError for a max_klen below 1, as its default is.
    """

    by_distance = False

    def __init__(self, *, n_head: int, d_head: int, d_model: int, max_klen: int = 0):
        super().__init__(d_head=d_head)
        self.r_emb = nn.Parameter(torch.empty(checked_rows(max_klen), d_model))  # the furthest place first

    def at_layer(self, rows: Float[Tensor, "b k m"], behind: int) -> Float[Tensor, "b k m"]:
        """The rows and the vectors of their places."""
        last = len(self.r_emb) - 1
        place = torch.arange(behind + rows.shape[1] - 1, behind - 1, -1, device=rows.device)
        return rows + self.r_emb[last - place.clamp(max=last)]


class RotaryPosition(Position):
    """Turns queries and keys by an angle for each place, so that their product knows the distance (Su et al. 2021, section 3.2).

        logits[i, j] = (T_i q_i) . (T_j k_j) / sqrt(d_head) = q_i . T_{j-i} k_j / sqrt(d_head)

    T_x turns the pair of components (c, c + d_head / 2) by x 10000^(-2c / d_head). Nothing is learned, and a distance
    cannot be clamped. Raises ValueError for an odd d_head.
    """

    def __init__(self, *, n_head: int, d_head: int, d_model: int):
        super().__init__(d_head=d_head)
        check_even("d_head", d_head)
        self.d_head = d_head

    def encode(self, n_key: int, like: Tensor) -> Float[Tensor, "r d"]:
        """Sine and cosine of each distance from the last key: its place, counted backwards."""
        return ops.distance_encoding(n_key, self.d_head, None, like.dtype, like.device)

    def forward(
        self, q: Float[Tensor, "h b i d"], k: Float[Tensor, "h b j d"], r: Float[Tensor, "n r d"]
    ) -> tuple[Float[Tensor, "h b i d"], Float[Tensor, "h b j d"], None, None]:
        """Query and key, turned."""
        places = r[0, :-1]
        return turned(q * self.scale, places[k.shape[2] - q.shape[2] :]), turned(k, places), None, None


class ALiBiPosition(Position):
    """A penalty on distance, steeper in some heads than in others, and nothing else (Press et al. 2022, section 3).

        logits[i, j] = q_i . k_j / sqrt(d_head) - s_h (m + i - j),    s_h = 2^(-8 h / n_head),  h = 1, ..., n_head

    Where n_head is no power of two, the slopes are those of the power below, and then every second one of the power above,
    as in their code. Nothing is learned. `clamp_len` (tokens): every distance beyond it counts as it. Raises ValueError for
    a clamp_len below 1.
    """

    def __init__(self, *, n_head: int, d_head: int, d_model: int, clamp_len: int | None = None):
        super().__init__(d_head=d_head)
        self.n_head, self.clamp_len = n_head, checked_clamp(clamp_len)

    def encode(self, n_key: int, like: Tensor) -> Float[Tensor, "r one"]:
        """The distances themselves."""
        distance = torch.arange(
            n_key - 1, -2, -1, dtype=torch.float64, device=like.device if _has_float64(like) else None
        )
        return distance.clamp(max=self.clamp_len or n_key)[:, None].to(like.device, like.dtype)

    def project(self, encoding: Float[Tensor, "r one"]) -> Float[Tensor, "h r one"]:
        """The penalty of each distance in each head."""
        slopes = torch.tensor(alibi_slopes(self.n_head), dtype=encoding.dtype, device=encoding.device)
        return -slopes[:, None, None] * encoding

    def forward(
        self, q: Float[Tensor, "h b i d"], k: Float[Tensor, "h b j d"], r: Float[Tensor, "h r one"]
    ) -> tuple[
        Float[Tensor, "h b i d"], Float[Tensor, "h b j d"], Float[Tensor, "h b i one"], Float[Tensor, "h r one"]
    ]:
        """The penalty is the same for all queries."""
        return q * self.scale, k, torch.ones_like(q[..., :1]), r


def turned(rows: Float[Tensor, "h b k d"], places: Float[Tensor, "k d"]) -> Float[Tensor, "h b k d"]:
    """Rows turned back by the angles whose sines, then cosines, are given."""
    (first, second), (sine, cosine) = rows.chunk(2, dim=-1), places.chunk(2, dim=-1)
    return torch.cat([first * cosine + second * sine, second * cosine - first * sine], dim=-1)


def alibi_slopes(n_head: int) -> list[float]:
    """How steep the penalty is in each head, as in the code of Press et al."""
    power = 1 << (n_head.bit_length() - 1)
    slopes = [2.0 ** (-8 * head / power) for head in range(1, power + 1)]
    return slopes + [2.0 ** (-4 * head / power) for head in range(1, 2 * (n_head - power), 2)]


def _has_float64(like: Tensor) -> bool:
    return like.device.type != "mps"


def checked_clamp(clamp_len: int | None) -> int | None:
    """Raises ValueError for a limit below 1."""
    if clamp_len is not None and not 1 <= clamp_len < 2**31:
        raise ValueError(NO_CLAMP.format(clamp_len))
    return clamp_len


def checked_rows(max_klen: int) -> int:
    """Raises ValueError for a table without rows."""
    if not 1 <= max_klen < 2**31:
        raise ValueError(f"model.position.max_klen: must be at least 1 and below 2^31, got {max_klen}")
    return max_klen


def check_even(name: str, size: int) -> None:
    """Raises ValueError for a width that no pairs of sine and cosine fill."""
    if size % 2:
        raise ValueError(f"model.{name}: must be even, since sinusoids come in pairs of sine and cosine; got {size}")
