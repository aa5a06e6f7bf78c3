//! A router in virtual time: the index, the book and the pipeline of a live one.

use std::{sync::Arc, time::Duration};

use kvist_blocks::{Batch, BlockHash, Incarnation, SourceKey};
use kvist_index::{Applied, DigestVerdict, Holder, Index, IndexSettings, RecentDecisions};
use kvist_ledger::LedgerDigest;
use kvist_schedule::{
    Book, Candidate, Draws, EngineReport, OverlapCursor, Pipeline, Rates, Request, ReservationId, TargetId,
    cached_prompt, expected_output_tokens, recent_is_valid_for,
};

use crate::trace::TRACE_BLOCK_TOKENS;

const INDEX_BYTE_BUDGET: u64 = 1 << 30;
const MOST_RECENT_MARKS: usize = 200_000;

#[derive(Clone, Debug)]
struct Member {
    target: TargetId,
    incarnation: Incarnation,
    unavailable: Option<&'static str>,
    report: Option<EngineReport>,
    is_catching_up: bool,
}

/// Where a request goes, and what was thought of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Choice {
    pub(super) worker: usize,
    pub(super) reservation: ReservationId,
    pub(super) predicted_cached_tokens: u64,
    /// To the first token; none for other scorers than `cost`.
    pub(super) predicted_seconds: Option<f64>,
    /// Prompt tokens that may wait there; with more, another target is better.
    pub(super) most_waiting_tokens: Option<u64>,
}

#[derive(Debug)]
pub(super) struct Router {
    index: Index,
    pub(super) book: Book,
    recent: RecentDecisions,
    pipeline: Pipeline,
    members: Vec<Member>,
    draws: Draws,
}

fn nanos(now: Duration) -> u64 {
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX)
}

impl Router {
    pub(super) fn new(pipeline: Pipeline, prior: Rates, seed: u64) -> Self {
        Self {
            index: Index::new(IndexSettings { byte_budget: INDEX_BYTE_BUDGET }),
            book: Book::new(prior),
            recent: RecentDecisions::new(MOST_RECENT_MARKS, recent_is_valid_for(false)),
            pipeline,
            members: Vec::new(),
            draws: Draws::new(seed),
        }
    }

    /// A worker is known from here on, by its position.
    pub(super) fn add(&mut self, target: TargetId, incarnation: Incarnation) {
        self.members.push(Member { target, incarnation, unavailable: None, report: None, is_catching_up: true });
        let member = self.members.len() - 1;
        self.index.expect_source(&self.source(member), self.members[member].incarnation);
    }

    fn source(&self, member: usize) -> SourceKey {
        let target = &self.members[member].target;
        SourceKey { worker: target.worker.clone(), rank: target.rank }
    }

    pub(super) fn exclude(&mut self, member: usize, reason: &'static str) {
        if let Some(member) = self.members.get_mut(member) {
            member.unavailable = Some(reason);
        }
    }

    /// The process of a worker has ended.
    pub(super) fn close(&mut self, member: usize) {
        self.exclude(member, "connection_lost");
        if let Some(member) = self.members.get(member) {
            self.index.close(&member.target.worker, member.incarnation);
        }
    }

    pub(super) fn take_report(&mut self, now: Duration, member: usize, report: EngineReport) {
        if let Some(member) = self.members.get_mut(member) {
            member.report = Some(EngineReport { received_at: now, ..report });
        }
    }

    /// Takes a batch; true when batches before it are missing and nobody fetches them yet.
    pub(super) fn take_batch(&mut self, now: Duration, member: usize, batch: &Batch) -> bool {
        let Some(known) = self.members.get(member) else { return false };
        let applied = self.index.apply_batch(&self.source(member), known.incarnation, batch, nanos(now));
        self.is_gap(member, matches!(applied, Applied::Gap { .. } | Applied::NewIncarnation))
    }

    /// Holds a digest against the index; true when batches are missing and nobody fetches them yet.
    pub(super) fn take_digest(&mut self, now: Duration, member: usize, digest: &LedgerDigest) -> bool {
        let Some(known) = self.members.get(member) else { return false };
        let (source, next) = (self.source(member), digest.next_sequence);
        let verdict =
            self.index.apply_digest(&source, known.incarnation, next, &digest.tiers, digest.complete, nanos(now));
        self.is_gap(member, verdict == DigestVerdict::Behind)
    }

