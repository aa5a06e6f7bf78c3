//! A connection that is given up when its client takes nothing any more.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::Sleep,
};

/// Breaks a connection off when nothing could be written to it for a while. What waits for a client is bounded in bytes
/// and tokens, and this bounds it in time: a body that cannot be written is not polled, so nothing else would end it.
#[derive(Debug)]
pub(crate) struct PatientIo<S> {
    inner: S,
    patience: Duration,
    /// Runs while a write waits.
    waiting: Option<Pin<Box<Sleep>>>,
}

impl<S> PatientIo<S> {
    pub(crate) fn new(inner: S, patience: Duration) -> Self {
        Self { inner, patience, waiting: None }
    }

    fn wait<T>(&mut self, context: &mut Context<'_>) -> Poll<io::Result<T>> {
        let patience = self.patience;
        let timer = self.waiting.get_or_insert_with(|| Box::pin(tokio::time::sleep(patience)));
        timer.as_mut().poll(context).map(|()| Err(io::Error::new(io::ErrorKind::TimedOut, "the client takes nothing")))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for PatientIo<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for PatientIo<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match Pin::new(&mut self.inner).poll_write(context, bytes) {
            Poll::Pending => self.wait(context),
            written => {
                self.waiting = None;
                written
            }
        }
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffers: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match Pin::new(&mut self.inner).poll_write_vectored(context, buffers) {
            Poll::Pending => self.wait(context),
            written => {
                self.waiting = None;
                written
            }
        }
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(30);

    #[tokio::test(start_paused = true)]
    async fn a_client_that_takes_nothing_is_given_up() {
        let (mut near, _far) = PatientIo::pair();
        let began = tokio::time::Instant::now();
        let error = near.write_all(&[0; 100]).await.unwrap_err();
        assert_eq!(io::ErrorKind::TimedOut, error.kind());
        assert_eq!(PATIENCE, began.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_takes_a_little_now_and_then_is_not() {
        let (mut near, mut far) = PatientIo::pair();
        let reading = tokio::spawn(async move {
            let mut taken = 0;
            while taken < 100 {
                tokio::time::sleep(PATIENCE - Duration::from_secs(1)).await;
                taken += far.read(&mut [0; 16]).await.unwrap();
            }
        });
        near.write_all(&[0; 100]).await.unwrap();
        reading.await.unwrap();
    }

    impl PatientIo<tokio::io::DuplexStream> {
        fn pair() -> (Self, tokio::io::DuplexStream) {
            let (near, far) = tokio::io::duplex(16);
            (Self::new(near, PATIENCE), far)
        }
    }
}
