//! From what two sockets of an engine deliver to one gapless stream. No I/O and no clock.
//!
//! The PUB socket loses messages silently and says nothing while it is idle; the replay socket says what was published
//! from a number on, as far as it remembers. Nothing in either tells one start of an engine from the next, and a new
//! start may be past the number at which the old one ended. So each question begins with the last batch that was taken:
//! if it does not come back as it was, another engine answers.

use std::{
    collections::VecDeque,
    hash::{DefaultHasher, Hash as _, Hasher as _},
};

use bytes::Bytes;

/// Batches whose digests are remembered, to tell a repetition from another engine's.
const REMEMBERED: usize = 1024;

/// The stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Said {
    /// The next batch of the engine.
    Batch(u64, Bytes),
    /// Batches are lost for ever; the next one does not follow the last.
    Lost,
    /// Another start of the engine speaks from here on.
    Restarted,
}

/// A question to the replay socket: what was published from a number on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Question {
    pub(super) number: u64,
    pub(super) from: u64,
    /// Earlier attempts that failed.
    pub(super) attempt: u32,
}

/// What happened since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VllmStreamCounters {
    /// Batches taken from the PUB socket.
    pub live_batches: u64,
    /// Batches taken from the replay socket.
    pub replayed_batches: u64,
    /// Batches that were taken before.
    pub duplicate_batches: u64,
    /// Gaps seen in sequence numbers.
    pub gaps: u64,
    /// Times that batches were lost for ever.
    pub losses: u64,
    /// Other starts of the engine.
    pub restarts: u64,
    /// Questions to the replay socket.
    pub questions: u64,
    /// Questions without a whole answer.
    pub failed_questions: u64,
    /// Batches that could not be kept while a question was open.
    pub dropped_batches: u64,
    /// Messages that are no batch.
    pub malformed_messages: u64,
}

#[derive(Debug)]
struct Asking {
    question: Question,
    /// The last batch came back as it was.
    is_verified: bool,
    /// A batch was kept already that does not follow this number: the engine has published what is missing.
    missing: Option<u64>,
}

#[derive(Debug)]
pub(super) struct Sequencer {
    next: u64,
    /// Digests of the batches before `next`, the last one at the end.
    digests: VecDeque<u64>,
    asking: Option<Asking>,
    last_number: u64,
    kept: VecDeque<(u64, Bytes)>,
    kept_bytes: usize,
    most_kept_bytes: usize,
    /// A loss was said, and nothing was taken since.
    is_lost: bool,
    said: VecDeque<Said>,
    new_question: Option<Question>,
    /// The engine has confirmed what was taken, and nothing speaks against it since.
    is_confirmed: bool,
    pub(super) counters: VllmStreamCounters,
}

fn digest(payload: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    payload.hash(&mut hasher);
    hasher.finish()
}

impl Sequencer {
    pub(super) fn new(most_kept_bytes: usize) -> Self {
        Self {
            next: 0,
            digests: VecDeque::new(),
            asking: None,
            last_number: 0,
            kept: VecDeque::new(),
            kept_bytes: 0,
            most_kept_bytes,
            is_lost: false,
            said: VecDeque::new(),
            new_question: None,
            is_confirmed: false,
            counters: VllmStreamCounters::default(),
        }
    }

    /// The stream since the last call.
    pub(super) fn take_said(&mut self) -> Option<Said> {
        self.said.pop_front()
    }

    /// A question that arose; it supersedes earlier ones.
    pub(super) fn take_question(&mut self) -> Option<Question> {
        self.new_question.take()
    }

    /// Whether the replay socket has confirmed the stream since the last connection, start, or failed question.
    pub(super) fn is_confirmed(&self) -> bool {
        self.is_confirmed
    }

    pub(super) fn is_asking(&self) -> bool {
        self.asking.is_some()
    }

    /// The PUB socket is connected, perhaps to another engine: what was said meanwhile is missing.
    pub(super) fn connected(&mut self) {
        // Perhaps another engine's, and the answer has them all.
        self.kept.clear();
        self.kept_bytes = 0;
        self.is_confirmed = false;
        self.ask(0);
    }

    /// The PUB socket's connection is gone.
    pub(super) fn disconnected(&mut self) {
        self.is_confirmed = false;
    }

    /// Nothing was said for a while: perhaps the last batch was lost.
    pub(super) fn idle(&mut self) {
        if self.asking.is_none() {
            self.ask(0);
        }
    }

    /// A batch from the PUB socket.
    pub(super) fn live(&mut self, sequence: u64, payload: Bytes) {
        if self.asking.is_some() {
            return self.keep(sequence, payload);
        }
        if sequence == self.next {
            self.counters.live_batches += 1;
            self.take(sequence, payload);
        } else if sequence > self.next {
            self.counters.gaps += 1;
            self.keep(sequence, payload);
            self.ask(0);
        } else if self.remembers(sequence, &payload) {
            self.counters.duplicate_batches += 1;
        } else {
            // Another engine's, or older than anything that is remembered: the replay socket knows.
            self.keep(sequence, payload);
            self.ask(0);
        }
    }

