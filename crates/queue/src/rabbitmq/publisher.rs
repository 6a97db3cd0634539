//! Publishes messages over one connection, which is replaced when it breaks.
//!
//! One task owns the channel: it sends the messages in the sequence in which they arrive, without waiting for the confirms of earlier
//! ones, and answers each when its confirm arrives. How many are under way is bounded.
//!
//! A message that was sent is never sent again from here, because it may be in the queue.
//!
//! When the broker returns a message, an operator has deleted a queue or a binding. Everything is then declared again at once, because a
//! consumer does so only when it connects.

use std::future::{pending, poll_fn};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use futures_util::future::BoxFuture;
use lapin::message::BasicReturnMessage;
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel, Confirmation, ConnectionStatus, Event};
use parking_lot::{Mutex, RwLock};
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::confirms::{Answers, ChannelLost, Confirmed, Confirms, Publishing, Returned, Waiter};
use super::connection::{Link, broker_error};
use super::topology::{Target, Topology};
use super::{ConnectError, Setup};
use crate::backoff::Backoff;
use crate::{QueueError, UnreadyReason};

/// Closes a channel without an error.
const REPLY_SUCCESS: u16 = 200;
/// The broker writes the message to disk.
const PERSISTENT: u8 = 2;
/// A connection that ends without an event is noticed after this time.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// How long closing waits for confirms.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);
/// The broker is unready if it has refused messages for this long and taken none. If this were shorter, one full queue would count although
/// others take messages.
const REJECTING_AFTER: Duration = Duration::from_secs(2);
/// It counts as ready again this long after it has refused one: if nothing is published, nothing shows that it takes messages again.
const REJECTED_FOR: Duration = Duration::from_secs(5);
/// Returned messages are logged at most this often.
const LOG_INTERVAL: Duration = Duration::from_secs(10);
const TOO_MANY: QueueError = QueueError::Busy("too many messages are not confirmed yet");
const BLOCKED: QueueError = QueueError::Busy("the broker has blocked publishers");

#[derive(Debug)]
struct Request {
    target: Target,
    payload: Vec<u8>,
    /// Why it is a dead letter.
    reason: Option<String>,
    waiter: Waiter,
}

enum State {
    /// `unready`: the broker has returned messages, and something is still missing.
    Connected {
        requests: mpsc::Sender<Request>,
        status: ConnectionStatus,
        unready: Option<UnreadyReason>,
        rejecting: Option<Rejecting>,
    },
    Disconnected {
        reason: String,
        unready: UnreadyReason,
    },
    Closed,
}

/// When the broker has refused a message, without having taken one since.
#[derive(Debug, Clone, Copy)]
struct Rejecting {
    first: Instant,
    last: Instant,
}

impl Rejecting {
    fn lasted(&self) -> Duration {
        self.last.duration_since(self.first)
    }

    fn is_unready(&self) -> bool {
        self.lasted() >= REJECTING_AFTER && self.last.elapsed() < REJECTED_FOR
    }
}

pub(super) struct Publisher {
    state: Arc<RwLock<State>>,
    permits: Arc<Semaphore>,
    confirm_timeout: Duration,
    task: Mutex<Option<JoinHandle<()>>>,
}

impl Publisher {
    /// Connects. Afterwards a task keeps the connection.
    pub(super) async fn start(setup: Arc<Setup>) -> Result<Self, ConnectError> {
        let (link, channel) = open(&setup).await?;
        let permits = Arc::new(Semaphore::new(setup.max_in_flight));
        let confirm_timeout = setup.confirm_timeout;
        let state = Arc::new(RwLock::new(disconnected("starting".to_owned())));
        let requests = enter(&state, &setup, &link);
        let task = tokio::spawn(keep_connected(setup, state.clone(), link, channel, requests));
        Ok(Self { state, permits, confirm_timeout, task: Mutex::new(Some(task)) })
    }

