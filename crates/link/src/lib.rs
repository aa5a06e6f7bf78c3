//! Both ends of Connect: frames, side streams, load, aborts.
//!
//! One stream for each (router, worker), not for each request: whenever a writer is ready it sends one frame with
//! everything at hand, so the cost of a token falls as load rises. [`WorkerLink`] is the router's end, [`LinkServer`]
//! the worker's. There is no resume: loss of the stream ends all its requests at both ends.

mod buffer;
mod failure;
mod frame;
mod router;
mod server;
mod slot;
mod stores;
mod wake;

pub use buffer::{EventReceiver, EventSender, event_buffer};
pub use failure::{error_from_failed, failed_from_error};
pub use frame::FRAME_LIMIT_BYTES;
pub use router::{LinkSettings, LinkState, RequestStream, TimedLoad, WorkerLink};
pub use server::{ConnectFrames, LinkServer, LinkServerSettings, RequestAcceptor, RequestOutput};
pub use slot::{Overflow, RequestEvent};
pub use stores::{PromptStore, ResultStore};
pub use wake::WakeBatch;

/// Largest message either end takes; frames are far smaller, this bounds a fault.
pub const MESSAGE_LIMIT_BYTES: usize = 64 * 1024 * 1024;
