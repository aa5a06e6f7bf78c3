//! Log lines that strangers cause, and must not be able to fill a disk with.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use parking_lot::Mutex;

/// At most one line in this time; what was left out is counted into the next.
const LINE_INTERVAL: Duration = Duration::from_secs(1);

/// Handshakes that failed.
#[derive(Debug, Default)]
pub(crate) struct Complaints {
    state: Mutex<(Option<Instant>, u64)>,
}

impl Complaints {
    /// Notes one, and says it when the last line is long enough ago.
    pub(crate) fn note(&self, peer: Option<SocketAddr>, reason: &str) {
        let mut state = self.state.lock();
        let (last, left_out) = &mut *state;
        let now = Instant::now();
        if last.is_some_and(|last| now.duration_since(last) < LINE_INTERVAL) {
            *left_out += 1;
            return;
        }
        *last = Some(now);
        let others = std::mem::take(left_out);
        drop(state);
        let peer = peer.map(tracing::field::display);
        tracing::warn!(peer, reason, others, "tls_handshake_failed");
    }
}
