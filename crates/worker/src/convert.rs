//! The ledger's words as messages.

use kvist_blocks::{Batch, Event};
use kvist_ledger::{LedgerDigest, Snapshot};
use kvist_proto::{
    engine::v1::{SnapshotBlocks, SnapshotChunk},
    events::v1::{self, BlocksRemoved, BlocksStored, CacheCleared, KvEvent, KvEventBatch, SourceId, kv_event},
};
use kvist_telemetry::timestamp;

/// Blocks in one chunk of a snapshot.
const CHUNK_BLOCKS: usize = 8192;

pub(crate) fn batch(source: &SourceId, batch: &Batch) -> KvEventBatch {
    let events = batch
        .events
        .iter()
        .map(|event| {
            let event = match event {
                Event::Stored { tier, parent, hashes } => kv_event::Event::Stored(BlocksStored {
                    tier: tier.to_number(),
                    parent_block_hash: parent.map(|parent| parent.0),
                    block_hashes: hashes.iter().map(|hash| hash.0).collect(),
                }),
                Event::Removed { tier, hashes } => kv_event::Event::Removed(BlocksRemoved {
                    tier: tier.to_number(),
                    block_hashes: hashes.iter().map(|hash| hash.0).collect(),
                }),
                Event::Cleared { tier } => {
                    kv_event::Event::Cleared(CacheCleared { tier: tier.map_or(0, kvist_blocks::Tier::to_number) })
                }
            };
            KvEvent { event: Some(event) }
        })
        .collect();
    KvEventBatch {
        source: Some(source.clone()),
        sequence: batch.sequence,
        recorded_at: Some(timestamp(batch.recorded_at_unix_nanos)),
        events,
    }
}

pub(crate) fn digest(source: &SourceId, digest: &LedgerDigest, now_unix_nanos: u64) -> v1::LedgerDigest {
    v1::LedgerDigest {
        source: Some(source.clone()),
        next_sequence: digest.next_sequence,
        tiers: digest
            .tiers
            .iter()
            .map(|tier| v1::TierDigest {
                tier: tier.tier.to_number(),
                block_count: tier.block_count,
                digest: tier.digest.to_be_bytes().to_vec().into(),
            })
            .collect(),
        complete: digest.complete,
        recorded_at: Some(timestamp(now_unix_nanos)),
    }
}

/// A snapshot in chunks; an empty one is one chunk.
pub(crate) fn snapshot(source: &SourceId, snapshot: &Snapshot) -> Vec<SnapshotChunk> {
    let mut chunks: Vec<SnapshotChunk> = snapshot
        .blocks
        .iter()
        .flat_map(|(tier, hashes)| hashes.chunks(CHUNK_BLOCKS).map(move |hashes| (*tier, hashes)))
        .map(|(tier, hashes)| SnapshotChunk {
            blocks: vec![SnapshotBlocks {
                tier: tier.to_number(),
                block_hashes: hashes.iter().map(|hash| hash.0).collect(),
            }],
            ..SnapshotChunk::default()
        })
        .collect();
    if chunks.is_empty() {
        chunks.push(SnapshotChunk::default());
    }
    let last = chunks.len() - 1;
    for (position, chunk) in chunks.iter_mut().enumerate() {
        chunk.source = Some(source.clone());
        chunk.next_sequence = snapshot.next_sequence;
        chunk.complete = snapshot.complete;
        (chunk.first, chunk.last) = (position == 0, position == last);
    }
    chunks
}
