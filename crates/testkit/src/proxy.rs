//! A TCP proxy that can cut, delay, stop reading and drop.

use std::io::Result;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// What happens to what passes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Everything passes.
    None,
    /// Every connection is closed, and so is every new one.
    Cut,
    /// Everything passes, later.
    Delay(Duration),
    /// Nothing is read: both sides hang.
    Hang,
    /// What the client says arrives; what the server answers is lost.
    DropAnswers,
}

#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    fault: Arc<watch::Sender<Fault>>,
    /// Rises when every present connection is to be closed.
    cuts: Arc<watch::Sender<u64>>,
    task: JoinHandle<()>,
}

impl Proxy {
    /// Listens on a free port and passes on to `target`.
    pub async fn start(target: SocketAddr) -> Result<Self> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let address = listener.local_addr()?;
        let fault = Arc::new(watch::Sender::new(Fault::None));
        let cuts = Arc::new(watch::Sender::new(0));
        let (faults, cutting) = (fault.clone(), cuts.clone());
        let task = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let faults = faults.subscribe();
                if *faults.borrow() != Fault::Cut {
                    tokio::spawn(pass(client, target, faults, cutting.subscribe()));
                }
            }
        });
        Ok(Self { address, fault, cuts, task })
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Closes every connection there is now; new ones may come.
    pub fn cut_all(&self) {
        self.cuts.send_modify(|cut| *cut += 1);
    }

    /// From now on.
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

async fn pass(
    client: TcpStream,
    target: SocketAddr,
    mut faults: watch::Receiver<Fault>,
    mut cuts: watch::Receiver<u64>,
) {
    // A target that is not there looks to the client like a connection that closes.
    let Ok(server) = TcpStream::connect(target).await else { return };
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    let asking = forward(from_client, to_server, faults.clone(), false);
    let answering = forward(from_server, to_client, faults.clone(), true);
    let both = async { tokio::join!(asking, answering) };
    tokio::select! {
        _ = both => {}
        // The proxy has gone, or it cuts.
        _ = cuts.changed() => {}
        _ = faults.wait_for(|fault| *fault == Fault::Cut) => {}
    }
}

/// Until either end closes.
async fn forward(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    mut faults: watch::Receiver<Fault>,
    answers: bool,
) {
    let mut buffer = vec![0; 16 * 1024];
    loop {
        if faults.wait_for(|fault| *fault != Fault::Hang).await.is_err() {
            return;
        }
        let Ok(length @ 1..) = from.read(&mut buffer).await else { break };
        // What came in while it was told to hang waits, too.
        let fault = match faults.wait_for(|fault| *fault != Fault::Hang).await {
            Ok(fault) => *fault,
            Err(_) => return,
        };
        match fault {
            Fault::DropAnswers if answers => continue,
            Fault::Delay(span) => tokio::time::sleep(span).await,
            _ => {}
        }
        if to.write_all(&buffer[..length]).await.is_err() {
            break;
        }
    }
    // The other direction learns of it by its own end.
    let _ = to.shutdown().await;
}
