"""The Rust core. Calls that may block release the interpreter; failures are `CoreError`."""

from collections.abc import Callable
from typing import Protocol, Self

__version__: str

class CoreError(Exception):
    """A failure: (code, message, details as JSON text). `kvist.errors.from_core` reads it."""

class EngineHost:
    """The ledgers and the load of a worker, as its engine sees them. Methods may be called from any thread."""

    @property
    def block_size_tokens(self) -> int:
        """Tokens a block."""
    def stored(
        self,
        rank: int,
        engine_hashes: list[int],
        parent: int | None,
        tokens: list[int],
        adapter: str = "",
        cache_salt: str = "",
    ) -> None:
        """Blocks are in the cache from here on, each the parent of the next."""
    def removed(self, rank: int, engine_hashes: list[int]) -> None:
        """One copy of each of these blocks has left the cache. Said before their memory is used for something else."""
    def cleared(self, rank: int) -> None:
        """The cache of a rank is empty."""
    def follow_vllm(self, rank: int, settings_json: str) -> None:
        """Feeds a rank's ledger from the sockets on which the engine publishes its KV events, as vLLM does.

        Settings: `endpoint`, `replay_endpoint`, `engine_rank`, `hash_algorithm`, `python_hash_seed`. Only within
        `start`.
        """
    def clear_ordered(self) -> int:
        """The engine is about to empty its cache and will say so late; returns how many blocks were claimed."""
    def cache_unknown(self) -> None:
        """Nothing is known of what the engine holds."""
    def block_hashes(self, tokens: list[int], adapter: str = "", cache_salt: str = "") -> list[int]:
        """Block hashes of a prompt, as the ledger names them."""
    def claimed_blocks(self, rank: int, block_hashes: list[int]) -> int:
        """Leading blocks of a prompt that the ledger claims."""
    def report_load(self, report: bytes) -> None:
        """Replaces the load report of its rank: an encoded `kvist.events.v1.LoadReport`, numbered by the worker."""
    def failed(self, reason: str) -> None:
        """The engine is broken: nothing new is taken and what runs fails. The reason is for the log."""

class EmbedSink:
    """Where the embeddings of one call go. Dropped before its end, the call fails."""

    def finished(self, response: bytes) -> None:
        """The embeddings: an encoded `kvist.engine.v1.EmbedResponse`, one for each input in order."""
    def failed(
        self,
        code: str,
        message: str,
        not_started: bool = False,
        retry_after_ms: int | None = None,
        fields: list[tuple[str, str]] = ...,
    ) -> None:
        """The call failed, with a code of the catalogue and a public text."""
    def is_abandoned(self) -> bool:
        """Whether nobody waits for the embeddings any more."""

class NatsCredentials:
    """A user's credentials at NATS."""

    def __new__(cls, text: str) -> Self:
        """Reads the text of a credentials file."""
    @property
    def jwt(self) -> str:
        """The token."""
    def sign(self, nonce: bytes) -> bytes:
        """Signs what the server has made up."""

class RequestSink:
    """Where the events of one request go. Dropped before its end, the request fails."""

    @property
    def request_id(self) -> str:
        """Id of the request."""
    def tokens(
        self,
        token_ids: list[int],
        logprobs: bytes | None = None,
        cached_tokens: int | None = None,
        choice: int = 0,
    ) -> None:
        """New tokens of a choice.

        `logprobs` is an encoded `TokenDelta` whose log-probabilities are taken; `cached_tokens` goes with the first
        tokens.
        """
    def finished(self, finished: bytes, prompt_logprobs: bytes | None = None) -> None:
        """The engine ended the request: an encoded `kvist.engine.v1.Finished`.

        `prompt_logprobs` is an encoded `TokenDelta` whose log-probabilities are those of the prompt.
        """
    def failed(
        self,
        code: str,
        message: str,
        not_started: bool = False,
        retry_after_ms: int | None = None,
        fields: list[tuple[str, str]] = ...,
    ) -> None:
        """The request failed, with a code of the catalogue, a public text, and (path, why) of each wrong field."""
    def is_aborted(self) -> bool:
        """Whether somebody has asked for its end."""

class Engine(Protocol):
    """What `WorkerServer` asks of an engine that is written in Python.

    `submit` and `abort` are called from one thread of their own and never block; the others may take time.
    """

    def description(self) -> str:
        """What the engine is, as JSON text; asked once, before `start`. May load the model."""
    def tokenizer_json(self) -> bytes | None:
        """Its `tokenizer.json`; none when it has no tokenizer."""
    def start(self, host: EngineHost) -> None:
        """Takes requests once this returns."""
    def submit(self, request: bytes, sink: RequestSink) -> None:
        """Takes an encoded `EngineRequest` whose prompt is token ids. The sink gets exactly one end."""
    def abort(self, request_id: str, reason: int) -> None:
        """Ends a request within a step; its sink still gets its end. An unknown id is ignored."""
    def reset_cache(self) -> int:
        """Empties the prefix cache; returns how many blocks that were."""
    def close(self) -> None:
        """Ends everything."""

