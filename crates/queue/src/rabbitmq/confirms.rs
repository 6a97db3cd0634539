//! The messages of a channel that the broker has not confirmed yet.
//!
//! The broker returns a mandatory message that no queue takes, and then confirms it like any other. lapin keeps returned messages in a
//! list and gives the first of them to the next message that is confirmed, whichever it is. With many messages under way, that is often
//! another one: the returned message itself then looks as if it had been stored. So every message carries its number, which comes back
//! when it is returned, and this module decides by the numbers:
//!
//! - A message whose number was returned is [`Unroutable`](QueueError::Unroutable).
//! - A message that was confirmed together with another one's return: the list was not empty, so its own return may still be in it.
//!   [`Unconfirmed`](QueueError::Unconfirmed).
//! - A message that was confirmed without a return: the list was empty. The return of a message arrives before its confirm, so if it was
//!   returned, the return was given to a message that was confirmed before. Those are all looked at before the answer is given: if any
//!   message was confirmed, all others are polled again until none is.

use std::collections::HashSet;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::sync::{OwnedSemaphorePermit, oneshot};

use crate::QueueError;

/// What the broker says about a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Confirmed {
    /// The broker takes responsibility for the message.
    pub(super) acknowledged: bool,
    pub(super) returned: Option<Returned>,
}

/// A message that came back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Returned {
    Number(u64),
    /// It has no number, so it is not known which message it is.
    Unknown,
}

/// Who waits for the outcome. The permit bounds how many messages are under way, also those that nobody waits for any more.
#[derive(Debug)]
pub(super) struct Waiter {
    pub(super) reply: oneshot::Sender<Result<(), QueueError>>,
    pub(super) permit: OwnedSemaphorePermit,
}

impl Waiter {
    pub(super) fn answer(self, outcome: Result<(), QueueError>) {
        drop(self.permit);
        // Nobody waits if the caller was cancelled or has timed out.
        let _ = self.reply.send(outcome);
    }
}

/// Sends a message and waits for its confirm. The first poll puts the message behind those that were polled before.
pub(super) type Publishing = Pin<Box<dyn Future<Output = Result<Confirmed, String>> + Send>>;

struct Pending {
    number: u64,
    publishing: Publishing,
    waiter: Waiter,
}

/// The channel cannot be used any more.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ChannelLost(pub(super) String);

/// Whether the broker has taken, or refused to take, a message.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Answers {
    pub(super) taken: bool,
    pub(super) rejected: bool,
}

/// The messages under way on one channel.
#[derive(Default)]
pub(super) struct Confirms {
    pending: Vec<Pending>,
    /// Numbers that were returned and whose confirms have not been seen.
    returned: HashSet<u64>,
    has_returned: bool,
    /// Answers by the broker since this was last asked.
    answers: Answers,
}

impl Confirms {
    pub(super) fn push(&mut self, number: u64, publishing: Publishing, waiter: Waiter) {
        self.pending.push(Pending { number, publishing, waiter });
    }

    pub(super) fn is_empty(&self) -> bool {
        self.pending.is_empty()
    }

    /// Whether the broker has returned a message since this was last asked.
    pub(super) fn take_returned(&mut self) -> bool {
        std::mem::take(&mut self.has_returned)
    }

    /// What the broker has answered since this was last asked.
    pub(super) fn take_answers(&mut self) -> Answers {
        std::mem::take(&mut self.answers)
    }

