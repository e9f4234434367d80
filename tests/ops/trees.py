"""Random token forests, packed by hand, with the per-path computation they must agree with."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from gyre.models import dense

TINY = dense.ModelConfig(vocab_size=37, num_layers=2, d_model=16, num_heads=4, num_kv_heads=2,
                         head_dim=8, d_ff=24, max_context_tokens=64)


@functools.cache
def tiny_params():
    """Random parameters of `TINY`, as numpy."""
    leaves, treedef = jax.tree.flatten(dense.abstract_params(TINY))
    rng = np.random.default_rng(0)
    return jax.tree.unflatten(treedef, [
        (rng.normal(size=p.shape) * (p.shape[-1] ** -0.5 if p.ndim > 1 else 0.2)
         + (p.ndim == 1)).astype(np.float32) for p in leaves])


@dataclasses.dataclass
class Forest:
    """Depth-first tokens of concatenated trees. `parent` i32[n] is -1 at roots."""

    tokens: np.ndarray
    parent: np.ndarray

    @property
    def size(self):
        return len(self.tokens)

    @property
    def sub_end(self):
        end = np.arange(1, self.size + 1, dtype=np.int32)
        for i in reversed(range(self.size)):
            if self.parent[i] >= 0:
                end[self.parent[i]] = max(end[self.parent[i]], end[i])
        return end

    @property
    def pos(self):
        pos = np.zeros(self.size, np.int32)
        for i, p in enumerate(self.parent):
            pos[i] = 0 if p < 0 else pos[p] + 1
        return pos

    def paths(self):
        """Root-to-leaf token indices, one list per leaf."""
        leaves = sorted(set(range(self.size)) - set(self.parent.tolist()))
        return [self.path(leaf) for leaf in leaves]

    def path(self, index):
        """Indices of the ancestors of `index`, root first, itself last."""
        path = []
        while index >= 0:
            path.append(index)
            index = int(self.parent[index])
        return path[::-1]


def random_forest(rng, trees=1, levels=3, vocab_size=TINY.vocab_size):
    """Trees that branch into 2 or 3 at every level; segments have 1 to 5 tokens."""
    tokens, parent = [], []

    def grow(above, level):
        for _ in range(rng.integers(1, 6)):
            tokens.append(rng.integers(vocab_size))
            parent.append(above)
            above = len(tokens) - 1
        if level < levels:
            for _ in range(rng.integers(2, 4)):
                grow(above, level + 1)

    for _ in range(trees):
        grow(-1, 0)
    return Forest(np.array(tokens, np.int32), np.array(parent, np.int32))


def batch_of(rng, forest, n_tokens=None, n_rows=None, train_fraction=0.7):
    """Micro-step arrays of a forest with random weights, advantages and behaviour log-probs."""
    rows = np.array([i for i in range(forest.size)
                     if forest.parent[i] >= 0 and rng.random() < train_fraction], np.int32)
    n, r = forest.size, len(rows)
    batch = {"tokens": forest.tokens, "pos": forest.pos, "pred": forest.parent,
             "sub_end": forest.sub_end, "rows": rows,
             "w": rng.uniform(0.1, 1.0, r).astype(np.float32),
             "adv": rng.normal(size=r).astype(np.float32),
             "old_logp": (-np.log(TINY.vocab_size) + rng.normal(size=r) * 0.3).astype(np.float32)}
    return pad(batch, n_tokens or n, n_rows or r)


def pad(batch, n_tokens, n_rows):
    """The same micro-step in a larger bucket."""
    n, r = len(batch["tokens"]), len(batch["rows"])
    fill = {"pred": np.full(n_tokens - n, -1), "sub_end": np.arange(n + 1, n_tokens + 1)}
    out = {}
    for name, array in batch.items():
        missing = (n_tokens - n) if name in ("tokens", "pos", "pred", "sub_end") else (n_rows - r)
        out[name] = np.concatenate(
            [array, fill.get(name, np.zeros(missing))]).astype(array.dtype)
    return out


def clipped_loss(logp, old_logp, adv, w):
    """PPO's clipped objective: a loss with both smooth and flat parts."""
    ratio = jnp.exp(logp - old_logp)
    loss = -jnp.minimum(ratio * adv, jnp.clip(ratio, 0.8, 1.2) * adv)
    return (w * loss).sum(), {"ratio_sum": (w * ratio).sum()}


def causal(q, k, v, _):
    """Plain causal attention of one sequence, written independently of the code under test."""
    n, heads, width = q.shape
    k, v = (jnp.repeat(x, heads // x.shape[1], axis=1) for x in (k, v))
    logits = jnp.einsum("nhd,mhd->hnm", q, k) / width**0.5
    logits = jnp.where(jnp.tril(jnp.ones((n, n), bool)), logits, -1e30)
    return jnp.einsum("hnm,mhd->nhd", jax.nn.softmax(logits), v), None


def per_path_loss(params, forest, batch, temperature):
    """The loss by running every root-to-leaf path alone; a token counts on its first path only.

    Paths are padded at their end to one length, which causal attention cannot see.
    """
    paths = forest.paths()
    length = max(map(len, paths))
    tokens = np.stack([np.pad(forest.tokens[path], (0, length - len(path))) for path in paths])
    first = {}  # token -> (path, depth)
    for p, path in enumerate(paths):
        for depth, token in enumerate(path):
            first.setdefault(token, (p, depth))
    real = batch["w"] > 0
    rows = batch["rows"][real]
    path_of, depth_of = np.array([first[int(t)] for t in rows]).T
    unembed = dense.unembedding(TINY, params)

    def run(path_tokens):
        hidden, _ = dense.forward(TINY, params, path_tokens, jnp.arange(length), causal)
        return jax.nn.log_softmax(hidden @ unembed.T / temperature, axis=-1)

    logps = jax.vmap(run)(tokens)[path_of, depth_of - 1, forest.tokens[rows]]
    return clipped_loss(logps, batch["old_logp"][real], batch["adv"][real], batch["w"][real])[0]


def relative_error(tree, expected):
    """Norm of the difference over the norm of `expected`, of whole pytrees."""
    def norm(t):
        return np.sqrt(sum((np.asarray(x, np.float64)**2).sum() for x in jax.tree.leaves(t)))
    return norm(jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), tree, expected)) / norm(
        expected)
