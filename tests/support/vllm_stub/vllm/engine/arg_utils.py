"""Stub."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any

from vllm.config.kv_events import KVEventsConfig


@dataclass
class AsyncEngineArgs:
    model: str = ""
    runner: str = "auto"
    convert: str = "auto"
    tokenizer: str | None = None
    dtype: str = "auto"
    max_model_len: int | None = None
    enforce_eager: bool = False
    enable_prefix_caching: bool | None = None
    prefix_caching_hash_algo: str = "sha256"
    block_size: int | None = None
    data_parallel_size: int = 1
    tensor_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    scheduling_policy: str = "fcfs"
    speculative_config: dict[str, Any] | None = None
    kv_transfer_config: dict[str, Any] | None = None
    enable_lora: bool = False
    lora_target_modules: list[str] | None = None
    distributed_executor_backend: str | None = None
    trust_remote_code: bool = False
    enable_log_requests: bool = True
    kv_events_config: KVEventsConfig | None = None

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser, async_args_only: bool = False) -> argparse.ArgumentParser:
        kinds = {"int | None": int, "int": int, "dict[str, Any] | None": json.loads}
        for field in fields(AsyncEngineArgs):
            flag = f"--{field.name.replace('_', '-')}"
            if str(field.type).startswith("bool"):
                parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=field.default)
            elif str(field.type).startswith("list"):
                parser.add_argument(flag, nargs="+", default=field.default)
            else:
                parser.add_argument(flag, type=kinds.get(str(field.type), str), default=field.default)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> AsyncEngineArgs:
        return cls(**{field.name: getattr(args, field.name) for field in fields(cls)})

    def create_engine_config(self, usage_context: Any = None, headless: bool = False) -> Any:
        if self.max_model_len is not None and self.max_model_len > 8192:
            raise ValueError("max_model_len is more than the model was made for")
        return SimpleNamespace(
            arguments=self,
            model_config=SimpleNamespace(
                max_model_len=self.max_model_len or 64,
                max_logprobs=20,
                tokenizer=self.tokenizer or self.model,
                get_vocab_size=lambda: 1000,
                try_get_generation_config=lambda: {"eos_token_id": [2, 5]},
            ),
            cache_config=SimpleNamespace(
                block_size=self.block_size or 16,
                num_gpu_blocks=40 * self.data_parallel_size,
                prefix_caching_hash_algo=self.prefix_caching_hash_algo,
            ),
            scheduler_config=SimpleNamespace(max_num_seqs=8, policy=self.scheduling_policy),
            parallel_config=SimpleNamespace(
                tensor_parallel_size=self.tensor_parallel_size,
                pipeline_parallel_size=1,
                data_parallel_size=self.data_parallel_size,
                prefill_context_parallel_size=1,
                decode_context_parallel_size=self.decode_context_parallel_size,
            ),
            kv_events_config=self.kv_events_config,
            kv_transfer_config=None if self.kv_transfer_config is None else SimpleNamespace(**self.kv_transfer_config),
            lora_config=object() if self.enable_lora else None,
            observability_config=SimpleNamespace(otlp_traces_endpoint=None),
        )
