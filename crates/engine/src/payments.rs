//! Paying orders: callbacks of a provider, and a provider for tests; and returning payments.

use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use hmac::{Hmac, KeyInit as _, Mac as _};
use metrics::counter;
use serde::Deserialize;
use sha2::Sha256;
use stampede_core::ports::PaymentOutcome;
use stampede_core::{
    Code, Invalid, Order, OrderId, OrderStatus, Payment, PaymentStatus, RefundAttempt, ReportedPayment, Timestamp,
    UserId,
};

use crate::alerts::AlertKind;
use crate::engine::Engine;
use crate::error::Error;

/// The name under which payments of the provider for tests are kept.
const TEST_PROVIDER: &str = "test";
/// The name under which payments are kept that signed callbacks report.
const CALLBACK_PROVIDER: &str = "callback";
/// The longest transaction id.
const MAX_TRANSACTION: usize = 64;

/// Returns payments to those who paid.
#[async_trait]
pub trait PaymentProvider: Send + Sync + fmt::Debug {
    /// Returns a payment. Called again for the same payment after a failure, also if it has succeeded and the answer was lost, so it must
    /// return each only once.
    async fn refund(&self, payment: &Payment) -> Result<(), Box<dyn StdError + Send + Sync>>;
}

/// Payments without money.
#[derive(Debug)]
struct TestProvider;

#[async_trait]
impl PaymentProvider for TestProvider {
    async fn refund(&self, _: &Payment) -> Result<(), Box<dyn StdError + Send + Sync>> {
        Ok(())
    }
}

/// What becomes of a payment whose order was cancelled before it arrived.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum LatePayments {
    /// It is returned.
    #[default]
    Refund,
    /// It pays a new order of the same buyer, if the gate admits one; otherwise it is returned.
    Readmit,
}

/// How payments reach the engine, and how they are returned.
#[derive(Clone)]
pub struct PaymentConfig {
    /// The keys of callbacks. Any of them is valid, so that a key can be replaced without a gap.
    pub callback_keys: Vec<Vec<u8>>,
    /// How old a callback may be, and how far ahead its clock.
    pub replay_window: Duration,
    /// Whether buyers can pay without a provider.
    pub test_provider: bool,
    pub late: LatePayments,
    /// Returns payments that callbacks have reported; `None` if an operator does it.
    pub provider: Option<Arc<dyn PaymentProvider>>,
    /// The pause after the first attempt to return a payment. It doubles with each further one.
    pub refund_pause: Duration,
    /// The number of attempts after which an alert is raised.
    pub refund_tries: u32,
}

impl Default for PaymentConfig {
    fn default() -> Self {
        Self {
            callback_keys: Vec::new(),
            replay_window: Duration::from_secs(300),
            test_provider: false,
            late: LatePayments::Refund,
            provider: None,
            refund_pause: Duration::from_secs(1),
            refund_tries: 10,
        }
    }
}

impl fmt::Debug for PaymentConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { callback_keys, replay_window, test_provider, late, provider, refund_pause, refund_tries } = self;
        f.debug_struct("PaymentConfig")
            .field("callback_keys", &callback_keys.len())
            .field("replay_window", replay_window)
            .field("test_provider", test_provider)
            .field("late", late)
            .field("provider", provider)
            .field("refund_pause", refund_pause)
            .field("refund_tries", refund_tries)
            .finish()
    }
}

/// The body of a callback.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Callback {
    transaction_id: String,
    order_id: OrderId,
    amount_cents: i64,
}

impl Callback {
    /// Reads a callback, and checks what the ledger can store.
    fn parse(body: &[u8]) -> Result<ReportedPayment, Invalid> {
        let Self { transaction_id, order_id, amount_cents } =
            serde_json::from_slice(body).map_err(|error| Invalid::new("body", error.to_string()))?;
        // Serde also fills a struct from an array, member by member in their order.
        if body.trim_ascii_start().first() != Some(&b'{') {
            return Err(Invalid::new("body", "must be a JSON object"));
        }
        let graphic = transaction_id.bytes().all(|byte| byte.is_ascii_graphic());
        if transaction_id.is_empty() || transaction_id.len() > MAX_TRANSACTION || !graphic {
            let text = format!("must have 1 to {MAX_TRANSACTION} visible ASCII characters");
            return Err(Invalid::new("transaction_id", text));
        }
        // To return a negative amount would be to take money.
        if amount_cents < 0 {
            return Err(Invalid::new("amount_cents", "must not be negative"));
        }
        let provider = CALLBACK_PROVIDER.to_owned();
        Ok(ReportedPayment { provider, transaction: transaction_id, order: order_id, amount_cents })
    }
}

