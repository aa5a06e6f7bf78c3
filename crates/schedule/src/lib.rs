//! Filter, score, pick; reservations.
//!
//! Pure: time and randomness are arguments, so one scheduler runs live and in the twin. A decision takes candidates as
//! the index and the load reports describe them, leaves out what cannot serve, gives each of the rest a cost, and picks
//! the smallest.

mod decide;
mod reservations;

pub use decide::{Candidate, Decision, POLICY_LEAST_TOKENS, Scored, TargetId, decide};
pub use reservations::{ReservationId, Reservations, TargetPromise};
