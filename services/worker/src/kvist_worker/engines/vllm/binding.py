"""The only module that imports vLLM. Public classes alone, so that few releases break it.

`tests/unit/worker/vllm` runs it on a stub of these classes, and `tests/vllm` holds the stub's signatures against the
installed package.
"""

import argparse
import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

# Before vLLM is imported, which reads them. The engine's sockets of events listen at this address alone.
os.environ["VLLM_HOST_IP"] = "127.0.0.1"
# This process has threads of its own: a fork would copy their locks.
os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

from vllm.config.kv_events import KVEventsConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import GracefulHTTPError, VLLMClientError, VLLMNotFoundError
from vllm.inputs.engine import tokens_input
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.metrics.loggers import StatLoggerBase

import vllm
from kvist.errors import KvistError, error, invalid_field
from kvist_worker.engine import KvLayout
from kvist_worker.engines.vllm import arguments as engine_arguments
from kvist_worker.engines.vllm import version as vllm_version
from kvist_worker.engines.vllm.arguments import VllmArguments
from kvist_worker.engines.vllm.facts import EngineFacts, EventSockets
from kvist_worker.engines.vllm.hand_over import (
    SIDE_CHANNEL_HOST,
    set_environment,
    with_connector,
    worker_extension,
)
from kvist_worker.engines.vllm.layout import ParallelLayout
from kvist_worker.engines.vllm.load import SchedulerState
from kvist_worker.engines.vllm.output import Embedded, Output, Pooled
from kvist_worker.engines.vllm.request import PreparedRequest
from kvist_worker.settings import HandOverSettings

# The longest that a busy engine may take to end before it is ended.
_SHUTDOWN_SECONDS = 5.0
# What CBOR names can be recomputed with any request; names of pickles only without extra keys.
_HASH_ALGORITHM = "sha256_cbor"
# Tasks of vLLM that Kvist serves.
_GENERATE, _EMBED = "generate", "embed"
OnStep = Callable[[int, SchedulerState], None]
_T = TypeVar("_T")


