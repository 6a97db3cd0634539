//! lapin on the runtime of the process, over a stream that this crate opens.
//!
//! lapin can open TLS streams by itself, but not with a configuration of rustls that the application has made, and it brings in parsers of
//! formats for keys that are not used here.

use std::fmt;
use std::io::{ErrorKind, Read, Result, Write};
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use async_rs::traits::Reactor;
use async_rs::util::RuntimeParts;
use async_rs::{Runtime, Tokio};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// tokio, except that it opens no streams.
pub(super) fn runtime() -> Runtime<RuntimeParts<Tokio, Timers>> {
    Runtime::new(RuntimeParts::new(Tokio::current(), Timers(Tokio::current())))
}

#[derive(Debug, Clone)]
pub(super) struct Timers(Tokio);

impl Reactor for Timers {
    type TcpStream = Stream;
    type Sleep = <Tokio as Reactor>::Sleep;

    fn register<H: Read + Write + Send + 'static>(
        &self,
        _socket: H,
    ) -> Result<impl futures_io::AsyncRead + futures_io::AsyncWrite + Send + Unpin + 'static> {
        Err::<Stream, _>(ErrorKind::Unsupported.into())
    }

    fn sleep(&self, span: Duration) -> Self::Sleep {
        self.0.sleep(span)
    }

    fn interval(&self, span: Duration) -> impl futures_util::Stream<Item = Instant> + Send + 'static {
        self.0.interval(span)
    }

    fn tcp_connect_addr(&self, _address: SocketAddr) -> impl Future<Output = Result<Self::TcpStream>> + Send + 'static {
        std::future::ready(Err(ErrorKind::Unsupported.into()))
    }
}

trait Duplex: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Duplex for T {}

/// A stream of tokio with the traits that lapin uses.
pub(super) struct Stream(Box<dyn Duplex>);

impl Stream {
    pub(super) fn new(stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static) -> Self {
        Self(Box::new(stream))
    }
}

impl futures_io::AsyncRead for Stream {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut [u8]) -> Poll<Result<usize>> {
        let mut buffer = ReadBuf::new(buffer);
        let read = Pin::new(&mut self.0).poll_read(context, &mut buffer);
        read.map_ok(|()| buffer.filled().len())
    }
}

impl futures_io::AsyncWrite for Stream {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<Result<usize>> {
        Pin::new(&mut self.0).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.0).poll_flush(context)
    }

    fn poll_close(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(context)
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Stream")
    }
}
