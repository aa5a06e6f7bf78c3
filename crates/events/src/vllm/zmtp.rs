//! The client's side of ZMTP 3.0, as far as two sockets of an engine need it: SUB and DEALER, without security.
//!
//! A client of our own, since the ready-made one believes whatever length a peer announces and hides that a connection
//! was lost and made anew. Here a message has a bound, and a connection ends where the other side ends it.

use std::{io, time::Duration};

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    net::{TcpStream, UnixStream},
    time::timeout,
};

const GREETING_BYTES: usize = 64;
const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;
/// A handshake has less, an event four.
const MOST_FRAMES: usize = 16;
const READ_BYTES: usize = 64 * 1024;

/// What we are to the other side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    Subscriber,
    Dealer,
}

impl Role {
    fn name(self) -> &'static [u8] {
        match self {
            Self::Subscriber => b"SUB",
            Self::Dealer => b"DEALER",
        }
    }
}

trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// A connection whose handshake is done.
pub(super) struct Connection {
    stream: Box<dyn Stream>,
    received: BytesMut,
    frames: Vec<Bytes>,
    most_message_bytes: usize,
}

fn broken(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// A frame: its flags and content.
fn encode(flags: u8, content: &[u8], out: &mut BytesMut) {
    if let Ok(length) = u8::try_from(content.len()) {
        out.put_u8(flags);
        out.put_u8(length);
    } else {
        out.put_u8(flags | LONG);
        out.put_u64(content.len() as u64);
    }
    out.put_slice(content);
}

impl Connection {
    /// Connects to `tcp://host:port` or `ipc://path` and shakes hands, within a time.
    pub(super) async fn open(
        endpoint: &str,
        role: Role,
        most_message_bytes: usize,
        time_limit: Duration,
    ) -> io::Result<Self> {
        let late = |_| io::Error::from(io::ErrorKind::TimedOut);
        timeout(time_limit, Self::connect(endpoint, role, most_message_bytes)).await.map_err(late)?
    }

    async fn connect(endpoint: &str, role: Role, most_message_bytes: usize) -> io::Result<Self> {
        let stream: Box<dyn Stream> = if let Some(address) = endpoint.strip_prefix("tcp://") {
            let stream = TcpStream::connect(address).await?;
            stream.set_nodelay(true)?;
            Box::new(stream)
        } else if let Some(path) = endpoint.strip_prefix("ipc://") {
            Box::new(UnixStream::connect(path).await?)
        } else {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "neither tcp:// nor ipc://"));
        };
        let mut connection = Self { stream, received: BytesMut::new(), frames: Vec::new(), most_message_bytes };
        connection.greet().await?;
        connection.shake_hands(role).await?;
        Ok(connection)
    }

    async fn greet(&mut self) -> io::Result<()> {
        let mut greeting = [0u8; GREETING_BYTES];
        greeting[0] = 0xff;
        greeting[9] = 0x7f;
        greeting[10] = 3;
        greeting[12..16].copy_from_slice(b"NULL");
        self.stream.write_all(&greeting).await?;
        self.fill(GREETING_BYTES).await?;
        let theirs = self.received.split_to(GREETING_BYTES);
        if theirs[0] != 0xff || theirs[9] & 1 == 0 || theirs[10] < 3 {
            return Err(broken("no ZMTP 3"));
        }
        if theirs[12..16] != *b"NULL" || theirs[16] != 0 {
            return Err(broken("a security mechanism that we do not speak"));
        }
        Ok(())
    }

    async fn shake_hands(&mut self, role: Role) -> io::Result<()> {
        let mut ready = BytesMut::new();
        ready.put_slice(b"\x05READY\x0bSocket-Type");
        let name = role.name();
        ready.put_u32(u32::try_from(name.len()).unwrap_or(0));
        ready.put_slice(name);
        if role == Role::Dealer {
            ready.put_slice(b"\x08Identity");
            ready.put_u32(0);
        }
        let mut out = BytesMut::new();
        encode(COMMAND, &ready, &mut out);
        self.stream.write_all(&out).await?;
        loop {
            if let Some((flags, content)) = self.frame()? {
                let is_ready = flags & COMMAND != 0 && content.starts_with(b"\x05READY");
                return if is_ready { Ok(()) } else { Err(broken("refused")) };
            }
            self.read().await?;
        }
    }

    /// Asks for messages whose first frame begins so.
    pub(super) async fn subscribe(&mut self, topic: &str) -> io::Result<()> {
        let mut content = vec![1];
        content.extend_from_slice(topic.as_bytes());
        self.send(&[&content]).await
    }

    /// Sends a message.
    pub(super) async fn send(&mut self, frames: &[&[u8]]) -> io::Result<()> {
        let mut out = BytesMut::new();
        for (position, frame) in frames.iter().enumerate() {
            let is_last = position + 1 == frames.len();
            encode(if is_last { 0 } else { MORE }, frame, &mut out);
        }
        self.stream.write_all(&out).await
    }

    /// The next message. To give up waiting loses nothing.
    pub(super) async fn receive(&mut self) -> io::Result<Vec<Bytes>> {
        loop {
            while let Some((flags, content)) = self.frame()? {
                if flags & COMMAND != 0 {
                    self.answer(&content).await?;
                    continue;
                }
                self.frames.push(content);
                if flags & MORE == 0 {
                    return Ok(std::mem::take(&mut self.frames));
                }
                let bytes: usize = self.frames.iter().map(Bytes::len).sum();
                if self.frames.len() >= MOST_FRAMES || bytes > self.most_message_bytes {
                    return Err(broken("a message without end"));
                }
            }
            self.read().await?;
        }
    }

    async fn answer(&mut self, command: &[u8]) -> io::Result<()> {
        // Name, a time to live of two bytes, and a context that comes back.
        let Some(ping) = command.strip_prefix(b"\x04PING") else { return Ok(()) };
        let mut pong = b"\x04PONG".to_vec();
        pong.extend_from_slice(ping.get(2..).unwrap_or_default());
        let mut out = BytesMut::new();
        encode(COMMAND, &pong, &mut out);
        self.stream.write_all(&out).await
    }

    /// A frame, if all of it is there.
    fn frame(&mut self) -> io::Result<Option<(u8, Bytes)>> {
        let Some(flags) = self.received.first().copied() else { return Ok(None) };
        let header = if flags & LONG == 0 { 2 } else { 9 };
        let Some(length) = self.received.get(1..header) else { return Ok(None) };
        let length = length.iter().fold(0u64, |length, byte| length << 8 | u64::from(*byte));
        let length = usize::try_from(length).ok().filter(|length| *length <= self.most_message_bytes);
        let length = length.ok_or(broken("a frame above the limit"))?;
        if self.received.len() < header + length {
            return Ok(None);
        }
        self.received.advance(header);
        Ok(Some((flags, self.received.split_to(length).freeze())))
    }

    async fn fill(&mut self, bytes: usize) -> io::Result<()> {
        while self.received.len() < bytes {
            self.read().await?;
        }
        Ok(())
    }

    async fn read(&mut self) -> io::Result<()> {
        self.received.reserve(READ_BYTES);
        let read = self.stream.read_buf(&mut self.received).await?;
        if read == 0 { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(()) }
    }
}
