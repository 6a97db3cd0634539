//! A timeout for writes to a peer that does not read.

use std::io::{Error, ErrorKind, IoSlice, Result};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};

use crate::connections::Connection;

/// Passes everything through to the stream. A write without progress for `timeout` is an error, so that a peer that never reads does not
/// hold a connection forever.
pub(crate) struct WriteTimeout<S> {
    stream: S,
    timeout: Duration,
    /// Runs while a write makes no progress.
    blocked: Option<Pin<Box<Sleep>>>,
    /// Its state says whether a write is blocked.
    connection: Arc<Connection>,
}

impl<S> WriteTimeout<S> {
    pub(crate) const fn new(stream: S, timeout: Duration, connection: Arc<Connection>) -> Self {
        Self { stream, timeout, blocked: None, connection }
    }

    /// Starts the timeout if the write is pending, stops it if the write made progress.
    fn check_progress<T>(&mut self, context: &mut Context<'_>, write: Poll<Result<T>>) -> Poll<Result<T>> {
        if write.is_ready() {
            if self.blocked.take().is_some() {
                self.connection.set_blocked(false);
            }
            return write;
        }
        let (timeout, connection) = (self.timeout, &self.connection);
        let blocked = self.blocked.get_or_insert_with(|| {
            connection.set_blocked(true);
            Box::pin(sleep(timeout))
        });
        ready!(blocked.as_mut().poll(context));
        Poll::Ready(Err(Error::new(ErrorKind::TimedOut, "the peer does not read")))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for WriteTimeout<S> {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for WriteTimeout<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<Result<usize>> {
        let write = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.check_progress(context, write)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<Result<usize>> {
        let write = Pin::new(&mut self.stream).poll_write_vectored(context, slices);
        self.check_progress(context, write)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        let flush = Pin::new(&mut self.stream).poll_flush(context);
        self.check_progress(context, flush)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        let shutdown = Pin::new(&mut self.stream).poll_shutdown(context);
        self.check_progress(context, shutdown)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    #[tokio::test]
    async fn write_fails_only_if_the_peer_never_reads() {
        let (stream, mut peer) = tokio::io::duplex(64);
        let mut stream = WriteTimeout::new(stream, Duration::from_secs(2), Arc::default());
        let reading = tokio::spawn(async move {
            let mut received = [0; 32];
            for _ in 0..8 {
                tokio::task::yield_now().await;
                peer.read_exact(&mut received).await.unwrap();
            }
            peer
        });
        stream.write_all(&[7; 256]).await.unwrap();
        let _peer = reading.await.unwrap();
        let error = stream.write_all(&[7; 256]).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
    }
}
