//! Messages to the words of ledger and index, and back.

use kvist_blocks::{Batch, BlockHash, Digest, Event, Incarnation, Rank, Run, SourceKey, Tier, TierDigest};
use kvist_history::convert::{self as history, tier_digest_to};
pub use kvist_history::convert::{batch_to, digest_to, snapshot_to};
use kvist_index::{SourceState, SourceStatus};
use kvist_ledger::LedgerDigest;
use kvist_proto::{
    engine::v1::SnapshotChunk,
    events::v1::{self, SourceId, kv_event},
    router,
};
use kvist_telemetry::timestamp;

use crate::EventsError;

fn unix_nanos(timestamp: Option<&prost_types::Timestamp>) -> u64 {
    timestamp.map_or(0, |time| {
        let seconds = u64::try_from(time.seconds).unwrap_or(0);
        seconds.saturating_mul(1_000_000_000).saturating_add(u64::try_from(time.nanos).unwrap_or(0))
    })
}

/// Who speaks, from a message.
///
/// # Errors
/// The message does not say.
pub fn source_from(source: Option<&SourceId>) -> Result<(SourceKey, Incarnation), EventsError> {
    let source = source.ok_or(EventsError::Malformed("no source"))?;
    if source.worker_uid.is_empty() || source.incarnation == 0 {
        return Err(EventsError::Malformed("source without worker or incarnation"));
    }
    let key = SourceKey { worker: source.worker_uid.as_str().into(), rank: Rank(source.rank) };
    Ok((key, Incarnation(source.incarnation)))
}

/// Who speaks, as a message.
#[must_use]
pub fn source_to(key: &SourceKey, incarnation: Incarnation) -> SourceId {
    SourceId { worker_uid: key.worker.as_str().to_owned(), rank: key.rank.0, incarnation: incarnation.0 }
}

fn tier_from(number: i32) -> Result<Tier, EventsError> {
    Tier::from_number(number).ok_or(EventsError::Malformed("unknown tier"))
}

fn hashes_from(hashes: &[u64]) -> Vec<BlockHash> {
    hashes.iter().copied().map(BlockHash).collect()
}

/// A batch from its message.
///
/// # Errors
/// It holds an event or a tier that is not known. A batch is applied whole or not at all.
pub fn batch_from(message: &v1::KvEventBatch) -> Result<Batch, EventsError> {
    let events = message
        .events
        .iter()
        .map(|event| match event.event.as_ref().ok_or(EventsError::Malformed("unknown event"))? {
            kv_event::Event::Stored(stored) => Ok(Event::Stored {
                tier: tier_from(stored.tier)?,
                parent: stored.parent_block_hash.map(BlockHash),
                hashes: hashes_from(&stored.block_hashes),
            }),
            kv_event::Event::Removed(removed) => {
                Ok(Event::Removed { tier: tier_from(removed.tier)?, hashes: hashes_from(&removed.block_hashes) })
            }
            kv_event::Event::Cleared(cleared) if cleared.tier == 0 => Ok(Event::Cleared { tier: None }),
            kv_event::Event::Cleared(cleared) => Ok(Event::Cleared { tier: Some(tier_from(cleared.tier)?) }),
        })
        .collect::<Result<_, EventsError>>()?;
    Ok(Batch { sequence: message.sequence, recorded_at_unix_nanos: unix_nanos(message.recorded_at.as_ref()), events })
}

/// A digest from its message.
///
/// # Errors
/// A tier is not known or a digest is not 16 bytes.
pub fn digest_from(message: &v1::LedgerDigest) -> Result<LedgerDigest, EventsError> {
    let tiers = message
        .tiers
        .iter()
        .map(|tier| {
            Ok(TierDigest {
                tier: tier_from(tier.tier)?,
                block_count: tier.block_count,
                digest: Digest::from_be_slice(&tier.digest)
                    .ok_or(EventsError::Malformed("digest of another length"))?,
            })
        })
        .collect::<Result<_, EventsError>>()?;
    Ok(LedgerDigest { next_sequence: message.next_sequence, tiers, complete: message.complete })
}