/// The result of checking the signature of a callback.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SignatureCheck {
    Valid,
    /// One of the keys has signed it, too long ago, or by a clock that is ahead.
    OutsideWindow,
    Invalid,
}

/// `t=SECONDS,v1=HEX[,v1=HEX]`: when it was signed, and with which signatures.
fn parse_signature(text: &str) -> Option<(i64, Vec<[u8; 32]>)> {
    let (mut at, mut signatures) = (None, Vec::new());
    for part in text.split(',').take(8) {
        match part.trim().split_once('=')? {
            ("t", seconds) => at = Some(seconds.parse().ok()?),
            ("v1", hex) => signatures.push(parse_hex(hex)?),
            _ => {}
        }
    }
    Some((at?, signatures))
}

fn parse_hex(hex: &str) -> Option<[u8; 32]> {
    let (mut bytes, hex) = ([0; 32], hex.as_bytes());
    if hex.len() != 64 {
        return None;
    }
    for (byte, digits) in bytes.iter_mut().zip(hex.chunks_exact(2)) {
        let digit = |digit: u8| char::from(digit).to_digit(16);
        *byte = u8::try_from(digit(digits[0])? * 16 + digit(digits[1])?).ok()?;
    }
    Some(bytes)
}

impl PaymentConfig {
    /// Who returns this payment; `None` if an operator must.
    pub(crate) fn provider_of(&self, payment: &ReportedPayment) -> Option<&dyn PaymentProvider> {
        match payment.provider.as_str() {
            TEST_PROVIDER => Some(&TestProvider),
            CALLBACK_PROVIDER => self.provider.as_deref(),
            _ => None,
        }
    }

    /// Checks whether one of the keys has signed the body, and when. Signatures are compared in constant time.
    fn check_signature(&self, signature: &str, body: &[u8], now: Timestamp) -> SignatureCheck {
        let Some((seconds, signatures)) = parse_signature(signature) else { return SignatureCheck::Invalid };
        let prefix = format!("{seconds}.");
        let is_signed = self.callback_keys.iter().any(|key| {
            let Ok(mac) = Hmac::<Sha256>::new_from_slice(key) else { return false };
            let mac = mac.chain_update(prefix.as_bytes()).chain_update(body);
            signatures.iter().any(|signature| mac.clone().verify_slice(signature).is_ok())
        });
        let age_ms = now.ms().abs_diff(seconds.saturating_mul(1000));
        match is_signed {
            false => SignatureCheck::Invalid,
            true if u128::from(age_ms) > self.replay_window.as_millis() => SignatureCheck::OutsideWindow,
            true => SignatureCheck::Valid,
        }
    }
}

fn count(payment: &Payment) {
    let (status, reason) = payment.answer();
    let reason = reason.map_or("", |reason| reason.as_str());
    counter!("stampede_payments_total", "status" => status.as_str(), "reason" => reason).increment(1);
}

impl Engine {
    /// Whether buyers can pay without a provider.
    pub const fn allows_test_payments(&self) -> bool {
        self.payments.test_provider
    }

    /// Whether one of the keys has signed the body of a callback not long ago.
    pub fn is_signed_callback(&self, signature: &str, body: &[u8]) -> bool {
        self.payments.check_signature(signature, body, self.clock.now()) == SignatureCheck::Valid
    }

    /// Records the payment of a signed callback, and pays its order, or a new one of the same buyer. The payment is returned as it is; a repeated
    /// callback gets the same [`Payment::answer`], and while it is not decided, none. What a provider has signed and cannot be recorded raises an alert.
    pub async fn receive_callback(self: &Arc<Self>, signature: &str, body: &[u8]) -> Result<Payment, Error> {
        let now = self.clock.now();
        let signature = self.payments.check_signature(signature, body, now);
        if signature != SignatureCheck::Valid {
            counter!("stampede_payment_callbacks_refused_total").increment(1);
            if signature == SignatureCheck::OutsideWindow {
                self.alert_late_callback(body).await;
            }
            return Err(Error::Plain(Code::Unauthorized));
        }
        match Callback::parse(body) {
            Ok(reported) => {
                let held_until = match self.payments.late {
                    // A clock that is ahead must not hold the payment for longer.
                    LatePayments::Readmit => Some(now.min(self.stores.ledger.now().await?).plus(self.hold())),
                    LatePayments::Refund => None,
                };
                self.receive(reported, held_until).await
            }
            Err(invalid) => {
                let message = format!("its member {} is not valid: {}", invalid.member, invalid.detail);
                self.alert_refused_callback(&message).await;
                Err(Error::Invalid(vec![invalid]))
            }
        }
    }

