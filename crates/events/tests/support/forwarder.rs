//! A bus between two clusters' names that loses and spoils messages when it is told to.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use futures::StreamExt as _;
use kvist_events::Subjects;
use kvist_proto::events::v1::{KvEventBatch, KvEventMessage, Tombstone};
use parking_lot::Mutex;
use prost::Message as _;
use tokio::task::JoinHandle;

/// What happens to batches from a sequence on; those before it may still be on their way and are spared.
#[derive(Clone, Copy)]
enum Mischief {
    None,
    LoseFrom(u64),
    /// Takes the events out of the batches and leaves their sequences.
    SpoilFrom(u64),
}

impl Mischief {
    /// How many batches of the message were hit.
    fn befall(self, batches: &mut Vec<KvEventBatch>) -> usize {
        match self {
            Self::None => 0,
            Self::LoseFrom(first) => {
                let sent = batches.len();
                batches.retain(|batch| batch.sequence < first);
                sent - batches.len()
            }
            Self::SpoilFrom(first) => {
                batches.iter_mut().filter(|batch| batch.sequence >= first).map(|batch| batch.events.clear()).count()
            }
        }
    }
}

/// Carries what is said in one cluster to another.
pub(crate) struct Forwarder {
    client: async_nats::Client,
    to: Subjects,
    mischief: Arc<Mutex<Mischief>>,
    spoiled: Arc<AtomicU64>,
    task: JoinHandle<()>,
}

impl Forwarder {
    pub(crate) async fn start(url: &str, from: &str, to: &str) -> Self {
        let client = async_nats::connect(url).await.unwrap();
        let (from, to) = (Subjects::new(from).unwrap(), Subjects::new(to).unwrap());
        let mut messages = client.subscribe(from.all_events()).await.unwrap();
        client.flush().await.unwrap();
        let mischief = Arc::new(Mutex::new(Mischief::None));
        let spoiled = Arc::new(AtomicU64::new(0));
        let task = tokio::spawn({
            let (client, to) = (client.clone(), to.clone());
            let (mischief, spoiled) = (Arc::clone(&mischief), Arc::clone(&spoiled));
            async move {
                while let Some(message) = messages.next().await {
                    let mut decoded = KvEventMessage::decode(message.payload).unwrap();
                    let source = match decoded.batches.first() {
                        Some(batch) => batch.source.clone(),
                        None => decoded.digest.as_ref().and_then(|digest| digest.source.clone()),
                    };
                    let source = source.unwrap();
                    // Digests are spared, so that each test sees the one fault it wants.
                    let hit = mischief.lock().befall(&mut decoded.batches);
                    let subject = to.events(&source.worker_uid, source.rank);
                    client.publish(subject, decoded.encode_to_vec().into()).await.unwrap();
                    spoiled.fetch_add(hit as u64, Ordering::SeqCst);
                }
            }
        });
        Self { client, to, mischief, spoiled, task }
    }

    pub(crate) fn lose_batches_from(&self, sequence: u64) {
        *self.mischief.lock() = Mischief::LoseFrom(sequence);
    }

    pub(crate) fn spoil_batches_from(&self, sequence: u64) {
        *self.mischief.lock() = Mischief::SpoilFrom(sequence);
    }

    pub(crate) fn behave(&self) {
        *self.mischief.lock() = Mischief::None;
    }

    /// Batches lost or spoiled so far.
    pub(crate) fn spoiled(&self) -> u64 {
        self.spoiled.load(Ordering::SeqCst)
    }

    pub(crate) async fn announce_death(&self, worker_uid: &str, incarnation: u64) {
        let tombstone = Tombstone { worker_uid: worker_uid.to_owned(), incarnation, ..Tombstone::default() };
        let subject = self.to.tombstone(&worker_uid.into());
        self.client.publish(subject, tombstone.encode_to_vec().into()).await.unwrap();
        self.client.flush().await.unwrap();
    }
}

impl Drop for Forwarder {
    fn drop(&mut self) {
        self.task.abort();
    }
}