    /// Publishes a message and waits for its confirm.
    pub(super) async fn publish(
        &self,
        target: Target,
        payload: Vec<u8>,
        reason: Option<String>,
    ) -> Result<(), QueueError> {
        let permit = self.permits.clone().try_acquire_owned().map_err(|_| TOO_MANY)?;
        let (reply, answer) = oneshot::channel();
        self.send(Request { target, payload, reason, waiter: Waiter { reply, permit } })?;
        match timeout(self.confirm_timeout, answer).await {
            Ok(Ok(outcome)) => outcome,
            Ok(Err(_)) => Err(QueueError::Unconfirmed("the publisher has stopped".to_owned())),
            Err(_) => Err(QueueError::Unconfirmed(format!("no answer within {:?}", self.confirm_timeout))),
        }
    }

    fn send(&self, request: Request) -> Result<(), QueueError> {
        match &*self.state.read() {
            State::Connected { status, .. } if status.blocked() => Err(BLOCKED),
            State::Connected { requests, .. } => requests.try_send(request).map_err(|error| match error {
                mpsc::error::TrySendError::Full(_) => TOO_MANY,
                mpsc::error::TrySendError::Closed(_) => QueueError::NotSent("the connection was lost".to_owned()),
            }),
            State::Disconnected { reason, .. } => Err(QueueError::NotSent(reason.clone())),
            State::Closed => Err(QueueError::NotSent("the queue was closed".to_owned())),
        }
    }

    pub(super) fn unready_reason(&self) -> Option<UnreadyReason> {
        match &*self.state.read() {
            State::Connected { status, .. } if !status.connected() => Some(UnreadyReason::Unreachable),
            State::Connected { status, .. } if status.blocked() => Some(UnreadyReason::Blocked),
            State::Connected { unready: Some(reason), .. } => Some(*reason),
            State::Connected { rejecting, .. } => {
                rejecting.filter(Rejecting::is_unready).map(|_| UnreadyReason::Rejecting)
            }
            State::Disconnected { unready, .. } => Some(*unready),
            State::Closed => Some(UnreadyReason::Unreachable),
        }
    }

    /// Waits for the confirms of messages under way, but not long, then disconnects.
    pub(super) async fn close(&self) {
        let before = std::mem::replace(&mut *self.state.write(), State::Closed);
        let Some(mut task) = self.task.lock().take() else { return };
        let connected = matches!(before, State::Connected { .. });
        // With its sender the task's queue ends.
        drop(before);
        if !connected || timeout(CLOSE_TIMEOUT, &mut task).await.is_err() {
            task.abort();
        }
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        if let Some(task) = self.task.lock().take() {
            task.abort();
        }
    }
}

/// Opens a channel that confirms messages, with exchange and queues declared.
async fn open(setup: &Setup) -> Result<(Link, Channel), ConnectError> {
    let (link, channel) = setup.open("publisher").await?;
    let selecting = channel.confirm_select(ConfirmSelectOptions::default());
    setup.answer(selecting).await?;
    Ok((link, channel))
}

/// Lets callers publish over the connection, unless the publisher was closed.
fn enter(state: &RwLock<State>, setup: &Setup, link: &Link) -> mpsc::Receiver<Request> {
    let (sender, requests) = mpsc::channel(setup.max_in_flight);
    let mut state = state.write();
    if !matches!(*state, State::Closed) {
        let status = link.connection.status().clone();
        *state = State::Connected { requests: sender, status, unready: None, rejecting: None };
    }
    requests
}

const fn disconnected(reason: String) -> State {
    State::Disconnected { reason, unready: UnreadyReason::Unreachable }
}

fn disconnect(state: &RwLock<State>, to: State) {
    let mut state = state.write();
    if !matches!(*state, State::Closed) {
        *state = to;
    }
}

