//! A reader of the two ZeroMQ sockets on which a rank of vLLM publishes its KV events.
//!
//! ```text
//! vLLM PUB    ──(topic, number, batch)──▶ follower ─┐
//! vLLM ROUTER ◀──(number)── asker ──(batches)──▶    ├─▶ sequencer ─▶ decoder ─▶ VllmSaid
//!                                                   ┘
//! ```
//!
//! The stream that comes out has no hole that is not said: gaps are replayed, what the engine has forgotten is
//! [`EngineEvent::Lost`], and another start of the engine is [`VllmSaid::Restarted`]. All buffers are bounded; a caller
//! that does not keep up slows the reader, and in the end the engine's socket drops, which is a gap like any other.

mod sequencer;
mod zmtp;

use std::{io, sync::Arc, time::Duration};

use bytes::Bytes;
use kvist_ledger::{
    EngineEvent,
    vllm::{VllmCounters, VllmDecoder, VllmSettings},
};
use parking_lot::Mutex;
use tokio::{
    sync::{Notify, mpsc, watch},
    task::JoinHandle,
    time::{Instant, sleep, sleep_until, timeout},
};

pub use self::sequencer::VllmStreamCounters;
use self::{
    sequencer::{Question, Said, Sequencer},
    zmtp::{Connection, Role},
};
use crate::worker_channel::retry_delay;

/// Messages between the sockets and the sequencer; each socket's own buffer adds to them.
const MESSAGES_ON_THE_WAY: usize = 16;
const END_OF_ANSWER: u64 = u64::MAX;
/// A PUB socket that says nothing while so many answers in a row have news is a connection whose other end is gone.
const MOST_NEWS_WITHOUT_WORD: u32 = 3;

/// Where a rank of an engine publishes, and how patient its reader is.
#[derive(Clone, Debug)]
pub struct VllmReaderSettings {
    /// PUB socket: `tcp://host:port` or `ipc://path`.
    pub endpoint: String,
    /// ROUTER socket for replays, likewise. Not optional: without it a lost removal would stay unknown. The engine has
    /// to remember at least one batch.
    pub replay_endpoint: String,
    /// Beginning of the topic.
    pub topic: String,
    /// How the engine is understood.
    pub engine: VllmSettings,
    /// Time for a connection, and between two messages of an answer.
    pub answer_time_limit: Duration,
    /// After so long without news the last batch is verified.
    pub idle_interval: Duration,
    /// When nobody answers for so long while the engine goes on, what is missing counts as lost.
    pub patience: Duration,
    /// Between attempts to connect or to ask, doubling from the first to the second.
    pub retry_pauses: (Duration, Duration),
    /// Most bytes kept while a question is open.
    pub most_kept_bytes: usize,
}

impl VllmReaderSettings {
    /// Defaults for two endpoints.
    #[must_use]
    pub fn new(endpoint: impl Into<String>, replay_endpoint: impl Into<String>, engine: VllmSettings) -> Self {
        Self {
            endpoint: endpoint.into(),
            replay_endpoint: replay_endpoint.into(),
            topic: String::new(),
            engine,
            answer_time_limit: Duration::from_secs(5),
            idle_interval: Duration::from_secs(2),
            patience: Duration::from_secs(10),
            retry_pauses: (Duration::from_millis(50), Duration::from_secs(5)),
            most_kept_bytes: 64 << 20,
        }
    }
}

/// What an engine says, in order.
#[derive(Clone, Debug, PartialEq)]
pub enum VllmSaid {
    /// Its next batch. [`EngineEvent::Lost`] in it means that earlier ones are missing.
    Events {
        /// The rank that the batch names.
        rank: Option<u32>,
        /// What happened to its cache.
        events: Vec<EngineEvent>,
    },
    /// Another start of the engine speaks from here on: a new incarnation with an empty account.
    Restarted,
    /// Whether the engine confirms what was said so far. It does not while it cannot be reached; what was said stays
    /// true of the past then. False at first.
    InTouch(bool),
}

