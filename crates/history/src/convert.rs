//! What a ledger says, as messages.

use kvist_blocks::{Batch, BlockHash, Event, Run, Tier, TierDigest};
use kvist_ledger::{LedgerDigest, Snapshot};
use kvist_proto::{
    engine::v1::{SnapshotBlocks, SnapshotChunk, SnapshotRun},
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

/// A snapshot as chunks; an empty one is one chunk. A run that does not fit goes on in the next chunk, where the block
/// before its first is the last one of this chunk.
#[must_use]
pub fn snapshot_to(source: &SourceId, snapshot: &Snapshot) -> Vec<SnapshotChunk> {
    chunks_to(source, snapshot, SNAPSHOT_CHUNK_BLOCKS)
}

fn chunks_to(source: &SourceId, snapshot: &Snapshot, most_blocks: usize) -> Vec<SnapshotChunk> {
    let tiers = snapshot.blocks.iter();
    let mut parts: Vec<Vec<SnapshotBlocks>> =
        tiers.flat_map(|(tier, runs)| tier_chunks(*tier, runs, most_blocks)).map(|part| vec![part]).collect();
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

fn tier_chunks(tier: Tier, runs: &[Run], most_blocks: usize) -> Vec<SnapshotBlocks> {
    let new = || SnapshotBlocks { tier: tier.to_number(), ..SnapshotBlocks::default() };
    let (mut full, mut open) = (Vec::new(), new());
    for run in runs {
        let (mut parent, mut rest) = (run.parent, &run.hashes[..]);
        while !rest.is_empty() {
            if open.block_hashes.len() == most_blocks {
                full.push(std::mem::replace(&mut open, new()));
            }
            let (now, later) = rest.split_at(rest.len().min(most_blocks - open.block_hashes.len()));
            open.block_hashes.extend(now.iter().map(|hash| hash.0));
            let blocks = u32::try_from(now.len()).unwrap_or(u32::MAX);
            open.runs.push(SnapshotRun { parent_block_hash: parent.map(|parent| parent.0), blocks });
            (parent, rest) = (now.last().copied(), later);
        }
    }
    if !open.block_hashes.is_empty() {
        full.push(open);
    }
    // Where nothing is known, nothing is said.
    for part in &mut full {
        if part.runs.iter().all(|run| run.blocks == 1 && run.parent_block_hash.is_none()) {
            part.runs.clear();
        }
    }
    full
}

/// Why blocks of a snapshot cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MalformedBlocks {
    /// The tier is not known.
    UnknownTier,
    /// The runs are not what the blocks divide into.
    WrongRuns,
}

impl MalformedBlocks {
    /// For the log.
    #[must_use]
    pub fn reason(self) -> &'static str {
        match self {
            Self::UnknownTier => "unknown tier",
            Self::WrongRuns => "runs that do not divide their blocks",
        }
    }
}

/// Adds the blocks of a chunk to what was collected of its snapshot. Blocks of which nothing is known are a run each, and
/// a run that a chunk has cut is whole again.
///
/// # Errors
/// What is wrong with it; nothing of the part that is wrong is added.
pub fn collect_chunk(chunk: &SnapshotChunk, blocks: &mut Vec<(Tier, Vec<Run>)>) -> Result<(), MalformedBlocks> {
    for part in &chunk.blocks {
        let tier = Tier::from_number(part.tier).ok_or(MalformedBlocks::UnknownTier)?;
        let runs = runs_from(part).ok_or(MalformedBlocks::WrongRuns)?;
        let position = blocks.iter().position(|(collected, _)| *collected == tier).unwrap_or_else(|| {
            blocks.push((tier, Vec::new()));
            blocks.len() - 1
        });
        let collected = &mut blocks[position].1;
        let mut runs = runs.into_iter();
        if let Some(first) = runs.next() {
            match collected.last_mut() {
                Some(cut) if first.parent.is_some() && cut.hashes.last() == first.parent.as_ref() => {
                    cut.hashes.extend(first.hashes);
                }
                _ => collected.push(first),
            }
        }
        collected.extend(runs);
    }
    Ok(())
}

fn runs_from(part: &SnapshotBlocks) -> Option<Vec<Run>> {
    let mut rest = &part.block_hashes[..];
    if part.runs.is_empty() {
        return Some(rest.iter().map(|hash| Run { parent: None, hashes: vec![BlockHash(*hash)] }).collect());
    }
    let mut runs = Vec::with_capacity(part.runs.len());
    for run in &part.runs {
        let blocks = usize::try_from(run.blocks).ok().filter(|blocks| (1..=rest.len()).contains(blocks))?;
        let (own, others) = rest.split_at(blocks);
        let hashes = own.iter().copied().map(BlockHash).collect();
        runs.push(Run { parent: run.parent_block_hash.map(BlockHash), hashes });
        rest = others;
    }
    rest.is_empty().then_some(runs)
}

#[cfg(test)]
#[path = "convert_tests.rs"]
mod tests;
