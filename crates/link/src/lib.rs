//! Both ends of `EngineService.Connect`: frames, side streams, load, aborts.
//!
//! One stream for each (router, worker) carries all requests. A writer sends everything at hand in one frame and never
//! waits for more; a reader always reads, and a request whose consumer is slow fills its own bounded buffer and fails
//! alone. Loss of the stream ends all its requests at both ends.

mod outbox;
mod request;
mod router_end;
mod worker_end;

pub use request::{LinkEvent, RequestStream};
pub use router_end::{LinkSettings, LinkState, WorkerLink};
pub use worker_end::{Acceptor, LoadListener, Outbound, StreamSink, serve};

/// Largest frame, encoded. A larger prompt travels by `PutPrompt`.
pub const FRAME_BYTES: usize = 64 * 1024;

/// Prompts of more tokens than this travel by `PutPrompt`: at five bytes a token at most, the rest fits a frame.
pub const INLINE_PROMPT_TOKENS: usize = 12_000;

/// Tokens in one message of `PutPrompt`.
pub const PROMPT_CHUNK_TOKENS: usize = 100_000;
