//! The headers by which clients see what is left of their limits. The one place where they are written.

use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue};
use kvist_router::{RateLimit, RateLimits};

const NAMES_OF_REQUESTS: [&str; 3] =
    ["x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests"];
const NAMES_OF_TOKENS: [&str; 3] =
    ["x-ratelimit-limit-tokens", "x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens"];

/// Writes what a caller's limits are; nothing for a caller without limits.
pub(crate) fn put_rate_limits(headers: &mut HeaderMap, limits: &RateLimits) {
    for (names, limit) in [(NAMES_OF_REQUESTS, limits.requests), (NAMES_OF_TOKENS, limits.tokens)] {
        let Some(RateLimit { limit, remaining, reset }) = limit else { continue };
        for (name, value) in names.into_iter().zip([limit.to_string(), remaining.to_string(), duration(reset)]) {
            if let Ok(value) = HeaderValue::try_from(value) {
                headers.insert(HeaderName::from_static(name), value);
            }
        }
    }
}

/// A time as OpenAI writes it: `12ms`, `1s`, `6m0s`.
fn duration(time: Duration) -> String {
    // Rounded up: who comes back when it says is not too early.
    let milliseconds = time.as_nanos().div_ceil(1_000_000);
    if milliseconds < 1000 {
        return format!("{milliseconds}ms");
    }
    let seconds = milliseconds.div_ceil(1000);
    let (hours, minutes, seconds) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    match (hours, minutes) {
        (0, 0) => format!("{seconds}s"),
        (0, _) => format!("{minutes}m{seconds}s"),
        _ => format!("{hours}h{minutes}m{seconds}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_written_as_clients_know_them() {
        for (milliseconds, text) in [
            (0, "0ms"),
            (12, "12ms"),
            (999, "999ms"),
            (1000, "1s"),
            (1001, "2s"),
            (360_000, "6m0s"),
            (3_661_000, "1h1m1s"),
        ] {
            assert_eq!(text, duration(Duration::from_millis(milliseconds)));
        }
        assert_eq!("1ms", duration(Duration::from_micros(1)));
    }

    #[test]
    fn only_limits_that_there_are_are_told() {
        let mut headers = HeaderMap::new();
        put_rate_limits(&mut headers, &RateLimits::default());
        assert!(headers.is_empty());
        let tokens = Some(RateLimit { limit: 1000, remaining: 250, reset: Duration::from_millis(12) });
        put_rate_limits(&mut headers, &RateLimits { requests: None, tokens });
        let told: Vec<&str> = NAMES_OF_TOKENS.iter().map(|name| headers[*name].to_str().unwrap()).collect();
        assert_eq!((vec!["1000", "250", "12ms"], 3), (told, headers.len()));
    }
}