    /// A batch of an answer.
    pub(super) fn answered(&mut self, number: u64, sequence: u64, payload: Bytes) {
        let Some(asking) = self.asking.as_mut().filter(|asking| asking.question.number == number) else { return };
        if !asking.is_verified {
            if sequence >= self.next {
                // The engine no longer has the last batch, so that nobody can say whether it is the same engine.
                asking.is_verified = true;
                self.lose(sequence);
            } else if sequence + 1 < self.next {
                return;
            } else if self.digests.back() == Some(&digest(&payload)) {
                asking.is_verified = true;
                return;
            } else {
                return self.restart();
            }
        }
        if sequence < self.next {
            return;
        }
        if sequence > self.next {
            self.lose(sequence);
        }
        self.counters.replayed_batches += 1;
        self.take(sequence, payload);
    }

    /// The end of an answer.
    pub(super) fn answer_ended(&mut self, number: u64) {
        let Some(asking) = self.asking.take_if(|asking| asking.question.number == number) else { return };
        if !asking.is_verified {
            // An engine that has published a batch remembers it: this one has not.
            return self.restart();
        }
        let mut kept = std::mem::take(&mut self.kept);
        self.kept_bytes = 0;
        while let Some((sequence, payload)) = kept.pop_front() {
            if sequence > self.next {
                if asking.missing == Some(self.next) {
                    // The engine does not have what is missing.
                    self.lose(sequence);
                } else {
                    // Lost while the answer was on its way.
                    self.counters.gaps += 1;
                    self.kept = kept;
                    self.kept_bytes = self.kept.iter().map(|(_, payload)| payload.len()).sum();
                    self.kept.push_front((sequence, payload));
                    return self.ask(0);
                }
            }
            if sequence == self.next {
                self.counters.live_batches += 1;
                self.take(sequence, payload);
            } else {
                // The engine has just shown that it is the same.
                self.counters.duplicate_batches += 1;
            }
        }
        self.is_confirmed = true;
    }

    /// A question that got no whole answer. It is asked again.
    pub(super) fn answer_failed(&mut self, number: u64) {
        let Some(asking) = self.asking.as_ref().filter(|asking| asking.question.number == number) else { return };
        self.counters.failed_questions += 1;
        self.is_confirmed = false;
        let attempt = asking.question.attempt.saturating_add(1);
        self.ask(attempt);
    }

    /// Whether batches wait for an answer.
    pub(super) fn has_kept(&self) -> bool {
        !self.kept.is_empty()
    }

    /// Nobody answers while the engine goes on: what is missing counts as lost. Without news there is nothing to give
    /// up, what was said was true.
    pub(super) fn give_up(&mut self) {
        if self.asking.is_none() || self.kept.is_empty() {
            return;
        }
        self.asking = None;
        self.new_question = None;
        self.kept_bytes = 0;
        self.digests.clear();
        let mut is_first = true;
        for (sequence, payload) in std::mem::take(&mut self.kept) {
            if std::mem::take(&mut is_first) || sequence > self.next {
                self.lose(sequence);
            }
            if sequence < self.next {
                self.counters.duplicate_batches += 1;
            } else {
                self.counters.live_batches += 1;
                self.take(sequence, payload);
            }
        }
    }

    fn ask(&mut self, attempt: u32) {
        self.last_number += 1;
        self.counters.questions += 1;
        let from = self.next.saturating_sub(u64::from(!self.digests.is_empty()));
        let question = Question { number: self.last_number, from, attempt };
        let missing = self.kept.front().filter(|(sequence, _)| *sequence > self.next).map(|_| self.next);
        // Before the first batch there is nothing to compare.
        let is_verified = self.digests.is_empty();
        self.asking = Some(Asking { question, is_verified, missing });
        self.new_question = Some(question);
    }

    fn keep(&mut self, sequence: u64, payload: Bytes) {
        self.kept_bytes += payload.len();
        self.kept.push_back((sequence, payload));
        while self.kept_bytes > self.most_kept_bytes && self.kept.len() > 1 {
            // The answer will be newer than what was kept first; what is missing then is a gap like any other.
            if let Some((_, payload)) = self.kept.pop_front() {
                self.kept_bytes -= payload.len();
                self.counters.dropped_batches += 1;
            }
        }
    }

    fn take(&mut self, sequence: u64, payload: Bytes) {
        if self.digests.len() == REMEMBERED {
            self.digests.pop_front();
        }
        self.digests.push_back(digest(&payload));
        self.next = sequence + 1;
        self.is_lost = false;
        self.said.push_back(Said::Batch(sequence, payload));
    }

    fn remembers(&self, sequence: u64, payload: &[u8]) -> bool {
        let back = usize::try_from(self.next - sequence).unwrap_or(usize::MAX);
        let position = self.digests.len().checked_sub(back);
        position.and_then(|position| self.digests.get(position)) == Some(&digest(payload))
    }

    /// Goes on at a number that does not follow.
    fn lose(&mut self, next: u64) {
        if !self.is_lost {
            self.counters.losses += 1;
            self.said.push_back(Said::Lost);
        }
        self.is_lost = true;
        self.next = next;
        // What comes does not follow these: they are no evidence for it.
        self.digests.clear();
    }

    /// Everything is of another start of the engine, also what was kept.
    fn restart(&mut self) {
        self.counters.restarts += 1;
        self.is_confirmed = false;
        self.said.push_back(Said::Restarted);
        self.next = 0;
        self.digests.clear();
        self.is_lost = false;
        self.asking = None;
        self.ask(0);
    }
}

#[cfg(test)]
#[path = "sequencer_tests.rs"]
mod tests;
