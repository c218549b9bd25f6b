# SPDX-License-Identifier: Apache-2.0
"""A slow engine in numpy and float64: one request, one row at a time in the books, greedy.

It keeps keys and values of every position of every layer, and says of each step which rows run.
"""

import numpy as np


def norm(x, scale, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * scale


class SlowModel:
    """A llama's layers, and the head."""

    def __init__(self, config, params):
        self.config = config

        def wide(tree):
            return {
                k: wide(v) if isinstance(v, dict) else np.asarray(v, np.float64)
                for k, v in tree.items()
            }

        self.params = wide(params)

    def embed(self, tokens):
        return self.params["embed"][np.asarray(tokens)]

    def project(self, layer, x, places):
        """Queries, keys and values [n, heads, e] of rows."""
        c, block = self.config, self.params["blocks"]
        part = block["attention"]
        y = norm(x, block["attention_norm"]["scale"][layer], c.norm_eps)
        out = []
        for name in ("query", "key", "value"):
            z = y @ part[name][layer]
            if c.qkv_bias:
                z = z + part[f"{name}_bias"][layer]
            out.append(z.reshape(len(x), -1, c.head_dim))
        q, k, v = out
        half = c.head_dim // 2
        angles = np.asarray(places)[:, None, None] * c.rope_theta ** (-np.arange(half) / half)
        cos, sin = np.cos(angles), np.sin(angles)

        def turn(z):
            first, second = z[..., :half], z[..., half:]
            return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

        return turn(q), turn(k), v

    def attend(self, q, k, v):
        """Each query over all keys."""
        group = q.shape[1] // k.shape[1]
        k, v = (np.repeat(z, group, axis=1) for z in (k, v))
        scores = np.einsum("the,she->hts", q, k) / np.sqrt(q.shape[-1])
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return np.einsum("hts,she->the", weights, v).reshape(len(q), -1)

    def finish(self, layer, x, mixed):
        block, c = self.params["blocks"], self.config
        x = x + mixed @ block["attention"]["out"][layer]
        y = norm(x, block["mlp_norm"]["scale"][layer], c.norm_eps)
        gate = y @ block["mlp"]["gate"][layer]
        hidden = gate / (1 + np.exp(-gate)) * (y @ block["mlp"]["up"][layer])
        return x + hidden @ block["mlp"]["down"][layer]

    def logits(self, x):
        c = self.config
        table = self.params["embed"] if c.tied else self.params["head"]
        return norm(x, self.params["norm"]["scale"], c.norm_eps) @ table[: c.vocab_size].T


def build(model, segments, depth, masks=0, mask_id=None):
    """(keys, values by layer below `depth`, hidden state at every depth) of a prefix, segment after
    segment; `masks` of them stand behind each while it is built."""
    kept = [(None, None)] * depth
    hidden = [np.zeros((0, model.config.dim))] * (depth + 1)
    first = 0
    for tokens in segments:
        n = len(tokens)
        x = model.embed([*tokens, *[mask_id] * masks])
        places = first + np.arange(len(x))
        for layer in range(depth):
            hidden[layer] = np.concatenate([hidden[layer], x[:n]])
            q, k, v = model.project(layer, x, places)
            before = kept[layer]
            both = [
                new if old is None else np.concatenate([old, new])
                for old, new in zip(before, (k, v), strict=True)
            ]
            x = model.finish(layer, x, model.attend(q, *both))
            kept[layer] = tuple(z[: first + n] for z in both)
        hidden[depth] = np.concatenate([hidden[depth], x[:n]])
        first += n
    return kept, hidden


def answer(model, request, policy, mask_id, segments=(), depth=0, masks=0, trace=None):
    """Tokens after the last step. `depth` counts where the policy shares; `trace` receives the
    logits [w, vocab] of each step's masked positions."""
    c, ask = model.config, request.sampling
    tokens = np.array(request.tokens)
    prefix = 0 if policy.name == "none" else sum(segments)
    if not policy.shared:
        depth = 0
    parts = np.split(tokens[:prefix], np.cumsum(segments)[:-1]) if prefix else []
    size = (len(tokens), c.kv_heads, c.head_dim)
    keys, values = np.zeros((c.layers, *size)), np.zeros((c.layers, *size))
    stored, hidden = build(model, parts, depth, masks, mask_id)
    for layer in range(depth if prefix else 0):
        keys[layer, :prefix], values[layer, :prefix] = stored[layer]
    places = np.flatnonzero(tokens == mask_id)
    places = places[places >= request.begin]
    first, last = places[0], places[-1] + 1
    steps, block = min(ask.steps or len(places), len(places)), ask.block or last - first
    since = 0
    for begin in range(first, last, block):
        end = min(begin + block, last)
        count, left = (int((tokens[begin:stop] == mask_id).sum()) for stop in (end, last))
        if not count:
            continue
        since, step = 0, 0
        share = min(max(int(steps * count / left), 1), count)
        while (tokens[begin:end] == mask_id).any():
            start = max(begin - c.shifted, prefix)
            suffix = {
                "suffix": np.arange(prefix, len(tokens)),
                "rest": np.arange(start, len(tokens)),
                "block": np.arange(start, end),
            }[policy.window if since else "suffix"]
            x, at = model.embed(tokens[suffix]), suffix
            for layer in range(c.layers):
                if since == 0 and prefix and layer == depth:
                    y = hidden[depth] if depth else model.embed(tokens[:prefix])
                    x, at = np.concatenate([y, x]), np.concatenate([np.arange(prefix), suffix])
                q, keys[layer, at], values[layer, at] = model.project(layer, x, at)
                x = model.finish(layer, x, model.attend(q, keys[layer], values[layer]))
            x = x[len(at) - len(suffix) :]
            wanted = np.flatnonzero(tokens[begin:end] == mask_id) + begin
            found = model.logits(x[wanted - c.shifted - suffix[0]])
            if trace is not None:
                trace.append(found.copy())
            found[:, mask_id] = -np.inf
            probs = np.exp(found - found.max(-1, keepdims=True))
            probs /= probs.sum(-1, keepdims=True)
            score = probs.max(-1)
            fills = count // share + (step < count % share)
            if ask.policy == "threshold":
                fills = max(int((score >= ask.threshold).sum()), 1)
            best = np.argsort(-score, kind="stable")[:fills]
            tokens[wanted[best]] = probs[best].argmax(-1)
            step, steps, since = step + 1, steps - 1, since + 1
            if policy.every and since >= policy.every:
                since = 0
    return tokens