/// Numbers of a reader.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VllmReaderStats {
    /// Whether the PUB socket is connected.
    pub is_connected: bool,
    /// Whether the engine confirms what was said so far.
    pub is_in_touch: bool,
    /// Whether batches wait for an answer of the replay socket, or the last one is being verified.
    pub is_asking: bool,
    /// What became of the stream.
    pub stream: VllmStreamCounters,
    /// What became of its batches.
    pub batches: VllmCounters,
}

impl VllmReaderStats {
    /// Messages, batches and events that could not be understood.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.stream.malformed_messages + self.batches.all_refused()
    }
}

/// A running reader. Dropping it stops it.
pub struct VllmReader {
    stats: Arc<Mutex<VllmReaderStats>>,
    tasks: [JoinHandle<()>; 3],
}

impl VllmReader {
    /// Begins; the engine may come later. The channel holds few messages: not to read it slows the reader.
    #[must_use]
    pub fn start(settings: VllmReaderSettings) -> (Self, mpsc::Receiver<VllmSaid>) {
        let settings = Arc::new(settings);
        let stats = Arc::new(Mutex::new(VllmReaderStats::default()));
        let (said, caller) = mpsc::channel(MESSAGES_ON_THE_WAY);
        let (heard, live) = mpsc::channel(MESSAGES_ON_THE_WAY);
        let (answered, answers) = mpsc::channel(MESSAGES_ON_THE_WAY);
        let (asked, questions) = watch::channel(None);
        let reconnect = Arc::new(Notify::new());
        let work = Work {
            sequencer: Sequencer::new(settings.most_kept_bytes),
            decoder: VllmDecoder::new(settings.engine.clone()),
            is_connected: false,
            is_in_touch: false,
            news_without_word: 0,
            is_news: false,
            reconnect: Arc::clone(&reconnect),
            settings: Arc::clone(&settings),
            stats: Arc::clone(&stats),
            asked,
            said,
        };
        let tasks = [
            tokio::spawn(follow(Arc::clone(&settings), heard, reconnect)),
            tokio::spawn(ask(settings, questions, answered)),
            tokio::spawn(work.run(live, answers)),
        ];
        (Self { stats, tasks }, caller)
    }

    /// Numbers since the start.
    #[must_use]
    pub fn stats(&self) -> VllmReaderStats {
        *self.stats.lock()
    }
}

