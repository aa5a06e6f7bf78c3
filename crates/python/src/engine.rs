//! An engine that is written in Python.
//!
//! Threads of the data plane never wait for the interpreter: requests and aborts go through a channel to one thread of
//! their own, which holds the interpreter only while it has something to hand over.

use std::{
    sync::mpsc::{Receiver, Sender, channel},
    thread::JoinHandle,
};

use bytes::Bytes;
use kvist_errors::{Code, KvistError};
use kvist_proto::engine::v1::{AbortReason, Capabilities, EmbedRequest, EngineRequest, KvLayout};
use kvist_worker::{EmbedSink, Engine, EngineDescription, EngineHost, RequestSink, TokenizerFile, takes_no_adapters};
use parking_lot::Mutex;
use prost::Message as _;
use pyo3::{prelude::*, types::PyBytes};
use serde::Deserialize;

use crate::{
    embed_sink::EmbedAnswer,
    engine_host::{Host, Sink},
    failure::from_python,
};

/// What the adapter says of its engine, as JSON.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Description {
    engine: String,
    #[serde(default)]
    version: String,
    context_tokens: u32,
    max_running_requests: u32,
    #[serde(default)]
    max_waiting_requests: u32,
    #[serde(default)]
    max_top_logprobs: u32,
    #[serde(default)]
    kv_blocks: u64,
    block_size_tokens: u32,
    #[serde(default)]
    ranks: u32,
    #[serde(default)]
    hash_algorithm: String,
    #[serde(default)]
    claims_hold_for_all: bool,
    #[serde(default)]
    makes_choices: bool,
    #[serde(default)]
    capabilities: CapabilityNames,
    #[serde(default)]
    chat_template: String,
    #[serde(default)]
    bos_token: String,
    #[serde(default)]
    eos_token: String,
    #[serde(default)]
    add_bos: bool,
    #[serde(default)]
    eos_token_ids: Vec<u32>,
    #[serde(default)]
    kv_layout: Option<Layout>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Layout {
    connector: String,
    tensor_parallel_size: u32,
    prefill_context_parallel_size: u32,
    decode_context_parallel_size: u32,
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct CapabilityNames {
    logprobs: bool,
    json_schema: bool,
    grammar: bool,
    regex: bool,
    embeddings: bool,
    images: bool,
    adapters: bool,
    kv_events: bool,
    kv_transfer: bool,
    structural_tag: bool,
}

enum Command {
    Submit(Box<EngineRequest>, RequestSink),
    Abort(String, AbortReason),
    Embed(EmbedRequest, EmbedSink),
}

/// The thread that hands commands over, and the way to it.
struct Courier {
    commands: Sender<Command>,
    thread: JoinHandle<()>,
}

/// A Python object with the methods of `kvist_worker.engine.EngineAdapter`.
pub(crate) struct PythonEngine {
    adapter: Py<PyAny>,
    courier: Mutex<Option<Courier>>,
}

impl PythonEngine {
    pub(crate) fn new(adapter: Py<PyAny>) -> Self {
        Self { adapter, courier: Mutex::new(None) }
    }

    fn send(&self, command: Command) {
        // Before the start and after the end a request's sink is dropped here, which fails the request.
        if let Some(courier) = &*self.courier.lock() {
            let _ = courier.commands.send(command);
        }
    }
}

impl PythonEngine {
    /// Calls a method that only engines with LoRA adapters have.
    fn call_when_there<A>(&self, method: &str, arguments: A) -> Result<(), KvistError>
    where
        A: for<'py> pyo3::call::PyCallArgs<'py>,
    {
        tokio::task::block_in_place(|| {
            let is_there = attached(|py| self.adapter.bind(py).hasattr(method))?;
            if !is_there {
                return Err(takes_no_adapters());
            }
            attached(|py| self.adapter.call_method1(py, method, arguments).map(drop))
        })
    }
}

impl Engine for PythonEngine {
    fn description(&self) -> Result<EngineDescription, KvistError> {
        let (text, tokenizer_json) = attached(|py| {
            let text: String = self.adapter.call_method0(py, "description")?.extract(py)?;
            let tokenizer: Option<Vec<u8>> = self.adapter.call_method0(py, "tokenizer_json")?.extract(py)?;
            Ok((text, tokenizer))
        })?;
        let said: Description = serde_json::from_str(&text)
            .map_err(|error| KvistError::field(Code::EngineFailed, "description", error.to_string()))?;
        if said.block_size_tokens == 0 {
            return Err(KvistError::field(Code::EngineFailed, "description.block_size_tokens", "must be at least 1"));
        }
        let tokenizer = tokenizer_json.map(|json| TokenizerFile {
            json: Bytes::from(json),
            chat_template: said.chat_template,
            bos_token: said.bos_token,
            eos_token: said.eos_token,
            add_bos: said.add_bos,
            eos_token_ids: said.eos_token_ids,
        });
        let can = said.capabilities;
        Ok(EngineDescription {
            engine: said.engine,
            version: said.version,
            hash_algorithm: said.hash_algorithm,
            context_tokens: said.context_tokens,
            max_running_requests: said.max_running_requests,
            max_waiting_requests: said.max_waiting_requests,
            max_top_logprobs: said.max_top_logprobs,
            kv_blocks: said.kv_blocks,
            block_size_tokens: said.block_size_tokens,
            ranks: said.ranks.max(1),
            claims_hold_for_all: said.claims_hold_for_all,
            makes_choices: said.makes_choices,
            capabilities: Capabilities {
                logprobs: can.logprobs,
                json_schema: can.json_schema,
                grammar: can.grammar,
                regex: can.regex,
                embeddings: can.embeddings,
                images: can.images,
                adapters: can.adapters,
                kv_events: can.kv_events,
                kv_transfer: can.kv_transfer,
                structural_tag: can.structural_tag,
            },
            tokenizer,
            kv_layout: said.kv_layout.map(|layout| KvLayout {
                connector: layout.connector,
                tensor_parallel_size: layout.tensor_parallel_size,
                prefill_context_parallel_size: layout.prefill_context_parallel_size,
                decode_context_parallel_size: layout.decode_context_parallel_size,
            }),
        })
    }

    fn start(&self, host: EngineHost) -> Result<(), KvistError> {
        attached(|py| {
            self.adapter.call_method1(py, "start", (Host::new(host),))?;
            Ok(())
        })?;
        let adapter = attached(|py| Ok(self.adapter.clone_ref(py)))?;
        let (commands, inbox) = channel();
        let thread = std::thread::Builder::new()
            .name("kvist-engine".to_owned())
            .spawn(move || hand_over(&adapter, &inbox))
            .map_err(|error| KvistError::new(Code::EngineFailed, format!("no thread for the engine: {error}")))?;
        *self.courier.lock() = Some(Courier { commands, thread });
        Ok(())
    }

    fn submit(&self, request: EngineRequest, sink: RequestSink) {
        self.send(Command::Submit(Box::new(request), sink));
    }

    fn abort(&self, request_id: &str, reason: AbortReason) {
        self.send(Command::Abort(request_id.to_owned(), reason));
    }

    fn embed(&self, request: EmbedRequest, sink: EmbedSink) {
        self.send(Command::Embed(request, sink));
    }

    // Calls that have to wait for an answer give their place in the runtime away meanwhile.

    fn reset_cache(&self) -> Result<u64, KvistError> {
        tokio::task::block_in_place(|| attached(|py| self.adapter.call_method0(py, "reset_cache")?.extract(py)))
    }

    fn load_adapter(&self, name: &str, path: &str) -> Result<(), KvistError> {
        self.call_when_there("load_adapter", (name, path))
    }

    fn unload_adapter(&self, name: &str) -> Result<(), KvistError> {
        self.call_when_there("unload_adapter", (name,))
    }

    fn close(&self) {
        let courier = self.courier.lock().take();
        if let Some(Courier { commands, thread }) = courier {
            drop(commands);
            if thread.join().is_err() {
                tracing::error!("engine_courier_panicked");
            }
        }
        let closed = attached(|py| self.adapter.call_method0(py, "close").map(drop));
        if let Err(error) = closed {
            tracing::error!(error = error.to_string(), "engine_close_failed");
        }
    }
}

/// Runs until all senders are gone.
fn hand_over(adapter: &Py<PyAny>, inbox: &Receiver<Command>) {
    while let Ok(first) = inbox.recv() {
        let attached = Python::try_attach(|py| {
            let mut next = Some(first);
            // Everything at hand goes over before the interpreter is given back.
            while let Some(command) = next {
                hand_over_one(py, adapter, command);
                next = inbox.try_recv().ok();
            }
        });
        if attached.is_none() {
            // The interpreter is going away; what is left in the channel fails as its sinks are dropped.
            return;
        }
    }
}

fn hand_over_one(py: Python<'_>, adapter: &Py<PyAny>, command: Command) {
    match command {
        Command::Submit(request, sink) => {
            let sink = match Py::new(py, Sink::new(sink)) {
                Ok(sink) => sink,
                Err(error) => {
                    tracing::error!(error = error.to_string(), "engine_submit_failed");
                    return;
                }
            };
            let request = PyBytes::new(py, &request.encode_to_vec());
            if let Err(error) = adapter.call_method1(py, "submit", (request, sink.clone_ref(py))) {
                sink.get().fail(&from_python(py, &error, "the engine refused the request"));
            }
        }
        Command::Embed(request, sink) => {
            let sink = match Py::new(py, EmbedAnswer::new(sink)) {
                Ok(sink) => sink,
                Err(error) => {
                    tracing::error!(error = error.to_string(), "engine_embed_failed");
                    return;
                }
            };
            let request = PyBytes::new(py, &request.encode_to_vec());
            if let Err(error) = adapter.call_method1(py, "embed", (request, sink.clone_ref(py))) {
                sink.get().fail(from_python(py, &error, "the engine refused the call"));
            }
        }
        Command::Abort(request_id, reason) => {
            if let Err(error) = adapter.call_method1(py, "abort", (request_id, i32::from(reason))) {
                // The request goes on to its own end.
                let error = from_python(py, &error, "the engine failed to abort");
                tracing::error!(error = error.to_string(), "engine_abort_failed");
            }
        }
    }
}

/// Calls into Python from a thread that may wait for it.
fn attached<T>(call: impl FnOnce(Python<'_>) -> PyResult<T>) -> Result<T, KvistError> {
    Python::try_attach(|py| call(py).map_err(|error| from_python(py, &error, "the engine failed")))
        .unwrap_or_else(|| Err(KvistError::new(Code::Draining, "the process is ending")))
}