/// Adds the blocks of a chunk to what was collected of its snapshot.
///
/// # Errors
/// A tier is not known, or the runs do not divide their blocks.
pub fn collect_chunk(chunk: &SnapshotChunk, blocks: &mut Vec<(Tier, Vec<Run>)>) -> Result<(), EventsError> {
    history::collect_chunk(chunk, blocks).map_err(|wrong| EventsError::Malformed(wrong.reason()))
}

/// A state as a message says it.
#[must_use]
pub fn state_to(state: SourceState) -> v1::SourceState {
    match state {
        SourceState::Exact => v1::SourceState::Exact,
        SourceState::CatchingUp => v1::SourceState::CatchingUp,
        SourceState::Partial => v1::SourceState::Partial,
        SourceState::Truncated => v1::SourceState::Truncated,
        SourceState::Stale => v1::SourceState::Stale,
    }
}

/// A source's numbers as a message.
#[must_use]
pub fn status_to(status: &SourceStatus) -> router::v1::SourceStatus {
    router::v1::SourceStatus {
        source: Some(source_to(&status.source, status.incarnation)),
        state: state_to(status.state).into(),
        next_sequence: status.next_sequence,
        tiers: status.tiers.iter().map(tier_digest_to).collect(),
        heard_at: (status.heard_at_unix_nanos > 0).then(|| timestamp(status.heard_at_unix_nanos)),
        gaps_total: status.gaps,
        snapshots_total: status.snapshots,
        mismatches_total: status.mismatches,
        divergent_blocks: status.divergent_blocks,
        given_up_blocks: status.given_up_blocks,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn tiers() -> impl Strategy<Value = Tier> {
        prop::sample::select(Tier::ALL.to_vec())
    }

    fn hashes() -> impl Strategy<Value = Vec<BlockHash>> {
        prop::collection::vec(any::<u64>().prop_map(BlockHash), 0..5)
    }

    fn events() -> impl Strategy<Value = Event> {
        prop_oneof![
            (tiers(), prop::option::of(any::<u64>()), hashes()).prop_map(|(tier, parent, hashes)| Event::Stored {
                tier,
                parent: parent.map(BlockHash),
                hashes
            }),
            (tiers(), hashes()).prop_map(|(tier, hashes)| Event::Removed { tier, hashes }),
            prop::option::of(tiers()).prop_map(|tier| Event::Cleared { tier }),
        ]
    }

    proptest! {
        #![proptest_config(crate::cases::usually(32))]

        #[test]
        fn a_batch_survives_the_way(
            sequence in any::<u64>(),
            recorded_at_unix_nanos in 0..u64::MAX / 2,
            events in prop::collection::vec(events(), 0..5),
        ) {
            let batch = Batch { sequence, recorded_at_unix_nanos, events };
            let source = SourceId { worker_uid: "w".to_owned(), rank: 1, incarnation: 2 };
            prop_assert_eq!(&batch, &batch_from(&batch_to(&source, &batch)).unwrap());
        }
    }

    #[test]
    fn what_is_not_understood_is_refused_whole() {
        let unknown = v1::KvEventBatch { events: vec![v1::KvEvent { event: None }], ..Default::default() };
        assert!(batch_from(&unknown).is_err());
        let tier = kv_event::Event::Removed(v1::BlocksRemoved { tier: 0, block_hashes: vec![1] });
        let unspecified = v1::KvEventBatch { events: vec![v1::KvEvent { event: Some(tier) }], ..Default::default() };
        assert!(batch_from(&unspecified).is_err());
        assert!(source_from(None).is_err());
        assert!(source_from(Some(&SourceId { worker_uid: "w".to_owned(), ..Default::default() })).is_err());
    }
}