    fn is_gap(&mut self, member: usize, is_behind: bool) -> bool {
        let is_news = is_behind && !self.members[member].is_catching_up;
        self.members[member].is_catching_up |= is_behind;
        is_news
    }

    /// The last batch that was applied of a worker; none before the first.
    pub(super) fn applied_sequence(&self, member: usize) -> Option<u64> {
        self.index.source(&self.source(member)).and_then(|source| source.next_sequence.checked_sub(1))
    }

    /// Takes the batches that were missing.
    pub(super) fn catch_up(&mut self, now: Duration, member: usize, batches: &[Arc<Batch>]) {
        for batch in batches {
            self.take_batch(now, member, batch);
        }
        self.members[member].is_catching_up = false;
        self.index.mark_caught_up(&self.source(member), self.members[member].incarnation);
    }

    /// A worker has refused what was chosen for it at a time.
    pub(super) fn take_back(
        &mut self,
        choice_at: Duration,
        member: usize,
        reservation: ReservationId,
        hashes: &[BlockHash],
    ) {
        self.book.reservations.release(reservation);
        if let Some(known) = self.members.get(member) {
            let holder = Holder { source: self.source(member), incarnation: known.incarnation };
            self.recent.take_back(choice_at, &holder, hashes);
        }
    }

    /// Pairs of a block and a holder that the index claims.
    pub(super) fn claimed_blocks(&self) -> u64 {
        self.index.collect_garbage();
        self.index.memory().holders
    }

    /// Chooses a worker and promises it the work. None when nobody takes requests.
    pub(super) fn choose(
        &mut self,
        now: Duration,
        hashes: &[BlockHash],
        prompt_tokens: usize,
        tried: Option<usize>,
    ) -> Option<Choice> {
        let overlaps = self.index.lookup(hashes);
        let recent = self.recent.look_up(now, hashes);
        let request = Request {
            prompt_tokens: prompt_tokens as u64,
            expected_output_tokens: expected_output_tokens(None),
            ..Request::default()
        };
        let mut cursor = OverlapCursor::new(&overlaps);
        let mut candidates = Vec::with_capacity(self.members.len());
        for (position, member) in self.members.iter().enumerate() {
            let overlap = cursor.get(&member.target).filter(|overlap| overlap.incarnation == member.incarnation);
            let valid_for = recent_is_valid_for(overlap.is_some_and(|overlap| overlap.state.is_exact()));
            let recent = recent
                .iter()
                .filter(|recent| recent.holder.source.worker == member.target.worker)
                .find(|recent| recent.holder.incarnation == member.incarnation && recent.age <= valid_for)
                .map_or(0, |recent| recent.blocks as usize);
            let tried = (tried == Some(position)).then_some("already_tried");
            let mut cached = cached_prompt(overlap, recent, hashes.len(), TRACE_BLOCK_TOKENS);
            if let Some(cached) = &mut cached {
                // The last block may be partial.
                cached.matched_tokens = cached.matched_tokens.min(request.prompt_tokens);
            }
            candidates.push(Candidate {
                unavailable: member.unavailable.or(tried),
                cached,
                block_size_tokens: TRACE_BLOCK_TOKENS as u64,
                ..Candidate::new(member.target.clone())
            });
        }
        let reports: Vec<Option<EngineReport>> = self.members.iter().map(|member| member.report).collect();
        self.book.describe(now, &mut candidates, &reports);
        let (decision, reservation) =
            self.book.decide(now, &self.pipeline, &request, &candidates, &mut self.draws, true);
        let (worker, reservation) = (decision.chosen?, reservation?);
        let member = &self.members[worker];
        let holder = Holder {
            source: SourceKey { worker: member.target.worker.clone(), rank: member.target.rank },
            incarnation: member.incarnation,
        };
        if !hashes.is_empty() {
            self.recent.note(now, holder, hashes);
        }
        let terms = decision.verdicts[worker].terms;
        Some(Choice {
            worker,
            reservation,
            predicted_cached_tokens: candidates[worker].matched_tokens(),
            predicted_seconds: terms.map(|terms| terms.queue + terms.prefill + terms.transfer),
            most_waiting_tokens: kvist_schedule::most_waiting_tokens(&decision, &candidates),
        })
    }
}