    /// Answers every message that is confirmed. Pending until there is one.
    pub(super) fn poll_answer(&mut self, context: &mut Context<'_>) -> Poll<Result<(), ChannelLost>> {
        let mut confirmed = Vec::new();
        let (mut lost, mut unknown_return) = (None, false);
        loop {
            let before = confirmed.len();
            let mut index = 0;
            while index < self.pending.len() {
                let pending = &mut self.pending[index];
                match pending.publishing.as_mut().poll(context) {
                    Poll::Pending => index += 1,
                    Poll::Ready(outcome) => {
                        // Messages stay in their sequence, because those that were never polled are sent in it.
                        let pending = self.pending.remove(index);
                        match &outcome {
                            Ok(Confirmed { returned: Some(Returned::Number(number)), .. }) => {
                                self.returned.insert(*number);
                                self.has_returned = true;
                            }
                            Ok(Confirmed { returned: Some(Returned::Unknown), .. }) => {
                                unknown_return = true;
                                lost = Some("the broker returned a message without a number".to_owned());
                            }
                            Ok(Confirmed { returned: None, .. }) => {}
                            Err(error) => lost = Some(error.clone()),
                        }
                        confirmed.push((pending, outcome));
                    }
                }
            }
            if confirmed.len() == before {
                break;
            }
        }
        if confirmed.is_empty() {
            return Poll::Pending;
        }
        for (pending, outcome) in confirmed {
            self.answers.rejected |= matches!(outcome, Ok(Confirmed { acknowledged: false, .. }));
            let outcome = self.decide(pending.number, outcome, unknown_return);
            self.answers.taken |= outcome.is_ok();
            pending.waiter.answer(outcome);
        }
        Poll::Ready(lost.map_or(Ok(()), |error| Err(ChannelLost(error))))
    }

    fn decide(
        &mut self,
        number: u64,
        outcome: Result<Confirmed, String>,
        unknown_return: bool,
    ) -> Result<(), QueueError> {
        if self.returned.remove(&number) {
            return Err(QueueError::Unroutable);
        }
        let unconfirmed = |reason: &str| Err(QueueError::Unconfirmed(reason.to_owned()));
        match outcome {
            Err(error) => unconfirmed(&error),
            Ok(Confirmed { acknowledged: false, .. }) => unconfirmed("it could not store the message"),
            Ok(Confirmed { returned: Some(_), .. }) => unconfirmed("it returned another message"),
            // The return could be of this message.
            Ok(_) if unknown_return => unconfirmed("it returned a message without a number"),
            Ok(Confirmed { acknowledged: true, returned: None }) => Ok(()),
        }
    }

