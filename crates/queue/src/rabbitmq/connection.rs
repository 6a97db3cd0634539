//! A connection to RabbitMQ that is made within a time limit and can be cut at any time.
//!
//! lapin runs a thread per connection, and neither a limit nor a way to end it while the broker does not answer. So the socket is kept
//! here as well: shutting it down ends the thread.

use std::net::Shutdown;
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::Duration;

use lapin::{AsyncTcpStream, Connection, ConnectionProperties, ErrorKind};
use parking_lot::Mutex;
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use super::transport::{self, Stream};
use super::{Address, ConnectError, Tls};

/// How long the broker may take to answer that it closes a connection.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// Reply codes with which the broker refuses a login or a virtual host.
const ACCESS_REFUSED: u16 = 403;
const NOT_ALLOWED: u16 = 530;

/// Makes connections.
#[derive(Debug)]
pub(super) struct Connector {
    pub(super) address: Address,
    pub(super) tls: Option<Tls>,
    pub(super) connect_timeout: Duration,
    pub(super) heartbeat_s: u16,
}

/// A connection. It is cut when this is dropped; the broker then re-queues what its consumers have not acknowledged.
pub(super) struct Link {
    // Dropped first: what lapin sends when its own parts are dropped must not reach the broker.
    socket: Socket,
    pub(super) connection: Connection,
}

/// The socket of a connection as soon as there is one. Shut down on drop.
#[derive(Clone, Default)]
struct Slot(Arc<Mutex<Option<std::net::TcpStream>>>);

struct Socket(Slot);

impl Drop for Socket {
    fn drop(&mut self) {
        if let Some(socket) = self.0.0.lock().take() {
            // An error means that it is closed already.
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

impl Connector {
    /// Connects and logs in. `purpose` is shown in the broker's list of connections.
    pub(super) async fn connect(&self, purpose: &str) -> Result<Link, ConnectError> {
        let slot = Slot::default();
        let socket = Socket(slot.clone());
        let (host, port, limit) = (self.address.host.clone(), self.address.port, self.connect_timeout);
        let tls = match (&self.tls, self.address.tls) {
            (Some(tls), true) => Some(TlsConnector::from(tls.config())),
            (None, false) => None,
            (None, true) | (Some(_), false) => return Err(ConnectError::TlsMismatch),
        };
        // Runs on lapin's thread.
        let open = async move |_, _| {
            let opening = async {
                let stream = TcpStream::connect((host.as_str(), port)).await?;
                stream.set_nodelay(true)?;
                *slot.0.lock() = Some(stream.as_fd().try_clone_to_owned()?.into());
                match &tls {
                    None => Ok(Stream::new(stream)),
                    Some(tls) => {
                        let name = ServerName::try_from(host.clone()).map_err(std::io::Error::other)?;
                        Ok(Stream::new(tls.connect(name, stream).await?))
                    }
                }
            };
            let timed_out = |_| Err(std::io::ErrorKind::TimedOut.into());
            let opened: std::io::Result<Stream> = timeout(limit, opening).await.unwrap_or_else(timed_out);
            Ok(AsyncTcpStream::Plain(opened?))
        };
        let properties = ConnectionProperties::default().with_connection_name(format!("stampede {purpose}").into());
        let connecting =
            Connection::connector(self.address.uri(self.heartbeat_s), transport::runtime(), open, properties);
        match timeout(self.connect_timeout, connecting).await {
            Ok(Ok(connection)) => Ok(Link { socket, connection }),
            Ok(Err(error)) => Err(ConnectError::from_lapin(&error)),
            Err(_) => Err(ConnectError::Unreachable(format!("no answer within {:?}", self.connect_timeout))),
        }
    }
}

impl Link {
    /// Disconnects in the way of the protocol, or cuts the connection if the broker does not answer.
    pub(super) async fn close(self) {
        // The broker may have closed it already.
        let _ = timeout(CLOSE_TIMEOUT, self.connection.close(200, "closed".into())).await;
        drop(self.socket);
    }

    pub(super) fn is_connected(&self) -> bool {
        self.connection.status().connected()
    }
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Link").field("status", self.connection.status()).finish_non_exhaustive()
    }
}

/// Reply code and text of an error that the broker sent.
pub(super) fn broker_error(error: &lapin::Error) -> Option<(u16, String)> {
    match error.kind() {
        ErrorKind::ProtocolError(error) => Some((error.get_id(), error.get_message().to_string())),
        _ => None,
    }
}

impl ConnectError {
    pub(super) fn from_lapin(error: &lapin::Error) -> Self {
        match broker_error(error) {
            Some((ACCESS_REFUSED | NOT_ALLOWED, message)) => Self::Refused(message),
            _ => Self::Unreachable(error.to_string()),
        }
    }
}