class WorkerServer:
    """One engine behind the gRPC server of a worker."""

    def __new__(cls, runtime: Runtime, settings_json: str, engine: Engine | None = None) -> Self:
        """Without an engine, the simulated one."""
    def start(self) -> str:
        """Starts the engine, which may take minutes, and serves.

        Returns `grpc_address`, `admin_address` and `incarnation` as JSON text.
        """
    def has_failed(self) -> bool:
        """Whether the engine has failed for good."""
    def drain(self, time_limit_ms: int) -> tuple[int, int]:
        """Takes nothing new, waits for what runs and aborts the rest.

        Returns how many requests ended by themselves and how many were aborted.
        """
    def stop(self) -> None:
        """Ends the engine and the server. Idempotent."""

class DoorRules:
    """The table of who may call what, as one server reads it."""

    def __new__(cls, open_services: list[str], role_uri: str) -> Self:
        """`open_services`: of `health` and `reflection`; `role_uri`: how certificates state roles."""
    def check(self, method: str, uris: list[str]) -> None:
        """Refuses a call of `service/method` by a peer whose certificate has these URIs."""

class IndexService:
    """The index of a whole cluster, fed from NATS and from the workers themselves."""

    def __new__(cls, runtime: Runtime, settings_json: str) -> Self:
        """Settings: `nats_url`, `cluster`, `byte_budget`, `client_name`, `digest_interval_ms`, `tls` and so on."""
    def start(self) -> None:
        """Subscribes; NATS may come later."""
    def apply_cluster_state(self, state: bytes) -> bool:
        """Follows the workers of an encoded `ClusterState`; false when it is not newer, or knows none of them."""
    def lookup(self, request: bytes) -> bytes:
        """Answers an encoded `LookupRequest` with an encoded `LookupResponse`, without `answered_by`."""
    def stats(self) -> bytes:
        """An encoded `StatsResponse`, without `role`."""
    def feed_stats(self) -> str:
        """Numbers of the feed as JSON text."""
    def bootstrap(self, worker_uids: list[str]) -> IndexSnapshots:
        """Snapshots of the named workers' sources, or of all when none is named."""
    def stop(self) -> None:
        """Ends the feed; what is known stays. Idempotent."""

class IndexSnapshots:
    """One reader's way through an index."""

    def next_parts(self) -> list[bytes]:
        """The next encoded `BootstrapResponse`s; none after the end mark. Walks the index."""

class AttachedEngines:
    """Reads what attached engines publish, and keeps their ledgers."""

    def __new__(cls, runtime: Runtime, settings_json: str) -> Self:
        """Settings: `hash_seed`, `folder`, `engines`, `ring_batches`, `digest_interval_ms`."""
    def start(self) -> None:
        """Begins to read; engines may come later."""
    def descriptions(self) -> list[bytes]:
        """Encoded `AttachedEngine`s, of those that were reached."""
    def digests(self, worker_uid: str) -> list[bytes] | None:
        """Encoded `LedgerDigest`s of the ledgers of an engine; none for an engine that is not attached."""
    def watch(self, request: bytes, on_part: Callable[[bytes | str | None], object]) -> AttachedStream:
        """Answers an encoded `kvist.agent.v1.WatchKvEventsRequest`.

        `on_part` is called, on a thread of the core, with each encoded response, at last with the name of an error
        code, or with none. Whoever has sent a part on calls `taken`.
        """
    def stats(self) -> str:
        """Numbers of all engines as JSON text."""
    def stop(self) -> None:
        """Ends the readers. Idempotent."""

class AttachedStream:
    """A history on its way. Closed when it is dropped."""

    def taken(self) -> None:
        """A part was sent on: there is room for another."""
    def close(self) -> None:
        """Nobody wants the rest. Idempotent."""

class Relay:
    """Publishes the KV events of a node's workers and attached engines."""

    def __new__(cls, runtime: Runtime, settings_json: str) -> Self:
        """Settings: `nats_url`, `cluster`, `client_name`, `credentials_file`."""
    def start(self) -> None:
        """Connects in the background; NATS may come later."""
    def set_workers(self, workers_json: str) -> None:
        """Relays exactly these workers: a JSON array of `{"uid", "address"}`."""
    def attach(self, engines: AttachedEngines) -> None:
        """Relays attached engines too, from here on."""
    def stats(self) -> str:
        """Numbers of the relay as JSON text."""
    def stop(self) -> None:
        """Ends the relay. Idempotent."""

