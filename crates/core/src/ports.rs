//! What the ledger must be able to do, whichever database it is written in.
//!
//! Every transaction that changes `live` or `sold` locks the sale's row first. Whether a failure may be tried again is in its
//! type ([`LedgerError`]). What a caller must decide on is a value, not an error.

use std::error::Error as StdError;
use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

use async_trait::async_trait;

use crate::clock::Timestamp;
use crate::ids::{Epoch, Lease, OrderId, SaleId, ShopId, ShopTypeId, UserId, VoucherId, WorkerId};
use crate::order::{Order, OrderStatus, RejectReason};
use crate::sale::{Sale, SaleStatus, Window};
use crate::shop::{Shop, ShopType, Voucher};
use crate::user::{Phone, User};

type Source = Box<dyn StdError + Send + Sync>;

/// Why the ledger did not answer.
#[derive(Debug, thiserror::Error)]
pub enum LedgerError {
    /// Surely not done: another transaction was in the way. The same call may succeed at once.
    #[error("another transaction was in the way")]
    Conflict(#[source] Source),
    /// Surely not done: it could not be reached, or rolled back. The same call may succeed later.
    #[error("the ledger is not available")]
    Unavailable(#[source] Source),
    /// Perhaps done: a commit was not answered. Find out by doing it again with the same ids.
    #[error("the ledger did not say whether it was done")]
    Unknown(#[source] Source),
    /// Surely not done, and the same call will fail again.
    #[error("the ledger cannot do this")]
    Poison(#[source] Source),
}

pub type Result<T> = std::result::Result<T, LedgerError>;

/// One admitted order on its way into the ledger.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Admitted {
    pub order: OrderId,
    pub user: UserId,
    /// The gate's count of admissions: who came first.
    pub seq: i64,
    pub at: Timestamp,
}

/// What became of one admitted order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recorded {
    /// It is in the ledger now.
    Recorded,
    /// It was there before, and lives.
    Already,
    /// It was there before, and is dead: it must not be revived.
    Dead,
    /// It is in the ledger as `rejected`. `keep` is the live order that the buyer has instead.
    Refused { reason: RejectReason, keep: Option<OrderId> },
    /// Another order has this id. It needs a new one, and a person should look.
    IdCollision,
    /// It is in quarantine and has no row: an operator decides. It keeps its mark.
    Quarantined,
}

/// An order that could not be recorded for a reason of its own. It keeps its mark, so its stock stays taken, until an operator
/// retries or discards it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QuarantinedOrder {
    pub sale: SaleId,
    pub epoch: Epoch,
    pub admitted: Admitted,
    /// What the database said.
    pub error: String,
    pub quarantined_at: Timestamp,
}

/// What became of discarding a quarantined order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Discarded {
    /// It is in the ledger as `rejected` now, and the release of its mark is [`Owed`].
    Done,
    /// It has a row already; only the quarantine entry is gone.
    HadRow,
    /// There is no such order in quarantine.
    NoSuchOrder,
}

/// What became of a step that an order was asked to take.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Stepped {
    Done(Order),
    /// There is no such order of this user.
    NoSuchOrder,
    /// The order took this step before; nothing was done again.
    Repeated(Order),
    /// It cannot take this step from the status it has.
    Illegal(OrderStatus),
}

/// What became of an edit of a sale.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Edited {
    Done {
        before: Sale,
        after: Sale,
    },
    /// The same request was carried out before; nothing was done again.
    Repeated(Sale),
    NoSuchSale,
    Illegal(SaleStatus),
    /// The request id was used for something else.
    RequestIdReused,
}

/// A mark that must still be released in the gate: its order is dead in the ledger.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Owed {
    pub order: OrderId,
    pub sale: SaleId,
    pub user: UserId,
}

/// What the gate is rebuilt from: a sale and its live orders, read at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Loaded {
    pub sale: Sale,
    pub marks: Vec<(UserId, OrderId)>,
}

/// An order with all that the ledger keeps of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OrderRow {
    pub order: Order,
    pub live: bool,
    pub epoch: Epoch,
    pub seq: i64,
}

/// All that the ledger holds of a sale, at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inspected {
    pub sale: Sale,
    pub orders: Vec<OrderRow>,
    pub quarantine: Vec<(UserId, OrderId)>,
    pub owed: Vec<OrderId>,
    pub top_ups: Vec<AddedStock>,
}

