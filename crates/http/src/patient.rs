//! A connection that gives up on a peer that does not read.

use std::io::{Error, ErrorKind, IoSlice, Result};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};

use crate::connections::Connection;

/// Passes everything through. A write that gets nowhere for `within` is an error, so that who never reads holds no place for ever.
pub(crate) struct Patient<S> {
    stream: S,
    within: Duration,
    /// Runs while a write gets nowhere.
    stuck: Option<Pin<Box<Sleep>>>,
    /// Learns whether a write waits.
    connection: Arc<Connection>,
}

impl<S> Patient<S> {
    pub(crate) const fn new(stream: S, within: Duration, connection: Arc<Connection>) -> Self {
        Self { stream, within, stuck: None, connection }
    }

    /// Starts the clock if the write waits, stops it if it got somewhere.
    fn judge<T>(&mut self, context: &mut Context<'_>, write: Poll<Result<T>>) -> Poll<Result<T>> {
        if write.is_ready() {
            if self.stuck.take().is_some() {
                self.connection.set_blocked(false);
            }
            return write;
        }
        let (within, connection) = (self.within, &self.connection);
        let stuck = self.stuck.get_or_insert_with(|| {
            connection.set_blocked(true);
            Box::pin(sleep(within))
        });
        ready!(stuck.as_mut().poll(context));
        Poll::Ready(Err(Error::new(ErrorKind::TimedOut, "the peer does not read")))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Patient<S> {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Patient<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<Result<usize>> {
        let write = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.judge(context, write)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<Result<usize>> {
        let write = Pin::new(&mut self.stream).poll_write_vectored(context, slices);
        self.judge(context, write)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        let flush = Pin::new(&mut self.stream).poll_flush(context);
        self.judge(context, flush)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        let shutdown = Pin::new(&mut self.stream).poll_shutdown(context);
        self.judge(context, shutdown)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    #[tokio::test]
    async fn gives_up_on_who_never_reads_and_only_then() {
        let (ours, mut theirs) = tokio::io::duplex(64);
        let mut ours = Patient::new(ours, Duration::from_secs(2), Arc::default());
        let reading = tokio::spawn(async move {
            let mut heard = [0; 32];
            for _ in 0..8 {
                tokio::task::yield_now().await;
                theirs.read_exact(&mut heard).await.unwrap();
            }
            theirs
        });
        ours.write_all(&[7; 256]).await.unwrap();
        let _theirs = reading.await.unwrap();
        let error = ours.write_all(&[7; 256]).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
    }
}