    /// Answers all messages that are left: they may be in the queue.
    pub(super) fn fail_all(&mut self, reason: &str) {
        self.returned.clear();
        for pending in self.pending.drain(..) {
            pending.waiter.answer(Err(QueueError::Unconfirmed(reason.to_owned())));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::task::Waker;

    use tokio::sync::Semaphore;

    use super::*;

    type Outcome = Result<Confirmed, String>;

    struct Sent {
        confirm: Option<oneshot::Sender<Outcome>>,
        answer: oneshot::Receiver<Result<(), QueueError>>,
    }

    /// A channel with `count` messages under way, numbered from 0.
    fn channel(count: u64) -> (Confirms, Vec<Sent>, Arc<Semaphore>) {
        let permits = Arc::new(Semaphore::new(100));
        let mut confirms = Confirms::default();
        let sent = (0..count)
            .map(|number| {
                let (confirm, confirmed) = oneshot::channel();
                let (reply, answer) = oneshot::channel();
                let waiter = Waiter { reply, permit: permits.clone().try_acquire_owned().unwrap() };
                confirms.push(number, Box::pin(async { confirmed.await.unwrap() }), waiter);
                Sent { confirm: Some(confirm), answer }
            })
            .collect();
        (confirms, sent, permits)
    }

    impl Sent {
        fn resolve(&mut self, outcome: Outcome) {
            self.confirm.take().unwrap().send(outcome).unwrap();
        }

        fn acknowledge(&mut self, returned: Option<u64>) {
            self.resolve(Ok(Confirmed { acknowledged: true, returned: returned.map(Returned::Number) }));
        }

        fn answer(&mut self) -> Option<Result<(), QueueError>> {
            self.answer.try_recv().ok()
        }

        fn is_unconfirmed(&mut self) -> bool {
            matches!(self.answer(), Some(Err(QueueError::Unconfirmed(_))))
        }
    }

    fn poll(confirms: &mut Confirms) -> Poll<Result<(), ChannelLost>> {
        confirms.poll_answer(&mut Context::from_waker(Waker::noop()))
    }

    #[test]
    fn each_message_gets_its_own_confirm_and_frees_its_place() {
        let (mut confirms, mut sent, permits) = channel(3);
        assert!(poll(&mut confirms).is_pending());
        sent[1].acknowledge(None);
        assert_eq!(poll(&mut confirms), Poll::Ready(Ok(())));
        assert_eq!([0, 1, 2].map(|message: usize| sent[message].answer()), [None, Some(Ok(())), None]);
        assert_eq!(permits.available_permits(), 98);
        sent[0].acknowledge(None);
        sent[2].resolve(Ok(Confirmed { acknowledged: false, returned: None }));
        assert_eq!(poll(&mut confirms), Poll::Ready(Ok(())));
        assert_eq!(sent[0].answer(), Some(Ok(())));
        assert!(sent[2].is_unconfirmed());
        assert_eq!(confirms.take_answers(), Answers { taken: true, rejected: true });
        assert_eq!(confirms.take_answers(), Answers::default());
        assert!(confirms.is_empty() && permits.available_permits() == 100);
    }

    /// lapin gives the return of message 1 to message 0, in either sequence of polling.
    #[test]
    fn returned_message_is_not_confirmed_if_another_one_gets_its_return() {
        for (victim, returned) in [(0, 1), (1, 0)] {
            let (mut confirms, mut sent, _permits) = channel(3);
            sent[victim].acknowledge(Some(returned as u64));
            sent[returned].acknowledge(None);
            assert_eq!(poll(&mut confirms), Poll::Ready(Ok(())));
            assert!(sent[victim].is_unconfirmed());
            assert_eq!(sent[returned].answer(), Some(Err(QueueError::Unroutable)));
            assert!(confirms.take_returned() && !confirms.take_returned());
            assert_eq!(confirms.take_answers(), Answers::default(), "neither was taken for sure");
            sent[2].acknowledge(None);
            assert_eq!(poll(&mut confirms), Poll::Ready(Ok(())));
            assert_eq!(sent[2].answer(), Some(Ok(())));
        }
    }

    #[test]
    fn return_is_remembered_until_its_message_is_confirmed() {
        let (mut confirms, mut sent, _permits) = channel(2);
        sent[0].acknowledge(Some(1));
        assert_eq!(poll(&mut confirms), Poll::Ready(Ok(())));
        assert_eq!(sent[1].answer(), None);
        sent[1].acknowledge(None);
        assert_eq!(poll(&mut confirms), Poll::Ready(Ok(())));
        assert_eq!(sent[1].answer(), Some(Err(QueueError::Unroutable)));
    }

    /// Message 1 is confirmed between the polls of 0 and 1, after the return of 1 was given to 0.
    #[test]
    fn messages_that_were_polled_too_early_are_polled_again() {
        let (mut confirms, mut sent, permits) = channel(1);
        let (reply, mut answer) = oneshot::channel();
        let confirm = sent[0].confirm.take().unwrap();
        let publishing = async move {
            confirm.send(Ok(Confirmed { acknowledged: true, returned: Some(Returned::Number(1)) })).unwrap();
            Ok(Confirmed { acknowledged: true, returned: None })
        };
        let waiter = Waiter { reply, permit: permits.try_acquire_owned().unwrap() };
        confirms.push(1, Box::pin(publishing), waiter);
        assert_eq!(poll(&mut confirms), Poll::Ready(Ok(())));
        assert_eq!(answer.try_recv(), Ok(Err(QueueError::Unroutable)));
        assert!(sent[0].is_unconfirmed());
    }

    #[test]
    fn nothing_is_confirmed_together_with_a_return_of_unknown_number() {
        let (mut confirms, mut sent, _permits) = channel(3);
        sent[0].acknowledge(None);
        sent[1].resolve(Ok(Confirmed { acknowledged: true, returned: Some(Returned::Unknown) }));
        assert!(matches!(poll(&mut confirms), Poll::Ready(Err(ChannelLost(_)))));
        confirms.fail_all("closed");
        for mut sent in sent {
            assert!(sent.is_unconfirmed());
        }
    }

    #[test]
    fn lost_channel_confirms_nothing() {
        let (mut confirms, mut sent, permits) = channel(2);
        sent[0].resolve(Err("gone".to_owned()));
        assert_eq!(poll(&mut confirms), Poll::Ready(Err(ChannelLost("gone".to_owned()))));
        confirms.fail_all("gone");
        for mut sent in sent {
            assert_eq!(sent.answer(), Some(Err(QueueError::Unconfirmed("gone".to_owned()))));
        }
        assert_eq!(permits.available_permits(), 100);
    }
}