    /// Raises an alert unless the payment is in the ledger: then its callback was repeated, or replayed by someone.
    async fn alert_late_callback(&self, body: &[u8]) {
        let reported = Callback::parse(body);
        if let Ok(ReportedPayment { provider, transaction, .. }) = &reported
            && let Ok(Some(_)) = self.stores.ledger.payment(provider, transaction).await
        {
            return;
        }
        let which = match &reported {
            Ok(reported) => format!("transaction {} for order {}", reported.transaction, reported.order),
            Err(invalid) => format!("the member {} is not valid", invalid.member),
        };
        let window_s = self.payments.replay_window.as_secs();
        let message = format!("it was signed more than {window_s} s ago, or by a clock that is ahead ({which})");
        self.alert_refused_callback(&message).await;
    }

    async fn alert_refused_callback(&self, why: &str) {
        let message = format!("a signed callback was refused, so a payment may not be recorded: {why}");
        self.alerts.raise(AlertKind::CallbackRefused, "payment callbacks".to_owned(), message).await;
    }

    /// With `held_until`, a payment whose order was cancelled may pay a new one until then.
    async fn receive(
        self: &Arc<Self>,
        reported: ReportedPayment,
        held_until: Option<Timestamp>,
    ) -> Result<Payment, Error> {
        match self.stores.ledger.receive_payment(&reported, self.clock.now(), held_until).await? {
            PaymentOutcome::Received(payment) => {
                count(&payment);
                Ok(payment)
            }
            PaymentOutcome::Held(payment, ended) => {
                // On the heap, because it is large and happens rarely.
                let readmitted = Box::pin(self.readmit(&payment.reported, &ended)).await;
                count(readmitted.as_ref().unwrap_or(&payment));
                readmitted
            }
            PaymentOutcome::Repeated(payment) => Ok(payment),
            PaymentOutcome::StillHeld => Err(Error::OutcomeUnknown),
            PaymentOutcome::TransactionReused(known) => {
                let message = format!(
                    "the transaction was reported for order {} with {} cents, and again for order {} with {} cents",
                    known.reported.order, known.reported.amount_cents, reported.order, reported.amount_cents
                );
                let about = format!("payment {} {}", reported.provider, reported.transaction);
                self.alerts.raise(AlertKind::TransactionReused, about, message).await;
                Err(Error::Plain(Code::RequestIdReused))
            }
        }
    }

    /// The payments that are to be returned, the oldest first.
    pub async fn open_refunds(&self, limit: u32) -> Result<Vec<RefundAttempt>, Error> {
        Ok(self.stores.ledger.open_refunds(limit).await?)
    }

    /// Has a payment returned now that is to be returned, and counts its attempts from the first again.
    pub async fn retry_refund(&self, provider: &str, transaction: &str) -> Result<(), Error> {
        self.open_refund(provider, transaction).await?;
        let is_due = self.stores.ledger.retry_refund(provider, transaction, self.clock.now()).await?;
        if is_due { Ok(()) } else { Err(Error::Plain(Code::IllegalStep)) }
    }

    /// Records that an operator has returned a payment.
    pub async fn complete_refund(&self, provider: &str, transaction: &str) -> Result<Payment, Error> {
        let payment = self.open_refund(provider, transaction).await?;
        // It may have paid a new order in between, or been returned.
        let is_done = self.stores.ledger.complete_refund(&payment.reported, self.clock.now()).await?;
        if is_done { Ok(payment) } else { Err(Error::Plain(Code::IllegalStep)) }
    }

    /// A payment that is to be returned.
    async fn open_refund(&self, provider: &str, transaction: &str) -> Result<Payment, Error> {
        let payment = self.stores.ledger.payment(provider, transaction).await?.ok_or(Error::Plain(Code::NotFound))?;
        let is_open = payment.status == PaymentStatus::RefundDue;
        if is_open { Ok(payment) } else { Err(Error::Plain(Code::IllegalStep)) }
    }

