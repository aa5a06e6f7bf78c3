//! Ids of requests that are answered without the router.

use std::{
    hash::{BuildHasher as _, RandomState},
    sync::atomic::{AtomicU64, Ordering},
};

/// Longest id of a client that is taken over.
const LONGEST: usize = 128;

/// Makes ids that no other process makes.
#[derive(Debug)]
pub(crate) struct RequestIds {
    prefix: u64,
    next: AtomicU64,
}

impl RequestIds {
    pub(crate) fn new() -> Self {
        // The standard library's hasher is seeded at random for each process and each use.
        Self { prefix: RandomState::new().hash_one(std::process::id()), next: AtomicU64::new(0) }
    }

    pub(crate) fn next(&self) -> String {
        format!("edge-{:016x}-{:x}", self.prefix, self.next.fetch_add(1, Ordering::Relaxed))
    }

    /// A client's own id, as it may go into a header and a log line.
    pub(crate) fn of_client(id: &str) -> Option<String> {
        let id: String = id.chars().filter(char::is_ascii_graphic).take(LONGEST).collect();
        (!id.is_empty()).then_some(id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_differ_within_a_process_and_between_two() {
        let (one, other) = (RequestIds::new(), RequestIds::new());
        let ids = [one.next(), one.next(), other.next(), other.next()];
        let distinct: std::collections::HashSet<&String> = ids.iter().collect();
        assert_eq!(ids.len(), distinct.len());
    }

    #[test]
    fn the_id_of_a_client_is_cut_to_what_a_header_may_hold() {
        assert_eq!(Some("mine-1".to_owned()), RequestIds::of_client("mine -1"));
        assert_eq!(None, RequestIds::of_client(" "));
        assert_eq!(LONGEST, RequestIds::of_client(&"x".repeat(500)).unwrap().len());
    }
}
