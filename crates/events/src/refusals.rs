//! What was said and could not be used: counted by reason, and logged once for each speaker and interval.
//!
//! Whoever floods the bus with nonsense must not flood the log as well, and must not hide another speaker's.

use std::{collections::HashMap, time::Duration};

/// Time between two lines about one speaker and reason.
const LOG_INTERVAL: Duration = Duration::from_secs(60);
/// Most speakers remembered for the log; beyond them statements are counted alone until the interval is over.
const MOST_SPEAKERS: usize = 1_024;
/// Longest name of a speaker that is logged; it may be a stranger's choice.
const MOST_NAME_CHARACTERS: usize = 128;

/// Why a statement was not used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Refusal {
    /// No message of ours, or one that does not say who speaks.
    Garbage,
    /// Larger than a message may be.
    Oversized,
    /// About another source than its subject names.
    WrongSubject,
    /// Of a worker that the cluster state does not name.
    UnknownWorker,
    /// Of a known source, and not to be understood.
    Malformed,
    /// A history that ended early or contradicts itself.
    BrokenHistory,
}

impl Refusal {
    fn word(self) -> &'static str {
        match self {
            Self::Garbage => "garbage",
            Self::Oversized => "oversized",
            Self::WrongSubject => "wrong_subject",
            Self::UnknownWorker => "unknown_worker",
            Self::Malformed => "malformed",
            Self::BrokenHistory => "broken_history",
        }
    }
}

/// Statements that could not be used since the start, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct RefusalCounts {
    /// Messages that are none of ours, or do not say who speaks.
    pub garbage: u64,
    /// Messages larger than one may be.
    pub oversized: u64,
    /// Messages about another source than their subject names.
    pub wrong_subject: u64,
    /// Statements of workers that the cluster state does not name.
    pub unknown_workers: u64,
    /// Statements of known sources that could not be understood.
    pub malformed: u64,
    /// Histories that ended early or contradict themselves.
    pub broken_histories: u64,
}

#[derive(Debug)]
struct Said {
    at: Duration,
    since_then: u64,
}

/// Counts, and decides what is logged.
#[derive(Debug, Default)]
pub(crate) struct Refusals {
    counts: RefusalCounts,
    said: HashMap<(Refusal, Box<str>), Said>,
}

impl Refusals {
    pub(crate) fn counts(&self) -> RefusalCounts {
        self.counts
    }

    /// Counts a statement; true when it was logged.
    pub(crate) fn note(&mut self, refusal: Refusal, speaker: &str, now: Duration) -> bool {
        let counts = &mut self.counts;
        *match refusal {
            Refusal::Garbage => &mut counts.garbage,
            Refusal::Oversized => &mut counts.oversized,
            Refusal::WrongSubject => &mut counts.wrong_subject,
            Refusal::UnknownWorker => &mut counts.unknown_workers,
            Refusal::Malformed => &mut counts.malformed,
            Refusal::BrokenHistory => &mut counts.broken_histories,
        } += 1;
        let name: Box<str> = speaker.chars().take(MOST_NAME_CHARACTERS).collect();
        let key = (refusal, name);
        let mut more = 0;
        if let Some(said) = self.said.get_mut(&key) {
            if now.saturating_sub(said.at) < LOG_INTERVAL {
                said.since_then += 1;
                return false;
            }
            more = said.since_then;
        } else if self.said.len() >= MOST_SPEAKERS {
            self.said.retain(|_, said| now.saturating_sub(said.at) < LOG_INTERVAL);
            if self.said.len() >= MOST_SPEAKERS {
                return false;
            }
        }
        tracing::warn!(reason = refusal.word(), source = &*key.1, more, "kv_statement_refused");
        self.said.insert(key, Said { at: now, since_then: 0 });
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// R25.
    #[test]
    fn a_speaker_is_logged_once_an_interval_and_hides_no_other() {
        let mut refusals = Refusals::default();
        let soon = Duration::from_secs(1);
        assert!(refusals.note(Refusal::Garbage, "one", Duration::ZERO));
        assert!(!refusals.note(Refusal::Garbage, "one", soon));
        assert!(refusals.note(Refusal::Garbage, "two", soon));
        assert!(refusals.note(Refusal::Malformed, "one", soon));
        assert!(refusals.note(Refusal::Garbage, "one", LOG_INTERVAL));
        assert_eq!(RefusalCounts { garbage: 4, malformed: 1, ..RefusalCounts::default() }, refusals.counts());
    }

    /// R25.
    #[test]
    fn strangers_without_number_take_no_memory_without_bound() {
        let mut refusals = Refusals::default();
        for number in 0..10 * MOST_SPEAKERS {
            refusals.note(Refusal::UnknownWorker, &format!("stranger {number}"), Duration::ZERO);
        }
        assert_eq!((MOST_SPEAKERS, 10 * MOST_SPEAKERS as u64), (refusals.said.len(), refusals.counts.unknown_workers));
        assert!(refusals.note(Refusal::Garbage, "somebody else, an interval later", LOG_INTERVAL));
        refusals.note(Refusal::Garbage, &"long".repeat(MOST_NAME_CHARACTERS), LOG_INTERVAL);
        assert!(refusals.said.keys().all(|(_, name)| name.len() <= MOST_NAME_CHARACTERS));
    }
}