impl Drop for VllmReader {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

/// A message of either socket; the last two frames of each.
enum Message {
    Batch(u64, Bytes),
    End,
    Malformed,
}

fn read(mut frames: Vec<Bytes>) -> Message {
    let payload = frames.pop();
    let sequence = frames.pop().and_then(|frame| Some(u64::from_be_bytes(frame.as_ref().try_into().ok()?)));
    match (sequence, payload) {
        (Some(END_OF_ANSWER), Some(_)) => Message::End,
        (Some(sequence), Some(payload)) => Message::Batch(sequence, payload),
        _ => Message::Malformed,
    }
}

/// What the PUB socket delivers.
enum Heard {
    Connected,
    Disconnected,
    Batch(u64, Bytes),
    Malformed,
}

/// Follows the PUB socket for as long as somebody listens.
async fn follow(settings: Arc<VllmReaderSettings>, heard: mpsc::Sender<Heard>, reconnect: Arc<Notify>) {
    let mut attempt = 0;
    while !heard.is_closed() {
        let mut connected_at = None;
        let ended = tokio::select! {
            ended = follow_once(&settings, &heard, &mut connected_at) => ended,
            () = reconnect.notified() => Err(io::ErrorKind::ConnectionAborted.into()),
        };
        if let Err(error) = ended {
            tracing::debug!(endpoint = settings.endpoint, %error, "vllm_events_disconnected");
        }
        if let Some(connected_at) = connected_at {
            // One that accepts and hangs up is not hurried.
            if connected_at.elapsed() > settings.retry_pauses.1 {
                attempt = 0;
            }
            if heard.send(Heard::Disconnected).await.is_err() {
                return;
            }
        }
        attempt += 1;
        pause(&settings, attempt).await;
    }
}

async fn follow_once(
    settings: &VllmReaderSettings,
    heard: &mpsc::Sender<Heard>,
    connected_at: &mut Option<Instant>,
) -> io::Result<()> {
    let limit = settings.answer_time_limit;
    let mut connection =
        Connection::open(&settings.endpoint, Role::Subscriber, most_message_bytes(settings), limit).await?;
    connection.subscribe(&settings.topic).await?;
    *connected_at = Some(Instant::now());
    let mut message = Heard::Connected;
    while heard.send(message).await.is_ok() {
        message = match read(connection.receive().await?) {
            Message::Batch(sequence, payload) => Heard::Batch(sequence, payload),
            Message::End | Message::Malformed => Heard::Malformed,
        };
    }
    Ok(())
}

/// A part of an answer, with the number of its question.
enum Answered {
    Batch(u64, u64, Bytes),
    Ended(u64),
    Failed(u64),
}

/// Asks the replay socket the latest question, for as long as there may be more.
async fn ask(
    settings: Arc<VllmReaderSettings>,
    mut questions: watch::Receiver<Option<Question>>,
    answered: mpsc::Sender<Answered>,
) {
    let mut connection = None;
    while questions.changed().await.is_ok() {
        loop {
            let Some(question) = *questions.borrow_and_update() else { break };
            let answering = async {
                if question.attempt > 0 {
                    pause(&settings, question.attempt).await;
                }
                answer(&settings, &mut connection, question, &answered).await
            };
            tokio::select! {
                result = answering => {
                    let message = match result {
                        Ok(()) => Answered::Ended(question.number),
                        Err(error) => {
                            tracing::debug!(endpoint = settings.replay_endpoint, %error, "vllm_replay_failed");
                            connection = None;
                            Answered::Failed(question.number)
                        }
                    };
                    if answered.send(message).await.is_err() {
                        return;
                    }
                    break;
                }
                changed = questions.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    // The rest of the answer would be taken for the next one's.
                    connection = None;
                }
            }
        }
    }
}

/// One question and its answer, up to its end.
async fn answer(
    settings: &VllmReaderSettings,
    connection: &mut Option<Connection>,
    question: Question,
    answered: &mpsc::Sender<Answered>,
) -> io::Result<()> {
    let late = |_| io::Error::from(io::ErrorKind::TimedOut);
    let limit = settings.answer_time_limit;
    let mut open = match connection.take() {
        Some(connection) => connection,
        None => Connection::open(&settings.replay_endpoint, Role::Dealer, most_message_bytes(settings), limit).await?,
    };
    let from = question.from.to_be_bytes();
    timeout(limit, open.send(&[b"", &from])).await.map_err(late)??;
    let mut least = question.from;
    loop {
        match read(timeout(limit, open.receive()).await.map_err(late)??) {
            Message::Batch(sequence, payload) => {
                // An answer that does not go forward would not end.
                if sequence < least {
                    return Err(io::Error::new(io::ErrorKind::InvalidData, "an answer that goes back"));
                }
                least = sequence.saturating_add(1);
                // Nobody waits for the answer any more: neither does the next question.
                let _ = answered.send(Answered::Batch(question.number, sequence, payload)).await;
            }
            Message::End => {
                *connection = Some(open);
                return Ok(());
            }
            Message::Malformed => return Err(io::Error::new(io::ErrorKind::InvalidData, "no batch")),
        }
    }
}

async fn pause(settings: &VllmReaderSettings, attempt: u32) {
    let (shortest, longest) = settings.retry_pauses;
    let delay = retry_delay(attempt, shortest, longest, &mut rand::rng());
    sleep(delay).await;
}

/// A batch and its number and topic.
fn most_message_bytes(settings: &VllmReaderSettings) -> usize {
    settings.engine.most_batch_bytes.saturating_add(4096)
}

/// The task between the sockets and the caller.
struct Work {
    sequencer: Sequencer,
    decoder: VllmDecoder,
    is_connected: bool,
    /// As the caller was told.
    is_in_touch: bool,
    news_without_word: u32,
    /// The answer that is coming has a batch that was new.
    is_news: bool,
    reconnect: Arc<Notify>,
    settings: Arc<VllmReaderSettings>,
    stats: Arc<Mutex<VllmReaderStats>>,
    asked: watch::Sender<Option<Question>>,
    said: mpsc::Sender<VllmSaid>,
}

