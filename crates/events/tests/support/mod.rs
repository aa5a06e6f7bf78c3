//! A real NATS server, scripted workers over real ledgers, and a bus in between that can lose and spoil messages.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "support of tests")]

mod forwarder;
mod kvmaster;
mod nats;
mod worker;

use std::time::{Duration, Instant};

pub(crate) use forwarder::Forwarder;
pub(crate) use kvmaster::ScriptedKvMaster;
pub(crate) use nats::NatsServer;
pub(crate) use worker::ScriptedWorker;

/// Waits for a condition, for as long as the slowest machine may need.
pub(crate) async fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !condition() {
        assert!(Instant::now() < deadline, "not in time: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}
