//! Reservations that another gateway holds.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use kvist_proto::events::v1::Receipt;
use parking_lot::Mutex;

use crate::{
    door::Place,
    explain::{Ending, SeenDecision},
    select::Reservation,
};

/// How long a lease lives when nobody says.
pub(crate) const DEFAULT_LEASE: Duration = Duration::from_secs(60);
/// How long it may live.
pub(crate) const LONGEST_LEASE: Duration = Duration::from_secs(3600);

/// A target that somebody else sends a request to. What it holds ends with it, the reservation first, so that the place is
/// given on with the target's room.
#[derive(Debug)]
pub(crate) struct Lease {
    #[expect(dead_code, reason = "held for its end")]
    pub(crate) reservation: Reservation,
    #[expect(dead_code, reason = "held for its end")]
    pub(crate) place: Place,
    pub(crate) decision: Arc<SeenDecision>,
    pub(crate) expires_at: Instant,
}

/// Reservations by the id that `Select` gave out.
#[derive(Debug, Default)]
pub(crate) struct Leases {
    open: Mutex<HashMap<String, Lease>>,
}

impl Leases {
    pub(crate) fn add(&self, id: String, lease: Lease) {
        // An older one of the same id ends after the lock is free.
        let _older = self.open.lock().insert(id, lease);
    }

    /// Ends a lease; false when it had ended before.
    pub(crate) fn release(&self, id: &str, receipt: Option<Receipt>) -> bool {
        let lease = self.open.lock().remove(id);
        if let Some(lease) = &lease {
            let _ = lease.decision.ending.set(Ending { receipt, outcome: "released", time_to_first_token: None });
        }
        lease.is_some()
    }

    /// Ends what nobody has released in time.
    pub(crate) fn expire(&self, now: Instant) {
        // Dropped after the lock is free.
        let _expired: Vec<Lease> =
            self.open.lock().extract_if(|_, lease| lease.expires_at <= now).map(|(_, l)| l).collect();
    }

    /// Ends all.
    pub(crate) fn clear(&self) {
        let _all = std::mem::take(&mut *self.open.lock());
    }
}
