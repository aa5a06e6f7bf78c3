//! Prompts that have ended engines.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use kvist_blocks::{Incarnation, WorkerUid};
use parking_lot::Mutex;

/// Losses of different engines after which a prompt is held back.
const LOSSES: usize = 2;
const REMEMBERED_FOR: Duration = Duration::from_secs(600);
const REMEMBERED_PROMPTS: usize = 4096;

#[derive(Debug)]
struct Losses {
    engines: Vec<(WorkerUid, Incarnation)>,
    at: Instant,
}

/// Counts, for each prompt that was running without a token when its engine was lost, how many engines that were. One
/// loss also strikes the innocent requests beside the guilty one; the same prompt at the second loss hardly does.
#[derive(Debug, Default)]
pub(crate) struct Quarantine {
    prompts: Mutex<HashMap<u64, Losses>>,
}

impl Quarantine {
    /// An engine was lost before it answered this prompt.
    pub(crate) fn engine_lost(&self, fingerprint: u64, worker: WorkerUid, incarnation: Incarnation, now: Instant) {
        let mut prompts = self.prompts.lock();
        if prompts.len() >= REMEMBERED_PROMPTS {
            prompts.retain(|_, losses| now.duration_since(losses.at) < REMEMBERED_FOR);
            if prompts.len() >= REMEMBERED_PROMPTS {
                return;
            }
        }
        let losses = prompts.entry(fingerprint).or_insert_with(|| Losses { engines: Vec::new(), at: now });
        losses.at = now;
        let engine = (worker, incarnation);
        if !losses.engines.contains(&engine) && losses.engines.len() < LOSSES {
            losses.engines.push(engine);
        }
    }

    /// An engine has answered it: it was innocent.
    pub(crate) fn answered(&self, fingerprint: impl FnOnce() -> u64) {
        let mut prompts = self.prompts.lock();
        if !prompts.is_empty() {
            prompts.remove(&fingerprint());
        }
    }

    /// Whether the prompt is held back. The fingerprint is computed only when there is something to compare it with.
    pub(crate) fn holds(&self, fingerprint: impl FnOnce() -> u64, now: Instant) -> bool {
        let prompts = self.prompts.lock();
        if prompts.is_empty() {
            return false;
        }
        prompts
            .get(&fingerprint())
            .is_some_and(|losses| losses.engines.len() >= LOSSES && now.duration_since(losses.at) < REMEMBERED_FOR)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_engines_condemn_a_prompt_and_an_answer_acquits_it() {
        let (quarantine, now) = (Quarantine::default(), Instant::now());
        quarantine.engine_lost(7, "a".into(), Incarnation(1), now);
        quarantine.engine_lost(7, "a".into(), Incarnation(1), now);
        assert!(!quarantine.holds(|| 7, now));
        quarantine.engine_lost(7, "a".into(), Incarnation(2), now);
        assert!(quarantine.holds(|| 7, now) && !quarantine.holds(|| 8, now));
        assert!(!quarantine.holds(|| 7, now + REMEMBERED_FOR));
        quarantine.answered(|| 7);
        assert!(!quarantine.holds(|| 7, now));
    }
}
