"""A small LoRA adapter of the packaged model, with random weights: it only has to change the output."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from support.model_folder import write_safetensors

_RANK = 8


def lora_folder(folder: Path, model_folder: Path) -> Path:
    """Writes the adapter for the value projections of all layers."""
    config = json.loads((model_folder / "config.json").read_text())
    hidden = config["hidden_size"]
    width = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    dice = np.random.default_rng(7)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.v_proj"
        tensors[f"{name}.lora_A.weight"] = dice.normal(0, 0.5, (_RANK, hidden))
        tensors[f"{name}.lora_B.weight"] = dice.normal(0, 0.5, (width, _RANK))
    folder.mkdir()
    write_safetensors(folder / "adapter_model.safetensors", tensors)
    adapter = {
        "peft_type": "LORA",
        "r": _RANK,
        "lora_alpha": _RANK,
        "target_modules": ["v_proj"],
        "bias": "none",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model_folder),
    }
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    return folder