/// Stock that was added to a sale after it was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AddedStock {
    pub at: Timestamp,
    pub added: u32,
}

/// A sale to be created.
#[derive(Debug, Clone, Copy)]
pub struct SaleDraft {
    pub id: SaleId,
    pub voucher: VoucherId,
    pub stock: u32,
    pub window: Window,
    pub status: SaleStatus,
}

/// One row of the audit log. An administrator's action has two: one before it is carried out, one with its outcome.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuditRow {
    pub id: i64,
    /// The id of the action's first row; in that row its own id.
    pub action_id: i64,
    pub at: Timestamp,
    pub actor: String,
    /// Where the request came from.
    pub address: String,
    pub request_id: String,
    pub action: String,
    /// What it is about, such as `sale 12`. A creation is asked under its parent; its outcome is about what was made.
    pub target: String,
    /// `asked` in the first row; in the second `done`, `unchanged`, or the code of the refusal.
    pub outcome: String,
    /// JSON: what was asked for; in the second row what was changed, or why nothing was.
    pub detail: String,
}

/// Which actions of the audit log, the newest first.
#[derive(Debug, Clone, Copy, Default)]
pub struct AuditFilter<'a> {
    /// Only what is about this, such as `sale 12`.
    pub target: Option<&'a str>,
    /// Only actions with an id below this.
    pub before: Option<i64>,
    pub limit: u32,
}

/// What became of creating something that hangs on something else.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Created {
    Done,
    /// What it hangs on does not exist.
    NoParent,
    /// There is one already.
    Exists,
}

/// Selling: the truth about sales and orders.
#[async_trait]
pub trait Ledger: Send + Sync + fmt::Debug {
    /// Records admitted orders of one sale, all in one transaction: one answer for each, in their order. Idempotent by order id.
    async fn record(&self, sale: SaleId, epoch: Epoch, batch: &[Admitted]) -> Result<Vec<Recorded>>;

    /// Puts an order that cannot be recorded for a reason of its own into quarantine. If the sale was rebuilt since its
    /// admission, it becomes a `rejected` row instead; if it has a row by now, that row is the answer.
    async fn quarantine(&self, order: &QuarantinedOrder) -> Result<Recorded>;

    /// The orders in quarantine, newest first, those below `before`.
    async fn quarantined(&self, before: Option<OrderId>, limit: u32) -> Result<Vec<QuarantinedOrder>>;

    async fn quarantined_order(&self, id: OrderId) -> Result<Option<QuarantinedOrder>>;

    /// Records a quarantined order under the sale's present epoch and ends its quarantine, in one transaction. `None` if it is
    /// not in quarantine. If it fails, the order stays in quarantine.
    async fn retry_quarantined(&self, id: OrderId) -> Result<Option<Recorded>>;

    /// Rejects a quarantined order for good, unless it has a row.
    async fn discard_quarantined(&self, id: OrderId) -> Result<Discarded>;

    /// Copies orders of sales that ended before this moment into the index by user, at most `limit` of them. Returns whether
    /// there is more to do.
    async fn index_orders(&self, ended_before: Timestamp, limit: u32) -> Result<bool>;

    /// Cancels the user's own unpaid order: the stock goes back, and the release of the mark becomes [`Owed`].
    async fn cancel(&self, order: OrderId, user: UserId, now: Timestamp) -> Result<Stepped>;

    /// The marks still to be released, at most `limit` of them.
    async fn owed(&self, limit: u32) -> Result<Vec<Owed>>;

    /// These marks are released.
    async fn settle_owed(&self, orders: &[OrderId]) -> Result<()>;

    async fn order(&self, id: OrderId) -> Result<Option<Order>>;

    /// The user's live order in a sale.
    async fn live_order(&self, sale: SaleId, user: UserId) -> Result<Option<Order>>;

    /// The user's orders, newest first, those below `before`.
    async fn orders_of(&self, user: UserId, before: Option<OrderId>, limit: u32) -> Result<Vec<Order>>;

    /// The sales that end after this moment, or all; newest first.
    async fn sales(&self, end_after: Option<Timestamp>) -> Result<Vec<Sale>>;

    async fn sale(&self, id: SaleId) -> Result<Option<Sale>>;

    /// The sale and its live orders, at one moment.
    async fn load(&self, id: SaleId) -> Result<Option<Loaded>>;

