//! Streams of HTTP/2 whose client takes nothing any more while it goes on with others on the same connection.
//!
//! The connection is alive, so its own bound does not see them, and a body without room in its flow-control window is
//! not polled, so it cannot end itself. A task beside it does: it drops the answer, and with it the request.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use parking_lot::Mutex;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use crate::body::EdgeBody;

/// A body as a connection serves it.
pub(crate) enum ServedBody {
    /// One whose connection is bounded, or which is written at once.
    Plain(EdgeBody),
    /// One that is given up when nothing is taken of it.
    Watched(WatchedBody),
}

impl ServedBody {
    /// A body that is one of several on its connection.
    pub(crate) fn watched(body: EdgeBody, patience: Duration) -> Self {
        if matches!(body, EdgeBody::Whole(_)) {
            return Self::Plain(body);
        }
        let state = Arc::new(Mutex::new(State { body: Some(body), waits_since: None }));
        let watching = AbortOnDropHandle::new(tokio::spawn(watch(Arc::clone(&state), patience)));
        Self::Watched(WatchedBody { state, _watching: watching })
    }
}

pub(crate) struct WatchedBody {
    state: Arc<Mutex<State>>,
    _watching: AbortOnDropHandle<()>,
}

struct State {
    /// None once it was given up.
    body: Option<EdgeBody>,
    /// When the last frame was handed over. The connection asks for the next one as soon as there is room for it, so
    /// whoever is not asked for long has no room.
    waits_since: Option<Instant>,
}

/// Gives the body up when it has had no room for the whole time.
async fn watch(state: Arc<Mutex<State>>, patience: Duration) {
    loop {
        let left = {
            let mut state = state.lock();
            let left = state.waits_since.map_or(patience, |since| patience.saturating_sub(since.elapsed()));
            if left.is_zero() {
                state.body = None;
                return;
            }
            left
        };
        tokio::time::sleep(left).await;
    }
}

impl Body for ServedBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        let watched = match self.get_mut() {
            Self::Plain(body) => {
                return Pin::new(body)
                    .poll_frame(context)
                    .map(|frame| frame.map(|frame| frame.map_err(|never| match never {})));
            }
            Self::Watched(watched) => watched,
        };
        let mut state = watched.state.lock();
        let Some(body) = &mut state.body else {
            let error = io::Error::new(io::ErrorKind::TimedOut, "the client took nothing of this stream");
            return Poll::Ready(Some(Err(error)));
        };
        let frame =
            Pin::new(body).poll_frame(context).map(|frame| frame.map(|frame| frame.map_err(|never| match never {})));
        state.waits_since = matches!(frame, Poll::Ready(Some(_))).then(Instant::now);
        frame
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Plain(body) => body.is_end_stream(),
            Self::Watched(watched) => watched.state.lock().body.as_ref().is_some_and(Body::is_end_stream),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Plain(body) => body.size_hint(),
            Self::Watched(_) => SizeHint::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use futures::stream;
    use http::{Request, Response};
    use http_body_util::{BodyExt as _, Empty};
    use hyper::{client::conn::http2 as client, server::conn::http2 as server, service::service_fn};
    use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(30);
    const WINDOW_BYTES: u32 = 16 * 1024;

    struct Counted(Arc<AtomicUsize>);

    impl Drop for Counted {
        fn drop(&mut self) {
            self.0.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// A kilobyte at once, again and again with a pause between, so many times.
    fn answer(running: &Arc<AtomicUsize>, pieces: usize, pause: Duration) -> EdgeBody {
        running.fetch_add(1, Ordering::AcqRel);
        let state = (pieces, Counted(Arc::clone(running)));
        EdgeBody::Relayed(Box::pin(stream::unfold(state, move |(left, counted)| async move {
            let left = left.checked_sub(1)?;
            tokio::time::sleep(pause).await;
            Some((Bytes::from_static(&[b'x'; 1024]), (left, counted)))
        })))
    }

    async fn connect(running: &Arc<AtomicUsize>) -> client::SendRequest<Empty<Bytes>> {
        let (near, far) = tokio::io::duplex(1024 * 1024);
        let running = Arc::clone(running);
        let service = service_fn(move |request: Request<hyper::body::Incoming>| {
            let body = match request.uri().path() {
                "/endless" => answer(&running, usize::MAX, Duration::from_millis(1)),
                _ => answer(&running, 20, PATIENCE * 2 / 3),
            };
            async move { Ok::<_, std::convert::Infallible>(Response::new(ServedBody::watched(body, PATIENCE))) }
        });
        let mut serving = server::Builder::new(TokioExecutor::new());
        serving.timer(TokioTimer::new());
        tokio::spawn(serving.serve_connection(TokioIo::new(near), service));
        let (sender, connection) = client::Builder::new(TokioExecutor::new())
            .initial_stream_window_size(WINDOW_BYTES)
            .initial_connection_window_size(16 * WINDOW_BYTES)
            .handshake(TokioIo::new(far))
            .await
            .unwrap();
        tokio::spawn(connection);
        sender
    }

    fn get(path: &str) -> Request<Empty<Bytes>> {
        Request::get(format!("http://test{path}")).body(Empty::new()).unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn a_stream_of_which_nothing_is_taken_is_ended_and_its_neighbour_goes_on() {
        let running = Arc::new(AtomicUsize::new(0));
        let mut sender = connect(&running).await;
        let unread = sender.send_request(get("/endless")).await.unwrap();
        // Slower than the time limit as a whole, with pauses that are shorter.
        let read = sender.send_request(get("/slow")).await.unwrap();
        assert_eq!(2, running.load(Ordering::Acquire));
        tokio::time::sleep(3 * PATIENCE).await;
        assert_eq!(1, running.load(Ordering::Acquire), "what nobody takes is dropped");
        assert_eq!(20 * 1024, read.into_body().collect().await.unwrap().to_bytes().len());
        // What was on the way is there, and then it is said that it broke off.
        let mut unread = unread.into_body();
        let mut taken = 0;
        let error = loop {
            match unread.frame().await.expect("an error and no end") {
                Ok(frame) => taken += frame.into_data().unwrap().len(),
                Err(error) => break error,
            }
        };
        assert!(error.to_string().contains("reset") || std::error::Error::source(&error).is_some(), "{error}");
        assert!(taken >= WINDOW_BYTES as usize, "{taken}");
    }

    #[tokio::test(start_paused = true)]
    async fn whoever_takes_a_little_now_and_then_is_not_given_up() {
        let running = Arc::new(AtomicUsize::new(0));
        let mut sender = connect(&running).await;
        let mut body = sender.send_request(get("/endless")).await.unwrap().into_body();
        for _ in 0..40 {
            tokio::time::sleep(PATIENCE / 4).await;
            for _ in 0..8 {
                assert!(body.frame().await.unwrap().is_ok());
            }
        }
        drop(body);
        while running.load(Ordering::Acquire) > 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}
