"""The decoder in plain NumPy: slow, short, and the oracle for kernels, exports and peers. Uses no kernel and no compiler.

L layers   D hidden size   H query heads   K key/value heads   E head dim   F MLP width   V vocabulary
S tokens given now   T tokens in the cache, these included   G = H // K query heads per key head

block      x += Wo attention(rope(q), rope(k), v)                 n = norm(x)
           q = Wq n [+ bias] [each head normed], k likewise, v = Wv n [+ bias]; no rope where the shape has none
           x += Wdown (silu(Wgate n) * Wup n)                     n = norm(x)
           or Wdown relu(Wup n)^2, Wdown gelu(Wup n) without a gate
norm       n_i = g_i x_i / sqrt(mean(x^2) + eps)
rope       with a = t rate_i (see rope.py):  (u_i, u_{i+E/2}) -> (u_i cos a - u_{i+E/2} sin a, u_{i+E/2} cos a + u_i sin a)
attention  head h reads key head h // G; softmax(q.k / sqrt(E)) over the positions up to its own
logits     Whead norm(x); the head is the embedding when tied
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from deepthin.engine.arrays import F32, F64
from deepthin.engine.errors import UsageError
from deepthin.engine.rope import rope_magnitude, rope_rates
from deepthin.engine.shape import Shape
from deepthin.engine.tensors import tensor_specs


class Reference:
    """A decoder with its cache, over weights that are already plain numbers.

    Args:
        shape: what the weights are of.
        weights: f32 by canonical name, rows in canonical order (``Model.dequantized()``).
        dtype: what everything is computed in; annotations below say F64, which is the default.

    Attributes:
        watch: when set, told the residual stream [S, D] behind the embedding (``token_embd``) and behind the attention and the
            MLP of each run (``blk.N.attn``, ``blk.N.ffn``).

    Raises:
        UsageError: a weight is missing or has other dimensions than the shape needs.
    """

    def __init__(self, shape: Shape, weights: Mapping[str, F32], dtype: npt.DTypeLike = np.float64) -> None:
        for spec in tensor_specs(shape):
            found = weights[spec.name].shape if spec.name in weights else None
            if found != spec.dims:
                raise UsageError(f"reference decoder: weight '{spec.name}' is {found}, but {spec.dims} is needed")
        self.shape = shape
        self._dtype = np.dtype(dtype)
        self._weights = {spec.name: np.asarray(weights[spec.name], self._dtype) for spec in tensor_specs(shape)}
        self._rates = rope_rates(shape.head_dim, shape.rope_theta, shape.rope_scaling)
        self.watch: Callable[[str, F64], None] | None = None
        self.reset()

    @property
    def position(self) -> int:
        """Tokens in the cache."""
        return self._position

    def reset(self) -> None:
        """Forget all tokens."""
        empty = np.empty((0, self.shape.num_kv_heads, self.shape.head_dim), self._dtype)
        self._keys = [empty] * self.shape.num_executed_layers
        self._values = [empty] * self.shape.num_executed_layers
        self._position = 0

    def logits(self, ids: Sequence[int]) -> F64:
        """Append ``ids`` [S] to the cache; returns the logits behind each of them, [S, V].

        Raises:
            UsageError: no id, one outside the vocabulary, or more tokens than ``max_seq_len``.
        """
        tokens = np.asarray(ids, np.int64)
        if tokens.ndim != 1 or not tokens.size or tokens.min() < 0 or tokens.max() >= self.shape.vocab_size:
            raise UsageError(f"reference decoder: token ids must be one or more numbers from 0 to {self.shape.vocab_size - 1}")
        if self._position + tokens.size > self.shape.max_seq_len:
            raise UsageError(
                f"reference decoder: {self._position + tokens.size} tokens exceed the context of {self.shape.max_seq_len}"
            )
        x = self._weights["token_embd"][tokens]
        self._tell("token_embd", x)
        for run in range(self.shape.num_executed_layers):
            x = self._block(run, x)
        self._position += tokens.size
        return self._product(self._norm(x, "output_norm"), "token_embd" if self.shape.tie_word_embeddings else "output")

    def _block(self, run: int, x: F64) -> F64:
        """Run number ``run`` of a block on x [S, D]; each run has a cache of its own, shared blocks share weights."""
        name = f"blk.{run // self.shape.layer_sharing}."
        x = x + self._product(self._attention(run, name, self._norm(x, name + "attn_norm")), name + "attn_output")
        self._tell(f"blk.{run}.attn", x)
        n = self._norm(x, name + "ffn_norm")
        inner = self._product(n, name + "ffn_up")
        if self.shape.mlp == "swiglu":
            inner = _silu(self._product(n, name + "ffn_gate")) * inner
        else:
            inner = np.maximum(inner, 0) ** 2 if self.shape.mlp == "relu2" else _gelu(inner)
        x = x + self._product(inner, name + "ffn_down")
        self._tell(f"blk.{run}.ffn", x)
        return x

    def _attention(self, run: int, name: str, n: F64) -> F64:
        """Append keys and values of n [S, D], then attend; returns [S, H·E]."""
        tokens, width = len(n), self.shape.head_dim
        q, k, v = (self._heads(n, f"{name}attn_{part}") for part in "qkv")
        if self.shape.qk_norm:
            q, k = self._norm(q, name + "attn_q_norm"), self._norm(k, name + "attn_k_norm")
        if self.shape.has_rope(run // self.shape.layer_sharing):
            q, k = self._rope(q), self._rope(k)
        keys = self._keys[run] = np.concatenate([self._keys[run], k])
        values = self._values[run] = np.concatenate([self._values[run], v])
        group = self.shape.num_heads // self.shape.num_kv_heads
        future = np.arange(len(keys))[None, :] > self._position + np.arange(tokens)[:, None]  # [S, T]
        out = np.empty_like(q)
        for h in range(self.shape.num_heads):
            scores = q[:, h] @ keys[:, h // group].T / math.sqrt(width)
            scores[future] = -np.inf
            out[:, h] = _softmax(scores) @ values[:, h // group]
        return out.reshape(tokens, -1)

    def _heads(self, n: F64, name: str) -> F64:
        """One of the three projections of n [S, D], its bias added: [S, heads, E]."""
        out = self._product(n, name)
        if self.shape.qkv_bias:
            out = out + self._weights[name + ".bias"]
        return out.reshape(len(n), -1, self.shape.head_dim)

    def _product(self, n: F64, name: str) -> F64:
        """Multiply n [S, in] by the transpose of a matrix [out, in]; the one place where weights meet activations."""
        out: F64 = n @ self._weights[name].T
        return out

    def _tell(self, point: str, stream: F64) -> None:
        if self.watch is not None:
            self.watch(point, stream)

    def _rope(self, u: F64) -> F64:
        """Turn u [S, heads, E] by the positions that follow the cache; angles are always f64."""
        angles = (self._position + np.arange(len(u)))[:, None] * self._rates[None, :]
        magnitude = rope_magnitude(self.shape.rope_scaling)
        cos, sin = ((f(angles) * magnitude).astype(self._dtype)[:, None, :] for f in (np.cos, np.sin))
        first, second = np.split(u, 2, axis=-1)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def _norm(self, x: F64, name: str) -> F64:
        mean_square = np.mean(x * x, axis=-1, keepdims=True)
        out: F64 = x / np.sqrt(mean_square + self.shape.rms_norm_eps) * self._weights[name]
        return out


def _silu(x: F64) -> F64:
    """Return x sigmoid(x), through tanh so that no exponential overflows."""
    out: F64 = x * (1 + np.tanh(x / 2)) / 2
    return out


def _gelu(x: F64) -> F64:
    """The tanh form, x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2 (Hendrycks and Gimpel, arXiv 1606.08415, section 2)."""
    out: F64 = x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2
    return out


def _softmax(scores: F64) -> F64:
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    out: F64 = weights / weights.sum(axis=-1, keepdims=True)
    return out