    /// All that there is of a sale, dead orders too.
    async fn inspect(&self, id: SaleId) -> Result<Option<Inspected>>;

    /// The orders of a sale, dead ones too, in the order of their ids, from above `after`.
    async fn orders_in(&self, sale: SaleId, after: Option<OrderId>, limit: u32) -> Result<Vec<OrderRow>>;

    async fn create_sale(&self, draft: SaleDraft, now: Timestamp) -> Result<Created>;

    /// Pause, resume, publish, end: only legal steps.
    async fn set_status(&self, sale: SaleId, status: SaleStatus) -> Result<Edited>;

    /// Adds stock, once per request id.
    async fn top_up(&self, sale: SaleId, add: u32, request_id: &str, now: Timestamp) -> Result<Edited>;

    /// Renews the lease of `worker` if `holder` still has it; otherwise leases a free worker. The range granted begins at or
    /// after `not_before` and overlaps no other lease of that worker.
    async fn lease_worker(
        &self,
        holder: &str,
        worker: Option<WorkerId>,
        not_before: Timestamp,
        span: Duration,
    ) -> Result<Lease>;

    /// Gives the rest of a lease back: nothing from `unused_from` on was used.
    async fn return_worker(&self, holder: &str, worker: WorkerId, unused_from: Timestamp) -> Result<()>;

    /// Appends to the audit log, which is never changed. Idempotent by the row's id.
    async fn audit(&self, row: &AuditRow) -> Result<()>;

    /// The rows of the audit log's newest actions, those of one action together, `asked` first.
    async fn audit_log(&self, filter: AuditFilter<'_>) -> Result<Vec<AuditRow>>;

    /// Does anybody else hold a worker number now? Then others may sell from this ledger, too.
    async fn has_other_workers(&self, holder: &str) -> Result<bool>;

    /// Does it answer?
    async fn ping(&self) -> Result<()>;

    /// Lets go of the database, at the very end.
    async fn close(&self);
}

/// Which shops.
#[derive(Debug, Clone, Default)]
pub struct ShopFilter {
    pub type_id: Option<ShopTypeId>,
    /// A part of the name, whatever its case.
    pub name: Option<String>,
    pub before: Option<ShopId>,
    pub limit: u32,
}

/// Some shops, newest first.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ShopPage {
    pub shops: Vec<Shop>,
    /// Go on before this one; `None` at the end. A search looks at so many shops and no more, so a page may be short, or empty, and
    /// yet not the last.
    pub next: Option<ShopId>,
}

/// What became of replacing something.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Replaced<T> {
    /// What it was before.
    Done(T),
    NoSuch,
    /// What it hangs on does not exist.
    NoParent,
}

/// Shops and vouchers.
#[async_trait]
pub trait Catalogue: Send + Sync + fmt::Debug {
    /// In the order they are shown.
    async fn shop_types(&self) -> Result<Vec<ShopType>>;

    async fn create_shop(&self, shop: &Shop) -> Result<Created>;

    /// Takes the place of the shop with the same id.
    async fn edit_shop(&self, shop: &Shop) -> Result<Replaced<Shop>>;

    async fn shop(&self, id: ShopId) -> Result<Option<Shop>>;

    async fn shops(&self, filter: &ShopFilter) -> Result<ShopPage>;

    async fn create_voucher(&self, voucher: &Voucher) -> Result<Created>;

    /// Puts the voucher on the shelf or takes it off.
    async fn shelve_voucher(&self, id: VoucherId, on_shelf: bool) -> Result<Replaced<Voucher>>;

    /// Takes the place of the voucher with the same id. Its shop, its kind and its place on the shelf stay.
    async fn edit_voucher(&self, voucher: &Voucher) -> Result<Replaced<Voucher>>;

    async fn voucher(&self, id: VoucherId) -> Result<Option<Voucher>>;

    /// A shop's vouchers, newest first, at most 100 of them.
    async fn vouchers_of(&self, shop: ShopId) -> Result<Vec<Voucher>>;
}

/// The name of a session: 128 random bits.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct SessionId(pub [u8; 16]);

impl fmt::Debug for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SessionId(…)")
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Session {
    pub id: SessionId,
    pub user: UserId,
    pub created_at: Timestamp,
    pub expires_at: Timestamp,
}

/// The name of one request for a login code: 128 random bits.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct ChallengeId(pub [u8; 16]);

impl fmt::Debug for ChallengeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ChallengeId(…)")
    }
}

