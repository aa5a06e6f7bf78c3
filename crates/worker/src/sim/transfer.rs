//! How the simulated engines move KV: over TCP on loopback, a line of JSON for each message.
//!
//! The decode engine asks for a lease by its name and by the engine that gave it; the prefill engine answers with the
//! names of the blocks, which stand for their content; the decode engine says that it has them. Blocks are names of
//! content, so that KV of another prompt is told from the right one.

use std::{net::SocketAddr, time::Duration};

use kvist_blocks::BlockHash;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use tokio::net::{TcpListener, TcpStream};

/// A line is at most so long: 200,000 blocks.
const MOST_LINE_BYTES: usize = 4 * 1024 * 1024;

/// What goes wrong at the prefill engine, for tests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TransferFault {
    /// Nothing.
    #[default]
    None,
    /// It knows no lease.
    Refuse,
    /// It breaks off in the middle of the answer.
    Break,
    /// It answers nothing.
    Stall,
    /// It sends blocks of another prompt.
    WrongBlocks,
}

/// What the decode engine says.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Ask {
    /// It wants the blocks of a lease.
    Fetch { engine: String, lease: String },
    /// It has them.
    Done,
}

/// What the prefill engine says.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Answer {
    /// Names of the prompt's whole blocks, in order.
    Blocks(Vec<u64>),
    /// There is no such lease, or no more.
    NoLease,
}

/// Where KV is kept: what the prefill engine said at the end of its request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Origin {
    pub(super) address: SocketAddr,
    pub(super) engine: String,
    pub(super) lease: String,
}

/// Fetches blocks, and says so. The error is for the log.
pub(super) async fn fetch(origin: &Origin, limit: Duration) -> Result<Vec<BlockHash>, String> {
    let fetching = async {
        let mut lines = Lines::new(TcpStream::connect(origin.address).await.map_err(|error| error.to_string())?);
        lines.send(&Ask::Fetch { engine: origin.engine.clone(), lease: origin.lease.clone() }).await?;
        match lines.receive().await? {
            Answer::Blocks(blocks) => {
                lines.send(&Ask::Done).await?;
                Ok(blocks.into_iter().map(BlockHash).collect())
            }
            Answer::NoLease => Err("the prefill engine knows no such lease".to_owned()),
        }
    };
    tokio::time::timeout(limit, fetching).await.unwrap_or_else(|_| Err("it took too long".to_owned()))
}

/// Serves leases until it is dropped. `find` says what a lease of this engine holds, `done` ends one.
pub(super) async fn serve(
    listener: TcpListener,
    engine: String,
    fault: TransferFault,
    find: impl Fn(&str) -> Option<Vec<BlockHash>> + Clone + Send + 'static,
    done: impl Fn(&str) + Clone + Send + 'static,
) {
    let mut connections = tokio::task::JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let Ok((stream, _)) = accepted else { continue };
                let (engine, find, done) = (engine.clone(), find.clone(), done.clone());
                connections.spawn(async move { serve_one(Lines::new(stream), &engine, fault, find, done).await });
            }
            Some(ended) = connections.join_next() => {
                if let Ok(Err(reason)) = ended {
                    tracing::debug!(reason, "transfer_broke_off");
                }
            }
        }
    }
}

async fn serve_one(
    mut lines: Lines,
    own: &str,
    fault: TransferFault,
    find: impl Fn(&str) -> Option<Vec<BlockHash>>,
    done: impl Fn(&str),
) -> Result<(), String> {
    let Ask::Fetch { engine, lease } = lines.receive().await? else { return Err("it began with the end".to_owned()) };
    let held = if engine == own { find(&lease) } else { None };
    let Some(blocks) = held.filter(|_| fault != TransferFault::Refuse) else {
        return lines.send(&Answer::NoLease).await;
    };
    let mut names: Vec<u64> = blocks.iter().map(|block| block.0).collect();
    match fault {
        TransferFault::Stall => return std::future::pending().await,
        TransferFault::Break => return lines.send_bytes(b"{\"Blocks\":[1,").await,
        TransferFault::WrongBlocks => names.iter_mut().for_each(|name| *name = !*name),
        TransferFault::None | TransferFault::Refuse => {}
    }
    lines.send(&Answer::Blocks(names)).await?;
    match lines.receive().await? {
        Ask::Done => done(&lease),
        Ask::Fetch { .. } => return Err("it asked twice".to_owned()),
    }
    Ok(())
}

/// Messages over a stream.
struct Lines {
    stream: TcpStream,
    read: Vec<u8>,
}

impl Lines {
    fn new(stream: TcpStream) -> Self {
        Self { stream, read: Vec::new() }
    }

    async fn send(&self, message: &impl Serialize) -> Result<(), String> {
        let mut line = serde_json::to_vec(message).map_err(|error| error.to_string())?;
        line.push(b'\n');
        self.send_bytes(&line).await
    }

    async fn send_bytes(&self, mut bytes: &[u8]) -> Result<(), String> {
        while !bytes.is_empty() {
            self.stream.writable().await.map_err(|error| error.to_string())?;
            match self.stream.try_write(bytes) {
                Ok(count) => bytes = bytes.get(count..).unwrap_or_default(),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error.to_string()),
            }
        }
        Ok(())
    }

    async fn receive<T: DeserializeOwned>(&mut self) -> Result<T, String> {
        loop {
            if let Some(end) = self.read.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.read.drain(..=end).collect();
                return serde_json::from_slice(&line).map_err(|error| error.to_string());
            }
            if self.read.len() > MOST_LINE_BYTES {
                return Err("a line is too long".to_owned());
            }
            self.stream.readable().await.map_err(|error| error.to_string())?;
            let mut part = [0; 16 * 1024];
            match self.stream.try_read(&mut part) {
                Ok(0) => return Err("the other end has closed the connection".to_owned()),
                Ok(count) => self.read.extend_from_slice(part.get(..count).unwrap_or_default()),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error.to_string()),
            }
        }
    }
}