class _Parser(FlexibleArgumentParser):  # type: ignore[misc]
    """vLLM's parser, which raises instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise engine_arguments.refused_by_vllm(message)


def read_arguments(
    given: Mapping[str, Any], hand_over: HandOverSettings | None = None, *, is_prefill: bool = False
) -> VllmArguments:
    """Checks arguments against the names that the installed vLLM has, and tells its connector how to hand KV over.

    Raises:
        KvistError: `NOT_IMPLEMENTED` for a version that is too old, `INVALID_ARGUMENT` for wrong arguments.
    """
    vllm_version.check(vllm.__version__)
    given = with_connector(given, hand_over, is_prefill=is_prefill)
    if hand_over is not None:
        with socket.socket() as probe:
            probe.bind((SIDE_CHANNEL_HOST, 0))
            # Free a moment ago; the connector takes a number and no socket.
            set_environment(os.environ, hand_over, port=probe.getsockname()[1])
    arguments = engine_arguments.read(given, known={field.name for field in fields(AsyncEngineArgs)})
    return replace(arguments, worker_extension=worker_extension(hand_over))


class VllmBinding:
    """One `AsyncLLM`. All methods belong to the thread of its event loop."""

    def __init__(self, arguments: VllmArguments) -> None:
        self._arguments = arguments
        # Every adapter that there ever was: its number and its path are part of what its name means.
        self._known_adapters = {
            name: LoRARequest(name, number, path) for number, (name, path) in enumerate(arguments.adapters.items(), 1)
        }
        self._adapters = dict(self._known_adapters)
        self._engine: AsyncLLM | None = None
        self._facts: EngineFacts | None = None

    async def start(self, on_step: OnStep) -> EngineFacts:
        """Loads the model, and holds the loop up until the engine is up: the one that will run the requests.

        Raises:
            KvistError: The arguments are wrong, or the engine does not come up.
        """
        engine_args = self._engine_args()
        try:
            config = engine_args.create_engine_config()
        except (ValueError, TypeError, OSError, NotImplementedError) as failure:
            raise engine_arguments.refused_by_vllm(str(failure)) from failure
        parallel = config.parallel_config
        ParallelLayout(
            tensor=parallel.tensor_parallel_size,
            pipeline=parallel.pipeline_parallel_size,
            data=parallel.data_parallel_size,
            prefill_context=parallel.prefill_context_parallel_size,
            decode_context=parallel.decode_context_parallel_size,
        ).check(present_devices=_present_devices())
        try:
            engine = AsyncLLM.from_vllm_config(config, stat_loggers=[_stat_logger(on_step)])
        except Exception as failure:  # Its children have said why, in the log.
            raise error("ENGINE_FAILED", "vLLM's engine did not come up; its log says why") from failure
        self._engine = engine
        tasks = await engine.get_supported_tasks()
        if not {_GENERATE, _EMBED} & set(tasks):
            self.shutdown()
            raise engine_arguments.refused_by_vllm(
                f"the model is for {', '.join(tasks)}; Kvist serves {_GENERATE} and {_EMBED}"
            )
        self._facts = _facts(engine, embeds=_GENERATE not in tasks)
        return self._facts

    def generate(self, request: PreparedRequest) -> AsyncIterator[Output]:
        """Runs a request. Closing or cancelling the iterator ends it.

        Raises:
            KvistError: The engine refuses it, or fails.
        """
        engine, facts = self._up()
        sampling = self._sampling(request)
        outputs = engine.generate(
            tokens_input(list(request.prompt), cache_salt=request.cache_salt or None),
            sampling,
            request.request_id,
            lora_request=self._adapter(request.adapter),
            trace_headers=request.trace_headers if facts.is_traced and request.trace_headers else None,
            priority=request.priority,
            data_parallel_rank=request.rank if facts.ranks > 1 else None,
            session_id=request.session_id,
        )
        return _with_known_errors(outputs)

    async def embed(self, request_id: str, prompt: Sequence[int]) -> Embedded:
        """Makes the embedding of one input. Cancelling it ends it in the engine.

        Raises:
            KvistError: The engine refuses it, or fails.
        """
        engine, _ = self._up()
        outputs: AsyncIterator[Pooled] = engine.encode(
            tokens_input(list(prompt)), PoolingParams(task=_EMBED), request_id
        )
        async for output in _with_known_errors(outputs):
            if output.finished:
                vector = output.outputs.data
                return Embedded(vector.float().tolist(), len(output.prompt_token_ids), output.num_cached_tokens)
        raise error("ENGINE_FAILED", "vLLM ended an input without its embedding")

    async def abort(self, request_id: str) -> None:
        """Ends a request within a step; an unknown one is ignored."""
        engine, _ = self._up()
        await engine.abort(request_id)

    async def reset_prefix_cache(self) -> None:
        """Empties the prefix cache; running requests compute their prompts again.

        Raises:
            KvistError: It could not be emptied.
        """
        engine, _ = self._up()
        try:
            is_reset = await engine.reset_prefix_cache(reset_running_requests=True)
        except EngineDeadError as failure:
            raise error("ENGINE_UNAVAILABLE", "the engine has failed") from failure
        except Exception as failure:
            raise error("PRECONDITION_FAILED", "requests that wait for KV of other engines hold the cache") from failure
        if not is_reset:
            raise error("PRECONDITION_FAILED", "the engine could not empty its cache")

    async def load_adapter(self, name: str, path: str) -> None:
        """Loads a LoRA adapter; requests may name it from then on.

        Raises:
            KvistError: LoRA is off, the files are no adapter, or the name has meant other files: what the cache holds
                of them would be claimed for the new ones.
        """
        engine, facts = self._up()
        if not facts.takes_adapters:
            raise error("NOT_IMPLEMENTED", "this engine was started without enable-lora")
        known = self._known_adapters.get(name)
        if known is not None and known.lora_path != path:
            raise error("ALREADY_EXISTS", f"the adapter {name!r} has other files; choose another name")
        adapter = known or LoRARequest(name, len(self._known_adapters) + 1, path)
        try:
            is_loaded = await engine.add_lora(adapter)
        except EngineDeadError as failure:
            raise error("ENGINE_UNAVAILABLE", "the engine has failed") from failure
        except Exception as failure:
            raise invalid_field("path", "vLLM cannot load it as an adapter; the worker's log says why") from failure
        if not is_loaded:
            raise error("ENGINE_FAILED", "vLLM did not load the adapter")
        self._known_adapters[name] = self._adapters[name] = adapter

    async def unload_adapter(self, name: str) -> None:
        """Unloads a LoRA adapter; an unknown one is ignored."""
        engine, _ = self._up()
        adapter = self._adapters.pop(name, None)
        if adapter is not None:
            await engine.remove_lora(adapter.lora_int_id)

    @property
    def has_died(self) -> bool:
        """Whether the engine core has ended."""
        return self._engine is not None and bool(self._engine.errored)

    def shutdown(self) -> None:
        """Ends the engine and its processes."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.shutdown(timeout=_SHUTDOWN_SECONDS)

    def _engine_args(self) -> AsyncEngineArgs:
        parser = AsyncEngineArgs.add_cli_args(_Parser(add_help=False, allow_abbrev=False))
        namespace = parser.parse_args(list(self._arguments.flags), argparse.Namespace())
        engine_args = AsyncEngineArgs.from_cli_args(namespace)
        engine_args.enable_log_requests = False
        engine_args.worker_extension_cls = self._arguments.worker_extension
        if "--prefix-caching-hash-algo" not in {flag.partition("=")[0] for flag in self._arguments.flags}:
            engine_args.prefix_caching_hash_algo = _HASH_ALGORITHM
        if engine_args.enable_prefix_caching is not False:
            engine_args.kv_events_config = KVEventsConfig(
                enable_kv_cache_events=True,
                publisher="zmq",
                # Any port of the address above.
                endpoint="tcp://*:0",
                replay_endpoint="tcp://*:0",
            )
        return engine_args

    def _up(self) -> tuple[AsyncLLM, EngineFacts]:
        if self._engine is None or self._facts is None:
            raise error("NOT_READY", "the engine is not up")
        return self._engine, self._facts

    def _adapter(self, name: str) -> LoRARequest | None:
        if not name:
            return None
        try:
            return self._adapters[name]
        except KeyError:
            raise error("UNKNOWN_MODEL", f"there is no adapter {name!r}", not_started=True) from None

    def _sampling(self, request: PreparedRequest) -> SamplingParams:
        structured = None
        try:
            if request.structured_output is not None:
                kind, value = request.structured_output
                structured = StructuredOutputsParams(**{kind: value})
            return SamplingParams(
                **request.sampling,
                structured_outputs=structured,
                output_kind=RequestOutputKind.DELTA,
                detokenize=False,
            )
        except (VLLMClientError, ValueError, TypeError) as failure:
            raise _invalid(failure) from failure