/// A login code that was sent. Tries are bound to it, so that guesses at one challenge do not touch another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Challenge {
    pub id: ChallengeId,
    pub phone: Phone,
    /// The address that requested it, or its network of 64 bits.
    pub address: IpAddr,
    /// What is kept of the code.
    pub seal: Vec<u8>,
    /// How long the code is.
    pub digits: u32,
    pub created_at: Timestamp,
    pub expires_at: Timestamp,
}

/// Which challenge of a phone a code is meant for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WhichChallenge {
    Id(ChallengeId),
    /// The newest one that was requested from this address.
    NewestFrom(IpAddr),
}

/// What came of a login with the right code.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LogIn {
    /// The session is open. `ended` are the user's oldest sessions, which had to end because there were too many.
    Done { user: User, ended: Vec<SessionId> },
    /// Another login has used the challenge.
    Used,
    /// The account is disabled. The challenge is used up.
    Disabled,
}

/// A user as an administrator sees them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Account {
    pub user: User,
    pub created_at: Timestamp,
    pub disabled: bool,
}

/// What came of disabling or enabling an account.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Disabled {
    /// Was it disabled before?
    pub was: bool,
    pub ended: Vec<SessionId>,
}

/// People, their login codes and their sessions.
///
/// Every transaction about a phone's challenges locks the phone's row first, and every transaction that opens a session or ends
/// all of a user's sessions locks the user's row.
#[async_trait]
pub trait Accounts: Send + Sync + fmt::Debug {
    /// The named secret; the first caller's `fresh` becomes it.
    async fn secret(&self, name: &str, fresh: &[u8]) -> Result<Vec<u8>>;

    /// Tries at codes of this phone since its last login, over all its challenges.
    async fn login_failures(&self, phone: &Phone) -> Result<u32>;

    /// Keeps a challenge. A phone has at most `max_live` of them: beyond that the oldest of the address that has the most ends,
    /// so that one address cannot push out another's.
    async fn put_challenge(&self, challenge: &Challenge, max_live: usize) -> Result<()>;

    /// Counts one try at a challenge of this phone, *then* returns it to be compared: no crowd of guesses compares more than
    /// `max_tries`. `None` if there is no such challenge, or it has expired or was tried that often.
    async fn try_challenge(
        &self,
        phone: &Phone,
        which: WhichChallenge,
        max_tries: u32,
        now: Timestamp,
    ) -> Result<Option<Challenge>>;

    /// Uses the challenge up and opens a session, for `newcomer` if the phone is new. The phone's failures are forgotten. A user
    /// has at most `max_sessions`; the oldest end.
    async fn log_in(
        &self,
        challenge: ChallengeId,
        newcomer: &User,
        session: SessionId,
        expires_at: Timestamp,
        max_sessions: usize,
        now: Timestamp,
    ) -> Result<LogIn>;

    /// Opens a session for each of these people, without a code; who is new is made. Their ids, in the same order.
    async fn open_sessions(
        &self,
        people: &[User],
        sessions: &[SessionId],
        expires_at: Timestamp,
        now: Timestamp,
    ) -> Result<Vec<UserId>>;

    async fn user(&self, id: UserId) -> Result<Option<User>>;

    async fn account(&self, id: UserId) -> Result<Option<Account>>;

    async fn account_of(&self, phone: &Phone) -> Result<Option<Account>>;

    /// Disables the account and ends its sessions, or enables it again; `None` if there is no such user.
    async fn set_disabled(&self, user: UserId, disabled: bool) -> Result<Option<Disabled>>;

    async fn session(&self, id: SessionId, now: Timestamp) -> Result<Option<Session>>;

    /// Moves the expiry of sessions that still exist.
    async fn touch_sessions(&self, sessions: &[Session]) -> Result<()>;

    /// The user's sessions that have not expired, newest first.
    async fn sessions_of(&self, user: UserId, now: Timestamp) -> Result<Vec<Session>>;

    /// Ends the user's own session; `false` if there is none of this name.
    async fn end_session(&self, user: UserId, id: SessionId) -> Result<bool>;

    /// Ends all sessions of the user, and returns them; `None` if there is no such user.
    async fn end_sessions(&self, user: UserId) -> Result<Option<Vec<SessionId>>>;

    /// Forgets challenges and sessions that have expired; tells how many.
    async fn forget_expired(&self, now: Timestamp) -> Result<u64>;
}