/// Declares everything again after the broker has returned a message, until that is done. On a channel of its own, because the broker
/// closes the channel of a declaration that it refuses.
async fn declare_again(setup: &Setup, link: &Link, state: &RwLock<State>, is_logged: bool) {
    let note = |reason: Option<UnreadyReason>| {
        if let State::Connected { unready, .. } = &mut *state.write() {
            *unready = reason;
        }
    };
    let broker = &setup.connector.address;
    note(Some(UnreadyReason::Returning));
    if is_logged {
        tracing::warn!(%broker, "the broker returned a message: a queue or a binding is missing; declaring everything again");
    }
    let mut backoff = Backoff::new();
    loop {
        match setup.declare(link).await {
            Ok(channel) => {
                note(None);
                if is_logged {
                    tracing::info!(%broker, "exchange and queues were declared again");
                }
                // It is closed with the connection otherwise.
                let _ = setup.answer(channel.close(REPLY_SUCCESS, "".into())).await;
                return;
            }
            Err(error) => {
                tracing::error!(%broker, %error, "the queues cannot be declared again; trying again");
                note(Some(error.unready_reason()));
                backoff.sleep().await;
            }
        }
    }
}

/// Notes that the broker takes messages, or refuses them.
fn note_answers(setup: &Setup, state: &RwLock<State>, answers: Answers) {
    let State::Connected { rejecting, .. } = &mut *state.write() else { return };
    let broker = &setup.connector.address;
    // Logged when it counts, at most once in that time: with one full queue among others, the answers alternate.
    match rejecting {
        Some(since) if answers.taken => {
            if since.lasted() >= REJECTING_AFTER {
                tracing::info!(%broker, "the broker takes messages again");
            }
            *rejecting = None;
        }
        Some(since) => {
            let lasted = since.lasted();
            since.last = Instant::now();
            if lasted < REJECTING_AFTER && since.lasted() >= REJECTING_AFTER {
                tracing::warn!(%broker, "the broker refuses messages; is a limit of its queues reached?");
            }
        }
        None if answers.taken => {}
        None => {
            let now = Instant::now();
            *rejecting = Some(Rejecting { first: now, last: now });
        }
    }
}

/// Runs connections one after another until the publisher is closed.
async fn keep_connected(
    setup: Arc<Setup>,
    state: Arc<RwLock<State>>,
    mut link: Link,
    mut channel: Channel,
    mut requests: mpsc::Receiver<Request>,
) {
    let mut backoff = Backoff::new();
    loop {
        let started = Instant::now();
        let ended = run(&setup, &state, &link, Arc::new(channel), &mut requests).await;
        let Err(ChannelLost(reason)) = ended else {
            link.close().await;
            return;
        };
        disconnect(&state, disconnected(reason.clone()));
        // The broker must not wait for this connection, which may hang.
        drop(link);
        requests.close();
        while let Ok(request) = requests.try_recv() {
            request.waiter.answer(Err(QueueError::NotSent(reason.clone())));
        }
        tracing::warn!(broker = %setup.connector.address, reason, "the connection for publishing was lost");
        backoff.connection_lasted(started.elapsed());
        (link, channel) = loop {
            backoff.sleep().await;
            match open(&setup).await {
                Ok(opened) => break opened,
                Err(error) => {
                    tracing::warn!(broker = %setup.connector.address, %error, "cannot connect for publishing");
                    let (reason, unready) = (error.to_string(), error.unready_reason());
                    disconnect(&state, State::Disconnected { reason, unready });
                }
            }
        };
        tracing::info!(broker = %setup.connector.address, "connected for publishing");
        requests = enter(&state, &setup, &link);
    }
}

