//! Feeds the index from one worker: its ledger's history, then what comes after it.
//!
//! The stream states its position in each message, so a lost connection continues where the index stands; a history
//! that is gone comes back as a snapshot, taken in at once.

use std::{
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use kvist_blocks::{Batch, BlockHash, Digest, Event, Incarnation, Rank, SourceKey, Tier, TierDigest};
use kvist_index::{Applied, DigestVerdict, Index};
use kvist_proto::{
    engine::v1::{
        ResumePosition, WatchKvEventsRequest, engine_service_client::EngineServiceClient,
        watch_kv_events_response::Part,
    },
    events::v1::{KvEventBatch, kv_event},
};
use tonic::transport::Channel;

const RETRY: Duration = Duration::from_millis(200);
/// Silence longer than this makes a source stale; ledgers speak every two seconds.
const SILENCE: Duration = Duration::from_secs(7);
const MESSAGE_BYTES: usize = 64 * 1024 * 1024;

/// A running feed; dropping it ends the feed.
#[derive(Debug)]
pub(crate) struct Follower(tokio::task::JoinHandle<()>);

impl Follower {
    pub(crate) fn start(index: Arc<Index>, channel: Channel, key: SourceKey, incarnation: Incarnation) -> Self {
        index.expect_source(&key, incarnation);
        Self(tokio::spawn(async move {
            loop {
                follow(&index, channel.clone(), &key).await;
                index.mark_stale(&key);
                tokio::time::sleep(RETRY).await;
            }
        }))
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// One stream until it ends or does not fit.
async fn follow(index: &Index, channel: Channel, key: &SourceKey) {
    let known = index.source(key);
    let resume_after = known
        .filter(|source| source.next_sequence > 0)
        .map(|source| ResumePosition {
            rank: key.rank.0,
            incarnation: source.incarnation.0,
            sequence: source.next_sequence.checked_sub(1),
        })
        .into_iter()
        .collect();
    let request = WatchKvEventsRequest { resume_after, follow: true, ranks: vec![key.rank.0] };
    let mut client = EngineServiceClient::new(channel).max_decoding_message_size(MESSAGE_BYTES);
    let Ok(response) = client.watch_kv_events(request).await else { return };
    let mut stream = response.into_inner();
    let mut snapshot: Vec<(Tier, Vec<BlockHash>)> = Vec::new();
    while let Ok(Ok(Some(message))) = tokio::time::timeout(SILENCE, stream.message()).await {
        let now = now_unix_nanos();
        match message.part {
            Some(Part::Snapshot(chunk)) => {
                if chunk.first {
                    snapshot.clear();
                }
                for blocks in chunk.blocks {
                    let Some(tier) = Tier::from_number(blocks.tier) else { return };
                    snapshot.push((tier, blocks.block_hashes.into_iter().map(BlockHash).collect()));
                }
                if chunk.last {
                    let incarnation = Incarnation(chunk.source.unwrap_or_default().incarnation);
                    index.apply_snapshot(key, incarnation, chunk.next_sequence, &snapshot, chunk.complete, now);
                    snapshot = Vec::new();
                }
            }
            Some(Part::Batch(batch)) => {
                let incarnation = Incarnation(batch.source.as_ref().map_or(0, |source| source.incarnation));
                let Some(batch) = batch_of(batch) else { return };
                match index.apply_batch(key, incarnation, &batch, now) {
                    Applied::Applied | Applied::Duplicate => {}
                    // The next stream starts from what the index has.
                    _ => return,
                }
            }
            Some(Part::Digest(digest)) => {
                let incarnation = Incarnation(digest.source.as_ref().map_or(0, |source| source.incarnation));
                let tiers: Vec<TierDigest> = digest
                    .tiers
                    .iter()
                    .filter_map(|tier| {
                        Some(TierDigest {
                            tier: Tier::from_number(tier.tier)?,
                            block_count: tier.block_count,
                            digest: Digest::from_be_slice(&tier.digest)?,
                        })
                    })
                    .collect();
                match index.apply_digest(key, incarnation, digest.next_sequence, &tiers, digest.complete, now) {
                    DigestVerdict::Equal | DigestVerdict::Old | DigestVerdict::Unknown => {}
                    DigestVerdict::Mismatch => {
                        // What the index holds is wrong: forget it, so that the next stream brings a snapshot.
                        index.remove_worker(&key.worker);
                        index.expect_source(key, incarnation);
                        return;
                    }
                    DigestVerdict::Behind | DigestVerdict::OldIncarnation => return,
                }
            }
            Some(Part::CaughtUp(caught_up)) => {
                index.mark_caught_up(key, Incarnation(caught_up.source.unwrap_or_default().incarnation));
            }
            None => {}
        }
    }
}

fn batch_of(batch: KvEventBatch) -> Option<Batch> {
    let hashes = |hashes: Vec<u64>| hashes.into_iter().map(BlockHash).collect();
    let events = batch
        .events
        .into_iter()
        .map(|event| {
            Some(match event.event? {
                kv_event::Event::Stored(stored) => Event::Stored {
                    tier: Tier::from_number(stored.tier)?,
                    parent: stored.parent_block_hash.map(BlockHash),
                    hashes: hashes(stored.block_hashes),
                },
                kv_event::Event::Removed(removed) => {
                    Event::Removed { tier: Tier::from_number(removed.tier)?, hashes: hashes(removed.block_hashes) }
                }
                kv_event::Event::Cleared(cleared) => Event::Cleared { tier: Tier::from_number(cleared.tier) },
            })
        })
        .collect::<Option<Vec<Event>>>()?;
    Some(Batch { sequence: batch.sequence, recorded_at_unix_nanos: 0, events })
}

pub(crate) fn source_key(worker_uid: &str) -> SourceKey {
    SourceKey { worker: worker_uid.into(), rank: Rank(0) }
}

pub(crate) fn now_unix_nanos() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX)
}