impl Work {
    async fn run(mut self, mut live: mpsc::Receiver<Heard>, mut answers: mpsc::Receiver<Answered>) {
        let mut idle_at = Instant::now() + self.settings.idle_interval;
        let mut patient_until = None;
        loop {
            tokio::select! {
                heard = live.recv() => {
                    let Some(heard) = heard else { return };
                    idle_at = Instant::now() + self.settings.idle_interval;
                    self.hear(heard);
                }
                answered = answers.recv() => {
                    let Some(answered) = answered else { return };
                    if !matches!(answered, Answered::Failed(_)) {
                        patient_until = None;
                    }
                    idle_at = Instant::now() + self.settings.idle_interval;
                    self.take_answer(answered);
                }
                () = sleep_until(idle_at) => {
                    idle_at = Instant::now() + self.settings.idle_interval;
                    self.sequencer.idle();
                }
                () = sleep_until(patient_until.unwrap_or(idle_at)), if patient_until.is_some() => {
                    patient_until = None;
                    self.sequencer.give_up();
                }
            }
            if !self.sequencer.has_kept() {
                patient_until = None;
            } else if patient_until.is_none() {
                patient_until = Some(Instant::now() + self.settings.patience);
            }
            if self.pass_on().await.is_err() {
                return;
            }
        }
    }

    fn take_answer(&mut self, answered: Answered) {
        match answered {
            Answered::Batch(number, sequence, payload) => {
                let before = self.sequencer.counters.replayed_batches;
                self.sequencer.answered(number, sequence, payload);
                self.is_news |= self.sequencer.counters.replayed_batches > before;
            }
            Answered::Ended(number) => {
                self.sequencer.answer_ended(number);
                self.news_without_word += u32::from(std::mem::take(&mut self.is_news));
                if self.news_without_word >= MOST_NEWS_WITHOUT_WORD {
                    self.news_without_word = 0;
                    self.reconnect.notify_one();
                }
            }
            Answered::Failed(number) => self.sequencer.answer_failed(number),
        }
    }

    fn hear(&mut self, heard: Heard) {
        match heard {
            Heard::Connected => {
                self.is_connected = true;
                self.sequencer.connected();
            }
            Heard::Disconnected => {
                self.is_connected = false;
                self.sequencer.disconnected();
            }
            Heard::Batch(sequence, payload) => {
                self.news_without_word = 0;
                self.sequencer.live(sequence, payload);
            }
            // If it was a batch, the next one shows a gap.
            Heard::Malformed => self.sequencer.counters.malformed_messages += 1,
        }
    }

    /// Tells the caller, and the asker, what there is to tell.
    async fn pass_on(&mut self) -> Result<(), mpsc::error::SendError<VllmSaid>> {
        while let Some(said) = self.sequencer.take_said() {
            let said = match said {
                Said::Batch(_, payload) => {
                    let batch = self.decoder.decode(&payload);
                    VllmSaid::Events { rank: batch.rank, events: batch.events }
                }
                Said::Lost => VllmSaid::Events { rank: None, events: vec![EngineEvent::Lost] },
                Said::Restarted => VllmSaid::Restarted,
            };
            self.said.send(said).await?;
        }
        let is_in_touch = self.is_connected && self.sequencer.is_confirmed();
        if is_in_touch != self.is_in_touch {
            self.is_in_touch = is_in_touch;
            self.said.send(VllmSaid::InTouch(is_in_touch)).await?;
        }
        if let Some(question) = self.sequencer.take_question() {
            self.asked.send_replace(Some(question));
        }
        *self.stats.lock() = VllmReaderStats {
            is_connected: self.is_connected,
            is_in_touch,
            is_asking: self.sequencer.is_asking(),
            stream: self.sequencer.counters,
            batches: self.decoder.counters(),
        };
        Ok(())
    }
}
