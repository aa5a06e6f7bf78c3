//! A connection that came through a door.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll},
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
};
use tokio_rustls::server::TlsStream;
use tonic::transport::server::Connected;

use crate::{Caller, Peer};

/// A connection, and who is on its other side.
#[derive(Debug)]
pub struct DoorStream {
    peer: Peer,
    io: Io,
}

#[derive(Debug)]
enum Io {
    Plain(TcpStream),
    Encrypted(Box<TlsStream<TcpStream>>),
}

impl DoorStream {
    pub(crate) fn plain(stream: TcpStream) -> Self {
        Self { peer: Peer::Unasked, io: Io::Plain(stream) }
    }

    pub(crate) fn encrypted(stream: TlsStream<TcpStream>, peer: Peer) -> Self {
        Self { peer, io: Io::Encrypted(Box::new(stream)) }
    }

    /// Who is on the other side.
    #[must_use]
    pub fn peer(&self) -> Peer {
        self.peer
    }
}

impl Connected for DoorStream {
    type ConnectInfo = Caller;

    fn connect_info(&self) -> Caller {
        let socket = match &self.io {
            Io::Plain(stream) => stream,
            Io::Encrypted(stream) => stream.get_ref().0,
        };
        Caller { peer: self.peer, host: socket.peer_addr().ok().map(|address| address.ip()) }
    }
}

macro_rules! forward {
    ($self:ident, $method:ident $(, $argument:expr)*) => {
        match &mut $self.get_mut().io {
            Io::Plain(stream) => Pin::new(stream).$method($($argument),*),
            Io::Encrypted(stream) => Pin::new(stream.as_mut()).$method($($argument),*),
        }
    };
}

impl AsyncRead for DoorStream {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        forward!(self, poll_read, context, buffer)
    }
}

impl AsyncWrite for DoorStream {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        forward!(self, poll_write, context, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        forward!(self, poll_write_vectored, context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        match &self.io {
            Io::Plain(stream) => stream.is_write_vectored(),
            Io::Encrypted(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        forward!(self, poll_flush, context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        forward!(self, poll_shutdown, context)
    }
}