async def _with_known_errors(outputs: AsyncIterator[_T]) -> AsyncIterator[_T]:
    """The outputs; errors become those of the catalogue."""
    try:
        async for output in outputs:
            yield output
    except (asyncio.CancelledError, GeneratorExit):
        raise
    except EngineGenerateError as failure:
        raise _known(failure.__cause__ or failure) from failure
    except Exception as failure:
        raise _known(failure) from failure


def _known(failure: BaseException) -> KvistError:
    match failure:
        case KvistError():
            return failure
        case EngineDeadError():
            return error("ENGINE_FAILED", "the engine has failed")
        case VLLMNotFoundError():
            return error("UNKNOWN_MODEL", "the engine has no such adapter", not_started=True)
        case VLLMClientError() | ValueError() | TypeError():
            return _invalid(failure)
        case GracefulHTTPError():
            return error("QUEUE_FULL", "too many requests are waiting", not_started=True)
        case _:
            return error("ENGINE_FAILED", "the engine failed")


def _invalid(failure: BaseException) -> KvistError:
    # vLLM's own words name its own parameters; they hold what the caller sent and nothing else.
    return error("INVALID_ARGUMENT", f"vLLM refuses the request: {failure}", not_started=True)


def _stat_logger(on_step: OnStep) -> Callable[..., StatLoggerBase]:
    class StepLogger(StatLoggerBase):  # type: ignore[misc]
        """Passes on what the scheduler of one rank says after each step."""

        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            del vllm_config
            self._rank = engine_index

        def record(
            self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
        ) -> None:
            del mm_cache_stats, engine_idx
            if scheduler_stats is None:
                return
            drawn = 0 if iteration_stats is None else iteration_stats.num_generation_tokens
            by_source = getattr(iteration_stats, "prompt_token_stats", None)
            speculation = scheduler_stats.spec_decoding_stats
            on_step(
                self._rank,
                SchedulerState(
                    running_requests=scheduler_stats.num_running_reqs,
                    waiting_requests=scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs,
                    cache_usage_ratio=scheduler_stats.kv_cache_usage,
                    generated_tokens=drawn,
                    external_tokens=getattr(by_source, "external_kv_transfer", 0),
                    preemptions=0 if iteration_stats is None else iteration_stats.num_preempted_reqs,
                    drafts=0 if speculation is None else speculation.num_drafts,
                    draft_tokens=0 if speculation is None else speculation.num_draft_tokens,
                    accepted_draft_tokens=0 if speculation is None else speculation.num_accepted_tokens,
                ),
            )

        def log_engine_initialized(self) -> None:
            """Nothing to say: the worker announces itself."""

    return StepLogger


