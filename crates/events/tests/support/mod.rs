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
    wait(Duration::from_secs(30), Duration::from_millis(2), what, &mut condition).await;
}

/// What takes a machine with better things to do that long.
pub(crate) const MINUTES: Duration = Duration::from_secs(300);

/// Waits for a condition that many have to come together for.
pub(crate) async fn eventually_within(limit: Duration, what: &str, mut condition: impl FnMut() -> bool) {
    wait(limit, Duration::from_millis(500), what, &mut condition).await;
}

async fn wait(limit: Duration, pause: Duration, what: &str, condition: &mut impl FnMut() -> bool) {
    let deadline = Instant::now() + limit;
    while !condition() {
        assert!(Instant::now() < deadline, "not in time: {what}");
        tokio::time::sleep(pause).await;
    }
}
