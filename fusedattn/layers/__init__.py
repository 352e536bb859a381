"""Layers of standard transformers, and a recurrent decoder, which use `fusedattn.MultiHeadAttention`.

`backend="naive"` computes attention by the plain formula. True in a mask = may attend.
"""

import inspect
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.types import Device

from ..call.checks import as_python, check_floating, check_names, check_place, check_sizes, fail
from .attention import MultiHeadAttention, check_fits, check_input, check_layer


def _check_ids(name: str, ids: Tensor, shape: tuple[str, ...], table: nn.Embedding) -> None:
    check_input(name, ids, shape)
    if not isinstance(ids, fx.Proxy):
        if ids.dtype not in (torch.int32, torch.int64):
            fail(TypeError, name, "int32 or int64", ids.dtype)
        check_fits(name, ids, table, same_dtype=False)


def _look_up(table: nn.Embedding, name: str, ids: Tensor) -> Tensor:
    """Return the embeddings of ids. Raise for an id outside the table; on a GPU, torch's assert ends the program."""
    try:
        return table(ids)  # type: ignore[no-any-return]
    except IndexError:
        fail(ValueError, name, f"ids from 0 to {table.num_embeddings - 1}", f"{ids.min()} to {ids.max()}")


# IMPLEMENTED: {attribute of a config: its only supported value}. OPTIONS: {attribute of a config: option of a layer}.
IMPLEMENTED = dict(hidden_act="gelu", position_embedding_type="absolute", is_decoder=False, add_cross_attention=False)
OPTIONS = dict(hidden_dropout_prob="dropout", attention_probs_dropout_prob="attention_dropout")
OPTIONAL = "attention_probs_dropout_prob", "layer_norm_eps"  # attributes that a config may lack
_Layer = TypeVar("_Layer", bound="_Configurable")


class _Configurable(nn.Module):
    """Module with `from_config`. READS: config attributes that become options or must equal those of IMPLEMENTED."""

    READS: tuple[str, ...]

    @classmethod
    def from_config(cls: type[_Layer], config: Any, **options: Any) -> _Layer:
        """Return a module with the sizes, dropouts and eps of a BertConfig or a similar object; options override them.

        Examples:
            >>> from types import SimpleNamespace
            >>> config = SimpleNamespace(hidden_size=64, intermediate_size=256, hidden_dropout_prob=0.1)
            >>> layer = fusedattn.layers.FeedForward.from_config(config)

        Raises ValueError for a config that needs more than this module implements, TypeError for a missing attribute.
        """
        read = {}
        for name in cls.READS:
            if name in IMPLEMENTED:
                if (x := getattr(config, name, IMPLEMENTED[name])) != IMPLEMENTED[name]:
                    fail(ValueError, f"config.{name}", repr(IMPLEMENTED[name]), f"{x!r}, which {cls.__name__} lacks")
            elif hasattr(config, name):
                read[OPTIONS.get(name, name)] = getattr(config, name)
            elif name not in OPTIONAL:
                fail(TypeError, "config", f"an object with {name}", type(config).__name__)
        return cls(**read | options)


@fx.wrap
def _add_positions(x: Tensor, pe: Tensor) -> Tensor:
    check_floating("x", x, pe.device, "pe")
    if x.shape[1] > len(pe):
        fail(ValueError, "x", f"a length of at most {len(pe)}", x.shape[1])
    return x + pe[: x.shape[1]].to(x.dtype)


