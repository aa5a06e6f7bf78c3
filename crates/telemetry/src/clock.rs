//! The time of day, as records and messages carry it.

use std::time::{SystemTime, UNIX_EPOCH};

/// Nanoseconds since 1970.
#[must_use]
pub fn now_unix_nanos() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

/// The same as a message.
#[must_use]
pub fn timestamp(unix_nanos: u64) -> prost_types::Timestamp {
    prost_types::Timestamp {
        seconds: i64::try_from(unix_nanos / 1_000_000_000).unwrap_or(i64::MAX),
        nanos: i32::try_from(unix_nanos % 1_000_000_000).unwrap_or(0),
    }
}
