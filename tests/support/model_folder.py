"""The packaged SmolLM2 as a folder in the form of Hugging Face, as vLLM loads models.

Written from the GGUF file itself: weights dequantized, tokenizer as the llama.cpp worker converts it. `transformers`
would do the same in minutes, with a tokenizer that does not split digits.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import dequantize

from kvist_worker import gguf_tokenizer
from kvist_worker.engines.llamacpp.model import packaged_model_path

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_MODEL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def smollm2_folder(folder: Path) -> Path:
    """The folder; made when it is not there yet. Whole or absent, so that two makers do not meet."""
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=folder.parent))
    _write(packaged_model_path(), unfinished)
    try:
        unfinished.rename(folder)
    except OSError:
        shutil.rmtree(unfinished)
    return folder


def _write(gguf_path: Path, folder: Path) -> None:
    reader = gguf.GGUFReader(gguf_path)

    def value(key: str) -> Any:
        field = reader.get_field(f"llama.{key}")
        assert field is not None, key
        return field.contents()

    heads, kv_heads = value("attention.head_count"), value("attention.head_count_kv")
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    for tensor in reader.tensors:
        weights = dequantize(tensor.data, tensor.tensor_type)
        parts = tensor.name.split(".")
        if parts[0] != "blk":
            tensors[f"{_MODEL_NAMES[parts[0]]}.weight"] = weights
            continue
        if parts[2] in {"attn_q", "attn_k"}:
            weights = _rotary_halves(weights, heads if parts[2] == "attn_q" else kv_heads)
        tensors[f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.weight"] = weights
    write_safetensors(folder / "model.safetensors", tensors)
    tokenizer = gguf_tokenizer.convert(gguf_path)
    vocabulary_size, hidden_size = tensors["model.embed_tokens.weight"].shape
    _write_json(
        folder / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": hidden_size,
            "intermediate_size": value("feed_forward_length"),
            "num_hidden_layers": value("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "vocab_size": vocabulary_size,
            "max_position_embeddings": value("context_length"),
            "rms_norm_eps": value("attention.layer_norm_rms_epsilon"),
            "rope_theta": value("rope.freq_base"),
            "hidden_act": "silu",
            "tie_word_embeddings": "lm_head.weight" not in tensors,
            "eos_token_id": list(tokenizer.eos_token_ids),
            "torch_dtype": "float16",
        },
    )
    # One end token as for the base model: what ends a chat is the model's own list.
    _write_json(folder / "generation_config.json", {"eos_token_id": list(tokenizer.eos_token_ids)})
    (folder / "tokenizer.json").write_bytes(tokenizer.json)
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokenizer.bos_token,
            "eos_token": tokenizer.eos_token,
            "chat_template": tokenizer.chat_template,
        },
    )


def _rotary_halves(weights: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows of a head back from llama.cpp's pairs to halves, as rotary embeddings take them elsewhere."""
    rows = weights.shape[0]
    paired = weights.reshape(heads, rows // heads // 2, 2, *weights.shape[1:])
    return paired.swapaxes(1, 2).reshape(weights.shape)


def write_safetensors(path: Path, tensors: dict[str, np.ndarray[Any, Any]]) -> None:
    """The format is a length, a JSON header, and the bytes of all tensors."""
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.size * 2
        header[name] = {"dtype": "F16", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)))
        file.write(encoded)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor, dtype=np.float16).tobytes())


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + os.linesep)
