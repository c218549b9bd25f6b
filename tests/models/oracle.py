# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's Llama, Qwen2, GPT-2 and BERT, LLaDA and Dream in float64 numpy, from their config
keys and tensor names.

Written from those models' papers and that library's names alone, without our config, parameters or
tables of names, so that a mistake there cannot be repeated here.
"""

import math

import numpy as np


def llama_file(hf, rng):
    """Random tensors of a LlamaForCausalLM: projections are [out, in]."""
    d, f, v = hf["hidden_size"], hf["intermediate_size"], hf["vocab_size"]
    kv = d // hf["num_attention_heads"] * hf["num_key_value_heads"]
    shapes = {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,)}
    for i in range(hf["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.self_attn.{n}_proj.weight": (d, d) for n in "qo"}
        shapes |= {f"{layer}.self_attn.{n}_proj.weight": (kv, d) for n in "kv"}
        shapes |= {f"{layer}.mlp.{n}_proj.weight": (f, d) for n in ("gate", "up")}
        shapes[f"{layer}.mlp.down_proj.weight"] = (d, f)
        shapes[f"{layer}.input_layernorm.weight"] = (d,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (d,)
    if not hf["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (v, d)
    return _draw(shapes, rng)


def qwen2_file(hf, rng):
    """Random tensors of a Qwen2ForCausalLM or a DreamModel: a Llama's and three biases a layer."""
    d = hf["hidden_size"]
    kv = d // hf["num_attention_heads"] * hf["num_key_value_heads"]
    biases = {
        f"model.layers.{i}.self_attn.{name}_proj.bias": (width,)
        for i in range(hf["num_hidden_layers"])
        for name, width in (("q", d), ("k", kv), ("v", kv))
    }
    return llama_file(hf, rng) | _draw(biases, rng)


def llada_file(hf, rng):
    """Random tensors of a LLaDAModelLM: projections are [out, in]."""
    d, f, v = hf["d_model"], hf["mlp_hidden_size"], hf["embedding_size"]
    kv = d // hf["n_heads"] * hf["n_kv_heads"]
    widths = {
        "attn_norm": (d,),
        "q_proj": (d, d),
        "k_proj": (kv, d),
        "v_proj": (kv, d),
        "attn_out": (d, d),
        "ff_norm": (d,),
        "ff_proj": (f, d),
        "up_proj": (f, d),
        "ff_out": (d, f),
    }
    shapes = {"wte": (v, d), "ln_f": (d,)}
    if not hf["weight_tying"]:
        shapes["ff_out"] = (v, d)
    shapes |= {
        f"blocks.{i}.{n}": shape for i in range(hf["n_layers"]) for n, shape in widths.items()
    }
    return _draw({f"model.transformer.{n}.weight": shape for n, shape in shapes.items()}, rng)


def gpt2_file(hf, rng):
    """Random tensors of a GPT2LMHeadModel: its Conv1D weights are [in, out]."""
    d, f, v = hf["n_embd"], hf["n_inner"] or 4 * hf["n_embd"], hf["vocab_size"]
    shapes = {"transformer.wte.weight": (v, d), "transformer.wpe.weight": (hf["n_positions"], d)}
    shapes |= {f"transformer.ln_f.{part}": (d,) for part in ("weight", "bias")}
    for i in range(hf["n_layer"]):
        for name, (rows, columns) in {
            "attn.c_attn": (d, 3 * d),
            "attn.c_proj": (d, d),
            "mlp.c_fc": (d, f),
            "mlp.c_proj": (f, d),
        }.items():
            shapes[f"transformer.h.{i}.{name}.weight"] = (rows, columns)
            shapes[f"transformer.h.{i}.{name}.bias"] = (columns,)
        for name in ("ln_1.weight", "ln_1.bias", "ln_2.weight", "ln_2.bias"):
            shapes[f"transformer.h.{i}.{name}"] = (d,)
    return _draw(shapes, rng)