/// Publishes over one channel until it is lost, or until the publisher is closed and every message is answered.
async fn run(
    setup: &Arc<Setup>,
    state: &RwLock<State>,
    link: &Link,
    channel: Arc<Channel>,
    requests: &mut mpsc::Receiver<Request>,
) -> Result<(), ChannelLost> {
    let mut confirms = Confirms::default();
    let numbers = AtomicU64::new(1);
    let publish = |confirms: &mut Confirms, request: Request| {
        // A message that nobody waits for is not sent.
        if !request.waiter.reply.is_closed() {
            let number = numbers.fetch_add(1, Ordering::Relaxed);
            let Request { target, payload, reason, waiter } = request;
            let publishing = publishing(setup.clone(), channel.clone(), number, target, payload, reason);
            confirms.push(number, publishing, waiter);
        }
    };
    let mut events = std::pin::pin!(link.connection.events_listener());
    let mut check = tokio::time::interval(CHECK_INTERVAL);
    let mut closing = false;
    let (mut declaring, mut logged_at): (Option<BoxFuture<'_, ()>>, Option<Instant>) = (None, None);
    let mut is_rejecting = false;
    let lost = loop {
        if closing && confirms.is_empty() {
            return Ok(());
        }
        tokio::select! {
            answered = poll_fn(|context| confirms.poll_answer(context)), if !confirms.is_empty() => {
                if let Err(lost) = answered {
                    break lost;
                }
                let answers = confirms.take_answers();
                if answers.rejected || (is_rejecting && answers.taken) {
                    is_rejecting = !answers.taken;
                    note_answers(setup, state, answers);
                }
                if confirms.take_returned() && declaring.is_none() {
                    let is_logged = logged_at.is_none_or(|at| at.elapsed() >= LOG_INTERVAL);
                    if is_logged {
                        logged_at = Some(Instant::now());
                    }
                    declaring = Some(Box::pin(declare_again(setup, link, state, is_logged)));
                }
            }
            () = async { if let Some(declaring) = &mut declaring { declaring.await } else { pending().await } } => {
                declaring = None;
            }
            request = requests.recv(), if !closing => match request {
                None => closing = true,
                Some(request) => {
                    publish(&mut confirms, request);
                    while let Ok(request) = requests.try_recv() {
                        publish(&mut confirms, request);
                    }
                }
            },
            event = events.next() => match event {
                // Of the channel on which everything is declared again. If this one is lost as well, `check` notices.
                Some(Event::Error(error)) if declaring.is_some() && broker_error(&error).is_some() => {}
                Some(Event::Error(error)) => break ChannelLost(error.to_string()),
                None => break ChannelLost("the connection has ended".to_owned()),
                Some(Event::ConnectionBlocked(reason)) => {
                    tracing::warn!(broker = %setup.connector.address, reason, "the broker has blocked publishers");
                }
                Some(Event::ConnectionUnblocked) => {
                    tracing::info!(broker = %setup.connector.address, "the broker accepts messages again");
                }
                Some(_) => {}
            },
            _ = check.tick() => {
                if !channel.status().connected() || !link.is_connected() {
                    break ChannelLost("the connection has ended".to_owned());
                }
            }
        }
    };
    confirms.fail_all(&lost.0);
    Err(lost)
}

fn publishing(
    setup: Arc<Setup>,
    channel: Arc<Channel>,
    number: u64,
    target: Target,
    payload: Vec<u8>,
    reason: Option<String>,
) -> Publishing {
    Box::pin(async move {
        let mut properties =
            BasicProperties::default().with_delivery_mode(PERSISTENT).with_message_id(number.to_string().into());
        if let Some(reason) = reason {
            let mut headers = FieldTable::default();
            headers.insert("reason".into(), AMQPValue::LongString(reason.into()));
            properties = properties.with_headers(headers);
        }
        let options = BasicPublishOptions { mandatory: setup.mandatory, ..BasicPublishOptions::default() };
        let (exchange, key) = (setup.topology.exchange(), Topology::routing_key(target));
        let sending = channel.basic_publish(exchange.into(), key.into(), options, &payload, properties);
        let confirm = sending.await.map_err(|error| error.to_string())?;
        let (acknowledged, returned) = match confirm.await.map_err(|error| error.to_string())? {
            Confirmation::Ack(returned) => (true, returned),
            Confirmation::Nack(returned) => (false, returned),
            Confirmation::NotRequested => return Err("the channel does not confirm messages".to_owned()),
        };
        Ok(Confirmed { acknowledged, returned: returned.map(|message| number_of(&message)) })
    })
}

fn number_of(message: &BasicReturnMessage) -> Returned {
    let id = message.delivery.properties.message_id().as_ref();
    id.and_then(|id| id.as_str().parse().ok()).map_or(Returned::Unknown, Returned::Number)
}