def _present_devices() -> int | None:
    """Devices that ranks need for themselves; none on a CPU."""
    return None if current_platform.is_cpu() else int(current_platform.device_count())


def _facts(engine: AsyncLLM, *, embeds: bool) -> EngineFacts:
    config = engine.vllm_config
    model, cache, scheduler = config.model_config, config.cache_config, config.scheduler_config
    ranks = config.parallel_config.data_parallel_size
    tokenizer = engine.get_tokenizer()
    generation = model.try_get_generation_config()
    ends = generation.get("eos_token_id")
    end_ids = {ends} if isinstance(ends, int) else set(ends or ())
    end_ids |= {tokenizer.eos_token_id} - {None}
    template = getattr(tokenizer, "chat_template", None)
    begin = tokenizer.bos_token_id
    # Inputs of embeddings are whole; nobody asks where their beginnings lie.
    is_followed = config.kv_events_config is not None and not embeds
    sources = engine.get_kv_event_sources() if is_followed else {}
    return EngineFacts(
        version=vllm.__version__,
        context_tokens=model.max_model_len,
        max_running_requests=scheduler.max_num_seqs,
        max_top_logprobs=model.max_logprobs if model.max_logprobs >= 0 else model.get_vocab_size(),
        vocabulary_size=model.get_vocab_size(),
        block_size_tokens=cache.block_size,
        # The front process adds up what its ranks report.
        kv_blocks=(cache.num_gpu_blocks or 0) // ranks,
        ranks=ranks,
        hash_algorithm=str(cache.prefix_caching_hash_algo),
        event_sockets={
            rank: EventSockets(source.endpoint, source.replay_endpoint) for rank, source in sorted(sources.items())
        },
        orders_by_priority=scheduler.policy == "priority",
        embeds=embeds,
        kv_layout=_kv_layout(config),
        takes_adapters=config.lora_config is not None,
        is_traced=config.observability_config.otlp_traces_endpoint is not None,
        tokenizer_json=_tokenizer_json(str(model.tokenizer), tokenizer),
        chat_template=template if isinstance(template, str) else "",
        bos_token=tokenizer.bos_token or "",
        eos_token=tokenizer.eos_token or "",
        add_bos=begin is not None and tokenizer.encode("a")[:1] == [begin],
        eos_token_ids=tuple(sorted(end_ids)),
    )


def _kv_layout(config: Any) -> KvLayout | None:
    transfer, parallel = config.kv_transfer_config, config.parallel_config
    if transfer is None or not transfer.kv_connector:
        return None
    return KvLayout(
        connector=transfer.kv_connector,
        tensor_parallel_size=parallel.tensor_parallel_size,
        prefill_context_parallel_size=parallel.prefill_context_parallel_size,
        decode_context_parallel_size=parallel.decode_context_parallel_size,
    )


def _tokenizer_json(name: str, tokenizer: Any) -> bytes | None:
    """The file itself where it lies on this node, else what the tokenizer makes of itself."""
    file = Path(name) / "tokenizer.json"
    if file.is_file():
        return file.read_bytes()
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return None if backend is None else str(backend.to_str()).encode()
