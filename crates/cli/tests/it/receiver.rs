//! A server of an operator or a provider that gets signed messages.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Mutex};

use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

/// A message as it arrived.
#[derive(Debug, Clone)]
pub struct Message {
    /// The header `x-stampede-signature`.
    pub signature: String,
    pub body: String,
    /// What was answered.
    pub status: u16,
}

impl Message {
    pub fn json(&self) -> Value {
        self.body.parse().unwrap()
    }
}

#[derive(Debug, Clone)]
pub struct Receiver {
    pub address: SocketAddr,
    status: Arc<AtomicU16>,
    rejected: Arc<Mutex<Option<String>>>,
    received: Arc<Mutex<Vec<Message>>>,
}

impl Receiver {
    /// Starts one that answers with this status.
    pub async fn start(status: u16) -> Self {
        Self::start_at(([127, 0, 0, 1], 0).into(), status).await
    }

    /// Starts one at this address.
    pub async fn start_at(address: SocketAddr, status: u16) -> Self {
        let listener = TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap();
        let status = Arc::new(AtomicU16::new(status));
        let receiver = Self { address, status, rejected: Arc::default(), received: Arc::default() };
        let serving = receiver.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let serving = serving.clone();
                tokio::spawn(async move { serving.serve(stream).await });
            }
        });
        receiver
    }

    pub fn answer_with(&self, status: u16) {
        self.status.store(status, Ordering::SeqCst);
    }

    /// Messages that contain this are answered with 422 from now on.
    pub fn reject(&self, text: Option<&str>) {
        *self.rejected.lock().unwrap() = text.map(str::to_owned);
    }

    fn status_for(&self, body: &str) -> u16 {
        let is_rejected = self.rejected.lock().unwrap().as_ref().is_some_and(|text| body.contains(text));
        match self.status.load(Ordering::SeqCst) {
            200..300 if is_rejected => 422,
            status => status,
        }
    }

    /// All messages, those too that were not accepted.
    pub fn received(&self) -> Vec<Message> {
        self.received.lock().unwrap().clone()
    }

    /// Reads requests until the connection is closed.
    async fn serve(&self, mut stream: TcpStream) {
        let mut bytes = Vec::new();
        loop {
            let text = String::from_utf8(bytes.clone()).unwrap();
            let whole = text.split_once("\r\n\r\n").and_then(|(head, rest)| {
                let header = |name: &str| {
                    let line = head.lines().find(|line| line.to_lowercase().starts_with(name))?;
                    Some(line[name.len()..].trim().to_owned())
                };
                let length: usize = header("content-length:")?.parse().ok()?;
                let body = rest.get(..length)?.to_owned();
                let status = self.status_for(&body);
                Some((Message { signature: header("x-stampede-signature:")?, body, status }, head.len() + 4 + length))
            });
            if let Some((message, length)) = whole {
                bytes.drain(..length);
                let status = message.status;
                self.received.lock().unwrap().push(message);
                let answer = format!("HTTP/1.1 {status} Answer\r\ncontent-length: 0\r\n\r\n");
                if stream.write_all(answer.as_bytes()).await.is_err() {
                    return;
                }
                continue;
            }
            // The other side may end the connection at any time.
            if stream.read_buf(&mut bytes).await.unwrap_or(0) == 0 {
                return;
            }
        }
    }
}
