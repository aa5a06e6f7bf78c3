//! Numbers of attached engines.

use std::{collections::BTreeMap, sync::atomic::Ordering};

use kvist_ledger::{Ledger, LedgerCounters, vllm::Refusal};
use serde::Serialize;

use super::AttachedRank;

/// Numbers of one engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct AttachedEngineStats {
    /// UID under which its ledger speaks.
    pub worker_uid: String,
    /// Its name on this node.
    pub name: String,
    /// By rank.
    pub ranks: Vec<AttachedRankStats>,
}

/// Numbers of one rank since the agent's start.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct AttachedRankStats {
    /// This start of the engine, as far as it is known.
    pub incarnation: u64,
    /// Whether the PUB socket is connected.
    pub connected: bool,
    /// Whether the engine confirms what was said so far.
    pub in_touch: bool,
    /// Whether the account misses nothing.
    pub complete: bool,
    /// Blocks held.
    pub blocks: u64,
    /// Hints kept.
    pub hints: u64,
    /// Batches of the engine that were taken, by where they came from: `live`, `replayed`.
    pub batches: BTreeMap<&'static str, u64>,
    /// Batches that were taken before.
    pub duplicate_batches: u64,
    /// Events that were understood.
    pub events: u64,
    /// Hashes of blocks that were recomputed, by outcome: `verified`, `mismatched`.
    pub hash_checks: BTreeMap<&'static str, u64>,
    /// Messages, batches and events that were refused, by reason.
    pub refused: BTreeMap<&'static str, u64>,
    /// Gaps in the engine's numbers.
    pub gaps: u64,
    /// Times that batches were lost for ever.
    pub losses: u64,
    /// Other starts of the engine.
    pub restarts: u64,
    /// Questions to the replay socket.
    pub questions: u64,
    /// Questions without a whole answer.
    pub failed_questions: u64,
    /// Blocks that were left out of the account, by reason.
    pub left_out_blocks: BTreeMap<&'static str, u64>,
}

impl AttachedRank {
    pub(super) fn stats(&self) -> AttachedRankStats {
        let reader = *self.reader.lock();
        let (ledger, mut counters) = {
            let present = self.present.lock();
            (std::sync::Arc::clone(&present.ledger), present.earlier)
        };
        let (own, complete, blocks, hints) = ledger.read(|ledger: &Ledger| {
            (ledger.counters(), ledger.is_complete(), ledger.block_count(), ledger.hint_count() as u64)
        });
        counters += own;
        let stream = reader.stream;
        let mut refused: BTreeMap<_, _> =
            Refusal::ALL.iter().map(|reason| (reason.name(), reader.batches.refused(*reason))).collect();
        refused.insert("not_a_message", stream.malformed_messages);
        refused.insert("another_rank", self.foreign_batches.load(Ordering::Relaxed));
        refused.insert("tokens_do_not_fill_blocks", counters.malformed_events);
        AttachedRankStats {
            incarnation: ledger.source().incarnation,
            connected: reader.is_connected,
            in_touch: ledger.is_in_touch(),
            complete,
            blocks,
            hints,
            batches: [("live", stream.live_batches), ("replayed", stream.replayed_batches)].into(),
            duplicate_batches: stream.duplicate_batches,
            events: reader.batches.events,
            hash_checks: [
                ("verified", reader.batches.verified_hashes),
                ("mismatched", reader.batches.mismatched_hashes),
            ]
            .into(),
            refused,
            gaps: stream.gaps,
            losses: stream.losses,
            restarts: stream.restarts,
            questions: stream.questions,
            failed_questions: stream.failed_questions,
            left_out_blocks: left_out(&counters),
        }
    }
}

fn left_out(counters: &LedgerCounters) -> BTreeMap<&'static str, u64> {
    BTreeMap::from([
        ("unknown_parent", counters.unknown_parents),
        ("unknown_content", counters.unknown_contents),
        ("unknown_adapter", counters.unknown_namespaces),
        ("unstated_keys", counters.unstated_keys),
        ("odd_block_size", counters.odd_block_sizes),
        ("conflicting_hash", counters.conflicting_hashes),
    ])
}
