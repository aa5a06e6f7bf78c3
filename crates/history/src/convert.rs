//! What a ledger says, as messages.

use kvist_blocks::{Batch, BlockHash, Event, Tier, TierDigest};
use kvist_ledger::{LedgerDigest, Snapshot};
use kvist_proto::{
    engine::v1::{SnapshotBlocks, SnapshotChunk},
    events::v1::{self, BlocksRemoved, BlocksStored, CacheCleared, KvEvent, KvEventBatch, SourceId, kv_event},
};
use kvist_telemetry::timestamp;

/// Most blocks of one chunk of a snapshot.
pub const SNAPSHOT_CHUNK_BLOCKS: usize = 8192;

fn hashes_to(hashes: &[BlockHash]) -> Vec<u64> {
    hashes.iter().map(|hash| hash.0).collect()
}

/// A batch as a message.
#[must_use]
pub fn batch_to(source: &SourceId, batch: &Batch) -> KvEventBatch {
    let events = batch.events.iter().map(|event| {
        let event = match event {
            Event::Stored { tier, parent, hashes } => kv_event::Event::Stored(BlocksStored {
                tier: tier.to_number(),
                parent_block_hash: parent.map(|parent| parent.0),
                block_hashes: hashes_to(hashes),
            }),
            Event::Removed { tier, hashes } => {
                kv_event::Event::Removed(BlocksRemoved { tier: tier.to_number(), block_hashes: hashes_to(hashes) })
            }
            Event::Cleared { tier } => kv_event::Event::Cleared(CacheCleared { tier: tier.map_or(0, Tier::to_number) }),
        };
        KvEvent { event: Some(event) }
    });
    KvEventBatch {
        source: Some(source.clone()),
        sequence: batch.sequence,
        recorded_at: Some(timestamp(batch.recorded_at_unix_nanos)),
        events: events.collect(),
    }
}

/// A digest as a message.
#[must_use]
pub fn digest_to(source: &SourceId, digest: &LedgerDigest, now_unix_nanos: u64) -> v1::LedgerDigest {
    v1::LedgerDigest {
        source: Some(source.clone()),
        next_sequence: digest.next_sequence,
        tiers: digest.tiers.iter().map(tier_digest_to).collect(),
        complete: digest.complete,
        recorded_at: Some(timestamp(now_unix_nanos)),
    }
}

/// Count and digest of a tier as a message.
#[must_use]
pub fn tier_digest_to(tier: &TierDigest) -> v1::TierDigest {
    v1::TierDigest {
        tier: tier.tier.to_number(),
        block_count: tier.block_count,
        digest: tier.digest.to_be_bytes().to_vec().into(),
    }
}

/// A snapshot as chunks; an empty one is one chunk.
#[must_use]
pub fn snapshot_to(source: &SourceId, snapshot: &Snapshot) -> Vec<SnapshotChunk> {
    let mut parts: Vec<Vec<SnapshotBlocks>> = snapshot
        .blocks
        .iter()
        .flat_map(|(tier, hashes)| hashes.chunks(SNAPSHOT_CHUNK_BLOCKS).map(move |hashes| (*tier, hashes)))
        .map(|(tier, hashes)| vec![SnapshotBlocks { tier: tier.to_number(), block_hashes: hashes_to(hashes) }])
        .collect();
    if parts.is_empty() {
        parts.push(Vec::new());
    }
    let last = parts.len() - 1;
    parts
        .into_iter()
        .enumerate()
        .map(|(position, blocks)| SnapshotChunk {
            source: Some(source.clone()),
            next_sequence: snapshot.next_sequence,
            blocks,
            first: position == 0,
            last: position == last,
            complete: snapshot.complete,
        })
        .collect()
}