def bert_file(hf, rng):
    """Random tensors of a BertForMaskedLM: dense weights are [out, in]."""
    d, f, v = hf["hidden_size"], hf["intermediate_size"], hf["vocab_size"]
    shapes = {
        "bert.embeddings.word_embeddings.weight": (v, d),
        "bert.embeddings.position_embeddings.weight": (hf["max_position_embeddings"], d),
        "bert.embeddings.token_type_embeddings.weight": (hf["type_vocab_size"], d),
        "cls.predictions.bias": (v,),
        "cls.predictions.transform.dense.weight": (d, d),
        "cls.predictions.transform.dense.bias": (d,),
    }
    norms = ["bert.embeddings.LayerNorm", "cls.predictions.transform.LayerNorm"]
    for i in range(hf["num_hidden_layers"]):
        layer = f"bert.encoder.layer.{i}"
        for name, (out, width) in {
            "attention.self.query": (d, d),
            "attention.self.key": (d, d),
            "attention.self.value": (d, d),
            "attention.output.dense": (d, d),
            "intermediate.dense": (f, d),
            "output.dense": (d, f),
        }.items():
            shapes[f"{layer}.{name}.weight"] = (out, width)
            shapes[f"{layer}.{name}.bias"] = (out,)
        norms += [f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm"]
    shapes |= {f"{norm}.{part}": (d,) for norm in norms for part in ("weight", "bias")}
    return _draw(shapes, rng)


def llama(tensors, hf, tokens, positions, segments, causal=True):
    """Logits [b, t, V]; of a Qwen2 too, which has biases, and with all visible where not causal."""
    p, shape = _wide(tensors), _Shape(hf, "num_attention_heads", "num_key_value_heads")

    def layer(i):
        at = lambda name: p.get(f"model.layers.{i}.{name}")  # noqa: E731
        return {
            "attention_norm": at("input_layernorm.weight"),
            **{
                n: (at(f"self_attn.{n}_proj.weight"), at(f"self_attn.{n}_proj.bias")) for n in "qkv"
            },
            "out": at("self_attn.o_proj.weight"),
            "mlp_norm": at("post_attention_layernorm.weight"),
            **{n: at(f"mlp.{n}_proj.weight") for n in ("gate", "up", "down")},
        }

    x = p["model.embed_tokens.weight"][tokens]
    layers = map(layer, range(hf["num_hidden_layers"]))
    x = _llama_layers(x, layers, shape, positions, segments, causal)
    head = "model.embed_tokens" if hf["tie_word_embeddings"] else "lm_head"
    return _rms(x, p["model.norm.weight"], shape.eps) @ p[f"{head}.weight"].T


def dream(tensors, hf, tokens, positions, segments):
    """Logits [b, t, V] as the head gives them: row i is about token i + 1."""
    return llama(tensors, hf, tokens, positions, segments, causal=False)


def llada(tensors, hf, tokens, positions, segments):
    """Logits [b, t, V]."""
    p, shape = _wide(tensors), _Shape(hf, "n_heads", "n_kv_heads")
    stem = "model.transformer"

    def layer(i):
        at = lambda name: p[f"{stem}.blocks.{i}.{name}.weight"]  # noqa: E731
        return {
            "attention_norm": at("attn_norm"),
            **{n: (at(f"{n}_proj"), None) for n in "qkv"},
            "out": at("attn_out"),
            "mlp_norm": at("ff_norm"),
            "gate": at("ff_proj"),
            "up": at("up_proj"),
            "down": at("ff_out"),
        }

    x = p[f"{stem}.wte.weight"][tokens]
    layers = map(layer, range(hf["n_layers"]))
    x = _llama_layers(x, layers, shape, positions, segments, False)
    head = "wte" if hf["weight_tying"] else "ff_out"
    return _rms(x, p[f"{stem}.ln_f.weight"], shape.eps) @ p[f"{stem}.{head}.weight"].T


def gpt2(tensors, hf, tokens, positions, segments):
    """Logits [b, t, V]."""
    p, eps, size = _wide(tensors), hf["layer_norm_epsilon"], hf["n_embd"] // hf["n_head"]
    part = lambda name: (p[f"transformer.{name}.weight"], p[f"transformer.{name}.bias"])  # noqa: E731
    x = p["transformer.wte.weight"][tokens] + p["transformer.wpe.weight"][positions]
    for i in range(hf["n_layer"]):
        weight, bias = part(f"h.{i}.attn.c_attn")
        fused = _layer_norm(x, *part(f"h.{i}.ln_1"), eps) @ weight + bias
        q, k, v = (_heads(y, size) for y in np.split(fused, 3, axis=-1))
        weight, bias = part(f"h.{i}.attn.c_proj")
        x = x + _attend(q, k, v, segments, True) @ weight + bias
        weight, bias = part(f"h.{i}.mlp.c_fc")
        h = _layer_norm(x, *part(f"h.{i}.ln_2"), eps) @ weight + bias
        h = 0.5 * h * (1 + np.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
        weight, bias = part(f"h.{i}.mlp.c_proj")
        x = x + h @ weight + bias
    return _layer_norm(x, *part("ln_f"), eps) @ p["transformer.wte.weight"].T


def bert(tensors, hf, tokens, positions, segments, types=0):
    """Logits [b, t, V] of the masked-LM head; `types` are token types, one or [b, t]."""
    p, eps = _wide(tensors), hf["layer_norm_eps"]
    size = hf["hidden_size"] // hf["num_attention_heads"]
    part = lambda name: (p[f"{name}.weight"], p[f"{name}.bias"])  # noqa: E731

    def dense(x, name):
        weight, bias = part(name)
        return x @ weight.T + bias

    x = p["bert.embeddings.word_embeddings.weight"][tokens]
    x = x + p["bert.embeddings.position_embeddings.weight"][positions]
    x = x + p["bert.embeddings.token_type_embeddings.weight"][types]
    x = _layer_norm(x, *part("bert.embeddings.LayerNorm"), eps)
    for i in range(hf["num_hidden_layers"]):
        layer = f"bert.encoder.layer.{i}"
        names = ("query", "key", "value")
        q, k, v = (_heads(dense(x, f"{layer}.attention.self.{n}"), size) for n in names)
        added = dense(_attend(q, k, v, segments, False), f"{layer}.attention.output.dense")
        x = _layer_norm(x + added, *part(f"{layer}.attention.output.LayerNorm"), eps)
        added = dense(_gelu(dense(x, f"{layer}.intermediate.dense")), f"{layer}.output.dense")
        x = _layer_norm(x + added, *part(f"{layer}.output.LayerNorm"), eps)
    x = _gelu(dense(x, "cls.predictions.transform.dense"))
    x = _layer_norm(x, *part("cls.predictions.transform.LayerNorm"), eps)
    return x @ p["bert.embeddings.word_embeddings.weight"].T + p["cls.predictions.bias"]


def _draw(shapes, rng):
    """Values of size 0.3, and norm scales near 1; no two tensors alike."""
    tensors = {}
    for name, shape in shapes.items():
        scale = "norm" in name.lower() or ".ln_" in name
        base = 1.0 if scale and name.endswith("weight") else 0.0
        tensors[name] = (base + 0.3 * rng.standard_normal(shape)).astype(np.float32)
    return tensors


class _Shape:
    """What Llama-like configs say under names of their own."""

    def __init__(self, hf, heads, kv_heads):
        self.hf, self.eps = hf, hf["rms_norm_eps"]
        self.group = hf[heads] // hf[kv_heads]
        self.size = hf.get("hidden_size", hf.get("d_model")) // hf[heads]


def _llama_layers(x, layers, shape, positions, segments, causal):
    """[b, t, d] after all layers."""
    angles = positions[..., None, None] * _frequencies(shape.hf, shape.size)
    for w in layers:
        normed = _rms(x, w["attention_norm"], shape.eps)
        q, k, v = (
            _heads(normed @ weight.T + (0 if bias is None else bias), shape.size)
            for weight, bias in (w[n] for n in "qkv")
        )
        q, k = _turn(q, angles), _turn(k, angles)
        k, v = (np.repeat(y, shape.group, axis=2) for y in (k, v))
        x = x + _attend(q, k, v, segments, causal) @ w["out"].T
        normed = _rms(x, w["mlp_norm"], shape.eps)
        gate = normed @ w["gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (normed @ w["up"].T)) @ w["down"].T
    return x


def _wide(tensors):
    return {name: np.asarray(tensor, np.float64) for name, tensor in tensors.items()}


def _heads(x, size):
    return x.reshape(*x.shape[:2], -1, size)


def _attend(q, k, v, segments, causal):
    b, t, heads, size = q.shape
    seen = segments[:, :, None] == segments[:, None, :]
    if causal:
        seen = seen & (np.arange(t)[:, None] >= np.arange(t))
    scores = np.einsum("bthe,bshe->bhts", q, k) / math.sqrt(size)
    scores = np.where(seen[:, None], scores, -np.inf)
    probs = np.exp(scores - scores.max(-1, keepdims=True))
    probs /= probs.sum(-1, keepdims=True)
    return np.einsum("bhts,bshe->bthe", probs, v).reshape(b, t, heads * size)


def _frequencies(hf, size):
    plain = hf["rope_theta"] ** (-np.arange(0, size, 2) / size)
    scaling = hf.get("rope_scaling")
    if scaling is None:
        return plain
    out = []
    for frequency in plain:
        wavelength = 2 * math.pi / frequency
        context, low, high = (
            scaling[key]
            for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
        )
        if wavelength < context / high:
            out.append(frequency)
        elif wavelength > context / low:
            out.append(frequency / scaling["factor"])
        else:
            smooth = (context / wavelength - low) / (high - low)
            out.append((1 - smooth) * frequency / scaling["factor"] + smooth * frequency)
    return np.array(out)


def _turn(x, angles):
    """Element i of a head's first half is turned with element i of its second half."""
    first, second = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _rms(x, weight, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def _layer_norm(x, weight, bias, eps):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * weight + bias


def _gelu(x):
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