class SinusoidalPositionalEncoding(nn.Module):
    """Positions P[:S] added to x (B, S, E): P[i, 2j] = sin(i / 10000^(2j/E)), P[i, 2j+1] = cos(i / 10000^(2j/E)).

    Examples:
        >>> layer = fusedattn.layers.SinusoidalPositionalEncoding(512, 1000)
        >>> out = layer(torch.zeros(2, 100, 512))  # (2, 100, 512)

    P is the buffer `pe` (max_len, E), float64 by default; the output has x's dtype. The state dict leaves it out, so
    that weights load for any max_len. After `to_empty` call `reset_parameters`.

    Source: Attention is all you need, arXiv:1706.03762, section 3.5.
    """

    pe: Tensor

    def __init__(self, embed_dim: int, max_len: int, *, device: Device = None, dtype: torch.dtype = torch.float64):
        super().__init__()
        self.embed_dim, self.max_len = embed_dim, max_len = check_sizes(embed_dim=embed_dim, max_len=max_len)
        check_layer(dtype)
        self.register_buffer("pe", torch.empty(max_len, embed_dim, device=device, dtype=dtype), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Compute P into the buffer `pe`, in its dtype and on its device."""
        powers = torch.arange(0, self.embed_dim, 2, device=self.pe.device).double() / self.embed_dim
        positions = torch.arange(self.max_len, device=self.pe.device).double()
        angles = positions[:, None] / 10000.0**powers  # (max_len, ceil(E / 2))
        self.pe[:, 0::2] = angles.sin()
        self.pe[:, 1::2] = angles[:, : self.embed_dim // 2].cos()

    def forward(self, x: Tensor) -> Tensor:
        """Return x (B, S, E) plus P[:S], in x's dtype. Raises if x is not floating or S > max_len."""
        check_input("x", x, ("batch", "length", self.embed_dim))
        return _add_positions(x, self.pe)

    def extra_repr(self) -> str:
        return f"embed_dim={self.embed_dim}, max_len={self.max_len}"


@fx.wrap
def _positions(input_ids: Tensor, max_length: int) -> Tensor:
    length = input_ids.shape[1]
    if length > max_length:
        fail(ValueError, "input_ids", f"a length of at most {max_length}", length)
    return torch.arange(length, device=input_ids.device)


class Embeddings(_Configurable):
    """Embeddings (B, S, hidden) of ids: dropout(layer_norm(token_embeddings(ids) + position_embeddings(0..S-1))).

    Examples:
        >>> layer = fusedattn.layers.Embeddings(1000, 64, 128)
        >>> out = layer(torch.randint(1000, (2, 100)))  # (2, 100, 64)

    layer_norm_eps is added to the variance; factory is the device and dtype of the parameters.

    Source: BERT, arXiv:1810.04805, section 3, without its token types.
    """

    READS: tuple[str, ...] = ("position_embedding_type", "vocab_size", "hidden_size", "max_position_embeddings")
    READS += ("hidden_dropout_prob", "layer_norm_eps")

    def __init__(
        self, vocab_size: int, hidden_size: int, max_position_embeddings: int, dropout: float = 0.0, *,
        layer_norm_eps: float = 1e-12, **factory: Any,
    ):  # fmt: skip
        super().__init__()
        vocab_size, hidden_size, max_position_embeddings = check_sizes(
            vocab_size=vocab_size, hidden_size=hidden_size, max_position_embeddings=max_position_embeddings
        )
        check_layer(factory.get("dtype"), layer_norm_eps, dropout=dropout)
        self.token_embeddings = nn.Embedding(vocab_size, hidden_size, **factory)
        self.position_embeddings = nn.Embedding(max_position_embeddings, hidden_size, **factory)
        self.layer_norm = nn.LayerNorm(hidden_size, eps=as_python(layer_norm_eps), **factory)
        self.dropout = nn.Dropout(as_python(dropout))

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return embeddings (B, S, hidden) of ids (B, S), int32 or int64. Raises ValueError or TypeError otherwise."""
        _check_ids("input_ids", input_ids, ("batch", "length"), self.token_embeddings)
        positions = self.position_embeddings(_positions(input_ids, self.position_embeddings.num_embeddings))
        tokens = _look_up(self.token_embeddings, "input_ids", input_ids)
        return self.dropout(self.layer_norm(tokens + positions))  # type: ignore[no-any-return]


class FeedForward(_Configurable):
    """Feed-forward network: dropout(linear_2(gelu(linear_1(x)))) for x (..., hidden), with the exact gelu.

    Examples:
        >>> layer = fusedattn.layers.FeedForward(64, 256)
        >>> out = layer(torch.randn(2, 100, 64))  # (2, 100, 64)

    factory is the device and dtype of the parameters.
    """

    READS = ("hidden_act", "hidden_size", "intermediate_size", "hidden_dropout_prob")

    def __init__(self, hidden_size: int, intermediate_size: int, dropout: float = 0.0, **factory: Any):
        super().__init__()
        hidden_size, intermediate_size = check_sizes(hidden_size=hidden_size, intermediate_size=intermediate_size)
        check_layer(factory.get("dtype"), dropout=dropout)
        self.hidden_size = hidden_size
        self.linear_1 = nn.Linear(hidden_size, intermediate_size, **factory)
        self.linear_2 = nn.Linear(intermediate_size, hidden_size, **factory)
        self.dropout = nn.Dropout(as_python(dropout))

    def forward(self, x: Tensor) -> Tensor:
        """Return the output for x (..., hidden), of the same shape. Raises ValueError for another width."""
        if not isinstance(x, fx.Proxy):
            if getattr(x, "layout", None) != torch.jagged:
                check_place("x", x)
            if x.shape[-1:] != (self.hidden_size,):
                fail(ValueError, "x", f"shape (..., {self.hidden_size})", x.shape)
            check_fits("x", x, self.linear_1)
        return self.dropout(self.linear_2(F.gelu(self.linear_1(x))))  # type: ignore[no-any-return]


# Options that a TransformerEncoderLayer passes to its attention. Its keys and values are as wide as its queries.
_OPTIONS = set(inspect.signature(MultiHeadAttention).parameters) - {"embed_dim", "num_heads", "kdim", "vdim", "dropout"}


class TransformerEncoderLayer(_Configurable):
    """Pre-norm transformer layer: x = x + attention(layer_norm_1(x)); x = x + feed_forward(layer_norm_2(x)).

    Examples:
        >>> layer = fusedattn.layers.TransformerEncoderLayer(512, 8, 2048)
        >>> out = layer(torch.randn(2, 100, 512))  # (2, 100, 512)

    The attention weights are `layer.attention(layer.layer_norm_1(x), need_weights=True)[1]`, (B, H, S, S).

    Args:
        hidden_size, num_attention_heads, intermediate_size: E, H, and the width inside `feed_forward`.
        dropout, attention_dropout: probabilities for `feed_forward`'s output and for attention weights, in training.
        layer_norm_eps: added to the variance by the norms.
        options: those of `fusedattn.MultiHeadAttention`, such as head_dim, scale, causal and backend.

    Source: On layer normalization in the transformer architecture, arXiv:2002.04745, figure 1 (b).
    """

    READS = (*IMPLEMENTED, "hidden_size", "num_attention_heads", "intermediate_size", *OPTIONS, "layer_norm_eps")

    def __init__(
        self, hidden_size: int, num_attention_heads: int, intermediate_size: int, dropout: float = 0.0, *,
        attention_dropout: float = 0.0, layer_norm_eps: float = 1e-5,
        device: Device = None, dtype: torch.dtype | None = None, **options: Any,
    ):  # fmt: skip
        super().__init__()
        check_names(type(self).__name__, options, _OPTIONS)
        hidden_size, num_attention_heads = check_sizes(hidden_size=hidden_size, num_attention_heads=num_attention_heads)
        if options.get("head_dim") is None and hidden_size % num_attention_heads:
            got = f"{num_attention_heads}: pass head_dim if that is meant"
            fail(ValueError, "num_attention_heads", f"a divisor of hidden_size, {hidden_size}", got)
        check_layer(dtype, layer_norm_eps, attention_dropout=attention_dropout)
        factory: dict[str, Any] = dict(device=device, dtype=dtype)
        self.layer_norm_1 = nn.LayerNorm(hidden_size, eps=as_python(layer_norm_eps), **factory)
        self.layer_norm_2 = nn.LayerNorm(hidden_size, eps=as_python(layer_norm_eps), **factory)
        options |= dict(dropout=attention_dropout, **factory)
        self.attention = MultiHeadAttention(hidden_size, num_attention_heads, **options)
        self.feed_forward = FeedForward(hidden_size, intermediate_size, dropout, **factory)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, key_mask: Tensor | None = None) -> Tensor:
        """Return the output (B, S, E) for x (B, S, E). mask and key_mask are as in `fusedattn.MultiHeadAttention`."""
        check_input("x", x, ("batch", "length", self.attention.embed_dim), self.layer_norm_1, jagged=True)
        x = x + self.attention(self.layer_norm_1(x), mask=mask, key_mask=key_mask)[0]
        return x + self.feed_forward(self.layer_norm_2(x))  # type: ignore[no-any-return]


class TransformerEncoder(_Configurable):
    """A stack of num_hidden_layers `TransformerEncoderLayer`, without a norm after the last.

    Examples:
        >>> encoder = fusedattn.layers.TransformerEncoder(2, 64, 4, 256)
        >>> out = encoder(torch.randn(2, 100, 64))  # (2, 100, 64)

    sizes and options are the arguments of `TransformerEncoderLayer`.
    """

    READS = (*TransformerEncoderLayer.READS, "num_hidden_layers")

    def __init__(self, num_hidden_layers: int, *sizes: Any, **options: Any):
        super().__init__()
        check_sizes(num_hidden_layers=num_hidden_layers)
        self.layers = nn.ModuleList(TransformerEncoderLayer(*sizes, **options) for _ in range(num_hidden_layers))

    def forward(self, x: Tensor, mask: Tensor | None = None, *, key_mask: Tensor | None = None) -> Tensor:
        """Return the output (B, S, E) for x (B, S, E). Every layer gets the same mask and key_mask."""
        for layer in self.layers:
            x = layer(x, mask, key_mask=key_mask)
        return x


class AttentionDecoder(nn.Module):
    """One step of a recurrent sequence-to-sequence decoder with attention to the encoder's outputs.

    The hidden state is the query of each of `attentions`; `fc_attn` maps their outputs to one context. The GRU `rnn`
    takes the token's embedding and the context. `fc` maps the GRU's output, the context and the embedding to logits.

    Examples:
        >>> decoder, hidden = fusedattn.layers.AttentionDecoder(1000, 64, 128, 256), torch.zeros(2, 128)
        >>> encoder_outputs, target = torch.randn(2, 30, 256), torch.randint(1000, (2, 5))
        >>> for tokens in target.T:
        ...     logits, hidden, _ = decoder(tokens, hidden, encoder_outputs)

    Args:
        embed_size, hidden_size: the widths of the embeddings and of the state.
        encoder_size: the width of encoder_outputs and of the context.
        num_attentions, num_heads: the number of attentions, and the number of heads in each.
        dropout, scale, backend: as in `fusedattn.MultiHeadAttention`.
        factory: the device and dtype of the parameters.

    Source: arXiv:1409.0473, with the attention of arXiv:1706.03762 in place of its own.
    """

    def __init__(
        self, vocab_size: int, embed_size: int, hidden_size: int, encoder_size: int, num_attentions: int = 2,
        num_heads: int = 1, dropout: float = 0.0, *, scale: float | None = None, backend: str | None = None,
        **factory: Any,
    ):  # fmt: skip
        super().__init__()
        vocab_size, embed_size, hidden_size, encoder_size = check_sizes(
            vocab_size=vocab_size, embed_size=embed_size, hidden_size=hidden_size, encoder_size=encoder_size
        )
        num_attentions, num_heads = check_sizes(num_attentions=num_attentions, num_heads=num_heads)
        if hidden_size % num_heads:
            fail(ValueError, "num_heads", f"a divisor of hidden_size, {hidden_size}", num_heads)
        check_layer(factory.get("dtype"))
        self.hidden_size, self.encoder_size = hidden_size, encoder_size
        options = factory | dict(kdim=encoder_size, vdim=encoder_size, dropout=dropout, scale=scale, backend=backend)
        attentions = (MultiHeadAttention(hidden_size, num_heads, **options) for _ in range(num_attentions))
        self.embedding, self.attentions = nn.Embedding(vocab_size, embed_size, **factory), nn.ModuleList(attentions)
        self.fc_attn = nn.Linear(num_attentions * hidden_size, encoder_size, **factory)
        self.rnn = nn.GRU(embed_size + encoder_size, hidden_size, batch_first=True, **factory)
        self.fc = nn.Linear(hidden_size + encoder_size + embed_size, vocab_size, **factory)

    def forward(
        self, input: Tensor, hidden: Tensor, encoder_outputs: Tensor, *,
        key_mask: Tensor | None = None, need_weights: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        """Compute one decoding step: the logits, the next state and the attention weights.

        Args:
            input: (B,) ids of the previous tokens, int32 or int64.
            hidden, encoder_outputs: the state (B, hidden_size), and (B, S, encoder_size).
            key_mask: bool (B, S), True = a real token of the source.
            need_weights: also return the weights, after dropout.

        Returns:
            (logits (B, vocab_size), state (B, hidden_size), weights (B, num_attentions, num_heads, S) or None).
        """
        _check_ids("input", input, ("batch",), self.embedding)
        check_input("hidden", hidden, (input.shape[0], self.hidden_size), self.embedding)
        check_input("encoder_outputs", encoder_outputs, (input.shape[0], "length", self.encoder_size), self.embedding)
        embedded = _look_up(self.embedding, "input", input)
        options = dict(key_mask=key_mask, need_weights=need_weights)
        attended = [attention(hidden[:, None], encoder_outputs, **options) for attention in self.attentions]
        context = self.fc_attn(torch.cat([out[:, 0] for out, _ in attended], -1))  # (B, encoder_size)
        # cuDNN takes contiguous states only.
        outputs, state = self.rnn(torch.cat([embedded, context], -1)[:, None], hidden[None].contiguous())
        logits = self.fc(torch.cat([outputs[:, 0], context, embedded], -1))
        weights = torch.stack([weight[:, :, 0] for _, weight in attended], 1) if need_weights else None
        return logits, state[0], weights
