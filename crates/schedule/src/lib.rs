//! Filter, score, pick; reservations, admission, breakers.
//!
//! Pure: time and randomness are arguments, so one scheduler runs live and in the twin. A decision takes candidates as
//! the index and the load reports describe them, leaves out what must not serve, scores the rest, and picks one. It
//! returns all of that, so that every decision can be explained.

mod admission;
mod admission_config;
mod book;
mod breaker;
mod candidate;
pub mod catalogue;
mod config;
mod cost;
mod draws;
mod overlap;
mod patience;
mod pipeline;
mod rates;
mod reservations;
mod rounds;
mod saturation;
mod score;
mod scorers;

pub use admission::{Admission, Ended, Offer, Refusal, TicketId, TicketRequest};
pub use admission_config::{AdmissionConfig, ClassConfig};
pub use book::{Book, EngineReport, expected_output_tokens};
pub use breaker::{BreakerBook, BreakerSettings, BreakerState, Report};
pub use candidate::{Cached, Candidate, Load, Request, Round, TargetId};
pub use config::{ConfigError, PRESETS, PipelineConfig, Step};
pub use cost::{CostParameters, CostTerms};
pub use draws::Draws;
pub use overlap::{OverlapCursor, cached_prompt, recent_is_valid_for};
pub use patience::{MOST_REFUSALS, most_waiting_tokens};
pub use pipeline::{Decision, Outcome, Pipeline, Verdict};
pub use rates::{PrefillRate, RateBook, Rates};
pub use reservations::{OutstandingReport, ReservationId, Reservations, TargetPromise, Work};
pub use rounds::{PairDecision, RoundPlan, RoundSettings, decide_pair, plan_rounds};
pub use saturation::{SATURATION_THRESHOLD, Saturation};
pub use score::Score;
pub use scorers::Memory;
