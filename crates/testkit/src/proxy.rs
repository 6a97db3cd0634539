//! A TCP proxy that can close connections, delay data, stop reading, drop responses, and lead to another server.

use std::io::Result;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// What the proxy does with the data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Data is forwarded.
    None,
    /// Every connection is closed, new ones included.
    Cut,
    /// Data is forwarded after this time.
    Delay(Duration),
    /// Nothing is read, so both sides hang.
    Hang,
    /// Requests are forwarded, responses are dropped.
    DropResponses,
}

#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    target: Arc<watch::Sender<SocketAddr>>,
    fault: Arc<watch::Sender<Fault>>,
    /// A change closes every present connection.
    cuts: Arc<watch::Sender<u64>>,
    opened: Arc<AtomicU64>,
    task: JoinHandle<()>,
}

impl Proxy {
    /// Listens on a free port and forwards to `target`.
    pub async fn start(target: SocketAddr) -> Result<Self> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let address = listener.local_addr()?;
        let target = Arc::new(watch::Sender::new(target));
        let fault = Arc::new(watch::Sender::new(Fault::None));
        let cuts = Arc::new(watch::Sender::new(0));
        let opened = Arc::new(AtomicU64::new(0));
        let (targets, faults, cutting, counter) = (target.clone(), fault.clone(), cuts.clone(), opened.clone());
        let task = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                counter.fetch_add(1, Ordering::Relaxed);
                let faults = faults.subscribe();
                if *faults.borrow() != Fault::Cut {
                    // Subscribed first: a connection that is opened while the target changes is closed, or leads to the new one.
                    let cuts = cutting.subscribe();
                    let target = *targets.borrow();
                    tokio::spawn(forward_both(client, target, faults, cuts));
                }
            }
        });
        Ok(Self { address, target, fault, cuts, opened, task })
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// How many connections clients have opened so far, including those that were closed at once because the server was away.
    pub fn opened(&self) -> u64 {
        self.opened.load(Ordering::Relaxed)
    }

    /// Leads new connections to another server, and closes the present ones.
    pub fn set_target(&self, target: SocketAddr) {
        self.target.send_replace(target);
        self.cut_all();
    }

    /// Closes every present connection. New ones are accepted.
    pub fn cut_all(&self) {
        self.cuts.send_modify(|cut| *cut += 1);
    }

    /// Sets the fault for present and new connections.
    pub fn set(&self, fault: Fault) {
        self.fault.send_replace(fault);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
        self.fault.send_replace(Fault::Cut);
    }
}

async fn forward_both(
    client: TcpStream,
    target: SocketAddr,
    mut faults: watch::Receiver<Fault>,
    mut cuts: watch::Receiver<u64>,
) {
    // If the target refuses the connection, the client's connection is closed.
    let Ok(server) = TcpStream::connect(target).await else { return };
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    let requests = forward(from_client, to_server, faults.clone(), false);
    let responses = forward(from_server, to_client, faults.clone(), true);
    let both = async { tokio::join!(requests, responses) };
    tokio::select! {
        _ = both => {}
        // `cut_all` was called, or the proxy was dropped.
        _ = cuts.changed() => {}
        _ = faults.wait_for(|fault| *fault == Fault::Cut) => {}
    }
}

/// Forwards one direction until either end closes.
async fn forward(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    mut faults: watch::Receiver<Fault>,
    responses: bool,
) {
    let mut buffer = vec![0; 16 * 1024];
    loop {
        if faults.wait_for(|fault| *fault != Fault::Hang).await.is_err() {
            return;
        }
        let Ok(length @ 1..) = from.read(&mut buffer).await else { break };
        // Data that was read when the fault changed to `Hang` waits as well.
        let fault = match faults.wait_for(|fault| *fault != Fault::Hang).await {
            Ok(fault) => *fault,
            Err(_) => return,
        };
        match fault {
            Fault::DropResponses if responses => continue,
            Fault::Delay(span) => tokio::time::sleep(span).await,
            _ => {}
        }
        if to.write_all(&buffer[..length]).await.is_err() {
            break;
        }
    }
    // The other direction ends when its own side closes.
    let _ = to.shutdown().await;
}