    /// Pays the user's own order with the provider for tests. A payment that comes too late is returned at once.
    pub async fn pay_for_test(self: &Arc<Self>, id: OrderId, user: UserId) -> Result<Order, Error> {
        let order = self.own_order(id, user).await?.ok_or(Error::Plain(Code::NoSuchOrder))?;
        if !matches!(order.status, OrderStatus::Unpaid | OrderStatus::Paid) {
            return Err(Error::Plain(Code::IllegalStep));
        }
        let (provider, transaction) = (TEST_PROVIDER.to_owned(), format!("test-{id}"));
        let reported = ReportedPayment { provider, transaction, order: id, amount_cents: order.price.cents() };
        if self.receive(reported.clone(), None).await?.status != PaymentStatus::Paid {
            self.stores.ledger.complete_refund(&reported, self.clock.now()).await?;
            return Err(Error::Plain(Code::IllegalStep));
        }
        self.own_order(id, user).await?.ok_or(Error::Plain(Code::NoSuchOrder))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sign(key: &[u8], seconds: i64, body: &str) -> String {
        let mac = Hmac::<Sha256>::new_from_slice(key).unwrap();
        let mac = mac.chain_update(format!("{seconds}.{body}").as_bytes()).finalize().into_bytes();
        let hex: String = mac.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("t={seconds},v1={hex}")
    }

    #[test]
    fn only_fresh_signatures_of_a_known_key_are_accepted() {
        use SignatureCheck::{Invalid, OutsideWindow, Valid};
        let config = PaymentConfig {
            callback_keys: vec![b"the key in use, 32 characters...".to_vec(), b"the next key".to_vec()],
            replay_window: Duration::from_secs(300),
            ..PaymentConfig::default()
        };
        let now = Timestamp::from_ms(1_800_000_000_000);
        let seconds = now.ms() / 1000;
        let body = "{}";
        let check = |signature: &str, body: &str| config.check_signature(signature, body.as_bytes(), now);
        for key in &config.callback_keys {
            let good = sign(key, seconds, body);
            assert_eq!(check(&good, body), Valid);
            assert_eq!(check(&format!("{good},v1={}", "0".repeat(64)), body), Valid, "one of several signatures");
            assert_eq!(check(&good, "{ }"), Invalid, "another body");
            assert_eq!(check(&good.replace(&format!("t={seconds}"), &format!("t={}", seconds + 1)), body), Invalid);
            for (offset, expected) in [(300, Valid), (-300, Valid), (301, OutsideWindow), (-301, OutsideWindow)] {
                assert_eq!(check(&sign(key, seconds + offset, body), body), expected, "{offset}");
            }
        }
        for offset in [0, 301] {
            assert_eq!(check(&sign(b"another key", seconds + offset, body), body), Invalid);
        }
        for malformed in
            ["", "t=1", "v1=00", "t=x,v1=00", "t=,v1=", &format!("t={seconds},v1=zz"), &"a=b,".repeat(1000)]
        {
            assert_eq!(check(malformed, body), Invalid, "{malformed}");
        }
        let without_keys = PaymentConfig::default();
        assert_eq!(without_keys.check_signature(&sign(b"", seconds, body), body.as_bytes(), now), Invalid);
    }

    #[test]
    fn callbacks_that_cannot_be_recorded_are_not_valid() {
        let parse = |transaction: &str, order: &str, amount: &str| {
            let body = format!(r#"{{"transaction_id":"{transaction}","order_id":"{order}","amount_cents":{amount}}}"#);
            Callback::parse(body.as_bytes()).map_err(|invalid| invalid.member)
        };
        let (longest, too_long) = ("x".repeat(MAX_TRANSACTION), "x".repeat(MAX_TRANSACTION + 1));
        for transaction in ["a", "a/b:c", &longest] {
            assert_eq!(parse(transaction, "7", "0").unwrap().transaction, transaction);
        }
        for transaction in ["", "a b", "茶", &too_long] {
            assert_eq!(parse(transaction, "7", "1"), Err("transaction_id"), "{transaction}");
        }
        assert_eq!(parse("a", "7", "-1"), Err("amount_cents"));
        for (order, amount) in [("0", "1"), ("x", "1"), ("7", "1.5"), ("7", "99999999999999999999")] {
            assert_eq!(parse("a", order, amount), Err("body"), "{order} {amount}");
        }
        let member = |body: &str| Callback::parse(body.as_bytes()).map_err(|invalid| invalid.member);
        assert_eq!(
            member(" \n{\"transaction_id\":\"a\",\"order_id\":\"7\",\"amount_cents\":1}").unwrap().amount_cents,
            1
        );
        for not_an_object in [r#"["a","7",1]"#, " [\"a\",\"7\",1]", "[]", "null", "1", ""] {
            assert_eq!(member(not_an_object), Err("body"), "{not_an_object}");
        }
    }
}
