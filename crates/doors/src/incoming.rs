//! The connections that come in at a door.

use std::{
    collections::VecDeque,
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use futures::Stream;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::mpsc,
    task::{AbortHandle, JoinSet},
    time::timeout,
};
use tokio_util::task::AbortOnDropHandle;

use crate::{Door, DoorStream};

/// Time for a handshake.
const HANDSHAKE_TIME_LIMIT: Duration = Duration::from_secs(5);
/// Handshakes at once. With more, the oldest is given up: an honest one takes milliseconds.
const MOST_HANDSHAKES: usize = 256;
/// Connections that wait for the server to take them.
const READY_CONNECTIONS: usize = 64;
/// Wait after an accept that failed, as when file descriptors run out.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Connections, one after the other, for `serve_with_incoming` and for loops. Dropping it closes the listener.
#[derive(Debug)]
pub struct Incoming(Source);

#[derive(Debug)]
enum Source {
    Plain(TcpListener),
    /// Handshakes are made by a task, so that a slow one holds up nobody.
    Encrypted {
        ready: mpsc::Receiver<DoorStream>,
        _accepting: AbortOnDropHandle<()>,
    },
}

impl Incoming {
    pub(crate) fn plain(listener: TcpListener) -> Self {
        Self(Source::Plain(listener))
    }

    pub(crate) fn encrypted(listener: TcpListener, door: Arc<Door>) -> Self {
        let (sender, ready) = mpsc::channel(READY_CONNECTIONS);
        let accepting = tokio::spawn(accept(listener, door, sender));
        Self(Source::Encrypted { ready, _accepting: AbortOnDropHandle::new(accepting) })
    }
}

impl Stream for Incoming {
    type Item = io::Result<DoorStream>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        match &mut self.0 {
            Source::Plain(listener) => {
                let accepted = ready!(listener.poll_accept(context));
                Poll::Ready(Some(accepted.map(|(stream, _)| DoorStream::plain(prompt(stream)))))
            }
            Source::Encrypted { ready, .. } => ready.poll_recv(context).map(|stream| stream.map(Ok)),
        }
    }
}

/// What is written is small and must not wait for the acknowledgment of what was written before.
fn prompt(stream: TcpStream) -> TcpStream {
    let _ = stream.set_nodelay(true);
    stream
}

async fn accept(listener: TcpListener, door: Arc<Door>, ready: mpsc::Sender<DoorStream>) {
    // Ends with this task.
    let mut handshakes = JoinSet::new();
    let mut running: VecDeque<AbortHandle> = VecDeque::new();
    loop {
        let accepted = tokio::select! {
            () = ready.closed() => return,
            accepted = listener.accept() => accepted,
        };
        while handshakes.try_join_next().is_some() {}
        match accepted {
            Ok((stream, _)) => {
                running.retain(|handshake| !handshake.is_finished());
                if running.len() >= MOST_HANDSHAKES
                    && let Some(oldest) = running.pop_front()
                {
                    oldest.abort();
                    door.complaints.note(None, "too many handshakes at once");
                }
                running.push_back(handshakes.spawn(shake_hands(Arc::clone(&door), stream, ready.clone())));
            }
            Err(error) => {
                tracing::warn!(%error, "accept_failed");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

async fn shake_hands(door: Arc<Door>, stream: TcpStream, ready: mpsc::Sender<DoorStream>) {
    let peer = stream.peer_addr().ok();
    match timeout(HANDSHAKE_TIME_LIMIT, door.receive(prompt(stream))).await {
        // The server may have ended meanwhile.
        Ok(Ok(stream)) => drop(ready.send(stream).await),
        Ok(Err(error)) => door.complaints.note(peer, &error.to_string()),
        Err(_) => door.complaints.note(peer, "the handshake took too long"),
    }
}