class RouterServer:
    """A whole router: HTTP edge, gRPC server and admin port."""

    def __new__(cls, runtime: Runtime, settings_json: str) -> Self: ...
    def start(self) -> str:
        """Listens; not ready until the first cluster state.

        Returns `http_address`, `grpc_address` and `admin_address` as JSON text.
        """
    def apply_cluster_state(self, state: bytes) -> bool:
        """Takes up an encoded `ClusterState`; false when it is no newer than the present one, or is held back."""
    def set_control_plane_connected(self, connected: bool) -> None:
        """Notes whether a controller can be reached."""
    def status(self) -> str:
        """Numbers for people and supervisors, as JSON text."""
    def drain(self, time_limit_ms: int) -> bool:
        """Takes nothing new and waits for what runs; true when nothing runs any more."""
    def stop(self) -> None:
        """Ends everything: streams that run end with an error, never as if they were complete. Idempotent."""

class EdgeServer:
    """HTTP edge and admin port before routers of other processes."""

    def __new__(cls, runtime: Runtime, settings_json: str) -> Self: ...
    def start(self) -> str:
        """Listens; not ready until a remote router serves. Returns `http_address` and `admin_address` as JSON text."""
    def drain(self, time_limit_ms: int) -> bool:
        """Takes nothing new and waits for what runs; true when nothing runs any more."""
    def stop(self) -> None:
        """Ends everything: streams that run end with an error, never as if they were complete. Idempotent."""

class Runtime:
    """Threads of the data plane. Close it before the process ends."""

    def __new__(cls, worker_threads: int | None = None) -> Self: ...
    def close(self) -> None:
        """Ends all tasks and threads. Idempotent."""

class ModelText:
    """Tokenizer and chat template of one model."""

    def __new__(
        cls,
        tokenizer_json: bytes,
        *,
        chat_template: str = "",
        bos_token: str = "",
        eos_token: str = "",
        add_bos: bool = False,
        eos_token_ids: list[int] = ...,
    ) -> Self: ...
    @property
    def digest(self) -> str:
        """BLAKE3 of the tokenizer file."""
    @property
    def is_fast(self) -> bool:
        """Whether the fast tokenizer agreed with its oracle."""
    @property
    def vocabulary_size(self) -> int:
        """Tokens of the vocabulary."""
    def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt."""
    def decode(self, token_ids: list[int], *, skip_special: bool = True) -> str:
        """Text of token ids."""
    def render_chat(
        self,
        messages_json: str,
        *,
        tools_json: str = "[]",
        variables_json: str = "{}",
        add_generation_prompt: bool = True,
    ) -> str:
        """Text of a conversation; messages and tools as JSON arrays, variables as a JSON object."""
    def encode_chat(
        self,
        messages_json: str,
        *,
        tools_json: str = "[]",
        variables_json: str = "{}",
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Token ids of a conversation."""

def access_table() -> str:
    """The table of who may call what, as JSON text: `[{"service", "method", "roles"}]`."""

def certificate_expiry(path: str) -> int:
    """Until when the first certificate of a PEM file may be used, in Unix seconds."""

def block_hashes(
    hash_seed: int, namespace: str, adapter: str, cache_salt: str, tokens: list[int], block_size_tokens: int
) -> list[int]:
    """Kvist's block hashes of the whole blocks of a prompt."""

def check_admission(admission: str) -> None:
    """Refuses an admission, as JSON text, that no router would take; names the path of what is wrong."""

def check_machine(worker_settings: str) -> None:
    """Refuses a worker's settings, as JSON text, that this machine cannot honor."""

def check_routing(routing: str) -> None:
    """Refuses a routing pipeline, as JSON text, that no router would take; says which names there are."""

def digest_hex(data: bytes) -> str:
    """BLAKE3 of a file's bytes, lower-case hex."""

def reasoning_parsers() -> list[str]:
    """Names of the parsers of thoughts that a model's resource may give."""

def tool_parsers() -> list[str]:
    """Names of the parsers of tool calls that a model's resource may give."""

def engine_mode(mode: str, is_configured: bool) -> tuple[bytes, int]:
    """What an engine of the core can do, as an encoded `Capabilities`, and how many ranks its example has."""

def engine_refusal(mode: str, is_configured: bool, request: bytes) -> str | None:
    """Why an engine of the core does not take an encoded `EngineRequest`; none when it does."""

def error_catalogue() -> str:
    """The error catalogue as JSON text."""

def new_incarnation(floor: int) -> int:
    """A new incarnation, above `floor`."""

def run_twin(request: str, trace: str) -> tuple[str, str, str]:
    """Runs routing policies on a trace in virtual time: its outcome as JSON text, a table for people, and an SVG."""

def usable_blocks(prompt_tokens: int, block_size_tokens: int) -> int:
    """Blocks of a prompt that a cache can serve."""

def init_telemetry(settings_json: str) -> None:
    """Installs logs and, when an OTLP endpoint is configured, traces of the data plane. Once a process."""

def shutdown_telemetry() -> None:
    """Sends what is left. Idempotent."""
